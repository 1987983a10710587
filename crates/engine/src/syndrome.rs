//! Which check failed: [`freeflow_verbs::Completion::vendor_error`] of a completion in error.

/// Numbers of `ibv_wc.vendor_err`; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Syndrome {
    /// The QP is in ERROR or SQE; this request was not begun, or not finished.
    Flushed = 0x01,
    /// The descriptor in the ring made no sense.
    MalformedDescriptor = 0x02,
    /// The operation does not exist on this type of QP, or can't be inline.
    WrongOperation = 0x03,
    /// READ or atomic with `max_rd_atomic` 0.
    NoReadDepth = 0x04,
    /// The address handle does not exist or belongs to another PD.
    AddressHandle = 0x05,
    /// The message is longer than the service allows, or the buffer shorter than an atomic's
    /// result.
    LocalLength = 0x06,
    /// An lkey is unknown, of another PD, lacks a right, or the range leaves the MR.
    LocalKey = 0x07,
    /// The registered memory is no longer there (local side).
    LocalMemoryGone = 0x08,
    /// The key of a BIND_MW names no window of the QP's PD.
    WindowUnknown = 0x09,
    /// A window of type 2 is bound already, or was to be bound with length 0.
    WindowState = 0x0a,
    /// The lkey of a BIND_MW is unknown, of another PD, lacks MW_BIND, or its region is zero-based.
    WindowRegion = 0x0b,
    /// The window's rights are unknown, more than its region allows, or of another type of window.
    WindowRights = 0x0c,
    /// The window leaves its region.
    WindowRange = 0x0d,
    /// The key of a LOCAL_INV is not that of a window bound to this QP.
    InvalidateKey = 0x0e,
    /// An answer from another host is not what the request asks for.
    BadResponse = 0x0f,
    /// The responder's QP does not allow this operation.
    RemoteOperationForbidden = 0x20,
    /// The responder's `max_dest_rd_atomic` is 0.
    RemoteNoReadDepth = 0x21,
    /// The rkey is unknown, of another PD, lacks a right, or the range leaves the MR.
    RemoteKey = 0x22,
    /// An atomic's address is not a multiple of eight.
    RemoteMisaligned = 0x23,
    /// The RECV is too short for the message.
    ReceiveTooShort = 0x24,
    /// An lkey of the RECV is wrong.
    ReceiveKey = 0x25,
    /// The RECV's descriptor made no sense.
    ReceiveMalformed = 0x26,
    /// The registered memory is no longer there (remote side).
    RemoteMemoryGone = 0x27,
    /// The key of a SEND_WITH_INV is not that of a window bound to the responder.
    RemoteInvalidate = 0x2a,
    /// A packet is not the one that follows the last: a message without its beginning, or within
    /// another one.
    PacketSequence = 0x2b,
    /// A packet, or the message that it ends, is not as long as it must be.
    PacketLength = 0x2c,
    /// The receiver was never ready within `rnr_retry` attempts.
    ReceiverNotReady = 0x28,
    /// XRC: the request names no SRQ of the target's domain.
    SharedQueue = 0x2e,
    /// Another host's NAK, which says no more than the completion's status.
    NakReceived = 0x2f,
    /// Nobody answered within `retry_cnt` attempts.
    NoAnswer = 0x29,
}
