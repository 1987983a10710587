//! Access rights of memory regions, windows and queue pairs (`enum ibv_access_flags`).
use serde::{Deserialize, Serialize};

/// A set of access rights; bit values equal `enum ibv_access_flags` in `infiniband/verbs.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access(pub u32);

impl Access {
    /// The region may be written locally: RECVs, READ responses, atomic results.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The peer may WRITE; needs LOCAL_WRITE.
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    /// The peer may READ.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// The peer may carry out atomic operations and ATOMIC_WRITE; needs LOCAL_WRITE.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Memory windows may be bound to the region.
    pub const MW_BIND: Self = Self(1 << 4);
    /// Requests address the region from 0 on.
    pub const ZERO_BASED: Self = Self(1 << 5);
    /// Pages are found when they are used (`IBV_ACCESS_ON_DEMAND`).
    pub const ON_DEMAND: Self = Self(1 << 6);
    /// The region lies in huge pages: a hint, which is ignored.
    pub const HUGETLB: Self = Self(1 << 7);
    /// The peer may FLUSH for global visibility (IBTA annex A19).
    pub const FLUSH_GLOBAL: Self = Self(1 << 8);
    /// The peer may FLUSH for persistence: refused, nothing here is persistent.
    pub const FLUSH_PERSISTENT: Self = Self(1 << 9);
    /// Bits that a provider may ignore (`IBV_ACCESS_OPTIONAL_RANGE`; RELAXED_ORDERING is bit 20).
    pub const OPTIONAL_RANGE: Self = Self(0x3ff0_0000);

    /// Whether all rights of `other` are in the set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether some right of `other` is in the set.
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The rights of both sets.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without the bits that a provider may ignore.
    pub const fn required(self) -> Self {
        Self(self.0 & !Self::OPTIONAL_RANGE.0)
    }
}
