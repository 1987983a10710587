//! Counters that changed are handed to the control thread.
use crate::dataplane::event::Counted;
use crate::dataplane::worker::Worker;
use freeflow_verbs::{Duration, Instant};

impl Worker {
    /// Hands the counters that changed to the control thread, not more often than every [`INTERVAL`].
    pub(crate) fn publish_counters(&mut self, now: Instant) {
        const NOW: Option<Duration> = Some(Duration(0));
        let is_due = self.publishing.due_in(now) == NOW;
        // Both at the same time, if both have something to say.
        if self.ports.watch.due_in(now) == NOW || is_due && self.ports.watch.is_busy() {
            let Some(has_grown) = self.watch_direct(now) else { return };
            self.publishing.pending |= has_grown;
        }
        if self.publishing.due_in(now) != NOW {
            return;
        }
        self.publishing.pending = false;
        self.publishing.at = now;
        let mut changed = Vec::new();
        for (id, _) in self.ports.vnics.iter() {
            let counters = self.engine.vnic_counters(id).unwrap_or_default();
            if self.publishing.notified.insert(id, counters).unwrap_or_default() != counters {
                changed.push((id, counters));
            }
        }
        if self.publishing.notified.len() > self.ports.vnics.len() {
            self.publishing.notified.retain(|&id, _| self.ports.vnics.get(id).is_some());
        }
        if !changed.is_empty() {
            self.notify_control(Counted { counters: changed });
        }
    }
}
