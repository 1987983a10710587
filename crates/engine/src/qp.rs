//! A queue pair: its attributes and the two state machines in it, a requester ([`Sender`]) and a
//! responder ([`Receiver`]). What they do stands in `requester`, `responder` and `delivery`; the
//! verbs in `qp_verbs`.
//!
//! Invariant: the requester has at most one request in hand and at most one pending copy; the
//! responder has at most one RECV in hand. So completions of each queue come in order, and
//! everything of a message stands in its two QPs.
use crate::in_flight::InFlightId;
use crate::keys::NOWHERE;
use crate::multicast::Fanout;
use crate::policy::{IPV6_GID_INDEX, Permit};
use crate::slab::Owned;
use crate::transport::datagrams::Datagram;
use crate::transport::wire::Wire;
use crate::xrc::{DomainId, Target};
use crate::{
    CqId, GRH_BYTES, HostId, MwId, PdId, QpId, QpInit, QpTraffic, ReceiveQueueId, SessionId, SrqId, Used, VnicId,
};
use alloc::boxed::Box;
use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use freeflow_verbs::{
    Completion, Gid, Instant, NetworkId, QpAttributes, QpState, QpType, Qpn, ReceiveRequest, SendRequest,
};
use serde::{Deserialize, Serialize};

/// Those of its vNIC, which never change.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Addresses {
    pub first: Gid,
    pub ipv6: Option<Gid>,
}

impl Addresses {
    /// By index; what is sent by the external one (1) is the first's within its network.
    #[inline]
    pub fn by(self, index: u8) -> Gid {
        self.ipv6.filter(|_| index == IPV6_GID_INDEX).unwrap_or(self.first)
    }

    #[inline]
    pub fn has(self, gid: Gid) -> bool {
        self.first == gid || self.ipv6 == Some(gid)
    }

    /// The one by which somebody with that address is spoken to.
    pub fn like(self, gid: Gid) -> Gid {
        self.ipv6.filter(|_| gid.to_ipv4().is_none()).unwrap_or(self.first)
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct QueuePair {
    pub session: SessionId,
    pub vnic: VnicId,
    pub network: NetworkId,
    /// The network that its peer is in: what policy was asked about when it got the peer's address.
    /// Else its own.
    pub reached: NetworkId,
    pub addresses: Addresses,
    pub qpn: Qpn,
    pub service: QpType,
    /// See [`QpInit`] for which types have what.
    pub pd: Option<PdId>,
    pub send_cq: Option<CqId>,
    pub recv_cq: Option<CqId>,
    /// Of a target QP: the one that the message in hand names, or named; it may be gone.
    pub srq: Option<SrqId>,
    /// An `XrcReceive` QP is one.
    pub target: Option<Box<Target>>,
    pub all_signaled: bool,
    pub block_own_multicast: bool,
    pub cookie: u32,
    /// Its state is `attributes.state`.
    pub attributes: QpAttributes,
    pub teardown: Teardown,
    /// First of the windows bound to it, or [`NOWHERE`].
    pub windows: u32,
    /// It stands in the engine's ready queue.
    pub queued: bool,
    pub send: Sender,
    pub receive: Receiver,
    /// Use since its vNIC was last charged.
    pub used: Used,
    pub traffic: QpTraffic,
    /// There while its peer is on another host.
    pub wire: Option<Box<Wire>>,
    /// UD: PSN of the next packet to another host.
    pub datagram_psn: u32,
    /// UD: hosts that were notified of it.
    pub introduced: BTreeSet<HostId>,
}

/// A verb that found copies in flight and will be asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Teardown {
    None,
    Reset,
    Destroy,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Sender {
    /// Valid unless the phase is `Idle`.
    pub request: Box<SendRequest>,
    pub phase: SendPhase,
    /// The message was counted against the limits of rate.
    pub paid: bool,
    /// Payload of the message, bytes.
    pub length: u64,
    /// Of these already delivered.
    pub moved: u64,
    /// The responder that admitted the message (phases `Moving`, `Original`, `InFlight`).
    pub responder: Option<QpId>,
    pub retries_left: u8,
    pub rnr_retries_left: u8,
    /// Looks at an empty receive queue that a message without acknowledgement has left.
    pub grace_steps_left: u8,
    /// When a message last waited for the word of another host in vain.
    pub unanswered_at: Option<Instant>,
    /// The empty receive queue that it waits for.
    pub waits_for: Option<ReceiveQueueId>,
    pub in_flight: Option<InFlightId>,
    /// Flights of the packet transport.
    pub wire_in_flight: u32,
    /// LOCAL_INV: the window that this request made invalid, and whose last copies it waits for.
    pub releases: Option<MwId>,
    pub drain: Drain,
    /// UD: what precedes the payload of this message.
    #[serde(with = "crate::array")]
    pub grh: [u8; GRH_BYTES],
    /// UD: the members that a multicast message has still to reach. There since the first such
    /// message.
    pub fanout: Option<Box<Fanout>>,
    /// UD: whom policy lets it send to.
    pub permit: Permit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SendPhase {
    /// No request in hand.
    Idle,
    /// To be checked and offered to the responder, for the first time or again.
    Begin,
    /// Multicast: to be offered to the next member.
    Replicate,
    /// Admitted: bytes are on their way, chunk by chunk.
    Moving,
    /// UC, UD: its packets go to another host, one after the other.
    Transmitting,
    /// An atomic was done; the value found goes to local memory.
    Original(u64),
    /// A copy or an atomic goes on elsewhere.
    InFlight,
    /// For a timer, a RECV, or a busy UD receiver.
    Waiting,
}

/// Of SQD (IBTA 10.3.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Drain {
    None,
    /// The request in hand is still being worked off.
    Draining {
        notify: bool,
    },
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Receiver {
    /// Valid unless the claim is `None`.
    pub request: Box<ReceiveRequest>,
    pub claim: Claim,
    /// Pending copies and atomics that peers do in this QP's name.
    pub in_flight: u32,
    /// UD senders that found the claim taken.
    pub waiters: Vec<QpId>,
    /// The value of the last `want_receives` for the QP's own receive ring.
    pub wanted: bool,
    /// COMM_EST was raised.
    pub established: bool,
    /// LAST_WQE_REACHED was raised.
    pub last_wqe_raised: bool,
    /// UD: packets of other hosts that wait for a RECV, or for the one in hand to be filled.
    pub datagrams: VecDeque<Datagram>,
    /// Of packets that wait at this QP, whatever its type.
    pub held_bytes: usize,
    /// UD: how the RECV completes that a packet of another host is being written to.
    pub arriving: Option<Box<Completion>>,
    /// When it last took a RECV from its queue.
    pub taken_at: Option<Instant>,
    /// UD: of whom on another host policy lets it receive.
    pub permit: Permit,
}

/// User of the RECV in hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Claim {
    /// There is none in hand.
    None,
    /// Taken from the queue and not consumed; the next message gets it.
    Held,
    /// The message of this requester.
    By(QpId),
    /// A message from another host.
    Wire,
}

impl Owned for QueuePair {
    fn session(&self) -> SessionId {
        self.session
    }

    fn belongs_to(&self, session: SessionId) -> bool {
        match &self.target {
            None => self.session == session,
            Some(target) => target.openers.contains(&session),
        }
    }
}

impl QueuePair {
    pub fn new(session: SessionId, vnic: VnicId, home: (NetworkId, Addresses), qpn: Qpn, init: &QpInit) -> Self {
        Self {
            session,
            vnic,
            network: home.0,
            reached: home.0,
            addresses: home.1,
            qpn,
            service: init.qp_type,
            pd: init.pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            target: None,
            all_signaled: init.all_signaled,
            block_own_multicast: init.block_own_multicast,
            cookie: init.cookie,
            attributes: QpAttributes { capabilities: init.capabilities, ..QpAttributes::default() },
            teardown: Teardown::None,
            windows: NOWHERE,
            queued: false,
            send: Sender::new(),
            receive: Receiver::new(),
            used: Used::default(),
            traffic: QpTraffic::default(),
            wire: None,
            datagram_psn: 0,
            introduced: BTreeSet::new(),
        }
    }

    pub fn state(&self) -> QpState {
        self.attributes.state
    }

    /// Whether messages may arrive (IBTA 10.3.1: RTR and beyond, but not ERROR).
    pub fn receives(&self) -> bool {
        let state = matches!(
            self.state(),
            QpState::ReadyToReceive | QpState::ReadyToSend | QpState::SqDrain | QpState::SqError
        );
        state && self.teardown == Teardown::None
    }

    pub fn has_in_flight(&self) -> bool {
        self.send.in_flight.is_some() || self.send.wire_in_flight > 0 || self.receive.in_flight > 0
    }

    /// The GID that it speaks by: that of its connection, the vNIC's first otherwise.
    #[inline]
    pub fn gid(&self) -> Gid {
        self.addresses.by(self.attributes.address.grh.map_or(0, |route| route.sgid_index))
    }

    /// Whether messages to this GID are its: a connected one has one GID, others all of the vNIC's.
    #[inline]
    pub fn is_at(&self, gid: Gid) -> bool {
        if self.is_connected_service() { self.gid() == gid } else { self.addresses.has(gid) }
    }

    /// The GID that it is connected to.
    pub fn remote_gid(&self) -> Option<Gid> {
        self.attributes.address.grh.map(|route| route.dgid)
    }

    /// Where the keys of its own requests live.
    pub fn sender_pd(&self) -> PdId {
        self.pd.expect("a QP that sends has a PD")
    }

    /// Whether it is a target QP that another process may open through this domain.
    pub fn can_be_opened(&self, domain: DomainId) -> bool {
        self.teardown != Teardown::Destroy && self.target.as_ref().is_some_and(|target| target.domain == domain)
    }

    pub fn is_connected_service(&self) -> bool {
        self.service != QpType::Ud
    }
}

impl Sender {
    /// Whether a multicast message is on its way through its group.
    pub fn replicates(&self) -> bool {
        self.fanout.as_ref().is_some_and(|fanout| fanout.is_under_way())
    }

    /// Where a message goes on that had to wait, or lost its responder.
    pub fn offer_again(&mut self) {
        self.phase = if self.replicates() { SendPhase::Replicate } else { SendPhase::Begin };
    }

    fn new() -> Self {
        Self {
            request: Box::default(),
            phase: SendPhase::Idle,
            paid: false,
            length: 0,
            moved: 0,
            responder: None,
            retries_left: 0,
            rnr_retries_left: 0,
            grace_steps_left: 0,
            unanswered_at: None,
            waits_for: None,
            in_flight: None,
            wire_in_flight: 0,
            releases: None,
            drain: Drain::None,
            grh: [0; GRH_BYTES],
            fanout: None,
            permit: Permit::default(),
        }
    }
}

impl Receiver {
    fn new() -> Self {
        Self {
            request: Box::default(),
            claim: Claim::None,
            in_flight: 0,
            waiters: Vec::new(),
            datagrams: VecDeque::new(),
            held_bytes: 0,
            arriving: None,
            wanted: false,
            established: false,
            last_wqe_raised: false,
            taken_at: None,
            permit: Permit::default(),
        }
    }
}
