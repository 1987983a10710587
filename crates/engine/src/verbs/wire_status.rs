//! Getters of the packet transport, for `status` and tests.
use crate::{Drops, Engine, HostId, HostStatus, PeerInfo, QpId, QpWireStatus};
use alloc::vec::Vec;
use freeflow_verbs::{QpType, Qpn};

impl Engine {
    /// Packets that no QP acted upon, by reason.
    pub fn drops(&self) -> Drops {
        self.requester.responder.drops
    }

    /// Whether the QP has a peer on another host.
    pub fn is_on_wire(&self, id: QpId) -> bool {
        self.completer().qps.get(id).is_some_and(|qp| qp.wire.is_some())
    }

    /// Whether some QP has its peer on that host.
    pub fn is_connected_to(&self, host: HostId) -> bool {
        self.requester.responder.peers.leads_to(host)
    }

    /// Of all QPs that have a peer on another host.
    pub fn wire_qps(&self) -> impl Iterator<Item = QpWireStatus> + '_ {
        self.completer().qps.iter().filter_map(|(_, qp)| {
            let wire = qp.wire.as_ref()?;
            Some(QpWireStatus {
                host: wire.destination.host,
                qpn: qp.qpn,
                dest_qpn: Qpn(qp.attributes.dest_qpn),
                window_bytes: wire.requester.congestion.window_bytes(),
                in_flight_bytes: wire.share.in_flight_bytes(),
                smoothed_rtt_ns: wire.requester.congestion.smoothed_rtt_ns(),
                counters: wire.counters,
            })
        })
    }

    /// Bytes that may be on the way to one host, besides the last burst. What is on the way already
    /// stays.
    pub fn set_host_bytes_max(&mut self, bytes: u64) {
        self.completer_mut().hosts.bytes_max = bytes.max(1);
        let hosts: Vec<HostId> = self.completer().hosts.flows.keys().copied().collect();
        for host in hosts {
            self.completer_mut().grant_waiting(host);
        }
    }

    /// Of all hosts that something is, or was, on the way to.
    pub fn host_flows(&self) -> impl Iterator<Item = HostStatus> + '_ {
        self.completer().hosts.flows.iter().map(|(host, flow)| {
            let waiting = flow.vnic_queues.values().map(|vnic_queue| vnic_queue.listed.len()).sum();
            HostStatus { host: *host, in_flight_bytes: flow.taken_bytes, waiting }
        })
    }

    /// Description of the QP behind a QPN of this host, for other hosts' routers.
    pub fn peer_info(&self, qpn: Qpn) -> Option<PeerInfo> {
        let (_, qp) = self.completer().qps.at(self.requester.responder.qpns.get(qpn.0)?)?;
        let connected = (qp.is_connected_service() && qp.receives())
            .then(|| Some((qp.remote_gid()?, Qpn(qp.attributes.dest_qpn))))
            .flatten();
        let ipv6_gid = qp.addresses.ipv6.filter(|_| qp.service == QpType::Ud);
        Some(PeerInfo { network: qp.network, gid: qp.gid(), ipv6_gid, service: qp.service, connected })
    }
}
