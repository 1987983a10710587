//! The calls of one socket: made, connected, read, written, closed.
use crate::names::{self, Name};
use crate::real::{self, errno, set_errno};
use crate::{epoll, forks, options, queries, rules, table};
use libc::{
    FILE, c_int, c_long, c_uint, c_ulong, c_void, iovec, msghdr, off_t, pollfd, size_t, sockaddr, socklen_t, ssize_t,
};
use std::ptr;
use table::{inside, rsocket_of};

/// How long a connect that does not block waits for a refusal, since then the ordinary socket must
/// be tried.
const REFUSAL_WAIT_MS: c_int = 50;
const SENDFILE_BYTES: usize = 1 << 16;
const TYPE_FLAGS: c_int = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: no pointers.
    unsafe {
        let fd = real::socket(domain, kind, protocol);
        // Left over from a descriptor that was closed behind this library's back.
        table::forget(fd);
        let wanted = matches!(domain, libc::AF_INET | libc::AF_INET6) && !table::is_inside();
        if fd < 0 || !wanted || !inside(|| rules::wants_rsocket(domain, kind & !TYPE_FLAGS, protocol)) {
            return fd;
        }
        let saved = errno();
        let rsocket = inside(|| real::rsocket(domain, kind, protocol));
        if rsocket < 0 {
            // Without a vNIC all is as it was.
            set_errno(saved);
            return fd;
        }
        options::set_sizes(rsocket);
        options::set_impatient(rsocket);
        if !table::insert(fd, rsocket) {
            inside(|| real::rclose(rsocket));
        }
        fd
    }
}

/// Makes the descriptor an ordinary socket again.
pub fn fall_back(fd: c_int) {
    epoll::leave_to_kernel(fd);
    table::forget(fd);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        if let Some(rsocket) = rsocket_of(fd) {
            // Nobody outside the container may reach it, and to rdma_cm loopback is the vNIC.
            if names::is_loopback(address, length) && queries::is_stream(rsocket) && !table::was_bound(fd) {
                let answer = real::bind(fd, address, length);
                if answer == 0 {
                    fall_back(fd);
                }
                return answer;
            }
            if inside(|| real::rbind(rsocket, address, length)) == 0 {
                table::note_bound(fd);
                return 0;
            }
            if matches!(errno(), libc::EADDRINUSE | libc::EINVAL) {
                return -1;
            }
            // The connection manager calls a conflict with a wildcard that too, where sockets say
            // that it is in use.
            if errno() == libc::EADDRNOTAVAIL && is_of_vnic(address, length) {
                return set_errno(libc::EADDRINUSE);
            }
            // No address of a vNIC.
            fall_back(fd);
        }
        real::bind(fd, address, length)
    }
}

/// Whether rsockets can have this address, whatever the port.
///
/// # Safety
/// As of `bind(2)`.
unsafe fn is_of_vnic(address: *const sockaddr, length: socklen_t) -> bool {
    // SAFETY: this function's contract: an address of an internet family is as long as its type,
    // else it is refused before.
    unsafe {
        let mut any_port: libc::sockaddr_storage = std::mem::zeroed();
        let bytes = (length as usize).min(size_of::<libc::sockaddr_storage>());
        ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut any_port).cast(), bytes);
        // The port is at the same place in both families.
        (*(&raw mut any_port).cast::<libc::sockaddr_in>()).sin_port = 0;
        let domain = c_int::from(any_port.ss_family);
        inside(|| {
            let probe = real::rsocket(domain, libc::SOCK_STREAM, 0);
            let bound = probe >= 0 && real::rbind(probe, (&raw const any_port).cast(), length) == 0;
            if probe >= 0 {
                real::rclose(probe);
            }
            bound
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: no pointers.
    match rsocket_of(fd) {
        Some(rsocket) => {
            // SAFETY: the C contract.
            let answer = inside(|| unsafe { real::rlisten(rsocket, backlog) });
            // Reports about a socket without a peer hold no more.
            table::note_read(fd);
            answer
        }
        // SAFETY: as above.
        None => unsafe { real::listen(fd, backlog) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the C contract.
    unsafe { accept4(fd, address, length, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        let Some(rsocket) = rsocket_of(fd) else { return real::accept4(fd, address, length, flags) };
        let (mut peer, mut bytes) = names::none();
        let accepted = inside(|| real::raccept(rsocket, (&raw mut peer).cast(), &raw mut bytes));
        table::note_read(fd);
        if accepted < 0 {
            return -1;
        }
        let domain = queries::family(accepted);
        let new = real::socket(domain, libc::SOCK_STREAM | flags, 0);
        if new < 0 || !table::insert(new, accepted) {
            let error = if new < 0 { errno() } else { libc::EMFILE };
            inside(|| real::rclose(accepted));
            return set_errno(error);
        }
        table::note_begun(accepted);
        names::write(&names::in_family(domain, (peer, bytes)), address, length);
        // Unlike an rsocket, a socket has nothing of the listener's flags.
        let status = if flags & libc::SOCK_NONBLOCK != 0 { libc::O_NONBLOCK } else { 0 };
        inside(|| real::rfcntl(accepted, libc::F_SETFL, c_long::from(status)));
        new
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        if let Some(rsocket) = rsocket_of(fd) {
            let bound_to = if table::was_bound(fd) { queries::name(real::rgetsockname, rsocket) } else { None };
            if names::is_loopback(address, length)
                && queries::is_stream(rsocket)
                && !table::has_begun(rsocket)
                && let Some(answer) = connect_here(fd, bound_to.as_ref(), address, length)
            {
                let saved = errno();
                fall_back(fd);
                set_errno(saved);
                return answer;
            }
            table::note_begun(rsocket);
            let connected = inside(|| real::rconnect(rsocket, address, length)) == 0;
            table::note_written(fd);
            if connected {
                return 0;
            }
            let pending = errno() == libc::EINPROGRESS;
            if matches!(errno(), libc::EALREADY | libc::EISCONN | libc::EINTR)
                || (pending && !was_refused(|entry| inside(|| real::rpoll(entry, 1, REFUSAL_WAIT_MS)), rsocket))
            {
                return -1;
            }
            fall_back(fd);
            if bound_to.is_some_and(|name| !bind_as(fd, &name)) {
                return -1;
            }
        }
        real::connect(fd, address, length)
    }
}

/// Connects to who listens in this container as an ordinary socket. `None`: nobody does, and the
/// socket is as it was.
///
/// # Safety
/// As of `connect(2)`.
unsafe fn connect_here(
    fd: c_int,
    bound_to: Option<&Name>,
    address: *const sockaddr,
    length: socklen_t,
) -> Option<c_int> {
    // SAFETY: this function's contract; one entry.
    unsafe {
        if bound_to.is_some_and(|name| !bind_as(fd, name)) {
            return None;
        }
        let mut answer = real::connect(fd, address, length);
        if answer != 0 && errno() == libc::EINPROGRESS && was_refused(|entry| real::poll(entry, 1, REFUSAL_WAIT_MS), fd)
        {
            // This call says why, and is the end of the connection.
            answer = real::connect(fd, address, length);
        }
        (answer == 0 || matches!(errno(), libc::EINPROGRESS | libc::EINTR)).then_some(answer)
    }
}

/// Binds the ordinary socket to what its rsocket is bound to. Whether it is.
fn bind_as(fd: c_int, (name, bytes): &Name) -> bool {
    // SAFETY: an address of that length. EINVAL: it was bound when it was tried first.
    unsafe { real::bind(fd, ptr::from_ref(name).cast(), *bytes) == 0 || errno() == libc::EINVAL }
}

/// Whether a connection that was begun has failed already. Leaves EINPROGRESS.
fn was_refused(poll: impl FnOnce(*mut pollfd) -> c_int, fd: c_int) -> bool {
    let mut entry = pollfd { fd, events: libc::POLLOUT, revents: 0 };
    poll(&raw mut entry);
    set_errno(libc::EINPROGRESS);
    entry.revents & (libc::POLLERR | libc::POLLHUP) != 0
}

/// # Safety
/// As of `getsockname(2)`.
unsafe fn write_name(name: Option<Name>, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    let Some(name) = name else { return -1 };
    // SAFETY: this function's contract.
    unsafe { names::write(&name, address, length) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match rsocket_of(fd) {
        Some(rsocket) => {
            // SAFETY: no pointers.
            let answer = inside(|| unsafe { real::rshutdown(rsocket, how) });
            table::note_read(fd);
            table::note_written(fd);
            answer
        }
        // SAFETY: as above.
        None => unsafe { real::shutdown(fd, how) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    let_go(fd);
    // SAFETY: no pointers.
    unsafe { real::close(fd) }
}

/// Before a descriptor is closed, whoever does it: afterwards its number may be another thread's.
fn let_go(fd: c_int) {
    epoll::handle_close(fd);
    table::forget(fd);
    forks::forget_names(fd);
}

/// The C library closes a stream's descriptor by itself.
///
/// # Safety
/// Null, or a stream.
unsafe fn let_go_of_stream(stream: *mut FILE) {
    if !stream.is_null() {
        let saved = errno();
        // SAFETY: this function's contract: a stream that is open. One of memory has no descriptor.
        let fd = unsafe { libc::fileno(stream) };
        set_errno(saved);
        let_go(fd);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        let_go_of_stream(stream);
        real::fclose(stream)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // With other flags nothing is closed, or for this thread alone.
    if flags == 0 {
        table::known(first, last).for_each(let_go);
    }
    // SAFETY: no pointers.
    unsafe { real::close_range(first, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    table::known(first.max(0).cast_unsigned(), c_uint::MAX).for_each(let_go);
    // SAFETY: no pointers.
    unsafe { real::closefrom(first) }
}

/// Calls that move bytes, and what the table then notes.
macro_rules! moves {
    ($note:ident: $($name:ident($($argument:ident: $kind:ty),*) -> $rsocket:ident($($given:expr),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(fd: c_int, $($argument: $kind),*) -> ssize_t {
                // SAFETY: the C contract.
                match rsocket_of(fd) {
                    // SAFETY: the C contract.
                    None => unsafe { real::$name(fd, $($argument),*) },
                    Some(rsocket) => {
                        // SAFETY: the C contract.
                        let count = inside(|| unsafe { real::$rsocket(rsocket, $($given),*) });
                        table::$note(fd);
                        count
                    }
                }
            }
        )*
    };
}

moves! { note_read:
    recv(buffer: *mut c_void, bytes: size_t, flags: c_int) -> rrecv(buffer, bytes, flags);
    read(buffer: *mut c_void, bytes: size_t) -> rrecv(buffer, bytes, 0);
    readv(list: *const iovec, count: c_int) -> rreadv(list, count);
    recvmsg(message: *mut msghdr, flags: c_int) -> rrecvmsg(message, flags);
    recvfrom(buffer: *mut c_void, bytes: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t) ->
        rrecvfrom(buffer, bytes, flags, from, length);
}

moves! { note_written:
    send(buffer: *const c_void, bytes: size_t, flags: c_int) -> rsend(buffer, bytes, flags);
    write(buffer: *const c_void, bytes: size_t) -> rsend(buffer, bytes, 0);
    writev(list: *const iovec, count: c_int) -> rwritev(list, count);
    sendmsg(message: *const msghdr, flags: c_int) -> rsendmsg(message, flags);
    sendto(buffer: *const c_void, bytes: size_t, flags: c_int, to: *const sockaddr, length: socklen_t) ->
        rsendto(buffer, bytes, flags, to, length);
}

// Functions called by programs that were compiled with _FORTIFY_SOURCE: the room is known there,
// and is checked first.

#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, bytes: size_t, room: size_t) -> ssize_t {
    check(bytes, room);
    // SAFETY: the C contract.
    unsafe { read(fd, buffer, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __recv_chk(fd: c_int, buffer: *mut c_void, bytes: size_t, room: size_t, flags: c_int) -> ssize_t {
    check(bytes, room);
    // SAFETY: the C contract.
    unsafe { recv(fd, buffer, bytes, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    bytes: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    check(bytes, room);
    // SAFETY: the C contract.
    unsafe { recvfrom(fd, buffer, bytes, flags, from, length) }
}

/// As glibc does: a program that would overrun its buffer ends.
fn check(bytes: size_t, room: size_t) {
    if bytes > room {
        std::process::abort();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, bytes: size_t) -> ssize_t {
    let Some(rsocket) = rsocket_of(to) else {
        // SAFETY: the C contract.
        return unsafe { real::sendfile(to, from, offset, bytes) };
    };
    let mut room = vec![0u8; bytes.min(SENDFILE_BYTES)];
    // SAFETY: the C contract; the room is as long as is read.
    unsafe {
        let start = if offset.is_null() { libc::lseek(from, 0, libc::SEEK_CUR) } else { *offset };
        if start < 0 {
            return -1;
        }
        let mut done = 0;
        while done < bytes {
            let wanted = (bytes - done).min(room.len());
            let got = libc::pread(from, room.as_mut_ptr().cast(), wanted, start + done as off_t);
            if got <= 0 {
                if got < 0 && done == 0 {
                    return -1;
                }
                break;
            }
            let sent = inside(|| real::rsend(rsocket, room.as_ptr().cast(), got as usize, 0));
            table::note_written(to);
            if sent < 0 && done == 0 {
                return -1;
            }
            done += usize::try_from(sent).unwrap_or(0);
            if sent < got {
                break;
            }
        }
        if offset.is_null() {
            libc::lseek(from, start + done as off_t, libc::SEEK_SET);
        } else {
            *offset = start + done as off_t;
        }
        done.cast_signed()
    }
}

/// On x86-64 the same function.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, bytes: size_t) -> ssize_t {
    // SAFETY: the C contract.
    unsafe { sendfile(to, from, offset, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the C contract.
    match rsocket_of(fd) {
        // SAFETY: the C contract.
        Some(rsocket) => unsafe { write_name(queries::name(real::rgetpeername, rsocket), address, length) },
        // SAFETY: as above.
        None => unsafe {
            forks::write_name(fd, true, address, length).unwrap_or_else(|| real::getpeername(fd, address, length))
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the C contract.
    match rsocket_of(fd) {
        // SAFETY: the C contract.
        Some(rsocket) => unsafe { write_name(queries::name(real::rgetsockname, rsocket), address, length) },
        // SAFETY: as above.
        None => unsafe {
            forks::write_name(fd, false, address, length).unwrap_or_else(|| real::getsockname(fd, address, length))
        },
    }
}

/// A copy of the descriptor stands for the same rsocket, or is the same epoll set.
fn share(from: c_int, copy: c_int) -> c_int {
    forks::copy_names(from, copy);
    if copy < 0 {
        return copy;
    }
    let is_shared = match rsocket_of(from) {
        Some(rsocket) => !table::is_ours() || table::insert(copy, rsocket),
        None => crate::epoll::share(from, copy),
    };
    if !is_shared {
        // SAFETY: no pointers.
        unsafe { real::close(copy) };
        return set_errno(libc::EMFILE);
    }
    copy
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: no pointers.
    share(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    if from == to {
        // SAFETY: no pointers.
        return unsafe { real::dup2(from, to) };
    }
    // SAFETY: as above.
    replace(from, to, || unsafe { real::dup2(from, to) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: as above.
    replace(from, to, || unsafe { real::dup3(from, to, flags) })
}

fn replace(from: c_int, to: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let copy = call();
    if copy >= 0 && from != to {
        let_go(to);
    }
    share(from, copy)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the C contract.
    let answer = unsafe { real::fcntl(fd, command, argument) };
    after_fcntl(fd, command, argument, answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the C contract.
    let answer = unsafe { real::fcntl64(fd, command, argument) };
    after_fcntl(fd, command, argument, answer)
}

/// The ordinary socket has the flags; the rsocket follows.
fn after_fcntl(fd: c_int, command: c_int, argument: c_ulong, answer: c_int) -> c_int {
    if answer >= 0 && matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        return share(fd, answer);
    }
    let Some(rsocket) = rsocket_of(fd).filter(|_| answer >= 0) else { return answer };
    match command {
        libc::F_SETFL | libc::F_SETFD => {
            // SAFETY: no pointers.
            inside(|| unsafe { real::rfcntl(rsocket, command, argument as c_long) });
            answer
        }
        _ => answer,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(rsocket) = rsocket_of(fd) else {
        // SAFETY: the C contract.
        return unsafe { real::ioctl(fd, request, argument) };
    };
    // SAFETY: the C contract: both requests are about one number.
    unsafe {
        if request == libc::FIONREAD && !argument.is_null() {
            let mut room = [0u8; 1 << 16];
            let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
            let there = inside(|| real::rrecv(rsocket, room.as_mut_ptr().cast(), room.len(), flags));
            *argument.cast::<c_int>() = c_int::try_from(there.max(0)).unwrap_or(0);
            return 0;
        }
        let answer = real::ioctl(fd, request, argument);
        if request == libc::FIONBIO && answer == 0 {
            let status = real::fcntl(fd, libc::F_GETFL, 0);
            inside(|| real::rfcntl(rsocket, libc::F_SETFL, c_long::from(status)));
        }
        answer
    }
}

/// Says goodbye for what the program leaves open when it ends, as the kernel does for sockets.
extern "C" fn at_exit() {
    forks::wait_for_carriers();
    let linger = libc::linger { l_onoff: 1, l_linger: 1 };
    for rsocket in table::all().collect::<Vec<_>>() {
        // SAFETY: an option of that length.
        inside(|| unsafe {
            let bytes = size_of::<libc::linger>() as socklen_t;
            real::rsetsockopt(rsocket, libc::SOL_SOCKET, libc::SO_LINGER, ptr::from_ref(&linger).cast(), bytes);
            real::rclose(rsocket);
        });
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
