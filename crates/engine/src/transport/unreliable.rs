//! State of a UC QP about the message that it sends or receives by packets (IBTA 9.8).
use freeflow_verbs::{Duration, SendOpcode};
use serde::{Deserialize, Serialize};

/// Packets of one UC burst.
pub(crate) const DATAGRAM_BURST_PACKETS_MAX: usize = 16;

pub(crate) const DATAGRAM_BURST_BYTES_MAX: u64 = 60 * 1024;

/// Time between two looks for the word of another host that keeps one waiting: 1 s in all. It
/// counts while nobody has answered: a router that has no processor for some hundred milliseconds
/// loses no message.
pub(crate) const WORD_STEP: Duration = Duration::from_millis(10);

/// So long after one waited in vain the next ones wait less: 0.2 s in all. A host that is down does
/// not hold up a QP's whole queue.
pub(crate) const VAIN_FOR: Duration = Duration::from_millis(30_000);

pub(crate) const VAIN_STEP: Duration = Duration::from_millis(2);

/// Hosts that a UD QP is made known to unasked; any more have to ask.
pub(crate) const INTRODUCED_HOSTS_MAX: usize = 256;

/// UC: both directions of one connection.
#[derive(Serialize, Deserialize)]
pub(crate) struct Unreliable {
    pub next_psn: u32,
    pub expected_psn: u32,
    /// The message that is arriving.
    pub message: Option<IncomingDatagramMessage>,
}

/// A UC message of which the first packets have come.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct IncomingDatagramMessage {
    pub opcode: SendOpcode,
    pub address: u64,
    pub rkey: u32,
    /// WRITE: as announced.
    pub length: u64,
    pub received: u64,
    /// Of the packet that is being written.
    pub bytes: u64,
    pub ends: bool,
    pub solicited: bool,
    pub immediate: u32,
}

/// Whether a datagram may go to a QPN of another host.
pub(crate) enum Reachability {
    Go,
    /// Its owner is being asked.
    Wait,
    /// Nobody would take it.
    Lost,
}

impl Unreliable {
    pub fn new(sq_psn: u32, rq_psn: u32) -> Self {
        Self { next_psn: sq_psn, expected_psn: rq_psn, message: None }
    }

    pub fn begin(&mut self, sq_psn: u32) {
        self.next_psn = sq_psn;
    }
}
