//! Contexts: the structure behind an `ibv_context`, and queries. `opening` makes and ends them.
use crate::boundary::{Outcome, code};
use crate::clock::clock_ns;
use crate::on_demand::OnDemandRegions;
use freeflow_abi::{
    IBV_VALUES_MASK_RAW_CLOCK, PORT_ATTR_COMPAT_BYTES, copy_prefix, device_attributes_ex_to_c, device_attributes_to_c,
    ibv_context, ibv_device, ibv_device_attr, ibv_device_attr_ex, ibv_port_attr, ibv_query_device_ex_input,
    ibv_values_ex, port_attributes_to_c, verbs_context,
};
use freeflow_client as client;
use freeflow_verbs::VerbsError;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::ptr;

/// A context as C sees it (through a pointer to its last part), and what is behind it.
#[repr(C)]
pub(crate) struct Context {
    pub c: UnsafeCell<verbs_context>,
    pub client: client::Context,
    pub on_demand: OnDemandRegions,
    /// Imported: the descriptor that it was imported by, which is its own since.
    pub imported_by: Option<OwnedFd>,
    /// Holds a reference.
    pub device: *mut ibv_device,
}

impl Context {
    /// # Safety
    /// `context` came from this library and is not closed.
    pub unsafe fn from_c<'a>(context: *mut ibv_context) -> &'a Self {
        // SAFETY: every context handed out is the `context` of a `Context`'s `verbs_context`, which
        // is its first field.
        unsafe { &*context.byte_sub(offset_of!(verbs_context, context)).cast::<Self>() }
    }

    /// A number that no other open context has.
    pub fn number(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    pub fn client(&self) -> &client::Context {
        &self.client
    }

    pub fn on_demand(&self) -> &OnDemandRegions {
        &self.on_demand
    }

    pub fn as_c(&self) -> *mut ibv_context {
        // SAFETY: within the struct.
        unsafe { &raw mut (*self.c.get()).context }
    }
}

/// The session of a context.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn session<'a>(context: *mut ibv_context) -> &'a client::Session {
    // SAFETY: this function's contract.
    unsafe { Context::from_c(context) }.client.session()
}

/// Queries answer from what the router said at first, in a child of `fork` too.
fn live(session: &client::Session) -> Outcome<()> {
    if session.is_router_gone() { Err(VerbsError::DeviceFatal) } else { Ok(()) }
}

/// `ibv_query_device(3)`.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let session = unsafe { session(context) };
        live(session)?;
        // SAFETY: the C contract.
        unsafe { *attr = device_attributes_to_c(session.device()) };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_bytes: usize,
) -> c_int {
    code(|| {
        // SAFETY: null or valid.
        if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0) {
            return Err(VerbsError::InvalidArgument);
        }
        if attr_bytes < size_of::<ibv_device_attr>() {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the C contract, `attr` for `attr_bytes` bytes.
        unsafe {
            let session = session(context);
            live(session)?;
            copy_prefix(&device_attributes_ex_to_c(session.device()), attr, attr_bytes);
        }
        Ok(())
    })
}

/// `ibv_query_port(3)` as programs of old call it: they allocated the first 48 bytes only.
///
/// # Safety
/// The pointers are valid, `attr` for 48 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the C contract.
    unsafe { query_port(context, port, attr, PORT_ATTR_COMPAT_BYTES) }
}

pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    attr_bytes: usize,
) -> c_int {
    code(|| {
        if port != 1 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the C contract, `attr` for `attr_bytes` bytes.
        unsafe {
            let session = session(context);
            live(session)?;
            copy_prefix(&port_attributes_to_c(&session.device().port), attr, attr_bytes);
        }
        Ok(())
    })
}

/// Completion timestamps are nanoseconds of CLOCK_MONOTONIC, so the raw clock is that clock: all of
/// it in `tv_nsec`, in the unit of the timestamps, as mlx5 gives it and programs read it.
/// `comp_mask` says on return what was given.
pub(crate) unsafe extern "C" fn query_rt_values(_context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let values = unsafe { &mut *values };
        values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
        if values.comp_mask != 0 {
            let now = clock_ns(libc::CLOCK_MONOTONIC) as libc::c_long;
            values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: now };
        }
        Ok(())
    })
}

const _: () = assert!(size_of::<verbs_context>() == 696 && offset_of!(verbs_context, context) == 368);
