//! Counts that the machine keeps, for `status`.
use freeflow_wire::cm::Kind;

/// Of each kind of message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageCounts {
    /// Messages that went out.
    pub sent: u64,
    /// Of those sent: copies of what was not answered in time.
    pub repeated: u64,
    /// Messages that came.
    pub received: u64,
    /// Of those received: what had no effect, since it was for nobody, late, twice there, or not
    /// its sender's to say.
    pub refused: u64,
}

/// Numbers of the machine: objects that are there, and messages since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Identifiers.
    pub ids: usize,
    /// Identifiers that listen.
    pub listeners: usize,
    /// All that is between two ends: those being made, those that stand, those that end.
    pub connections: usize,
    /// Connections between two ends that both know of it.
    pub established: usize,
    /// Requests that a program here has not answered yet.
    pub half_open: usize,
    /// Connections without an identifier.
    pub orphans: usize,
    /// By [`Kind::index`].
    pub messages: [MessageCounts; Kind::COUNT],
    /// Packets that were no messages.
    pub malformed: u64,
    /// Requests that found no room: backlog, half-open requests of a remote, or identifiers of the
    /// vNIC.
    pub overflows: u64,
}
