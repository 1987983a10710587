//! Rings laid over a segment: bounds and alignment are checked once, here; afterwards a masked
//! index needs no check.
use crate::layout::{QueueShape, SLOT_BYTES, queue};
use crate::segment::Segment;
use crate::slot::{SLOT_WORDS, Slot, Slots};
use crate::sync::{AtomicU32, AtomicU64};
use std::ptr::NonNull;
use std::sync::Arc;

const WORD_BYTES: usize = 8;
/// The first of [`QueueView::tally`], and how many there are.
pub(crate) const TALLY: usize = queue::DIRECT_SENDS;
pub(crate) const TALLY_WORDS: usize = (queue::BYTES - TALLY) / WORD_BYTES;

/// `count` slots (a power of two) at `offset` of a segment, which it keeps mapped.
pub(crate) struct SlotView {
    first: NonNull<Slot>,
    mask: u32,
    segment: Arc<Segment>,
}

// SAFETY: it is a pointer to atomics inside a segment that it keeps alive; `Segment` is Send and
// Sync.
unsafe impl Send for SlotView {}
// SAFETY: as above.
unsafe impl Sync for SlotView {}

impl SlotView {
    /// Panics if the slots are not inside the segment or not aligned.
    pub(crate) fn new(segment: Arc<Segment>, offset: usize, count: u32) -> Self {
        assert!(count.is_power_of_two());
        let first = segment.pointer(offset, count as usize * SLOT_BYTES, SLOT_BYTES).cast();
        Self { first: NonNull::new(first).expect("a mapping is not at address 0"), mask: count - 1, segment }
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// A slot modulo the count.
    #[inline]
    pub(crate) fn index(&self, position: u32) -> u32 {
        position & self.mask
    }

    pub(crate) fn count(&self) -> u32 {
        self.mask + 1
    }
}

impl Slots for SlotView {
    #[inline]
    fn slot(&self, position: u32) -> &Slot {
        // SAFETY: the masked index is below the count, for which `new` checked bounds and
        // alignment; the segment lives as long as `self`; any bytes are valid atomics.
        unsafe { self.first.add(self.index(position) as usize).as_ref() }
    }
}

/// A queue of requests over a segment: header, slots, extensions, owners.
pub(crate) struct QueueView {
    pub(crate) slots: SlotView,
    /// The header; the slots' segment keeps it mapped.
    header: NonNull<u8>,
    extensions: NonNull<AtomicU64>,
    extension_words: usize,
    /// Dangling if the shape has none.
    owners: NonNull<AtomicU32>,
    has_owners: bool,
}

// SAFETY: pointers to atomics inside a segment that `slots` keeps alive; `Segment` is Send and
// Sync.
unsafe impl Send for QueueView {}
// SAFETY: as above.
unsafe impl Sync for QueueView {}

impl QueueView {
    /// Panics if the queue is not inside the segment or not aligned.
    pub(crate) fn new(segment: Arc<Segment>, offset: usize, shape: QueueShape) -> Self {
        assert!((shape.extension_bytes as usize).is_multiple_of(SLOT_BYTES));
        let header = segment.pointer(offset, shape.bytes(), SLOT_BYTES);
        let slots_bytes = shape.slot_count as usize * SLOT_BYTES;
        let extensions_bytes = shape.slot_count as usize * shape.extension_bytes as usize;
        let extensions = segment.pointer(offset + queue::BYTES + slots_bytes, extensions_bytes, SLOT_BYTES);
        let owners_bytes = if shape.has_owners { shape.slot_count as usize * 4 } else { 0 };
        let owners = segment.pointer(offset + shape.owners(), owners_bytes, 4);
        Self {
            owners: NonNull::new(owners.cast()).expect("a mapping is not at address 0"),
            has_owners: shape.has_owners,
            slots: SlotView::new(segment, offset + queue::BYTES, shape.slot_count),
            header: NonNull::new(header).expect("a mapping is not at address 0"),
            extensions: NonNull::new(extensions.cast()).expect("a mapping is not at address 0"),
            extension_words: shape.extension_bytes as usize / WORD_BYTES,
        }
    }

    /// A word of the header.
    #[inline]
    pub(crate) fn header<const OFFSET: usize>(&self) -> &AtomicU32 {
        const { assert!(OFFSET.is_multiple_of(4) && OFFSET < queue::BYTES) };
        // SAFETY: inside the header (asserted), for which `new` checked bounds and alignment;
        // mapped as long as `self` lives; any bytes are a valid AtomicU32.
        unsafe { AtomicU32::from_ptr(self.header.as_ptr().add(OFFSET).cast()) }
    }

    /// A word of eight bytes of the header.
    #[inline]
    pub(crate) fn wide_header<const OFFSET: usize>(&self) -> &AtomicU64 {
        const { assert!(OFFSET.is_multiple_of(8) && OFFSET + 8 <= queue::BYTES) };
        // SAFETY: inside the header (asserted), for which `new` checked bounds and alignment;
        // mapped as long as `self` lives; any bytes are a valid AtomicU64.
        unsafe { AtomicU64::from_ptr(self.header.as_ptr().add(OFFSET).cast()) }
    }

    /// The words of the tally.
    #[inline]
    pub(crate) fn tally(&self) -> &[AtomicU64; TALLY_WORDS] {
        const { assert!(TALLY.is_multiple_of(8) && TALLY + TALLY_WORDS * WORD_BYTES <= queue::BYTES) };
        // SAFETY: inside the header (asserted), for which `new` checked bounds and alignment;
        // mapped as long as `self` lives; any bytes are valid atomics.
        unsafe { self.header.add(TALLY).cast().as_ref() }
    }

    /// The word that says who takes the RECV at `position`. Panics if the queue's shape has none.
    #[inline]
    pub(crate) fn owner(&self, position: u32) -> &AtomicU32 {
        assert!(self.has_owners, "a send queue has one taker");
        // SAFETY: the masked index is below the slot count, and there are so many words (checked in
        // `new`, and just now); mapped as long as `self` lives; any bytes are a valid AtomicU32.
        unsafe { self.owners.add(self.slots.index(position) as usize).as_ref() }
    }

    /// All of them; empty if the queue's shape has none.
    pub(crate) fn owners(&self) -> &[AtomicU32] {
        let count = if self.has_owners { self.slots.count() as usize } else { 0 };
        // SAFETY: as in `owner`.
        unsafe { std::slice::from_raw_parts(self.owners.as_ptr(), count) }
    }

    /// The extension of the slot at `position`.
    #[inline]
    pub(crate) fn extension(&self, position: u32) -> &[AtomicU64] {
        let first = self.slots.index(position) as usize * self.extension_words;
        // SAFETY: the masked index is below the slot count, so the extension is inside the range
        // that `new` checked; mapped as long as `self` lives; any bytes are valid atomics.
        unsafe { std::slice::from_raw_parts(self.extensions.add(first).as_ptr(), self.extension_words) }
    }
}

const _: () = {
    assert!(size_of::<Slot>() == SLOT_BYTES && align_of::<Slot>() == SLOT_BYTES);
    assert!(SLOT_WORDS * WORD_BYTES == SLOT_BYTES);
};
