//! Memory regions.
//!
//! Every region is made by [`register`] and given up by [`deregister`], whatever it lies over;
//! [`ibv_rereg_mr`] changes one in place.
use crate::boundary::{Outcome, code, guarded, pointer, set_errno};
use crate::context::{Context, session};
use crate::on_demand::Extent;
use crate::pd::ParentUse;
use freeflow_abi::{
    IBV_REG_MR_MASK_ADDR, IBV_REG_MR_MASK_BUF, IBV_REG_MR_MASK_DMAH, IBV_REG_MR_MASK_FD, IBV_REG_MR_MASK_FD_OFFSET,
    IBV_REG_MR_MASK_IOVA, IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_TRANSLATION,
    IBV_REREG_MR_ERR_CMD, IBV_REREG_MR_ERR_INPUT, errno_of, ibv_mr, ibv_mr_init_attr, ibv_pd,
};
use freeflow_client::{Handle, MemoryRegion};
use freeflow_remap::{self as remap, Placement, ProcessMap, RegionSpan, check_mapped};
use freeflow_verbs::{Access, RegionChange, Translation, VerbsError};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// The memory under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionKind {
    /// Memory of the process that is mapped when it is registered.
    Ordinary,
    /// Addresses of the process, whatever is mapped there when they are used
    /// (`IBV_ACCESS_ON_DEMAND`).
    OnDemand,
    /// Nothing (`ibv_alloc_null_mr`).
    Null,
    /// Device memory.
    Device,
    /// Memory of another process.
    Imported,
}

impl Extent {
    /// A region of the whole address space (implicit on-demand paging).
    fn is_implicit(&self) -> bool {
        self.address == 0 && self.length == usize::MAX as u64 && self.access.contains(Access::ON_DEMAND)
    }

    fn span(&self, kind: RegionKind, owner: &Context) -> RegionSpan {
        let is_on_demand = kind == RegionKind::OnDemand;
        RegionSpan { owner: owner.number(), start: self.address, length: self.length, is_on_demand }
    }

    /// Moves memory of this process into segments, if it may be moved. Called before the router
    /// knows of the region. `maps`: the result of [`Self::check`].
    fn prepare(&self, kind: RegionKind, owner: &Context, maps: Option<ProcessMap>) {
        if self.is_remappable(kind) {
            let placement = match kind {
                RegionKind::Ordinary if self.is_remote() => Placement::Exclusive,
                RegionKind::Ordinary => Placement::Shared,
                _ => Placement::Unmoved,
            };
            remap::prepare(owner.client().session(), self.span(kind, owner), placement, maps);
        }
    }

    /// The region changes, and its memory stays the same.
    fn refresh(&self, kind: RegionKind, owner: &Context) {
        if self.is_remappable(kind) {
            remap::refresh(owner.client().session(), self.address, self.length);
        }
    }

    /// Ends the effect of [`Self::prepare`], after the router has forgotten the region.
    fn release(&self, kind: RegionKind, owner: &Context) {
        if self.is_remappable(kind) {
            remap::release(owner.client().session(), self.span(kind, owner));
        }
    }

    /// Peers have rights to it.
    fn is_remote(&self) -> bool {
        self.access.intersects(Access(Access::REMOTE_WRITE.0 | Access::REMOTE_READ.0 | Access::REMOTE_ATOMIC.0))
    }

    /// An implicit region touches everything, and would keep all else where it is.
    fn is_remappable(&self, kind: RegionKind) -> bool {
        matches!(kind, RegionKind::Ordinary | RegionKind::OnDemand) && !self.is_implicit()
    }

    fn kind(&self) -> RegionKind {
        if self.access.contains(Access::ON_DEMAND) { RegionKind::OnDemand } else { RegionKind::Ordinary }
    }

    /// # Errors
    /// InvalidArgument: it wraps around, or an implicit region has an iova. BadAddress: not all of
    /// it is mapped with its rights, which only a region that is paged on demand may be.
    fn check(&self) -> Outcome<Option<ProcessMap>> {
        if self.is_implicit() {
            return if self.iova == 0 { Ok(None) } else { Err(VerbsError::InvalidArgument) };
        }
        if self.address.checked_add(self.length).is_none() || self.iova.checked_add(self.length).is_none() {
            return Err(VerbsError::InvalidArgument);
        }
        if self.length == 0 || self.kind() == RegionKind::OnDemand {
            return Ok(None);
        }
        check_mapped(self.address, self.length, self.access.contains(Access::LOCAL_WRITE))
    }
}

/// A region as C sees it, and what is behind it.
#[repr(C)]
pub(crate) struct Mr {
    c: UnsafeCell<ibv_mr>,
    state: Mutex<MrState>,
}

struct MrState {
    kind: RegionKind,
    extent: Extent,
    /// The PD's handle. The PD itself may be gone: an imported one can be given up before its
    /// regions.
    pd: Handle,
    parent_use: ParentUse,
    /// Deregistered, but peers may have its memory still: the verb failed, and may be tried again.
    is_given_up: bool,
}

impl Mr {
    /// # Safety
    /// `mr` came from this library and is not deregistered.
    unsafe fn from_c<'a>(mr: *mut ibv_mr) -> &'a Self {
        // SAFETY: every region handed out is the beginning of an `Mr`.
        unsafe { &*mr.cast::<Self>() }
    }
}

/// # Safety
/// `pd` is allocated.
unsafe fn hand_out(
    pd: *mut ibv_pd,
    kind: RegionKind,
    extent: Extent,
    addr: *mut c_void,
    region: &MemoryRegion,
) -> *mut ibv_mr {
    // SAFETY: this function's contract.
    let (context, pd_handle, parent_use) = unsafe { ((*pd).context, (*pd).handle, ParentUse::of(pd)) };
    let length = extent.length as usize;
    let c = ibv_mr { context, pd, addr, length, handle: region.handle, lkey: region.lkey, rkey: region.rkey };
    let state = MrState { kind, extent, pd: pd_handle, parent_use, is_given_up: false };
    let mr = Mr { c: UnsafeCell::new(c), state: Mutex::new(state) };
    Box::into_raw(Box::new(mr)).cast()
}

/// Registers memory of this process: what every way of registration comes to. `addr` is what the
/// program shall see, `maps` what the check of the memory gave.
///
/// # Safety
/// `pd` is allocated.
pub(crate) unsafe fn register(
    pd: *mut ibv_pd,
    kind: RegionKind,
    extent: Extent,
    addr: *mut c_void,
    maps: Option<ProcessMap>,
) -> Outcome<*mut ibv_mr> {
    // SAFETY: this function's contract; a PD's context is open.
    unsafe {
        let (owner, pd_handle) = (Context::from_c((*pd).context), (*pd).handle);
        let Extent { address, length, iova, access } = extent;
        extent.prepare(kind, owner, maps);
        let region = owner
            .client()
            .session()
            .register(pd_handle, address, length, iova, access)
            .inspect_err(|_| extent.release(kind, owner))?;
        if kind == RegionKind::OnDemand {
            owner.on_demand().insert(region.lkey, pd_handle, extent);
        }
        Ok(hand_out(pd, kind, extent, addr, &region))
    }
}

/// Gives a region up, of whatever kind. On return nothing of its memory is read or written any
/// more.
///
/// # Errors
/// Busy: windows are bound to it.
///
/// # Safety
/// `mr` is registered, and is not used any more if this succeeds.
unsafe fn deregister(mr: *mut ibv_mr) -> Outcome<()> {
    // SAFETY: this function's contract; a region's context is open; made by `Box::into_raw` in
    // `hand_out`.
    unsafe {
        let owner = Context::from_c((*mr).context);
        let session = owner.client().session();
        {
            let mut state = Mr::from_c(mr).state.lock().unwrap_or_else(PoisonError::into_inner);
            if !state.is_given_up {
                session.deregister((*mr).handle)?;
                owner.on_demand().remove((*mr).lkey);
                state.extent.release(state.kind, owner);
                state.is_given_up = true;
            }
        }
        remap::wait_for_revocations(session)?;
        drop(Box::from_raw(mr.cast::<Mr>()));
    }
    Ok(())
}

/// Access rights that a registration may ask for. Besides them the optional ones and HUGETLB, which
/// only says how the memory is mapped, are ignored.
const SUPPORTED: u32 = Access::LOCAL_WRITE.0
    | Access::REMOTE_WRITE.0
    | Access::REMOTE_READ.0
    | Access::REMOTE_ATOMIC.0
    | Access::MW_BIND.0
    | Access::ZERO_BASED.0
    | Access::ON_DEMAND.0
    | Access::HUGETLB.0
    | Access::FLUSH_GLOBAL.0;
/// Nothing here outlives a power failure.
const KNOWN: u32 = SUPPORTED | Access::FLUSH_PERSISTENT.0;

pub(crate) fn access_from_c(access: c_uint) -> Outcome<Access> {
    let access = Access(access).required();
    if access.0 & !KNOWN != 0 {
        return Err(VerbsError::InvalidArgument);
    }
    if access.0 & !SUPPORTED != 0 {
        return Err(VerbsError::NotSupported);
    }
    // IBTA 10.6.3.1: remote write or atomic needs local write.
    if access.intersects(Access(Access::REMOTE_WRITE.0 | Access::REMOTE_ATOMIC.0))
        && !access.contains(Access::LOCAL_WRITE)
    {
        return Err(VerbsError::InvalidArgument);
    }
    Ok(Access(access.0 & !Access::HUGETLB.0))
}

/// Where a region begins as requests name it: ZERO_BASED counts from its beginning.
fn first_address(iova: u64, access: Access) -> u64 {
    if access.contains(Access::ZERO_BASED) { 0 } else { iova }
}

/// # Safety
/// `pd` is allocated.
unsafe fn register_mapped(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Outcome<*mut ibv_mr> {
    let access = access_from_c(access)?;
    let extent =
        Extent { address: addr.addr() as u64, length: length as u64, iova: first_address(iova, access), access };
    let maps = extent.check()?;
    // SAFETY: this function's contract.
    unsafe { register(pd, extent.kind(), extent, addr, maps) }
}

/// `ibv_reg_mr(3)`.
///
/// # Safety
/// `pd` is allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: the C contract.
    pointer(|| unsafe { register_mapped(pd, addr, length, addr.addr() as u64, access as c_uint) })
}

/// `ibv_reg_mr_iova(3)`.
///
/// # Safety
/// `pd` is allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the C contract.
    pointer(|| unsafe { register_mapped(pd, addr, length, iova, access as c_uint) })
}

/// The function that the header's `ibv_reg_mr` calls with optional access bits.
///
/// # Safety
/// `pd` is allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the C contract.
    pointer(|| unsafe { register_mapped(pd, addr, length, iova, access) })
}

/// `ibv_reg_mr_ex(3)`: memory by its address. There are no dma-bufs, TPH handles and
/// `ibv_alloc_buf` buffers here.
///
/// # Safety
/// `pd` is allocated; of `init` only what `comp_mask` names must be there besides its first three
/// fields.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_ex(pd: *mut ibv_pd, init: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    const BY_FILE: u64 = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
    const MASKS: u64 =
        IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR | BY_FILE | IBV_REG_MR_MASK_DMAH | IBV_REG_MR_MASK_BUF;
    pointer(|| {
        // SAFETY: the C contract.
        unsafe {
            let mask = (*init).comp_mask;
            if (mask & IBV_REG_MR_MASK_ADDR == 0) == (mask & BY_FILE == 0) {
                return Err(VerbsError::InvalidArgument);
            }
            if mask & !MASKS != 0 || mask & (BY_FILE | IBV_REG_MR_MASK_DMAH | IBV_REG_MR_MASK_BUF) != 0 {
                return Err(VerbsError::NotSupported);
            }
            let addr = (*init).addr;
            let iova = if mask & IBV_REG_MR_MASK_IOVA != 0 { (*init).iova } else { addr.addr() as u64 };
            register_mapped(pd, addr, (*init).length, iova, (*init).access as c_uint)
        }
    })
}

/// `ibv_alloc_null_mr(3)`: only its lkey is of use.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: the C contract; a PD's context is open.
        unsafe {
            let region = session((*pd).context).alloc_null_region((*pd).handle)?;
            let extent = Extent { address: 0, length: u64::MAX, iova: 0, access: Access::LOCAL_WRITE };
            Ok(hand_out(pd, RegionKind::Null, extent, ptr::null_mut(), &MemoryRegion { rkey: 0, ..region }))
        }
    })
}

/// `ibv_import_mr(3)`: ENOENT if the PD's process has no such region. Its address is NULL here.
///
/// # Safety
/// `pd` is imported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: the C contract; a PD's context is open.
        unsafe {
            let (region, length) = session((*pd).context).import_region((*pd).handle, handle)?;
            let extent = Extent { address: 0, length, iova: 0, access: Access::default() };
            Ok(hand_out(pd, RegionKind::Imported, extent, ptr::null_mut(), &region))
        }
    })
}

/// `ibv_unimport_mr(3)`. The region lives on in its own process.
///
/// # Safety
/// `mr` is imported, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: the C contract.
    let _ = guarded(|| unsafe { deregister(mr) });
}

/// `ibv_dereg_mr(3)`: EBUSY while windows are bound to it. What was imported is only given up.
///
/// # Safety
/// `mr` is registered, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the C contract.
    code(|| unsafe { deregister(mr) })
}

/// Arguments of `ibv_rereg_mr`.
struct Reregistration {
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
}

impl Reregistration {
    fn has(&self, flag: c_int) -> bool {
        self.flags & flag != 0
    }

    /// Finds errors before anything was tried.
    fn check(&self, kind: RegionKind) -> Outcome<()> {
        const FLAGS: c_int = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
        let is_wrong = !matches!(kind, RegionKind::Ordinary | RegionKind::OnDemand)
            || self.flags & !FLAGS != 0
            || (self.has(IBV_REREG_MR_CHANGE_TRANSLATION) && (self.length == 0 || self.addr.is_null()))
            || (self.has(IBV_REREG_MR_CHANGE_PD) && self.pd.is_null())
            || (self.access != 0 && !self.has(IBV_REREG_MR_CHANGE_ACCESS));
        if is_wrong { Err(VerbsError::InvalidArgument) } else { Ok(()) }
    }

    /// The region as it shall be.
    fn applied_to(&self, before: &Extent) -> Outcome<Extent> {
        let mut after = *before;
        if self.has(IBV_REREG_MR_CHANGE_ACCESS) {
            after.access = access_from_c(self.access)?;
        }
        if self.has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            after.address = self.addr.addr() as u64;
            after.length = self.length as u64;
            after.iova = first_address(after.address, after.access);
        }
        Ok(after)
    }
}

/// `ibv_rereg_mr(3)`: 0; or `IBV_REREG_MR_ERR_INPUT`, and the region is as it was; or
/// `IBV_REREG_MR_ERR_CMD`, and the region should be used no more; with errno.
///
/// # Safety
/// `mr` is registered; `pd` is allocated if it shall change.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let wanted = Reregistration { flags, pd, addr, length, access: access as c_uint };
    let mut failure = IBV_REREG_MR_ERR_INPUT;
    let outcome = guarded(|| {
        // SAFETY: the C contract.
        let mut state = unsafe { Mr::from_c(mr) }.state.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.check(state.kind)?;
        failure = IBV_REREG_MR_ERR_CMD;
        // SAFETY: the C contract.
        unsafe { change(mr, &wanted, &mut state) }?;
        Ok(())
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            set_errno(errno_of(error));
            failure
        }
    }
}

/// Changes a region and says how it lies now.
///
/// # Safety
/// `mr` is registered; the PD is allocated if it shall change.
unsafe fn change(mr: *mut ibv_mr, wanted: &Reregistration, state: &mut MrState) -> Outcome<()> {
    let before = state.extent;
    let moves = wanted.has(IBV_REREG_MR_CHANGE_TRANSLATION);
    let after = wanted.applied_to(&before)?;
    let more_rights = after.access.0 & !before.access.0 & Access::LOCAL_WRITE.0 != 0;
    if wanted.flags == 0 {
        return Err(VerbsError::InvalidArgument);
    }
    let is_checked = moves || more_rights || after.kind() != before.kind();
    let maps = if is_checked { after.check()? } else { None };
    let request = RegionChange {
        translation: moves.then_some(Translation { address: after.address, length: after.length, iova: after.iova }),
        access: wanted.has(IBV_REREG_MR_CHANGE_ACCESS).then_some(after.access),
    };
    // SAFETY: this function's contract; a region's context is open.
    unsafe {
        let owner = Context::from_c((*mr).context);
        let changes_pd = wanted.has(IBV_REREG_MR_CHANGE_PD);
        if changes_pd && (*wanted.pd).context != (*mr).context {
            return Err(VerbsError::InvalidArgument);
        }
        let new_pd = changes_pd.then(|| (*wanted.pd).handle);
        let changes_memory = moves || after.kind() != before.kind();
        if changes_memory {
            after.prepare(after.kind(), owner, maps);
        } else {
            after.refresh(after.kind(), owner);
        }
        let region = owner.client().session().reregister((*mr).handle, new_pd, request).inspect_err(|_| {
            if changes_memory {
                after.release(after.kind(), owner);
            }
        })?;
        if changes_memory {
            before.release(before.kind(), owner);
        }
        let settled = remap::wait_for_revocations(owner.client().session());
        (state.extent, state.kind) = (after, after.kind());
        let c = &mut *Mr::from_c(mr).c.get();
        if changes_pd {
            (state.pd, state.parent_use) = ((*wanted.pd).handle, ParentUse::of(wanted.pd));
            c.pd = wanted.pd;
        }
        owner.on_demand().remove(c.lkey);
        if after.kind() == RegionKind::OnDemand {
            owner.on_demand().insert(region.lkey, state.pd, after);
        }
        (c.lkey, c.rkey) = (region.lkey, region.rkey);
        if moves {
            (c.addr, c.length) = (wanted.addr, wanted.length);
        }
        settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_rights() {
        assert_eq!(access_from_c(1 << 20), Ok(Access(0)));
        assert_eq!(access_from_c(0b1111 | 1 << 20 | 1 << 7), Ok(Access(0b1111)));
        assert_eq!(access_from_c(2), Err(VerbsError::InvalidArgument));
        assert_eq!(access_from_c(8), Err(VerbsError::InvalidArgument));
        assert_eq!(access_from_c(1 << 6 | 1 << 8), Ok(Access(1 << 6 | 1 << 8)));
        assert_eq!(access_from_c(1 << 9), Err(VerbsError::NotSupported));
        assert_eq!(access_from_c(1 << 15), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn what_must_be_mapped() {
        let extent = |address, length, access| Extent { address, length, iova: address, access: Access(access) };
        let on_demand = Access::ON_DEMAND.0;
        assert_eq!(extent(0, 4096, 0).check().map(drop), Err(VerbsError::BadAddress));
        assert_eq!(extent(0, 4096, on_demand).check().map(drop), Ok(()));
        assert_eq!(extent(0, u64::MAX, on_demand).check().map(drop), Ok(()));
        assert_eq!(extent(0, u64::MAX, 0).check().map(drop), Err(VerbsError::BadAddress));
        assert_eq!(extent(4096, u64::MAX, on_demand).check().map(drop), Err(VerbsError::InvalidArgument));
        let shifted = Extent { iova: 4096, ..extent(0, u64::MAX, on_demand) };
        assert_eq!(shifted.check().map(drop), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn reregistration_checks_its_input_first() {
        let wanted = |flags, addr: usize, length, access| Reregistration {
            flags,
            pd: ptr::null_mut(),
            addr: ptr::without_provenance_mut(addr),
            length,
            access,
        };
        let (moves, pd, access) = (1, 2, 4);
        let wrong = Err(VerbsError::InvalidArgument);
        assert_eq!(wanted(moves, 4096, 1, 0).check(RegionKind::Ordinary), Ok(()));
        assert_eq!(wanted(moves, 4096, 1, 0).check(RegionKind::OnDemand), Ok(()));
        assert_eq!(wanted(0, 0, 0, 0).check(RegionKind::Ordinary), Ok(()));
        for kind in [RegionKind::Null, RegionKind::Device, RegionKind::Imported] {
            assert_eq!(wanted(moves, 4096, 1, 0).check(kind), wrong);
        }
        for (flags, addr, length, rights) in
            [(moves, 0, 1, 0), (moves, 4096, 0, 0), (pd, 0, 0, 0), (8, 0, 0, 0), (moves, 4096, 1, 1)]
        {
            assert_eq!(wanted(flags, addr, length, rights).check(RegionKind::Ordinary), wrong, "{flags}");
        }
        let before = Extent { address: 4096, length: 10, iova: 7, access: Access(1) };
        let after = wanted(access, 0, 0, 3).applied_to(&before).unwrap();
        assert_eq!(after, Extent { access: Access(3), ..before });
        let after = wanted(moves | access, 8192, 5, 0b10_0000).applied_to(&before).unwrap();
        assert_eq!(after, Extent { address: 8192, length: 5, iova: 0, access: Access(0b10_0000) });
    }
}
