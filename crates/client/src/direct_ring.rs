//! The segment of a direct ring, which sender and receiver of a connection map and the router does
//! not.
use freeflow_protocol::library::Reply;
use freeflow_shm::layout::direct_ring;
use freeflow_shm::{CreditList, Segment};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A direct ring's segment, and its credits; `None` if it can't be mapped.
pub(crate) fn map_direct_ring(reply: &Reply, descriptors: &[OwnedFd]) -> Option<(Arc<Segment>, CreditList)> {
    let (&Reply::Direct { segment_bytes, credit_count, .. }, [memory]) = (reply, descriptors) else {
        return None;
    };
    let credits = if credit_count == 0 { CreditList::Promised } else { CreditList::Each(credit_count) };
    let bytes = direct_ring::bytes(credits.count());
    if !credits.count().is_power_of_two() || bytes as u64 > segment_bytes {
        return None;
    }
    let segment = Segment::map(memory.as_fd(), bytes).ok()?;
    let _ = segment.set_dontfork();
    Some((Arc::new(segment), credits))
}
