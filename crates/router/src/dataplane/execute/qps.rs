//! Queue pairs, XRC targets and multicast groups.
use crate::dataplane::command::{
    AttachMulticast, CreateQp, CreateXrcTarget, DestroyQp, DetachMulticast, Execute, Execution, ModifyQp,
    OpenXrcTarget, PrepareQp, QueryQp, StepQp,
};
use crate::dataplane::ports::DoorbellTarget;
use crate::dataplane::qp_changes::{Change, QpChanges};
use crate::dataplane::worker::Worker;
use crate::dataplane::xrc_targets::Viewer;
use freeflow_engine::{QpId, Refusal, SessionId};
use freeflow_verbs::{Instant, QpAttributeMask, QpState, VerbsError};
use std::task::Poll;

impl Execute<CreateQp> for Worker {
    fn execute(&mut self, now: Instant, command: CreateQp) -> Execution<CreateQp> {
        let (session, cookie) = (command.qp.session, command.qp.cookie);
        let (id, qpn, _) = match self.engine.create_qp(session, command.init) {
            Ok(created) => created,
            Err(error) => return Execution::refused(command, error),
        };
        let CreateQp { qp, changes, .. } = command;
        self.ports.qps.insert(id, qp);
        self.ports.set_doorbell(session, cookie, Some(DoorbellTarget::Qp(id)));
        Execution::done(self.begin_qp(now, session, id, cookie, &changes).map(|()| (id, qpn)))
    }
}

impl Execute<CreateXrcTarget> for Worker {
    fn execute(&mut self, now: Instant, command: CreateXrcTarget) -> Execution<CreateXrcTarget> {
        let CreateXrcTarget { session, context, init, changes } = command;
        let cookie = init.cookie;
        Execution::done(self.engine.create_qp(session, init).and_then(|(id, qpn, _)| {
            self.ports.targets.insert(id, Viewer { session, context, cookie });
            self.begin_qp(now, session, id, cookie, &changes)?;
            Ok((id, qpn))
        }))
    }
}

impl Execute<OpenXrcTarget> for Worker {
    fn execute(&mut self, _: Instant, command: OpenXrcTarget) -> Execution<OpenXrcTarget> {
        let OpenXrcTarget { session, context, xrcd, qpn, cookie } = command;
        let opened = self.engine.open_qp(session, xrcd, qpn);
        Execution::done(opened.inspect(|&id| self.ports.targets.insert(id, Viewer { session, context, cookie })))
    }
}

impl Execute<ModifyQp> for Worker {
    fn execute(&mut self, now: Instant, command: ModifyQp) -> Execution<ModifyQp> {
        let ModifyQp { session, qp, attributes, mask } = &command;
        self.end_direct(*qp);
        if self.ports.has_insiders(*session) {
            return Execution::Again(command);
        }
        let result = self.engine.modify_qp(&mut self.ports, now, *session, *qp, attributes, *mask);
        if let Ok(state) = result {
            self.handle_modified(*qp, state, *mask);
        }
        Execution::unless_in_flight(command, result)
    }
}

impl Execute<StepQp> for Worker {
    fn execute(&mut self, now: Instant, mut command: StepQp) -> Execution<StepQp> {
        self.end_direct(command.changes.qp);
        if self.ports.has_insiders(command.changes.session) {
            return Execution::Again(command);
        }
        match self.change_qp(now, &mut command.changes) {
            Poll::Ready(result) => Execution::done(result),
            Poll::Pending => Execution::Again(command),
        }
    }
}

impl Execute<PrepareQp> for Worker {
    fn execute(&mut self, now: Instant, mut command: PrepareQp) -> Execution<PrepareQp> {
        self.end_direct(command.changes.qp);
        if self.ports.has_insiders(command.changes.session) {
            return Execution::Again(command);
        }
        // A QP with copies in flight is no new QP: the library shall see.
        Execution::done(matches!(self.change_qp(now, &mut command.changes), Poll::Ready(Ok(_))))
    }
}

impl Execute<QueryQp> for Worker {
    fn execute(&mut self, _: Instant, QueryQp { session, qp }: QueryQp) -> Execution<QueryQp> {
        Execution::done(self.engine.query_qp(session, qp))
    }
}

impl Execute<DestroyQp> for Worker {
    fn execute(&mut self, now: Instant, command: DestroyQp) -> Execution<DestroyQp> {
        let DestroyQp { session, qp, cookie } = command;
        self.end_direct(qp);
        if self.ports.has_insiders(session) {
            return Execution::Again(command);
        }
        let result = self.engine.destroy_qp(&mut self.ports, now, session, qp);
        let result = result.map(|()| self.ports.remove_qp(qp, session, cookie));
        Execution::unless_in_flight(command, result)
    }
}

impl Execute<AttachMulticast> for Worker {
    fn execute(&mut self, _: Instant, command: AttachMulticast) -> Execution<AttachMulticast> {
        Execution::done(self.engine.attach_multicast(command.session, command.qp, command.group))
    }
}

impl Execute<DetachMulticast> for Worker {
    fn execute(&mut self, _: Instant, command: DetachMulticast) -> Execution<DetachMulticast> {
        Execution::done(self.engine.detach_multicast(command.session, command.qp, command.group))
    }
}

impl Worker {
    /// The first changes of a new QP; if they fail it is destroyed.
    fn begin_qp(
        &mut self,
        now: Instant,
        session: SessionId,
        id: QpId,
        cookie: u32,
        changes: &[Change],
    ) -> Result<(), VerbsError> {
        if changes.is_empty() {
            return Ok(());
        }
        match self.change_qp(now, &mut QpChanges::new(session, id, changes.to_vec())) {
            Poll::Ready(Ok(_)) => Ok(()),
            refused => {
                // A new QP has no copies in flight.
                let _ = self.engine.destroy_qp(&mut self.ports, now, session, id);
                drop(self.ports.remove_qp(id, session, cookie));
                Err(if let Poll::Ready(Err(error)) = refused { error } else { VerbsError::InvalidArgument })
            }
        }
    }

    /// Pending: copies are in flight, ask again. After an error those before it stay done.
    fn change_qp(&mut self, now: Instant, changes: &mut QpChanges) -> Poll<Result<QpState, VerbsError>> {
        let (session, qp) = (changes.session, changes.qp);
        self.end_direct(qp);
        while let Some((attributes, mask)) = changes.next() {
            let mask = *mask;
            match self.engine.modify_qp(&mut self.ports, now, session, qp, attributes, mask) {
                Ok(state) => {
                    self.handle_modified(qp, state, mask);
                    changes.advance(state);
                }
                Err(Refusal::InFlight) => return Poll::Pending,
                Err(Refusal::Error(error)) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(changes.state))
    }

    /// A QP was modified: its rings begin again, or may have requests that are to be run or flushed.
    pub(crate) fn handle_modified(&mut self, id: QpId, state: QpState, mask: QpAttributeMask) {
        if !mask.contains(QpAttributeMask::STATE) {
            return;
        }
        if state != QpState::Reset {
            return self.activate(id);
        }
        self.deactivate(id);
        self.ports.expel(id);
        if let Some(qp) = self.ports.qps.get_mut(id) {
            qp.send.reset();
            qp.direct.begin_anew();
            if let Some(receive) = &mut qp.receive {
                receive.reset();
            }
        }
    }
}
