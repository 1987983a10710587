//! Attributes of devices, ports, queue pairs, shared receive queues and address handles.
use crate::access::Access;
use crate::id::Gid;
use crate::queue_pair::{PathMtu, QpState};
use alloc::string::String;
use serde::{Deserialize, Serialize};

/// Bit values equal `enum ibv_qp_attr_mask`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpAttributeMask(pub u32);

impl QpAttributeMask {
    pub const STATE: u32 = 1;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
    pub const RATE_LIMIT: u32 = 1 << 25;

    pub const fn contains(self, bit: u32) -> bool {
        self.0 & bit != 0
    }
}

/// Queue sizes of a QP (`struct ibv_qp_cap`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpCapabilities {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_global_route`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressHandleAttributes {
    /// Absent on InfiniBand subnets; RoCE always needs it (a RoCE address without it is refused with EINVAL).
    pub grh: Option<GlobalRoute>,
    pub dlid: u16,
    pub service_level: u8,
    pub source_path_bits: u8,
    pub static_rate: u8,
    pub port: u8,
}

/// `struct ibv_qp_attr`. Which fields count says a [`QpAttributeMask`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpAttributes {
    pub state: QpState,
    pub current_state: QpState,
    pub path_mtu: PathMtu,
    /// 0 migrated, 1 rearm, 2 armed (`enum ibv_mig_state`).
    pub path_migration_state: u8,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qpn: u32,
    pub access: Access,
    pub capabilities: QpCapabilities,
    pub address: AddressHandleAttributes,
    pub alternate_address: AddressHandleAttributes,
    pub pkey_index: u16,
    pub alternate_pkey_index: u16,
    pub enable_sqd_async_notify: bool,
    pub sq_draining: bool,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    /// Index into the RNR timer table (IBTA table 45), 0..31.
    pub min_rnr_timer: u8,
    pub port: u8,
    /// Local ACK timeout: 4.096 us * 2^timeout; 0 means for ever. 5 bits.
    pub timeout: u8,
    /// 3 bits.
    pub retry_count: u8,
    /// 3 bits; 7 means for ever.
    pub rnr_retry: u8,
    pub alternate_port: u8,
    pub alternate_timeout: u8,
    /// Kilobits per second; 0 means unlimited.
    pub rate_limit_kbps: u32,
}

/// `struct ibv_srq_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqAttributes {
    pub max_wr: u32,
    pub max_sge: u32,
    /// An event is raised once when fewer requests than this are left; 0 means disarmed.
    pub limit: u32,
}

/// Attributes of a port (`struct ibv_port_attr`); RoCE v2, always up while the router lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortAttributes {
    pub active: bool,
    pub max_mtu: PathMtu,
    pub active_mtu: PathMtu,
    pub gid_table_length: u32,
    pub message_bytes_max: u32,
    /// `ibv_port_attr.active_speed` code.
    pub active_speed: u8,
    /// `ibv_port_attr.active_width` code.
    pub active_width: u8,
}

/// Attributes of the device (`struct ibv_device_attr`); every number is enforced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAttributes {
    /// Name in the device list, for example `freeflow0`.
    pub name: String,
    pub firmware_version: String,
    /// EUI-64, host byte order.
    pub node_guid: u64,
    pub mr_bytes_max: u64,
    pub qp_count_max: u32,
    pub queue_work_requests_max: u32,
    pub sge_count_max: u32,
    pub cq_count_max: u32,
    pub cqe_count_max: u32,
    pub mr_count_max: u32,
    pub pd_count_max: u32,
    pub qp_rd_atomic_max: u32,
    pub srq_count_max: u32,
    pub srq_work_requests_max: u32,
    pub srq_sge_count_max: u32,
    pub ah_count_max: u32,
    pub inline_bytes_max: u32,
    pub completion_vector_count: u32,
    pub mw_count_max: u32,
    pub multicast_group_count_max: u32,
    /// QPs of this vNIC that may be attached to one group.
    pub multicast_attach_count_max: u32,
    /// Of all device memory together (host memory stands in).
    pub device_memory_bytes_max: u64,
    pub port: PortAttributes,
}

/// Identity of a file, as `stat` gives it: processes of one vNIC that name the same file share an
/// XRC domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
}

/// Kind of a memory window; numbers equal `enum ibv_mw_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum WindowKind {
    /// Belongs to a protection domain; bound by a verb.
    Type1 = 1,
    /// Belongs, while bound, to the QP that bound it (type 2B); bound and invalidated by work requests.
    Type2 = 2,
}

impl WindowKind {
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Type1),
            2 => Some(Self::Type2),
            _ => None,
        }
    }
}

/// Changes that `ibv_rereg_mr` makes; an absent one leaves the value as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionChange {
    pub translation: Option<Translation>,
    pub access: Option<Access>,
}

/// Where a memory region lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translation {
    /// In the process.
    pub address: u64,
    pub length: u64,
    /// As requests name it.
    pub iova: u64,
}
