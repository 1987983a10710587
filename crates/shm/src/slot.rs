//! One cache line that crosses from a producer to a consumer, and the cursors that walk a ring of
//! such lines.
//!
//! A slot is eight 64-bit words. The *head*, word 1, carries 32 bits of the message (low half) and
//! the sequence (high half): position plus one, wrapping. It is stored last and loaded first,
//! always as one 64-bit word, so one Release store publishes the whole line.
//!
//! A slot never published holds sequence 0, which position `u32::MAX` expects; rings begin at
//! position 0, so every slot has been published many times before that position comes.
//!
//! Invariant: every word of a slot is only ever accessed as a whole `AtomicU64`: a hostile writer
//! that races with us can change what we read, never whether the read is defined.
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// 64-bit words of a slot. Under loom three: one before the head, the head, one after it; more
/// would only be slower.
pub const SLOT_WORDS: usize = if cfg!(loom) { 3 } else { 8 };
/// Index of the word that publishes.
pub const HEAD: usize = 1;

/// The ring holds as many entries as it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// One cache line of a ring.
#[repr(C, align(64))]
pub struct Slot {
    words: [AtomicU64; SLOT_WORDS],
}

/// Words read from a slot: word [`HEAD`] as it was when its sequence matched, the others after it.
pub type Line = [u64; SLOT_WORDS];

impl Slot {
    /// Words whose sequence was never published.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self { words: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Publishes `line` at `position`; the low half of `line[HEAD]` is message, its high half is
    /// ignored.
    #[inline]
    pub fn publish(&self, position: u32, line: &Line) {
        for (index, (word, value)) in self.words.iter().zip(line).enumerate() {
            if index != HEAD {
                word.store(*value, Ordering::Relaxed);
            }
        }
        let head = line[HEAD] & u64::from(u32::MAX) | u64::from(position.wrapping_add(1)) << 32;
        // Release; partner: the Acquire load in `take`. The words above, and an extension stored
        // before, come with it.
        self.words[HEAD].store(head, Ordering::Release);
    }

    /// Whether the slot is published for `position`.
    #[inline]
    pub fn is_published(&self, position: u32) -> bool {
        // Acquire; partner: the Release store in `publish` (or in `clear`).
        sequence(self.words[HEAD].load(Ordering::Acquire)) == position.wrapping_add(1)
    }

    /// Copies the slot out, if it is published for `position`.
    #[inline]
    pub fn take(&self, position: u32) -> Option<Line> {
        // Acquire; partner: the Release store in `publish`. Loaded once; the copy is used.
        let head = self.words[HEAD].load(Ordering::Acquire);
        if sequence(head) != position.wrapping_add(1) {
            return None;
        }
        let mut line = [0; SLOT_WORDS];
        for (index, (value, word)) in line.iter_mut().zip(&self.words).enumerate() {
            *value = if index == HEAD { head } else { word.load(Ordering::Relaxed) };
        }
        Some(line)
    }

    /// One word of a slot that the caller itself wrote.
    #[inline]
    pub fn own_word(&self, index: usize) -> u64 {
        // Relaxed: same thread, or ordered by the caller's own lock.
        self.words[index].load(Ordering::Relaxed)
    }

    /// The words, for extensions: written before, read after the slot they belong to.
    #[inline]
    pub fn words(&self) -> &[AtomicU64; SLOT_WORDS] {
        &self.words
    }

    /// Makes the slot match no position that a fresh consumer expects.
    #[inline]
    pub fn clear(&self) {
        // Release; partner: the Acquire loads in `take` and `is_published`.
        self.words[HEAD].store(0, Ordering::Release);
    }
}

#[inline]
fn sequence(head: u64) -> u32 {
    (head >> 32) as u32
}

/// A ring of slots: a free-running position finds its slot modulo the slot count, a power of two.
pub trait Slots {
    fn slot(&self, position: u32) -> &Slot;
}

impl Slots for [Slot] {
    #[inline]
    fn slot(&self, position: u32) -> &Slot {
        &self[position as usize & (self.len() - 1)]
    }
}

/// Publishes requests; the caller bounds how many are outstanding.
#[derive(Debug, Default)]
pub struct PublishCursor {
    next: u32,
}

impl PublishCursor {
    pub fn at(next: u32) -> Self {
        Self { next }
    }

    /// The position that the next publication gets.
    #[inline]
    pub fn position(&self) -> u32 {
        self.next
    }

    #[inline]
    pub fn publish<S: Slots + ?Sized>(&mut self, slots: &S, line: &Line) -> u32 {
        let position = self.next;
        slots.slot(position).publish(position, line);
        self.next = position.wrapping_add(1);
        position
    }
}

/// Takes what was published, in order.
#[derive(Debug, Default)]
pub struct TakeCursor {
    taken: u32,
}

impl TakeCursor {
    pub fn at(taken: u32) -> Self {
        Self { taken }
    }

    /// How many were taken: also the position that comes next.
    #[inline]
    pub fn position(&self) -> u32 {
        self.taken
    }

    /// Goes on at a later position.
    pub fn skip_to(&mut self, position: u32) {
        self.taken = position;
    }

    #[inline]
    pub fn has_next<S: Slots + ?Sized>(&self, slots: &S) -> bool {
        slots.slot(self.taken).is_published(self.taken)
    }

    #[inline]
    pub fn take<S: Slots + ?Sized>(&mut self, slots: &S) -> Option<(u32, Line)> {
        let position = self.taken;
        let line = slots.slot(position).take(position)?;
        self.taken = position.wrapping_add(1);
        Some((position, line))
    }

    /// How many are published and not taken, at most `limit` (at most the slot count).
    ///
    /// A binary search: an honest producer publishes in order, so published positions are a prefix.
    /// A hostile one gets some number up to `limit`, after a bounded number of loads.
    pub fn pending<S: Slots + ?Sized>(&self, slots: &S, limit: u32) -> u32 {
        let (mut published, mut unpublished) = (0, limit);
        while published < unpublished {
            let middle = published + (unpublished - published) / 2;
            let position = self.taken.wrapping_add(middle);
            if slots.slot(position).is_published(position) {
                published = middle + 1;
            } else {
                unpublished = middle;
            }
        }
        published
    }
}

/// The producer's side of a ring whose consumer reports how far it has come.
#[derive(Debug)]
pub struct BoundedPublishCursor {
    next: u32,
    /// The consumer's count when last looked at.
    consumed: u32,
    /// Entries that may stand in the ring.
    capacity: u32,
}

impl BoundedPublishCursor {
    /// `next` is the first position, `consumed` what the consumer's word holds now.
    pub fn at(next: u32, consumed: u32, capacity: u32) -> Self {
        Self { next, consumed, capacity }
    }

    /// Publishes `line`, unless `capacity` entries are unconsumed. `consumer` is loaded only when
    /// it looks so.
    #[inline]
    pub fn publish<S: Slots + ?Sized>(&mut self, slots: &S, consumer: &AtomicU32, line: &Line) -> Result<(), Full> {
        if self.next.wrapping_sub(self.consumed) >= self.capacity {
            self.look(consumer);
            if self.next.wrapping_sub(self.consumed) >= self.capacity {
                return Err(Full);
            }
        }
        slots.slot(self.next).publish(self.next, line);
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Entries published and not yet consumed, at most the capacity.
    pub fn unconsumed(&mut self, consumer: &AtomicU32) -> u32 {
        self.look(consumer);
        self.next.wrapping_sub(self.consumed).min(self.capacity)
    }

    /// Takes over the consumer's count if it is possible: not before what it was, not beyond what
    /// was published. A hostile consumer that says anything else stays where it was.
    #[cold]
    fn look(&mut self, consumer: &AtomicU32) {
        // Acquire; partner: the Release store in `commit`: the consumer has read what we now
        // overwrite.
        let consumed = consumer.load(Ordering::Acquire);
        if self.next.wrapping_sub(consumed) <= self.next.wrapping_sub(self.consumed) {
            self.consumed = consumed;
        }
    }
}

/// Publishes to the producer that every position below `consumed` was read.
#[inline]
pub fn commit(consumer: &AtomicU32, consumed: u32) {
    // Release; partner: the Acquire load in `BoundedPublishCursor::look`.
    consumer.store(consumed, Ordering::Release);
}
