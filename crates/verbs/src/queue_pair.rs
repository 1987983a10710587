//! Queue pair types, states and path MTU.
use serde::{Deserialize, Serialize};

/// Transport service of a QP; numbers equal `enum ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum QpType {
    Rc = 2,
    Uc = 3,
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
    #[default]
    Reset = 0,
    Init = 1,
    ReadyToReceive = 2,
    ReadyToSend = 3,
    SqDrain = 4,
    SqError = 5,
    Error = 6,
}

impl QpState {
    pub const ALL: [Self; 7] =
        [Self::Reset, Self::Init, Self::ReadyToReceive, Self::ReadyToSend, Self::SqDrain, Self::SqError, Self::Error];

    pub const fn from_number(number: u32) -> Option<Self> {
        if number < 7 { Some(Self::ALL[number as usize]) } else { None }
    }
}

/// Path MTU; numbers equal `enum ibv_mtu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum PathMtu {
    Mtu256 = 1,
    Mtu512 = 2,
    #[default]
    Mtu1024 = 3,
    Mtu2048 = 4,
    Mtu4096 = 5,
}

impl PathMtu {
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

    pub const fn bytes(self) -> u32 {
        128 << (self as u32)
    }
}
