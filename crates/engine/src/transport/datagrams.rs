//! UD packets that arrive from other hosts.
//!
//! The receiver must know whose a packet is, for the GRH and because networks do not mix: packets of senders that it has
//! not heard of wait in [`Strangers`] until their owner has answered. Packets that come while their receiver's RECV is
//! being filled, or while it is about to post one, wait at the QP, as messages of this host do (`crate::limits::LIVELY`).
use super::{HELD_PACKET_BYTES, Packet, WireFlight};
use crate::keys::Part;
use crate::limits::{PATIENCE_COUNT, PATIENCE_STEP};
use crate::qp::Claim;
use crate::responder::{Arrival, Received, Refused};
use crate::ud::{GRH_BYTES, grh, is_ipv6};
use crate::{
    CopyOutcome, Engine, Environment, HostId, Means, MemorySide, Path, PeerAnswer, PeerInfo, QpId, ReceiveQueueId,
    Source, SourceBody, Syndrome,
};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{
    Access, Completion, CompletionStatus, Duration, Gid, GlobalRoute, Instant, NetworkId, QpType, Qpn, SendOpcode,
};
use freeflow_wire::cm::MAD_QPN;
use serde::{Deserialize, Serialize};

/// Packets that wait for word of their senders, of all hosts together and of one.
const STRANGERS_MAX: usize = 1024;
const STRANGERS_OF_HOST_MAX: usize = 256;
/// Packets that wait at one QP, and for how long.
const DATAGRAMS_MAX: usize = 1024;
const DATAGRAM_PATIENCE: Duration = Duration(PATIENCE_STEP.0 * PATIENCE_COUNT as u64);

/// A UD packet whose sender is known.
#[derive(Serialize, Deserialize)]
pub(crate) struct Datagram {
    header: DatagramHeader,
    payload: Vec<u8>,
    at: Instant,
}

/// What of a UD packet matters to its receiver.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct DatagramHeader {
    grh: DatagramRoute,
    source_qpn: u32,
    qkey: u32,
    immediate: Option<u32>,
    solicited: bool,
    /// The sender's IPv6 address sent it, to the receiver's (or to a group).
    by_ipv6: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct DatagramRoute {
    source: Gid,
    destination: Gid,
    traffic_class: u8,
    hop_limit: u8,
}

/// UD packets of senders that nobody has told us about yet, in the order of arrival.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Strangers {
    waiting: VecDeque<Stranger>,
}

#[derive(Serialize, Deserialize)]
struct Stranger {
    host: HostId,
    source_qpn: u32,
    dest_qpn: u32,
    header: DatagramHeader,
    payload: Vec<u8>,
}

impl DatagramHeader {
    /// What stands in front of so many bytes.
    fn prefix(&self, length: u32) -> [u8; GRH_BYTES] {
        let DatagramRoute { source, destination, traffic_class, hop_limit } = self.grh;
        let to = GlobalRoute { dgid: destination, traffic_class, hop_limit, ..GlobalRoute::default() };
        grh(source, &to, length, self.immediate.is_some())
    }

    fn opcode(&self) -> SendOpcode {
        if self.immediate.is_some() { SendOpcode::SendWithImmediate } else { SendOpcode::Send }
    }
}

impl Engine {
    pub(super) fn handle_ud<E: Environment>(&mut self, env: &mut E, now: Instant, from: HostId, packet: &Packet<'_>) {
        let header = packet.header;
        if header.dest_qpn == MAD_QPN {
            return self.handle_management(env, from, packet);
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
        if self.groups.of_number(header.dest_qpn).is_none() && self.ud_receiver(header.dest_qpn).is_none() {
            return;
        }
        match env.peer(from, Qpn(source_qpn)) {
            PeerAnswer::Known(info) => {
                self.handle_from(env, now, header.dest_qpn, &info, datagram, packet.payload);
            }
            PeerAnswer::External(gid) => self.accept_external(env, now, from, gid, (header.dest_qpn, datagram), packet),
            PeerAnswer::Absent => self.drops.wrong_network += 1,
            PeerAnswer::Asked => {
                let waiting = &mut self.strangers.waiting;
                let of_host = waiting.iter().filter(|stranger| stranger.host == from).count();
                if waiting.len() >= STRANGERS_MAX || of_host >= STRANGERS_OF_HOST_MAX {
                    self.drops.parked_overflow += 1;
                    return;
                }
                let (dest_qpn, payload) = (header.dest_qpn, packet.payload.to_vec());
                waiting.push_back(Stranger { host: from, source_qpn, dest_qpn, header: datagram, payload });
            }
        }
    }

    /// The UD QP of this number, if it listens; counts why not.
    fn ud_receiver(&mut self, qpn: u32) -> Option<QpId> {
        let Some((id, qp)) = self.qpns.get(qpn).and_then(|index| self.qps.at(index)) else {
            self.drops.unknown_qpn += 1;
            return None;
        };
        let (is_ud, receives) = (qp.service == QpType::Ud, qp.receives());
        if !is_ud {
            self.drops.wrong_service += 1;
        } else if !receives {
            self.drops.wrong_state += 1;
        }
        (is_ud && receives).then_some(id)
    }

    /// An external machine reaches only vNICs that may reach it.
    fn accept_external<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        from: HostId,
        gid: Gid,
        (dest_qpn, datagram): (u32, DatagramHeader),
        packet: &Packet<'_>,
    ) {
        let Some(id) = self.ud_receiver(dest_qpn) else { return };
        let (vnic, network) = (self.qp(id).vnic, self.qp(id).network);
        let back = GlobalRoute { dgid: gid, sgid_index: 1, ..GlobalRoute::default() };
        match (env.path(vnic, network, &back), self.external_gid(vnic)) {
            (Path::Wire(destination), Some(own)) if destination.host == from => {
                if !self.may_receive_from_outside(env, id, gid) {
                    return self.drops.denied += 1;
                }
                let grh = DatagramRoute { source: gid, destination: own, ..datagram.grh };
                self.deliver_datagram(env, now, id, DatagramHeader { grh, ..datagram }, packet.payload);
            }
            _ => self.drops.wrong_source += 1,
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
        let Some(source) = source else { return self.drops.wrong_source += 1 };
        let network = (sender.service == QpType::Ud).then_some(sender.network);
        let grh = DatagramRoute { source, ..datagram.grh };
        self.distribute(env, now, qpn, network, DatagramHeader { grh, ..datagram }, payload);
    }

    /// To the group of this number, if it is of the sender's network, or to the QP, if the sender's network is where its address is
    /// for that QP.
    fn distribute<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        qpn: u32,
        network: Option<NetworkId>,
        datagram: DatagramHeader,
        payload: &[u8],
    ) {
        if let Some((of_group, group)) = self.groups.of_number(qpn) {
            if network != Some(of_group) {
                return self.drops.wrong_network += 1;
            }
            let members: Vec<QpId> = self.groups.members(of_group, group).collect();
            for id in members {
                let grh = DatagramRoute { destination: group, ..datagram.grh };
                if self.qp(id).receives() && self.may_receive(env, id, (of_group, grh.source), Means::Multicast) {
                    self.deliver_datagram(env, now, id, DatagramHeader { grh, ..datagram }, payload);
                }
            }
            return;
        }
        let Some(id) = self.ud_receiver(qpn) else { return };
        let other = network.filter(|other| self.finds(env, id, (*other, datagram.grh.source)));
        let Some(other) = other else { return self.drops.wrong_network += 1 };
        let qp = self.qp(id);
        let destination = if datagram.by_ipv6 { qp.addresses.ipv6 } else { Some(qp.addresses.first) };
        let Some(destination) = destination else { return self.drops.wrong_source += 1 };
        let grh = DatagramRoute { destination, ..datagram.grh };
        if !self.may_receive(env, id, (other, grh.source), Means::Datagram) {
            return self.drops.denied += 1;
        }
        self.deliver_datagram(env, now, id, DatagramHeader { grh, ..datagram }, payload);
    }

    fn deliver_datagram<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        datagram: DatagramHeader,
        payload: &[u8],
    ) {
        if datagram.qkey != self.qp(id).attributes.qkey {
            return self.drops.wrong_qkey += 1;
        }
        let counters = &mut self.vnic_of(id).counters.wire;
        counters.packets_received += 1;
        counters.bytes_received += payload.len() as u64;
        // In order behind those that wait.
        if !self.qp(id).receive.datagrams.is_empty() {
            return self.hold_datagram(now, id, datagram, payload.to_vec());
        }
        if let Some(refused) = self.take_datagram(env, now, id, &datagram, payload) {
            self.datagram_refused(env, now, id, refused, datagram, payload.to_vec());
        }
    }

    fn datagram_refused<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        refused: Refused,
        datagram: DatagramHeader,
        payload: Vec<u8>,
    ) {
        match refused {
            Refused::Busy => self.hold_datagram(now, id, datagram, payload),
            Refused::Late => {
                self.hold_datagram(now, id, datagram, payload);
                self.ask_for_receives(env, id);
                self.push_ready(id);
            }
            Refused::NotReady { .. } | Refused::Nak(_) | Refused::Dropped => {
                self.drops.no_receive += 1;
                self.count_lost(id);
            }
        }
    }

    fn hold_datagram(&mut self, now: Instant, id: QpId, header: DatagramHeader, payload: Vec<u8>) {
        let has_room = self.qp(id).receive.datagrams.len() < DATAGRAMS_MAX;
        if !has_room || !self.keep(id, payload.len()) {
            self.drops.no_receive += 1;
            return self.count_lost(id);
        }
        self.qp_mut(id).receive.datagrams.push_back(Datagram { header, payload, at: now });
    }

    /// The next RECV that is posted shall ring; false if it would have anyway.
    fn ask_for_receives<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let queue = self.receive_queue(id);
        if let ReceiveQueueId::Srq(srq) = queue
            && let Some(srq) = self.srqs.get_mut(srq)
            && !srq.waiters.contains(&id)
        {
            srq.waiters.push(id);
        }
        let asks = !self.is_wanted(queue);
        self.set_wanted(env, queue, true);
        asks
    }

    /// A RECV was posted.
    pub(crate) fn wake_datagrams(&mut self, id: QpId) {
        if self.qps.get(id).is_some_and(|qp| !qp.receive.datagrams.is_empty()) {
            self.push_ready(id);
        }
    }

    /// Packets that waited at a QP, in order.
    pub(crate) fn resume_datagrams<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        while let Some(qp) = self.qps.get_mut(id) {
            if !qp.receives() {
                qp.receive.datagrams.clear();
                return self.let_go(id, usize::MAX);
            }
            if matches!(qp.receive.claim, Claim::Wire | Claim::By(_)) {
                return;
            }
            let Some(datagram) = qp.receive.datagrams.pop_front() else { return };
            self.let_go(id, datagram.payload.len() + HELD_PACKET_BYTES);
            // One that waited for others to land may have waited long, and has a RECV for all that.
            let is_late = now - datagram.at > DATAGRAM_PATIENCE;
            match self.take_datagram(env, now, id, &datagram.header, &datagram.payload) {
                None => {}
                Some(Refused::Busy | Refused::Late) if !is_late => {
                    self.keep(id, datagram.payload.len());
                    self.qp_mut(id).receive.datagrams.push_front(datagram);
                    // One that was posted before its doorbell was asked for is seen by one more look.
                    if !self.ask_for_receives(env, id) {
                        return;
                    }
                }
                Some(_) => {
                    self.drops.no_receive += 1;
                    self.count_lost(id);
                }
            }
        }
    }

    /// Writes a packet to the QP's next RECV. `None`: it is done, or will be.
    fn take_datagram<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        datagram: &DatagramHeader,
        payload: &[u8],
    ) -> Option<Refused> {
        let length = payload.len() as u64;
        let opcode = datagram.opcode();
        // A landing packet has the same claim as this one.
        if self.qp(id).receive.claim == Claim::Wire {
            return Some(Refused::Busy);
        }
        let arrival = Arrival {
            claim: Claim::Wire,
            responder: id,
            srqn: 0,
            opcode,
            length,
            right: Access(0),
            whole: false,
            remote_address: 0,
            rkey: 0,
            qkey: datagram.qkey,
        };
        if let Err(refused) = self.admit(env, now, &arrival) {
            return Some(refused);
        }
        let bytes = length + GRH_BYTES as u64;
        let prefix = datagram.prefix(length as u32);
        self.qp_mut(id).receive.arriving = Some(Box::new(datagram_receipt(datagram, (bytes, is_ipv6(&prefix)), now)));
        self.from.clear();
        self.to.clear();
        let part = Part { pd: self.receive_pd(id), offset: 0, bytes };
        let sges = self.qps.get(id).expect("the receiver exists").receive.request.sges();
        if self.keys.gather(sges, part, Access::LOCAL_WRITE, &mut self.to).is_err() {
            let fault = (CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
            return Some(self.receive_fault(env, now, id, fault));
        }
        let source = Source { prefix: &prefix, body: SourceBody::Bytes(payload) };
        match env.copy(self.next_token(), source, &self.to, true) {
            CopyOutcome::Done => self.datagram_arrived(env, now, id),
            CopyOutcome::Pending => self.launch_wire(id, WireFlight::Payload, None),
            CopyOutcome::Fault(_) => {
                let fault = (CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
                return Some(self.receive_fault(env, now, id, fault));
            }
        }
        None
    }

    fn datagram_arrived<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let Some(completion) = self.qp_mut(id).receive.arriving.take() else { return };
        let counters = &mut self.vnic_of(id).counters;
        counters.received.add(u64::from(completion.byte_count) - GRH_BYTES as u64, 1, false);
        self.complete_receive(env, id, Completion { timestamp_ns: now.0, ..*completion });
    }

    pub(super) fn datagram_written<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        match result {
            Ok(()) => self.datagram_arrived(env, now, id),
            Err(_) => {
                let fault = (CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
                self.receive_fault(env, now, id, fault);
            }
        }
    }

    /// Senders of this host (of this QPN) are known now, or known not to be.
    pub(super) fn resume_strangers<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        host: HostId,
        qpn: Option<Qpn>,
    ) {
        let waiting = core::mem::take(&mut self.strangers.waiting);
        for stranger in waiting {
            let concerned = stranger.host == host && qpn.is_none_or(|qpn| qpn.0 == stranger.source_qpn);
            if !concerned {
                self.strangers.waiting.push_back(stranger);
                continue;
            }
            match env.peer(host, Qpn(stranger.source_qpn)) {
                PeerAnswer::Known(info) => {
                    self.handle_from(env, now, stranger.dest_qpn, &info, stranger.header, &stranger.payload);
                }
                PeerAnswer::Asked => self.strangers.waiting.push_back(stranger),
                PeerAnswer::Absent | PeerAnswer::External(_) => self.drops.wrong_network += 1,
            }
        }
    }
}

fn datagram_receipt(datagram: &DatagramHeader, (bytes, has_ipv6_header): (u64, bool), now: Instant) -> Completion {
    let received = Received {
        opcode: datagram.opcode(),
        bytes,
        argument: datagram.immediate.unwrap_or(0),
        solicited: datagram.solicited,
        source_qpn: Some(datagram.source_qpn),
        has_ipv6_header,
    };
    received.completion(now)
}
