//! A fence that one thread pays for all: the system call `membarrier`.
//!
//! The fast side of a store-buffering pattern need then only keep the compiler from reordering its
//! store and its load; the slow side calls [`fence_all_threads`] between its own.
use crate::sys::sleep_uncancelled;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

/// `enum membarrier_cmd` of `linux/membarrier.h`.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// Longer than any processor keeps a store to itself.
const STORE_VISIBLE_WITHIN: Duration = Duration::from_millis(1);

static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Makes [`fence_all_threads`] cheap in this process. False: the kernel, or a filter of system
/// calls, does not let it; then nobody may count on that.
pub fn register() -> bool {
    let is_registered = membarrier(REGISTER_PRIVATE_EXPEDITED);
    // Relaxed: nothing else hangs on it.
    IS_REGISTERED.store(is_registered, Ordering::Relaxed);
    is_registered
}

/// Whether [`register`] has succeeded.
#[inline]
pub(crate) fn is_registered() -> bool {
    // Relaxed: as above.
    IS_REGISTERED.load(Ordering::Relaxed)
}

/// Every thread of the process passes a fence between the begin and the end of this.
pub(crate) fn fence_all_threads() {
    fence(Ordering::SeqCst);
    // A child of `fork` may have to register for itself.
    let is_done = membarrier(PRIVATE_EXPEDITED) || register() && membarrier(PRIVATE_EXPEDITED);
    if !is_done {
        // A filter that came later: what others stored before is seen after a while at the latest.
        sleep_uncancelled(STORE_VISIBLE_WITHIN);
    }
    fence(Ordering::SeqCst);
}
