//! State of a connected QP for the packet transport.
use crate::transport::carrier::{Carriage, CarrierState};
use crate::transport::hosts::HostShare;
pub(crate) use crate::transport::kept::HELD_PACKET_BYTES;
use crate::transport::peers::PeerGate;
use crate::transport::requester::WireRequester;
use crate::transport::responder::WireResponder;
use crate::transport::unreliable::Unreliable;
use crate::{Destination, IpInfo, WireCounters};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{PathMtu, QpAttributes, QpType};
use freeflow_wire::frame::FRAME_HEADER_BYTES;
use serde::{Deserialize, Serialize};

/// Packets of one QP that wait while an earlier one lands, and their bytes.
pub(crate) const PARKED_PACKETS_MAX: usize = 1024;

pub(crate) const PARKED_BYTES_MAX: usize = 4 << 20;

/// Bytes of packets that wait at all QPs of one vNIC: what a tenant can make the router keep.
pub(crate) const HELD_BYTES_OF_VNIC_MAX: usize = 32 << 20;

/// P_Keys that are accepted: the default partition, as a full or a limited member (IBTA 10.9.1).
pub(crate) const PKEY_MASK: u16 = 0x7fff;

/// State of a connected QP (RC, UC, XRC) whose peer is on another host.
#[derive(Serialize, Deserialize)]
pub(crate) struct Wire {
    pub destination: Destination,
    pub gate: PeerGate,
    /// The gate was last opened by a router's word: the peer is no external machine.
    pub is_to_router: bool,
    /// RC, XRC.
    pub requester: WireRequester,
    /// RC, XRC.
    pub share: HostShare,
    /// RC, XRC.
    pub responder: WireResponder,
    /// UC.
    pub unreliable: Unreliable,
    /// The payload of a received packet is being written elsewhere, or an atomic done.
    pub writing: bool,
    pub parked: VecDeque<(Vec<u8>, IpInfo)>,
    pub parked_bytes: usize,
    /// Bytes of those that are written with the packet in hand: they count as waiting until they are written.
    pub landing_bytes: usize,
    pub counters: WireCounters,
    /// RC: for messages that go by a carrier instead.
    pub carriage: Option<Box<Carriage>>,
}

impl Wire {
    /// No request is under way, by the wire or by the carrier.
    pub fn is_idle(&self) -> bool {
        self.requester.is_idle() && self.carriage.as_ref().is_none_or(|carriage| carriage.messages.is_empty())
    }

    /// Whether messages that the carrier has given back have not gone out again.
    #[inline]
    pub fn has_returned(&self) -> bool {
        self.carriage.as_ref().is_some_and(|carriage| carriage.has_returned())
    }

    /// Requests that a fence waits for.
    pub fn answers_due(&self) -> usize {
        let carried = self.carriage.as_ref().map_or(0, |carriage| carriage.reads_due());
        self.requester.window.answers_due() + carried
    }

    pub fn carrier_state(&self) -> CarrierState {
        let Some(carriage) = &self.carriage else { return CarrierState::Wire };
        match (carriage.is_wanted, self.requester.is_idle(), carriage.messages.is_empty()) {
            _ if carriage.has_returned() => CarrierState::DrainToWire,
            (true, true, _) => CarrierState::Carrier,
            (true, false, _) => CarrierState::DrainToCarrier,
            (false, _, true) => CarrierState::Wire,
            (false, _, false) => CarrierState::DrainToWire,
        }
    }
}

/// Kinds of operations in flight of the packet transport and of carriers: what goes on elsewhere,
/// for one QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WireOperation {
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
    /// Requester: a carrier has the message.
    Carried,
    /// Responder: a carrier moves the bytes of a message.
    Landing,
}

impl WireOperation {
    pub fn is_requesters(self) -> bool {
        matches!(self, Self::Request | Self::Result | Self::Carried)
    }

    /// Received packets wait until it has completed.
    pub fn writes(self) -> bool {
        matches!(self, Self::Result | Self::Payload | Self::Atomic | Self::Landing)
    }
}

/// Payload of a whole packet that is no frame, bytes; both ends count the PSNs of a READ by it, and a responder
/// takes no other length of FIRST and MIDDLE packets. The standard has both ends agree on the path
/// MTU, which the attributes then say. Only where the way between two hosts is narrower, it is the
/// way's: larger packets would not arrive, and both routers see the same way. (A machine without
/// FreeFlow does not offer more than its link takes, so that its attribute is the lesser one.)
pub(crate) fn path_mtu(attributes: &QpAttributes, destination: &Destination) -> u32 {
    attributes.path_mtu.bytes().min(u32::from(destination.mtu)).max(PathMtu::Mtu256.bytes())
}

/// Payload of a whole frame that a QP's requester sends, bytes. `None`: it sends packets of the standard. A frame says
/// itself where it belongs, so that the other end need not know this number; a READ request says it.
pub(crate) fn frame_bytes(service: QpType, destination: &Destination) -> Option<u32> {
    (service == QpType::Rc && destination.frame_bytes > 0).then_some(u32::from(destination.frame_bytes))
}

/// Bytes that a frame of records may have in all, its own headers counted. `None`: a QP sends none.
pub(crate) fn record_room(service: QpType, destination: &Destination) -> Option<u32> {
    let bytes = frame_bytes(service, destination).filter(|_| destination.records)?;
    Some(bytes + FRAME_HEADER_BYTES as u32)
}

/// "ECN-capable transport", in the two lowest bits of a traffic class (RFC 3168, 5).
const ECN_CAPABLE: u8 = 0b10;

const ECN_MASK: u8 = 0b11;

/// Traffic class of a QP's packets: the one that its program asks for. Between routers that tell each other of marks of
/// congestion, as those with selective repeat do, a switch may mark the packets in place of dropping them.
pub(crate) fn traffic_class(service: QpType, destination: &Destination, asked: u8) -> u8 {
    if is_selective(service, destination) { asked & !ECN_MASK | ECN_CAPABLE } else { asked }
}

/// Whether what comes ahead of a missing packet is kept and reported, in place of go-back-N.
pub(crate) fn is_selective(service: QpType, destination: &Destination) -> bool {
    destination.selective && frame_bytes(service, destination).is_some()
}
