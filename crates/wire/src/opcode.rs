//! The opcode of the BTH as a typed table (IBTA table 38; XRC: A14; FLUSH, ATOMIC WRITE: A19).
use serde::{Deserialize, Serialize};

/// Transport service: the upper three bits of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Service {
    /// Reliable connection.
    Rc = 0,
    /// Unreliable connection.
    Uc = 1,
    /// Unreliable datagram.
    Ud = 3,
    /// Extended reliable connection (annex A14).
    Xrc = 5,
}

/// Operation that a packet is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operation {
    /// SEND.
    Send,
    /// SEND whose last packet carries immediate data; FIRST and MIDDLE are those of `Send`.
    SendImmediate,
    /// SEND whose last packet carries an rkey to invalidate; FIRST and MIDDLE are those of `Send`.
    SendInvalidate,
    /// WRITE.
    Write,
    /// WRITE whose last packet carries immediate data; FIRST and MIDDLE are those of `Write`.
    WriteImmediate,
    /// READ request.
    ReadRequest,
    /// Also the answer to FLUSH and to ATOMIC WRITE: ONLY, without payload (A19).
    ReadResponse,
    /// ACK or NAK.
    Acknowledge,
    /// Answer to an atomic operation, with the value found.
    AtomicAcknowledge,
    /// Compare and swap.
    CompareSwap,
    /// Fetch and add.
    FetchAdd,
    /// FLUSH (A19).
    Flush,
    /// ATOMIC WRITE (A19).
    AtomicWrite,
}

/// Where in its message (or READ response) a packet stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PacketPosition {
    /// First of several packets.
    First,
    /// Neither the first nor the last.
    Middle,
    /// Last of several packets.
    Last,
    /// The only packet.
    Only,
}

/// A valid opcode: only combinations that the standard has can be made, or read from a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Opcode(u8);

/// A number that is not the opcode of any packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedOpcode(pub u8);

use Operation as O;
use PacketPosition as P;

/// Low five bits of an opcode: operation and place. `None`: reserved.
const OPERATIONS: [Option<(Operation, PacketPosition)>; 32] = {
    let mut table = [None; 32];
    table[0x00] = Some((O::Send, P::First));
    table[0x01] = Some((O::Send, P::Middle));
    table[0x02] = Some((O::Send, P::Last));
    table[0x03] = Some((O::SendImmediate, P::Last));
    table[0x04] = Some((O::Send, P::Only));
    table[0x05] = Some((O::SendImmediate, P::Only));
    table[0x06] = Some((O::Write, P::First));
    table[0x07] = Some((O::Write, P::Middle));
    table[0x08] = Some((O::Write, P::Last));
    table[0x09] = Some((O::WriteImmediate, P::Last));
    table[0x0a] = Some((O::Write, P::Only));
    table[0x0b] = Some((O::WriteImmediate, P::Only));
    table[0x0c] = Some((O::ReadRequest, P::Only));
    table[0x0d] = Some((O::ReadResponse, P::First));
    table[0x0e] = Some((O::ReadResponse, P::Middle));
    table[0x0f] = Some((O::ReadResponse, P::Last));
    table[0x10] = Some((O::ReadResponse, P::Only));
    table[0x11] = Some((O::Acknowledge, P::Only));
    table[0x12] = Some((O::AtomicAcknowledge, P::Only));
    table[0x13] = Some((O::CompareSwap, P::Only));
    table[0x14] = Some((O::FetchAdd, P::Only));
    table[0x16] = Some((O::SendInvalidate, P::Last));
    table[0x17] = Some((O::SendInvalidate, P::Only));
    table[0x1c] = Some((O::Flush, P::Only));
    table[0x1d] = Some((O::AtomicWrite, P::Only));
    table
};

impl Service {
    /// The service of an opcode's upper three bits. `None`: reserved, or not spoken here.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Rc),
            1 => Some(Self::Uc),
            3 => Some(Self::Ud),
            5 => Some(Self::Xrc),
            _ => None,
        }
    }

    /// Whether the service has this operation (IBTA table 38).
    pub const fn has(self, operation: Operation) -> bool {
        match self {
            Self::Rc | Self::Xrc => true,
            Self::Uc => matches!(operation, O::Send | O::SendImmediate | O::Write | O::WriteImmediate),
            Self::Ud => matches!(operation, O::Send | O::SendImmediate),
        }
    }
}

impl Opcode {
    /// `None`: reserved, of a service that RoCEv2 end points don't speak here (RD, CNP), or an
    /// operation that its service has not.
    pub const fn from_byte(byte: u8) -> Option<Self> {
        let (Some(service), Some((operation, place))) =
            (Service::from_bits(byte >> 5), OPERATIONS[(byte & 31) as usize])
        else {
            return None;
        };
        let whole = !matches!(service, Service::Ud) || matches!(place, P::Only);
        if service.has(operation) && whole { Some(Self(byte)) } else { None }
    }

    /// The opcode of this packet. FIRST and MIDDLE of a message with immediate data or an
    /// invalidation are those without. `None`: there is no such packet.
    pub fn new(service: Service, operation: Operation, place: PacketPosition) -> Option<Self> {
        let plain = match (operation, place) {
            (O::SendImmediate | O::SendInvalidate, P::First | P::Middle) => O::Send,
            (O::WriteImmediate, P::First | P::Middle) => O::Write,
            _ => operation,
        };
        let low = OPERATIONS.iter().position(|entry| *entry == Some((plain, place)))? as u8;
        Self::from_byte((service as u8) << 5 | low)
    }

    /// The opcode as it stands in the BTH.
    pub const fn byte(self) -> u8 {
        self.0
    }

    /// Transport service.
    pub const fn service(self) -> Service {
        match Service::from_bits(self.0 >> 5) {
            Some(service) => service,
            None => panic!("an opcode has a service"),
        }
    }

    /// Operation that the packet is part of.
    pub const fn operation(self) -> Operation {
        self.facts().0
    }

    /// Position of the packet in its message or response.
    pub const fn place(self) -> PacketPosition {
        self.facts().1
    }

    const fn facts(self) -> (Operation, PacketPosition) {
        match OPERATIONS[(self.0 & 31) as usize] {
            Some(facts) => facts,
            None => panic!("an opcode has an operation"),
        }
    }

    /// First packet of its message or response: FIRST or ONLY.
    pub const fn begins(self) -> bool {
        matches!(self.place(), P::First | P::Only)
    }

    /// Last packet of its message or response: LAST or ONLY.
    pub const fn ends(self) -> bool {
        matches!(self.place(), P::Last | P::Only)
    }

    /// Travels from responder to requester.
    pub const fn is_response(self) -> bool {
        matches!(self.operation(), O::ReadResponse | O::Acknowledge | O::AtomicAcknowledge)
    }

    // ---- which extension headers follow, in this order

    /// In every packet of the requester, MIDDLE and LAST too (A14).
    pub const fn has_xrceth(self) -> bool {
        matches!(self.service(), Service::Xrc) && !self.is_response()
    }

    /// DETH: in every packet of UD.
    pub const fn has_deth(self) -> bool {
        matches!(self.service(), Service::Ud)
    }

    /// FETH comes before the RETH (A19).
    pub const fn has_feth(self) -> bool {
        matches!(self.operation(), O::Flush)
    }

    /// RETH: in READ requests, FLUSH, ATOMIC WRITE, and the first packet of a WRITE.
    pub const fn has_reth(self) -> bool {
        matches!(self.operation(), O::ReadRequest | O::Flush | O::AtomicWrite)
            || matches!(self.operation(), O::Write | O::WriteImmediate) && self.begins()
    }

    /// AtomicETH: in requests of atomic operations.
    pub const fn has_atomic_eth(self) -> bool {
        matches!(self.operation(), O::CompareSwap | O::FetchAdd)
    }

    /// AETH: in acknowledgements, and in READ responses but for MIDDLE.
    pub const fn has_aeth(self) -> bool {
        match self.operation() {
            O::Acknowledge | O::AtomicAcknowledge => true,
            O::ReadResponse => !matches!(self.place(), P::Middle),
            _ => false,
        }
    }

    /// AtomicAckETH: in answers to atomic operations.
    pub const fn has_atomic_ack_eth(self) -> bool {
        matches!(self.operation(), O::AtomicAcknowledge)
    }

    /// ImmDt: in the last packet of a message with immediate data.
    pub const fn has_immediate(self) -> bool {
        matches!(self.operation(), O::SendImmediate | O::WriteImmediate)
    }

    /// IETH: in the last packet of a SEND with invalidation.
    pub const fn has_ieth(self) -> bool {
        matches!(self.operation(), O::SendInvalidate)
    }

    /// Whether payload may follow.
    pub const fn has_payload(self) -> bool {
        matches!(
            self.operation(),
            O::Send
                | O::SendImmediate
                | O::SendInvalidate
                | O::Write
                | O::WriteImmediate
                | O::ReadResponse
                | O::AtomicWrite
        )
    }
}

impl TryFrom<u8> for Opcode {
    type Error = ReservedOpcode;

    fn try_from(byte: u8) -> Result<Self, ReservedOpcode> {
        Self::from_byte(byte).ok_or(ReservedOpcode(byte))
    }
}

impl From<Opcode> for u8 {
    fn from(opcode: Opcode) -> Self {
        opcode.0
    }
}

impl core::fmt::Display for ReservedOpcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#04x} is a reserved opcode", self.0)
    }
}

impl core::fmt::Debug for Opcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} {:?} {:?}", self.service(), self.operation(), self.place())
    }
}
