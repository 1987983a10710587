//! Protection domains: a context's own, imported ones, and parent domains, which stand for another
//! with a thread domain.
//!
//! A parent domain has the handle of the protection domain that it stands for, so whatever takes a
//! PD takes it. Its allocators are never called: rings are memory of the router's making. Thread
//! domains change nothing either: the locks of a queue are not contended by one thread.
use crate::boundary::{code, guarded, pointer};
use crate::context::{Context, session};
use freeflow_abi::{
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS, IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC,
    IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, ibv_context, ibv_parent_domain_init_attr, ibv_pd, ibv_td, ibv_td_init_attr,
};
use freeflow_verbs::VerbsError;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// A PD as C sees it, and what is behind it.
#[repr(C)]
struct Pd {
    c: ibv_pd,
    kind: PdKind,
    /// Parent domains that stand for it; of a parent domain, the objects that were made with it.
    /// The router knows what uses the others.
    user_count: AtomicU32,
}

#[derive(Clone, Copy)]
enum PdKind {
    Own,
    Imported,
    Parent { protection: *mut ibv_pd, thread: *mut ibv_td },
}

impl Pd {
    fn hand_out(context: *mut ibv_context, handle: u32, kind: PdKind) -> *mut ibv_pd {
        let pd = Self { c: ibv_pd { context, handle }, kind, user_count: AtomicU32::new(0) };
        Box::into_raw(Box::new(pd)).cast()
    }

    /// # Safety
    /// `pd` came from this library and is not deallocated.
    unsafe fn from_c<'a>(pd: *mut ibv_pd) -> &'a Self {
        // SAFETY: every PD handed out is the beginning of a `Pd`.
        unsafe { &*pd.cast::<Self>() }
    }

    fn is_used(&self) -> bool {
        self.user_count.load(Ordering::Acquire) != 0
    }
}

/// An object's use of the parent domain that it was made with, if it was one: the domain can't go
/// before the object.
pub(crate) struct ParentUse(*mut ibv_pd);

impl ParentUse {
    pub fn none() -> Self {
        Self(ptr::null_mut())
    }

    /// # Safety
    /// `pd` is allocated.
    pub unsafe fn of(pd: *mut ibv_pd) -> Self {
        // SAFETY: this function's contract.
        let whole = unsafe { Pd::from_c(pd) };
        if !matches!(whole.kind, PdKind::Parent { .. }) {
            return Self::none();
        }
        // Relaxed: whoever deallocates the domain knows by other means that the object was made.
        whole.user_count.fetch_add(1, Ordering::Relaxed);
        Self(pd)
    }
}

impl Drop for ParentUse {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: a parent domain is not deallocated while it is used.
            unsafe { Pd::from_c(self.0) }.user_count.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Whether it is one of `ibv_alloc_parent_domain`.
///
/// # Safety
/// `pd` is allocated.
pub(crate) unsafe fn is_parent_domain(pd: *mut ibv_pd) -> bool {
    // SAFETY: this function's contract.
    matches!(unsafe { Pd::from_c(pd) }.kind, PdKind::Parent { .. })
}

/// A thread domain as C sees it, and the parent domains that use it.
#[repr(C)]
struct Td {
    c: ibv_td,
    user_count: AtomicU32,
}

impl Td {
    /// # Safety
    /// `td` came from this library and is not deallocated.
    unsafe fn from_c<'a>(td: *mut ibv_td) -> &'a Self {
        // SAFETY: every thread domain handed out is the beginning of a `Td`.
        unsafe { &*td.cast::<Self>() }
    }
}

/// `ibv_alloc_pd(3)`.
///
/// # Safety
/// `context` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: the C contract.
        let owner = unsafe { Context::from_c(context) }.client();
        let handle = owner.session().alloc_pd(owner.handle())?;
        Ok(Pd::hand_out(context, handle, PdKind::Own))
    })
}

/// `ibv_dealloc_pd(3)`: EBUSY while something uses it.
///
/// # Safety
/// `pd` is allocated, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    code(|| {
        // SAFETY: the C contract; what a parent domain names can't go before it; made by
        // `Box::into_raw` in `hand_out`.
        unsafe {
            let whole = Pd::from_c(pd);
            match whole.kind {
                _ if whole.is_used() => return Err(VerbsError::Busy),
                PdKind::Parent { protection, thread } => {
                    Pd::from_c(protection).user_count.fetch_sub(1, Ordering::Release);
                    if !thread.is_null() {
                        Td::from_c(thread).user_count.fetch_sub(1, Ordering::Release);
                    }
                }
                PdKind::Own | PdKind::Imported => session(whole.c.context).dealloc_pd(whole.c.handle)?,
            }
            drop(Box::from_raw(pd.cast::<Pd>()));
        }
        Ok(())
    })
}

/// `ibv_import_pd(3)`: ENOENT if the context's process has no such PD.
///
/// # Safety
/// `context` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: the C contract.
        let owner = unsafe { Context::from_c(context) }.client();
        let handle = owner.session().import_pd(owner.handle(), handle)?;
        Ok(Pd::hand_out(context, handle, PdKind::Imported))
    })
}

/// `ibv_unimport_pd(3)`. What is still in it keeps this process' share until the context is closed.
///
/// # Safety
/// `pd` is imported, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_pd(pd: *mut ibv_pd) {
    let _ = guarded(|| {
        // SAFETY: the C contract; made by `Box::into_raw` in `hand_out`.
        unsafe {
            let whole = Pd::from_c(pd);
            if whole.is_used() {
                return Err(VerbsError::Busy);
            }
            if matches!(whole.kind, PdKind::Imported) {
                let _ = session(whole.c.context).dealloc_pd(whole.c.handle);
            }
            drop(Box::from_raw(pd.cast::<Pd>()));
        }
        Ok(())
    });
}

/// `ibv_alloc_td(3)`.
pub(crate) unsafe extern "C" fn alloc_td(context: *mut ibv_context, init: *mut ibv_td_init_attr) -> *mut ibv_td {
    pointer(|| {
        // SAFETY: the C contract.
        if unsafe { (*init).comp_mask } != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(Box::into_raw(Box::new(Td { c: ibv_td { context }, user_count: AtomicU32::new(0) })).cast())
    })
}

/// `ibv_dealloc_td(3)`: EBUSY while a parent domain uses it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    code(|| {
        // SAFETY: the C contract; made by `Box::into_raw` in `alloc_td`.
        unsafe {
            if Td::from_c(td).user_count.load(Ordering::Acquire) != 0 {
                return Err(VerbsError::Busy);
            }
            drop(Box::from_raw(td.cast::<Td>()));
        }
        Ok(())
    })
}

/// `ibv_alloc_parent_domain(3)`.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    const MASKS: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
        | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC;
    pointer(|| {
        // SAFETY: the C contract.
        unsafe {
            let (named, thread) = ((*attr).pd, (*attr).td);
            if named.is_null() || (*attr).comp_mask & !MASKS != 0 || (*named).context != context {
                return Err(VerbsError::InvalidArgument);
            }
            if !thread.is_null() && Td::from_c(thread).c.context != context {
                return Err(VerbsError::InvalidArgument);
            }
            let protection = match Pd::from_c(named).kind {
                PdKind::Parent { protection, .. } => protection,
                PdKind::Own | PdKind::Imported => named,
            };
            Pd::from_c(protection).user_count.fetch_add(1, Ordering::Relaxed);
            if !thread.is_null() {
                Td::from_c(thread).user_count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(Pd::hand_out(context, (*protection).handle, PdKind::Parent { protection, thread }))
        }
    })
}
