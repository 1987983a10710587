//! Queue pairs: creation, states, queries.
use crate::boundary::{Outcome, code, pointer};
use crate::context::Context;
use crate::cq::Cq;
use crate::pd::ParentUse;
use crate::qp_ex::Builder;
use crate::srq::Srq;
use crate::sync::Acknowledged;
use crate::xrc::Xrcd;
use freeflow_abi::{
    IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, IBV_QP_CREATE_CVLAN_STRIPPING, IBV_QP_CREATE_PCI_WRITE_END_PADDING,
    IBV_QP_CREATE_SCATTER_FCS, IBV_QP_CREATE_SOURCE_QPN, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_WRITE, IBV_QP_EX_WITH_BIND_MW, IBV_QP_EX_WITH_FLUSH,
    IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
    IBV_QP_EX_WITH_SEND, IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_QP_EX_WITH_SEND_WITH_INV, IBV_QP_INIT_ATTR_CREATE_FLAGS,
    IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QP_INIT_ATTR_XRCD, IBV_QPS_UNKNOWN, VENDOR_ID,
    gid_from_c, ibv_context, ibv_ece, ibv_gid, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr,
    ibv_qp_init_attr_ex, ibv_xrcd, qp_attributes_from_c, qp_attributes_to_c, qp_capabilities_from_c,
    qp_capabilities_to_c, qp_type_from_c,
};
use freeflow_client::{Handle, QpParameters, QueuePair};
use freeflow_verbs::{QpAttributeMask, QpCapabilities, QpType, VerbsError};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A QP as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct Qp {
    c: UnsafeCell<ibv_qp_ex>,
    pub client: QueuePair,
    pub asyncs_delivered: AtomicU32,
    /// Peers may have memory still that it gave them: the verb failed, and may be tried again.
    is_destroyed: AtomicBool,
    all_signaled: bool,
    /// Whether it was created with SEND_OPS_FLAGS.
    is_extended: bool,
    _parent_use: ParentUse,
    pub builder: Builder,
}

impl Qp {
    /// # Safety
    /// `qp` came from this library and is not destroyed.
    pub unsafe fn from_c<'a>(qp: *mut ibv_qp) -> &'a Self {
        // SAFETY: every QP handed out is the beginning of a `Qp`.
        unsafe { &*qp.cast::<Self>() }
    }

    pub fn acks(&self) -> Acknowledged {
        let c = self.c.get();
        // SAFETY: within the struct.
        unsafe {
            Acknowledged {
                mutex: &raw mut (*c).qp_base.mutex,
                cond: &raw mut (*c).qp_base.cond,
                count: &raw mut (*c).qp_base.events_completed,
            }
        }
    }
}

/// Parameters of `ibv_create_qp_ex` alone, and the objects that the QP is in.
struct Extra {
    pd: *mut ibv_pd,
    xrcd: *mut ibv_xrcd,
    block_own_multicast: bool,
    is_extended: bool,
    /// The identifier of rdma_cm that it is for.
    connection: Option<Handle>,
}

/// Parameters for the router. An XRC target has nothing of its own but its number; an XRC initiator
/// receives nothing.
///
/// # Safety
/// The pointers are null or valid; what `init` names exists.
unsafe fn parameters<'a>(init: &ibv_qp_init_attr, extra: &Extra) -> Outcome<QpParameters<'a>> {
    let qp_type = qp_type_from_c(init.qp_type)?;
    let receives = !matches!(qp_type, QpType::XrcSend | QpType::XrcReceive);
    let mut wanted = QpParameters {
        qp_type,
        pd: None,
        send_cq: None,
        recv_cq: None,
        srq: None,
        xrcd: None,
        capabilities: QpCapabilities::default(),
        all_signaled: init.sq_sig_all != 0,
        block_own_multicast: extra.block_own_multicast,
        connection: extra.connection,
    };
    if qp_type == QpType::XrcReceive {
        if extra.xrcd.is_null() {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: this function's contract.
        wanted.xrcd = Some(unsafe { Xrcd::from_c(extra.xrcd) }.handle);
        return Ok(wanted);
    }
    if extra.pd.is_null() || init.send_cq.is_null() || (receives && init.recv_cq.is_null()) {
        return Err(VerbsError::InvalidArgument);
    }
    wanted.capabilities = qp_capabilities_from_c(&init.cap);
    // SAFETY: this function's contract; not null.
    unsafe {
        wanted.pd = Some((*extra.pd).handle);
        wanted.send_cq = Some(&Cq::from_c(init.send_cq).client);
        wanted.recv_cq = receives.then(|| &Cq::from_c(init.recv_cq).client);
        wanted.srq = (receives && !init.srq.is_null()).then(|| &Srq::from_c(init.srq).client);
    }
    if !receives || wanted.srq.is_some() {
        // A QP with an SRQ has no receive queue of its own.
        (wanted.capabilities.max_recv_wr, wanted.capabilities.max_recv_sge) = (0, 0);
    }
    Ok(wanted)
}

/// # Safety
/// `context` is open; the pointers are null or valid; what `init` names exists.
unsafe fn create(context: *mut ibv_context, init: &mut ibv_qp_init_attr, extra: &Extra) -> Outcome<*mut ibv_qp> {
    // SAFETY: this function's contract.
    let client = unsafe {
        let wanted = parameters(init, extra)?;
        QueuePair::create(Context::from_c(context).client().session(), &wanted)?
    };
    init.cap = qp_capabilities_to_c(&client.capabilities());
    // SAFETY: this function's contract.
    Ok(unsafe { hand_out(context, client, init, extra) })
}

/// Makes of a QP what C sees.
///
/// # Safety
/// `context` is open; the PD of a QP that sends is allocated.
unsafe fn hand_out(
    context: *mut ibv_context,
    client: QueuePair,
    init: &ibv_qp_init_attr,
    extra: &Extra,
) -> *mut ibv_qp {
    // SAFETY: integers, pointers and optional functions only; all zeroes are valid.
    let mut c: ibv_qp_ex = unsafe { std::mem::zeroed() };
    c.qp_base.context = context;
    c.qp_base.qp_context = init.qp_context;
    let mut parent_use = ParentUse::none();
    if client.qp_type().sends() {
        // SAFETY: this function's contract: such a QP has a PD.
        parent_use = unsafe { ParentUse::of(extra.pd) };
        c.qp_base.pd = extra.pd;
        c.qp_base.send_cq = init.send_cq;
        c.qp_base.recv_cq = init.recv_cq;
        c.qp_base.srq = init.srq;
    }
    c.qp_base.handle = client.handle();
    c.qp_base.qp_num = client.qpn();
    c.qp_base.qp_type = init.qp_type;
    c.qp_base.state = client.state() as c_uint;
    crate::qp_ex::fill(&mut c);
    let builder = Builder::new(if extra.is_extended { client.capabilities() } else { Default::default() });
    let qp = Box::into_raw(Box::new(Qp {
        c: UnsafeCell::new(c),
        client,
        asyncs_delivered: AtomicU32::new(0),
        is_destroyed: AtomicBool::new(false),
        all_signaled: init.sq_sig_all != 0,
        is_extended: extra.is_extended,
        _parent_use: parent_use,
        builder,
    }));
    // SAFETY: in its final place and not shared yet.
    unsafe {
        (*qp).acks().init();
        (*qp).client.set_tag(qp.expose_provenance());
    }
    qp.cast()
}

/// `ibv_create_qp(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    pointer(|| {
        if pd.is_null() {
            return Err(VerbsError::InvalidArgument);
        }
        let extra =
            Extra { pd, xrcd: ptr::null_mut(), block_own_multicast: false, is_extended: false, connection: None };
        // SAFETY: the C contract; a PD's context is open.
        unsafe { create((*pd).context, &mut *init, &extra) }
    })
}

/// Another process' XRC target, as C sees it. Its state is not known here (7), as with rdma-core.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn hand_out_opened(
    context: *mut ibv_context,
    client: QueuePair,
    qp_context: *mut c_void,
) -> *mut ibv_qp {
    let init = ibv_qp_init_attr {
        qp_context,
        send_cq: ptr::null_mut(),
        recv_cq: ptr::null_mut(),
        srq: ptr::null_mut(),
        cap: qp_capabilities_to_c(&QpCapabilities::default()),
        qp_type: client.qp_type() as c_uint,
        sq_sig_all: 0,
    };
    let extra = Extra {
        pd: ptr::null_mut(),
        xrcd: ptr::null_mut(),
        block_own_multicast: false,
        is_extended: false,
        connection: None,
    };
    // SAFETY: this function's contract; the QP is not shared yet.
    unsafe {
        let qp = hand_out(context, client, &init, &extra);
        (*qp).state = IBV_QPS_UNKNOWN;
        qp
    }
}

/// Operations of `ibv_wr_*` that a QP of that type can be created with.
fn send_operations(qp_type: QpType) -> u64 {
    let send = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let local = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    let reliable = IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_SEND_WITH_INV
        | IBV_QP_EX_WITH_FLUSH
        | IBV_QP_EX_WITH_ATOMIC_WRITE;
    match qp_type {
        QpType::Ud => send,
        QpType::Uc => send | write | local,
        QpType::Rc | QpType::XrcSend => send | write | local | reliable,
        QpType::XrcReceive => 0,
    }
}

/// Whether a UD QP's own multicast messages shall not come back to it. EOPNOTSUPP for the flags of
/// raw packets, EINVAL for what is no flag.
fn block_own_multicast(qp_type: QpType, flags: u32) -> Outcome<bool> {
    const RAW: u32 = IBV_QP_CREATE_SCATTER_FCS
        | IBV_QP_CREATE_CVLAN_STRIPPING
        | IBV_QP_CREATE_SOURCE_QPN
        | IBV_QP_CREATE_PCI_WRITE_END_PADDING;
    if flags & !(RAW | IBV_QP_CREATE_BLOCK_SELF_MCAST_LB) != 0 {
        return Err(VerbsError::InvalidArgument);
    }
    if flags & RAW != 0 {
        return Err(VerbsError::NotSupported);
    }
    if flags != 0 && qp_type != QpType::Ud {
        return Err(VerbsError::InvalidArgument);
    }
    Ok(flags != 0)
}

pub(crate) unsafe extern "C" fn create_qp_ex(context: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the C contract.
    unsafe { create_extended(context, init, None) }
}

/// `ibv_create_qp_ex(3)`, or the same for an identifier of rdma_cm.
///
/// # Safety
/// The pointers are valid.
pub(crate) unsafe fn create_extended(
    context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
    connection: Option<Handle>,
) -> *mut ibv_qp {
    const MASKS: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    pointer(|| {
        // SAFETY: this function's contract. Only what `comp_mask` names is read of the newer
        // fields; the struct begins as `ibv_qp_init_attr` does.
        unsafe {
            let mask = (*init).comp_mask;
            let qp_type = qp_type_from_c((*init).qp_type)?;
            if mask & !MASKS != 0 {
                return Err(VerbsError::NotSupported);
            }
            let flags = if mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 { (*init).create_flags } else { 0 };
            let block_own_multicast = block_own_multicast(qp_type, flags)?;
            let is_extended = mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
            if is_extended && (*init).send_ops_flags & !send_operations(qp_type) != 0 {
                return Err(VerbsError::NotSupported);
            }
            let pd = if mask & IBV_QP_INIT_ATTR_PD != 0 { (*init).pd } else { ptr::null_mut() };
            let xrcd = if mask & IBV_QP_INIT_ATTR_XRCD != 0 { (*init).xrcd } else { ptr::null_mut() };
            let extra = Extra { pd, xrcd, block_own_multicast, is_extended, connection };
            create(context, &mut *init.cast::<ibv_qp_init_attr>(), &extra)
        }
    })
}

/// `ibv_qp_to_qp_ex(3)`: NULL unless the QP was created with SEND_OPS_FLAGS.
///
/// # Safety
/// `qp` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the C contract.
    if unsafe { Qp::from_c(qp) }.is_extended { qp.cast() } else { ptr::null_mut() }
}

/// Attributes that there are; the rest of the mask must be clear.
const ATTRIBUTES: u32 = ((QpAttributeMask::DEST_QPN << 1) - 1) | QpAttributeMask::RATE_LIMIT;

/// Attributes that programs may name for an XRC QP because RC has them, and that its half of the
/// connection has not: they are not looked at, as in the kernel.
const fn other_half(qp_type: QpType) -> u32 {
    match qp_type {
        QpType::XrcSend => QpAttributeMask::MAX_DEST_RD_ATOMIC | QpAttributeMask::MIN_RNR_TIMER,
        QpType::XrcReceive => {
            QpAttributeMask::MAX_QP_RD_ATOMIC | QpAttributeMask::RETRY_CNT | QpAttributeMask::RNR_RETRY
        }
        _ => 0,
    }
}

/// `ibv_modify_qp(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    code(|| {
        if mask as u32 & !ATTRIBUTES != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the C contract.
        let client = unsafe { &Qp::from_c(qp).client };
        let mask = QpAttributeMask(mask as u32 & !other_half(client.qp_type()));
        // SAFETY: the C contract.
        let attributes = unsafe { qp_attributes_from_c(&*attr, mask) }?;
        let state = client.modify(&attributes, mask)?;
        // SAFETY: the C contract.
        unsafe { (*qp).state = state as c_uint };
        freeflow_remap::wait_for_revocations(client.session())
    })
}

/// `ibv_query_qp(3)`. Fills in everything, whatever the mask names.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let whole = unsafe { Qp::from_c(qp) };
        let mut attributes = whole.client.query()?;
        attributes.capabilities = whole.client.capabilities();
        attributes.current_state = attributes.state;
        let cap = qp_capabilities_to_c(&attributes.capabilities);
        // SAFETY: the C contract.
        unsafe {
            (*qp).state = attributes.state as c_uint;
            *attr = qp_attributes_to_c(&attributes);
            *init = ibv_qp_init_attr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap,
                qp_type: (*qp).qp_type,
                sq_sig_all: c_int::from(whole.all_signaled),
            };
        }
        Ok(())
    })
}

/// `ibv_attach_mcast(3)`. RoCE has no LIDs: `lid` is not looked at.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the C contract.
    code(|| unsafe { Qp::from_c(qp).client.attach_multicast(gid_from_c(gid.read_unaligned())) })
}

/// `ibv_detach_mcast(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the C contract.
    code(|| unsafe { Qp::from_c(qp).client.detach_multicast(gid_from_c(gid.read_unaligned())) })
}

/// FreeFlow's word to a peer in a connection's set-up: who it is, and no options.
const ECE: ibv_ece = ibv_ece { vendor_id: VENDOR_ID, options: 0, comp_mask: 0 };

/// `ibv_query_ece(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the C contract.
    unsafe { *ece = ECE };
    0
}

/// `ibv_set_ece(3)`: accepts a wish for no options, whoever it came from; EINVAL for any other.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let ece = unsafe { &mut *ece };
        if ece.options != 0 || ece.comp_mask != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        *ece = ECE;
        Ok(())
    })
}

/// `ibv_destroy_qp(3)`: waits until its events were acknowledged.
///
/// # Safety
/// `qp` exists, and is not used any more but for acknowledgements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let whole = unsafe { Qp::from_c(qp) };
        // Once: the second time it is waited for only what the first one left.
        if !whole.is_destroyed.load(Ordering::Relaxed) {
            whole.client.destroy()?;
            whole.is_destroyed.store(true, Ordering::Relaxed);
        }
        freeflow_remap::wait_for_revocations(whole.client.session())?;
        // SAFETY: no more events are delivered; made by `Box::into_raw` in `create`.
        unsafe {
            whole.acks().wait(&whole.asyncs_delivered);
            whole.acks().destroy();
            drop(Box::from_raw(qp.cast::<Qp>()));
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_creation() {
        let block = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
        assert_eq!(block_own_multicast(QpType::Ud, block), Ok(true));
        assert_eq!(block_own_multicast(QpType::Rc, 0), Ok(false));
        assert_eq!(block_own_multicast(QpType::Rc, block), Err(VerbsError::InvalidArgument));
        assert_eq!(block_own_multicast(QpType::Ud, block | IBV_QP_CREATE_SOURCE_QPN), Err(VerbsError::NotSupported));
        assert_eq!(block_own_multicast(QpType::Ud, 1), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn operations_of_each_type() {
        assert_eq!(send_operations(QpType::Ud), 0xc);
        assert_eq!(send_operations(QpType::Uc), 0x18f);
        assert_eq!(send_operations(QpType::Rc), 0x1bff);
        assert_eq!(send_operations(QpType::XrcSend), send_operations(QpType::Rc));
        assert_eq!(send_operations(QpType::XrcReceive), 0);
    }
}
