//! Which QPs are connected to which QPNs of other hosts, and whether each may send; see
//! `responder::gates`.
use crate::{HostId, QpId};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::ops::RangeInclusive;
use freeflow_verbs::Qpn;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PeerGate {
    /// The owner has not been asked, or something changed since.
    Unchecked,
    /// Packets may go out.
    Open,
}

/// Which QPs are connected to which QPN of which host.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Peers {
    pub connected: BTreeSet<(HostId, u32, QpId)>,
}

impl Peers {
    pub fn connect(&mut self, host: HostId, qpn: u32, id: QpId) {
        self.connected.insert((host, qpn, id));
    }

    pub fn disconnect(&mut self, host: HostId, qpn: u32, id: QpId) {
        self.connected.remove(&(host, qpn, id));
    }

    pub fn of(&self, host: HostId, qpn: Option<Qpn>) -> Vec<QpId> {
        self.connected.range(ends(host, qpn)).map(|(_, _, id)| *id).collect()
    }

    /// Whether some QP is connected to one of that host.
    pub fn leads_to(&self, host: HostId) -> bool {
        self.connected.range(ends(host, None)).next().is_some()
    }
}

fn ends(host: HostId, qpn: Option<Qpn>) -> RangeInclusive<(HostId, u32, QpId)> {
    let (first, last) = match qpn {
        Some(Qpn(number)) => (number, number),
        None => (0, u32::MAX),
    };
    (host, first, QpId { index: 0, generation: 0 })..=(host, last, QpId { index: u32::MAX, generation: u32::MAX })
}
