//! Signal masks of the calling thread.
use crate::real::{errno, set_errno};
use libc::{c_int, sigset_t};
use std::{mem, ptr};

/// Runs a call under another signal mask, unless there is none.
///
/// # Safety
/// The mask is null or valid.
pub unsafe fn with_mask(mask: *const sigset_t, call: impl FnOnce() -> c_int) -> c_int {
    if mask.is_null() {
        return call();
    }
    // SAFETY: this function's contract.
    unsafe {
        let mut before: sigset_t = mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, mask, &raw mut before);
        let answer = call();
        let error = errno();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        set_errno(error);
        answer
    }
}
