//! Budget of one run of a QP, and the ways in which its steps end.
use crate::{CHUNK_BYTES_MAX, Progress, REQUESTS_PER_RUN_MAX};
use freeflow_verbs::{Access, SendOpcode};

pub(crate) struct Budget {
    pub bytes: u64,
    /// A multicast message counts once more for each member.
    pub requests: u32,
    /// Messages that may begin.
    pub messages: u32,
    /// Piece of a message that is copied at once.
    pub chunk_bytes: u64,
    /// Limits of rate apply.
    pub metered: bool,
    /// READ responses with payload may go out.
    pub answers: bool,
}

impl Budget {
    /// Of a QP to which no limit of rate applies.
    #[inline]
    pub fn unmetered(bytes: u64) -> Self {
        let (requests, chunk_bytes) = (REQUESTS_PER_RUN_MAX, CHUNK_BYTES_MAX);
        Self { bytes, requests, messages: u32::MAX, chunk_bytes, metered: false, answers: true }
    }
}

pub(crate) enum Turn {
    Continue,
    Stop(Progress),
}

/// The right that an operation needs of local memory.
pub(crate) fn local_right(opcode: SendOpcode) -> Access {
    if opcode == SendOpcode::RdmaRead || opcode.is_atomic() { Access::LOCAL_WRITE } else { Access(0) }
}
