//! UD packets of other hosts, as their receivers take them: held until there is a RECV, written,
//! completed. Packets that come while their receiver's RECV is being filled, or while it is about
//! to post one, wait at the QP, as messages of this host do (`crate::limits::RECENTLY_ACTIVE`).
//!
//! Management datagrams (MADs) of machines without FreeFlow come to QP 1. No tenant has it: whose
//! connections are managed is the environment's to say. Other routers have a channel for this, so
//! what comes from them by packets is nobody's.
use crate::arrival::{Arrival, Received, Rejection};
use crate::fault::Fault;
use crate::keys::Part;
use crate::qp::Claim;
use crate::responder::Responder;
use crate::transport::datagrams::{DATAGRAM_RNR_GRACE, DATAGRAMS_MAX, Datagram, DatagramHeader, DatagramRoute};
use crate::transport::management::opcode;
use crate::transport::packets::Packet;
use crate::transport::wire::{HELD_PACKET_BYTES, WireOperation};
use crate::ud::is_ipv6;
use crate::{
    CopyOutcome, Environment, GRH_BYTES, HostId, MemorySide, Path, QpId, ReceiveQueueId, Source, SourceBody, Syndrome,
};
use alloc::boxed::Box;
use alloc::vec::Vec;
use freeflow_verbs::{Access, Completion, CompletionStatus, Gid, GlobalRoute, Instant, QpType};
use freeflow_wire::cm::{MAD_QKEY, MAD_QPN};

impl Responder {
    /// The UD QP of this number, if it listens; counts why not.
    pub(crate) fn ud_receiver(&mut self, qpn: u32) -> Option<QpId> {
        let Some((id, qp)) = self.qpns.get(qpn).and_then(|index| self.completer.qps.at(index)) else {
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
    pub(crate) fn accept_external<E: Environment>(
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
        match (env.path(vnic, network, &back), self.completer.external_gid(vnic)) {
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

    pub(crate) fn deliver_datagram<E: Environment>(
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
        refused: Rejection,
        datagram: DatagramHeader,
        payload: Vec<u8>,
    ) {
        match refused {
            Rejection::Busy => self.hold_datagram(now, id, datagram, payload),
            Rejection::Late => {
                self.hold_datagram(now, id, datagram, payload);
                self.ask_for_receives(env, id);
                self.push_ready(id);
            }
            Rejection::NotReady { .. } | Rejection::Postponed | Rejection::Nak(_) | Rejection::Dropped => {
                self.drops.no_receive += 1;
                self.count_lost(id);
            }
        }
    }

    fn hold_datagram(&mut self, now: Instant, id: QpId, header: DatagramHeader, payload: Vec<u8>) {
        let has_room = self.qp(id).receive.datagrams.len() < DATAGRAMS_MAX;
        if !has_room || !self.completer.keep(id, payload.len()) {
            self.drops.no_receive += 1;
            return self.count_lost(id);
        }
        self.qp_mut(id).receive.datagrams.push_back(Datagram { header, payload, at: now });
    }

    /// The next RECV that is posted shall ring; false if it would have anyway.
    fn ask_for_receives<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let queue = self.receive_queue(id);
        if let ReceiveQueueId::Srq(srq) = queue
            && let Some(srq) = self.completer.srqs.get_mut(srq)
            && !srq.waiters.contains(&id)
        {
            srq.waiters.push(id);
        }
        let asks = !self.completer.is_wanted(queue);
        self.completer.set_wanted(env, queue, true);
        asks
    }

    /// A RECV was posted.
    pub(crate) fn wake_datagrams(&mut self, id: QpId) {
        if self.completer.qps.get(id).is_some_and(|qp| !qp.receive.datagrams.is_empty()) {
            self.push_ready(id);
        }
    }

    /// Packets that waited at a QP, in order.
    pub(crate) fn resume_datagrams<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        while let Some(qp) = self.completer.qps.get_mut(id) {
            if !qp.receives() {
                qp.receive.datagrams.clear();
                return self.completer.let_go(id, usize::MAX);
            }
            if matches!(qp.receive.claim, Claim::Wire | Claim::By(_)) {
                return;
            }
            let Some(datagram) = qp.receive.datagrams.pop_front() else { return };
            self.completer.let_go(id, datagram.payload.len() + HELD_PACKET_BYTES);
            // One that waited for others to land may have waited long, and has a RECV for all that.
            let is_late = now - datagram.at > DATAGRAM_RNR_GRACE;
            match self.take_datagram(env, now, id, &datagram.header, &datagram.payload) {
                None => {}
                Some(Rejection::Busy | Rejection::Late) if !is_late => {
                    self.completer.keep(id, datagram.payload.len());
                    self.qp_mut(id).receive.datagrams.push_front(datagram);
                    // One that was posted before its doorbell was asked for is seen by one more
                    // look.
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
    ) -> Option<Rejection> {
        let length = payload.len() as u64;
        let opcode = datagram.opcode();
        // A landing packet has the same claim as this one.
        if self.qp(id).receive.claim == Claim::Wire {
            return Some(Rejection::Busy);
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
        self.completer.from.clear();
        self.completer.to.clear();
        let part = Part { pd: self.receive_pd(id), offset: 0, bytes };
        let sges = self.completer.qps.get(id).expect("the receiver exists").receive.request.sges();
        if self.completer.keys.gather(sges, part, Access::LOCAL_WRITE, &mut self.completer.to).is_err() {
            let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::ReceiveKey);
            return Some(self.receive_fault(env, now, id, fault));
        }
        let source = Source { prefix: &prefix, body: SourceBody::Bytes(payload) };
        match env.copy(self.completer.next_token(), source, &self.completer.to, true) {
            CopyOutcome::Done => self.datagram_arrived(env, now, id),
            CopyOutcome::Pending => self.completer.submit_wire(id, WireOperation::Payload, None),
            CopyOutcome::Fault(_) => {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
                return Some(self.receive_fault(env, now, id, fault));
            }
        }
        None
    }

    fn datagram_arrived<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let Some(completion) = self.qp_mut(id).receive.arriving.take() else { return };
        let counters = &mut self.vnic_of(id).counters;
        counters.received.add(u64::from(completion.byte_count) - GRH_BYTES as u64, 1, false);
        self.completer.complete_receive(env, id, Completion { timestamp_ns: now.0, ..*completion });
    }

    pub(crate) fn datagram_written<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        match result {
            Ok(()) => self.datagram_arrived(env, now, id),
            Err(_) => {
                let fault = Fault::new(CompletionStatus::LocalProtectionError, Syndrome::RemoteMemoryGone);
                self.receive_fault(env, now, id, fault);
            }
        }
    }

    /// A UD packet to QP 1.
    pub(crate) fn handle_management<E: Environment>(&mut self, env: &mut E, from: HostId, packet: &Packet<'_>) {
        let header = packet.header;
        if header.opcode != opcode() {
            return self.drops.wrong_service += 1;
        }
        if header.deth.qkey != MAD_QKEY {
            return self.drops.wrong_qkey += 1;
        }
        let Ok(mad) = packet.payload.try_into() else { return self.drops.malformed += 1 };
        if header.deth.source_qpn != MAD_QPN || !env.take_management(from, mad) {
            self.drops.wrong_source += 1;
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
