//! The segment of a direct ring, which sender and receiver of a connection map and the router does
//! not.
use freeflow_protocol::library::Reply;
use freeflow_shm::Segment;
use freeflow_shm::layout::direct_ring;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A direct ring's segment, and the number of its credits; `None` if it can't be mapped.
pub(crate) fn map_direct_ring(reply: &Reply, descriptors: &[OwnedFd]) -> Option<(Arc<Segment>, u32)> {
    let (&Reply::Direct { segment_bytes, credit_count, .. }, [memory]) = (reply, descriptors) else {
        return None;
    };
    let bytes = direct_ring::bytes(credit_count);
    if !credit_count.is_power_of_two() || bytes as u64 > segment_bytes {
        return None;
    }
    let segment = Segment::map(memory.as_fd(), bytes).ok()?;
    let _ = segment.set_dontfork();
    Some((Arc::new(segment), credit_count))
}
