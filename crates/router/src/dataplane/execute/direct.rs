//! Commands of the direct path: rings between two QPs, grants of memory, and the end of grants.
use crate::dataplane::command::{
    AcceptDirectRing, ConfirmRevocation, DirectRingTerms, Execute, Execution, Grant, OpenDirectRing, OpenRevokeCommands,
};
use crate::dataplane::worker::Worker;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<OpenDirectRing> for Worker {
    fn execute(&mut self, _: Instant, command: OpenDirectRing) -> Execution<OpenDirectRing> {
        let id = command.qp;
        let allowed = self.may_open_direct_ring(id);
        if let Some(qp) = self.ports.qps.get_mut(id) {
            qp.direct.asked.ever = true;
        }
        let to = match allowed {
            Ok(to) => to,
            Err(error) => return Execution::refused(command, error),
        };
        let direct_rings_closed =
            self.ports.open_direct_ring(id, (to, self.engine.srq_of(to)), command.copy, command.charge);
        let (credit_count, takes_writes) = (self.credit_count(to), self.engine.takes_writes(to));
        Execution::done(Ok(DirectRingTerms { credit_count, direct_rings_closed, takes_writes }))
    }
}

impl Execute<AcceptDirectRing> for Worker {
    fn execute(&mut self, _: Instant, AcceptDirectRing { qp: id }: AcceptDirectRing) -> Execution<AcceptDirectRing> {
        let descriptor = self.ports.qps.get_mut(id).and_then(|qp| qp.direct.take_ring());
        let credit_count = self.credit_count(id);
        let terms = DirectRingTerms { credit_count, direct_rings_closed: 0, takes_writes: false };
        Execution::done(descriptor.map(|descriptor| (terms, descriptor)).ok_or(VerbsError::NotFound))
    }
}

impl Execute<Grant> for Worker {
    fn execute(&mut self, _: Instant, Grant { qp, request }: Grant) -> Execution<Grant> {
        Execution::done(self.grant_and_note(qp, &request))
    }
}

impl Execute<OpenRevokeCommands> for Worker {
    fn execute(&mut self, _: Instant, command: OpenRevokeCommands) -> Execution<OpenRevokeCommands> {
        let session = command.session;
        let Some(entry) = self.ports.sessions.get_mut(session) else {
            return Execution::refused(command, VerbsError::DeviceFatal);
        };
        entry.commands = Some(self.ports.pipes.insert(session, command.write));
        Execution::done(Ok(()))
    }
}

impl Execute<ConfirmRevocation> for Worker {
    fn execute(&mut self, now: Instant, command: ConfirmRevocation) -> Execution<ConfirmRevocation> {
        let ConfirmRevocation { session, segment } = command;
        let grants = &mut self.ports.grants;
        let was_ordered = grants.leaving.confirm((session, segment), now + grants.time_max);
        if was_ordered && let Some(entry) = self.ports.sessions.get_mut(session) {
            entry.lost.note_left(segment);
        }
        Execution::done(if was_ordered { Ok(()) } else { Err(VerbsError::NotFound) })
    }
}
