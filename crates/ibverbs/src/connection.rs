//! `freeflow_call`: how the drop-in `librdmacm.so.1` reaches the router. A process has one
//! connection to its router, and it is this library's; so its identifiers, queue pairs and events
//! have one owner.
//!
//! Private to the two libraries, which come from one build: not in a header, and not for programs.
use crate::boundary::code;
use crate::qp::{Qp, create_extended};
use freeflow_client::{connection_call, connection_step};
use freeflow_verbs::VerbsError;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;

/// Sends one encoded `Request::Cm` and gives the encoded reply (`Option<CmReply>`: `None` is
/// `Done`), and a descriptor that came with it, or -1. 0 or an errno: EINVAL for what is no such
/// request, ENOMEM for a reply that does not fit.
///
/// # Safety
/// `context` is open; the pointers are valid, `request` and `reply` for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeflow_call(
    context: *mut freeflow_abi::ibv_context,
    request: *const c_void,
    request_bytes: usize,
    reply: *mut c_void,
    reply_capacity: usize,
    reply_bytes: *mut usize,
    descriptor: *mut c_int,
) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let (session, request) = unsafe {
            *reply_bytes = 0;
            *descriptor = -1;
            (crate::context::session(context), std::slice::from_raw_parts(request.cast::<u8>(), request_bytes))
        };
        let (answer, came_with_it) = connection_call(session, request)?;
        if answer.len() > reply_capacity {
            return Err(VerbsError::NoMemory);
        }
        // SAFETY: the C contract; it fits.
        unsafe {
            std::ptr::copy_nonoverlapping(answer.as_ptr(), reply.cast::<u8>(), answer.len());
            *reply_bytes = answer.len();
            if let Some(first) = came_with_it.into_iter().next() {
                *descriptor = first.into_raw_fd();
            }
        }
        Ok(())
    })
}

/// `ibv_create_qp_ex(3)` for an identifier, by the router's handle of it: the QP is in INIT then, a
/// UD one in RTS.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeflow_create_qp(
    context: *mut freeflow_abi::ibv_context,
    init: *mut freeflow_abi::ibv_qp_init_attr_ex,
    connection: u32,
) -> *mut freeflow_abi::ibv_qp {
    // SAFETY: the C contract.
    unsafe { create_extended(context, init, Some(connection)) }
}

/// Takes a step of the connection that a QP is for: an encoded `CmStep`. 0 or an errno; the QP's
/// state is known in either case.
///
/// # Safety
/// The pointers are valid, `step` for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeflow_step(qp: *mut freeflow_abi::ibv_qp, step: *const c_void, bytes: usize) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let (client, step) = unsafe { (&Qp::from_c(qp).client, std::slice::from_raw_parts(step.cast::<u8>(), bytes)) };
        let outcome = connection_step(client, step);
        let settled = freeflow_remap::wait_for_revocations(client.session());
        // SAFETY: the C contract.
        unsafe { (*qp).state = client.state() as c_uint };
        outcome.and(settled)
    })
}

/// The router has brought the QP to RTS, as its peer agreed to the connection.
///
/// # Safety
/// `qp` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeflow_note_connected(qp: *mut freeflow_abi::ibv_qp) {
    // SAFETY: the C contract.
    unsafe {
        let client = &Qp::from_c(qp).client;
        client.note_connected();
        (*qp).state = client.state() as c_uint;
    }
}
