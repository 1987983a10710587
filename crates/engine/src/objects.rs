//! The small objects of the control path: what each belongs to, and how many others stand on it.
use crate::slab::Owned;
use crate::xrc::XrcQueue;
use crate::{ContextId, PdId, QpId, SessionId, Usage, VnicCounters, VnicId};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, GlobalRoute, NetworkId, SrqAttributes, VnicLimits};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub(crate) struct Vnic {
    pub network: NetworkId,
    pub gid: Gid,
    /// Its IPv6 address, in networks that have any (GID index 2).
    pub ipv6_gid: Option<Gid>,
    /// The host's own address, where policy lets the vNIC talk to machines without FreeFlow by it (GID index 1).
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
    /// What the ring was last told by `want_receives`.
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
