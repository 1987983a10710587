//! Descriptors and sockets: messages with descriptors over Unix `SOCK_SEQPACKET`, who the peer is,
//! sockets of events, eventfds.
//!
//! A descriptor that another process shares can have its O_NONBLOCK changed by that process at any
//! time: what the router does on such descriptors ([`Doorbell::drain`]) does not rely on the flag.
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
use std::time::Duration;

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
/// Errors: EMSGSIZE beyond [`MESSAGE_BYTES_MAX`]; EINVAL beyond [`MESSAGE_FDS_MAX`]; `WouldBlock`
/// on a non-blocking socket whose peer doesn't read; EPIPE or ECONNRESET if the peer is gone.
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

/// Receives one message into `buffer`, whose length is then the message's, and at most `max_fds`
/// descriptors, all close-on-exec. `(0, [])` says that the peer has closed.
///
/// Errors: `InvalidData` if the message or its descriptors were more than allowed (they are
/// closed); `WouldBlock` on a non-blocking socket with nothing to receive.
pub fn receive_message(sock: impl AsFd, buffer: &mut Vec<u8>, max_fds: usize) -> io::Result<(usize, Vec<OwnedFd>)> {
    buffer.resize(MESSAGE_BYTES_MAX, 0);
    let received = receive_into(sock, buffer, max_fds);
    buffer.truncate(received.as_ref().map_or(0, |(bytes, _)| *bytes));
    received
}

/// The same into a buffer of [`MESSAGE_BYTES_MAX`] that is kept: nothing of it has to be cleared
/// for each message. Gives the message's length.
pub fn receive_into(sock: impl AsFd, buffer: &mut [u8], max_fds: usize) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive_with(sock, buffer, max_fds, RecvFlags::empty())
}

/// The same of what is there already; `None`: nothing is, on a blocking socket either.
pub fn receive_now(sock: impl AsFd, buffer: &mut [u8], max_fds: usize) -> Option<io::Result<(usize, Vec<OwnedFd>)>> {
    match receive_with(sock, buffer, max_fds, RecvFlags::DONTWAIT) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        received => Some(received),
    }
}

fn receive_with(
    sock: impl AsFd,
    buffer: &mut [u8],
    max_fds: usize,
    flags: RecvFlags,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let (received, fds) = receive_any(sock, buffer, flags);
    let bytes = received?;
    if fds.len() > max_fds { Err(too_much()) } else { Ok((bytes, fds)) }
}

fn too_much() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message longer, or with more descriptors, than allowed")
}

/// The same with whatever descriptors came, also with a message that is too long: to close one may
/// take as long as its sender likes.
pub fn receive_all(sock: impl AsFd, buffer: &mut [u8]) -> (io::Result<usize>, Vec<OwnedFd>) {
    receive_any(sock, buffer, RecvFlags::empty())
}

fn receive_any(sock: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> (io::Result<usize>, Vec<OwnedFd>) {
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(RECEIVED_FDS_MAX))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result = rustix::net::recvmsg(sock.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, flags);
        if result.as_ref().is_err_and(|error| *error == Errno::INTR) {
            continue;
        }
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let received = match result {
            Ok(received) if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => Err(too_much()),
            Ok(received) => Ok(received.bytes),
            Err(error) => Err(error.into()),
        };
        return (received, fds);
    }
}

/// Listens at `path` with the given permission bits; a socket that a dead process left there is
/// replaced. The socket is non-blocking and close-on-exec.
pub fn listen_seqpacket(path: impl AsRef<Path>, mode: u32) -> io::Result<OwnedFd> {
    listen(path.as_ref(), mode, SocketType::SEQPACKET)
}

/// The same for streams of bytes.
pub fn listen_stream(path: impl AsRef<Path>, mode: u32) -> io::Result<OwnedFd> {
    listen(path.as_ref(), mode, SocketType::STREAM)
}

fn listen(path: &Path, mode: u32, kind: SocketType) -> io::Result<OwnedFd> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path)?,
        _ => {}
    }
    let sock = socket(kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
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
    connect(path.as_ref(), SocketType::SEQPACKET)
}

/// Connects to a socket made by [`listen_stream`]: blocking and close-on-exec.
pub fn connect_stream(path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    connect(path.as_ref(), SocketType::STREAM)
}

fn connect(path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
    let sock = socket(kind, SocketFlags::CLOEXEC)?;
    with_address(path, |address| retry_on_intr(|| rustix::net::connect(&sock, address)))?;
    Ok(sock)
}

/// How long a receiver waits on a blocking socket; what takes longer is `WouldBlock`.
pub fn set_receive_timeout(sock: impl AsFd, at_most: Duration) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_socket_timeout(sock, rustix::net::sockopt::Timeout::Recv, Some(at_most))?)
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

fn socket(kind: SocketType, flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?)
}

/// Calls `f` with the address of `path`; one too long for an address goes by a descriptor of its
/// directory.
fn with_address(path: &Path, f: impl FnOnce(&SocketAddrUnix) -> Result<(), Errno>) -> io::Result<()> {
    match SocketAddrUnix::new(path) {
        Ok(address) => Ok(f(&address)?),
        Err(Errno::NAMETOOLONG) => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(Errno::NAMETOOLONG.into());
            };
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = rustix::fs::open(parent, flags, Mode::empty())?;
            let short = Path::new("/proc/thread-self/fd").join(directory.as_raw_fd().to_string()).join(name);
            Ok(f(&SocketAddrUnix::new(&short)?)?)
        }
        Err(error) => Err(error.into()),
    }
}

/// The process at the other end when the connection was made, in this process' namespaces.
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

/// Most groups that a process has (NGROUPS_MAX).
const GROUP_COUNT_MAX: usize = 65_536;
/// Enough for almost everybody.
const GROUP_COUNT_USUAL: usize = 64;

/// SO_PEERGROUPS: the supplementary groups that the peer had when the connection was made, in this
/// process' user namespace.
pub fn peer_groups(sock: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; GROUP_COUNT_USUAL];
    loop {
        let mut bytes = size_of_val(groups.as_slice()) as libc::socklen_t;
        let fd = sock.as_fd().as_raw_fd();
        // SAFETY: `groups` has room for `bytes` bytes and is ours; the kernel writes plain integers
        // there and keeps no pointer.
        let result = unsafe {
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, groups.as_mut_ptr().cast(), &raw mut bytes)
        };
        let error = io::Error::last_os_error();
        let count = bytes as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        // ERANGE: `bytes` says what is needed.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() || count > GROUP_COUNT_MAX {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// A pidfd of the process that connected: by SO_PEERPIDFD (Linux 6.5), else by its PID, which a
/// reused PID could fool.
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
    // SAFETY: `value` and `bytes` are ours, and `bytes` says how long `value` is. T is `i32` or
    // `ucred`: plain integers.
    let result = unsafe {
        libc::getsockopt(sock.as_raw_fd(), libc::SOL_SOCKET, option, (&raw mut value).cast(), &raw mut bytes)
    };
    if result == 0 && bytes as usize == size_of::<T>() { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// SO_PASSRIGHTS off (Linux 6.16): who connects to this listener can't send descriptors. An older
/// kernel can't be asked.
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

/// The process of a pidfd has not ended. False also if that can't be found out.
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

/// Whether there is something to read, or there never will be, by then.
pub fn readable_within(fd: impl AsFd, at_most: Duration) -> bool {
    let at_most = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
    ready_within(fd.as_fd(), PollFlags::IN, at_most).map_or(true, |events| !events.is_empty())
}

/// poll(2) without waiting.
fn ready_now(fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<PollFlags> {
    ready_within(fd, events, Timespec { tv_sec: 0, tv_nsec: 0 })
}

fn ready_within(fd: BorrowedFd<'_>, events: PollFlags, at_most: Timespec) -> io::Result<PollFlags> {
    let mut polled = [PollFd::from_borrowed_fd(fd, events)];
    retry_on_intr(|| rustix::event::poll(&mut polled, Some(&at_most)))?;
    Ok(polled[0].revents())
}

/// An eventfd at 0, non-blocking and close-on-exec.
pub fn eventfd() -> io::Result<OwnedFd> {
    use rustix::event::EventfdFlags;
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A way for records from one process to another that is not trusted: (end to read, end to write),
/// both close-on-exec and blocking. A `read` gives what one [`send_record`] sent, and 0 once the
/// other end is gone. About `bytes` wait there at most, counted with what the kernel keeps beside
/// each record (some 800 bytes).
///
/// A socket, not a pipe: who writes into a pipe waits for its mutex, O_NONBLOCK or not, and a
/// reader has that while it copies into its memory, as slow as it likes to make that. A socket's
/// sender never waits for the one that reads. Nothing can be sent against the direction.
pub fn event_sockets(bytes: usize) -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = seqpacket_pair()?;
    rustix::net::shutdown(&write, rustix::net::Shutdown::Read)?;
    // The kernel doubles it.
    rustix::net::sockopt::set_socket_send_buffer_size(&write, bytes / 2)?;
    Ok((read, write))
}

/// Sends a record by the writing end of [`event_sockets`], whole or not at all; never waits. False:
/// there is no room. When nobody has the other end any more it is as good as sent.
pub fn send_record(socket: impl AsFd, record: &[u8]) -> bool {
    let sent = retry_on_intr(|| rustix::net::send(socket.as_fd(), record, SendFlags::DONTWAIT | SendFlags::NOSIGNAL));
    // ENOBUFS and ENOMEM: the kernel has no room for anybody at the moment.
    !matches!(sent, Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM))
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

    /// Forgets the kicks so far; never waits, even if the other side made the descriptor blocking.
    /// True: there were any.
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
