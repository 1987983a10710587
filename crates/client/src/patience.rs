//! How polls of an empty completion queue wait, where the pollers don't fit the cores.
//!
//! A program that polls in a loop would keep its core for whole slices, and so keep from it those that it waits for. So an
//! empty poll gives way, at first by `sched_yield`. That hands over within a scheduling group only (a login session, a cgroup),
//! and a busy program on the other side of it gains nothing. A poll that has found nothing for [`SPIN_NS`] sleeps, until
//! the router brings completions to this process, at most [`SLEEP_NS`]; if the wait before took [`LONG_WAIT_NS`], it sleeps at once.
//!
//! A program that does other work between its polls is not held up: what it does between two of them tells ([`OWN_WORK_NS`]).
//!
//! Invariant: a poll sleeps only if its CQ was empty [`EMPTY_POLLS_BEFORE_YIELD`] times since the router last brought anything to the
//! process. So a thread that polls several CQs in turns has looked at all of them since.
use crate::session::Session;
use freeflow_shm::{monotonic_ns, sched_yield};
use std::sync::atomic::{AtomicU64, Ordering};

/// Empty polls in a row after which a poller that shares its core gives way.
const EMPTY_POLLS_BEFORE_YIELD: u32 = 20;
/// Empty polls between two looks whether the router lives, a power of two.
const EMPTY_POLLS_PER_CHECK: u32 = 64;
/// After so long a poll sleeps. A wake-up costs both sides together 5 to 25 us.
const SPIN_NS: u64 = 50_000;
/// After a wait as long as this the next one sleeps at once.
const LONG_WAIT_NS: u64 = 100_000;
/// Who was away for so long since the last poll gave way does something else beside polling.
const OWN_WORK_NS: u64 = 10_000;
/// The longest sleep: a program may wait for more than completions.
const SLEEP_NS: u64 = 100_000;

/// What the empty polls of a CQ have seen so far.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Empty polls since the last completion.
    empty_polls: u32,
    /// Empty polls while the router's count was `seen`.
    unchanged_polls: u32,
    seen: u64,
    /// When giving way began.
    began_ns: u64,
    /// How long the last wait took that gave way.
    last_wait_ns: u64,
}

/// What a CQ's polls look at from outside of its lock.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    /// When the last poll that gave way returned; 0: since then one found something.
    ended_ns: AtomicU64,
}

/// What an empty poll does before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    checks: bool,
    way: Way,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Return,
    Yield,
    Sleep { seen: u64 },
}

impl Patience {
    #[inline]
    pub fn note_success(&mut self, rest: &Rest) {
        if self.began_ns != 0 {
            self.last_wait_ns = monotonic_ns() - self.began_ns;
            self.began_ns = 0;
            // Relaxed, here and below: a hint. Who polls is in the lock, and who rests is the one that polled.
            rest.ended_ns.store(0, Ordering::Relaxed);
        }
        self.empty_polls = 0;
    }

    #[inline]
    pub fn next_step(&mut self, session: &Session, rest: &Rest, may_sleep: bool) -> Step {
        self.empty_polls = self.empty_polls.wrapping_add(1);
        let checks = self.empty_polls.is_multiple_of(EMPTY_POLLS_PER_CHECK);
        if !session.must_yield() {
            return Step { checks, way: Way::Return };
        }
        let rested_ns = rest.ended_ns.load(Ordering::Relaxed);
        let way = self.next_way(session.completed(), rested_ns, monotonic_ns, || session.is_worker_here());
        // Nobody wakes a sleeper whose message came by a channel.
        let way = if !may_sleep && matches!(way, Way::Sleep { .. }) { Way::Yield } else { way };
        if self.empty_polls == 0 {
            // It began anew: that gap counts once.
            rest.ended_ns.store(0, Ordering::Relaxed);
        }
        Step { checks, way }
    }

    #[inline]
    fn next_way(
        &mut self,
        completed: u64,
        rested_ns: u64,
        now_ns: impl FnOnce() -> u64,
        is_worker_here: impl FnOnce() -> bool,
    ) -> Way {
        if completed != self.seen {
            self.seen = completed;
            self.unchanged_polls = 0;
        }
        self.unchanged_polls = self.unchanged_polls.saturating_add(1);
        if self.empty_polls <= EMPTY_POLLS_BEFORE_YIELD {
            return Way::Return;
        }
        let now_ns = now_ns();
        if rested_ns != 0 && now_ns.saturating_sub(rested_ns) > OWN_WORK_NS {
            (self.empty_polls, self.unchanged_polls, self.began_ns) = (0, 0, 0);
            return Way::Return;
        }
        if self.began_ns == 0 {
            self.began_ns = now_ns;
        }
        let is_worker_here = is_worker_here();
        let is_long = now_ns.saturating_sub(self.began_ns) >= SPIN_NS || self.last_wait_ns >= LONG_WAIT_NS;
        if (is_long || is_worker_here) && self.unchanged_polls > EMPTY_POLLS_BEFORE_YIELD {
            Way::Sleep { seen: self.seen }
        } else {
            Way::Yield
        }
    }
}

impl Step {
    #[inline]
    pub fn wait(self, session: &Session, rest: &Rest) {
        match self.way {
            Way::Return => {}
            Way::Yield => sched_yield(),
            Way::Sleep { seen } => session.sleep_while(seen, SLEEP_NS),
        }
        if self.way != Way::Return {
            rest.ended_ns.store(monotonic_ns(), Ordering::Relaxed);
        }
        if self.checks || matches!(self.way, Way::Sleep { .. }) {
            session.check_sometimes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls in vain for so long, a microsecond each; how many of each way that took.
    fn polls(patience: &mut Patience, completed: u64, from_us: u64, count: u32, worker_here: bool) -> (u32, u32, u32) {
        let (mut returns, mut yields, mut sleeps) = (0, 0, 0);
        for step in 1..=count {
            patience.empty_polls += 1;
            let now_ns = (from_us + u64::from(step)) * 1_000;
            match patience.next_way(completed, now_ns - 1_000, || now_ns, || worker_here) {
                Way::Return => returns += 1,
                Way::Yield => yields += 1,
                Way::Sleep { seen } => {
                    assert_eq!(seen, completed);
                    sleeps += 1;
                }
            }
        }
        (returns, yields, sleeps)
    }

    #[test]
    fn pauses_then_yields_then_sleeps() {
        let mut patience = Patience::default();
        assert_eq!(polls(&mut patience, 0, 0, 20, false), (20, 0, 0));
        assert_eq!(polls(&mut patience, 0, 20, 50, false), (0, 50, 0));
        assert_eq!(polls(&mut patience, 0, 70, 10, false), (0, 0, 10));
        patience.empty_polls = 0;
        assert_eq!(polls(&mut patience, 0, 80, 20, false), (20, 0, 0), "after a completion it begins anew");
    }

    #[test]
    fn whoever_waited_long_sleeps_at_once() {
        let mut patience = Patience { last_wait_ns: LONG_WAIT_NS, ..Patience::default() };
        assert_eq!(polls(&mut patience, 0, 0, 30, false), (20, 0, 10));
        patience.last_wait_ns = LONG_WAIT_NS - 1;
        (patience.empty_polls, patience.began_ns) = (0, 0);
        assert_eq!(polls(&mut patience, 0, 100, 30, false), (20, 10, 0));
    }

    #[test]
    fn the_worker_gets_the_processor_that_it_waits_for() {
        let mut patience = Patience::default();
        assert_eq!(polls(&mut patience, 0, 0, 30, true), (20, 0, 10));
    }

    #[test]
    fn whoever_works_between_polls_is_not_held_up() {
        let mut patience = Patience { last_wait_ns: LONG_WAIT_NS, ..Patience::default() };
        for step in 1..1_000_u64 {
            patience.empty_polls += 1;
            let now_ns = step * (OWN_WORK_NS + 1_000);
            let way = patience.next_way(0, now_ns - OWN_WORK_NS - 1, || now_ns, || true);
            assert_eq!(way, Way::Return, "{step}");
        }
    }

    /// Else a thread that polls several CQs could sleep over a completion of another one.
    #[test]
    fn nobody_sleeps_just_after_the_router_brought_something() {
        let mut patience = Patience::default();
        assert_eq!(polls(&mut patience, 0, 0, 1_000, true).2, 980);
        assert_eq!(polls(&mut patience, 1, 1_000, 20, true), (0, 20, 0));
        assert_eq!(polls(&mut patience, 1, 1_020, 1, true), (0, 0, 1));
        assert_eq!(polls(&mut patience, 2, 1_021, 20, true), (0, 20, 0));
    }
}
