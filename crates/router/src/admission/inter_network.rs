//! The rules' answers about addresses that talk across two networks, for some of them: kept for as
//! long as the rules and the owner of the address are as they are.
//!
//! Invariant: no more than [`PROFILE_COUNT_MAX`], whoever asks for how many.
use crate::admission::access::Key;
use freeflow_orchestrator::access::Profile;
use freeflow_verbs::NetworkId;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included, Unbounded};

pub const PROFILE_COUNT_MAX: usize = 8192;

/// An address, and the network with somebody of which it is to talk.
pub type End = (Key, NetworkId);

#[derive(Debug, Default)]
pub struct Across {
    profiles: BTreeMap<End, Profile>,
    /// The last one that had to go: the next is the one behind it, so that all take their turns.
    gone: Option<End>,
}

impl Across {
    pub fn get(&self, end: End) -> Option<&Profile> {
        self.profiles.get(&end)
    }

    /// Keeps one; what is kept of `opposite` stays.
    pub fn insert(&mut self, end: End, opposite: End, profile: Profile) {
        if self.profiles.len() >= PROFILE_COUNT_MAX && !self.profiles.contains_key(&end) {
            let behind = (self.gone.map_or(Unbounded, Excluded), Unbounded);
            let mut ends = self.profiles.range(behind).chain(&self.profiles).map(|(&end, _)| end);
            self.gone = ends.find(|&end| end != opposite);
            drop(self.gone.and_then(|gone| self.profiles.remove(&gone)));
        }
        self.profiles.insert(end, profile);
    }

    /// Somebody else has the address now, or another thing is known of who has it.
    pub fn remove(&mut self, key: Key) {
        let all = (Included((key, NetworkId(0))), Included((key, NetworkId(u32::MAX))));
        while let Some((&end, _)) = self.profiles.range(all).next() {
            self.profiles.remove(&end);
        }
    }

    pub fn clear(&mut self) {
        self.profiles.clear();
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.profiles.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_orchestrator::access::{AccessTable, Party};
    use freeflow_verbs::Gid;

    fn end(number: usize, other: u32) -> End {
        ((NetworkId(1), Gid::from_ip(std::net::Ipv4Addr::from(number as u32).into())), NetworkId(other))
    }

    #[test]
    fn who_is_new_takes_the_place_of_each_in_turn_but_not_of_its_opposite() {
        let profile = AccessTable::default().profile(&Party { network: "a", addresses: &[], known: None });
        let (mut across, first, count) = (Across::default(), end(0, 2), PROFILE_COUNT_MAX);
        for number in 0..count {
            across.insert(end(number, 2), first, profile.clone());
        }
        across.insert(first, end(1, 2), profile.clone());
        assert_eq!(across.len(), count, "it was there");
        across.insert(end(count, 2), first, profile.clone());
        across.insert(end(count + 1, 2), first, profile.clone());
        assert_eq!(across.len(), count);
        let gone: Vec<usize> = (0..=count).filter(|&number| across.get(end(number, 2)).is_none()).collect();
        assert_eq!(gone, [1, 2]);
        for number in 0..2 * count {
            across.insert(end(2 * count + number, 2), first, profile.clone());
        }
        assert_eq!((across.len(), across.get(first).is_some()), (count, true));
    }

    #[test]
    fn one_address_is_dropped_for_all_networks() {
        let profile = AccessTable::default().profile(&Party { network: "a", addresses: &[], known: None });
        let mut across = Across::default();
        for (number, other) in [(6, u32::MAX), (7, 0), (7, 2), (7, u32::MAX), (8, 0)] {
            across.insert(end(number, other), end(0, 0), profile.clone());
        }
        across.remove(end(7, 0).0);
        assert_eq!(across.profiles.keys().copied().collect::<Vec<_>>(), [end(6, u32::MAX), end(8, 0)]);
    }
}
