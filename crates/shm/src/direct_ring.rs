//! A direct ring: how messages of one QP reach the RECVs of its peer past the router. Its layout is
//! [`layout::direct_ring`].
//!
//! Both ends distrust each other: each word is loaded once and checked. What a sender says can
//! spoil the messages that its receiver gets from it, and what a receiver says those that it is
//! sent; nothing else.
//!
//! Invariant: the sender never publishes over what the receiver has not freed. The receiver takes
//! places from the sender, and has none outside the ring: each number of a slot that a descriptor
//! can hold is one of the ring's, and the place of data is bounded.
mod places;

use crate::handshake;
use crate::layout::{
    CREDIT_ROUTED, DIRECT_RING_OPEN, descriptor,
    direct_ring::{self, DESCRIPTOR_BYTES, DESCRIPTOR_COUNT, UNIT_BYTES, UNIT_COUNT},
};
use crate::own::{OwnMemory, OwnRange};
use crate::segment::Segment;
use freeflow_verbs::CompletionFlags;
use places::{Data, Slots};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Longest message that goes by a direct ring, bytes: several find room at once. Longer ones go
/// through the router, which copies once.
pub const DIRECT_RING_MESSAGE_BYTES_MAX: u32 = UNIT_COUNT / 4 * UNIT_BYTES as u32;

/// A message, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// Payload, bytes.
    pub length: u32,
    /// The RECV that it takes.
    pub msn: u32,
    /// Network byte order.
    pub immediate: u32,
    /// Of the receiver's completion.
    pub flags: CompletionFlags,
    /// It reports a WRITE with immediate data: how many bytes that wrote, as the sender says.
    pub written: Option<u32>,
}

const CACHE_LINE_BYTES: usize = 64;
/// Payload in the first cache line of a descriptor.
const FIRST_LINE_PAYLOAD_BYTES: usize = CACHE_LINE_BYTES - descriptor::PAYLOAD;

/// Where the number of the next slot stands in the word at [`descriptor::FLAGS`].
const NEXT_SLOT_SHIFT: u32 = 16;

/// Set in [`descriptor::FLAGS`] of a report of a WRITE, beyond the flags of the completion.
const REPORTS_WRITE: u64 = 1 << 8;

/// State of a RECV, as a sender knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credit {
    /// None is posted, as far as can be seen.
    Missing,
    /// The router must deliver to it.
    Routed,
    /// It takes so many bytes.
    Bytes(u32),
}

/// How the receiver of a direct ring lists its RECVs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreditList {
    /// Each of its own receive queue, which has so many slots, a power of two.
    Each(u32),
    /// They are an SRQ's: how many messages are promised one.
    Promised,
}

impl CreditList {
    /// Words.
    pub fn count(self) -> u32 {
        match self {
            Self::Each(count) => count,
            Self::Promised => 1,
        }
    }

    /// Panics if the list is not one that the segment holds.
    fn check(self, segment: &Segment) {
        let count = self.count();
        assert!(count.is_power_of_two() && direct_ring::bytes(count) <= segment.bytes());
    }
}

fn descriptor_at(slot: u8) -> usize {
    direct_ring::DESCRIPTORS + slot as usize * DESCRIPTOR_BYTES
}

/// Where data begins whose place the sender names: inside the ring, whatever it says.
fn data_at(first: u32, length: u32) -> usize {
    let last = UNIT_COUNT - length.div_ceil(UNIT_BYTES as u32);
    direct_ring::DATA + first.min(last) as usize * UNIT_BYTES
}

/// Whether the payload of a message is not in its descriptor.
fn has_data(length: u32) -> bool {
    length as usize > descriptor::PAYLOAD_BYTES_MAX
}

/// The sender's end.
pub struct DirectRingSender {
    segment: Arc<Segment>,
    credits: CreditList,
    /// Words of the last cache line of credits that was looked at. The receiver writes there for every RECV that it
    /// posts, and each look that follows costs a transfer of the line.
    seen: [u64; CREDITS_PER_LINE],
    slots: Slots,
    data: Data,
    /// Messages, free-running.
    next: u32,
    /// As the receiver said when it was last looked at.
    freed: u32,
}

impl DirectRingSender {
    /// Over a segment of [`direct_ring::bytes`] of so many credits. Panics if it is shorter.
    pub fn new(segment: Arc<Segment>, credits: CreditList) -> Self {
        credits.check(&segment);
        let seen = [0; CREDITS_PER_LINE];
        Self { segment, credits, seen, slots: Slots::new(), data: Data::default(), next: 0, freed: 0 }
    }

    /// The receiver takes messages.
    #[inline]
    pub fn is_open(&self) -> bool {
        // Acquire; partner: the Release store in `DirectRingReceiver::open`: credits come with it.
        self.segment.u32(direct_ring::STATE).load(Ordering::Acquire) == DIRECT_RING_OPEN
    }

    /// The receiver's credit for its RECV of that number.
    #[inline]
    pub fn credit(&mut self, msn: u32) -> Credit {
        let CreditList::Each(count) = self.credits else { return self.promised() };
        let slot = (msn & (count - 1)) as usize % CREDITS_PER_LINE;
        if !is_of(self.seen[slot], msn) {
            self.look_at_credits(msn, count);
        }
        match self.seen[slot] {
            word if !is_of(word, msn) => Credit::Missing,
            word if word as u32 == CREDIT_ROUTED => Credit::Routed,
            word => Credit::Bytes(word as u32),
        }
    }

    /// Takes over the credit of a RECV, and those after it in the same cache line.
    #[cold]
    fn look_at_credits(&mut self, msn: u32, count: u32) {
        let first = (msn & (count - 1)) as usize % CREDITS_PER_LINE;
        for (msn, slot) in (0..count).map(|more| msn.wrapping_add(more)).zip(first..CREDITS_PER_LINE) {
            // Acquire; partner: the Release store in `CreditWriter::publish`: what used the RECV's
            // memory before has ended.
            let word = self.segment.u64(credit_at(msn, count)).load(Ordering::Acquire);
            if !is_of(word, msn) {
                break;
            }
            self.seen[slot] = word;
        }
    }

    /// The receiver's promise to the next message of the ring.
    fn promised(&self) -> Credit {
        // Acquire; partner: the Release store in `DirectRingReceiver::promise`.
        let word = self.segment.u64(credit_at(0, 1)).load(Ordering::Acquire);
        let left = ((word >> 32) as u32).wrapping_sub(self.next).cast_signed();
        if left > 0 { Credit::Bytes(word as u32) } else { Credit::Missing }
    }

    /// Whether a message of this length finds room now.
    #[inline]
    pub fn has_room(&mut self, length: u32) -> bool {
        self.fits(length) || {
            self.look();
            self.fits(length)
        }
    }

    #[inline]
    fn fits(&self, length: u32) -> bool {
        self.next.wrapping_sub(self.freed) < self.slots.count()
            && (!has_data(length) || self.data.place(length).is_some())
    }

    /// Takes over what the receiver says, if it is possible.
    #[cold]
    fn look(&mut self) {
        // Acquire; partner: the Release store in `DirectRingReceiver::commit`: the receiver has
        // read what is now overwritten.
        let freed = self.segment.u32(direct_ring::FREED).load(Ordering::Acquire);
        if self.next.wrapping_sub(freed) <= self.next.wrapping_sub(self.freed) {
            self.freed = freed;
            self.data.note_freed(freed);
        }
    }

    /// Publishes a message that has room; its payload stands in `inline`, then in `ranges`:
    /// `message.length` bytes altogether.
    #[inline]
    pub fn publish(&mut self, own: OwnMemory, message: &Staged, inline: &[u8], ranges: &[OwnRange]) {
        let at = descriptor_at(self.slots.next());
        let (mut payload, mut first) = (at + descriptor::PAYLOAD, 0);
        if has_data(message.length) {
            let place = self.data.place(message.length).expect("the message has room");
            (payload, first) = (data_at(place.first, message.length), place.first);
            self.data.take(place, self.next);
        }
        let end = payload + message.length as usize;
        let mut reached = payload;
        if !inline.is_empty() {
            self.segment.write(reached, inline, false).expect("the direct ring's places are inside it");
            reached += inline.len();
        }
        for range in ranges {
            assert!(reached + range.bytes as usize <= end, "the pieces are as long as the message");
            let copied = own.copy_in(*range, &self.segment, reached, false);
            debug_assert!(copied, "the direct ring's places are inside it");
            reached += range.bytes as usize;
        }
        // Relaxed, both: the head's Release store brings them along.
        let second = u64::from(message.msn) | u64::from(message.immediate) << 32;
        self.segment.u64(at + descriptor::MSN).store(second, Ordering::Relaxed);
        let third = match message.written {
            Some(bytes) => REPORTS_WRITE | u64::from(bytes) << 32,
            None => u64::from(first) << 32,
        };
        let third = third | u64::from(message.flags.0) | u64::from(self.next_slot()) << NEXT_SLOT_SHIFT;
        self.segment.u64(at + descriptor::FLAGS).store(third, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
        let head = u64::from(message.length) | u64::from(self.next) << 32;
        // Release; partner: the Acquire load in `DirectRingReceiver::peek`.
        self.segment.u64(at + descriptor::LENGTH).store(head, Ordering::Release);
    }

    /// Goes on to the slot of the message after this one; if all slots are in use, there are more.
    #[inline]
    fn next_slot(&mut self) -> u8 {
        let is_full = |ring: &Self| ring.next.wrapping_sub(ring.freed) + 1 >= ring.slots.count();
        if is_full(self) {
            self.look();
            if is_full(self) {
                self.add_slots();
            }
        }
        self.slots.advance()
    }

    /// Makes no slot of them look as if its message were published: what nobody wrote is the number of one, too.
    #[cold]
    fn add_slots(&mut self) {
        let published = u64::from(self.next) << 32;
        for slot in self.slots.grow() {
            // Relaxed: the Release store of the head that leads there brings it along.
            self.segment.u64(descriptor_at(slot) + descriptor::LENGTH).store(published, Ordering::Relaxed);
        }
    }

    /// After publishing: the receiver must be notified by the router. Fences first.
    #[inline]
    pub fn must_notify(&self) -> bool {
        // SeqCst; partner: the fence in `DirectRingReceiver::want_notifications`.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        self.segment.u32(direct_ring::WANTS_NOTIFICATION).load(Ordering::Relaxed) != 0
    }

    /// After [`Self::must_notify`] said so: the receiver's RECVs are flushed, and it may never see
    /// the message.
    #[inline]
    pub fn may_be_unseen(&self) -> bool {
        handshake::may_be_unseen(self.segment.u32(direct_ring::STATE))
    }
}

/// Credits in a cache line.
const CREDITS_PER_LINE: usize = 8;

/// Whether a word is the credit of that RECV.
#[inline]
fn is_of(word: u64, msn: u32) -> bool {
    (word >> 32) as u32 == msn.wrapping_add(1)
}

fn credit_at(msn: u32, credit_count: u32) -> usize {
    direct_ring::credits(credit_count) + (msn & (credit_count - 1)) as usize * 8
}

/// The receiver's end: who posts RECVs.
pub struct CreditWriter {
    segment: Arc<Segment>,
    credit_count: u32,
}

impl CreditWriter {
    /// Says what the RECV at `position` takes; `None`: the router must deliver to it.
    #[inline]
    pub fn publish(&self, position: u32, bytes: Option<u32>) {
        let bytes = bytes.map_or(CREDIT_ROUTED, |bytes| bytes.min(CREDIT_ROUTED - 1));
        let word = u64::from(bytes) | u64::from(position.wrapping_add(1)) << 32;
        // Release; partner: the Acquire load in `DirectRingSender::credit`.
        self.segment.u64(credit_at(position, self.credit_count)).store(word, Ordering::Release);
    }
}

/// The receiver's end: who takes messages.
pub struct DirectRingReceiver {
    segment: Arc<Segment>,
    /// Messages that were taken, free-running.
    taken: u32,
    /// Of the next message.
    slot: u8,
    wants_notification: bool,
    has_left: bool,
}

impl DirectRingReceiver {
    /// Over a segment of [`direct_ring::bytes`] of so many credits. Panics if it is shorter. It is
    /// not open yet, and to be notified.
    pub fn new(segment: Arc<Segment>, credits: CreditList) -> (Self, CreditWriter) {
        credits.check(&segment);
        let credits = CreditWriter { segment: segment.clone(), credit_count: credits.count() };
        let receiver = Self { segment, taken: 0, slot: 0, wants_notification: false, has_left: false };
        receiver.segment.u32(direct_ring::WANTS_NOTIFICATION).store(1, Ordering::Relaxed);
        (Self { wants_notification: true, ..receiver }, credits)
    }

    /// Takes messages from now on. The RECVs that are posted already have their credits.
    pub fn open(&self) {
        // Release; partner: the Acquire load in `DirectRingSender::is_open`.
        self.segment.u32(direct_ring::STATE).store(DIRECT_RING_OPEN, Ordering::Release);
    }

    /// The next message, if there is one.
    #[inline]
    pub fn peek(&self) -> Option<Staged> {
        let at = descriptor_at(self.slot);
        // Acquire; partner: the Release store in `publish`. Loaded once.
        let head = self.segment.u64(at + descriptor::LENGTH).load(Ordering::Acquire);
        if (head >> 32) as u32 != self.taken.wrapping_add(1) {
            return None;
        }
        let length = (head as u32).min(DIRECT_RING_MESSAGE_BYTES_MAX);
        // Relaxed, both: came with the head.
        let second = self.segment.u64(at + descriptor::MSN).load(Ordering::Relaxed);
        let third = self.segment.u64(at + descriptor::FLAGS).load(Ordering::Relaxed);
        if has_data(length) {
            self.segment.prefetch(data_at((third >> 32) as u32, length));
        } else if length as usize > FIRST_LINE_PAYLOAD_BYTES {
            self.segment.prefetch(at + CACHE_LINE_BYTES);
        }
        Some(Staged {
            length,
            msn: second as u32,
            immediate: (second >> 32) as u32,
            flags: CompletionFlags(third as u8 & (CompletionFlags::WITH_IMMEDIATE | CompletionFlags::SOLICITED)),
            written: (third & REPORTS_WRITE != 0).then_some((third >> 32) as u32),
        })
    }

    /// The slot after one whose message was published.
    #[inline]
    fn slot_after(&self, at: usize) -> u8 {
        // Relaxed: came with the head.
        (self.segment.u64(at + descriptor::FLAGS).load(Ordering::Relaxed) >> NEXT_SLOT_SHIFT) as u8
    }

    /// How many messages were published until now, free-running.
    pub fn published(&self) -> u32 {
        let (mut number, mut slot) = (self.taken(), self.slot);
        for _ in 0..DESCRIPTOR_COUNT {
            let at = descriptor_at(slot);
            // Acquire; partner: the Release store in `publish`.
            let head = self.segment.u64(at + descriptor::LENGTH).load(Ordering::Acquire);
            if (head >> 32) as u32 != number.wrapping_add(1) {
                break;
            }
            (number, slot) = (number.wrapping_add(1), self.slot_after(at));
        }
        number
    }

    /// Copies the payload of the message that `peek` gave to these ranges, as far as they reach.
    #[inline]
    pub fn copy_out(&self, own: OwnMemory, message: &Staged, to: impl Iterator<Item = OwnRange>) {
        let at = descriptor_at(self.slot);
        let mut payload = at + descriptor::PAYLOAD;
        if has_data(message.length) {
            // Relaxed: came with the head.
            let third = self.segment.u64(at + descriptor::FLAGS).load(Ordering::Relaxed);
            payload = data_at((third >> 32) as u32, message.length);
        }
        let mut left = message.length;
        for range in to {
            let bytes = range.bytes.min(left);
            if bytes == 0 {
                continue;
            }
            let copied = own.copy_out(&self.segment, payload, OwnRange { bytes, ..range });
            debug_assert!(copied, "the direct ring's places are inside it");
            payload += bytes as usize;
            left -= bytes;
        }
    }

    /// The message that `peek` gave is done with.
    #[inline]
    pub fn take(&mut self) {
        self.slot = self.slot_after(descriptor_at(self.slot));
        self.taken = self.taken.wrapping_add(1);
    }

    /// How many messages were taken, free-running.
    #[inline]
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Promises a RECV that takes so many bytes to each of the messages before this one
    /// ([`CreditList::Promised`]).
    #[inline]
    pub fn promise(&self, until: u32, bytes: u32) {
        let word = u64::from(bytes) | u64::from(until) << 32;
        // Release; partner: the Acquire load in `DirectRingSender::promised`: what used the RECVs'
        // memory before has ended.
        self.segment.u64(credit_at(0, 1)).store(word, Ordering::Release);
    }

    /// Gives the sender back what was taken.
    #[inline]
    pub fn commit(&self) {
        // Release; partner: the Acquire load in `look`.
        self.segment.u32(direct_ring::FREED).store(self.taken, Ordering::Release);
    }

    /// Whether the sender shall have the router notify of messages. After `true` look once more; a
    /// fence is made.
    #[inline]
    pub fn want_notifications(&mut self, wants: bool) {
        if std::mem::replace(&mut self.wants_notification, wants) == wants || self.has_left {
            return;
        }
        // Relaxed: ordered by the fence.
        self.segment.u32(direct_ring::WANTS_NOTIFICATION).store(u32::from(wants), Ordering::Relaxed);
        // SeqCst; partner: the fence in `must_notify`.
        fence(Ordering::SeqCst);
    }

    /// RECVs are flushed: what [`Self::peek`] finds from now on is taken, and the sender of
    /// anything later knows that it may not be.
    pub fn leave(&mut self) {
        if !std::mem::replace(&mut self.has_left, true) {
            self.wants_notification = true;
            handshake::leave(self.segment.u32(direct_ring::STATE), self.segment.u32(direct_ring::WANTS_NOTIFICATION));
        }
    }

    pub fn wants_notification(&self) -> bool {
        self.wants_notification
    }
}

#[cfg(test)]
mod tests;
