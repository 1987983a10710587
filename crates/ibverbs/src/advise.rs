//! On-demand paging: which regions are paged on demand, and advice about them.
//!
//! The router reaches memory through the process' page table and takes its page faults, so nothing must be done for
//! paging as such. Advice brings pages in ahead: done here, in the process itself, before the call returns.
use crate::boundary::{Outcome, code};
use crate::context::Context;
use crate::memory::Extent;
use freeflow_abi::{
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, IB_UVERBS_ADVISE_MR_FLAG_FLUSH, ibv_pd, ibv_sge,
};
use freeflow_client::Handle;
use freeflow_remap::populate;
use freeflow_verbs::{Access, VerbsError};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

    /// Where an SGE lies in the process.
    ///
    /// # Errors
    /// As `ibv_advise_mr(3)` lists them. NotFound: the key is of no region that is paged on demand. NotPermitted: the
    /// region is another PD's, or may not be written. BadAddress: not inside the region.
    fn place(&self, pd: Handle, sge: &ibv_sge, writable: bool) -> Outcome<u64> {
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

/// `ibv_advise_mr(3)`. What is present already needs nothing for the router to reach it, so NO_FAULT only checks.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: c_uint,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    code(|| {
        let writable = match advice {
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH | IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => false,
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => true,
            _ => return Err(VerbsError::NotSupported),
        };
        if flags & !IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0 || list.is_null() || count == 0 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the caller's; a PD's context is open.
        let (sges, owner, pd) =
            unsafe { (slice::from_raw_parts(list, count as usize), Context::from_c((*pd).context), (*pd).handle) };
        for sge in sges {
            owner.on_demand().place(pd, sge, writable)?;
        }
        if advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT {
            return Ok(());
        }
        for sge in sges {
            populate(owner.on_demand().place(pd, sge, writable)?, u64::from(sge.length), writable)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_refusals() {
        let regions = OnDemandRegions::default();
        let extent = |address, length, iova, access| Extent { address, length, iova, access: Access(access) };
        regions.insert(1, 7, extent(0x1000, 100, 0x40, 0));
        regions.insert(2, 7, extent(0, u64::MAX, 0, 1));
        let place = |pd, lkey, addr, length, writable| regions.place(pd, &ibv_sge { addr, length, lkey }, writable);
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
