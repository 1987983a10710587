//! Local delivery: the requester's message goes to its responder without packets, chunk by chunk.
//!
//! Invariant: every chunk finds its responder and its keys again, so that a message stops as soon as
//! a key is invalid or one end is gone; bytes move in ascending order; the RECV completes after the
//! last byte, the request after the RECV.
use crate::arrival::{Nak, Received, Rejection, receive_bytes, remote_right};
use crate::fault::Fault;
use crate::in_flight::{InFlightId, InFlightKind};
use crate::keys::Part;
use crate::limits::ATOMIC_BYTES;
use crate::qp::{Claim, QueuePair, SendPhase, Teardown};
use crate::requester::Requester;
use crate::responder::routing::answers;
use crate::turn::{Budget, Turn, local_right};
use crate::{
    AtomicOutcome, CopyOutcome, Environment, GRH_BYTES, MemorySide, Progress, QpId, Source, SourceBody, Syndrome, ud,
};
use freeflow_verbs::{
    Access, AtomicOperation, Completion, CompletionStatus, Instant, QpState, QpType, SendFlags, SendOpcode, SendRequest,
};

/// The side with the key that refuses a chunk.
#[derive(Clone, Copy)]
enum ChunkFault {
    Local,
    Remote,
    Receive,
}

impl Requester {
    /// Whether the responder of the message in hand is still the one that admitted it.
    fn still_there(&self, id: QpId, responder: QpId) -> bool {
        let (qp, Some(peer)) = (self.qp(id), self.responder.completer.qps.get(responder)) else { return false };
        let claimed = !qp.send.request.opcode.consumes_receive() || peer.receive.claim == Claim::By(id);
        let path = !qp.is_connected_service()
            || (qp.reached == peer.network
                && qp.remote_gid() == Some(peer.gid())
                && qp.attributes.dest_qpn == peer.qpn.0
                && answers(qp, peer));
        peer.receives() && claimed && path && self.responder.completer.queue_is_there(peer)
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
                self.responder.completer.submit(id, Some(responder), InFlightKind::Chunk { bytes });
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
        self.responder.completer.note_used(id, bytes);
        if reads {
            self.note_read(id, responder, bytes);
        }
    }

    /// Fills the lists `from` and `to` with the next bytes of the message.
    fn gather_chunk(&mut self, id: QpId, responder: QpId, bytes: u64) -> Result<(), ChunkFault> {
        self.responder.completer.from.clear();
        self.responder.completer.to.clear();
        let (qp, peer) = (
            self.responder.completer.qps.get(id).expect("the requester exists"),
            self.responder.completer.qps.get(responder).expect("the responder exists"),
        );
        let (request, offset) = (&*qp.send.request, qp.send.moved);
        let (reads, prefix) = (request.opcode == SendOpcode::RdmaRead, receive_bytes(qp.service, 0));
        let local = if reads { &mut self.responder.completer.to } else { &mut self.responder.completer.from };
        if !request.is_inline() {
            let part = Part { pd: qp.sender_pd(), offset, bytes };
            let gathered =
                self.responder.completer.keys.gather(request.sges(), part, local_right(request.opcode), local);
            gathered.map_err(|_| ChunkFault::Local)?;
        }
        if request.opcode.is_send() {
            let part = Part { pd: self.responder.receive_pd(responder), offset, bytes: bytes + prefix };
            let gathered = self.responder.completer.keys.gather(
                peer.receive.request.sges(),
                part,
                Access::LOCAL_WRITE,
                &mut self.responder.completer.to,
            );
            return gathered.map_err(|_| ChunkFault::Receive);
        }
        let right = remote_right(request.opcode);
        let address = request.remote_address.wrapping_add(offset);
        let reach = self.responder.reach(responder);
        let span = self.responder.completer.keys.resolve_remote(request.rkey, reach, address, bytes as u32, right);
        let remote = if reads { &mut self.responder.completer.from } else { &mut self.responder.completer.to };
        remote.push(span.map_err(|_| ChunkFault::Remote)?);
        Ok(())
    }

    fn copy_chunk<E: Environment>(&mut self, env: &mut E, id: QpId, bytes: u64) -> CopyOutcome {
        let token = self.responder.completer.next_token();
        let qp = self.qp(id);
        let send = &qp.send;
        let prefix: &[u8] = if qp.service == QpType::Ud { &send.grh[..GRH_BYTES] } else { &[] };
        let body = if send.request.is_inline() {
            let start = (send.moved as usize).min(send.request.inline_data.len());
            let end = (start + bytes as usize).min(send.request.inline_data.len());
            SourceBody::Bytes(&send.request.inline_data[start..end])
        } else {
            SourceBody::Spans(&self.responder.completer.from)
        };
        let last = send.moved + bytes == send.length;
        env.copy(token, Source { prefix, body }, &self.responder.completer.to, last)
    }

    pub(crate) fn chunk_done<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        responder: QpId,
        bytes: u64,
    ) {
        let send = &mut self.qp_mut(id).send;
        send.moved += bytes;
        debug_assert!(send.moved <= send.length, "no chunk reaches beyond its message");
        if send.moved == send.length {
            self.finish(env, now, id, responder);
        }
    }

    /// All bytes are there: first the RECV completes, then the request.
    pub(crate) fn finish<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId) {
        self.responder.completer.count_received(id, responder);
        let request = &self.qp(id).send.request;
        let (opcode, key) = (request.opcode, request.immediate);
        if opcode == SendOpcode::SendWithInvalidate
            && self.responder.completer.invalidate_remotely(env, responder, key).is_err()
        {
            self.responder.completer.invalidation_failed(env, now, responder);
        } else if opcode.consumes_receive() {
            let completion = received(self.qp(id), now);
            self.responder.completer.complete_receive(env, responder, completion);
        }
        self.responder.completer.succeed_send(env, now, id);
    }

    // ---- what goes wrong on the way

    /// The responder went away before it could acknowledge.
    fn lost<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        self.responder.completer.release_claim(env, id);
        if let Some(responder) = self.qp_mut(id).send.responder.take()
            && self.responder.find_responder(id) == Some(responder)
            && !self.responder.completer.queue_is_there(self.qp(responder))
        {
            // The SRQ was destroyed under the message: the rest of it names one that does not
            // exist.
            let refused = self.responder.refuse(env, responder, Nak::InvalidRequest(Syndrome::SharedQueue));
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
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalKey);
                return self.responder.completer.fail_send(env, now, id, fault);
            }
            ChunkFault::Remote => self.responder.refuse(env, responder, Nak::RemoteAccess(Syndrome::RemoteKey)),
            ChunkFault::Receive => {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
                self.responder.receive_fault(env, now, responder, fault)
            }
        };
        self.conclude(env, now, id, refused);
    }

    /// The bytes of a good key could not be reached.
    pub(crate) fn copy_failed<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        responder: QpId,
        side: MemorySide,
    ) {
        let opcode = self.qp(id).send.request.opcode;
        let remote_side = if opcode == SendOpcode::RdmaRead { MemorySide::Source } else { MemorySide::Destination };
        if side != remote_side {
            let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone);
            return self.responder.completer.fail_send(env, now, id, fault);
        }
        let refused = if opcode.is_send() {
            let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
            self.responder.receive_fault(env, now, responder, fault)
        } else {
            self.responder.refuse(env, responder, Nak::RemoteOperational(Syndrome::RemoteMemoryGone))
        };
        self.conclude(env, now, id, refused);
    }

    /// The requester's end of a message that its responder gave up.
    fn conclude<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, refused: Rejection) {
        match refused {
            Rejection::Nak(nak) => self.responder.completer.fail_send(env, now, id, nak.fault()),
            Rejection::Dropped
            | Rejection::Late
            | Rejection::Busy
            | Rejection::Postponed
            | Rejection::NotReady { .. } => self.lose(env, now, id),
        }
    }

    // ---- atomics

    fn perform_atomic<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId) -> Turn {
        let request = &self.qp(id).send.request;
        let (operation, rkey, address) = (operation_of(request), request.rkey, request.remote_address);
        let reach = self.responder.reach(responder);
        let right = Access::REMOTE_ATOMIC;
        let Ok(at) = self.responder.completer.keys.resolve_remote(rkey, reach, address, ATOMIC_BYTES as u32, right)
        else {
            self.chunk_refused(env, now, id, responder, ChunkFault::Remote);
            return Turn::Continue;
        };
        match env.atomic(self.responder.completer.next_token(), at, operation) {
            AtomicOutcome::Done(value) => {
                self.atomic_went(id, responder);
                self.responder.completer.count_received(id, responder);
                self.qp_mut(id).send.phase = SendPhase::Original(value);
                Turn::Continue
            }
            AtomicOutcome::Pending => {
                self.atomic_went(id, responder);
                self.responder.completer.note_atomic_span(at);
                self.responder.completer.submit(id, Some(responder), InFlightKind::Atomic);
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
        self.responder.completer.note_used(id, ATOMIC_BYTES);
        self.note_read(id, responder, ATOMIC_BYTES);
    }

    pub(crate) fn atomic_failed<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, responder: QpId) {
        let refused = self.responder.refuse(env, responder, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
        self.conclude(env, now, id, refused);
    }

    /// Brings the value that an atomic found to the requester's memory.
    pub(crate) fn write_original<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, value: u64) -> Turn {
        self.responder.completer.from.clear();
        self.responder.completer.to.clear();
        let qp = self.responder.completer.qps.get(id).expect("the requester exists");
        let part = Part { pd: qp.sender_pd(), offset: 0, bytes: ATOMIC_BYTES };
        if self
            .responder
            .completer
            .keys
            .gather(qp.send.request.sges(), part, Access::LOCAL_WRITE, &mut self.responder.completer.to)
            .is_err()
        {
            self.responder.completer.fail_send(
                env,
                now,
                id,
                Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalKey),
            );
            return Turn::Continue;
        }
        let bytes = value.to_ne_bytes();
        let from = Source { prefix: &[], body: SourceBody::Bytes(&bytes) };
        match env.copy(self.responder.completer.next_token(), from, &self.responder.completer.to, true) {
            CopyOutcome::Done => {
                self.responder.completer.succeed_send(env, now, id);
                Turn::Continue
            }
            CopyOutcome::Pending => {
                self.responder.completer.submit(id, None, InFlightKind::AtomicResult);
                self.qp_mut(id).send.phase = SendPhase::InFlight;
                Turn::Stop(Progress::Waiting)
            }
            CopyOutcome::Fault(_) => {
                self.responder.completer.fail_send(
                    env,
                    now,
                    id,
                    Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone),
                );
                Turn::Continue
            }
        }
    }

    /// Completes an operation. Gives the requester if its message goes on; if one of the ends has
    /// stopped meanwhile, sees to what that means.
    pub(crate) fn finish_in_flight<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: InFlightId,
    ) -> Option<(QpId, Option<QpId>)> {
        let operation = self.responder.completer.complete_in_flight(id)?;
        let (requester, responder) = (operation.requester, operation.responder);
        let is_orphan = self.responder.completer.qps.get(requester).is_none();
        if let Some(responder) = responder
            && let Some(peer) = self.responder.completer.qps.get(responder)
        {
            if peer.state() == QpState::Error {
                self.push_ready(responder);
            }
            if is_orphan {
                self.responder.completer.release_claim_of(env, responder, requester);
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
}

fn operation_of(request: &SendRequest) -> AtomicOperation {
    if request.opcode == SendOpcode::CompareSwap {
        AtomicOperation::CompareSwap { compare: request.compare_add, swap: request.swap }
    } else {
        AtomicOperation::FetchAdd { add: request.compare_add }
    }
}

/// The completion of the RECV that this requester's message consumed.
pub(crate) fn received(qp: &QueuePair, now: Instant) -> Completion {
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
