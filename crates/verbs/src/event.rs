//! Asynchronous events (`enum ibv_event_type`, IBTA 11.6.3).
use serde::{Deserialize, Serialize};

/// Numbers equal `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum AsyncEventKind {
    /// A CQ has overflowed.
    CqError = 0,
    /// A QP has failed, and is in ERROR.
    QpFatal = 1,
    /// A request that arrived was invalid: the QP is in ERROR.
    QpRequestError = 2,
    /// A request that arrived lacked the right: the QP is in ERROR.
    QpAccessError = 3,
    /// A packet has arrived at a QP in RTR.
    CommunicationEstablished = 4,
    /// A send queue in SQD has drained.
    SqDrained = 5,
    /// `IBV_EVENT_PATH_MIG`; never raised.
    PathMigrated = 6,
    /// `IBV_EVENT_PATH_MIG_ERR`; never raised.
    PathMigrationError = 7,
    /// The device is gone: the router has ended.
    DeviceFatal = 8,
    /// The port is up.
    PortActive = 9,
    /// The port is down.
    PortError = 10,
    /// `IBV_EVENT_LID_CHANGE`; never raised on RoCE.
    LidChange = 11,
    /// `IBV_EVENT_PKEY_CHANGE`.
    PkeyChange = 12,
    /// `IBV_EVENT_SM_CHANGE`; never raised on RoCE.
    SmChange = 13,
    /// A shared receive queue has failed.
    SrqError = 14,
    /// A shared receive queue has fewer requests than its limit.
    SrqLimitReached = 15,
    /// A QP with an SRQ, in ERROR, takes no more RECVs.
    QpLastWqeReached = 16,
    /// `IBV_EVENT_CLIENT_REREGISTER`; never raised on RoCE.
    ClientReregister = 17,
    /// The GID table has changed.
    GidChange = 18,
}

impl AsyncEventKind {
    /// The kind with this number of `enum ibv_event_type`.
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
    /// The device.
    Device,
    /// A port, by its number.
    Port(u8),
    /// A completion queue, by its cookie.
    Cq(u32),
    /// A queue pair, by its cookie.
    Qp(u32),
    /// A shared receive queue, by its cookie.
    Srq(u32),
}

/// An asynchronous event and its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncEvent {
    /// Kind of event.
    pub kind: AsyncEventKind,
    /// The object of the event.
    pub element: EventElement,
}
