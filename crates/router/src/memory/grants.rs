//! Grants: memory of one process that a QP's process, on the same host, reaches by its rkey past the router.
//!
//! The QP's library asks; the router does every check that the request itself would meet, and
//! passes the memfd of the segment in which those pages lie. Who has that descriptor reaches all of
//! the segment, and has it for as long as it likes. So a segment is granted only while these hold,
//! and is revoked as a whole (`revocation`) before one of them ends:
//!
//! | invariant | who keeps it |
//! |---|---|
//! | all that the owner has mapped of it lies inside the region that the key names | [`Worker::grant`]; [`Ports::admit_mapping`] for what is mapped later |
//! | the region gives the right: it stays as it was registered, and is not deregistered | [`Ports::revoke_grants_by`], called before the engine does either |
//! | each right that a process has to it, it has by one of its QPs: that and its peer are connected and give the right; their sessions and the policy let them | [`Ports::revoke_grants_of`], called whenever something direct of a QP ends: if other QPs of the process have all its rights, only the QP goes |
//! | nobody whose right does not include writing can write | [`Protection`]: seals, set before the descriptor leaves; one kind for a segment, for good |
//! | it holds nothing from before: no part of it was taken back | the lease's mark; the same that keeps it from being granted again |
//! | each process that has it has paid for taking it back, once: a QP of it had as many bytes carried by the router that had paid for nothing yet | [`Worker::grant`] |
//! | it lies in few ranges, so that it is revoked in a moment | [`Worker::grant`]; [`Ports::admit_mapping`] |
//! | no other process has it by an import | the lease's marks, of which one excludes the other |
//! | its owner's process takes revoke commands | [`Worker::grant`]; it loses its session if it does not carry one out in time |
//!
//! Invariant: GRANTS_REVOKED of each QP that was granted some of a segment has grown before the
//! router does or answers anything by which one of these ends. A segment that was revoked is
//! never mapped or granted again.
//!
//! So all that is ever copied is at most what was carried, and [`FREE_BYTES`] for each QP. What was paid stays paid.
use crate::memory::lease::SegmentLease;
use crate::memory::page_table::Origin;
use crate::memory::revoking::Leaving;
use freeflow_engine::{MrId, QpId, SessionId, VnicId};
use freeflow_protocol::library::{GrantAccess, Handle, REVOCATION_TIME_MAX_MS, Reply};
use freeflow_shm::{Segment, forbid_writing};
use freeflow_verbs::Duration;
use rustix::fs::SealFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Segments that the QPs of one vNIC have, each counted for each QP.
pub(crate) const VNIC_GRANT_COUNT_MAX: u32 = 4096;
/// QPs that have one segment, and regions by which they have it.
pub(crate) const SEGMENT_HOLDER_COUNT_MAX: usize = 1024;

/// Parameters of [`Request::AskGrant`](freeflow_protocol::library::Request::AskGrant).
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantRequest {
    pub rkey: u32,
    pub address: u64,
    pub length: u32,
    pub access: GrantAccess,
}

/// A segment: whose it is, and what that session calls it.
pub(crate) type Name = (SessionId, Handle);

/// Access that those have who hold a segment's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    /// Sealed against further seals.
    Writable,
    /// Sealed against new writable mappings and writes to the file, by whatever descriptor.
    ReadOnly,
}

impl Protection {
    /// For one more QP, which may write by its key or not. `None`: it would have more than its
    /// right, or less than it asks.
    pub(crate) fn decide(now: Option<Self>, writes: bool, may_write: bool) -> Option<Self> {
        match now {
            Some(Self::ReadOnly) => (!writes).then_some(Self::ReadOnly),
            Some(Self::Writable) => may_write.then_some(Self::Writable),
            None => Some(if may_write { Self::Writable } else { Self::ReadOnly }),
        }
    }

    /// Seals the memory so, if it is not yet. The owner, who could set seals itself, can at most make this fail.
    pub fn seal(self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let seals = rustix::fs::fcntl_get_seals(descriptor)?;
        let forbids_writing = seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
        match self {
            Self::ReadOnly if forbids_writing => Ok(()),
            Self::ReadOnly => forbid_writing(descriptor),
            Self::Writable if forbids_writing => Err(io::ErrorKind::PermissionDenied.into()),
            Self::Writable if seals.contains(SealFlags::SEAL) => Ok(()),
            Self::Writable => Ok(rustix::fs::fcntl_add_seals(descriptor, SealFlags::SEAL)?),
        }
    }
}

/// A QP that has a segment.
pub(crate) struct Grantee {
    pub(crate) peer: QpId,
    pub(crate) session: SessionId,
    pub(crate) vnic: VnicId,
    pub(crate) rights: BTreeSet<Right>,
}

/// By which region, and for what.
type Right = (MrId, GrantAccess);

impl Grantee {
    pub(crate) fn is_at(&self, own: QpId, id: QpId) -> bool {
        own == id || self.peer == id
    }
}

/// A segment that others can reach.
pub(crate) struct Exposed {
    pub segment: Arc<Segment>,
    pub lease: Arc<SegmentLease>,
    pub(crate) protection: Protection,
    pub grantees: BTreeMap<QpId, Grantee>,
    /// By which they have it, all of them together, and where each lies in the owner's process.
    pub regions: BTreeMap<MrId, Range<u64>>,
}

impl Exposed {
    pub fn is_read_only(&self) -> bool {
        self.protection == Protection::ReadOnly
    }
}

/// All segments that are granted to somebody, or being revoked.
pub struct Grants {
    pub(crate) exposed: BTreeMap<Name, Exposed>,
    /// The same by their grantees and by the peers of those.
    pub(crate) by_qp: BTreeSet<(QpId, Name)>,
    pub(crate) by_region: BTreeSet<(MrId, Name)>,
    /// Grants of each vNIC's QPs.
    pub(crate) counts: BTreeMap<VnicId, u32>,
    pub(crate) leaving: Leaving,
    /// How long a process may take to carry out a revoke command.
    pub time_max: Duration,
}

impl Default for Grants {
    fn default() -> Self {
        Self {
            exposed: BTreeMap::new(),
            by_qp: BTreeSet::new(),
            by_region: BTreeSet::new(),
            counts: BTreeMap::new(),
            leaving: Leaving::default(),
            time_max: Duration::from_millis(REVOCATION_TIME_MAX_MS),
        }
    }
}

impl Grants {
    pub(crate) fn get(&self, name: Name) -> Option<&Exposed> {
        self.exposed.get(&name)
    }

    /// Of a QP, as grantee or as a grantee's peer.
    pub(crate) fn of_qp(&self, id: QpId) -> Vec<Name> {
        let first = (SessionId { index: 0, generation: 0 }, 0);
        self.by_qp.range((id, first)..).take_while(|(qp, _)| *qp == id).map(|&(_, name)| name).collect()
    }

    pub(crate) fn by_region(&self, mr: MrId) -> Vec<Name> {
        let first = (SessionId { index: 0, generation: 0 }, 0);
        self.by_region.range((mr, first)..).take_while(|(region, _)| *region == mr).map(|&(_, name)| name).collect()
    }

    pub(crate) fn of_owner(&self, owner: SessionId) -> Vec<Name> {
        self.exposed.range((owner, 0)..=(owner, Handle::MAX)).map(|(&name, _)| name).collect()
    }

    pub(crate) fn has_owner(&self, owner: SessionId) -> bool {
        self.exposed.range((owner, 0)..=(owner, Handle::MAX)).next().is_some()
    }

    /// Notes one more grantee of a segment, if the bounds and the seals allow one, and it can pay.
    /// Its process pays once.
    pub(crate) fn enter(&mut self, name: Name, about: Entry<'_>) -> Result<Entered, Refusal> {
        let Entry { segment, origin, id, grantee, region: (mr, range), access, may_write, cost, funds } = about;
        let now = self.exposed.get(&name);
        let protection = Protection::decide(now.map(|exposed| exposed.protection), access.writes(), may_write);
        let protection = protection.ok_or(Refusal::Never)?;
        let is_paid = now.is_some_and(|exposed| exposed.is_held_by(grantee.session));
        let count = self.counts.get(&grantee.vnic).copied().unwrap_or(0);
        let is_new = now.is_none_or(|exposed| !exposed.grantees.contains_key(&id));
        let is_full = now.is_some_and(|exposed| {
            let more = |known: bool, count: usize| !known && count >= SEGMENT_HOLDER_COUNT_MAX;
            more(!is_new, exposed.grantees.len()) || more(exposed.regions.contains_key(&mr), exposed.regions.len())
        });
        if is_full || is_new && count >= VNIC_GRANT_COUNT_MAX || !origin.lease.may_be_granted() {
            return Err(Refusal::Never);
        }
        let cost = if is_paid { 0 } else { cost };
        if cost > funds {
            return Err(Refusal::NotEnoughCredit { missing: cost - funds });
        }
        if !origin.lease.mark_granted() {
            return Err(Refusal::Never);
        }
        let exposed = self.exposed.entry(name).or_insert_with(|| {
            let (segment, lease) = (segment.clone(), origin.lease.clone());
            Exposed { segment, lease, protection, grantees: BTreeMap::new(), regions: BTreeMap::new() }
        });
        if is_new {
            *self.counts.entry(grantee.vnic).or_default() += 1;
            self.by_qp.extend([(id, name), (grantee.peer, name)]);
        }
        exposed.grantees.entry(id).or_insert(grantee).rights.insert((mr, access));
        self.by_region.insert((mr, name));
        exposed.regions.insert(mr, range);
        Ok(Entered { protection, cost })
    }

    /// A QP loses its part in a segment, as grantee and as a grantee's peer. Gives the grantees
    /// that go by it, if they can: their processes have all of their rights by other QPs too.
    /// `None`: it has to be revoked.
    pub(crate) fn release(&mut self, name: Name, id: QpId) -> Option<Vec<QpId>> {
        let exposed = self.exposed.get_mut(&name)?;
        let ids: Vec<QpId> = exposed.at(id).map(|(&own, _)| own).collect();
        if !exposed.at(id).all(|(_, grantee)| exposed.has_beside(id, grantee)) {
            return None;
        }
        for own in &ids {
            let Some(grantee) = exposed.grantees.remove(own) else { continue };
            uncount(&mut self.counts, grantee.vnic);
            for end in [*own, grantee.peer] {
                if exposed.at(end).next().is_none() {
                    self.by_qp.remove(&(end, name));
                }
            }
        }
        Some(ids)
    }

    /// The segment is granted to nobody any more, as far as is known here.
    pub(crate) fn take(&mut self, name: Name) -> Option<Exposed> {
        let exposed = self.exposed.remove(&name)?;
        for (&id, grantee) in &exposed.grantees {
            self.by_qp.remove(&(id, name));
            self.by_qp.remove(&(grantee.peer, name));
            uncount(&mut self.counts, grantee.vnic);
        }
        for &mr in exposed.regions.keys() {
            self.by_region.remove(&(mr, name));
        }
        Some(exposed)
    }
}

pub(crate) fn uncount(counts: &mut BTreeMap<VnicId, u32>, vnic: VnicId) {
    if let Some(count) = counts.get_mut(&vnic) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&vnic);
        }
    }
}

impl Exposed {
    /// Grants that a QP takes part in, as grantee or as peer.
    pub(crate) fn at(&self, id: QpId) -> impl Iterator<Item = (&QpId, &Grantee)> {
        self.grantees.iter().filter(move |(own, grantee)| grantee.is_at(**own, id))
    }

    pub(crate) fn is_held_by(&self, session: SessionId) -> bool {
        self.grantees.values().any(|grantee| grantee.session == session)
    }

    /// Whether a grantee's process has all of its rights by others than by this QP.
    pub(crate) fn has_beside(&self, id: QpId, lost: &Grantee) -> bool {
        let is_kept = |right: &Right| {
            let mut of_process = self.grantees.iter().filter(|(_, grantee)| grantee.session == lost.session);
            of_process.any(|(&own, grantee)| !grantee.is_at(own, id) && grantee.rights.contains(right))
        };
        lost.rights.iter().all(is_kept)
    }
}

/// A grantee was noted; what it pays.
#[derive(Debug)]
pub(crate) struct Entered {
    pub(crate) protection: Protection,
    pub(crate) cost: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Never,
    NotEnoughCredit { missing: u64 },
}

/// Facts that [`Grants::enter`] notes.
pub(crate) struct Entry<'a> {
    pub(crate) segment: &'a Arc<Segment>,
    pub(crate) origin: &'a Origin,
    pub(crate) id: QpId,
    pub(crate) grantee: Grantee,
    pub(crate) region: (MrId, Range<u64>),
    pub(crate) access: GrantAccess,
    pub(crate) may_write: bool,
    /// Cost of taking the segment back, and the QP's credit, bytes.
    pub(crate) cost: u64,
    pub(crate) funds: u64,
}

/// The worker's verdict on a request; the control thread makes the descriptor and the answer.
pub(crate) enum Verdict {
    Given(Box<Given>),
    NotEnoughCredit { missing: u64 },
}

pub(crate) struct Given {
    pub lease: Arc<SegmentLease>,
    pub protection: Protection,
    pub reply: Reply,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::account::{Account, Charge, Commons};

    const OWNER: SessionId = SessionId { index: 1, generation: 0 };

    struct Shared {
        segment: Arc<Segment>,
        origin: Origin,
    }

    fn some(handle: Handle) -> Shared {
        let account = Arc::new(Account::new(Arc::new(Commons::new(1 << 16, 1 << 16))));
        let lease = SegmentLease::new(None, Charge::descriptor(&account).unwrap());
        Shared { segment: Arc::new(Segment::create("test", 4096).unwrap().0), origin: Origin { handle, lease } }
    }

    const READ: GrantAccess = GrantAccess::Read;
    const WRITE: GrantAccess = GrantAccess::Write;
    const ATOMIC: GrantAccess = GrantAccess::Atomic;

    const NEVER: Result<u64, Refusal> = Err(Refusal::Never);

    /// QPs of one pair.
    fn ends(qp: u32) -> (QpId, QpId) {
        (QpId { index: 2 * qp, generation: 0 }, QpId { index: 2 * qp + 1, generation: 0 })
    }

    /// By whom and by which region it is asked for, and what the QP has.
    #[derive(Clone, Copy)]
    struct Asked {
        qp: u32,
        session: u32,
        vnic: u32,
        mr: u32,
        access: GrantAccess,
        funds: u64,
    }

    impl Asked {
        /// → what it costs.
        fn enter(self, grants: &mut Grants, to: &Shared) -> Result<u64, Refusal> {
            let (id, peer) = ends(self.qp);
            let session = SessionId { index: self.session, generation: 0 };
            let vnic = VnicId { index: self.vnic, generation: 0 };
            let grantee = Grantee { peer, session, vnic, rights: BTreeSet::new() };
            let region = (MrId { index: self.mr, generation: 0 }, 0..4096);
            let (segment, origin, access, funds) = (&to.segment, &to.origin, self.access, self.funds);
            let entry = Entry { segment, origin, id, grantee, region, access, may_write: true, cost: 4096, funds };
            grants.enter((OWNER, to.origin.handle), entry).map(|entered| entered.cost)
        }
    }

    fn enter(grants: &mut Grants, to: &Shared, qp: u32, vnic: u32, mr: u32) -> bool {
        Asked { qp, session: vnic, vnic, mr, access: WRITE, funds: 4096 }.enter(grants, to).is_ok()
    }

    #[test]
    fn a_process_pays_once_for_a_segment() {
        let (mut grants, segment) = (Grants::default(), some(1));
        let poor = Asked { qp: 1, session: 1, vnic: 1, mr: 1, access: WRITE, funds: 1000 };
        assert_eq!(poor.enter(&mut grants, &segment), Err(Refusal::NotEnoughCredit { missing: 3096 }));
        assert!(grants.get((OWNER, 1)).is_none() && grants.by_qp.is_empty());
        assert_eq!(Asked { funds: 4096, ..poor }.enter(&mut grants, &segment), Ok(4096));
        for again in [poor, Asked { mr: 2, ..poor }, Asked { qp: 2, access: READ, funds: 0, ..poor }] {
            assert_eq!(again.enter(&mut grants, &segment), Ok(0), "its process has it");
        }
        let other = Asked { qp: 3, session: 2, ..poor };
        assert_eq!(other.enter(&mut grants, &segment), Err(Refusal::NotEnoughCredit { missing: 3096 }));
        grants.take((OWNER, 1));
        segment.origin.lease.mark_revoked();
        assert_eq!(poor.enter(&mut grants, &segment), NEVER, "credit does not help");
    }

    #[test]
    fn who_has_all_rights_by_other_qps_leaves_alone() {
        let (mut grants, segment) = (Grants::default(), some(1));
        let name = (OWNER, 1);
        let first = Asked { qp: 1, session: 1, vnic: 1, mr: 1, access: WRITE, funds: 4096 };
        let second = Asked { qp: 2, ..first };
        let stranger = Asked { qp: 3, session: 2, vnic: 1, ..first };
        for asked in [first, second, stranger] {
            asked.enter(&mut grants, &segment).unwrap();
        }
        let (own, peer) = ends(1);
        for end in [own, peer] {
            assert_eq!(grants.release(name, end), Some(vec![own]));
            assert!(grants.of_qp(own).is_empty() && grants.of_qp(peer).is_empty());
            assert_eq!(grants.release(name, end), Some(vec![]), "it has left");
            first.enter(&mut grants, &segment).unwrap();
        }
        // A right that no other QP of its process has: by another region, or to do something else.
        for more in [Asked { mr: 2, ..first }, Asked { access: READ, ..first }, Asked { access: ATOMIC, ..first }] {
            more.enter(&mut grants, &segment).unwrap();
            assert_eq!((grants.release(name, own), grants.release(name, peer)), (None, None));
            Asked { qp: 2, ..more }.enter(&mut grants, &segment).unwrap();
        }
        assert_eq!(grants.release(name, own), Some(vec![own]));
        assert_eq!(grants.release(name, ends(2).0), None, "the last one of its process");
        assert_eq!(grants.release(name, ends(3).1), None);
        assert_eq!(grants.by_region(MrId { index: 2, generation: 0 }), [name], "the process has it by that still");
        assert_eq!(grants.counts.values().copied().collect::<Vec<_>>(), [2]);
        grants.take(name);
        assert!(grants.by_qp.is_empty() && grants.by_region.is_empty() && grants.counts.is_empty());
    }

    /// Both ends of a pair, in one process, have memory of it.
    #[test]
    fn a_qp_that_is_holder_and_peer_goes_as_both() {
        let (mut grants, segment) = (Grants::default(), some(1));
        let name = (OWNER, 1);
        let first = Asked { qp: 1, session: 1, vnic: 1, mr: 1, access: WRITE, funds: 4096 };
        for qp in [1, 2] {
            Asked { qp, ..first }.enter(&mut grants, &segment).unwrap();
        }
        let (own, peer) = ends(1);
        if let Some(exposed) = grants.exposed.get_mut(&name) {
            let right = (MrId { index: 1, generation: 0 }, WRITE);
            let (session, vnic) = (exposed.grantees[&own].session, exposed.grantees[&own].vnic);
            exposed.grantees.insert(peer, Grantee { peer: own, session, vnic, rights: [right].into() });
            *grants.counts.entry(vnic).or_default() += 1;
        }
        assert_eq!(grants.release(name, own), Some(vec![own, peer]));
        assert!(grants.of_qp(own).is_empty() && grants.of_qp(peer).is_empty());
        assert_eq!(grants.counts.values().copied().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn grants_of_a_segment_and_of_a_vnic_run_out_and_come_back() {
        let mut grants = Grants::default();
        let segments: Vec<Shared> = (1..=6).map(some).collect();
        for segment in &segments[..4] {
            for qp in 0..1024 {
                assert!(enter(&mut grants, segment, qp, 7, 0));
            }
            assert!(!enter(&mut grants, segment, 1024, 8, 0), "one QP too many, whosever it is");
        }
        assert!(!enter(&mut grants, &segments[4], 0, 7, 0), "one grant too many");
        assert!(enter(&mut grants, &segments[4], 2000, 8, 0), "others are not concerned");
        assert!(enter(&mut grants, &segments[0], 5, 7, 0), "what it has costs nothing");
        for mr in 1..1024 {
            assert!(enter(&mut grants, &segments[0], 5, 7, mr));
        }
        assert!(!enter(&mut grants, &segments[0], 5, 7, 1024), "one region too many");
        assert_eq!(grants.of_qp(QpId { index: 11, generation: 0 }).len(), 4, "its peer has a part in it");
        assert!(grants.take((OWNER, 1)).is_some());
        assert_eq!((grants.by_region(MrId { index: 5, generation: 0 }).len(), grants.of_owner(OWNER).len()), (0, 4));
        assert!(enter(&mut grants, &segments[5], 0, 7, 0));
        for name in grants.of_owner(OWNER) {
            grants.take(name);
        }
        assert!(grants.by_qp.is_empty() && grants.by_region.is_empty() && grants.counts.is_empty());
    }
}
