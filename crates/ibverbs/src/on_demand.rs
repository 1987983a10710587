//! Where regions lie, and which of a context are paged on demand.
use crate::boundary::Outcome;
use freeflow_abi::ibv_sge;
use freeflow_client::Handle;
use freeflow_verbs::{Access, VerbsError};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where a region lies, and its rights. Lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub address: u64,
    pub length: u64,
    /// Its first address as requests name it.
    pub iova: u64,
    pub access: Access,
}

/// The regions of a context that are paged on demand, by lkey.
#[derive(Debug, Default)]
pub(crate) struct OnDemandRegions(Mutex<BTreeMap<u32, (Handle, Extent)>>);

impl OnDemandRegions {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, (Handle, Extent)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, lkey: u32, pd: Handle, extent: Extent) {
        self.lock().insert(lkey, (pd, extent));
    }

    pub fn remove(&self, lkey: u32) {
        self.lock().remove(&lkey);
    }

    /// The address of an SGE in the process.
    ///
    /// # Errors
    /// As `ibv_advise_mr(3)` lists them. NotFound: the key is of no region that is paged on demand.
    /// NotPermitted: the region is another PD's, or may not be written. BadAddress: not inside the
    /// region.
    pub fn address_of(&self, pd: Handle, sge: &ibv_sge, writable: bool) -> Outcome<u64> {
        let regions = self.lock();
        let (owner, extent) = regions.get(&sge.lkey).ok_or(VerbsError::NotFound)?;
        if *owner != pd || (writable && !extent.access.contains(Access::LOCAL_WRITE)) {
            return Err(VerbsError::NotPermitted);
        }
        let offset = sge.addr.checked_sub(extent.iova).ok_or(VerbsError::BadAddress)?;
        let end = offset.checked_add(u64::from(sge.length)).ok_or(VerbsError::BadAddress)?;
        if end > extent.length { Err(VerbsError::BadAddress) } else { Ok(extent.address + offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_refusals() {
        let regions = OnDemandRegions::default();
        let extent = |address, length, iova, access| Extent { address, length, iova, access: Access(access) };
        regions.insert(1, 7, extent(0x1000, 100, 0x40, 0));
        regions.insert(2, 7, extent(0, u64::MAX, 0, 1));
        let place =
            |pd, lkey, addr, length, writable| regions.address_of(pd, &ibv_sge { addr, length, lkey }, writable);
        assert_eq!(place(7, 1, 0x40, 100, false), Ok(0x1000));
        assert_eq!(place(7, 1, 0x44, 96, false), Ok(0x1004));
        assert_eq!(place(7, 1, 0x44, 97, false), Err(VerbsError::BadAddress));
        assert_eq!(place(7, 1, 0x3f, 1, false), Err(VerbsError::BadAddress));
        assert_eq!(place(7, 1, 0x40, 1, true), Err(VerbsError::NotPermitted));
        assert_eq!(place(8, 1, 0x40, 1, false), Err(VerbsError::NotPermitted));
        assert_eq!(place(7, 3, 0x40, 1, false), Err(VerbsError::NotFound));
        assert_eq!(place(7, 2, 0x7fff_0000, 8, true), Ok(0x7fff_0000));
        assert_eq!(place(7, 2, u64::MAX, 8, true), Err(VerbsError::BadAddress));
        regions.remove(2);
        assert_eq!(place(7, 2, 0, 1, false), Err(VerbsError::NotFound));
    }
}
