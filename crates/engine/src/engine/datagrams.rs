//! UD packets of other hosts: whom they are for, and whether their senders may.
//!
//! The receiver must know whose a packet is, for the GRH and because networks do not mix: packets
//! of senders that it has not heard of wait in [`UnresolvedSenders`] until their owner has
//! answered.
use crate::transport::datagrams::{
    DatagramHeader, DatagramRoute, UNRESOLVED_MAX, UNRESOLVED_OF_HOST_MAX, UnresolvedDatagram,
};
use crate::transport::packets::Packet;
use crate::{Engine, Environment, HostId, PeerAnswer, PeerInfo, QpId, TrafficKind};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, Instant, NetworkId, QpType, Qpn};
use freeflow_wire::cm::MAD_QPN;

impl Engine {
    pub(crate) fn handle_ud<E: Environment>(&mut self, env: &mut E, now: Instant, from: HostId, packet: &Packet<'_>) {
        let header = packet.header;
        if header.dest_qpn == MAD_QPN {
            return self.requester.responder.handle_management(env, from, packet);
        }
        let source_qpn = header.deth.source_qpn;
        let datagram = DatagramHeader {
            grh: DatagramRoute {
                source: Gid::default(),
                destination: Gid::default(),
                traffic_class: packet.ip.traffic_class,
                hop_limit: packet.ip.hop_limit,
            },
            source_qpn,
            qkey: header.deth.qkey,
            immediate: header.opcode.has_immediate().then_some(header.immediate),
            solicited: header.solicited,
            by_ipv6: header.by_ipv6,
        };
        if self.requester.groups.of_number(header.dest_qpn).is_none()
            && self.requester.responder.ud_receiver(header.dest_qpn).is_none()
        {
            return;
        }
        match env.peer(from, Qpn(source_qpn)) {
            PeerAnswer::Known(info) => {
                self.handle_from(env, now, header.dest_qpn, &info, datagram, packet.payload);
            }
            PeerAnswer::External(gid) => {
                self.requester.responder.accept_external(env, now, from, gid, (header.dest_qpn, datagram), packet)
            }
            PeerAnswer::Absent => self.requester.responder.drops.wrong_network += 1,
            PeerAnswer::Asked => {
                let waiting = &mut self.unresolved.waiting;
                let of_host = waiting.iter().filter(|unresolved_datagram| unresolved_datagram.host == from).count();
                if waiting.len() >= UNRESOLVED_MAX || of_host >= UNRESOLVED_OF_HOST_MAX {
                    self.requester.responder.drops.parked_overflow += 1;
                    return;
                }
                let (dest_qpn, payload) = (header.dest_qpn, packet.payload.to_vec());
                waiting.push_back(UnresolvedDatagram { host: from, source_qpn, dest_qpn, header: datagram, payload });
            }
        }
    }

    /// From a QP that is known now.
    fn handle_from<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        qpn: u32,
        sender: &PeerInfo,
        datagram: DatagramHeader,
        payload: &[u8],
    ) {
        let source = if datagram.by_ipv6 { sender.ipv6_gid } else { Some(sender.gid) };
        let Some(source) = source else { return self.requester.responder.drops.wrong_source += 1 };
        let network = (sender.service == QpType::Ud).then_some(sender.network);
        let grh = DatagramRoute { source, ..datagram.grh };
        self.distribute(env, now, qpn, network, DatagramHeader { grh, ..datagram }, payload);
    }

    /// To the group of this number, if it is of the sender's network, or to the QP, if the sender's
    /// network is where its address is for that QP.
    fn distribute<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        qpn: u32,
        network: Option<NetworkId>,
        datagram: DatagramHeader,
        payload: &[u8],
    ) {
        if let Some((of_group, group)) = self.requester.groups.of_number(qpn) {
            if network != Some(of_group) {
                return self.requester.responder.drops.wrong_network += 1;
            }
            let members: Vec<QpId> = self.requester.groups.members(of_group, group).collect();
            for id in members {
                let grh = DatagramRoute { destination: group, ..datagram.grh };
                if self.qp(id).receives()
                    && self.requester.responder.may_receive(env, id, (of_group, grh.source), TrafficKind::Multicast)
                {
                    self.requester.responder.deliver_datagram(
                        env,
                        now,
                        id,
                        DatagramHeader { grh, ..datagram },
                        payload,
                    );
                }
            }
            return;
        }
        let Some(id) = self.requester.responder.ud_receiver(qpn) else { return };
        let other = network.filter(|other| self.requester.responder.finds(env, id, (*other, datagram.grh.source)));
        let Some(other) = other else { return self.requester.responder.drops.wrong_network += 1 };
        let qp = self.qp(id);
        let destination = if datagram.by_ipv6 { qp.addresses.ipv6 } else { Some(qp.addresses.first) };
        let Some(destination) = destination else { return self.requester.responder.drops.wrong_source += 1 };
        let grh = DatagramRoute { destination, ..datagram.grh };
        if !self.requester.responder.may_receive(env, id, (other, grh.source), TrafficKind::Datagram) {
            return self.requester.responder.drops.denied += 1;
        }
        self.requester.responder.deliver_datagram(env, now, id, DatagramHeader { grh, ..datagram }, payload);
    }

    /// Whether datagrams wait until it is known who sent them.
    pub fn has_unresolved_datagrams(&self) -> bool {
        !self.unresolved.waiting.is_empty()
    }

    /// Senders of this host (of this QPN) are known now, or known not to be.
    pub(crate) fn resume_unresolved<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        host: HostId,
        qpn: Option<Qpn>,
    ) {
        let waiting = core::mem::take(&mut self.unresolved.waiting);
        for unresolved_datagram in waiting {
            let concerned =
                unresolved_datagram.host == host && qpn.is_none_or(|qpn| qpn.0 == unresolved_datagram.source_qpn);
            if !concerned {
                self.unresolved.waiting.push_back(unresolved_datagram);
                continue;
            }
            match env.peer(host, Qpn(unresolved_datagram.source_qpn)) {
                PeerAnswer::Known(info) => {
                    self.handle_from(
                        env,
                        now,
                        unresolved_datagram.dest_qpn,
                        &info,
                        unresolved_datagram.header,
                        &unresolved_datagram.payload,
                    );
                }
                PeerAnswer::Asked => self.unresolved.waiting.push_back(unresolved_datagram),
                PeerAnswer::Absent | PeerAnswer::External(_) => self.requester.responder.drops.wrong_network += 1,
            }
        }
    }
}
