//! What a vNIC's port would have carried, for its port counters.
//!
//! Local delivery has no packets. Counted are those that the wire would need: a message's payload in pieces of the path
//! MTU, and one request packet for a READ or an atomic. Acknowledgements, headers and retries are not counted: there
//! are none.
use crate::{Engine, QpId};
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
    }

    fn count_shape(&mut self, id: QpId, shape: &Shape) {
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

    fn count_arrival(&mut self, responder: QpId, shape: &Shape) {
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
