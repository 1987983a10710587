//! The responder: whether a message that arrives may be executed, as a pipeline of small checks (IBTA 9.7.4, 9.9.3).
//!
//! Each check names the next one, or refuses. The classes of the standard's responder faults (9.9.3.1): RC answers a NAK
//! and its QP goes to ERROR; UC and UD drop the message, unless the fault is the responder's own (its RECV).
use crate::keys::Reach;
use crate::limits::{ATOMIC_BYTES, LIVELY};
use crate::qp::Claim;
use crate::ud::{GRH_BYTES, QKEY_USE_OWN};
use crate::{Engine, Environment, EventTarget, Fetch, PdId, QpId, ReceiveQueueId, Syndrome};
use freeflow_verbs::{
    Access, AsyncEventKind, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Duration, Instant,
    QpState, QpType, SendOpcode,
};

/// A message as its requester announces it: what BTH, RETH, AtomicETH and DETH would carry.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    /// How the RECV that it consumes is claimed for it: `By` its requester, or `Wire`.
    pub claim: Claim,
    pub responder: QpId,
    /// XRC: number of the shared receive queue.
    pub srqn: u32,
    pub opcode: SendOpcode,
    /// Payload, bytes; of a SEND from another host as far as it has arrived. FLUSH: of the range.
    pub length: u64,
    /// What it needs of the QP and of the region.
    pub right: Access,
    /// FLUSH of all that the key names.
    pub whole: bool,
    pub remote_address: u64,
    pub rkey: u32,
    /// UD.
    pub qkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// UD: another sender's message occupies the receiver; it will be woken.
    Busy,
    /// RNR NAK: no RECV is posted.
    NotReady { queue: ReceiveQueueId, delay: Duration },
    /// NAK; the responder is in ERROR.
    Nak(Nak),
    /// UC, UD: no RECV is posted, but the receiver is at work: one may come.
    Late,
    /// UC, UD: nobody will know.
    Dropped,
}

/// NAK codes (IBTA table 46), with the syndrome that tells more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nak {
    InvalidRequest(Syndrome),
    RemoteAccess(Syndrome),
    RemoteOperational(Syndrome),
}

/// A message that has arrived whole, as its RECV tells of it.
pub(crate) struct Received {
    pub opcode: SendOpcode,
    /// UD: with the GRH.
    pub bytes: u64,
    /// Immediate data, or the key that was invalidated.
    pub argument: u32,
    pub solicited: bool,
    /// UD: the sender's.
    pub source_qpn: Option<u32>,
    /// UD: its GRH is an IPv6 header.
    pub has_ipv6_header: bool,
}

impl Received {
    pub fn completion(&self, now: Instant) -> Completion {
        let invalidates = self.opcode == SendOpcode::SendWithInvalidate;
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags = flag(self.opcode.has_immediate(), CompletionFlags::WITH_IMMEDIATE)
            | flag(invalidates, CompletionFlags::WITH_INVALIDATE)
            | flag(self.solicited, CompletionFlags::SOLICITED)
            | flag(self.source_qpn.is_some(), CompletionFlags::GRH)
            | flag(self.has_ipv6_header, CompletionFlags::IPV6_HEADER);
        Completion {
            opcode: match self.opcode.is_send() {
                true => CompletionOpcode::Receive,
                false => CompletionOpcode::ReceiveRdmaWithImmediate,
            },
            flags: CompletionFlags(flags),
            byte_count: self.bytes as u32,
            immediate: if self.opcode.has_immediate() || invalidates { self.argument } else { 0 },
            source_qpn: self.source_qpn.unwrap_or(0),
            timestamp_ns: now.0,
            ..Completion::default()
        }
    }
}

enum Check {
    Operation,
    Key,
    Resource,
    Room,
    Scatter,
    Admitted,
}

impl Engine {
    /// Asks the responder to take a message. After `Ok` the RECV it consumes, if any, is claimed for the requester.
    pub(crate) fn admit<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<(), Refused> {
        let mut check = Check::Operation;
        loop {
            check = match check {
                Check::Operation => self.check_operation(env, now, arrival)?,
                Check::Key => self.check_remote_key(env, arrival)?,
                Check::Resource => self.check_resource(env, now, arrival)?,
                Check::Room => self.check_room(env, now, arrival)?,
                Check::Scatter => self.check_scatter(env, now, arrival)?,
                Check::Admitted => return Ok(()),
            }
        }
    }

    /// Does the QP allow this kind of message at all (IBTA 9.7.4.1.2 … 9.7.4.1.5)?
    fn check_operation<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<Check, Refused> {
        self.note_arrival(env, arrival.responder);
        if self.qp(arrival.responder).service == QpType::XrcReceive {
            self.name_queue(env, now, arrival)?;
        }
        let (qp, opcode) = (self.qp(arrival.responder), arrival.opcode);
        if qp.service == QpType::Ud && arrival.qkey != qp.attributes.qkey {
            return Err(Refused::Dropped);
        }
        if !opcode.is_send() && !qp.attributes.access.contains(arrival.right) {
            let nak = Nak::InvalidRequest(Syndrome::RemoteOperationForbidden);
            return Err(self.refuse(env, arrival.responder, nak));
        }
        if needs_depth(opcode) && qp.attributes.max_dest_rd_atomic == 0 {
            let nak = Nak::InvalidRequest(Syndrome::RemoteNoReadDepth);
            return Err(self.refuse(env, arrival.responder, nak));
        }
        if is_atomic_access(opcode) && !arrival.remote_address.is_multiple_of(ATOMIC_BYTES) {
            let nak = Nak::InvalidRequest(Syndrome::RemoteMisaligned);
            return Err(self.refuse(env, arrival.responder, nak));
        }
        // A message without bytes names no memory (IBTA 9.7.4.1.6).
        Ok(if opcode.is_send() || (arrival.length == 0 && opcode != SendOpcode::Flush) {
            after_key(opcode)
        } else {
            Check::Key
        })
    }

    fn check_remote_key<E: Environment>(&mut self, env: &mut E, arrival: &Arrival) -> Result<Check, Refused> {
        let reach = self.reach(arrival.responder);
        let (key, right) = (arrival.rkey, arrival.right);
        let span = match arrival.whole {
            true => self.keys.check_remote_rights(key, reach, right).map(|()| None),
            false => {
                let length = arrival.length as u32;
                self.keys.resolve_remote(key, reach, arrival.remote_address, length, right).map(Some)
            }
        };
        match span {
            Err(_) => {
                self.note_wrong_key(env, arrival.responder, key);
                Err(self.refuse(env, arrival.responder, Nak::RemoteAccess(Syndrome::RemoteKey)))
            }
            Ok(Some(span)) if is_atomic_access(arrival.opcode) && !span.address.is_multiple_of(ATOMIC_BYTES) => {
                Err(self.refuse(env, arrival.responder, Nak::InvalidRequest(Syndrome::RemoteMisaligned)))
            }
            Ok(_) => Ok(after_key(arrival.opcode)),
        }
    }

    /// Takes the RECV that the message consumes.
    fn check_resource<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<Check, Refused> {
        let next = if arrival.opcode.is_send() { Check::Room } else { Check::Admitted };
        let responder = arrival.responder;
        match self.qp(responder).receive.claim {
            claim if claim == arrival.claim => return Ok(next),
            Claim::By(_) | Claim::Wire => return Err(Refused::Busy),
            Claim::Held => {}
            Claim::None => self.take_receive(env, now, responder)?,
        }
        self.qp_mut(responder).receive.claim = arrival.claim;
        Ok(next)
    }

    fn take_receive<E: Environment>(&mut self, env: &mut E, now: Instant, responder: QpId) -> Result<(), Refused> {
        let queue = self.receive_queue(responder);
        loop {
            let qp = self.qp_mut(responder);
            let (service, code) = (qp.service, qp.attributes.min_rnr_timer);
            match env.fetch_receive(queue, &mut qp.receive.request) {
                Fetch::Ready => {
                    qp.receive.taken_at = Some(now);
                    self.check_srq_limit(env, responder);
                    return Ok(());
                }
                Fetch::Malformed => {
                    self.vnic_of(responder).counters.malformed_descriptors += 1;
                    let fault = (CompletionStatus::LocalQpOperationError, Syndrome::ReceiveMalformed);
                    self.qp_mut(responder).receive.claim = Claim::Held;
                    return Err(self.receive_fault(env, now, responder, fault));
                }
                Fetch::Empty if !service.is_reliable() => {
                    let lively = qp.receive.taken_at.is_some_and(|at| now - at < LIVELY);
                    if lively {
                        return Err(Refused::Late);
                    }
                    self.vnic_of(responder).counters.receives_missing += 1;
                    return Err(Refused::Dropped);
                }
                Fetch::Empty if !self.is_wanted(queue) => self.set_wanted(env, queue, true),
                Fetch::Empty => return Err(Refused::NotReady { queue, delay: crate::timers::rnr_delay(code) }),
            }
        }
    }

    /// Is the RECV long enough (IBTA 9.7.4.1.7)?
    fn check_room<E: Environment>(&mut self, env: &mut E, now: Instant, arrival: &Arrival) -> Result<Check, Refused> {
        let responder = arrival.responder;
        let qp = self.qp_mut(responder);
        if receive_bytes(qp.service, arrival.length) <= qp.receive.request.capacity_bytes() {
            return Ok(Check::Scatter);
        }
        match (qp.service.is_reliable(), qp.srq) {
            (true, _) => {
                let fault = (CompletionStatus::LocalLengthError, Syndrome::ReceiveTooShort);
                self.fail_receive(env, now, responder, fault);
                self.enter_error(env, responder);
                Err(Refused::Nak(Nak::InvalidRequest(Syndrome::ReceiveTooShort)))
            }
            // Class E: an SRQ's RECV can't be put back.
            (false, Some(_)) => {
                let fault = (CompletionStatus::RemoteInvalidRequest, Syndrome::ReceiveTooShort);
                self.fail_receive(env, now, responder, fault);
                Err(Refused::Dropped)
            }
            // Class D: as if the message had never come.
            (false, None) => {
                qp.receive.claim = Claim::Held;
                self.wake_waiters(responder);
                Err(Refused::Dropped)
            }
        }
    }

    /// Are the RECV's own keys good, as far as the message reaches?
    fn check_scatter<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<Check, Refused> {
        let pd = self.receive_pd(arrival.responder);
        let qp = self.qp(arrival.responder);
        let bytes = receive_bytes(qp.service, arrival.length);
        match self.keys.check(qp.receive.request.sges(), pd, bytes, Access::LOCAL_WRITE) {
            Ok(()) => Ok(Check::Admitted),
            Err(_) => {
                let fault = (CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
                Err(self.receive_fault(env, now, arrival.responder, fault))
            }
        }
    }

    /// The RECV itself is at fault (class A): it completes with the error, the QP goes to ERROR.
    pub(crate) fn receive_fault<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        responder: QpId,
        fault: (CompletionStatus, Syndrome),
    ) -> Refused {
        self.fail_receive(env, now, responder, fault);
        self.enter_error(env, responder);
        if self.qp(responder).service.is_reliable() {
            Refused::Nak(Nak::RemoteOperational(fault.1))
        } else {
            Refused::Dropped
        }
    }

    /// The request is at fault (class C): RC tells both ends, UC forgets the message.
    pub(crate) fn refuse<E: Environment>(&mut self, env: &mut E, responder: QpId, nak: Nak) -> Refused {
        if !self.qp(responder).service.is_reliable() {
            return Refused::Dropped;
        }
        let event = match nak {
            Nak::InvalidRequest(_) => AsyncEventKind::QpRequestError,
            Nak::RemoteAccess(_) => AsyncEventKind::QpAccessError,
            Nak::RemoteOperational(_) => AsyncEventKind::QpFatal,
        };
        if matches!(nak, Nak::RemoteAccess(_)) {
            self.vnic_of(responder).counters.remote_access_errors += 1;
        }
        if self.qp(responder).state() != QpState::Error {
            env.raise(event, EventTarget::Qp(responder));
        }
        self.enter_error(env, responder);
        Refused::Nak(nak)
    }

    /// COMM_EST: the first message for a connected QP in RTR (IBTA 11.6.3.1).
    fn note_arrival<E: Environment>(&mut self, env: &mut E, responder: QpId) {
        let qp = self.qp_mut(responder);
        if qp.state() == QpState::ReadyToReceive && qp.is_connected_service() && !qp.receive.established {
            qp.receive.established = true;
            env.raise(AsyncEventKind::CommunicationEstablished, EventTarget::Qp(responder));
        }
    }

    /// SRQ_LIMIT_REACHED, once for each arming (IBTA 10.2.9.2).
    fn check_srq_limit<E: Environment>(&mut self, env: &mut E, responder: QpId) {
        let Some(id) = self.qp(responder).srq else { return };
        let srq = self.srqs.get_mut(id).expect("an SRQ outlives its QPs");
        if srq.attributes.limit > 0 && env.srq_pending(id) < srq.attributes.limit {
            srq.attributes.limit = 0;
            env.raise(AsyncEventKind::SrqLimitReached, EventTarget::Srq(id));
        }
    }

    pub(crate) fn receive_queue(&self, id: QpId) -> ReceiveQueueId {
        self.qp(id).srq.map_or(ReceiveQueueId::Qp(id), ReceiveQueueId::Srq)
    }

    /// The protection domain of a QP's RECVs.
    pub(crate) fn receive_pd(&self, id: QpId) -> PdId {
        let qp = self.qp(id);
        let own = || qp.pd.expect("a QP with its own RECVs has a PD");
        qp.srq.and_then(|srq| self.srqs.get(srq)).map_or_else(own, |srq| srq.pd)
    }

    /// What rkeys that arrive at a QP are checked against: its PD, or (XRC) that of the SRQ which the message names.
    pub(crate) fn reach(&self, responder: QpId) -> Reach {
        let pd = self.qp(responder).pd.unwrap_or_else(|| self.receive_pd(responder));
        Reach { pd, responder }
    }
}

/// Bytes of a RECV that a message fills.
pub(crate) fn receive_bytes(service: QpType, length: u64) -> u64 {
    if service == QpType::Ud { length + GRH_BYTES as u64 } else { length }
}

/// The Q_Key that a UD request carries.
pub(crate) fn effective_qkey(posted: u32, own: u32) -> u32 {
    if posted & QKEY_USE_OWN != 0 { own } else { posted }
}

/// The right that an operation needs, of the QP and of the region.
pub(crate) fn remote_right(opcode: SendOpcode) -> Access {
    match opcode {
        SendOpcode::RdmaWrite | SendOpcode::RdmaWriteWithImmediate | SendOpcode::AtomicWrite => Access::REMOTE_WRITE,
        SendOpcode::RdmaRead => Access::REMOTE_READ,
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => Access::REMOTE_ATOMIC,
        SendOpcode::Flush => Access::FLUSH_GLOBAL,
        SendOpcode::Send | SendOpcode::SendWithImmediate | SendOpcode::SendWithInvalidate => Access(0),
        SendOpcode::BindWindow | SendOpcode::LocalInvalidate => Access(0),
    }
}

/// Whether it takes one of the responder's `max_dest_rd_atomic` places (IBTA 9.7.8.1, annex A19).
pub(crate) fn needs_depth(opcode: SendOpcode) -> bool {
    opcode.is_atomic() || matches!(opcode, SendOpcode::RdmaRead | SendOpcode::AtomicWrite | SendOpcode::Flush)
}

/// Whether it touches eight aligned bytes at once.
fn is_atomic_access(opcode: SendOpcode) -> bool {
    opcode.is_atomic() || opcode == SendOpcode::AtomicWrite
}

fn after_key(opcode: SendOpcode) -> Check {
    if opcode.consumes_receive() { Check::Resource } else { Check::Admitted }
}
