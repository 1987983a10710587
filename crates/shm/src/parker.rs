//! Parking a thread that has queues: producers put something in a queue, then call
//! [`Parker::wake`]; the thread sleeps on a [`Waker`], after one more look at its queues.
//!
//! Generic over the bell, so that loom checks this very code (`tests/loom/`). What loom can't see
//! is that the thread blocks on the bell in the kernel, and that its last look covers all its
//! queues.
use crate::handshake::{announce, announced};
use crate::sync::{AtomicU32, Ordering};

/// A sleeping thread blocks on it. It stays rung until the thread has taken the ring.
pub trait Waker {
    fn ring(&self);
}

#[cfg(not(loom))]
impl Waker for crate::fd::Doorbell {
    fn ring(&self) {
        self.kick();
    }
}

pub struct Parker<B> {
    sleeping: AtomicU32,
    bell: B,
}

impl<B> Parker<B> {
    pub fn new(bell: B) -> Self {
        Self { sleeping: AtomicU32::new(0), bell }
    }

    pub fn bell(&self) -> &B {
        &self.bell
    }

    /// The thread itself, before its last look at its queues, and after it woke.
    pub fn set_sleeping(&self, sleeping: bool) {
        announce(&self.sleeping, sleeping);
    }

    /// A hint, unless the caller has the thread's lock.
    pub fn is_sleeping(&self) -> bool {
        // Relaxed: only a hint.
        self.sleeping.load(Ordering::Relaxed) != 0
    }

    /// The thread itself: announces that it sleeps, then looks once more. False: `is_idle` found
    /// work, and it stays awake.
    pub fn prepare_to_sleep(&self, is_idle: impl FnOnce() -> bool) -> bool {
        self.set_sleeping(true);
        if is_idle() {
            return true;
        }
        self.set_sleeping(false);
        false
    }
}

impl<B: Waker> Parker<B> {
    /// After something was put in a queue. Either this sees the thread asleep and rings, or the
    /// thread's last look sees what was put there.
    pub fn wake(&self) {
        if announced(&self.sleeping) {
            self.bell.ring();
        }
    }
}
