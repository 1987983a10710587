//! The session segment: doorbells, and what router and library publish about waiting.
use crate::handshake::{Doorbells, EventCount, announce};
use crate::layout::{
    DOORBELL_COUNT, DOORBELL_WORD_COUNT, LAYOUT_VERSION, NOTIFICATION_WORD_COUNT, SESSION_MAGIC, WAIT_SPIN, WAIT_YIELD,
    session,
};
use crate::segment::Segment;
use crate::sys::{futex_wait, futex_wake};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Sleepers that are woken at once: a process that parks thousands of threads costs the router no
/// more than this. The others end their sleep by themselves.
const WOKEN_MAX: i32 = 8;

/// One process' session segment, on either side.
#[derive(Debug)]
pub struct SessionSegment {
    segment: Segment,
}

impl SessionSegment {
    /// Router: makes it; the descriptor is for the library.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (segment, fd) = Segment::create("freeflow-session", session::BYTES)?;
        Ok((Self::create_in(segment), fd))
    }

    /// Router: makes it in a segment of [`session::BYTES`] zero bytes.
    pub fn create_in(segment: Segment) -> Self {
        // Relaxed, both: the library hears of it after this.
        segment.u64(session::MAGIC).store(SESSION_MAGIC, Ordering::Relaxed);
        segment.u32(session::VERSION).store(LAYOUT_VERSION, Ordering::Relaxed);
        Self { segment }
    }

    /// Library: maps it, from `offset` of the file on. Errors: `InvalidData` if it is no session segment, `Unsupported`
    /// if of another version.
    pub fn map(fd: BorrowedFd<'_>, offset: u64) -> io::Result<Self> {
        let segment = Segment::map_at(fd, offset, session::BYTES)?;
        // Relaxed, both: stored before the descriptor was passed on.
        if segment.u64(session::MAGIC).load(Ordering::Relaxed) != SESSION_MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a FreeFlow session"));
        }
        if segment.u32(session::VERSION).load(Ordering::Relaxed) != LAYOUT_VERSION {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "a FreeFlow session of another layout version"));
        }
        Ok(Self { segment })
    }

    /// Library: rings the doorbell of a QP or SRQ. True: the router sleeps, kick it. Panics beyond
    /// the last doorbell.
    #[inline]
    pub fn ring(&self, doorbell: u32) -> bool {
        assert!((doorbell as usize) < DOORBELL_COUNT);
        self.doorbells().ring(doorbell)
    }

    /// Router: takes doorbells that ring (a bounded number a look), each once, all below
    /// [`DOORBELL_COUNT`]. False: none does.
    #[inline]
    pub fn take_doorbells(&self, f: impl FnMut(u32)) -> bool {
        self.doorbells().take(f)
    }

    /// Router: no doorbell rings. Look again after `set_router_sleeps(true)`.
    #[inline]
    pub fn summary_is_empty(&self) -> bool {
        // Relaxed: ordered by the fence in `set_router_sleeps`.
        self.segment.u64(session::SUMMARY).load(Ordering::Relaxed) == 0
    }

    /// Router: says whether ringing must be followed by a kick; then a SeqCst fence.
    #[inline]
    pub fn set_router_sleeps(&self, sleeps: bool) {
        announce(self.segment.u32(session::ROUTER_SLEEPS), sleeps);
    }

    /// Library: [`WAIT_SPIN`] or [`WAIT_YIELD`].
    #[inline]
    pub fn wait_policy(&self) -> u32 {
        // Relaxed: advice.
        match self.segment.u32(session::WAIT_POLICY).load(Ordering::Relaxed) {
            WAIT_SPIN => WAIT_SPIN,
            _ => WAIT_YIELD,
        }
    }

    /// Router: sets what [`Self::wait_policy`] gives.
    #[inline]
    pub fn set_wait_policy(&self, policy: u32) {
        // Relaxed: advice.
        self.segment.u32(session::WAIT_POLICY).store(policy, Ordering::Relaxed);
    }

    /// Library: the count to give to [`Self::sleep_while`], taken before the look at the queues.
    #[inline]
    pub fn completed(&self) -> u64 {
        self.event_count().completed()
    }

    /// Library: sleeps until the router brings completions after those counted by `seen`, at most
    /// so long. May return early.
    pub fn sleep_while(&self, seen: u64, at_most_ns: u64) {
        let count = self.event_count();
        count.await_next(seen);
        futex_wait(count.completed, seen, at_most_ns);
    }

    /// Library: the worker is awake, and cannot run while the caller does, who polls on processor
    /// `cpu`. Says to the router where that is.
    #[inline]
    pub fn is_worker_here(&self, cpu: u32) -> bool {
        // Relaxed, all: advice.
        let own = self.segment.u32(session::LIBRARY_CPU);
        if own.load(Ordering::Relaxed) != cpu + 1 {
            own.store(cpu + 1, Ordering::Relaxed);
        }
        self.segment.u32(session::ROUTER_CPU).load(Ordering::Relaxed) == cpu + 1
            && self.segment.u32(session::ROUTER_SLEEPS).load(Ordering::Relaxed) == 0
    }

    /// Router: where its worker runs; `u32::MAX`: does not say.
    #[inline]
    pub fn set_router_cpu(&self, cpu: u32) {
        // Relaxed: advice.
        self.segment.u32(session::ROUTER_CPU).store(cpu.wrapping_add(1), Ordering::Relaxed);
    }

    /// Router: a poller of this session waits for the processor on which the worker runs, `cpu`, as
    /// far as can be seen.
    #[inline]
    pub fn is_poller_here(&self, cpu: u32, count: u64) -> bool {
        // Relaxed: advice.
        self.segment.u32(session::LIBRARY_CPU).load(Ordering::Relaxed) == cpu + 1
            && !self.event_count().is_awaited(count + 1)
    }

    /// Router: completions are in their rings; `count` grows by one with each call.
    #[inline]
    pub fn advance(&self, count: u64) {
        self.event_count().advance(count);
    }

    /// Router, after `advance` and [`fence_for_all`](crate::handshake::fence_for_all): wakes
    /// pollers that sleep, a few at once.
    #[inline]
    pub fn wake_sleepers(&self, count: u64) {
        let events = self.event_count();
        if events.is_awaited(count) {
            futex_wake(events.completed, WOKEN_MAX);
        }
    }

    /// Router: the QP of this cookie shall look at its direct ring.
    pub fn notify(&self, cookie: u32) {
        let word = cookie as usize / 64;
        if word < NOTIFICATION_WORD_COUNT {
            // Release, both; partners: the Acquire swaps in `take_notifications`.
            self.notifications(word).fetch_or(1 << (cookie % 64), Ordering::Release);
            self.segment.u64(session::NOTIFICATION_SUMMARY).fetch_or(1 << (word / 8), Ordering::Release);
        }
    }

    /// Library: some QP has a notification.
    #[inline]
    pub fn has_notifications(&self) -> bool {
        // SeqCst: a process that asks several words whether there are notifications asks this one
        // first.
        self.segment.u64(session::NOTIFICATION_SUMMARY).load(Ordering::SeqCst) != 0
    }

    /// Library: takes the cookies of QPs that have notifications.
    pub fn take_notifications(&self, mut each: impl FnMut(u32)) {
        // Acquire at least, both; partners: the Release `fetch_or`s in `notify`.
        let mut summary = self.segment.u64(session::NOTIFICATION_SUMMARY).swap(0, Ordering::SeqCst);
        while summary != 0 {
            let group = summary.trailing_zeros() as usize * 8;
            summary &= summary - 1;
            for word in group..group + 8 {
                let mut bits = self.notifications(word).swap(0, Ordering::Acquire);
                while bits != 0 {
                    each(word as u32 * 64 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
    }

    fn notifications(&self, word: usize) -> &AtomicU64 {
        self.segment.u64(session::NOTIFICATIONS + word * 8)
    }

    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    #[inline]
    fn event_count(&self) -> EventCount<'_> {
        EventCount { completed: self.segment.u64(session::COMPLETED), awaited: self.segment.u64(session::AWAITED) }
    }

    #[inline]
    fn doorbells(&self) -> Doorbells<'_> {
        let words = self.segment.pointer(session::DOORBELLS, DOORBELL_WORD_COUNT * 8, 8).cast::<AtomicU64>();
        Doorbells {
            summary: self.segment.u64(session::SUMMARY),
            // SAFETY: in bounds and aligned (`pointer` checks), mapped as long as `self` lives; any
            // bytes are valid atomics.
            words: unsafe { std::slice::from_raw_parts(words, DOORBELL_WORD_COUNT) },
            router_sleeps: self.segment.u32(session::ROUTER_SLEEPS),
        }
    }
}
