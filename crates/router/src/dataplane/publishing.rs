//! Which vNICs' counters changed: the worker compares its counts now and then while it works, and hands those that changed to the
//! control thread, so that a machine without connections does nothing at all.
use crate::dataplane::event::Counted;
use crate::dataplane::worker::Worker;
use freeflow_engine::{VnicCounters, VnicId};
use freeflow_verbs::{Duration, Instant};
use std::collections::BTreeMap;

/// Counters are handed over this often while they change.
pub const INTERVAL: Duration = Duration::from_millis(250);

/// Counters that the control thread was notified of.
pub struct Publishing {
    /// Something happened since.
    pending: bool,
    at: Instant,
    notified: BTreeMap<VnicId, VnicCounters>,
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

impl Worker {
    /// Hands the counters that changed to the control thread, not more often than every [`INTERVAL`].
    pub(crate) fn publish_counters(&mut self, now: Instant) {
        const NOW: Option<Duration> = Some(Duration(0));
        let is_due = self.publishing.due_in(now) == NOW;
        // Both at the same time, if both have something to say.
        if self.rings.watch.due_in(now) == NOW || is_due && self.rings.watch.is_busy() {
            let Some(has_grown) = self.watch_direct(now) else { return };
            self.publishing.pending |= has_grown;
        }
        if self.publishing.due_in(now) != NOW {
            return;
        }
        self.publishing.pending = false;
        self.publishing.at = now;
        let mut changed = Vec::new();
        for (id, _) in self.rings.vnics.iter() {
            let counters = self.engine.vnic_counters(id).unwrap_or_default();
            if self.publishing.notified.insert(id, counters).unwrap_or_default() != counters {
                changed.push((id, counters));
            }
        }
        if self.publishing.notified.len() > self.rings.vnics.len() {
            self.publishing.notified.retain(|&id, _| self.rings.vnics.get(id).is_some());
        }
        if !changed.is_empty() {
            self.notify_control(Counted { counters: changed });
        }
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
