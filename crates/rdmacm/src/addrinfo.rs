//! `rdma_getaddrinfo`: the C library's names and services, in connection management's terms.
use crate::address::on_heap;
use crate::addrinfo_list::rdma_freeaddrinfo;
use crate::boundary::{Outcome, guarded, set_errno};
use crate::process::Process;
use freeflow_abi::*;
use libc::{AF_INET6, addrinfo, sockaddr, sockaddr_in6};
use std::ffi::{c_char, c_int};
use std::mem;
use std::ptr;

/// Failure: an errno, or an answer of `getaddrinfo` (`EAI_*`), which the program gets as it is.
enum Failure {
    Errno(c_int),
    Lookup(c_int),
}

impl From<c_int> for Failure {
    fn from(errno: c_int) -> Self {
        Self::Errno(errno)
    }
}

/// In the C library's terms.
fn lookup_hints(hints: &rdma_addrinfo) -> addrinfo {
    // SAFETY: integers and pointers only; all zeroes are valid.
    let mut out: addrinfo = unsafe { mem::zeroed() };
    if hints.ai_flags & RAI_PASSIVE != 0 {
        out.ai_flags |= libc::AI_PASSIVE;
    }
    if hints.ai_flags & RAI_NUMERICHOST != 0 {
        out.ai_flags |= libc::AI_NUMERICHOST;
    }
    if hints.ai_family != AF_IB {
        out.ai_family = hints.ai_family;
    }
    out.ai_socktype = match hints.ai_qp_type as u32 {
        IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => libc::SOCK_STREAM,
        IBV_QPT_UD => libc::SOCK_DGRAM,
        _ => 0,
    };
    out.ai_protocol = match (hints.ai_port_space as u32, out.ai_socktype) {
        (RDMA_PS_TCP, _) | (RDMA_PS_IB, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
        (RDMA_PS_IPOIB | RDMA_PS_UDP, _) | (RDMA_PS_IB, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
        _ => 0,
    };
    out
}

/// An IPv6 address as one of family AF_IB, for who asks for that family and numbers.
///
/// # Safety
/// `address` is valid for so many bytes.
unsafe fn as_infiniband(address: *const sockaddr, bytes: u32, port_space: c_int) -> Outcome<*mut sockaddr> {
    // SAFETY: this function's contract; a socket address of another family is not touched.
    unsafe {
        if bytes as usize != size_of::<sockaddr_in6>() || c_int::from((*address).sa_family) != AF_INET6 {
            return Err(libc::EINVAL);
        }
        let ip = address.cast::<sockaddr_in6>().read_unaligned();
        let port = u16::from_be(ip.sin6_port);
        let mut mask = if port_space != 0 { RDMA_IB_IP_PS_MASK } else { 0 };
        if port != 0 {
            mask |= RDMA_IB_IP_PORT_MASK;
        }
        let infiniband = sockaddr_ib {
            sib_family: AF_IB as u16,
            sib_pkey: crate::address::PKEY_DEFAULT.to_be(),
            sib_flowinfo: ip.sin6_flowinfo,
            sib_addr: ip.sin6_addr.s6_addr,
            sib_sid: (((port_space as u64) << 16) + u64::from(port)).to_be(),
            sib_sid_mask: mask.to_be(),
            sib_scope_id: u64::from(ip.sin6_scope_id),
        };
        on_heap((&raw const infiniband).cast(), size_of::<sockaddr_ib>() as u32)
    }
}

/// # Safety
/// `found` is what `getaddrinfo` gave.
unsafe fn convert(out: &mut rdma_addrinfo, hints: &rdma_addrinfo, found: &addrinfo) -> Outcome<()> {
    out.ai_qp_type = match (hints.ai_qp_type, found.ai_socktype) {
        (0, libc::SOCK_STREAM) => IBV_QPT_RC as c_int,
        (0, libc::SOCK_DGRAM) => IBV_QPT_UD as c_int,
        (named, _) => named,
    };
    out.ai_port_space = match (hints.ai_port_space, found.ai_protocol) {
        (0, libc::IPPROTO_TCP) => RDMA_PS_TCP as c_int,
        (0, libc::IPPROTO_UDP) => RDMA_PS_UDP as c_int,
        (named, _) => named,
    };
    let wants_infiniband =
        hints.ai_flags & RAI_FAMILY != 0 && hints.ai_family == AF_IB && hints.ai_flags & RAI_NUMERICHOST != 0;
    // SAFETY: this function's contract.
    let (address, bytes) = unsafe {
        if wants_infiniband {
            let address = as_infiniband(found.ai_addr, found.ai_addrlen, out.ai_port_space)?;
            (address, size_of::<sockaddr_ib>() as u32)
        } else {
            (on_heap(found.ai_addr, found.ai_addrlen)?, found.ai_addrlen)
        }
    };
    out.ai_family = if wants_infiniband { AF_IB } else { found.ai_family };
    // SAFETY: a C string or null.
    let name = unsafe { if found.ai_canonname.is_null() { ptr::null_mut() } else { libc::strdup(found.ai_canonname) } };
    if found.ai_flags & libc::AI_PASSIVE != 0 {
        out.ai_flags = RAI_PASSIVE;
        (out.ai_src_addr, out.ai_src_len, out.ai_src_canonname) = (address, bytes, name);
    } else {
        (out.ai_dst_addr, out.ai_dst_len, out.ai_dst_canonname) = (address, bytes, name);
    }
    Ok(())
}

/// # Safety
/// The pointers are valid; `given` is null or the caller's hints.
unsafe fn fill(
    out: &mut rdma_addrinfo,
    node: *const c_char,
    service: *const c_char,
    given: *const rdma_addrinfo,
) -> Result<(), Failure> {
    // SAFETY: this function's contract; integers and pointers only, all zeroes are valid.
    unsafe {
        let hints = given.as_ref().copied().unwrap_or_else(|| mem::zeroed());
        if node.is_null() && service.is_null() {
            out.ai_flags = hints.ai_flags;
            out.ai_family = hints.ai_family;
            (out.ai_qp_type, out.ai_port_space) = (hints.ai_qp_type, hints.ai_port_space);
            if hints.ai_dst_len > 0 {
                out.ai_dst_addr = on_heap(hints.ai_dst_addr, hints.ai_dst_len)?;
                out.ai_dst_len = hints.ai_dst_len;
            }
        } else {
            let wanted = lookup_hints(&hints);
            let mut found: *mut addrinfo = ptr::null_mut();
            let wanted = if given.is_null() { ptr::null() } else { &raw const wanted };
            let code = libc::getaddrinfo(node, service, wanted, &raw mut found);
            if code != 0 {
                return Err(Failure::Lookup(code));
            }
            let outcome = found.as_ref().map_or(Err(libc::ENOENT), |found| convert(out, &hints, found));
            libc::freeaddrinfo(found);
            outcome?;
        }
        if out.ai_src_len == 0 && hints.ai_src_len > 0 {
            out.ai_src_addr = on_heap(hints.ai_src_addr, hints.ai_src_len)?;
            out.ai_src_len = hints.ai_src_len;
        }
    }
    Ok(())
}

/// # Safety
/// The pointers are valid.
unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> Result<*mut rdma_addrinfo, Failure> {
    if node.is_null() && service.is_null() && hints.is_null() {
        return Err(Failure::Errno(libc::EINVAL));
    }
    Process::devices()?;
    // SAFETY: this function's contract; calloc's memory is that long, and zeroes are valid.
    unsafe {
        if hints.as_ref().is_some_and(|hints| hints.ai_flags & RAI_SA != 0) {
            // Services of a subnet administrator: there is none.
            return Err(Failure::Errno(libc::EOPNOTSUPP));
        }
        let out = libc::calloc(1, size_of::<rdma_addrinfo>()).cast::<rdma_addrinfo>();
        if out.is_null() {
            return Err(Failure::Errno(libc::ENOMEM));
        }
        fill(&mut *out, node, service, hints).inspect_err(|_| rdma_freeaddrinfo(out))?;
        Ok(out)
    }
}

/// `rdma_getaddrinfo(3)`: 0; -1 with errno; or an `EAI_*` of the C library.
///
/// # Safety
/// The pointers are valid; `node`, `service` and `hints` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    found: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: the C contract.
    let outcome = guarded(|| Ok(unsafe { look_up(node, service, hints) }));
    match outcome.unwrap_or_else(|errno| Err(Failure::Errno(errno))) {
        Ok(list) => {
            // SAFETY: the C contract.
            unsafe { *found = list };
            0
        }
        Err(Failure::Errno(errno)) => {
            set_errno(errno);
            -1
        }
        Err(Failure::Lookup(code)) => code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hints() -> rdma_addrinfo {
        // SAFETY: integers and pointers only.
        unsafe { mem::zeroed() }
    }

    fn ask(node: &std::ffi::CStr, service: &std::ffi::CStr, hints: &rdma_addrinfo) -> rdma_addrinfo {
        let mut out = self::hints();
        // SAFETY: all valid.
        let filled = unsafe { fill(&mut out, node.as_ptr(), service.as_ptr(), hints) };
        assert!(filled.is_ok());
        out
    }

    #[test]
    fn numbers_become_addresses_of_their_side() {
        let mut wanted = hints();
        wanted.ai_port_space = RDMA_PS_TCP as c_int;
        let active = ask(c"10.1.0.7", c"7471", &wanted);
        assert_eq!((active.ai_family, active.ai_dst_len, active.ai_src_len), (libc::AF_INET, 16, 0));
        assert_eq!((active.ai_qp_type, active.ai_port_space), (IBV_QPT_RC as c_int, RDMA_PS_TCP as c_int));
        // SAFETY: an address of that family.
        let address = unsafe { crate::address::from_c(active.ai_dst_addr) }.unwrap();
        assert_eq!(address.port, 7471);
        wanted.ai_flags = RAI_PASSIVE | RAI_NUMERICHOST;
        let passive = ask(c"::", c"7471", &wanted);
        assert_eq!((passive.ai_flags, passive.ai_family, passive.ai_src_len), (RAI_PASSIVE, AF_INET6, 28));
    }

    #[test]
    fn the_family_of_infiniband_can_be_asked_for() {
        let mut wanted = hints();
        (wanted.ai_flags, wanted.ai_family) = (RAI_FAMILY | RAI_NUMERICHOST, AF_IB);
        wanted.ai_port_space = RDMA_PS_TCP as c_int;
        let found = ask(c"fd00::7", c"7471", &wanted);
        assert_eq!((found.ai_family, found.ai_dst_len), (AF_IB, 48));
        // SAFETY: an address of that family.
        let address = unsafe { crate::address::from_c(found.ai_dst_addr) }.unwrap();
        assert_eq!((address.port, address.gid), (7471, freeflow_verbs::Gid::from_ip("fd00::7".parse().unwrap())));
    }
}
