//! Looking a little longer before sleeping: for a thread whose peer, as a rule, answers sooner than
//! the kernel puts the one to sleep and has the other wake it.
//!
//! Invariant: a thread that finds nothing looks seldom. Each look in vain doubles the number of
//! waits after it that are not looked at, up to [`SKIPPED_COUNT_MAX`], so that a thread that wakes
//! rarely costs its host nothing.
use crate::sys::{cpu_count, monotonic_ns};
use std::time::Duration;

/// Waits that are slept through at once after looks in vain.
const SKIPPED_COUNT_MAX: u32 = 256;

/// How one thread's waits went.
#[derive(Debug, Default)]
pub struct ShortWait {
    /// To be skipped, of the next waits.
    left: u32,
    /// To be skipped after the next look in vain.
    next: u32,
}

impl ShortWait {
    /// Looks for something by `look` for at most so long; `None`: sleep.
    pub fn look<T>(&mut self, at_most: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if !self.begin(cpu_count()) {
            return None;
        }
        let until_ns = monotonic_ns() + at_most.as_nanos() as u64;
        loop {
            let found = look();
            if found.is_some() || monotonic_ns() >= until_ns {
                self.end(found.is_some());
                return found;
            }
            crate::sys::pause();
        }
    }

    /// Whether this wait is looked at. On one processor nobody else runs meanwhile.
    fn begin(&mut self, cpus: usize) -> bool {
        let looks = self.left == 0 && cpus > 1;
        self.left = self.left.saturating_sub(1);
        looks
    }

    fn end(&mut self, is_hit: bool) {
        self.next = if is_hit { 0 } else { (2 * self.next).clamp(1, SKIPPED_COUNT_MAX) };
        self.left = self.next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of so many waits, those that are looked at.
    fn looks(wait: &mut ShortWait, count: usize, is_hit: bool) -> usize {
        let looked = (0..count).filter(|_| {
            let looks = wait.begin(2);
            if looks {
                wait.end(is_hit);
            }
            looks
        });
        looked.count()
    }

    #[test]
    fn who_finds_nothing_looks_ever_more_rarely() {
        let mut wait = ShortWait::default();
        assert_eq!(looks(&mut wait, 100, true), 100);
        assert!(looks(&mut wait, 1000, false) <= 12);
        // Each of them but the first is followed by as many skipped ones as there may be.
        assert_eq!(looks(&mut wait, 10 * (SKIPPED_COUNT_MAX as usize + 1), false), 10);
        assert!(looks(&mut wait, 1000, true) > 700, "one hit is enough");
    }

    #[test]
    fn on_one_processor_nothing_is_looked_for() {
        assert!(!ShortWait::default().begin(1));
    }

    #[test]
    fn what_is_found_is_given_and_a_look_in_vain_ends() {
        let mut wait = ShortWait::default();
        let mut left = 3;
        let mut look = || {
            left -= 1;
            (left == 0).then_some(7)
        };
        let found = wait.look(Duration::from_secs(3600), &mut look);
        assert_eq!(found, (cpu_count() > 1).then_some(7));
        assert_eq!(wait.look(Duration::ZERO, || None::<u8>), None);
    }
}
