//! System calls on mappings, by their numbers.
//!
//! Programs and libraries put functions of their own in the place of the C library's, to learn what becomes of memory
//! (UCX's ucm patches them in memory, sanitizers define them). Such a one may drop `mremap`'s new address, deregister what it
//! hears is unmapped, or take a lock that a thread has which stands still in a window. What is done here is none of their
//! business: the program's memory stays where it is and what it is.
use libc::{c_int, c_long, c_void};

/// What the kernel says, as a pointer.
fn pointer(answer: c_long) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(answer as usize)
}

/// `mmap(2)`.
///
/// # Safety
/// As of it.
pub(super) unsafe fn mmap(
    at: *mut c_void,
    bytes: usize,
    rights: c_int,
    flags: c_int,
    fd: c_int,
    from: i64,
) -> *mut c_void {
    // SAFETY: the caller's.
    pointer(unsafe { libc::syscall(libc::SYS_mmap, at, bytes, rights, flags, fd, from) })
}

/// `munmap(2)`.
///
/// # Safety
/// As of it.
pub(super) unsafe fn munmap(at: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_munmap, at, bytes) as c_int }
}

/// `mremap(2)`; `to` counts with MREMAP_FIXED.
///
/// # Safety
/// As of it.
pub(super) unsafe fn mremap(
    at: *mut c_void,
    old_bytes: usize,
    bytes: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's.
    pointer(unsafe { libc::syscall(libc::SYS_mremap, at, old_bytes, bytes, flags, to) })
}

/// `mprotect(2)`.
///
/// # Safety
/// As of it.
pub(super) unsafe fn mprotect(at: *mut c_void, bytes: usize, rights: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mprotect, at, bytes, rights) as c_int }
}

/// `madvise(2)`.
///
/// # Safety
/// As of it.
pub(crate) unsafe fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_madvise, at, bytes, advice) as c_int }
}

/// `munlock(2)`.
///
/// # Safety
/// As of it.
pub(super) unsafe fn munlock(at: *mut c_void, bytes: usize) {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_munlock, at, bytes) };
}
