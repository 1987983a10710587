//! Queue pairs: creation, states, queries.
use crate::boundary::{Outcome, code, pointer};
use crate::context::Context;
use crate::cq::Cq;
use crate::qp_ex::Builder;
use crate::srq::Srq;
use crate::sync::Acknowledged;
use freeflow_abi::{
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_RDMA_READ,
    IBV_QP_EX_WITH_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_SEND, IBV_QP_EX_WITH_SEND_WITH_IMM,
    IBV_QP_INIT_ATTR_CREATE_FLAGS, IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, ibv_context, ibv_pd, ibv_qp,
    ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex, qp_attributes_from_c, qp_attributes_to_c,
    qp_capabilities_from_c, qp_capabilities_to_c, qp_type_from_c,
};
use freeflow_client::{QpParameters, QueuePair};
use freeflow_verbs::{QpAttributeMask, QpType, VerbsError};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};
use std::ptr;
use std::sync::atomic::AtomicU32;

/// A QP as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct Qp {
    c: UnsafeCell<ibv_qp_ex>,
    pub client: QueuePair,
    pub asyncs_delivered: AtomicU32,
    all_signaled: bool,
    /// Whether it was created with SEND_OPS_FLAGS.
    is_extended: bool,
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

/// # Safety
/// The pointers are valid; what `init` names exists.
unsafe fn create(pd: *mut ibv_pd, init: &mut ibv_qp_init_attr, is_extended: bool) -> Outcome<*mut ibv_qp> {
    let qp_type = qp_type_from_c(init.qp_type)?;
    if pd.is_null() || init.send_cq.is_null() || init.recv_cq.is_null() {
        return Err(VerbsError::InvalidArgument);
    }
    let mut capabilities = qp_capabilities_from_c(&init.cap);
    if !init.srq.is_null() {
        // A QP with an SRQ has no receive queue of its own.
        (capabilities.max_recv_wr, capabilities.max_recv_sge) = (0, 0);
    }
    let all_signaled = init.sq_sig_all != 0;
    // SAFETY: the caller's.
    let (context, pd_handle) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: the caller's; a PD's context is open.
    let client = unsafe {
        let wanted = QpParameters {
            qp_type,
            send_cq: &Cq::from_c(init.send_cq).client,
            recv_cq: &Cq::from_c(init.recv_cq).client,
            srq: if init.srq.is_null() { None } else { Some(&Srq::from_c(init.srq).client) },
            capabilities,
            all_signaled,
        };
        QueuePair::create(Context::from_c(context).client().session(), pd_handle, &wanted)?
    };
    init.cap = qp_capabilities_to_c(&client.capabilities());
    // SAFETY: integers, pointers and optional functions only; all zeroes are valid.
    let mut c: ibv_qp_ex = unsafe { std::mem::zeroed() };
    c.qp_base.context = context;
    c.qp_base.qp_context = init.qp_context;
    c.qp_base.pd = pd;
    c.qp_base.send_cq = init.send_cq;
    c.qp_base.recv_cq = init.recv_cq;
    c.qp_base.srq = init.srq;
    c.qp_base.handle = client.handle();
    c.qp_base.qp_num = client.qpn();
    c.qp_base.qp_type = init.qp_type;
    crate::qp_ex::fill(&mut c);
    let builder = Builder::new(if is_extended { client.capabilities() } else { Default::default() });
    let qp = Box::into_raw(Box::new(Qp {
        c: UnsafeCell::new(c),
        client,
        asyncs_delivered: AtomicU32::new(0),
        all_signaled,
        is_extended,
        builder,
    }));
    // SAFETY: in its final place and not shared yet.
    unsafe {
        (*qp).acks().init();
        (*qp).client.set_tag(qp.expose_provenance());
    }
    Ok(qp.cast())
}

/// `ibv_create_qp(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    pointer(|| unsafe { create(pd, &mut *init, false) })
}

/// Operations of `ibv_wr_*` that a QP of that type can be created with.
fn send_operations(qp_type: QpType) -> u64 {
    let send = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let read = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    match qp_type {
        QpType::Ud => send,
        QpType::Uc => send | write,
        QpType::Rc => send | write | read,
    }
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const MASKS: u32 = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    pointer(|| {
        // SAFETY: the caller's. Only what `comp_mask` names is read of the newer fields; the struct begins as
        // `ibv_qp_init_attr` does.
        unsafe {
            let mask = (*init).comp_mask;
            let qp_type = qp_type_from_c((*init).qp_type)?;
            if mask & !MASKS != 0 {
                return Err(VerbsError::NotSupported);
            }
            if mask & IBV_QP_INIT_ATTR_PD == 0 {
                return Err(VerbsError::InvalidArgument);
            }
            if mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && (*init).create_flags != 0 {
                return Err(VerbsError::NotSupported);
            }
            let is_extended = mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
            if is_extended && (*init).send_ops_flags & !send_operations(qp_type) != 0 {
                return Err(VerbsError::NotSupported);
            }
            create((*init).pd, &mut *init.cast::<ibv_qp_init_attr>(), is_extended)
        }
    })
}

/// `ibv_qp_to_qp_ex(3)`: NULL unless the QP was created with SEND_OPS_FLAGS.
///
/// # Safety
/// `qp` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller's.
    if unsafe { Qp::from_c(qp) }.is_extended { qp.cast() } else { ptr::null_mut() }
}

/// Attributes that there are; the rest of the mask must be clear.
const ATTRIBUTES: u32 = ((QpAttributeMask::DEST_QPN << 1) - 1) | QpAttributeMask::RATE_LIMIT;

/// `ibv_modify_qp(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    code(|| {
        let mask = QpAttributeMask(mask as u32);
        if mask.0 & !ATTRIBUTES != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the caller's.
        let attributes = unsafe { qp_attributes_from_c(&*attr, mask) }?;
        // SAFETY: the caller's.
        let state = unsafe { Qp::from_c(qp) }.client.modify(&attributes, mask)?;
        // SAFETY: the caller's.
        unsafe { (*qp).state = state as c_uint };
        Ok(())
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
        // SAFETY: the caller's.
        let whole = unsafe { Qp::from_c(qp) };
        let mut attributes = whole.client.query()?;
        attributes.capabilities = whole.client.capabilities();
        attributes.current_state = attributes.state;
        let cap = qp_capabilities_to_c(&attributes.capabilities);
        // SAFETY: the caller's.
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

/// `ibv_destroy_qp(3)`: waits until its events were acknowledged.
///
/// # Safety
/// `qp` exists, and is not used any more but for acknowledgements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    code(|| {
        // SAFETY: the caller's.
        let whole = unsafe { Qp::from_c(qp) };
        whole.client.destroy()?;
        // SAFETY: no more events are delivered; made by `Box::into_raw` in `create`.
        unsafe {
            whole.acks().wait(&whole.asyncs_delivered);
            whole.acks().destroy();
            drop(Box::from_raw(qp.cast::<Qp>()));
        }
        Ok(())
    })
}
