//! `rdma_resolve_addrinfo` and `rdma_query_addrinfo` (RDMACM_1.4): names are looked up in the call,
//! and the event follows, as rdma-core does it. Services of a subnet administrator (`RAI_SA`) there
//! are none: EOPNOTSUPP.
use crate::addrinfo::rdma_getaddrinfo;
use crate::boundary::{Outcome, last_errno, status};
use crate::endpoint::complete;
use crate::event::write_own;
use crate::id::{AddrInfoState, Id, Resolved};
use freeflow_abi::{RAI_SA, RDMA_CM_EVENT_ADDRINFO_RESOLVED, rdma_addrinfo, rdma_cm_id};
use std::ffi::{c_char, c_int};
use std::mem;
use std::ptr;

/// # Safety
/// The pointers are valid.
unsafe fn resolve(id: &Id, node: *const c_char, service: *const c_char, hints: *const rdma_addrinfo) -> Outcome<()> {
    // SAFETY: this function's contract.
    unsafe {
        if hints.as_ref().is_some_and(|hints| hints.ai_flags & RAI_SA != 0) {
            return Err(libc::EOPNOTSUPP);
        }
        let mut list = ptr::null_mut();
        match rdma_getaddrinfo(node, service, hints, &raw mut list) {
            0 => id.state().names = AddrInfoState::Resolved(Resolved(list)),
            -1 => return Err(last_errno()),
            _ => return Err(libc::ENOENT),
        }
    }
    write_own(id, RDMA_CM_EVENT_ADDRINFO_RESOLVED, 0, 0)
}

/// `rdma_resolve_addrinfo(3)`: EBUSY while an earlier one's result was not taken. ENOENT for a name
/// that is not found.
///
/// # Safety
/// The pointers are valid; all but `id` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_addrinfo(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        {
            let mut state = id.state();
            if !matches!(state.names, AddrInfoState::Idle) {
                return Err(libc::EBUSY);
            }
            state.names = AddrInfoState::Resolving;
        }
        // SAFETY: the C contract.
        if let Err(error) = unsafe { resolve(id, node, service, hints) } {
            crate::event::forget_addrinfo(id);
            return Err(error);
        }
        complete(id)
    })
}

/// `rdma_query_addrinfo(3)`: the list is the program's from here on. ENOENT if there is none.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_query_addrinfo(id: *mut rdma_cm_id, found: *mut *mut rdma_addrinfo) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        let id = unsafe { Id::from_c(id)? };
        if found.is_null() {
            return Err(libc::EINVAL);
        }
        let mut state = id.state();
        match mem::replace(&mut state.names, AddrInfoState::Idle) {
            AddrInfoState::Resolved(resolved) => {
                // SAFETY: the C contract.
                unsafe { *found = resolved.0 };
                mem::forget(resolved);
                Ok(())
            }
            other => {
                state.names = other;
                Err(libc::ENOENT)
            }
        }
    })
}
