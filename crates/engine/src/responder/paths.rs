//! Where a connected QP leads: to a QP of this host, or by the packet transport to another.
use crate::responder::Responder;
use crate::transport::hosts::HostShare;
use crate::transport::peers::PeerGate;
use crate::transport::requester::WireRequester;
use crate::transport::responder::WireResponder;
use crate::transport::unreliable::Unreliable;
use crate::transport::wire::{Wire, frame_bytes, path_mtu, traffic_class};
use crate::{Destination, Environment, Path, QpId, WireCounters};
use alloc::boxed::Box;
use alloc::collections::VecDeque;

impl Responder {
    // ---- paths

    /// A connected QP got the address of its peer, or finds nobody of this host behind it: looks
    /// where it leads. True: it runs the packet transport from now on (or did so already).
    pub(crate) fn look_for_wire<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        if qp.wire.is_some() || !qp.is_connected_service() {
            return qp.wire.is_some();
        }
        let (vnic, reached, attributes) = (qp.vnic, qp.reached, &qp.attributes);
        let Some(route) = attributes.address.grh else { return false };
        let Path::Wire(destination) = env.path(vnic, reached, &route) else { return false };
        let traffic_class = traffic_class(qp.service, &destination, route.traffic_class);
        let destination = Destination { traffic_class, ..destination };
        let (sq_psn, rq_psn) = (attributes.sq_psn, attributes.rq_psn);
        let (qpn, dest_qpn) = (qp.qpn, attributes.dest_qpn);
        let mtu = frame_bytes(qp.service, &destination).unwrap_or_else(|| path_mtu(attributes, &destination));
        self.qp_mut(id).wire = Some(Box::new(Wire {
            destination,
            gate: PeerGate::Unchecked,
            is_to_router: false,
            requester: WireRequester::new(sq_psn, mtu),
            share: HostShare::default(),
            responder: WireResponder::new(rq_psn),
            unreliable: Unreliable::new(sq_psn, rq_psn),
            writing: false,
            parked: VecDeque::new(),
            parked_bytes: 0,
            landing_bytes: 0,
            counters: WireCounters::default(),
            carriage: None,
        }));
        self.peers.connect(destination.host, dest_qpn, id);
        env.identity_changed(qpn, Some(destination.host));
        true
    }

    /// The QP got an address again: nobody has said that its peer is the one behind it.
    pub(crate) fn doubt_wire(&mut self, id: QpId) {
        if let Some(wire) = &mut self.qp_mut(id).wire {
            wire.gate = PeerGate::Unchecked;
        }
    }

    /// To RTS: the PSN that its requests begin with is known.
    pub(crate) fn begin_wire(&mut self, id: QpId) {
        let sq_psn = self.qp(id).attributes.sq_psn;
        self.qp_mut(id).datagram_psn = sq_psn;
        if let Some(wire) = &mut self.qp_mut(id).wire {
            wire.requester.begin(sq_psn);
            wire.unreliable.begin(sq_psn);
        }
    }

    /// The QP is reset or goes: nothing of it is on the way any more.
    pub(crate) fn cut_wire<E: Environment>(&mut self, env: &mut E, id: QpId) {
        self.end_wait(env, id);
        self.completer.leave_host(id);
        let qp = self.qp_mut(id);
        let (qpn, dest_qpn) = (qp.qpn, qp.attributes.dest_qpn);
        let Some(wire) = qp.wire.take() else { return };
        self.peers.disconnect(wire.destination.host, dest_qpn, id);
        env.identity_changed(qpn, Some(wire.destination.host));
    }
}
