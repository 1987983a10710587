//! Identifiers that travel: QP numbers, packet sequence numbers, global identifiers.
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use serde::{Deserialize, Serialize};

/// A queue pair number: 24 bits, unique on a host (IBTA 3.5.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Qpn(pub u32);

impl Qpn {
    /// The 24 bits of a QPN.
    pub const MASK: u32 = 0x00ff_ffff;
    /// The destination QPN of every multicast packet.
    pub const MULTICAST: Self = Self(Self::MASK);
}

/// A packet sequence number: 24 bits, compared modulo 2^24 (IBTA 9.7.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Psn(pub u32);

impl Psn {
    /// The 24 bits of a PSN.
    pub const MASK: u32 = 0x00ff_ffff;
}

/// A global identifier: 128 bits. For RoCE v2 it is an IPv6 address, or an IPv4 address mapped into one.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID of an IP address; IPv4 is mapped (`::ffff:a.b.c.d`).
    pub fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }

    /// The IPv4 address mapped into this GID, if it holds one.
    pub fn to_ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// Whether it is `::`, an empty entry of a GID table.
    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether it is a multicast address of IPv6 or, mapped, of IPv4.
    pub fn is_multicast(self) -> bool {
        self.0[0] == 0xff || self.to_ipv4().is_some_and(|v4| v4.is_multicast())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Ipv6Addr::from(self.0), f)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Ipv6Addr::from(self.0), f)
    }
}

/// A virtual network: GIDs are unique within one; nothing crosses from one to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NetworkId(pub u32);
