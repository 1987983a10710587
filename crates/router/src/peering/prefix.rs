//! A range of IP addresses in CIDR notation, IPv4 or IPv6, and the GIDs that stand for them.
use freeflow_verbs::Gid;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use thiserror::Error;

/// Bits of an IPv6 address that mark an IPv4 address mapped into it (RFC 4291, 2.5.5.2).
const MAPPED_BITS: u8 = 96;

/// All addresses that begin with the same bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefix {
    /// IPv4 addresses are mapped into IPv6, so that each address has one form.
    bits: u128,
    /// Of 128.
    length: u8,
    is_ipv4: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PrefixError {
    /// Not `ADDRESS/LENGTH`.
    #[error("a range of addresses is written like 10.111.2.0/24 or fd00::/64")]
    Malformed,
    /// Bits are set behind the prefix.
    #[error("bits are set behind the prefix")]
    HostBits,
}

impl Prefix {
    pub fn contains(self, gid: Gid) -> bool {
        (u128::from_be_bytes(gid.0) ^ self.bits) & mask(self.length) == 0
    }

    /// The GID of the address that is all of it, if it is one alone.
    pub fn single(self) -> Option<Gid> {
        (self.length == 128).then(|| Gid(self.bits.to_be_bytes()))
    }

    pub fn overlaps(self, other: Self) -> bool {
        (self.bits ^ other.bits) & mask(self.length.min(other.length)) == 0
    }
}

/// Prefixes of which no two overlap, to be looked up in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prefixes {
    /// In order of their bits.
    sorted: Vec<Prefix>,
}

impl Prefixes {
    pub fn contains(&self, gid: Gid) -> bool {
        let bits = u128::from_be_bytes(gid.0);
        let after = self.sorted.partition_point(|prefix| prefix.bits <= bits);
        after.checked_sub(1).is_some_and(|at| self.sorted[at].contains(gid))
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = Prefix> {
        self.sorted.iter().copied()
    }

    /// Whether they have all addresses of others, of which each has its own prefixes, as a file names them.
    pub fn has_all(&self, others: &Self) -> bool {
        others.iter().all(|other| self.sorted.binary_search(&other).is_ok())
    }
}

impl FromIterator<Prefix> for Prefixes {
    fn from_iter<I: IntoIterator<Item = Prefix>>(prefixes: I) -> Self {
        let mut sorted: Vec<Prefix> = prefixes.into_iter().collect();
        sorted.sort_unstable();
        Self { sorted }
    }
}

fn mask(length: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0)
}

impl FromStr for Prefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let (address, length) = text.split_once('/').ok_or(PrefixError::Malformed)?;
        let address: IpAddr = address.parse().map_err(|_| PrefixError::Malformed)?;
        if !length.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(PrefixError::Malformed);
        }
        let length: u8 = length.parse().map_err(|_| PrefixError::Malformed)?;
        let is_ipv4 = address.is_ipv4();
        if length > if is_ipv4 { 32 } else { 128 } {
            return Err(PrefixError::Malformed);
        }
        let length = if is_ipv4 { MAPPED_BITS + length } else { length };
        let bits = u128::from_be_bytes(Gid::from_ip(address).0);
        if bits & !mask(length) != 0 {
            return Err(PrefixError::HostBits);
        }
        Ok(Self { bits, length, is_ipv4 })
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid = Gid(self.bits.to_be_bytes());
        match gid.to_ipv4() {
            Some(address) if self.is_ipv4 => write!(f, "{address}/{}", self.length - MAPPED_BITS),
            _ => write!(f, "{gid}/{}", self.length),
        }
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> Prefix {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_are_parsed_strictly_and_printed_as_they_were() {
        for good in ["10.111.2.0/24", "0.0.0.0/0", "192.0.2.9/32", "::/0", "fd00::/64", "2001:db8::1/128"] {
            assert_eq!(prefix(good).to_string(), good);
        }
        for bad in ["", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0.0/-1", "fd00::/129", "x/8", "10.0.0.0/ 8"] {
            assert_eq!(bad.parse::<Prefix>(), Err(PrefixError::Malformed), "{bad}");
        }
        for bad in ["10.0.0.1/24", "fd00::1/64", "1.0.0.0/0"] {
            assert_eq!(bad.parse::<Prefix>(), Err(PrefixError::HostBits), "{bad}");
        }
    }

    #[test]
    fn an_address_is_inside_or_not() {
        let gid = |text: &str| Gid::from_ip(text.parse().unwrap());
        assert!(prefix("10.111.2.0/24").contains(gid("10.111.2.255")));
        assert!(!prefix("10.111.2.0/24").contains(gid("10.111.3.0")));
        assert!(prefix("0.0.0.0/0").contains(gid("255.255.255.255")) && !prefix("0.0.0.0/0").contains(gid("fd00::1")));
        assert!(prefix("fd00::/64").contains(gid("fd00::1")) && !prefix("fd00::/64").contains(gid("fd00:0:0:1::")));
        assert!(
            prefix("192.0.2.9/32").contains(gid("192.0.2.9")) && !prefix("192.0.2.9/32").contains(gid("192.0.2.8"))
        );
    }

    #[test]
    fn ranges_overlap_if_one_contains_the_other() {
        for (one, other, overlap) in [
            ("10.0.0.0/8", "10.1.0.0/16", true),
            ("10.1.0.0/16", "10.1.0.0/16", true),
            ("10.1.0.0/16", "10.2.0.0/16", false),
            ("::/0", "10.0.0.0/8", true),
            ("fd00::/64", "10.0.0.0/8", false),
        ] {
            assert_eq!((prefix(one).overlaps(prefix(other)), prefix(other).overlaps(prefix(one))), (overlap, overlap));
        }
    }
}
