//! UC messages that arrive by packets (IBTA 9.8.2). A message of which a packet is missing is
//! dropped.
use crate::arrival::{Arrival, Received, remote_right};
use crate::keys::Part;
use crate::qp::Claim;
use crate::responder::Responder;
use crate::transport::packets::Packet;
use crate::transport::responder::send_opcode;
use crate::transport::unreliable::IncomingDatagramMessage;
use crate::transport::wire::WireOperation;
use crate::{CopyOutcome, Environment, MemorySide, QpId, Source, SourceBody};
use freeflow_verbs::{Access, Instant};
use freeflow_wire::psn_add;

impl Responder {
    // ---- UC: receiving

    /// A packet out of sequence ends the message that it interrupts; what follows is dropped up to
    /// the next message (IBTA 9.8.2.2).
    pub(crate) fn handle_uc<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        let (header, payload) = (packet.header, packet.payload);
        let state = &mut self.wire_mut(id).unreliable;
        let in_sequence = header.psn == state.expected_psn;
        state.expected_psn = psn_add(header.psn, 1);
        if !in_sequence || header.opcode.begins() {
            self.give_up_message(id);
        }
        let opcode = send_opcode(header.opcode);
        let begun = if header.opcode.begins() {
            let length = if opcode.is_write() { u64::from(header.reth.length) } else { 0 };
            Some(IncomingDatagramMessage {
                opcode,
                address: header.reth.address,
                rkey: header.reth.rkey,
                length,
                received: 0,
                bytes: 0,
                ends: false,
                solicited: false,
                immediate: 0,
            })
        } else {
            self.wire_mut(id).unreliable.message.take().filter(|message| message.opcode.is_send() == opcode.is_send())
        };
        let Some(mut message) = begun else { return self.count_lost(id) };
        message.opcode = opcode;
        message.bytes = payload.len() as u64;
        message.ends = header.opcode.ends();
        message.solicited = header.solicited;
        message.immediate = header.immediate;
        if !self.fits(id, &message) || !self.admit_uc(env, now, id, &message) {
            self.wire_mut(id).unreliable.message = None;
            self.release_wire_claim(id);
            return self.count_lost(id);
        }
        self.wire_mut(id).unreliable.message = Some(message);
        self.write_uc(env, now, id, &message, payload);
    }

    /// Lengths as the standard has them: whole packets but the last; a WRITE brings exactly what it
    /// announced.
    pub(crate) fn fits(&self, id: QpId, message: &IncomingDatagramMessage) -> bool {
        let mtu = u64::from(self.completer.wire_mtu(id));
        let arrived = message.received + message.bytes;
        let whole = if message.ends { message.bytes <= mtu } else { message.bytes == mtu };
        let announced = match (message.opcode.is_write(), message.ends) {
            (false, _) => true,
            (true, true) => arrived == message.length,
            (true, false) => arrived < message.length,
        };
        whole && announced
    }

    fn admit_uc<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        message: &IncomingDatagramMessage,
    ) -> bool {
        // The RECV of a WRITE with immediate data is taken with its last packet.
        let opcode = message.opcode;
        let length = if opcode.is_write() { message.length } else { message.received + message.bytes };
        let arrival = Arrival {
            claim: Claim::Wire,
            responder: id,
            srqn: 0,
            opcode,
            length,
            right: remote_right(opcode),
            whole: false,
            remote_address: message.address,
            rkey: message.rkey,
            qkey: 0,
        };
        self.admit(env, now, &arrival).is_ok()
    }

    fn write_uc<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        message: &IncomingDatagramMessage,
        payload: &[u8],
    ) {
        if payload.is_empty() {
            return self.uc_arrived(env, now, id);
        }
        self.completer.from.clear();
        self.completer.to.clear();
        let gathered = if message.opcode.is_send() {
            let part = Part { pd: self.receive_pd(id), offset: message.received, bytes: message.bytes };
            let peer = self.completer.qps.get(id).expect("the responder exists");
            self.completer
                .keys
                .gather(peer.receive.request.sges(), part, Access::LOCAL_WRITE, &mut self.completer.to)
                .is_ok()
        } else {
            let (reach, address) = (self.reach(id), message.address.wrapping_add(message.received));
            let right = remote_right(message.opcode);
            let span = self.completer.keys.resolve_remote(message.rkey, reach, address, message.bytes as u32, right);
            span.map(|span| self.completer.to.push(span)).is_ok()
        };
        if !gathered {
            return self.lose_message(id);
        }
        let source = Source { prefix: &[], body: SourceBody::Bytes(payload) };
        match env.copy(self.completer.next_token(), source, &self.completer.to, message.ends) {
            CopyOutcome::Done => self.uc_arrived(env, now, id),
            CopyOutcome::Pending => {
                let rkey = (!message.opcode.is_send()).then_some(message.rkey);
                self.completer.submit_wire(id, WireOperation::Payload, rkey);
            }
            CopyOutcome::Fault(_) => self.lose_message(id),
        }
    }

    /// The payload of a packet is where it belongs.
    fn uc_arrived<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let Some(mut message) = self.wire_mut(id).unreliable.message.take() else { return };
        message.received += message.bytes;
        if !message.ends {
            self.wire_mut(id).unreliable.message = Some(message);
            return;
        }
        if message.opcode.is_write() {
            self.vnic_of(id).counters.writes_received += 1;
        }
        self.vnic_of(id).counters.received.add(message.received, 1, false);
        if !message.opcode.consumes_receive() {
            return;
        }
        let received = Received {
            opcode: message.opcode,
            bytes: message.received,
            argument: message.immediate,
            solicited: message.solicited,
            source_qpn: None,
            has_ipv6_header: false,
        };
        self.completer.complete_receive(env, id, received.completion(now));
    }

    pub(crate) fn uc_written<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        match result {
            Ok(()) => self.uc_arrived(env, now, id),
            Err(_) => self.lose_message(id),
        }
    }

    /// A message that was under way is not whole any more.
    fn give_up_message(&mut self, id: QpId) {
        if self.wire_mut(id).unreliable.message.is_some() {
            self.lose_message(id);
        }
    }

    fn lose_message(&mut self, id: QpId) {
        self.wire_mut(id).unreliable.message = None;
        self.release_wire_claim(id);
        self.count_lost(id);
    }

    /// The RECV that a lost message took is the next one's.
    fn release_wire_claim(&mut self, id: QpId) {
        let receive = &mut self.qp_mut(id).receive;
        if receive.claim == Claim::Wire {
            receive.claim = Claim::Held;
        }
    }

    pub(crate) fn count_lost(&mut self, id: QpId) {
        self.vnic_of(id).counters.wire.lost += 1;
        if let Some(wire) = &mut self.qp_mut(id).wire {
            wire.counters.lost += 1;
        }
    }
}
