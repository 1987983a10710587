//! The system calls that rustix has no safe function for. The only unsafe code of the command.
//!
//! Invariant: the command has one thread whenever it forks or makes namespaces; `fork` and
//! `unshare` rely on it. Another thread is joined by the function that began it
//! (`freeflow_hostnet::namespace`).
#![allow(unsafe_code)]

use rustix::process::Pid;
use rustix::thread::{CapabilitySet, UnshareFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Whether this process may make interfaces, namespaces and mounts.
pub fn is_privileged() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    rustix::process::geteuid().is_root()
        && rustix::thread::capabilities(None).is_ok_and(|mine| mine.effective.contains(needed))
}

/// Both sides of a fork.
pub enum Fork {
    Parent(Pid),
    Child,
}

/// Splits the process in two. The child has to end by [`exit_now`] or by an exec.
pub fn fork() -> io::Result<Fork> {
    // SAFETY: the process has one thread (module invariant), so the child owns every lock that exists and may go on
    // running ordinary code.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(Pid::from_raw(pid).expect("fork gives the parent a positive pid"))),
    }
}

/// Ends the process without running exit handlers (they belong to the process it was forked from).
pub fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Puts the process into new namespaces.
pub fn unshare(flags: UnshareFlags) -> io::Result<()> {
    debug_assert!(!flags.contains(UnshareFlags::FILES));
    // SAFETY: unsafe only with FILES and several threads; the flag is never used here and there is one thread.
    unsafe { rustix::thread::unshare_unsafe(flags)? };
    Ok(())
}

/// `asm-generic/socket.h`; not in every libc.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// The number of the calling thread's network namespace, which no other one has had since the machine started.
///
/// # Errors
/// The kernel is older than 5.14.
pub fn network_namespace_cookie() -> io::Result<u64> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let (mut cookie, mut bytes) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: both are ours, and `bytes` says how long `cookie` is, which may hold any bytes.
    let result = unsafe {
        let value = (&raw mut cookie).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &raw mut bytes)
    };
    if result == 0 && bytes as usize == size_of::<u64>() { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// Marks every descriptor from `first` up close-on-exec.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    close_range(first, libc::CLOSE_RANGE_CLOEXEC)
}

/// Closes every descriptor from `first` up. Only for a process that will never use (or drop) what it held before:
/// the caller runs on to [`exit_now`].
pub fn close_from(first: u32) -> io::Result<()> {
    close_range(first, 0)
}

fn close_range(first: u32, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: takes three integers and touches no memory. Descriptors closed under their owners are the documented
    // business of `close_from`'s caller.
    match unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor that gives the blocked signals in order of arrival.
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals a supervisor passes on, and SIGCHLD, and opens a descriptor for them. Left alone: what
    /// can't be blocked, what a fault of this very process raises, and the terminal's stop signals.
    pub fn supervisor() -> io::Result<Self> {
        Self::block_all_but(&[
            libc::SIGTSTP,
            libc::SIGTTIN,
            libc::SIGTTOU,
            libc::SIGCONT,
            libc::SIGPIPE,
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
            libc::SIGTRAP,
            libc::SIGABRT,
            libc::SIGSYS,
        ])
    }

    /// Blocks all signals. The kernel drops signals for a PID 1 that has no handler, but not blocked ones.
    pub fn init() -> io::Result<Self> {
        Self::block_all_but(&[])
    }

    fn block_all_but(left_alone: &[i32]) -> io::Result<Self> {
        // SAFETY: the set is a plain value, initialised by sigfillset before any other use; signalfd and sigprocmask
        // only read it; the descriptor returned is new and owned by nobody else.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut set);
            for &signal in left_alone {
                libc::sigdelset(&mut set, signal);
            }
            if libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }

    /// The next signal that has arrived, if any.
    pub fn next(&self) -> Option<i32> {
        const SIGNAL_INFO_BYTES: usize = size_of::<libc::signalfd_siginfo>();
        let mut bytes = [0u8; SIGNAL_INFO_BYTES];
        match rustix::io::read(&self.0, &mut bytes) {
            // `ssi_signo` is the first field.
            Ok(SIGNAL_INFO_BYTES) => Some(i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
            _ => None,
        }
    }
}

/// Gives every signal its default action and unblocks all: what a program expects at its start.
pub fn reset_signals() {
    // SAFETY: SIG_DFL is a valid action; numbers that can't be changed are refused with an error, which is fine. The
    // set is initialised by sigemptyset before use.
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Has a program begin with [`reset_signals`]: it would inherit what this process blocks.
pub fn with_default_signals(command: &mut Command) -> &mut Command {
    let reset = || {
        reset_signals();
        Ok(())
    };
    // SAFETY: between fork and exec it makes calls alone that are async-signal-safe, and allocates nothing.
    unsafe { command.pre_exec(reset) }
}

/// Sends a signal by its number (rustix knows no real-time signals).
pub fn send_signal(pid: Pid, signal: i32) -> io::Result<()> {
    // SAFETY: takes two integers and touches no memory.
    match unsafe { libc::kill(pid.as_raw_nonzero().get(), signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets a descriptor live on over an exec.
pub fn keep_on_exec(fd: BorrowedFd<'_>) -> io::Result<i32> {
    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    Ok(fd.as_raw_fd())
}

/// Makes a detached mount one that its container can't change: read-only, and without devices and set-user-ID programs.
pub fn protect_mount(mount: BorrowedFd<'_>) -> io::Result<()> {
    set_mount(mount, libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV, 0)
}

/// The same for one of a device, which can be written to all the same: its mode and owner are the host's.
pub fn protect_device_mount(mount: BorrowedFd<'_>) -> io::Result<()> {
    set_mount(mount, libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC, 0)
}

/// The same for one that holds no programs.
pub fn protect_data_mount(mount: BorrowedFd<'_>) -> io::Result<()> {
    protect_mount(mount)?;
    set_mount(mount, libc::MOUNT_ATTR_NOEXEC, 0)
}

/// Keeps mounts that are made below a mount from now on in its namespace.
pub fn stop_propagation(mount: BorrowedFd<'_>) -> io::Result<()> {
    set_mount(mount, 0, libc::MS_SLAVE)
}

/// Makes a detached mount and all below it read-only.
pub fn make_read_only(tree: BorrowedFd<'_>) -> io::Result<()> {
    set_mounts(tree, libc::AT_RECURSIVE, libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NODEV, 0)
}

fn set_mount(mount: BorrowedFd<'_>, attributes: u64, propagation: u64) -> io::Result<()> {
    set_mounts(mount, 0, attributes, propagation)
}

fn set_mounts(mount: BorrowedFd<'_>, flags: i32, attributes: u64, propagation: u64) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation, userns_fd: 0 };
    let bytes = size_of::<libc::mount_attr>();
    let (fd, path, flags) = (mount.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH | flags);
    // SAFETY: the path is a C string and the structure is valid for reads of `bytes` bytes; the kernel keeps neither.
    match unsafe { libc::syscall(libc::SYS_mount_setattr, fd, path, flags, &raw const attributes, bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// For a session whose registered memory nobody unmaps: `ping`'s is the client's own, for as long as the process lives.
pub fn memory_that_stays() -> freeflow_client::OwnMemory {
    // SAFETY: `ping` registers only what `freeflow_client::allocate` gave it and never releases it.
    unsafe { freeflow_client::OwnMemory::promised() }
}
