//! The order of a send queue's requests, of which the router's ring has only some: the others go by
//! the direct path.
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// No queue holds as many requests.
pub(crate) const FAR: u32 = 1 << 30;

/// Requests that the posting thread carries out have no position in the ring. All requests of a
/// send queue, in the order of posting, have *posting positions*: that in the ring, and the number
/// of the others before it.
///
/// A poll asks for the posting position of a request of the ring while others are posted. Those
/// before the last path switch have one number of others before them, those after it another one;
/// the ones before the path switch before are returned.
#[derive(Default)]
pub(crate) struct PostingOrder {
    /// Requests that the ring has not.
    others: AtomicU32,
    /// The first position of the ring after the last path switch (low half), and the number of
    /// others before it (high half).
    change: AtomicU64,
}

impl PostingOrder {
    #[inline]
    pub fn others(&self) -> u32 {
        // Relaxed: the caller has the send queue's lock, or needs no more than a past value.
        self.others.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn of_ring(&self, position: u32) -> u32 {
        // Acquire; partner: the Release store in `add_direct`: a thread that sees it sees the path
        // switch before it, too.
        let others = self.others.load(Ordering::Acquire);
        let change = self.change.load(Ordering::Relaxed);
        let is_before = (position.wrapping_sub(change as u32) as i32) < 0;
        position.wrapping_add(if is_before { (change >> 32) as u32 } else { others })
    }

    /// The position of the ring of the oldest request that a virtual one leaves.
    pub fn to_ring(&self, posting_position: u32, next: u32) -> u32 {
        let others = self.others();
        let change = self.change.load(Ordering::Relaxed);
        let after = posting_position.wrapping_sub(others);
        let before = posting_position.wrapping_sub((change >> 32) as u32);
        let is_before = (before.wrapping_sub(change as u32) as i32) < 0;
        let position = if is_before { before } else { after };
        // Others at the end of a stretch have no position: the next of the ring counts.
        let least = if is_before { before } else { change as u32 };
        let position = if (position.wrapping_sub(least) as i32) < 0 { least } else { position };
        if (next.wrapping_sub(position) as i32) < 0 { next } else { position }
    }

    pub fn note_path_switch(&self, ring_position: u32) {
        // Relaxed: comes with the store in `add_direct`.
        self.change.store(u64::from(ring_position) | u64::from(self.others()) << 32, Ordering::Relaxed);
    }

    /// As in [`Outgoing`]: the last path switch must not fall too far back.
    #[inline]
    pub fn keep_near(&self, ring_position: u32) {
        let change = self.change.load(Ordering::Relaxed);
        if ring_position.wrapping_sub(change as u32) > FAR {
            self.note_path_switch(ring_position);
        }
    }

    #[inline]
    pub fn add_direct(&self) {
        // Release; partner: the Acquire load in `of_ring`.
        self.others.store(self.others().wrapping_add(1), Ordering::Release);
    }

    pub fn reset(&self) {
        self.others.store(0, Ordering::Relaxed);
        self.change.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of the ring and of others by turns: each ring position finds its virtual one while it
    /// may be outstanding.
    #[test]
    fn runs_by_turns() {
        let positions = PostingOrder::default();
        assert_eq!((positions.of_ring(0), positions.of_ring(5)), (0, 5));
        positions.note_path_switch(6);
        (0..10).for_each(|_| positions.add_direct());
        assert_eq!((positions.of_ring(5), positions.of_ring(6)), (5, 16));
        assert_eq!(positions.others(), 10);
        positions.note_path_switch(9);
        (0..3).for_each(|_| positions.add_direct());
        assert_eq!((positions.of_ring(6), positions.of_ring(8), positions.of_ring(9)), (16, 18, 22));
        // A flush begins with the ring's oldest request that a posting position leaves.
        assert_eq!(positions.to_ring(17, 12), 7);
        assert_eq!(positions.to_ring(19, 12), 9, "three others come before it");
        assert_eq!(positions.to_ring(23, 12), 10);
        assert_eq!(positions.to_ring(25, 12), 12);
    }

    #[test]
    fn a_change_long_ago_is_not_taken_for_one_to_come() {
        let positions = PostingOrder::default();
        positions.note_path_switch(6);
        positions.add_direct();
        let mut ring = 6_u32;
        for _ in 0..12 {
            ring = ring.wrapping_add(FAR / 2);
            positions.keep_near(ring);
            assert_eq!(positions.of_ring(ring), ring.wrapping_add(1));
            assert_eq!(positions.of_ring(ring.wrapping_sub(100)), ring.wrapping_sub(99));
        }
    }
}
