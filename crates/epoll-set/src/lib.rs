//! An epoll set that holds rsockets, for `repoll_wait` of librdmacm and `epoll_wait` of
//! librspreload. The kernel's own set keeps all other descriptors; the rsockets stand in a list
//! here, and waiting is `rpoll` on them and on the kernel's set.
//!
//! It makes none of these calls: [`Backend`] does, so that each library calls its own functions. It
//! exports no C function.
//!
//! ```
//! use freeflow_epoll_set::{Backend, EpollSet, IoCounts};
//! use std::time::Instant;
//!
//! /// All rsockets are readable, and the kernel's set is empty.
//! struct Readable;
//!
//! impl Backend for Readable {
//!     fn rsocket_of(&self, fd: i32) -> Option<i32> {
//!         Some(fd)
//!     }
//!     fn io_counts(&self, _: i32) -> IoCounts {
//!         IoCounts::default()
//!     }
//!     fn poll(&self, entries: &mut [libc::pollfd], _: Option<Instant>) -> Result<(), i32> {
//!         entries.iter_mut().skip(2).for_each(|entry| entry.revents = entry.events & libc::POLLIN);
//!         Ok(())
//!     }
//!     fn kernel_events(&self, _: &mut [libc::epoll_event]) -> usize {
//!         0
//!     }
//! }
//!
//! let set = EpollSet::create().expect("an eventfd");
//! set.interest().set(3, libc::EPOLLIN as u32, 42, IoCounts::default());
//! let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
//! assert_eq!(set.wait(-1, &Readable, &mut events, Some(Instant::now())), Ok(1));
//! assert_eq!({ events[0].u64 }, 42);
//! ```
mod interest;
mod notifier;

pub use interest::{Interest, InterestList, IoCounts};
pub use notifier::{Notifier, Waiter};

use interest::POLL_EVENTS;
use libc::{c_int, epoll_event, pollfd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The calls behind the descriptors of a set.
pub trait Backend {
    /// The rsocket that a descriptor of the program stands for; `None`: it is one no longer.
    fn rsocket_of(&self, fd: c_int) -> Option<c_int>;

    /// How often the descriptor was read and written.
    fn io_counts(&self, fd: c_int) -> IoCounts;

    /// `rpoll`.
    ///
    /// # Errors
    /// Its errno.
    fn poll(&self, entries: &mut [pollfd], deadline: Option<Instant>) -> Result<(), c_int>;

    /// The kernel's events that are there now, as many as there is room for. Returns their number.
    fn kernel_events(&self, room: &mut [epoll_event]) -> usize;
}

/// Descriptors that [`EpollSet::wait`] polls: the kernel's set, the notifier, then the rsockets of
/// `fds`.
struct Polled {
    entries: Vec<pollfd>,
    fds: Vec<c_int>,
}

const KERNEL: usize = 0;
const RSOCKETS: usize = 2;

/// The part of an epoll set that the kernel does not have.
#[derive(Debug)]
pub struct EpollSet {
    interest: Mutex<InterestList>,
    notifier: Notifier,
    closed: AtomicBool,
}

impl EpollSet {
    /// `None`: errno has the reason.
    #[must_use]
    pub fn create() -> Option<Self> {
        let notifier = Notifier::create()?;
        Some(Self { interest: Mutex::default(), notifier, closed: AtomicBool::new(false) })
    }

    pub fn interest(&self) -> MutexGuard<'_, InterestList> {
        self.interest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the threads in [`Self::wait`], which look at the list once more.
    pub fn notify(&self) {
        self.notifier.notify();
    }

    /// From now on [`Self::wait`] returns no event, at once.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.notify();
    }

    fn polled(&self, epoll: c_int, backend: &impl Backend) -> Polled {
        let readable = |fd| pollfd { fd, events: libc::POLLIN, revents: 0 };
        let (mut entries, mut fds) = (vec![readable(epoll), readable(self.notifier.fd())], Vec::new());
        for (fd, events) in self.interest().pending(|fd| backend.io_counts(fd)) {
            let Some(rsocket) = backend.rsocket_of(fd) else { continue };
            entries.push(pollfd { fd: rsocket, events: (events & POLL_EVENTS) as i16, revents: 0 });
            fds.push(fd);
        }
        Polled { entries, fds }
    }

    /// Reports the ready rsockets and the kernel's events, which take turns in being first. Returns
    /// the number of events.
    fn report(&self, backend: &impl Backend, polled: &Polled, out: &mut [epoll_event]) -> usize {
        let events = |entry: &pollfd| u32::from(entry.revents.cast_unsigned()) & POLL_EVENTS;
        let ready: Vec<_> = polled.fds.iter().copied().zip(polled.entries[RSOCKETS..].iter().map(events)).collect();
        let of_kernel = |room: &mut [epoll_event]| {
            if polled.entries[KERNEL].revents == 0 || room.is_empty() { 0 } else { backend.kernel_events(room) }
        };
        let mut interest = self.interest();
        let kernel_first = interest.kernel_first;
        interest.kernel_first = !kernel_first;
        let mut count = if kernel_first { of_kernel(out) } else { 0 };
        count += interest.report(&ready, &mut out[count..]);
        if !kernel_first {
            count += of_kernel(&mut out[count..]);
        }
        count
    }

    /// Waits for events until the deadline. Returns their number; 0: the time is over, or the set
    /// was closed.
    ///
    /// # Errors
    /// Those of `rpoll`.
    pub fn wait(
        &self,
        epoll: c_int,
        backend: &impl Backend,
        out: &mut [epoll_event],
        deadline: Option<Instant>,
    ) -> Result<usize, c_int> {
        let mut waiter = self.notifier.waiter();
        loop {
            waiter.acknowledge();
            if self.closed.load(Ordering::SeqCst) {
                return Ok(0);
            }
            let mut polled = self.polled(epoll, backend);
            backend.poll(&mut polled.entries, deadline)?;
            let count = self.report(backend, &polled, out);
            if count != 0 || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(count);
            }
        }
    }
}
