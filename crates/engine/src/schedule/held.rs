//! For how long limits have held QPs back, those included that they hold now.
use super::Throttled;
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// Of one QP, or of a vNIC's QPs together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Waits that are over.
    past: Throttled,
    /// QPs that are held now.
    count: u64,
    /// Since when, the sum of all; it wraps.
    since: u64,
}

impl Held {
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Of one QP that is held.
    pub fn since(&self) -> Instant {
        Instant(self.since)
    }

    pub fn note_wait(&mut self) {
        self.past.waits += 1;
    }

    pub fn begin(&mut self, now: Instant) {
        self.count = self.count.saturating_add(1);
        self.since = self.since.wrapping_add(now.0);
    }

    pub fn end(&mut self, since: Instant, now: Instant) {
        self.count = self.count.saturating_sub(1);
        self.since = self.since.wrapping_sub(since.0);
        self.past.time = Duration(self.past.time.0.saturating_add((now - since).0));
    }

    /// All of it until now.
    pub fn until(&self, now: Instant) -> Throttled {
        let running = self.count.wrapping_mul(now.0).wrapping_sub(self.since) as i64;
        let time = self.past.time.0.saturating_add(running.max(0) as u64);
        Throttled { time: Duration(time), ..self.past }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_is_counted_and_never_taken_back() {
        let mut held = Held::default();
        // Far enough for the sum to wrap.
        let at = |ns: u64| Instant((1 << 63) + ns);
        for since in [0, 10, 30] {
            held.note_wait();
            held.begin(at(since));
        }
        let time = |held: &Held, now: u64| held.until(at(now)).time.0;
        assert_eq!((held.count(), time(&held, 30), time(&held, 40)), (3, 50, 80));
        for (since, left) in [(10, 2), (0, 1), (30, 0)] {
            let before = held.until(at(50));
            held.end(at(since), at(50));
            assert_eq!((held.until(at(50)), held.count()), (before, left));
        }
        assert_eq!(held.until(at(1000)), Throttled { waits: 3, time: Duration(50 + 40 + 20) });
        held.begin(at(7));
        assert_eq!(time(&held, 0), 110, "a clock that was read earlier");
    }
}
