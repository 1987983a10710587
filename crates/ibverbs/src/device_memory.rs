//! Device memory (`ibv_alloc_dm`): shared segments of host memory stand in for a NIC's own.
use crate::boundary::{code, guarded, pointer};
use crate::context::Context;
use crate::memory::{RegionKind, access_from_c, register};
use crate::on_demand::Extent;
use freeflow_abi::{ibv_alloc_dm_attr, ibv_context, ibv_dm, ibv_mr, ibv_pd};
use freeflow_client::DeviceMemory;
use freeflow_verbs::{Access, VerbsError};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

/// The memory begins on a page, which is all the alignment that can be asked for. Log2 of bytes.
const LOG_ALIGNMENT_MAX: u32 = 12;

/// Rights that a region over device memory may have.
const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::ZERO_BASED)
    .union(Access::FLUSH_GLOBAL);

/// Device memory as C sees it, and what is behind it.
#[repr(C)]
struct Dm {
    c: ibv_dm,
    client: DeviceMemory,
}

impl Dm {
    fn hand_out(context: *mut ibv_context, client: DeviceMemory) -> *mut ibv_dm {
        let c = ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle: client.handle(),
        };
        Box::into_raw(Box::new(Self { c, client })).cast()
    }

    /// # Safety
    /// `dm` came from this library and is not freed.
    unsafe fn from_c<'a>(dm: *mut ibv_dm) -> &'a Self {
        // SAFETY: all device memory handed out is the beginning of a `Dm`.
        unsafe { &*dm.cast::<Self>() }
    }
}

/// `ibv_alloc_dm(3)`.
pub(crate) unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    pointer(|| {
        // SAFETY: the C contract.
        let (owner, attr) = unsafe { (Context::from_c(context).client(), &*attr) };
        if attr.comp_mask != 0 || attr.log_align_req > LOG_ALIGNMENT_MAX {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(Dm::hand_out(context, DeviceMemory::allocate(owner, attr.length)?))
    })
}

/// `ibv_free_dm(3)`: EBUSY while a memory region lies over it.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    code(|| {
        // SAFETY: the C contract; made by `Box::into_raw` in `hand_out`.
        unsafe {
            Dm::from_c(dm).client.free()?;
            drop(Box::from_raw(dm.cast::<Dm>()));
        }
        Ok(())
    })
}

/// `ibv_memcpy_to_dm(3)`: EFAULT beyond the memory, EINVAL unless offset and length are multiples
/// of four.
unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, host: *const c_void, length: usize) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let client = unsafe { &Dm::from_c(dm).client };
        client.check_copy(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the C contract.
        client.write(offset, unsafe { std::slice::from_raw_parts(host.cast(), length) })
    })
}

/// `ibv_memcpy_from_dm(3)`: as [`memcpy_to_dm`].
unsafe extern "C" fn memcpy_from_dm(host: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        let client = unsafe { &Dm::from_c(dm).client };
        client.check_copy(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the C contract; any byte is a valid one.
        client.read(offset, unsafe { std::slice::from_raw_parts_mut(host.cast(), length) })
    })
}

/// `ibv_reg_dm_mr(3)`: a region whose addresses count from its beginning, which ZERO_BASED must
/// say.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    pointer(|| {
        let access = access_from_c(access)?;
        if access.0 & !RIGHTS.0 != 0 || !access.contains(Access::ZERO_BASED) {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the C contract.
        let client = unsafe { &Dm::from_c(dm).client };
        let address = client.place(offset, length)?;
        let extent = if length == 0 {
            // The router knows no region without bytes: it gets one, without rights and out of the
            // way.
            Extent { address: client.place(0, 1)?, length: 1, iova: u64::MAX, access: Access::ZERO_BASED }
        } else {
            Extent { address, length: length as u64, iova: 0, access }
        };
        // SAFETY: the C contract; the region is the program's only later.
        unsafe {
            let mr = register(pd, RegionKind::Device, extent, ptr::null_mut(), None)?;
            (*mr).length = length;
            Ok(mr)
        }
    })
}

/// `ibv_import_dm(3)`: ENOENT if the context's process has no such memory.
///
/// # Safety
/// `context` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    // SAFETY: the C contract.
    pointer(|| Ok(Dm::hand_out(context, DeviceMemory::import(unsafe { Context::from_c(context) }.client(), handle)?)))
}

/// `ibv_unimport_dm(3)`. Memory under a region of this process stays mapped.
///
/// # Safety
/// `dm` is imported, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_dm(dm: *mut ibv_dm) {
    let _ = guarded(|| {
        // SAFETY: the C contract; made by `Box::into_raw` in `hand_out`.
        unsafe {
            Dm::from_c(dm).client.free()?;
            drop(Box::from_raw(dm.cast::<Dm>()));
        }
        Ok(())
    });
}
