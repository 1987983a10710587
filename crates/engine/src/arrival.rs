//! A message as its requester announces it, and what a responder answers.
use crate::fault::Fault;
use crate::qp::Claim;
use crate::ud::QKEY_USE_OWN;
use crate::{GRH_BYTES, QpId, ReceiveQueueId, Syndrome};
use freeflow_verbs::{
    Access, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Duration, Instant, QpType, SendOpcode,
};

/// A message as its requester announces it: what BTH, RETH, AtomicETH and DETH would carry.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    /// How the RECV that it consumes is claimed for it: `By` its requester, or `Wire`.
    pub claim: Claim,
    pub responder: QpId,
    /// XRC: number of the shared receive queue.
    pub srqn: u32,
    pub opcode: SendOpcode,
    /// Payload, bytes; of a SEND from another host as far as it has arrived. FLUSH: of the range.
    pub length: u64,
    /// The right that it needs of the QP and of the region.
    pub right: Access,
    /// FLUSH of all that the key names.
    pub whole: bool,
    pub remote_address: u64,
    pub rkey: u32,
    /// UD.
    pub qkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rejection {
    /// UD: another sender's message occupies the receiver; it will be woken.
    Busy,
    /// RNR NAK: no RECV is posted.
    NotReady { queue: ReceiveQueueId, delay: Duration },
    /// RC: older messages have their turn first.
    Postponed,
    /// NAK; the responder is in ERROR.
    Nak(Nak),
    /// UC, UD: no RECV is posted, but the receiver is at work: one may come.
    Late,
    /// UC, UD: nobody will know.
    Dropped,
}

/// NAK codes (IBTA table 46), with the syndrome that has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nak {
    InvalidRequest(Syndrome),
    RemoteAccess(Syndrome),
    RemoteOperational(Syndrome),
}

impl Nak {
    /// The fault in the requester's completion (IBTA table 58).
    pub fn fault(self) -> Fault {
        match self {
            Self::InvalidRequest(syndrome) => Fault::new(CompletionStatus::RemoteInvalidRequest, syndrome),
            Self::RemoteAccess(syndrome) => Fault::new(CompletionStatus::RemoteAccessError, syndrome),
            Self::RemoteOperational(syndrome) => Fault::new(CompletionStatus::RemoteOperationError, syndrome),
        }
    }
}

/// A message that has arrived whole, as its RECV reports it.
pub(crate) struct Received {
    pub opcode: SendOpcode,
    /// UD: with the GRH.
    pub bytes: u64,
    /// Immediate data, or the key that was invalidated.
    pub argument: u32,
    pub solicited: bool,
    /// UD: the sender's.
    pub source_qpn: Option<u32>,
    /// UD: its GRH is an IPv6 header.
    pub has_ipv6_header: bool,
}

impl Received {
    pub fn completion(&self, now: Instant) -> Completion {
        let invalidates = self.opcode == SendOpcode::SendWithInvalidate;
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags = flag(self.opcode.has_immediate(), CompletionFlags::WITH_IMMEDIATE)
            | flag(invalidates, CompletionFlags::WITH_INVALIDATE)
            | flag(self.solicited, CompletionFlags::SOLICITED)
            | flag(self.source_qpn.is_some(), CompletionFlags::GRH)
            | flag(self.has_ipv6_header, CompletionFlags::IPV6_HEADER);
        Completion {
            opcode: match self.opcode.is_send() {
                true => CompletionOpcode::Receive,
                false => CompletionOpcode::ReceiveRdmaWithImmediate,
            },
            flags: CompletionFlags(flags),
            byte_count: self.bytes as u32,
            immediate: if self.opcode.has_immediate() || invalidates { self.argument } else { 0 },
            source_qpn: self.source_qpn.unwrap_or(0),
            timestamp_ns: now.0,
            ..Completion::default()
        }
    }
}

/// Bytes of a RECV that a message fills.
pub(crate) fn receive_bytes(service: QpType, length: u64) -> u64 {
    if service == QpType::Ud { length + GRH_BYTES as u64 } else { length }
}

/// The Q_Key that a UD request carries.
pub(crate) fn effective_qkey(posted: u32, own: u32) -> u32 {
    if posted & QKEY_USE_OWN != 0 { own } else { posted }
}

/// The right that an operation needs, of the QP and of the region.
pub(crate) fn remote_right(opcode: SendOpcode) -> Access {
    match opcode {
        SendOpcode::RdmaWrite | SendOpcode::RdmaWriteWithImmediate | SendOpcode::AtomicWrite => Access::REMOTE_WRITE,
        SendOpcode::RdmaRead => Access::REMOTE_READ,
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => Access::REMOTE_ATOMIC,
        SendOpcode::Flush => Access::FLUSH_GLOBAL,
        SendOpcode::Send | SendOpcode::SendWithImmediate | SendOpcode::SendWithInvalidate => Access(0),
        SendOpcode::BindWindow | SendOpcode::LocalInvalidate => Access(0),
    }
}

/// Whether it takes one of the responder's `max_dest_rd_atomic` places (IBTA 9.7.8.1, annex A19).
pub(crate) fn needs_depth(opcode: SendOpcode) -> bool {
    opcode.is_atomic() || matches!(opcode, SendOpcode::RdmaRead | SendOpcode::AtomicWrite | SendOpcode::Flush)
}
