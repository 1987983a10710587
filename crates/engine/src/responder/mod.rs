//! The responder: whether a message that arrives may be executed, as a pipeline of small checks
//! (IBTA 9.7.4, 9.9.3).
//!
//! Each check names the next one, or refuses. The classes of the standard's responder faults
//! (9.9.3.1): RC answers a NAK and its QP goes to ERROR; UC and UD drop the message, unless the
//! fault is the responder's own (its RECV).
mod answers;
mod authorization;
mod carrier;
mod datagrams;
mod duplicates;
mod gates;
mod kept;
mod packets;
mod paths;
mod records;
pub(crate) mod routing;
mod unreliable;
mod violations;
mod waits;
mod xrc;

use crate::arrival::{Arrival, Nak, Rejection, needs_depth, receive_bytes};
use crate::completer::Completer;
use crate::fault::Fault;
use crate::keys::Reach;
use crate::limits::{ATOMIC_BYTES, RECENTLY_ACTIVE};
use crate::objects::{Session, Vnic};
use crate::policy::PolicyReview;
use crate::qp::{Claim, QueuePair};
use crate::schedule::{Schedule, Scheduler};
use crate::slab::Slab;
use crate::table::NumberTable;
use crate::transport::peers::Peers;
use crate::transport::wire::Wire;
use crate::xrc::Xrc;
use crate::{Drops, Environment, EventTarget, Fetch, PdId, QpId, ReceiveQueueId, SessionId, Syndrome, VnicId};
use alloc::collections::VecDeque;
use freeflow_verbs::{
    Access, AsyncEventKind, CompletionStatus, Instant, QpState, QpType, SendOpcode, Shard, VerbsError,
};

/// It owns what says whether a message may be executed, and what it owes for those that were.
pub(crate) struct Responder {
    pub completer: Completer,
    pub sessions: Slab<SessionId, Session>,
    pub xrc: Xrc,
    /// QPN to slab index.
    pub qpns: NumberTable,
    pub policy: PolicyReview,
    pub schedule: Schedule,
    pub peers: Peers,
    /// QPs that owe an acknowledgement.
    pub acks_owed: VecDeque<QpId>,
    /// QPs whose acknowledgement waits for the program's answer, by the end of the wait; some have sent it since.
    pub acks_waiting: VecDeque<(Instant, QpId)>,
    pub drops: Drops,
}

impl Responder {
    pub fn new(shard: Shard) -> Self {
        Self {
            completer: Completer::new(shard),
            sessions: Slab::new(shard),
            xrc: Xrc::new(shard),
            qpns: NumberTable::new(),
            policy: PolicyReview::default(),
            schedule: Schedule::default(),
            peers: Peers::default(),
            acks_owed: VecDeque::new(),
            acks_waiting: VecDeque::new(),
            drops: Drops::default(),
        }
    }

    /// A QP that our own bookkeeping says exists.
    #[inline]
    pub fn qp(&self, id: QpId) -> &QueuePair {
        self.completer.qp(id)
    }

    #[inline]
    pub fn qp_mut(&mut self, id: QpId) -> &mut QueuePair {
        self.completer.qp_mut(id)
    }

    #[inline]
    pub fn vnic_of(&mut self, id: QpId) -> &mut Vnic {
        self.completer.vnic_of(id)
    }

    #[inline]
    pub fn wire(&self, id: QpId) -> &Wire {
        self.completer.wire(id)
    }

    #[inline]
    pub fn wire_mut(&mut self, id: QpId) -> &mut Wire {
        self.completer.wire_mut(id)
    }

    #[inline]
    pub fn push_ready(&mut self, id: QpId) {
        self.completer.push_ready(id);
    }
}

pub(crate) enum Check {
    Operation,
    Key,
    Resource,
    Room,
    Scatter,
    Admitted,
}

impl Responder {
    // ---- accounts

    pub(crate) fn session_vnic(&self, session: SessionId) -> Result<VnicId, VerbsError> {
        self.sessions.get(session).map(|session| session.vnic).ok_or(VerbsError::NotFound)
    }

    /// Asks the responder to take a message. After `Ok` the RECV it consumes, if any, is claimed
    /// for the requester.
    pub(crate) fn admit<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<(), Rejection> {
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
    ) -> Result<Check, Rejection> {
        self.note_arrival(env, arrival.responder);
        if self.qp(arrival.responder).service == QpType::XrcReceive {
            self.name_queue(env, now, arrival)?;
        }
        let (qp, opcode) = (self.qp(arrival.responder), arrival.opcode);
        if qp.service == QpType::Ud && arrival.qkey != qp.attributes.qkey {
            return Err(Rejection::Dropped);
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

    fn check_remote_key<E: Environment>(&mut self, env: &mut E, arrival: &Arrival) -> Result<Check, Rejection> {
        let reach = self.reach(arrival.responder);
        let (key, right) = (arrival.rkey, arrival.right);
        let span = match arrival.whole {
            true => self.completer.keys.check_remote_rights(key, reach, right).map(|()| None),
            false => {
                let length = arrival.length as u32;
                self.completer.keys.resolve_remote(key, reach, arrival.remote_address, length, right).map(Some)
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
    ) -> Result<Check, Rejection> {
        let next = if arrival.opcode.is_send() { Check::Room } else { Check::Admitted };
        let responder = arrival.responder;
        match self.qp(responder).receive.claim {
            claim if claim == arrival.claim => return Ok(next),
            Claim::By(_) | Claim::Wire => return Err(Rejection::Busy),
            Claim::Held => {}
            Claim::None => self.take_receive(env, now, responder)?,
        }
        self.qp_mut(responder).receive.claim = arrival.claim;
        Ok(next)
    }

    fn take_receive<E: Environment>(&mut self, env: &mut E, now: Instant, responder: QpId) -> Result<(), Rejection> {
        let queue = self.receive_queue(responder);
        loop {
            let qp = self.qp_mut(responder);
            let (service, code) = (qp.service, qp.attributes.min_rnr_timer);
            match env.fetch_receive(responder, queue, &mut qp.receive.request) {
                Fetch::Ready => {
                    qp.receive.taken_at = Some(now);
                    self.check_srq_limit(env, responder);
                    return Ok(());
                }
                Fetch::Later => return Err(Rejection::Postponed),
                Fetch::Malformed => {
                    self.vnic_of(responder).counters.malformed_descriptors += 1;
                    let fault = Fault::new(CompletionStatus::LocalQpOperationError, Syndrome::ReceiveMalformed);
                    self.qp_mut(responder).receive.claim = Claim::Held;
                    return Err(self.receive_fault(env, now, responder, fault));
                }
                Fetch::Empty if !service.is_reliable() => {
                    if env.receives_were_taken(queue) {
                        qp.receive.taken_at = Some(now);
                    }
                    let recently_active = qp.receive.taken_at.is_some_and(|at| now - at < RECENTLY_ACTIVE);
                    if recently_active {
                        return Err(Rejection::Late);
                    }
                    self.vnic_of(responder).counters.receives_missing += 1;
                    return Err(Rejection::Dropped);
                }
                Fetch::Empty if !self.completer.is_wanted(queue) => self.completer.set_wanted(env, queue, true),
                Fetch::Empty => return Err(Rejection::NotReady { queue, delay: crate::timers::rnr_delay(code) }),
            }
        }
    }

    /// Is the RECV long enough (IBTA 9.7.4.1.7)?
    pub(crate) fn check_room<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<Check, Rejection> {
        let responder = arrival.responder;
        let qp = self.qp_mut(responder);
        if receive_bytes(qp.service, arrival.length) <= qp.receive.request.capacity_bytes() {
            return Ok(Check::Scatter);
        }
        match (qp.service.is_reliable(), qp.srq) {
            (true, _) => {
                let fault = Fault::new(CompletionStatus::LocalLengthError, Syndrome::ReceiveTooShort);
                self.completer.fail_receive(env, now, responder, fault);
                self.completer.enter_error(env, responder);
                Err(Rejection::Nak(Nak::InvalidRequest(Syndrome::ReceiveTooShort)))
            }
            // Class E: an SRQ's RECV can't be put back.
            (false, Some(_)) => {
                let fault = Fault::new(CompletionStatus::RemoteInvalidRequest, Syndrome::ReceiveTooShort);
                self.completer.fail_receive(env, now, responder, fault);
                Err(Rejection::Dropped)
            }
            // Class D: as if the message had never come.
            (false, None) => {
                self.completer.keep_receive(env, responder);
                self.completer.wake_waiters(responder);
                Err(Rejection::Dropped)
            }
        }
    }

    /// Are the RECV's own keys good, as far as the message reaches?
    fn check_scatter<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<Check, Rejection> {
        let pd = self.receive_pd(arrival.responder);
        let qp = self.qp(arrival.responder);
        let bytes = receive_bytes(qp.service, arrival.length);
        match self.completer.keys.check(qp.receive.request.sges(), pd, bytes, Access::LOCAL_WRITE) {
            Ok(()) => Ok(Check::Admitted),
            Err(_) => {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
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
        fault: Fault,
    ) -> Rejection {
        self.completer.fail_receive(env, now, responder, fault);
        self.completer.enter_error(env, responder);
        if self.qp(responder).service.is_reliable() {
            Rejection::Nak(Nak::RemoteOperational(fault.syndrome))
        } else {
            Rejection::Dropped
        }
    }

    /// The request is at fault (class C): RC fails at both ends, UC drops the message.
    pub(crate) fn refuse<E: Environment>(&mut self, env: &mut E, responder: QpId, nak: Nak) -> Rejection {
        if !self.qp(responder).service.is_reliable() {
            return Rejection::Dropped;
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
        self.completer.enter_error(env, responder);
        Rejection::Nak(nak)
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
        self.completer.check_srq_limit(env, id);
    }

    pub(crate) fn receive_queue(&self, id: QpId) -> ReceiveQueueId {
        self.qp(id).srq.map_or(ReceiveQueueId::Qp(id), ReceiveQueueId::Srq)
    }

    /// The protection domain of a QP's RECVs.
    pub(crate) fn receive_pd(&self, id: QpId) -> PdId {
        let qp = self.qp(id);
        let own = || qp.pd.expect("a QP with its own RECVs has a PD");
        qp.srq.and_then(|srq| self.completer.srqs.get(srq)).map_or_else(own, |srq| srq.pd)
    }

    /// Scope in which rkeys that arrive at a QP are checked: its PD, or (XRC) that of the SRQ which
    /// the message names.
    pub(crate) fn reach(&self, responder: QpId) -> Reach {
        let pd = self.qp(responder).pd.unwrap_or_else(|| self.receive_pd(responder));
        Reach { pd, responder }
    }

    /// Whether READ responses may go out while a datagram is handled: those of a metered vNIC wait
    /// for the QP's run.
    #[inline]
    pub(crate) fn may_answer(&self, id: QpId) -> bool {
        !self.schedule.is_metered(self.qp(id).vnic)
    }

    pub(crate) fn wake_eligible(&mut self) {
        while let Some(id) = self.schedule.poll_eligible() {
            if self.completer.qps.get(id).is_some() {
                self.push_ready(id);
            }
        }
    }
}

/// Whether it touches eight aligned bytes at once.
fn is_atomic_access(opcode: SendOpcode) -> bool {
    opcode.is_atomic() || opcode == SendOpcode::AtomicWrite
}

fn after_key(opcode: SendOpcode) -> Check {
    if opcode.consumes_receive() { Check::Resource } else { Check::Admitted }
}
