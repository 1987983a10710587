//! Socket addresses as C has them, and as `std::net` has them.
use libc::{AF_INET, AF_INET6, c_int, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;

const FAMILY_BYTES: usize = size_of::<libc::sa_family_t>();

#[derive(Clone, Copy)]
pub struct Address {
    storage: sockaddr_storage,
}

impl Address {
    /// No address of a family.
    #[must_use]
    pub fn unspecified(family: c_int) -> Self {
        // SAFETY: all zeros is a `sockaddr_storage`.
        let mut storage: sockaddr_storage = unsafe { zeroed() };
        storage.ss_family = family as u16;
        Self { storage }
    }

    /// `None`: null, too short for its family, or longer than any.
    ///
    /// # Safety
    /// `address` is null, or valid for `length` bytes.
    pub unsafe fn from_c(address: *const sockaddr, length: socklen_t) -> Option<Self> {
        let length = length as usize;
        if address.is_null() || length < FAMILY_BYTES || length > size_of::<sockaddr_storage>() {
            return None;
        }
        let mut out = Self::unspecified(0);
        // SAFETY: this function's contract; the storage is not shorter.
        unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut out.storage).cast::<u8>(), length) };
        (length >= out.length() as usize).then_some(out)
    }

    /// As the calls do that give an address: as much as there is room for, and how long it is.
    ///
    /// # Safety
    /// Both pointers are null, or valid; `out` for `*length` bytes.
    pub unsafe fn to_c(self, out: *mut sockaddr, length: *mut socklen_t) {
        if out.is_null() || length.is_null() {
            return;
        }
        // SAFETY: this function's contract.
        unsafe {
            let bytes = (*length).min(self.length()) as usize;
            ptr::copy_nonoverlapping((&raw const self.storage).cast::<u8>(), out.cast::<u8>(), bytes);
            *length = self.length();
        }
    }

    #[must_use]
    pub fn family(&self) -> c_int {
        c_int::from(self.storage.ss_family)
    }

    #[must_use]
    pub fn length(&self) -> socklen_t {
        let bytes = match self.family() {
            AF_INET => size_of::<sockaddr_in>(),
            AF_INET6 => size_of::<sockaddr_in6>(),
            _ => FAMILY_BYTES,
        };
        bytes as socklen_t
    }

    #[must_use]
    pub fn pointer(&mut self) -> *mut sockaddr {
        (&raw mut self.storage).cast()
    }

    #[must_use]
    pub fn to_std(self) -> Option<SocketAddr> {
        match self.family() {
            AF_INET => {
                // SAFETY: of this family, so these bytes are that struct, which any bytes are.
                let address = unsafe { &*(&raw const self.storage).cast::<sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(address.sin_port))))
            }
            AF_INET6 => {
                // SAFETY: as above.
                let address = unsafe { &*(&raw const self.storage).cast::<sockaddr_in6>() };
                let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
                let (port, scope) = (u16::from_be(address.sin6_port), address.sin6_scope_id);
                Some(SocketAddr::V6(SocketAddrV6::new(ip, port, address.sin6_flowinfo, scope)))
            }
            _ => None,
        }
    }

    #[must_use]
    pub fn from_std(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(v4) => {
                let mut out = Self::unspecified(AF_INET);
                // SAFETY: the storage is larger, and aligned for every address.
                let c = unsafe { &mut *(&raw mut out.storage).cast::<sockaddr_in>() };
                c.sin_port = v4.port().to_be();
                c.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                out
            }
            SocketAddr::V6(v6) => {
                let mut out = Self::unspecified(AF_INET6);
                // SAFETY: as above.
                let c = unsafe { &mut *(&raw mut out.storage).cast::<sockaddr_in6>() };
                c.sin6_port = v6.port().to_be();
                c.sin6_addr.s6_addr = v6.ip().octets();
                c.sin6_flowinfo = v6.flowinfo();
                c.sin6_scope_id = v6.scope_id();
                out
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for text in ["10.1.2.3:80", "[fe80::1]:9"] {
            let address: SocketAddr = text.parse().unwrap();
            let mut c = Address::from_std(address);
            assert_eq!(c.to_std(), Some(address));
            let length = c.length();
            let pointer = c.pointer();
            // SAFETY: an address of that length.
            assert!(unsafe { Address::from_c(pointer, length - 1) }.is_none());
            // SAFETY: as above.
            assert_eq!(unsafe { Address::from_c(pointer, length) }.unwrap().to_std(), Some(address));
        }
    }
}
