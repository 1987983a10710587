//! A carrier: a reliable transport of whole messages to other hosts, beside the wire. A NIC is one.
//!
//! The wire is a transport of the engine's own (`transport`), which needs packets sent and no more
//! ([`crate::Fabric::transmit`]). A carrier segments, acknowledges and retransmits by itself; the
//! engine keeps what verbs promise: checks, order, limits, counts, completions, flushing.
use crate::{HostId, QpId, Source, Token};
use freeflow_verbs::{Duration, QpAttributes, Qpn, SendOpcode};
use serde::{Deserialize, Serialize};

/// Header of a message for its receiver: the fields that BTH and RETH would carry (IBTA 9.2, 9.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedHead {
    /// Sender's QP number.
    pub source_qpn: Qpn,
    /// Receiver's QP number.
    pub dest_qpn: Qpn,
    /// SEND or WRITE, with or without immediate data, or READ.
    pub opcode: SendOpcode,
    /// Payload in either direction, bytes.
    pub length: u32,
    /// Receiver's virtual address, of RDMA.
    pub remote_address: u64,
    /// Key of the receiver's memory, of RDMA.
    pub rkey: u32,
    /// Immediate data, in network byte order; 0 without.
    pub immediate: u32,
    /// Whether the receiver's CQ raises a solicited event.
    pub is_solicited: bool,
}

/// A message of an RC QP, for [`Carrier::carry`].
#[derive(Clone, Copy, Debug)]
pub struct CarriedMessage<'a> {
    /// The sender's QP.
    pub qp: QpId,
    /// The one that the peer is on.
    pub host: HostId,
    /// Timeout, retries and depth are the carrier's business while it has the message.
    pub attributes: &'a QpAttributes,
    /// Header for the receiver.
    pub head: CarriedHead,
}

/// A carrier's answer to [`Carrier::carry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarryOutcome {
    /// [`crate::Engine::handle_carried`] brings the result, within a finite time whatever happens.
    /// Until then the memory stays registered; slices given are not needed any more.
    Taken,
    /// Not now; [`crate::Engine::handle_carrier_ready`] follows.
    Later,
    /// This message has to go by the wire.
    Declined,
}

/// Result of a message that a carrier took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// The peer has executed it; of a READ, the bytes are in memory.
    Executed,
    /// The QP goes to ERROR.
    Failed(CarryFailure),
    /// It was not executed and will not be, and no later message of the QP was: it goes by the
    /// wire, and so does all that follows until the QP gets a carrier again. Of a READ it is enough
    /// that it left nothing undone: it is asked again.
    Returned,
}

/// Why a message failed, in the words of IBTA table 46 and 9.9.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CarryFailure {
    /// The responder's NAK: invalid request.
    InvalidRequest,
    /// The responder's NAK: remote access error.
    RemoteAccess,
    /// The responder's NAK: remote operational error.
    RemoteOperational,
    /// `rnr_retry` is used up.
    ReceiverNotReady,
    /// The requester's memory is not there.
    LocalMemory,
}

/// How the responder's engine answers a message that a carrier brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The carrier may use the memory, and then calls [`crate::Engine::handle_landed`].
    Admitted(Token),
    /// No RECV is posted (RNR): to be tried again after this time.
    NotReady(Duration),
    /// An earlier message of this QP is still being written: to be tried again.
    Busy,
    /// It is not executed; the requester's engine gets this.
    Answered(Carried),
}

/// Moves messages of RC QPs to other hosts. An environment that has none declines all.
pub trait Carrier {
    /// Takes a whole message. `local`: its payload; of a READ the memory that it is written to.
    ///
    /// Asked only about QPs that [`crate::Engine::use_carrier`] was called for, and only while
    /// nothing of the QP is under way on the wire. Messages of one QP are executed in the order in
    /// which they were taken.
    fn carry(&mut self, token: Token, message: &CarriedMessage<'_>, local: Source<'_>) -> CarryOutcome;

    /// The QP goes to RESET or ERROR, or goes away, while messages of it have no result yet. The
    /// carrier tries none of them any more that the responder has not admitted, and brings their
    /// results as of others: [`Carried::Returned`]. May be called more than once.
    fn withdraw(&mut self, qp: QpId);
}
