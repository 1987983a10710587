//! Counting of messages, for QPs and for the ports of vNICs; see `counters` for what counts as a
//! packet.
use crate::completer::Completer;
use crate::counters::add_reported;
use crate::qp::QueuePair;
use crate::transport::responder::Written;
use crate::{DirectTraffic, Engine, QpId, VnicId};
use freeflow_verbs::{QpType, SendOpcode};

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

impl Completer {
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

    /// WRITEs of another host were executed by this responder.
    pub(crate) fn count_written(&mut self, responder: QpId, written: &Written) {
        let traffic = &mut self.qp_mut(responder).traffic;
        traffic.messages_received += u64::from(written.messages);
        traffic.bytes_received += written.bytes;
        let counters = &mut self.vnic_of(responder).counters;
        counters.received.add(written.bytes, written.packets, false);
        counters.writes_received += u64::from(written.messages);
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

impl Engine {
    /// Counts what a QP did past the router, for its vNIC and for its peer's. Either may be gone.
    pub fn count_direct(&mut self, from: VnicId, to: VnicId, traffic: &DirectTraffic) {
        self.count_direct_sent(from, traffic);
        self.count_direct_received(to, traffic);
    }

    /// The same for its own vNIC.
    pub fn count_direct_sent(&mut self, from: VnicId, traffic: &DirectTraffic) {
        if let Some(vnic) = self.requester.responder.completer.vnics.get_mut(from) {
            let counters = &mut vnic.counters;
            let messages = traffic.messages();
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
    }

    /// The same for its peer's.
    pub fn count_direct_received(&mut self, to: VnicId, traffic: &DirectTraffic) {
        if let Some(vnic) = self.requester.responder.completer.vnics.get_mut(to) {
            let counters = &mut vnic.counters;
            traffic.count(&mut counters.received, &mut counters.sent);
            add_reported(&mut counters.writes_received, traffic.writes);
            add_reported(&mut counters.reads_received, traffic.reads);
            add_reported(&mut counters.atomics_received, traffic.atomics);
        }
    }

    /// The same for the QP itself, and for its peer. Either may be gone.
    pub fn count_direct_of_qps(&mut self, from: Option<QpId>, to: Option<QpId>, traffic: &DirectTraffic) {
        let messages = traffic.messages();
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
        if let Some(qp) = from.and_then(|from| self.requester.responder.completer.qps.get_mut(from)) {
            count(qp, traffic.sent_bytes, traffic.read_bytes, messages, 0);
        }
        if let Some(qp) = to.and_then(|to| self.requester.responder.completer.qps.get_mut(to)) {
            count(qp, traffic.read_bytes, traffic.sent_bytes, 0, messages);
        }
    }
}
