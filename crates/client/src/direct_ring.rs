//! The segment of a direct ring, which sender and receiver of a connection map and the router does
//! not.
use crate::passed::Passed;
use freeflow_protocol::library::Reply;
use freeflow_shm::layout::direct_ring;
use freeflow_shm::{CreditList, Segment};
use std::sync::Arc;

/// A look of a CQ at its direct rings.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    /// Looks until now.
    pub polls: u64,
    /// Completions have the time when they were written.
    pub timestamps: bool,
    /// The CQ's doorbell, if the CQ is armed.
    pub armed: Option<u32>,
}

/// The router's description of a direct ring.
pub(crate) struct DirectRingTerms {
    segment_bytes: u64,
    credit_count: u32,
    pub direct_rings_closed: u32,
    pub takes_writes: bool,
    /// If the router numbers its messages: the first one's.
    pub msn: Option<u32>,
}

impl DirectRingTerms {
    pub fn of(reply: &Reply) -> Option<Self> {
        let (&Reply::Direct { segment_bytes, credit_count, direct_rings_closed, takes_writes }
        | &Reply::NumberedDirect { segment_bytes, credit_count, direct_rings_closed, takes_writes, .. }) = reply
        else {
            return None;
        };
        let msn = if let &Reply::NumberedDirect { msn, .. } = reply { Some(msn) } else { None };
        Some(Self { segment_bytes, credit_count, direct_rings_closed, takes_writes, msn })
    }

    /// The direct ring's segment, and its credits; `None` if it can't be mapped.
    pub fn map(&self, descriptors: &[Passed]) -> Option<(Arc<Segment>, CreditList)> {
        let credits = if self.credit_count == 0 { CreditList::Promised } else { CreditList::Each(self.credit_count) };
        Some((map_ring(self.segment_bytes, credits, descriptors)?, credits))
    }
}

/// A direct ring's segment; `None` if it can't be mapped.
pub(crate) fn map_ring(segment_bytes: u64, credits: CreditList, descriptors: &[Passed]) -> Option<Arc<Segment>> {
    let [memory] = descriptors else { return None };
    let bytes = direct_ring::bytes(credits.count());
    if !credits.count().is_power_of_two() || bytes as u64 > segment_bytes {
        return None;
    }
    let segment = memory.map(bytes).ok()?;
    let _ = segment.set_dontfork();
    Some(Arc::new(segment))
}

/// Messages of a direct ring that are still taken once its end is noticed, however long that takes:
/// their senders saw success. A full ring, and as many again for what a sender puts there in that
/// moment. More than that comes only from a peer that goes on regardless, and would for ever.
const CLOSE_DRAIN_COUNT_MAX: u32 = 2 * direct_ring::DESCRIPTOR_COUNT;

/// The messages that are still taken of a closed direct ring.
pub(crate) struct CloseDrain {
    left: u32,
}

impl Default for CloseDrain {
    fn default() -> Self {
        Self { left: CLOSE_DRAIN_COUNT_MAX }
    }
}

impl CloseDrain {
    #[cold]
    pub fn takes_another(&mut self) -> bool {
        let takes = self.left > 0;
        self.left = self.left.saturating_sub(1);
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_direct_ring_gives_what_it_holds_and_not_for_ever() {
        let mut close_drain = CloseDrain::default();
        assert!((0..=direct_ring::DESCRIPTOR_COUNT).all(|_| close_drain.takes_another()));
        let beyond = (0..10 * CLOSE_DRAIN_COUNT_MAX).filter(|_| close_drain.takes_another()).count();
        assert!(beyond < CLOSE_DRAIN_COUNT_MAX as usize && !close_drain.takes_another());
    }
}
