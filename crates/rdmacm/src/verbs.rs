//! Functions of `libibverbs.so.1` that this library calls.
use crate::boundary::{Outcome, last_errno};
use core::ffi::{c_int, c_void};
use freeflow_abi::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_ece, ibv_gid, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr_ex, ibv_srq, ibv_srq_init_attr_ex, ibv_xrcd, ibv_xrcd_init_attr, verbs_context,
};
use std::mem::offset_of;
use std::ptr::NonNull;

unsafe extern "C" {
    pub(crate) fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    pub(crate) fn ibv_free_device_list(list: *mut *mut ibv_device);
    pub(crate) fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    pub(crate) fn ibv_close_device(context: *mut ibv_context) -> c_int;
    pub(crate) fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    pub(crate) fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    pub(crate) fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub(crate) fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub(crate) fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub(crate) fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub(crate) fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    pub(crate) fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub(crate) fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub(crate) fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub(crate) fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    pub(crate) fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub(crate) fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub(crate) fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
    pub(crate) fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
    pub(crate) fn freeflow_create_qp(
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
        connection: u32,
    ) -> *mut ibv_qp;
    pub(crate) fn freeflow_step(qp: *mut ibv_qp, step: *const c_void, bytes: usize) -> c_int;
    pub(crate) fn freeflow_note_connected(qp: *mut ibv_qp);
    pub(crate) fn freeflow_call(
        context: *mut ibv_context,
        request: *const c_void,
        request_bytes: usize,
        reply: *mut c_void,
        reply_capacity: usize,
        reply_bytes: *mut usize,
        descriptor: *mut c_int,
    ) -> c_int;
}

/// The object that a verb returned, or its errno for NULL.
pub(crate) fn given<T>(object: *mut T) -> Outcome<NonNull<T>> {
    NonNull::new(object).ok_or_else(last_errno)
}

/// The table that the header's inline functions reach into.
///
/// # Safety
/// `context` is open. All contexts of FreeFlow's libibverbs are extended ones.
unsafe fn extended<'a>(context: *mut ibv_context) -> &'a verbs_context {
    // SAFETY: this function's contract.
    unsafe { &*context.byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>() }
}

/// As the inline function of the header.
///
/// # Safety
/// The pointers are valid.
pub(crate) unsafe fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> Outcome<NonNull<ibv_srq>> {
    // SAFETY: this function's contract.
    unsafe { given(extended(context).create_srq_ex.ok_or(libc::EOPNOTSUPP)?(context, attr)) }
}

/// As the inline function of the header.
///
/// # Safety
/// The pointers are valid.
pub(crate) unsafe fn open_xrcd(context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> Outcome<NonNull<ibv_xrcd>> {
    // SAFETY: this function's contract.
    unsafe { given(extended(context).open_xrcd.ok_or(libc::EOPNOTSUPP)?(context, attr)) }
}

/// As the inline function of the header.
///
/// # Safety
/// `xrcd` is open, and not used any more.
pub(crate) unsafe fn close_xrcd(xrcd: *mut ibv_xrcd) {
    // SAFETY: this function's contract.
    unsafe {
        if let Some(close) = extended((*xrcd).context).close_xrcd {
            close(xrcd);
        }
    }
}
