//! Ranges of addresses of either family, as networks and selectors name them.
use crate::pool::Pool;
use core::fmt;
use core::net::{IpAddr, Ipv6Addr};
use core::str::FromStr;
use ipnet::IpNet;
use thiserror::Error;

/// `a.b.c.d/n` or `x::/n`, no bits set behind the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr(IpNet);

/// The text is no range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a range of addresses is written like 10.1.0.0/16 or fd00:1::/64, with no bits set behind the prefix")]
pub struct CidrError;

impl Cidr {
    /// The range of one address.
    pub fn single(address: IpAddr) -> Self {
        Self(IpNet::from(address))
    }

    /// Whether the address is in the range; one of the other family never is.
    pub fn contains(self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }

    /// Whether some address is in both ranges.
    pub fn overlaps(self, other: Self) -> bool {
        self.0.contains(&other.0) || other.0.contains(&self.0)
    }

    /// Whether it is a range of IPv6.
    pub fn is_ipv6(self) -> bool {
        matches!(self.0, IpNet::V6(_))
    }

    /// The first and the last address.
    pub fn bounds(self) -> (IpAddr, IpAddr) {
        (self.0.network(), self.0.broadcast())
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl From<Pool> for Cidr {
    fn from(pool: Pool) -> Self {
        Self(IpNet::new_assert(IpAddr::V4(pool.base()), pool.prefix_length()))
    }
}

impl From<Pool6> for Cidr {
    fn from(pool: Pool6) -> Self {
        Self(IpNet::new_assert(IpAddr::V6(pool.base()), pool.prefix_length))
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        // The address by the standard library's parser: ipnet's own takes leading zeros.
        let (base, length) = text.split_once('/').ok_or(CidrError)?;
        let base: IpAddr = base.parse().map_err(|_| CidrError)?;
        let net = IpNet::new(base, length.parse().map_err(|_| CidrError)?).map_err(|_| CidrError)?;
        if net.trunc() == net { Ok(Self(net)) } else { Err(CidrError) }
    }
}

/// IPv6 addresses of a network, prefix lengths 32 to 112, or the part of them that a host gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool6 {
    base: u128,
    prefix_length: u8,
}

impl Pool6 {
    /// The network's own address, the first of the range.
    pub fn base(self) -> Ipv6Addr {
        Ipv6Addr::from(self.base)
    }

    pub(crate) fn host_bits(self) -> u8 {
        128 - self.prefix_length
    }

    /// The addresses that stand in it where those of `range` stand in `pool`.
    pub(crate) fn part(self, pool: Pool, range: Pool) -> Self {
        let offset = pool.offset_of(range.base()).unwrap_or(0);
        Self { base: self.base + u128::from(offset), prefix_length: 128 - range.host_bits() }
    }

    /// The first address after the network's own.
    pub fn gateway(self) -> Ipv6Addr {
        self.address_at(1)
    }

    /// Prefix length, 32 to 128.
    pub fn prefix_length(self) -> u8 {
        self.prefix_length
    }

    /// Whether a vNIC can have it: neither the subnet routers' address nor the gateway's.
    pub fn is_assignable(self, address: Ipv6Addr) -> bool {
        Cidr::from(self).contains(IpAddr::V6(address)) && u128::from(address) - self.base > 1
    }

    pub(crate) fn address_at(self, offset: u32) -> Ipv6Addr {
        let mask = (1u128 << (128 - self.prefix_length)) - 1;
        Ipv6Addr::from(self.base | (u128::from(offset) & mask))
    }
}

impl fmt::Display for Pool6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base(), self.prefix_length)
    }
}

impl FromStr for Pool6 {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let Cidr(IpNet::V6(net)) = text.parse()? else { return Err(CidrError) };
        let pool = Self { base: u128::from(net.addr()), prefix_length: net.prefix_len() };
        if (32..=112).contains(&pool.prefix_length) { Ok(pool) } else { Err(CidrError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_are_parsed_strictly_and_compared() {
        assert!(cidr("10.1.0.0/16").overlaps(cidr("10.1.2.0/24")) && cidr("10.1.2.0/24").overlaps(cidr("10.1.0.0/16")));
        assert!(!cidr("10.1.0.0/16").overlaps(cidr("10.2.0.0/16")));
        assert!(!cidr("0.0.0.0/0").overlaps(cidr("::/0")) && cidr("::/0").overlaps(cidr("fd00::/8")));
        assert!(cidr("10.1.2.3/32").contains("10.1.2.3".parse().unwrap()));
        assert!(!cidr("10.1.2.3/32").contains("10.1.2.4".parse().unwrap()));
        for bad in ["", "10.0.0.0", "10.0.0.1/24", "10.0.0.0/33", "fd00::1/64", "fd00::/129", "x/8"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
        let pool: Pool6 = "fd00:1::/64".parse().unwrap();
        assert!(pool.is_assignable("fd00:1::2".parse().unwrap()) && !pool.is_assignable(pool.gateway()));
        let part = pool.part("10.5.0.0/16".parse().unwrap(), "10.5.3.0/24".parse().unwrap());
        assert_eq!((part.gateway(), part.prefix_length()), ("fd00:1::301".parse().unwrap(), 120));
        assert!(part.is_assignable("fd00:1::3ff".parse().unwrap()) && !part.is_assignable(part.gateway()));
        assert!(!part.is_assignable("fd00:1::402".parse().unwrap()) && !part.is_assignable(part.base()));
        assert!("fd00::/16".parse::<Pool6>().is_err() && "fd00::/120".parse::<Pool6>().is_err());
    }
}
