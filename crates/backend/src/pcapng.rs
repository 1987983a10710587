//! Captures as files: blocks of the pcapng format (draft-ietf-opsawg-pcapng), with IP and UDP headers made up from what
//! the sockets report. Of a packet received the checksums are those that a sound header would have.
//!
//! A file is [`begin`], then one [`packet`] for each; interfaces are numbered from 0.
use crate::capture::{Captured, Direction};
use std::net::{IpAddr, SocketAddr};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
/// The packet begins with its IP header, of version 4 or 6.
const LINKTYPE_RAW: u16 = 101;
const OPTION_END: u16 = 0;
const SECTION_APPLICATION: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_TIME_RESOLUTION: u16 = 9;
/// Time stamps count 10^-9 s.
const NANOSECONDS: u8 = 9;
const PACKET_FLAGS: u16 = 2;
const FLAG_INBOUND: u32 = 1;
const FLAG_OUTBOUND: u32 = 2;
const OPTION_BYTES_MAX: usize = 255;
const IPV4_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
const PROTOCOL_UDP: u8 = 17;
const DONT_FRAGMENT: u16 = 0x4000;

/// Appends the blocks that a file begins with: one section, one interface of this name (cut at 255 bytes).
pub fn begin(interface: &str, out: &mut Vec<u8>) {
    block(SECTION_HEADER, out, |out| {
        out.extend(BYTE_ORDER_MAGIC.to_le_bytes());
        out.extend(1_u16.to_le_bytes());
        out.extend(0_u16.to_le_bytes());
        // The section's length is not known.
        out.extend(u64::MAX.to_le_bytes());
        option(SECTION_APPLICATION, b"FreeFlow", out);
        option(OPTION_END, &[], out);
    });
    block(INTERFACE_DESCRIPTION, out, |out| {
        out.extend(LINKTYPE_RAW.to_le_bytes());
        out.extend(0_u16.to_le_bytes());
        // No limit to a packet's length.
        out.extend(0_u32.to_le_bytes());
        option(INTERFACE_NAME, interface.as_bytes(), out);
        option(INTERFACE_TIME_RESOLUTION, &[NANOSECONDS], out);
        option(OPTION_END, &[], out);
    });
}

/// Appends a packet.
pub fn packet(captured: &Captured<'_>, out: &mut Vec<u8>) {
    block(ENHANCED_PACKET, out, |out| {
        out.extend(0_u32.to_le_bytes());
        out.extend(((captured.time_ns >> 32) as u32).to_le_bytes());
        out.extend((captured.time_ns as u32).to_le_bytes());
        let lengths = out.len();
        out.extend([0; 8]);
        let start = out.len();
        headers(captured, out);
        out.extend(captured.bytes);
        let length = ((out.len() - start) as u32).to_le_bytes();
        out[lengths..lengths + 4].copy_from_slice(&length);
        out[lengths + 4..lengths + 8].copy_from_slice(&length);
        pad(start, out);
        let flags = match captured.direction {
            Direction::Received => FLAG_INBOUND,
            Direction::Sent => FLAG_OUTBOUND,
        };
        option(PACKET_FLAGS, &flags.to_le_bytes(), out);
        option(OPTION_END, &[], out);
    });
}

/// Appends a block: its type, its length, what `fill` appends, its length again.
fn block(kind: u32, out: &mut Vec<u8>, fill: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    fill(out);
    let length = ((out.len() + 4 - start) as u32).to_le_bytes();
    out.extend(length);
    out[start + 4..start + 8].copy_from_slice(&length);
}

fn option(code: u16, value: &[u8], out: &mut Vec<u8>) {
    let value = &value[..value.len().min(OPTION_BYTES_MAX)];
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    let start = out.len();
    out.extend(value);
    pad(start, out);
}

/// Fills up to a multiple of 32 bits, counted from `start`.
fn pad(start: usize, out: &mut Vec<u8>) {
    out.resize(start + (out.len() - start).next_multiple_of(4), 0);
}

/// The IP and UDP headers in front of a packet.
fn headers(captured: &Captured<'_>, out: &mut Vec<u8>) {
    let udp_length = (UDP_BYTES + captured.bytes.len()) as u16;
    match (captured.source, captured.destination) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            let start = out.len();
            out.extend([0x45, captured.traffic_class]);
            out.extend((IPV4_BYTES as u16 + udp_length).to_be_bytes());
            out.extend(captured.identification.to_be_bytes());
            out.extend(DONT_FRAGMENT.to_be_bytes());
            out.extend([captured.hop_limit, PROTOCOL_UDP, 0, 0]);
            out.extend(source.ip().octets());
            out.extend(destination.ip().octets());
            let checksum = checksum([&out[start..]]);
            out[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
            // No UDP checksum.
            out.extend(udp(captured, udp_length, 0));
        }
        (source, destination) => {
            let (from, to) = (as_v6(source.ip()), as_v6(destination.ip()));
            out.extend((6 << 28 | u32::from(captured.traffic_class) << 20).to_be_bytes());
            out.extend(udp_length.to_be_bytes());
            out.extend([PROTOCOL_UDP, captured.hop_limit]);
            out.extend(from);
            out.extend(to);
            let pseudo = [u32::from(udp_length).to_be_bytes(), u32::from(PROTOCOL_UDP).to_be_bytes()];
            let bare = udp(captured, udp_length, 0);
            let sum = checksum([&from, &to, pseudo.as_flattened(), &bare, captured.bytes]);
            // A sum of zero is sent as its other form: zero would say that there is none (RFC 8200, 8.1).
            out.extend(udp(captured, udp_length, if sum == 0 { 0xffff } else { sum }));
        }
    }
}

fn udp(captured: &Captured<'_>, length: u16, checksum: u16) -> [u8; UDP_BYTES] {
    let mut header = [0; UDP_BYTES];
    let fields = [captured.source.port(), captured.destination.port(), length, checksum];
    for (place, field) in header.chunks_exact_mut(2).zip(fields) {
        place.copy_from_slice(&field.to_be_bytes());
    }
    header
}

fn as_v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The Internet checksum (RFC 1071). All parts but the last are of even length.
fn checksum<const COUNT: usize>(parts: [&[u8]; COUNT]) -> u16 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
    let mut sum: u64 = parts.iter().flat_map(|part| part.chunks(2)).map(word).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_a_known_header() {
        let header = [0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];
        assert_eq!(checksum([&header]), 0xb861);
    }

    #[test]
    fn blocks_have_equal_lengths_at_both_ends_and_fill_words() {
        let mut out = Vec::new();
        begin("veth0", &mut out);
        for length in 16..32 {
            let bytes = vec![1; length];
            packet(
                &Captured {
                    time_ns: 1 << 40,
                    direction: Direction::Sent,
                    source: "[::1]:49152".parse().expect("address"),
                    destination: "[::2]:4791".parse().expect("address"),
                    traffic_class: 2,
                    hop_limit: 64,
                    identification: 0,
                    bytes: &bytes,
                },
                &mut out,
            );
        }
        let word = |at: usize| u32::from_le_bytes(out[at..at + 4].try_into().expect("four bytes")) as usize;
        let (mut at, mut blocks) = (0, 0);
        while at < out.len() {
            let length = word(at + 4);
            assert_eq!((length % 4, word(at + length - 4)), (0, length));
            at += length;
            blocks += 1;
        }
        assert_eq!((at, blocks), (out.len(), 18));
    }
}
