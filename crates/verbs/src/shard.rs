//! Parts of a host's router that work side by side, each with vNICs of its own.
use crate::Qpn;
use serde::{Deserialize, Serialize};

/// One of the engines of a router. A QPN says by its low bits which of them has the QP, so that packets find it without
/// a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    index: u8,
    count: u8,
}

impl Shard {
    /// Most engines of one router.
    pub const COUNT_MAX: u8 = 8;
    /// The engine of a router that has no other.
    pub const ONLY: Self = Self { index: 0, count: 1 };

    /// Engine `index` of `count`. `None`: `count` is no power of two up to [`COUNT_MAX`](Self::COUNT_MAX), or `index`
    /// not below it.
    pub const fn new(index: u8, count: u8) -> Option<Self> {
        let is_count = count.is_power_of_two() && count <= Self::COUNT_MAX;
        if is_count && index < count { Some(Self { index, count }) } else { None }
    }

    /// All engines of a router with so many; none if there can't be so many.
    pub fn all(count: u8) -> impl Iterator<Item = Self> + Clone {
        (0..count).filter_map(move |index| Self::new(index, count))
    }

    /// Numbers of the router's other engines.
    pub fn others(self) -> impl Iterator<Item = u8> {
        (0..self.count).filter(move |&index| index != self.index)
    }

    /// Its number.
    pub const fn index(self) -> u8 {
        self.index
    }

    /// Engines that the router has.
    pub const fn count(self) -> u8 {
        self.count
    }

    /// The number of the engine with this QP. Those of management (0 and 1) are the first one's.
    #[inline]
    pub const fn of_qpn(self, qpn: Qpn) -> u8 {
        if qpn.0 <= 1 { 0 } else { (qpn.0 & (self.count as u32 - 1)) as u8 }
    }

    /// Whether it has this QP.
    #[inline]
    pub const fn has_qpn(self, qpn: Qpn) -> bool {
        self.of_qpn(qpn) == self.index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_powers_of_two() {
        let counts: alloc::vec::Vec<u8> = (0..=u8::MAX).filter(|&count| Shard::new(0, count).is_some()).collect();
        assert_eq!(counts, [1, 2, 4, 8]);
        assert_eq!((Shard::new(3, 4).map(Shard::index), Shard::new(4, 4)), (Some(3), None));
        assert_eq!((Shard::all(4).count(), Shard::all(3).count()), (4, 0));
        assert!(Shard::new(1, 4).is_some_and(|shard| shard.others().eq([0, 2, 3])));
    }

    #[test]
    fn each_qpn_is_of_one_engine() {
        for count in [1, 2, 4, 8] {
            for qpn in [0, 1, 2, 3, 4, 17, 18, Qpn::MASK - 1, Qpn::MASK] {
                let owners = Shard::all(count).filter(|shard| shard.has_qpn(Qpn(qpn)));
                assert_eq!(owners.count(), 1, "{qpn} of {count}");
            }
            assert!(Shard::new(0, count).is_some_and(|first| first.has_qpn(Qpn(1))));
        }
    }
}
