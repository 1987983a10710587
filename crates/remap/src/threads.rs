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

/// After an attempt that came to nothing there is none for this long: each time in a row twice as
/// long, up to the most, and longer after attempts that took long.
const RETRY_AFTER_MIN_NS: u64 = 1_000_000_000;
const RETRY_AFTER_MAX_NS: u64 = 64_000_000_000;
/// The same in units of what the attempt took: so attempts in a row take less than 1% of the time.
const RETRY_AFTER_COSTS_MIN: u64 = 32;
const RETRY_AFTER_COSTS_MAX: u64 = 256;

/// Bytes around the stack pointer of one of the program's threads that are written while this library
/// runs.
const STACK_BELOW_BYTES: u64 = 256 << 10;
const STACK_ABOVE_BYTES: u64 = 32 << 10;

/// Of attempts to freeze threads alone, and the router's accesses with them.
static REFUSALS: [Refusals; 2] = [Refusals::new(), Refusals::new()];
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

/// Attempts that came to nothing. Relaxed, all of it: hints only.
struct Refusals {
    /// The next attempt is not before that.
    until_ns: AtomicU64,
    /// The wait before it; 0 after an attempt that succeeded.
    wait_ns: AtomicU64,
}

impl Refusals {
    const fn new() -> Self {
        Self { until_ns: AtomicU64::new(0), wait_ns: AtomicU64::new(0) }
    }

    fn may_try(&self, now_ns: u64) -> bool {
        now_ns >= self.until_ns.load(Ordering::Relaxed)
    }

    fn note(&self, began_ns: u64, now_ns: u64, has_succeeded: bool) {
        let wait = if has_succeeded { 0 } else { wait_after(self.wait_ns.load(Ordering::Relaxed), now_ns - began_ns) };
        self.wait_ns.store(wait, Ordering::Relaxed);
        self.until_ns.store(if has_succeeded { 0 } else { now_ns + wait }, Ordering::Relaxed);
    }
}

/// `before_ns`: the wait before this attempt.
fn wait_after(before_ns: u64, cost_ns: u64) -> u64 {
    let least = RETRY_AFTER_MIN_NS.max(cost_ns * RETRY_AFTER_COSTS_MIN);
    let most = RETRY_AFTER_MAX_NS.max(cost_ns * RETRY_AFTER_COSTS_MAX);
    (2 * before_ns).clamp(least, most)
}

/// Whether an attempt to keep out what `freeze` names is worth it: the last one succeeded, or was
/// long ago.
pub(crate) fn may_try_freeze(freeze: Freeze) -> bool {
    REFUSALS[freeze as usize].may_try(now_ns())
}

fn freeze_others(session: &Session, freeze: Freeze, body: &mut dyn FnMut(u64)) -> bool {
    let began = now_ns();
    let has_succeeded = session.with_threads_frozen(thread_id() as u32, freeze, body).is_ok();
    REFUSALS[freeze as usize].note(began, now_ns(), has_succeeded);
    has_succeeded
}

/// Whether it is worth trying to open a window.
pub(crate) fn is_window_possible() -> bool {
    may_try_freeze(Freeze::Threads) || is_alone()
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
        let mut frozen = |asked_ns| body(&FreezeWindow { asked_ns: Some(asked_ns) });
        may_try_freeze(freeze) && freeze_others(session, freeze, &mut frozen)
    };
    set_signal_mask(before);
    ran
}

/// Runs `body` while all other threads are frozen, or while they run, if they can't be frozen. For
/// the thread of `commands`, whose signals are blocked, and which is never alone. `body` keeps to
/// the rules of a window.
pub(crate) fn with_others_frozen(session: &Session, body: &mut dyn FnMut()) {
    let mut ran = false;
    if may_try_freeze(Freeze::Threads) {
        freeze_others(session, Freeze::Threads, &mut |_| {
            body();
            ran = true;
        });
    }
    if !ran {
        body();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_that_come_to_nothing_take_little_of_the_time() {
        for cost_ns in [1_000, 20_000_000, 200_000_000, 1_000_000_000] {
            let refusals = Refusals::new();
            let (mut now, mut spent) = (5_u64, 0);
            for _ in 0..20 {
                assert!(refusals.may_try(now));
                refusals.note(now, now + cost_ns, false);
                (now, spent) = (now + cost_ns, spent + cost_ns);
                assert!(!refusals.may_try(now) && !refusals.may_try(now + RETRY_AFTER_MIN_NS - 1));
                now += refusals.wait_ns.load(Ordering::Relaxed);
            }
            assert!(spent * 100 < now, "{spent} of {now} ns");
            assert!(refusals.wait_ns.load(Ordering::Relaxed) == RETRY_AFTER_MAX_NS.max(256 * cost_ns));
            // A thread that could not be stopped for a while is forgotten.
            refusals.note(now, now + cost_ns, true);
            assert!(refusals.may_try(now) && wait_after(0, 1) == RETRY_AFTER_MIN_NS);
        }
    }

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
