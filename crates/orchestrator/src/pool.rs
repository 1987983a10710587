//! A range of IPv4 addresses in CIDR notation.
use core::fmt;
use core::net::Ipv4Addr;
use core::str::FromStr;
use thiserror::Error;

/// An address pool: prefix lengths 8 to 29, host bits zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    base: Ipv4Addr,
    prefix_length: u8,
}

/// Not `a.b.c.d/n` with n from 8 to 29 and no bits set behind the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("an address pool is written like 10.111.0.0/16, with a prefix length from 8 to 29")]
pub struct PoolError;

impl Pool {
    /// The network's own address, the first of the pool.
    pub fn base(self) -> Ipv4Addr {
        self.base
    }

    /// Prefix length.
    pub fn prefix_length(self) -> u8 {
        self.prefix_length
    }

    pub(crate) fn host_bits(self) -> u8 {
        32 - self.prefix_length
    }

    /// Addresses, all in all.
    pub fn size(self) -> u32 {
        1 << (32 - self.prefix_length)
    }

    /// The first address after the network's own.
    pub fn gateway(self) -> Ipv4Addr {
        self.address_at(1)
    }

    /// Whether the address is in the pool.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        self.offset_of(address).is_some()
    }

    /// Whether all addresses of `other` are also of this pool.
    pub fn encloses(self, other: Pool) -> bool {
        other.prefix_length >= self.prefix_length && self.contains(other.base)
    }

    /// Whether a vNIC can have it: neither network, gateway nor broadcast address.
    pub fn is_assignable(self, address: Ipv4Addr) -> bool {
        self.offset_of(address).is_some_and(|offset| offset > 1 && offset < self.size() - 1)
    }

    pub(crate) fn address_at(self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base) | (offset & (self.size() - 1)))
    }

    pub(crate) fn offset_of(self, address: Ipv4Addr) -> Option<u32> {
        let offset = u32::from(address) & (self.size() - 1);
        (u32::from(address) - offset == u32::from(self.base)).then_some(offset)
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix_length)
    }
}

impl FromStr for Pool {
    type Err = PoolError;

    fn from_str(text: &str) -> Result<Self, PoolError> {
        let (base, length) = text.split_once('/').ok_or(PoolError)?;
        let base: Ipv4Addr = base.parse().map_err(|_| PoolError)?;
        let prefix_length: u8 = length.parse().map_err(|_| PoolError)?;
        if !(8..=29).contains(&prefix_length) {
            return Err(PoolError);
        }
        let pool = Self { base, prefix_length };
        if pool.offset_of(base) == Some(0) { Ok(pool) } else { Err(PoolError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn pools_are_parsed_strictly() {
        let pool: Pool = "10.111.0.0/16".parse().unwrap();
        assert_eq!(pool.gateway(), Ipv4Addr::new(10, 111, 0, 1));
        assert_eq!((pool.size(), pool.to_string().as_str()), (65_536, "10.111.0.0/16"));
        let range: Pool = "10.111.2.0/24".parse().unwrap();
        assert!(pool.encloses(range) && pool.encloses(pool) && !range.encloses(pool));
        assert!(!pool.encloses("10.112.2.0/24".parse().unwrap()));
        for bad in ["", "10.0.0.0", "10.0.0.0/7", "10.0.0.0/30", "10.0.0.1/24", "10.0.0.0/x", "::/64"] {
            assert_eq!(bad.parse::<Pool>(), Err(PoolError), "{bad}");
        }
    }
}
