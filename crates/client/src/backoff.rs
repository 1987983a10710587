//! How polls of an empty completion queue wait, where the pollers don't fit the cores.
//!
//! A program that polls in a loop would keep its core for whole slices, and so keep from it those
//! that it waits for. So an empty poll gives way, at first by `sched_yield`. That hands over within
//! a scheduling group only (a login session, a cgroup), and a busy program on the other side of it
//! gains nothing. A thread that has found nothing for [`SPIN_NS`] sleeps, until the router brings
//! completions to this process, at most [`SLEEP_NS`]; if its wait before took [`LONG_WAIT_NS`], it
//! sleeps at once.
//!
//! It is the thread that waits, not the CQ: many programs poll several in turns, of which some are
//! always empty. What one of them brings ends the wait at all of them, and so does a request that
//! was posted, once an empty poll of its CQ sees that.
//!
//! A program that does other work between its polls is not held up: the time between two of them
//! shows that ([`OWN_WORK_NS`]). Nor is one that waits by events: it polls between small pieces of
//! work (QEMU's migration: twice for each 4 KiB page), and blocks on the channel when it has
//! nothing to do. So polls of a CQ of which an event was taken lately return at once
//! ([`EVENTS_NS`]); a yield would give the program's other threads a whole slice. Unless the router's
//! worker waits for this very processor: nothing comes until it has it.
//!
//! Invariant: a poll sleeps only if its CQ was empty [`EMPTY_POLLS_BEFORE_YIELD`] times since the
//! router last brought anything to the process, and since the thread's wait began. So a thread that
//! polls several CQs in turns has looked at all of them since. And only if the thread polls no CQ
//! that has messages without the router ([`POLLS_WITHOUT_DIRECT_RING`]).
use crate::session::Session;
use freeflow_shm::{monotonic_ns, sched_yield};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Empty polls in a row after which a poller that shares its core gives way.
const EMPTY_POLLS_BEFORE_YIELD: u32 = 20;
/// Empty polls between two looks whether the router lives, a power of two.
const EMPTY_POLLS_PER_CHECK: u32 = 64;
/// After so long a poll sleeps. A wake-up costs both sides together 5 to 25 us.
const SPIN_NS: u64 = 50_000;
/// After a wait as long as this the next one sleeps at once.
const LONG_WAIT_NS: u64 = 100_000;
/// A thread that polls again only after this time does other work between its polls.
const OWN_WORK_NS: u64 = 10_000;
/// So long after an event of a CQ was taken, its program is one that waits by events.
const EVENTS_NS: u64 = 1_000_000_000;
/// The longest sleep: a program may wait for more than completions.
const SLEEP_NS: u64 = 100_000;
/// Nobody wakes a sleeper whose message came by a direct ring: a thread sleeps only after this many
/// polls without one.
const POLLS_WITHOUT_DIRECT_RING: u32 = 1024;

/// The empty polls of a CQ so far.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Empty polls since the last completion.
    empty_polls: u32,
    /// Empty polls while the router's count was `seen`, in one wait of the thread that polls.
    unchanged_polls: u32,
    seen: u64,
    /// Which thread's that was, and which of its waits. Several threads by turns are taken for one.
    thread: usize,
    wait: u32,
    /// When the last event was taken; 0: there was none.
    event_ns: u64,
}

/// The wait of a thread, whatever CQs it polls.
#[derive(Clone, Copy, Debug)]
struct ThreadWait {
    /// Empty polls since it found or posted something.
    empty_polls: u32,
    /// Polls since it last looked at a direct ring.
    polls_without_direct_ring: u32,
    /// When giving way began; 0: it has not.
    began_ns: u64,
    /// How long the last wait took that gave way.
    last_wait_ns: u64,
    /// When the last poll that gave way returned; 0: none has since one found something.
    ended_ns: u64,
    /// Counts its waits.
    number: u32,
}

impl ThreadWait {
    const NEW: Self = Self {
        empty_polls: 0,
        polls_without_direct_ring: POLLS_WITHOUT_DIRECT_RING,
        began_ns: 0,
        last_wait_ns: 0,
        ended_ns: 0,
        number: 0,
    };

    /// The next wait begins.
    fn restart(&mut self) {
        (self.empty_polls, self.began_ns, self.ended_ns) = (0, 0, 0);
        self.number = self.number.wrapping_add(1);
    }

    fn end(&mut self, now_ns: impl FnOnce() -> u64) {
        if self.began_ns != 0 {
            self.last_wait_ns = now_ns().saturating_sub(self.began_ns);
        }
        self.restart();
    }

    fn note_direct_rings(&mut self, has_direct_rings: bool) {
        self.polls_without_direct_ring =
            if has_direct_rings { 0 } else { self.polls_without_direct_ring.saturating_add(1) };
    }
}

thread_local!(static THREAD_WAIT: Cell<ThreadWait> = const { Cell::new(ThreadWait::NEW) });

/// Changes this thread's wait; the number is no other thread's.
fn in_thread<T>(change: impl FnOnce(&mut ThreadWait, usize) -> T) -> T {
    THREAD_WAIT.with(|cell| {
        let mut wait = cell.get();
        let value = change(&mut wait, std::ptr::from_ref(cell).addr());
        cell.set(wait);
        value
    })
}

/// A hint for a CQ's polls, outside of its lock.
#[derive(Debug, Default)]
pub(crate) struct PostHint {
    /// A request was posted to a QP whose sends complete here, since an empty poll looked last.
    some: AtomicBool,
}

impl PostHint {
    #[inline]
    pub fn note(&self) {
        // Relaxed, here and in `take`: a hint.
        if !self.some.load(Ordering::Relaxed) {
            self.some.store(true, Ordering::Relaxed);
        }
    }

    #[inline]
    fn take(&self) -> bool {
        let some = self.some.load(Ordering::Relaxed);
        if some {
            self.some.store(false, Ordering::Relaxed);
        }
        some
    }
}

/// How an empty poll waits before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EmptyPollAction {
    checks: bool,
    pause: Pause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    Return,
    Yield,
    Sleep { seen: u64 },
}

impl Backoff {
    #[inline]
    pub fn note_success(&mut self, session: &Session, has_direct_rings: bool) {
        self.empty_polls = 0;
        if session.must_yield() {
            in_thread(|wait, _| {
                wait.note_direct_rings(has_direct_rings);
                wait.end(monotonic_ns);
            });
        }
    }

    /// An event of this CQ was taken.
    pub fn note_event(&mut self, now_ns: u64) {
        self.event_ns = now_ns;
    }

    /// `has_direct_rings`: messages may come without the router.
    #[inline]
    pub fn next_action(&mut self, session: &Session, post_hint: &PostHint, has_direct_rings: bool) -> EmptyPollAction {
        self.empty_polls = self.empty_polls.wrapping_add(1);
        let checks = self.empty_polls.is_multiple_of(EMPTY_POLLS_PER_CHECK);
        if !session.must_yield() {
            return EmptyPollAction { checks, pause: Pause::Return };
        }
        let has_posted = post_hint.take();
        let pause = in_thread(|wait, thread| {
            if has_posted {
                wait.end(monotonic_ns);
            }
            wait.note_direct_rings(has_direct_rings);
            self.note_wait(thread, wait.number);
            self.next_pause(wait, session.completed(), monotonic_ns, || session.is_worker_here())
        });
        EmptyPollAction { checks, pause }
    }

    fn note_wait(&mut self, thread: usize, wait: u32) {
        if self.thread == thread && self.wait != wait {
            self.unchanged_polls = 0;
        }
        (self.thread, self.wait) = (thread, wait);
    }

    fn waits_by_events(&self, now_ns: u64) -> bool {
        self.event_ns != 0 && now_ns.saturating_sub(self.event_ns) < EVENTS_NS
    }

    #[inline]
    fn next_pause(
        &mut self,
        wait: &mut ThreadWait,
        completed: u64,
        now_ns: impl FnOnce() -> u64,
        is_worker_here: impl FnOnce() -> bool,
    ) -> Pause {
        if completed != self.seen {
            self.seen = completed;
            self.unchanged_polls = 0;
        }
        self.unchanged_polls = self.unchanged_polls.saturating_add(1);
        wait.empty_polls = wait.empty_polls.saturating_add(1);
        if wait.empty_polls <= EMPTY_POLLS_BEFORE_YIELD {
            return Pause::Return;
        }
        let now_ns = now_ns();
        if wait.ended_ns != 0 && now_ns.saturating_sub(wait.ended_ns) > OWN_WORK_NS {
            // This gap counts once.
            wait.restart();
            return Pause::Return;
        }
        // Also says to the router where this thread is.
        let is_worker_here = is_worker_here();
        if self.waits_by_events(now_ns) && !is_worker_here {
            return Pause::Return;
        }
        if wait.began_ns == 0 {
            wait.began_ns = now_ns;
        }
        let is_long = now_ns.saturating_sub(wait.began_ns) >= SPIN_NS || wait.last_wait_ns >= LONG_WAIT_NS;
        let may_sleep = self.unchanged_polls > EMPTY_POLLS_BEFORE_YIELD
            && wait.polls_without_direct_ring >= POLLS_WITHOUT_DIRECT_RING;
        if (is_long || is_worker_here) && may_sleep { Pause::Sleep { seen: self.seen } } else { Pause::Yield }
    }
}

impl EmptyPollAction {
    #[inline]
    pub fn wait(self, session: &Session) {
        match self.pause {
            Pause::Return => {}
            Pause::Yield => sched_yield(),
            Pause::Sleep { seen } => session.sleep_while(seen, SLEEP_NS),
        }
        if self.pause != Pause::Return {
            in_thread(|wait, _| wait.ended_ns = monotonic_ns());
        }
        if self.checks || matches!(self.pause, Pause::Sleep { .. }) {
            session.check_sometimes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls in vain for so long, a microsecond each; how many of each way that took.
    fn polls(
        (backoff, wait): (&mut Backoff, &mut ThreadWait),
        completed: u64,
        from_us: u64,
        count: u32,
        worker_here: bool,
    ) -> (u32, u32, u32) {
        let (mut returns, mut yields, mut sleeps) = (0, 0, 0);
        for action in 1..=count {
            let now_ns = (from_us + u64::from(action)) * 1_000;
            wait.ended_ns = now_ns - 1_000;
            wait.note_direct_rings(false);
            backoff.note_wait(1, wait.number);
            match backoff.next_pause(wait, completed, || now_ns, || worker_here) {
                Pause::Return => returns += 1,
                Pause::Yield => yields += 1,
                Pause::Sleep { seen } => {
                    assert_eq!(seen, completed);
                    sleeps += 1;
                }
            }
        }
        (returns, yields, sleeps)
    }

    #[test]
    fn pauses_then_yields_then_sleeps() {
        let (mut backoff, mut wait) = (Backoff::default(), ThreadWait::NEW);
        assert_eq!(polls((&mut backoff, &mut wait), 0, 0, 20, false), (20, 0, 0));
        assert_eq!(polls((&mut backoff, &mut wait), 0, 20, 50, false), (0, 50, 0));
        assert_eq!(polls((&mut backoff, &mut wait), 0, 70, 10, false), (0, 0, 10));
        wait.end(|| 90_000);
        assert_eq!(wait.last_wait_ns, 69_000);
        assert_eq!(
            polls((&mut backoff, &mut wait), 0, 80, 20, false),
            (20, 0, 0),
            "after a completion it begins again"
        );
    }

    #[test]
    fn whoever_waited_long_sleeps_at_once() {
        let (mut backoff, mut wait) =
            (Backoff::default(), ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW });
        assert_eq!(polls((&mut backoff, &mut wait), 0, 0, 30, false), (20, 0, 10));
        wait.restart();
        wait.last_wait_ns = LONG_WAIT_NS - 1;
        assert_eq!(polls((&mut backoff, &mut wait), 0, 100, 30, false), (20, 10, 0));
    }

    #[test]
    fn the_worker_gets_the_processor_that_it_waits_for() {
        let (mut backoff, mut wait) = (Backoff::default(), ThreadWait::NEW);
        assert_eq!(polls((&mut backoff, &mut wait), 0, 0, 30, true), (20, 0, 10));
    }

    #[test]
    fn whoever_works_between_polls_is_not_held_up() {
        let (mut backoff, mut wait) =
            (Backoff::default(), ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW });
        for action in 1..1_000_u64 {
            let now_ns = action * (OWN_WORK_NS + 1_000);
            wait.ended_ns = now_ns - OWN_WORK_NS - 1;
            assert_eq!(backoff.next_pause(&mut wait, 0, || now_ns, || true), Pause::Return, "{action}");
        }
    }

    /// As an event loop that polls all of its CQs, and then does something else.
    #[test]
    fn nor_does_it_sleep_at_one_of_many_queues() {
        let mut queues: Vec<_> = (0..30).map(|_| Backoff::default()).collect();
        let mut wait = ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW };
        for turn in 1..1_000_u64 {
            for queue in &mut queues {
                let now_ns = turn * 30_000;
                queue.note_wait(1, wait.number);
                match queue.next_pause(&mut wait, 0, || now_ns, || true) {
                    Pause::Return => {}
                    Pause::Yield => wait.ended_ns = now_ns,
                    Pause::Sleep { .. } => panic!("{turn}"),
                }
            }
        }
    }

    /// Else a thread that polls several CQs could sleep over a completion of another one.
    #[test]
    fn nobody_sleeps_just_after_the_router_brought_something() {
        let (mut backoff, mut wait) = (Backoff::default(), ThreadWait::NEW);
        assert_eq!(polls((&mut backoff, &mut wait), 0, 0, 1_000, true).2, 980);
        assert_eq!(polls((&mut backoff, &mut wait), 1, 1_000, 20, true), (0, 20, 0));
        assert_eq!(polls((&mut backoff, &mut wait), 1, 1_020, 1, true), (0, 0, 1));
        assert_eq!(polls((&mut backoff, &mut wait), 2, 1_021, 20, true), (0, 20, 0));
    }

    /// As with a CQ for sends and another for receives: what one of them brings past the router is
    /// not counted there.
    #[test]
    fn a_queue_that_is_always_empty_holds_nobody_up() {
        let (mut idle, mut wait) = (Backoff::default(), ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW });
        for turn in 0..10_000 {
            assert_eq!(polls((&mut idle, &mut wait), 0, turn * 10, 10, true), (10, 0, 0), "{turn}");
            wait.end(|| unreachable!("it never gave way"));
        }
    }

    /// Nor many of them: one round is more polls than a wait has before it gives way.
    #[test]
    fn many_queues_that_are_always_empty_put_nobody_to_sleep() {
        let mut idle: Vec<_> = (0..100).map(|_| Backoff::default()).collect();
        let mut wait = ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW };
        for turn in 0..1_000 {
            for queue in &mut idle {
                assert_eq!(polls((queue, &mut wait), 0, turn, 1, true).2, 0, "{turn}");
            }
            wait.end(|| 1_000 * turn);
            wait.last_wait_ns = LONG_WAIT_NS;
        }
    }

    #[test]
    fn threads_that_poll_one_queue_by_turns_sleep_too() {
        let (mut backoff, mut wait) =
            (Backoff::default(), ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW });
        let mut sleeps = 0;
        for action in 0..100_u64 {
            backoff.note_wait(action as usize % 2, 7 + action as u32 % 2);
            sleeps += u32::from(matches!(backoff.next_pause(&mut wait, 0, || action, || true), Pause::Sleep { .. }));
        }
        assert!(sleeps > 50, "{sleeps}");
    }

    #[test]
    fn nobody_sleeps_with_a_direct_ring() {
        let (mut with, mut without) = (Backoff::default(), Backoff::default());
        let mut wait = ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW };
        for turn in 1..1_000 {
            wait.note_direct_rings(true);
            assert!(!matches!(with.next_pause(&mut wait, 0, || turn, || true), Pause::Sleep { .. }));
            assert_eq!(polls((&mut without, &mut wait), 0, turn, 1, true).2, 0, "{turn}");
        }
        assert_eq!(polls((&mut without, &mut wait), 0, 1_000, 1_100, true), (0, 1_022, 78), "it is polled no more");
    }

    #[test]
    fn whoever_waits_by_events_is_not_held_up() {
        let (mut backoff, mut wait) =
            (Backoff::default(), ThreadWait { last_wait_ns: LONG_WAIT_NS, ..ThreadWait::NEW });
        backoff.note_event(1_000);
        assert_eq!(polls((&mut backoff, &mut wait), 0, 1, 10_000, false), (10_000, 0, 0));
        backoff.note_event(900_000_000);
        assert_eq!(polls((&mut backoff, &mut wait), 0, 900_000, 10_000, false), (10_000, 0, 0));
        assert_eq!(polls((&mut backoff, &mut wait), 0, 1_800_000, 10_000, false), (10_000, 0, 0));
        assert_eq!(polls((&mut backoff, &mut wait), 0, 2_000_000, 10_000, false), (0, 0, 10_000), "no event any more");
    }

    #[test]
    fn whoever_waits_by_events_leaves_the_processor_to_the_worker() {
        let (mut backoff, mut wait) = (Backoff::default(), ThreadWait::NEW);
        backoff.note_event(1_000);
        assert_eq!(polls((&mut backoff, &mut wait), 0, 1, 40, true), (20, 0, 20));
        let mut looks = 0;
        let mut is_worker_here = || {
            looks += 1;
            false
        };
        assert_eq!(backoff.next_pause(&mut wait, 0, || 42_000, &mut is_worker_here), Pause::Return);
        assert_eq!(looks, 1, "the router learns where this thread polls");
    }

    #[test]
    fn a_post_is_seen_once() {
        let post_hint = PostHint::default();
        assert!(!post_hint.take());
        post_hint.note();
        post_hint.note();
        assert!(post_hint.take());
        assert!(!post_hint.take());
    }
}
