//! Claims on RECVs that two may take: the library for messages that came by its incoming direct
//! ring, the router for all others and to flush.
//!
//! Each slot of such a queue has a word that says whose its RECV is: one compare-and-swap decides,
//! so a position has exactly one taker, whatever a peer says that lies about which RECV its
//! messages take. It is one of the few words that both sides store. A library that scribbles over
//! it spoils its own RECVs.
use crate::sync::{AtomicU32, Ordering};

/// Taker of a RECV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    Library = 1,
    Router = 2,
}

/// Content of the word once `taker` has `position`, of which it has 30 bits. Positions run freely;
/// what is a lap older or newer differs, for a queue has far fewer slots than 2^30.
#[inline]
fn owned(position: u32, taker: Taker) -> u32 {
    position << 2 | taker as u32
}

/// Whether the word belongs to a later position than `wanted`, of a slot that was taken and used
/// again meanwhile.
#[inline]
fn is_later(word: u32, wanted: u32) -> bool {
    // The sign of the difference of both positions, modulo 2^30, moved to bit 31.
    let ahead = ((word >> 2).wrapping_sub(wanted >> 2) << 2).cast_signed();
    word & 3 != 0 && ahead > 0
}

/// Takes the RECV at `position`. False: the other side has it, or had it. A second call for the
/// same taker says the same again.
#[inline]
pub fn claim(owner: &AtomicU32, position: u32, taker: Taker) -> bool {
    let wanted = owned(position, taker);
    // Relaxed, all: what the RECV says was published with its slot, and who loses reads and writes
    // nothing of it.
    let mut before = owner.load(Ordering::Relaxed);
    // Twice at most: the other side has it then, or has just given it back, and who comes too late for that may as well
    // have come before. One that scribbles gets all.
    for _ in 0..2 {
        if before >> 2 == wanted >> 2 && before & 3 != 0 {
            return before == wanted;
        }
        // A taker so late that the slot is in use again has looked at what was there before.
        if is_later(before, wanted) {
            return false;
        }
        match owner.compare_exchange(before, wanted, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => before = now,
        }
    }
    false
}

/// `taker` gives back the RECV at `position`, which it has not used: whoever claims it next has it.
pub fn unclaim(owner: &AtomicU32, position: u32, taker: Taker) {
    // Relaxed, both: as in `claim`. If it fails the word is not what honest sides store.
    let _ = owner.compare_exchange(owned(position, taker), 0, Ordering::Relaxed, Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_position_has_one_taker() {
        for position in [0, 128, 256, (1 << 30) - 64, (1 << 31) - 64, u32::MAX - 127] {
            let owner = AtomicU32::new(0);
            assert!(claim(&owner, position, Taker::Library));
            assert!(claim(&owner, position, Taker::Library));
            assert!(!claim(&owner, position, Taker::Router));
            let next = position.wrapping_add(64);
            assert!(claim(&owner, next, Taker::Router));
            assert!(!claim(&owner, next, Taker::Library));
            // A lap late.
            assert!(!claim(&owner, position, Taker::Library) && !claim(&owner, position, Taker::Router));
            assert!(claim(&owner, next, Taker::Router));
        }
    }

    #[test]
    fn what_is_given_back_has_one_taker_again() {
        for position in [0, 64, (1 << 30) - 1, u32::MAX] {
            let owner = AtomicU32::new(0);
            assert!(claim(&owner, position, Taker::Router) && !claim(&owner, position, Taker::Library));
            unclaim(&owner, position, Taker::Library);
            assert!(!claim(&owner, position, Taker::Library), "only who has it gives it back");
            unclaim(&owner, position, Taker::Router);
            assert!(claim(&owner, position, Taker::Library) && !claim(&owner, position, Taker::Router));
        }
    }
}
