//! Base of every object here: the process that it belongs to, and locks that survive a panic.
use crate::boundary::Outcome;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The key of nothing: of records that only wake somebody up.
pub(crate) const KEY_NONE: u64 = 0;

/// Locks, whatever became of an earlier holder: a panic is an error at the boundary, and what is
/// locked here is left consistent between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Born(u32);

impl Born {
    pub fn here() -> Self {
        Self(std::process::id())
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
        assert_eq!(Born(0).check(), Err(libc::EIO));
    }
}
