//! UC over packets, UD to other hosts, multicast to other hosts (IBTA 9.8).
//!
//! A sender completes a message once its packets are out. A UC receiver drops a message of which a packet is missing.
use super::packets::operation;
use super::responder::send_opcode;
use super::{Packet, WireFlight};
use crate::keys::Part;
use crate::limits::{PATIENCE_COUNT, PATIENCE_STEP};
use crate::policy::IPV6_GID_INDEX;
use crate::qp::{Claim, SendPhase};
use crate::requester::{Budget, Turn};
use crate::responder::{Arrival, Received, effective_qkey, remote_right};
use crate::timers::TimerKind;
use crate::{
    CopyOutcome, Destination, Engine, Environment, HostId, MemorySide, PacketHead, Path, PeerAnswer, Progress, QpId,
    Source, SourceBody, Syndrome, TransmitOutcome,
};
use freeflow_verbs::{Access, CompletionStatus, Duration, Gid, Instant, NetworkId, QpType, Qpn, SendFlags, SendOpcode};
use freeflow_wire::cm::MAD_QPN;
use freeflow_wire::{Header, Opcode, Operation, Place, Reth, Service, psn_add};
use serde::{Deserialize, Serialize};

/// Packets of one UC burst.
const BURST_PACKETS_MAX: usize = 16;
const BURST_BYTES_MAX: u64 = 60 * 1024;
/// Time between two looks for the word of another host that keeps one waiting: 1 s in all. It counts while nobody has answered:
/// a router that has no processor for some hundred milliseconds loses no message.
const WORD_STEP: Duration = Duration::from_millis(10);
/// So long after one waited in vain the next ones wait less: 0.2 s in all. A host that is down does not hold up a QP's whole queue.
const VAIN_FOR: Duration = Duration::from_millis(30_000);
const VAIN_STEP: Duration = Duration::from_millis(2);
/// Hosts that a UD QP is made known to unasked; any more have to ask.
const INTRODUCED_HOSTS_MAX: usize = 256;

/// UC: both directions of one connection.
#[derive(Serialize, Deserialize)]
pub(crate) struct Unreliable {
    next_psn: u32,
    expected_psn: u32,
    /// The message that is arriving.
    message: Option<Message>,
}

/// A UC message of which the first packets have come.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Message {
    opcode: SendOpcode,
    address: u64,
    rkey: u32,
    /// WRITE: as announced.
    length: u64,
    received: u64,
    /// Of the packet that is being written.
    bytes: u64,
    ends: bool,
    solicited: bool,
    immediate: u32,
}

/// Whether a datagram may go to a QPN of another host.
enum Verdict {
    Go,
    /// Its owner is being asked.
    Wait,
    /// Nobody would take it.
    Lost,
}

impl Unreliable {
    pub fn new(sq_psn: u32, rq_psn: u32) -> Self {
        Self { next_psn: sq_psn, expected_psn: rq_psn, message: None }
    }

    pub fn begin(&mut self, sq_psn: u32) {
        self.next_psn = sq_psn;
    }
}

impl Engine {
    // ---- sending

    /// No QP of this host has the address of the request in hand: another host may. `None`: none has.
    pub(crate) fn find_wire<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Option<Turn> {
        match self.qp(id).service {
            QpType::Ud => self.find_datagram_wire(env, now, id),
            QpType::Uc => self.look_for_wire(env, id).then(|| {
                if self.gate_is_open(env, id) {
                    self.qp_mut(id).send.phase = SendPhase::Transmitting;
                    return Turn::Continue;
                }
                let (host, qpn) = (self.wire(id).destination.host, self.qp(id).attributes.dest_qpn);
                let is_asked = env.peer(host, Qpn(qpn)) == PeerAnswer::Asked;
                // A peer that is not there, or not connected back, may just be on its way; but not for each message anew.
                if is_asked || self.qp(id).send.patience_left > PATIENCE_COUNT / 2 {
                    return self.await_word(env, now, id);
                }
                self.unanswered(env, now, id)
            }),
            // The packet transport takes it from here, with the request in hand.
            _ => self.look_for_wire(env, id).then_some(Turn::Continue),
        }
    }

    fn find_datagram_wire<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Option<Turn> {
        let qp = self.qp(id);
        let (_, handle) = self.ahs.at(qp.send.request.address_handle)?;
        let (route, qpn) = (handle.route, Qpn(qp.send.request.remote_qpn & Qpn::MASK));
        if route.dgid.is_multicast() {
            return None;
        }
        let network = self.datagram_network(qp, &route);
        let Path::Wire(destination) = env.path(qp.vnic, network, &route) else { return None };
        let destination = Destination { traffic_class: route.traffic_class, ..destination };
        if qpn.0 <= MAD_QPN {
            // Management is its host's, not a tenant's.
            return Some(self.unanswered(env, now, id));
        }
        Some(match reaches(env, &destination, qpn, network, route.dgid) {
            Verdict::Go => self.send_datagram(env, now, id, &destination, qpn),
            Verdict::Wait => {
                self.introduce(env, id, destination.host);
                self.await_word(env, now, id)
            }
            Verdict::Lost => self.unanswered(env, now, id),
        })
    }

    /// Tells the host of a receiver who the sender is: it need not ask then, while messages pile up, and gets an answer
    /// even if the sender has gone by the time its message is looked at.
    fn introduce<E: Environment>(&mut self, env: &mut E, id: QpId, host: HostId) {
        let qp = self.qp_mut(id);
        if qp.introduced.len() < INTRODUCED_HOSTS_MAX && qp.introduced.insert(host) {
            env.identity_changed(qp.qpn, Some(host));
        }
    }

    /// Whoever owns the destination is being asked about it: the message waits a little while.
    fn await_word<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let send = &mut self.qp_mut(id).send;
        if send.patience_left == 0 {
            send.unanswered_at = Some(now);
            return self.unanswered(env, now, id);
        }
        let step = match send.unanswered_at {
            _ if send.patience_left > PATIENCE_COUNT / 2 => PATIENCE_STEP,
            Some(at) if now - at < VAIN_FOR => VAIN_STEP,
            _ => WORD_STEP,
        };
        send.patience_left -= 1;
        send.phase = SendPhase::Waiting;
        self.timers.arm(id, TimerKind::Patience, now + step);
        Turn::Stop(Progress::Waiting)
    }

    /// Sends the request in hand as one UD packet.
    pub(crate) fn send_datagram<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        destination: &Destination,
        qpn: Qpn,
    ) -> Turn {
        let qp = self.qp(id);
        let (length, psn) = (qp.send.length, qp.datagram_psn);
        if length > u64::from(destination.mtu) {
            self.fail_send(env, now, id, (CompletionStatus::LocalLengthError, Syndrome::LocalLength));
            return Turn::Continue;
        }
        self.introduce(env, id, destination.host);
        let qp = self.qp(id);
        let request = &qp.send.request;
        let operation = if request.opcode.has_immediate() { Operation::SendImmediate } else { Operation::Send };
        let opcode = Opcode::new(Service::Ud, operation, Place::Only).expect("UD has both");
        let mut header = Header::new(opcode, qpn.0, psn);
        header.solicited = request.flags.contains(SendFlags::SOLICITED);
        header.deth.qkey = effective_qkey(request.remote_qkey, qp.attributes.qkey);
        header.deth.source_qpn = qp.qpn.0;
        header.immediate = request.immediate;
        let route = self.ahs.at(request.address_handle).map(|(_, handle)| handle.route);
        header.by_ipv6 = route.is_some_and(|route| route.sgid_index == IPV6_GID_INDEX);
        let head = PacketHead::new(header, length as usize);
        let flow = Destination { flow: qp.qpn.0, ..*destination };
        self.send_packets(env, now, id, &flow, &[head], (0, length))
    }

    /// Sends packets whose payload is a part of the request in hand.
    fn send_packets<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        destination: &Destination,
        heads: &[PacketHead],
        (offset, bytes): (u64, u64),
    ) -> Turn {
        self.from.clear();
        self.to.clear();
        let qp = self.qps.get(id).expect("the requester exists");
        let request = &*qp.send.request;
        if !request.is_inline() {
            let part = Part { pd: qp.sender_pd(), offset, bytes };
            if self.keys.gather(request.sges(), part, Access(0), &mut self.from).is_err() {
                self.fail_send(env, now, id, (CompletionStatus::LocalProtectionError, Syndrome::LocalKey));
                return Turn::Continue;
            }
        }
        let body = if request.is_inline() {
            SourceBody::Bytes(&request.inline_data[offset as usize..(offset + bytes) as usize])
        } else {
            SourceBody::Spans(&self.from)
        };
        match env.transmit(self.next_token(), destination, heads, Source { prefix: &[], body }) {
            TransmitOutcome::Full => Turn::Stop(Progress::More),
            TransmitOutcome::Sent => {
                self.note_sent(id, heads, bytes);
                self.packets_sent(env, now, id);
                Turn::Continue
            }
            TransmitOutcome::Pending => {
                self.note_sent(id, heads, bytes);
                self.launch_wire(id, WireFlight::Request, None);
                let send = &mut self.qp_mut(id).send;
                // What goes on when it has landed.
                send.phase = SendPhase::InFlight;
                Turn::Stop(Progress::Waiting)
            }
            TransmitOutcome::Fault => {
                self.fail_send(env, now, id, (CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone));
                Turn::Continue
            }
        }
    }

    fn note_sent(&mut self, id: QpId, heads: &[PacketHead], bytes: u64) {
        let count = heads.len() as u64;
        let counters = &mut self.vnic_of(id).counters.wire;
        counters.packets_sent += count;
        counters.bytes_sent += bytes;
        let qp = self.qp_mut(id);
        qp.used.bytes += bytes;
        match &mut qp.wire {
            Some(wire) => {
                wire.counters.packets_sent += count;
                wire.counters.bytes_sent += bytes;
                wire.unreliable.next_psn = psn_add(wire.unreliable.next_psn, heads.len() as u32);
                qp.send.moved += bytes;
            }
            None => qp.datagram_psn = psn_add(qp.datagram_psn, 1),
        }
    }

    /// The packets of the last `send_packets` are out.
    fn packets_sent<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let qp = self.qp_mut(id);
        if qp.wire.is_some() {
            qp.send.phase = SendPhase::Transmitting;
            if qp.send.moved >= qp.send.length {
                let bytes = qp.send.length;
                self.count_wire(id, bytes);
                self.succeed_send(env, now, id);
            }
            return;
        }
        let bytes = qp.send.length;
        if let Some(fanout) = qp.send.fanout.as_mut().filter(|fanout| fanout.is_under_way()) {
            fanout.host_done();
            if fanout.is_under_way() {
                qp.send.phase = SendPhase::Replicate;
                return;
            }
        }
        self.count_wire(id, bytes);
        self.succeed_send(env, now, id);
    }

    /// The payload of pending packets was fetched, and they went out; or it is not there.
    pub(super) fn datagram_fetched<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        match result {
            Ok(()) => self.packets_sent(env, now, id),
            Err(_) => {
                self.fail_send(env, now, id, (CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone));
            }
        }
    }

    /// UC: the next packets of the message in hand.
    pub(crate) fn transmit_on<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Turn {
        let qp = self.qp(id);
        let Some(wire) = &qp.wire else { return self.unanswered(env, now, id) };
        let destination = Destination { flow: qp.qpn.0, ..wire.destination };
        let mtu = u64::from(self.wire_mtu(id));
        let (request, length) = (&qp.send.request, qp.send.length);
        let (mut at, mut psn) = (qp.send.moved, wire.unreliable.next_psn);
        let (begin, mut heads) = (at, [const { None }; BURST_PACKETS_MAX]);
        let mut count = 0;
        let most = BURST_BYTES_MAX.min(budget.chunk_bytes);
        while count < BURST_PACKETS_MAX && (at < length || at == 0 && count == 0) && at - begin + mtu <= most {
            let bytes = mtu.min(length - at);
            let place = match (at == 0, at + bytes == length) {
                (true, true) => Place::Only,
                (true, false) => Place::First,
                (false, true) => Place::Last,
                (false, false) => Place::Middle,
            };
            let opcode = Opcode::new(Service::Uc, operation(request.opcode), place).expect("UC has SEND and WRITE");
            let mut header = Header::new(opcode, qp.attributes.dest_qpn, psn);
            header.solicited = opcode.ends() && request.flags.contains(SendFlags::SOLICITED);
            header.immediate = request.immediate;
            header.reth = Reth { address: request.remote_address, rkey: request.rkey, length: length as u32 };
            heads[count] = Some(PacketHead::new(header, bytes as usize));
            count += 1;
            at += bytes;
            psn = psn_add(psn, 1);
        }
        budget.bytes = budget.bytes.saturating_sub((at - begin).max(1));
        let heads: [PacketHead; BURST_PACKETS_MAX] =
            heads.map(|head| head.unwrap_or(PacketHead { header: EMPTY_HEADER, payload_bytes: 0 }));
        self.send_packets(env, now, id, &destination, &heads[..count], (begin, at - begin))
    }

    // ---- UC: receiving

    /// A packet out of sequence ends the message that it interrupts; what follows is dropped up to the next message
    /// (IBTA 9.8.2.2).
    pub(super) fn handle_uc<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
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
            Some(Message {
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

    /// Lengths as the standard has them: whole packets but the last; a WRITE brings exactly what it announced.
    fn fits(&self, id: QpId, message: &Message) -> bool {
        let mtu = u64::from(self.wire_mtu(id));
        let arrived = message.received + message.bytes;
        let whole = if message.ends { message.bytes <= mtu } else { message.bytes == mtu };
        let announced = match (message.opcode.is_write(), message.ends) {
            (false, _) => true,
            (true, true) => arrived == message.length,
            (true, false) => arrived < message.length,
        };
        whole && announced
    }

    fn admit_uc<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, message: &Message) -> bool {
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

    fn write_uc<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, message: &Message, payload: &[u8]) {
        if payload.is_empty() {
            return self.uc_arrived(env, now, id);
        }
        self.from.clear();
        self.to.clear();
        let gathered = if message.opcode.is_send() {
            let part = Part { pd: self.receive_pd(id), offset: message.received, bytes: message.bytes };
            let peer = self.qps.get(id).expect("the responder exists");
            self.keys.gather(peer.receive.request.sges(), part, Access::LOCAL_WRITE, &mut self.to).is_ok()
        } else {
            let (reach, address) = (self.reach(id), message.address.wrapping_add(message.received));
            let right = remote_right(message.opcode);
            let span = self.keys.resolve_remote(message.rkey, reach, address, message.bytes as u32, right);
            span.map(|span| self.to.push(span)).is_ok()
        };
        if !gathered {
            return self.lose_message(id);
        }
        let source = Source { prefix: &[], body: SourceBody::Bytes(payload) };
        match env.copy(self.next_token(), source, &self.to, message.ends) {
            CopyOutcome::Done => self.uc_arrived(env, now, id),
            CopyOutcome::Pending => {
                let rkey = (!message.opcode.is_send()).then_some(message.rkey);
                self.launch_wire(id, WireFlight::Payload, rkey);
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
        self.complete_receive(env, id, received.completion(now));
    }

    pub(super) fn uc_written<E: Environment>(
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

    pub(super) fn count_lost(&mut self, id: QpId) {
        self.vnic_of(id).counters.wire.lost += 1;
        if let Some(wire) = &mut self.qp_mut(id).wire {
            wire.counters.lost += 1;
        }
    }
}

const EMPTY_HEADER: freeflow_wire::HeaderBytes =
    freeflow_wire::HeaderBytes { bytes: [0; freeflow_wire::HEADER_BYTES_MAX], length: 0 };

/// Is the QPN of the network and the GID that a datagram is for?
fn reaches<E: Environment>(env: &mut E, to: &Destination, qpn: Qpn, network: NetworkId, gid: Gid) -> Verdict {
    let is_meant = match env.peer(to.host, qpn) {
        PeerAnswer::Known(info) => info.network == network && info.has(gid) && info.service == QpType::Ud,
        PeerAnswer::External(external) => external == gid,
        PeerAnswer::Absent => false,
        PeerAnswer::Asked => return Verdict::Wait,
    };
    if is_meant { Verdict::Go } else { Verdict::Lost }
}
