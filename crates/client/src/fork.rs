//! State after `fork`: the child has copies of this crate's objects, but the session is its
//! parent's.
//!
//! The child may not touch the parent's rings: they are not even mapped there (MADV_DONTFORK). The
//! drop-in registers [`note_child`] with `pthread_atfork`; every verb of an old session then fails
//! with DeviceFatal before it touches anything. The child may make a session of its own.
//!
//! Memory regions need nothing: the router reaches private memory through the parent's own page
//! table, so copy-on-write can't lead it astray.
use crate::session::VNIC_COUNT_MAX;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Counts forks on the way from the first process to this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Control descriptor of each vNIC's newest session, or -1.
static CONTROL_DESCRIPTORS: [AtomicI32; VNIC_COUNT_MAX] = [const { AtomicI32::new(-1) }; VNIC_COUNT_MAX];

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

/// The descriptors of the newest sessions' control sockets. A child replaces them by something
/// inert, so that the parent's connections end with the parent.
pub fn control_descriptors() -> impl Iterator<Item = i32> {
    CONTROL_DESCRIPTORS.iter().map(|one| one.load(Ordering::Relaxed)).filter(|descriptor| *descriptor >= 0)
}

pub(crate) fn set_control_descriptor(number: usize, descriptor: i32) {
    CONTROL_DESCRIPTORS[number].store(descriptor, Ordering::Relaxed);
}

/// Forgets the descriptor, if it is still a newest session's.
pub(crate) fn clear_control_descriptor(descriptor: i32) {
    for one in &CONTROL_DESCRIPTORS {
        let _ = one.compare_exchange(descriptor, -1, Ordering::Relaxed, Ordering::Relaxed);
    }
}
