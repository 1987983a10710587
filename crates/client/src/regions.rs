//! The regions that this process registered, by their local keys: what a copy that the router has
//! no part in is checked by.
//!
//! Regions of other kinds (imported, null, on demand) are not here: what names them goes through
//! the router.
use freeflow_protocol::library::Handle;
use freeflow_shm::OwnRange;
use freeflow_verbs::{Access, Sge};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Entries of a RECV that takes messages by a direct ring.
pub(crate) const SGES_MAX: usize = 4;
/// Entries of a cache, a power of two.
const CACHED: usize = 4;

/// A region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub handle: Handle,
    pub pd: Handle,
    /// Where requests name it.
    pub iova: u64,
    pub length: u64,
    /// Where the process sees it.
    pub address: u64,
    pub access: Access,
}

impl Region {
    /// Where the process sees the bytes of an SGE.
    #[inline]
    fn resolve(&self, sge: &Sge, pd: Handle, needed: Access) -> Option<OwnRange> {
        let offset = sge.address.wrapping_sub(self.iova);
        let fits = offset <= self.length && u64::from(sge.length) <= self.length - offset;
        (fits && self.pd == pd && self.access.contains(needed))
            .then(|| OwnRange { address: self.address.wrapping_add(offset), bytes: sge.length })
    }
}

/// All regions of a session.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    known: RwLock<Known>,
    /// Grows when a region goes or changes: what was cached before counts no more.
    epoch: AtomicU64,
}

#[derive(Debug, Default)]
struct Known {
    by_key: HashMap<u32, Region>,
    keys: HashMap<Handle, u32>,
}

/// Regions that were named last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cache {
    epoch: u64,
    entries: [Option<(u32, Region)>; CACHED],
}

impl Regions {
    pub fn insert(&self, lkey: u32, region: Region) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.keys.insert(region.handle, lkey);
        known.by_key.insert(lkey, region);
    }

    /// To be called before the router hears of it: from then on nothing new is copied by it.
    pub fn remove(&self, handle: Handle) -> Option<(u32, Region)> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let lkey = known.keys.remove(&handle)?;
        let region = known.by_key.remove(&lkey)?;
        // Release; partner: the Acquire load in `resolve`.
        self.epoch.fetch_add(1, Ordering::Release);
        Some((lkey, region))
    }

    /// Where the process sees the bytes of an SGE; `None`: that is for the router to say.
    #[inline]
    pub fn resolve(&self, cache: &mut Cache, sge: &Sge, pd: Handle, needed: Access) -> Option<OwnRange> {
        // Acquire; partner: the Release addition in `remove`.
        let epoch = self.epoch.load(Ordering::Acquire);
        cache.renew(epoch);
        match &cache.entries[sge.lkey as usize % CACHED] {
            Some((lkey, region)) if *lkey == sge.lkey => region.resolve(sge, pd, needed),
            _ => self.resolve_anew(cache, sge, pd, needed),
        }
    }

    #[cold]
    fn resolve_anew(&self, cache: &mut Cache, sge: &Sge, pd: Handle, needed: Access) -> Option<OwnRange> {
        let region = *self.known.read().unwrap_or_else(PoisonError::into_inner).by_key.get(&sge.lkey)?;
        cache.put(sge.lkey, region);
        region.resolve(sge, pd, needed)
    }

    /// How many bytes a RECV takes by a direct ring; `None`: the router must deliver to it.
    #[inline(always)] // into a post of the usual one SGE
    pub fn room(&self, cache: &mut Cache, sges: &[Sge], pd: Handle) -> Option<u32> {
        if sges.len() > SGES_MAX {
            return None;
        }
        let mut room = 0_u32;
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            self.resolve(cache, sge, pd, Access::LOCAL_WRITE)?;
            room = room.checked_add(sge.length)?;
        }
        Some(room)
    }

    /// No region goes while it is held.
    #[inline]
    pub fn hold(&self) -> Held<'_> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: it changes under the lock only.
        Held { known, epoch: self.epoch.load(Ordering::Relaxed) }
    }
}

/// All regions, as they are.
pub(crate) struct Held<'a> {
    known: RwLockReadGuard<'a, Known>,
    epoch: u64,
}

impl Held<'_> {
    /// As [`Regions::resolve`].
    #[inline]
    pub fn resolve(&self, cache: &mut Cache, sge: &Sge, pd: Handle, needed: Access) -> Option<OwnRange> {
        cache.renew(self.epoch);
        let region = match &cache.entries[sge.lkey as usize % CACHED] {
            Some((lkey, region)) if *lkey == sge.lkey => *region,
            _ => {
                let region = *self.known.by_key.get(&sge.lkey)?;
                cache.put(sge.lkey, region);
                region
            }
        };
        region.resolve(sge, pd, needed)
    }
}

impl Cache {
    #[inline]
    fn renew(&mut self, epoch: u64) {
        if self.epoch != epoch {
            *self = Self { epoch, ..Self::default() };
        }
    }

    fn put(&mut self, lkey: u32, region: Region) {
        self.entries[lkey as usize % CACHED] = Some((lkey, region));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Access = Access::LOCAL_WRITE;

    fn region(handle: Handle, iova: u64) -> Region {
        Region { handle, pd: 7, iova, length: 100, address: 0x1000, access: WRITE }
    }

    fn sge(address: u64, length: u32, lkey: u32) -> Sge {
        Sge { address, length, lkey }
    }

    #[test]
    fn only_what_lies_inside_is_resolved() {
        let (regions, mut cache) = (Regions::default(), Cache::default());
        regions.insert(5, region(1, 0x4000));
        let mut resolve = |sge: Sge, pd, needed| regions.resolve(&mut cache, &sge, pd, needed);
        assert_eq!(resolve(sge(0x4010, 16, 5), 7, WRITE), Some(OwnRange { address: 0x1010, bytes: 16 }));
        assert_eq!(resolve(sge(0x4000, 100, 5), 7, Access(0)), Some(OwnRange { address: 0x1000, bytes: 100 }));
        assert_eq!(resolve(sge(0x4064, 0, 5), 7, Access(0)), Some(OwnRange { address: 0x1064, bytes: 0 }));
        for bad in [sge(0x3fff, 1, 5), sge(0x4000, 101, 5), sge(0x4064, 1, 5), sge(0x4065, 0, 5), sge(0x4000, 1, 9)] {
            assert_eq!(resolve(bad, 7, Access(0)), None, "{bad:?}");
        }
        assert_eq!(resolve(sge(0x4000, 1, 5), 8, Access(0)), None, "another PD");
        assert_eq!(resolve(sge(0x4000, 1, 5), 7, Access::REMOTE_READ), None, "a right that it lacks");
        assert_eq!(resolve(sge(u64::MAX, u32::MAX, 5), 7, Access(0)), None);
    }

    #[test]
    fn what_was_removed_is_not_found_in_a_cache() {
        let (regions, mut cache) = (Regions::default(), Cache::default());
        regions.insert(5, region(1, 0));
        regions.insert(9, region(2, 0));
        assert!(regions.resolve(&mut cache, &sge(0, 1, 5), 7, WRITE).is_some());
        assert!(regions.resolve(&mut cache, &sge(0, 1, 9), 7, WRITE).is_some(), "the same place in the cache");
        assert_eq!(regions.remove(1).map(|(lkey, _)| lkey), Some(5));
        assert_eq!(regions.remove(1), None);
        assert!(regions.resolve(&mut cache, &sge(0, 1, 5), 7, WRITE).is_none());
        assert!(regions.resolve(&mut cache, &sge(0, 1, 9), 7, WRITE).is_some());
    }
}
