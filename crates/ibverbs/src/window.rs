//! Memory windows. Type 1 is bound by a verb, type 2 by a work request; both go the way of
//! `BIND_MW`.
use crate::boundary::{code, pointer};
use crate::context::session;
use crate::pd::ParentUse;
use crate::post::{Binding, post_bind};
use crate::qp::Qp;
use freeflow_abi::{IBV_MW_TYPE_1, ibv_mw, ibv_mw_bind, ibv_pd, ibv_qp};
use freeflow_verbs::{Access, VerbsError, WindowKind};
use std::ffi::{c_int, c_uint};

/// A window as C sees it, and what is behind it.
#[repr(C)]
struct Window {
    c: ibv_mw,
    _parent_use: ParentUse,
}

/// The low bits of a window's key, which each binding changes.
const VARIANT: u32 = 0xff;

/// The key after the next binding (`ibv_inc_rkey` of the header).
fn next_key(rkey: u32) -> u32 {
    rkey & !VARIANT | rkey.wrapping_add(1) & VARIANT
}

/// `ibv_alloc_mw(3)`: EINVAL for a type that there is not.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: c_uint) -> *mut ibv_mw {
    pointer(|| {
        let kind = WindowKind::from_number(mw_type).ok_or(VerbsError::InvalidArgument)?;
        // SAFETY: the C contract.
        let (context, pd_handle) = unsafe { ((*pd).context, (*pd).handle) };
        // SAFETY: a PD's context is open.
        let (handle, rkey) = unsafe { session(context) }.alloc_window(pd_handle, kind)?;
        // SAFETY: the C contract.
        let parent_use = unsafe { ParentUse::of(pd) };
        let window = Window { c: ibv_mw { context, pd, rkey, handle, mw_type }, _parent_use: parent_use };
        Ok(Box::into_raw(Box::new(window)).cast())
    })
}

/// `ibv_dealloc_mw(3)`: a binding goes with it.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    code(|| {
        // SAFETY: the C contract; made by `Box::into_raw` in `alloc_mw`.
        unsafe {
            session((*mw).context).dealloc_window((*mw).handle)?;
            drop(Box::from_raw(mw.cast::<Window>()));
        }
        Ok(())
    })
}

/// `ibv_bind_mw(3)`. The window has its new key as soon as the request is posted.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    code(|| {
        // SAFETY: the C contract.
        unsafe {
            let info = &(*bind).bind_info;
            // IBTA o10-36.2.2: only windows of type 2 can count from zero.
            let zero_based = Access(info.mw_access_flags).contains(Access::ZERO_BASED);
            if (*mw).mw_type != IBV_MW_TYPE_1 || zero_based || (info.mr.is_null() && info.addr != 0) {
                return Err(VerbsError::InvalidArgument);
            }
            let binding = Binding::from_c(mw, next_key((*mw).rkey), info)?;
            post_bind(Qp::from_c(qp), (*bind).wr_id, (*bind).send_flags, &binding)?;
            (*mw).rkey = binding.rkey;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_change_in_their_low_byte_only() {
        assert_eq!(next_key(0x1234_5600), 0x1234_5601);
        assert_eq!(next_key(0x1234_56ff), 0x1234_5600);
        assert_eq!(next_key(0xffff_ffff), 0xffff_ff00);
    }
}
