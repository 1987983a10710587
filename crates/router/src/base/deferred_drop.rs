//! Closing what a tenant had a hand in, and freeing its memory.
//!
//! The last close of a descriptor can take as long as whoever made it likes: a TCP socket lingers,
//! a FUSE file waits for its daemon. A tenant can send such descriptors, and leave them unread in
//! its socket, whose close is then theirs. So they are closed on a thread of their vNIC's own,
//! which ends when it has been idle for a moment.
//!
//! Memory is freed by another one: the kernel takes seconds for tens of GiB, though never as long as somebody likes.
use crate::base::privileges::{self, ThreadKind};
use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Things taken out of the tables; whoever gets them drops them, best not on the worker's thread.
pub type DeferredDrop = Vec<Box<dyn Any + Send>>;

const IDLE: Duration = Duration::from_secs(1);
/// Descriptors that may wait to be closed: more than an honest vNIC's processes can leave at once.
const WAITING_COUNT_MAX: u32 = 4096;
const STACK_BYTES: usize = 64 * 1024;

struct Item {
    thing: Option<Box<dyn Any + Send>>,
    count: u32,
    waiting: Arc<AtomicU32>,
}

impl Drop for Item {
    fn drop(&mut self) {
        self.thing = None;
        // After the close.
        self.waiting.fetch_sub(self.count, Relaxed);
    }
}

/// One vNIC's. Dropping it lets the thread end after what it has.
#[derive(Default)]
pub struct Closer {
    /// Nobody waits with the lock held.
    sender: Mutex<Option<Sender<Item>>>,
    waiting: Arc<AtomicU32>,
}

impl Closer {
    /// Drops `thing`, which holds about `count` descriptors (0: its vNIC's account bounds them),
    /// elsewhere. False: too much waits already; nothing more of this tenant's should be taken.
    pub fn close(&self, thing: impl Any + Send, count: u32) -> bool {
        let waiting = self.waiting.fetch_add(count, Relaxed) + count;
        let mut item = Item { thing: Some(Box::new(thing)), count, waiting: self.waiting.clone() };
        let mut current = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*current {
            match sender.send(item) {
                Ok(()) => return waiting <= WAITING_COUNT_MAX,
                // The thread has ended.
                Err(refused) => item = refused.0,
            }
        }
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("ff-closer".into()).stack_size(STACK_BYTES);
        // No thread to be had: the item is dropped right here, with the receiver.
        let _ = sender.send(item);
        *current = thread
            .spawn(move || {
                privileges::enter(ThreadKind::Closer);
                drain(&receiver);
            })
            .is_ok()
            .then_some(sender);
        waiting <= WAITING_COUNT_MAX
    }
}

/// A thing and what is done when it has been dropped, wherever that is.
pub struct AndThen<F: FnOnce()> {
    thing: Option<Box<dyn Any + Send>>,
    then: Option<F>,
}

impl<F: FnOnce()> AndThen<F> {
    pub fn new(thing: Box<dyn Any + Send>, then: F) -> Self {
        Self { thing: Some(thing), then: Some(then) }
    }
}

impl<F: FnOnce()> Drop for AndThen<F> {
    fn drop(&mut self) {
        self.thing = None;
        if let Some(then) = self.then.take() {
            then();
        }
    }
}

/// An item sent in the last moment is dropped with the receiver, on this thread too.
fn drain(receiver: &Receiver<Item>) {
    while let Ok(item) = receiver.recv_timeout(IDLE) {
        drop(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Slow(Receiver<()>, Sender<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
            let _ = self.1.send(());
        }
    }

    #[test]
    fn what_does_not_close_is_waited_for_elsewhere_and_counted() {
        let closer = Closer::default();
        let (release, released) = channel();
        let (dropped, was_dropped) = channel();
        assert!(closer.close(Slow(released, dropped), 1));
        assert!(closer.close((), WAITING_COUNT_MAX - 1));
        assert!(!closer.close((), 1));
        assert!(was_dropped.try_recv().is_err());
        drop((release, closer));
        was_dropped.recv().unwrap();
    }
}
