//! Functions of glibc 2.34 that an older one lacks, by system calls. Programs may look them up by name in any glibc,
//! and find this library's, which goes on to these.
use libc::{c_int, c_uint};

/// `close_range(2)`.
///
/// # Safety
/// The function's own contract.
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: no pointers.
    let answer = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    if answer < 0 { -1 } else { 0 }
}

/// `closefrom(3)`.
///
/// # Safety
/// The function's own contract.
pub unsafe extern "C" fn closefrom(first: c_int) {
    let first = first.max(0);
    // SAFETY: no pointers.
    if unsafe { close_range(first.cast_unsigned(), c_uint::MAX, 0) } == 0 {
        return;
    }
    // A filter of system calls may forbid it.
    // SAFETY: no pointers.
    let most = unsafe { libc::sysconf(libc::_SC_OPEN_MAX) };
    for fd in first..c_int::try_from(most).unwrap_or(c_int::MAX) {
        // SAFETY: the caller gives up every descriptor from `first` on.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn duplicate_at(least: c_int) -> c_int {
        // SAFETY: no pointers.
        let fd = unsafe { libc::fcntl(2, libc::F_DUPFD_CLOEXEC, least) };
        assert!(fd >= least, "{}", std::io::Error::last_os_error());
        fd
    }

    fn is_open(fd: c_int) -> bool {
        // SAFETY: no pointers.
        unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
    }

    #[test]
    fn functions_that_an_old_glibc_lacks_close_the_same() {
        // Above all descriptors of other tests of this process.
        let (low, high) = (duplicate_at(900), duplicate_at(1000));
        // SAFETY: descriptors of this test alone.
        assert_eq!(unsafe { close_range(low.cast_unsigned(), low.cast_unsigned(), 0) }, 0);
        assert!(!is_open(low) && is_open(high));
        // SAFETY: the same.
        unsafe { closefrom(high) };
        assert!(!is_open(high) && is_open(2));
        // SAFETY: nothing is closed: the range is none.
        assert_eq!(unsafe { close_range(2, 1, 0) }, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
    }
}
