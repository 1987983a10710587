//! The boundary to C: errno, and no panic beyond it.
use freeflow_abi::errno_of;
use freeflow_verbs::VerbsError;
use std::ffi::c_int;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) type Outcome<T> = Result<T, VerbsError>;

pub(crate) fn set_errno(number: c_int) {
    // SAFETY: glibc gives the address of this thread's errno.
    unsafe { *libc::__errno_location() = number };
}

/// Runs the body of a verb; a panic in it becomes a DeviceFatal (EIO).
#[inline]
pub(crate) fn guarded<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(VerbsError::DeviceFatal))
}

/// For verbs that return 0 or an errno.
#[inline]
pub(crate) fn code(body: impl FnOnce() -> Outcome<()>) -> c_int {
    match guarded(body) {
        Ok(()) => 0,
        Err(error) => {
            set_errno(errno_of(error));
            errno_of(error)
        }
    }
}

/// For verbs that return a number, or -1 and set errno.
pub(crate) fn number(body: impl FnOnce() -> Outcome<c_int>) -> c_int {
    guarded(body).unwrap_or_else(|error| {
        set_errno(errno_of(error));
        -1
    })
}

/// For verbs that return a pointer, or NULL and set errno.
pub(crate) fn pointer<T>(body: impl FnOnce() -> Outcome<*mut T>) -> *mut T {
    guarded(body).unwrap_or_else(|error| {
        set_errno(errno_of(error));
        std::ptr::null_mut()
    })
}

/// For verbs that wait for an event: 0, or -1 with errno. `None` inside: no event will ever come (EIO).
pub(crate) fn event(body: impl FnOnce() -> Result<(), Option<io::Error>>) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(None));
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error.and_then(|error| error.raw_os_error()).unwrap_or(libc::EIO));
            -1
        }
    }
}
