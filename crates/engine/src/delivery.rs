//! Local delivery: the requester's message goes to its responder without packets, chunk by chunk.
//!
//! Invariant: every chunk finds its responder and its keys anew, so that a message stops as soon as a key is
//! invalid or one end is gone; bytes move in ascending order; the RECV completes after the last byte, the request after
//! the RECV.
use crate::flight::{FlightId, FlightKind};
use crate::keys::Part;
use crate::limits::ATOMIC_BYTES;
use crate::qp::{Claim, QueuePair, SendPhase, Teardown};
use crate::requester::{Budget, Turn, local_right, nak_fault};
use crate::responder::{Nak, Received, Refused, receive_bytes, remote_right};
use crate::transport::WireFlight;
use crate::ud::{self, GRH_BYTES};
use crate::{
    AtomicOutcome, CopyOutcome, Engine, Environment, MemorySide, Progress, QpId, ReceiveQueueId, Source, SourceBody,
    Syndrome, Token,
};
use freeflow_verbs::{
    Access, AtomicOperation, Completion, CompletionStatus, Instant, QpState, QpType, Qpn, SendFlags, SendOpcode,
    SendRequest,
};

/// Whose key stands in the way of a chunk.
#[derive(Clone, Copy)]
enum ChunkFault {
    Local,
    Remote,
    Receive,
}

impl Engine {
    // ---- who answers

    /// The QP that a message of `id` arrives at, if it would be listened to: in the network that it may go to, of the same type,
    /// in a state that receives and, for a connected service, connected back.
    pub(crate) fn find_responder(&self, id: QpId) -> Option<QpId> {
        let qp = self.qp(id);
        let (network, gid, qpn) = match qp.service {
            QpType::Rc | QpType::Uc | QpType::XrcSend => (qp.reached, qp.remote_gid()?, qp.attributes.dest_qpn),
            QpType::XrcReceive => return None,
            QpType::Ud => {
                let (_, handle) = self.ahs.at(qp.send.request.address_handle)?;
                (self.datagram_network(qp, &handle.route), handle.route.dgid, qp.send.request.remote_qpn)
            }
        };
        let (responder, peer) = self.qps.at(self.qpns.get(qpn & Qpn::MASK)?)?;
        let listens =
            peer.service == qp.service.peer() && peer.network == network && peer.is_at(gid) && peer.receives();
        (listens && answers(qp, peer)).then_some(responder)
    }

    /// Whether the responder of the message in hand is still the one that admitted it.
    fn still_there(&self, id: QpId, responder: QpId) -> bool {
        let (qp, Some(peer)) = (self.qp(id), self.qps.get(responder)) else { return false };
        let claimed = !qp.send.request.opcode.consumes_receive() || peer.receive.claim == Claim::By(id);
        let path = !qp.is_connected_service()
            || (qp.reached == peer.network
                && qp.remote_gid() == Some(peer.gid())
                && qp.attributes.dest_qpn == peer.qpn.0
                && answers(qp, peer));
        peer.receives() && claimed && path && self.queue_is_there(peer)
    }

    // ---- moving

    /// Moves the next chunk of the message in hand.
    pub(crate) fn move_on<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) -> Turn {
        let responder = self.qp(id).send.responder.expect("an admitted message has a responder");
        if !self.still_there(id, responder) {
            return self.lost(env, now, id);
        }
        self.move_chunk(env, now, id, responder, budget)
    }

    /// The responder is there: it admitted the message just now, or [`Self::still_there`] says so.
    pub(crate) fn move_chunk<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        responder: QpId,
        budget: &mut Budget,
    ) -> Turn {
        let qp = self.qp(id);
        let send = &qp.send;
        let is_atomic = send.request.opcode.is_atomic();
        let bytes = (send.length - send.moved).min(budget.chunk_bytes);
        let reads = send.request.opcode == SendOpcode::RdmaRead;
        if (reads || is_atomic) && self.reads_too_much(now, id, responder) {
            return Turn::Stop(Progress::Waiting);
        }
        budget.bytes = budget.bytes.saturating_sub(bytes.max(1));
        if is_atomic {
            return self.perform_atomic(env, now, id, responder);
        }
        let qp = self.qp(id);
        let send = &qp.send;
        if send.length == 0 && qp.service != QpType::Ud {
            self.finish(env, now, id, responder);
            return Turn::Continue;
        }
        if let Err(fault) = self.gather_chunk(id, responder, bytes) {
            self.chunk_refused(env, now, id, responder, fault);
            return Turn::Continue;
        }
        match self.copy_chunk(env, id, bytes) {
            CopyOutcome::Done => {
                self.chunk_went(id, (responder, reads), bytes);
                self.chunk_done(env, now, id, responder, bytes);
                Turn::Continue
            }
            CopyOutcome::Pending => {
                self.chunk_went(id, (responder, reads), bytes);
                self.launch(id, Some(responder), FlightKind::Chunk { bytes });
                self.qp_mut(id).send.phase = SendPhase::InFlight;
                Turn::Stop(Progress::Waiting)
            }
            CopyOutcome::Fault(side) => {
                self.copy_failed(env, now, id, responder, side);
                Turn::Continue
            }
        }
    }

    /// The limits' view of a chunk: it is on its way.
    #[inline]
    fn chunk_went(&mut self, id: QpId, (responder, reads): (QpId, bool), bytes: u64) {
        self.note_used(id, bytes);
        if reads {
            self.note_read(id, responder, bytes);
        }
    }

    /// Fills `self.from` and `self.to` with the next bytes of the message.
    fn gather_chunk(&mut self, id: QpId, responder: QpId, bytes: u64) -> Result<(), ChunkFault> {
        self.from.clear();
        self.to.clear();
        let (qp, peer) =
            (self.qps.get(id).expect("the requester exists"), self.qps.get(responder).expect("the responder exists"));
        let (request, offset) = (&*qp.send.request, qp.send.moved);
        let (reads, prefix) = (request.opcode == SendOpcode::RdmaRead, receive_bytes(qp.service, 0));
        let local = if reads { &mut self.to } else { &mut self.from };
        if !request.is_inline() {
            let part = Part { pd: qp.sender_pd(), offset, bytes };
            let gathered = self.keys.gather(request.sges(), part, local_right(request.opcode), local);
            gathered.map_err(|_| ChunkFault::Local)?;
        }
        if request.opcode.is_send() {
            let part = Part { pd: self.receive_pd(responder), offset, bytes: bytes + prefix };
            let gathered = self.keys.gather(peer.receive.request.sges(), part, Access::LOCAL_WRITE, &mut self.to);
            return gathered.map_err(|_| ChunkFault::Receive);
        }
        let right = remote_right(request.opcode);
        let address = request.remote_address.wrapping_add(offset);
        let reach = self.reach(responder);
        let span = self.keys.resolve_remote(request.rkey, reach, address, bytes as u32, right);
        let remote = if reads { &mut self.from } else { &mut self.to };
        remote.push(span.map_err(|_| ChunkFault::Remote)?);
        Ok(())
    }

    fn copy_chunk<E: Environment>(&mut self, env: &mut E, id: QpId, bytes: u64) -> CopyOutcome {
        let token = self.next_token();
        let qp = self.qp(id);
        let send = &qp.send;
        let prefix: &[u8] = if qp.service == QpType::Ud { &send.grh[..GRH_BYTES] } else { &[] };
        let body = if send.request.is_inline() {
            let start = (send.moved as usize).min(send.request.inline_data.len());
            let end = (start + bytes as usize).min(send.request.inline_data.len());
            SourceBody::Bytes(&send.request.inline_data[start..end])
        } else {
            SourceBody::Spans(&self.from)
        };
        let last = send.moved + bytes == send.length;
        env.copy(token, Source { prefix, body }, &self.to, last)
    }

    fn chunk_done<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId, bytes: u64) {
        let send = &mut self.qp_mut(id).send;
        send.moved += bytes;
        if send.moved == send.length {
            self.finish(env, now, id, responder);
        }
    }

    /// All bytes are there: first the RECV completes, then the request.
    fn finish<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId) {
        self.count_received(id, responder);
        let request = &self.qp(id).send.request;
        let (opcode, key) = (request.opcode, request.immediate);
        if opcode == SendOpcode::SendWithInvalidate && self.invalidate_remotely(responder, key).is_err() {
            self.invalidation_failed(env, now, responder);
        } else if opcode.consumes_receive() {
            let completion = received(self.qp(id), now);
            self.complete_receive(env, responder, completion);
        }
        self.succeed_send(env, now, id);
    }

    // ---- what goes wrong on the way

    /// The responder went away before it could acknowledge.
    fn lost<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        self.release_claim(id);
        if let Some(responder) = self.qp_mut(id).send.responder.take()
            && self.find_responder(id) == Some(responder)
            && !self.queue_is_there(self.qp(responder))
        {
            // The SRQ was destroyed under the message: the rest of it names one that does not exist.
            let refused = self.refuse(env, responder, Nak::InvalidRequest(Syndrome::SharedQueue));
            self.conclude(env, now, id, refused);
            return Turn::Continue;
        }
        self.unanswered(env, now, id)
    }

    /// A key that was good when the message was admitted is not any more.
    fn chunk_refused<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        responder: QpId,
        fault: ChunkFault,
    ) {
        let refused = match fault {
            ChunkFault::Local => {
                let fault = (CompletionStatus::LocalProtectionError, Syndrome::LocalKey);
                return self.fail_send(env, now, id, fault);
            }
            ChunkFault::Remote => self.refuse(env, responder, Nak::RemoteAccess(Syndrome::RemoteKey)),
            ChunkFault::Receive => {
                let fault = (CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
                self.receive_fault(env, now, responder, fault)
            }
        };
        self.conclude(env, now, id, refused);
    }

    /// The bytes of a good key could not be reached.
    fn copy_failed<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId, side: MemorySide) {
        let opcode = self.qp(id).send.request.opcode;
        let remote_side = if opcode == SendOpcode::RdmaRead { MemorySide::Source } else { MemorySide::Destination };
        if side != remote_side {
            let fault = (CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone);
            return self.fail_send(env, now, id, fault);
        }
        let refused = if opcode.is_send() {
            let fault = (CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
            self.receive_fault(env, now, responder, fault)
        } else {
            self.refuse(env, responder, Nak::RemoteOperational(Syndrome::RemoteMemoryGone))
        };
        self.conclude(env, now, id, refused);
    }

    /// The requester's end of a message that its responder gave up.
    fn conclude<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, refused: Refused) {
        match refused {
            Refused::Nak(nak) => self.fail_send(env, now, id, nak_fault(nak)),
            Refused::Dropped | Refused::Late | Refused::Busy | Refused::NotReady { .. } => {
                self.succeed_send(env, now, id)
            }
        }
    }

    // ---- atomics

    fn perform_atomic<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId) -> Turn {
        let request = &self.qp(id).send.request;
        let (operation, rkey, address) = (operation_of(request), request.rkey, request.remote_address);
        let reach = self.reach(responder);
        let right = Access::REMOTE_ATOMIC;
        let Ok(at) = self.keys.resolve_remote(rkey, reach, address, ATOMIC_BYTES as u32, right) else {
            self.chunk_refused(env, now, id, responder, ChunkFault::Remote);
            return Turn::Continue;
        };
        match env.atomic(self.next_token(), at, operation) {
            AtomicOutcome::Done(value) => {
                self.atomic_went(id, responder);
                self.count_received(id, responder);
                self.qp_mut(id).send.phase = SendPhase::Original(value);
                Turn::Continue
            }
            AtomicOutcome::Pending => {
                self.atomic_went(id, responder);
                self.note_atomic_span(at);
                self.launch(id, Some(responder), FlightKind::Atomic);
                self.qp_mut(id).send.phase = SendPhase::InFlight;
                Turn::Stop(Progress::Waiting)
            }
            AtomicOutcome::Fault => {
                self.atomic_failed(env, now, id, responder);
                Turn::Continue
            }
        }
    }

    /// Charged like a READ: to who asks, and to the owner of the memory.
    fn atomic_went(&mut self, id: QpId, responder: QpId) {
        self.note_used(id, ATOMIC_BYTES);
        self.note_read(id, responder, ATOMIC_BYTES);
    }

    fn atomic_failed<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId) {
        let refused = self.refuse(env, responder, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
        self.conclude(env, now, id, refused);
    }

    /// Brings the value that an atomic found to the requester's memory.
    pub(crate) fn write_original<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, value: u64) -> Turn {
        self.from.clear();
        self.to.clear();
        let qp = self.qps.get(id).expect("the requester exists");
        let part = Part { pd: qp.sender_pd(), offset: 0, bytes: ATOMIC_BYTES };
        if self.keys.gather(qp.send.request.sges(), part, Access::LOCAL_WRITE, &mut self.to).is_err() {
            self.fail_send(env, now, id, (CompletionStatus::LocalProtectionError, Syndrome::LocalKey));
            return Turn::Continue;
        }
        let bytes = value.to_ne_bytes();
        let from = Source { prefix: &[], body: SourceBody::Bytes(&bytes) };
        match env.copy(self.next_token(), from, &self.to, true) {
            CopyOutcome::Done => {
                self.succeed_send(env, now, id);
                Turn::Continue
            }
            CopyOutcome::Pending => {
                self.launch(id, None, FlightKind::AtomicResult);
                self.qp_mut(id).send.phase = SendPhase::InFlight;
                Turn::Stop(Progress::Waiting)
            }
            CopyOutcome::Fault(_) => {
                self.fail_send(env, now, id, (CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone));
                Turn::Continue
            }
        }
    }

    // ---- results from elsewhere

    /// The result of a copy that was `Pending`. A token that is no longer awaited is ignored.
    pub fn handle_copied<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        token: Token,
        result: Result<(), MemorySide>,
    ) {
        let flight = FlightId::from_token(token);
        let kind = match self.flights.get(flight).map(|flight| flight.kind) {
            None | Some(FlightKind::Atomic) => return,
            Some(FlightKind::Wire(kind)) => return self.handle_wire_copied(env, now, flight, kind, result),
            Some(kind) => kind,
        };
        let Some((id, responder)) = self.touch_down(env, now, flight) else { return };
        match (kind, result, responder) {
            (FlightKind::Chunk { bytes }, Ok(()), Some(responder)) => self.chunk_done(env, now, id, responder, bytes),
            (FlightKind::Chunk { .. }, Err(side), Some(responder)) => self.copy_failed(env, now, id, responder, side),
            (_, Ok(()), _) => self.succeed_send(env, now, id),
            (_, Err(_), _) => {
                self.fail_send(env, now, id, (CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone));
            }
        }
    }

    /// The result of an atomic operation that was `Pending`: the value before it, or that the memory is not there.
    #[allow(clippy::result_unit_err)]
    pub fn handle_atomic_done<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        token: Token,
        result: Result<u64, ()>,
    ) {
        let flight = FlightId::from_token(token);
        match self.flights.get(flight).map(|flight| flight.kind) {
            Some(FlightKind::Atomic) => {}
            Some(FlightKind::Wire(WireFlight::Atomic)) => return self.handle_wire_atomic(env, now, flight, result),
            _ => return,
        }
        match (self.touch_down(env, now, flight), result) {
            (Some((id, responder)), Ok(value)) => {
                if let Some(responder) = responder {
                    self.count_received(id, responder);
                }
                self.qp_mut(id).send.phase = SendPhase::Original(value);
            }
            (Some((id, Some(responder))), Err(())) => self.atomic_failed(env, now, id, responder),
            _ => {}
        }
    }

    /// Takes a flight in. Gives the requester if its message goes on; if one of the ends has stopped meanwhile, sees to
    /// what that means.
    fn touch_down<E: Environment>(&mut self, env: &mut E, now: Instant, id: FlightId) -> Option<(QpId, Option<QpId>)> {
        let flight = self.land(id)?;
        let (requester, responder) = (flight.requester, flight.responder);
        let is_orphan = self.qps.get(requester).is_none();
        if let Some(responder) = responder
            && let Some(peer) = self.qps.get(responder)
        {
            if peer.state() == QpState::Error {
                self.push_ready(responder);
            }
            if is_orphan {
                self.release_claim_of(responder, requester);
            }
        }
        if is_orphan {
            return None;
        }
        self.push_ready(requester);
        let qp = self.qp_mut(requester);
        if qp.teardown != Teardown::None || qp.state() == QpState::Error {
            qp.send.phase = SendPhase::Begin;
            return None;
        }
        qp.send.phase = SendPhase::Moving;
        if let Some(responder) = responder
            && !self.still_there(requester, responder)
        {
            self.lost(env, now, requester);
            return None;
        }
        Some((requester, responder))
    }

    /// Number of copies in flight that touch this session's memory or QPs.
    pub fn copies_in_flight(&self, session: crate::SessionId) -> u32 {
        self.flights.iter().filter(|(_, flight)| self.flight_touches(flight, session)).count() as u32
    }

    // ---- waiting and waking

    /// A RECV was posted to a queue for which `want_receives` stands: flushes it (QP in error) or wakes waiting senders.
    pub fn handle_receive_posted<E: Environment>(&mut self, env: &mut E, now: Instant, queue: ReceiveQueueId) {
        match queue {
            ReceiveQueueId::Qp(id) => {
                let Some(qp) = self.qps.get(id) else { return };
                if qp.state() == QpState::Error {
                    if self.flush(env, now, id) == Progress::More {
                        self.push_ready(id);
                    }
                    return;
                }
                let sender = self.qpns.get(qp.attributes.dest_qpn).and_then(|index| self.qps.at(index));
                let sender = sender.map(|(sender, _)| sender);
                self.set_wanted(env, queue, false);
                self.wake_datagrams(id);
                if let Some(sender) = sender
                    && self.qp(sender).send.waits_for == Some(queue)
                {
                    self.stop_waiting(env, sender);
                    self.wake(sender);
                }
            }
            ReceiveQueueId::Srq(id) => {
                let Some(srq) = self.srqs.get_mut(id) else { return };
                let mut waiters = core::mem::take(&mut srq.waiters);
                self.set_wanted(env, queue, false);
                for sender in waiters.drain(..) {
                    if let Some(qp) = self.qps.get_mut(sender) {
                        if qp.send.waits_for == Some(queue) {
                            qp.send.waits_for = None;
                            self.wake(sender);
                        }
                        self.wake_datagrams(sender);
                    }
                }
                if let Some(srq) = self.srqs.get_mut(id) {
                    srq.waiters = waiters;
                }
            }
        }
    }

    /// Lets a waiting requester try again.
    pub(crate) fn wake(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id)
            && qp.send.phase == SendPhase::Waiting
        {
            qp.send.offer_again();
            self.push_ready(id);
        }
    }

    /// Lets the UD senders that found this receiver busy try again.
    pub(crate) fn wake_waiters(&mut self, id: QpId) {
        if !self.qp(id).receive.datagrams.is_empty() {
            self.push_ready(id);
        }
        let mut waiters = core::mem::take(&mut self.qp_mut(id).receive.waiters);
        for waiter in waiters.drain(..) {
            self.wake(waiter);
        }
        self.qp_mut(id).receive.waiters = waiters;
    }

    /// Notes that a sender waits for a RECV in this queue.
    pub(crate) fn wait_for(&mut self, id: QpId, queue: ReceiveQueueId) {
        self.qp_mut(id).send.waits_for = Some(queue);
        if let ReceiveQueueId::Srq(srq) = queue
            && let Some(srq) = self.srqs.get_mut(srq)
        {
            srq.waiters.push(id);
        }
    }

    /// The sender waits for no RECV any more; the last one stops the doorbell of the queue.
    #[inline]
    pub(crate) fn stop_waiting<E: Environment>(&mut self, env: &mut E, id: QpId) {
        if let Some(queue) = self.qp_mut(id).send.waits_for.take() {
            self.leave_waiters(env, id, queue);
        }
    }

    #[cold]
    fn leave_waiters<E: Environment>(&mut self, env: &mut E, id: QpId, queue: ReceiveQueueId) {
        let still_wanted = match queue {
            ReceiveQueueId::Srq(srq) => self.srqs.get_mut(srq).is_some_and(|srq| {
                srq.waiters.retain(|waiter| *waiter != id);
                !srq.waiters.is_empty()
            }),
            ReceiveQueueId::Qp(owner) => self.qps.get(owner).is_some_and(|owner| owner.state() == QpState::Error),
        };
        if !still_wanted {
            self.set_wanted(env, queue, false);
        }
    }

    pub(crate) fn is_wanted(&self, queue: ReceiveQueueId) -> bool {
        match queue {
            ReceiveQueueId::Qp(id) => self.qps.get(id).is_some_and(|qp| qp.receive.wanted),
            ReceiveQueueId::Srq(id) => self.srqs.get(id).is_some_and(|srq| srq.wanted),
        }
    }

    pub(crate) fn set_wanted<E: Environment>(&mut self, env: &mut E, queue: ReceiveQueueId, wanted: bool) {
        let told = match queue {
            ReceiveQueueId::Qp(id) => self.qps.get_mut(id).map(|qp| &mut qp.receive.wanted),
            ReceiveQueueId::Srq(id) => self.srqs.get_mut(id).map(|srq| &mut srq.wanted),
        };
        if let Some(told) = told
            && *told != wanted
        {
            *told = wanted;
            env.want_receives(queue, wanted);
        }
    }
}

/// Whether `peer` listens to `qp`: a connected QP only to the one it is connected to. A reliable one expects the PSN that
/// the other begins with, else every packet of the connection would be out of sequence (IBTA 9.7.2).
fn answers(qp: &QueuePair, peer: &QueuePair) -> bool {
    if !peer.is_connected_service() {
        return true;
    }
    let in_sequence = !qp.service.is_reliable() || peer.attributes.rq_psn == qp.attributes.sq_psn;
    let is_back = peer.reached == qp.network && peer.remote_gid() == Some(qp.gid());
    is_back && peer.attributes.dest_qpn == qp.qpn.0 && in_sequence
}

fn operation_of(request: &SendRequest) -> AtomicOperation {
    if request.opcode == SendOpcode::CompareSwap {
        AtomicOperation::CompareSwap { compare: request.compare_add, swap: request.swap }
    } else {
        AtomicOperation::FetchAdd { add: request.compare_add }
    }
}

/// The completion of the RECV that this requester's message consumed.
fn received(qp: &QueuePair, now: Instant) -> Completion {
    let request = &qp.send.request;
    let received = Received {
        opcode: request.opcode,
        bytes: receive_bytes(qp.service, qp.send.length),
        argument: request.immediate,
        solicited: request.flags.contains(SendFlags::SOLICITED),
        source_qpn: (qp.service == QpType::Ud).then_some(qp.qpn.0),
        has_ipv6_header: qp.service == QpType::Ud && ud::is_ipv6(&qp.send.grh),
    };
    received.completion(now)
}
