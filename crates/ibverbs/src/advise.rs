//! On-demand paging: advice about regions that are paged on demand.
//!
//! The router reaches memory through the process' page table and takes its page faults, so nothing
//! must be done for paging as such. Advice brings pages in ahead: done here, in the process itself,
//! before the call returns.
use crate::boundary::code;
use crate::context::Context;
use freeflow_abi::{
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, IB_UVERBS_ADVISE_MR_FLAG_FLUSH, ibv_pd, ibv_sge,
};
use freeflow_remap::populate;
use freeflow_verbs::VerbsError;
use std::ffi::{c_int, c_uint};
use std::slice;

/// `ibv_advise_mr(3)`. What is present already needs nothing for the router to reach it, so
/// NO_FAULT only checks.
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
        // SAFETY: the C contract; a PD's context is open.
        let (sges, owner, pd) =
            unsafe { (slice::from_raw_parts(list, count as usize), Context::from_c((*pd).context), (*pd).handle) };
        for sge in sges {
            owner.on_demand().address_of(pd, sge, writable)?;
        }
        if advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT {
            return Ok(());
        }
        for sge in sges {
            populate(owner.on_demand().address_of(pd, sge, writable)?, u64::from(sge.length), writable)?;
        }
        Ok(())
    })
}
