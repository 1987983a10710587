//! Waking the worker: other threads leave something for it in a queue, then call [`Waker::wake`].
use freeflow_shm::Doorbell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst, fence};

pub struct Waker {
    sleeping: AtomicBool,
    /// Pollers don't fit the cores: whoever waits should sleep soon.
    crowded: AtomicBool,
    bell: Doorbell,
}

impl Waker {
    pub fn new() -> io::Result<Self> {
        Ok(Self { sleeping: AtomicBool::new(false), crowded: AtomicBool::new(false), bell: Doorbell::new()? })
    }

    /// Called after something was put in a queue of the worker's.
    pub fn wake(&self) {
        // Pairs with the fence of `set_sleeping`: either this thread sees the worker asleep and rings, or the worker,
        // which looks at its queues once more after it said so, sees what was put there.
        fence(SeqCst);
        if self.sleeping.load(Relaxed) {
            self.bell.kick();
        }
    }

    /// The worker, before it looks at its queues for the last time; and after it woke.
    pub fn set_sleeping(&self, sleeping: bool) {
        self.sleeping.store(sleeping, Relaxed);
        fence(SeqCst);
    }

    pub fn is_sleeping(&self) -> bool {
        self.sleeping.load(Relaxed)
    }

    pub fn set_crowded(&self, crowded: bool) {
        self.crowded.store(crowded, Relaxed);
    }

    pub fn is_crowded(&self) -> bool {
        self.crowded.load(Relaxed)
    }

    pub fn drain(&self) {
        self.bell.drain();
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
