//! What the engine needs from whoever runs it: posted requests, completions, bytes. The engine sees no memory, no ring
//! and no clock; the router's worker implements [`Environment`] over shared memory, tests implement it over vectors.
use crate::{
    Attempt, CqId, Destination, HostId, PacketHead, Path, PeerAnswer, QpId, ReceiveQueueId, SessionId, SrqId,
    TransmitOutcome, VnicId,
};
use alloc::vec::Vec;
use freeflow_verbs::{
    AsyncEventKind, AtomicOperation, Completion, Gid, GlobalRoute, NetworkId, Qpn, ReceiveRequest, SendRequest,
};

/// What [`Environment::fetch_send`] and [`Environment::fetch_receive`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// Nothing is posted.
    Empty,
    /// One request was copied out, checked and consumed.
    Ready,
    /// The descriptor made no sense (hostile or broken library). `ring_position` and `work_request_id` of the request
    /// are filled as far as they could be read; it was consumed.
    Malformed,
}

/// A range of one process' memory that a key has already been checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub session: SessionId,
    pub region: SpanRegion,
    /// Virtual address in the process (not the IOVA).
    pub address: u64,
    pub length: u32,
}

/// The memory region that a span is of: its index, and whether it is registered on demand. In one word, since spans are many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanRegion(u32);

impl SpanRegion {
    const ON_DEMAND: u32 = 1 << 31;

    /// `index`: less than 2^31.
    #[inline]
    pub fn new(index: u32, is_on_demand: bool) -> Self {
        Self(index | if is_on_demand { Self::ON_DEMAND } else { 0 })
    }

    #[inline]
    pub fn index(self) -> u32 {
        self.0 & !Self::ON_DEMAND
    }

    /// The bytes are those that the process sees at the address when they are used, whatever other regions cover it.
    #[inline]
    pub fn is_on_demand(self) -> bool {
        self.0 & Self::ON_DEMAND != 0
    }
}

/// Where the bytes of a copy come from: first `prefix`, then `body`.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The 40 bytes of the GRH of a UD message, else empty.
    pub prefix: &'a [u8],
    pub body: SourceBody<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum SourceBody<'a> {
    Bytes(&'a [u8]),
    Spans(&'a [Span]),
}

/// Names a copy or an atomic operation that was answered with `Pending`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// Which side of a copy could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySide {
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    Done,
    /// It goes on elsewhere; [`crate::Engine::handle_copied`] brings the result. Slices given are not needed any more.
    Pending,
    /// The memory is not there (unmapped since its registration, truncated file, process gone).
    Fault(MemorySide),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOutcome {
    /// The value before the operation, in host byte order.
    Done(u64),
    /// [`crate::Engine::handle_atomic_done`] brings the result.
    Pending,
    Fault,
}

/// The CQ has no room: it is in error from now on (IBTA 11.6.3.2, CQ error).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqFull;

/// Who wants to talk to whom, for [`Environment::may_talk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Talk {
    /// Of the QP that asks.
    pub network: NetworkId,
    /// Of the other end: what [`Environment::network_at`] says of its address.
    pub other: NetworkId,
    /// Who begins.
    pub from: Gid,
    pub to: Gid,
    pub means: Means,
    /// The other one is to be a machine without FreeFlow: the path leads out by the vNIC's second address.
    pub is_external: bool,
    /// Which of the two is the QP's that asks.
    pub asks: Asker,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    From,
    To,
}

/// By what two talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// A QP is about to be connected.
    Connection,
    /// It is connected, and policy has changed: if the answer is no, the connection is cut.
    Standing,
    /// A datagram to one receiver.
    Datagram,
    /// A datagram to a group: the receiver is one of its members.
    Multicast,
}

pub trait Environment {
    /// Takes the next posted send of `qp`, if there is one.
    fn fetch_send(&mut self, qp: QpId, into: &mut SendRequest) -> Fetch;

    /// Takes the next posted receive of a QP's own queue or of an SRQ.
    fn fetch_receive(&mut self, queue: ReceiveQueueId, into: &mut ReceiveRequest) -> Fetch;

    /// Requests now posted to `srq` and not taken (for its limit event).
    fn srq_pending(&mut self, srq: SrqId) -> u32;

    /// Asks (or no longer asks) that a post to this queue ring the doorbell: senders wait for a RECV, or the QP is in
    /// error and posted requests are to be flushed. After `wanted == true` returns, every later post rings, and an
    /// earlier one is visible to `fetch_receive`.
    fn want_receives(&mut self, queue: ReceiveQueueId, wanted: bool);

    /// Puts a completion in the ring of `cq` and sees to its notification.
    fn complete(&mut self, cq: CqId, completion: &Completion) -> Result<(), CqFull>;

    /// Raises an asynchronous event in the context of the object it is about.
    fn raise(&mut self, kind: AsyncEventKind, about: EventTarget);

    /// Copies exactly the bytes of `from` into `to` (both of equal length), in ascending order; if `last`, so that the
    /// last eight bytes become visible after all others.
    fn copy(&mut self, token: Token, from: Source<'_>, to: &[Span], last: bool) -> CopyOutcome;

    /// Performs an atomic operation on the eight bytes at `at` (aligned, checked), atomic against every other atomic
    /// operation of this router on the same bytes.
    fn atomic(&mut self, token: Token, at: Span, operation: AtomicOperation) -> AtomicOutcome;

    /// The QP goes to ERROR: what it did past the router ends, and what its peer did to it.
    fn end_direct(&mut self, _qp: QpId) {}

    /// Whether policy lets these two talk. What it says may change only before [`crate::Engine::handle_policy_changed`]: until then
    /// the engine may keep a yes. Connected services are asked about for both directions at once.
    fn may_talk(&mut self, _talk: &Talk) -> bool {
        true
    }

    /// The network that has the address `gid` for those of `network`: itself, or another of its tenant. Whether the two may talk is
    /// [`Self::may_talk`]'s business. It may change only before [`crate::Engine::handle_policy_changed`].
    fn network_at(&mut self, network: NetworkId, _gid: Gid) -> NetworkId {
        network
    }

    /// A vNIC tried something on others and got nowhere. Told each time, so it has to cost little.
    fn attempted(&mut self, _attempt: &Attempt) {}

    /// Policy has cut the connection of `qpn` with a QPN of another host, whose end has to hear of it.
    fn severed(&mut self, _qpn: Qpn, _host: HostId, _peer: Qpn) {}

    // ---- other hosts; an environment without any leaves these as they are

    /// The way of messages from this vNIC to an address of that network. It may change at any time; the engine asks when a QP is
    /// connected, and for each datagram.
    fn path(&mut self, _vnic: VnicId, _to: NetworkId, _route: &GlobalRoute) -> Path {
        Path::Local
    }

    /// Who is behind a QPN of another host.
    fn peer(&mut self, _host: HostId, _qpn: Qpn) -> PeerAnswer {
        PeerAnswer::Absent
    }

    /// Sends packets in order. `payload` holds the payload of all of them, one after the other.
    fn transmit(
        &mut self,
        _token: Token,
        _to: &Destination,
        _packets: &[PacketHead],
        _payload: Source<'_>,
    ) -> TransmitOutcome {
        TransmitOutcome::Sent
    }

    /// What [`crate::Engine::peer_info`] says of this QPN is another now. `peer`: the host that it concerns, if it is
    /// connected to one.
    fn identity_changed(&mut self, _qpn: Qpn, _peer: Option<HostId>) {}

    /// A management datagram came from a host to QP 1. False: it may not send any.
    fn management(&mut self, _from: HostId, _mad: &[u8; freeflow_wire::cm::MAD_BYTES]) -> bool {
        false
    }

    /// The hosts that have members of a group, and the QPN under which each takes its messages.
    fn group_hosts(&mut self, _network: NetworkId, _group: Gid, _into: &mut Vec<(Destination, Qpn)>) {}
}

/// Object of an asynchronous event, by the engine's own name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventTarget {
    Cq(CqId),
    Qp(QpId),
    Srq(SrqId),
}
