//! Access rights of memory regions, windows and queue pairs (`enum ibv_access_flags`).
use serde::{Deserialize, Serialize};

/// A set of access rights; bit values equal `enum ibv_access_flags` in `infiniband/verbs.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access(pub u32);

impl Access {
    pub const LOCAL_WRITE: Self = Self(1);
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    pub const REMOTE_READ: Self = Self(1 << 2);
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    pub const MW_BIND: Self = Self(1 << 4);
    pub const ZERO_BASED: Self = Self(1 << 5);
    pub const ON_DEMAND: Self = Self(1 << 6);
    pub const HUGETLB: Self = Self(1 << 7);
    pub const FLUSH_GLOBAL: Self = Self(1 << 8);
    pub const FLUSH_PERSISTENT: Self = Self(1 << 9);
    /// Bits that a provider may ignore (`IBV_ACCESS_OPTIONAL_RANGE`; RELAXED_ORDERING is bit 20).
    pub const OPTIONAL_RANGE: Self = Self(0x3ff0_0000);

    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without the bits that a provider may ignore.
    pub const fn required(self) -> Self {
        Self(self.0 & !Self::OPTIONAL_RANGE.0)
    }
}
