//! Completions (`struct ibv_wc`; IBTA 11.4.2.1).
use serde::{Deserialize, Serialize};

/// Numbers equal `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum CompletionStatus {
    /// `IBV_WC_SUCCESS`.
    #[default]
    Success = 0,
    /// A message is longer than its RECV, or than messages may be (`IBV_WC_LOC_LEN_ERR`).
    LocalLengthError = 1,
    /// Internal inconsistency of the QP (`IBV_WC_LOC_QP_OP_ERR`).
    LocalQpOperationError = 2,
    /// `IBV_WC_LOC_EEC_OP_ERR`; never given, there are no EE contexts.
    LocalEecOperationError = 3,
    /// A local key does not cover the SGE, or lacks the right (`IBV_WC_LOC_PROT_ERR`).
    LocalProtectionError = 4,
    /// The QP was in ERROR before the request was done (`IBV_WC_WR_FLUSH_ERR`).
    WorkRequestFlushed = 5,
    /// A window could not be bound (`IBV_WC_MW_BIND_ERR`).
    MemoryWindowBindError = 6,
    /// The responder's packet makes no sense (`IBV_WC_BAD_RESP_ERR`).
    BadResponse = 7,
    /// `IBV_WC_LOC_ACCESS_ERR`; never given.
    LocalAccessError = 8,
    /// The responder found the request invalid (`IBV_WC_REM_INV_REQ_ERR`).
    RemoteInvalidRequest = 9,
    /// The remote key does not cover the range, or lacks the right (`IBV_WC_REM_ACCESS_ERR`).
    RemoteAccessError = 10,
    /// The responder could not carry the request out (`IBV_WC_REM_OP_ERR`).
    RemoteOperationError = 11,
    /// No acknowledgement after all retries (`IBV_WC_RETRY_EXC_ERR`).
    RetryExceeded = 12,
    /// No RECV at the peer after all RNR retries (`IBV_WC_RNR_RETRY_EXC_ERR`).
    RnrRetryExceeded = 13,
    /// `IBV_WC_FATAL_ERR`; never given.
    FatalError = 19,
    /// `IBV_WC_RESP_TIMEOUT_ERR`; never given.
    ResponseTimeout = 20,
    /// `IBV_WC_GENERAL_ERR`; never given.
    GeneralError = 21,
}

impl CompletionStatus {
    /// The status with this number of `enum ibv_wc_status`.
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Success,
            1 => Self::LocalLengthError,
            2 => Self::LocalQpOperationError,
            3 => Self::LocalEecOperationError,
            4 => Self::LocalProtectionError,
            5 => Self::WorkRequestFlushed,
            6 => Self::MemoryWindowBindError,
            7 => Self::BadResponse,
            8 => Self::LocalAccessError,
            9 => Self::RemoteInvalidRequest,
            10 => Self::RemoteAccessError,
            11 => Self::RemoteOperationError,
            12 => Self::RetryExceeded,
            13 => Self::RnrRetryExceeded,
            19 => Self::FatalError,
            20 => Self::ResponseTimeout,
            21 => Self::GeneralError,
            _ => return None,
        })
    }
}

/// Numbers equal `enum ibv_wc_opcode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum CompletionOpcode {
    /// SEND of any kind.
    #[default]
    Send = 0,
    /// WRITE, with or without immediate data.
    RdmaWrite = 1,
    /// READ.
    RdmaRead = 2,
    /// Compare and swap.
    CompareSwap = 3,
    /// Fetch and add.
    FetchAdd = 4,
    /// Binding of a memory window.
    BindMemoryWindow = 5,
    /// Local invalidation.
    LocalInvalidate = 6,
    /// FLUSH.
    Flush = 8,
    /// ATOMIC_WRITE.
    AtomicWrite = 9,
    /// A SEND has arrived in a RECV.
    Receive = 128,
    /// A WRITE with immediate data has arrived, and consumed a RECV.
    ReceiveRdmaWithImmediate = 129,
}

impl CompletionOpcode {
    /// The opcode with this number of `enum ibv_wc_opcode`.
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Send,
            1 => Self::RdmaWrite,
            2 => Self::RdmaRead,
            3 => Self::CompareSwap,
            4 => Self::FetchAdd,
            5 => Self::BindMemoryWindow,
            6 => Self::LocalInvalidate,
            8 => Self::Flush,
            9 => Self::AtomicWrite,
            128 => Self::Receive,
            129 => Self::ReceiveRdmaWithImmediate,
            _ => return None,
        })
    }
}

/// Bit values equal `enum ibv_wc_flags`, but for those from IPV6_HEADER on, which the library does not show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionFlags(pub u8);

impl CompletionFlags {
    /// A GRH precedes the payload (UD).
    pub const GRH: u8 = 1;
    /// [`Completion::immediate`] is immediate data.
    pub const WITH_IMMEDIATE: u8 = 1 << 1;
    /// [`Completion::immediate`] is the rkey that the message invalidated.
    pub const WITH_INVALIDATE: u8 = 1 << 3;
    /// With GRH: what stands in front of the payload is an IPv6 header. Not shown as a flag, but by `ibv_wc.sl`.
    pub const IPV6_HEADER: u8 = 1 << 5;
    /// The message asked for a solicited event, or the completion is an error: a CQ armed for solicited completions
    /// only is reported (IBTA 11.4.2.2).
    pub const SOLICITED: u8 = 1 << 7;
    /// A completion of the send queue (else of a receive queue): which ring position it frees.
    pub const SEND_QUEUE: u8 = 1 << 6;

    /// Whether `bit` is set.
    pub const fn contains(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

/// One completion, as the engine hands it to the ring and the library reads it from there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completion {
    /// The program's `wr_id`.
    pub work_request_id: u64,
    /// Success, or the error.
    pub status: CompletionStatus,
    /// Operation that has completed; undefined in an error, as in verbs.
    pub opcode: CompletionOpcode,
    /// Valid fields, and properties of the message.
    pub flags: CompletionFlags,
    /// Payload that arrived or was read, bytes.
    pub byte_count: u32,
    /// Immediate data in network byte order as posted, or the invalidated rkey.
    pub immediate: u32,
    /// QPN of the QP whose request has completed.
    pub qpn: u32,
    /// Sender's QPN (UD).
    pub source_qpn: u32,
    /// The library's own cookie of the QP. A completion of an XRC target has the cookie of the
    /// shared receive queue: the QP may be another process'.
    pub qp_cookie: u32,
    /// Position of the completed request in its ring (send queue, receive queue or SRQ): a free-running count. Every
    /// request of the send queue up to and including this one is finished.
    pub ring_position: u32,
    /// When it completed: router's monotonic clock (CLOCK_MONOTONIC), nanoseconds.
    pub timestamp_ns: u64,
    /// Vendor syndrome: says which check failed (documented in the engine). 0 on success.
    pub vendor_error: u8,
}
