//! One measurement between two ends: its traffic, its memory, and its outcome.
use crate::stats::Summary;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    Send,
    Write,
    Read,
}

impl Operation {
    pub const ALL: [Self; 3] = [Self::Send, Self::Write, Self::Read];

    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "SEND",
            Self::Write => "WRITE",
            Self::Read => "READ",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    /// From `ibv_malloc`: the router reaches it directly.
    Shared,
    /// From `mmap`, registered like any memory.
    Ordinary,
    /// The same, 16 bytes off a page, as large blocks of `malloc` are.
    Unaligned,
    /// Ordinary, in transparent huge pages as far as the kernel has them.
    Huge,
    /// Anonymous, and shared by the program itself: the router maps its file.
    Foreign,
    /// The same, of System V: UCX has its buffers there.
    SystemV,
    /// Shared by a file that the router can't map: reached by its helper.
    SlowPath,
}

impl Memory {
    /// Kinds of memory for traffic; huge pages make no difference there.
    pub const OF_TRAFFIC: [Self; 3] = [Self::Shared, Self::Ordinary, Self::SlowPath];
    pub const ALL: [Self; 4] = [Self::Shared, Self::Ordinary, Self::Huge, Self::Foreign];

    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "ibv_malloc",
            Self::Ordinary => "ordinary",
            Self::Unaligned => "unaligned",
            Self::Huge => "huge pages",
            Self::Foreign => "foreign",
            Self::SystemV => "System V",
            Self::SlowPath => "slow path",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Traffic {
    /// One message at a time. SEND and WRITE: there and back. READ: one READ.
    Latency,
    /// Many in flight, one way.
    Bandwidth,
    /// The same, and the receiver of SENDs reads all of each.
    BandwidthRead,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub traffic: Traffic,
    pub operation: Operation,
    /// Payload, bytes; two or more.
    pub bytes: usize,
    /// Messages in flight at most, each with a place of its own in memory.
    pub slots: usize,
    pub duration_ms: u64,
}

/// Address of one end, for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub gid: [u8; 16],
    pub qpn: u32,
    pub rkey: u32,
    /// Of the memory that the other end may read and write.
    pub address: u64,
}

/// Result of one end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Latency: microseconds a round trip. Bandwidth: Gb/s, over equal parts of the time. Only of the end that ran.
    pub figures: Option<Summary>,
    /// Messages that this end sent, warm-up included.
    pub message_count: u64,
    /// CPU time of the process, nanoseconds, and the time it took.
    pub cpu_ns: u64,
    pub elapsed_ns: u64,
}
