//! The segment of a direct ring, which sender and receiver of a connection map and the router does
//! not.
use freeflow_protocol::library::Reply;
use freeflow_shm::layout::direct_ring;
use freeflow_shm::{CreditList, Segment};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

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
    pub fn map(&self, descriptors: &[OwnedFd]) -> Option<(Arc<Segment>, CreditList)> {
        let ([memory], &Self { segment_bytes, credit_count, .. }) = (descriptors, self) else { return None };
        let credits = if credit_count == 0 { CreditList::Promised } else { CreditList::Each(credit_count) };
        let bytes = direct_ring::bytes(credits.count());
        if !credits.count().is_power_of_two() || bytes as u64 > segment_bytes {
            return None;
        }
        let segment = Segment::map(memory.as_fd(), bytes).ok()?;
        let _ = segment.set_dontfork();
        Some((Arc::new(segment), credits))
    }
}
