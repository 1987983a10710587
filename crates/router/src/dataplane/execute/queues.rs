//! Completion queues and shared receive queues.
use crate::dataplane::command::{
    CreateCq, CreateSrq, DestroyCq, DestroySrq, Execute, ModerateCq, ModifySrq, QuerySrq, ResizeCq, Step,
};
use crate::dataplane::moderation::Moderation;
use crate::dataplane::ports::{Bell, Cq, Notify, Srq};
use crate::dataplane::worker::Worker;
use freeflow_shm::CompletionProducer;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<CreateCq> for Worker {
    fn execute(&mut self, _: Instant, command: CreateCq) -> Step<CreateCq> {
        let id = match self.engine.create_cq(command.session, command.context, command.cqe) {
            Ok(id) => id,
            Err(error) => return Step::refused(command, error),
        };
        let CreateCq { session, context, cookie, ring, channel, timestamps, .. } = command;
        let (previous, notify, moderation) = (None, Notify::Nothing, Moderation::default());
        let cq = Cq { session, context, cookie, ring, previous, channel, timestamps, notify, moderation };
        self.rings.cqs.insert(id, cq);
        if let Some(entry) = self.rings.sessions.get_mut(session) {
            entry.cq_bells.insert(cookie, id);
        }
        Step::done(Ok(id))
    }
}

impl Execute<ResizeCq> for Worker {
    fn execute(&mut self, _: Instant, command: ResizeCq) -> Step<ResizeCq> {
        let Some(cq) = self.rings.cqs.get_mut(command.cq) else { return Step::refused(command, VerbsError::NotFound) };
        let unconsumed = cq.ring.unconsumed();
        if unconsumed > command.cqe {
            return Step::refused(command, VerbsError::InvalidArgument);
        }
        let ring = CompletionProducer::new(command.segment, command.cqe, unconsumed);
        let before = std::mem::replace(&mut cq.ring, ring);
        Step::done(Ok(cq.previous.replace(before)))
    }
}

impl Execute<ModerateCq> for Worker {
    fn execute(&mut self, _: Instant, ModerateCq { cq, count, period }: ModerateCq) -> Step<ModerateCq> {
        Step::done(if self.rings.moderate(cq, count, period) { Ok(()) } else { Err(VerbsError::NotFound) })
    }
}

impl Execute<DestroyCq> for Worker {
    fn execute(&mut self, _: Instant, DestroyCq { session, cq }: DestroyCq) -> Step<DestroyCq> {
        Step::done(self.engine.destroy_cq(session, cq).map(|()| self.rings.remove_cq(cq)))
    }
}

impl Execute<CreateSrq> for Worker {
    fn execute(&mut self, _: Instant, command: CreateSrq) -> Step<CreateSrq> {
        let CreateSrq { session, pd, attributes, xrc, cookie, .. } = command;
        let created = match self.engine.create_srq(session, pd, attributes, xrc, cookie) {
            Ok(created) => created,
            Err(error) => return Step::refused(command, error),
        };
        let CreateSrq { context, receive, .. } = command;
        self.rings.srqs.insert(created.0, Srq { session, context, cookie, receive, receives_wanted: false });
        self.rings.set_bell(session, cookie, Some(Bell::Srq(created.0)));
        Step::done(Ok(created))
    }
}

impl Execute<ModifySrq> for Worker {
    fn execute(&mut self, _: Instant, ModifySrq { session, srq, limit }: ModifySrq) -> Step<ModifySrq> {
        Step::done(self.engine.modify_srq(&mut self.rings, session, srq, limit))
    }
}

impl Execute<QuerySrq> for Worker {
    fn execute(&mut self, _: Instant, QuerySrq { session, srq }: QuerySrq) -> Step<QuerySrq> {
        Step::done(self.engine.query_srq(session, srq))
    }
}

impl Execute<DestroySrq> for Worker {
    fn execute(&mut self, _: Instant, command: DestroySrq) -> Step<DestroySrq> {
        let DestroySrq { session, srq } = command;
        let result = self.engine.destroy_srq(session, srq).map(|()| self.rings.remove_srq(srq));
        Step::unless_in_flight(command, result)
    }
}
