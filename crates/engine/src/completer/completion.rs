//! Completions, and the ways a QP stops: ERROR, SQE, flushing (IBTA 10.3.1, 10.10.2, 11.6.2).
//!
//! Invariant: `enter_error` only changes state and asks for a later turn; flushing happens in
//! [`crate::Engine::run`] and the verbs. So the request whose failure led to ERROR completes with
//! its own status before the rest is flushed.
use crate::completer::Completer;
use crate::fault::Fault;
use crate::limits::FLUSHES_PER_TURN_MAX;
use crate::objects::CqState;
use crate::qp::{Claim, Drain, SendPhase, Teardown};
use crate::{Environment, EventTarget, Fetch, Progress, QpId, ReceiveQueueId, Syndrome};
use freeflow_verbs::{
    AsyncEventKind, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Instant, QpState, QpType,
    SendFlags, SendOpcode, SendRequest,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

impl Completer {
    /// Completes the send request in hand with success, quietly if it is unsignaled.
    pub(crate) fn succeed_send<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let qp = self.qp(id);
        if qp.send.replicates() {
            return self.member_done(env, now, id);
        }
        let (opcode, length) = (qp.send.request.opcode, qp.send.length);
        let signaled = qp.all_signaled || qp.send.request.flags.contains(SendFlags::SIGNALED);
        self.count_sent(id);
        self.drop_request(env, id);
        if signaled {
            let byte_count = if opcode == SendOpcode::RdmaRead || opcode.is_atomic() { length as u32 } else { 0 };
            let completion = Completion { byte_count, ..self.send_completion(now, id, CompletionStatus::Success) };
            self.post(env, id, Side::Send, completion);
        }
        self.finish_drain(env, id);
    }

    /// Completes the send request in hand with an error: RC and XRC go to ERROR, UC and UD to SQE.
    pub(crate) fn fail_send<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, fault: Fault) {
        let completion =
            Completion { vendor_error: fault.syndrome as u8, ..self.send_completion(now, id, fault.status) };
        self.drop_request(env, id);
        let qp = self.qp(id);
        if !qp.service.is_reliable() && qp.state() != QpState::Error {
            // Before anybody can know of it.
            env.revoke_direct(id);
        }
        self.post(env, id, Side::Send, completion);
        if self.qp(id).service.is_reliable() {
            self.enter_error(env, id);
        } else if self.qp(id).state() != QpState::Error {
            let qp = self.qp_mut(id);
            qp.attributes.state = QpState::SqError;
            qp.send.drain = Drain::None;
            self.push_ready(id);
        }
    }

    /// Completes the RECV that `id` has in hand.
    pub(crate) fn complete_receive<E: Environment>(&mut self, env: &mut E, id: QpId, completion: Completion) {
        let receive = &mut self.qp_mut(id).receive;
        debug_assert!(receive.claim != Claim::None, "a RECV is in hand");
        receive.claim = Claim::None;
        let completion = Completion {
            work_request_id: receive.request.work_request_id,
            ring_position: receive.request.ring_position,
            ..completion
        };
        self.post(env, id, Side::Receive, completion);
        self.wake_waiters(id);
    }

    /// Completes the RECV that `id` has in hand with an error; what becomes of the QP is the
    /// caller's business.
    pub(crate) fn fail_receive<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, fault: Fault) {
        let completion = Completion {
            status: fault.status,
            opcode: CompletionOpcode::Receive,
            vendor_error: fault.syndrome as u8,
            timestamp_ns: now.0,
            ..Completion::default()
        };
        self.complete_receive(env, id, completion);
    }

    /// To ERROR: no new work, in neither direction; the next turn flushes.
    pub(crate) fn enter_error<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let qp = self.qp_mut(id);
        if qp.state() == QpState::Error || qp.teardown != Teardown::None {
            return;
        }
        env.revoke_direct(id);
        self.withdraw_carried(env, id);
        let qp = self.qp_mut(id);
        qp.attributes.state = QpState::Error;
        qp.send.drain = Drain::None;
        if qp.send.phase == SendPhase::Waiting {
            qp.send.phase = SendPhase::Begin;
        }
        self.timers.cancel(id);
        self.forget_kept(id);
        self.sync_host(id);
        self.stop_waiting(env, id);
        self.wake_waiters(id);
        self.push_ready(id);
    }

    /// One turn of flushing a QP in ERROR. What a pending copy still uses is left for the turn
    /// after it has completed.
    pub(crate) fn flush<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Progress {
        let receives =
            if self.qp(id).receive.in_flight == 0 { self.flush_receives(env, now, id) } else { Progress::Waiting };
        let send = &self.qp(id).send;
        let sends = if send.in_flight.is_none() && send.wire_in_flight == 0 {
            self.flush_sends(env, now, id)
        } else {
            Progress::Waiting
        };
        match (receives, sends) {
            (Progress::More, _) | (_, Progress::More) => Progress::More,
            (Progress::Waiting, _) | (_, Progress::Waiting) => Progress::Waiting,
            _ => Progress::Idle,
        }
    }

    fn flush_receives<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Progress {
        let flushed = Fault::new(CompletionStatus::WorkRequestFlushed, Syndrome::Flushed);
        if self.qp(id).receive.claim != Claim::None {
            self.fail_receive(env, now, id, flushed);
        }
        if self.qp(id).srq.is_some() || self.qp(id).target.is_some() {
            let receive = &mut self.qp_mut(id).receive;
            if !receive.last_wqe_raised {
                receive.last_wqe_raised = true;
                env.raise(AsyncEventKind::QpLastWqeReached, EventTarget::Qp(id));
            }
            return Progress::Idle;
        }
        let queue = ReceiveQueueId::Qp(id);
        for _ in 0..FLUSHES_PER_TURN_MAX {
            let receive = &mut self.qp_mut(id).receive;
            match env.fetch_receive(id, queue, &mut receive.request) {
                Fetch::Ready | Fetch::Malformed => {
                    receive.claim = Claim::Held;
                    self.fail_receive(env, now, id, flushed);
                }
                // Later posts ring; one that came before is seen by one more look.
                Fetch::Empty if !receive.wanted => self.set_wanted(env, queue, true),
                Fetch::Empty | Fetch::Later => return Progress::Idle,
            }
        }
        Progress::More
    }

    /// Flushes the send queue of a QP in ERROR or SQE.
    pub(crate) fn flush_sends<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Progress {
        if !self.qp(id).service.sends() {
            return Progress::Idle;
        }
        let flushed = self.flush_wire(env, now, id, FLUSHES_PER_TURN_MAX);
        for _ in flushed..FLUSHES_PER_TURN_MAX {
            let send = &mut self.qp_mut(id).send;
            if send.phase == SendPhase::Idle {
                match env.fetch_send(id, &mut send.request) {
                    Fetch::Empty | Fetch::Later => return Progress::Idle,
                    Fetch::Ready | Fetch::Malformed => send.phase = SendPhase::Begin,
                }
            }
            let status = CompletionStatus::WorkRequestFlushed;
            let completion =
                Completion { vendor_error: Syndrome::Flushed as u8, ..self.send_completion(now, id, status) };
            self.drop_request(env, id);
            self.post(env, id, Side::Send, completion);
        }
        Progress::More
    }

    /// The request in hand is over: whatever it held of others is given back.
    pub(crate) fn drop_request<E: Environment>(&mut self, env: &mut E, id: QpId) {
        self.timers.cancel(id);
        self.stop_waiting(env, id);
        self.release_claim(env, id);
        let send = &mut self.qp_mut(id).send;
        send.phase = SendPhase::Idle;
        send.moved = 0;
        send.responder = None;
        send.releases = None;
        if let Some(fanout) = &mut send.fanout {
            fanout.clear();
        }
    }

    /// A RECV that this requester's message claimed and did not consume is the next message's.
    #[inline]
    pub(crate) fn release_claim<E: Environment>(&mut self, env: &mut E, id: QpId) {
        if let Some(responder) = self.qp(id).send.responder {
            self.release_claim_of(env, responder, id);
        }
    }

    pub(crate) fn release_claim_of<E: Environment>(&mut self, env: &mut E, responder: QpId, id: QpId) {
        let Some(peer) = self.qps.get_mut(responder) else { return };
        if peer.receive.claim == Claim::By(id) {
            self.keep_receive(env, responder);
            let peer = self.qp(responder);
            if peer.state() == QpState::Error {
                self.push_ready(responder);
            }
            self.wake_waiters(responder);
        }
    }

    /// The RECV in hand was not used: the next message takes it.
    pub(crate) fn keep_receive<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let qp = self.qp_mut(id);
        let may_put_back = qp.service == QpType::Ud && qp.srq.is_none();
        let is_put_back = may_put_back && env.put_back_receive(id, qp.recv_cq, qp.receive.request.ring_position);
        qp.receive.claim = if is_put_back { Claim::None } else { Claim::Held };
    }

    /// SQ_DRAINED, if the last request before the drain is over (IBTA 11.6.3.3).
    pub(crate) fn finish_drain<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let qp = self.qp_mut(id);
        if let Drain::Draining { notify } = qp.send.drain {
            qp.send.drain = Drain::None;
            if notify && qp.state() == QpState::SqDrain {
                env.raise(AsyncEventKind::SqDrained, EventTarget::Qp(id));
            }
        }
    }

    fn send_completion(&self, now: Instant, id: QpId, status: CompletionStatus) -> Completion {
        of_send(&self.qp(id).send.request, now, status)
    }

    /// Hands a completion to its CQ. A CQ without room is in error for good, and the QP with it.
    pub(crate) fn post<E: Environment>(&mut self, env: &mut E, id: QpId, side: Side, mut completion: Completion) {
        let qp = self.qp(id);
        completion.qpn = qp.qpn.0;
        completion.qp_cookie = qp.cookie;
        let cq = match side {
            Side::Send => {
                completion.flags.0 |= CompletionFlags::SEND_QUEUE;
                qp.send_cq.expect("a QP that sends has a CQ for it")
            }
            Side::Receive => match qp.recv_cq {
                Some(cq) => cq,
                // A target QP: its SRQ's. When that is gone nobody asks for its RECVs any more.
                None => {
                    let Some(queue) = self.live_queue(qp) else { return };
                    completion.qp_cookie = queue.cookie;
                    queue.cq
                }
            },
        };
        if completion.status != CompletionStatus::Success {
            completion.flags.0 |= CompletionFlags::SOLICITED;
            let counters = &mut self.vnic_of(id).counters;
            counters.completions_with_error += 1;
            counters.failures.count(side == Side::Send, completion.status);
        }
        let ring = self.cqs.get_mut(cq).expect("a CQ outlives its QPs");
        if ring.state == CqState::Good {
            if env.complete(cq, &completion).is_ok() {
                return;
            }
            ring.state = CqState::Overflowed;
            env.raise(AsyncEventKind::CqError, EventTarget::Cq(cq));
        }
        if self.qp(id).state() != QpState::Error {
            env.raise(AsyncEventKind::QpFatal, EventTarget::Qp(id));
            self.enter_error(env, id);
        }
    }

    /// The next member has the message, or will never get it. After the last one the request is
    /// done.
    pub(crate) fn member_done<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        self.release_claim(env, id);
        let send = &mut self.qp_mut(id).send;
        send.responder = None;
        send.moved = 0;
        send.phase = SendPhase::Replicate;
        if let Some(fanout) = &mut send.fanout {
            fanout.members.pop();
            fanout.put_off = 0;
            if fanout.is_under_way() {
                return;
            }
        }
        self.succeed_send(env, now, id);
    }
}

/// The completion of a send request.
pub(crate) fn of_send(request: &SendRequest, now: Instant, status: CompletionStatus) -> Completion {
    Completion {
        work_request_id: request.work_request_id,
        status,
        opcode: match request.opcode {
            SendOpcode::Send | SendOpcode::SendWithImmediate | SendOpcode::SendWithInvalidate => CompletionOpcode::Send,
            SendOpcode::RdmaWrite | SendOpcode::RdmaWriteWithImmediate => CompletionOpcode::RdmaWrite,
            SendOpcode::RdmaRead => CompletionOpcode::RdmaRead,
            SendOpcode::CompareSwap => CompletionOpcode::CompareSwap,
            SendOpcode::FetchAdd => CompletionOpcode::FetchAdd,
            SendOpcode::BindWindow => CompletionOpcode::BindMemoryWindow,
            SendOpcode::LocalInvalidate => CompletionOpcode::LocalInvalidate,
            SendOpcode::Flush => CompletionOpcode::Flush,
            SendOpcode::AtomicWrite => CompletionOpcode::AtomicWrite,
        },
        ring_position: request.ring_position,
        timestamp_ns: now.0,
        ..Completion::default()
    }
}
