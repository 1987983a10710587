//! Which vNICs' counters changed: the worker compares its counts now and then while it works, and
//! hands those that changed to the control thread, so that a machine without connections does
//! nothing at all.
use freeflow_engine::{VnicCounters, VnicId};
use freeflow_verbs::{Duration, Instant};
use std::collections::BTreeMap;

/// Counters are handed over this often while they change.
pub const INTERVAL: Duration = Duration::from_millis(250);

/// Counters that the control thread was notified of.
pub struct Publishing {
    /// Something happened since.
    pub(crate) pending: bool,
    pub(crate) at: Instant,
    pub(crate) notified: BTreeMap<VnicId, VnicCounters>,
}

impl Publishing {
    pub fn new() -> Self {
        Self { pending: false, at: Instant(0), notified: BTreeMap::new() }
    }

    pub fn note_busy(&mut self) {
        self.pending = true;
    }

    /// How long until [`Worker::publish_counters`] has something to do; `None`: nothing happened.
    pub fn due_in(&self, now: Instant) -> Option<Duration> {
        self.pending.then(|| self.at + INTERVAL - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_due_while_nothing_happens() {
        let mut publishing = Publishing::new();
        let now = Instant(0) + Duration::from_millis(1000);
        assert_eq!(publishing.due_in(now), None);
        publishing.note_busy();
        assert_eq!(publishing.due_in(now), Some(Duration(0)));
        publishing.at = now;
        assert_eq!(publishing.due_in(now + Duration::from_millis(100)), Some(Duration::from_millis(150)));
    }
}
