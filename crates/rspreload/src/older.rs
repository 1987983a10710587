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
    if close_listed(first) {
        return;
    }
    // SAFETY: no pointers.
    let most = unsafe { libc::sysconf(libc::_SC_OPEN_MAX) };
    for fd in first..c_int::try_from(most).unwrap_or(c_int::MAX) {
        // SAFETY: the caller gives up every descriptor from `first` on.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
}

/// Bytes of one look at a folder, on the stack: a child of a fork may have no heap.
const ENTRIES_BYTES: usize = 4096;
/// Of an entry of getdents64(2): its length, and its name, which ends with a zero.
const LENGTH_AT: usize = 16;
const NAME_AT: usize = 19;

/// Closes those from `first` up that /proc lists: a limit of a milliard of descriptors is nothing to count to. False if
/// /proc is not there.
fn close_listed(first: c_int) -> bool {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the path is a C string.
    let folder = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, c"/proc/thread-self/fd".as_ptr(), flags) };
    let Ok(folder) = c_int::try_from(folder) else { return false };
    if folder < 0 {
        return false;
    }
    let mut entries = [0u8; ENTRIES_BYTES];
    let mut is_whole = true;
    loop {
        // SAFETY: the kernel writes at most so many bytes there.
        let length = unsafe { libc::syscall(libc::SYS_getdents64, folder, entries.as_mut_ptr(), ENTRIES_BYTES) };
        let Ok(length @ 1..) = usize::try_from(length) else {
            is_whole &= length == 0;
            break;
        };
        let mut rest = &entries[..length];
        while let Some(bytes) = rest.get(LENGTH_AT..LENGTH_AT + 2) {
            let size = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
            let fd = number(rest.get(NAME_AT..size).unwrap_or_default()).filter(|&fd| fd >= first && fd != folder);
            if let Some(fd) = fd {
                // SAFETY: the caller gives up every descriptor from `first` on.
                unsafe { libc::syscall(libc::SYS_close, fd) };
            }
            rest = rest.get(size.max(1)..).unwrap_or_default();
        }
    }
    // SAFETY: opened above.
    unsafe { libc::syscall(libc::SYS_close, folder) };
    is_whole
}

/// A name that is a descriptor's number; `.` and `..` are none.
fn number(name: &[u8]) -> Option<c_int> {
    let digits = name.split(|&byte| byte == 0).next()?;
    let value = |value: c_int, digit: &u8| {
        let digit = digit.is_ascii_digit().then(|| c_int::from(digit - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    };
    if digits.is_empty() { None } else { digits.iter().try_fold(0, value) }
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
    fn numbers_are_read_from_names() {
        assert_eq!(number(b"1048575\0\0\0"), Some(1_048_575));
        for bad in [&b".\0"[..], b"..\0", b"", b"\0", b"7x\0", b"99999999999\0"] {
            assert_eq!(number(bad), None);
        }
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
        // More than one look has room for.
        let many: Vec<c_int> = (0..400).map(|_| duplicate_at(600)).collect();
        assert!(close_listed(600));
        assert!(many.iter().all(|&fd| !is_open(fd)) && is_open(2));
        // SAFETY: nothing is closed: the range is none.
        assert_eq!(unsafe { close_range(2, 1, 0) }, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
    }
}
