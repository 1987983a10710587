//! Protection domains and memory regions.
use crate::boundary::{Outcome, code, pointer};
use crate::context::{Context, session};
use freeflow_abi::{ibv_context, ibv_mr, ibv_pd};
use freeflow_client::check_mapped;
use freeflow_verbs::{Access, VerbsError};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

/// `ibv_alloc_pd(3)`.
///
/// # Safety
/// `context` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: the caller's.
        let owner = unsafe { Context::from_c(context) }.client();
        let handle = owner.session().alloc_pd(owner.handle())?;
        Ok(Box::into_raw(Box::new(ibv_pd { context, handle })))
    })
}

/// `ibv_dealloc_pd(3)`: EBUSY while something uses it.
///
/// # Safety
/// `pd` is allocated, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    code(|| {
        // SAFETY: the caller's; made by `Box::into_raw` above.
        unsafe {
            session((*pd).context).dealloc_pd((*pd).handle)?;
            drop(Box::from_raw(pd));
        }
        Ok(())
    })
}

/// Access rights that a registration may ask for. The rest are refused, but for the optional ones, which are ignored,
/// and HUGETLB, which only says how the memory is mapped.
const SUPPORTED: u32 = Access::LOCAL_WRITE.0
    | Access::REMOTE_WRITE.0
    | Access::REMOTE_READ.0
    | Access::REMOTE_ATOMIC.0
    | Access::HUGETLB.0;
const KNOWN: u32 = SUPPORTED
    | Access::MW_BIND.0
    | Access::ZERO_BASED.0
    | Access::ON_DEMAND.0
    | Access::FLUSH_GLOBAL.0
    | Access::FLUSH_PERSISTENT.0;

fn access_from_c(access: c_uint) -> Outcome<Access> {
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

/// # Safety
/// `pd` is allocated.
unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr {
    pointer(|| {
        let access = access_from_c(access)?;
        let start = addr.addr() as u64;
        if start.checked_add(length as u64).is_none() || iova.checked_add(length as u64).is_none() {
            return Err(VerbsError::InvalidArgument);
        }
        if length > 0 {
            check_pages(start, length as u64, access.contains(Access::LOCAL_WRITE))?;
        }
        // SAFETY: the caller's.
        let (context, pd_handle) = unsafe { ((*pd).context, (*pd).handle) };
        // SAFETY: a PD's context is open.
        let region = unsafe { session(context) }.register(pd_handle, start, length as u64, iova, access)?;
        let mr = ibv_mr { context, pd, addr, length, handle: region.handle, lkey: region.lkey, rkey: region.rkey };
        Ok(Box::into_raw(Box::new(mr)))
    })
}

/// `ibv_reg_mr(3)`.
///
/// # Safety
/// `pd` is allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: the caller's.
    unsafe { register(pd, addr, length, addr.addr() as u64, access as c_uint) }
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
    // SAFETY: the caller's.
    unsafe { register(pd, addr, length, iova, access as c_uint) }
}

/// What the header's `ibv_reg_mr` calls with optional access bits.
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
    // SAFETY: the caller's.
    unsafe { register(pd, addr, length, iova, access) }
}

/// `ibv_dereg_mr(3)`. On return nothing of the memory is read or written any more.
///
/// # Safety
/// `mr` is registered, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    code(|| {
        // SAFETY: the caller's; made by `Box::into_raw` above.
        unsafe {
            session((*mr).context).deregister((*mr).handle)?;
            drop(Box::from_raw(mr));
        }
        Ok(())
    })
}

/// `struct procmap_query` of `linux/fs.h` (Linux 6.11): asks for one area of the process's own map.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u64 = 0xc000_6611 | ((size_of::<ProcmapQuery>() as u64) << 16);
const VMA_READABLE: u64 = 1;
const VMA_WRITABLE: u64 = 2;

/// Checks that memory is mapped with the rights asked for, by the quick way where the kernel has it.
fn check_pages(start: u64, length: u64, writable: bool) -> Outcome<()> {
    static NOT_THERE: AtomicBool = AtomicBool::new(false);
    if !NOT_THERE.load(Ordering::Relaxed) {
        match query_pages(start, start + length, writable) {
            Some(outcome) => return outcome,
            None => NOT_THERE.store(true, Ordering::Relaxed),
        }
    }
    check_mapped(start, length, writable)
}

/// `None`: the kernel can't say.
fn query_pages(start: u64, end: u64, writable: bool) -> Option<Outcome<()>> {
    use std::os::fd::AsRawFd;
    let maps = std::fs::File::open("/proc/self/maps").ok()?;
    let needed = VMA_READABLE | if writable { VMA_WRITABLE } else { 0 };
    let mut reached = start;
    while reached < end {
        let mut query =
            ProcmapQuery { size: size_of::<ProcmapQuery>() as u64, query_addr: reached, ..ProcmapQuery::default() };
        // SAFETY: the kernel reads and writes the struct, whose size it is told.
        if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) } != 0 {
            return match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOENT) => Some(Err(VerbsError::BadAddress)),
                _ => None,
            };
        }
        if query.vma_flags & needed != needed {
            return Some(Err(VerbsError::BadAddress));
        }
        reached = query.vma_end;
    }
    Some(Ok(()))
}

const _: () = assert!(size_of::<ProcmapQuery>() == 104);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_rights() {
        assert_eq!(access_from_c(1 << 20), Ok(Access(0)));
        assert_eq!(access_from_c(0b1111 | 1 << 20 | 1 << 7), Ok(Access(0b1111)));
        assert_eq!(access_from_c(2), Err(VerbsError::InvalidArgument));
        assert_eq!(access_from_c(8), Err(VerbsError::InvalidArgument));
        assert_eq!(access_from_c(1 << 6), Err(VerbsError::NotSupported));
        assert_eq!(access_from_c(1 << 15), Err(VerbsError::InvalidArgument));
    }

    #[test]
    fn both_ways_agree_on_what_is_mapped() {
        let here = [0_u8; 64];
        let stack = here.as_ptr().addr() as u64;
        let code = access_from_c as *const () as u64;
        for (start, length, writable) in [(stack, 64, true), (code, 16, false), (code, 16, true), (0, 8, false)] {
            let expected = check_mapped(start, length, writable);
            assert_eq!(check_pages(start, length, writable), expected, "{start:#x}");
            if let Some(quick) = query_pages(start, start + length, writable) {
                assert_eq!(quick, expected, "{start:#x}");
            }
        }
    }
}
