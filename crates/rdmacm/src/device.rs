//! The one device of a process, opened once and shared by all its identifiers, and `rdma_get_devices`.
use crate::boundary::{Outcome, checked, last_errno, pointer, quiet};
use crate::process::{Born, Process, lock};
use crate::verbs;
use freeflow_abi::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, ibv_context, ibv_device_attr, ibv_pd, ibv_xrcd,
    ibv_xrcd_init_attr,
};
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex};

/// An open device, with the protection domain and XRC domain that identifiers have by default.
pub(crate) struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    /// Null until it is asked for.
    xrcd: Mutex<Xrcd>,
    born: Born,
    /// Of READs and atomics, as initiator and as responder.
    pub depth_max: u8,
}

struct Xrcd(*mut ibv_xrcd);

// SAFETY: verbs may be called from any thread; the pointers don't change but for the domain's, which is behind a lock.
unsafe impl Send for Device {}
// SAFETY: the same.
unsafe impl Sync for Device {}

impl Device {
    /// The current router's. ENODEV without one.
    pub fn current() -> Outcome<Arc<Self>> {
        let mut current = lock(&Process::current().device);
        let mut count = 0;
        // SAFETY: a local.
        let list = unsafe { verbs::ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(libc::ENODEV);
        }
        // SAFETY: a list ends with a null pointer.
        let newest = unsafe { *list };
        let outcome = match &*current {
            // SAFETY: the context is open. libibverbs names another device once the router is another one.
            Some(device) if unsafe { (*device.context).device } == newest => Ok(device.clone()),
            _ if newest.is_null() => Err(libc::ENODEV),
            _ => Self::open(newest).inspect(|device| *current = Some(device.clone())),
        };
        // SAFETY: from above, once.
        unsafe { verbs::ibv_free_device_list(list) };
        outcome
    }

    fn open(device: *mut freeflow_abi::ibv_device) -> Outcome<Arc<Self>> {
        // SAFETY: a device of the caller's list.
        let context = unsafe { verbs::ibv_open_device(device) };
        if context.is_null() {
            return Err(libc::ENODEV);
        }
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: open; the attributes are integers, for which zeroes are valid.
        let outcome = unsafe {
            checked(verbs::ibv_query_device(context, attributes.as_mut_ptr())).and_then(|()| {
                let pd = verbs::given(verbs::ibv_alloc_pd(context))?;
                Ok((pd.as_ptr(), attributes.assume_init_ref().max_qp_init_rd_atom.clamp(0, 255) as u8))
            })
        };
        match outcome {
            Ok((pd, depth_max)) => {
                let xrcd = Mutex::new(Xrcd(ptr::null_mut()));
                Ok(Arc::new(Self { context, pd, xrcd, born: Born::here(), depth_max }))
            }
            Err(error) => {
                // SAFETY: nobody else has it.
                unsafe { verbs::ibv_close_device(context) };
                Err(error)
            }
        }
    }

    pub fn context(&self) -> *mut ibv_context {
        self.context
    }

    pub fn pd(&self) -> *mut ibv_pd {
        self.pd
    }

    /// The process' nameless XRC domain, shared by all its identifiers.
    pub fn xrcd(&self) -> Outcome<*mut ibv_xrcd> {
        let mut xrcd = lock(&self.xrcd);
        if xrcd.0.is_null() {
            let mut attributes = ibv_xrcd_init_attr {
                comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            // SAFETY: open; a local.
            xrcd.0 = unsafe { verbs::open_xrcd(self.context, &raw mut attributes)? }.as_ptr();
        }
        Ok(xrcd.0)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.born.is_here() {
            return;
        }
        let xrcd = lock(&self.xrcd).0;
        // SAFETY: no identifier has it any more. What the program still has in the domain keeps it, and the context with it.
        unsafe {
            if !xrcd.is_null() {
                verbs::close_xrcd(xrcd);
            }
            if verbs::ibv_dealloc_pd(self.pd) == 0 {
                verbs::ibv_close_device(self.context);
            }
        }
    }
}

/// `rdma_get_devices(3)`: the process' context, and NULL. ENODEV without a router.
///
/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let list = pointer(|| {
        let device = Device::current()?;
        // SAFETY: the size of two pointers.
        let list = unsafe { libc::calloc(2, size_of::<*mut ibv_context>()) }.cast::<*mut ibv_context>();
        if list.is_null() {
            return Err(last_errno());
        }
        // SAFETY: within what was allocated.
        unsafe { *list = device.context };
        lock(&Process::current().lists).insert(list.addr(), device);
        Ok(list)
    });
    if !count.is_null() {
        // SAFETY: the caller's.
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
        // SAFETY: the caller's; from calloc.
        unsafe { libc::free(list.cast()) };
    });
}
