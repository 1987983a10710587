//! Commands of the direct path: rings between two QPs, grants of memory, and the end of grants.
use crate::dataplane::command::{
    AcceptDatagramRing, AcceptDirectRing, ConfirmRevocation, DirectRingTerms, Execute, Execution, Grant,
    OpenDatagramRing, OpenDirectRing, OpenRevokeCommands,
};
use crate::dataplane::worker::Worker;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<OpenDirectRing> for Worker {
    fn execute(&mut self, _: Instant, command: OpenDirectRing) -> Execution<OpenDirectRing> {
        let id = command.qp;
        let allowed = self.may_open_direct_ring(id, command.is_numbered);
        if let Some(qp) = self.ports.qps.get_mut(id) {
            qp.direct.asked.ever = true;
        }
        let (to, msn) = match allowed {
            Ok(allowed) => allowed,
            Err(error) => return Execution::refused(command, error),
        };
        let direct_rings_closed =
            self.ports.open_direct_ring(id, (to, self.engine.srq_of(to)), command.copy, command.charge);
        let msn = command.is_numbered.then_some(msn);
        let (credit_count, takes_writes) = (self.credit_count(to), self.engine.takes_writes(to));
        Execution::done(Ok(DirectRingTerms { credit_count, direct_rings_closed, takes_writes, msn }))
    }
}

impl Execute<AcceptDirectRing> for Worker {
    fn execute(&mut self, _: Instant, AcceptDirectRing { qp: id }: AcceptDirectRing) -> Execution<AcceptDirectRing> {
        let qp = self.ports.qps.get_mut(id);
        let taken = qp.and_then(|qp| qp.direct.take_ring().map(|descriptor| (descriptor, qp.direct.led_here)));
        let Some((descriptor, direct_rings_closed)) = taken else { return Execution::done(Err(VerbsError::NotFound)) };
        let credit_count = self.credit_count(id);
        let terms = DirectRingTerms { credit_count, direct_rings_closed, takes_writes: false, msn: None };
        Execution::done(Ok((terms, descriptor)))
    }
}

impl Execute<OpenDatagramRing> for Worker {
    fn execute(&mut self, _: Instant, command: OpenDatagramRing) -> Execution<OpenDatagramRing> {
        let allowed = match self.may_open_datagram_ring(command.qp, command.ring) {
            Ok(allowed) => allowed,
            Err(error) => return Execution::refused(command, error),
        };
        let OpenDatagramRing { qp, ring, offered, charge } = command;
        self.ports.open_datagram_ring(qp, ring, allowed, (offered, charge));
        Execution::done(Ok(()))
    }
}

impl Execute<AcceptDatagramRing> for Worker {
    fn execute(&mut self, _: Instant, AcceptDatagramRing { qp }: AcceptDatagramRing) -> Execution<AcceptDatagramRing> {
        Execution::done(self.ports.accept_datagram_ring(qp).ok_or(VerbsError::NotFound))
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
