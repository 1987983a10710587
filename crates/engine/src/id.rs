//! Names of the engine's objects: index and generation, so that a stale name finds nothing.
//!
//! Invariant: the upper bits of a generation are the index of the engine's shard, so that engines
//! of one router never give the same name, and each of them finds nothing by another's.
use freeflow_verbs::Shard;
use serde::{Deserialize, Serialize};

/// Bits of a generation that count uses of a slot; those above are the index of the shard.
const USE_BITS: u32 = 29;

/// Those bits.
pub(crate) const USES: u32 = (1 << USE_BITS) - 1;

const _: () = assert!(Shard::COUNT_MAX as u32 <= 1 << (u32::BITS - USE_BITS));

/// Generation of a slot that has not been used.
pub(crate) fn first_generation(shard: Shard) -> u32 {
    u32::from(shard.index()) << USE_BITS
}

/// Generation of a slot for its next use: the same shard's.
pub(crate) fn next_generation(generation: u32) -> u32 {
    generation & !USES | generation.wrapping_add(1) & USES
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name {
            /// Index in its table.
            pub index: u32,
            /// Shard, and count of the slot's uses: a stale ID has another.
            pub generation: u32,
        }

        impl $name {
            /// Index of the shard whose engine gave the name.
            pub fn shard(self) -> u8 {
                (self.generation >> USE_BITS) as u8
            }
        }

        impl crate::slab::SlabId for $name {
            fn new(index: u32, generation: u32) -> Self {
                Self { index, generation }
            }

            fn index(self) -> u32 {
                self.index
            }

            fn generation(self) -> u32 {
                self.generation
            }
        }
    )* };
}

ids! {
    /// A virtual NIC: one address in one network.
    VnicId,
    /// One process' connection.
    SessionId,
    /// One `ibv_open_device`.
    ContextId,
    /// A protection domain.
    PdId,
    /// A memory region.
    MrId,
    /// A memory window.
    MwId,
    /// An XRC domain.
    XrcdId,
    /// A completion queue.
    CqId,
    /// A shared receive queue.
    SrqId,
    /// A queue pair.
    QpId,
    /// An address handle.
    AhId,
}

impl SessionId {
    /// No process: memory that reads as zeros and forgets what is written (a null MR's). Each shard
    /// has it: [`Self::shard`] says nothing about it.
    pub const VOID: Self = Self { index: u32::MAX, generation: u32::MAX };
}

/// Where RECVs come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReceiveQueueId {
    /// The QP's own receive queue.
    Qp(QpId),
    /// A shared receive queue.
    Srq(SrqId),
}
