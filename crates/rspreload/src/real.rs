//! The functions that this library stands before (the next ones of their names), and those of
//! `librdmacm.so.1`.
use libc::{
    FILE, c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pollfd, sigset_t,
    size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

macro_rules! next {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)*) => {
        $(
            /// The next function of this name.
            ///
            /// # Safety
            /// The function's own contract.
            #[inline]
            pub unsafe fn $name($($argument: $kind),*) -> $answer {
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
                // Relaxed: an address of code, the same whoever looks it up.
                let mut found = FOUND.load(Ordering::Relaxed);
                if found.is_null() {
                    found = look_up(const { name_of(concat!(stringify!($name), "\0")) });
                    FOUND.store(found, Ordering::Relaxed);
                }
                // SAFETY: the C library's function of this name has this type; the arguments are
                // this function's contract.
                unsafe {
                    let function: unsafe extern "C" fn($($kind),*) -> $answer = std::mem::transmute(found);
                    function($($argument),*)
                }
            }
        )*
    };
}

const fn name_of(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name with a zero in it"),
    }
}

#[cold]
fn look_up(name: &'static CStr) -> *mut c_void {
    // SAFETY: a string that ends in zero.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !found.is_null() {
        return found;
    }
    // A program may look these up in any glibc, and this library has them: of 2.28 and 2.34.
    match name.to_bytes() {
        b"fcntl64" => look_up(c"fcntl"),
        b"close_range" => crate::older::close_range as *mut c_void,
        b"closefrom" => crate::older::closefrom as *mut c_void,
        // glibc 2.17 has all others: without one the process can't go on.
        _ => std::process::abort(),
    }
}

next! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int;
    connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    recv(fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    read(fd: c_int, buffer: *mut c_void, bytes: size_t) -> ssize_t;
    readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t;
    send(fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int, to: *const sockaddr, length: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    write(fd: c_int, buffer: *const c_void, bytes: size_t) -> ssize_t;
    writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    sendfile(to: c_int, from: c_int, offset: *mut off_t, bytes: size_t) -> ssize_t;
    poll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout_ms: c_int, mask: *const sigset_t) -> c_int;
    getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int;
    fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(from: c_int, to: c_int) -> c_int;
    dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fclose(stream: *mut FILE) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom(first: c_int) -> ();
}

unsafe extern "C" {
    pub fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    pub fn rbind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    pub fn rlisten(fd: c_int, backlog: c_int) -> c_int;
    pub fn raccept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    pub fn rconnect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    pub fn rshutdown(fd: c_int, how: c_int) -> c_int;
    pub fn rclose(fd: c_int) -> c_int;
    pub fn rrecv(fd: c_int, buffer: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t;
    pub fn rrecvfrom(
        fd: c_int,
        buffer: *mut c_void,
        bytes: size_t,
        flags: c_int,
        from: *mut sockaddr,
        length: *mut socklen_t,
    ) -> ssize_t;
    pub fn rrecvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    pub fn rreadv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t;
    pub fn rsend(fd: c_int, buffer: *const c_void, bytes: size_t, flags: c_int) -> ssize_t;
    pub fn rsendto(
        fd: c_int,
        buffer: *const c_void,
        bytes: size_t,
        flags: c_int,
        to: *const sockaddr,
        length: socklen_t,
    ) -> ssize_t;
    pub fn rsendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    pub fn rwritev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t;
    pub fn rpoll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int;
    pub fn rgetpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    pub fn rgetsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    pub fn rsetsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t) -> c_int;
    pub fn rgetsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int;
    pub fn rfcntl(fd: c_int, command: c_int, ...) -> c_int;
}

/// An errno, as C keeps it.
#[must_use]
pub fn errno() -> c_int {
    // SAFETY: glibc gives the address of this thread's errno.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(number: c_int) -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = number };
    -1
}
