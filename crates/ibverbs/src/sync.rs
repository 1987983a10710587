//! The mutexes and conditions that live in C structs.
use std::sync::atomic::{AtomicU32, Ordering};

/// The mutex and the condition of a C struct, with the count of events that were acknowledged.
///
/// Invariant: the count is only touched under the mutex.
#[derive(Clone, Copy)]
pub(crate) struct Acknowledged {
    pub mutex: *mut libc::pthread_mutex_t,
    pub cond: *mut libc::pthread_cond_t,
    pub count: *mut u32,
}

impl Acknowledged {
    /// # Safety
    /// The pointers are valid, and nobody else uses them yet.
    pub unsafe fn init(self) {
        // SAFETY: this function's contract.
        unsafe {
            libc::pthread_mutex_init(self.mutex, std::ptr::null());
            libc::pthread_cond_init(self.cond, std::ptr::null());
            *self.count = 0;
        }
    }

    /// # Safety
    /// The pointers are valid and initialised.
    pub unsafe fn add(self, events: u32) {
        // SAFETY: this function's contract; the count is touched under the mutex.
        unsafe {
            libc::pthread_mutex_lock(self.mutex);
            *self.count = (*self.count).wrapping_add(events);
            libc::pthread_cond_broadcast(self.cond);
            libc::pthread_mutex_unlock(self.mutex);
        }
    }

    /// Waits until every delivered event was acknowledged. No more are delivered.
    ///
    /// # Safety
    /// The pointers are valid and initialised.
    pub unsafe fn wait(self, delivered: &AtomicU32) {
        // SAFETY: this function's contract; the count is touched under the mutex.
        unsafe {
            libc::pthread_mutex_lock(self.mutex);
            while *self.count != delivered.load(Ordering::Acquire) {
                libc::pthread_cond_wait(self.cond, self.mutex);
            }
            libc::pthread_mutex_unlock(self.mutex);
        }
    }

    /// # Safety
    /// The pointers are valid and initialised, and nobody uses them any more.
    pub unsafe fn destroy(self) {
        // SAFETY: this function's contract.
        unsafe {
            libc::pthread_cond_destroy(self.cond);
            libc::pthread_mutex_destroy(self.mutex);
        }
    }
}
