//! Options: the rsocket's answer counts; the ordinary socket gets it too, for the case that it
//! takes its place.
use crate::forks;
use crate::real::{self, errno, set_errno};
use crate::table::{inside, rsocket_of};
use libc::{c_int, c_void, socklen_t};

const SOL_RDMA: c_int = 0x10000;
const SIZES: [(&str, c_int); 3] = [("RS_SQ_SIZE", 0), ("RS_RQ_SIZE", 1), ("RS_INLINE", 2)];

/// Our librdmacm's own: how long to look for an address, ms.
const RDMA_RESOLVE_MS: c_int = 0x4646;

/// Options that would have no effect though they matter: a program that asks for one learns that
/// there is none, as from an older Linux.
const REFUSED: [(c_int, c_int); 13] = [
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
    (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER),
    (libc::SOL_SOCKET, SO_ATTACH_BPF),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_TCP, libc::TCP_MD5SIG),
    (libc::IPPROTO_TCP, TCP_MD5SIG_EXT),
    (libc::IPPROTO_TCP, TCP_INQ),
    (libc::IPPROTO_IP, IP_MINTTL),
    (libc::IPPROTO_IPV6, IPV6_MINHOPCOUNT),
];
// Of Linux's headers.
const SO_ATTACH_BPF: c_int = 50;
const TCP_MD5SIG_EXT: c_int = 32;
const TCP_INQ: c_int = 36;
const IP_MINTTL: c_int = 21;
const IPV6_MINHOPCOUNT: c_int = 73;

/// A peer that is not known at once is tried by the ordinary socket.
pub fn set_impatient(rsocket: c_int) {
    let none: c_int = 0;
    // SAFETY: a number.
    inside(|| unsafe { real::rsetsockopt(rsocket, SOL_RDMA, RDMA_RESOLVE_MS, (&raw const none).cast(), 4) });
}

/// Sizes that the environment sets for a new rsocket.
pub fn set_sizes(rsocket: c_int) {
    for (name, option) in SIZES {
        let value = std::env::var(name).ok().and_then(|text| text.trim().parse::<c_int>().ok());
        if let Some(value) = value.filter(|value| *value > 0) {
            // SAFETY: a number.
            inside(|| unsafe { real::rsetsockopt(rsocket, SOL_RDMA, option, (&raw const value).cast(), 4) });
        }
    }
}

/// Whether a number switches an option off.
///
/// # Safety
/// As of `setsockopt(2)`.
unsafe fn is_off(value: *const c_void, length: socklen_t) -> bool {
    // SAFETY: this function's contract.
    length as usize == size_of::<c_int>() && !value.is_null() && unsafe { value.cast::<c_int>().read_unaligned() } == 0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        let Some(rsocket) = rsocket_of(fd) else {
            let ordinary = real::setsockopt(fd, level, name, value, length);
            // The socket that a child has in a connection's place has no options of TCP or IP.
            return if level != libc::SOL_SOCKET && forks::is_inherited(fd) { 0 } else { ordinary };
        };
        let answer = inside(|| real::rsetsockopt(rsocket, level, name, value, length));
        let error = errno();
        let is_unknown = answer != 0 && error == libc::ENOTSUP;
        if is_unknown && REFUSED.contains(&(level, name)) && !is_off(value, length) {
            return set_errno(libc::ENOPROTOOPT);
        }
        let ordinary = real::setsockopt(fd, level, name, value, length);
        if is_unknown {
            // One that means nothing to an rsocket is kept by the ordinary socket, and given back.
            return ordinary;
        }
        set_errno(error);
        answer
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the C contract.
    unsafe {
        if let Some(rsocket) = rsocket_of(fd) {
            let saved = errno();
            if inside(|| real::rgetsockopt(rsocket, level, name, value, length)) == 0 {
                return 0;
            }
            if errno() != libc::ENOTSUP {
                return -1;
            }
            set_errno(saved);
        }
        real::getsockopt(fd, level, name, value, length)
    }
}
