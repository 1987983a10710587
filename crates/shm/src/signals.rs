//! Signals as a descriptor, for processes that forbid unsafe code.
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Blocks SIGTERM and SIGINT in the calling thread, and so in the threads it begins later; the
/// descriptor becomes readable when one of them arrives.
pub fn termination_signals() -> io::Result<OwnedFd> {
    // SAFETY: `set` is ours and initialised by sigemptyset; the calls touch nothing else.
    let fd = unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
