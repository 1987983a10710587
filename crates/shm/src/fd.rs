//! Descriptors and sockets: messages with descriptors over Unix `SOCK_SEQPACKET`, who the peer is, pipes and eventfds.
//!
//! A descriptor that another process shares can have its O_NONBLOCK changed by that process at any time: what the router
//! does on such descriptors ([`Doorbell::drain`]) does not rely on the flag.
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Longest message, bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Descriptors that one message may carry.
pub const MESSAGE_FDS_MAX: usize = 16;
/// Descriptors that the kernel lets one message bring (SCM_MAX_FD).
pub const RECEIVED_FDS_MAX: usize = 253;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 512;

/// Sends one message. Never raises SIGPIPE.
///
/// Errors: EMSGSIZE beyond [`MESSAGE_BYTES_MAX`]; EINVAL beyond [`MESSAGE_FDS_MAX`]; `WouldBlock` on a non-blocking
/// socket whose peer doesn't read; EPIPE or ECONNRESET if the peer is gone.
pub fn send_message(sock: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(Errno::MSGSIZE.into());
    }
    if fds.len() > MESSAGE_FDS_MAX {
        return Err(Errno::INVAL.into());
    }
    let sent = retry_on_intr(|| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(fds));
            assert!(fits, "the space is for as many descriptors as were checked");
        }
        rustix::net::sendmsg(sock.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one message into `buffer`, whose length is then the message's, and at most `max_fds` descriptors, all
/// close-on-exec. `(0, [])` says that the peer has closed.
///
/// Errors: `InvalidData` if the message or its descriptors were more than allowed (they are closed); `WouldBlock` on a
/// non-blocking socket with nothing to receive.
pub fn receive_message(sock: impl AsFd, buffer: &mut Vec<u8>, max_fds: usize) -> io::Result<(usize, Vec<OwnedFd>)> {
    let max_fds = max_fds.min(RECEIVED_FDS_MAX);
    buffer.resize(MESSAGE_BYTES_MAX, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(RECEIVED_FDS_MAX))];
    let (result, fds) = loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result =
            rustix::net::recvmsg(sock.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC);
        if result.as_ref().is_err_and(|error| *error == Errno::INTR) {
            continue;
        }
        // Collected in any case, so that they are closed in any case.
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        break (result, fds);
    };
    let received = match result {
        Ok(received) => received,
        Err(error) => {
            buffer.clear();
            return Err(error.into());
        }
    };
    let truncated = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    if truncated || fds.len() > max_fds {
        buffer.clear();
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message longer, or with more descriptors, than allowed",
        ));
    }
    buffer.truncate(received.bytes);
    Ok((received.bytes, fds))
}

/// Listens at `path` with the given permission bits; a socket that a dead process left there is replaced. The socket is
/// non-blocking and close-on-exec.
pub fn listen_seqpacket(path: impl AsRef<Path>, mode: u32) -> io::Result<OwnedFd> {
    let path = path.as_ref();
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path)?,
        _ => {}
    }
    let sock = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    with_address(path, |address| rustix::net::bind(&sock, address))?;
    // Nobody can connect before `listen`, so the permissions hold from the first connection.
    rustix::fs::chmod(path, Mode::from_raw_mode(mode))?;
    rustix::net::listen(&sock, BACKLOG)?;
    Ok(sock)
}

/// Accepts one connection: **non-blocking** and close-on-exec. `WouldBlock` if none waits.
pub fn accept(sock: impl AsFd) -> io::Result<OwnedFd> {
    Ok(retry_on_intr(|| rustix::net::accept_with(sock.as_fd(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK))?)
}

/// Connects to a socket made by [`listen_seqpacket`]: blocking and close-on-exec.
pub fn connect_seqpacket(path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    let sock = socket(SocketFlags::CLOEXEC)?;
    with_address(path.as_ref(), |address| retry_on_intr(|| rustix::net::connect(&sock, address)))?;
    Ok(sock)
}

/// Two connected blocking sockets.
pub fn seqpacket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Changes whether calls on the descriptor wait.
pub fn set_nonblocking(fd: impl AsFd, nonblocking: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(fd.as_fd())?;
    flags.set(OFlags::NONBLOCK, nonblocking);
    Ok(rustix::fs::fcntl_setfl(fd.as_fd(), flags)?)
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Calls `f` with the address of `path`; one too long for an address goes by a descriptor of its directory.
fn with_address(path: &Path, f: impl FnOnce(&SocketAddrUnix) -> Result<(), Errno>) -> io::Result<()> {
    match SocketAddrUnix::new(path) {
        Ok(address) => Ok(f(&address)?),
        Err(Errno::NAMETOOLONG) => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(Errno::NAMETOOLONG.into());
            };
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = rustix::fs::open(parent, flags, Mode::empty())?;
            let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
            Ok(f(&SocketAddrUnix::new(&short)?)?)
        }
        Err(error) => Err(error.into()),
    }
}

/// Who was at the other end when the connection was made, in this process' namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// 0 if the peer is not visible from this PID namespace.
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// SO_PEERCRED.
pub fn peer_credentials(sock: impl AsFd) -> io::Result<PeerCredentials> {
    let none = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let credentials = socket_option(sock.as_fd(), libc::SO_PEERCRED, none)?;
    Ok(PeerCredentials { pid: credentials.pid, uid: credentials.uid, gid: credentials.gid })
}

/// A pidfd of the process that connected: by SO_PEERPIDFD (Linux 6.5), else by its PID, which a reused PID could fool.
pub fn peer_pidfd(sock: impl AsFd) -> io::Result<OwnedFd> {
    match socket_option(sock.as_fd(), SO_PEERPIDFD, -1_i32) {
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(fd) if fd >= 0 => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        Err(error) if error.raw_os_error() != Some(libc::ENOPROTOOPT) => return Err(error),
        _ => {}
    }
    let pid = rustix::process::Pid::from_raw(peer_credentials(sock)?.pid).ok_or(Errno::SRCH)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

/// asm-generic/socket.h; not in every libc.
const SO_PEERPIDFD: libc::c_int = 77;

/// getsockopt(2) at SOL_SOCKET of a value that may hold any bytes.
fn socket_option<T: Copy>(sock: BorrowedFd<'_>, option: libc::c_int, mut value: T) -> io::Result<T> {
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` and `bytes` are ours, and `bytes` says how long `value` is. T is `i32` or `ucred`: plain integers.
    let result = unsafe {
        libc::getsockopt(sock.as_raw_fd(), libc::SOL_SOCKET, option, (&raw mut value).cast(), &raw mut bytes)
    };
    if result == 0 && bytes as usize == size_of::<T>() { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// SO_PASSRIGHTS off (Linux 6.16): who connects to this listener can't send descriptors. An older kernel can't be told.
pub fn refuse_descriptors(listener: impl AsFd) -> io::Result<()> {
    let (off, bytes) = (0_i32, size_of::<i32>() as libc::socklen_t);
    let fd = listener.as_fd().as_raw_fd();
    // SAFETY: `off` is valid for reads of `bytes` bytes, and the kernel keeps no pointer to it.
    let result = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const off).cast(), bytes) };
    match io::Error::last_os_error() {
        error if result != 0 && error.raw_os_error() != Some(libc::ENOPROTOOPT) => Err(error),
        _ => Ok(()),
    }
}

/// asm-generic/socket.h; not in every libc.
const SO_PASSRIGHTS: libc::c_int = 83;

/// The process of a pidfd has not ended. False also if that can't be told.
pub fn pidfd_alive(fd: impl AsFd) -> bool {
    ready_now(fd.as_fd(), PollFlags::IN).is_ok_and(|events| events.is_empty())
}

/// The other end of a socket or pipe is gone, or the descriptor is unusable. Doesn't wait.
pub fn peer_closed(fd: impl AsFd) -> bool {
    match ready_now(fd.as_fd(), PollFlags::empty()) {
        Ok(events) => events.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
        Err(_) => true,
    }
}

/// poll(2) without waiting.
fn ready_now(fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<PollFlags> {
    let mut polled = [PollFd::from_borrowed_fd(fd, events)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    retry_on_intr(|| rustix::event::poll(&mut polled, Some(&now)))?;
    Ok(polled[0].revents())
}

/// An eventfd at 0, non-blocking and close-on-exec.
pub fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A pipe of events: (read end, write end), both close-on-exec; only the write end is non-blocking.
pub fn event_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    set_nonblocking(&write, true)?;
    Ok((read, write))
}

/// An eventfd by which one side wakes the other.
#[derive(Debug)]
pub struct Doorbell(pub OwnedFd);

impl Doorbell {
    pub fn new() -> io::Result<Self> {
        eventfd().map(Self)
    }

    /// Wakes the other side. One that is awake already, or gone, is no error.
    #[inline]
    pub fn kick(&self) {
        // The only error of interest is a full counter: then it is awake.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Forgets the kicks so far; never waits, even if the other side made the descriptor blocking. True: there were any.
    pub fn drain(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }
}

impl From<OwnedFd> for Doorbell {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
