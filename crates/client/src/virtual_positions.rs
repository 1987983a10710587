//! The order of a send queue's requests, of which the router's ring has only some.
use crate::outgoing::FAR;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Requests that the posting thread carries out have no position in the ring. All requests of a send queue, in the order of posting,
/// have *virtual* positions: that in the ring, and the number of the others before it.
///
/// Who polls asks for the virtual position of a request of the ring while others are posted. Those before the last
/// change over have one number of others before them, those after it another one; the ones before the change over before are returned.
#[derive(Default)]
pub(crate) struct VirtualPositions {
    /// Requests that the ring has not.
    others: AtomicU32,
    /// The first position of the ring after the last change over (low half), and the number of others before it (high
    /// half).
    change: AtomicU64,
}

impl VirtualPositions {
    #[inline]
    pub fn others(&self) -> u32 {
        // Relaxed: the caller has the send queue's lock, or needs no more than a past value.
        self.others.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn of_ring(&self, position: u32) -> u32 {
        // Acquire; partner: the Release store in `add_other`: whoever sees it sees the change over before it, too.
        let others = self.others.load(Ordering::Acquire);
        let change = self.change.load(Ordering::Relaxed);
        let is_before = (position.wrapping_sub(change as u32) as i32) < 0;
        position.wrapping_add(if is_before { (change >> 32) as u32 } else { others })
    }

    /// The position of the ring of the oldest request that a virtual one leaves.
    pub fn to_ring(&self, virtual_position: u32, next: u32) -> u32 {
        let others = self.others();
        let change = self.change.load(Ordering::Relaxed);
        let after = virtual_position.wrapping_sub(others);
        let before = virtual_position.wrapping_sub((change >> 32) as u32);
        let is_before = (before.wrapping_sub(change as u32) as i32) < 0;
        let position = if is_before { before } else { after };
        // Others at the end of a stretch have no position: the next of the ring counts.
        let least = if is_before { before } else { change as u32 };
        let position = if (position.wrapping_sub(least) as i32) < 0 { least } else { position };
        if (next.wrapping_sub(position) as i32) < 0 { next } else { position }
    }

    pub fn note_change(&self, ring_position: u32) {
        // Relaxed: comes with the store in `add_other`.
        self.change.store(u64::from(ring_position) | u64::from(self.others()) << 32, Ordering::Relaxed);
    }

    /// As in [`Outgoing`]: the last change over must not fall too far back.
    #[inline]
    pub fn keep_near(&self, ring_position: u32) {
        let change = self.change.load(Ordering::Relaxed);
        if ring_position.wrapping_sub(change as u32) > FAR {
            self.note_change(ring_position);
        }
    }

    pub fn add_other(&self) {
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

    /// Runs of the ring and of others by turns: each ring position finds its virtual one while it may be outstanding.
    #[test]
    fn runs_by_turns() {
        let positions = VirtualPositions::default();
        assert_eq!((positions.of_ring(0), positions.of_ring(5)), (0, 5));
        positions.note_change(6);
        (0..10).for_each(|_| positions.add_other());
        assert_eq!((positions.of_ring(5), positions.of_ring(6)), (5, 16));
        assert_eq!(positions.others(), 10);
        positions.note_change(9);
        (0..3).for_each(|_| positions.add_other());
        assert_eq!((positions.of_ring(6), positions.of_ring(8), positions.of_ring(9)), (16, 18, 22));
        // What a flush begins with: the ring's oldest that a virtual position leaves.
        assert_eq!(positions.to_ring(17, 12), 7);
        assert_eq!(positions.to_ring(19, 12), 9, "three others come before it");
        assert_eq!(positions.to_ring(23, 12), 10);
        assert_eq!(positions.to_ring(25, 12), 12);
    }

    #[test]
    fn a_change_long_ago_is_not_taken_for_one_to_come() {
        let positions = VirtualPositions::default();
        positions.note_change(6);
        positions.add_other();
        let mut ring = 6_u32;
        for _ in 0..12 {
            ring = ring.wrapping_add(FAR / 2);
            positions.keep_near(ring);
            assert_eq!(positions.of_ring(ring), ring.wrapping_add(1));
            assert_eq!(positions.of_ring(ring.wrapping_sub(100)), ring.wrapping_sub(99));
        }
    }
}
