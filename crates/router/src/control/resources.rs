//! A vNIC's use of the router, and the most that it may use.
//!
//! The heap is an estimate: the objects that there are, each with what one takes at most in the
//! engine, in the worker's tables and in the control thread's. The stage `memory` compares it with
//! the process.
use crate::admission::account::Held;
use crate::control::vnic_entry::VnicEntry;
use crate::dataplane::meters::VnicNumbers;
use crate::memory::bounce::BOUNCE_BYTES_MAX;
use crate::memory::page_table::VNIC_RANGE_COUNT_MAX;
use freeflow_engine::Usage;
use freeflow_orchestrator::objects::{ResourceAmounts, VnicResources};
use freeflow_verbs::VnicLimits;
use std::sync::atomic::Ordering::Relaxed;

/// Heap that one object takes, bytes, rounded up from what was measured with each limit reached.
const SESSION_BYTES: u64 = 4096;
const CONTEXT_BYTES: u64 = 1024;
const PD_BYTES: u64 = 192;
/// One that is connected.
const QP_BYTES: u64 = 4096;
const CQ_BYTES: u64 = 640;
const SRQ_BYTES: u64 = 640;
const MR_BYTES: u64 = 384;
const MW_BYTES: u64 = 256;
const XRCD_BYTES: u64 = 256;
const AH_BYTES: u64 = 128;
const RANGE_BYTES: u64 = 128;

/// Of these objects, with so many ranges in page tables.
fn heap_bytes(objects: &Usage, ranges: u64) -> u64 {
    let of_objects: u64 = [
        (objects.sessions, SESSION_BYTES),
        (objects.contexts, CONTEXT_BYTES),
        (objects.pds, PD_BYTES),
        (objects.qps, QP_BYTES),
        (objects.cqs, CQ_BYTES),
        (objects.srqs, SRQ_BYTES),
        (objects.mrs, MR_BYTES),
        (objects.mws, MW_BYTES),
        (objects.xrcds, XRCD_BYTES),
        (objects.ahs, AH_BYTES),
    ]
    .into_iter()
    .map(|(count, bytes)| u64::from(count) * bytes)
    .sum();
    of_objects + ranges * RANGE_BYTES
}

/// As many objects as a vNIC can have.
fn all_objects(limits: &VnicLimits) -> Usage {
    Usage {
        sessions: limits.session_count_max,
        contexts: limits.context_count_max,
        pds: limits.pd_count_max,
        qps: limits.qp_count_max,
        cqs: limits.cq_count_max,
        srqs: limits.srq_count_max,
        mrs: limits.mr_count_max,
        mws: limits.mw_count_max,
        xrcds: limits.xrcd_count_max,
        ahs: limits.ah_count_max,
        ..Usage::default()
    }
}

/// Its present use.
pub(crate) fn used(entry: &VnicEntry, numbers: &VnicNumbers) -> ResourceAmounts {
    let account = &entry.account;
    let Held { mappings, descriptors, threads } = account.held();
    // Relaxed, all: counts, which order nothing.
    let page_table_ranges = account.ranges.load(Relaxed);
    ResourceAmounts {
        segment_bytes: account.segment_bytes.load(Relaxed),
        ring_bytes: account.ring_bytes.load(Relaxed),
        bounce_bytes: numbers.bounce_bytes,
        heap_bytes: heap_bytes(&numbers.usage, page_table_ranges),
        page_table_ranges,
        mappings,
        descriptors,
        threads,
    }
}

pub(crate) fn of_vnic(entry: &VnicEntry, numbers: &VnicNumbers) -> VnicResources {
    let limits = &entry.record.limits;
    let Held { mappings, descriptors, threads } = entry.account.limits();
    let limits = ResourceAmounts {
        segment_bytes: limits.segment_bytes_max,
        ring_bytes: entry.account.ring_bytes_limit(limits),
        bounce_bytes: BOUNCE_BYTES_MAX,
        heap_bytes: heap_bytes(&all_objects(limits), VNIC_RANGE_COUNT_MAX),
        page_table_ranges: VNIC_RANGE_COUNT_MAX,
        mappings,
        descriptors,
        threads,
    };
    VnicResources { used: used(entry, numbers), limits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heap_follows_from_the_limits() {
        assert_eq!(heap_bytes(&Usage::default(), 0), 0);
        let objects = Usage { qps: 2, mrs: 3, ..Usage::default() };
        assert_eq!(heap_bytes(&objects, 5), 2 * 4096 + 3 * 384 + 5 * 128);
        // SECURITY.md names it.
        let all = heap_bytes(&all_objects(&VnicLimits::default()), VNIC_RANGE_COUNT_MAX);
        assert_eq!(all.div_ceil(1 << 20), 321, "{all}");
    }
}
