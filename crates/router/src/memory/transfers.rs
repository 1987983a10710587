//! Copies that slow-path copiers have in hand, and what comes of them.
use crate::base::slab::Slab;
use crate::dataplane::bursts::Burst;
use crate::memory::bounce::Bounces;
use crate::memory::slow_path::Part;
use freeflow_engine::{MemorySide, Span, Token, VnicId};

/// Lists kept for later.
pub(crate) const SPARE_COUNT_MAX: usize = 64;

/// Jobs that copiers have, and buffers to use again.
#[derive(Default)]
pub struct Transfers {
    pub(crate) transfers: Slab<Transfer>,
    pub(crate) slow_path_atomic_count: u32,
    pub(crate) shared_atomic_count: u32,
    pub(crate) bounces: Bounces,
    pub(crate) spare_parts: Vec<Vec<Part>>,
    pub(crate) spare_spans: Vec<Vec<Span>>,
}

pub(crate) struct Transfer {
    pub(crate) token: Token,
    pub(crate) stage: Stage,
    /// The vNIC whose copier has the job.
    pub(crate) copier: VnicId,
    pub(crate) to: Vec<Span>,
    pub(crate) bytes: usize,
    pub(crate) last: bool,
    /// How often it was scattered before.
    pub(crate) scattered: u32,
    pub(crate) way: Way,
}

/// How shared memory is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Through this process' mapping.
    Mapped,
    /// As all other memory of its process: through the owner's address space, by its vNIC's copier.
    ByOwner,
}

/// Why a copy was not made.
pub(crate) enum Unmade {
    /// A page is missing: only [`Way::ByOwner`] can do it.
    Missing,
    Fault(MemorySide),
}

pub(crate) enum Stage {
    Gather,
    /// As `Gather`, for packets.
    Fetch(Box<Burst>),
    /// The shared parts of the destination are written after the copier is done.
    Scatter {
        shared_last: bool,
        /// [`PageTable::revoked`](crate::memory::page_table::PageTable::revoked) of the
        /// destination when the job was begun.
        revoked: u64,
    },
    /// On the bytes at `Transfer::to`: by the slow path, which is atomic only against other work of the same copier,
    /// or on a segment.
    Atomic {
        by_slow_path: bool,
    },
}

/// Result of a job that a slow-path copier finished.
#[derive(Clone, Copy, Debug)]
pub enum Arrival {
    Copied(Token, Result<(), MemorySide>),
    Atomic(Token, Result<u64, ()>),
}

impl Transfers {
    pub fn in_flight(&self) -> usize {
        self.transfers.len() + self.bounces.postponed_count()
    }

    /// Gives up the jobs of a copier that was given up: as if it had failed each. It touches no other vNIC's memory.
    pub fn forget_copier(&mut self, vnic: VnicId) -> Vec<Arrival> {
        let jobs = self.transfers.keys_where(|transfer| transfer.copier == vnic);
        let gone: Vec<Transfer> = jobs.into_iter().filter_map(|id| self.transfers.remove(id)).collect();
        gone.into_iter().map(|Transfer { token, stage, .. }| self.failed(token, stage)).collect()
    }

    pub(crate) fn failed(&mut self, token: Token, stage: Stage) -> Arrival {
        match stage {
            Stage::Gather | Stage::Fetch(_) => Arrival::Copied(token, Err(MemorySide::Source)),
            Stage::Scatter { .. } => Arrival::Copied(token, Err(MemorySide::Destination)),
            Stage::Atomic { by_slow_path } => {
                self.count_atomic_done(by_slow_path);
                Arrival::Atomic(token, Err(()))
            }
        }
    }

    pub(crate) fn count_atomic_done(&mut self, by_slow_path: bool) {
        *(if by_slow_path { &mut self.slow_path_atomic_count } else { &mut self.shared_atomic_count }) -= 1;
    }

    pub(crate) fn keep_parts(&mut self, mut parts: Vec<Part>) {
        if self.spare_parts.len() < SPARE_COUNT_MAX {
            parts.clear();
            self.spare_parts.push(parts);
        }
    }

    /// Kept until [`Self::keep_spans`].
    pub(crate) fn spans_of(&mut self, spans: &[Span]) -> Vec<Span> {
        let mut kept = self.spare_spans.pop().unwrap_or_default();
        kept.extend_from_slice(spans);
        kept
    }

    pub(crate) fn keep_spans(&mut self, mut spans: Vec<Span>) {
        if self.spare_spans.len() < SPARE_COUNT_MAX {
            spans.clear();
            self.spare_spans.push(spans);
        }
    }
}
