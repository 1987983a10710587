//! A table whose names go stale: an entry's generation changes when it is removed, so that an old
//! name finds nothing. Generations are of the engine's shard, and so are names.
use crate::SessionId;
use crate::id::{USES, first_generation, next_generation};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::marker::PhantomData;
use freeflow_verbs::{Shard, VerbsError};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

/// Name of an entry.
pub(crate) trait SlabId: Copy {
    fn new(index: u32, generation: u32) -> Self;
    fn index(self) -> u32;
    fn generation(self) -> u32;
}

/// An object that one session owns.
pub(crate) trait Owned {
    fn session(&self) -> SessionId;

    /// Whether it is this session's, alone or among others.
    fn belongs_to(&self, session: SessionId) -> bool {
        self.session() == session
    }
}

#[derive(Serialize)]
pub(crate) struct Slab<I, T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    /// Session and index of each entry that has an owner: what one session has is found without
    /// looking at the others'. An entry that several sessions have stands here for each.
    owned: BTreeSet<(u32, u32)>,
    /// Generation of a new entry.
    first_generation: u32,
    names: PhantomData<I>,
}

#[derive(Serialize, Deserialize)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

/// The fields as they were written; refused unless `free` names each empty entry once, and all
/// generations are of one shard.
impl<'de, I, T: Deserialize<'de>> Deserialize<'de> for Slab<I, T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (entries, free, owned, first_generation) = Deserialize::deserialize(deserializer)?;
        let slab = Self { entries, free, owned, first_generation, names: PhantomData };
        if slab.is_consistent() { Ok(slab) } else { Err(D::Error::custom("names and entries disagree")) }
    }
}

impl<I, T> Slab<I, T> {
    fn is_consistent(&self) -> bool {
        let is_empty = |index: u32| self.entries.get(index as usize).is_some_and(|entry| entry.value.is_none());
        let empty = self.entries.iter().filter(|entry| entry.value.is_none()).count();
        let free: BTreeSet<u32> = self.free.iter().copied().collect();
        let is_there = |&(_, index): &(u32, u32)| (index as usize) < self.entries.len() && !is_empty(index);
        let all_free = free.len() == self.free.len() && empty == free.len();
        let is_of_shard = |entry: &Entry<T>| entry.generation & !USES == self.first_generation;
        all_free
            && free.iter().all(|index| is_empty(*index))
            && self.owned.iter().all(is_there)
            && self.entries.iter().all(is_of_shard)
    }

    /// Whether its names are this shard's.
    pub fn is_of(&self, shard: Shard) -> bool {
        self.first_generation == first_generation(shard)
    }
}

impl<I: SlabId, T> Slab<I, T> {
    pub fn new(shard: Shard) -> Self {
        let first_generation = first_generation(shard);
        Self { entries: Vec::new(), free: Vec::new(), owned: BTreeSet::new(), first_generation, names: PhantomData }
    }

    /// The name that the next `insert` gives.
    pub fn vacant(&self) -> I {
        match self.free.last() {
            Some(&index) => I::new(index, self.entries[index as usize].generation),
            None => {
                let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 entries");
                I::new(index, self.first_generation)
            }
        }
    }

    pub fn insert(&mut self, value: T) -> I {
        let id = self.vacant();
        match self.free.pop() {
            Some(index) => self.entries[index as usize].value = Some(value),
            None => self.entries.push(Entry { generation: id.generation(), value: Some(value) }),
        }
        id
    }

    pub fn get(&self, id: I) -> Option<&T> {
        let entry = self.entries.get(id.index() as usize)?;
        if entry.generation == id.generation() { entry.value.as_ref() } else { None }
    }

    pub fn get_mut(&mut self, id: I) -> Option<&mut T> {
        let entry = self.entries.get_mut(id.index() as usize)?;
        if entry.generation == id.generation() { entry.value.as_mut() } else { None }
    }

    /// The value that an index has now.
    pub fn at(&self, index: u32) -> Option<(I, &T)> {
        let entry = self.entries.get(index as usize)?;
        entry.value.as_ref().map(|value| (I::new(index, entry.generation), value))
    }

    pub fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.value.as_mut()
    }

    pub fn remove(&mut self, id: I) -> Option<T> {
        let entry = self.entries.get_mut(id.index() as usize)?;
        if entry.generation != id.generation() {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = next_generation(entry.generation);
        self.free.push(id.index());
        Some(value)
    }

    /// Indexes are below this.
    pub fn end(&self) -> u32 {
        self.entries.len() as u32
    }

    /// In order of index.
    pub fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            entry.value.as_ref().map(|value| (I::new(index as u32, entry.generation), value))
        })
    }
}

impl<I: SlabId, T: Owned> Slab<I, T> {
    /// [`Self::insert`] of what belongs to a session.
    pub fn adopt(&mut self, value: T) -> I {
        let session = value.session().index;
        let id = self.insert(value);
        self.owned.insert((session, id.index()));
        id
    }

    /// [`Self::remove`] of what belongs to a session.
    pub fn disown(&mut self, id: I) -> Option<T> {
        let value = self.remove(id)?;
        self.owned.remove(&(value.session().index, id.index()));
        Some(value)
    }

    /// Another session has it too from now on; [`Owned::belongs_to`] says so.
    pub fn share(&mut self, id: I, session: SessionId) {
        self.owned.insert((session.index, id.index()));
    }

    pub fn unshare(&mut self, id: I, session: SessionId) {
        self.owned.remove(&(session.index, id.index()));
    }

    pub fn owned(&self, session: SessionId, id: I) -> Result<&T, VerbsError> {
        self.get(id).filter(|value| value.belongs_to(session)).ok_or(VerbsError::NotFound)
    }

    pub fn owned_mut(&mut self, session: SessionId, id: I) -> Result<&mut T, VerbsError> {
        self.get_mut(id).filter(|value| value.belongs_to(session)).ok_or(VerbsError::NotFound)
    }

    /// Names of all that a session owns, in order of index.
    pub fn all_of(&self, session: SessionId) -> Vec<I> {
        let of_session = self.owned.range((session.index, 0)..=(session.index, u32::MAX));
        let entries = of_session.filter_map(|&(_, index)| self.at(index));
        entries.filter(|(_, value)| value.belongs_to(session)).map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PdId;

    #[test]
    fn an_old_name_finds_nothing() {
        let mut slab: Slab<PdId, u32> = Slab::new(Shard::ONLY);
        let first = slab.insert(1);
        assert_eq!(slab.get(first), Some(&1));
        assert_eq!(slab.remove(first), Some(1));
        let promised = slab.vacant();
        let second = slab.insert(2);
        assert_eq!(promised, second);
        assert_eq!(second.index, first.index);
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.at(second.index), Some((second, &2)));
        assert_eq!(slab.iter().count(), 1);
    }

    #[test]
    fn names_of_shards_never_meet() {
        let shards = Shard::all(Shard::COUNT_MAX);
        let mut slabs: Vec<Slab<PdId, u8>> = shards.clone().map(Slab::new).collect();
        let mut names = Vec::new();
        for (slab, shard) in slabs.iter_mut().zip(shards) {
            let first = slab.insert(shard.index());
            // As after so many uses that the next one has the first generation again.
            slab.entries[0].generation |= USES;
            let (last, _) = slab.at(first.index).unwrap();
            names.push([first, last]);
        }
        for (own, slab) in slabs.iter_mut().enumerate() {
            for (of, [first, last]) in names.iter().enumerate() {
                assert_eq!([first.shard(), last.shard()], [of as u8; 2]);
                assert!(slab.get(*first).is_none());
                assert_eq!(slab.get(*last).is_some(), of == own);
                assert_eq!(slab.get_mut(*last).is_some(), of == own);
            }
            for (_, [_, last]) in names.iter().enumerate().filter(|(of, _)| *of != own) {
                assert_eq!(slab.remove(*last), None);
            }
            let [first, last] = names[own];
            assert_eq!(slab.remove(last), Some(own as u8));
            assert_eq!(slab.insert(own as u8), first, "it wraps");
        }
        for (own, slab) in slabs.iter().enumerate() {
            let found: Vec<usize> = (0..names.len()).filter(|of| slab.get(names[*of][0]).is_some()).collect();
            assert_eq!(found, [own]);
        }
    }

    #[test]
    fn what_is_read_is_of_one_shard() {
        let [one, other] = [2, 3].map(|index| Shard::new(index, 4).unwrap());
        let mut slab: Slab<PdId, u8> = Slab::new(one);
        let id = slab.insert(1);
        let read =
            |slab: &Slab<PdId, u8>| postcard::from_bytes::<Slab<PdId, u8>>(&postcard::to_allocvec(slab).unwrap()).ok();
        let restored = read(&slab).unwrap();
        assert_eq!(restored.get(id), Some(&1));
        assert!(restored.is_of(one) && !restored.is_of(other));
        slab.entries[0].generation = first_generation(other);
        assert!(read(&slab).is_none());
    }
}
