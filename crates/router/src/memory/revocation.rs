//! Taking granted memory back; see `grants` for what ends a grant.
//!
//! Holders of a grant learn of its end by a number in the header of their send queue; that is
//! enough for a library that keeps to the rules, and costs one store. But its process may keep the
//! descriptor. So where the owner's process goes on using the pages, it is *ordered* to put private
//! copies in their place: the segment is taken out of the router's page table, which from then on
//! reaches those bytes by the slow path, and once no copier has the segment in hand, its handle is
//! written into the process' command pipe. A process that does not say in time that it has done
//! so loses its session.
//!
//! An atomic that a library does by a grant when that ends is waited for: it counts, and must then be in what
//! the owner takes back. Until it is done (`insiders`) the segment stays in the page table, so that the router's own
//! atomics are of the same kind, no command is written, and the owner's verb is not answered. Whoever takes too long
//! for one loses the QP: in ERROR it reports no success, and nothing of it is done again.
//!
//! Owners that take their memory back themselves (UnmapPart, DestroySegment, the end of the session) need no
//! command.
//!
//! Invariant: a segment is in the worker's hands in one of three ways: exposed (`Grants`), leaving
//! (here; first perhaps held), or neither; and once it has been exposed, neither means that its lease is marked
//! revoked.
use crate::dataplane::event_pipes::Sent;
use crate::dataplane::ports::Ports;
use crate::memory::grants::{Exposed, Name};
use crate::memory::page_table::Origin;
use crate::memory::revoking::Held;
use freeflow_engine::{MrId, QpId, SessionId};
use freeflow_protocol::library::{COMMAND_BYTES, COMMAND_REVOKE, EVENT_BYTES};
use freeflow_shm::pause;
use freeflow_verbs::{Instant, VerbsError};
use std::ops::Range;

/// Looks at an atomic before it is waited for.
const INSIDER_LOOKS: u32 = 64;

// Commands go through the pipes of events, which are never lost either.
const _: () = assert!(COMMAND_BYTES == EVENT_BYTES);

impl Ports {
    /// A QP was granted something; gives the number by which it knows how long that holds.
    pub(crate) fn note_granted(&mut self, id: QpId, peer: QpId, cost: u64) -> u32 {
        self.begin_direct(id, peer);
        let Some(qp) = self.qps.get_mut(id) else { return 0 };
        qp.direct.grants_paid = qp.direct.grants_paid.saturating_add(cost);
        qp.direct.granted_at = Some(qp.direct.grants_revoked);
        qp.direct.grants_revoked
    }

    /// All that a QP was granted holds no longer: some of it is memory of this owner.
    fn note_revoked(&mut self, owner: SessionId, id: QpId) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        qp.direct.grants_revoked = qp.direct.grants_revoked.wrapping_add(1);
        qp.send.set_grants_revoked(qp.direct.grants_revoked);
        let Some(atomic) = qp.send.entered() else { return };
        if self.grants.leaving.insiders.knows(owner, id, atomic) {
            return;
        }
        // An atomic takes a moment, unless its thread does not run.
        for _ in 0..INSIDER_LOOKS {
            if !qp.send.is_inside(atomic) {
                return;
            }
            pause();
        }
        if let Some(session) = self.sessions.get(qp.session) {
            self.grants.leaving.insiders.add(owner, (id, session.vnic), atomic, self.now);
        }
    }

    /// An atomic that the QP's library does now never counts: for a QP that reports no success any more.
    /// Nor is it waited for, whatever the library says then.
    pub(crate) fn expel(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get(id) {
            qp.send.expel();
        }
        self.grants.leaving.insiders.remove(id);
    }

    /// Whether a verb of this session has to wait: an atomic may still change memory of it by a right that has ended.
    pub(crate) fn has_insiders(&self, owner: SessionId) -> bool {
        self.grants.leaving.insiders.has(owner)
    }

    /// Notifies all grantees of a segment: nothing of it is granted any longer.
    pub(crate) fn recall(&mut self, name: Name) {
        let grantees = self.grants.get(name).map(|exposed| exposed.grantees.keys().copied().collect::<Vec<_>>());
        for id in grantees.unwrap_or_default() {
            self.note_revoked(name.0, id);
        }
    }

    /// A QP stops doing anything directly, or its peer does: what was granted to it is taken back,
    /// and what was granted of its peer's memory too; but for what their processes have rightfully
    /// by other QPs.
    pub(crate) fn revoke_grants_of(&mut self, id: QpId) {
        for name in self.grants.of_qp(id) {
            match self.grants.release(name, id) {
                Some(gone) => gone.into_iter().for_each(|id| self.note_revoked(name.0, id)),
                None => self.revoke(name),
            }
        }
    }

    /// A region is about to end or to change.
    pub(crate) fn revoke_grants_by(&mut self, mr: MrId) {
        for name in self.grants.by_region(mr) {
            self.revoke(name);
        }
    }

    fn revoke(&mut self, name: Name) {
        self.recall(name);
        let Some(exposed) = self.grants.take(name) else { return };
        exposed.lease.mark_revoked();
        let held = Held { name, is_read_only: exposed.is_read_only(), segment: exposed.segment };
        if self.has_insiders(name.0) {
            self.grants.leaving.held.push(held);
        } else {
            self.begin_leaving(&held);
        }
    }

    fn begin_leaving(&mut self, held: &Held) {
        let &Held { name, is_read_only, ref segment } = held;
        self.settle(name.0);
        if let Some(owner) = self.sessions.get_mut(name.0) {
            if let Some(extent) = owner.memory.extent(segment) {
                owner.lost.begin(name.1, extent, is_read_only);
            }
            owner.memory.take_out(segment);
            self.grants.leaving.begin(name);
        }
    }

    /// After [`Self::recall`]: its owner has taken a segment back, or takes it back, as a whole.
    pub(crate) fn forget_grants_of(&mut self, name: Name) {
        self.forget(name);
        self.grants.leaving.segments.remove(&name);
        self.grants.leaving.held.retain(|held| held.name != name);
    }

    /// After [`Self::recall`].
    fn forget(&mut self, name: Name) {
        if let Some(exposed) = self.grants.take(name) {
            exposed.lease.mark_revoked();
        }
    }

    /// A process ends: there is nobody to command.
    pub(crate) fn forget_grants_of_session(&mut self, owner: SessionId) {
        for name in self.grants.of_owner(owner) {
            self.recall(name);
            self.forget_grants_of(name);
        }
        // Its library may go on for longer than they were waited for.
        for id in self.grants.leaving.forget_owner(owner) {
            if let Some(qp) = self.qps.get(id) {
                qp.send.expel();
            }
        }
    }

    /// A process takes back the parts of segments between these addresses. Those who were granted
    /// something of them are notified; they get nothing more of them. Gives the segments.
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

    /// A process has mapped more of a segment. Others must not reach that by a region in which it
    /// does not lie, nor in more ranges than can be revoked at once.
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
            self.revoke(name);
        }
        if origin.lease.is_revoked() { Err(VerbsError::NotSupported) } else { Ok(()) }
    }

    /// Sends the commands that wait for no copier, and ends the sessions that did not carry out
    /// theirs in time.
    #[inline]
    pub(crate) fn send_commands(&mut self, now: Instant) {
        if !self.grants.leaving.is_quiet() {
            self.send_commands_now(now);
        }
    }

    #[cold]
    fn send_commands_now(&mut self, now: Instant) {
        let qps = &self.qps;
        // One of a QP that is gone was expelled.
        let is_inside = |id, atomic| qps.get(id).is_some_and(|qp| qp.send.is_inside(atomic));
        self.grants.leaving.insiders.retain(is_inside);
        for held in self.grants.leaving.take_released() {
            self.begin_leaving(&held);
        }
        for name in std::mem::take(&mut self.grants.leaving.unsent) {
            if !self.grants.leaving.segments.contains_key(&name) {
                continue;
            }
            if self.is_segment_at_copier(name.0) {
                self.grants.leaving.unsent.push(name);
                continue;
            }
            self.grants.leaving.note_ordered(name, now + self.grants.time_max);
            let commands = self.sessions.get(name.0).and_then(|session| session.commands);
            if commands.is_none_or(|pipe| self.pipes.send(pipe, name.1, COMMAND_REVOKE) == Sent::TooMuch) {
                self.fail(name.0, "its revoke commands are not read");
            }
        }
        while let Some(name) = self.grants.leaving.poll_late(now) {
            self.fail(name.0, "it did not take memory back that others had been granted");
        }
        self.send_share_commands();
    }
}
