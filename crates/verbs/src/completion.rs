//! Completions (`struct ibv_wc`; IBTA 11.4.2.1).
use serde::{Deserialize, Serialize};

/// Numbers equal `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum CompletionStatus {
    #[default]
    Success = 0,
    LocalLengthError = 1,
    LocalQpOperationError = 2,
    LocalEecOperationError = 3,
    LocalProtectionError = 4,
    WorkRequestFlushed = 5,
    MemoryWindowBindError = 6,
    BadResponse = 7,
    LocalAccessError = 8,
    RemoteInvalidRequest = 9,
    RemoteAccessError = 10,
    RemoteOperationError = 11,
    RetryExceeded = 12,
    RnrRetryExceeded = 13,
    FatalError = 19,
    ResponseTimeout = 20,
    GeneralError = 21,
}

impl CompletionStatus {
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
    #[default]
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompareSwap = 3,
    FetchAdd = 4,
    BindMemoryWindow = 5,
    LocalInvalidate = 6,
    Flush = 8,
    AtomicWrite = 9,
    Receive = 128,
    ReceiveRdmaWithImmediate = 129,
}

impl CompletionOpcode {
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
    pub const GRH: u8 = 1;
    pub const WITH_IMMEDIATE: u8 = 1 << 1;
    pub const WITH_INVALIDATE: u8 = 1 << 3;
    /// With GRH: what stands in front of the payload is an IPv6 header. Not shown as a flag, but by `ibv_wc.sl`.
    pub const IPV6_HEADER: u8 = 1 << 5;
    /// The message asked for a solicited event, or the completion is an error: a CQ armed for solicited completions
    /// only is told (IBTA 11.4.2.2).
    pub const SOLICITED: u8 = 1 << 7;
    /// A completion of the send queue (else of a receive queue): which ring position it frees.
    pub const SEND_QUEUE: u8 = 1 << 6;

    pub const fn contains(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

/// One completion, as the engine hands it to the ring and the library reads it from there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completion {
    pub work_request_id: u64,
    pub status: CompletionStatus,
    pub opcode: CompletionOpcode,
    pub flags: CompletionFlags,
    pub byte_count: u32,
    /// Immediate data in network byte order as posted, or the invalidated rkey.
    pub immediate: u32,
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
