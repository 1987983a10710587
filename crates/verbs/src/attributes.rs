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
    /// [`QpAttributes::state`].
    pub const STATE: u32 = 1;
    /// [`QpAttributes::current_state`].
    pub const CUR_STATE: u32 = 1 << 1;
    /// [`QpAttributes::enable_sqd_async_notify`].
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    /// [`QpAttributes::access`].
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    /// [`QpAttributes::pkey_index`].
    pub const PKEY_INDEX: u32 = 1 << 4;
    /// [`QpAttributes::port`].
    pub const PORT: u32 = 1 << 5;
    /// [`QpAttributes::qkey`].
    pub const QKEY: u32 = 1 << 6;
    /// [`QpAttributes::address`].
    pub const AV: u32 = 1 << 7;
    /// [`QpAttributes::path_mtu`].
    pub const PATH_MTU: u32 = 1 << 8;
    /// [`QpAttributes::timeout`].
    pub const TIMEOUT: u32 = 1 << 9;
    /// [`QpAttributes::retry_count`].
    pub const RETRY_CNT: u32 = 1 << 10;
    /// [`QpAttributes::rnr_retry`].
    pub const RNR_RETRY: u32 = 1 << 11;
    /// [`QpAttributes::rq_psn`].
    pub const RQ_PSN: u32 = 1 << 12;
    /// [`QpAttributes::max_rd_atomic`].
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    /// [`QpAttributes::alternate_address`], with its P_Key index, port and timeout; refused.
    pub const ALT_PATH: u32 = 1 << 14;
    /// [`QpAttributes::min_rnr_timer`].
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    /// [`QpAttributes::sq_psn`].
    pub const SQ_PSN: u32 = 1 << 16;
    /// [`QpAttributes::max_dest_rd_atomic`].
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    /// [`QpAttributes::path_migration_state`].
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    /// [`QpAttributes::capabilities`].
    pub const CAP: u32 = 1 << 19;
    /// [`QpAttributes::dest_qpn`].
    pub const DEST_QPN: u32 = 1 << 20;
    /// [`QpAttributes::rate_limit_kbps`].
    pub const RATE_LIMIT: u32 = 1 << 25;

    /// Whether the mask names the attributes of `bit`, or some of them if it is several.
    pub const fn contains(self, bit: u32) -> bool {
        self.0 & bit != 0
    }
}

/// Queue sizes of a QP (`struct ibv_qp_cap`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpCapabilities {
    /// Outstanding requests of the send queue.
    pub max_send_wr: u32,
    /// Outstanding requests of the receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of one send request.
    pub max_send_sge: u32,
    /// Scatter/gather entries of one receive request.
    pub max_recv_sge: u32,
    /// Inline payload of one send request, bytes.
    pub max_inline_data: u32,
}

/// `struct ibv_global_route`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalRoute {
    /// GID of the destination.
    pub dgid: Gid,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Index of the source's GID in the port's table.
    pub sgid_index: u8,
    /// TTL or hop limit of packets.
    pub hop_limit: u8,
    /// IPv4 type of service or IPv6 traffic class.
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressHandleAttributes {
    /// Absent on InfiniBand subnets; RoCE always needs it (a RoCE address without it is refused with EINVAL).
    pub grh: Option<GlobalRoute>,
    /// LID of the destination; unused on RoCE.
    pub dlid: u16,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Path bits of the source's LID; unused on RoCE.
    pub source_path_bits: u8,
    /// `enum ibv_rate`; has no effect.
    pub static_rate: u8,
    /// Port of the device, from 1.
    pub port: u8,
}

/// `struct ibv_qp_attr`. Which fields count says a [`QpAttributeMask`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpAttributes {
    /// The state to enter, or the present one.
    pub state: QpState,
    /// The state that the caller takes the QP to be in.
    pub current_state: QpState,
    /// Path MTU: payload of one packet at most.
    pub path_mtu: PathMtu,
    /// 0 migrated, 1 rearm, 2 armed (`enum ibv_mig_state`).
    pub path_migration_state: u8,
    /// Q_Key that arriving datagrams must carry (UD).
    pub qkey: u32,
    /// PSN of the first packet to arrive, 24 bits.
    pub rq_psn: u32,
    /// PSN of the first packet to send, 24 bits.
    pub sq_psn: u32,
    /// QPN of the peer, 24 bits.
    pub dest_qpn: u32,
    /// Rights of the peer on this QP: REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC.
    pub access: Access,
    /// Queue sizes.
    pub capabilities: QpCapabilities,
    /// Path to the peer.
    pub address: AddressHandleAttributes,
    /// Alternate path. RoCE has none: naming it is refused (InvalidArgument).
    pub alternate_address: AddressHandleAttributes,
    /// Index of the P_Key in the port's table.
    pub pkey_index: u16,
    /// The same of the alternate path.
    pub alternate_pkey_index: u16,
    /// Whether SQ_DRAINED is raised when the send queue has drained.
    pub enable_sqd_async_notify: bool,
    /// Whether the send queue is draining (query only).
    pub sq_draining: bool,
    /// Outstanding READs and atomics as requester.
    pub max_rd_atomic: u8,
    /// Outstanding READs and atomics as responder.
    pub max_dest_rd_atomic: u8,
    /// Index into the RNR timer table (IBTA table 45), 0..31.
    pub min_rnr_timer: u8,
    /// Port of the device, from 1.
    pub port: u8,
    /// Local ACK timeout: 4.096 us * 2^timeout; 0 means for ever. 5 bits.
    pub timeout: u8,
    /// 3 bits.
    pub retry_count: u8,
    /// 3 bits; 7 means for ever.
    pub rnr_retry: u8,
    /// Port of the alternate path.
    pub alternate_port: u8,
    /// Local ACK timeout of the alternate path.
    pub alternate_timeout: u8,
    /// Kilobits per second; 0 means unlimited.
    pub rate_limit_kbps: u32,
}

/// `struct ibv_srq_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqAttributes {
    /// Outstanding requests of the queue.
    pub max_wr: u32,
    /// Scatter/gather entries of one request.
    pub max_sge: u32,
    /// An event is raised once when fewer requests than this are left; 0 means disarmed.
    pub limit: u32,
}

/// Attributes of a port (`struct ibv_port_attr`); RoCE v2, always up while the router lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortAttributes {
    /// Whether the port is up (`IBV_PORT_ACTIVE`).
    pub active: bool,
    /// Largest path MTU that the port supports.
    pub max_mtu: PathMtu,
    /// Largest path MTU in use.
    pub active_mtu: PathMtu,
    /// Entries of the GID table.
    pub gid_table_length: u32,
    /// Largest message, bytes.
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
    /// Version that `ibv_devinfo` prints as `fw_ver`.
    pub firmware_version: String,
    /// EUI-64, host byte order.
    pub node_guid: u64,
    /// Largest memory region, bytes.
    pub mr_bytes_max: u64,
    /// Queue pairs.
    pub qp_count_max: u32,
    /// Outstanding requests of one work queue.
    pub queue_work_requests_max: u32,
    /// Scatter/gather entries of one request.
    pub sge_count_max: u32,
    /// Completion queues.
    pub cq_count_max: u32,
    /// Entries of one completion queue.
    pub cqe_count_max: u32,
    /// Memory regions.
    pub mr_count_max: u32,
    /// Protection domains.
    pub pd_count_max: u32,
    /// Outstanding READs and atomics of one QP, as requester or as responder.
    pub qp_rd_atomic_max: u32,
    /// Shared receive queues.
    pub srq_count_max: u32,
    /// Outstanding requests of one shared receive queue.
    pub srq_work_requests_max: u32,
    /// Scatter/gather entries of one of its requests.
    pub srq_sge_count_max: u32,
    /// Address handles.
    pub ah_count_max: u32,
    /// Inline payload of one request, bytes.
    pub inline_bytes_max: u32,
    /// Completion vectors.
    pub completion_vector_count: u32,
    /// Memory windows.
    pub mw_count_max: u32,
    /// Multicast groups.
    pub multicast_group_count_max: u32,
    /// QPs of this vNIC that may be attached to one group.
    pub multicast_attach_count_max: u32,
    /// Of all device memory together (host memory stands in).
    pub device_memory_bytes_max: u64,
    /// Attributes of the only port.
    pub port: PortAttributes,
}

/// Identity of a file, as `stat` gives it: processes of one vNIC that name the same file share an
/// XRC domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileIdentity {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// How an XRC domain is opened: the `oflags` of `ibv_open_xrcd`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct XrcdOpenFlags {
    /// O_CREAT: makes the domain of a file that has none.
    pub create: bool,
    /// O_EXCL: refuses a domain that is there.
    pub exclusive: bool,
}

impl XrcdOpenFlags {
    /// A domain that is there.
    pub const EXISTING: Self = Self { create: false, exclusive: false };
    /// A domain that is there, or a new one.
    pub const CREATE: Self = Self { create: true, exclusive: false };
    /// A new domain.
    pub const CREATE_NEW: Self = Self { create: true, exclusive: true };
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
    /// The kind with this number of `enum ibv_mw_type`.
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
    /// New memory.
    pub translation: Option<Translation>,
    /// New rights.
    pub access: Option<Access>,
}

/// Where a memory region lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translation {
    /// In the process.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// As requests name it.
    pub iova: u64,
}
