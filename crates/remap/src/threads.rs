//! Freeze windows: moments in which nobody but the calling thread accesses the memory of the
//! process.
//!
//! In a window the calling thread has its signals blocked, and all other threads are frozen by the
//! router (or there are none). Nothing that runs in it allocates, locks, logs or calls a function
//! that the dynamic linker has not bound yet.
use crate::ranges::PAGE_BYTES;
use crate::syscalls::thread_id;
use freeflow_client::{Freeze, Session};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// After threads could not be frozen, it is not tried again for this long.
const FREEZE_RETRY_NS: u64 = 1_000_000_000;

/// Bytes around the stack pointer of one of the program's threads that are written while this library
/// runs.
const STACK_BELOW_BYTES: u64 = 256 << 10;
const STACK_ABOVE_BYTES: u64 = 32 << 10;

/// When threads could not be frozen, last.
static FREEZE_REFUSED_NS: AtomicU64 = AtomicU64::new(0);
/// Threads of this library that do nothing without the table's lock. Changes under that lock.
static QUIESCENT_THREADS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The calling thread is one of those: another one of the program's always runs.
    static IS_QUIESCENT: Cell<bool> = const { Cell::new(false) };
    /// The stack of such a thread, from its lowest address to its end; zeroes if that is not known.
    static OWN_STACK: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A thread was started that waits in `poll` or for the table's lock, and does nothing else without
/// it. Under that lock.
pub(crate) fn add_quiescent() {
    // Relaxed: read under the lock only, as the count is changed.
    QUIESCENT_THREADS.fetch_add(1, Ordering::Relaxed);
}

/// By such a thread, before it is counted.
pub(crate) fn note_own_quiescence() {
    IS_QUIESCENT.set(true);
}

/// The stack of a thread, which holds the thread's own records, too. The C library may allocate for
/// that, so it is asked by the thread that starts one: the other gets no heap of its own.
///
/// # Safety
/// The thread runs.
pub(crate) unsafe fn stack_of(thread: libc::pthread_t) -> Option<Range<u64>> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut start, mut bytes) = (ptr::null_mut(), 0);
    // SAFETY: the thread runs (this function's contract); the attributes are initialised before they
    // are used, and all is ours to write.
    unsafe {
        if libc::pthread_getattr_np(thread, attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let is_known = libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut bytes) == 0;
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        let start = start.addr() as u64;
        is_known.then(|| start & !(PAGE_BYTES - 1)..(start + bytes as u64).next_multiple_of(PAGE_BYTES))
    }
}

/// By a command thread.
pub(crate) fn note_own_stack(stack: &Range<u64>) {
    OWN_STACK.set((stack.start, stack.end));
}

/// The part of the calling thread's stack that is written while this library runs: no page of it is
/// moved, in whatever direction. Of a command thread all of its stack, and nothing else.
pub(crate) fn stack_in_use() -> Range<u64> {
    let own = OWN_STACK.get();
    if own.1 > 0 {
        return own.0..own.1;
    }
    let here = 0_u8;
    let here = (&raw const here).addr() as u64;
    here.saturating_sub(STACK_BELOW_BYTES) & !(PAGE_BYTES - 1)..(here + STACK_ABOVE_BYTES) & !(PAGE_BYTES - 1)
}

/// The C library's code follows in the thread: a copy thread of pages has to freeze it again.
pub(crate) fn remove_quiescent() {
    // Release: pairs with the Acquire in `is_alone`.
    QUIESCENT_THREADS.fetch_sub(1, Ordering::Release);
}

/// In a child of `fork`, which has one thread.
pub(crate) fn reset_quiescent() {
    QUIESCENT_THREADS.store(0, Ordering::Relaxed);
}

/// Whether the calling thread is the only one, but for quiescent ones: it has the table's lock.
fn is_alone() -> bool {
    if IS_QUIESCENT.get() {
        return false;
    }
    // SAFETY: all zeroes are valid; the struct is ours to write, the path a C string. A directory
    // of threads has two links and one for each. The count is read afterwards: it only falls
    // meanwhile, before such a thread ends.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        let is_known = libc::stat(c"/proc/self/task".as_ptr(), &raw mut about) == 0;
        // Acquire: pairs with the Release in `remove_quiescent`; a thread that the kernel does not
        // show any more is not counted.
        is_known && about.st_nlink == 3 + QUIESCENT_THREADS.load(Ordering::Acquire)
    }
}

/// Whether threads could be frozen the last time that it was tried, or that is a while ago.
pub(crate) fn may_try_freeze() -> bool {
    // Relaxed: a hint only.
    let refused = FREEZE_REFUSED_NS.load(Ordering::Relaxed);
    refused == 0 || now_ns().saturating_sub(refused) >= FREEZE_RETRY_NS
}

fn note_refusal() {
    FREEZE_REFUSED_NS.store(now_ns(), Ordering::Relaxed);
}

/// Whether it is worth trying to open a window.
pub(crate) fn is_window_possible() -> bool {
    may_try_freeze() || is_alone()
}

/// Replaces the signal mask and gives the one before. By system call: the C library leaves out the
/// signals that it uses itself.
fn set_signal_mask(mask: u64) -> u64 {
    let (mask, mut before) = (mask, 0_u64);
    // SAFETY: both are valid signal sets of the kernel's size.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut before, size_of::<u64>());
    }
    before
}

/// An open window.
pub(crate) struct FreezeWindow {
    /// When the router was asked to freeze the threads; `None` if there are none.
    asked_ns: Option<u64>,
}

impl FreezeWindow {
    pub fn is_younger(&self, than_ns: u64) -> bool {
        self.asked_ns.is_none_or(|asked| now_ns() - asked < than_ns)
    }

    /// Whether there was no other thread before the window either.
    pub fn is_single_threaded(&self) -> bool {
        self.asked_ns.is_none()
    }
}

/// Runs `body` in a window that keeps out what `freeze` names. False: there can't be one now.
pub(crate) fn in_freeze_window(session: &Session, freeze: Freeze, body: &mut dyn FnMut(&FreezeWindow)) -> bool {
    let before = set_signal_mask(u64::MAX);
    let ran = if freeze == Freeze::Threads && is_alone() {
        body(&FreezeWindow { asked_ns: None });
        true
    } else {
        let frozen = |asked_ns| body(&FreezeWindow { asked_ns: Some(asked_ns) });
        may_try_freeze() && {
            let outcome = session.with_threads_frozen(thread_id() as u32, freeze, &mut { frozen });
            // Re-sharing is tried again when the router asks for it again: no registration shall do
            // without for it.
            if outcome.is_err() && freeze == Freeze::Threads {
                note_refusal();
            }
            outcome.is_ok()
        }
    };
    set_signal_mask(before);
    ran
}

/// Runs `body` while all other threads are frozen, or while they run, if they can't be frozen. For
/// the thread of `commands`, whose signals are blocked, and which is never alone. `body` keeps to
/// the rules of a window.
pub(crate) fn with_others_frozen(session: &Session, body: &mut dyn FnMut()) {
    let mut ran = false;
    if may_try_freeze() {
        let frozen = session.with_threads_frozen(thread_id() as u32, Freeze::Threads, &mut |_| {
            body();
            ran = true;
        });
        if frozen.is_err() {
            note_refusal();
        }
    }
    if !ran {
        body();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_thread_knows_its_stack() {
        let here = || {
            let here = 0_u8;
            (&raw const here).addr() as u64
        };
        assert!(stack_in_use().contains(&here()));
        let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            // SAFETY: the calling thread runs.
            note_own_stack(&unsafe { stack_of(libc::pthread_self()) }.unwrap());
            (stack_in_use(), here())
        });
        let (stack, address) = thread.unwrap().join().unwrap();
        assert!(stack.contains(&address) && stack.end - stack.start <= 256 << 10, "{stack:x?} {address:x}");
        assert_eq!((stack.start | stack.end) % PAGE_BYTES, 0);
    }
}
