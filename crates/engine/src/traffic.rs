//! What a vNIC's port would have carried, for its port counters.
//!
//! Local delivery has no packets. Counted are those that the wire would need: a message's payload in pieces of the path
//! MTU, and one request packet for a READ or an atomic. Acknowledgements, headers and retries are not counted: there
//! are none. What goes past the router is counted so by the libraries, and added here.
use crate::qp::QueuePair;
use crate::{Engine, QpId, VnicId};
use freeflow_verbs::{QpType, SendOpcode};
use serde::{Deserialize, Serialize};

/// Payload and packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub bytes: u64,
    pub packets: u64,
    /// Of `packets`, those to a multicast group.
    pub multicast_packets: u64,
}

impl Traffic {
    pub(crate) fn add(&mut self, bytes: u64, packets: u64, multicast: bool) {
        self.bytes += bytes;
        self.packets += packets;
        self.multicast_packets += if multicast { packets } else { 0 };
    }
}

/// A sum to which a library's word adds nothing more: what the engine counts itself never makes it overflow.
const REPORTED_SUM_MAX: u64 = 1 << 63;

fn add_reported(sum: &mut u64, more: u64) {
    *sum = sum.saturating_add(more).min(REPORTED_SUM_MAX.max(*sum));
}

/// What was carried out past the router, as the requester's library says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectTraffic {
    pub sends: u64,
    pub writes: u64,
    /// Of both.
    pub sent_bytes: u64,
    pub sent_packets: u64,
    pub reads: u64,
    /// What they brought.
    pub read_bytes: u64,
    pub read_packets: u64,
}

impl DirectTraffic {
    /// Counts it for one of the two ports: where the payload of SENDs and WRITEs goes out, and where it comes in.
    fn count(&self, out: &mut Traffic, back: &mut Traffic) {
        add_reported(&mut out.bytes, self.sent_bytes);
        add_reported(&mut out.packets, self.sent_packets.saturating_add(self.reads));
        add_reported(&mut back.bytes, self.read_bytes);
        add_reported(&mut back.packets, self.read_packets);
    }
}

/// The message in hand, as a port sees it.
struct Shape {
    opcode: SendOpcode,
    bytes: u64,
    packets: u64,
    multicast: bool,
}

impl Shape {
    /// The data comes back from the responder.
    fn returns(&self) -> bool {
        self.opcode == SendOpcode::RdmaRead || self.opcode.is_atomic()
    }
}

impl Engine {
    fn shape(&self, id: QpId) -> Shape {
        let qp = self.qp(id);
        let request = &qp.send.request;
        let bytes = qp.send.length;
        let datagram = qp.service == QpType::Ud;
        // A power of two.
        let mtu = u64::from(qp.attributes.path_mtu.bytes());
        let packets = if datagram || bytes <= mtu { 1 } else { (bytes + mtu - 1) >> mtu.trailing_zeros() };
        let group = || self.ahs.at(request.address_handle).is_some_and(|(_, handle)| handle.route.dgid.is_multicast());
        Shape { opcode: request.opcode, bytes, packets, multicast: datagram && group() }
    }

    /// The request in hand went out, and its answer came back: the requester's side.
    pub(crate) fn count_sent(&mut self, id: QpId) {
        self.count_shape(id, &self.shape(id));
    }

    /// The same for a message of the packet transport.
    pub(crate) fn count_sent_message(&mut self, id: QpId, opcode: SendOpcode, bytes: u64) {
        let mtu = u64::from(self.wire_mtu(id));
        let packets = if bytes <= mtu { 1 } else { bytes.div_ceil(mtu) };
        self.count_shape(id, &Shape { opcode, bytes, packets, multicast: false });
        self.count_wire(id, bytes);
    }

    /// A message that is counted went to another host.
    pub(crate) fn count_wire(&mut self, id: QpId, bytes: u64) {
        let counters = &mut self.vnic_of(id).counters;
        counters.wire_messages += 1;
        counters.wire_bytes += bytes;
    }

    fn count_shape(&mut self, id: QpId, shape: &Shape) {
        let traffic = &mut self.qp_mut(id).traffic;
        traffic.messages_sent += 1;
        traffic.bytes_requested += shape.bytes;
        *if shape.returns() { &mut traffic.bytes_received } else { &mut traffic.bytes_sent } += shape.bytes;
        let counters = &mut self.vnic_of(id).counters;
        counters.messages += 1;
        counters.bytes += shape.bytes;
        if shape.opcode.is_local() {
            return;
        }
        if shape.returns() {
            counters.sent.add(0, 1, false);
            counters.received.add(shape.bytes, shape.packets, false);
        } else {
            counters.sent.add(shape.bytes, shape.packets, shape.multicast);
        }
    }

    /// The request in hand of `id` reached `responder`: the responder's side.
    pub(crate) fn count_received(&mut self, id: QpId, responder: QpId) {
        let shape = self.shape(id);
        if self.qps.get(responder).is_some() {
            self.count_arrival(responder, &shape);
        }
    }

    /// A request of another host was executed by this responder.
    pub(crate) fn count_arrived(&mut self, responder: QpId, opcode: SendOpcode, bytes: u64) {
        let packets = bytes.div_ceil(u64::from(self.wire_mtu(responder))).max(1);
        self.count_arrival(responder, &Shape { opcode, bytes, packets, multicast: false });
    }

    /// Counts what a QP did past the router, for its vNIC and for its peer's. Either may be gone.
    pub fn count_direct(&mut self, from: VnicId, to: VnicId, traffic: &DirectTraffic) {
        if let Some(vnic) = self.vnics.get_mut(from) {
            let counters = &mut vnic.counters;
            let messages = traffic.sends.saturating_add(traffic.writes).saturating_add(traffic.reads);
            let bytes = traffic.sent_bytes.saturating_add(traffic.read_bytes);
            for (sum, more) in [
                (&mut counters.messages, messages),
                (&mut counters.direct_messages, messages),
                (&mut counters.bytes, bytes),
                (&mut counters.direct_bytes, bytes),
            ] {
                add_reported(sum, more);
            }
            traffic.count(&mut counters.sent, &mut counters.received);
        }
        if let Some(vnic) = self.vnics.get_mut(to) {
            let counters = &mut vnic.counters;
            traffic.count(&mut counters.received, &mut counters.sent);
            add_reported(&mut counters.writes_received, traffic.writes);
            add_reported(&mut counters.reads_received, traffic.reads);
        }
    }

    /// The same for the QP itself, and for its peer. Either may be gone.
    pub fn count_direct_of_qps(&mut self, from: QpId, to: Option<QpId>, traffic: &DirectTraffic) {
        let messages = traffic.sends.saturating_add(traffic.writes).saturating_add(traffic.reads);
        let count = |qp: &mut QueuePair, out: u64, back: u64, sent: u64, received: u64| {
            let of_qp = &mut qp.traffic;
            for (sum, direct, more) in [
                (&mut of_qp.bytes_sent, &mut of_qp.direct_bytes_sent, out),
                (&mut of_qp.bytes_received, &mut of_qp.direct_bytes_received, back),
                (&mut of_qp.messages_sent, &mut of_qp.direct_messages_sent, sent),
                (&mut of_qp.messages_received, &mut of_qp.direct_messages_received, received),
            ] {
                add_reported(sum, more);
                add_reported(direct, more);
            }
        };
        if let Some(qp) = self.qps.get_mut(from) {
            count(qp, traffic.sent_bytes, traffic.read_bytes, messages, 0);
        }
        if let Some(qp) = to.and_then(|to| self.qps.get_mut(to)) {
            count(qp, traffic.read_bytes, traffic.sent_bytes, 0, messages);
        }
    }

    fn count_arrival(&mut self, responder: QpId, shape: &Shape) {
        let traffic = &mut self.qp_mut(responder).traffic;
        traffic.messages_received += 1;
        *if shape.returns() { &mut traffic.bytes_sent } else { &mut traffic.bytes_received } += shape.bytes;
        let counters = &mut self.vnic_of(responder).counters;
        if shape.returns() {
            counters.received.add(0, 1, false);
            counters.sent.add(shape.bytes, shape.packets, false);
        } else {
            counters.received.add(shape.bytes, shape.packets, shape.multicast);
        }
        match shape.opcode {
            SendOpcode::RdmaRead => counters.reads_received += 1,
            opcode if opcode.is_atomic() => counters.atomics_received += 1,
            opcode if opcode.is_write() || opcode == SendOpcode::AtomicWrite => counters.writes_received += 1,
            _ => {}
        }
    }
}
