//! Queue pair types, states and path MTU.
use serde::{Deserialize, Serialize};

/// Transport service of a QP; numbers equal `enum ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
    /// The initiator's end of an extended reliable connection (XRC): sends only (IBTA annex A14).
    XrcSend = 9,
    /// The target's end: receives only, into the shared receive queues of its XRC domain.
    XrcReceive = 10,
}

impl QpType {
    /// Acknowledged, in order, with READ and atomics: RC, and XRC which is RC with another receive side.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::XrcSend | Self::XrcReceive)
    }

    /// Whether a QP of this type posts send requests.
    pub const fn sends(self) -> bool {
        !matches!(self, Self::XrcReceive)
    }

    /// The type at the other end of a connection.
    pub const fn peer(self) -> Self {
        match self {
            Self::XrcSend => Self::XrcReceive,
            Self::XrcReceive => Self::XrcSend,
            same => same,
        }
    }
}

/// State of a QP; numbers equal `enum ibv_qp_state` (IBTA 10.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum QpState {
    /// Made, or reset: no request is accepted.
    #[default]
    Reset = 0,
    /// RECVs may be posted; none is taken.
    Init = 1,
    /// RTR: requests of the peer are answered.
    ReadyToReceive = 2,
    /// RTS: requests are sent.
    ReadyToSend = 3,
    /// SQD: the send queue drains, or has drained.
    SqDrain = 4,
    /// SQE: the send queue has failed; RECVs go on (UC, UD).
    SqError = 5,
    /// All requests are flushed.
    Error = 6,
}

impl QpState {
    /// All states, by number.
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::ReadyToReceive, Self::ReadyToSend, Self::SqDrain, Self::SqError, Self::Error];

    /// The state with this number of `enum ibv_qp_state`.
    pub const fn from_number(number: u32) -> Option<Self> {
        if number < 7 { Some(Self::ALL[number as usize]) } else { None }
    }
}

/// Path MTU; numbers equal `enum ibv_mtu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    #[default]
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl PathMtu {
    /// The MTU with this number of `enum ibv_mtu`.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Mtu256,
            2 => Self::Mtu512,
            3 => Self::Mtu1024,
            4 => Self::Mtu2048,
            5 => Self::Mtu4096,
            _ => return None,
        })
    }

    /// Payload of one packet, bytes.
    pub const fn bytes(self) -> u32 {
        128 << (self as u32)
    }
}
