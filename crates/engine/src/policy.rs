//! Cache of the answers of [`crate::Policy`].
use crate::Environment;
use freeflow_verbs::{Gid, GlobalRoute, NetworkId};
use serde::{Deserialize, Serialize};

/// The second address of a vNIC, by which it talks to machines without FreeFlow.
pub(crate) const EXTERNAL_GID_INDEX: u8 = 1;

/// Its IPv6 address, in networks that have any.
pub(crate) const IPV6_GID_INDEX: u8 = 2;

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct PolicyReview {
    /// How often it has changed.
    pub generation: u64,
    /// The QP that is looked at next, and how many are to be looked at still. It goes round, so
    /// that one change after the other does not keep it from the last ones.
    pub next: u32,
    pub left: u32,
    /// How many there were at the change: where it goes round. Those beyond were connected by what
    /// is said since.
    pub end: u32,
}

/// The last one that policy said yes to: when, its address, and the network that it is in.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Permit {
    pub who: Option<(u64, Gid, NetworkId)>,
}

impl Permit {
    /// Where the one with this address is, if the yes is for it and still good.
    #[inline]
    pub fn network_of(&self, generation: u64, gid: Gid) -> Option<NetworkId> {
        self.who.filter(|(at, who, _)| *at == generation && *who == gid).map(|(_, _, network)| network)
    }
}

/// The network that a route's address is in for those of `network`. What goes out to machines
/// without FreeFlow stays in it.
pub(crate) fn network_behind<E: Environment>(env: &mut E, network: NetworkId, route: &GlobalRoute) -> NetworkId {
    if route.sgid_index == EXTERNAL_GID_INDEX { network } else { env.network_at(network, route.dgid) }
}
