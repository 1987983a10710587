//! Public functions that FreeFlow does not do yet. Each refuses with EOPNOTSUPP in the way that its
//! signature demands: the errno as the result, or null, or -1, with `errno` set. `docs/VERBS.md`
//! lists them.
use crate::boundary::set_errno;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use freeflow_abi::{ibv_ah_attr, ibv_context, ibv_dm, ibv_mr, ibv_pd, ibv_qp};

/// A struct that programs hold only pointers to.
type Opaque = c_void;

/// Refuses where the result is an errno.
pub(crate) fn refuse() -> c_int {
    set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

/// Refuses where the result is a pointer.
pub(crate) fn refuse_pointer<T>() -> *mut T {
    set_errno(libc::EOPNOTSUPP);
    null_mut()
}

/// Refuses where the result is a descriptor or a count.
pub(crate) fn refuse_minus_one() -> c_int {
    set_errno(libc::EOPNOTSUPP);
    -1
}

// Memory regions of other kinds.

#[unsafe(no_mangle)]
pub extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    refuse_pointer()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_alloc_dmah(_context: *mut ibv_context, _attributes: *mut Opaque) -> *mut Opaque {
    refuse_pointer()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_dealloc_dmah(_handle: *mut Opaque) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_alloc_buf(_pd: *mut ibv_pd, _bytes: usize, _buffer: *mut *mut Opaque) -> *mut c_void {
    refuse_pointer()
}

/// Frees nothing: `ibv_alloc_buf` gave nothing.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_free_buf(_buffer: *mut Opaque) {}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_reg_buf_mr(
    _pd: *mut ibv_pd,
    _buffer: *mut Opaque,
    _address: *mut c_void,
    _length: usize,
    _access: c_int,
) -> *mut ibv_mr {
    refuse_pointer()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_export_buf_dmabuf_fd(_buffer: *mut Opaque) -> c_int {
    refuse_minus_one()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_dm_export_dmabuf_fd(_memory: *mut ibv_dm) -> c_int {
    refuse_minus_one()
}

// Completion counters.

#[unsafe(no_mangle)]
pub extern "C" fn _ibv_query_comp_cntr_caps(_context: *mut ibv_context, _caps: *mut Opaque, _bytes: usize) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_create_comp_cntr(_context: *mut ibv_context, _attributes: *mut Opaque) -> *mut Opaque {
    refuse_pointer()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_destroy_comp_cntr(_counter: *mut Opaque) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_set_comp_cntr(_counter: *mut Opaque, _value: u64) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_set_err_comp_cntr(_counter: *mut Opaque, _value: u64) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_inc_comp_cntr(_counter: *mut Opaque, _amount: u64) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_inc_err_comp_cntr(_counter: *mut Opaque, _amount: u64) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_read_comp_cntr(_counter: *mut Opaque, _value: *mut u64) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_read_err_comp_cntr(_counter: *mut Opaque, _value: *mut u64) -> c_int {
    refuse()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_qp_attach_comp_cntr(_qp: *mut ibv_qp, _counter: *mut Opaque, _attributes: *mut Opaque) -> c_int {
    refuse()
}

// Ethernet addresses: a vNIC's peers have none that a program could use.

/// Refuses with the negative errno that this function alone returns.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    _attributes: *mut ibv_ah_attr,
    _mac: *mut u8,
    _vlan: *mut u16,
) -> c_int {
    -refuse()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno() -> c_int {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    }

    #[test]
    fn every_kind_of_result_says_no() {
        assert_eq!(ibv_dealloc_dmah(null_mut()), libc::EOPNOTSUPP);
        set_errno(0);
        assert!(ibv_alloc_dmah(null_mut(), null_mut()).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        set_errno(0);
        assert_eq!(ibv_dm_export_dmabuf_fd(null_mut()), -1);
        assert_eq!(errno(), libc::EOPNOTSUPP);
        assert_eq!(ibv_resolve_eth_l2_from_gid(null_mut(), null_mut(), null_mut(), null_mut()), -libc::EOPNOTSUPP);
    }
}
