//! Addresses: C's socket addresses, and the protocol's GIDs with ports.
use crate::boundary::Outcome;
use freeflow_abi::{AF_IB, RDMA_IB_IP_PS_MASK, rdma_socket_address, sockaddr_ib};
use freeflow_protocol::cm::CmAddress;
use freeflow_verbs::Gid;
use libc::{AF_INET, AF_INET6, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::ffi::c_int;
use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The only partition.
pub(crate) const PKEY_DEFAULT: u16 = 0xffff;
/// Bytes of an address of that family; 0 for one that connection management does not know.
pub(crate) const fn length_of_family(family: c_int) -> usize {
    match family {
        AF_INET => size_of::<sockaddr_in>(),
        AF_INET6 => size_of::<sockaddr_in6>(),
        AF_IB => size_of::<sockaddr_ib>(),
        _ => 0,
    }
}

/// The family of an address; EINVAL for NULL and unknown ones.
///
/// # Safety
/// `address` is null or as long as its family says.
pub(crate) unsafe fn family(address: *const sockaddr) -> Outcome<c_int> {
    if address.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: every address begins with its family.
    let family = c_int::from(unsafe { (&raw const (*address).sa_family).read_unaligned() });
    if length_of_family(family) == 0 { Err(libc::EINVAL) } else { Ok(family) }
}

/// A copy in the union that identifiers have.
///
/// # Safety
/// As for [`family`].
pub(crate) unsafe fn copied(address: *const sockaddr) -> Outcome<rdma_socket_address> {
    // SAFETY: this function's contract; all zeroes are a valid address of no family.
    unsafe {
        let bytes = length_of_family(family(address)?);
        let mut copy: rdma_socket_address = mem::zeroed();
        std::ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut copy).cast::<u8>(), bytes);
        Ok(copy)
    }
}

/// The address as the router takes it. EINVAL for unknown families.
///
/// # Safety
/// As for [`family`].
pub(crate) unsafe fn from_c(address: *const sockaddr) -> Outcome<CmAddress> {
    // SAFETY: this function's contract; the family says which member holds, and the copy is
    // aligned.
    unsafe {
        let copy = copied(address)?;
        Ok(match c_int::from(copy.addr.sa_family) {
            AF_INET => {
                let ip = Ipv4Addr::from(copy.sin.sin_addr.s_addr.to_ne_bytes());
                CmAddress { gid: Gid::from_ip(ip.into()), port: u16::from_be(copy.sin.sin_port) }
            }
            AF_INET6 => CmAddress { gid: Gid(copy.sin6.sin6_addr.s6_addr), port: u16::from_be(copy.sin6.sin6_port) },
            _ => {
                let infiniband = mem::transmute_copy::<rdma_socket_address, sockaddr_ib>(&copy);
                CmAddress { gid: Gid(infiniband.sib_addr), port: u64::from_be(infiniband.sib_sid) as u16 }
            }
        })
    }
}

/// Says to the program where an end is, in the family that stands there already if it can hold it.
pub(crate) fn store(to: &mut rdma_socket_address, address: CmAddress) {
    // SAFETY: every member begins with the family, and all bytes of the union are there.
    let known = c_int::from(unsafe { to.addr.sa_family });
    let as_ipv4 = address.gid.to_ipv4().filter(|_| known != AF_INET6 && known != AF_IB);
    // SAFETY: the union holds any of the members; all zeroes are valid for each.
    unsafe {
        if known == AF_IB {
            let infiniband = &mut *(&raw mut *to).cast::<sockaddr_ib>();
            infiniband.sib_addr = address.gid.0;
            let space = u64::from_be(infiniband.sib_sid) & RDMA_IB_IP_PS_MASK;
            infiniband.sib_sid = (space | u64::from(address.port)).to_be();
        } else if let Some(ip) = as_ipv4 {
            *to = mem::zeroed();
            to.sin.sin_family = AF_INET as u16;
            to.sin.sin_port = address.port.to_be();
            to.sin.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
        } else {
            // The zone of a link-local address stays.
            let zone = if known == AF_INET6 { to.sin6.sin6_scope_id } else { 0 };
            *to = mem::zeroed();
            to.sin6.sin6_family = AF_INET6 as u16;
            to.sin6.sin6_port = address.port.to_be();
            to.sin6.sin6_addr.s6_addr = address.gid.0;
            to.sin6.sin6_scope_id = zone;
        }
    }
}

/// Port of an address, network byte order; 0 for an address of no family.
pub(crate) fn port(address: &rdma_socket_address) -> u16 {
    // SAFETY: the family says which member holds.
    unsafe {
        match c_int::from(address.addr.sa_family) {
            AF_INET => address.sin.sin_port,
            AF_INET6 => address.sin6.sin6_port,
            AF_IB => {
                let infiniband = mem::transmute_copy::<rdma_socket_address, sockaddr_ib>(address);
                (u64::from_be(infiniband.sib_sid) as u16).to_be()
            }
            _ => 0,
        }
    }
}

/// Whether it is the wildcard of its family.
pub(crate) fn is_any(gid: Gid) -> bool {
    gid.is_zero() || gid.to_ipv4() == Some(Ipv4Addr::UNSPECIFIED) || Ipv6Addr::from(gid.0).is_unspecified()
}

/// A copy on C's heap, as `rdma_freeaddrinfo` frees it.
///
/// # Safety
/// `address` is valid for so many bytes.
pub(crate) unsafe fn on_heap(address: *const sockaddr, bytes: socklen_t) -> Outcome<*mut sockaddr> {
    // SAFETY: calloc's memory is that long.
    unsafe {
        let copy = libc::calloc(1, (bytes as usize).max(1));
        if copy.is_null() {
            return Err(libc::ENOMEM);
        }
        std::ptr::copy_nonoverlapping(address.cast::<u8>(), copy.cast::<u8>(), bytes as usize);
        Ok(copy.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> rdma_socket_address {
        // SAFETY: all zeroes are an address of no family.
        unsafe { mem::zeroed() }
    }

    fn there_and_back(gid: Gid, family: c_int) -> (CmAddress, c_int) {
        let mut to = empty();
        to.addr.sa_family = family as u16;
        store(&mut to, CmAddress { gid, port: 18515 });
        assert_eq!(port(&to), 18515_u16.to_be());
        // SAFETY: a whole union.
        unsafe { (from_c(&raw const to.addr).unwrap(), c_int::from(to.addr.sa_family)) }
    }

    #[test]
    fn addresses_survive_in_every_family() {
        let four = Gid::from_ip(Ipv4Addr::new(10, 1, 0, 7).into());
        let six = Gid::from_ip("fd00::7".parse().unwrap());
        for (gid, given, shown) in
            [(four, 0, AF_INET), (four, AF_INET, AF_INET), (four, AF_INET6, AF_INET6), (six, 0, AF_INET6)]
        {
            assert_eq!(there_and_back(gid, given), (CmAddress { gid, port: 18515 }, shown));
        }
        assert_eq!(there_and_back(six, AF_IB), (CmAddress { gid: six, port: 18515 }, AF_IB));
    }

    #[test]
    fn unknown_families_are_refused() {
        let address = empty();
        // SAFETY: a whole union, and null.
        unsafe {
            assert_eq!(from_c(&raw const address.addr), Err(libc::EINVAL));
            assert_eq!(from_c(std::ptr::null()), Err(libc::EINVAL));
        }
        assert_eq!(port(&address), 0);
    }

    #[test]
    fn both_wildcards_are_known() {
        assert!(is_any(Gid::default()) && is_any(Gid::from_ip(Ipv4Addr::UNSPECIFIED.into())));
        assert!(!is_any(Gid::from_ip(Ipv4Addr::LOCALHOST.into())));
    }
}
