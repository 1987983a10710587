//! Contexts: opening the device, the tables of operations that inline functions of the header reach into, queries.
use crate::advise::{OnDemandRegions, advise_mr};
use crate::boundary::{Outcome, code, pointer, set_errno};
use crate::device::{Device, current_device, hold, release};
use crate::{cq, cq_ex, device_memory, memory, pd, post, qp, srq, window, xrc};
use freeflow_abi::{
    IBV_VALUES_MASK_RAW_CLOCK, PORT_ATTR_COMPAT_BYTES, VERBS_ABI_IS_EXTENDED, copy_prefix, device_attributes_ex_to_c,
    device_attributes_to_c, ibv_context, ibv_device, ibv_device_attr, ibv_device_attr_ex, ibv_port_attr,
    ibv_query_device_ex_input, ibv_values_ex, port_attributes_to_c, verbs_context,
};
use freeflow_client as client;
use freeflow_verbs::VerbsError;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// A context as C sees it (through a pointer to its last part), and what is behind it.
#[repr(C)]
pub(crate) struct Context {
    c: UnsafeCell<verbs_context>,
    client: client::Context,
    on_demand: OnDemandRegions,
    /// Imported: the descriptor that it was imported by, which is its own since.
    imported_by: Option<OwnedFd>,
    /// Holds a reference.
    device: *mut ibv_device,
}

impl Context {
    /// # Safety
    /// `context` came from [`hand_out`] and is not closed.
    pub unsafe fn from_c<'a>(context: *mut ibv_context) -> &'a Self {
        // SAFETY: every context handed out is the `context` of a `Context`'s `verbs_context`, which is its first field.
        unsafe { &*context.byte_sub(offset_of!(verbs_context, context)).cast::<Self>() }
    }

    /// A name for it, as long as it is open.
    pub fn number(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    pub fn client(&self) -> &client::Context {
        &self.client
    }

    pub fn on_demand(&self) -> &OnDemandRegions {
        &self.on_demand
    }

    fn as_c(&self) -> *mut ibv_context {
        // SAFETY: within the struct.
        unsafe { &raw mut (*self.c.get()).context }
    }
}

/// The session of a context.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn session<'a>(context: *mut ibv_context) -> &'a client::Session {
    // SAFETY: the caller's.
    unsafe { Context::from_c(context) }.client.session()
}

/// `ibv_open_device(3)`.
///
/// # Safety
/// `device` is a device of the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(|| {
        // SAFETY: the caller's.
        let client = client::Context::open(unsafe { Device::from_c(device) }.session())?;
        // SAFETY: the caller's; the reference is the context's from here on.
        unsafe { hold(device) };
        Ok(hand_out(device, client, None))
    })
}

/// `ibv_import_device(3)`: the context that a process of this vNIC has, by its `cmd_fd`. The descriptor is closed with
/// the context. EINVAL if it is no such descriptor, ENOENT if that context is closed.
///
/// # Safety
/// Nothing else closes the descriptor if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    let mut refused = 0;
    let context = pointer(|| {
        let mut pass = [0; client::PASS_BYTES];
        // SAFETY: the buffer is ours to write.
        let read = unsafe { libc::pread(cmd_fd, pass.as_mut_ptr().cast(), pass.len(), 0) };
        if read != pass.len() as isize {
            return Err(VerbsError::InvalidArgument);
        }
        let device = current_device().map_err(|errno| {
            refused = errno;
            VerbsError::DeviceFatal
        })?;
        // SAFETY: the reference is ours.
        let imported =
            client::Context::import(unsafe { Device::from_c(device) }.session(), pass).inspect_err(|_| {
                // SAFETY: nobody got it.
                unsafe { release(device) };
            })?;
        // SAFETY: the caller gives it away.
        Ok(hand_out(device, imported, Some(unsafe { OwnedFd::from_raw_fd(cmd_fd) })))
    });
    if refused != 0 {
        set_errno(refused);
    }
    context
}

/// A context for C. The reference to the device becomes its own.
fn hand_out(device: *mut ibv_device, client: client::Context, imported_by: Option<OwnedFd>) -> *mut ibv_context {
    // SAFETY: integers, pointers and optional functions only; all zeroes are valid.
    let mut c: verbs_context = unsafe { std::mem::zeroed() };
    fill_extended(&mut c);
    fill_operations(&mut c.context);
    c.context.device = device;
    c.context.cmd_fd = imported_by.as_ref().map_or_else(|| client.pass_descriptor(), AsRawFd::as_raw_fd);
    c.context.async_fd = client.descriptor();
    c.context.num_comp_vectors = client.session().device().completion_vector_count as c_int;
    let on_demand = OnDemandRegions::default();
    let context = Box::new(Context { c: UnsafeCell::new(c), client, on_demand, imported_by, device });
    // SAFETY: in its final place, and not shared yet.
    unsafe { libc::pthread_mutex_init(&raw mut (*context.as_c()).mutex, ptr::null()) };
    // The pointer handed out must reach the whole `Context`: it is derived from the box, not from a reference.
    let whole = Box::into_raw(context);
    // SAFETY: within the allocation.
    unsafe { whole.byte_add(offset_of!(verbs_context, context)).cast() }
}

fn fill_operations(context: &mut ibv_context) {
    context.ops.alloc_mw = Some(window::alloc_mw);
    context.ops.bind_mw = Some(window::bind_mw);
    context.ops.dealloc_mw = Some(window::dealloc_mw);
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_srq_recv = Some(post::post_srq_recv);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.abi_compat = ptr::without_provenance_mut(VERBS_ABI_IS_EXTENDED);
}

/// What stays null is refused with EOPNOTSUPP by the header's inline functions.
fn fill_extended(c: &mut verbs_context) {
    c.sz = size_of::<verbs_context>();
    c.query_port = Some(query_port);
    c.query_device_ex = Some(query_device_ex);
    c.query_rt_values = Some(query_rt_values);
    c.create_cq_ex = Some(cq_ex::create_cq_ex);
    c.create_qp_ex = Some(qp::create_qp_ex);
    c.create_srq_ex = Some(srq::create_srq_ex);
    c.get_srq_num = Some(srq::get_srq_num);
    c.modify_cq = Some(cq::modify_cq);
    c.open_qp = Some(xrc::open_qp);
    c.open_xrcd = Some(xrc::open_xrcd);
    c.close_xrcd = Some(xrc::close_xrcd);
    c.reg_mr_ex = Some(memory::ibv_reg_mr_ex);
    c.advise_mr = Some(advise_mr);
    c.alloc_null_mr = Some(memory::alloc_null_mr);
    c.alloc_dm = Some(device_memory::alloc_dm);
    c.free_dm = Some(device_memory::free_dm);
    c.reg_dm_mr = Some(device_memory::reg_dm_mr);
    c.alloc_td = Some(pd::alloc_td);
    c.dealloc_td = Some(pd::dealloc_td);
    c.alloc_parent_domain = Some(pd::alloc_parent_domain);
}

/// `ibv_close_device(3)`.
///
/// # Safety
/// `context` is open, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    crate::boundary::number(|| {
        // SAFETY: the caller's.
        let whole = unsafe { Context::from_c(context) };
        whole.client.close()?;
        freeflow_remap::release_all(whole.client.session(), whole.number());
        let device = whole.device;
        // SAFETY: made by `Box::into_raw` in `hand_out`; the reference was its.
        unsafe {
            libc::pthread_mutex_destroy(&raw mut (*context).mutex);
            drop(Box::from_raw(context.byte_sub(offset_of!(verbs_context, context)).cast::<Context>()));
            release(device);
        }
        Ok(0)
    })
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
        // SAFETY: the caller's.
        let session = unsafe { session(context) };
        live(session)?;
        // SAFETY: the caller's.
        unsafe { *attr = device_attributes_to_c(session.device()) };
        Ok(())
    })
}

unsafe extern "C" fn query_device_ex(
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
        // SAFETY: the caller's, `attr` for `attr_bytes` bytes.
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
    // SAFETY: the caller's.
    unsafe { query_port(context, port, attr, PORT_ATTR_COMPAT_BYTES) }
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    attr_bytes: usize,
) -> c_int {
    code(|| {
        if port != 1 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the caller's, `attr` for `attr_bytes` bytes.
        unsafe {
            let session = session(context);
            live(session)?;
            copy_prefix(&port_attributes_to_c(&session.device().port), attr, attr_bytes);
        }
        Ok(())
    })
}

/// Completion timestamps are nanoseconds of CLOCK_MONOTONIC, so the raw clock is that clock: all of it in `tv_nsec`, in the
/// unit of the timestamps, as mlx5 gives it and programs read it. `comp_mask` says on return what was given.
unsafe extern "C" fn query_rt_values(_context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    code(|| {
        // SAFETY: the caller's.
        let values = unsafe { &mut *values };
        values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
        if values.comp_mask != 0 {
            let now = crate::cq_ex::clock_ns(libc::CLOCK_MONOTONIC) as libc::c_long;
            values.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: now };
        }
        Ok(())
    })
}

const _: () = assert!(size_of::<verbs_context>() == 696 && offset_of!(verbs_context, context) == 368);
