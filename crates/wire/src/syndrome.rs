//! The syndrome of the AETH (IBTA 9.7.5.1, tables 44 to 46).
use serde::{Deserialize, Serialize};

/// Meaning of an AETH's syndrome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Syndrome {
    /// With the credit count of the end-to-end flow control, 0..=31; 31 says that there is none.
    Ack {
        /// Credit count, 0..=31.
        credits: u8,
    },
    /// With the code of IBTA table 45, 0..=31.
    ReceiverNotReady {
        /// Code of the time to wait, 0..=31.
        timer: u8,
    },
    /// The request is refused.
    Nak(NakCode),
}

/// IBTA table 46.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum NakCode {
    /// A PSN is missing: the packet's is ahead of the expected one.
    PsnSequence = 0,
    /// The request is invalid (IBTA 9.7.5.2.4).
    InvalidRequest = 1,
    /// The key does not cover the range, or lacks the right.
    RemoteAccess = 2,
    /// The responder could not carry the request out.
    RemoteOperational = 3,
    /// Invalid RD request; RC has none.
    InvalidRdRequest = 4,
}

impl Syndrome {
    /// No end-to-end flow control, as rxe says it.
    pub const ACK: Self = Self::Ack { credits: 31 };

    /// `None`: reserved.
    pub const fn from_byte(byte: u8) -> Option<Self> {
        let value = byte & 31;
        match byte >> 5 {
            0 => Some(Self::Ack { credits: value }),
            1 => Some(Self::ReceiverNotReady { timer: value }),
            3 => match value {
                0 => Some(Self::Nak(NakCode::PsnSequence)),
                1 => Some(Self::Nak(NakCode::InvalidRequest)),
                2 => Some(Self::Nak(NakCode::RemoteAccess)),
                3 => Some(Self::Nak(NakCode::RemoteOperational)),
                4 => Some(Self::Nak(NakCode::InvalidRdRequest)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The syndrome as it stands in the AETH.
    pub const fn byte(self) -> u8 {
        match self {
            Self::Ack { credits } => credits & 31,
            Self::ReceiverNotReady { timer } => 1 << 5 | timer & 31,
            Self::Nak(code) => 3 << 5 | code as u8,
        }
    }
}
