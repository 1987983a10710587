//! `rdma_get_devices` and its counterpart.
use crate::born::lock;
use crate::boundary::{last_errno, pointer, quiet};
use crate::process::Process;
use freeflow_abi::ibv_context;
use std::ffi::c_int;

/// `rdma_get_devices(3)`: the process' contexts, and NULL. ENODEV without a router.
///
/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let mut found = 0;
    let list = pointer(|| {
        let devices = Process::devices()?;
        // SAFETY: sizes.
        let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_context>()) }.cast::<*mut ibv_context>();
        if list.is_null() {
            return Err(last_errno());
        }
        for (at, device) in devices.iter().enumerate() {
            // SAFETY: within what was allocated.
            unsafe { *list.add(at) = device.context() };
        }
        found = devices.len() as c_int;
        lock(&Process::current().lists).insert(list.addr(), devices);
        Ok(list)
    });
    if !count.is_null() {
        // SAFETY: the C contract.
        unsafe { *count = if list.is_null() { 0 } else { found } };
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
        let devices = lock(&Process::current().lists).remove(&list.addr());
        drop(devices);
        // SAFETY: the C contract; from calloc.
        unsafe { libc::free(list.cast()) };
    });
}
