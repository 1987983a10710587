//! Which QP a message arrives at.
use crate::QpId;
use crate::qp::QueuePair;
use crate::responder::Responder;
use freeflow_verbs::{QpType, Qpn};

impl Responder {
    // ---- who answers

    /// The QP that a message of `id` arrives at, if it would be listened to: in the network that it
    /// may go to, of the same type, in a state that receives and, for a connected service,
    /// connected back.
    pub(crate) fn find_responder(&self, id: QpId) -> Option<QpId> {
        let qp = self.qp(id);
        let (network, gid, qpn) = match qp.service {
            QpType::Rc | QpType::Uc | QpType::XrcSend => (qp.reached, qp.remote_gid()?, qp.attributes.dest_qpn),
            QpType::XrcReceive => return None,
            QpType::Ud => {
                let (_, handle) = self.completer.ahs.at(qp.send.request.address_handle)?;
                (self.datagram_network(qp, &handle.route), handle.route.dgid, qp.send.request.remote_qpn)
            }
        };
        let (responder, peer) = self.completer.qps.at(self.qpns.get(qpn & Qpn::MASK)?)?;
        let listens =
            peer.service == qp.service.peer() && peer.network == network && peer.is_at(gid) && peer.receives();
        (listens && answers(qp, peer)).then_some(responder)
    }
}

/// Whether `peer` listens to `qp`: a connected QP only to the one it is connected to. A reliable
/// one expects the PSN that the other begins with, else every packet of the connection would be out
/// of sequence (IBTA 9.7.2).
pub(crate) fn answers(qp: &QueuePair, peer: &QueuePair) -> bool {
    if !peer.is_connected_service() {
        return true;
    }
    let in_sequence = !qp.service.is_reliable() || peer.attributes.rq_psn == qp.attributes.sq_psn;
    let is_back = peer.reached == qp.network && peer.remote_gid() == Some(qp.gid());
    is_back && peer.attributes.dest_qpn == qp.qpn.0 && in_sequence
}
