//! `ibv_malloc` and `ibv_free` (`freeflow/verbs.h`): memory that the router reaches without a copy
//! more. FreeFlow's own, exported under the node FREEFLOW_1.0.
use crate::boundary::{guarded, pointer, set_errno};
use crate::device::session_or_complain;
use freeflow_client::{allocate, release};
use freeflow_verbs::VerbsError;
use std::ffi::c_void;
use std::ptr;

/// Allocates whole pages, zero when fresh; NULL with errno if there is no router or a limit is
/// reached.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_malloc(bytes: usize) -> *mut c_void {
    let mut refused = 0;
    let memory = pointer(|| {
        let session = session_or_complain().map_err(|errno| {
            refused = errno;
            VerbsError::DeviceFatal
        })?;
        Ok(ptr::with_exposed_provenance_mut(allocate(&session, bytes.max(1))?))
    });
    if refused != 0 {
        set_errno(refused);
    }
    memory
}

/// Frees what [`ibv_malloc`] gave. Like `free`, it takes NULL and leaves errno alone.
///
/// # Safety
/// `memory` is NULL or came from `ibv_malloc`, and is not used any more; no memory region lies over
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free(memory: *mut c_void) {
    if !memory.is_null() {
        let _ = guarded(|| Ok(release(memory.addr())));
    }
}
