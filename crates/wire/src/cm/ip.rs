//! The header that stands first in the private data of REQ and SIDR REQ, if the service is of an IP
//! port space (annex A11).
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses of both ends, and the active side's port. Addresses are in the form of GIDs: IPv4 ones mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// TCP or UDP port of the active side.
    pub source_port: u16,
    /// Address of the active side.
    pub source: [u8; 16],
    /// Address of the passive side.
    pub destination: [u8; 16],
}

impl IpHeader {
    /// Length of the header in front of the private data (IBTA annex A11).
    pub const BYTES: usize = 36;
    const VERSION: u8 = 0;

    /// `None`: shorter, of another version, or neither IPv4 nor IPv6.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.first_chunk()?;
        let address = |at: usize| -> Option<[u8; 16]> {
            let raw: [u8; 16] = bytes[at..at + 16].try_into().ok()?;
            match bytes[1] >> 4 {
                4 => Some(Ipv4Addr::new(raw[12], raw[13], raw[14], raw[15]).to_ipv6_mapped().octets()),
                6 => Some(raw),
                _ => None,
            }
        };
        if bytes[0] != Self::VERSION {
            return None;
        }
        let source_port = u16::from_be_bytes([bytes[2], bytes[3]]);
        Some(Self { source_port, source: address(4)?, destination: address(20)? })
    }

    /// As IPv4 if both addresses are.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let [source, destination] = [self.source, self.destination].map(|raw| Ipv6Addr::from(raw).to_canonical());
        bytes[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        if let (IpAddr::V4(source), IpAddr::V4(destination)) = (source, destination) {
            bytes[1] = 4 << 4;
            bytes[16..20].copy_from_slice(&source.octets());
            bytes[32..36].copy_from_slice(&destination.octets());
        } else {
            bytes[1] = 6 << 4;
            bytes[4..20].copy_from_slice(&self.source);
            bytes[20..36].copy_from_slice(&self.destination);
        }
        bytes
    }
}
