//! Looking a little longer before sleeping: for a thread whose peer, as a rule, answers sooner than
//! the kernel puts the one to sleep and has the other wake it.
//!
//! Invariant: a look in vain follows upon a wait that was over in the time of a look, and has up to
//! [`SKIPPED_COUNT_MAX`] waits slept through at once, twice as many as the one before. So neither a
//! thread that wakes rarely nor one whose peers answer a little too late costs its host much.
use crate::sys::{cpu_count, monotonic_ns};
use std::time::Duration;

/// Waits that are slept through at once after looks in vain.
const SKIPPED_COUNT_MAX: u32 = 16;

/// How one thread's last waits went.
#[derive(Debug, Default)]
pub struct ShortWait {
    /// The last one was over in the time of a look.
    is_short: bool,
    /// Of the next waits, how many are slept through.
    skipped: u32,
    /// The same after the next look in vain.
    skipped_next: u32,
    /// When the wait began that is slept through.
    began_ns: u64,
}

impl ShortWait {
    /// Looks for something by `look` for at most so long, if the last wait was as short. `None`:
    /// sleep, then call [`Self::note_woken`].
    pub fn look<T>(&mut self, at_most: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        self.began_ns = monotonic_ns();
        if !self.begin(cpu_count()) {
            return None;
        }
        let until_ns = self.began_ns + nanoseconds(at_most);
        let mut found = look();
        while found.is_none() && monotonic_ns() < until_ns {
            crate::sys::pause();
            found = look();
        }
        self.end(found.is_some());
        found
    }

    /// The thread slept until something was there; `at_most` as for [`Self::look`].
    pub fn note_woken(&mut self, at_most: Duration) {
        self.is_short = monotonic_ns().saturating_sub(self.began_ns) <= nanoseconds(at_most);
    }

    /// Whether this wait is looked at. On one processor nobody else runs meanwhile.
    fn begin(&mut self, cpus: usize) -> bool {
        let looks = self.is_short && self.skipped == 0 && cpus > 1;
        self.skipped = self.skipped.saturating_sub(1);
        looks
    }

    fn end(&mut self, is_hit: bool) {
        self.is_short = is_hit;
        self.skipped_next = if is_hit { 0 } else { (2 * self.skipped_next).clamp(1, SKIPPED_COUNT_MAX) };
        self.skipped = self.skipped_next;
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Whether a wait is looked at on two processors; what is looked for is there, or never comes.
    fn is_looked_at(wait: &mut ShortWait, is_hit: bool) -> bool {
        let looks = wait.begin(2);
        if looks {
            wait.end(is_hit);
        }
        looks
    }

    #[test]
    fn only_a_short_wait_has_the_next_one_looked_at() {
        let mut wait = ShortWait { began_ns: monotonic_ns(), ..ShortWait::default() };
        assert!(!is_looked_at(&mut wait, true), "nothing is known yet");
        wait.began_ns -= 1;
        wait.note_woken(Duration::ZERO);
        assert!(!is_looked_at(&mut wait, true), "it was a long one");
        wait.note_woken(HOUR);
        assert!((0..100).all(|_| is_looked_at(&mut wait, true)));
        assert!(is_looked_at(&mut wait, false));
        assert!((0..100).all(|_| !is_looked_at(&mut wait, true)), "it slept, and nobody says for how short");
    }

    #[test]
    fn who_looks_in_vain_does_so_ever_more_rarely() {
        let mut wait = ShortWait::default();
        let mut looks = |count: usize, is_hit| {
            let looked = (0..count).filter(|_| {
                wait.is_short = true;
                is_looked_at(&mut wait, is_hit)
            });
            looked.count()
        };
        assert!(looks(1000, false) < 70);
        // Each of them is followed by as many skipped ones as there may be.
        assert_eq!(looks(10 * (SKIPPED_COUNT_MAX as usize + 1), false), 10);
        assert!(looks(1000, true) >= 1000 - SKIPPED_COUNT_MAX as usize, "one hit is enough");
    }

    #[test]
    fn on_one_processor_nothing_is_looked_for() {
        let mut wait = ShortWait { is_short: true, ..ShortWait::default() };
        assert!(!wait.begin(1));
    }

    #[test]
    fn what_is_found_is_given_and_a_look_in_vain_ends() {
        if cpu_count() == 1 {
            return;
        }
        let mut wait = ShortWait { is_short: true, ..ShortWait::default() };
        for _ in 0..10 {
            let mut left = 3;
            let found = wait.look(HOUR, || {
                left -= 1;
                (left == 0).then_some(7)
            });
            assert_eq!(found, Some(7));
        }
        assert_eq!(wait.look(Duration::ZERO, || None::<u8>), None);
    }
}
