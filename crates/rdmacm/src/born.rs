//! Base of every object here: the process that it belongs to, and locks that survive a panic.
use crate::boundary::Outcome;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The key of nothing: of records that only wake somebody up.
pub(crate) const KEY_NONE: u64 = 0;

/// Locks, whatever became of an earlier holder: a panic is an error at the boundary, and what is
/// locked here is left consistent between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts forks on the way from the first process that had this library to this one.
static FORK_COUNT: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    // Relaxed: a child has one thread when the count changes; no other data hangs on it.
    FORK_COUNT.fetch_add(1, Ordering::Relaxed);
}

/// The process that an object belongs to. Without a system call: every call looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Born(u32);

impl Born {
    pub fn here() -> Self {
        static WATCHING: Once = Once::new();
        WATCHING.call_once(|| {
            // SAFETY: the handler makes no call, and lives as long as the library, which is never unloaded
            // (-z nodelete).
            unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        Self(FORK_COUNT.load(Ordering::Relaxed))
    }

    pub fn is_here(self) -> bool {
        self == Self::here()
    }

    /// EIO for what a parent left behind.
    pub fn check(self) -> Outcome<()> {
        if self.is_here() { Ok(()) } else { Err(libc::EIO) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_another_process_are_refused() {
        assert_eq!(Born::here().check(), Ok(()));
        assert_eq!(Born(Born::here().0.wrapping_sub(1)).check(), Err(libc::EIO));
    }
}
