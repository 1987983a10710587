//! The boundary to C: errno, and no panic beyond it.
use freeflow_abi::errno_of;
use freeflow_client::{EVENT_BYTES, EventOutcome, EventRead, event_of};
use freeflow_verbs::VerbsError;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
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

// A cancellation point, which unwinds the thread: declared so that this is allowed.
unsafe extern "C-unwind" {
    fn read(descriptor: c_int, buffer: *mut c_void, bytes: usize) -> isize;
}

/// For verbs that wait for an event: 0, or -1 with errno. `begin` says what to read from, `handle`
/// whether that was it. Where no event will ever come it is EIO.
///
/// Waiting is a cancellation point, as with rdma-core: programs end their event threads by
/// `pthread_cancel`. So nothing that would have to be dropped is alive here while it waits.
#[inline]
pub(crate) fn event(
    begin: impl Copy + FnOnce() -> EventOutcome<RawFd>,
    handle: impl Copy + Fn(EventRead) -> EventOutcome<bool>,
) -> c_int {
    let mut record = [0; EVENT_BYTES];
    let pipe = begun(begin);
    if pipe < 0 {
        return -1;
    }
    loop {
        // SAFETY: the buffer is that long.
        let count = unsafe { read(pipe, record.as_mut_ptr().cast(), record.len()) };
        let code = handled(count, &record, handle);
        if code <= 0 {
            return code;
        }
    }
}

/// -1: refused, with errno.
fn begun(begin: impl FnOnce() -> EventOutcome<RawFd>) -> RawFd {
    catch_unwind(AssertUnwindSafe(begin)).unwrap_or(Err(None)).unwrap_or_else(refuse)
}

/// 0: it is delivered; 1: read on; -1: with errno.
fn handled(count: isize, record: &[u8; EVENT_BYTES], handle: impl Fn(EventRead) -> EventOutcome<bool>) -> c_int {
    let event = usize::try_from(count).map_or_else(|_| Err(io::Error::last_os_error()), |n| Ok(event_of(record, n)));
    let outcome = catch_unwind(AssertUnwindSafe(|| handle(event))).unwrap_or(Err(None));
    outcome.map_or_else(refuse, |delivered| c_int::from(!delivered))
}

fn refuse(error: Option<io::Error>) -> c_int {
    set_errno(error.and_then(|error| error.raw_os_error()).unwrap_or(libc::EIO));
    -1
}
