//! Devices and contexts.
use crate::attributes::ibv_device_attr;
use crate::constants::{IBV_SYSFS_NAME_MAX, IBV_SYSFS_PATH_MAX};
use crate::objects::{ibv_cq, ibv_mw, ibv_pd, ibv_qp, ibv_srq};
use crate::work::{ibv_mw_bind, ibv_recv_wr, ibv_send_wr, ibv_wc};
use core::ffi::{c_char, c_int, c_uint, c_void};

/// An entry that programs never call: it keeps the others in their places.
pub type unused_op = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device {
    pub _ops: [unused_op; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; IBV_SYSFS_NAME_MAX],
    pub dev_name: [c_char; IBV_SYSFS_NAME_MAX],
    pub dev_path: [c_char; IBV_SYSFS_PATH_MAX],
    pub ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
}

/// Layout behind every device pointer handed out: vendors' libraries read `ops` behind the public
/// part to see whether the device is theirs, so it must be readable and not equal to theirs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct verbs_device {
    pub device: ibv_device,
    /// `const struct verbs_device_ops *`.
    pub ops: *const c_void,
    pub refcount: c_int,
    /// `struct list_node`: next, previous.
    pub entry: [*mut c_void; 2],
    pub sysfs: *mut c_void,
    pub core_support: u64,
}

pub type poll_cq_fn = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub type req_notify_cq_fn = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub type post_send_fn = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub type post_recv_fn = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
pub type post_srq_recv_fn = unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// Thirty-two pointers, the first 256 bytes behind `device`. The typed ones are called by inline
/// functions of the header without a look whether they are null (but for `alloc_mw`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_context_ops {
    pub _compat_query_device: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int>,
    pub _compat_query_port: unused_op,
    pub _compat_alloc_pd: unused_op,
    pub _compat_dealloc_pd: unused_op,
    pub _compat_reg_mr: unused_op,
    pub _compat_rereg_mr: unused_op,
    pub _compat_dereg_mr: unused_op,
    pub alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, c_uint) -> *mut ibv_mw>,
    pub bind_mw: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int>,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
    pub _compat_create_cq: unused_op,
    pub poll_cq: Option<poll_cq_fn>,
    pub req_notify_cq: Option<req_notify_cq_fn>,
    pub _compat_cq_event: unused_op,
    pub _compat_resize_cq: unused_op,
    pub _compat_destroy_cq: unused_op,
    pub _compat_create_srq: unused_op,
    pub _compat_modify_srq: unused_op,
    pub _compat_query_srq: unused_op,
    pub _compat_destroy_srq: unused_op,
    pub post_srq_recv: Option<post_srq_recv_fn>,
    pub _compat_create_qp: unused_op,
    pub _compat_query_qp: unused_op,
    pub _compat_modify_qp: unused_op,
    pub _compat_destroy_qp: unused_op,
    pub post_send: Option<post_send_fn>,
    pub post_recv: Option<post_recv_fn>,
    pub _compat_create_ah: unused_op,
    pub _compat_destroy_ah: unused_op,
    pub _compat_attach_mcast: unused_op,
    pub _compat_detach_mcast: unused_op,
    pub _compat_async_event: unused_op,
}

#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    /// Programs poll it; it must be readable exactly when an asynchronous event waits.
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    /// [`crate::VERBS_ABI_IS_EXTENDED`] as a pointer.
    pub abi_compat: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_xrcd {
    pub context: *mut ibv_context,
}
