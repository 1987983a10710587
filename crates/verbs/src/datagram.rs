//! Unreliable datagrams: the 40 bytes before the payload (IBTA 8.3; RoCEv2 annex A17.4.5.2). Whoever delivers one
//! writes them: the router, or the receiver's library.
use crate::{Gid, GlobalRoute};

/// Bytes that precede the payload of every UD message in the receive buffer.
pub const GRH_BYTES: usize = 40;

/// Longest payload: an MTU of 4096.
pub const UD_MESSAGE_BYTES_MAX: u64 = 4096;

const PROTOCOL_UDP: u8 = 17;
const HOP_LIMIT_DEFAULT: u8 = 64;
/// UDP, BTH, DETH, ICRC.
const HEADERS_BYTES: u32 = 8 + 12 + 8 + 4;
const IMMEDIATE_BYTES: u32 = 4;

/// The bytes that a receiver finds before the payload: for IPv4 20 zeroes and the IPv4 header, else
/// the IPv6 header.
#[must_use]
pub fn grh(source: Gid, route: &GlobalRoute, payload: u32, has_immediate: bool) -> [u8; GRH_BYTES] {
    let immediate = if has_immediate { IMMEDIATE_BYTES } else { 0 };
    let below = (HEADERS_BYTES + immediate + payload.next_multiple_of(4)) as u16;
    let hops = if route.hop_limit == 0 { HOP_LIMIT_DEFAULT } else { route.hop_limit };
    let mut bytes = [0; GRH_BYTES];
    match (source.to_ipv4(), route.dgid.to_ipv4()) {
        (Some(from), Some(to)) => {
            let header = &mut bytes[20..];
            header[0] = 0x45;
            header[1] = route.traffic_class;
            header[2..4].copy_from_slice(&(below + 20).to_be_bytes());
            header[6] = 0x40; // don't fragment
            header[8] = hops;
            header[9] = PROTOCOL_UDP;
            header[12..16].copy_from_slice(&from.octets());
            header[16..20].copy_from_slice(&to.octets());
            let sum = checksum(header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        _ => {
            let first = 6 << 28 | u32::from(route.traffic_class) << 20 | (route.flow_label & 0xf_ffff);
            bytes[0..4].copy_from_slice(&first.to_be_bytes());
            bytes[4..6].copy_from_slice(&below.to_be_bytes());
            bytes[6] = PROTOCOL_UDP;
            bytes[7] = hops;
            bytes[8..24].copy_from_slice(&source.0);
            bytes[24..40].copy_from_slice(&route.dgid.0);
        }
    }
    bytes
}

/// Which of the two that is.
#[must_use]
pub fn is_ipv6(grh: &[u8; GRH_BYTES]) -> bool {
    grh[0] >> 4 == 6
}

/// RFC 1071, over an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    #[test]
    fn ipv4_header_is_valid() {
        let from = Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
        let to = Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
        let route = GlobalRoute { dgid: to, traffic_class: 0x20, ..Default::default() };
        let bytes = grh(from, &route, 13, true);
        assert_eq!(bytes[..20], [0; 20]);
        assert_eq!(bytes[20], 0x45);
        assert_eq!(u16::from_be_bytes([bytes[22], bytes[23]]), 20 + 8 + 12 + 8 + 4 + 16 + 4);
        assert_eq!(bytes[28], 64);
        assert_eq!(bytes[29], 17);
        assert_eq!(bytes[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(checksum(&bytes[20..]), 0);
        assert!(!is_ipv6(&bytes));
    }

    #[test]
    fn ipv6_header() {
        let from = Gid::from_ip(IpAddr::V6(Ipv6Addr::LOCALHOST));
        let to = Gid::from_ip(IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)));
        let bytes = grh(from, &GlobalRoute { dgid: to, hop_limit: 3, flow_label: 5, ..Default::default() }, 0, false);
        assert_eq!(bytes[..8], [0x60, 0, 0, 5, 0, 32, 17, 3]);
        assert_eq!(bytes[8..24], from.0);
        assert_eq!(bytes[24..], to.0);
        assert!(is_ipv6(&bytes));
    }
}
