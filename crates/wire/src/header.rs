//! BTH and extension headers as one validated value. Which of the extension fields count, the opcode says
//! ([`Opcode::has_reth`] and the like); the others are zero.
use crate::frame::{self, FRAME_HEADER_BYTES, FRAME_PAYLOAD_BYTES_MAX, Frame};
use crate::{BTH_BYTES, HEADER_BYTES_MAX, MASK_24, Opcode, Operation, PAYLOAD_BYTES_MAX, PKEY_DEFAULT, Syndrome};

/// Why bytes are no packet that can be acted upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Shorter than its headers and padding.
    Truncated,
    /// A transport header version other than 0.
    Version,
    /// A reserved opcode, or one of a service that is not spoken here.
    Opcode,
    /// A payload where the opcode has none, or longer than 4096 bytes (in a frame 8192).
    Length,
    /// A reserved AETH syndrome.
    Syndrome,
}

/// RDMA extended header (IBTA 9.3.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reth {
    /// First byte, in the region's own addressing.
    pub address: u64,
    /// Key of the region or window.
    pub rkey: u32,
    /// Length of the whole message, bytes.
    pub length: u32,
}

/// Atomic extended header (IBTA 9.3.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtomicEth {
    /// Address of the eight bytes, a multiple of 8.
    pub address: u64,
    /// Key of the region or window.
    pub rkey: u32,
    /// Swap value, or the addend.
    pub swap_add: u64,
    /// Expected value of a compare and swap.
    pub compare: u64,
}

/// Datagram extended header (IBTA 9.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deth {
    /// Q_Key of the receiver.
    pub qkey: u32,
    /// QPN of the sender, 24 bits.
    pub source_qpn: u32,
}

/// ACK extended header (IBTA 9.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Acknowledgement, RNR NAK or NAK.
    pub syndrome: Syndrome,
    /// 24 bits.
    pub msn: u32,
}

impl Default for Aeth {
    fn default() -> Self {
        Self { syndrome: Syndrome::ACK, msn: 0 }
    }
}

impl Aeth {
    fn from_word(word: u32) -> Result<Self, Malformed> {
        let syndrome = Syndrome::from_byte((word >> 24) as u8).ok_or(Malformed::Syndrome)?;
        Ok(Self { syndrome, msn: word & MASK_24 })
    }

    fn word(self) -> u32 {
        u32::from(self.syndrome.byte()) << 24 | self.msn & MASK_24
    }
}

/// ImmDt stays in network byte order.
pub(crate) fn immediate_of(word: u32) -> u32 {
    u32::from_ne_bytes(word.to_be_bytes())
}

pub(crate) fn immediate_word(immediate: u32) -> u32 {
    u32::from_be_bytes(immediate.to_ne_bytes())
}

/// All headers of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Opcode: which of the extension headers count.
    pub opcode: Opcode,
    /// Solicited event bit.
    pub solicited: bool,
    /// MigReq: rxe sends 0.
    pub migrated: bool,
    /// Bytes of padding after the payload, 0..=3.
    pub pad: u8,
    /// P_Key.
    pub pkey: u16,
    /// Forward explicit congestion notification.
    pub fecn: bool,
    /// Backward explicit congestion notification.
    pub becn: bool,
    /// Of the reserved bits the highest, which receivers ignore (IBTA 9.2.9). Between routers: the
    /// sender of a UD packet sent it by its IPv6 address.
    pub by_ipv6: bool,
    /// The next one of them. Between routers: of a request, its acknowledgement may wait for what the program answers;
    /// of an acknowledgement, it has waited, so that it measures no round trip.
    pub ack_waits: bool,
    /// QPN of the receiver, 24 bits.
    pub dest_qpn: u32,
    /// Acknowledgement request bit.
    pub ack_request: bool,
    /// Packet sequence number, 24 bits.
    pub psn: u32,
    /// XRCETH: number of the shared receive queue.
    pub srqn: u32,
    /// DETH, if [`Opcode::has_deth`].
    pub deth: Deth,
    /// RETH, if [`Opcode::has_reth`].
    pub reth: Reth,
    /// AtomicETH, if [`Opcode::has_atomic_eth`].
    pub atomic: AtomicEth,
    /// AETH, if [`Opcode::has_aeth`].
    pub aeth: Aeth,
    /// AtomicAckETH: the value found.
    pub original: u64,
    /// ImmDt as it stands in the packet (network byte order; `u32::from_ne_bytes` of its four bytes).
    pub immediate: u32,
    /// IETH: the key to invalidate.
    pub invalidate: u32,
    /// FETH: placement type (bits 0 to 3) and selectivity level (bits 4 and 5).
    pub flush: u32,
    /// The packet is a [frame](crate::frame): `reth` counts in all of them, and means what the frame's address, rkey
    /// and length do.
    pub frame: Option<Frame>,
}

/// Encoded headers.
#[derive(Clone, Copy)]
pub struct HeaderBytes {
    /// The headers, and zeroes behind them.
    pub bytes: [u8; HEADER_BYTES_MAX],
    /// Bytes in use.
    pub length: u8,
}

impl Header {
    /// A packet with nothing set but these.
    pub fn new(opcode: Opcode, dest_qpn: u32, psn: u32) -> Self {
        Self {
            opcode,
            solicited: false,
            migrated: false,
            pad: 0,
            pkey: PKEY_DEFAULT,
            fecn: false,
            becn: false,
            by_ipv6: false,
            ack_waits: false,
            dest_qpn: dest_qpn & MASK_24,
            ack_request: false,
            psn: psn & MASK_24,
            srqn: 0,
            deth: Deth::default(),
            reth: Reth::default(),
            atomic: AtomicEth::default(),
            aeth: Aeth::default(),
            original: 0,
            immediate: 0,
            invalidate: 0,
            flush: 0,
            frame: None,
        }
    }

    /// Reads the headers of `packet` (which ends with the padding: the ICRC is cut off; a frame has neither) and checks
    /// what can be checked without a QP; not a frame's CRC ([`frame::is_intact`]). Gives the header and the payload.
    ///
    /// # Errors
    /// [`Malformed`]: the first check that failed.
    pub fn parse(packet: &[u8]) -> Result<(Self, &[u8]), Malformed> {
        let mut reader = Reader { bytes: packet, short: false };
        let (opcode, flags, pkey) = (reader.u8(), reader.u8(), reader.u16());
        let (qp, psn) = (reader.u32(), reader.u32());
        if reader.short {
            return Err(Malformed::Truncated);
        }
        if flags & 0xf != 0 {
            return Err(Malformed::Version);
        }
        let is_frame = frame::is_frame(packet);
        let opcode = if is_frame { frame::standard_byte(opcode) } else { opcode };
        let opcode = Opcode::from_byte(opcode).ok_or(Malformed::Opcode)?;
        let mut header = Self::new(opcode, qp & MASK_24, psn & MASK_24);
        header.solicited = flags & 0x80 != 0;
        header.migrated = flags & 0x40 != 0;
        header.pad = flags >> 4 & 3;
        header.pkey = pkey;
        header.fecn = qp & 1 << 31 != 0;
        header.becn = qp & 1 << 30 != 0;
        header.by_ipv6 = qp & 1 << 29 != 0;
        header.ack_waits = qp & 1 << 28 != 0;
        header.ack_request = psn & 1 << 31 != 0;
        if is_frame {
            header.read_frame(&mut reader)?;
        } else {
            header.read_extensions(&mut reader)?;
        }
        if reader.short {
            return Err(Malformed::Truncated);
        }
        let rest = reader.bytes;
        let length = rest.len().checked_sub(usize::from(header.pad)).ok_or(Malformed::Truncated)?;
        let length_max = if is_frame { FRAME_PAYLOAD_BYTES_MAX } else { PAYLOAD_BYTES_MAX };
        if length > length_max || (length > 0 && !opcode.has_payload()) {
            return Err(Malformed::Length);
        }
        Ok((header, &rest[..length]))
    }

    fn read_extensions(&mut self, reader: &mut Reader<'_>) -> Result<(), Malformed> {
        let opcode = self.opcode;
        if opcode.has_xrceth() {
            self.srqn = reader.u32() & MASK_24;
        }
        if opcode.has_deth() {
            self.deth = Deth { qkey: reader.u32(), source_qpn: reader.u32() & MASK_24 };
        }
        if opcode.has_feth() {
            self.flush = reader.u32();
        }
        if opcode.has_reth() {
            self.reth = Reth { address: reader.u64(), rkey: reader.u32(), length: reader.u32() };
        }
        if opcode.has_atomic_eth() {
            let (address, rkey) = (reader.u64(), reader.u32());
            self.atomic = AtomicEth { address, rkey, swap_add: reader.u64(), compare: reader.u64() };
        }
        if opcode.has_aeth() {
            let word = reader.u32();
            if !reader.short {
                self.aeth = Aeth::from_word(word)?;
            }
        }
        if opcode.has_atomic_ack_eth() {
            self.original = reader.u64();
        }
        if opcode.has_immediate() {
            self.immediate = immediate_of(reader.u32());
        }
        if opcode.has_ieth() {
            self.invalidate = reader.u32();
        }
        Ok(())
    }

    /// The headers of a frame behind its BTH. It has no padding, whatever the BTH says.
    fn read_frame(&mut self, reader: &mut Reader<'_>) -> Result<(), Malformed> {
        let opcode = self.opcode;
        if !frame::travels_as_frame(opcode.operation()) {
            return Err(Malformed::Opcode);
        }
        self.pad = 0;
        self.reth = Reth { address: reader.u64(), rkey: reader.u32(), length: reader.u32() };
        let (argument, message, _crc) = (reader.u32(), reader.u32(), reader.u32());
        let mut fields = Frame { message_psn: message & MASK_24, response_bytes: 0 };
        match opcode.operation() {
            Operation::ReadRequest => fields.response_bytes = argument,
            Operation::ReadResponse | Operation::Acknowledge if !reader.short => self.aeth = Aeth::from_word(argument)?,
            _ if opcode.has_immediate() => self.immediate = immediate_of(argument),
            _ if opcode.has_ieth() => self.invalidate = argument,
            _ => {}
        }
        self.frame = Some(fields);
        Ok(())
    }

    /// The headers as they travel.
    pub fn encode(&self) -> HeaderBytes {
        let mut writer = Writer { bytes: [0; HEADER_BYTES_MAX], at: 0 };
        let bit = |set: bool, bit: u32| if set { 1 << bit } else { 0 };
        let flags = bit(self.solicited, 7) | bit(self.migrated, 6) | u32::from(self.pad & 3) << 4;
        let kind = if self.frame.is_some() { frame::OPCODE_BITS } else { 0 };
        writer.u32(u32::from(kind | self.opcode.byte()) << 24 | flags << 16 | u32::from(self.pkey));
        let reserved = bit(self.by_ipv6, 29) | bit(self.ack_waits, 28);
        writer.u32(bit(self.fecn, 31) | bit(self.becn, 30) | reserved | self.dest_qpn & MASK_24);
        writer.u32(bit(self.ack_request, 31) | self.psn & MASK_24);
        debug_assert_eq!(writer.at, BTH_BYTES);
        match &self.frame {
            Some(fields) => self.write_frame(fields, &mut writer),
            None => self.write_extensions(&mut writer),
        }
        HeaderBytes { bytes: writer.bytes, length: writer.at as u8 }
    }

    fn write_frame(&self, fields: &Frame, writer: &mut Writer) {
        let opcode = self.opcode;
        debug_assert!(opcode.byte() < 32 && frame::travels_as_frame(opcode.operation()), "{opcode:?} has no frame");
        debug_assert_eq!(self.pad, 0, "a frame has no padding");
        writer.u64(self.reth.address);
        writer.u32(self.reth.rkey);
        writer.u32(self.reth.length);
        writer.u32(match opcode.operation() {
            Operation::ReadRequest => fields.response_bytes,
            Operation::ReadResponse | Operation::Acknowledge => self.aeth.word(),
            _ if opcode.has_immediate() => immediate_word(self.immediate),
            _ if opcode.has_ieth() => self.invalidate,
            _ => 0,
        });
        writer.u32(fields.message_psn & MASK_24);
        if let Some(head) = writer.bytes.first_chunk_mut::<FRAME_HEADER_BYTES>() {
            frame::seal(head);
        }
        writer.at = FRAME_HEADER_BYTES;
    }

    fn write_extensions(&self, writer: &mut Writer) {
        let opcode = self.opcode;
        if opcode.has_xrceth() {
            writer.u32(self.srqn & MASK_24);
        }
        if opcode.has_deth() {
            writer.u32(self.deth.qkey);
            writer.u32(self.deth.source_qpn & MASK_24);
        }
        if opcode.has_feth() {
            writer.u32(self.flush);
        }
        if opcode.has_reth() {
            writer.u64(self.reth.address);
            writer.u32(self.reth.rkey);
            writer.u32(self.reth.length);
        }
        if opcode.has_atomic_eth() {
            writer.u64(self.atomic.address);
            writer.u32(self.atomic.rkey);
            writer.u64(self.atomic.swap_add);
            writer.u64(self.atomic.compare);
        }
        if opcode.has_aeth() {
            writer.u32(self.aeth.word());
        }
        if opcode.has_atomic_ack_eth() {
            writer.u64(self.original);
        }
        if opcode.has_immediate() {
            writer.u32(immediate_word(self.immediate));
        }
        if opcode.has_ieth() {
            writer.u32(self.invalidate);
        }
    }
}

impl HeaderBytes {
    /// The bytes in use.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// Takes big-endian numbers from the front; what is not there reads as zero and is noted.
pub(crate) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub short: bool,
}

impl Reader<'_> {
    fn take<const COUNT: usize>(&mut self) -> [u8; COUNT] {
        match self.bytes.split_first_chunk() {
            Some((chunk, rest)) => {
                self.bytes = rest;
                *chunk
            }
            None => {
                self.short = true;
                [0; COUNT]
            }
        }
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_be_bytes(self.take())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

/// Big-endian numbers, one after the other.
struct Writer {
    bytes: [u8; HEADER_BYTES_MAX],
    at: usize,
}

impl Writer {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }
}
