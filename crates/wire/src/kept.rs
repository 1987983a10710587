//! The list of packets in a report; see [`frame`](crate::frame).
use crate::Reth;

/// Packets behind the first missing one that a responder keeps, as a report names them: bit n is the packet n + 1 PSNs
/// behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept(pub u128);

impl Kept {
    /// Packets that a report may name.
    pub const PACKETS: u32 = u128::BITS;

    /// The packet so many PSNs behind the missing one is kept; false: it is too far away to be named.
    pub fn note(&mut self, distance: u32) -> bool {
        let is_inside = (1..=Self::PACKETS).contains(&distance);
        if is_inside {
            self.0 |= 1 << (distance - 1);
        }
        is_inside
    }

    /// Whether the packet so many PSNs behind the missing one is kept.
    pub fn has(self, distance: u32) -> bool {
        (1..=Self::PACKETS).contains(&distance) && self.0 >> (distance - 1) & 1 != 0
    }

    /// How far behind the missing packet the last one is that is kept; 0: none is.
    pub fn last(self) -> u32 {
        u128::BITS - self.0.leading_zeros()
    }

    /// The fields of a report that name them: the lowest bits are the address.
    pub fn fields(self) -> Reth {
        Reth { address: self.0 as u64, rkey: (self.0 >> 64) as u32, length: (self.0 >> 96) as u32 }
    }

    /// The packets that the fields of a report name.
    pub fn from_fields(fields: &Reth) -> Self {
        Self(u128::from(fields.address) | u128::from(fields.rkey) << 64 | u128::from(fields.length) << 96)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_what_is_kept() {
        let (mut kept, distances) = (Kept::default(), [1, 2, 64, 65, 96, 97, 128]);
        assert_eq!(kept.last(), 0);
        for distance in distances {
            assert!(!kept.has(distance) && kept.note(distance));
            assert_eq!(kept.last(), distance);
        }
        assert!(!kept.note(0) && !kept.note(129) && !kept.note(u32::MAX));
        assert!((0..200).all(|distance| kept.has(distance) == distances.contains(&distance)));
        assert_eq!(kept.fields(), Reth { address: 1 << 63 | 3, rkey: 1 << 31 | 1, length: 1 << 31 | 1 });
        assert_eq!(Kept::from_fields(&kept.fields()), kept);
    }
}
