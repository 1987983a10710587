//! Attributes of the device and of its port, as C structs.
use crate::attributes::{
    ibv_cq_moderation_caps, ibv_device_attr, ibv_device_attr_ex, ibv_odp_caps, ibv_packet_pacing_caps,
    ibv_pci_atomic_caps, ibv_port_attr, ibv_rss_caps, ibv_tm_caps, ibv_tso_caps,
};
use crate::constants::*;
use core::ffi::{c_char, c_int, c_uint};
use freeflow_verbs::{DeviceAttributes, PortAttributes};

/// Capabilities of the device: RNR NAKs, modifications that state the current state, events for
/// ports, one image GUID, memory windows of types 1 and 2B, invalidation of keys by either side,
/// XRC.
const DEVICE_CAP_FLAGS: c_uint = IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_PORT_ACTIVE_EVENT
    | IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_RC_RNR_NAK_GEN
    | IBV_DEVICE_UD_AV_PORT_ENFORCE
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_MEM_MGT_EXTENSIONS
    | IBV_DEVICE_XRC;
/// FLUSH for global visibility and ATOMIC_WRITE (IBTA annex A19). Nothing is persistent.
const DEVICE_CAP_FLAGS_EX: u64 =
    DEVICE_CAP_FLAGS as u64 | IB_UVERBS_DEVICE_FLUSH_GLOBAL | IB_UVERBS_DEVICE_ATOMIC_WRITE;
/// Memory regions may be paged on demand, and span the whole address space, for every operation
/// that a transport has: the router reaches memory through the process' own page table, never by
/// pinning it.
const ODP_CAPS: ibv_odp_caps = ibv_odp_caps {
    general_caps: IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT,
    rc_odp_caps: ODP_RELIABLE | IBV_ODP_SUPPORT_RECV,
    uc_odp_caps: IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE,
    ud_odp_caps: IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV,
};
/// RC and XRC. An XRC QP receives through SRQs only.
const ODP_RELIABLE: u32 = IBV_ODP_SUPPORT_SEND
    | IBV_ODP_SUPPORT_WRITE
    | IBV_ODP_SUPPORT_READ
    | IBV_ODP_SUPPORT_ATOMIC
    | IBV_ODP_SUPPORT_SRQ_RECV
    | IBV_ODP_SUPPORT_FLUSH
    | IBV_ODP_SUPPORT_ATOMIC_WRITE;
/// CQ moderation: all that `struct ibv_moderate_cq` can hold.
const CQ_MODERATION_CAPS: ibv_cq_moderation_caps =
    ibv_cq_moderation_caps { max_cq_count: u16::MAX, max_cq_period: u16::MAX };
/// Pages of 4 KiB and every larger power of two.
const PAGE_SIZE_CAP: u64 = 0xffff_ffff_ffff_f000;
/// Completion timestamps are nanoseconds: a clock of 1 GHz, in kHz.
const CORE_CLOCK_KHZ: u64 = 1_000_000;

/// C's `int` fields hold no more than this; a larger limit is reported as this.
fn to_int(value: u32) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// `text` as a C string of at most 63 characters.
fn to_c_text(text: &str) -> [c_char; 64] {
    let mut out = [0; 64];
    for (to, from) in out.iter_mut().zip(text.bytes().take(63)) {
        *to = from as c_char;
    }
    out
}

pub fn device_attributes_to_c(device: &DeviceAttributes) -> ibv_device_attr {
    let rd_atomic_max = to_int(device.qp_rd_atomic_max);
    let (groups, attached) = (device.multicast_group_count_max, device.multicast_attach_count_max);
    ibv_device_attr {
        fw_ver: to_c_text(&device.firmware_version),
        node_guid: device.node_guid.to_be(),
        sys_image_guid: device.node_guid.to_be(),
        max_mr_size: device.mr_bytes_max,
        page_size_cap: PAGE_SIZE_CAP,
        vendor_id: VENDOR_ID,
        vendor_part_id: VENDOR_PART_ID,
        hw_ver: 0,
        max_qp: to_int(device.qp_count_max),
        max_qp_wr: to_int(device.queue_work_requests_max),
        device_cap_flags: DEVICE_CAP_FLAGS,
        max_sge: to_int(device.sge_count_max),
        max_sge_rd: to_int(device.sge_count_max),
        max_cq: to_int(device.cq_count_max),
        max_cqe: to_int(device.cqe_count_max),
        max_mr: to_int(device.mr_count_max),
        max_pd: to_int(device.pd_count_max),
        max_qp_rd_atom: rd_atomic_max,
        max_ee_rd_atom: 0,
        max_res_rd_atom: to_int(device.qp_rd_atomic_max.saturating_mul(device.qp_count_max)),
        max_qp_init_rd_atom: rd_atomic_max,
        max_ee_init_rd_atom: 0,
        atomic_cap: IBV_ATOMIC_HCA,
        max_ee: 0,
        max_rdd: 0,
        max_mw: to_int(device.mw_count_max),
        max_raw_ipv6_qp: 0,
        max_raw_ethy_qp: 0,
        max_mcast_grp: to_int(groups),
        max_mcast_qp_attach: to_int(attached),
        max_total_mcast_qp_attach: to_int(groups.saturating_mul(attached)),
        max_ah: to_int(device.ah_count_max),
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: to_int(device.srq_count_max),
        max_srq_wr: to_int(device.srq_work_requests_max),
        max_srq_sge: to_int(device.srq_sge_count_max),
        max_pkeys: 1,
        local_ca_ack_delay: 0,
        phys_port_cnt: 1,
    }
}

pub fn device_attributes_ex_to_c(device: &DeviceAttributes) -> ibv_device_attr_ex {
    ibv_device_attr_ex {
        orig_attr: device_attributes_to_c(device),
        comp_mask: 0,
        odp_caps: ODP_CAPS,
        completion_timestamp_mask: u64::MAX,
        hca_core_clock: CORE_CLOCK_KHZ,
        device_cap_flags_ex: DEVICE_CAP_FLAGS_EX,
        tso_caps: ibv_tso_caps::default(),
        rss_caps: ibv_rss_caps::default(),
        max_wq_type_rq: 0,
        packet_pacing_caps: ibv_packet_pacing_caps::default(),
        raw_packet_caps: 0,
        tm_caps: ibv_tm_caps::default(),
        cq_mod_caps: CQ_MODERATION_CAPS,
        max_dm_size: device.device_memory_bytes_max,
        pci_atomic_caps: ibv_pci_atomic_caps::default(),
        xrc_odp_caps: ODP_RELIABLE,
        phys_port_cnt_ex: 1,
    }
}

pub fn port_attributes_to_c(port: &PortAttributes) -> ibv_port_attr {
    ibv_port_attr {
        state: if port.active { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN },
        max_mtu: port.max_mtu as c_uint,
        active_mtu: port.active_mtu as c_uint,
        gid_tbl_len: to_int(port.gid_table_length),
        port_cap_flags: IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
        max_msg_sz: port.message_bytes_max,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        active_width: port.active_width,
        active_speed: port.active_speed,
        phys_state: if port.active { PHYS_STATE_LINK_UP } else { PHYS_STATE_DISABLED },
        link_layer: IBV_LINK_LAYER_ETHERNET,
        flags: IBV_QPF_GRH_REQUIRED,
        port_cap_flags2: 0,
        active_speed_ex: u32::from(port.active_speed),
    }
}

/// Copies as much of `from` as fits in the caller's `bytes`, and zeroes what the caller has beyond
/// it: the rule for structs that grow (`ibv_port_attr`, `ibv_device_attr_ex`).
///
/// # Safety
/// `to` is valid for writes of `bytes` bytes. `T` has no padding whose bytes matter to the caller.
pub unsafe fn copy_prefix<T: Copy>(from: &T, to: *mut T, bytes: usize) {
    let copied = bytes.min(size_of::<T>());
    // SAFETY: `from` is readable for size_of::<T>() >= copied bytes, `to` writable for `bytes` >=
    // copied by this function's contract; a reference and a buffer of C's do not overlap.
    unsafe {
        core::ptr::copy_nonoverlapping((&raw const *from).cast::<u8>(), to.cast::<u8>(), copied);
        core::ptr::write_bytes(to.cast::<u8>().add(copied), 0, bytes - copied);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_verbs::PathMtu;

    fn port() -> PortAttributes {
        PortAttributes {
            active: true,
            max_mtu: PathMtu::Mtu4096,
            active_mtu: PathMtu::Mtu4096,
            gid_table_length: 1,
            message_bytes_max: 1 << 31,
            active_speed: 32,
            active_width: 2,
        }
    }

    #[test]
    fn an_old_caller_gets_no_byte_too_many() {
        let full = port_attributes_to_c(&port());
        let mut buffer = [0xaa_u8; 64];
        // SAFETY: the buffer has more than 52 bytes; byte copies need no alignment.
        unsafe { copy_prefix(&full, buffer.as_mut_ptr().cast(), 52) };
        assert_eq!(buffer[46], IBV_LINK_LAYER_ETHERNET);
        assert_eq!(&buffer[52..], &[0xaa; 12]);
    }

    #[test]
    fn a_newer_caller_gets_zeroes() {
        let full = port_attributes_to_c(&port());
        let mut buffer = [0xaa_u8; 64];
        // SAFETY: the buffer has 64 bytes; byte copies need no alignment.
        unsafe { copy_prefix(&full, buffer.as_mut_ptr().cast(), 60) };
        assert_eq!(&buffer[52..], &[32, 0, 0, 0, 0, 0, 0, 0, 0xaa, 0xaa, 0xaa, 0xaa]);
    }

    #[test]
    fn limits_beyond_an_int_are_reported_as_the_largest() {
        assert_eq!(to_int(u32::MAX), c_int::MAX);
        assert_eq!(to_c_text(&"x".repeat(100))[62..], [b'x' as c_char, 0]);
    }
}
