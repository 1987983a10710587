//! Sessions, and what in them has no rings: contexts, completion channels, PDs, address handles, XRC domains.
use crate::dataplane::command::{
    AllocPd, CloseContext, CloseXrcd, CreateAh, CreateCompletionChannel, CreateSession, DeallocPd, DestroyAh,
    DestroyCompletionChannel, DestroySession, Execute, Execution, OpenContext, OpenXrcd, SharePd, UnsharePd,
};
use crate::dataplane::ports::{Context, Session};
use crate::dataplane::worker::Worker;
use crate::memory::slow_path::Abandoned;
use freeflow_engine::QpId;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<CreateSession> for Worker {
    fn execute(&mut self, now: Instant, command: CreateSession) -> Execution<CreateSession> {
        let vnic = command.vnic;
        let Some(entry) = self.ports.vnics.get_mut(vnic) else {
            return Execution::refused(command, VerbsError::DeviceFatal);
        };
        entry.abandoned.retain(|thread| !Abandoned::has_ended(thread));
        if !entry.abandoned.is_empty() {
            return Execution::refused(command, VerbsError::DeviceFatal);
        }
        let created = self.ports.ensure_copier(vnic).and_then(|()| self.engine.create_session(vnic));
        let id = match created {
            Ok(id) => id,
            Err(error) => return Execution::refused(command, error),
        };
        if self.waiting.watch(id, &command.kick).is_err() {
            self.engine.destroy_session(&mut self.ports, now, id);
            return Execution::refused(command, VerbsError::NoMemory);
        }
        let CreateSession { features, segment, kick, memory, .. } = command;
        segment.set_wait_policy(self.waiting.policy);
        segment.set_router_sleeps(true);
        let session = Session { features, doorbell_seen: now, ..Session::new(vnic, segment, kick, memory) };
        self.ports.sessions.insert(id, session);
        if self.waiting.is_fastpath() {
            self.mark_active(now, id);
        }
        Execution::done(Ok(id))
    }
}

impl Execute<DestroySession> for Worker {
    fn execute(&mut self, now: Instant, DestroySession { session }: DestroySession) -> Execution<DestroySession> {
        Execution::done(self.destroy_session(now, session))
    }
}

impl Execute<OpenContext> for Worker {
    fn execute(&mut self, _: Instant, command: OpenContext) -> Execution<OpenContext> {
        match self.engine.open_context(command.session) {
            Ok(id) => {
                let pipe = self.ports.pipes.insert(command.session, command.write);
                self.ports.contexts.insert(id, Context { pipe });
                Execution::done(Ok(id))
            }
            Err(error) => Execution::refused(command, error),
        }
    }
}

impl Execute<CloseContext> for Worker {
    fn execute(&mut self, _: Instant, CloseContext { session, context }: CloseContext) -> Execution<CloseContext> {
        Execution::done(self.engine.close_context(session, context).map(|()| {
            let entry = self.ports.contexts.remove(context);
            let pipe = entry.and_then(|entry| self.ports.pipes.remove(entry.pipe));
            vec![Box::new(pipe) as _]
        }))
    }
}

impl Execute<CreateCompletionChannel> for Worker {
    fn execute(&mut self, _: Instant, command: CreateCompletionChannel) -> Execution<CreateCompletionChannel> {
        // A pipe would stay that is put there after the session's were taken out.
        if self.ports.sessions.get(command.session).is_none() {
            return Execution::refused(command, VerbsError::DeviceFatal);
        }
        Execution::done(Ok(self.ports.pipes.insert(command.session, command.write)))
    }
}

impl Execute<DestroyCompletionChannel> for Worker {
    fn execute(&mut self, _: Instant, command: DestroyCompletionChannel) -> Execution<DestroyCompletionChannel> {
        let pipe = self.ports.pipes.remove(command.pipe);
        Execution::done(Ok(vec![Box::new(pipe) as _]))
    }
}

impl Execute<AllocPd> for Worker {
    fn execute(&mut self, _: Instant, AllocPd { session, context }: AllocPd) -> Execution<AllocPd> {
        Execution::done(self.engine.alloc_pd(session, context))
    }
}

impl Execute<DeallocPd> for Worker {
    fn execute(&mut self, _: Instant, DeallocPd { session, pd }: DeallocPd) -> Execution<DeallocPd> {
        Execution::done(self.engine.dealloc_pd(session, pd))
    }
}

impl Execute<SharePd> for Worker {
    fn execute(&mut self, _: Instant, SharePd { owner, session, pd }: SharePd) -> Execution<SharePd> {
        Execution::done(self.engine.share_pd(owner, session, pd))
    }
}

impl Execute<UnsharePd> for Worker {
    fn execute(&mut self, _: Instant, UnsharePd { session, pd }: UnsharePd) -> Execution<UnsharePd> {
        Execution::done(self.engine.unshare_pd(session, pd))
    }
}

impl Execute<CreateAh> for Worker {
    fn execute(&mut self, _: Instant, CreateAh { session, pd, attributes }: CreateAh) -> Execution<CreateAh> {
        Execution::done(self.engine.create_ah(session, pd, &attributes))
    }
}

impl Execute<DestroyAh> for Worker {
    fn execute(&mut self, _: Instant, mut command: DestroyAh) -> Execution<DestroyAh> {
        // A NIC's requests name the route themselves: a program destroys the handle as soon as it
        // has posted the last one (mckey).
        let mut posted = command.posted.take().unwrap_or_else(|| self.datagrams_posted(&command.datagram_qps));
        if self.are_datagrams_sent(&mut posted) {
            self.ports.close_datagram_rings_by(command.ah.index);
            Execution::done(self.engine.destroy_ah(command.session, command.ah))
        } else {
            Execution::Again(DestroyAh { posted: Some(posted), ..command })
        }
    }
}

impl Worker {
    /// UD QPs that send, and how far they were posted to. Who has not rung for it is run all the same.
    pub(crate) fn datagrams_posted(&mut self, qps: &[QpId]) -> Vec<(QpId, u32)> {
        let posted = |&id: &QpId| {
            let send = &self.ports.qps.get(id)?.send;
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
        let Some(qp) = self.ports.qps.get(id) else { return false };
        let is_taken = qp.send.taken().wrapping_sub(until) as i32 >= 0;
        self.engine.is_sending(id, !is_taken && qp.send.has_next())
    }
}

impl Execute<OpenXrcd> for Worker {
    fn execute(&mut self, _: Instant, command: OpenXrcd) -> Execution<OpenXrcd> {
        let OpenXrcd { session, context, file, flags } = command;
        Execution::done(self.engine.open_xrcd(session, context, file, flags))
    }
}

impl Execute<CloseXrcd> for Worker {
    fn execute(&mut self, _: Instant, CloseXrcd { session, xrcd }: CloseXrcd) -> Execution<CloseXrcd> {
        Execution::done(self.engine.close_xrcd(session, xrcd))
    }
}
