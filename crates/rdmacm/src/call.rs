//! Calls to the router, by way of libibverbs.
use crate::boundary::{Outcome, checked};
use crate::verbs::freeflow_call;
use freeflow_abi::ibv_context;
use freeflow_protocol::cm::{CmAddress, CmReply, CmRequest};
use freeflow_protocol::library::{Handle, Request};
use freeflow_protocol::{decode, encode};
use std::os::fd::{FromRawFd, OwnedFd};

/// Replies are small: the longest is a set of QP attributes.
const REPLY_BYTES_MAX: usize = 1024;

/// Asks the router; `None` is `Done`.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn call(
    context: *mut ibv_context,
    request: CmRequest,
) -> Outcome<(Option<CmReply>, Option<OwnedFd>)> {
    let message = encode(&Request::Cm(request));
    let mut reply = [0_u8; REPLY_BYTES_MAX];
    let (mut reply_bytes, mut descriptor) = (0, -1);
    // SAFETY: this function's contract; the buffers are as long as is said.
    checked(unsafe {
        freeflow_call(
            context,
            message.as_ptr().cast(),
            message.len(),
            reply.as_mut_ptr().cast(),
            reply.len(),
            &raw mut reply_bytes,
            &raw mut descriptor,
        )
    })?;
    // SAFETY: it was made for us, and nobody else has it.
    let descriptor = (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) });
    let bytes = reply.get(..reply_bytes).ok_or(libc::EIO)?;
    Ok((decode::<Option<CmReply>>(bytes).map_err(|_| libc::EIO)?, descriptor))
}

/// A call whose answer is `Done`.
///
/// # Safety
/// As for [`call`].
pub(crate) unsafe fn command(context: *mut ibv_context, request: CmRequest) -> Outcome<()> {
    // SAFETY: this function's contract.
    match unsafe { call(context, request)? } {
        (None, _) => Ok(()),
        _ => Err(libc::EIO),
    }
}

/// A call whose answer says where an identifier is bound.
///
/// # Safety
/// As for [`call`].
pub(crate) unsafe fn bound(context: *mut ibv_context, request: CmRequest) -> Outcome<CmAddress> {
    // SAFETY: this function's contract.
    match unsafe { call(context, request)? } {
        (Some(CmReply::Bound { local }), _) => Ok(local),
        _ => Err(libc::EIO),
    }
}

/// Destroys an identifier: how many events it was sent. That of a router that is gone, or knows it
/// no more, is destroyed.
///
/// # Safety
/// As for [`call`].
pub(crate) unsafe fn destroy_id(context: *mut ibv_context, id: Handle) -> u32 {
    // SAFETY: this function's contract.
    match unsafe { call(context, CmRequest::DestroyId { id }) } {
        Ok((Some(CmReply::Destroyed { event_count }), _)) => event_count,
        _ => 0,
    }
}
