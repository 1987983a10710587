//! How two sides find out what both speak.
//!
//! Each side's first message carries an [`Offer`]: the versions that it speaks, and feature bits for
//! what was added since a version was released. [`Offer::agree`] is the same computation on both
//! sides. A release adds behind a feature bit wherever it can, and raises the version only for what
//! a bit cannot express; the code for the version before stays for one release.
//!
//! Invariant: the encoding of [`Offer`] and its place in each first message never change. A side
//! can read the offer of any later release.
use core::fmt;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Versions, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRange {
    /// Lowest version.
    pub lowest: u32,
    /// Highest version.
    pub highest: u32,
}

impl VersionRange {
    /// The range of one version.
    pub const fn only(version: u32) -> Self {
        Self { lowest: version, highest: version }
    }

    /// The highest version of both ranges. A range whose ends are swapped has none.
    pub fn highest_common(self, other: Self) -> Option<u32> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { lowest, highest } if lowest == highest => write!(f, "version {lowest}"),
            Self { lowest, highest } => write!(f, "versions {lowest} to {highest}"),
        }
    }
}

/// Versions and features that a side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Versions that this side speaks.
    pub versions: VersionRange,
    /// Features that this side understands. Unknown bits are ignored.
    pub features: u64,
    /// Those of them that the other side must understand, too.
    pub required_features: u64,
}

impl Offer {
    /// One version and no feature.
    pub const fn only(version: u32) -> Self {
        Self { versions: VersionRange::only(version), features: 0, required_features: 0 }
    }

    /// The version and features that both sides speak.
    ///
    /// # Errors
    /// No version is common to both, or a side requires a feature that the other does not offer.
    pub fn agree(&self, theirs: &Self) -> Result<Agreement, Disagreement> {
        let Some(version) = self.versions.highest_common(theirs.versions) else {
            return Err(Disagreement::Versions { ours: self.versions, theirs: theirs.versions });
        };
        // Of either side: one that requires what it does not offer itself agrees with nobody.
        let required = self.required_features | theirs.required_features;
        let (missing_here, missing_there) = (required & !self.features, required & !theirs.features);
        if missing_here | missing_there != 0 {
            return Err(Disagreement::Features { missing_here, missing_there });
        }
        Ok(Agreement { version, features: self.features & theirs.features })
    }

    /// Whether this side speaks what the other side says was agreed on.
    pub fn allows(&self, agreed: Agreement) -> bool {
        (self.versions.lowest..=self.versions.highest).contains(&agreed.version)
            && agreed.features & !self.features == 0
            && self.required_features & !agreed.features == 0
    }
}

/// The version and features in force between two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreement {
    /// The version.
    pub version: u32,
    /// Features that both sides understand.
    pub features: u64,
}

/// Why there is no [`Agreement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Disagreement {
    /// No version is common to both.
    #[error("the other side speaks {theirs}, this side {ours}")]
    Versions {
        /// Versions of this side.
        ours: VersionRange,
        /// Versions of the other side.
        theirs: VersionRange,
    },
    /// Bits that one side requires and the other does not offer.
    #[error("features are required that the other side lacks ({missing_there:#x}) or this side ({missing_here:#x})")]
    Features {
        /// Bits that the other side requires and this one lacks.
        missing_here: u64,
        /// Bits that this side requires and the other one lacks.
        missing_there: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    fn offer(lowest: u32, highest: u32, features: u64, required_features: u64) -> Offer {
        Offer { versions: VersionRange { lowest, highest }, features, required_features }
    }

    #[test]
    fn the_highest_common_version_is_chosen() {
        let version = |ours: (u32, u32), theirs: (u32, u32)| {
            offer(ours.0, ours.1, 0, 0).agree(&offer(theirs.0, theirs.1, 0, 0)).ok().map(|agreed| agreed.version)
        };
        assert_eq!(version((1, 3), (2, 5)), Some(3));
        assert_eq!(version((2, 5), (1, 3)), Some(3));
        assert_eq!(version((1, 1), (1, 9)), Some(1));
        assert_eq!(version((1, 9), (4, 4)), Some(4));
        assert_eq!(version((1, 2), (3, 4)), None);
        assert_eq!(version((3, 4), (1, 2)), None);
        assert_eq!(version((1, 9), (5, 4)), None, "a range with swapped ends");
    }

    #[test]
    fn a_higher_range_is_refused_and_both_are_named() {
        let error = offer(1, 1, 0, 0).agree(&offer(2, 3, u64::MAX, 0)).unwrap_err();
        assert_eq!(error.to_string(), "the other side speaks versions 2 to 3, this side version 1");
    }

    #[test]
    fn unknown_features_are_ignored_unless_required() {
        let ours = offer(1, 1, 0b011, 0);
        assert_eq!(ours.agree(&offer(1, 1, u64::MAX, 0)), Ok(Agreement { version: 1, features: 0b011 }));
        assert_eq!(ours.agree(&offer(1, 1, 0, 0)), Ok(Agreement { version: 1, features: 0 }));
        assert_eq!(ours.agree(&offer(1, 1, u64::MAX, 0b001)), Ok(Agreement { version: 1, features: 0b011 }));
        let error = ours.agree(&offer(1, 1, u64::MAX, 0b101)).unwrap_err();
        assert_eq!(error, Disagreement::Features { missing_here: 0b100, missing_there: 0 });
        assert!(error.to_string().ends_with("or this side (0x4)"));
        let strict = Offer { required_features: 0b010, ..ours };
        let error = strict.agree(&offer(1, 1, 0b001, 0)).unwrap_err();
        assert_eq!(error, Disagreement::Features { missing_here: 0, missing_there: 0b010 });
        let contradictory = offer(1, 1, 0b011, 0b100);
        assert!(contradictory.agree(&offer(1, 1, 0b100, 0)).is_err() && ours.agree(&contradictory).is_err());
    }

    #[test]
    fn what_was_not_offered_is_not_allowed() {
        let ours = offer(1, 2, 0b011, 0b001);
        let allows = |version, features| ours.allows(Agreement { version, features });
        assert!(allows(1, 0b001) && allows(2, 0b011));
        assert!(!allows(0, 0b001) && !allows(3, 0b001) && !allows(1, 0b101) && !allows(1, 0b010));
    }

    /// A later release must still find these bytes.
    #[test]
    fn the_encoding_of_an_offer_is_fixed() {
        assert_eq!(crate::encode(&offer(1, 300, 5, 4)), [1, 0xac, 2, 5, 4]);
    }

    proptest! {
        #[test]
        fn both_sides_agree_on_the_same(a in (0..4u32, 0..4u32, 0..8u64, 0..8u64), b in (0..4u32, 0..4u32, 0..8u64, 0..8u64)) {
            let (a, b) = (offer(a.0, a.1, a.2, a.3), offer(b.0, b.1, b.2, b.3));
            prop_assert_eq!(a.agree(&b).ok(), b.agree(&a).ok());
            if let Ok(agreed) = a.agree(&b) {
                prop_assert!(a.allows(agreed) && b.allows(agreed));
            }
        }
    }
}
