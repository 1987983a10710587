//! Format between two rsockets: the private data of the connection, the 32-bit messages that stand
//! in immediate data, and the entries that one end writes into the other's memory. Facts of
//! rdma-core's `librdmacm/docs/rsocket` and of recorded traffic; docs/RSOCKET.md lists them. Not
//! here: who sends what when (`stream`), memory, sockets.

/// Bytes of an entry of a target list in memory.
pub const TARGET_BYTES: usize = 16;
/// Bytes of an entry of the I/O map in memory.
pub const IOMAP_BYTES: usize = 24;
/// Bytes of the private data of a connection request and of its answer.
pub const CONNECTION_DATA_BYTES: usize = 40;
/// Entries of the target list that we give to the other end. (rdma-core has 2, and goes by what it
/// is sent.)
pub const TARGET_COUNT: u32 = 4;
/// Longest transfer that a message can announce.
pub const DATA_BYTES_MAX: u32 = DATA_MASK;

const VERSION: u8 = 1;
const OP_SHIFT: u32 = 29;
const DATA_MASK: u32 = (1 << OP_SHIFT) - 1;
const OP_DATA: u32 = 0;
const OP_CREDITS: u32 = 4;
const OP_IOMAP: u32 = 6;
const OP_CONTROL: u32 = 7;
/// Far from what rdma-core may count up to: it ignores what it does not know.
const CONTROL_RESET: u32 = 0x5253;
const FLAG_BIG_ENDIAN: u8 = 1;
const FLAG_IOMAP: u8 = 1 << 1;
/// Sizes of I/O maps above this travel in units of 256.
const SCALE_LIMIT: u16 = 128;

/// A message in immediate data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// So many bytes were written behind what was written before.
    Data(u32),
    /// The count (modulo 2^16) of messages up to which the other end may send; a target may have
    /// been written as well.
    Credits(u16),
    /// An entry of the I/O map was written.
    Iomap(u16),
    Control(Control),
    /// Reserved, or of a later version.
    Unknown(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Nothing more will be sent or received.
    Disconnect,
    Keepalive,
    /// Nothing more will be sent.
    Shutdown,
    /// Closed without care for what is under way. Ours alone: others ignore it.
    Reset,
}

impl Message {
    /// As it travels, in host order (immediate data is big-endian on the wire).
    #[must_use]
    pub fn to_bits(self) -> u32 {
        match self {
            Self::Data(bytes) => OP_DATA << OP_SHIFT | bytes & DATA_MASK,
            Self::Credits(limit) => OP_CREDITS << OP_SHIFT | u32::from(limit),
            Self::Iomap(index) => OP_IOMAP << OP_SHIFT | u32::from(index),
            Self::Control(Control::Disconnect) => OP_CONTROL << OP_SHIFT,
            Self::Control(Control::Keepalive) => OP_CONTROL << OP_SHIFT | 1,
            Self::Control(Control::Shutdown) => OP_CONTROL << OP_SHIFT | 2,
            Self::Control(Control::Reset) => OP_CONTROL << OP_SHIFT | CONTROL_RESET,
            Self::Unknown(bits) => bits,
        }
    }

    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        let data = bits & DATA_MASK;
        match (bits >> OP_SHIFT, data) {
            (OP_DATA, bytes) => Self::Data(bytes),
            // Only 16 bits count: the other end adds to a counter of 16 bits and may leave the
            // carry in.
            (OP_CREDITS, limit) => Self::Credits(limit as u16),
            (OP_IOMAP, index) => Self::Iomap(index as u16),
            (OP_CONTROL, 0) => Self::Control(Control::Disconnect),
            (OP_CONTROL, 1) => Self::Control(Control::Keepalive),
            (OP_CONTROL, 2) => Self::Control(Control::Shutdown),
            (OP_CONTROL, CONTROL_RESET) => Self::Control(Control::Reset),
            _ => Self::Unknown(bits),
        }
    }
}

/// In which byte order an entry is written into the other end's memory: its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ByteOrder {
    #[default]
    Ours,
    Swapped,
}

/// A piece of registered memory of the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Target {
    pub address: u64,
    pub key: u32,
    pub bytes: u32,
}

impl Target {
    /// The entry as it stands in the memory of an end with that byte order.
    #[must_use]
    pub fn to_memory(self, order: ByteOrder) -> [u8; TARGET_BYTES] {
        let (address, key, bytes) = match order {
            ByteOrder::Ours => (self.address, self.key, self.bytes),
            ByteOrder::Swapped => (self.address.swap_bytes(), self.key.swap_bytes(), self.bytes.swap_bytes()),
        };
        let mut memory = [0; TARGET_BYTES];
        memory[..8].copy_from_slice(&address.to_ne_bytes());
        memory[8..12].copy_from_slice(&key.to_ne_bytes());
        memory[12..].copy_from_slice(&bytes.to_ne_bytes());
        memory
    }

    /// From the two words of an entry of our own memory. `None`: not written, or not wholly. Both
    /// words are zero before, and neither is zero in an entry that means something.
    #[must_use]
    pub fn from_words(address: u64, rest: u64) -> Option<Self> {
        let rest = rest.to_ne_bytes();
        let key = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]);
        let bytes = u32::from_ne_bytes([rest[4], rest[5], rest[6], rest[7]]);
        (address != 0 && bytes != 0).then_some(Self { address, key, bytes })
    }

    fn to_network(self) -> [u8; TARGET_BYTES] {
        let mut out = [0; TARGET_BYTES];
        out[..8].copy_from_slice(&self.address.to_be_bytes());
        out[8..12].copy_from_slice(&self.key.to_be_bytes());
        out[12..].copy_from_slice(&self.bytes.to_be_bytes());
        out
    }

    fn from_network(bytes: &[u8; TARGET_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, k0, k1, k2, k3, l0, l1, l2, l3] = *bytes;
        Self {
            address: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            key: u32::from_be_bytes([k0, k1, k2, k3]),
            bytes: u32::from_be_bytes([l0, l1, l2, l3]),
        }
    }
}

/// An entry of an I/O map: `target` is reached at these offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct IomapEntry {
    pub offset: u64,
    pub target: Target,
}

impl IomapEntry {
    #[must_use]
    pub fn to_memory(self, order: ByteOrder) -> [u8; IOMAP_BYTES] {
        let offset = if order == ByteOrder::Ours { self.offset } else { self.offset.swap_bytes() };
        let mut memory = [0; IOMAP_BYTES];
        memory[..8].copy_from_slice(&offset.to_ne_bytes());
        memory[8..].copy_from_slice(&self.target.to_memory(order));
        memory
    }

    /// Bytes behind `offset` that this entry reaches.
    #[must_use]
    pub fn bytes_from(&self, offset: u64) -> Option<u64> {
        let skipped = offset.checked_sub(self.offset)?;
        u64::from(self.target.bytes).checked_sub(skipped).filter(|left| *left != 0)
    }
}

/// The private data of a connection request and of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionData {
    pub big_endian: bool,
    /// Whether the sender knows I/O maps.
    pub iomap: bool,
    /// Messages that may be sent to it.
    pub credits: u16,
    pub iomap_count: u16,
    /// Its target list; `bytes` counts entries.
    pub target_list: Target,
    /// Its first receive buffer.
    pub first_target: Target,
}

impl ConnectionData {
    #[must_use]
    pub fn to_bytes(self) -> [u8; CONNECTION_DATA_BYTES] {
        let mut out = [0; CONNECTION_DATA_BYTES];
        out[0] = VERSION;
        out[1] = if self.iomap { FLAG_IOMAP } else { 0 } | if self.big_endian { FLAG_BIG_ENDIAN } else { 0 };
        out[2..4].copy_from_slice(&self.credits.to_be_bytes());
        out[7] = iomap_count_to_scale(self.iomap_count);
        out[8..24].copy_from_slice(&self.target_list.to_network());
        out[24..].copy_from_slice(&self.first_target.to_network());
        out
    }

    /// `None`: too short, or of another version. What the transport pads behind is not looked at.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; CONNECTION_DATA_BYTES] = bytes.first_chunk()?;
        let (target_list, first_target) = (bytes[8..24].try_into().ok()?, bytes[24..].try_into().ok()?);
        let iomap = bytes[1] & FLAG_IOMAP != 0;
        (bytes[0] == VERSION).then(|| Self {
            big_endian: bytes[1] & FLAG_BIG_ENDIAN != 0,
            iomap,
            credits: u16::from_be_bytes([bytes[2], bytes[3]]),
            iomap_count: if iomap { scale_to_iomap_count(bytes[7]) } else { 0 },
            target_list: Target::from_network(target_list),
            first_target: Target::from_network(first_target),
        })
    }
}

fn iomap_count_to_scale(count: u16) -> u8 {
    if count <= SCALE_LIMIT { count as u8 } else { SCALE_LIMIT as u8 | (count >> 8) as u8 }
}

fn scale_to_iomap_count(scale: u8) -> u16 {
    let scale = u16::from(scale);
    if scale <= SCALE_LIMIT { scale } else { (scale & !SCALE_LIMIT) << 8 }
}

/// The nearest size of an I/O map that can be sent to the other end, not above `count` (but for 129
/// to 255: 128).
#[must_use]
pub fn round_iomap_count(count: u32) -> u16 {
    let count = count.min(0x7F00) as u16;
    scale_to_iomap_count(iomap_count_to_scale(count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_have_these_bits() {
        let cases = [
            (Message::Data(64), 64),
            (Message::Credits(0x017f), 0x8000_017f),
            (Message::Iomap(3), 0xC000_0003),
            (Message::Control(Control::Disconnect), 0xE000_0000),
            (Message::Control(Control::Keepalive), 0xE000_0001),
            (Message::Control(Control::Shutdown), 0xE000_0002),
            (Message::Control(Control::Reset), 0xE000_5253),
        ];
        for (message, bits) in cases {
            assert_eq!(message.to_bits(), bits);
            assert_eq!(Message::from_bits(bits), message);
        }
        // rdma-core adds two 16-bit numbers and leaves the carry.
        assert_eq!(Message::from_bits(0x8001_0005), Message::Credits(5));
    }

    /// The private data of a request that rdma-core's rstream sent, recorded between two Linux
    /// hosts, and the target that it wrote first.
    #[test]
    fn recorded_connection_data() {
        let recorded = [
            0x01, 0x02, 0x01, 0x80, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x55, 0xa8, 0x64, 0x52, 0x90, 0x00, 0x00, 0x00,
            0x13, 0xfa, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x7f, 0x26, 0x45, 0x9b, 0x00, 0x00, 0x00, 0x00, 0x14, 0xe7,
            0x00, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        ];
        let data = ConnectionData::from_bytes(&recorded).unwrap();
        assert_eq!(
            data,
            ConnectionData {
                big_endian: false,
                iomap: true,
                credits: 384,
                iomap_count: 0,
                target_list: Target { address: 0x55a8_6452_9000, key: 0x13fa, bytes: 2 },
                first_target: Target { address: 0x7f26_459b_0000, key: 0x14e7, bytes: 0x80000 },
            }
        );
        assert_eq!(data.to_bytes(), recorded[..CONNECTION_DATA_BYTES]);

        let second = Target { address: data.first_target.address + 0x80000, ..data.first_target };
        let written = [0x00, 0x00, 0xa3, 0x45, 0x26, 0x7f, 0x00, 0x00, 0xe7, 0x14, 0x00, 0x00, 0x00, 0x00, 0x08, 0x00];
        assert_eq!(second.to_memory(ByteOrder::Ours), written);
        assert_eq!(Message::from_bits(0x8000_0180), Message::Credits(384));
    }

    #[test]
    fn iomap_counts() {
        assert_eq!(
            [0, 1, 128, 129, 255, 256, 512, 700, 1 << 20].map(round_iomap_count),
            [0, 1, 128, 128, 128, 256, 512, 512, 0x7F00]
        );
    }

    proptest! {
        #[test]
        fn any_bits_are_some_message(bits: u32) {
            let message = Message::from_bits(bits);
            if !matches!(message, Message::Credits(_) | Message::Iomap(_)) {
                prop_assert_eq!(message.to_bits(), bits);
            }
        }

        #[test]
        fn any_private_data(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(data) = ConnectionData::from_bytes(&bytes) {
                prop_assert_eq!(ConnectionData::from_bytes(&data.to_bytes()), Some(data));
            }
        }

        #[test]
        fn entries_in_memory(offset: u64, address in 1u64.., key: u32, bytes in 1u32..) {
            let entry = IomapEntry { offset, target: Target { address, key, bytes } };
            let memory = entry.to_memory(ByteOrder::Ours);
            let word = |at: usize| u64::from_ne_bytes(memory[at..at + 8].try_into().unwrap());
            prop_assert_eq!(word(0), offset);
            prop_assert_eq!(Target::from_words(word(8), word(16)), Some(entry.target));
            let swapped = entry.to_memory(ByteOrder::Swapped);
            prop_assert!(memory[..8].iter().eq(swapped[..8].iter().rev()));
        }
    }
}
