//! The packet transport: what a QP does whose peer is on another host (IBTA chapter 9).
//!
//! Read in this order: this file (what a connected QP has for it, and where each packet goes), `requester` (requests become
//! packets, answers become completions), `responder` (requests of the peer; it admits them by the very pipeline that local
//! delivery uses, `crate::responder`) with `replay` (those that come twice) and `answers` (what goes back), `unreliable`
//! (UC, and UD on its way out), `datagrams` (UD that arrives), `management` (of these: MADs), `congestion` (how much a QP may have on the way), `hosts` (how
//! much all of them may have on the way to one host).
//!
//! Invariant: a packet acts on a QP only if its source host is the one that the QP's path leads to (UD: if the source's
//! owner says that it is of the same network). What is dropped is counted in [`Drops`].
//!
//! Invariant: packets of a QP are acted upon one at a time, in the order of arrival: while the payload of one is still being
//! written elsewhere (`landing`), later ones are parked.
mod answers;
mod completer;
mod congestion;
mod counters;
mod datagrams;
mod hosts;
mod management;
mod packets;
mod peers;
mod replay;
mod requester;
mod responder;
mod retransmit;
mod unreliable;
mod window;

pub use counters::{Drops, QpWireStatus, WireCounters};
pub(crate) use datagrams::{Datagram, Strangers};
pub use hosts::HostStatus;
pub(crate) use hosts::Hosts;
pub use management::management_head;
pub(crate) use peers::Peers;

use crate::flight::{FlightId, FlightKind};
use crate::qp::Teardown;
use crate::{Destination, Engine, Environment, HostId, IpInfo, MemorySide, Path, QpId};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{Instant, PathMtu, QpAttributes, QpState, QpType};
use freeflow_wire::{Header, Operation, Service};
use hosts::Share;
use peers::Gate;
use requester::Requester;
use responder::Responder;
use serde::{Deserialize, Serialize};
use unreliable::Unreliable;

/// Packets of one QP that wait while an earlier one lands, and their bytes.
const PARKED_PACKETS_MAX: usize = 1024;
const PARKED_BYTES_MAX: usize = 4 << 20;
/// Bytes of packets that wait at all QPs of one vNIC: what a tenant can make the router keep.
const HELD_BYTES_OF_VNIC_MAX: usize = 32 << 20;
/// What a packet that waits takes beside its bytes.
const HELD_PACKET_BYTES: usize = 96;
/// P_Keys that are accepted: the default partition, as a full or a limited member (IBTA 10.9.1).
const PKEY_MASK: u16 = 0x7fff;

/// What a connected QP (RC, UC, XRC) has whose peer is on another host.
#[derive(Serialize, Deserialize)]
pub(crate) struct Wire {
    pub destination: Destination,
    pub gate: Gate,
    /// RC, XRC.
    pub requester: Requester,
    /// RC, XRC.
    pub share: Share,
    /// RC, XRC.
    pub responder: Responder,
    /// UC.
    pub unreliable: Unreliable,
    /// The payload of a received packet is being written elsewhere, or an atomic done.
    pub landing: bool,
    parked: VecDeque<(Vec<u8>, IpInfo)>,
    parked_bytes: usize,
    pub counters: WireCounters,
}

/// Kinds of flights of the packet transport: what goes on elsewhere, for one QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WireFlight {
    /// Requester: payload of its packets is being fetched; the environment sends them.
    Request,
    /// Requester: what a READ or an atomic brought is being written to local memory.
    Result,
    /// Responder: READ responses are being fetched; the environment sends them.
    Response,
    /// Responder: payload is being written.
    Payload,
    /// Responder: an atomic is being done.
    Atomic,
}

impl WireFlight {
    pub fn is_requesters(self) -> bool {
        matches!(self, Self::Request | Self::Result)
    }

    /// Received packets wait until it has landed.
    fn lands(self) -> bool {
        matches!(self, Self::Result | Self::Payload | Self::Atomic)
    }
}

/// A received packet that a QP acts upon.
#[derive(Clone, Copy)]
pub(crate) struct Packet<'a> {
    pub header: &'a Header,
    pub payload: &'a [u8],
    pub ip: IpInfo,
}

impl Engine {
    // ---- paths

    /// A connected QP got the address of its peer, or finds nobody of this host behind it: looks where it leads. True:
    /// it runs the packet transport from now on (or did so already).
    pub(crate) fn look_for_wire<E: Environment>(&mut self, env: &mut E, id: QpId) -> bool {
        let qp = self.qp(id);
        if qp.wire.is_some() || !qp.is_connected_service() {
            return qp.wire.is_some();
        }
        let (vnic, reached, attributes) = (qp.vnic, qp.reached, &qp.attributes);
        let Some(route) = attributes.address.grh else { return false };
        let Path::Wire(destination) = env.path(vnic, reached, &route) else { return false };
        let destination = Destination { traffic_class: route.traffic_class, ..destination };
        let (sq_psn, rq_psn) = (attributes.sq_psn, attributes.rq_psn);
        let (qpn, dest_qpn) = (qp.qpn, attributes.dest_qpn);
        self.qp_mut(id).wire = Some(Box::new(Wire {
            destination,
            gate: Gate::Unchecked,
            requester: Requester::new(sq_psn, path_mtu(attributes, &destination)),
            share: Share::default(),
            responder: Responder::new(rq_psn),
            unreliable: Unreliable::new(sq_psn, rq_psn),
            landing: false,
            parked: VecDeque::new(),
            parked_bytes: 0,
            counters: WireCounters::default(),
        }));
        self.peers.connect(destination.host, dest_qpn, id);
        env.identity_changed(qpn, Some(destination.host));
        true
    }

    /// The QP got an address anew: nobody has said that its peer is the one behind it.
    pub(crate) fn doubt_wire(&mut self, id: QpId) {
        if let Some(wire) = &mut self.qp_mut(id).wire {
            wire.gate = Gate::Unchecked;
        }
    }

    /// To RTS: the PSN that its requests begin with is known.
    pub(crate) fn begin_wire(&mut self, id: QpId) {
        let sq_psn = self.qp(id).attributes.sq_psn;
        self.qp_mut(id).datagram_psn = sq_psn;
        if let Some(wire) = &mut self.qp_mut(id).wire {
            wire.requester.begin(sq_psn);
            wire.unreliable.begin(sq_psn);
        }
    }

    /// The QP is reset or goes: nothing of it is on the way any more.
    pub(crate) fn cut_wire<E: Environment>(&mut self, env: &mut E, id: QpId) {
        self.leave_host(id);
        let qp = self.qp_mut(id);
        let (qpn, dest_qpn) = (qp.qpn, qp.attributes.dest_qpn);
        let Some(wire) = qp.wire.take() else { return };
        self.peers.disconnect(wire.destination.host, dest_qpn, id);
        env.identity_changed(qpn, Some(wire.destination.host));
    }

    /// The way to the QP's peer; only for one that has one.
    pub(crate) fn wire(&self, id: QpId) -> &Wire {
        self.qp(id).wire.as_ref().expect("the QP runs the packet transport")
    }

    pub(crate) fn wire_mut(&mut self, id: QpId) -> &mut Wire {
        self.qp_mut(id).wire.as_mut().expect("the QP runs the packet transport")
    }

    /// The same for a QP.
    pub(crate) fn wire_mtu(&self, id: QpId) -> u32 {
        let qp = self.qp(id);
        let asked = qp.attributes.path_mtu.bytes();
        qp.wire.as_ref().map_or(asked, |wire| path_mtu(&qp.attributes, &wire.destination))
    }

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
        let (header, payload) = match Header::parse(bytes) {
            Ok(parsed) => parsed,
            Err(_) => return self.drops.malformed += 1,
        };
        if header.pkey & PKEY_MASK != PKEY_MASK {
            return self.drops.wrong_pkey += 1;
        }
        let packet = Packet { header: &header, payload, ip: *ip };
        if header.opcode.service() == Service::Ud {
            return self.handle_ud(env, now, from, &packet);
        }
        let Some((id, _)) = self.qpns.get(header.dest_qpn).and_then(|index| self.qps.at(index)) else {
            return self.drops.unknown_qpn += 1;
        };
        if !self.may_act(env, id, from, &header) {
            return;
        }
        if self.wire(id).landing {
            return self.park(id, bytes, ip);
        }
        self.act(env, now, id, &packet);
    }

    /// Does the QP listen to this host, and to this kind of packet (IBTA 9.6.1)?
    fn may_act<E: Environment>(&mut self, env: &mut E, id: QpId, from: HostId, header: &Header) -> bool {
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
            self.drops.wrong_service += 1;
            return false;
        }
        let sends = matches!(qp.state(), QpState::ReadyToSend | QpState::SqDrain);
        if qp.teardown != Teardown::None || !(if is_response { sends } else { qp.receives() }) {
            self.drops.wrong_state += 1;
            return false;
        }
        if !self.look_for_wire(env, id) || self.wire(id).destination.host != from {
            self.drops.wrong_source += 1;
            return false;
        }
        true
    }

    fn act<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, packet: &Packet<'_>) {
        self.tally(id, |counters| {
            counters.packets_received += 1;
            counters.bytes_received += packet.payload.len() as u64;
        });
        match packet.header.opcode.operation() {
            Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::ReadResponse => {
                self.handle_answer(env, now, id, packet);
            }
            _ if self.qp(id).service == QpType::Uc => self.handle_uc(env, now, id, packet),
            _ => self.handle_request(env, now, id, packet),
        }
    }

    fn park(&mut self, id: QpId, bytes: &[u8], ip: &IpInfo) {
        let wire = self.wire(id);
        let has_room = wire.parked.len() < PARKED_PACKETS_MAX && wire.parked_bytes + bytes.len() <= PARKED_BYTES_MAX;
        if !has_room || !self.keep(id, bytes.len()) {
            // Lost as on a wire: the requester sends it again.
            self.drops.parked_overflow += 1;
            return;
        }
        let wire = self.wire_mut(id);
        wire.parked_bytes += bytes.len();
        wire.parked.push_back((bytes.to_vec(), *ip));
    }

    /// A packet shall wait at a QP; false if its vNIC has too many of them.
    fn keep(&mut self, id: QpId, bytes: usize) -> bool {
        let bytes = bytes + HELD_PACKET_BYTES;
        let held = &mut self.vnic_of(id).held_bytes;
        if *held + bytes > HELD_BYTES_OF_VNIC_MAX {
            return false;
        }
        *held += bytes;
        self.qp_mut(id).receive.held_bytes += bytes;
        true
    }

    /// So many bytes (or all) of what waited at a QP do not any more.
    pub(crate) fn let_go(&mut self, id: QpId, bytes: usize) {
        let held = &mut self.qp_mut(id).receive.held_bytes;
        let bytes = bytes.min(*held);
        *held -= bytes;
        self.vnic_of(id).held_bytes -= bytes;
    }

    /// What arrived while a packet was landing.
    fn resume_parked<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        while let Some(qp) = self.qps.get_mut(id) {
            let receives = qp.receives() || qp.state() == QpState::SqDrain;
            let Some(wire) = &mut qp.wire else { return };
            if wire.landing || !receives {
                return;
            }
            let Some((bytes, ip)) = wire.parked.pop_front() else { return };
            wire.parked_bytes -= bytes.len();
            self.let_go(id, bytes.len() + HELD_PACKET_BYTES);
            if let Ok((header, payload)) = Header::parse(&bytes) {
                self.act(env, now, id, &Packet { header: &header, payload, ip });
            }
        }
    }

    // ---- flights

    /// Notes that the operation with the token just given out goes on elsewhere, for this QP. `self.from` and `self.to`
    /// hold the spans that it touches; `rkey`: the key that a peer named, if any.
    pub(crate) fn launch_wire(&mut self, id: QpId, kind: WireFlight, rkey: Option<u32>) {
        self.launch_for(id, FlightKind::Wire(kind), rkey);
        let qp = self.qp_mut(id);
        // A UD QP says so by its claim.
        if kind.lands()
            && let Some(wire) = &mut qp.wire
        {
            wire.landing = true;
        }
        if kind.is_requesters() {
            qp.send.wire_flights += 1;
        } else {
            qp.receive.flights += 1;
        }
    }

    /// The result of a copy or a transmission that was pending.
    pub(crate) fn handle_wire_copied<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        flight: FlightId,
        kind: WireFlight,
        result: Result<(), MemorySide>,
    ) {
        let Some(id) = self.land_wire(flight, kind) else { return };
        match kind {
            WireFlight::Request if !self.qp(id).service.is_reliable() => self.datagram_fetched(env, now, id, result),
            WireFlight::Request => self.request_fetched(env, now, id, result),
            WireFlight::Result => self.result_written(env, now, id, result),
            WireFlight::Response => self.response_fetched(env, now, id, result),
            WireFlight::Payload if self.qp(id).service == QpType::Ud => self.datagram_written(env, now, id, result),
            WireFlight::Payload if self.qp(id).service == QpType::Uc => self.uc_written(env, now, id, result),
            WireFlight::Payload => self.payload_written(env, now, id, result),
            WireFlight::Atomic => {}
        }
        self.push_ready(id);
        self.resume_parked(env, now, id);
    }

    pub(crate) fn handle_wire_atomic<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        flight: FlightId,
        result: Result<u64, ()>,
    ) {
        let Some(id) = self.land_wire(flight, WireFlight::Atomic) else { return };
        self.atomic_done(env, now, id, result);
        self.push_ready(id);
        self.resume_parked(env, now, id);
    }

    /// Takes a flight in; gives the QP if it goes on with what came of it.
    fn land_wire(&mut self, flight: FlightId, kind: WireFlight) -> Option<QpId> {
        let id = self.land(flight)?.requester;
        let qp = self.qps.get_mut(id)?;
        if kind.is_requesters() {
            qp.send.wire_flights -= 1;
        } else {
            qp.receive.flights -= 1;
        }
        let says_more = |wire: &Wire| kind == WireFlight::Response && wire.responder.is_closing();
        let lives = qp.state() != QpState::Error || qp.wire.as_deref().is_some_and(says_more);
        let goes_on = qp.teardown == Teardown::None && lives;
        if let Some(wire) = qp.wire.as_mut() {
            wire.landing &= !kind.lands();
            if !goes_on {
                wire.parked.clear();
                wire.parked_bytes = 0;
            }
        }
        if !goes_on {
            self.let_go(id, usize::MAX);
            self.push_ready(id);
            return None;
        }
        Some(id)
    }
}

/// Payload of a whole packet, bytes; both ends count the PSNs of a READ by it, and a responder takes no other length of FIRST
/// and MIDDLE packets. The standard has both ends agree on the path MTU, which the attributes then say. Only where the
/// way between two hosts is narrower, it is the way's: larger packets would not arrive, and both routers see the same way.
/// (A machine without FreeFlow does not offer more than its link takes, so that its attribute is the lesser one.)
fn path_mtu(attributes: &QpAttributes, destination: &Destination) -> u32 {
    attributes.path_mtu.bytes().min(u32::from(destination.mtu)).max(PathMtu::Mtu256.bytes())
}
