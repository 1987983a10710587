//! Sessions, and what in them has no rings: contexts, completion channels, PDs, address handles, XRC domains.
use crate::dataplane::command::{
    AllocPd, CloseContext, CloseXrcd, CreateAh, CreateCompletionChannel, CreateSession, DeallocPd, DestroyAh,
    DestroyCompletionChannel, DestroySession, Execute, OpenContext, OpenXrcd, SharePd, Step, UnsharePd,
};
use crate::dataplane::ports::{Context, Session};
use crate::dataplane::worker::Worker;
use crate::memory::slow_path::Abandoned;
use freeflow_engine::QpId;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<CreateSession> for Worker {
    fn execute(&mut self, now: Instant, command: CreateSession) -> Step<CreateSession> {
        let vnic = command.vnic;
        let Some(entry) = self.rings.vnics.get_mut(vnic) else {
            return Step::refused(command, VerbsError::DeviceFatal);
        };
        entry.abandoned.retain(|thread| !Abandoned::has_ended(thread));
        if !entry.abandoned.is_empty() {
            return Step::refused(command, VerbsError::DeviceFatal);
        }
        let created = self.rings.ensure_helper(vnic).and_then(|()| self.engine.create_session(vnic));
        let id = match created {
            Ok(id) => id,
            Err(error) => return Step::refused(command, error),
        };
        if self.waiting.watch(id, &command.kick).is_err() {
            self.engine.destroy_session(&mut self.rings, now, id);
            return Step::refused(command, VerbsError::NoMemory);
        }
        let CreateSession { segment, kick, memory, .. } = command;
        segment.set_wait_policy(self.waiting.policy);
        segment.set_router_sleeps(true);
        let session = Session { doorbell_seen: now, ..Session::new(vnic, segment, kick, memory) };
        self.rings.sessions.insert(id, session);
        if self.waiting.is_fastpath() {
            self.heat(now, id);
        }
        Step::done(Ok(id))
    }
}

impl Execute<DestroySession> for Worker {
    fn execute(&mut self, now: Instant, DestroySession { session }: DestroySession) -> Step<DestroySession> {
        Step::done(self.destroy_session(now, session))
    }
}

impl Execute<OpenContext> for Worker {
    fn execute(&mut self, _: Instant, command: OpenContext) -> Step<OpenContext> {
        match self.engine.open_context(command.session) {
            Ok(id) => {
                let pipe = self.rings.pipes.insert(command.session, command.write);
                self.rings.contexts.insert(id, Context { pipe });
                Step::done(Ok(id))
            }
            Err(error) => Step::refused(command, error),
        }
    }
}

impl Execute<CloseContext> for Worker {
    fn execute(&mut self, _: Instant, CloseContext { session, context }: CloseContext) -> Step<CloseContext> {
        Step::done(self.engine.close_context(session, context).map(|()| {
            let entry = self.rings.contexts.remove(context);
            let pipe = entry.and_then(|entry| self.rings.pipes.remove(entry.pipe));
            vec![Box::new(pipe) as _]
        }))
    }
}

impl Execute<CreateCompletionChannel> for Worker {
    fn execute(&mut self, _: Instant, command: CreateCompletionChannel) -> Step<CreateCompletionChannel> {
        // A pipe would stay that is put there after the session's were taken out.
        if self.rings.sessions.get(command.session).is_none() {
            return Step::refused(command, VerbsError::DeviceFatal);
        }
        Step::done(Ok(self.rings.pipes.insert(command.session, command.write)))
    }
}

impl Execute<DestroyCompletionChannel> for Worker {
    fn execute(&mut self, _: Instant, command: DestroyCompletionChannel) -> Step<DestroyCompletionChannel> {
        let pipe = self.rings.pipes.remove(command.pipe);
        Step::done(Ok(vec![Box::new(pipe) as _]))
    }
}

impl Execute<AllocPd> for Worker {
    fn execute(&mut self, _: Instant, AllocPd { session, context }: AllocPd) -> Step<AllocPd> {
        Step::done(self.engine.alloc_pd(session, context))
    }
}

impl Execute<DeallocPd> for Worker {
    fn execute(&mut self, _: Instant, DeallocPd { session, pd }: DeallocPd) -> Step<DeallocPd> {
        Step::done(self.engine.dealloc_pd(session, pd))
    }
}

impl Execute<SharePd> for Worker {
    fn execute(&mut self, _: Instant, SharePd { owner, session, pd }: SharePd) -> Step<SharePd> {
        Step::done(self.engine.share_pd(owner, session, pd))
    }
}

impl Execute<UnsharePd> for Worker {
    fn execute(&mut self, _: Instant, UnsharePd { session, pd }: UnsharePd) -> Step<UnsharePd> {
        Step::done(self.engine.unshare_pd(session, pd))
    }
}

impl Execute<CreateAh> for Worker {
    fn execute(&mut self, _: Instant, CreateAh { session, pd, attributes }: CreateAh) -> Step<CreateAh> {
        Step::done(self.engine.create_ah(session, pd, &attributes))
    }
}

impl Execute<DestroyAh> for Worker {
    fn execute(&mut self, _: Instant, mut command: DestroyAh) -> Step<DestroyAh> {
        // A NIC's requests name the route themselves: a program destroys the handle as soon as it
        // has posted the last one (mckey).
        let mut posted = command.posted.take().unwrap_or_else(|| self.datagrams_posted(&command.datagram_qps));
        if self.are_datagrams_sent(&mut posted) {
            Step::done(self.engine.destroy_ah(command.session, command.ah))
        } else {
            Step::Again(DestroyAh { posted: Some(posted), ..command })
        }
    }
}

impl Worker {
    /// UD QPs that send, and how far they were posted to. Who has not rung for it is run all the same.
    pub(crate) fn datagrams_posted(&mut self, qps: &[QpId]) -> Vec<(QpId, u32)> {
        let posted = |&id: &QpId| {
            let send = &self.rings.qps.get(id)?.send;
            let (until, has_next) = (send.taken().wrapping_add(send.pending()), send.has_next());
            if has_next {
                self.activate(id);
            }
            Some((id, until))
        };
        qps.iter().filter_map(posted).collect()
    }

    /// Whether each QP has sent what was posted before; who has is left out from then on. Where
    /// somebody has not, the others are not looked at: this is asked each turn.
    pub(crate) fn are_datagrams_sent(&self, posted: &mut Vec<(QpId, u32)>) -> bool {
        while let Some(&(id, until)) = posted.last() {
            if self.has_datagrams_before(id, until) {
                return false;
            }
            posted.pop();
        }
        true
    }

    /// Whether requests that were posted before are still to be sent.
    fn has_datagrams_before(&self, id: QpId, until: u32) -> bool {
        let Some(qp) = self.rings.qps.get(id) else { return false };
        let is_taken = qp.send.taken().wrapping_sub(until) as i32 >= 0;
        self.engine.is_sending(id, !is_taken && qp.send.has_next())
    }
}

impl Execute<OpenXrcd> for Worker {
    fn execute(&mut self, _: Instant, command: OpenXrcd) -> Step<OpenXrcd> {
        let OpenXrcd { session, context, file, create, exclusive } = command;
        Step::done(self.engine.open_xrcd(session, context, file, create, exclusive))
    }
}

impl Execute<CloseXrcd> for Worker {
    fn execute(&mut self, _: Instant, CloseXrcd { session, xrcd }: CloseXrcd) -> Step<CloseXrcd> {
        Step::done(self.engine.close_xrcd(session, xrcd))
    }
}
