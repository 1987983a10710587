//! Whether a QP may send to the QPN of another host that it is connected to. RC packets don't say
//! who sends them, and a tenant names any QPN it likes; so before a QP's first packet goes out, the
//! owner of the other QPN must have said that it is of the network and has the GID that the QP is
//! connected to, and is connected back.
use crate::qp::QueuePair;
use crate::responder::Responder;
use crate::transport::peers::PeerGate;
use crate::{Environment, HostId, Path, PeerAnswer, PeerInfo, QpId};
use freeflow_verbs::{Gid, Qpn};

impl Responder {
    /// Whether packets of this QP may go out. If not, nobody answers; `handle_peer_changed` looks
    /// again.
    pub(crate) fn gate_is_open<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let wire = self.wire(id);
        if wire.gate == PeerGate::Open {
            return true;
        }
        let (host, qpn) = (wire.destination.host, Qpn(self.qp(id).attributes.dest_qpn));
        let answer = env.peer(host, qpn);
        let is_to_router = matches!(answer, PeerAnswer::Known(_));
        let open = match answer {
            PeerAnswer::Known(info) => is_connected_back(self.qp(id), &info),
            PeerAnswer::External(gid) => self.may_talk_outside(env, id, host, gid),
            PeerAnswer::Absent | PeerAnswer::Asked => false,
        };
        if open {
            let wire = self.wire_mut(id);
            (wire.gate, wire.is_to_router) = (PeerGate::Open, is_to_router);
        }
        open
    }

    /// Something waits before a closed gate: if it is sure that nobody there may have it, it counts
    /// as what found nobody.
    #[cold]
    pub(crate) fn note_gated<E: Environment>(&mut self, env: &mut E, id: QpId) {
        if self.note_unanswered(env, id) {
            self.vnic_of(id).counters.undeliverable += 1;
        }
    }

    /// A machine without a router can't be asked, and knows this host by one address: it would take
    /// packets of any vNIC here for those of the one that its QP is connected to. So each of its
    /// QPs is of the vNIC that came to it first.
    fn may_talk_outside<E: Environment>(&mut self, env: &mut E, id: QpId, host: HostId, gid: Gid) -> bool {
        let qp = self.qp(id);
        let (vnic, network, qpn) = (qp.vnic, qp.network, Qpn(qp.attributes.dest_qpn));
        let Some(route) = qp.attributes.address.grh else { return false };
        let of_another = |id: QpId| {
            let qp = self.completer.qps.get(id).filter(|qp| qp.vnic != vnic);
            qp.and_then(|qp| qp.wire.as_ref()).is_some_and(|wire| wire.gate == PeerGate::Open)
        };
        let is_taken = self.peers.of(host, Some(qpn)).into_iter().any(of_another);
        let is_allowed = matches!(env.path(vnic, network, &route), Path::Wire(destination) if destination.host == host);
        is_allowed && !is_taken && route.dgid == gid && self.completer.external_gid(vnic).is_some()
    }
}

fn is_connected_back(qp: &QueuePair, peer: &PeerInfo) -> bool {
    peer.network == qp.reached
        && Some(peer.gid) == qp.remote_gid()
        && peer.service == qp.service.peer()
        && peer.connected == Some((qp.gid(), qp.qpn))
}
