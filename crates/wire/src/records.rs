//! Frames of records: several short messages of one QP in one packet.
//!
//! Each message is what a [frame](crate::frame) of its own would be, with a PSN of its own, one after the other: what
//! they share is said once. Their heads stand together, before all payload, so that one CRC covers whatever a receiver
//! checks, and nothing that a program may be writing meanwhile.
//!
//! ```text
//!  0  BTH                  opcode 0b110_11111, flags 0; PSN: the first message's
//! 12  count       1 byte   messages
//! 13              1 byte   0
//! 14  heads       2 bytes  bytes of all heads
//! 16  heads                one for each message, of 4 to 20 bytes:
//!       operation 1 byte   the highest bit: solicited; the lower five: operation and place (ONLY) of the standard
//!                 1 byte   0
//!       length    2 bytes  payload of the message
//!       rkey      4 bytes  WRITE
//!       address   8 bytes  WRITE
//!       argument  4 bytes  ImmDt or IETH, where the opcode has one
//!     CRC         4 bytes  CRC-32 of all before, as a frame's
//!     payload              one message's behind the other's, to the end of the datagram
//! ```
pub use crate::frame::is_records;
use crate::frame::{CRC_BYTES, Frame, RECORD_HEADS_AT as HEADS_AT, RECORDS_OPCODE as OPCODE, crc_of, records_crc_at};
use crate::header::{Reader, immediate_of, immediate_word};
use crate::{BTH_BYTES, Header, MASK_24, Malformed, Opcode, Operation, PKEY_DEFAULT, PacketPosition, Reth, psn_add};

/// Messages of one frame, at most.
pub const RECORDS_MAX: usize = 32;
/// Payload of a message that travels so, bytes, at most: of longer ones a packet holds too few to pay.
pub const RECORD_PAYLOAD_BYTES_MAX: usize = 512;
/// Everything before the payload, bytes, at most.
pub const RECORDS_HEAD_BYTES_MAX: usize = HEADS_AT + RECORDS_MAX * RECORD_BYTES_MAX + CRC_BYTES;

const COUNT_AT: usize = BTH_BYTES;
const RECORD_BYTES_MAX: usize = 20;
const SOLICITED: u8 = 1 << 7;
const ACK_REQUEST: u32 = 1 << 31;
const ACK_WAITS: u32 = 1 << 28;

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// One that [travels as a record](is_record).
    pub opcode: Opcode,
    /// Solicited event bit.
    pub solicited: bool,
    /// Payload, bytes.
    pub length: u16,
    /// WRITE; else 0.
    pub rkey: u32,
    /// WRITE; else 0.
    pub address: u64,
    /// Immediate data as [`Header::immediate`] has it, or the key to invalidate; else 0.
    pub argument: u32,
}

/// A received frame of records; as an iterator: its messages that are left, and their payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Records<'a> {
    /// QPN of the receiver.
    pub dest_qpn: u32,
    /// Of the next message.
    pub psn: u32,
    /// Acknowledgement request bit: each message asks for one.
    pub ack_request: bool,
    /// As in [`Header`]: these acknowledgements may wait.
    pub ack_waits: bool,
    /// P_Key.
    pub pkey: u16,
    heads: &'a [u8],
    payload: &'a [u8],
}

/// The head of a frame that is being written.
pub struct RecordsWriter {
    bytes: [u8; RECORDS_HEAD_BYTES_MAX],
    at: usize,
    count: u8,
}

/// Whether messages of this opcode may travel as records.
pub const fn is_record(opcode: Opcode) -> bool {
    opcode.byte() < 32
        && matches!(opcode.place(), PacketPosition::Only)
        && matches!(
            opcode.operation(),
            Operation::Send
                | Operation::SendImmediate
                | Operation::SendInvalidate
                | Operation::Write
                | Operation::WriteImmediate
        )
}

/// Bytes of the head of a message.
pub const fn head_bytes(writes: bool, has_argument: bool) -> usize {
    4 + if writes { 12 } else { 0 } + if has_argument { 4 } else { 0 }
}

/// Bytes of a frame besides heads and payload.
pub const fn fixed_bytes() -> usize {
    HEADS_AT + CRC_BYTES
}

/// Messages that a packet has, by its own word, which nobody has checked: 1, if it is no frame of records.
#[inline]
pub fn message_count(packet: &[u8]) -> usize {
    match is_records(packet) {
        true => packet.get(COUNT_AT).map_or(1, |&count| usize::from(count).clamp(1, RECORDS_MAX)),
        false => 1,
    }
}

impl Record {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (byte, zero, length) = (reader.u8(), reader.u8(), reader.u16());
        let opcode = Opcode::from_byte(byte & !SOLICITED).filter(|&opcode| is_record(opcode) && zero == 0);
        let opcode = opcode.ok_or(if reader.short { Malformed::Truncated } else { Malformed::Opcode })?;
        let mut record = Self { opcode, solicited: byte & SOLICITED != 0, length, rkey: 0, address: 0, argument: 0 };
        if opcode.has_reth() {
            (record.rkey, record.address) = (reader.u32(), reader.u64());
        }
        if opcode.has_immediate() {
            record.argument = immediate_of(reader.u32());
        } else if opcode.has_ieth() {
            record.argument = reader.u32();
        }
        match reader.short {
            true => Err(Malformed::Truncated),
            false if usize::from(length) > RECORD_PAYLOAD_BYTES_MAX => Err(Malformed::Length),
            false => Ok(record),
        }
    }
}

impl<'a> Records<'a> {
    /// Reads a frame of records, and checks all that can be checked without a QP; not its CRC
    /// ([`is_intact`](crate::frame::is_intact)).
    ///
    /// # Errors
    /// [`Malformed`]: the first check that failed.
    pub fn parse(packet: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader { bytes: packet, short: false };
        let (opcode, flags, pkey) = (reader.u8(), reader.u8(), reader.u16());
        let (qpn, psn) = (reader.u32(), reader.u32());
        let (count, zero, _) = (reader.u8(), reader.u8(), reader.u16());
        if reader.short {
            return Err(Malformed::Truncated);
        }
        if flags != 0 || qpn & !MASK_24 & !ACK_WAITS != 0 || psn & !MASK_24 & !ACK_REQUEST != 0 || zero != 0 {
            return Err(Malformed::Version);
        }
        if opcode != OPCODE {
            return Err(Malformed::Opcode);
        }
        let crc = records_crc_at(packet).ok_or(Malformed::Truncated)?;
        let (heads, payload) = (&packet[HEADS_AT..crc], &packet[crc + CRC_BYTES..]);
        let records = Self {
            dest_qpn: qpn & MASK_24,
            psn: psn & MASK_24,
            ack_request: psn & ACK_REQUEST != 0,
            ack_waits: qpn & ACK_WAITS != 0,
            pkey,
            heads,
            payload,
        };
        let (mut reader, mut messages, mut bytes) = (Reader { bytes: heads, short: false }, 0, 0);
        while !reader.bytes.is_empty() && messages <= RECORDS_MAX {
            bytes += usize::from(Record::read(&mut reader)?.length);
            messages += 1;
        }
        let is_whole = messages == usize::from(count) && (1..=RECORDS_MAX).contains(&messages);
        if is_whole && bytes == payload.len() { Ok(records) } else { Err(Malformed::Length) }
    }

    /// The headers of the frame that would have this message, of this PSN, alone.
    pub fn header(&self, psn: u32, record: &Record) -> Header {
        let Record { opcode, solicited, length, rkey, address, argument } = *record;
        Header {
            solicited,
            ack_request: self.ack_request,
            ack_waits: self.ack_waits,
            reth: Reth { address, rkey, length: u32::from(length) },
            immediate: if opcode.has_immediate() { argument } else { 0 },
            invalidate: if opcode.has_ieth() { argument } else { 0 },
            frame: Some(Frame { message_psn: psn & MASK_24, response_bytes: 0 }),
            ..Header::new(opcode, self.dest_qpn, psn)
        }
    }

    /// No message is left.
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = (Record, &'a [u8]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let mut reader = Reader { bytes: self.heads, short: false };
        // `parse` has read all of them.
        let record = Record::read(&mut reader).ok()?;
        let (payload, rest) = self.payload.split_at_checked(usize::from(record.length))?;
        (self.heads, self.payload, self.psn) = (reader.bytes, rest, psn_add(self.psn, 1));
        Some((record, payload))
    }
}

impl RecordsWriter {
    /// No message yet.
    pub fn new(dest_qpn: u32, psn: u32, (ack_request, ack_waits): (bool, bool)) -> Self {
        let mut writer = Self { bytes: [0; RECORDS_HEAD_BYTES_MAX], at: 0, count: 0 };
        writer.put(&[OPCODE, 0]);
        writer.put(&PKEY_DEFAULT.to_be_bytes());
        writer.put(&(dest_qpn & MASK_24 | if ack_waits { ACK_WAITS } else { 0 }).to_be_bytes());
        writer.put(&(psn & MASK_24 | if ack_request { ACK_REQUEST } else { 0 }).to_be_bytes());
        writer.at = HEADS_AT;
        writer
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    /// Adds a message, of which there are [`RECORDS_MAX`] at most.
    #[inline]
    pub fn push(&mut self, record: &Record) {
        debug_assert!(is_record(record.opcode) && usize::from(record.length) <= RECORD_PAYLOAD_BYTES_MAX);
        assert!(usize::from(self.count) < RECORDS_MAX, "no more messages than a frame has room for");
        let solicited = if record.solicited { SOLICITED } else { 0 };
        let [high, low] = record.length.to_be_bytes();
        self.put(&[record.opcode.byte() | solicited, 0, high, low]);
        if record.opcode.has_reth() {
            self.put(&record.rkey.to_be_bytes());
            self.put(&record.address.to_be_bytes());
        }
        if record.opcode.has_immediate() {
            self.put(&immediate_word(record.argument).to_be_bytes());
        } else if record.opcode.has_ieth() {
            self.put(&record.argument.to_be_bytes());
        }
        self.count += 1;
    }

    /// Everything before the payload.
    pub fn finish(&mut self) -> &[u8] {
        self.bytes[COUNT_AT] = self.count;
        let heads = (self.at - HEADS_AT) as u16;
        self.bytes[HEADS_AT - 2..HEADS_AT].copy_from_slice(&heads.to_be_bytes());
        let (end, crc) = (self.at, crc_of(&self.bytes[..self.at]));
        self.bytes[end..end + CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
        &self.bytes[..end + CRC_BYTES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Service;
    use crate::frame::{is_frame, is_intact, protected_bytes};
    use std::vec;
    use std::vec::Vec;

    fn record(operation: Operation, length: u16) -> Record {
        let opcode = Opcode::new(Service::Rc, operation, PacketPosition::Only).expect("the standard has it");
        let is_write = opcode.has_reth();
        let (rkey, address) = if is_write { (0x1112_1314, 0x0102_0304_0506_0708) } else { (0, 0) };
        let argument = if opcode.has_immediate() || opcode.has_ieth() { 0x3132_3334 } else { 0 };
        Record { opcode, solicited: false, length, rkey, address, argument }
    }

    fn all() -> Vec<Record> {
        use Operation as O;
        let operations = [O::Send, O::SendImmediate, O::SendInvalidate, O::Write, O::WriteImmediate];
        (0..).zip(operations).map(|(length, operation)| record(operation, 3 * length)).collect()
    }

    fn packet(records: &[Record]) -> Vec<u8> {
        let mut writer = RecordsWriter::new(0x1234, 0xff_fffe, (true, false));
        records.iter().for_each(|record| writer.push(record));
        let mut packet = writer.finish().to_vec();
        for (at, record) in records.iter().enumerate() {
            packet.extend(vec![at as u8; record.length.into()]);
        }
        packet
    }

    #[test]
    fn messages_are_counted_before_anything_is_checked() {
        let mut bytes = packet(&all());
        assert_eq!(message_count(&bytes), all().len());
        for (says, counts) in [(0, 1), (32, 32), (33, 32), (255, 32)] {
            bytes[COUNT_AT] = says;
            assert_eq!(message_count(&bytes), counts);
        }
        assert_eq!((message_count(&bytes[..COUNT_AT]), message_count(&[0x64; 100]), message_count(&[])), (1, 1, 1));
    }

    #[test]
    fn the_layout_is_the_one_above() {
        let write = Record { solicited: true, ..record(Operation::WriteImmediate, 3) };
        let bytes = packet(&[record(Operation::Send, 1), write]);
        let argument = 0x3132_3334_u32.to_ne_bytes();
        let mut expected = vec![
            0xdf, 0x00, 0xff, 0xff, 0x00, 0x00, 0x12, 0x34, 0x80, 0xff, 0xff, 0xfe, // BTH
            0x02, 0x00, 0x00, 0x18, // count, heads
            0x04, 0x00, 0x00, 0x01, // SEND
            0x8b, 0x00, 0x00, 0x03, 0x11, 0x12, 0x13, 0x14, // WRITE, rkey
            0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, // address
        ];
        expected.extend(argument);
        let crc = crc32fast::hash(&expected);
        expected.extend(crc.to_le_bytes());
        expected.extend([0, 1, 1, 1]);
        assert_eq!(bytes, expected);
        assert_eq!(fixed_bytes() + head_bytes(false, false) + head_bytes(true, true) + 4, bytes.len());
    }

    #[test]
    fn each_message_comes_back() {
        let (records, bytes) = (all(), packet(&all()));
        assert!(is_frame(&bytes) && is_records(&bytes) && is_intact(&bytes));
        assert_eq!(Header::parse(&bytes).err(), Some(Malformed::Opcode), "it is no packet of one message");
        let read = Records::parse(&bytes).expect("it is whole");
        assert_eq!((read.dest_qpn, read.psn, read.ack_request, read.pkey), (0x1234, 0xff_fffe, true, PKEY_DEFAULT));
        let mut left = read;
        for (at, record) in records.iter().enumerate() {
            let payload = vec![at as u8; record.length.into()];
            assert_eq!(left.psn, psn_add(0xff_fffe, at as u32));
            assert_eq!(left.next(), Some((*record, &payload[..])));
            let header = read.header(9, record);
            assert_eq!((header.dest_qpn, header.ack_request, header.ack_waits), (0x1234, true, false));
            assert_eq!(Header::parse(header.encode().as_slice()), Ok((header, &b""[..])), "a frame says the same");
        }
        assert!(left.is_empty() && left.next().is_none());
    }

    #[test]
    fn damage_of_the_heads_shows() {
        let whole = packet(&all());
        let payload: usize = all().iter().map(|record| usize::from(record.length)).sum();
        assert_eq!(protected_bytes(&whole), whole.len() - payload);
        for bit in 0..(whole.len() - payload) * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_records(&damaged) || !is_intact(&damaged), "bit {bit}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let whole = packet(&all());
        for length in 0..whole.len() {
            assert!(Records::parse(&whole[..length]).is_err(), "{length}");
        }
        assert_eq!(Records::parse(&[&whole[..], &[0]].concat()).err(), Some(Malformed::Length), "a byte too many");
        let changed = |at: usize, value: u8| {
            let mut bytes = whole.clone();
            bytes[at] = value;
            Records::parse(&bytes).err()
        };
        let mut waits = whole.clone();
        waits[4] |= 0x10;
        assert!(Records::parse(&waits).is_ok_and(|records| records.ack_waits));
        assert_eq!(changed(0, 0xc4), Some(Malformed::Opcode));
        for (at, value) in [(1, 0x40), (4, 0x20), (8, 0x40), (13, 1)] {
            assert_eq!(changed(at, value), Some(Malformed::Version), "reserved: {at}");
        }
        assert_eq!(changed(12, 4), Some(Malformed::Length), "another count");
        for (at, value) in [(16, 0x0c), (16, 0x00), (16, 0x24), (17, 1)] {
            assert_eq!(changed(at, value), Some(Malformed::Opcode), "no message of one packet: {value:#x}");
        }
        assert_eq!(changed(18, 0x08), Some(Malformed::Length), "a message that is too long");
        let (none, many) = (packet(&[]), packet(&[record(Operation::Send, 0); RECORDS_MAX]));
        assert_eq!(Records::parse(&none).err(), Some(Malformed::Length));
        assert_eq!(Records::parse(&many).map(Iterator::count), Ok(RECORDS_MAX));
    }
}
