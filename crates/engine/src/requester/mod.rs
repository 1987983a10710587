//! The requester: takes posted sends one after the other, checks them, offers each to its responder
//! and waits where the standard waits (IBTA 9.7.5, 9.9.2).
//!
//! Requests of a QP are executed strictly in order, one at a time; so a fence is always already
//! satisfied.
mod carrier;
mod delivery;
mod metering;
mod packets;
mod records;
mod repair;
mod replicate;
mod timeouts;
mod unreliable;

use crate::arrival::{Arrival, Rejection, effective_qkey, remote_right};
use crate::fault::Fault;
use crate::flush::flush_target;
use crate::limits::{ATOMIC_BYTES, RNR_GRACE_STEP, RNR_RETRY_FOREVER};
use crate::multicast::Groups;
use crate::objects::Vnic;
use crate::qp::{Claim, QueuePair, SendPhase, Teardown};
use crate::responder::Responder;
use crate::schedule::Scheduler;
use crate::timers::{TimerKind, acknowledge_timeout};
use crate::transport::wire::Wire;
use crate::turn::{Budget, Turn, local_right};
use crate::{Environment, Fetch, Progress, QpId, ReceiveQueueId, Syndrome, UD_MESSAGE_BYTES_MAX, ud};
use freeflow_verbs::{CompletionStatus, Duration, Instant, MESSAGE_BYTES_MAX, QpState, QpType, SendOpcode, Shard};

/// It owns the groups that its datagrams go to, and the responder that local delivery feeds.
pub(crate) struct Requester {
    pub responder: Responder,
    pub groups: Groups,
}

impl Requester {
    pub fn new(shard: Shard) -> Self {
        Self { responder: Responder::new(shard), groups: Groups::new() }
    }

    /// A QP that our own bookkeeping says exists.
    #[inline]
    pub fn qp(&self, id: QpId) -> &QueuePair {
        self.responder.completer.qp(id)
    }

    #[inline]
    pub fn qp_mut(&mut self, id: QpId) -> &mut QueuePair {
        self.responder.completer.qp_mut(id)
    }

    #[inline]
    pub fn vnic_of(&mut self, id: QpId) -> &mut Vnic {
        self.responder.completer.vnic_of(id)
    }

    #[inline]
    pub fn wire(&self, id: QpId) -> &Wire {
        self.responder.completer.wire(id)
    }

    #[inline]
    pub fn wire_mut(&mut self, id: QpId) -> &mut Wire {
        self.responder.completer.wire_mut(id)
    }

    #[inline]
    pub fn push_ready(&mut self, id: QpId) {
        self.responder.completer.push_ready(id);
    }
}

pub(crate) enum Check {
    Operation,
    Length,
    Protection(u64),
    Passed(u64),
}

impl Requester {
    /// Works off posted sends of one QP, at most about `budget_bytes` of payload (and a bounded
    /// number of requests).
    pub(crate) fn run<E: Environment>(&mut self, env: &mut E, now: Instant, qp: QpId, budget_bytes: u64) -> Progress {
        let mut budget = self.meter(now, qp, budget_bytes);
        let owes = match self.responder.completer.qps.get(qp) {
            Some(pair) if pair.wire.is_some() => self.responder.respond(env, now, qp, &mut budget),
            Some(pair) if !pair.receive.datagrams.is_empty() => {
                self.responder.resume_datagrams(env, now, qp);
                Progress::Idle
            }
            _ => Progress::Idle,
        };
        let sends = self.run_sends(env, now, qp, &mut budget);
        self.responder.answered(env, qp);
        let (owes, progress) = self.end_run(env, now, qp, &budget, (owes, sends));
        if progress != Progress::More {
            self.responder.completer.leave_place(qp);
        }
        if owes == Progress::Idle || progress == Progress::More { progress } else { owes }
    }

    fn run_sends<E: Environment>(&mut self, env: &mut E, now: Instant, qp: QpId, budget: &mut Budget) -> Progress {
        loop {
            let Some(pair) = self.responder.completer.qps.get(qp) else { return Progress::Idle };
            if pair.teardown != Teardown::None {
                return Progress::Idle;
            }
            let reliable_wire = pair.wire.is_some() && pair.service.is_reliable() && pair.service.sends();
            let turn = match pair.state() {
                QpState::ReadyToSend | QpState::SqDrain if reliable_wire => self.wire_turn(env, now, qp, budget),
                QpState::ReadyToSend | QpState::SqDrain => self.turn(env, now, qp, budget),
                QpState::Error => return self.responder.completer.flush(env, now, qp),
                QpState::SqError => return self.responder.completer.flush_sends(env, now, qp),
                QpState::Reset | QpState::Init | QpState::ReadyToReceive => return Progress::Idle,
            };
            if let Turn::Stop(progress) = turn {
                return progress;
            }
        }
    }

    pub(crate) fn turn<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) -> Turn {
        let qp = self.qp(id);
        let (phase, state) = (qp.send.phase, qp.state());
        match phase {
            SendPhase::InFlight | SendPhase::Waiting => Turn::Stop(Progress::Waiting),
            SendPhase::Idle if state == QpState::SqDrain => Turn::Stop(Progress::Idle),
            _ if budget.bytes == 0 => Turn::Stop(Progress::More),
            SendPhase::Idle | SendPhase::Replicate if budget.requests == 0 => Turn::Stop(Progress::More),
            SendPhase::Idle => {
                budget.requests -= 1;
                self.fetch(env, now, id)
            }
            SendPhase::Begin if !self.pay(id, budget) => Turn::Stop(Progress::More),
            SendPhase::Begin => self.begin(env, now, id, budget),
            SendPhase::Replicate => self.replicate(env, now, id, budget),
            SendPhase::Moving => self.move_on(env, now, id, budget),
            SendPhase::Transmitting => self.transmit_on(env, now, id, budget),
            SendPhase::Original(value) => self.write_original(env, now, id, value),
        }
    }

    pub(crate) fn fetch<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let qp = self.qp_mut(id);
        if !qp.service.sends() {
            return Turn::Stop(Progress::Idle);
        }
        match env.fetch_send(id, &mut qp.send.request) {
            Fetch::Empty | Fetch::Later => Turn::Stop(Progress::Idle),
            Fetch::Malformed => {
                self.vnic_of(id).counters.malformed_descriptors += 1;
                let fault = Fault::new(CompletionStatus::LocalQpOperationError, Syndrome::MalformedDescriptor);
                self.responder.completer.fail_send(env, now, id, fault);
                Turn::Continue
            }
            Fetch::Ready => {
                qp.send.phase = SendPhase::Begin;
                qp.send.paid = false;
                self.responder.completer.renew_retries(id);
                Turn::Continue
            }
        }
    }

    /// Checks the request in hand and offers it to its responder.
    pub(crate) fn begin<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) -> Turn {
        let length = match self.check_request(id) {
            Ok(length) => length,
            Err(fault) => {
                self.responder.completer.fail_send(env, now, id, fault);
                return Turn::Continue;
            }
        };
        let send = &mut self.qp_mut(id).send;
        send.length = length;
        send.moved = 0;
        if send.request.opcode.is_local() {
            return self.responder.completer.run_local(env, now, id);
        }
        if self.qp(id).service == QpType::Ud && !self.responder.may_send(env, id) {
            return self.unanswered(env, now, id);
        }
        let Some(responder) = self.responder.find_responder(id) else {
            return match self.find_wire(env, now, id) {
                Some(turn) => turn,
                None => self.send_to_group_or_nobody(env, now, id),
            };
        };
        let arrival = self.arrival(id, responder);
        match self.responder.admit(env, now, &arrival) {
            Ok(()) => {
                self.admitted(env, id, responder);
                match self.qp(id).service {
                    // Naming an SRQ may have ended what was there before, and with it the target.
                    QpType::XrcSend => Turn::Continue,
                    _ => self.move_chunk(env, now, id, responder, budget),
                }
            }
            Err(refused) => self.refused(env, now, id, &arrival, refused),
        }
    }

    pub(crate) fn check_request(&self, id: QpId) -> Result<u64, Fault> {
        let qp = self.qp(id);
        let mut check = Check::Operation;
        loop {
            check = match check {
                Check::Operation => self.check_own_operation(qp)?,
                Check::Length => check_length(qp)?,
                Check::Protection(length) => self.check_protection(qp, length)?,
                Check::Passed(length) => return Ok(length),
            }
        }
    }

    /// Does the operation exist on this service (IBTA table 38)?
    fn check_own_operation(&self, qp: &QueuePair) -> Result<Check, Fault> {
        let wrong = |syndrome| Err(Fault::new(CompletionStatus::LocalQpOperationError, syndrome));
        let request = &qp.send.request;
        let reads = request.opcode == SendOpcode::RdmaRead || request.opcode.is_atomic();
        let flushes = request.opcode == SendOpcode::Flush;
        let impossible = (reads || flushes) && request.is_inline() || flushes && flush_target(request).is_none();
        if !operation_exists(qp.service, request.opcode) || impossible {
            return wrong(Syndrome::WrongOperation);
        }
        if request.opcode.is_local() {
            return Ok(Check::Passed(0));
        }
        if (reads || request.opcode == SendOpcode::AtomicWrite) && qp.attributes.max_rd_atomic == 0 {
            return wrong(Syndrome::NoReadDepth);
        }
        let handle = || self.responder.completer.ahs.at(request.address_handle).map(|(_, handle)| handle.pd);
        if qp.service == QpType::Ud && handle() != qp.pd {
            return wrong(Syndrome::AddressHandle);
        }
        Ok(Check::Length)
    }

    fn check_protection(&self, qp: &QueuePair, length: u64) -> Result<Check, Fault> {
        let request = &qp.send.request;
        if request.is_inline() {
            return Ok(Check::Passed(length));
        }
        match self.responder.completer.keys.check(request.sges(), qp.sender_pd(), length, local_right(request.opcode)) {
            Ok(()) => Ok(Check::Passed(length)),
            Err(_) => Err(Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalKey)),
        }
    }

    #[inline]
    pub(crate) fn arrival(&self, id: QpId, responder: QpId) -> Arrival {
        let qp = self.qp(id);
        let request = &qp.send.request;
        let flush = flush_target(request);
        Arrival {
            claim: Claim::By(id),
            responder,
            srqn: request.remote_srqn,
            opcode: request.opcode,
            length: if flush.is_some() { request.compare_add } else { qp.send.length },
            right: flush.map_or_else(|| remote_right(request.opcode), |flush| flush.right),
            whole: flush.is_some_and(|flush| flush.whole),
            remote_address: request.remote_address,
            rkey: request.rkey,
            qkey: effective_qkey(request.remote_qkey, qp.attributes.qkey),
        }
    }

    pub(crate) fn admitted<E: Environment>(&mut self, env: &mut E, id: QpId, responder: QpId) {
        self.responder.completer.timers.cancel(id);
        self.responder.completer.stop_waiting(env, id);
        self.responder.completer.renew_retries(id);
        let qp = self.qp(id);
        if qp.service == QpType::Ud
            && !qp.send.replicates()
            && let Some((_, handle)) = self.responder.completer.ahs.at(qp.send.request.address_handle)
        {
            let has_immediate = qp.send.request.opcode.has_immediate();
            let from = qp.addresses.by(handle.route.sgid_index);
            let grh = ud::grh(from, &handle.route, qp.send.length as u32, has_immediate);
            self.qp_mut(id).send.grh = grh;
        }
        let send = &mut self.qp_mut(id).send;
        send.phase = SendPhase::Moving;
        send.responder = Some(responder);
    }

    fn refused<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        arrival: &Arrival,
        refused: Rejection,
    ) -> Turn {
        match refused {
            Rejection::Busy => {
                self.qp_mut(arrival.responder).receive.waiters.push(id);
                self.qp_mut(id).send.phase = SendPhase::Waiting;
                Turn::Stop(Progress::Waiting)
            }
            Rejection::NotReady { queue, delay } => self.not_ready(env, now, id, arrival.responder, (queue, delay)),
            Rejection::Postponed => {
                self.qp_mut(id).send.phase = SendPhase::Waiting;
                self.responder.completer.timers.arm(id, TimerKind::RnrGrace, now + RNR_GRACE_STEP);
                Turn::Stop(Progress::Waiting)
            }
            Rejection::Nak(nak) => {
                self.responder.completer.fail_send(env, now, id, nak.fault());
                Turn::Continue
            }
            Rejection::Late if self.qp(id).send.grace_steps_left > 0 => {
                let send = &mut self.qp_mut(id).send;
                send.grace_steps_left -= 1;
                send.phase = SendPhase::Waiting;
                self.responder.completer.timers.arm(id, TimerKind::RnrGrace, now + RNR_GRACE_STEP);
                Turn::Stop(Progress::Waiting)
            }
            Rejection::Late | Rejection::Dropped => {
                if refused == Rejection::Late {
                    self.vnic_of(arrival.responder).counters.receives_missing += 1;
                }
                self.responder.completer.count_received(id, arrival.responder);
                self.lose(env, now, id);
                Turn::Continue
            }
        }
    }

    /// An RNR NAK: waits and tries again, at the latest when the timer expires, `rnr_retry` times
    /// (IBTA 9.7.5.2.8).
    fn not_ready<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        responder: QpId,
        (queue, delay): (ReceiveQueueId, Duration),
    ) -> Turn {
        if self.qp(id).send.waits_for != Some(queue) {
            self.responder.completer.stop_waiting(env, id);
            self.responder.completer.wait_for(id, queue);
        }
        // A wake-up before the timer is no attempt of the standard's: it costs none.
        if self.responder.completer.timers.armed(id) != Some(TimerKind::ReceiverNotReady) {
            self.vnic_of(id).counters.rnr_naks += 1;
            self.vnic_of(responder).counters.receives_missing += 1;
            let qp = self.qp_mut(id);
            if qp.attributes.rnr_retry < RNR_RETRY_FOREVER {
                if qp.send.rnr_retries_left == 0 {
                    self.vnic_of(id).counters.rnr_retries_exceeded += 1;
                    let fault = Fault::new(CompletionStatus::RnrRetryExceeded, Syndrome::ReceiverNotReady);
                    self.responder.completer.fail_send(env, now, id, fault);
                    return Turn::Continue;
                }
                qp.send.rnr_retries_left -= 1;
            }
            self.responder.completer.timers.arm(id, TimerKind::ReceiverNotReady, now + delay);
        }
        self.qp_mut(id).send.phase = SendPhase::Waiting;
        Turn::Stop(Progress::Waiting)
    }

    /// A message that nobody acknowledges is lost: its sender sees success.
    pub(crate) fn lose<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let qp = self.qp(id);
        if qp.service == QpType::Uc && qp.send.request.opcode.consumes_receive() {
            env.message_lost(id);
        }
        self.responder.completer.succeed_send(env, now, id);
    }

    /// Nobody is there: RC waits for its timeout and tries again, UC and UD never know.
    pub(crate) fn unanswered<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        self.responder.completer.stop_waiting(env, id);
        let qp = self.qp_mut(id);
        let first = qp.send.retries_left == qp.attributes.retry_count;
        let timeout = acknowledge_timeout(qp.attributes.timeout);
        if !qp.service.is_reliable() {
            self.vnic_of(id).counters.undeliverable += 1;
            self.responder.note_unanswered(env, id);
            self.lose(env, now, id);
            return Turn::Continue;
        }
        qp.send.phase = SendPhase::Waiting;
        qp.send.moved = 0;
        if self.responder.completer.timers.armed(id) != Some(TimerKind::Acknowledge) {
            self.responder.completer.timers.cancel(id);
            if first {
                self.vnic_of(id).counters.undeliverable += 1;
                self.responder.note_unanswered(env, id);
            }
            if let Some(timeout) = timeout {
                self.responder.completer.timers.arm(id, TimerKind::Acknowledge, now + timeout);
            }
        }
        Turn::Stop(Progress::Waiting)
    }

    /// Expires timers up to `now`.
    pub(crate) fn handle_timeout<E: Environment>(&mut self, env: &mut E, now: Instant) {
        self.expire_limits(now);
        self.responder.expire_waits(env, now);
        while let Some((id, kind)) = self.responder.completer.timers.expire(now) {
            if kind == TimerKind::Retransmit || self.qp(id).wire.is_some() && self.qp(id).service.is_reliable() {
                self.wire_timeout(env, now, id, kind);
                continue;
            }
            let send = &mut self.qp_mut(id).send;
            debug_assert!(matches!(send.phase, SendPhase::Waiting | SendPhase::Begin));
            send.phase = SendPhase::Begin;
            self.push_ready(id);
            let send = &mut self.qp_mut(id).send;
            if kind == TimerKind::Acknowledge {
                if send.retries_left == 0 {
                    self.vnic_of(id).counters.retries_exceeded += 1;
                    self.responder.completer.fail_send(
                        env,
                        now,
                        id,
                        Fault::new(CompletionStatus::RetryExceeded, Syndrome::NoAnswer),
                    );
                } else {
                    send.retries_left -= 1;
                    self.vnic_of(id).counters.ack_timeouts += 1;
                }
            }
        }
    }

    /// When `handle_timeout` is next needed.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let (timer, limit) = (self.responder.completer.timers.next(), self.responder.schedule.poll_timeout());
        [timer, limit, self.responder.acks_due()].into_iter().flatten().min()
    }
}

/// IBTA table 38, without what FreeFlow does not do.
fn operation_exists(service: QpType, opcode: SendOpcode) -> bool {
    match service {
        QpType::Rc | QpType::XrcSend => true,
        QpType::Uc => {
            (opcode.is_send() && opcode != SendOpcode::SendWithInvalidate) || opcode.is_write() || opcode.is_local()
        }
        QpType::Ud => opcode.is_send() && opcode != SendOpcode::SendWithInvalidate,
        QpType::XrcReceive => false,
    }
}

fn check_length(qp: &QueuePair) -> Result<Check, Fault> {
    let request = &qp.send.request;
    let bytes = request.payload_bytes();
    let (fits, length) = match qp.service {
        _ if request.opcode.is_atomic() => (bytes >= ATOMIC_BYTES, ATOMIC_BYTES),
        _ if request.opcode == SendOpcode::AtomicWrite => (bytes == ATOMIC_BYTES, ATOMIC_BYTES),
        // It has no payload; its range stands in 32 bits (RETH).
        _ if request.opcode == SendOpcode::Flush => (request.compare_add <= u64::from(u32::MAX), 0),
        QpType::Ud => (bytes <= UD_MESSAGE_BYTES_MAX, bytes),
        _ => (bytes <= MESSAGE_BYTES_MAX, bytes),
    };
    if fits {
        Ok(Check::Protection(length))
    } else {
        Err(Fault::new(CompletionStatus::LocalLengthError, Syndrome::LocalLength))
    }
}
