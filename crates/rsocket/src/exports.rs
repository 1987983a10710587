//! The functions that C programs call: arguments in, errno out, and no panic beyond. All are of
//! node RDMACM_1.0, but `repoll_*` (1.5).
use crate::address::Address;
use crate::datagram::DatagramSocket;
use crate::epoll;
use crate::ffi::{Outcome, checked, set_errno};
use crate::keepalive;
use crate::pieces::Pieces;
use crate::poll;
use crate::socket::{Phase, StreamSocket};
use crate::table::{self, Socket};
use crate::wait::{Deadline, watch_forks};
use libc::{
    c_int, c_void, epoll_event, fd_set, iovec, msghdr, nfds_t, off_t, pollfd, size_t, sockaddr, socklen_t, ssize_t,
    timeval,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{ptr, slice};

const IOV_MAX: usize = 1024;
const POLL_MAX: u64 = 1 << 20;
const OPTION_BYTES_MAX: socklen_t = 4096;

/// Runs the body of a call; a panic in it becomes EIO.
#[inline]
fn answer<T: TryFrom<isize>>(body: impl FnOnce() -> Outcome<isize>) -> T {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(libc::EIO));
    let number = outcome.unwrap_or_else(|error| {
        set_errno(error);
        -1
    });
    number.try_into().unwrap_or_else(|_| unreachable!("an answer fits its type"))
}

/// # Errors
/// EBADF: no rsocket; ENOTCONN: a parent's, inherited by fork.
#[inline]
fn find(fd: c_int) -> Outcome<Socket> {
    match table::get(fd) {
        Some(socket) if socket.is_ours() => Ok(socket),
        Some(_) => Err(libc::ENOTCONN),
        None => Err(if table::is_inherited(fd) { libc::ENOTCONN } else { libc::EBADF }),
    }
}

fn done(outcome: Outcome<()>) -> Outcome<isize> {
    outcome.map(|()| 0)
}

/// `rsocket(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    answer(|| {
        let flags = kind & (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        let status = if flags & libc::SOCK_NONBLOCK != 0 { libc::O_NONBLOCK } else { 0 } | libc::O_RDWR;
        let descriptor = if flags & libc::SOCK_CLOEXEC != 0 { libc::FD_CLOEXEC } else { 0 };
        if !matches!(domain, libc::AF_INET | libc::AF_INET6) {
            return Err(libc::ENOTSUP);
        }
        watch_forks();
        let socket = match (kind & !flags, protocol) {
            (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
                Socket::Stream(StreamSocket::create(domain, status, descriptor)?)
            }
            (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
                Socket::Datagram(DatagramSocket::create(domain, status, descriptor)?)
            }
            _ => return Err(libc::ENOTSUP),
        };
        let fd = socket.fd();
        table::insert(socket);
        Ok(fd as isize)
    })
}

/// # Safety
/// As of `bind(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rbind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    answer(|| {
        // SAFETY: the C contract.
        let address = unsafe { Address::from_c(address, length) };
        done(match find(fd)? {
            Socket::Stream(socket) => socket.bind(address.ok_or(libc::EINVAL)?),
            Socket::Datagram(socket) => socket.bind(address.ok_or(libc::EINVAL)?),
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn rlisten(fd: c_int, backlog: c_int) -> c_int {
    answer(|| match find(fd)? {
        Socket::Stream(socket) => done(socket.listen(backlog)),
        Socket::Datagram(_) => Err(libc::EOPNOTSUPP),
    })
}

/// # Safety
/// As of `accept(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn raccept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    answer(|| {
        let Socket::Stream(socket) = find(fd)? else { return Err(libc::EOPNOTSUPP) };
        let accepted = socket.accept()?;
        // SAFETY: the C contract.
        unsafe { accepted.id.peer_address().to_c(address, length) };
        let fd = accepted.fd;
        table::insert(Socket::Stream(accepted));
        Ok(fd as isize)
    })
}

/// # Safety
/// As of `connect(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rconnect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    answer(|| {
        // SAFETY: the C contract.
        let address = unsafe { Address::from_c(address, length) }.ok_or(libc::EINVAL)?;
        done(match find(fd)? {
            Socket::Stream(_) if address.to_std().is_none() => Err(libc::EAFNOSUPPORT),
            Socket::Stream(socket) => socket.connect(address),
            Socket::Datagram(socket) => socket.connect(address),
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn rshutdown(fd: c_int, how: c_int) -> c_int {
    answer(|| match find(fd)? {
        Socket::Stream(socket) => done(socket.shutdown(how, Deadline::never())),
        Socket::Datagram(_) => Ok(0),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn rclose(fd: c_int) -> c_int {
    answer(|| {
        if table::forget_inherited(fd) {
            // The connection is the parent's: this process only lets go of the descriptor.
            // SAFETY: no pointers.
            return checked(unsafe { libc::syscall(libc::SYS_close, fd) } as c_int).map(|_| 0);
        }
        if epoll::close(fd) {
            return Ok(0);
        }
        epoll::leave(fd);
        let socket = table::remove(fd).ok_or(libc::EBADF)?;
        match &socket {
            Socket::Stream(socket) => {
                socket.close();
                // A call that came while it was closed may have begun them once more; the number is
                // not free yet.
                keepalive::cancel(fd);
            }
            Socket::Datagram(socket) => socket.close(),
        }
        Ok(0)
    })
}

/// # Safety
/// The pieces are valid for reading.
unsafe fn send_pieces(fd: c_int, list: &[iovec], flags: c_int, to: Option<Address>) -> Outcome<isize> {
    match find(fd)? {
        // SAFETY: this function's contract.
        Socket::Stream(socket) => socket.send(unsafe { Pieces::new(list) }, flags),
        Socket::Datagram(socket) => {
            // SAFETY: this function's contract.
            let parts = list.iter().map(|piece| unsafe { bytes_of(piece.iov_base, piece.iov_len) });
            let to = match to {
                Some(to) => Some(to.to_std().ok_or(libc::EAFNOSUPPORT)?),
                None => None,
            };
            match list {
                // SAFETY: this function's contract.
                [one] => socket.send(unsafe { bytes_of(one.iov_base, one.iov_len) }, flags, to),
                _ => socket.send(&parts.collect::<Vec<_>>().concat(), flags, to),
            }
        }
    }
    .map(usize::cast_signed)
}

/// # Safety
/// The pieces are valid for writing; `from` and `length` are null or valid.
unsafe fn receive_pieces(
    fd: c_int,
    list: &[iovec],
    flags: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> Outcome<(isize, bool)> {
    match find(fd)? {
        Socket::Stream(socket) => {
            // SAFETY: this function's contract.
            let bytes = socket.receive(unsafe { Pieces::new(list) }, flags)?;
            if bytes != 0 {
                // SAFETY: this function's contract.
                unsafe { socket.id.peer_address().to_c(from, length) };
            }
            Ok((bytes.cast_signed(), false))
        }
        Socket::Datagram(socket) => {
            let mut room = [0u8; crate::headers::DATAGRAM_BYTES];
            let total = list.iter().fold(0usize, |sum, piece| sum.saturating_add(piece.iov_len)).min(room.len());
            let (bytes, whole, source) = socket.receive(&mut room[..total], flags)?;
            let mut at = 0;
            for piece in list {
                let part = piece.iov_len.min(bytes - at);
                // SAFETY: this function's contract.
                unsafe { ptr::copy_nonoverlapping(room[at..].as_ptr(), piece.iov_base.cast(), part) };
                at += part;
            }
            // SAFETY: this function's contract.
            unsafe { Address::from_std(source).to_c(from, length) };
            let returned = if flags & libc::MSG_TRUNC != 0 { whole } else { bytes };
            Ok((returned.cast_signed(), whole > bytes))
        }
    }
}

/// # Safety
/// `base` is valid for `bytes`, or they are 0.
unsafe fn bytes_of<'a>(base: *const c_void, bytes: usize) -> &'a [u8] {
    // SAFETY: this function's contract.
    if bytes == 0 { &[] } else { unsafe { slice::from_raw_parts(base.cast(), bytes) } }
}

/// # Safety
/// `list` is valid for `count` entries.
unsafe fn pieces_of<'a>(list: *const iovec, count: usize) -> Outcome<&'a [iovec]> {
    match count {
        0 => Ok(&[]),
        _ if count > IOV_MAX || list.is_null() => Err(libc::EINVAL),
        // SAFETY: this function's contract.
        _ => Ok(unsafe { slice::from_raw_parts(list, count) }),
    }
}

/// # Safety
/// As of `send(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsend(fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int) -> ssize_t {
    let piece = [iovec { iov_base: buffer.cast_mut(), iov_len: bytes }];
    // SAFETY: the C contract.
    answer(|| unsafe { send_pieces(fd, &piece, flags, None) })
}

/// # Safety
/// As of `sendto(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsendto(
    fd: c_int,
    buffer: *const c_void,
    bytes: size_t,
    flags: c_int,
    to: *const sockaddr,
    length: socklen_t,
) -> ssize_t {
    let piece = [iovec { iov_base: buffer.cast_mut(), iov_len: bytes }];
    answer(|| {
        if to.is_null() {
            // SAFETY: the C contract.
            return unsafe { send_pieces(fd, &piece, flags, None) };
        }
        // A stream has its peer, and the address means nothing, as with TCP.
        let to = match find(fd)? {
            Socket::Stream(_) => None,
            // SAFETY: the C contract.
            Socket::Datagram(_) => Some(unsafe { Address::from_c(to, length) }.ok_or(libc::EINVAL)?),
        };
        // SAFETY: as above.
        unsafe { send_pieces(fd, &piece, flags, to) }
    })
}

/// # Safety
/// As of `sendmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    answer(|| {
        // SAFETY: the C contract.
        unsafe {
            let message = message.as_ref().ok_or(libc::EFAULT)?;
            if !message.msg_control.is_null() && message.msg_controllen != 0 {
                return Err(libc::ENOTSUP);
            }
            let to = Address::from_c(message.msg_name.cast(), message.msg_namelen);
            send_pieces(fd, pieces_of(message.msg_iov, message.msg_iovlen)?, flags, to)
        }
    })
}

/// # Safety
/// As of `write(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rwrite(fd: c_int, buffer: *const c_void, bytes: size_t) -> ssize_t {
    // SAFETY: the C contract.
    unsafe { rsend(fd, buffer, bytes, 0) }
}

/// # Safety
/// As of `writev(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rwritev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
    answer(|| {
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        // SAFETY: the C contract.
        unsafe { send_pieces(fd, pieces_of(list, count)?, 0, None) }
    })
}

/// # Safety
/// As of `recv(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rrecv(fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the C contract.
    unsafe { rrecvfrom(fd, buffer, bytes, flags, ptr::null_mut(), ptr::null_mut()) }
}

/// # Safety
/// As of `recvfrom(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rrecvfrom(
    fd: c_int,
    buffer: *mut c_void,
    bytes: size_t,
    flags: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    let piece = [iovec { iov_base: buffer, iov_len: bytes }];
    // SAFETY: the C contract.
    answer(|| unsafe { receive_pieces(fd, &piece, flags, from, length) }.map(|(bytes, _)| bytes))
}

/// # Safety
/// As of `recvmsg(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rrecvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    answer(|| {
        // SAFETY: the C contract.
        unsafe {
            let message = message.as_mut().ok_or(libc::EFAULT)?;
            let list = pieces_of(message.msg_iov, message.msg_iovlen)?;
            let length = &raw mut message.msg_namelen;
            let (bytes, cut) = receive_pieces(fd, list, flags, message.msg_name.cast(), length)?;
            message.msg_controllen = 0;
            message.msg_flags = if cut { libc::MSG_TRUNC } else { 0 };
            Ok(bytes)
        }
    })
}

/// # Safety
/// As of `read(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rread(fd: c_int, buffer: *mut c_void, bytes: size_t) -> ssize_t {
    // SAFETY: the C contract.
    unsafe { rrecv(fd, buffer, bytes, 0) }
}

/// # Safety
/// As of `readv(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rreadv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
    answer(|| {
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        // SAFETY: the C contract.
        let list = unsafe { pieces_of(list, count)? };
        // SAFETY: the C contract.
        unsafe { receive_pieces(fd, list, 0, ptr::null_mut(), ptr::null_mut()) }.map(|(bytes, _)| bytes)
    })
}

/// # Safety
/// As of `poll(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpoll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    answer(|| {
        if count > POLL_MAX {
            return Err(libc::EINVAL);
        }
        let deadline = match u64::try_from(timeout_ms) {
            Ok(ms) => Deadline::after(Some(Duration::from_millis(ms))),
            Err(_) => Deadline::never(),
        };
        // SAFETY: the C contract.
        let fds = if count == 0 { &mut [] } else { unsafe { slice::from_raw_parts_mut(fds, count as usize) } };
        poll::poll(fds, deadline).map(usize::cast_signed)
    })
}

/// # Safety
/// As of `select(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    answer(|| {
        // SAFETY: the C contract.
        unsafe {
            let mut entries = poll::entries_of_sets(count, [read, write, except].map(<*mut fd_set>::cast_const));
            let deadline = match timeout.as_ref() {
                None => Deadline::never(),
                Some(time) => {
                    let seconds = u64::try_from(time.tv_sec).map_err(|_| libc::EINVAL)?;
                    let micros = u64::try_from(time.tv_usec).map_err(|_| libc::EINVAL)?;
                    Deadline::after(Some(Duration::from_secs(seconds) + Duration::from_micros(micros)))
                }
            };
            poll::poll(&mut entries, deadline)?;
            poll::entries_to_sets(&entries, [read, write, except]).map(|bits| bits as isize)
        }
    })
}

/// As `epoll_create1(2)`; O_NONBLOCK may be among the flags.
#[unsafe(no_mangle)]
pub extern "C" fn repoll_create(flags: c_int) -> c_int {
    answer(|| epoll::create(flags).map(|fd| fd as isize))
}

/// # Safety
/// As of `epoll_ctl(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn repoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: the C contract.
    answer(|| done(epoll::control(epoll, operation, fd, unsafe { event.as_ref() }.copied())))
}

/// # Safety
/// As of `epoll_wait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn repoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int) -> c_int {
    answer(|| {
        let count = usize::try_from(count).ok().filter(|count| *count != 0).ok_or(libc::EINVAL)?;
        if events.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: the C contract.
        let out = unsafe { slice::from_raw_parts_mut(events, count) };
        let deadline = u64::try_from(timeout_ms).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        epoll::wait(epoll, out, deadline).map(usize::cast_signed)
    })
}

/// # Safety
/// As of `getpeername(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rgetpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    answer(|| match find(fd)? {
        Socket::Stream(socket)
            if socket.connected_link().is_none()
                && socket.ready_link(true, Deadline::never()).is_err()
                // An accepted socket has a peer before it hears of it.
                && socket.setup().phase != Phase::Accepting =>
        {
            Err(libc::ENOTCONN)
        }
        Socket::Stream(socket) => {
            // SAFETY: the C contract.
            unsafe { socket.id.peer_address().to_c(address, length) };
            Ok(0)
        }
        // SAFETY: the C contract.
        Socket::Datagram(socket) => checked(unsafe { libc::getpeername(socket.fd(), address, length) }).map(|_| 0),
    })
}

/// # Safety
/// As of `getsockname(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rgetsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    answer(|| match find(fd)? {
        Socket::Stream(socket) => {
            let own = socket.id.local_address();
            let own = if own.to_std().is_some() { own } else { Address::unspecified(socket.family) };
            // SAFETY: the C contract.
            unsafe { own.to_c(address, length) };
            Ok(0)
        }
        // SAFETY: the C contract.
        Socket::Datagram(socket) => checked(unsafe { libc::getsockname(socket.fd(), address, length) }).map(|_| 0),
    })
}

/// # Safety
/// As of `setsockopt(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsetsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    answer(|| {
        let socket = find(fd)?;
        if value.is_null() || length > OPTION_BYTES_MAX {
            return Err(libc::EINVAL);
        }
        // SAFETY: the C contract.
        let value = unsafe { bytes_of(value, length as usize) };
        done(match socket {
            Socket::Stream(socket) => socket.set_option(level, name, value),
            Socket::Datagram(socket) => socket.set_option(level, name, value),
        })
    })
}

/// # Safety
/// As of `getsockopt(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rgetsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    answer(|| {
        let socket = find(fd)?;
        if value.is_null() || length.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: the C contract.
        let room = unsafe { *length } as usize;
        let bytes = match socket {
            Socket::Stream(socket) => socket.option(level, name, room)?,
            Socket::Datagram(socket) => socket.option(level, name, room)?,
        };
        let count = bytes.len().min(room);
        // SAFETY: the C contract.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), count);
            *length = count as socklen_t;
        }
        Ok(0)
    })
}

/// `rfcntl(fd, command, ...)`. The one further argument of a variadic C call stands where a third
/// one would.
#[unsafe(no_mangle)]
pub extern "C" fn rfcntl(fd: c_int, command: c_int, argument: libc::c_long) -> c_int {
    answer(|| {
        let socket = find(fd)?;
        let (status, descriptor) = match &socket {
            Socket::Stream(socket) => (&socket.status_flags, &socket.descriptor_flags),
            Socket::Datagram(socket) => (&socket.status_flags, &socket.descriptor_flags),
        };
        let argument = argument as c_int;
        match command {
            libc::F_GETFL => return Ok(status.load(Ordering::Relaxed) as isize),
            libc::F_SETFL => status.store(argument & !libc::O_ACCMODE | libc::O_RDWR, Ordering::Relaxed),
            libc::F_GETFD => return Ok(descriptor.load(Ordering::Relaxed) as isize),
            libc::F_SETFD => {
                descriptor.store(argument, Ordering::Relaxed);
                // SAFETY: no pointers.
                checked(unsafe { libc::fcntl(socket.fd(), libc::F_SETFD, argument) })?;
            }
            _ => return Err(libc::ENOTSUP),
        }
        Ok(0)
    })
}

/// # Safety
/// `buffer` is valid for `bytes` until it is unmapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riomap(
    fd: c_int,
    buffer: *mut c_void,
    bytes: size_t,
    protection: c_int,
    _flags: c_int,
    offset: off_t,
) -> off_t {
    answer(|| match find(fd)? {
        Socket::Stream(socket) => socket.map(buffer, bytes, protection, offset).map(|offset| offset as isize),
        Socket::Datagram(_) => Err(libc::EINVAL),
    })
}

/// # Safety
/// None: an unknown buffer is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riounmap(fd: c_int, buffer: *mut c_void, bytes: size_t) -> c_int {
    answer(|| match find(fd)? {
        Socket::Stream(socket) => done(socket.unmap(buffer, bytes)),
        Socket::Datagram(_) => Err(libc::EINVAL),
    })
}

/// # Safety
/// `buffer` is valid for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riowrite(
    fd: c_int,
    buffer: *const c_void,
    bytes: size_t,
    offset: off_t,
    flags: c_int,
) -> size_t {
    let piece = [iovec { iov_base: buffer.cast_mut(), iov_len: bytes }];
    let written: ssize_t = answer(|| match find(fd)? {
        Socket::Stream(socket) => {
            // SAFETY: the C contract.
            socket.write_mapped(unsafe { Pieces::new(&piece) }, offset, flags).map(usize::cast_signed)
        }
        Socket::Datagram(_) => Err(libc::EINVAL),
    });
    written.cast_unsigned()
}
