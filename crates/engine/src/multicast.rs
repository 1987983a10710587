//! Which QPs are attached to which multicast groups, and how far a message is through its group
//! (IBTA 10.5, 11.3).
//!
//! Invariant: `members`, `groups_of` and `counts` say the same; an attachment ends with its QP at
//! the latest.
use crate::{Destination, QpId, VnicId};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, NetworkId, Qpn};
use serde::{Deserialize, Serialize};

const FIRST: QpId = QpId { index: 0, generation: 0 };

const LAST: QpId = QpId { index: u32::MAX, generation: u32::MAX };

#[derive(Serialize, Deserialize)]
pub(crate) struct Groups {
    pub members: BTreeSet<(NetworkId, Gid, QpId)>,
    pub groups_of: BTreeSet<(QpId, Gid)>,
    /// How many QPs of a vNIC are in a group; never zero.
    pub counts: BTreeMap<(VnicId, Gid), u32>,
    /// The QPN under which other hosts send to the members that a group has here, and back.
    pub numbers: BTreeMap<(NetworkId, Gid), Qpn>,
    pub groups: BTreeMap<Qpn, (NetworkId, Gid)>,
    /// Changes that other hosts have not been notified of.
    pub changes: VecDeque<GroupChange>,
}

/// A group has members on this host from now on, under a QPN (`None`: not any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupChange {
    /// Network of the group.
    pub network: NetworkId,
    /// Address of the group.
    pub group: Gid,
    /// QPN that packets for the members here go to; `None`: no member is left.
    pub qpn: Option<Qpn>,
}

impl Groups {
    pub fn new() -> Self {
        Self {
            members: BTreeSet::new(),
            groups_of: BTreeSet::new(),
            counts: BTreeMap::new(),
            numbers: BTreeMap::new(),
            groups: BTreeMap::new(),
            changes: VecDeque::new(),
        }
    }

    /// The multicast group of a QPN.
    pub fn of_number(&self, qpn: u32) -> Option<(NetworkId, Gid)> {
        self.groups.get(&Qpn(qpn)).copied()
    }

    pub fn members(&self, network: NetworkId, group: Gid) -> impl DoubleEndedIterator<Item = QpId> + '_ {
        self.members.range((network, group, FIRST)..=(network, group, LAST)).map(|(_, _, member)| *member)
    }

    pub fn has(&self, qp: QpId, group: Gid) -> bool {
        self.groups_of.contains(&(qp, group))
    }

    pub fn is_attached(&self, qp: QpId) -> bool {
        self.groups_of.range((qp, Gid([0; 16]))..=(qp, Gid([0xff; 16]))).next().is_some()
    }
}

/// The way of a message through its group.
#[derive(Serialize, Deserialize)]
pub(crate) struct Fanout {
    pub group: Gid,
    /// Members that have still to get it; the last one is next.
    pub members: Vec<QpId>,
    /// How many of these were found busy, one after the other.
    pub put_off: usize,
    /// Hosts that have still to get it, before the members here.
    pub hosts: Vec<(Destination, Qpn)>,
}

impl Fanout {
    pub fn is_under_way(&self) -> bool {
        !self.members.is_empty() || !self.hosts.is_empty()
    }

    pub fn clear(&mut self) {
        self.members.clear();
        self.hosts.clear();
        self.put_off = 0;
    }

    pub fn next_host(&self) -> Option<(Destination, Qpn)> {
        self.hosts.last().copied()
    }

    pub fn host_done(&mut self) {
        self.hosts.pop();
    }
}
