//! Frames: packets that only FreeFlow routers exchange, and only if both want them.
//!
//! A frame is a packet of the reliable connection service with headers of one length, so that all but the last of a
//! message are equal, and the packets of many messages make one batch of segments. Each says where its payload belongs.
//! Its opcode is one of those left to manufacturers (IBTA 9.2.1: the upper three bits are 110), which no standard
//! receiver takes; the lower five are the standard's operation and place.
//!
//! ```text
//!  0  BTH                 as in any packet; no padding
//! 12  address   8 bytes   WRITE: where this payload begins; SEND: its offset in the message; READ request: where the
//!                         range begins; READ response: 0; report: see below
//! 20  rkey      4 bytes   WRITE, READ request; report: see below; else 0
//! 24  length    4 bytes   of the whole message or READ; READ response: 0; report: see below
//! 28  argument  4 bytes   ImmDt, IETH or AETH, where the opcode has one; READ request: payload of a response packet
//! 32  message   4 bytes   8 bits 0, and the PSN of the message's first packet; READ response, report: 0
//! 36  CRC       4 bytes   CRC-32 (of Ethernet, little-endian as the ICRC) of the 36 bytes before
//! 40  payload             to the end of the datagram
//! ```
//!
//! A *report* is a sequence NAK as a frame (operation Acknowledge): its PSN is the first that is missing, and the 128
//! bits of address, rkey and length say which of the packets behind that one are kept ([`Kept`](crate::Kept)).
//!
//! The CRC covers nothing of the payload: that is the UDP checksum's, which is always there. So whatever a receiver
//! checks itself does not depend on bytes that a program may be writing meanwhile.
use crate::{BTH_BYTES, Operation};

/// Headers of a frame, bytes.
pub const FRAME_HEADER_BYTES: usize = 40;
/// Largest payload of a frame, bytes.
pub const FRAME_PAYLOAD_BYTES_MAX: usize = 8192;
/// IPv4 and UDP headers, or IPv6's, and those of a frame.
const OVERHEAD_V4_BYTES: u32 = 20 + 8 + FRAME_HEADER_BYTES as u32;
const OVERHEAD_V6_BYTES: u32 = 40 + 8 + FRAME_HEADER_BYTES as u32;
/// Least payload of a whole frame: that of the smallest path MTU.
const PAYLOAD_BYTES_MIN: u32 = 256;
const PAGE_BYTES: u32 = 4096;
/// Payload of less than a page is a multiple of this.
const CACHE_LINE_BYTES: u32 = 64;
/// Upper three bits of the opcode.
pub(crate) const OPCODE_BITS: u8 = 0b110 << 5;
const OPERATION_MASK: u8 = 31;
pub(crate) const CRC_BYTES: usize = 4;
const CRC_AT: usize = FRAME_HEADER_BYTES - CRC_BYTES;
/// First byte of a frame of records, and where the heads of its messages begin.
pub(crate) const RECORDS_OPCODE: u8 = OPCODE_BITS | 31;
pub(crate) const RECORD_HEADS_AT: usize = BTH_BYTES + 4;

/// Fields that a frame has beyond the standard's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// PSN of the message's first packet.
    pub message_psn: u32,
    /// READ request: payload of each response packet but the last, bytes.
    pub response_bytes: u32,
}

/// Whether a packet says that it is a frame.
#[inline]
pub fn is_frame(packet: &[u8]) -> bool {
    packet.first().is_some_and(|&opcode| opcode & !OPERATION_MASK == OPCODE_BITS)
}

/// Whether a packet says that it is a frame of [records](crate::records).
#[inline]
pub fn is_records(packet: &[u8]) -> bool {
    packet.first() == Some(&RECORDS_OPCODE)
}

/// Whether a packet is a request of the reliable connection service: a frame or a packet of the standard, no response
/// and no acknowledgement.
#[inline]
pub fn is_rc_request(packet: &[u8]) -> bool {
    let Some(&opcode) = packet.first() else { return false };
    matches!(opcode & !OPERATION_MASK, 0 | OPCODE_BITS) && !matches!(opcode & OPERATION_MASK, 13..=18)
}

/// Where the CRC of a frame of records stands, if there is one.
pub(crate) fn records_crc_at(packet: &[u8]) -> Option<usize> {
    let length = packet.get(RECORD_HEADS_AT - 2..RECORD_HEADS_AT)?.first_chunk::<2>()?;
    let at = RECORD_HEADS_AT + usize::from(u16::from_be_bytes(*length));
    (at + CRC_BYTES <= packet.len()).then_some(at)
}

/// Whether a frame's headers are all there, and undamaged; of one with [records](crate::records) their heads, too.
#[inline]
pub fn is_intact(packet: &[u8]) -> bool {
    if is_records(packet) {
        let split = records_crc_at(packet).and_then(|at| packet.split_at_checked(at));
        return split.is_some_and(|(head, rest)| rest.starts_with(&crc_of(head).to_le_bytes()));
    }
    let Some((head, _)) = packet.split_first_chunk::<FRAME_HEADER_BYTES>() else { return false };
    head[CRC_AT..] == crc(head).to_le_bytes()
}

/// Bytes of a frame that its CRC protects, and the CRC: all before the payload.
pub fn protected_bytes(packet: &[u8]) -> usize {
    let of_records = if is_records(packet) { records_crc_at(packet) } else { None };
    of_records.map_or(FRAME_HEADER_BYTES, |at| at + CRC_BYTES).min(packet.len())
}

pub(crate) fn crc_of(head: &[u8]) -> u32 {
    crc32fast::hash(head)
}

fn crc(head: &[u8; FRAME_HEADER_BYTES]) -> u32 {
    crc_of(&head[..CRC_AT])
}

/// Writes the CRC of the headers before it.
pub(crate) fn seal(head: &mut [u8; FRAME_HEADER_BYTES]) {
    let value = crc(head);
    head[CRC_AT..].copy_from_slice(&value.to_le_bytes());
}

/// Whether packets of this operation travel as frames.
pub const fn travels_as_frame(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Send
            | Operation::SendImmediate
            | Operation::SendInvalidate
            | Operation::Write
            | Operation::WriteImmediate
            | Operation::ReadRequest
            | Operation::ReadResponse
            | Operation::Acknowledge
    )
}

/// The standard RC opcode with the operation and place of a frame's.
pub(crate) const fn standard_byte(opcode: u8) -> u8 {
    opcode & OPERATION_MASK
}

/// Payload of a whole frame on a link that carries IP packets of `mtu` bytes: whole pages where one fits, else whole
/// cache lines; [`FRAME_PAYLOAD_BYTES_MAX`] at most. `None`: the link carries no useful frame.
pub fn payload_bytes(mtu: u32, is_v4: bool) -> Option<u16> {
    let room = mtu.checked_sub(if is_v4 { OVERHEAD_V4_BYTES } else { OVERHEAD_V6_BYTES })?;
    let room = room.min(FRAME_PAYLOAD_BYTES_MAX as u32);
    let unit = if room >= PAGE_BYTES { PAGE_BYTES } else { CACHE_LINE_BYTES };
    let bytes = room - room % unit;
    (bytes >= PAYLOAD_BYTES_MIN).then_some(bytes as u16)
}

/// Whether a READ may ask for response packets with so much payload.
pub const fn is_response_length(bytes: u32) -> bool {
    bytes >= PAYLOAD_BYTES_MIN && bytes <= FRAME_PAYLOAD_BYTES_MAX as u32
}

const _: () = assert!(BTH_BYTES + 8 + 4 + 4 + 4 + 4 + 4 == FRAME_HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Aeth, Header, Malformed, Opcode, PacketPosition, Reth, Service, Syndrome};
    use std::vec::Vec;

    fn header(operation: Operation, place: PacketPosition) -> Header {
        let opcode = Opcode::new(Service::Rc, operation, place).expect("the standard has it");
        Header { frame: Some(Frame::default()), ..Header::new(opcode, 0x1234, 0xab_cdef) }
    }

    fn packet(header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut packet = header.encode().as_slice().to_vec();
        packet.extend_from_slice(payload);
        packet
    }

    #[test]
    fn the_layout_is_the_one_above() {
        let mut write = header(Operation::WriteImmediate, PacketPosition::Last);
        write.ack_request = true;
        write.reth = Reth { address: 0x0102_0304_0506_0708, rkey: 0x1112_1314, length: 0x2122_2324 };
        write.immediate = u32::from_ne_bytes([0x31, 0x32, 0x33, 0x34]);
        write.frame = Some(Frame { message_psn: 0x41_4243, response_bytes: 0 });
        let bytes = packet(&write, b"abc");
        let expected = [
            0xc9, 0x00, 0xff, 0xff, 0x00, 0x00, 0x12, 0x34, 0x80, 0xab, 0xcd, 0xef, // BTH
            0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x11, 0x12, 0x13, 0x14, // address, rkey
            0x21, 0x22, 0x23, 0x24, 0x31, 0x32, 0x33, 0x34, 0x00, 0x41, 0x42, 0x43, // length, argument, message
        ];
        assert_eq!(bytes[..36], expected);
        assert_eq!(bytes[36..40], crc32fast::hash(&expected).to_le_bytes());
        assert_eq!(Header::parse(&bytes), Ok((write, &b"abc"[..])));
    }

    #[test]
    fn requests_of_rc_are_told_from_all_else() {
        for opcode in (0..=u8::MAX).filter_map(Opcode::from_byte) {
            let is_request = opcode.service() == Service::Rc && !opcode.is_response();
            assert_eq!(is_rc_request(&[opcode.byte()]), is_request, "{opcode:?}");
            if opcode.service() == Service::Rc && travels_as_frame(opcode.operation()) {
                assert_eq!(is_rc_request(&[OPCODE_BITS | opcode.byte()]), is_request, "{opcode:?}");
            }
        }
        assert!(is_rc_request(&[RECORDS_OPCODE]) && !is_rc_request(&[]));
    }

    #[test]
    fn each_operation_comes_back() {
        let places = [PacketPosition::First, PacketPosition::Middle, PacketPosition::Last, PacketPosition::Only];
        for byte in 0..=31 {
            let Some(opcode) = Opcode::from_byte(byte) else { continue };
            if !travels_as_frame(opcode.operation()) {
                let mut bytes = [0; FRAME_HEADER_BYTES];
                bytes[0] = OPCODE_BITS | byte;
                assert_eq!(Header::parse(&bytes).err(), Some(Malformed::Opcode), "{opcode:?}");
                continue;
            }
            assert!(places.contains(&opcode.place()));
            let mut header = header(opcode.operation(), opcode.place());
            header.reth = Reth { address: u64::MAX, rkey: 7, length: 9000 };
            header.frame = Some(Frame { message_psn: 5, response_bytes: 0 });
            match opcode.operation() {
                Operation::SendImmediate | Operation::WriteImmediate => header.immediate = 77,
                Operation::SendInvalidate => header.invalidate = 78,
                Operation::ReadResponse | Operation::Acknowledge => {
                    header.aeth = Aeth { syndrome: Syndrome::ACK, msn: 79 };
                }
                Operation::ReadRequest => header.frame = Some(Frame { message_psn: 5, response_bytes: 4096 }),
                _ => {}
            }
            let payload: &[u8] = if opcode.has_payload() { b"12345" } else { b"" };
            let bytes = packet(&header, payload);
            assert!(is_frame(&bytes) && is_intact(&bytes));
            assert_eq!(Header::parse(&bytes), Ok((header, payload)), "{opcode:?}");
        }
    }

    #[test]
    fn damage_of_the_headers_shows() {
        let whole = packet(&header(Operation::Send, PacketPosition::Middle), &[0; 64]);
        for bit in 0..FRAME_HEADER_BYTES * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&damaged), "bit {bit}");
        }
        assert!(!is_intact(&whole[..FRAME_HEADER_BYTES - 1]));
        assert_eq!(Header::parse(&whole[..FRAME_HEADER_BYTES - 1]), Err(Malformed::Truncated));
    }

    #[test]
    fn frames_have_no_more_than_their_payload() {
        let write = header(Operation::Write, PacketPosition::Only);
        assert!(Header::parse(&packet(&write, &[0; FRAME_PAYLOAD_BYTES_MAX])).is_ok());
        assert_eq!(Header::parse(&packet(&write, &[0; FRAME_PAYLOAD_BYTES_MAX + 1])), Err(Malformed::Length));
        let read = header(Operation::ReadRequest, PacketPosition::Only);
        assert_eq!(Header::parse(&packet(&read, &[0])), Err(Malformed::Length));
    }

    #[test]
    fn payload_follows_the_link() {
        let v4 = [0, 323, 324, 1500, 4163, 4164, 4200, 8260, 9000, 65_536].map(|mtu| payload_bytes(mtu, true));
        let expected =
            [None, None, Some(256), Some(1408), Some(4032), Some(4096), Some(4096), Some(8192), Some(8192), Some(8192)];
        assert_eq!(v4, expected);
        assert_eq!([1500, 4183, 4184].map(|mtu| payload_bytes(mtu, false)), [Some(1408), Some(4032), Some(4096)]);
    }
}
