//! FLUSH: makes earlier writes visible to all (IBTA annex A19). Memory here is coherent and writes
//! are done in order, so nothing moves; what counts is who may ask.
use freeflow_verbs::{Access, SendOpcode, SendRequest};

/// `enum ibv_placement_type`.
const GLOBAL: u64 = 1;
const PERSISTENT: u64 = 1 << 1;
const PLACEMENT_MASK: u64 = 0xff;
/// `enum ibv_selectivity_level`.
const LEVEL_RANGE: u64 = 0;
const LEVEL_REGION: u64 = 1;
const LEVEL_SHIFT: u32 = 8;

/// Target of a FLUSH.
#[derive(Clone, Copy)]
pub(crate) struct FlushTarget {
    /// Of the QP and of the region.
    pub right: Access,
    /// All that the key names: address and length say nothing.
    pub whole: bool,
}

/// `None` if the request is no FLUSH, or names no placement or level that there is.
pub(crate) fn flush_target(request: &SendRequest) -> Option<FlushTarget> {
    let is_flush = request.opcode == SendOpcode::Flush;
    is_flush.then(|| flush_target_of(request.swap & PLACEMENT_MASK, request.swap >> LEVEL_SHIFT)).flatten()
}

/// The same, of the two as the FETH of a packet names them.
pub(crate) fn flush_target_of(placement: u64, level: u64) -> Option<FlushTarget> {
    if placement == 0 || placement & !(GLOBAL | PERSISTENT) != 0 {
        return None;
    }
    let mut right = Access(0);
    for (bit, needed) in [(GLOBAL, Access::FLUSH_GLOBAL), (PERSISTENT, Access::FLUSH_PERSISTENT)] {
        if placement & bit != 0 {
            right = right.union(needed);
        }
    }
    match level {
        LEVEL_RANGE => Some(FlushTarget { right, whole: false }),
        LEVEL_REGION => Some(FlushTarget { right, whole: true }),
        _ => None,
    }
}
