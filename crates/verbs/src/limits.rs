//! Limits: what the virtual device offers at most, and what one vNIC may take of it.
use serde::{Deserialize, Serialize};

/// Scatter/gather entries of one work request (`max_sge`).
pub const SGE_COUNT_MAX: usize = 30;
/// Inline payload of one send request, bytes (`max_inline_data`).
pub const INLINE_BYTES_MAX: usize = 1024;
/// Work requests of one queue (`max_qp_wr`, `max_srq_wr`).
pub const QUEUE_WORK_REQUESTS_MAX: u32 = 32_768;
/// Entries of one completion queue (`max_cqe`).
pub const CQE_COUNT_MAX: u32 = 4_194_303;
/// One message, bytes (IBTA 9.2.5: 2^31).
pub const MESSAGE_BYTES_MAX: u64 = 1 << 31;
/// Outstanding READs and atomics of one QP (`max_qp_rd_atom`).
pub const READ_ATOMIC_DEPTH_MAX: u8 = 128;

/// Most objects and bytes of one vNIC at a time. Reaching one gives the errno a NIC gives: ENOMEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VnicLimits {
    /// Processes that may use the vNIC at once.
    pub session_count_max: u32,
    /// Device contexts.
    pub context_count_max: u32,
    /// Protection domains.
    pub pd_count_max: u32,
    /// Queue pairs.
    pub qp_count_max: u32,
    /// Completion queues.
    pub cq_count_max: u32,
    /// Shared receive queues.
    pub srq_count_max: u32,
    /// Memory regions.
    pub mr_count_max: u32,
    /// Memory windows.
    pub mw_count_max: u32,
    /// XRC domains.
    pub xrcd_count_max: u32,
    /// Multicast groups.
    pub multicast_group_count_max: u32,
    /// QPs attached to one group.
    pub multicast_attach_count_max: u32,
    /// Sum of the lengths of all device memory, which is part of `segment_bytes_max`.
    pub device_memory_bytes_max: u64,
    /// Address handles.
    pub ah_count_max: u32,
    /// Completion channels.
    pub channel_count_max: u32,
    /// Shared-memory segments: rings and `ibv_malloc` arenas together.
    pub mapping_count_max: u32,
    /// Sum of the lengths of all memory regions.
    pub registered_bytes_max: u64,
    /// Sum of the lengths of all shared-memory segments that the router maps. The router's own
    /// default follows the machine's memory.
    pub segment_bytes_max: u64,
    /// Of these, segments of QPs, CQs and SRQs: whoever first touches a page of theirs pays for it,
    /// and that may be the router.
    pub ring_bytes_max: u64,
}

impl Default for VnicLimits {
    fn default() -> Self {
        Self {
            session_count_max: 1024,
            context_count_max: 4096,
            pd_count_max: 16_384,
            qp_count_max: 16_384,
            cq_count_max: 16_384,
            srq_count_max: 4096,
            mr_count_max: 262_144,
            mw_count_max: 262_144,
            xrcd_count_max: 4096,
            multicast_group_count_max: 1024,
            multicast_attach_count_max: 256,
            device_memory_bytes_max: 64 << 20,
            ah_count_max: 65_536,
            channel_count_max: 4096,
            mapping_count_max: 49_152,
            registered_bytes_max: 1 << 46,
            segment_bytes_max: 1 << 40,
            // Two of the largest queues, or 16,384 QPs and as many CQs with 16 KiB each.
            ring_bytes_max: 512 << 20,
        }
    }
}

/// Most objects and bytes of all vNICs of one network together; `None`: as much as each of them
/// may. Reaching one gives ENOMEM too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkLimits {
    /// Queue pairs.
    pub qp_count_max: Option<u32>,
    /// Completion queues.
    pub cq_count_max: Option<u32>,
    /// Memory regions.
    pub mr_count_max: Option<u32>,
    /// Sum of the lengths of all memory regions.
    pub registered_bytes_max: Option<u64>,
}
