//! Messages between a router and the *near half* of a vNIC: the part that shares a kernel with the
//! vNIC's processes, where the router does not. It opens their memory, stops their threads, watches
//! their ends and holds the sockets that they read events from.
//!
//! Transport: a Unix `SOCK_SEQPACKET` pair a vNIC, one message a datagram. Descriptors go to the
//! near half only: with [`Request::Identify`] the process' pidfd, with [`Request::OpenEventChannel`]
//! the end for records of the library's event channel.
//!
//! A request that has a number gets one [`Report::Done`], in any order. The rest gets none. The
//! router gives every number once; what it names by one stays the near half's until it says
//! otherwise, or the stream ends.
//!
//! Flow control: no more than one event of a channel is under way ([`Report::EventTaken`]), and no
//! more than one access to memory, of at most [`ACCESS_BYTES_MAX`]. Bytes travel in the message.
use alloc::vec::Vec;
use freeflow_verbs::{AtomicOperation, VerbsError};
use serde::{Deserialize, Serialize};

/// Bytes that one access reads or writes.
pub const ACCESS_BYTES_MAX: usize = 32 * 1024;
/// Longest record of an event channel, bytes.
pub const RECORD_BYTES_MAX: usize = 16 * 1024;

/// To the near half. `request`, `process` and `channel` are numbers that the router gave; `address`
/// is one of the process.
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Looks at a process that connected, whose number is `request` from then on.
    Identify { request: u64, pid: i32, uid: u32, gid: u32 },
    /// The connection has ended: its frozen threads go on.
    LetGo { process: u64 },
    /// The number names nothing any more.
    Forget { process: u64 },
    /// Reads the process' memory; answered with `length` bytes.
    Read { request: u64, process: u64, address: u64, length: u32 },
    /// Writes the process' memory.
    Write { request: u64, process: u64, address: u64, bytes: Vec<u8> },
    /// Changes eight bytes; answered with their value before.
    Atomic { request: u64, process: u64, address: u64, operation: AtomicOperation },
    /// Freezes all threads but one, by its ID in its own PID namespace; `quiesce`: accesses to the
    /// memory wait as long.
    Freeze { request: u64, process: u64, thread: u32, quiesce: bool },
    /// Lets the frozen threads go on.
    Thaw { request: u64, process: u64 },
    /// An event channel has this number from now on.
    OpenEventChannel { channel: u64 },
    /// A record for the channel's reader.
    Event { channel: u64, record: Vec<u8> },
    /// Its reader meets the end of file, after what was sent.
    CloseChannel { channel: u64 },
    /// `Identify` of a connection to the guest agent of a virtual machine, which knows the process.
    IdentifyConnection { request: u64, connection: u64 },
    /// Reads the process' memory into the staging area of a virtual machine's shared-memory device.
    ReadStaged { request: u64, process: u64, address: u64, length: u32 },
    /// Writes bytes of the staging area to the process' memory.
    WriteStaged { request: u64, process: u64, address: u64, length: u32 },
}

/// From the near half, which may lie. Numbers are those of [`Request`].
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// Result of a request; an error is the access' or the process'.
    Done { request: u64, outcome: Result<Answer, VerbsError> },
    /// The process has ended.
    ProcessEnded { process: u64 },
    /// The event is where its reader finds it: the next one may come.
    EventTaken { channel: u64 },
    /// Nobody reads the channel any more.
    ChannelClosed { channel: u64 },
}

/// Answer to a request that was carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To all requests without another answer.
    Done,
    /// To [`Request::Read`].
    Bytes(Vec<u8>),
    /// To [`Request::Atomic`]: the value before.
    Value(u64),
}
