//! Waking a thread of the router: other threads leave something for it in a queue, then call [`Waker::wake`].
use freeflow_shm::Doorbell;
use freeflow_shm::parker::Parker;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

pub struct Waker {
    parker: Parker<Doorbell>,
    /// Pollers don't fit the cores: whoever waits should sleep soon.
    crowded: AtomicBool,
}

impl Waker {
    pub fn new() -> io::Result<Self> {
        Ok(Self { parker: Parker::new(Doorbell::new()?), crowded: AtomicBool::new(false) })
    }

    pub fn parker(&self) -> &Parker<Doorbell> {
        &self.parker
    }

    /// Called after something was put in a queue of the thread's.
    pub fn wake(&self) {
        self.parker.wake();
    }

    /// The thread itself, before it looks at its queues for the last time; and after it woke.
    pub fn set_sleeping(&self, sleeping: bool) {
        self.parker.set_sleeping(sleeping);
    }

    pub fn is_sleeping(&self) -> bool {
        self.parker.is_sleeping()
    }

    pub fn set_crowded(&self, crowded: bool) {
        self.crowded.store(crowded, Relaxed);
    }

    pub fn is_crowded(&self) -> bool {
        self.crowded.load(Relaxed)
    }

    pub fn drain(&self) {
        self.parker.bell().drain();
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.parker.bell().as_fd()
    }
}
