//! Commands of the direct path: rings between two QPs, grants of memory, and the end of grants.
use crate::dataplane::command::{
    AcceptDirectRing, ConfirmRevocation, DirectRingTerms, Execute, Grant, OpenDirectRing, OpenRevokeCommands, Step,
};
use crate::dataplane::worker::Worker;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<OpenDirectRing> for Worker {
    fn execute(&mut self, _: Instant, command: OpenDirectRing) -> Step<OpenDirectRing> {
        let id = command.qp;
        let allowed = self.may_open_channel(id);
        if let Some(qp) = self.rings.qps.get_mut(id) {
            qp.direct.asked.ever = true;
        }
        let to = match allowed {
            Ok(to) => to,
            Err(error) => return Step::refused(command, error),
        };
        let channels_closed = self.rings.open_channel(id, to, command.copy, command.charge);
        let (credit_count, takes_writes) = (self.rings.credit_count(to), self.engine.takes_writes(to));
        Step::done(Ok(DirectRingTerms { credit_count, channels_closed, takes_writes }))
    }
}

impl Execute<AcceptDirectRing> for Worker {
    fn execute(&mut self, _: Instant, AcceptDirectRing { qp: id }: AcceptDirectRing) -> Step<AcceptDirectRing> {
        let descriptor = self.rings.qps.get_mut(id).and_then(|qp| qp.direct.take_ring());
        let credit_count = self.rings.credit_count(id);
        let terms = DirectRingTerms { credit_count, channels_closed: 0, takes_writes: false };
        Step::done(descriptor.map(|descriptor| (terms, descriptor)).ok_or(VerbsError::NotFound))
    }
}

impl Execute<Grant> for Worker {
    fn execute(&mut self, _: Instant, Grant { qp, request }: Grant) -> Step<Grant> {
        Step::done(self.grant_and_note(qp, &request))
    }
}

impl Execute<OpenRevokeCommands> for Worker {
    fn execute(&mut self, _: Instant, command: OpenRevokeCommands) -> Step<OpenRevokeCommands> {
        let session = command.session;
        let Some(entry) = self.rings.sessions.get_mut(session) else {
            return Step::refused(command, VerbsError::DeviceFatal);
        };
        entry.orders = Some(self.rings.pipes.insert(session, command.write));
        Step::done(Ok(()))
    }
}

impl Execute<ConfirmRevocation> for Worker {
    fn execute(&mut self, now: Instant, command: ConfirmRevocation) -> Step<ConfirmRevocation> {
        let ConfirmRevocation { session, segment } = command;
        let grants = &mut self.rings.grants;
        let was_ordered = grants.leaving.confirm((session, segment), now + grants.time_max);
        if was_ordered && let Some(entry) = self.rings.sessions.get_mut(session) {
            entry.lost.note_left(segment);
        }
        Step::done(if was_ordered { Ok(()) } else { Err(VerbsError::NotFound) })
    }
}
