//! How what a responder owes its requester goes out (IBTA 9.7.5.1); see `transport::answers`.
//!
//! Invariant: the queue goes out in order, the verdict after it. So no acknowledgement overtakes
//! what is owed for an earlier PSN.
//!
//! Invariant: each burst of READ responses finds its key again, so that a READ stops as soon as its
//! key is invalid.
use crate::arrival::{Nak, Rejection};
use crate::keys::Reach;
use crate::limits::ATOMIC_BYTES;
use crate::qp::Teardown;
use crate::responder::Responder;
use crate::transport::answers::{
    AckWait, Answer, Body, DIRECT_BYTES_MAX, NO_PACKET, RESPONSE_BURST_BYTES_MAX, RESPONSE_BURST_PACKETS_MAX, Reading,
    ResponseBurst, ResponseVerdict, is_atomic,
};
use crate::transport::wire::{WireOperation, is_selective};
use crate::turn::Budget;
use crate::{Environment, MemorySide, PacketHead, Progress, QpId, Source, SourceBody, Syndrome, TransmitOutcome};
use freeflow_verbs::{Access, Instant, QpState, QpType};
use freeflow_wire::frame::Frame;
use freeflow_wire::{Aeth, Header, NakCode, Opcode, Operation, PacketPosition, Service, psn_add};

/// The next packet to go out.
enum Next {
    Nothing,
    Fetching,
    Reading(u32, Reading),
    Packet(Header),
}

/// How a packet or a burst went.
pub(crate) enum Sent {
    On,
    Stop(Progress),
}

impl Responder {
    // ---- what is owed

    /// An answer to a request that is new.
    pub(crate) fn owe_answer<E: Environment>(&mut self, env: &mut E, id: QpId, psn: u32, body: Body) {
        let answer = Answer { request: psn, psn, is_counted: !matches!(body, Body::Flushed), body };
        let responder = &mut self.wire_mut(id).responder;
        responder.unacknowledged = 0;
        if responder.answers.push(answer) {
            self.completer.tally(id, |counters| counters.acks_deferred += 1);
        }
        self.answer_now(env, id);
    }

    /// All packets up to this one are acknowledged, at the latest by [`Engine::flush_acks`], unless it lets that wait.
    pub(crate) fn owe_ack(&mut self, id: QpId, psn: u32, may_wait: bool) {
        let responder = &mut self.wire_mut(id).responder;
        responder.unacknowledged = 0;
        responder.habit.note_message(may_wait);
        let covered = responder.answers.owe_ack(psn);
        if !core::mem::replace(&mut responder.listed, true) {
            self.acks_owed.push_back(id);
        }
        if covered {
            self.completer.tally(id, |counters| counters.acks_deferred += 1);
        }
    }

    /// A request met a queue on its way (ECN): the next answer says so to a requester that looks for it.
    pub(crate) fn owe_echo(&mut self, id: QpId) {
        let service = self.qp(id).service;
        let wire = self.wire_mut(id);
        wire.responder.owes_echo = is_selective(service, &wire.destination);
        self.completer.tally(id, |counters| counters.congestion_marks += 1);
    }

    /// Sends what is owed if it is little and nothing else waits; the rest is for `Engine::run`.
    pub(crate) fn answer_now<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let answers = &self.wire(id).responder.answers;
        if answers.is_empty() {
            return;
        }
        let bytes = if answers.queue.len() > 1 { 0 } else { DIRECT_BYTES_MAX };
        let answers = self.may_answer(id);
        let mut budget = Budget { answers, ..Budget::unmetered(bytes) };
        if self.send_answers(env, id, &mut budget) == Progress::More {
            self.push_ready(id);
        }
    }

    // ---- sending

    /// Whether a turn of the QP would move payload, if it has a request or has none (`has_next`).
    pub(crate) fn has_work(&self, id: QpId, has_next: bool) -> bool {
        let owes = self.completer.qps.get(id).is_some_and(|qp| {
            let answers = qp.wire.as_ref().is_some_and(|wire| !wire.responder.answers.queue.is_empty());
            answers || !qp.receive.datagrams.is_empty()
        });
        owes || self.completer.is_sending(id, has_next)
    }

    /// Sends what is owed to the peer: READ responses, acknowledgements. Takes no more than half of
    /// the turn from the QP's own requests.
    pub(crate) fn respond<E: Environment>(
        &mut self,
        env: &mut E,
        _now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Progress {
        if self.qp(id).state() == QpState::Error {
            self.end_wait(env, id);
        }
        let kept = budget.bytes / 2;
        budget.bytes -= kept;
        let progress = self.send_answers(env, id, budget);
        budget.bytes += kept;
        progress
    }

    /// Sends the acknowledgements that were put off while a batch of datagrams was handled.
    pub(crate) fn flush_acks<E: Environment>(&mut self, env: &mut E, now: Instant) {
        while let Some(id) = self.acks_owed.pop_front() {
            let Some(wire) = self.completer.qps.get_mut(id).and_then(|qp| qp.wire.as_mut()) else { continue };
            wire.responder.listed = false;
            // A READ response that the ACK must not overtake has its own turn.
            if !self.begin_wait(now, id) && self.wire(id).responder.answers.queue.is_empty() {
                self.answer_now(env, id);
            }
        }
        self.drop_ended();
    }

    /// Whether the responder says anything: also in ERROR, if that is where its last words took it.
    fn speaks(&self, id: QpId) -> bool {
        let Some(qp) = self.completer.qps.get(id) else { return false };
        let Some(wire) = qp.wire.as_ref() else { return false };
        qp.receives() || qp.state() == QpState::Error && qp.teardown == Teardown::None && wire.responder.is_closing()
    }

    fn send_answers<E: Environment>(&mut self, env: &mut E, id: QpId, budget: &mut Budget) -> Progress {
        loop {
            if !self.speaks(id) {
                return Progress::Idle;
            }
            let next = self.next_answer(id);
            let sent = match next {
                Next::Nothing => return Progress::Idle,
                Next::Fetching => return Progress::Waiting,
                _ if budget.bytes == 0 => return Progress::More,
                // Another host's QP behind this QPN, which is not the peer, gets nothing.
                _ if !self.gate_is_open(env, id) => return Progress::Waiting,
                Next::Reading(..) if !budget.answers => return Progress::More,
                Next::Packet(header) if is_atomic(&header) && !budget.answers => return Progress::More,
                Next::Reading(psn, reading) => self.send_responses(env, id, (psn, reading), budget),
                Next::Packet(header) => self.send_bare(env, id, header, budget),
            };
            if let Sent::Stop(progress) = sent {
                return progress;
            }
        }
    }

    fn next_answer(&self, id: QpId) -> Next {
        let answers = &self.wire(id).responder.answers;
        if answers.fetching {
            return Next::Fetching;
        }
        let header = |operation, psn| self.answer_header(id, operation, PacketPosition::Only, psn);
        let packet = match (answers.queue.front(), answers.verdict) {
            (Some(Answer { psn, body: Body::Read(reading), .. }), _) => return Next::Reading(*psn, *reading),
            (Some(Answer { psn, body: Body::Atomic { original }, .. }), _) => {
                Header { original: *original, ..header(Operation::AtomicAcknowledge, *psn) }
            }
            (Some(Answer { psn, body: Body::Written | Body::Flushed, .. }), _) => header(Operation::ReadResponse, *psn),
            (None, ResponseVerdict::Ack { psn }) => match answers.wait {
                AckWait::Until(_) => return Next::Nothing,
                AckWait::None => header(Operation::Acknowledge, psn),
                AckWait::Over => Header { ack_waits: true, ..header(Operation::Acknowledge, psn) },
            },
            (None, ResponseVerdict::Nak { psn, syndrome }) => {
                let acknowledge = header(Operation::Acknowledge, psn);
                let nak = Header { aeth: Aeth { syndrome, ..acknowledge.aeth }, ..acknowledge };
                match syndrome {
                    freeflow_wire::Syndrome::Nak(NakCode::PsnSequence) if self.keeps(id) => {
                        let reth = self.wire(id).responder.kept.named(psn).fields();
                        Header { frame: Some(Frame::default()), reth, ..nak }
                    }
                    _ => nak,
                }
            }
            (None, ResponseVerdict::None) => return Next::Nothing,
        };
        Next::Packet(packet)
    }

    /// The MSN is that of now: it says how far the responder is.
    fn answer_header(&self, id: QpId, operation: Operation, place: PacketPosition, psn: u32) -> Header {
        let qp = self.qp(id);
        let service = if qp.service == QpType::Rc { Service::Rc } else { Service::Xrc };
        let opcode = Opcode::new(service, operation, place).expect("reliable services have all answers");
        let responder = &self.wire(id).responder;
        let aeth = Aeth { syndrome: freeflow_wire::Syndrome::ACK, msn: responder.msn };
        Header { aeth, becn: responder.owes_echo, ..Header::new(opcode, qp.attributes.dest_qpn, psn) }
    }

    /// An answer without payload.
    fn send_bare<E: Environment>(&mut self, env: &mut E, id: QpId, header: Header, budget: &mut Budget) -> Sent {
        budget.bytes -= 1;
        let (token, to) = (self.completer.next_token(), self.wire(id).destination);
        let nothing = Source { prefix: &[], body: SourceBody::Bytes(&[]) };
        if env.transmit(token, &to, &[PacketHead::new(header, 0)], nothing) == TransmitOutcome::Full {
            return Sent::Stop(Progress::More);
        }
        if is_atomic(&header) {
            self.completer.note_used(id, ATOMIC_BYTES);
        }
        self.note_answers(id, ResponseBurst { packets: 1, bytes: 0 });
        let answers = &mut self.wire_mut(id).responder.answers;
        if answers.queue.pop_front().is_none() {
            self.count_verdict(id);
            self.wire_mut(id).responder.answers.clear_verdict();
        }
        Sent::On
    }

    /// The next packets of a READ's answer.
    fn send_responses<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        (psn, reading): (u32, Reading),
        budget: &mut Budget,
    ) -> Sent {
        let mut heads = [NO_PACKET; RESPONSE_BURST_PACKETS_MAX];
        let burst = self.cut_responses(id, (psn, &reading), budget.bytes.min(RESPONSE_BURST_BYTES_MAX), &mut heads);
        budget.bytes = budget.bytes.saturating_sub(u64::from(burst.bytes).max(1));
        self.completer.from.clear();
        self.completer.to.clear();
        if burst.bytes > 0 {
            let reach = Reach { pd: reading.pd, responder: id };
            let right = Access::REMOTE_READ;
            match self.completer.keys.resolve_remote(reading.rkey, reach, reading.address, burst.bytes, right) {
                Ok(span) => self.completer.from.push(span),
                Err(_) => return self.reading_failed(env, id, Nak::RemoteAccess(Syndrome::RemoteKey)),
            }
        }
        let (token, to) = (self.completer.next_token(), self.wire(id).destination);
        let payload = Source { prefix: &[], body: SourceBody::Spans(&self.completer.from) };
        match env.transmit(token, &to, &heads[..burst.packets as usize], payload) {
            TransmitOutcome::Full => return Sent::Stop(Progress::More),
            TransmitOutcome::Fault => {
                return self.reading_failed(env, id, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
            }
            TransmitOutcome::Sent => self.wire_mut(id).responder.answers.advance(burst),
            TransmitOutcome::Pending => {
                let answers = &mut self.wire_mut(id).responder.answers;
                answers.fetching = true;
                if let Some(reading) = answers.front_reading() {
                    reading.fetching = Some(burst);
                }
                self.completer.submit_wire(id, WireOperation::Response, Some(reading.rkey));
            }
        }
        self.completer.note_used(id, u64::from(burst.bytes));
        self.note_answers(id, burst);
        Sent::On
    }

    /// Makes the packets of as much of a READ's answer as fits into a burst of so many bytes; one
    /// packet at least.
    fn cut_responses(
        &self,
        id: QpId,
        (mut psn, reading): (u32, &Reading),
        bytes_max: u64,
        heads: &mut [PacketHead; RESPONSE_BURST_PACKETS_MAX],
    ) -> ResponseBurst {
        let mtu = reading.mtu;
        let frame = reading.frames.then_some(Frame::default());
        let (mut begun, mut left, mut burst) = (reading.begun, reading.left, ResponseBurst { packets: 0, bytes: 0 });
        for head in heads {
            let bytes = left.min(mtu);
            let place = match (begun, bytes == left) {
                (false, true) => PacketPosition::Only,
                (false, false) => PacketPosition::First,
                (true, false) => PacketPosition::Middle,
                (true, true) => PacketPosition::Last,
            };
            let header = self.answer_header(id, Operation::ReadResponse, place, psn);
            *head = PacketHead::new(Header { frame, ..header }, bytes as usize);
            (begun, left, psn) = (true, left - bytes, psn_add(psn, 1));
            burst = ResponseBurst { packets: burst.packets + 1, bytes: burst.bytes + bytes };
            if left == 0 || u64::from(burst.bytes + mtu) > bytes_max {
                break;
            }
        }
        burst
    }

    /// The memory of a READ can't be had any more: a NAK in the place of its next packet, and the
    /// QP is in ERROR. A repeat is dropped like a duplicate that was forgotten (class D).
    fn reading_failed<E: Environment>(&mut self, env: &mut E, id: QpId, nak: Nak) -> Sent {
        let queue = &mut self.wire_mut(id).responder.answers.queue;
        if queue.pop_front_if(|answer| answer.is_repeat()).is_some() {
            return Sent::On;
        }
        if let Rejection::Nak(nak) = self.refuse(env, id, nak)
            && let Some(answer) = self.wire_mut(id).responder.answers.queue.front().copied()
        {
            self.wire_mut(id).responder.answers.queue.clear();
            self.last_words(id, answer.psn, nak);
        }
        Sent::On
    }

    /// The burst that was being fetched is out, or its memory is not there.
    pub(crate) fn response_fetched<E: Environment>(
        &mut self,
        env: &mut E,
        _now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        let answers = &mut self.wire_mut(id).responder.answers;
        answers.fetching = false;
        // Unless the requester has begun again.
        let Some(burst) = answers.front_reading().and_then(|reading| reading.fetching) else { return };
        match result {
            Ok(()) => answers.advance(burst),
            Err(_) => {
                self.reading_failed(env, id, Nak::RemoteOperational(Syndrome::RemoteMemoryGone));
            }
        }
    }

    // ---- counting

    /// They go out, and say what was owed of marks.
    fn note_answers(&mut self, id: QpId, burst: ResponseBurst) {
        self.wire_mut(id).responder.owes_echo = false;
        self.completer.tally(id, |counters| {
            counters.packets_sent += u64::from(burst.packets);
            counters.bytes_sent += u64::from(burst.bytes);
        });
    }

    fn count_verdict(&mut self, id: QpId) {
        let verdict = self.wire(id).responder.answers.verdict;
        self.completer.tally(id, |counters| match verdict {
            ResponseVerdict::None => {}
            ResponseVerdict::Ack { .. } => counters.acks_sent += 1,
            ResponseVerdict::Nak { syndrome, .. } => match syndrome {
                freeflow_wire::Syndrome::ReceiverNotReady { .. } => counters.rnr_naks_sent += 1,
                freeflow_wire::Syndrome::Nak(NakCode::PsnSequence) => counters.sequence_naks_sent += 1,
                _ => {}
            },
        });
    }
}
