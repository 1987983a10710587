//! Completion queues and shared receive queues.
use crate::dataplane::command::{
    CreateCq, CreateSrq, DestroyCq, DestroySrq, Execute, Execution, ModerateCq, ModifySrq, QuerySrq, ResizeCq,
};
use crate::dataplane::moderation::Moderation;
use crate::dataplane::ports::{Cq, DoorbellTarget, Notify, Srq};
use crate::dataplane::worker::Worker;
use freeflow_shm::CompletionProducer;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<CreateCq> for Worker {
    fn execute(&mut self, _: Instant, command: CreateCq) -> Execution<CreateCq> {
        let id = match self.engine.create_cq(command.session, command.context, command.cqe) {
            Ok(id) => id,
            Err(error) => return Execution::refused(command, error),
        };
        let CreateCq { session, context, cookie, ring, channel, timestamps, .. } = command;
        let (previous, notify, moderation) = (None, Notify::Nothing, Moderation::default());
        let cq = Cq { session, context, cookie, ring, previous, channel, timestamps, notify, moderation };
        self.ports.cqs.insert(id, cq);
        if let Some(entry) = self.ports.sessions.get_mut(session) {
            entry.cq_bells.insert(cookie, id);
        }
        Execution::done(Ok(id))
    }
}

impl Execute<ResizeCq> for Worker {
    fn execute(&mut self, _: Instant, command: ResizeCq) -> Execution<ResizeCq> {
        let Some(cq) = self.ports.cqs.get_mut(command.cq) else {
            return Execution::refused(command, VerbsError::NotFound);
        };
        let unconsumed = cq.ring.unconsumed();
        if unconsumed > command.cqe {
            return Execution::refused(command, VerbsError::InvalidArgument);
        }
        let ring = CompletionProducer::new(command.segment, command.cqe, unconsumed);
        let before = std::mem::replace(&mut cq.ring, ring);
        Execution::done(Ok(cq.previous.replace(before)))
    }
}

impl Execute<ModerateCq> for Worker {
    fn execute(&mut self, _: Instant, ModerateCq { cq, count, period }: ModerateCq) -> Execution<ModerateCq> {
        Execution::done(if self.ports.moderate(cq, count, period) { Ok(()) } else { Err(VerbsError::NotFound) })
    }
}

impl Execute<DestroyCq> for Worker {
    fn execute(&mut self, _: Instant, DestroyCq { session, cq }: DestroyCq) -> Execution<DestroyCq> {
        Execution::done(self.engine.destroy_cq(session, cq).map(|()| self.ports.remove_cq(cq)))
    }
}

impl Execute<CreateSrq> for Worker {
    fn execute(&mut self, _: Instant, command: CreateSrq) -> Execution<CreateSrq> {
        let CreateSrq { session, pd, attributes, xrc, cookie, .. } = command;
        let created = match self.engine.create_srq(session, pd, attributes, xrc, cookie) {
            Ok(created) => created,
            Err(error) => return Execution::refused(command, error),
        };
        let CreateSrq { context, receive, .. } = command;
        self.ports.srqs.insert(created.0, Srq { session, context, cookie, receive, receives_wanted: false });
        self.ports.set_doorbell(session, cookie, Some(DoorbellTarget::Srq(created.0)));
        Execution::done(Ok(created))
    }
}

impl Execute<ModifySrq> for Worker {
    fn execute(&mut self, _: Instant, ModifySrq { session, srq, limit }: ModifySrq) -> Execution<ModifySrq> {
        Execution::done(self.engine.modify_srq(&mut self.ports, session, srq, limit))
    }
}

impl Execute<QuerySrq> for Worker {
    fn execute(&mut self, _: Instant, QuerySrq { session, srq }: QuerySrq) -> Execution<QuerySrq> {
        Execution::done(self.engine.query_srq(session, srq))
    }
}

impl Execute<DestroySrq> for Worker {
    fn execute(&mut self, _: Instant, command: DestroySrq) -> Execution<DestroySrq> {
        let DestroySrq { session, srq } = command;
        let result = self.engine.destroy_srq(session, srq).map(|()| self.ports.remove_srq(srq));
        Execution::unless_in_flight(command, result)
    }
}
