//! Which path the requests of a QP take, and what became of its questions for a better one.
use crate::dataplane::datagram_rings::RingState;
use crate::dataplane::reasons::{Reason, done_directly};
use crate::dataplane::worker::Worker;
use crate::memory::grants::{GrantRequest, Verdict};
use freeflow_engine::{NotDirect, NotGrantable, QpId, QpStatus as Look};
use freeflow_protocol::admin::QpPath;
use freeflow_protocol::library::GrantAccess;
use freeflow_shm::DIRECT_RING_MESSAGE_BYTES_MAX;
use freeflow_verbs::{QpState, QpType, SendOpcode, VerbsError};
use std::ops::Range;

/// Requests through the router after which a library that does its part has asked for something.
const MESSAGES_BEFORE_ASKING: u64 = 64;

/// Conditions under which a kind of request is direct.
struct Needs {
    /// So many bytes of a message.
    direct_ring: Option<u64>,
    grant: Option<GrantAccess>,
}

impl Needs {
    /// Of a request. WRITEs without bytes need no memory.
    fn of(opcode: SendOpcode, bytes: u64) -> Result<Self, Reason> {
        let needs = |direct_ring, grant| Ok(Self { direct_ring, grant });
        match opcode {
            SendOpcode::Send | SendOpcode::SendWithImmediate => needs(Some(bytes), None),
            SendOpcode::RdmaWriteWithImmediate => needs(Some(0), (bytes > 0).then_some(GrantAccess::Write)),
            _ => GrantAccess::of(opcode).map_or(Err(Reason::Operation), |access| needs(None, Some(access))),
        }
    }
}

impl Worker {
    /// The path of a QP's last request, and why it is not a better one.
    pub(crate) fn path_of(&self, id: QpId, look: &Look) -> (QpPath, Option<Reason>) {
        if look.is_wire {
            return (QpPath::Wire, None);
        }
        match self.why_routed(id, look) {
            Some(reason) => (QpPath::Routed, Some(reason)),
            None => (QpPath::Direct, None),
        }
    }

    fn why_routed(&self, id: QpId, look: &Look) -> Option<Reason> {
        let is_datagram = self.ports.qps.get(id).is_some_and(|qp| qp.service == QpType::Ud);
        if is_datagram && self.ports.qps.get(id).is_some_and(|qp| qp.direct.routed_at != done_directly(&qp.send)) {
            // Not of that peer, perhaps, which the router carried the last one to.
            if self.uses_datagram_ring(id) {
                return None;
            }
        }
        let found = if is_datagram { self.engine.last_datagram_peer(id) } else { self.engine.direct_peer(id) };
        let to = match found {
            Ok(peer) => peer,
            Err(NotDirect::NoPeer) if is_datagram => return Some(Reason::NoLocalPeer),
            Err(reason) => return Some(Reason::of(reason, look.state)),
        };
        let peer = self.engine.qp_status(to).map(|peer| peer.vnic);
        let is_routed = |vnic| self.ports.vnics.get(vnic).is_none_or(|entry| !self.ports.policy.allows(entry.network));
        // The peer may be of another network.
        if is_routed(look.vnic) || peer.is_some_and(is_routed) {
            return Some(Reason::Policy);
        }
        let is_guest = |vnic| self.ports.vnics.get(vnic).is_some_and(|entry| entry.is_guest);
        if is_guest(look.vnic) || peer.is_some_and(is_guest) {
            return Some(Reason::Guest);
        }
        if self.engine.is_metered(look.vnic) || peer.is_some_and(|peer| self.engine.is_metered(peer)) {
            return Some(Reason::Metered);
        }
        if is_datagram {
            return Some(self.why_no_datagram_ring(id, to));
        }
        let entry = self.ports.qps.get(id)?;
        let holds_something = self.uses_direct_ring(id) || self.granted(id);
        if holds_something && entry.direct.routed_at != done_directly(&entry.send) {
            return None;
        }
        let (opcode, bytes) = look.last;
        match Needs::of(opcode, bytes) {
            Ok(needs) => {
                let by_direct_ring = needs.direct_ring.and_then(|bytes| self.why_no_direct_ring(id, bytes));
                by_direct_ring.or_else(|| needs.grant.and_then(|access| self.why_no_grant(id, access)))
            }
            Err(reason) => Some(reason),
        }
    }

    fn why_no_datagram_ring(&self, id: QpId, to: QpId) -> Reason {
        if self.engine.srq_of(to).is_some() {
            return Reason::SharedReceives;
        }
        let taken = self.ports.qps.get(id).map_or(0, |qp| qp.send.taken());
        match self.datagram_ring_state(id, to) {
            RingState::Missing => self.not_asked(id),
            RingState::Offered => Reason::NotAccepted,
            // Full, or left by its receiver: that can be seen in its memory alone.
            RingState::Accepted(before) if taken != before => Reason::NotAccepted,
            RingState::Accepted(_) => Reason::NotAsked,
        }
    }

    fn why_no_direct_ring(&self, id: QpId, bytes: u64) -> Option<Reason> {
        let peer = match self.engine.direct_peer(id) {
            Ok(peer) => peer,
            Err(reason) => return Some(Reason::of(reason, QpState::ReadyToSend)),
        };
        if bytes > u64::from(DIRECT_RING_MESSAGE_BYTES_MAX) {
            return Some(Reason::TooLong);
        }
        if self.engine.srq_of(peer).is_some() && self.ports.qps.get(id).is_some_and(|qp| qp.service == QpType::Uc) {
            return Some(Reason::SharedReceives);
        }
        if self.uses_direct_ring(id) {
            return None;
        }
        let is_open = self.ports.qps.get(id).is_some_and(|qp| qp.direct.has_direct_ring());
        Some(if is_open { Reason::NotAccepted } else { self.not_asked(id) })
    }

    fn why_no_grant(&self, id: QpId, access: GrantAccess) -> Option<Reason> {
        let asked = self.ports.qps.get(id)?.direct.asked;
        let granted = self.granted(id);
        match asked.refused[access as usize] {
            // By then it lies where nobody else reaches it.
            Some(Reason::NotShared) if asked.granted && !granted => Some(Reason::TakenBack),
            Some(reason) => Some(reason),
            None if granted => None,
            None if asked.granted => Some(Reason::TakenBack),
            None => Some(self.not_asked(id)),
        }
    }

    fn not_asked(&self, id: QpId) -> Reason {
        let has_asked = self.ports.qps.get(id).is_some_and(|qp| qp.direct.asked.ever);
        let sent = self.engine.qp_traffic(id).map_or(0, |traffic| traffic.messages_sent);
        if has_asked || sent < MESSAGES_BEFORE_ASKING { Reason::NotAsked } else { Reason::NeverAsked }
    }

    /// [`Worker::grant`], with a note of what came of it.
    pub(crate) fn grant_and_note(&mut self, id: QpId, request: &GrantRequest) -> Result<Verdict, VerbsError> {
        let verdict = self.grant(id, request);
        let refused = match &verdict {
            Ok(Verdict::Given(_)) => None,
            Ok(Verdict::NotEnoughCredit { .. }) => Some(Reason::NotEnoughCredit),
            Err(_) => self.why_not_granted(id, request),
        };
        if let Some(qp) = self.ports.qps.get_mut(id) {
            let asked = &mut qp.direct.asked;
            asked.ever = true;
            asked.granted |= matches!(verdict, Ok(Verdict::Given(_)));
            asked.refused[request.access as usize] = refused;
        }
        verdict
    }

    /// After a refusal. `None`: it may be otherwise by now, and is looked up again when somebody wants to know.
    fn why_not_granted(&self, id: QpId, request: &GrantRequest) -> Option<Reason> {
        let GrantRequest { rkey, address, length, access } = *request;
        let found = match self.engine.grantable(id, rkey, address, length, access.opcode()) {
            Ok(found) => found,
            Err(NotGrantable::Refused) => return Some(Reason::KeyRefused),
            Err(NotGrantable::Memory) => return Some(Reason::KindOfMemory),
            Err(NotGrantable::Path(_)) => return None,
        };
        let session = self.ports.qps.get(id)?.session;
        if !self.may_pass_router(session) || !self.may_pass_router(found.owner) {
            return None;
        }
        let owner = self.ports.sessions.get(found.owner)?;
        // Libraries take commands from the first memory on that they share.
        let Some(place) = owner.memory.place(found.asked) else { return Some(Reason::NotShared) };
        if owner.commands.is_none() {
            return Some(Reason::NoCommands);
        }
        if place.origin.lease.is_revoked() {
            return Some(Reason::TakenBack);
        }
        if place.origin.lease.is_imported() || place.origin.lease.descriptor().is_none() {
            return Some(Reason::Imported);
        }
        let is_inside =
            |extent: Range<u64>| found.address <= extent.start && extent.end - 1 <= found.address + found.last;
        let is_beyond = !owner.memory.extent(place.segment).is_some_and(is_inside);
        Some(if is_beyond { Reason::BeyondRegion } else { Reason::TooMany })
    }
}
