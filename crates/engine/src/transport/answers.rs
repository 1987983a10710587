//! Answers that a responder owes its requester (IBTA 9.7.5.1); how they go out stands in
//! `responder::answers`.
//!
//! Answers that bring something (READ responses, atomic acknowledgements; the empty READ response
//! that answers FLUSH and ATOMIC WRITE, as Linux rxe has it) stand in a queue. Behind them comes
//! one *verdict*: an ACK or a NAK. Both speak for all packets before theirs, so the newest one
//! replaces any older that has not gone out yet, and any answer to a later request makes an ACK
//! superfluous: this is how acknowledgements are coalesced.
use crate::{PacketHead, PdId};
use alloc::collections::VecDeque;
use freeflow_verbs::Instant;
use freeflow_wire::{HEADER_BYTES_MAX, Header, HeaderBytes, Operation, psn_add, psn_ahead};
use serde::{Deserialize, Serialize};

/// Answers of one QP that wait: twice as many as requests may be under way (128), so that each can
/// be asked for again.
const ANSWERS_MAX: usize = 256;

/// READ responses of one burst.
pub(crate) const RESPONSE_BURST_PACKETS_MAX: usize = 32;

/// Payload of one datagram with segmentation offload, at most.
pub(crate) const RESPONSE_BURST_BYTES_MAX: u64 = 60 * 1024;

/// READ responses that go out while their request is handled; the rest has its turn in
/// `Engine::run`.
pub(crate) const DIRECT_BYTES_MAX: u64 = 16 * 1024;

pub(crate) const NO_PACKET: PacketHead =
    PacketHead { header: HeaderBytes { bytes: [0; HEADER_BYTES_MAX], length: 0 }, payload_bytes: 0 };

#[derive(Serialize, Deserialize)]
pub(crate) struct Answers {
    pub queue: VecDeque<Answer>,
    pub verdict: ResponseVerdict,
    pub wait: AckWait,
    /// Responses are being fetched elsewhere; nothing may go out before them.
    pub fetching: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// PSN of the request.
    pub request: u32,
    /// Of the next packet.
    pub psn: u32,
    /// It counts against `max_dest_rd_atomic` until its last packet is out. Not so a FLUSH; nor the
    /// answer to a duplicate whose last packet was out once, for its requester may have received
    /// that and sent its next request.
    pub is_counted: bool,
    pub body: Body,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Body {
    Read(Reading),
    /// The value that was found.
    Atomic {
        original: u64,
    },
    /// ATOMIC WRITE.
    Written,
    Flushed,
}

/// How far the answer to a READ has come.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Reading {
    pub address: u64,
    /// Bytes.
    pub left: u32,
    pub rkey: u32,
    /// The PD that the key must belong to: for XRC that of the SRQ which the request named.
    pub pd: PdId,
    /// Its first packet is out.
    pub begun: bool,
    /// The burst that is being fetched.
    pub fetching: Option<ResponseBurst>,
    /// Payload of a whole packet, bytes.
    pub mtu: u32,
    /// It was asked for by a frame, and is answered by such.
    pub frames: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct ResponseBurst {
    pub packets: u32,
    pub bytes: u32,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum ResponseVerdict {
    None,
    Ack { psn: u32 },
    Nak { psn: u32, syndrome: freeflow_wire::Syndrome },
}

/// Whether the verdict, if it is an ACK, waits for what the program answers; see `responder::waits`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AckWait {
    None,
    Until(Instant),
    Over,
}

impl Answers {
    pub fn new() -> Self {
        Self { queue: VecDeque::new(), verdict: ResponseVerdict::None, wait: AckWait::None, fetching: false }
    }

    pub fn is_full(&self) -> bool {
        self.queue.len() >= ANSWERS_MAX
    }

    /// How many requests are under way that the requester can't know the answers of.
    pub fn outstanding(&self) -> usize {
        self.queue.iter().filter(|answer| answer.counts()).count()
    }

    /// The answer to a request that is new: it acknowledges all before. True if that makes an ACK
    /// superfluous.
    pub fn push(&mut self, answer: Answer) -> bool {
        let is_next = self.queue.back().is_none_or(|last| psn_ahead(answer.psn, last.psn) > 0);
        debug_assert!(is_next, "answers stand in the order of their requests");
        self.queue.push_back(answer);
        let covers = matches!(self.verdict, ResponseVerdict::Ack { .. });
        if covers {
            self.clear_verdict();
        }
        covers
    }

    /// The answer to a duplicate. One to the same request that still waits begins again, from the
    /// packet now asked for; it counts as that one did. Both have the place of their request. False
    /// if there is no room.
    pub fn replay(&mut self, answer: Answer) -> bool {
        let waiting = self.queue.iter().position(|waiting| waiting.request == answer.request);
        if waiting.is_none() && self.is_full() {
            return false;
        }
        let waiting = waiting.and_then(|place| self.queue.remove(place));
        let is_counted = waiting.is_some_and(|waiting| waiting.counts());
        // A READ that is being fetched stays in front, where `advance` finds it.
        let first = usize::from(self.front_reading().is_some_and(|reading| reading.fetching.is_some()));
        let later = |waiting: &Answer| psn_ahead(waiting.request, answer.request) > 0;
        let place = self.queue.iter().skip(first).position(later).map_or(self.queue.len(), |place| first + place);
        self.queue.insert(place, Answer { is_counted, ..answer });
        true
    }

    /// True if an earlier ACK need not go out.
    pub fn owe_ack(&mut self, psn: u32) -> bool {
        let covered = matches!(self.verdict, ResponseVerdict::Ack { .. });
        if !matches!(self.verdict, ResponseVerdict::Nak { .. }) {
            (self.verdict, self.wait) = (ResponseVerdict::Ack { psn }, AckWait::None);
        }
        covered
    }

    /// All packets before this one are acknowledged, this one is not.
    pub fn owe_nak(&mut self, psn: u32, syndrome: freeflow_wire::Syndrome) {
        (self.verdict, self.wait) = (ResponseVerdict::Nak { psn, syndrome }, AckWait::None);
    }

    /// Takes a NAK back, since the missing packet has come. True if the NAK has not gone out, and
    /// will not any more.
    pub fn retract_nak(&mut self) -> bool {
        let unsent = matches!(self.verdict, ResponseVerdict::Nak { .. });
        if unsent {
            self.clear_verdict();
        }
        unsent
    }

    /// It has gone out, or need not.
    pub fn clear_verdict(&mut self) {
        (self.verdict, self.wait) = (ResponseVerdict::None, AckWait::None);
    }

    /// Until when the ACK waits.
    pub fn waits_until(&self) -> Option<Instant> {
        match self.wait {
            AckWait::Until(until) => Some(until),
            AckWait::None | AckWait::Over => None,
        }
    }

    /// The next to go out is an ACK, which says only that messages have come.
    pub fn may_wait(&self) -> bool {
        self.queue.is_empty() && matches!(self.verdict, ResponseVerdict::Ack { .. })
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && matches!(self.verdict, ResponseVerdict::None)
    }

    /// A burst of the READ in front is on its way.
    pub fn advance(&mut self, burst: ResponseBurst) {
        let Some(Answer { psn, body: Body::Read(reading), .. }) = self.queue.front_mut() else { return };
        reading.fetching = None;
        reading.begun = true;
        reading.left -= burst.bytes;
        reading.address = reading.address.wrapping_add(u64::from(burst.bytes));
        *psn = psn_add(*psn, burst.packets);
        if reading.left == 0 {
            self.queue.pop_front();
        }
    }

    pub fn front_reading(&mut self) -> Option<&mut Reading> {
        match self.queue.front_mut() {
            Some(Answer { body: Body::Read(reading), .. }) => Some(reading),
            _ => None,
        }
    }
}

impl Answer {
    /// Its request is one of those that the requester can't know the answers of.
    pub fn counts(&self) -> bool {
        self.is_counted && !self.is_out()
    }

    /// A READ that its requester asked for again after the last packet was out. The requester may
    /// have all of it, and the owner of the memory may have deregistered it since.
    pub fn is_repeat(&self) -> bool {
        matches!(self.body, Body::Read(_)) && !self.is_counted
    }

    /// Its last packet is on its way, as far as can be known.
    pub fn is_out(&self) -> bool {
        match &self.body {
            Body::Read(reading) => reading.fetching.is_some_and(|burst| burst.bytes == reading.left),
            Body::Atomic { .. } | Body::Written | Body::Flushed => false,
        }
    }
}

/// Whether an answer brings what an atomic found.
pub(crate) fn is_atomic(header: &Header) -> bool {
    header.opcode.operation() == Operation::AtomicAcknowledge
}
