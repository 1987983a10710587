//! The memory of processes: ranges of it, copies between them, atomic operations.
use crate::{QpId, SessionId};
use freeflow_verbs::AtomicOperation;
use serde::{Deserialize, Serialize};

/// A range of one process' memory that a key has already been checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The process.
    pub session: SessionId,
    /// The region that the key named.
    pub region: SpanRegion,
    /// Virtual address in the process (not the IOVA).
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// The memory region that a span is of: its index, and whether it is registered on demand. In one
/// word, since spans are many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanRegion(u32);

impl SpanRegion {
    const ON_DEMAND: u32 = 1 << 31;

    /// `index`: less than 2^31.
    #[inline]
    pub fn new(index: u32, is_on_demand: bool) -> Self {
        Self(index | if is_on_demand { Self::ON_DEMAND } else { 0 })
    }

    /// Index of the region.
    #[inline]
    pub fn index(self) -> u32 {
        self.0 & !Self::ON_DEMAND
    }

    /// The bytes are those that the process sees at the address when they are used, whatever other
    /// regions cover it.
    #[inline]
    pub fn is_on_demand(self) -> bool {
        self.0 & Self::ON_DEMAND != 0
    }
}

/// Where the bytes of a copy come from: first `prefix`, then `body`.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The 40 bytes of the GRH of a UD message, else empty.
    pub prefix: &'a [u8],
    /// The bytes behind the prefix.
    pub body: SourceBody<'a>,
}

/// Where the bytes of a copy's body lie.
#[derive(Clone, Copy, Debug)]
pub enum SourceBody<'a> {
    /// In the router's own memory: inline data, or a packet.
    Bytes(&'a [u8]),
    /// In memory of processes, in this order.
    Spans(&'a [Span]),
}

/// Names a copy or an atomic operation that was answered with `Pending`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Token(pub u64);

/// Which side of a copy could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySide {
    /// The memory that is read.
    Source,
    /// The memory that is written.
    Destination,
}

/// Answer of [`Memory::copy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// All bytes are copied.
    Done,
    /// It goes on elsewhere; [`crate::Engine::handle_copied`] brings the result. Slices given are
    /// not needed any more.
    Pending,
    /// The memory is not there (unmapped since its registration, truncated file, process gone).
    Fault(MemorySide),
}

/// Answer of [`Memory::atomic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOutcome {
    /// The value before the operation, in host byte order.
    Done(u64),
    /// [`crate::Engine::handle_atomic_done`] brings the result.
    Pending,
    /// The memory is not there.
    Fault,
}

/// The memory that regions are registered of.
pub trait Memory {
    /// Copies exactly the bytes of `from` into `to` (both of equal length), in ascending order; if
    /// `last`, so that the last eight bytes become visible after all others.
    fn copy(&mut self, token: Token, from: Source<'_>, to: &[Span], last: bool) -> CopyOutcome;

    /// Performs an atomic operation on the eight bytes at `at` (aligned, checked), atomic against
    /// every other atomic operation of this router on the same bytes.
    fn atomic(&mut self, token: Token, at: Span, operation: AtomicOperation) -> AtomicOutcome;

    /// The QP goes to ERROR, or one of UC to SQE: its grants end, and its peer's grants of its memory.
    fn revoke_direct(&mut self, qp: QpId);
}
