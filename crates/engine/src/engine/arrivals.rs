//! Packets of other hosts: which QP each is for, and which part of it takes it.
use crate::in_flight::InFlightId;
use crate::qp::Teardown;
use crate::transport::packets::Packet;
use crate::transport::peers::PeerGate;
use crate::transport::wire::{HELD_PACKET_BYTES, PARKED_BYTES_MAX, PARKED_PACKETS_MAX, PKEY_MASK, WireOperation};
use crate::{Engine, Environment, HostId, IpInfo, MemorySide, QpId};
use alloc::vec::Vec;
use freeflow_verbs::{Instant, QpState, QpType, Qpn};
use freeflow_wire::records::{Records, is_records};
use freeflow_wire::{Header, Operation, Service};

impl Engine {
    // ---- arrivals

    /// A datagram of another host: BTH to padding. Its ICRC was right.
    pub fn handle_datagram<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        from: HostId,
        ip: &IpInfo,
        bytes: &[u8],
    ) {
        if is_records(bytes) {
            return self.handle_records(env, now, from, ip, bytes);
        }
        let (header, payload) = match Header::parse(bytes) {
            Ok(parsed) => parsed,
            Err(_) => return self.requester.responder.drops.malformed += 1,
        };
        if header.pkey & PKEY_MASK != PKEY_MASK {
            return self.requester.responder.drops.wrong_pkey += 1;
        }
        let packet = Packet { header: &header, payload, ip: *ip };
        if header.opcode.service() == Service::Ud {
            return self.handle_ud(env, now, from, &packet);
        }
        let Some((id, _)) =
            self.requester.responder.qpns.get(header.dest_qpn).and_then(|index| self.completer().qps.at(index))
        else {
            return self.requester.responder.drops.unknown_qpn += 1;
        };
        if !self.may_act(env, id, from, &header) {
            return;
        }
        if self.wire(id).writing {
            return self.park(id, bytes, ip);
        }
        self.act(env, now, id, &packet);
    }

    /// Does the QP listen to this host, and to this kind of packet (IBTA 9.6.1)?
    pub(crate) fn may_act<E: Environment>(&mut self, env: &mut E, id: QpId, from: HostId, header: &Header) -> bool {
        let qp = self.qp(id);
        let (service, is_response) = (header.opcode.service(), header.opcode.is_response());
        let fits = match qp.service {
            QpType::Rc => service == Service::Rc,
            QpType::Uc => service == Service::Uc,
            QpType::XrcSend => service == Service::Xrc && is_response,
            QpType::XrcReceive => service == Service::Xrc && !is_response,
            QpType::Ud => false,
        };
        if !fits {
            self.requester.responder.drops.wrong_service += 1;
            return false;
        }
        let sends = matches!(qp.state(), QpState::ReadyToSend | QpState::SqDrain);
        if qp.teardown != Teardown::None || !(if is_response { sends } else { qp.receives() }) {
            self.requester.responder.drops.wrong_state += 1;
            return false;
        }
        if !self.requester.responder.look_for_wire(env, id) || self.wire(id).destination.host != from {
            self.requester.responder.drops.wrong_source += 1;
            return false;
        }
        true
    }

    pub(crate) fn act<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        self.completer_mut().tally(id, |counters| {
            counters.packets_received += 1;
            counters.bytes_received += packet.payload.len() as u64;
        });
        match packet.header.opcode.operation() {
            Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::ReadResponse => {
                self.completer_mut().handle_answer(env, now, id, packet);
            }
            _ if self.qp(id).service == QpType::Uc => self.requester.responder.handle_uc(env, now, id, packet),
            _ => {
                self.requester.responder.handle_request(env, now, id, packet);
                self.requester.responder.take_kept(env, now, id);
            }
        }
    }

    pub(crate) fn park(&mut self, id: QpId, bytes: &[u8], ip: &IpInfo) {
        self.park_at(id, self.wire(id).parked.len(), bytes.to_vec(), ip);
    }

    /// A packet waits, with so many before it. False: there is no room.
    pub(crate) fn park_at(&mut self, id: QpId, place: usize, bytes: Vec<u8>, ip: &IpInfo) -> bool {
        let wire = self.wire(id);
        let has_room = wire.parked.len() < PARKED_PACKETS_MAX && wire.parked_bytes + bytes.len() <= PARKED_BYTES_MAX;
        if !has_room || !self.completer_mut().keep(id, bytes.len()) {
            // Lost as on a wire: the requester sends it again.
            self.requester.responder.drops.parked_overflow += 1;
            return false;
        }
        let wire = self.wire_mut(id);
        wire.parked_bytes += bytes.len();
        wire.parked.insert(place, (bytes, *ip));
        true
    }

    /// Continues with packets that arrived while another was in flight.
    pub(crate) fn resume_parked<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        self.requester.responder.take_kept(env, now, id);
        while let Some(qp) = self.completer_mut().qps.get_mut(id) {
            let receives = qp.receives() || qp.state() == QpState::SqDrain;
            let Some(wire) = &mut qp.wire else { return };
            if wire.writing || !receives {
                return;
            }
            let Some((bytes, ip)) = wire.parked.pop_front() else { return };
            wire.parked_bytes -= bytes.len();
            self.completer_mut().let_go(id, bytes.len() + HELD_PACKET_BYTES);
            if let Ok(records) = Records::parse(&bytes) {
                self.act_on_records(env, now, id, records, &ip);
            } else if let Ok((header, payload)) = Header::parse(&bytes) {
                self.act(env, now, id, &Packet { header: &header, payload, ip });
            }
        }
    }

    /// The result of a copy or a transmission that was pending.
    pub(crate) fn handle_wire_copied<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        operation: InFlightId,
        kind: WireOperation,
        result: Result<(), MemorySide>,
    ) {
        let Some(id) = self.completer_mut().complete_wire(operation, kind) else { return };
        match kind {
            WireOperation::Request if !self.qp(id).service.is_reliable() => {
                self.requester.datagram_fetched(env, now, id, result)
            }
            WireOperation::Request => self.requester.request_fetched(env, now, id, result),
            WireOperation::Result => self.completer_mut().result_written(env, now, id, result),
            WireOperation::Response => self.requester.responder.response_fetched(env, now, id, result),
            WireOperation::Payload if self.qp(id).service == QpType::Ud => {
                self.requester.responder.datagram_written(env, now, id, result)
            }
            WireOperation::Payload if self.qp(id).service == QpType::Uc => {
                self.requester.responder.uc_written(env, now, id, result)
            }
            WireOperation::Payload => self.requester.responder.payload_written(env, now, id, result),
            // They have results of other kinds.
            WireOperation::Atomic | WireOperation::Carried | WireOperation::Landing => {}
        }
        self.push_ready(id);
        self.resume_parked(env, now, id);
    }

    pub(crate) fn handle_wire_atomic<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        operation: InFlightId,
        result: Result<u64, ()>,
    ) {
        let Some(id) = self.completer_mut().complete_wire(operation, WireOperation::Atomic) else { return };
        self.requester.responder.atomic_done(env, now, id, result);
        self.push_ready(id);
        self.resume_parked(env, now, id);
    }

    /// Applies a change of the environment's knowledge of a QPN of another host (or of all).
    pub fn handle_peer_changed<E: Environment>(&mut self, env: &mut E, now: Instant, host: HostId, qpn: Option<Qpn>) {
        for id in self.requester.responder.peers.of(host, qpn) {
            self.wire_mut(id).gate = PeerGate::Unchecked;
            if self.requester.responder.gate_is_open(env, id) {
                self.requester.peer_came(env, now, id);
            } else if self.wire(id).requester.gated {
                self.requester.responder.note_gated(env, id);
            }
        }
        self.resume_unresolved(env, now, host, qpn);
    }
}
