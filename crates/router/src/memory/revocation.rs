//! Taking granted memory back; see `grants` for what ends a grant.
//!
//! Who was granted something is told by a number in the header of its send queue; that is enough for a library that keeps
//! to the rules, and costs one store. But its process may keep the descriptor. So where the owner's process goes on using
//! the pages, it is *ordered* to put private copies in their place: the segment is taken out of the router's page table,
//! which from then on reaches those bytes by the fallback, and once no helper has the segment in hand, its handle is
//! written into the process' pipe of orders. A process that does not say in time that it has done so loses its session.
//!
//! Owners that take their memory back themselves (UnmapPart, DestroySegment, the end of the session) need no order.
//!
//! Invariant: a segment is in the worker's hands in one of three ways: exposed (`Grants`), leaving (here), or neither; and once it
//! has been exposed, neither means that its lease is marked withdrawn.
use crate::dataplane::event_pipes::Sent;
use crate::dataplane::ports::Rings;
use crate::memory::grants::{Exposed, Name};
use crate::memory::page_table::Origin;
use freeflow_engine::{MrId, QpId, SessionId};
use freeflow_protocol::library::{EVENT_BYTES, ORDER_BYTES, ORDER_TAKE_BACK};
use freeflow_verbs::{Duration, Instant, VerbsError};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

// Orders go through the pipes of events, which are never lost either.
const _: () = assert!(ORDER_BYTES == EVENT_BYTES);

/// How soon an order is tried again that has to wait for a helper.
const ORDER_INTERVAL: Duration = Duration::from_millis(10);

/// Segments that processes have to take back.
#[derive(Default)]
pub(crate) struct Leaving {
    /// Until when, if the order is given.
    segments: BTreeMap<Name, Option<Instant>>,
    /// Whose order is not given yet.
    unordered: Vec<Name>,
    /// Orders, oldest first; also of segments that have left.
    deadlines: VecDeque<(Instant, Name)>,
    /// Until when a process that has just carried out one order has time for its others.
    renewed: BTreeMap<SessionId, Instant>,
    /// What was withdrawn and shall be shared again.
    pub(crate) wanted: Vec<Name>,
}

impl Leaving {
    fn begin(&mut self, name: Name) {
        self.segments.insert(name, None);
        self.unordered.push(name);
    }

    fn note_ordered(&mut self, name: Name, deadline: Instant) {
        self.segments.insert(name, Some(deadline));
        self.deadlines.push_back((deadline, name));
    }

    /// The process has done it, and has until `deadline` for the next. False: it was not told to.
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

    fn forget_owner(&mut self, owner: SessionId) {
        self.segments.retain(|name, _| name.0 != owner);
        self.renewed.remove(&owner);
    }

    /// The next that was not confirmed in time.
    fn poll_late(&mut self, now: Instant) -> Option<Name> {
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

    fn is_quiet(&self) -> bool {
        self.unordered.is_empty() && self.deadlines.is_empty() && self.wanted.is_empty()
    }

    /// When something is to be done about it.
    fn due_in(&self, now: Instant) -> Option<Duration> {
        let deadline = self.deadlines.front().map(|&(at, _)| at - now);
        let order = (!self.unordered.is_empty() || !self.wanted.is_empty()).then_some(ORDER_INTERVAL);
        [deadline, order].into_iter().flatten().min()
    }
}

impl crate::memory::grants::Grants {
    pub(crate) fn due_in(&self, now: Instant) -> Option<Duration> {
        self.leaving.due_in(now)
    }
}

impl Rings {
    /// A QP was granted something; gives the number by which it knows how long that holds.
    pub(crate) fn note_granted(&mut self, id: QpId, peer: QpId, cost: u64) -> u32 {
        self.begin_direct(id, peer);
        let Some(qp) = self.qps.get_mut(id) else { return 0 };
        qp.direct.grants_paid = qp.direct.grants_paid.saturating_add(cost);
        qp.direct.granted_at = Some(qp.direct.grants_withdrawn);
        qp.direct.grants_withdrawn
    }

    /// All that a QP was granted holds no longer.
    fn note_withdrawn(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id) {
            qp.direct.grants_withdrawn = qp.direct.grants_withdrawn.wrapping_add(1);
            qp.send.set_grants_withdrawn(qp.direct.grants_withdrawn);
        }
    }

    /// Tells all who hold a segment.
    fn recall(&mut self, name: Name) {
        let holders = self.grants.get(name).map(|exposed| exposed.holders.keys().copied().collect::<Vec<_>>());
        for id in holders.unwrap_or_default() {
            self.note_withdrawn(id);
        }
    }

    /// A QP stops doing anything directly, or its peer does: what was granted to it is taken back, and what was granted of
    /// its peer's memory too; but for what their processes have rightfully by other QPs.
    pub(crate) fn withdraw_grants_of(&mut self, id: QpId) {
        for name in self.grants.of_qp(id) {
            match self.grants.release(name, id) {
                Some(gone) => gone.into_iter().for_each(|id| self.note_withdrawn(id)),
                None => self.withdraw(name),
            }
        }
    }

    /// A region is about to end or to change.
    pub(crate) fn withdraw_grants_by(&mut self, mr: MrId) {
        for name in self.grants.by_region(mr) {
            self.withdraw(name);
        }
    }

    fn withdraw(&mut self, name: Name) {
        self.recall(name);
        let Some(exposed) = self.grants.take(name) else { return };
        exposed.lease.mark_withdrawn();
        self.settle(name.0);
        if let Some(owner) = self.sessions.get_mut(name.0) {
            if let Some(extent) = owner.memory.extent(&exposed.segment) {
                owner.lost.begin(name.1, extent, exposed.is_read_only());
            }
            owner.memory.take_out(&exposed.segment);
            self.grants.leaving.begin(name);
        }
    }

    /// Its owner has taken a segment back, or takes it back, as a whole.
    pub(crate) fn forget_grants_of(&mut self, name: Name) {
        self.recall(name);
        self.forget(name);
        self.grants.leaving.segments.remove(&name);
    }

    /// After [`Self::recall`].
    fn forget(&mut self, name: Name) {
        if let Some(exposed) = self.grants.take(name) {
            exposed.lease.mark_withdrawn();
        }
    }

    /// A process ends: there is nobody to order anything.
    pub(crate) fn forget_grants_of_session(&mut self, owner: SessionId) {
        for name in self.grants.of_owner(owner) {
            self.forget_grants_of(name);
        }
        self.grants.leaving.forget_owner(owner);
    }

    /// A process takes back the parts of segments between these addresses. Those who were granted something of them are told;
    /// they get nothing more of them. Gives the segments.
    pub(crate) fn recall_grants(&mut self, owner: SessionId, addresses: Range<u64>) -> Vec<Name> {
        if !self.grants.has_owner(owner) {
            return Vec::new();
        }
        let Some(session) = self.sessions.get(owner) else { return Vec::new() };
        let handles = session.memory.parts_between(addresses.start, addresses.end);
        let names: Vec<Name> = handles.into_iter().map(|handle| (owner, handle)).collect();
        for &name in &names {
            self.recall(name);
        }
        names
    }

    /// After [`Self::recall_grants`]: of some of them nothing is left.
    pub(crate) fn forget_unmapped(&mut self, owner: SessionId, names: Vec<Name>) {
        for name in names {
            let (Some(session), Some(exposed)) = (self.sessions.get(owner), self.grants.get(name)) else { continue };
            if !session.memory.has(&exposed.segment) {
                self.forget(name);
            }
        }
    }

    /// A process has mapped more of a segment. Others must not reach that by a region in which it does not lie, nor in more ranges
    /// than can be withdrawn at once.
    pub(crate) fn admit_mapping(
        &mut self,
        owner: SessionId,
        origin: &Origin,
        addresses: &Range<u64>,
    ) -> Result<(), VerbsError> {
        let name = (owner, origin.handle);
        let is_inside = |region: &Range<u64>| region.start <= addresses.start && addresses.end <= region.end;
        let memory = self.sessions.get(owner).map(|session| &session.memory);
        let stays = |exposed: &Exposed| {
            let is_few = memory.is_some_and(|memory| memory.has_few_ranges(&exposed.segment));
            is_few && exposed.regions.values().all(is_inside)
        };
        if self.grants.get(name).is_some_and(|exposed| !stays(exposed)) {
            self.withdraw(name);
        }
        if origin.lease.is_withdrawn() { Err(VerbsError::NotSupported) } else { Ok(()) }
    }

    /// Writes the orders that no helper stands in the way of, and ends the sessions that did not carry out theirs.
    #[inline]
    pub(crate) fn give_orders(&mut self, now: Instant) {
        if !self.grants.leaving.is_quiet() {
            self.give_orders_now(now);
        }
    }

    #[cold]
    fn give_orders_now(&mut self, now: Instant) {
        for name in std::mem::take(&mut self.grants.leaving.unordered) {
            if !self.grants.leaving.segments.contains_key(&name) {
                continue;
            }
            if self.is_segment_at_helper(name.0) {
                self.grants.leaving.unordered.push(name);
                continue;
            }
            self.grants.leaving.note_ordered(name, now + self.grants.time_max);
            let orders = self.sessions.get(name.0).and_then(|session| session.orders);
            if orders.is_none_or(|pipe| self.pipes.send(pipe, name.1, ORDER_TAKE_BACK) == Sent::TooMuch) {
                self.fail(name.0, "its orders are not read");
            }
        }
        while let Some(name) = self.grants.leaving.poll_late(now) {
            self.fail(name.0, "it did not take memory back that others had been granted");
        }
        self.give_share_orders();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_carries_out_one_order_after_the_other_is_not_late() {
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
