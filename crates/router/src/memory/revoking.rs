//! Segments that processes have to take back, and until when; and atomics by grants that are waited for before.
use crate::memory::grants::Name;
use crate::memory::insiders::Insiders;
use crate::memory::share_commands::ShareCommand;
use freeflow_engine::{QpId, SessionId};
use freeflow_shm::Segment;
use freeflow_verbs::{Duration, Instant};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// How soon a command is tried again that has to wait for a copier.
pub(crate) const COMMAND_INTERVAL: Duration = Duration::from_millis(10);

/// How soon an atomic is looked at again.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// A revoked segment that an atomic may still change.
pub(crate) struct Held {
    pub(crate) name: Name,
    pub(crate) segment: Arc<Segment>,
    pub(crate) is_read_only: bool,
}

/// Segments that processes have to take back.
#[derive(Default)]
pub(crate) struct Leaving {
    /// Until when, if the command is sent.
    pub(crate) segments: BTreeMap<Name, Option<Instant>>,
    /// Segments whose command is not sent yet.
    pub(crate) unsent: Vec<Name>,
    /// Commands, oldest first; also of segments that have left.
    pub(crate) deadlines: VecDeque<(Instant, Name)>,
    /// Until when a process that has just carried out one command has time for its others.
    pub(crate) renewed: BTreeMap<SessionId, Instant>,
    /// Atomics that are waited for, and the segments that wait for those of their owner.
    pub(crate) insiders: Insiders,
    pub(crate) held: Vec<Held>,
    /// Memory that processes shall share.
    pub(crate) wanted: Vec<ShareCommand>,
}

impl Leaving {
    pub(crate) fn begin(&mut self, name: Name) {
        self.segments.insert(name, None);
        self.unsent.push(name);
    }

    pub(crate) fn note_ordered(&mut self, name: Name, deadline: Instant) {
        self.segments.insert(name, Some(deadline));
        self.deadlines.push_back((deadline, name));
    }

    /// The process has done it, and has until `deadline` for the next. False: it was not asked to.
    pub(crate) fn confirm(&mut self, name: Name, deadline: Instant) -> bool {
        let is_ordered = matches!(self.segments.get(&name), Some(Some(_)));
        if is_ordered {
            self.segments.remove(&name);
            self.renewed.insert(name.0, deadline);
        }
        is_ordered
    }

    /// Nobody is late before `until`.
    pub(crate) fn postpone(&mut self, until: Instant) {
        for (deadline, _) in &mut self.deadlines {
            *deadline = until.max(*deadline);
        }
    }

    /// Segments that wait for no atomic any more.
    pub(crate) fn take_released(&mut self) -> Vec<Held> {
        let insiders = &self.insiders;
        let is_free = |held: &mut Held| !insiders.has(held.name.0);
        self.held.extract_if(.., is_free).collect()
    }

    /// A process ends. → the QPs whose atomics are waited for no longer.
    pub(crate) fn forget_owner(&mut self, owner: SessionId) -> Vec<QpId> {
        self.segments.retain(|name, _| name.0 != owner);
        self.renewed.remove(&owner);
        self.held.retain(|held| held.name.0 != owner);
        self.insiders.forget_owner(owner)
    }

    /// The next that was not confirmed in time.
    pub(crate) fn poll_late(&mut self, now: Instant) -> Option<Name> {
        while let Some(&(deadline, name)) = self.deadlines.front()
            && (deadline <= now || !self.segments.contains_key(&name))
        {
            self.deadlines.pop_front();
            if !self.segments.contains_key(&name) {
                continue;
            }
            // They are carried out one after the other.
            match self.renewed.get(&name.0) {
                Some(&renewed) if renewed > now => self.deadlines.push_back((renewed, name)),
                _ => return Some(name),
            }
        }
        None
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.unsent.is_empty() && self.deadlines.is_empty() && self.wanted.is_empty() && !self.has_waiting()
    }

    /// Something waits for an atomic, or waited until now.
    fn has_waiting(&self) -> bool {
        !self.insiders.is_empty() || !self.held.is_empty()
    }

    /// When something is to be done about it.
    pub(crate) fn due_in(&self, now: Instant) -> Option<Duration> {
        let deadline = self.deadlines.front().map(|&(at, _)| at - now);
        let command = (!self.unsent.is_empty() || !self.wanted.is_empty()).then_some(COMMAND_INTERVAL);
        let look = self.has_waiting().then_some(LOOK_INTERVAL);
        [deadline, command, look].into_iter().flatten().min()
    }
}

impl crate::memory::grants::Grants {
    pub(crate) fn due_in(&self, now: Instant) -> Option<Duration> {
        self.leaving.due_in(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_carries_out_one_command_after_the_other_is_not_late() {
        let session = |index| SessionId { index, generation: 0 };
        let at = |seconds: u64| Instant(seconds * 1_000_000_000);
        let mut leaving = Leaving::default();
        for name in [(session(1), 1), (session(1), 2), (session(1), 3), (session(2), 1)] {
            leaving.begin(name);
            leaving.note_ordered(name, at(30));
        }
        assert!(leaving.confirm((session(1), 1), at(55)) && !leaving.confirm((session(1), 1), at(99)));
        assert_eq!(leaving.poll_late(at(29)), None);
        assert_eq!(leaving.poll_late(at(31)), Some((session(2), 1)), "it has carried out none");
        assert_eq!(leaving.poll_late(at(31)), None);
        assert!(leaving.confirm((session(1), 3), at(60)));
        assert_eq!(leaving.poll_late(at(56)), None);
        assert_eq!(leaving.poll_late(at(61)), Some((session(1), 2)));
        leaving.forget_owner(session(1));
        assert!(leaving.renewed.is_empty());
        // The router itself was stopped when the time was over.
        leaving.begin((session(3), 1));
        leaving.note_ordered((session(3), 1), at(90));
        leaving.postpone(at(150));
        assert_eq!(leaving.poll_late(at(149)), None);
        assert_eq!(leaving.poll_late(at(151)), Some((session(3), 1)));
    }
}
