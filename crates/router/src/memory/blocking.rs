//! Copies that blocked the worker, and vNICs whose copies it leaves to their slow-path copier for that.
//!
//! A page that is missing never blocks (`copies`). A page that is there can: while its owner
//! punches a hole around it, while it is read from swap, or while its owner's memory cgroup
//! reclaims. The worker looks for that where it costs nothing: a turn that took long and in which
//! the thread was switched out voluntarily makes it *alert* for a while. When alert it touches both
//! sides of each copy by themselves, and asks the kernel after each whether it was switched out.
//! The vNIC whose memory did that is *avoided*: until a deadline all copies from and to its memory
//! go by its own slow-path copier, so that no one else waits. Each further time doubles that; time
//! without halves it again, for the worker may have waited for something else.
use freeflow_engine::VnicId;
use freeflow_shm::{monotonic_ns, voluntary_switch_count};
use freeflow_verbs::{Duration, Instant};

/// A turn, or one side of a copy, that took less than this was not blocked long enough to matter.
pub const BLOCKED_MIN: Duration = Duration::from_micros(200);
/// The worker stays alert this long after a turn that blocked, or after the last vNIC that it avoids.
pub(crate) const ALERT: Duration = Duration::from_millis(1000);
/// How long a vNIC is avoided the first time; it doubles with each further time.
pub(crate) const AVOIDED: Duration = Duration::from_millis(10_000);
pub(crate) const DOUBLING_COUNT_MAX: u32 = 6;
/// Each such time in which a vNIC is neither avoided nor blocks takes back one doubling.
pub(crate) const FORGIVEN: Duration = Duration::from_millis(1_200_000);

/// Tells whether this thread has been blocked by the kernel since it was started.
pub(crate) struct BlockedStopwatch {
    began_ns: u64,
    switch_count: u64,
}

impl BlockedStopwatch {
    pub(crate) fn start() -> Self {
        Self { began_ns: monotonic_ns(), switch_count: voluntary_switch_count() }
    }

    pub(crate) fn is_blocked(&self) -> bool {
        monotonic_ns() - self.began_ns > BLOCKED_MIN.0 && voluntary_switch_count() != self.switch_count
    }
}

struct Avoided {
    vnic: VnicId,
    until: Instant,
    times: u32,
}

#[derive(Default)]
pub struct Blocks {
    pub(crate) alert_until: Instant,
    /// Voluntary switches of the worker's thread when it last looked.
    pub(crate) switch_count: u64,
    avoided: Vec<Avoided>,
}

impl Blocks {
    #[inline]
    pub fn is_alert(&self, now: Instant) -> bool {
        now < self.alert_until
    }

    /// The worker was asleep, as it wanted.
    pub fn note_slept(&mut self) {
        self.switch_count = voluntary_switch_count();
    }

    /// A turn began at `before`, and the next begins now.
    #[inline]
    pub fn note_turn(&mut self, before: Instant, now: Instant) {
        if now - before > BLOCKED_MIN {
            self.look(now);
        }
    }

    #[cold]
    pub(crate) fn look(&mut self, now: Instant) {
        let count = voluntary_switch_count();
        if std::mem::replace(&mut self.switch_count, count) != count {
            self.alert_until = self.alert_until.max(now + ALERT);
        }
    }

    pub(crate) fn avoids(&self, vnic: VnicId, now: Instant) -> bool {
        self.avoided.iter().any(|avoided| avoided.vnic == vnic && now < avoided.until)
    }

    pub fn avoid(&mut self, vnic: VnicId, now: Instant) {
        let at = self.avoided.iter().position(|avoided| avoided.vnic == vnic).unwrap_or_else(|| {
            self.avoided.push(Avoided { vnic, until: now, times: 0 });
            self.avoided.len() - 1
        });
        let avoided = &mut self.avoided[at];
        if now > avoided.until {
            avoided.times = avoided.times.saturating_sub(((now - avoided.until).0 / FORGIVEN.0) as u32);
        }
        avoided.until = now + Duration(AVOIDED.0 << avoided.times);
        avoided.times = (avoided.times + 1).min(DOUBLING_COUNT_MAX);
        self.alert_until = self.alert_until.max(avoided.until + ALERT);
    }

    pub fn forget(&mut self, vnic: VnicId) {
        self.avoided.retain(|avoided| avoided.vnic != vnic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    fn vnic(index: u32) -> VnicId {
        VnicId { index, generation: 0 }
    }

    #[test]
    fn who_blocks_is_avoided_for_longer_each_time() {
        let mut blocks = Blocks::default();
        assert!(!blocks.is_alert(at(1)));
        blocks.avoid(vnic(1), at(0));
        assert!(blocks.avoids(vnic(1), at(9_999)) && !blocks.avoids(vnic(1), at(10_000)));
        assert!(!blocks.avoids(vnic(2), at(1)));
        assert!(blocks.is_alert(at(10_999)) && !blocks.is_alert(at(11_000)));
        blocks.avoid(vnic(1), at(20_000));
        assert!(blocks.avoids(vnic(1), at(39_999)) && !blocks.avoids(vnic(1), at(40_000)));
        for _ in 0..40 {
            blocks.avoid(vnic(1), at(50_000));
        }
        assert!(blocks.avoids(vnic(1), at(50_000 + 639_999)) && !blocks.avoids(vnic(1), at(50_000 + 640_000)));
        blocks.forget(vnic(1));
        assert!(!blocks.avoids(vnic(1), at(50_000)));
    }

    #[test]
    fn quiet_time_is_counted_for_a_vnic() {
        let mut blocks = Blocks::default();
        for _ in 0..9 {
            blocks.avoid(vnic(1), at(0));
        }
        let quiet = 640_000 + 6 * 1_200_000;
        blocks.avoid(vnic(1), at(quiet - 1));
        assert!(blocks.avoids(vnic(1), at(quiet + 19_000)), "five doublings are taken back, one is not");
        assert!(!blocks.avoids(vnic(1), at(quiet + 20_000)));
        blocks.avoid(vnic(1), at(quiet * 3));
        assert!(blocks.avoids(vnic(1), at(quiet * 3 + 9_000)) && !blocks.avoids(vnic(1), at(quiet * 3 + 10_000)));
    }

    #[test]
    fn only_a_long_turn_that_was_switched_out_alerts() {
        let mut blocks = Blocks::default();
        blocks.note_slept();
        blocks.note_turn(at(0), at(50));
        assert!(!blocks.is_alert(at(50)), "nobody switched this thread out");
        std::thread::sleep(std::time::Duration::from_millis(1));
        blocks.note_turn(at(50), Instant(at(50).0 + 100_000));
        assert!(!blocks.is_alert(at(51)), "a short turn");
        blocks.note_turn(at(51), at(52));
        assert!(blocks.is_alert(at(52)));
        std::thread::sleep(std::time::Duration::from_millis(1));
        blocks.note_slept();
        blocks.note_turn(at(9_000), at(9_001));
        assert!(!blocks.is_alert(at(9_001)), "it slept between turns");
    }
}
