//! Names of rsockets as a socket of their family has them: the connection manager calls an end by
//! its IPv4 address, whatever the socket's family, and loopback by the vNIC's.
use libc::{AF_INET, AF_INET6, c_int, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ptr;

pub type Name = (sockaddr_storage, socklen_t);

pub fn none() -> Name {
    // SAFETY: all zeros is an address of no family.
    (unsafe { std::mem::zeroed() }, size_of::<sockaddr_storage>() as socklen_t)
}

/// A socket of AF_INET6 has IPv4 addresses mapped.
pub fn in_family(family: c_int, (name, length): Name) -> Name {
    if family != AF_INET6 || c_int::from(name.ss_family) != AF_INET {
        return (name, length);
    }
    let (mut mapped, _) = none();
    // SAFETY: of this family, so these bytes are that struct; the storage is larger than either,
    // and aligned for every address.
    unsafe {
        let four = &*(&raw const name).cast::<sockaddr_in>();
        let six = &mut *(&raw mut mapped).cast::<sockaddr_in6>();
        six.sin6_family = AF_INET6 as u16;
        six.sin6_port = four.sin_port;
        six.sin6_addr.s6_addr = Ipv4Addr::from(u32::from_be(four.sin_addr.s_addr)).to_ipv6_mapped().octets();
    }
    (mapped, size_of::<sockaddr_in6>() as socklen_t)
}

/// As much of it as the program has room for, and how long it is.
///
/// # Safety
/// As of `getsockname(2)`, or null.
pub unsafe fn write(name: &Name, address: *mut sockaddr, length: *mut socklen_t) {
    if address.is_null() || length.is_null() {
        return;
    }
    // SAFETY: this function's contract: as much room as is said.
    unsafe {
        let bytes = (*length).min(name.1) as usize;
        ptr::copy_nonoverlapping(ptr::from_ref(&name.0).cast::<u8>(), address.cast(), bytes);
        *length = name.1;
    }
}

/// Whether an address is the container's own loopback: 127.0.0.0/8, ::1, and the former mapped.
///
/// # Safety
/// As of `bind(2)`.
pub unsafe fn is_loopback(address: *const sockaddr, length: socklen_t) -> bool {
    let length = length as usize;
    if address.is_null() || length < size_of::<sockaddr_in>() {
        return false;
    }
    // SAFETY: this function's contract: valid for its length, which is its family's; the program
    // may have it anywhere.
    unsafe {
        match c_int::from((&raw const (*address).sa_family).read_unaligned()) {
            AF_INET => {
                let four = address.cast::<sockaddr_in>().read_unaligned();
                Ipv4Addr::from(u32::from_be(four.sin_addr.s_addr)).is_loopback()
            }
            // The scope at the end may be left out, as Linux has it.
            AF_INET6 if length >= size_of::<sockaddr_in6>() - size_of::<u32>() => {
                let octets = (&raw const (*address.cast::<sockaddr_in6>()).sin6_addr.s6_addr).read_unaligned();
                let six = Ipv6Addr::from(octets);
                six.is_loopback() || six.to_ipv4_mapped().is_some_and(|four| four.is_loopback())
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn six(text: &str) -> Name {
        let (mut name, _) = none();
        // SAFETY: the storage is larger.
        let c = unsafe { &mut *(&raw mut name).cast::<sockaddr_in6>() };
        c.sin6_family = AF_INET6 as u16;
        c.sin6_addr.s6_addr = text.parse::<Ipv6Addr>().unwrap().octets();
        (name, size_of::<sockaddr_in6>() as socklen_t)
    }

    fn four(text: &str) -> Name {
        let (mut name, _) = none();
        // SAFETY: as above.
        let c = unsafe { &mut *(&raw mut name).cast::<sockaddr_in>() };
        c.sin_family = AF_INET as u16;
        c.sin_port = 80u16.to_be();
        c.sin_addr.s_addr = u32::from(text.parse::<Ipv4Addr>().unwrap()).to_be();
        (name, size_of::<sockaddr_in>() as socklen_t)
    }

    fn loops((name, length): &Name) -> bool {
        // SAFETY: an address of that length.
        unsafe { is_loopback(ptr::from_ref(name).cast(), *length) }
    }

    #[test]
    fn what_loopback_is() {
        for name in [four("127.0.0.1"), four("127.255.0.9"), six("::1"), six("::ffff:127.0.0.2")] {
            assert!(loops(&name));
        }
        for name in [four("0.0.0.0"), four("10.127.0.1"), six("::"), six("::ffff:10.0.0.1"), six("::127.0.0.1"), none()]
        {
            assert!(!loops(&name));
        }
        let (name, length) = four("127.0.0.1");
        // SAFETY: an address of no more than that length; none at all.
        unsafe { assert!(!is_loopback((&raw const name).cast(), length - 1) && !is_loopback(ptr::null(), length)) };
    }

    #[test]
    fn names_have_the_family_of_their_socket() {
        let (mapped, length) = in_family(AF_INET6, four("10.1.2.3"));
        let (expected, _) = six("::ffff:10.1.2.3");
        // SAFETY: all are storages of these families.
        unsafe {
            let [mapped, expected] = [&mapped, &expected].map(|name| *ptr::from_ref(name).cast::<sockaddr_in6>());
            assert_eq!((mapped.sin6_addr.s6_addr, mapped.sin6_port), (expected.sin6_addr.s6_addr, 80u16.to_be()));
        }
        assert_eq!((c_int::from(mapped.ss_family), length as usize), (AF_INET6, size_of::<sockaddr_in6>()));
        assert_eq!(in_family(AF_INET, four("10.1.2.3")).1 as usize, size_of::<sockaddr_in>());
        assert_eq!(c_int::from(in_family(AF_INET6, six("fe80::1")).0.ss_family), AF_INET6);
    }
}
