//! Reports to the environment of what a tenant tries on others, and gets nowhere with. What goes
//! wrong among QPs of one network is no violation: a peer that is not ready yet, a key that is not
//! valid any more.
use crate::keys::KeyHolder;
use crate::policy::network_behind;
use crate::responder::Responder;
use crate::{Environment, Path, PeerAnswer, QpId, Violation, ViolationKind};
use freeflow_verbs::{GlobalRoute, NetworkId, QpType, Qpn};

/// The owner of a QPN.
enum QpnOwner {
    /// One of the same network or of the one that it may go to, or the owner has not answered yet.
    Own,
    Other(NetworkId),
    Nobody,
}

impl Responder {
    /// The QP's message in hand reached nobody. Whether that is known to be more than a peer that
    /// is not ready or gone: then the environment knows it.
    #[cold]
    pub(crate) fn note_unanswered<E: Environment>(&self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        let (route, number) = match qp.service {
            QpType::Ud => {
                let handle = self.completer.ahs.at(qp.send.request.address_handle).map(|(_, handle)| handle.route);
                (handle, qp.send.request.remote_qpn & Qpn::MASK)
            }
            _ => (qp.attributes.address.grh, qp.attributes.dest_qpn),
        };
        let Some(route) = route else { return false };
        let to = route.dgid;
        let kind = match qp.service {
            QpType::Ud if to.is_multicast() => ViolationKind::Multicast,
            QpType::Ud => ViolationKind::Datagram,
            _ => ViolationKind::Message,
        };
        let owner = match self.qpn_owner(env, id, &route, number) {
            QpnOwner::Other(network) => Some(network),
            // A peer that was reached and is gone has ended.
            QpnOwner::Nobody if !qp.service.is_reliable() || qp.traffic.messages_sent == 0 => None,
            QpnOwner::Nobody | QpnOwner::Own => return false,
        };
        let from = qp.addresses.by(route.sgid_index);
        env.report_violation(&Violation { kind, network: qp.network, from, to, number, owner });
        true
    }

    fn qpn_owner<E: Environment>(&self, env: &mut E, id: QpId, route: &GlobalRoute, number: u32) -> QpnOwner {
        let qp = self.qp(id);
        // (That of a datagram may have been refused: then it has no permit.)
        let at = network_behind(env, qp.network, route);
        let reached = if qp.service == QpType::Ud { at } else { qp.reached };
        let is_own = |network: NetworkId| network == qp.network || network == reached;
        let of = |network: NetworkId| if is_own(network) { QpnOwner::Own } else { QpnOwner::Other(network) };
        // Each host numbers its QPs by itself: the same number here may be anybody's.
        let is_group = qp.service == QpType::Ud && route.dgid.is_multicast();
        let host = match &qp.wire {
            Some(wire) => Some(wire.destination.host),
            None if is_group => None,
            None => match env.path(qp.vnic, at, route) {
                Path::Wire(destination) => Some(destination.host),
                Path::Local => None,
            },
        };
        let Some(host) = host else {
            let here = self.qpns.get(number).and_then(|index| self.completer.qps.at(index));
            return here.map_or(QpnOwner::Nobody, |(_, peer)| of(peer.network));
        };
        match env.peer(host, Qpn(number)) {
            PeerAnswer::Known(info) => of(info.network),
            PeerAnswer::Asked | PeerAnswer::External(_) => QpnOwner::Own,
            PeerAnswer::Absent => QpnOwner::Nobody,
        }
    }

    /// The network whose memory a key opens, or would for others.
    pub(crate) fn network_of_key(&self, key: u32) -> Option<NetworkId> {
        let session = match self.completer.keys.holder(key)? {
            KeyHolder::Region(index) => self.completer.keys.regions.at(index)?.1.session,
            KeyHolder::Window(index) => self.completer.keys.windows.at(index)?.1.session,
        };
        Some(self.completer.vnics.get(self.session_vnic(session).ok()?)?.network)
    }

    /// A key that does not open what it was used for: whether that is another network's.
    #[cold]
    pub(crate) fn note_wrong_key<E: Environment>(&self, env: &mut E, responder: QpId, key: u32) {
        let qp = self.qp(responder);
        let Some(from) = qp.remote_gid() else { return };
        let (kind, network, to, owner) = (ViolationKind::RemoteKey, qp.reached, qp.gid(), self.network_of_key(key));
        let attempt = Violation { kind, network, from, to, number: key, owner };
        match owner {
            Some(owner) if owner != qp.network && owner != qp.reached => env.report_violation(&attempt),
            Some(_) => {}
            None => env.report_unknown_key(qp.network, &attempt),
        }
    }
}
