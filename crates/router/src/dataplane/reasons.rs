//! Why requests of a QP go through the router: what `freeflow ps --qps`, `/metrics` and `freeflow ping` say.
//!
//! A QP's path is that of its last request. What could be otherwise by now is looked up when
//! somebody asks; what the router refused is noted then, of messages and of memory, for writing and
//! for reading, and holds until it is asked again.
use freeflow_engine::NotDirect;
use freeflow_shm::{DIRECT_RING_MESSAGE_BYTES_MAX, RequestConsumer};
use freeflow_verbs::QpState;

/// Why not direct.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reason {
    Type,
    Multicast,
    /// Of datagrams.
    NoLocalPeer,
    NotConnected,
    OnlyReceives,
    Drained,
    Failed,
    OtherHost,
    NoPeer,
    /// Its network's policy says so.
    Policy,
    /// It, or its peer, is a virtual machine's.
    Guest,
    /// A limit of rate applies to its vNIC, or to its peer's.
    Metered,
    /// Its library asks once the QP has sent enough to be worth it, and again now and then.
    NotAsked,
    NeverAsked,
    /// It has a direct ring that its peer has not begun to take messages from; or, of datagrams, that takes none.
    NotAccepted,
    TooLong,
    /// A SEND of UC, or a datagram.
    SharedReceives,
    Operation,
    KeyRefused,
    KindOfMemory,
    NoCommands,
    NotShared,
    Imported,
    TakenBack,
    BeyondRegion,
    TooMany,
    NotEnoughCredit,
}

impl Reason {
    pub const fn text(self) -> &'static str {
        match self {
            Self::Type => "XRC",
            Self::Multicast => "multicast",
            Self::NoLocalPeer => "no peer on this host",
            Self::NotConnected => "not connected",
            Self::OnlyReceives => "only receives",
            Self::Drained => "send queue drained",
            Self::Failed => "in error",
            Self::OtherHost => "peer on another host",
            Self::NoPeer => "no peer",
            Self::Policy => "policy",
            Self::Guest => "virtual machine",
            Self::Metered => "limited by a QoS class",
            Self::NotAsked => "not asked yet",
            Self::NeverAsked => "its library does not ask",
            Self::NotAccepted => "peer does not take it",
            Self::TooLong => "message over 256 KiB",
            Self::SharedReceives => "UC or UD with an SRQ",
            Self::Operation => "neither SEND, WRITE, READ nor atomic",
            Self::KeyRefused => "key refused",
            Self::KindOfMemory => "no process' own memory",
            Self::NoCommands => "peer's process takes no revoke commands",
            Self::NotShared => "memory not shared with the router",
            Self::Imported => "memory of several processes",
            Self::TakenBack => "memory was taken back",
            Self::BeyondRegion => "memory beyond the region",
            Self::TooMany => "too many grants",
            Self::NotEnoughCredit => "not enough credit for a grant",
        }
    }

    pub(crate) fn of(reason: NotDirect, state: QpState) -> Self {
        match reason {
            NotDirect::Type => Self::Type,
            NotDirect::Multicast => Self::Multicast,
            NotDirect::OtherHost => Self::OtherHost,
            NotDirect::NoPeer => Self::NoPeer,
            NotDirect::State => match state {
                QpState::Reset | QpState::Init | QpState::ReadyToSend => Self::NotConnected,
                QpState::ReadyToReceive => Self::OnlyReceives,
                QpState::SqDrain => Self::Drained,
                QpState::SqError | QpState::Error => Self::Failed,
            },
        }
    }
}

const _: () = assert!(DIRECT_RING_MESSAGE_BYTES_MAX == 256 << 10, "as `Reason::TooLong` says");

/// Results of a QP's requests for grants.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Asked {
    /// It has asked for something; also before its last reset.
    pub ever: bool,
    /// It was granted something since its last reset.
    pub granted: bool,
    /// Why it was not granted what it last asked for, by [`GrantAccess`].
    pub refused: [Option<Reason>; 3],
}

impl Asked {
    /// The QP was reset.
    pub fn begin_anew(self) -> Self {
        Self { ever: self.ever, ..Self::default() }
    }
}

/// Requests that a library says it has carried out past the router.
pub(crate) fn done_directly(send: &RequestConsumer) -> u64 {
    let tally = send.tally();
    tally.sends.wrapping_add(tally.writes).wrapping_add(tally.reads).wrapping_add(tally.atomics)
}
