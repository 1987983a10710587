//! How threads sleep: each has an event descriptor of its own, by which whoever changes the state
//! of a socket wakes the others that sleep on it. A completion event or an event of the connection
//! manager wakes only one thread for sure; that one wakes the rest.
use crate::ffi::{Outcome, errno, uncancelled};
use libc::{c_int, pollfd};
use std::cell::RefCell;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// How often this process is a child of a fork since the library was loaded: sockets of an earlier
/// count are not ours.
#[inline]
pub fn fork_count() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Counts forks from now on.
pub fn watch_forks() {
    static ONCE: Once = Once::new();
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handler only adds.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(count));
    });
}

/// A value that each process has of its own. A forked child leaves its parent's where it is and
/// begins again, so it never waits for a lock that a thread of its parent held when it was forked.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<(u32, T)>,
}

impl<T: Default + Send + Sync> PerProcess<T> {
    #[must_use]
    pub const fn new() -> Self {
        Self { current: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// This process'.
    #[inline]
    pub fn get(&self) -> &'static T {
        // Acquire: pairs with the exchange in `begin`.
        let known = self.current.load(Ordering::Acquire);
        // SAFETY: what was put there is never freed.
        match unsafe { known.as_ref() } {
            Some((forks, value)) if *forks == fork_count() => value,
            _ => self.begin(known),
        }
    }

    #[cold]
    fn begin(&self, known: *mut (u32, T)) -> &'static T {
        let fresh = Box::into_raw(Box::new((fork_count(), T::default())));
        let now = match self.current.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(now) => {
                // SAFETY: nobody has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                now
            }
        };
        // SAFETY: never freed; who was quicker is a thread of this process.
        unsafe { &(*now).1 }
    }
}

/// The descriptor that wakes one thread.
#[derive(Debug)]
pub struct Poke {
    fd: c_int,
    forks: u32,
}

impl Poke {
    fn create() -> Outcome<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 { Err(errno()) } else { Ok(Self { fd, forks: fork_count() }) }
    }

    /// This thread's.
    ///
    /// # Errors
    /// Those of `eventfd`.
    pub fn of_thread() -> Outcome<Arc<Self>> {
        thread_local!(static POKE: RefCell<Option<Arc<Poke>>> = const { RefCell::new(None) });
        POKE.try_with(|poke| {
            let mut poke = poke.borrow_mut();
            if let Some(poke) = poke.as_ref().filter(|poke| poke.forks == fork_count()) {
                return Ok(Arc::clone(poke));
            }
            let new = Arc::new(Self::create()?);
            *poke = Some(Arc::clone(&new));
            Ok(new)
        })
        .unwrap_or_else(|_| Self::create().map(Arc::new))
    }

    fn poke(&self) {
        let one = 1u64;
        // SAFETY: eight bytes; a full counter wakes as well.
        uncancelled(|| unsafe { libc::write(self.fd, (&raw const one).cast(), 8) });
    }

    pub fn drain(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes; does not block.
        uncancelled(|| unsafe { libc::read(self.fd, (&raw mut count).cast(), 8) });
    }

    #[must_use]
    pub fn pollfd(&self) -> pollfd {
        readable(self.fd)
    }
}

impl Drop for Poke {
    fn drop(&mut self) {
        // SAFETY: ours.
        unsafe { libc::close(self.fd) };
    }
}

#[must_use]
pub fn readable(fd: c_int) -> pollfd {
    pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Threads that sleep on a socket.
#[derive(Debug, Default)]
pub struct Sleepers {
    count: AtomicUsize,
    list: Mutex<Vec<Arc<Poke>>>,
}

impl Sleepers {
    /// From now on changes wake `poke`: look at the state after this, then sleep.
    pub fn enter(&self, poke: &Arc<Poke>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.push(Arc::clone(poke));
        // SeqCst: pairs with the load in `wake`; either that sees us, or we see the change.
        self.count.store(list.len(), Ordering::SeqCst);
    }

    pub fn leave(&self, poke: &Arc<Poke>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = list.iter().position(|other| Arc::ptr_eq(other, poke)) {
            list.swap_remove(index);
        }
        self.count.store(list.len(), Ordering::SeqCst);
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Wakes all that sleep, but for the caller.
    #[inline]
    pub fn wake(&self, but: Option<&Arc<Poke>>) {
        // SeqCst: pairs with the store in `enter`.
        if self.count.load(Ordering::SeqCst) != 0 {
            self.wake_all(but);
        }
    }

    #[cold]
    fn wake_all(&self, but: Option<&Arc<Poke>>) {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        for poke in list.iter().filter(|poke| !but.is_some_and(|but| Arc::ptr_eq(poke, but))) {
            poke.poke();
        }
    }
}

/// A place in a list of sleepers, until it is dropped.
pub struct Watch<'a> {
    sleepers: &'a Sleepers,
    pub poke: Arc<Poke>,
}

impl<'a> Watch<'a> {
    /// Look at the state after this, then sleep.
    ///
    /// # Errors
    /// Those of [`Poke::of_thread`].
    pub fn begin(sleepers: &'a Sleepers) -> Outcome<Self> {
        let poke = Poke::of_thread()?;
        sleepers.enter(&poke);
        Ok(Self { sleepers, poke })
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.sleepers.leave(&self.poke);
    }
}

/// Milliseconds of a clock that costs little and is exact to a few of them.
#[inline]
pub fn coarse_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and the time is written.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// When a call gives up.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    #[must_use]
    pub fn never() -> Self {
        Self(None)
    }

    #[must_use]
    pub fn after(duration: Option<Duration>) -> Self {
        Self(duration.and_then(|duration| Instant::now().checked_add(duration)))
    }

    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_some_and(|at| Instant::now() >= at)
    }

    /// This, or `duration` from now, whichever is first.
    #[must_use]
    pub fn sooner(&self, duration: Duration) -> Self {
        let other = Instant::now().checked_add(duration);
        Self(self.0.into_iter().chain(other).min())
    }

    fn timespec(&self) -> Option<libc::timespec> {
        let left = self.0?.saturating_duration_since(Instant::now());
        Some(libc::timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        })
    }
}

/// `ppoll(2)`. How many are ready; 0 if it is over.
///
/// # Errors
/// EINTR, or what else it says.
pub fn sleep(fds: &mut [pollfd], deadline: Deadline) -> Outcome<usize> {
    let time = deadline.timespec();
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: as many entries as the slice has. By number: a program's own `ppoll` may be ours
    // (librspreload).
    let ready = unsafe { libc::syscall(libc::SYS_ppoll, fds.as_mut_ptr(), fds.len(), time, 0usize, 8usize) };
    if ready < 0 { Err(errno()) } else { Ok(ready as usize) }
}

/// Polls for a while before it sleeps: first at once, then giving the processor away each time,
/// since the other end, or the router, may want it.
#[derive(Debug)]
pub struct Spin {
    begun: Option<Instant>,
    limit: Duration,
    rounds: u32,
}

const BUSY_ROUNDS: u32 = 8;

impl Spin {
    #[must_use]
    pub fn new(limit_us: u32) -> Self {
        Self { begun: None, limit: Duration::from_micros(u64::from(limit_us)), rounds: 0 }
    }

    /// Whether to look once more.
    pub fn again(&mut self) -> bool {
        if self.limit.is_zero() {
            return false;
        }
        let begun = *self.begun.get_or_insert_with(Instant::now);
        self.rounds += 1;
        if self.rounds <= BUSY_ROUNDS {
            std::hint::spin_loop();
            return true;
        }
        // SAFETY: no arguments.
        unsafe { libc::sched_yield() };
        begun.elapsed() < self.limit
    }
}
