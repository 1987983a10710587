//! How the worker waits: what it knows of those who poll, and the end of each wait. See
//! [`idle`](crate::dataplane::idle).
use crate::base::mode::Mode;
use crate::base::wake::Waker;
use crate::dataplane::pollers::Pollers;
use crate::dataplane::table::Id;
use freeflow_engine::SessionId;
use freeflow_shm::layout::{WAIT_SPIN, WAIT_YIELD};
use freeflow_shm::worker_lock::WorkerGuard;
use freeflow_shm::worker_lock::WorkerLock;
use freeflow_shm::{Doorbell, pause, sched_yield};
use freeflow_verbs::{Duration, Instant};
use rustix::event::{Timespec, epoll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Idle time before the worker sleeps.
pub(crate) const ADAPTIVE_IDLE: Duration = Duration::from_micros(100);

pub(crate) const LOWCPU_IDLE: Duration = Duration::from_micros(3);

/// The same in adaptive mode while the pollers don't fit the cores.
pub(crate) const CROWDED_IDLE: Duration = Duration::from_micros(20);

/// `sched_yield`s in a row that took this long each went to a thread that spins without yielding
/// (an application that polls memory, not its CQ). Yielding again would cost another slice; who
/// sleeps instead is woken at once, before the spinner. A long one between short ones was only some
/// other program's slice.
pub(crate) const HOGGED_YIELD: Duration = Duration::from_micros(200);

pub(crate) const HOGGED_YIELD_COUNT: u32 = 3;

/// How long the worker sleeps instead of yielding after it met such a thread.
pub(crate) const HOGGED: Duration = Duration::from_millis(50);

/// Pauses before the first `sched_yield`.
pub(crate) const PAUSE_COUNT: u32 = 20;

/// The same as a time: with sockets to look at, twenty turns take longer than others need for their work.
pub(crate) const PAUSE_TIME: Duration = Duration::from_micros(1);

/// Where the worker says that it runs when that is nobody's business.
pub(crate) const NO_CPU: u32 = u32::MAX;

pub(crate) const WAKER_TOKEN: u64 = u64::MAX;

/// A socket has datagrams.
pub(crate) const WIRE_TOKEN: u64 = u64::MAX - 1;

pub(crate) const EVENT_COUNT: usize = 64;

/// The worker's step after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Turn,
    /// Everyone was notified, and nobody had work; at most so long.
    Sleep(Option<Duration>),
}

/// Blocks the worker, without the worker lock.
pub struct Sleeper {
    pub(crate) epoll: Arc<OwnedFd>,
    pub(crate) waker: Arc<Waker>,
}

impl Sleeper {
    /// Adds the tokens of those that woke it.
    pub fn sleep<'a, T>(
        &self,
        (lock, guard): (&'a WorkerLock<T>, WorkerGuard<'a, T>),
        timeout: Option<Duration>,
        tokens: &mut Vec<u64>,
    ) -> WorkerGuard<'a, T> {
        lock.sleep(guard, self.waker.parker(), || self.block(timeout, tokens))
    }

    pub(crate) fn block(&self, timeout: Option<Duration>, tokens: &mut Vec<u64>) {
        poll(&self.epoll, timeout, tokens);
    }
}

/// Waits for kicks, at most until `timeout`.
pub(crate) fn poll(epoll: &OwnedFd, timeout: Option<Duration>, tokens: &mut Vec<u64>) {
    let timeout = timeout
        .map(|span| Timespec { tv_sec: (span.0 / 1_000_000_000) as i64, tv_nsec: (span.0 % 1_000_000_000) as i64 });
    let mut events = [const { MaybeUninit::uninit() }; EVENT_COUNT];
    // An interrupted wait is one without events.
    if let Ok((events, _)) = epoll::wait(epoll, &mut events, timeout.as_ref()) {
        tokens.extend(events.iter().map(|event| event.data.u64()));
    }
}

pub struct Waiting {
    pub(crate) mode: Mode,
    pub(crate) epoll: Arc<OwnedFd>,
    pub(crate) waker: Arc<Waker>,
    /// It sleeps, until then at most.
    pub(crate) asleep: Option<Instant>,
    pub(crate) pollers: Pollers,
    /// Of the events that `poll` found.
    pub(crate) tokens: Vec<u64>,
    pub(crate) idle_turns: u32,
    pub(crate) busy_at: Instant,
    pub(crate) kicks_at: Instant,
    pub(crate) epoch_at: Instant,
    pub(crate) house_at: Instant,
    /// When the pollers last did not fit.
    pub(crate) crowded_at: Instant,
    /// Long yields since the last short one.
    pub(crate) long_yields: u32,
    /// Until when to sleep rather than yield.
    pub(crate) hogged_until: Instant,
    pub(crate) busy_before: u32,
    /// The processor that the worker runs on.
    pub(crate) cpu: u32,
    pub(crate) policy: u32,
}

impl Waiting {
    pub fn new(mode: Mode, waker: Arc<Waker>, pollers: Pollers) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&epoll, waker.fd(), epoll::EventData::new_u64(WAKER_TOKEN), epoll::EventFlags::IN)?;
        let start = Instant(0);
        Ok(Self {
            mode,
            epoll,
            waker,
            asleep: None,
            pollers,
            tokens: Vec::with_capacity(EVENT_COUNT),
            idle_turns: 0,
            busy_at: start,
            kicks_at: start,
            epoch_at: start,
            house_at: start,
            crowded_at: start,
            long_yields: 0,
            hogged_until: start,
            busy_before: 0,
            cpu: NO_CPU,
            policy: WAIT_SPIN,
        })
    }

    /// Edge-triggered, so that nobody has to read the eventfd.
    pub fn watch(&self, session: SessionId, kick: &Doorbell) -> io::Result<()> {
        let data = epoll::EventData::new_u64(session.index() as u64 | u64::from(session.generation()) << 32);
        Ok(epoll::add(&self.epoll, kick.as_fd(), data, epoll::EventFlags::IN | epoll::EventFlags::ET)?)
    }

    /// A socket whose datagrams wake the worker. It stays.
    pub fn watch_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, epoll::EventData::new_u64(WIRE_TOKEN), epoll::EventFlags::IN)?)
    }

    pub fn unwatch(&self, kick: &Doorbell) {
        let _ = epoll::delete(&self.epoll, kick.as_fd());
    }

    /// In force when the worker next has nothing to do.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    pub fn is_fastpath(&self) -> bool {
        self.mode == Mode::Fastpath
    }

    pub(crate) fn relax(&mut self, now: Instant) {
        self.idle_turns = self.idle_turns.saturating_add(1);
        if self.policy != WAIT_YIELD || self.idle_turns <= PAUSE_COUNT && now - self.busy_at < PAUSE_TIME {
            return pause();
        }
        sched_yield();
        let after = Instant(freeflow_shm::monotonic_ns());
        self.long_yields = if after - now > HOGGED_YIELD { self.long_yields + 1 } else { 0 };
        if self.long_yields >= HOGGED_YIELD_COUNT {
            self.long_yields = 0;
            self.hogged_until = after + HOGGED;
        }
    }

    /// How long the worker stays awake with nothing to do.
    pub(crate) fn idle_limit(&self, now: Instant, packets_flow: bool) -> Option<Duration> {
        match self.mode {
            Mode::Fastpath => None,
            _ if now < self.hogged_until => Some(Duration(0)),
            Mode::LowCpu => Some(LOWCPU_IDLE),
            // A packet that wakes the worker has the scheduler put it on the core that brought the
            // packet, which is the sender's.
            Mode::Adaptive | Mode::Auto if self.policy == WAIT_YIELD && !packets_flow => Some(CROWDED_IDLE),
            Mode::Adaptive | Mode::Auto => Some(ADAPTIVE_IDLE),
        }
    }

    /// Waits for kicks, at most until `timeout`.
    pub(crate) fn poll(&mut self, timeout: Option<Duration>) {
        self.tokens.clear();
        poll(&self.epoll, timeout, &mut self.tokens);
    }

    pub fn sleeper(&self) -> Sleeper {
        Sleeper { epoll: self.epoll.clone(), waker: self.waker.clone() }
    }

    pub fn is_asleep(&self) -> bool {
        self.asleep.is_some()
    }

    /// Whether the worker wakes by itself before that is due.
    pub fn sleeps_long_enough(&self, due: Option<Instant>) -> bool {
        due.is_none_or(|due| self.asleep.is_some_and(|until| until <= due))
    }
}
