//! State after `fork`: the child has copies of this crate's objects, but the session is its
//! parent's.
//!
//! The child may not touch the parent's rings: they are not even mapped there (MADV_DONTFORK). The
//! drop-in registers [`note_child`] with `pthread_atfork`; every verb of an old session then fails
//! with DeviceFatal before it touches anything. The child may make a session of its own.
//!
//! Memory regions need nothing: the router reaches private memory through the parent's own page
//! table, so copy-on-write can't lead it astray.
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Counts forks on the way from the first process to this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The newest session's control descriptor, or -1.
static CONTROL_DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

/// The generation of this process.
#[inline]
pub fn generation() -> u32 {
    // Relaxed: a child has one thread when the count changes; no other data hangs on it.
    GENERATION.load(Ordering::Relaxed)
}

/// Says that this process is a new child. Async-signal-safe: for `pthread_atfork` child handlers.
pub fn note_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The descriptor of the newest session's control socket, or -1. A child replaces it by something
/// inert, so that the parent's connection ends with the parent.
pub fn control_descriptor() -> i32 {
    CONTROL_DESCRIPTOR.load(Ordering::Relaxed)
}

pub(crate) fn set_control_descriptor(descriptor: i32) {
    CONTROL_DESCRIPTOR.store(descriptor, Ordering::Relaxed);
}

/// Forgets the descriptor, if it is still the newest session's.
pub(crate) fn clear_control_descriptor(descriptor: i32) {
    let _ = CONTROL_DESCRIPTOR.compare_exchange(descriptor, -1, Ordering::Relaxed, Ordering::Relaxed);
}
