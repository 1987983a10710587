//! Whether a QP is granted memory: every check that its request would meet, and the conditions of
//! [`grants`](crate::memory::grants).
use crate::dataplane::worker::Worker;
use crate::memory::grants::{Entered, Entry, Given, GrantRequest, Grantee, Refusal, Verdict};
use freeflow_engine::{Grantable, NotDirect, NotGrantable, QpId, SessionId, VnicId};
use freeflow_protocol::library::{GrantAccess, REQUEST_BYTES, Reply};
use freeflow_verbs::VerbsError;
use std::collections::BTreeSet;

/// Bytes that a new QP can pay: to make and connect it costs more than to copy so much.
const FREE_BYTES: u64 = 64 << 10;

fn refusal(reason: NotGrantable) -> VerbsError {
    match reason {
        NotGrantable::Path(NotDirect::State | NotDirect::NoPeer) => VerbsError::Busy,
        NotGrantable::Path(_) | NotGrantable::Refused | NotGrantable::Memory => VerbsError::NotSupported,
    }
}

impl Worker {
    pub(crate) fn grant(&mut self, id: QpId, request: &GrantRequest) -> Result<Verdict, VerbsError> {
        let GrantRequest { rkey, address, length, access } = *request;
        let found = self.engine.grantable(id, rkey, address, length, access.opcode()).map_err(refusal)?;
        let (asker, vnic) = self.allowed(id).ok_or(VerbsError::NotSupported)?;
        let funds = self.funds(id);
        let Grantable { owner, mr, responder, writable: may_write, .. } = found;
        if !self.may_pass_router(owner) {
            return Err(VerbsError::NotSupported);
        }
        // The slow path reads and writes for an atomic. It begins none on a segment, but may still do one of before.
        let meets_slow_path = access == GrantAccess::Atomic && self.ports.is_atomic_by_slow_path(owner);
        if meets_slow_path || self.ports.has_insiders(owner) {
            return Err(VerbsError::Busy);
        }
        let session = self.ports.sessions.get(owner).filter(|session| session.commands.is_some() && !session.failed);
        let place = session.and_then(|session| {
            let place = session.memory.place(found.asked)?;
            let extent = session.memory.extent(place.segment)?;
            let is_inside = found.address <= extent.start && extent.end - 1 <= found.address + found.last;
            let is_known = !place.segment.poisoned() && place.origin.lease.descriptor().is_some();
            (is_inside && is_known && session.memory.has_few_ranges(place.segment)).then_some(place)
        });
        // Revoked memory comes back when there is traffic, and what was left where it is may be shared soon.
        let may_come =
            session.is_some_and(|session| session.lost.has(found.asked) || session.memory.place(found.asked).is_none());
        let place = place.ok_or(if may_come { VerbsError::Busy } else { VerbsError::NotSupported })?;
        let (offset, addresses, lease) = (place.offset, place.addresses.clone(), place.origin.lease.clone());
        let segment_bytes = place.segment.bytes() as u64;
        let cost = session.map_or(0, |session| session.memory.mapped_bytes(place.segment));
        let grantee = Grantee { peer: responder, session: asker, vnic, rights: BTreeSet::new() };
        // Its end fits: the process has memory mapped beyond, or nothing of the segment.
        let region = (mr, found.address..found.address.saturating_add(found.last).saturating_add(1));
        let (segment, origin) = (place.segment, place.origin);
        let entry = Entry { segment, origin, id, grantee, region, access, may_write, cost, funds };
        let Entered { protection, cost } = match self.ports.grants.enter((owner, place.origin.handle), entry) {
            Ok(entered) => entered,
            Err(Refusal::Never) => return Err(VerbsError::NotSupported),
            Err(Refusal::NotEnoughCredit { missing }) => return Ok(Verdict::NotEnoughCredit { missing }),
        };
        let grants_revoked = self.ports.note_granted(id, responder, cost);
        let address = found.iova + (addresses.start - found.address);
        let length = addresses.end - addresses.start;
        let reply = Reply::Grant { address, length, offset, segment_bytes, grants_revoked, writable: access.writes() };
        Ok(Verdict::Given(Box::new(Given { lease, protection, reply })))
    }

    /// Bytes carried for a QP's requests that have paid for nothing yet.
    pub(crate) fn funds(&self, id: QpId) -> u64 {
        let carried = self.engine.qp_traffic(id).unwrap_or_default().carried(REQUEST_BYTES);
        let paid = self.ports.qps.get(id).map_or(0, |qp| qp.direct.grants_paid);
        carried.saturating_add(FREE_BYTES).saturating_sub(paid)
    }

    /// The session and the vNIC of a QP, if policy lets it reach others of its network directly.
    fn allowed(&self, id: QpId) -> Option<(SessionId, VnicId)> {
        let session = self.ports.qps.get(id)?.session;
        let vnic = self.ports.sessions.get(session)?.vnic;
        self.may_pass_router(session).then_some((session, vnic))
    }

    /// Whether a QP holds a grant now.
    pub fn granted(&self, id: QpId) -> bool {
        self.ports.qps.get(id).is_some_and(|qp| qp.direct.granted_at == Some(qp.direct.grants_revoked))
    }
}
