//! Shared receive queues: basic ones, and those for XRC.
use crate::boundary::{Outcome, code, pointer};
use crate::context::Context;
use crate::cq::Cq;
use crate::pd::ParentUse;
use crate::sync::Acknowledged;
use crate::xrc::Xrcd;
use freeflow_abi::{
    IBV_SRQ_INIT_ATTR_CQ, IBV_SRQ_INIT_ATTR_PD, IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_XRCD, IBV_SRQ_LIMIT,
    IBV_SRQ_MAX_WR, IBV_SRQT_BASIC, IBV_SRQT_TM, ibv_context, ibv_cq, ibv_pd, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
    ibv_srq_init_attr_ex, ibv_xrcd, srq_attributes_from_c, srq_attributes_to_c,
};
use freeflow_client::SharedReceiveQueue;
use freeflow_verbs::VerbsError;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// An SRQ as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct Srq {
    c: UnsafeCell<ibv_srq>,
    pub client: Arc<SharedReceiveQueue>,
    pub asyncs_delivered: AtomicU32,
    _parent_use: ParentUse,
}

impl Srq {
    /// # Safety
    /// `srq` came from this library and is not destroyed.
    pub unsafe fn from_c<'a>(srq: *mut ibv_srq) -> &'a Self {
        // SAFETY: every SRQ handed out is the beginning of a `Srq`.
        unsafe { &*srq.cast::<Self>() }
    }

    pub fn acks(&self) -> Acknowledged {
        let c = self.c.get();
        // SAFETY: within the struct.
        unsafe {
            Acknowledged { mutex: &raw mut (*c).mutex, cond: &raw mut (*c).cond, count: &raw mut (*c).events_completed }
        }
    }
}

/// An XRC SRQ's domain and CQ.
struct Xrc {
    xrcd: *mut ibv_xrcd,
    cq: *mut ibv_cq,
}

/// # Safety
/// `pd` is allocated; what `xrc` names exists.
unsafe fn create(
    pd: *mut ibv_pd,
    srq_context: *mut c_void,
    attr: &mut ibv_srq_attr,
    xrc: Option<&Xrc>,
) -> Outcome<*mut ibv_srq> {
    // SAFETY: this function's contract.
    let (context, pd_handle) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: a PD's context is open.
    let owner = unsafe { Context::from_c(context) }.client();
    // SAFETY: this function's contract.
    let xrc = xrc.map(|xrc| unsafe { (Xrcd::from_c(xrc.xrcd).handle, &Cq::from_c(xrc.cq).client) });
    let client = SharedReceiveQueue::create(owner.session(), pd_handle, srq_attributes_from_c(attr), xrc)?;
    (attr.max_wr, attr.max_sge) = (client.attributes().max_wr, client.attributes().max_sge);
    // SAFETY: integers and pointers only; all zeroes are valid.
    let mut c: ibv_srq = unsafe { std::mem::zeroed() };
    c.context = context;
    c.srq_context = srq_context;
    c.pd = pd;
    c.handle = client.handle();
    // SAFETY: this function's contract.
    let parent_use = unsafe { ParentUse::of(pd) };
    let srq = Srq {
        c: UnsafeCell::new(c),
        client: Arc::new(client),
        asyncs_delivered: AtomicU32::new(0),
        _parent_use: parent_use,
    };
    let srq = Box::into_raw(Box::new(srq));
    // SAFETY: in its final place and not shared yet.
    unsafe {
        (*srq).acks().init();
        (*srq).client.set_tag(srq.expose_provenance());
    }
    Ok(srq.cast())
}

/// `ibv_create_srq(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the C contract.
    pointer(|| unsafe { create(pd, (*init).srq_context, &mut (*init).attr, None) })
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    const XRC_MASKS: u32 = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    const MASKS: u32 = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | XRC_MASKS;
    pointer(|| {
        // SAFETY: the C contract. Only what `comp_mask` names is read of the newer fields.
        unsafe {
            let mask = (*init).comp_mask;
            let srq_type = if mask & IBV_SRQ_INIT_ATTR_TYPE != 0 { (*init).srq_type } else { IBV_SRQT_BASIC };
            if mask & !MASKS != 0 || srq_type == IBV_SRQT_TM {
                return Err(VerbsError::NotSupported);
            }
            if mask & IBV_SRQ_INIT_ATTR_PD == 0 || (*init).pd.is_null() || srq_type > IBV_SRQT_TM {
                return Err(VerbsError::InvalidArgument);
            }
            if srq_type == IBV_SRQT_BASIC {
                return create((*init).pd, (*init).srq_context, &mut (*init).attr, None);
            }
            if mask & XRC_MASKS != XRC_MASKS || (*init).xrcd.is_null() || (*init).cq.is_null() {
                return Err(VerbsError::InvalidArgument);
            }
            let xrc = Xrc { xrcd: (*init).xrcd, cq: (*init).cq };
            create((*init).pd, (*init).srq_context, &mut (*init).attr, Some(&xrc))
        }
    })
}

/// `ibv_get_srq_num(3)`: EINVAL for a basic SRQ, which has no number.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        unsafe { *number = Srq::from_c(srq).client.number().ok_or(VerbsError::InvalidArgument)? };
        Ok(())
    })
}

/// `ibv_modify_srq(3)`: the limit; a new size is EOPNOTSUPP.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    code(|| {
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        if mask & IBV_SRQ_MAX_WR != 0 {
            return Err(VerbsError::NotSupported);
        }
        if mask & IBV_SRQ_LIMIT == 0 {
            return Ok(());
        }
        // SAFETY: the C contract.
        let (client, limit) = unsafe { (&Srq::from_c(srq).client, (*attr).srq_limit) };
        if limit > client.attributes().max_wr {
            return Err(VerbsError::InvalidArgument);
        }
        client.set_limit(limit)
    })
}

/// `ibv_query_srq(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        unsafe { *attr = srq_attributes_to_c(&Srq::from_c(srq).client.query()?) };
        Ok(())
    })
}

/// `ibv_destroy_srq(3)`: EBUSY while a QP uses it; waits until its events were acknowledged.
///
/// # Safety
/// `srq` exists, and is not used any more but for acknowledgements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let whole = unsafe { Srq::from_c(srq) };
        whole.client.destroy()?;
        // SAFETY: no more events are delivered; made by `Box::into_raw` in `create`.
        unsafe {
            whole.acks().wait(&whole.asyncs_delivered);
            whole.acks().destroy();
            drop(Box::from_raw(srq.cast::<Srq>()));
        }
        Ok(())
    })
}
