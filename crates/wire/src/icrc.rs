//! The invariant CRC (IBTA 7.8.1; RoCEv2 annex A17.3.3).
//!
//! CRC-32 as of Ethernet, little-endian on the wire, over: 8 bytes of ones; the IP header with all
//! that routers change as ones (IPv4: ToS, TTL, checksum; IPv6: traffic class, flow label, hop
//! limit); the UDP header with its checksum as ones; the BTH with its byte 4 (FECN, BECN, reserved)
//! as ones; the rest as it is.
//!
//! # The identification that a socket does not show
//! Over IPv4 the ICRC covers the identification of the IP header, which a UDP socket does not show
//! to the receiver. It can be solved for. Read as polynomials over GF(2), a message M has the CRC
//! M(x)·x^32 mod P, but for terms that depend on the length alone. So two packets that differ in
//! nothing but the identification, by the 16 bits Δ(x), and have m bytes after it, have ICRCs that
//! differ by
//!
//! > d(x) = Δ(x)·x^(8m + 32) mod P.
//!
//! P has the constant term 1, hence x has an inverse modulo P, and d·x^-(8m + 32) mod P *is* Δ: of
//! degree below 16, where anything below 32 could be. [`Flow::explain`] computes the difference for
//! one guess of the identification, takes the shift back by a multiplication with a power of 1/x
//! out of a table, and looks whether the upper 16 coefficients are zero. One identification at most
//! explains a packet: x is invertible.
//!
//! **What the check is still worth**: 16 bits of 32. Of random damage, one packet of 2^16 passes,
//! and with "don't fragment" unknown as well, two of 2^16. With that bit set, no single wrong bit
//! passes in packets of up to 26 KB (the first power x^-k of degree below 16 beyond the
//! identification itself is k = 214135). Explained by a bit that is clear, there are two places in
//! packets of up to 4 KB whose lone damage passes: 1564 and 14855 bits behind the identification.
//! Damage of the identification itself, which nobody uses, passes always. A receiver that knows the
//! identification compares with [`Flow::icrc`] and has all 32 bits.
use crate::{BTH_BYTES, ICRC_BYTES, UDP_PORT};
use crc32fast::Hasher;

/// Result of [`Flow::explain`] where there is no identification: IPv6.
pub const NO_IDENTIFICATION: u16 = 0;
/// Longest packet without its ICRC that an IPv4 datagram holds, bytes.
pub const PACKET_BYTES_MAX: usize = u16::MAX as usize - IPV4_BYTES - UDP_BYTES - ICRC_BYTES;

const ONES_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const PROTOCOL_UDP: u8 = 17;
const DONT_FRAGMENT: u8 = 0x40;
/// The byte of the BTH that counts as ones (FECN, BECN, reserved).
const MASKED_AT: usize = 4;
const MASKED_DIFFERENCE_BYTES_MIN: usize = 256;

/// Where a packet comes from and goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addresses {
    /// IPv4 addresses.
    V4 {
        /// Source address, in network byte order.
        source: [u8; 4],
        /// Destination address, in network byte order.
        destination: [u8; 4],
    },
    /// IPv6 addresses.
    V6 {
        /// Source address, in network byte order.
        source: [u8; 16],
        /// Destination address, in network byte order.
        destination: [u8; 16],
    },
}

/// Fields of the IP and UDP headers that the ICRC covers. The UDP destination port is [`UDP_PORT`].
///
/// A packet is here what the UDP datagram holds but for the ICRC: BTH, extension headers, payload, padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Addresses of the IP header.
    pub addresses: Addresses,
    /// UDP source port.
    pub source_port: u16,
}

impl Flow {
    /// The ICRC of `packet`: its bytes are `to_le_bytes()` of this. `identification` is that of the IPv4 header (IPv6:
    /// ignored), which has no options and the flag "don't fragment", as all RoCEv2 packets of ours and of rxe.
    ///
    /// Bytes that are no packet, or more than fit into a datagram, give some number.
    pub fn icrc(&self, identification: u16, packet: &[u8]) -> u32 {
        self.prefix(packet.len()).icrc(identification, packet)
    }

    /// The identification with which `received` is the ICRC of `packet` (IPv6: [`NO_IDENTIFICATION`]). `None`: there is
    /// none, the packet is damaged.
    ///
    /// `expected` is tried first and costs nothing more than the CRC: a sender with a counter is
    /// followed by giving it what was found last plus one. If "don't fragment" set does not explain
    /// the packet, it is taken to be clear. See the module about what this check detects.
    pub fn explain(&self, expected: u16, packet: &[u8], received: u32) -> Option<u16> {
        self.prefix(packet.len()).explain(expected, packet, received)
    }

    /// CRC of the headers that packets of `packet_bytes` have in common: to be kept for a run of
    /// them.
    pub fn prefix(&self, packet_bytes: usize) -> Prefix {
        let udp_length = (UDP_BYTES + packet_bytes + ICRC_BYTES) as u16;
        let mut hasher = Hasher::new();
        match &self.addresses {
            Addresses::V4 { source, destination } => {
                let length = (IPV4_BYTES as u16).wrapping_add(udp_length);
                let mut head = [0xff; ONES_BYTES + IPV4_BYTES + UDP_BYTES];
                head[8] = 0x45;
                head[10..12].copy_from_slice(&length.to_be_bytes());
                head[12..16].copy_from_slice(&[0, 0, DONT_FRAGMENT, 0]);
                head[17] = PROTOCOL_UDP;
                head[20..24].copy_from_slice(source);
                head[24..28].copy_from_slice(destination);
                head[28..34].copy_from_slice(&self.udp(udp_length));
                hasher.update(&head);
            }
            Addresses::V6 { source, destination } => {
                let mut head = [0xff; ONES_BYTES + IPV6_BYTES + UDP_BYTES];
                head[8] = 0x6f;
                head[12..14].copy_from_slice(&udp_length.to_be_bytes());
                head[14] = PROTOCOL_UDP;
                head[16..32].copy_from_slice(source);
                head[32..48].copy_from_slice(destination);
                head[48..54].copy_from_slice(&self.udp(udp_length));
                hasher.update(&head);
            }
        }
        let has_identification = matches!(self.addresses, Addresses::V4 { .. });
        let long = (MASKED_DIFFERENCE_BYTES_MIN..=PACKET_BYTES_MAX).contains(&packet_bytes);
        let masked = long.then(|| {
            let behind = packet_bytes - MASKED_AT - 1;
            multiply(0xff << 24, multiply(SHIFT[behind & 0xff], SHIFT_256[behind >> 8]))
        });
        Prefix { crc: hasher.finalize(), packet_bytes, has_identification, masked }
    }

    /// The UDP header up to its checksum.
    fn udp(&self, length: u16) -> [u8; 6] {
        let (source, destination, length) =
            (self.source_port.to_be_bytes(), UDP_PORT.to_be_bytes(), length.to_be_bytes());
        [source[0], source[1], destination[0], destination[1], length[0], length[1]]
    }
}

/// The CRC of all that comes before the BTH, for the identification 0: [`Flow::icrc`] begun, for packets of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    crc: u32,
    packet_bytes: usize,
    has_identification: bool,
    /// Difference that the byte at [`MASKED_AT`] makes by counting as ones where it is zero. Only
    /// of long packets: of short ones the copy of the BTH costs less.
    masked: Option<u32>,
}

impl Prefix {
    /// Length of the packets that it is for, bytes.
    pub fn packet_bytes(&self) -> usize {
        self.packet_bytes
    }

    /// As [`Flow::icrc`], for a packet of [`packet_bytes`](Self::packet_bytes).
    pub fn icrc(&self, identification: u16, packet: &[u8]) -> u32 {
        debug_assert_eq!(packet.len(), self.packet_bytes);
        let mut crc = self.crc;
        if self.has_identification {
            let [high, low] = identification.to_be_bytes();
            crc ^= IDENTIFICATION_HIGH[usize::from(high)] ^ IDENTIFICATION_LOW[usize::from(low)];
        }
        let mut hasher = Hasher::new_with_initial(crc);
        if let Some(masked) = self.masked
            && packet.get(MASKED_AT) == Some(&0)
        {
            // No copy of the BTH: its bytes, written one by one and read together, would wait for
            // all writes before them, which are those of somebody's payload.
            hasher.update(packet);
            return hasher.finalize() ^ masked;
        }
        let (first, rest) = packet.split_at(packet.len().min(BTH_BYTES));
        let mut bth = [0; BTH_BYTES];
        bth[..first.len()].copy_from_slice(first);
        bth[MASKED_AT] = 0xff;
        hasher.update(&bth[..first.len()]);
        hasher.update(rest);
        hasher.finalize()
    }

    /// As [`Flow::explain`], for a packet of [`packet_bytes`](Self::packet_bytes).
    pub fn explain(&self, expected: u16, packet: &[u8], received: u32) -> Option<u16> {
        let difference = self.icrc(expected, packet) ^ received;
        match self.has_identification {
            true if difference == 0 => Some(expected),
            true => Some(expected ^ solve(difference, packet.len())?),
            false => (difference == 0).then_some(NO_IDENTIFICATION),
        }
    }
}

/// The bits of the identification by which two packets of `length` bytes differ whose ICRCs differ by `difference`.
fn solve(difference: u32, length: usize) -> Option<u16> {
    if length > PACKET_BYTES_MAX {
        return None;
    }
    let shift = multiply(SHIFT_BACK[length & 0xff], SHIFT_BACK_256[length >> 8]);
    let unshifted = multiply(difference, shift);
    [0, FRAGMENT].into_iter().find_map(|known| {
        let identification = unshifted ^ known;
        // Of degree below 16: the lower half is zero. Each byte of a message goes in by its lowest
        // bit first, so that the first of the two is the lower byte here.
        (identification & 0xffff == 0).then_some(((identification >> 16) as u16).swap_bytes())
    })
}

// ---- polynomials over GF(2) modulo P, as the CRC has them: bit 31 is the coefficient of x^0, bit 0 that of x^31

/// P without x^32.
const POLYNOMIAL: u32 = 0xedb8_8320;
/// The polynomial 1.
const ONE: u32 = 1 << 31;
/// Bytes from the identification to the packet (flags, TTL, protocol, checksum, addresses, UDP), and four more: x^32.
const BYTES_BETWEEN: usize = IPV4_BYTES - 6 + UDP_BYTES + 4;

/// `[i]`: takes a shift by a packet of i bytes, and what stands between it and the identification, back.
const SHIFT_BACK: [u32; 256] = powers(divided(ONE, 8 * BYTES_BETWEEN), divided(ONE, 8));
/// `[i]`: takes a shift by i times 256 bytes back.
const SHIFT_BACK_256: [u32; 256] = powers(ONE, divided(ONE, 8 * 256));
/// `[i]`: shifts by i bytes, and four more: x^32.
const SHIFT: [u32; 256] = powers(multiplied(ONE, 32), multiplied(ONE, 8));
/// `[i]`: shifts by i times 256 bytes.
const SHIFT_256: [u32; 256] = powers(ONE, multiplied(ONE, 8 * 256));
/// Change that the upper byte of an identification makes to the CRC of all that comes before the
/// packet.
const IDENTIFICATION_HIGH: [u32; 256] = identifications(16);
/// Change that the lower byte makes.
const IDENTIFICATION_LOW: [u32; 256] = identifications(24);
/// "Don't fragment" as it differs, in place of the identification: the second bit of a byte that
/// goes in by its lowest bit first is the seventh to follow.
const FRAGMENT: u32 = divided(ONE, 7);

/// The differences that [`solve`] solves for, for a packet of no bytes. `place`: of a byte's lowest bit there.
const fn identifications(place: u32) -> [u32; 256] {
    let shift = multiplied(ONE, 8 * BYTES_BETWEEN);
    let (mut table, mut byte) = ([0; 256], 0);
    while byte < table.len() {
        table[byte] = multiply((byte as u32) << place, shift);
        byte += 1;
    }
    table
}

/// `first`, `first`·`factor`, `first`·`factor`², …
const fn powers(first: u32, factor: u32) -> [u32; 256] {
    let mut table = [first; 256];
    let mut at = 1;
    while at < table.len() {
        table[at] = multiply(table[at - 1], factor);
        at += 1;
    }
    table
}

/// `value`·x.
const fn shifted(value: u32) -> u32 {
    (value >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(value & 1))
}

/// `value`·x^`count`.
const fn multiplied(mut value: u32, count: usize) -> u32 {
    let mut at = 0;
    while at < count {
        value = shifted(value);
        at += 1;
    }
    value
}

/// `value`·x^-`count`.
const fn divided(mut value: u32, count: usize) -> u32 {
    let mut at = 0;
    while at < count {
        // A polynomial with a constant term gets P added, which takes that away and brings x^32:
        // x^31 when divided, bit 0.
        let odd = value >> 31;
        value = (value ^ (POLYNOMIAL & 0u32.wrapping_sub(odd))) << 1 | odd;
        at += 1;
    }
    value
}

const fn multiply(left: u32, mut right: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= right & 0u32.wrapping_sub(left >> bit & 1);
        right = shifted(right);
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn division_is_the_inverse_of_shifting() {
        let mut value = 0x1234_5678;
        for _ in 0..1000 {
            assert_eq!(shifted(divided(value, 1)), value);
            assert_eq!(divided(shifted(value), 1), value);
            value = shifted(value) ^ 0x9e37_79b9;
        }
        assert_eq!(multiply(ONE, 0xdead_beef), 0xdead_beef);
        assert_eq!(multiply(ONE >> 1, 0xdead_beef), shifted(0xdead_beef));
    }

    /// The definition, byte by byte, for every length and what is masked.
    #[test]
    fn prefixes_agree_with_the_definition() {
        let flow = Flow {
            addresses: Addresses::V4 { source: [192, 0, 2, 1], destination: [192, 0, 2, 2] },
            source_port: 0xc123,
        };
        let lengths = (12..600).chain([1040, 4095, 4096, 4108, 4140, 9000, PACKET_BYTES_MAX]);
        for (length, masked) in lengths.flat_map(|length| [(length, 0), (length, 0x80), (length, 0xff)]) {
            let mut packet: Vec<u8> = (0..length).map(|at| (at * 7 + length) as u8).collect();
            packet[MASKED_AT] = masked;
            let identification = (length as u16).wrapping_mul(0x1357) ^ u16::from(masked);
            let udp_length = (length + 12) as u16;
            let mut whole = std::vec![0xff; 8];
            whole.extend([0x45, 0xff]);
            whole.extend((udp_length + 20).to_be_bytes());
            whole.extend(identification.to_be_bytes());
            whole.extend([0x40, 0, 0xff, 17, 0xff, 0xff, 192, 0, 2, 1, 192, 0, 2, 2, 0xc1, 0x23, 0x12, 0xb7]);
            whole.extend(udp_length.to_be_bytes());
            whole.extend([0xff, 0xff]);
            whole.extend(&packet);
            whole[36 + MASKED_AT] = 0xff;
            let mut crc = u32::MAX;
            for byte in whole {
                crc = (0..8).fold(crc ^ u32::from(byte), |crc, _| shifted(crc));
            }
            let prefix = flow.prefix(length);
            assert_eq!(prefix.icrc(identification, &packet), !crc, "{length} bytes, {masked:#x}");
            assert_eq!(prefix.explain(7, &packet, !crc), Some(identification), "{length} bytes, {masked:#x}");
        }
    }

    #[test]
    fn tables_take_back_whole_bytes() {
        for length in [0, 1, 255, 256, 257, 4143, PACKET_BYTES_MAX] {
            let back = multiply(SHIFT_BACK[length & 0xff], SHIFT_BACK_256[length >> 8]);
            let mut forth = ONE;
            for _ in 0..8 * (BYTES_BETWEEN + length) {
                forth = shifted(forth);
            }
            assert_eq!(multiply(back, forth), ONE, "{length} bytes");
        }
    }

    /// Single wrong bits pass at the distances in the module's documentation, and at no others
    /// within 26 KB.
    #[test]
    fn single_wrong_bits_that_pass() {
        let (mut power, mut set, mut clear) = (ONE, Vec::new(), Vec::new());
        for distance in 1..=8 * 27_000 {
            power = divided(power, 1);
            if power & 0xffff == 0 {
                set.push(distance);
            }
            if (power ^ FRAGMENT) & 0xffff == 0 {
                clear.push(distance);
            }
        }
        assert_eq!(set, [214_135]);
        assert_eq!(clear, [7, 1564, 14_855, 214_142], "7 is the bit itself");
    }
}
