//! The ring of a completion queue: the router's worker produces, the library consumes under its own
//! lock of the CQ.
//!
//! Invariant: at most `cqe` entries are unconsumed, those of a ring before a resize included, so no
//! entry is overwritten before the library has read it.
//!
//! Resize: the new ring begins with CONSUMER at minus the number of entries still in the old one.
//! The library counts it up to zero as it consumes those
//! ([`CompletionConsumer::commit_carried_over`]), then on as it consumes the new ring's.
use crate::handshake;
use crate::layout::{ARMED_NONE, ARMED_SOLICITED, cq, cq_bytes, cq_entry_count};
use crate::segment::Segment;
use crate::slot::{BoundedPublishCursor, Full, HEAD, Line, Slots, TakeCursor, commit};
use crate::sync::{AtomicU32, Ordering};
use crate::view::SlotView;
use freeflow_verbs::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus};
use std::ptr::NonNull;
use std::sync::Arc;

/// The two words of the header, and the entries.
struct CqView {
    slots: SlotView,
    armed: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
}

// SAFETY: pointers to atomics inside a segment that `slots` keeps alive; `Segment` is Send and
// Sync.
unsafe impl Send for CqView {}
// SAFETY: as above.
unsafe impl Sync for CqView {}

impl CqView {
    fn new(segment: Arc<Segment>, cqe: u32) -> Self {
        assert!(cq_bytes(cqe) <= segment.bytes(), "a CQ's ring fits its segment");
        let armed = NonNull::from(segment.u32(cq::ARMED));
        let consumer = NonNull::from(segment.u32(cq::CONSUMER));
        Self { slots: SlotView::new(segment, cq::BYTES, cq_entry_count(cqe)), armed, consumer }
    }

    #[inline]
    fn armed(&self) -> &AtomicU32 {
        // SAFETY: made from a reference into the segment that `slots` keeps mapped.
        unsafe { self.armed.as_ref() }
    }

    #[inline]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: made from a reference into the segment that `slots` keeps mapped.
        unsafe { self.consumer.as_ref() }
    }
}

/// Router side.
pub struct CompletionProducer {
    view: CqView,
    cursor: BoundedPublishCursor,
}

impl CompletionProducer {
    /// Over a fresh segment of [`cq_bytes`]`(cqe)`, before the library gets it. `carried_over`:
    /// entries that the library has still to consume in the ring that this one replaces.
    pub fn new(segment: Arc<Segment>, cqe: u32, carried_over: u32) -> Self {
        let view = CqView::new(segment, cqe);
        let consumed = carried_over.min(cqe).wrapping_neg();
        // Relaxed: the descriptor is passed on after this.
        view.consumer().store(consumed, Ordering::Relaxed);
        Self { view, cursor: BoundedPublishCursor::at(0, consumed, cqe) }
    }

    /// Puts a completion in the ring. Afterwards, once a turn, ask [`Self::take_armed`].
    #[inline]
    pub fn publish(&mut self, completion: &Completion) -> Result<(), Full> {
        self.cursor.publish(&self.view.slots, self.view.consumer(), &encode(completion))
    }

    /// Whether the library waits for an event (a solicited one only if `solicited`); it is then no
    /// longer armed. Fences first: call it once after all completions of a turn.
    #[inline]
    pub fn take_armed(&self, solicited: bool) -> bool {
        handshake::take_armed(self.view.armed(), solicited)
    }

    /// Entries that the library has not consumed, those carried over included; at most `cqe`,
    /// whatever a hostile library says.
    pub fn unconsumed(&mut self) -> u32 {
        self.cursor.unconsumed(self.view.consumer())
    }

    pub fn segment(&self) -> &Segment {
        self.view.slots.segment()
    }
}

/// Library side.
pub struct CompletionConsumer {
    view: CqView,
    cursor: TakeCursor,
}

impl CompletionConsumer {
    pub fn new(segment: Arc<Segment>, cqe: u32) -> Self {
        Self { view: CqView::new(segment, cqe), cursor: TakeCursor::default() }
    }

    /// Reads the next completion, if there is one. [`Self::commit`] afterwards gives the router its
    /// room back.
    #[inline]
    pub fn poll(&mut self, into: &mut Completion) -> bool {
        match self.cursor.take(&self.view.slots) {
            Some((_, line)) => {
                decode(&line, into);
                true
            }
            None => false,
        }
    }

    /// Publishes to the router how far we have polled: once per batch.
    #[inline]
    pub fn commit(&mut self) {
        commit(self.view.consumer(), self.cursor.position());
    }

    /// After a resize, on the new ring and before anything of it is polled: `left` entries of the
    /// old ring are still to be consumed. Not needed for correct completions, but until the first
    /// `commit` of the new ring the router counts all entries of the old one as unconsumed
    /// otherwise.
    pub fn commit_carried_over(&mut self, left: u32) {
        if self.cursor.position() == 0 {
            commit(self.view.consumer(), left.wrapping_neg());
        }
    }

    /// Asks for an event at the next completion or the next solicited one; then a SeqCst fence.
    /// Poll once more after it.
    #[inline]
    pub fn arm(&self, solicited_only: bool) {
        handshake::arm(self.view.armed(), solicited_only);
    }

    /// Whether an event is still to come.
    #[inline]
    pub fn is_armed(&self) -> bool {
        // Relaxed: who arms has the consumer's lock, and an event that is sent meanwhile only comes
        // a little earlier.
        self.view.armed().load(Ordering::Relaxed) != ARMED_NONE
    }

    /// Whether only a solicited completion gives that event.
    pub fn is_armed_for_solicited(&self) -> bool {
        // Relaxed: as above.
        self.view.armed().load(Ordering::Relaxed) == ARMED_SOLICITED
    }

    /// How many were polled: also the position that comes next.
    #[inline]
    pub fn position(&self) -> u32 {
        self.cursor.position()
    }

    /// The position after the last one that can be polled now.
    pub fn published(&self) -> u32 {
        self.cursor.position().wrapping_add(self.cursor.pending(&self.view.slots, self.view.slots.count()))
    }

    /// The flags of a completion that can be polled now; `None` if the position is not published.
    pub fn flags_at(&self, position: u32) -> Option<CompletionFlags> {
        let line = self.view.slots.slot(position).take(position)?;
        let mut completion = Completion::default();
        decode(&line, &mut completion);
        Some(completion.flags)
    }

    /// Nothing to poll.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.cursor.has_next(&self.view.slots)
    }

    pub fn segment(&self) -> &Segment {
        self.view.slots.segment()
    }
}

/// Two 32-bit fields of a word; the first stands at the lower address.
#[inline]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
fn encode(completion: &Completion) -> Line {
    let head = [completion.status as u8, completion.opcode as u8, completion.flags.0, completion.vendor_error];
    let mut line = [0; 8];
    line[0] = completion.work_request_id;
    line[HEAD] = u64::from(u32::from_le_bytes(head));
    line[2] = pair(completion.byte_count, completion.immediate);
    line[3] = pair(completion.qpn, completion.source_qpn);
    line[4] = pair(completion.qp_cookie, completion.ring_position);
    line[5] = completion.timestamp_ns;
    line
}

#[inline]
fn decode(line: &Line, into: &mut Completion) {
    let low = |word: u64| word as u32;
    let high = |word: u64| (word >> 32) as u32;
    let [status, opcode, flags, vendor_error] = low(line[HEAD]).to_le_bytes();
    *into = Completion {
        work_request_id: line[0],
        status: CompletionStatus::from_number(status).unwrap_or(CompletionStatus::GeneralError),
        opcode: CompletionOpcode::from_number(opcode).unwrap_or_default(),
        flags: CompletionFlags(flags),
        byte_count: low(line[2]),
        immediate: high(line[2]),
        qpn: low(line[3]),
        source_qpn: high(line[3]),
        qp_cookie: low(line[4]),
        ring_position: high(line[4]),
        timestamp_ns: line[5],
        vendor_error,
    };
}

#[cfg(test)]
mod tests;
