//! Opening, importing and closing a device, and the tables of operations that inline functions of
//! the header reach into.
use crate::advise::advise_mr;
use crate::boundary::{number, pointer, set_errno};
use crate::context::{Context, query_device_ex, query_port, query_rt_values};
use crate::device::{Device, current_devices, hold, release};
use crate::on_demand::OnDemandRegions;
use crate::{cq, cq_ex, device_memory, memory, open_qp, pd, post, qp, srq, window, xrc};
use freeflow_abi::{VERBS_ABI_IS_EXTENDED, ibv_context, ibv_device, verbs_context};
use freeflow_client as client;
use freeflow_verbs::VerbsError;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// `ibv_open_device(3)`.
///
/// # Safety
/// `device` is a device of the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(|| {
        // SAFETY: the C contract.
        let client = client::Context::open(unsafe { Device::from_c(device) }.session())?;
        // SAFETY: the C contract; the reference is the context's from here on.
        unsafe { hold(device) };
        Ok(hand_out(device, client, None))
    })
}

/// `ibv_import_device(3)`: the context that a process of this vNIC has, by its `cmd_fd`. The
/// descriptor is closed with the context. EINVAL if it is no such descriptor, ENOENT if that
/// context is closed.
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
        let devices = current_devices().map_err(|errno| {
            refused = errno;
            VerbsError::DeviceFatal
        })?;
        // A pass does not say of which vNIC it is.
        let mut imported = Err(VerbsError::NotFound);
        for device in devices {
            if imported.is_err() {
                // SAFETY: the reference is ours.
                let session = unsafe { Device::from_c(device) }.session();
                imported = client::Context::import(session, pass).map(|context| (device, context));
                if imported.is_ok() {
                    continue;
                }
            }
            // SAFETY: nobody got it.
            unsafe { release(device) };
        }
        let (device, imported) = imported?;
        // SAFETY: the C contract: the context takes the descriptor over.
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
    c.context.async_fd = client.events().descriptor();
    c.context.num_comp_vectors = client.session().device().completion_vector_count as c_int;
    let on_demand = OnDemandRegions::default();
    let context = Box::new(Context { c: UnsafeCell::new(c), client, on_demand, imported_by, device });
    // SAFETY: in its final place, and not shared yet.
    unsafe { libc::pthread_mutex_init(&raw mut (*context.as_c()).mutex, ptr::null()) };
    // The pointer handed out must reach the whole `Context`: it is derived from the box, not from a
    // reference.
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

/// The header's inline functions refuse a null entry with EOPNOTSUPP.
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
    c.open_qp = Some(open_qp::open_qp);
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
    number(|| {
        // SAFETY: the C contract.
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
