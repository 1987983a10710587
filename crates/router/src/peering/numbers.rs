//! Numbers of hosts, by which the worker and the control thread know them.
//!
//! A host keeps its number while it is in the peers file, and after it has left: it may be back. QPs and connections
//! that led to it name that number for as long as they are there, so nobody else gets it while there are others. Only
//! when all have been given the one that left first gives its own up, and not before [`NUMBER_KEPT`] has passed. A QP
//! that still names it then finds the new host as it would find another run of the router that was there: that one is
//! asked whether its QP is connected back, within its own prefixes.
use freeflow_engine::HostId;
use freeflow_verbs::{Duration, Instant};
use std::collections::{BTreeMap, BTreeSet};

/// How long the number of a host that has left the file is its own, at least: longer than any request waits.
pub const NUMBER_KEPT: Duration = Duration::from_millis(3_600_000);

pub struct Numbers {
    /// The largest one; the smallest is 1.
    max: u32,
    by_name: BTreeMap<String, HostId>,
    /// Hosts that are not in the file any more, and since when.
    left_at: BTreeMap<String, Instant>,
    left: BTreeSet<(Instant, String)>,
}

impl Numbers {
    pub fn new(max: u32) -> Self {
        Self { max, by_name: BTreeMap::new(), left_at: BTreeMap::new(), left: BTreeSet::new() }
    }

    /// Of a host that is in the file, or was.
    pub fn of(&self, name: &str) -> Option<HostId> {
        self.by_name.get(name).copied()
    }

    /// The number of a host that is in the file now. `None`: others have them all.
    pub fn take(&mut self, now: Instant, name: &str) -> Option<HostId> {
        if let Some(number) = self.of(name) {
            if let Some(at) = self.left_at.remove(name) {
                self.left.remove(&(at, name.into()));
            }
            return Some(number);
        }
        let number = match u32::try_from(self.by_name.len()) {
            Ok(count) if count < self.max => HostId(count + 1),
            _ => self.take_back(now)?,
        };
        self.by_name.insert(name.into(), number);
        Some(number)
    }

    /// The number of the host that left first, if that is long ago.
    fn take_back(&mut self, now: Instant) -> Option<HostId> {
        if self.left.first()?.0 + NUMBER_KEPT > now {
            return None;
        }
        let (_, name) = self.left.pop_first()?;
        self.left_at.remove(&name);
        self.by_name.remove(&name)
    }

    /// A host is not in the file any more.
    pub fn leave(&mut self, now: Instant, name: &str) {
        if self.by_name.contains_key(name) && !self.left_at.contains_key(name) {
            self.left_at.insert(name.into(), now);
            self.left.insert((now, name.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_another_hosts_only_when_none_is_left_and_its_own_is_long_gone() {
        let (mut numbers, mut now) = (Numbers::new(3), Instant(5));
        for (name, number) in [("a", 1), ("b", 2), ("a", 1), ("c", 3)] {
            assert_eq!(numbers.take(now, name), Some(HostId(number)));
        }
        assert_eq!(numbers.take(now, "d"), None, "all are in the file");
        for name in ["b", "a", "x"] {
            numbers.leave(now, name);
            now = now + Duration(10);
        }
        assert_eq!((numbers.take(now, "d"), numbers.of("b")), (None, Some(HostId(2))), "they may be back");
        // One is, for a while.
        assert_eq!(numbers.take(now, "b"), Some(HostId(2)));
        numbers.leave(now, "b");
        now = now + NUMBER_KEPT;
        assert_eq!((numbers.take(now, "d"), numbers.of("a")), (Some(HostId(1)), None), "that one left first");
        assert_eq!((numbers.take(now, "e"), numbers.of("b")), (Some(HostId(2)), None));
        assert_eq!((numbers.take(now, "a"), numbers.take(now, "e")), (None, Some(HostId(2))));
    }
}
