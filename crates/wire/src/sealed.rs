//! Sealed packets: what two FreeFlow routers that are configured so send each other, and nothing else.
//!
//! A sealed packet has another packet in it, encrypted and authenticated by AES-128-GCM (RFC 5116), with a key that is
//! one pair of hosts' and one direction's. The first byte is one of the opcodes left to manufacturers (IBTA 9.2.1),
//! which neither a standard packet nor a [frame](crate::frame) has.
//!
//! ```text
//!  0  type      1 byte    0xe0
//!  1  key       3 bytes   the number that the sender gave its key, big-endian, as is the counter
//!  4  counter   8 bytes   the number of the receiver's engine in the first one; then packets that were sealed with
//!                         this key before
//! 12  text                a frame, or a packet of the standard with an ICRC of 0, encrypted
//!  …  tag      16 bytes   covers the text and the twelve bytes before it
//! ```
//!
//! All packets become longer by the same number of bytes, so equal ones stay equal.
use crate::MASK_24;

/// Bytes before the text.
pub const SEAL_HEADER_BYTES: usize = 12;
/// Bytes behind the text.
pub const SEAL_TAG_BYTES: usize = 16;
/// Bytes by which a sealed packet is longer than the one in it.
pub const SEAL_BYTES: usize = SEAL_HEADER_BYTES + SEAL_TAG_BYTES;
/// Key of AES-128.
pub const SEAL_KEY_BYTES: usize = 16;
/// Nonces of GCM.
pub const SEAL_NONCE_BYTES: usize = 12;
/// Above the count in a counter.
const ENGINE_SHIFT: u32 = 56;
/// First byte of a sealed packet.
pub const SEAL_TYPE: u8 = 0b111 << 5;

/// The header of a sealed packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealHeader {
    /// Number of the key, 24 bits.
    pub key: u32,
    /// The packet's own number under that key, with the receiver's engine in its highest byte.
    pub counter: u64,
}

/// Whether a packet says that it is sealed.
#[inline]
pub fn is_sealed(packet: &[u8]) -> bool {
    packet.first() == Some(&SEAL_TYPE)
}

impl SealHeader {
    /// Of the packet with this number, below 2^56, to an engine of the receiver's.
    #[inline]
    pub const fn new(key: u32, shard: u8, count: u64) -> Self {
        Self { key, counter: (shard as u64) << ENGINE_SHIFT | count }
    }

    /// The number of the receiver's engine that has the packet in it.
    #[inline]
    pub const fn shard(self) -> u8 {
        (self.counter >> ENGINE_SHIFT) as u8
    }

    /// As it stands in the packet, and as the tag covers it.
    #[inline]
    pub fn encode(self) -> [u8; SEAL_HEADER_BYTES] {
        let mut bytes = [0; SEAL_HEADER_BYTES];
        bytes[..4].copy_from_slice(&(u32::from(SEAL_TYPE) << 24 | self.key & MASK_24).to_be_bytes());
        bytes[4..].copy_from_slice(&self.counter.to_be_bytes());
        bytes
    }

    /// The header, and what is behind it: text and tag. `None`: no sealed packet, or too short for one.
    #[inline]
    pub fn parse(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = packet.split_first_chunk::<SEAL_HEADER_BYTES>()?;
        if !is_sealed(head) || rest.len() < SEAL_TAG_BYTES {
            return None;
        }
        let (first, counter) = head.split_at(4);
        let key = u32::from_be_bytes(first.try_into().ok()?) & MASK_24;
        Some((Self { key, counter: u64::from_be_bytes(counter.try_into().ok()?) }, rest))
    }

    /// The nonce of this packet: the key's own random bits, and the counter in the lower eight bytes (as in RFC 8446,
    /// 5.3). No two packets of a key have the same.
    #[inline]
    pub fn nonce(self, base: &[u8; SEAL_NONCE_BYTES]) -> [u8; SEAL_NONCE_BYTES] {
        let mut nonce = *base;
        for (byte, of_counter) in nonce[SEAL_NONCE_BYTES - 8..].iter_mut().zip(self.counter.to_be_bytes()) {
            *byte ^= of_counter;
        }
        nonce
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::is_frame;
    use crate::{Header, Malformed, Opcode};
    use std::vec::Vec;

    #[test]
    fn the_layout_is_the_one_above() {
        let header = SealHeader { key: 0xab_cdef, counter: 0x0102_0304_0506_0708 };
        let mut packet = header.encode().to_vec();
        assert_eq!(packet, [0xe0, 0xab, 0xcd, 0xef, 1, 2, 3, 4, 5, 6, 7, 8]);
        packet.extend_from_slice(&[9; SEAL_TAG_BYTES]);
        assert_eq!(SealHeader::parse(&packet), Some((header, &[9; SEAL_TAG_BYTES][..])));
        assert_eq!(SealHeader::parse(&packet[..SEAL_BYTES - 1]), None);
        assert_eq!((header.shard(), SealHeader::new(0xab_cdef, 1, 0x02_0304_0506_0708)), (1, header));
        packet[0] = 0xe1;
        assert_eq!(SealHeader::parse(&packet), None);
    }

    #[test]
    fn nothing_else_looks_like_it() {
        let mut packet = [0; 64];
        for byte in 0..=u8::MAX {
            packet[0] = byte;
            if is_sealed(&packet) {
                assert_eq!(Opcode::from_byte(byte), None);
                assert!(!is_frame(&packet));
                assert_eq!(Header::parse(&packet).err(), Some(Malformed::Opcode));
            }
        }
    }

    #[test]
    fn nonces_of_one_key_differ() {
        let base = [0xa5; SEAL_NONCE_BYTES];
        let counts = [0, 1, 2, 255, 256, 1 << 24, 1 << 32, (1 << 56) - 1];
        let counters: Vec<_> = counts.into_iter().flat_map(|count| (0..8).map(move |shard| (shard, count))).collect();
        let nonce = |&(shard, count): &(u8, u64)| SealHeader::new(1, shard, count).nonce(&base);
        let mut nonces: Vec<_> = counters.iter().map(nonce).collect();
        assert!(nonces.iter().all(|nonce| nonce[..4] == base[..4]));
        nonces.sort_unstable();
        nonces.dedup();
        assert_eq!(nonces.len(), counters.len());
    }
}
