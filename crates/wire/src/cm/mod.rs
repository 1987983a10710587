//! Messages of the communication manager: MADs of class 7 (IBTA 1.4 chapters 12 and 13.4, annex
//! A11), as validated values.
//!
//! A MAD has 256 bytes: a header of 24, and the message. Decoding is total: any bytes give a
//! message or a [`Malformed`]. Reserved bits are not read, and written as zero. What values mean is
//! not checked here.
mod fields;
mod ip;
mod messages;

pub use ip::IpHeader;
pub use messages::{Apr, Drep, Dreq, Lap, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq, Transport};

/// Length of every MAD.
pub const MAD_BYTES: usize = 256;
const HEADER_BYTES: usize = 24;
/// Bytes of a MAD behind its header: the message.
pub const BODY_BYTES: usize = MAD_BYTES - HEADER_BYTES;
/// The queue pair that MADs go to and come from, besides the subnet manager's.
pub const MAD_QPN: u32 = 1;
/// Q_Key of [`MAD_QPN`].
pub const MAD_QKEY: u32 = 0x8001_0000;

const BASE_VERSION: u8 = 1;
const CLASS: u8 = 7;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 3;

/// Why bytes are no message of the communication manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Not 256 bytes.
    Length,
    /// Another version of MADs or of this class.
    Version,
    /// Another management class.
    Class,
    /// Not ComMgtSend.
    Method,
    /// Not a message of this class, or one that only answers questions about the class itself.
    Attribute,
}

/// One message, with what of its header counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad {
    /// Status of the MAD; 0 in every message of this class.
    pub status: u16,
    /// Number by which an answer names its request; repetitions have the same.
    pub transaction_id: u64,
    /// Of REQ, REP and SIDR REP: the options of extended connection establishment. Else 0.
    pub attribute_modifier: u32,
    /// The message itself.
    pub message: Message,
}

/// Fixed-size values on purpose: private data always has the length that its message has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)]
pub enum Message {
    /// Request for communication (12.6.5).
    Req(Req),
    /// Message receipt acknowledgement: the answer takes longer (12.6.6).
    Mra(Mra),
    /// Reject (12.6.7).
    Rej(Rej),
    /// Reply to a REQ (12.6.8).
    Rep(Rep),
    /// Ready to use (12.6.9).
    Rtu(Rtu),
    /// Request for disconnection (12.6.10).
    Dreq(Dreq),
    /// Reply to a DREQ (12.6.11).
    Drep(Drep),
    /// Service ID resolution request: asks for the QP of a datagram service (12.11.1).
    SidrReq(SidrReq),
    /// Answer to a SIDR_REQ (12.11.2).
    SidrRep(SidrRep),
    /// Load alternate path (12.8.1).
    Lap(Lap),
    /// Alternate path response (12.8.2).
    Apr(Apr),
}

/// The message that a [`Mra`] or [`Rej`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum About {
    /// A REQ.
    Req = 0,
    /// A REP.
    Rep = 1,
    /// Of an MRA: LAP.
    Other = 2,
}

/// Why a [`Rej`] was sent (IBTA 12.6.7.2; 35: annex A17 of extended connection establishment).
pub mod reason {
    /// No room for another connection.
    pub const NO_RESOURCES: u16 = 3;
    /// No answer in time.
    pub const TIMEOUT: u16 = 4;
    /// A communication ID that the peer does not know.
    pub const INVALID_COMM_ID: u16 = 6;
    /// Nobody listens at the service ID.
    pub const INVALID_SERVICE_ID: u16 = 8;
    /// The listener's transport is another.
    pub const INVALID_TRANSPORT: u16 = 9;
    /// A connection with these QPNs is still known.
    pub const STALE_CONNECTION: u16 = 10;
    /// The GID of the primary path is not the peer's.
    pub const INVALID_GID: u16 = 12;
    /// The path MTU is not supported.
    pub const INVALID_MTU: u16 = 26;
    /// The program refused, and may say why in the private data.
    pub const CONSUMER_DEFINED: u16 = 28;
    /// An option of extended connection establishment is not supported (A17).
    pub const VENDOR_OPTION_NOT_SUPPORTED: u16 = 35;
}

/// Status of a [`SidrRep`] (IBTA 12.11.2.1).
pub mod sidr_status {
    /// The answer has a QPN and a Q_Key.
    pub const VALID: u8 = 0;
    /// The service ID is not supported.
    pub const NOT_SUPPORTED: u8 = 1;
    /// The service's owner refused.
    pub const REJECTED: u8 = 2;
    /// The service has no QP to give.
    pub const NO_QP: u8 = 3;
}

/// Status of an [`Apr`] (IBTA 12.8.2.1).
pub mod apr_status {
    /// Alternate paths are not supported.
    pub const NOT_SUPPORTED: u8 = 2;
}

/// The attribute of each message, in the order of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Kind {
    /// [`Message::Req`].
    Req = 0x10,
    /// [`Message::Mra`].
    Mra = 0x11,
    /// [`Message::Rej`].
    Rej = 0x12,
    /// [`Message::Rep`].
    Rep = 0x13,
    /// [`Message::Rtu`].
    Rtu = 0x14,
    /// [`Message::Dreq`].
    Dreq = 0x15,
    /// [`Message::Drep`].
    Drep = 0x16,
    /// [`Message::SidrReq`].
    SidrReq = 0x17,
    /// [`Message::SidrRep`].
    SidrRep = 0x18,
    /// [`Message::Lap`].
    Lap = 0x19,
    /// [`Message::Apr`].
    Apr = 0x1a,
}

impl Kind {
    /// Number of kinds.
    pub const COUNT: usize = 11;
    /// All kinds, in order of their attributes.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Req,
        Self::Mra,
        Self::Rej,
        Self::Rep,
        Self::Rtu,
        Self::Dreq,
        Self::Drep,
        Self::SidrReq,
        Self::SidrRep,
        Self::Lap,
        Self::Apr,
    ];

    /// Its place in [`Kind::ALL`].
    pub const fn index(self) -> usize {
        self as usize - Self::Req as usize
    }

    /// The standard's name, as `REQ` or `SIDR_REP`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Req => "REQ",
            Self::Mra => "MRA",
            Self::Rej => "REJ",
            Self::Rep => "REP",
            Self::Rtu => "RTU",
            Self::Dreq => "DREQ",
            Self::Drep => "DREP",
            Self::SidrReq => "SIDR_REQ",
            Self::SidrRep => "SIDR_REP",
            Self::Lap => "LAP",
            Self::Apr => "APR",
        }
    }

    fn from_attribute(attribute: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == attribute)
    }
}

impl Message {
    /// The message's attribute.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Req(_) => Kind::Req,
            Self::Mra(_) => Kind::Mra,
            Self::Rej(_) => Kind::Rej,
            Self::Rep(_) => Kind::Rep,
            Self::Rtu(_) => Kind::Rtu,
            Self::Dreq(_) => Kind::Dreq,
            Self::Drep(_) => Kind::Drep,
            Self::SidrReq(_) => Kind::SidrReq,
            Self::SidrRep(_) => Kind::SidrRep,
            Self::Lap(_) => Kind::Lap,
            Self::Apr(_) => Kind::Apr,
        }
    }
}

impl Mad {
    /// A MAD without status and attribute modifier.
    pub const fn new(transaction_id: u64, message: Message) -> Self {
        Self { status: 0, transaction_id, attribute_modifier: 0, message }
    }

    /// Reads a MAD of [`MAD_BYTES`].
    ///
    /// # Errors
    ///
    /// [`Malformed`]: the bytes are no message of this class.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes: &[u8; MAD_BYTES] = bytes.try_into().map_err(|_| Malformed::Length)?;
        let [base, class, version, method, ..] = *bytes;
        if base != BASE_VERSION {
            return Err(Malformed::Version);
        }
        if class != CLASS {
            return Err(Malformed::Class);
        }
        if version != CLASS_VERSION {
            return Err(Malformed::Version);
        }
        if method != METHOD_SEND {
            return Err(Malformed::Method);
        }
        let short = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let long = |at: usize| u64::from(short(at)) << 16 | u64::from(short(at + 2));
        let kind = Kind::from_attribute(short(16)).ok_or(Malformed::Attribute)?;
        let body: &[u8; BODY_BYTES] = bytes.last_chunk().expect("a MAD is longer than its body");
        let message = match kind {
            Kind::Req => Message::Req(Req::read(body)),
            Kind::Mra => Message::Mra(Mra::read(body)),
            Kind::Rej => Message::Rej(Rej::read(body)),
            Kind::Rep => Message::Rep(Rep::read(body)),
            Kind::Rtu => Message::Rtu(Rtu::read(body)),
            Kind::Dreq => Message::Dreq(Dreq::read(body)),
            Kind::Drep => Message::Drep(Drep::read(body)),
            Kind::SidrReq => Message::SidrReq(SidrReq::read(body)),
            Kind::SidrRep => Message::SidrRep(SidrRep::read(body)),
            Kind::Lap => Message::Lap(Lap::read(body)),
            Kind::Apr => Message::Apr(Apr::read(body)),
        };
        Ok(Self {
            status: short(4),
            transaction_id: long(8) << 32 | long(12),
            attribute_modifier: long(20) as u32,
            message,
        })
    }

    /// The MAD's bytes; reserved bits are zero.
    pub fn encode(&self) -> [u8; MAD_BYTES] {
        let mut bytes = [0; MAD_BYTES];
        bytes[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        bytes[4..6].copy_from_slice(&self.status.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.transaction_id.to_be_bytes());
        bytes[16..18].copy_from_slice(&(self.message.kind() as u16).to_be_bytes());
        bytes[20..24].copy_from_slice(&self.attribute_modifier.to_be_bytes());
        let body: &mut [u8; BODY_BYTES] = bytes.last_chunk_mut().expect("a MAD is longer than its body");
        match &self.message {
            Message::Req(message) => message.write(body),
            Message::Mra(message) => message.write(body),
            Message::Rej(message) => message.write(body),
            Message::Rep(message) => message.write(body),
            Message::Rtu(message) => message.write(body),
            Message::Dreq(message) => message.write(body),
            Message::Drep(message) => message.write(body),
            Message::SidrReq(message) => message.write(body),
            Message::SidrRep(message) => message.write(body),
            Message::Lap(message) => message.write(body),
            Message::Apr(message) => message.write(body),
        }
        bytes
    }
}
