//! From C structs to the vocabulary and back: work, queue pairs, addresses.
//!
//! A mask says which fields of an attribute struct a program has filled in; the others may hold
//! anything, so they are not looked at. Ranges that the standard sets are the engine's to check;
//! here only what has no meaning is refused.
use crate::attributes::{ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_attr, ibv_qp_cap, ibv_srq_attr};
use crate::work::{ibv_sge, ibv_wc};
use core::ffi::c_uint;
use freeflow_verbs::{
    Access, AddressHandleAttributes, AsyncEventKind, Completion, CompletionFlags, Gid, GlobalRoute, PathMtu,
    QpAttributeMask, QpAttributes, QpCapabilities, QpState, QpType, Sge, SrqAttributes, VerbsError,
};

/// Path migration states are 0 migrated, 1 rearm, 2 armed.
const MIGRATION_STATE_COUNT: c_uint = 3;

/// A value without a meaning is an invalid argument.
pub fn invalid_as_error<T>(value: Option<T>) -> Result<T, VerbsError> {
    value.ok_or(VerbsError::InvalidArgument)
}

pub fn gid_from_c(gid: ibv_gid) -> Gid {
    Gid(gid.raw)
}

pub fn gid_to_c(gid: Gid) -> ibv_gid {
    ibv_gid { raw: gid.0 }
}

pub fn sge_from_c(sge: &ibv_sge) -> Sge {
    Sge { address: sge.addr, length: sge.length, lkey: sge.lkey }
}

/// RC, UC, UD and XRC; the others are not done (EOPNOTSUPP), or are no types (EINVAL).
pub fn qp_type_from_c(qp_type: c_uint) -> Result<QpType, VerbsError> {
    match qp_type {
        crate::IBV_QPT_RC => Ok(QpType::Rc),
        crate::IBV_QPT_UC => Ok(QpType::Uc),
        crate::IBV_QPT_UD => Ok(QpType::Ud),
        crate::IBV_QPT_XRC_SEND => Ok(QpType::XrcSend),
        crate::IBV_QPT_XRC_RECV => Ok(QpType::XrcReceive),
        crate::IBV_QPT_RAW_PACKET | crate::IBV_QPT_DRIVER => Err(VerbsError::NotSupported),
        _ => Err(VerbsError::InvalidArgument),
    }
}

pub fn ah_attributes_from_c(ah: &ibv_ah_attr) -> AddressHandleAttributes {
    let grh = (ah.is_global != 0).then(|| GlobalRoute {
        dgid: gid_from_c(ah.grh.dgid),
        flow_label: ah.grh.flow_label,
        sgid_index: ah.grh.sgid_index,
        hop_limit: ah.grh.hop_limit,
        traffic_class: ah.grh.traffic_class,
    });
    AddressHandleAttributes {
        grh,
        dlid: ah.dlid,
        service_level: ah.sl,
        source_path_bits: ah.src_path_bits,
        static_rate: ah.static_rate,
        port: ah.port_num,
    }
}

pub fn ah_attributes_to_c(ah: &AddressHandleAttributes) -> ibv_ah_attr {
    let route = ah.grh.unwrap_or_default();
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: gid_to_c(route.dgid),
            flow_label: route.flow_label,
            sgid_index: route.sgid_index,
            hop_limit: route.hop_limit,
            traffic_class: route.traffic_class,
        },
        dlid: ah.dlid,
        sl: ah.service_level,
        src_path_bits: ah.source_path_bits,
        static_rate: ah.static_rate,
        is_global: u8::from(ah.grh.is_some()),
        port_num: ah.port,
    }
}

pub fn qp_capabilities_from_c(cap: &ibv_qp_cap) -> QpCapabilities {
    QpCapabilities {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

pub fn qp_capabilities_to_c(cap: &QpCapabilities) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

pub fn srq_attributes_from_c(attr: &ibv_srq_attr) -> SrqAttributes {
    SrqAttributes { max_wr: attr.max_wr, max_sge: attr.max_sge, limit: attr.srq_limit }
}

pub fn srq_attributes_to_c(attr: &SrqAttributes) -> ibv_srq_attr {
    ibv_srq_attr { max_wr: attr.max_wr, max_sge: attr.max_sge, srq_limit: attr.limit }
}

/// Takes the fields that `mask` names; the others keep their defaults. EINVAL if a state, an MTU or
/// a migration state is none.
pub fn qp_attributes_from_c(attr: &ibv_qp_attr, mask: QpAttributeMask) -> Result<QpAttributes, VerbsError> {
    type M = QpAttributeMask;
    let mut out = QpAttributes::default();
    if mask.contains(M::STATE) {
        out.state = invalid_as_error(QpState::from_number(attr.qp_state))?;
    }
    if mask.contains(M::CUR_STATE) {
        out.current_state = invalid_as_error(QpState::from_number(attr.cur_qp_state))?;
    }
    if mask.contains(M::PATH_MTU) {
        out.path_mtu = invalid_as_error(PathMtu::from_number(attr.path_mtu))?;
    }
    if mask.contains(M::PATH_MIG_STATE) {
        if attr.path_mig_state >= MIGRATION_STATE_COUNT {
            return Err(VerbsError::InvalidArgument);
        }
        out.path_migration_state = attr.path_mig_state as u8;
    }
    if mask.contains(M::CAP) {
        out.capabilities = qp_capabilities_from_c(&attr.cap);
    }
    if mask.contains(M::AV) {
        out.address = ah_attributes_from_c(&attr.ah_attr);
    }
    if mask.contains(M::ALT_PATH) {
        out.alternate_address = ah_attributes_from_c(&attr.alt_ah_attr);
        (out.alternate_pkey_index, out.alternate_port) = (attr.alt_pkey_index, attr.alt_port_num);
        out.alternate_timeout = attr.alt_timeout;
    }
    let take = |bit, value: u32| if mask.contains(bit) { value } else { 0 };
    let take_byte = |bit, value: u8| if mask.contains(bit) { value } else { 0 };
    out.qkey = take(M::QKEY, attr.qkey);
    out.rq_psn = take(M::RQ_PSN, attr.rq_psn);
    out.sq_psn = take(M::SQ_PSN, attr.sq_psn);
    out.dest_qpn = take(M::DEST_QPN, attr.dest_qp_num);
    out.access = Access(take(M::ACCESS_FLAGS, attr.qp_access_flags));
    out.pkey_index = if mask.contains(M::PKEY_INDEX) { attr.pkey_index } else { 0 };
    out.enable_sqd_async_notify = take_byte(M::EN_SQD_ASYNC_NOTIFY, attr.en_sqd_async_notify) != 0;
    out.max_rd_atomic = take_byte(M::MAX_QP_RD_ATOMIC, attr.max_rd_atomic);
    out.max_dest_rd_atomic = take_byte(M::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic);
    out.min_rnr_timer = take_byte(M::MIN_RNR_TIMER, attr.min_rnr_timer);
    out.port = take_byte(M::PORT, attr.port_num);
    out.timeout = take_byte(M::TIMEOUT, attr.timeout);
    out.retry_count = take_byte(M::RETRY_CNT, attr.retry_cnt);
    out.rnr_retry = take_byte(M::RNR_RETRY, attr.rnr_retry);
    out.rate_limit_kbps = take(M::RATE_LIMIT, attr.rate_limit);
    Ok(out)
}

/// All fields: `ibv_query_qp` fills in more than it was asked for, as NICs' drivers do.
pub fn qp_attributes_to_c(attributes: &QpAttributes) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: attributes.state as c_uint,
        cur_qp_state: attributes.current_state as c_uint,
        path_mtu: attributes.path_mtu as c_uint,
        path_mig_state: c_uint::from(attributes.path_migration_state),
        qkey: attributes.qkey,
        rq_psn: attributes.rq_psn,
        sq_psn: attributes.sq_psn,
        dest_qp_num: attributes.dest_qpn,
        qp_access_flags: attributes.access.0,
        cap: qp_capabilities_to_c(&attributes.capabilities),
        ah_attr: ah_attributes_to_c(&attributes.address),
        alt_ah_attr: ah_attributes_to_c(&attributes.alternate_address),
        pkey_index: attributes.pkey_index,
        alt_pkey_index: attributes.alternate_pkey_index,
        en_sqd_async_notify: u8::from(attributes.enable_sqd_async_notify),
        sq_draining: u8::from(attributes.sq_draining),
        max_rd_atomic: attributes.max_rd_atomic,
        max_dest_rd_atomic: attributes.max_dest_rd_atomic,
        min_rnr_timer: attributes.min_rnr_timer,
        port_num: attributes.port,
        timeout: attributes.timeout,
        retry_cnt: attributes.retry_count,
        rnr_retry: attributes.rnr_retry,
        alt_port_num: attributes.alternate_port,
        alt_timeout: attributes.alternate_timeout,
        rate_limit: attributes.rate_limit_kbps,
    }
}

/// Flags of a completion that programs see; the rest are between router and library.
const VISIBLE_FLAGS: u8 = CompletionFlags::GRH | CompletionFlags::WITH_IMMEDIATE | CompletionFlags::WITH_INVALIDATE;

/// `sl` of a datagram's completion on RoCE, as on NICs (mlx5, hns, bnxt): not a service level but
/// the kind of header in front of it, 1 for RoCE v2 over IPv6, 2 over IPv4. UCX takes from it where
/// in the 40 bytes the destination stands. Without a branch: each completion comes by here.
#[inline]
fn header_kind(flags: CompletionFlags) -> u8 {
    const GRH_BIT: u32 = CompletionFlags::GRH.trailing_zeros();
    const IPV6_BIT: u32 = CompletionFlags::IPV6_HEADER.trailing_zeros();
    let has_header = flags.0 >> GRH_BIT & 1;
    (has_header << 1) - (flags.0 >> IPV6_BIT & has_header)
}

#[inline]
pub fn completion_to_c(completion: &Completion) -> ibv_wc {
    ibv_wc {
        wr_id: completion.work_request_id,
        status: completion.status as c_uint,
        opcode: completion.opcode as c_uint,
        vendor_err: u32::from(completion.vendor_error),
        byte_len: completion.byte_count,
        imm_data: completion.immediate,
        qp_num: completion.qpn,
        src_qp: completion.source_qpn,
        wc_flags: c_uint::from(completion.flags.0 & VISIBLE_FLAGS),
        pkey_index: 0,
        slid: 0,
        sl: header_kind(completion.flags),
        dlid_path_bits: 0,
    }
}

pub fn async_event_kind_to_c(kind: AsyncEventKind) -> c_uint {
    kind as c_uint
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_verbs::{CompletionOpcode, CompletionStatus};

    #[test]
    fn only_datagrams_name_their_header() {
        let datagram = Completion { flags: CompletionFlags(CompletionFlags::GRH), ..Completion::default() };
        assert_eq!(completion_to_c(&datagram).sl, 2);
        let flags = CompletionFlags(CompletionFlags::GRH | CompletionFlags::IPV6_HEADER);
        let six = completion_to_c(&Completion { flags, ..Completion::default() });
        assert_eq!((six.sl, six.wc_flags), (1, 1));
        assert_eq!(completion_to_c(&Completion::default()).sl, 0);
    }

    #[test]
    fn unmasked_garbage_is_not_looked_at() {
        let attr = ibv_qp_attr { qp_state: 99, path_mtu: 77, path_mig_state: 55, qkey: 5, ..Default::default() };
        let taken = qp_attributes_from_c(&attr, QpAttributeMask(QpAttributeMask::QKEY)).unwrap();
        assert_eq!(taken, QpAttributes { qkey: 5, ..Default::default() });
    }

    #[test]
    fn masked_garbage_is_refused() {
        let attr = ibv_qp_attr { qp_state: 7, cur_qp_state: 8, path_mtu: 0, path_mig_state: 3, ..Default::default() };
        for bit in [
            QpAttributeMask::STATE,
            QpAttributeMask::CUR_STATE,
            QpAttributeMask::PATH_MTU,
            QpAttributeMask::PATH_MIG_STATE,
        ] {
            assert_eq!(qp_attributes_from_c(&attr, QpAttributeMask(bit)), Err(VerbsError::InvalidArgument));
        }
    }

    #[test]
    fn attributes_survive_the_way_there_and_back() {
        let route = GlobalRoute { dgid: Gid([3; 16]), flow_label: 9, sgid_index: 0, hop_limit: 64, traffic_class: 7 };
        let address = AddressHandleAttributes {
            grh: Some(route),
            dlid: 1,
            service_level: 2,
            source_path_bits: 3,
            static_rate: 4,
            port: 1,
        };
        let attributes = QpAttributes {
            state: QpState::ReadyToSend,
            current_state: QpState::SqDrain,
            path_mtu: PathMtu::Mtu4096,
            path_migration_state: 2,
            qkey: 1,
            rq_psn: 2,
            sq_psn: 3,
            dest_qpn: 4,
            access: Access(5),
            capabilities: QpCapabilities { max_send_wr: 1, max_recv_wr: 2, ..Default::default() },
            address,
            alternate_address: AddressHandleAttributes { grh: None, ..address },
            pkey_index: 6,
            alternate_pkey_index: 7,
            enable_sqd_async_notify: true,
            sq_draining: false,
            max_rd_atomic: 8,
            max_dest_rd_atomic: 9,
            min_rnr_timer: 10,
            port: 1,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 6,
            alternate_port: 1,
            alternate_timeout: 13,
            rate_limit_kbps: 1000,
        };
        let back = qp_attributes_from_c(&qp_attributes_to_c(&attributes), QpAttributeMask(u32::MAX)).unwrap();
        assert_eq!(back, attributes);
    }

    #[test]
    fn completions_show_only_public_flags() {
        let completion = Completion {
            status: CompletionStatus::WorkRequestFlushed,
            opcode: CompletionOpcode::Receive,
            flags: CompletionFlags(0xff),
            vendor_error: 3,
            ..Default::default()
        };
        let wc = completion_to_c(&completion);
        assert_eq!((wc.status, wc.opcode, wc.wc_flags, wc.vendor_err), (5, 128, 0b1011, 3));
    }

    #[test]
    fn qp_types_are_known_refused_or_wrong() {
        assert_eq!(qp_type_from_c(2), Ok(QpType::Rc));
        assert_eq!(qp_type_from_c(9), Ok(QpType::XrcSend));
        assert_eq!(qp_type_from_c(8), Err(VerbsError::NotSupported));
        assert_eq!(qp_type_from_c(1), Err(VerbsError::InvalidArgument));
    }
}
