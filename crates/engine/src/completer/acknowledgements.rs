//! Completer of RC and XRC: what the answers of the peer do (IBTA 9.7.5.1, 9.7.5.2, 9.7.7).
//!
//! An answer speaks of one PSN. All before it has arrived, unless an earlier message still lacks
//! the answer that only it can have (READ, atomic, FLUSH, ATOMIC WRITE): then that answer was lost
//! on the way, which counts as a NAK (implied NAK, IBTA 9.7.5.2.4). An answer to what was never
//! sent, or to what is acknowledged already, does nothing.
//!
//! Of a READ response the PSN and the length count, not its place in the response (FIRST, MIDDLE,
//! LAST, ONLY): after a retry, which asks for the rest of a READ, late responses of the first
//! request are as good as those of the second.
use crate::arrival::Nak;
use crate::completer::Completer;
use crate::completer::completion::{Side, of_send};
use crate::fault::Fault;
use crate::keys::Part;
use crate::qp::SendPhase;
use crate::transport::packets::Packet;
use crate::transport::parked::Run;
use crate::transport::requester::WireRequester;
use crate::transport::wire::WireOperation;
use crate::{CopyOutcome, Environment, MemorySide, QpId, Source, SourceBody, Syndrome};
use alloc::boxed::Box;
use freeflow_verbs::{Access, Completion, CompletionStatus, Instant, QpState, SendFlags, SendOpcode, SendRequest};
use freeflow_wire::{Header, NakCode, Operation, Syndrome as AethSyndrome, psn_add, psn_ahead};

const BAD_RESPONSE: Fault = Fault::new(CompletionStatus::BadResponse, Syndrome::BadResponse);

/// Relation of a response packet to an unanswered request.
enum Fit {
    /// Bytes of its local memory, from this offset on.
    Payload {
        offset: u32,
        last: bool,
    },
    /// An answer without payload.
    Nothing,
    Wrong,
}

impl Completer {
    /// An ACK, NAK, READ response or atomic acknowledgement.
    pub(crate) fn handle_answer<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let header = packet.header;
        let psn = header.psn;
        if packet.ip.congestion || header.becn {
            self.tally(id, |counters| counters.congestion_marks += 1);
            self.sender(id).congestion.mark();
        }
        if header.opcode.operation() == Operation::Acknowledge {
            self.tally(id, |counters| counters.acks_received += 1);
        }
        if !self.sender(id).window.awaits(psn) {
            return self.tally(id, |counters| counters.answers_ignored += 1);
        }
        match (header.opcode.operation(), header.aeth.syndrome) {
            (Operation::ReadResponse, _) => self.handle_response(env, now, id, packet),
            (Operation::AtomicAcknowledge, _) => self.handle_original(env, now, id, packet),
            (_, AethSyndrome::Ack { .. }) => self.handle_ack(env, now, id, header),
            (_, AethSyndrome::ReceiverNotReady { timer }) => {
                self.tally(id, |counters| counters.rnr_naks_received += 1);
                if self.acknowledge_before(env, now, id, psn) {
                    self.receiver_not_ready(env, now, id, timer);
                }
            }
            (_, AethSyndrome::Nak(code)) => {
                if self.acknowledge_before(env, now, id, psn) {
                    self.handle_nak(env, now, id, header, code);
                }
            }
        }
    }

    /// All up to and with `header.psn` has arrived.
    fn handle_ack<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, header: &Header) {
        let psn = header.psn;
        match header.ack_waits && self.wire(id).is_to_router {
            false => self.measure(now, id, psn),
            true => drop(self.take_sample(id, psn)),
        }
        let requester = self.sender(id);
        // Where later packets are kept, reports say which are missing.
        let was_probe = requester.clock.probed == Some(psn) && requester.repair.is_empty();
        if !self.acknowledge_before(env, now, id, psn_add(psn, 1)) || !was_probe {
            return;
        }
        // A peer that has more would have acknowledged that: the probe filled a gap, and what
        // follows it was lost too.
        if self.qp(id).state() != QpState::Error && self.wire(id).requester.window.has_unacknowledged() {
            self.go_back_for_loss(now, id);
        }
    }

    fn handle_nak<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, header: &Header, code: NakCode) {
        let nak = match code {
            NakCode::PsnSequence => {
                self.tally(id, |counters| counters.sequence_naks_received += 1);
                return match header.frame {
                    Some(_) => self.handle_report(now, id, header),
                    None => self.go_back_for_loss(now, id),
                };
            }
            // The code of RD, which does not exist here, is an invalid request too.
            NakCode::InvalidRequest | NakCode::InvalidRdRequest => Nak::InvalidRequest(Syndrome::NakReceived),
            NakCode::RemoteAccess => Nak::RemoteAccess(Syndrome::NakReceived),
            NakCode::RemoteOperational => Nak::RemoteOperational(Syndrome::NakReceived),
        };
        self.fail_head(env, now, id, nak.fault());
    }

    // ---- answers with something in them

    /// A READ response; also what answers FLUSH and ATOMIC WRITE, without payload.
    fn handle_response<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let psn = packet.header.psn;
        if !self.acknowledge_before(env, now, id, psn) {
            return;
        }
        self.measure(now, id, psn);
        match self.fit(id, packet.payload.len()) {
            Fit::Payload { offset, last } => self.write_response(env, now, id, (offset, last), packet),
            Fit::Nothing => self.answered(env, now, id, 1),
            Fit::Wrong => self.fail_head(env, now, id, BAD_RESPONSE),
        }
    }

    /// Relation of a response of so many bytes to the oldest PSN (IBTA 9.7.5.2.9: its length is
    /// what was asked for).
    fn fit(&self, id: QpId, bytes: usize) -> Fit {
        let window = &self.wire(id).requester.window;
        let Some(head) = window.head() else { return Fit::Wrong };
        let (at, mtu) = (window.packet_of_head(), window.mtu());
        let offset = head.bytes_before(at, mtu);
        match head.request.opcode {
            SendOpcode::Flush | SendOpcode::AtomicWrite if bytes == 0 => Fit::Nothing,
            SendOpcode::RdmaRead if (head.bytes_before(at + 1, mtu) - offset) as usize != bytes => Fit::Wrong,
            SendOpcode::RdmaRead if bytes == 0 => Fit::Nothing,
            SendOpcode::RdmaRead => Fit::Payload { offset, last: at + 1 == head.packets },
            _ => Fit::Wrong,
        }
    }

    /// Writes what a response brought, and what waits behind it and goes on there.
    fn write_response<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        (offset, mut last): (u32, bool),
        packet: &Packet<'_>,
    ) {
        let (mut run, mut psn, mut packets) = (Run::of(packet.payload), packet.header.psn, 1);
        while !last {
            let window = &self.wire(id).requester.window;
            let Some(head) = window.head() else { break };
            let (at, mtu) = (window.packet_of_head() + packets, window.mtu());
            let (wanted, next) = (head.bytes_before(at + 1, mtu) - head.bytes_before(at, mtu), psn_add(psn, 1));
            let (is_last, is_awaited) = (at + 1 == head.packets, window.awaits(next));
            let follows = |header: &Header, bytes: u64| {
                is_awaited
                    && header.opcode.operation() == Operation::ReadResponse
                    && header.opcode.service() == packet.header.opcode.service()
                    && (header.psn, bytes, header.becn) == (next, u64::from(wanted), false)
            };
            if self.take_parked(id, &mut run, follows).is_none() {
                break;
            }
            (psn, packets, last) = (next, packets + 1, is_last);
            self.measure(now, id, psn);
        }
        let payload = run.bytes();
        let payload = payload.as_deref().unwrap_or(packet.payload);
        self.write_result(env, now, id, (offset, packets), payload, last);
    }

    /// The value that an atomic found.
    fn handle_original<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let psn = packet.header.psn;
        if !self.acknowledge_before(env, now, id, psn) {
            return;
        }
        self.measure(now, id, psn);
        let head = self.wire(id).requester.window.head();
        match head.is_some_and(|head| head.request.opcode.is_atomic()) {
            true => self.write_result(env, now, id, (0, 1), &packet.header.original.to_ne_bytes(), true),
            false => self.fail_head(env, now, id, BAD_RESPONSE),
        }
    }

    /// Brings what so many packets of an answer carry to the memory that the oldest request names.
    fn write_result<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        (offset, packets): (u32, u32),
        payload: &[u8],
        last: bool,
    ) {
        self.from.clear();
        self.to.clear();
        let qp = self.qps.get(id).expect("the requester exists");
        let wire = qp.wire.as_ref().expect("the QP runs the packet transport");
        let head = wire.requester.window.head().expect("an answer fits a message");
        let part = Part { pd: qp.sender_pd(), offset: u64::from(offset), bytes: payload.len() as u64 };
        if self.keys.gather(head.request.sges(), part, Access::LOCAL_WRITE, &mut self.to).is_err() {
            self.let_run_go(id);
            let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalKey);
            return self.fail_head(env, now, id, fault);
        }
        let from = Source { prefix: &[], body: SourceBody::Bytes(payload) };
        let outcome = env.copy(self.next_token(), from, &self.to, last);
        if outcome != CopyOutcome::Pending {
            self.let_run_go(id);
        }
        match outcome {
            CopyOutcome::Done => self.answered(env, now, id, packets),
            CopyOutcome::Pending => {
                self.sender(id).writing = packets;
                self.submit_wire(id, WireOperation::Result, None);
            }
            CopyOutcome::Fault(_) => self.result_written(env, now, id, Err(MemorySide::Destination)),
        }
    }

    /// The same, of a copy that was pending: until now no other packet was acted upon.
    pub(crate) fn result_written<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        match result {
            Ok(()) => {
                let packets = self.sender(id).writing;
                self.answered(env, now, id, packets);
            }
            Err(_) => {
                self.fail_head(
                    env,
                    now,
                    id,
                    Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone),
                );
            }
        }
    }

    /// The oldest PSNs have their answers.
    fn answered<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packets: u32) {
        if self.sender(id).window.advance(packets) {
            self.complete_head(env, now, id);
        }
        self.progress(env, now, id);
    }

    // ---- acknowledging

    /// All before `psn` has arrived. False: an earlier answer is missing, and the requester has
    /// gone back for it; or the QP is in ERROR.
    fn acknowledge_before<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, psn: u32) -> bool {
        let mut moved = false;
        let arrived = loop {
            let window = &mut self.sender(id).window;
            let count = window.acknowledgeable(psn);
            if count == 0 {
                break true;
            }
            if window.head_is_answered() {
                break false;
            }
            moved = true;
            if window.advance(count) {
                self.complete_head(env, now, id);
            }
        };
        if moved {
            self.progress(env, now, id);
        }
        if self.qp(id).state() == QpState::Error {
            return false;
        }
        if !arrived {
            self.tally(id, |counters| counters.implied_naks += 1);
            self.go_back_for_loss(now, id);
        }
        arrived
    }

    /// Something that was not acknowledged is now.
    fn progress<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let had_lapsed = self.wire_mut(id).share.renew();
        let acknowledged_bytes = self.sender(id).window.take_acknowledged();
        let host = self.wire(id).destination.host;
        let (most_bytes, has_grown) = self.hosts.arrive(now, host, acknowledged_bytes);
        self.sync_host(id);
        if had_lapsed {
            self.hosts.note_renewed(host);
        }
        if has_grown || had_lapsed {
            self.grant_waiting(host);
        }
        if self.qp(id).state() == QpState::Error {
            return;
        }
        self.renew_retries(id);
        let requester = self.sender(id);
        requester.clock.restart(now);
        let (oldest, sent) = (requester.window.oldest(), requester.window.sent());
        requester.congestion.acknowledge(oldest, sent, most_bytes);
        requester.repair.advance(now, oldest, requester.congestion.smoothed_rtt_ns());
        let waited = core::mem::take(&mut requester.not_ready);
        let is_empty = requester.window.is_empty();
        if waited || is_empty || had_lapsed {
            self.timers.cancel(id);
        }
        if self.wire(id).is_idle() && self.qp(id).send.phase == SendPhase::Idle {
            self.finish_drain(env, id);
        }
        if !is_empty {
            self.watch(now, id);
        }
        self.look_at_stuck(env, now, id);
        self.let_go_on(id);
    }

    /// A turn that waited for an answer may go on.
    pub(crate) fn let_go_on(&mut self, id: QpId) {
        let wire = self.wire_mut(id);
        if wire.share.is_listed() && wire.requester.window.has_unsent() {
            // It waits for others, and will be called.
            return;
        }
        if core::mem::take(&mut wire.requester.held) {
            self.push_ready(id);
        }
    }

    /// Takes the round trip of the last packet that asked for an acknowledgement and has it now.
    fn measure(&mut self, now: Instant, id: QpId, psn: u32) {
        if let Some(at) = self.take_sample(id, psn) {
            self.sender(id).congestion.measure(now, now - at);
            let host = self.wire(id).destination.host;
            if let Some(flow) = self.hosts.flows.get_mut(&host) {
                flow.pipe.measure(now - at);
            }
        }
    }

    /// When the last packet up to this one went out that was to be measured.
    fn take_sample(&mut self, id: QpId, psn: u32) -> Option<Instant> {
        let requester = self.sender(id);
        let mut sent_at = None;
        while let Some(&(sample, at)) = requester.samples.front()
            && psn_ahead(sample, psn) <= 0
        {
            sent_at = Some(at);
            requester.samples.pop_front();
        }
        sent_at
    }

    // ---- completions

    /// The oldest message is whole.
    fn complete_head<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let Some(message) = self.sender(id).window.remove_head() else { return };
        self.succeed_message(env, now, id, message.request, message.length);
    }

    /// A message to another host succeeded, of so many bytes in either direction.
    pub(crate) fn succeed_message<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        request: Box<SendRequest>,
        length: u32,
    ) {
        let opcode = request.opcode;
        self.count_sent_message(id, opcode, u64::from(length));
        if self.qp(id).all_signaled || request.flags.contains(SendFlags::SIGNALED) {
            let returns = opcode == SendOpcode::RdmaRead || opcode.is_atomic();
            let completion = Completion {
                byte_count: if returns { length } else { 0 },
                ..of_send(&request, now, CompletionStatus::Success)
            };
            self.post(env, id, Side::Send, completion);
        }
        self.sender(id).window.recycle(request);
    }

    /// The oldest message fails, and the QP with it.
    pub(crate) fn fail_head<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, fault: Fault) {
        self.end_head(env, now, id, fault);
        self.enter_error(env, id);
    }

    fn end_head<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, fault: Fault) {
        let Some(message) = self.sender(id).window.remove_head() else { return };
        self.fail_message(env, now, id, message.request, fault);
    }

    /// A message to another host failed. What becomes of the QP is the caller's business.
    pub(crate) fn fail_message<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        request: Box<SendRequest>,
        fault: Fault,
    ) {
        env.end_references();
        let completion = Completion { vendor_error: fault.syndrome as u8, ..of_send(&request, now, fault.status) };
        self.post(env, id, Side::Send, completion);
        self.sender(id).window.recycle(request);
    }

    /// The QP is in ERROR: completes what is under way as flushed, oldest first, at most `limit`;
    /// gives how many.
    pub(crate) fn flush_wire<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, limit: u32) -> u32 {
        let mut count = 0;
        while count < limit
            && let Some(wire) = &self.qp(id).wire
            && !wire.is_idle()
        {
            let fault = Fault::new(CompletionStatus::WorkRequestFlushed, Syndrome::Flushed);
            match wire.requester.is_idle() {
                false => self.end_head(env, now, id, fault),
                true => self.end_carried(env, now, id, fault),
            }
            count += 1;
        }
        count
    }

    pub(crate) fn sender(&mut self, id: QpId) -> &mut WireRequester {
        &mut self.wire_mut(id).requester
    }

    /// The packets that can't be read may be the oldest ones now; or they are acknowledged, as
    /// those of a retry may be.
    pub(crate) fn look_at_stuck<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let requester = self.sender(id);
        let Some((psn, stuck)) = requester.stuck else { return };
        if psn_ahead(psn, requester.window.oldest()) < 0 {
            requester.stuck = None;
        } else if requester.window.sends_oldest() {
            self.fail_head(env, now, id, stuck.fault());
        }
    }
}
