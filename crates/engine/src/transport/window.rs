//! A requester's messages under way, in posting order, and the PSNs that bound them (IBTA 9.7.2).
//!
//! ```text
//!   messages      [  WRITE  ][ SEND ][      READ      ][ WRITE ]
//!   PSNs          ......^..........^.......^..................^
//!                    oldest       next    sent              tail
//! ```
//!
//! Before `oldest` all is acknowledged; before `next` all is on the way; before `sent` all was sent
//! once, so that answers may speak of it; `tail` is what the next message begins with. Going back
//! (go-back-N) sets `next` to `oldest`.
//!
//! A READ takes as many PSNs as its responses have packets. It is asked for in pieces that fit the
//! congestion window (and the one of a short way), since nothing else slows a responder down; each
//! piece is a READ request of its own, which is also what a retry of the rest of a READ looks like
//! (IBTA 9.7.5.2.9). A piece counts as one of the `max_rd_atomic` requests that may be unanswered.
//!
//! Invariant: `oldest <= next <= tail`, `oldest <= sent <= tail` in the order of PSNs; `sending` is
//! the message that `next` lies in, or the number of messages if `next == tail`; `in_flight_bytes`
//! is the charge of the PSNs from `oldest` to `next`. PSNs under way are far fewer than 2^23, for
//! each is charged at least [`PACKET_OVERHEAD_BYTES`] of the congestion window.
use super::congestion::{WINDOW_BYTES_MAX, WINDOW_BYTES_SHORT};
use super::packets::record_bytes;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{SendOpcode, SendRequest};
use freeflow_wire::Kept;
use freeflow_wire::records::{RECORDS_MAX, fixed_bytes};
use freeflow_wire::{MASK_24, psn_add, psn_ahead};
use serde::{Deserialize, Serialize};

/// Bytes charged for a packet besides its payload: Ethernet, IP, UDP, BTH, ICRC. (Fixed, for it
/// need not be exact.)
pub(crate) const PACKET_OVERHEAD_BYTES: u64 = 64;
/// Messages under way. Each keeps its posted request (1.6 KB), for it may have to be sent again.
pub(crate) const MESSAGES_MAX: usize = 1024;
/// One call of the environment's `transmit`: what a kernel takes in one go (UDP GSO: 64 segments,
/// 64 KB with headers).
pub(crate) const BURST_PACKETS_MAX: u32 = 64;
pub(crate) const BURST_BYTES_MAX: u32 = 60 * 1024;

const _: () = assert!(WINDOW_BYTES_MAX / PACKET_OVERHEAD_BYTES < 1 << 22);

/// A request that has PSNs.
#[derive(Serialize, Deserialize)]
pub(crate) struct OutgoingMessage {
    pub request: Box<SendRequest>,
    /// Payload, of whichever direction; bytes. At most 2^31.
    pub length: u32,
    pub first_psn: u32,
    /// PSNs that it takes; at most 2^23.
    pub packets: u32,
}

/// The next packets to go out; all of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Burst {
    /// Index of the message in the list.
    pub message: usize,
    pub psn: u32,
    /// Packet of the message that it begins with.
    pub at: u32,
    /// PSNs that it takes. A request that is answered with payload is one packet, however many.
    pub packets: u32,
    /// Payload of these PSNs, of whichever direction.
    pub bytes: u32,
}

/// Messages of one packet each that go out together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordRun {
    /// Index of the first message in the list.
    pub message: usize,
    pub psn: u32,
    /// Messages, and PSNs.
    pub count: u32,
    /// Payload.
    pub bytes: u32,
    pub charge: u64,
    /// Part of a turn's budget.
    pub cost_bytes: u64,
    /// Payload stands in the requests.
    pub is_inline: bool,
}

/// Short messages that have not gone out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unsent {
    pub count: usize,
    /// Of a frame that had them all.
    pub bytes: u32,
    /// With what is on the way.
    pub on_the_way: u64,
}

/// Limits of what goes out together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunLimits {
    /// Of the packet.
    pub room_bytes: u32,
    /// Of what is on the way.
    pub window_bytes: u64,
    /// Of the turn.
    pub budget_bytes: u64,
}

/// Why nothing can go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// All was sent.
    Nothing,
    Congestion,
    /// As many requests are unanswered as the responder keeps.
    Depth,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct SendWindow {
    messages: VecDeque<OutgoingMessage>,
    /// Boxes of requests that are over.
    #[expect(clippy::vec_box, reason = "a box goes from here to a message and back, its 1.6 KB stay where they are")]
    spare: Vec<Box<SendRequest>>,
    mtu: u32,
    oldest: u32,
    next: u32,
    sent: u32,
    /// Before this PSN all was counted against limits of rate, if it goes out again: see
    /// [`Self::recount`].
    counted: u32,
    tail: u32,
    sending: usize,
    in_flight_bytes: u64,
    /// Charge of what was acknowledged since it was asked for.
    acknowledged_bytes: u64,
    /// Where READ pieces, atomics, FLUSHes and ATOMIC WRITEs end that went out and are not
    /// answered: the PSN after each. A retry asks for the rest of what was asked for, since a
    /// responder takes it for a duplicate only then.
    asked: VecDeque<u32>,
    /// Of these, how many are on the way.
    unanswered: usize,
    /// Messages in the list that are answered with more than an acknowledgement.
    answers_due: usize,
}

/// How far `psn` is behind `base`, 0 … 2^24 - 1.
fn distance(psn: u32, base: u32) -> u32 {
    psn.wrapping_sub(base) & MASK_24
}

/// Whether an acknowledgement alone does not complete it (IBTA 9.7.5.1; FLUSH, ATOMIC WRITE: A19).
pub(crate) fn needs_answer(opcode: SendOpcode) -> bool {
    opcode.is_atomic() || matches!(opcode, SendOpcode::RdmaRead | SendOpcode::Flush | SendOpcode::AtomicWrite)
}

impl OutgoingMessage {
    /// Payload of its first packets.
    pub fn bytes_before(&self, packet: u32, mtu: u32) -> u32 {
        // 2^23 packets of 256 bytes are 2^31.
        packet.saturating_mul(mtu).min(self.length)
    }

    fn charge(&self, from: u32, count: u32, mtu: u32) -> u64 {
        let payload = self.bytes_before(from + count, mtu) - self.bytes_before(from, mtu);
        u64::from(payload) + u64::from(count) * PACKET_OVERHEAD_BYTES
    }
}

impl Unsent {
    fn add(&mut self, message: &OutgoingMessage) -> bool {
        let bytes = record_bytes(message.request.opcode, message.length).filter(|_| message.packets == 1);
        self.count += 1;
        self.bytes += bytes.unwrap_or(0);
        self.on_the_way += u64::from(message.length) + PACKET_OVERHEAD_BYTES;
        bytes.is_some()
    }
}

impl SendWindow {
    pub fn new(psn: u32, mtu: u32) -> Self {
        Self {
            messages: VecDeque::new(),
            spare: Vec::new(),
            mtu,
            oldest: psn,
            next: psn,
            sent: psn,
            counted: psn,
            tail: psn,
            sending: 0,
            in_flight_bytes: 0,
            acknowledged_bytes: 0,
            asked: VecDeque::new(),
            unanswered: 0,
            answers_due: 0,
        }
    }

    // ---- getters

    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    pub fn oldest(&self) -> u32 {
        self.oldest
    }

    pub fn sent(&self) -> u32 {
        self.sent
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    pub fn answers_due(&self) -> usize {
        self.answers_due
    }

    pub fn has_unsent(&self) -> bool {
        self.next != self.tail
    }

    /// Something is on the way.
    pub fn has_unacknowledged(&self) -> bool {
        self.oldest != self.next
    }

    /// PSNs on the way.
    pub fn on_the_way(&self) -> u32 {
        distance(self.next, self.oldest)
    }

    /// The oldest message is the one that goes out next.
    pub fn sends_oldest(&self) -> bool {
        self.sending == 0
    }

    pub fn head(&self) -> Option<&OutgoingMessage> {
        self.messages.front()
    }

    /// The oldest message is complete only with its answer.
    pub fn head_is_answered(&self) -> bool {
        self.messages.front().is_some_and(|head| needs_answer(head.request.opcode))
    }

    pub fn message(&self, place: usize) -> &OutgoingMessage {
        &self.messages[place]
    }

    /// The packet of the oldest message that is not acknowledged.
    pub fn packet_of_head(&self) -> u32 {
        self.messages.front().map_or(0, |head| distance(self.oldest, head.first_psn))
    }

    /// Whether an answer may speak of this PSN: it was sent, and is not acknowledged.
    pub fn awaits(&self, psn: u32) -> bool {
        psn_ahead(psn, self.oldest) >= 0 && psn_ahead(psn, self.sent) < 0
    }

    /// Whether a packet goes out that went out before.
    pub fn repeats(&self, psn: u32) -> bool {
        psn_ahead(psn, self.sent) < 0
    }

    // ---- sending

    fn packets_of(&self, opcode: SendOpcode, length: u32) -> u32 {
        // Most messages are short, and a division is not.
        if length <= self.mtu || needs_answer(opcode) && opcode != SendOpcode::RdmaRead {
            return 1;
        }
        length.div_ceil(self.mtu)
    }

    /// Whether there is room for another message: in the list (`most` messages), and in half of the
    /// PSNs, since the order of PSNs is known only within that (IBTA 9.7.2).
    pub fn has_room(&self, opcode: SendOpcode, length: u32, most: usize) -> bool {
        let psns = distance(self.tail, self.oldest) + self.packets_of(opcode, length);
        self.is_empty() || self.len() < most.min(MESSAGES_MAX) && psns <= 1 << 23
    }

    /// Appends a message. Gives a box for the next request.
    pub fn enlist(&mut self, request: &mut Box<SendRequest>, length: u32) {
        let packets = self.packets_of(request.opcode, length);
        let request = self.swap(request);
        self.answers_due += usize::from(needs_answer(request.opcode));
        self.messages.push_back(OutgoingMessage { request, length, first_psn: self.tail, packets });
        self.tail = psn_add(self.tail, packets);
    }

    /// Takes a request. Leaves a box for the next one.
    pub fn swap(&mut self, request: &mut Box<SendRequest>) -> Box<SendRequest> {
        core::mem::replace(request, self.spare.pop().unwrap_or_default())
    }

    /// The burst that may go out next, if `window_bytes` and `depth` unanswered requests may be on the way.
    pub fn plan(&self, window_bytes: u64, depth: usize) -> Result<Burst, Hold> {
        let message = self.messages.get(self.sending).ok_or(Hold::Nothing)?;
        let at = distance(self.next, message.first_psn);
        let left = message.packets - at;
        let room = window_bytes.saturating_sub(self.in_flight_bytes);
        let is_answered = needs_answer(message.request.opcode);
        if is_answered && self.unanswered >= depth {
            return Err(Hold::Depth);
        }
        let again = self.asked.get(self.unanswered).filter(|_| is_answered);
        // It comes at once, as fast as the responder can send.
        let piece_bytes = WINDOW_BYTES_SHORT;
        let room = if is_answered && again.is_none() { room.min(piece_bytes) } else { room };
        let most = match again {
            Some(&end) => distance(end, self.next),
            None if is_answered || left == 1 => left,
            None => left.min(BURST_PACKETS_MAX).min(BURST_BYTES_MAX / self.mtu),
        };
        let packets = match message.charge(at, most, self.mtu) <= room {
            true => most,
            false if again.is_some() && self.in_flight_bytes > 0 => 0,
            false if again.is_some() => most,
            // No small pieces of a READ: each costs the responder's attention, and one of `depth`.
            false if is_answered && room < window_bytes.min(piece_bytes) / 2 && self.in_flight_bytes > 0 => 0,
            false => most.min((room / (u64::from(self.mtu) + PACKET_OVERHEAD_BYTES)) as u32),
        };
        // One packet is always on the way.
        let packets = if packets == 0 && self.in_flight_bytes == 0 { 1 } else { packets };
        if packets == 0 {
            return Err(Hold::Congestion);
        }
        Ok(self.burst(self.sending, at, packets))
    }

    /// The oldest packet on the way (of a READ the rest of the oldest piece), to be sent once more.
    pub fn plan_probe(&self) -> Option<Burst> {
        let head = self.messages.front().filter(|_| self.has_unacknowledged())?;
        let packets = match (needs_answer(head.request.opcode), self.asked.front()) {
            (true, Some(&end)) => distance(end, self.oldest),
            _ => 1,
        };
        Some(self.burst(0, self.packet_of_head(), packets))
    }

    /// Applies a report of the peer to the packets on the way: calls `missing` for each that is missing before one that
    /// is kept, in their order (of a piece of a READ for its first PSN), with whether it may be a record. Gives the
    /// charge of those that are kept and have left the network; answers are still to come.
    pub fn look_behind(&self, first: u32, kept: Kept, mut missing: impl FnMut(u32, bool)) -> u64 {
        let (mut kept_bytes, mut place, mut step) = (0, 0, 0);
        while first == self.oldest && step <= kept.last() && step < self.on_the_way() {
            let psn = psn_add(first, step);
            while self.messages.get(place).is_some_and(|message| distance(psn, message.first_psn) >= message.packets) {
                place += 1;
            }
            let Some(packets) = self.repeated_packets(place, psn) else { break };
            let message = &self.messages[place];
            match kept.has(step) {
                true if needs_answer(message.request.opcode) => {}
                true => kept_bytes += message.charge(distance(psn, message.first_psn), packets, self.mtu),
                false => {
                    missing(psn, message.packets == 1 && record_bytes(message.request.opcode, message.length).is_some())
                }
            }
            step += packets;
        }
        kept_bytes
    }

    /// PSNs of what goes out again from this one on, which is a message's.
    fn repeated_packets(&self, place: usize, psn: u32) -> Option<u32> {
        match needs_answer(self.messages.get(place)?.request.opcode) {
            false => Some(1),
            true => self.asked.iter().find(|end| psn_ahead(**end, psn) > 0).map(|&end| distance(end, psn)),
        }
    }

    /// A packet on the way, to be sent once more; of a READ the piece from there on.
    pub fn plan_repeat(&self, psn: u32) -> Option<Burst> {
        if distance(psn, self.oldest) >= self.on_the_way() {
            return None;
        }
        let place = self.messages.partition_point(|message| psn_ahead(message.first_psn, psn) <= 0).checked_sub(1)?;
        let packets = self.repeated_packets(place, psn)?;
        Some(self.burst(place, distance(psn, self.messages[place].first_psn), packets))
    }

    /// Messages that are about to go out for the first time, if each of them may be a record.
    pub fn unsent_records(&self) -> Option<Unsent> {
        let count = self.messages.len() - self.sending;
        if count == 0 || count > RECORDS_MAX || self.repeats(self.next) {
            return None;
        }
        let mut unsent = Unsent { count: 0, bytes: fixed_bytes() as u32, on_the_way: self.in_flight_bytes };
        self.messages.range(self.sending..).all(|message| unsent.add(message)).then_some(unsent)
    }

    /// The message that was enlisted last is one more of them. False: it is no record.
    pub fn add_newest(&self, unsent: &mut Unsent) -> bool {
        self.messages.back().is_some_and(|newest| unsent.add(newest))
    }

    /// The messages that may go out in one frame from this burst's on: whole and short ones, with payload in one kind
    /// of place, of which all were sent before or none. `None`: fewer than two.
    pub fn plan_records(&self, burst: &Burst, limits: &RunLimits) -> Option<RecordRun> {
        let first = self.messages.get(burst.message).filter(|_| burst.at == 0)?;
        let (is_inline, repeats) = (first.request.is_inline(), self.repeats(burst.psn));
        let (message, psn) = (burst.message, burst.psn);
        let mut run = RecordRun { message, psn, count: 0, bytes: 0, charge: 0, cost_bytes: 0, is_inline };
        let mut used = fixed_bytes() as u32;
        for message in self.messages.range(burst.message..).take(RECORDS_MAX) {
            let is_like = message.packets == 1
                && message.request.is_inline() == is_inline
                && self.repeats(message.first_psn) == repeats;
            let Some(bytes) = record_bytes(message.request.opcode, message.length).filter(|_| is_like) else { break };
            used += bytes;
            let charge = run.charge + message.charge(0, 1, self.mtu);
            let cost_bytes = run.cost_bytes + u64::from(message.length.max(1));
            let is_within = used <= limits.room_bytes
                && self.in_flight_bytes + charge <= limits.window_bytes
                && cost_bytes <= limits.budget_bytes;
            if !is_within {
                break;
            }
            (run.count, run.bytes) = (run.count + 1, run.bytes + message.length);
            (run.charge, run.cost_bytes) = (charge, cost_bytes);
        }
        (run.count > 1).then_some(run)
    }

    pub fn messages_of(&self, run: &RecordRun) -> impl Iterator<Item = &OutgoingMessage> {
        self.messages.range(run.message..run.message + run.count as usize)
    }

    /// As [`fresh`](Self::fresh), of all messages of a run.
    pub fn fresh_records(&self, run: &RecordRun) -> (u32, u32) {
        if psn_ahead(self.counted, run.psn) <= 0 && !self.repeats(run.psn) {
            return (run.bytes, 0);
        }
        let bursts = (run.message..run.message + run.count as usize).map(|place| self.fresh(&self.burst(place, 0, 1)));
        bursts.fold((0, 0), |(bytes, messages), (more, begun)| (bytes + more, messages + begun))
    }

    /// The run, as planned, has gone out.
    pub fn note_records(&mut self, run: &RecordRun) {
        self.in_flight_bytes += run.charge;
        self.next = psn_add(self.next, run.count);
        self.sending += run.count as usize;
        self.note_sent(self.next);
    }

    /// As much of a burst as has so much payload, one packet at least; a READ's is asked for as a
    /// whole.
    pub fn trimmed(&self, burst: Burst, bytes: u64) -> Burst {
        if u64::from(burst.bytes) <= bytes || needs_answer(self.messages[burst.message].request.opcode) {
            return burst;
        }
        let packets = (bytes / u64::from(self.mtu)).max(1) as u32;
        self.burst(burst.message, burst.at, packets.min(burst.packets))
    }

    /// Cost of a burst against rate limits: payload, and messages that begin again.
    pub fn fresh(&self, burst: &Burst) -> (u32, u32) {
        let counted = psn_ahead(self.counted, burst.psn);
        let begins_anew = burst.at == 0 && counted <= 0 && self.repeats(burst.psn);
        let bytes = match u32::try_from(counted) {
            Ok(count) if count >= burst.packets => 0,
            Ok(count) if count > 0 => self.burst(burst.message, burst.at + count, burst.packets - count).bytes,
            _ => burst.bytes,
        };
        (bytes, u32::from(begins_anew))
    }

    /// Packets that go out again count once more.
    pub fn recount(&mut self) {
        self.counted = self.oldest;
    }

    /// Bytes that a burst counts.
    pub fn charge(&self, burst: &Burst) -> u64 {
        self.messages[burst.message].charge(burst.at, burst.packets, self.mtu)
    }

    /// The order of the PSNs that bound it; see the invariant above.
    fn is_ordered(&self) -> bool {
        let tail = distance(self.tail, self.oldest);
        distance(self.next, self.oldest) <= tail && distance(self.sent, self.oldest) <= tail
    }

    fn burst(&self, place: usize, at: u32, packets: u32) -> Burst {
        let message = &self.messages[place];
        let bytes = message.bytes_before(at + packets, self.mtu) - message.bytes_before(at, self.mtu);
        Burst { message: place, psn: psn_add(message.first_psn, at), at, packets, bytes }
    }

    /// The burst, as planned, is on its way to the fabric.
    pub fn note_next(&mut self, burst: &Burst) {
        let message = &self.messages[burst.message];
        self.in_flight_bytes += message.charge(burst.at, burst.packets, self.mtu);
        self.next = psn_add(self.next, burst.packets);
        if needs_answer(message.request.opcode) {
            if self.unanswered == self.asked.len() {
                self.asked.push_back(self.next);
            }
            self.unanswered += 1;
        }
        if burst.at + burst.packets == message.packets {
            self.sending += 1;
        }
    }

    /// All before `end` has gone out.
    pub fn note_sent(&mut self, end: u32) {
        if psn_ahead(end, self.sent) > 0 {
            self.sent = end;
        }
        if psn_ahead(end, self.counted) > 0 {
            self.counted = end;
        }
    }

    /// A burst did not go out, though `note_next` had counted it. False: what would go out
    /// next is not what comes after it any more, or it was acknowledged (it was a retry); so
    /// nothing is to be taken back.
    pub fn take_back(&mut self, burst: &Burst) -> bool {
        let is_last = self.next == psn_add(burst.psn, burst.packets);
        if !is_last || psn_ahead(burst.psn, self.oldest) < 0 || self.next == self.oldest {
            return false;
        }
        if self.messages.get(self.sending).is_none_or(|message| message.first_psn == self.next) {
            self.sending -= 1;
        }
        let message = &self.messages[self.sending];
        self.in_flight_bytes -= message.charge(burst.at, burst.packets, self.mtu);
        if needs_answer(message.request.opcode) {
            self.unanswered -= 1;
            if psn_ahead(self.next, self.sent) > 0 {
                self.asked.pop_back();
            }
        }
        self.next = burst.psn;
        true
    }

    /// Go-back-N: all that is not acknowledged goes out again.
    pub fn go_back(&mut self) {
        self.next = self.oldest;
        self.sending = 0;
        self.in_flight_bytes = 0;
        self.unanswered = 0;
    }

    // ---- acknowledging

    /// How many PSNs of the oldest message come before `psn`, or up to its end; 0: none.
    pub fn acknowledgeable(&self, psn: u32) -> u32 {
        let Some(head) = self.messages.front() else { return 0 };
        (head.packets - self.packet_of_head()).min(distance(psn, self.oldest))
    }

    /// The next `count` PSNs are acknowledged, all of the oldest message. True: it is whole.
    pub fn advance(&mut self, count: u32) -> bool {
        let (at, unacknowledged) = (self.packet_of_head(), distance(self.next, self.oldest).min(count));
        let head = &self.messages[0];
        self.in_flight_bytes -= head.charge(at, unacknowledged, self.mtu);
        self.acknowledged_bytes = self.acknowledged_bytes.saturating_add(head.charge(at, count, self.mtu));
        let is_whole = at + count == head.packets;
        self.oldest = psn_add(self.oldest, count);
        if unacknowledged < count {
            // Given up, and yet acknowledged: it need not go out again.
            self.next = self.oldest;
        }
        self.note_sent(self.oldest);
        while self.asked.front().is_some_and(|end| psn_ahead(*end, self.oldest) <= 0) {
            self.asked.pop_front();
            self.unanswered = self.unanswered.saturating_sub(1);
        }
        debug_assert!(self.is_ordered(), "oldest, next, sent and tail stand in this order");
        is_whole
    }

    /// Bytes that were acknowledged since the last call.
    pub fn take_acknowledged(&mut self) -> u64 {
        core::mem::take(&mut self.acknowledged_bytes)
    }

    /// Takes the oldest message out: it is over, whether whole or not.
    pub fn remove_head(&mut self) -> Option<OutgoingMessage> {
        let message = self.messages.pop_front()?;
        self.answers_due -= usize::from(needs_answer(message.request.opcode));
        self.sending = self.sending.saturating_sub(1);
        Some(message)
    }

    /// A request is over: its box serves another one.
    pub fn recycle(&mut self, request: Box<SendRequest>) {
        self.spare.push(request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_verbs::SendOpcode as O;
    use proptest::prelude::*;

    fn enlist(window: &mut SendWindow, opcode: O, length: u32) {
        let mut request = Box::new(SendRequest { opcode, ..Default::default() });
        window.enlist(&mut request, length);
    }

    fn send(window: &mut SendWindow, window_bytes: u64, depth: usize) -> Result<Burst, Hold> {
        let burst = window.plan(window_bytes, depth)?;
        window.note_next(&burst);
        window.note_sent(psn_add(burst.psn, burst.packets));
        Ok(burst)
    }

    #[test]
    fn messages_take_psns_by_their_packets() {
        for (opcode, length, packets) in [
            (O::RdmaWrite, 0, 1),
            (O::RdmaWrite, 1, 1),
            (O::Send, 256, 1),
            (O::Send, 257, 2),
            (O::RdmaRead, 0, 1),
            (O::RdmaRead, 512, 2),
            (O::RdmaRead, 1 << 31, 1 << 23),
            (O::CompareSwap, 8, 1),
            (O::Flush, 0, 1),
            (O::AtomicWrite, 8, 1),
        ] {
            let mut window = SendWindow::new(0xff_fff0, 256);
            enlist(&mut window, opcode, length);
            assert_eq!(window.message(0).packets, packets, "{opcode:?} {length}");
        }
    }

    #[test]
    fn a_read_is_asked_for_in_pieces_of_the_window() {
        let packet = 1024 + PACKET_OVERHEAD_BYTES;
        let mut window = SendWindow::new(0, 1024);
        enlist(&mut window, O::RdmaRead, 10 * 1024);
        assert_eq!(send(&mut window, 4 * packet, 2).map(|burst| (burst.at, burst.packets)), Ok((0, 4)));
        assert_eq!(send(&mut window, 4 * packet, 2), Err(Hold::Congestion));
        window.advance(1);
        assert_eq!(send(&mut window, 4 * packet, 2), Err(Hold::Congestion), "one packet is no piece");
        window.advance(1);
        assert_eq!(send(&mut window, 4 * packet, 2).map(|burst| (burst.at, burst.packets)), Ok((4, 2)));
        assert_eq!(send(&mut window, 8 * packet, 2), Err(Hold::Depth));
        window.advance(2);
        assert_eq!(send(&mut window, 8 * packet, 2).map(|burst| (burst.at, burst.packets)), Ok((6, 4)));
        assert!(!window.has_unsent());
        assert_eq!(window.plan_probe().map(|burst| (burst.at, burst.packets)), Some((4, 2)), "the oldest piece");
    }

    #[test]
    fn one_packet_is_always_allowed() {
        let mut window = SendWindow::new(0, 4096);
        enlist(&mut window, O::RdmaWrite, 10_000);
        assert_eq!(send(&mut window, 0, 1).map(|burst| burst.packets), Ok(1));
        assert_eq!(send(&mut window, 0, 1), Err(Hold::Congestion));
    }

    #[test]
    fn acknowledged_after_going_back() {
        let mut window = SendWindow::new(5, 256);
        enlist(&mut window, O::RdmaWrite, 512);
        enlist(&mut window, O::RdmaWrite, 512);
        while send(&mut window, 1 << 20, 1).is_ok() {}
        window.go_back();
        assert_eq!(window.in_flight_bytes(), 0);
        assert!(window.advance(2));
        window.remove_head();
        let next = window.plan(1 << 20, 1).map(|burst| (burst.message, burst.psn));
        assert_eq!(next, Ok((0, 7)), "what was acknowledged does not go out again");
    }

    proptest! {
        /// The invariants hold for any order of sends, acknowledgements and losses.
        #[test]
        fn invariants(
            steps in prop::collection::vec((0u8..5, 0u32..3_000, 0u32..9), 1..200),
            first in 0u32..1 << 24,
        ) {
            let mut window = SendWindow::new(first, 256);
            for (what, size, which) in steps {
                match what {
                    0 if window.len() < 20 => {
                        let opcode = [O::RdmaWrite, O::RdmaRead, O::Send, O::FetchAdd, O::Flush][which as usize % 5];
                        let length = match opcode { O::FetchAdd => 8, O::Flush => 0, _ => size };
                        enlist(&mut window, opcode, length);
                    }
                    1 | 2 => { let _ = send(&mut window, u64::from(size) * 3, 2); }
                    3 => window.go_back(),
                    _ => {
                        let sent = distance(window.sent, window.oldest);
                        let mut left = sent.min(size % 40);
                        while left > 0 {
                            let count = window.acknowledgeable(psn_add(window.oldest, left));
                            prop_assert!(count > 0);
                            left -= count;
                            if window.advance(count) {
                                let message = window.remove_head().unwrap();
                                window.recycle(message.request);
                            }
                        }
                    }
                }
                check(&window);
            }
        }
    }

    fn check(window: &SendWindow) {
        let ahead = |psn| distance(psn, window.oldest);
        assert!(ahead(window.next) <= ahead(window.tail) && ahead(window.sent) <= ahead(window.tail));
        let charge: u64 = (0..ahead(window.next))
            .map(|step| {
                let psn = psn_add(window.oldest, step);
                let holds = |message: &&OutgoingMessage| distance(psn, message.first_psn) < message.packets;
                let message = window.messages.iter().find(holds).expect("a PSN under way is a message's");
                message.charge(distance(psn, message.first_psn), 1, window.mtu)
            })
            .sum();
        assert_eq!(charge, window.in_flight_bytes);
        check_repeats(window);
        match window.messages.get(window.sending) {
            Some(message) => assert!(distance(window.next, message.first_psn) < message.packets),
            None => assert!(window.next == window.tail && window.sending == window.messages.len()),
        }
    }

    /// Reports name each packet on the way once at most, as missing or as kept, and the missing ones can go out again.
    fn check_repeats(window: &SendWindow) {
        for kept in [0, 1, 1 << 127, 0x5a5a << 112 | 0xf0f3, u128::MAX << 3].map(Kept) {
            let (mut holes, mut charge) = (Vec::new(), 0);
            let kept_bytes = window.look_behind(window.oldest, kept, |psn, _| holes.push(psn));
            let mut before = None;
            for psn in holes {
                let at = distance(psn, window.oldest);
                assert!(before < Some(at) && !kept.has(at), "in order, and not kept");
                let burst = window.plan_repeat(psn).expect("what is on the way can go out again");
                assert_eq!(burst.psn, psn);
                assert!(at + burst.packets <= window.on_the_way());
                charge += window.charge(&burst);
                before = Some(at);
            }
            assert!(kept_bytes + charge <= window.in_flight_bytes);
            if kept.last() >= window.on_the_way() && window.answers_due == 0 {
                assert_eq!(kept_bytes + charge, window.in_flight_bytes, "all of it");
            }
        }
        let beyond = psn_add(window.oldest, window.on_the_way());
        assert_eq!((window.plan_repeat(beyond), window.plan_repeat(psn_add(window.oldest, MASK_24))), (None, None));
    }
}
