//! `rdma_get_devices` and its counterpart.
use crate::born::lock;
use crate::boundary::{last_errno, pointer, quiet};
use crate::process::Process;
use freeflow_abi::ibv_context;
use std::ffi::c_int;

/// `rdma_get_devices(3)`: the process' context, and NULL. ENODEV without a router.
///
/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let list = pointer(|| {
        let device = Process::device()?;
        // SAFETY: the size of two pointers.
        let list = unsafe { libc::calloc(2, size_of::<*mut ibv_context>()) }.cast::<*mut ibv_context>();
        if list.is_null() {
            return Err(last_errno());
        }
        // SAFETY: within what was allocated.
        unsafe { *list = device.context() };
        lock(&Process::current().lists).insert(list.addr(), device);
        Ok(list)
    });
    if !count.is_null() {
        // SAFETY: the C contract.
        unsafe { *count = c_int::from(!list.is_null()) };
    }
    list
}

/// `rdma_free_devices(3)`.
///
/// # Safety
/// `list` came from [`rdma_get_devices`], once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    quiet(|| {
        let device = lock(&Process::current().lists).remove(&list.addr());
        drop(device);
        // SAFETY: the C contract; from calloc.
        unsafe { libc::free(list.cast()) };
    });
}
