//! Names of the engine's objects: index and generation, so that a stale name finds nothing.
use serde::{Deserialize, Serialize};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name {
            /// Index in its table.
            pub index: u32,
            /// Count of the slot's uses: a stale ID has another.
            pub generation: u32,
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
    /// No process: memory that reads as zeros and forgets what is written (a null MR's).
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
