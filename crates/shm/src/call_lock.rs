//! A lock that is held from one C call to a later one. Of the library alone: it is in no shared
//! memory.
use std::cell::UnsafeCell;

/// A lock that one C call takes and a later one of the same thread releases. Spins shortly, then
/// sleeps.
pub struct CallLock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a pthread mutex may be used from any thread; its owner keeps it in place (in a Box) while
// it is in use.
unsafe impl Sync for CallLock {}
// SAFETY: it is moved only before its first use.
unsafe impl Send for CallLock {}

impl Default for CallLock {
    fn default() -> Self {
        Self::new()
    }
}

impl CallLock {
    #[must_use]
    pub const fn new() -> Self {
        Self(UnsafeCell::new(libc::PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP))
    }

    #[inline]
    pub fn lock(&self) {
        // SAFETY: initialised statically, and in place.
        unsafe { libc::pthread_mutex_lock(self.0.get()) };
    }

    /// To be called by the thread that holds it.
    #[inline]
    pub fn unlock(&self) {
        // SAFETY: initialised statically, and in place.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }
}
