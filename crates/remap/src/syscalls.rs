//! System calls on mappings, by their numbers.
//!
//! Programs and libraries put functions of their own in the place of the C library's, to learn what
//! becomes of memory (UCX's ucm patches them in memory, sanitizers define them). Such a function
//! may drop `mremap`'s new address, deregister what it hears is unmapped, or take a lock that a
//! thread has that is frozen in a window. Calls made here are none of their business: the program's
//! memory keeps its address and its contents.
//!
//! # Safety
//! Each function does to the mappings in its range what its manual page says. Nothing that Rust
//! code refers to lies there, or the call leaves its contents and rights as they are.
use libc::{c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::AtomicU32;

/// The kernel's answer as a pointer.
fn pointer(answer: c_long) -> *mut c_void {
    ptr::with_exposed_provenance_mut(answer as usize)
}

/// `mmap(2)`.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn mmap(
    at: *mut c_void,
    bytes: usize,
    rights: c_int,
    flags: c_int,
    fd: c_int,
    from: i64,
) -> *mut c_void {
    // SAFETY: the module's contract.
    pointer(unsafe { libc::syscall(libc::SYS_mmap, at, bytes, rights, flags, fd, from) })
}

/// `munmap(2)`.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn munmap(at: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the module's contract.
    unsafe { libc::syscall(libc::SYS_munmap, at, bytes) as c_int }
}

/// `mremap(2)`; `to` counts with MREMAP_FIXED.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn mremap(
    at: *mut c_void,
    old_bytes: usize,
    bytes: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    // SAFETY: the module's contract.
    pointer(unsafe { libc::syscall(libc::SYS_mremap, at, old_bytes, bytes, flags, to) })
}

/// `mprotect(2)`.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn mprotect(at: *mut c_void, bytes: usize, rights: c_int) -> c_int {
    // SAFETY: the module's contract.
    unsafe { libc::syscall(libc::SYS_mprotect, at, bytes, rights) as c_int }
}

/// `madvise(2)`.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    // SAFETY: the module's contract.
    unsafe { libc::syscall(libc::SYS_madvise, at, bytes, advice) as c_int }
}

/// `munlock(2)`.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn munlock(at: *mut c_void, bytes: usize) {
    // SAFETY: the module's contract.
    unsafe { libc::syscall(libc::SYS_munlock, at, bytes) };
}

/// `gettid(2)`.
pub(crate) fn thread_id() -> i32 {
    // SAFETY: takes nothing.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// `getpid(2)`.
pub(crate) fn process_id() -> i32 {
    // SAFETY: takes nothing.
    unsafe { libc::syscall(libc::SYS_getpid) as i32 }
}

/// Sleeps while the word has this value, unless it is woken.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32) {
    let kind = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word lives during the call. Every return value means: look again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), kind, value, ptr::null::<libc::timespec>()) };
}

fn futex_wake(word: &AtomicU32, count: c_int) {
    // SAFETY: the word lives during the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, count) };
}

pub(crate) fn futex_wake_one(word: &AtomicU32) {
    futex_wake(word, 1);
}

pub(crate) fn futex_wake_all(word: &AtomicU32) {
    futex_wake(word, c_int::MAX);
}
