//! `rdma_set_option`.
use crate::boundary::{Outcome, status};
use crate::call::command;
use crate::id::Id;
use freeflow_abi::{
    RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, RDMA_OPTION_ID_AFONLY,
    RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_TOS, ibv_path_data, rdma_cm_id,
};
use freeflow_protocol::cm::{CmOption, CmRequest};
use std::ffi::{c_int, c_void};
use std::mem;

/// EINVAL for a value of a wrong size, ENOSYS for an option that is none, as the kernel has it.
/// EOPNOTSUPP for a path of the program's own: paths are the router's.
///
/// # Safety
/// `value` is valid for so many bytes.
unsafe fn option(level: c_int, name: c_int, value: *const c_void, bytes: usize) -> Outcome<CmOption> {
    // SAFETY: this function's contract; looked at only if it is that long.
    let byte = || if bytes == 1 { Ok(unsafe { value.cast::<u8>().read() }) } else { Err(libc::EINVAL) };
    let flag = || {
        let is_long_enough = bytes == size_of::<c_int>();
        // SAFETY: this function's contract.
        if is_long_enough { Ok(unsafe { value.cast::<c_int>().read_unaligned() } != 0) } else { Err(libc::EINVAL) }
    };
    if value.is_null() {
        return Err(libc::EINVAL);
    }
    match (level, name) {
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => Ok(CmOption::TypeOfService(byte()?)),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => Ok(CmOption::ReuseAddress(flag()?)),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => Ok(CmOption::AddressFamilyOnly(flag()?)),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => Ok(CmOption::AckTimeout(byte()?)),
        (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) => {
            let is_list = bytes > 0 && bytes.is_multiple_of(size_of::<ibv_path_data>());
            Err(if is_list { libc::EOPNOTSUPP } else { libc::EINVAL })
        }
        _ => Err(libc::ENOSYS),
    }
}

/// `rdma_set_option(3)`.
///
/// # Safety
/// `id` is an identifier, `value` valid for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    bytes: usize,
) -> c_int {
    status(|| {
        // SAFETY: the C contract.
        unsafe {
            let id = Id::from_c(id)?;
            let option = option(level, name, value, bytes)?;
            id.context()?;
            for home in id.homes() {
                command(home.device.context(), CmRequest::SetOption { id: home.handle, option })?;
            }
            let options = &mut id.state().options;
            options.retain(|known| mem::discriminant(known) != mem::discriminant(&option));
            options.push(option);
            Ok(())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask<T>(level: c_int, name: c_int, value: &T) -> Outcome<CmOption> {
        // SAFETY: a value of that size.
        unsafe { option(level, name, std::ptr::from_ref(value).cast(), size_of::<T>()) }
    }

    #[test]
    fn sizes_and_names_are_the_kernels() {
        assert_eq!(ask(0, RDMA_OPTION_ID_TOS, &7_u8), Ok(CmOption::TypeOfService(7)));
        assert_eq!(ask(0, RDMA_OPTION_ID_TOS, &7_u32), Err(libc::EINVAL));
        assert_eq!(ask(0, RDMA_OPTION_ID_REUSEADDR, &1_i32), Ok(CmOption::ReuseAddress(true)));
        assert_eq!(ask(0, RDMA_OPTION_ID_AFONLY, &0_i32), Ok(CmOption::AddressFamilyOnly(false)));
        assert_eq!(ask(0, RDMA_OPTION_ID_ACK_TIMEOUT, &14_u8), Ok(CmOption::AckTimeout(14)));
        assert_eq!(ask(0, 9, &1_u8), Err(libc::ENOSYS));
        assert_eq!(ask(1, RDMA_OPTION_IB_PATH, &[0_u8; 72]), Err(libc::EOPNOTSUPP));
        assert_eq!(ask(1, RDMA_OPTION_IB_PATH, &[0_u8; 71]), Err(libc::EINVAL));
        assert_eq!(ask(2, 0, &1_u8), Err(libc::ENOSYS));
    }
}
