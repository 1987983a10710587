//! Who is behind the QPN that a QP is connected to. RC packets don't say who sends them, and a tenant names any QPN it
//! likes; so before a QP's first packet goes out, the owner of the other QPN must have said that it is of the network and
//! has the GID that the QP is connected to, and is connected back.
use crate::qp::QueuePair;
use crate::{Engine, Environment, HostId, Path, PeerAnswer, PeerInfo, QpId};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use freeflow_verbs::{Gid, Instant, QpType, Qpn};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Gate {
    /// The owner has not been asked, or something changed since.
    Unchecked,
    /// Packets may go out.
    Open,
}

/// Which QPs are connected to which QPN of which host.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Peers {
    connected: BTreeSet<(HostId, u32, QpId)>,
}

impl Peers {
    pub fn connect(&mut self, host: HostId, qpn: u32, id: QpId) {
        self.connected.insert((host, qpn, id));
    }

    pub fn disconnect(&mut self, host: HostId, qpn: u32, id: QpId) {
        self.connected.remove(&(host, qpn, id));
    }

    fn of(&self, host: HostId, qpn: Option<Qpn>) -> Vec<QpId> {
        let (first, last) = match qpn {
            Some(Qpn(number)) => (number, number),
            None => (0, u32::MAX),
        };
        let ends = (host, first, QpId { index: 0, generation: 0 })
            ..=(host, last, QpId { index: u32::MAX, generation: u32::MAX });
        self.connected.range(ends).map(|(_, _, id)| *id).collect()
    }
}

impl Engine {
    /// Whether packets of this QP may go out. If not, nobody answers; `handle_peer_changed` looks again.
    pub(crate) fn gate_is_open<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let wire = self.wire(id);
        if wire.gate == Gate::Open {
            return true;
        }
        let (host, qpn) = (wire.destination.host, Qpn(self.qp(id).attributes.dest_qpn));
        let open = match env.peer(host, qpn) {
            PeerAnswer::Known(info) => is_connected_back(self.qp(id), &info),
            PeerAnswer::External(gid) => self.may_talk_outside(env, id, host, gid),
            PeerAnswer::Absent | PeerAnswer::Asked => false,
        };
        if open {
            self.wire_mut(id).gate = Gate::Open;
        }
        open
    }

    /// Something waits before a closed gate: if it is sure that nobody there may have it, it counts as what found nobody.
    #[cold]
    pub(crate) fn note_gated<E: Environment>(&mut self, env: &mut E, id: QpId) {
        if self.note_unanswered(env, id) {
            self.vnic_of(id).counters.undeliverable += 1;
        }
    }

    /// A machine without a router can't be asked, and knows this host by one address: it would take packets of any vNIC
    /// here for those of the one that its QP is connected to. So each of its QPs is of the vNIC that came to it first.
    fn may_talk_outside<E: Environment>(&mut self, env: &mut E, id: QpId, host: HostId, gid: Gid) -> bool {
        let qp = self.qp(id);
        let (vnic, network, qpn) = (qp.vnic, qp.network, Qpn(qp.attributes.dest_qpn));
        let Some(route) = qp.attributes.address.grh else { return false };
        let of_another = |id: QpId| {
            let qp = self.qps.get(id).filter(|qp| qp.vnic != vnic);
            qp.and_then(|qp| qp.wire.as_ref()).is_some_and(|wire| wire.gate == Gate::Open)
        };
        let is_taken = self.peers.of(host, Some(qpn)).into_iter().any(of_another);
        let is_allowed = matches!(env.path(vnic, network, &route), Path::Wire(destination) if destination.host == host);
        is_allowed && !is_taken && route.dgid == gid && self.external_gid(vnic).is_some()
    }

    /// What the environment knows of a QPN of another host (or of all) is another now.
    pub fn handle_peer_changed<E: Environment>(&mut self, env: &mut E, now: Instant, host: HostId, qpn: Option<Qpn>) {
        for id in self.peers.of(host, qpn) {
            self.wire_mut(id).gate = Gate::Unchecked;
            if self.gate_is_open(env, id) {
                self.peer_came(env, now, id);
            } else if self.wire(id).requester.gated {
                self.note_gated(env, id);
            }
        }
        self.resume_strangers(env, now, host, qpn);
    }

    /// What other hosts' routers are told of a QPN of this host.
    pub fn peer_info(&self, qpn: Qpn) -> Option<PeerInfo> {
        let (_, qp) = self.qps.at(self.qpns.get(qpn.0)?)?;
        let connected = (qp.is_connected_service() && qp.receives())
            .then(|| Some((qp.remote_gid()?, Qpn(qp.attributes.dest_qpn))))
            .flatten();
        let ipv6_gid = qp.addresses.ipv6.filter(|_| qp.service == QpType::Ud);
        Some(PeerInfo { network: qp.network, gid: qp.gid(), ipv6_gid, service: qp.service, connected })
    }
}

fn is_connected_back(qp: &QueuePair, peer: &PeerInfo) -> bool {
    peer.network == qp.reached
        && Some(peer.gid) == qp.remote_gid()
        && peer.service == qp.service.peer()
        && peer.connected == Some((qp.gid(), qp.qpn))
}
