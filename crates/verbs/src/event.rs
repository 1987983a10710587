//! Asynchronous events (`enum ibv_event_type`, IBTA 11.6.3).
use serde::{Deserialize, Serialize};

/// Numbers equal `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum AsyncEventKind {
    CqError = 0,
    QpFatal = 1,
    QpRequestError = 2,
    QpAccessError = 3,
    CommunicationEstablished = 4,
    SqDrained = 5,
    PathMigrated = 6,
    PathMigrationError = 7,
    DeviceFatal = 8,
    PortActive = 9,
    PortError = 10,
    LidChange = 11,
    PkeyChange = 12,
    SmChange = 13,
    SrqError = 14,
    SrqLimitReached = 15,
    QpLastWqeReached = 16,
    ClientReregister = 17,
    GidChange = 18,
}

impl AsyncEventKind {
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::CqError,
            1 => Self::QpFatal,
            2 => Self::QpRequestError,
            3 => Self::QpAccessError,
            4 => Self::CommunicationEstablished,
            5 => Self::SqDrained,
            6 => Self::PathMigrated,
            7 => Self::PathMigrationError,
            8 => Self::DeviceFatal,
            9 => Self::PortActive,
            10 => Self::PortError,
            11 => Self::LidChange,
            12 => Self::PkeyChange,
            13 => Self::SmChange,
            14 => Self::SrqError,
            15 => Self::SrqLimitReached,
            16 => Self::QpLastWqeReached,
            17 => Self::ClientReregister,
            18 => Self::GidChange,
            _ => return None,
        })
    }
}

/// The object of an event; the number is the library's own cookie for the object (or the port
/// number).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventElement {
    Device,
    Port(u8),
    Cq(u32),
    Qp(u32),
    Srq(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncEvent {
    pub kind: AsyncEventKind,
    pub element: EventElement,
}
