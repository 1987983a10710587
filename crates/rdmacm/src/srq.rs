//! Shared receive queues of identifiers.
use crate::boundary::{Outcome, quiet, status};
use crate::id::Id;
use crate::qp::{create_cqs, destroy_cqs};
use crate::verbs;
use freeflow_abi::{
    IBV_QPT_XRC_RECV, IBV_SRQ_INIT_ATTR_CQ, IBV_SRQ_INIT_ATTR_PD, IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_XRCD,
    IBV_SRQT_BASIC, IBV_SRQT_XRC, ibv_pd, ibv_srq_init_attr, ibv_srq_init_attr_ex, rdma_cm_id,
};
use std::ffi::c_int;
use std::mem;
use std::ptr;

/// # Safety
/// The pointers of `attr` are valid.
unsafe fn create_extended(id: &Id, attr: &mut ibv_srq_init_attr_ex) -> Outcome<()> {
    let c = id.as_c();
    let device = id.device()?;
    if attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: the identifier's own.
    unsafe {
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || attr.pd.is_null() {
            attr.pd = (*c).pd;
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
        }
        if attr.srq_type == IBV_SRQT_XRC {
            if attr.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || attr.xrcd.is_null() {
                attr.xrcd = device.xrcd()?;
            }
            if attr.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || attr.cq.is_null() {
                create_cqs(id, 0, attr.attr.max_wr)?;
                attr.cq = (*c).recv_cq;
            }
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
        }
        let srq = verbs::create_srq_ex((*c).verbs, attr).inspect_err(|_| destroy_cqs(id))?;
        if (*c).pd.is_null() {
            (*c).pd = attr.pd;
        }
        (*c).srq = srq.as_ptr();
    }
    Ok(())
}

/// `rdma_create_srq_ex(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
    // SAFETY: the C contract.
    status(|| unsafe { create_extended(Id::from_c(id)?, attr.as_mut().ok_or(libc::EINVAL)?) })
}

/// `rdma_create_srq(3)`: for XRC if the identifier is.
///
/// # Safety
/// The pointers are valid; `pd` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> c_int {
    status(|| {
        if attr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract; the extended struct begins as the simple one does, and zeroes are
        // valid for the rest.
        unsafe {
            let id = Id::from_c(id)?;
            let mut extended: ibv_srq_init_attr_ex = mem::zeroed();
            ptr::copy_nonoverlapping(attr, (&raw mut extended).cast(), 1);
            extended.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
            let is_xrc = (*id.as_c()).qp_type == IBV_QPT_XRC_RECV;
            extended.srq_type = if is_xrc { IBV_SRQT_XRC } else { IBV_SRQT_BASIC };
            extended.pd = pd;
            let outcome = create_extended(id, &mut extended);
            ptr::copy_nonoverlapping((&raw const extended).cast(), attr, 1);
            outcome
        }
    })
}

/// Destroys the SRQ of an identifier, with the completion queue that came with it.
pub(crate) fn destroy(id: &Id) {
    // SAFETY: the pointer is the identifier's own; what stands there exists.
    unsafe {
        let srq = mem::replace(&mut (*id.as_c()).srq, ptr::null_mut());
        if !srq.is_null() {
            verbs::ibv_destroy_srq(srq);
        }
    }
    destroy_cqs(id);
}

/// `rdma_destroy_srq(3)`.
///
/// # Safety
/// `id` is an identifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    quiet(|| {
        // SAFETY: the C contract.
        if let Ok(id) = unsafe { Id::from_c(id) } {
            destroy(id);
        }
    });
}
