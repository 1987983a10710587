//! Attributes of a vNIC's device. Every number is enforced: here, by the limits of the vNIC, or by
//! the engine.
use crate::control::vnic_entry::Record;
use freeflow_verbs::{
    CQE_COUNT_MAX, DeviceAttributes, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, NetworkId, PathMtu, PortAttributes,
    QUEUE_WORK_REQUESTS_MAX, READ_ATOMIC_DEPTH_MAX, SGE_COUNT_MAX,
};

/// The name in the library's device list.
pub const DEVICE_NAME: &str = "freeflow0";
/// `ibv_port_attr.active_speed` 32 (EDR, 25 Gb/s a lane) and `active_width` 2 (four lanes): 100 Gb/s.
const SPEED_EDR: u8 = 32;
const WIDTH_4X: u8 = 2;
/// The first entry is filled, the second where the vNIC may talk to machines without FreeFlow
/// (`crate::control::external`), the third where it has an IPv6 address. Programs may look at the
/// others, as on any NIC, and find them empty.
pub const GID_TABLE_LENGTH: u32 = 16;

pub fn device_attributes(vnic: &Record, network: NetworkId) -> DeviceAttributes {
    let limits = &vnic.limits;
    DeviceAttributes {
        name: DEVICE_NAME.into(),
        firmware_version: env!("CARGO_PKG_VERSION").into(),
        node_guid: node_guid(vnic, network),
        mr_bytes_max: limits.registered_bytes_max,
        qp_count_max: limits.qp_count_max,
        queue_work_requests_max: QUEUE_WORK_REQUESTS_MAX,
        sge_count_max: SGE_COUNT_MAX as u32,
        cq_count_max: limits.cq_count_max,
        cqe_count_max: CQE_COUNT_MAX,
        mr_count_max: limits.mr_count_max,
        pd_count_max: limits.pd_count_max,
        qp_rd_atomic_max: u32::from(READ_ATOMIC_DEPTH_MAX),
        srq_count_max: limits.srq_count_max,
        srq_work_requests_max: QUEUE_WORK_REQUESTS_MAX,
        srq_sge_count_max: SGE_COUNT_MAX as u32,
        ah_count_max: limits.ah_count_max,
        inline_bytes_max: INLINE_BYTES_MAX as u32,
        completion_vector_count: 1,
        mw_count_max: limits.mw_count_max,
        multicast_group_count_max: limits.multicast_group_count_max,
        multicast_attach_count_max: limits.multicast_attach_count_max,
        device_memory_bytes_max: limits.device_memory_bytes_max,
        port: PortAttributes {
            active: true,
            max_mtu: PathMtu::Mtu4096,
            active_mtu: PathMtu::Mtu4096,
            gid_table_length: GID_TABLE_LENGTH,
            message_bytes_max: MESSAGE_BYTES_MAX as u32,
            active_speed: SPEED_EDR,
            active_width: WIDTH_4X,
        },
    }
}

/// An EUI-64, locally administered: the same for the same address of the same network.
fn node_guid(vnic: &Record, network: NetworkId) -> u64 {
    let [n1, n0] = (network.0 as u16).to_be_bytes();
    let [a, b, c, d] = vnic.address.octets();
    u64::from_be_bytes([0x02, 0x46, n1, n0, a, b, c, d])
}
