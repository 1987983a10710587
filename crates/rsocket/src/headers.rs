//! Headers of datagrams: before those that travel by UDP, until the other end's queue pair is
//! known, and before those that travel between queue pairs. Facts of rdma-core's
//! `librdmacm/docs/rsocket`.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Bytes of a datagram with its header: what every rsocket has room for.
pub const DATAGRAM_BYTES: usize = 2048;
/// Longest of either header.
pub const HEADER_BYTES_MAX: usize = UDP_V6_BYTES;

const TAG: u32 = 0x5555_5555;
const UDP_V4_BYTES: usize = 16;
const UDP_V6_BYTES: usize = 28;
const V4_BYTES: usize = 8;
const V6_BYTES: usize = 24;
const OP_DATA: u8 = 0;
const OP_CONTROL: u8 = 7;

/// A header and how long it is.
pub type Header = ([u8; HEADER_BYTES_MAX], usize);

/// Before a datagram that travels by UDP: the sender's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    /// Whether data follow; else it only answers.
    pub data: bool,
    pub qpn: u32,
    pub address: IpAddr,
}

impl UdpHeader {
    #[must_use]
    pub fn to_bytes(self) -> Header {
        let mut out = [0; HEADER_BYTES_MAX];
        out[..4].copy_from_slice(&TAG.to_be_bytes());
        out[5] = if self.data { OP_DATA } else { OP_CONTROL };
        out[8..12].copy_from_slice(&(self.qpn & 0xFF_FFFF).to_be_bytes());
        let bytes = match self.address {
            IpAddr::V4(address) => {
                out[4] = 4;
                out[12..16].copy_from_slice(&address.octets());
                UDP_V4_BYTES
            }
            IpAddr::V6(address) => {
                out[4] = 6;
                out[12..28].copy_from_slice(&address.octets());
                UDP_V6_BYTES
            }
        };
        out[6] = bytes as u8;
        (out, bytes)
    }

    /// The header, and the bytes behind it. `None`: not a header of that family's, so not from an
    /// rsocket.
    #[must_use]
    pub fn from_bytes(bytes: &[u8], v6: bool) -> Option<(Self, &[u8])> {
        let (version, length) = if v6 { (6, UDP_V6_BYTES) } else { (4, UDP_V4_BYTES) };
        let (header, rest) = bytes.split_at_checked(length)?;
        if header[..4] != TAG.to_be_bytes() || header[4] != version || usize::from(header[6]) != length {
            return None;
        }
        let data = match header[5] {
            OP_DATA => true,
            OP_CONTROL => false,
            _ => return None,
        };
        let qpn = u32::from_be_bytes([0, header[9], header[10], header[11]]);
        let address = if v6 {
            IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(&header[12..28]).ok()?))
        } else {
            IpAddr::V4(Ipv4Addr::new(header[12], header[13], header[14], header[15]))
        };
        Some((Self { data, qpn, address }, rest))
    }
}

/// Before a datagram between queue pairs: who sent it.
#[must_use]
pub fn source_to_bytes(source: SocketAddr) -> Header {
    let mut out = [0; HEADER_BYTES_MAX];
    out[2..4].copy_from_slice(&source.port().to_be_bytes());
    let (version, bytes) = match source {
        SocketAddr::V4(v4) => {
            out[4..8].copy_from_slice(&v4.ip().octets());
            (4, V4_BYTES)
        }
        SocketAddr::V6(v6) => {
            out[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            out[8..24].copy_from_slice(&v6.ip().octets());
            (6, V6_BYTES)
        }
    };
    out[0] = version;
    out[1] = bytes as u8;
    (out, bytes)
}

/// The sender of a datagram, and the length of its header.
#[must_use]
pub fn source_from_bytes(bytes: &[u8]) -> Option<(SocketAddr, usize)> {
    let header: &[u8; V4_BYTES] = bytes.first_chunk()?;
    let port = u16::from_be_bytes([header[2], header[3]]);
    match (header[0], usize::from(header[1])) {
        (4, V4_BYTES) => {
            let ip = Ipv4Addr::new(header[4], header[5], header[6], header[7]);
            Some((SocketAddr::new(IpAddr::V4(ip), port), V4_BYTES))
        }
        (6, V6_BYTES) => {
            let header: &[u8; V6_BYTES] = bytes.first_chunk()?;
            let ip = Ipv6Addr::from(<[u8; 16]>::try_from(&header[8..24]).ok()?);
            Some((SocketAddr::new(IpAddr::V6(ip), port), V6_BYTES))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn headers_have_these_bytes() {
        let header = UdpHeader { data: false, qpn: 0x12_3456, address: "10.0.0.9".parse().unwrap() };
        let (bytes, length) = header.to_bytes();
        assert_eq!(bytes[..length], [0x55, 0x55, 0x55, 0x55, 4, 7, 16, 0, 0, 0x12, 0x34, 0x56, 10, 0, 0, 9]);
        let (bytes, length) = source_to_bytes("10.0.0.9:258".parse().unwrap());
        assert_eq!(bytes[..length], [4, 8, 1, 2, 10, 0, 0, 9]);
    }

    proptest! {
        #[test]
        fn udp_headers(data: bool, qpn in 0u32..1 << 24, v4: [u8; 4], v6: [u8; 16], six: bool, rest: Vec<u8>) {
            let address = if six { IpAddr::from(v6) } else { IpAddr::from(v4) };
            let header = UdpHeader { data, qpn, address };
            let (bytes, length) = header.to_bytes();
            let packet = [&bytes[..length], &rest].concat();
            prop_assert_eq!(UdpHeader::from_bytes(&packet, six), Some((header, &rest[..])));
            prop_assert_eq!(UdpHeader::from_bytes(&packet, !six), None);
        }

        #[test]
        fn sources(port: u16, v4: [u8; 4], v6: [u8; 16], six: bool) {
            let source = SocketAddr::new(if six { IpAddr::from(v6) } else { IpAddr::from(v4) }, port);
            let (bytes, length) = source_to_bytes(source);
            prop_assert_eq!(source_from_bytes(&bytes[..length]), Some((source, length)));
        }

        #[test]
        fn any_bytes(bytes: Vec<u8>, six: bool) {
            let _ = (UdpHeader::from_bytes(&bytes, six), source_from_bytes(&bytes));
        }
    }
}
