//! The requester: takes posted sends one after the other, checks them, offers each to its responder and waits where the
//! standard waits (IBTA 9.7.5, 9.9.2).
//!
//! Requests of a QP are executed strictly in order, one at a time; so a fence is always already satisfied.
use crate::limits::{ATOMIC_BYTES, REQUESTS_PER_RUN_MAX, RNR_RETRY_FOREVER, UD_MESSAGE_BYTES_MAX};
use crate::qp::{QueuePair, SendPhase, Teardown};
use crate::responder::{Arrival, Nak, Refused, effective_qkey};
use crate::timers::{TimerKind, acknowledge_timeout};
use crate::{Engine, Environment, Fetch, Progress, QpId, ReceiveQueueId, Syndrome, ud};
use freeflow_verbs::{Access, CompletionStatus, Duration, Instant, MESSAGE_BYTES_MAX, QpState, QpType, SendOpcode};

pub(crate) struct Budget {
    pub bytes: u64,
    pub requests: u32,
}

pub(crate) enum Turn {
    Continue,
    Stop(Progress),
}

/// Why a request fails before anything is sent.
pub(crate) type Fault = (CompletionStatus, Syndrome);

enum Check {
    Operation,
    Length,
    Protection(u64),
    Passed(u64),
}

impl Engine {
    /// Works off posted sends of one QP, at most about `budget_bytes` of payload (and a bounded number of requests).
    pub fn run<E: Environment>(&mut self, env: &mut E, now: Instant, qp: QpId, budget_bytes: u64) -> Progress {
        let mut budget = Budget { bytes: budget_bytes, requests: REQUESTS_PER_RUN_MAX };
        loop {
            let Some(pair) = self.qps.get(qp) else { return Progress::Idle };
            if pair.teardown != Teardown::None {
                return Progress::Idle;
            }
            let turn = match pair.state() {
                QpState::ReadyToSend | QpState::SqDrain => self.turn(env, now, qp, &mut budget),
                QpState::Error => return self.flush(env, now, qp),
                QpState::SqError => return self.flush_sends(env, now, qp),
                QpState::Reset | QpState::Init | QpState::ReadyToReceive => return Progress::Idle,
            };
            if let Turn::Stop(progress) = turn {
                return progress;
            }
        }
    }

    fn turn<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) -> Turn {
        let qp = self.qp(id);
        match qp.send.phase {
            SendPhase::InFlight | SendPhase::Waiting => Turn::Stop(Progress::Waiting),
            SendPhase::Idle if qp.state() == QpState::SqDrain => Turn::Stop(Progress::Idle),
            _ if budget.bytes == 0 => Turn::Stop(Progress::More),
            SendPhase::Idle if budget.requests == 0 => Turn::Stop(Progress::More),
            SendPhase::Idle => {
                budget.requests -= 1;
                self.fetch(env, now, id)
            }
            SendPhase::Begin => self.begin(env, now, id),
            SendPhase::Moving => self.move_on(env, now, id, budget),
            SendPhase::Original(value) => self.write_original(env, now, id, value),
        }
    }

    fn fetch<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let qp = self.qp_mut(id);
        match env.fetch_send(id, &mut qp.send.request) {
            Fetch::Empty => Turn::Stop(Progress::Idle),
            Fetch::Malformed => {
                self.vnic_of(id).counters.malformed_descriptors += 1;
                let fault = (CompletionStatus::LocalQpOperationError, Syndrome::MalformedDescriptor);
                self.fail_send(env, now, id, fault);
                Turn::Continue
            }
            Fetch::Ready => {
                qp.send.phase = SendPhase::Begin;
                self.renew_retries(id);
                Turn::Continue
            }
        }
    }

    /// Checks the request in hand and offers it to its responder.
    fn begin<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let length = match self.check_request(id) {
            Ok(length) => length,
            Err(fault) => {
                self.fail_send(env, now, id, fault);
                return Turn::Continue;
            }
        };
        let send = &mut self.qp_mut(id).send;
        send.length = length;
        send.moved = 0;
        let Some(responder) = self.find_responder(id) else { return self.unanswered(env, now, id) };
        let arrival = self.arrival(id, responder);
        match self.admit(env, now, &arrival) {
            Ok(()) => {
                self.admitted(env, id, responder);
                Turn::Continue
            }
            Err(refused) => self.refused(env, now, &arrival, refused),
        }
    }

    fn check_request(&self, id: QpId) -> Result<u64, Fault> {
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
        let wrong = |syndrome| Err((CompletionStatus::LocalQpOperationError, syndrome));
        let request = &qp.send.request;
        let reads = request.opcode == SendOpcode::RdmaRead || request.opcode.is_atomic();
        if !operation_exists(qp.service, request.opcode) || (reads && request.is_inline()) {
            return wrong(Syndrome::WrongOperation);
        }
        if reads && qp.attributes.max_rd_atomic == 0 {
            return wrong(Syndrome::NoReadDepth);
        }
        let handle = self.ahs.at(request.address_handle).map(|(_, handle)| handle.pd);
        if qp.service == QpType::Ud && handle != Some(qp.pd) {
            return wrong(Syndrome::AddressHandle);
        }
        Ok(Check::Length)
    }

    fn check_protection(&self, qp: &QueuePair, length: u64) -> Result<Check, Fault> {
        let request = &qp.send.request;
        if request.is_inline() {
            return Ok(Check::Passed(length));
        }
        match self.keys.check(request.sges(), qp.pd, length, local_right(request.opcode)) {
            Ok(()) => Ok(Check::Passed(length)),
            Err(_) => Err((CompletionStatus::LocalProtectionError, Syndrome::LocalKey)),
        }
    }

    fn arrival(&self, id: QpId, responder: QpId) -> Arrival {
        let qp = self.qp(id);
        let request = &qp.send.request;
        Arrival {
            requester: id,
            responder,
            opcode: request.opcode,
            length: qp.send.length,
            remote_address: request.remote_address,
            rkey: request.rkey,
            qkey: effective_qkey(request.remote_qkey, qp.attributes.qkey),
        }
    }

    fn admitted<E: Environment>(&mut self, env: &mut E, id: QpId, responder: QpId) {
        self.timers.cancel(id);
        self.stop_waiting(env, id);
        self.renew_retries(id);
        let qp = self.qp(id);
        if qp.service == QpType::Ud
            && let Some((_, handle)) = self.ahs.at(qp.send.request.address_handle)
        {
            let has_immediate = qp.send.request.opcode.has_immediate();
            let grh = ud::grh(qp.gid, &handle.route, qp.send.length as u32, has_immediate);
            self.qp_mut(id).send.grh = grh;
        }
        let send = &mut self.qp_mut(id).send;
        send.phase = SendPhase::Moving;
        send.responder = Some(responder);
    }

    fn refused<E: Environment>(&mut self, env: &mut E, now: Instant, arrival: &Arrival, refused: Refused) -> Turn {
        let id = arrival.requester;
        match refused {
            Refused::Busy => {
                self.qp_mut(arrival.responder).receive.waiters.push(id);
                self.qp_mut(id).send.phase = SendPhase::Waiting;
                Turn::Stop(Progress::Waiting)
            }
            Refused::NotReady { queue, delay } => self.not_ready(env, now, id, queue, delay),
            Refused::Nak(nak) => {
                self.fail_send(env, now, id, nak_fault(nak));
                Turn::Continue
            }
            Refused::Dropped => {
                self.succeed_send(env, now, id);
                Turn::Continue
            }
        }
    }

    /// An RNR NAK: waits and tries again, at the latest when the timer expires, `rnr_retry` times (IBTA 9.7.5.2.8).
    fn not_ready<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        queue: ReceiveQueueId,
        delay: Duration,
    ) -> Turn {
        if self.qp(id).send.waits_for != Some(queue) {
            self.stop_waiting(env, id);
            self.wait_for(id, queue);
        }
        // A wake-up before the timer is no attempt of the standard's: it costs none.
        if self.timers.armed(id) != Some(TimerKind::ReceiverNotReady) {
            self.vnic_of(id).counters.rnr_naks += 1;
            let qp = self.qp_mut(id);
            if qp.attributes.rnr_retry != RNR_RETRY_FOREVER {
                if qp.send.rnr_retries_left == 0 {
                    let fault = (CompletionStatus::RnrRetryExceeded, Syndrome::ReceiverNotReady);
                    self.fail_send(env, now, id, fault);
                    return Turn::Continue;
                }
                qp.send.rnr_retries_left -= 1;
            }
            self.timers.arm(id, TimerKind::ReceiverNotReady, now + delay);
        }
        self.qp_mut(id).send.phase = SendPhase::Waiting;
        Turn::Stop(Progress::Waiting)
    }

    /// Nobody is there: RC waits for its timeout and tries again, UC and UD never know.
    pub(crate) fn unanswered<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        self.stop_waiting(env, id);
        let qp = self.qp_mut(id);
        let first = qp.send.retries_left == qp.attributes.retry_count;
        let timeout = acknowledge_timeout(qp.attributes.timeout);
        if qp.service != QpType::Rc {
            self.vnic_of(id).counters.undeliverable += 1;
            self.succeed_send(env, now, id);
            return Turn::Continue;
        }
        qp.send.phase = SendPhase::Waiting;
        qp.send.moved = 0;
        if self.timers.armed(id) != Some(TimerKind::Acknowledge) {
            self.timers.cancel(id);
            if first {
                self.vnic_of(id).counters.undeliverable += 1;
            }
            if let Some(timeout) = timeout {
                self.timers.arm(id, TimerKind::Acknowledge, now + timeout);
            }
        }
        Turn::Stop(Progress::Waiting)
    }

    /// Expires timers up to `now`.
    pub fn handle_timeout<E: Environment>(&mut self, env: &mut E, now: Instant) {
        while let Some((id, kind)) = self.timers.expire(now) {
            let send = &mut self.qp_mut(id).send;
            debug_assert!(matches!(send.phase, SendPhase::Waiting | SendPhase::Begin));
            send.phase = SendPhase::Begin;
            self.push_ready(id);
            let send = &mut self.qp_mut(id).send;
            if kind == TimerKind::Acknowledge {
                if send.retries_left == 0 {
                    self.vnic_of(id).counters.retries_exceeded += 1;
                    self.fail_send(env, now, id, (CompletionStatus::RetryExceeded, Syndrome::NoAnswer));
                } else {
                    send.retries_left -= 1;
                }
            }
        }
    }

    /// When `handle_timeout` is next needed.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Progress was made: both retry counts start afresh.
    pub(crate) fn renew_retries(&mut self, id: QpId) {
        let qp = self.qp_mut(id);
        qp.send.retries_left = qp.attributes.retry_count;
        qp.send.rnr_retries_left = qp.attributes.rnr_retry;
    }
}

/// The right that an operation needs of local memory.
pub(crate) fn local_right(opcode: SendOpcode) -> Access {
    if opcode == SendOpcode::RdmaRead || opcode.is_atomic() { Access::LOCAL_WRITE } else { Access(0) }
}

/// The completion status that a NAK leads to (IBTA table 58).
pub(crate) fn nak_fault(nak: Nak) -> Fault {
    match nak {
        Nak::InvalidRequest(syndrome) => (CompletionStatus::RemoteInvalidRequest, syndrome),
        Nak::RemoteAccess(syndrome) => (CompletionStatus::RemoteAccessError, syndrome),
        Nak::RemoteOperational(syndrome) => (CompletionStatus::RemoteOperationError, syndrome),
    }
}

/// IBTA table 38, without what FreeFlow does not do.
fn operation_exists(service: QpType, opcode: SendOpcode) -> bool {
    match service {
        QpType::Rc => true,
        QpType::Uc => opcode.is_send() || opcode.is_write(),
        QpType::Ud => opcode.is_send(),
    }
}

fn check_length(qp: &QueuePair) -> Result<Check, Fault> {
    let request = &qp.send.request;
    let bytes = request.payload_bytes();
    let (fits, length) = match qp.service {
        _ if request.opcode.is_atomic() => (bytes >= ATOMIC_BYTES, ATOMIC_BYTES),
        QpType::Ud => (bytes <= UD_MESSAGE_BYTES_MAX, bytes),
        QpType::Rc | QpType::Uc => (bytes <= MESSAGE_BYTES_MAX, bytes),
    };
    if fits { Ok(Check::Protection(length)) } else { Err((CompletionStatus::LocalLengthError, Syndrome::LocalLength)) }
}
