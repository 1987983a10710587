//! UC over packets, UD to other hosts, multicast to other hosts (IBTA 9.8): the sending side. A
//! sender completes a message once its packets are out.
use crate::arrival::effective_qkey;
use crate::fault::Fault;
use crate::keys::Part;
use crate::limits::{RNR_GRACE_STEP, RNR_GRACE_STEPS};
use crate::policy::IPV6_GID_INDEX;
use crate::qp::SendPhase;
use crate::requester::Requester;
use crate::timers::TimerKind;
use crate::transport::packets::operation;
use crate::transport::unreliable::{
    DATAGRAM_BURST_BYTES_MAX, DATAGRAM_BURST_PACKETS_MAX, INTRODUCED_HOSTS_MAX, Reachability, VAIN_FOR, VAIN_STEP,
    WORD_STEP,
};
use crate::transport::wire::WireOperation;
use crate::turn::{Budget, Turn};
use crate::{
    Destination, Environment, HostId, MemorySide, PacketHead, Path, PeerAnswer, Progress, QpId, Source, SourceBody,
    Syndrome, TransmitOutcome,
};
use freeflow_verbs::{Access, CompletionStatus, Gid, Instant, NetworkId, QpType, Qpn, SendFlags};
use freeflow_wire::cm::MAD_QPN;
use freeflow_wire::{Header, Opcode, Operation, PacketPosition, Reth, Service, psn_add};

const EMPTY_HEADER: freeflow_wire::HeaderBytes =
    freeflow_wire::HeaderBytes { bytes: [0; freeflow_wire::HEADER_BYTES_MAX], length: 0 };

impl Requester {
    // ---- sending

    /// No QP of this host has the address of the request in hand: another host may. `None`: none
    /// has.
    pub(crate) fn find_wire<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Option<Turn> {
        match self.qp(id).service {
            QpType::Ud => self.find_datagram_wire(env, now, id),
            QpType::Uc => self.responder.look_for_wire(env, id).then(|| {
                if self.responder.gate_is_open(env, id) {
                    self.qp_mut(id).send.phase = SendPhase::Transmitting;
                    return Turn::Continue;
                }
                let (host, qpn) = (self.wire(id).destination.host, self.qp(id).attributes.dest_qpn);
                let is_asked = env.peer(host, Qpn(qpn)) == PeerAnswer::Asked;
                // A peer that is not there, or not connected back, may just be on its way; but not
                // for each message again.
                if is_asked || self.qp(id).send.grace_steps_left > RNR_GRACE_STEPS / 2 {
                    return self.await_word(env, now, id);
                }
                self.unanswered(env, now, id)
            }),
            // The packet transport takes it from here, with the request in hand.
            _ => self.responder.look_for_wire(env, id).then_some(Turn::Continue),
        }
    }

    fn find_datagram_wire<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Option<Turn> {
        let qp = self.qp(id);
        let (_, handle) = self.responder.completer.ahs.at(qp.send.request.address_handle)?;
        let (route, qpn) = (handle.route, Qpn(qp.send.request.remote_qpn & Qpn::MASK));
        if route.dgid.is_multicast() {
            return None;
        }
        let network = self.responder.datagram_network(qp, &route);
        let Path::Wire(destination) = env.path(qp.vnic, network, &route) else { return None };
        let destination = Destination { traffic_class: route.traffic_class, ..destination };
        if qpn.0 <= MAD_QPN {
            // Management is its host's, not a tenant's.
            return Some(self.unanswered(env, now, id));
        }
        Some(match reaches(env, &destination, qpn, network, route.dgid) {
            Reachability::Go => self.send_datagram(env, now, id, &destination, qpn),
            Reachability::Wait => {
                self.introduce(env, id, destination.host);
                self.await_word(env, now, id)
            }
            Reachability::Lost => self.unanswered(env, now, id),
        })
    }

    /// Announces the sender to the host of a receiver: it need not ask then, while messages pile
    /// up, and gets an answer even if the sender has gone by the time its message is looked at.
    fn introduce<E: Environment>(&mut self, env: &mut E, id: QpId, host: HostId) {
        let qp = self.qp_mut(id);
        if qp.introduced.len() < INTRODUCED_HOSTS_MAX && qp.introduced.insert(host) {
            env.identity_changed(qp.qpn, Some(host));
        }
    }

    /// The owner of the destination is being asked about it: the message waits a little while.
    fn await_word<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> Turn {
        let send = &mut self.qp_mut(id).send;
        if send.grace_steps_left == 0 {
            send.unanswered_at = Some(now);
            return self.unanswered(env, now, id);
        }
        let step = match send.unanswered_at {
            _ if send.grace_steps_left > RNR_GRACE_STEPS / 2 => RNR_GRACE_STEP,
            Some(at) if now - at < VAIN_FOR => VAIN_STEP,
            _ => WORD_STEP,
        };
        send.grace_steps_left -= 1;
        send.phase = SendPhase::Waiting;
        self.responder.completer.timers.arm(id, TimerKind::RnrGrace, now + step);
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
            self.responder.completer.fail_send(
                env,
                now,
                id,
                Fault::new(CompletionStatus::LocalLengthError, Syndrome::LocalLength),
            );
            return Turn::Continue;
        }
        self.introduce(env, id, destination.host);
        let qp = self.qp(id);
        let request = &qp.send.request;
        let operation = if request.opcode.has_immediate() { Operation::SendImmediate } else { Operation::Send };
        let opcode = Opcode::new(Service::Ud, operation, PacketPosition::Only).expect("UD has both");
        let mut header = Header::new(opcode, qpn.0, psn);
        header.solicited = request.flags.contains(SendFlags::SOLICITED);
        header.deth.qkey = effective_qkey(request.remote_qkey, qp.attributes.qkey);
        header.deth.source_qpn = qp.qpn.0;
        header.immediate = request.immediate;
        let route = self.responder.completer.ahs.at(request.address_handle).map(|(_, handle)| handle.route);
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
        self.responder.completer.from.clear();
        self.responder.completer.to.clear();
        let qp = self.responder.completer.qps.get(id).expect("the requester exists");
        let request = &*qp.send.request;
        if !request.is_inline() {
            let part = Part { pd: qp.sender_pd(), offset, bytes };
            if self
                .responder
                .completer
                .keys
                .gather(request.sges(), part, Access(0), &mut self.responder.completer.from)
                .is_err()
            {
                self.responder.completer.fail_send(
                    env,
                    now,
                    id,
                    Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalKey),
                );
                return Turn::Continue;
            }
        }
        let body = if request.is_inline() {
            SourceBody::Bytes(&request.inline_data[offset as usize..(offset + bytes) as usize])
        } else {
            SourceBody::Spans(&self.responder.completer.from)
        };
        match env.transmit(self.responder.completer.next_token(), destination, heads, Source { prefix: &[], body }) {
            TransmitOutcome::Full => Turn::Stop(Progress::More),
            TransmitOutcome::Sent => {
                self.note_sent(id, heads, bytes);
                self.packets_sent(env, now, id);
                Turn::Continue
            }
            TransmitOutcome::Pending => {
                self.note_sent(id, heads, bytes);
                self.responder.completer.submit_wire(id, WireOperation::Request, None);
                let send = &mut self.qp_mut(id).send;
                // The message goes on when the operation has completed.
                send.phase = SendPhase::InFlight;
                Turn::Stop(Progress::Waiting)
            }
            TransmitOutcome::Fault => {
                self.responder.completer.fail_send(
                    env,
                    now,
                    id,
                    Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone),
                );
                Turn::Continue
            }
        }
    }

    pub(crate) fn note_sent(&mut self, id: QpId, heads: &[PacketHead], bytes: u64) {
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
                self.responder.completer.count_wire(id, bytes);
                self.responder.completer.succeed_send(env, now, id);
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
        self.responder.completer.count_wire(id, bytes);
        self.responder.completer.succeed_send(env, now, id);
    }

    /// The payload of pending packets was fetched, and they went out; or it is not there.
    pub(crate) fn datagram_fetched<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        match result {
            Ok(()) => self.packets_sent(env, now, id),
            Err(_) => {
                self.responder.completer.fail_send(
                    env,
                    now,
                    id,
                    Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone),
                );
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
        let mtu = u64::from(self.responder.completer.wire_mtu(id));
        let (request, length) = (&qp.send.request, qp.send.length);
        let (mut at, mut psn) = (qp.send.moved, wire.unreliable.next_psn);
        let (begin, mut heads) = (at, [const { None }; DATAGRAM_BURST_PACKETS_MAX]);
        let mut count = 0;
        let most = DATAGRAM_BURST_BYTES_MAX.min(budget.chunk_bytes);
        while count < DATAGRAM_BURST_PACKETS_MAX && (at < length || at == 0 && count == 0) && at - begin + mtu <= most {
            let bytes = mtu.min(length - at);
            let place = match (at == 0, at + bytes == length) {
                (true, true) => PacketPosition::Only,
                (true, false) => PacketPosition::First,
                (false, true) => PacketPosition::Last,
                (false, false) => PacketPosition::Middle,
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
        let heads: [PacketHead; DATAGRAM_BURST_PACKETS_MAX] =
            heads.map(|head| head.unwrap_or(PacketHead { header: EMPTY_HEADER, payload_bytes: 0 }));
        self.send_packets(env, now, id, &destination, &heads[..count], (begin, at - begin))
    }
}

/// Is the QPN of the network and the GID that a datagram is for?
pub(crate) fn reaches<E: Environment>(
    env: &mut E,
    to: &Destination,
    qpn: Qpn,
    network: NetworkId,
    gid: Gid,
) -> Reachability {
    let is_meant = match env.peer(to.host, qpn) {
        PeerAnswer::Known(info) => info.network == network && info.has(gid) && info.service == QpType::Ud,
        PeerAnswer::External(external) => external == gid,
        PeerAnswer::Absent => false,
        PeerAnswer::Asked => return Reachability::Wait,
    };
    if is_meant { Reachability::Go } else { Reachability::Lost }
}
