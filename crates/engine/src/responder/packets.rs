//! Responder of RC and XRC: the requests of the peer, packet by packet (IBTA 9.7.4, 9.7.5.1; XRC:
//! A14; FLUSH and ATOMIC WRITE: A19).
//!
//! A packet is looked at in this order: its PSN (`handle_request`; duplicates: `replay`), its place
//! in its message and its length (`check_part`), and then as a message of this host would be, by
//! [`Responder::admit`]: operation, key, RECV, room, scatter list. Its bytes are written; only when
//! they have completed it counts: the expected PSN moves on, the MSN, the RECV completes, an
//! acknowledgement is owed (`part_written`). What is owed, and how it goes out, stands in
//! `answers`.
//!
//! Invariant: everything with a PSN behind the expected one has been executed, once; nothing beyond
//! it has.
//!
//! Invariant: after a fatal NAK the QP is in ERROR; what was owed before goes out, then the NAK,
//! then nothing any more.
//!
//! Where the standard leaves a choice, or peers differ:
//! * READ responses are read from memory when they go out, so that a later WRITE may be seen by an
//!   earlier READ that is not fenced (IBTA table 79).
//! * A SEND's packets must have the lengths that the path MTU asks for, as a WRITE's (IBTA
//!   9.7.4.1.7). Linux rxe 6.1 takes other lengths of a SEND, but sends none.
//! * After an RNR NAK nothing is said about packets beyond the refused one. (rxe sends a sequence
//!   NAK too.)
//! * More READs and atomics than `max_dest_rd_atomic` are an invalid request. (rxe forgets the
//!   oldest.) FLUSH does not count: requesters don't count it either.
use crate::arrival::{Arrival, Nak, Received, Rejection, remote_right};
use crate::fault::Fault;
use crate::flush::{FlushTarget, flush_target_of};
use crate::keys::Part;
use crate::limits::ATOMIC_BYTES;
use crate::qp::Claim;
use crate::responder::Responder;
use crate::transport::answers::{Body, Reading};
use crate::transport::packets::{Packet, packets_of};
use crate::transport::parked::Run;
use crate::transport::replay::{Outcome, Replay};
use crate::transport::responder::{
    ACKNOWLEDGE_PACKETS, IncomingMessage, PendingWrite, Phase, WriteTarget, atomic_opcode, send_opcode,
};
use crate::transport::wire::WireOperation;
use crate::{AtomicOutcome, CopyOutcome, Environment, MemorySide, QpId, ReceiveQueueId, Source, SourceBody, Syndrome};
use alloc::vec::Vec;
use freeflow_verbs::{Access, AtomicOperation, CompletionStatus, Instant, MESSAGE_BYTES_MAX, QpState, SendOpcode};
use freeflow_wire::frame::is_response_length;
use freeflow_wire::{Header, MASK_24, NakCode, Operation, PacketPosition, Reth, psn_add, psn_ahead};

/// Whether a packet of so many bytes goes on where the message stands: its place asks for the path MTU, but for the
/// last one (IBTA 9.7.4.1.7), and a WRITE is as long as it was announced. A frame may be of any length, but it says
/// where it belongs, and so must every one of its message.
fn fits(message: &IncomingMessage, header: &Header, bytes: u64, mtu: u64) -> bool {
    let opcode = header.opcode;
    let has_length = match (header.frame, opcode.place()) {
        (Some(_), PacketPosition::Only) => true,
        (Some(_), _) => bytes > 0,
        (None, PacketPosition::First | PacketPosition::Middle) => bytes == mtu,
        (None, PacketPosition::Last) => (1..=mtu).contains(&bytes),
        (None, PacketPosition::Only) => bytes <= mtu,
    };
    let arrived = message.arrived + bytes;
    let is_announced = message.writes || header.frame.is_some();
    has_length
        && (header.frame.is_none() || message.is_next(&header.reth))
        && match (is_announced, opcode.ends()) {
            (false, _) => arrived <= MESSAGE_BYTES_MAX,
            (true, false) => arrived < message.length && message.length <= MESSAGE_BYTES_MAX,
            (true, true) => arrived == message.length,
        }
}

impl Responder {
    // ---- the PSN

    /// SEND, WRITE, READ request, atomic, FLUSH, ATOMIC WRITE of the peer (IBTA 9.7.4.1.1).
    pub(crate) fn handle_request<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        if packet.ip.congestion {
            self.owe_echo(id);
        }
        match psn_ahead(packet.header.psn, self.wire(id).responder.expected_psn) {
            0 => self.handle_expected(env, now, id, packet),
            1.. => self.handle_gap(env, id, packet),
            _ => self.handle_duplicate(env, id, packet),
        }
    }

    /// A packet is missing before this one.
    fn handle_gap<E: Environment>(&mut self, env: &mut E, id: QpId, packet: &Packet<'_>) {
        self.completer.tally(id, |counters| counters.out_of_sequence += 1);
        if self.keeps(id) {
            return self.keep_ahead(id, packet);
        }
        let responder = &mut self.wire_mut(id).responder;
        if responder.phase == Phase::Listening {
            responder.phase = Phase::Gap;
            let nak = freeflow_wire::Syndrome::Nak(NakCode::PsnSequence);
            responder.answers.owe_nak(responder.expected_psn, nak);
            self.answer_now(env, id);
        }
    }

    pub(crate) fn handle_expected<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let responder = &mut self.wire_mut(id).responder;
        debug_assert_eq!(packet.header.psn, responder.expected_psn, "nothing beyond the expected PSN is executed");
        responder.phase = Phase::Listening;
        if responder.answers.retract_nak() {
            // It would have acknowledged what came before.
            self.owe_ack(id, psn_add(packet.header.psn, MASK_24), false);
        }
        let interrupts = self.wire(id).responder.message.is_some();
        match packet.header.opcode.operation() {
            Operation::Send
            | Operation::SendImmediate
            | Operation::SendInvalidate
            | Operation::Write
            | Operation::WriteImmediate => self.take_part(env, now, id, packet),
            _ if interrupts => self.invalid(env, id, packet, Syndrome::PacketSequence),
            Operation::ReadRequest => self.take_read(env, now, id, packet),
            Operation::CompareSwap | Operation::FetchAdd => self.take_atomic(env, now, id, packet),
            Operation::Flush => self.take_flush(env, now, id, packet),
            Operation::AtomicWrite => self.take_atomic_write(env, now, id, packet),
            // The requester's.
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge => {}
        }
    }

    // ---- SEND and WRITE

    fn take_part<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let message = match self.check_part(id, packet) {
            Ok(message) => message,
            Err(syndrome) => return self.invalid(env, id, packet, syndrome),
        };
        if let Err(refused) = self.admit_part(env, now, id, packet, &message) {
            return self.turn_down(env, id, packet.header.psn, refused);
        }
        // Naming an SRQ may have ended what was there before, and with it the QP.
        if self.qp(id).receives() {
            self.wire_mut(id).responder.message = Some(message);
            self.write_part(env, now, id, packet, &message);
        }
    }

    /// Whether the packet goes on where the last one stopped (IBTA 9.7.4.1.2), and has the length
    /// that its place asks for (9.7.4.1.7): the path MTU, but for the last one. Gives the message
    /// as it is before this packet.
    fn check_part(&self, id: QpId, packet: &Packet<'_>) -> Result<IncomingMessage, Syndrome> {
        let (opcode, header) = (packet.header.opcode, packet.header);
        let writes = send_opcode(opcode).is_write();
        let message = match (opcode.begins(), self.wire(id).responder.message) {
            (true, None) => IncomingMessage::begin(writes, header.srqn, &header.reth),
            (false, Some(begun)) if begun.writes == writes && begun.srqn == header.srqn => begun,
            _ => return Err(Syndrome::PacketSequence),
        };
        if !opcode.begins() && !self.completer.queue_is_there(self.qp(id)) {
            return Err(Syndrome::SharedQueue);
        }
        let mtu = u64::from(self.completer.wire_mtu(id));
        if fits(&message, header, packet.payload.len() as u64, mtu) { Ok(message) } else { Err(Syndrome::PacketLength) }
    }

    /// A WRITE is admitted as a whole when it begins, and once more for its RECV when it ends with
    /// immediate data. A SEND's length shows as it comes, so it is asked of each packet whether the
    /// RECV has room for that much.
    fn admit_part<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        packet: &Packet<'_>,
        message: &IncomingMessage,
    ) -> Result<(), Rejection> {
        let opcode = send_opcode(packet.header.opcode);
        if !(packet.header.opcode.begins() || opcode.consumes_receive()) {
            return Ok(());
        }
        let arrived = message.arrived + packet.payload.len() as u64;
        let arrival = Arrival {
            claim: Claim::Wire,
            responder: id,
            srqn: message.srqn,
            opcode,
            length: if message.writes { message.length } else { arrived },
            right: remote_right(opcode),
            whole: false,
            remote_address: message.address,
            rkey: message.rkey,
            qkey: 0,
        };
        self.admit(env, now, &arrival)
    }

    /// Writes an admitted packet's bytes to where they belong; RECV and keys are looked at again.
    fn write_part<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        packet: &Packet<'_>,
        message: &IncomingMessage,
    ) {
        let mut writing = PendingWrite::new(packet);
        if writing.bytes == 0 {
            return self.part_written(env, now, id, writing);
        }
        let run = if message.writes { self.take_followers(id, &mut writing, packet, message) } else { None };
        let payload = run.as_deref().unwrap_or(packet.payload);
        let bytes = payload.len() as u64;
        self.completer.from.clear();
        self.completer.to.clear();
        let rkey = message.writes.then_some(message.rkey);
        if message.writes {
            let address = message.address.wrapping_add(message.arrived);
            let reach = self.reach(id);
            match self.completer.keys.resolve_remote(message.rkey, reach, address, bytes as u32, Access::REMOTE_WRITE) {
                Ok(span) => self.completer.to.push(span),
                Err(_) => {
                    self.completer.let_run_go(id);
                    let refused = self.refuse(env, id, Nak::RemoteAccess(Syndrome::RemoteKey));
                    return self.turn_down(env, id, writing.first_psn(), refused);
                }
            }
        } else {
            let part = Part { pd: self.receive_pd(id), offset: message.arrived, bytes };
            let request = &self.completer.qps.get(id).expect("the responder exists").receive.request;
            if self.completer.keys.gather(request.sges(), part, Access::LOCAL_WRITE, &mut self.completer.to).is_err() {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
                let refused = self.receive_fault(env, now, id, fault);
                return self.turn_down(env, id, writing.first_psn(), refused);
            }
        }
        self.write_payload(env, now, id, (writing, payload), rkey);
    }

    /// Packets of the same WRITE that waited behind this one: their bytes, with its own, are written at once.
    fn take_followers(
        &mut self,
        id: QpId,
        writing: &mut PendingWrite,
        packet: &Packet<'_>,
        message: &IncomingMessage,
    ) -> Option<Vec<u8>> {
        let (service, mtu) = (packet.header.opcode.service(), u64::from(self.completer.wire_mtu(id)));
        let mut run = Run::of(packet.payload);
        let mut message = *message;
        loop {
            message.arrived += u64::from(run.last_bytes());
            let follows = |header: &Header, bytes: u64| {
                // With immediate data it asks for a RECV, too.
                header.opcode.operation() == Operation::Write
                    && header.opcode.service() == service
                    && !header.opcode.begins()
                    && header.psn == psn_add(writing.psn, 1)
                    && header.srqn == message.srqn
                    && fits(&message, header, bytes, mtu)
            };
            let Some(header) = self.completer.take_parked(id, &mut run, follows) else { break };
            writing.extend(&header, run.last_bytes());
        }
        run.bytes()
    }

    /// Copies a packet's payload to the spans in `self.completer.to`.
    fn write_payload<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        (writing, payload): (PendingWrite, &[u8]),
        rkey: Option<u32>,
    ) {
        let source = Source { prefix: &[], body: SourceBody::Bytes(payload) };
        let outcome = env.copy(self.completer.next_token(), source, &self.completer.to, writing.opcode.ends());
        self.note_copy(env, now, id, (writing, rkey), outcome);
    }

    /// The copy to the spans in `self.completer.to` has begun: how it went.
    pub(crate) fn note_copy<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        (writing, rkey): (PendingWrite, Option<u32>),
        outcome: CopyOutcome,
    ) {
        if outcome != CopyOutcome::Pending {
            self.completer.let_run_go(id);
        }
        match outcome {
            CopyOutcome::Done => self.part_written(env, now, id, writing),
            CopyOutcome::Pending => {
                self.wire_mut(id).responder.writing = Some(writing);
                self.completer.submit_wire(id, WireOperation::Payload, rkey);
            }
            CopyOutcome::Fault(_) => self.write_failed(env, now, id, writing),
        }
    }

    pub(crate) fn payload_written<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        let Some(writing) = self.wire_mut(id).responder.writing.take() else { return };
        match result {
            Ok(()) => self.part_written(env, now, id, writing),
            Err(_) => self.write_failed(env, now, id, writing),
        }
    }

    /// The bytes of a packet are in memory.
    fn part_written<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, writing: PendingWrite) {
        if writing.opcode.operation() == Operation::AtomicWrite {
            self.completer.count_arrived(id, SendOpcode::AtomicWrite, ATOMIC_BYTES);
            return self.executed(env, id, writing.psn, 1, Body::Written);
        }
        let responder = &mut self.wire_mut(id).responder;
        responder.expected_psn = psn_add(writing.psn, 1);
        responder.unacknowledged += writing.packets;
        let due = writing.ack_request || responder.unacknowledged >= ACKNOWLEDGE_PACKETS;
        if let Some(message) = &mut responder.message {
            message.arrived += u64::from(writing.bytes);
        }
        let ended = responder.message.take_if(|_| writing.opcode.ends());
        if ended.is_some() {
            responder.complete_message();
        }
        if due {
            self.owe_ack(id, writing.psn, writing.ack_waits && writing.packets == 1);
        }
        if let Some(message) = ended {
            self.finish_message(env, now, id, writing, message.arrived);
        }
    }

    /// All bytes of a SEND or WRITE are there.
    fn finish_message<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        writing: PendingWrite,
        bytes: u64,
    ) {
        let opcode = send_opcode(writing.opcode);
        self.completer.count_arrived(id, opcode, bytes);
        if !opcode.consumes_receive() {
            return;
        }
        if opcode == SendOpcode::SendWithInvalidate
            && self.completer.invalidate_remotely(env, id, writing.argument).is_err()
        {
            self.completer.invalidation_failed(env, now, id);
        } else {
            let (argument, solicited) = (writing.argument, writing.solicited);
            let received = Received { opcode, bytes, argument, solicited, source_qpn: None, has_ipv6_header: false };
            self.completer.complete_receive(env, id, received.completion(now));
        }
        // Its completion took the QP down; the message has arrived all the same.
        if self.qp(id).state() == QpState::Error {
            self.owe_ack(id, writing.psn, false);
            self.wire_mut(id).responder.phase = Phase::Closing;
            self.answer_now(env, id);
        }
    }

    /// The bytes of a good key could not be reached.
    fn write_failed<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, writing: PendingWrite) {
        let refused = if writing.opcode.operation() != Operation::AtomicWrite && send_opcode(writing.opcode).is_send() {
            let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
            self.receive_fault(env, now, id, fault)
        } else {
            self.refuse(env, id, Nak::RemoteOperational(Syndrome::RemoteMemoryGone))
        };
        self.turn_down(env, id, writing.first_psn(), refused);
    }

    // ---- requests of one packet, which are answered

    fn take_read<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let Reth { address, rkey, length } = packet.header.reth;
        if u64::from(length) > MESSAGE_BYTES_MAX {
            return self.invalid(env, id, packet, Syndrome::PacketLength);
        }
        let target = WriteTarget { address, rkey, length, right: Access::REMOTE_READ, whole: false };
        if !self.admit_single(env, now, id, packet, SendOpcode::RdmaRead, &target) {
            return;
        }
        let Some(mtu) = self.response_bytes(id, packet.header) else {
            return self.invalid(env, id, packet, Syndrome::PacketLength);
        };
        let (psn, pd) = (packet.header.psn, self.reach(id).pd);
        let packets = packets_of(length, mtu);
        self.remember(id, Replay { psn, packets, result: Outcome::Read { address, length, rkey, pd } });
        self.completer.count_arrived(id, SendOpcode::RdmaRead, u64::from(length));
        let reading = Reading {
            address,
            left: length,
            rkey,
            pd,
            begun: false,
            fetching: None,
            mtu,
            frames: packet.header.frame.is_some(),
        };
        self.executed(env, id, psn, packets, Body::Read(reading));
    }

    /// Payload of a whole packet of a READ's response: the path MTU; of a frame what the request says. `None`: that is
    /// out of range.
    pub(crate) fn response_bytes(&self, id: QpId, request: &Header) -> Option<u32> {
        match request.frame {
            None => Some(self.completer.wire_mtu(id)),
            Some(frame) => is_response_length(frame.response_bytes).then_some(frame.response_bytes),
        }
    }

    fn take_atomic<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let (eth, opcode) = (packet.header.atomic, atomic_opcode(packet.header.opcode));
        let (address, rkey, right) = (eth.address, eth.rkey, Access::REMOTE_ATOMIC);
        let target = WriteTarget { address, rkey, length: ATOMIC_BYTES as u32, right, whole: false };
        if !self.admit_single(env, now, id, packet, opcode, &target) {
            return;
        }
        let psn = packet.header.psn;
        let Ok(at) = self.completer.keys.resolve_remote(rkey, self.reach(id), address, target.length, right) else {
            let refused = self.refuse(env, id, Nak::RemoteAccess(Syndrome::RemoteKey));
            return self.turn_down(env, id, psn, refused);
        };
        let operation = match opcode {
            SendOpcode::CompareSwap => AtomicOperation::CompareSwap { compare: eth.compare, swap: eth.swap_add },
            _ => AtomicOperation::FetchAdd { add: eth.swap_add },
        };
        match env.atomic(self.completer.next_token(), at, operation) {
            AtomicOutcome::Done(original) => self.atomic_executed(env, id, opcode, psn, original),
            AtomicOutcome::Pending => {
                self.wire_mut(id).responder.writing = Some(PendingWrite::new(packet));
                self.completer.note_atomic_span(at);
                self.completer.submit_wire(id, WireOperation::Atomic, Some(rkey));
            }
            AtomicOutcome::Fault => {
                let refused = self.refuse(env, id, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
                self.turn_down(env, id, psn, refused);
            }
        }
    }

    pub(crate) fn atomic_done<E: Environment>(
        &mut self,
        env: &mut E,
        _now: Instant,
        id: QpId,
        result: Result<u64, ()>,
    ) {
        let Some(writing) = self.wire_mut(id).responder.writing.take() else { return };
        match result {
            Ok(original) => self.atomic_executed(env, id, atomic_opcode(writing.opcode), writing.psn, original),
            Err(()) => {
                let refused = self.refuse(env, id, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
                self.turn_down(env, id, writing.psn, refused);
            }
        }
    }

    fn atomic_executed<E: Environment>(&mut self, env: &mut E, id: QpId, opcode: SendOpcode, psn: u32, original: u64) {
        self.completer.count_arrived(id, opcode, ATOMIC_BYTES);
        self.remember(id, Replay { psn, packets: 1, result: Outcome::Atomic { original } });
        self.executed(env, id, psn, 1, Body::Atomic { original });
    }

    /// Earlier writes are visible already: the check is only whether the requester may ask.
    fn take_flush<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let Reth { address, rkey, length } = packet.header.reth;
        let feth = u64::from(packet.header.flush);
        let Some(FlushTarget { right, whole }) = flush_target_of(feth & 0xf, feth >> 4 & 3) else {
            return self.invalid(env, id, packet, Syndrome::RemoteOperationForbidden);
        };
        let target = WriteTarget { address, rkey, length, right, whole };
        if self.admit_single(env, now, id, packet, SendOpcode::Flush, &target) {
            self.executed(env, id, packet.header.psn, 1, Body::Flushed);
        }
    }

    fn take_atomic_write<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let Reth { address, rkey, length } = packet.header.reth;
        if u64::from(length) != ATOMIC_BYTES || packet.payload.len() as u64 != ATOMIC_BYTES {
            return self.invalid(env, id, packet, Syndrome::PacketLength);
        }
        let target = WriteTarget { address, rkey, length, right: Access::REMOTE_WRITE, whole: false };
        if !self.admit_single(env, now, id, packet, SendOpcode::AtomicWrite, &target) {
            return;
        }
        let Ok(at) = self.completer.keys.resolve_remote(rkey, self.reach(id), address, length, target.right) else {
            let refused = self.refuse(env, id, Nak::RemoteAccess(Syndrome::RemoteKey));
            return self.turn_down(env, id, packet.header.psn, refused);
        };
        self.completer.from.clear();
        self.completer.to.clear();
        self.completer.to.push(at);
        self.write_payload(env, now, id, (PendingWrite::new(packet), packet.payload), Some(rkey));
    }

    /// Asks the pipeline; sees to the refusal.
    fn admit_single<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        packet: &Packet<'_>,
        opcode: SendOpcode,
        target: &WriteTarget,
    ) -> bool {
        let arrival = Arrival {
            claim: Claim::Wire,
            responder: id,
            srqn: packet.header.srqn,
            opcode,
            length: u64::from(target.length),
            right: target.right,
            whole: target.whole,
            remote_address: target.address,
            rkey: target.rkey,
            qkey: 0,
        };
        if let Err(refused) = self.admit(env, now, &arrival) {
            self.turn_down(env, id, packet.header.psn, refused);
            return false;
        }
        let (qp, answers) = (self.qp(id), &self.wire(id).responder.answers);
        if !qp.receives() {
            return false;
        }
        // If its requester does not listen, the packet is as good as lost.
        if opcode == SendOpcode::Flush || answers.is_full() {
            return !answers.is_full();
        }
        let has_room = answers.outstanding() < usize::from(qp.attributes.max_dest_rd_atomic);
        if !has_room {
            self.invalid(env, id, packet, Syndrome::RemoteNoReadDepth);
        }
        has_room
    }

    fn remember(&mut self, id: QpId, replay: Replay) {
        let depth = self.qp(id).attributes.max_dest_rd_atomic;
        self.wire_mut(id).responder.replays.remember(replay, depth);
    }

    /// A request took `packets` PSNs from `psn` on, and is answered.
    fn executed<E: Environment>(&mut self, env: &mut E, id: QpId, psn: u32, packets: u32, body: Body) {
        let responder = &mut self.wire_mut(id).responder;
        responder.expected_psn = psn_add(psn, packets);
        responder.complete_message();
        self.owe_answer(env, id, psn, body);
    }

    // ---- refusals

    fn invalid<E: Environment>(&mut self, env: &mut E, id: QpId, packet: &Packet<'_>, syndrome: Syndrome) {
        let refused = self.refuse(env, id, Nak::InvalidRequest(syndrome));
        self.turn_down(env, id, packet.header.psn, refused);
    }

    /// Answers the requester about a packet that was not taken.
    fn turn_down<E: Environment>(&mut self, env: &mut E, id: QpId, psn: u32, refused: Rejection) {
        match refused {
            Rejection::Nak(nak) => self.last_words(id, psn, nak),
            Rejection::NotReady { queue, .. } => self.not_ready_for(env, id, psn, queue),
            // As if it had been lost on its way; it will come again.
            Rejection::Busy | Rejection::Postponed | Rejection::Late | Rejection::Dropped => return,
        }
        self.answer_now(env, id);
    }

    /// The QP is in ERROR, and this is the last that its peer hears of it.
    pub(crate) fn last_words(&mut self, id: QpId, psn: u32, nak: Nak) {
        let code = match nak {
            Nak::InvalidRequest(_) => NakCode::InvalidRequest,
            Nak::RemoteAccess(_) => NakCode::RemoteAccess,
            Nak::RemoteOperational(_) => NakCode::RemoteOperational,
        };
        let responder = &mut self.wire_mut(id).responder;
        responder.phase = Phase::Closing;
        responder.message = None;
        responder.answers.owe_nak(psn, freeflow_wire::Syndrome::Nak(code));
        self.completer.forget_kept(id);
    }

    /// RNR NAK: the requester comes again with this packet (IBTA 9.7.5.2.8).
    fn not_ready_for<E: Environment>(&mut self, env: &mut E, id: QpId, psn: u32, queue: ReceiveQueueId) {
        self.vnic_of(id).counters.receives_missing += 1;
        let timer = self.qp(id).attributes.min_rnr_timer;
        let responder = &mut self.wire_mut(id).responder;
        responder.phase = Phase::NotReady;
        responder.answers.owe_nak(psn, freeflow_wire::Syndrome::ReceiverNotReady { timer });
        // The requester sends all again.
        self.completer.forget_kept(id);
        self.let_queue_rest(env, queue);
    }

    /// Posts to a queue need not ring, since nobody here waits for a RECV on the requester's
    /// behalf.
    pub(crate) fn let_queue_rest<E: Environment>(&mut self, env: &mut E, queue: ReceiveQueueId) {
        let waited_for = match queue {
            ReceiveQueueId::Srq(srq) => self.completer.srqs.get(srq).is_some_and(|srq| !srq.waiters.is_empty()),
            ReceiveQueueId::Qp(_) => false,
        };
        if !waited_for {
            self.completer.set_wanted(env, queue, false);
        }
    }
}
