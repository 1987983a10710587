//! The small objects of the control path: what each belongs to, and how many others stand on it.
use crate::policy::{EXTERNAL_GID_INDEX, IPV6_GID_INDEX};
use crate::slab::Owned;
use crate::xrc::XrcQueue;
use crate::{ContextId, PdId, QpId, SessionId, Usage, VnicCounters, VnicId};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, GlobalRoute, NetworkId, SrqAttributes, VerbsError, VnicLimits};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub(crate) struct Vnic {
    pub network: NetworkId,
    pub gid: Gid,
    /// Its IPv6 address, in networks that have any (GID index 2).
    pub ipv6_gid: Option<Gid>,
    /// The host's own address, where policy lets the vNIC talk to machines without FreeFlow by it
    /// (GID index 1).
    pub external_gid: Option<Gid>,
    pub limits: VnicLimits,
    pub usage: Usage,
    /// How often the vNIC's own limit of each kind refused, and its network's.
    pub refused: Usage,
    pub refused_by_network: Usage,
    pub counters: VnicCounters,
    /// Of packets that wait at its QPs; see `transport::HELD_BYTES_OF_VNIC_MAX`.
    pub held_bytes: usize,
}

impl Vnic {
    /// Whether it is an address of its own.
    pub fn has(&self, gid: Gid) -> bool {
        self.gid == gid || self.ipv6_gid == Some(gid)
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Session {
    pub vnic: VnicId,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Context {
    pub session: SessionId,
    /// PDs, XRC domains and CQs.
    pub children: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CqState {
    Good,
    /// It overflowed: what completes on it is lost (IBTA 11.6.3.2).
    Overflowed,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Cq {
    pub session: SessionId,
    pub context: ContextId,
    /// QPs, and SRQs for XRC; a QP that uses it for both queues counts twice.
    pub users: u32,
    pub state: CqState,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Srq {
    pub session: SessionId,
    pub pd: PdId,
    pub attributes: SrqAttributes,
    pub xrc: Option<XrcQueue>,
    /// QPs; not target QPs, which are of a domain.
    pub users: u32,
    /// Senders that wait for a RECV, in order of arrival.
    pub waiters: Vec<QpId>,
    /// The value of the ring's last `want_receives`.
    pub wanted: bool,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct AddressHandle {
    pub session: SessionId,
    pub pd: PdId,
    pub route: GlobalRoute,
}

macro_rules! owned {
    ($($name:ident),*) => { $(
        impl Owned for $name {
            fn session(&self) -> SessionId {
                self.session
            }
        }
    )* };
}

owned!(Context, Cq, Srq, AddressHandle);

/// Filled entries of a vNIC's GID table besides the first one.
#[derive(Clone, Copy)]
pub(crate) struct GidTable {
    pub has_external: bool,
    pub has_ipv6: bool,
}

impl GidTable {
    pub fn has(self, index: u8) -> bool {
        match index {
            0 => true,
            EXTERNAL_GID_INDEX => self.has_external,
            IPV6_GID_INDEX => self.has_ipv6,
            _ => false,
        }
    }

    /// Whether a vNIC may send to that address by this of its GIDs. One with two families sends to
    /// neither by the other's: no host's routes lead from one into the other.
    pub fn leads_to(self, route: &GlobalRoute) -> bool {
        let same_family =
            |ipv6: bool| !self.has_ipv6 || route.dgid.is_multicast() || route.dgid.to_ipv4().is_none() == ipv6;
        let index = route.sgid_index;
        self.has(index) && (index == EXTERNAL_GID_INDEX || same_family(index == IPV6_GID_INDEX))
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Pd {
    /// The session that allocated it: perhaps gone.
    pub session: SessionId,
    pub vnic: VnicId,
    /// Where it was allocated, until it is deallocated there.
    pub context: Option<ContextId>,
    pub is_shared: bool,
    pub shares: Vec<PdShare>,
}

/// One session's share of a PD.
#[derive(Serialize, Deserialize)]
pub(crate) struct PdShare {
    pub session: SessionId,
    /// The allocation, and each import.
    pub uses: u32,
    /// MRs, windows, SRQs, QPs and AHs.
    pub children: u32,
}

impl Owned for Pd {
    fn session(&self) -> SessionId {
        self.session
    }

    fn belongs_to(&self, session: SessionId) -> bool {
        self.share(session).is_some()
    }
}

impl Pd {
    /// Whether a QP with CQs of this context may be in it.
    pub fn fits(&self, context: ContextId) -> bool {
        self.is_shared || self.context == Some(context)
    }

    pub fn share(&self, session: SessionId) -> Option<&PdShare> {
        self.shares.iter().find(|share| share.session == session)
    }

    pub fn share_mut(&mut self, session: SessionId) -> Option<&mut PdShare> {
        self.shares.iter_mut().find(|share| share.session == session)
    }

    /// Whether a session may give one of its uses up.
    pub fn check_leave(&self, session: SessionId) -> Result<(), VerbsError> {
        let share = self.share(session).ok_or(VerbsError::NotFound)?;
        if share.uses == 1 && share.children > 0 { Err(VerbsError::Busy) } else { Ok(()) }
    }
}
