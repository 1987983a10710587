//! The requester's packets: which headers each packet of a message carries (IBTA 9.2 … 9.5; XRC:
//! A14; FLUSH, ATOMIC WRITE: A19).
use super::window::{Burst, OutgoingMessage, needs_answer};
use crate::{IpInfo, PacketHead};
use alloc::vec::Vec;
use freeflow_verbs::{SendFlags, SendOpcode, SendRequest};
use freeflow_wire::frame::Frame;
use freeflow_wire::records::{RECORD_PAYLOAD_BYTES_MAX, Record, head_bytes, is_record};
use freeflow_wire::{AtomicEth, Header, Opcode, Operation, PacketPosition, Reth, Service, psn_add};

/// A received packet that a QP acts upon.
#[derive(Clone, Copy)]
pub(crate) struct Packet<'a> {
    pub header: &'a Header,
    pub payload: &'a [u8],
    pub ip: IpInfo,
}

/// Fields that all packets of a QP have in common.
#[derive(Clone, Copy)]
pub(crate) struct Stamp {
    pub service: Service,
    pub dest_qpn: u32,
    pub mtu: u32,
    /// They travel as frames.
    pub frames: bool,
    /// Acknowledgements may wait for the program's answer.
    pub is_patient: bool,
}

/// When a packet asks for an acknowledgement (AckReq): the last of each message, and within a long
/// one whenever `every_bytes` of payload went out since the last that asked.
#[derive(Clone, Copy)]
pub(crate) struct AckPolicy {
    pub since_bytes: u32,
    pub every_bytes: u32,
    /// The last packet of the burst that asked.
    pub asked_psn: Option<u32>,
}

impl AckPolicy {
    fn asks(&mut self, psn: u32, bytes: u32, ends: bool) -> bool {
        self.since_bytes = self.since_bytes.saturating_add(bytes);
        let asks = ends || self.since_bytes >= self.every_bytes;
        if asks {
            self.since_bytes = 0;
            self.asked_psn = Some(psn);
        }
        asks
    }
}

/// Appends the packets of a burst.
pub(crate) fn write(
    stamp: &Stamp,
    message: &OutgoingMessage,
    burst: &Burst,
    acks: &mut AckPolicy,
    heads: &mut Vec<PacketHead>,
) {
    if needs_answer(message.request.opcode) {
        return heads.push(only(stamp, message, burst, acks));
    }
    for step in 0..burst.packets {
        heads.push(packet(stamp, message, burst.at + step, acks));
    }
}

/// The one packet of a burst that is one.
pub(crate) fn write_one(stamp: &Stamp, message: &OutgoingMessage, burst: &Burst, acks: &mut AckPolicy) -> PacketHead {
    match needs_answer(message.request.opcode) {
        true => only(stamp, message, burst, acks),
        false => packet(stamp, message, burst.at, acks),
    }
}

/// One packet of a SEND or WRITE.
fn packet(stamp: &Stamp, message: &OutgoingMessage, at: u32, acks: &mut AckPolicy) -> PacketHead {
    let request = &*message.request;
    let place = match (at == 0, at + 1 == message.packets) {
        (true, true) => PacketPosition::Only,
        (true, false) => PacketPosition::First,
        (false, true) => PacketPosition::Last,
        (false, false) => PacketPosition::Middle,
    };
    let bytes = message.bytes_before(at + 1, stamp.mtu) - message.bytes_before(at, stamp.mtu);
    let mut header = header(stamp, request, place, psn_add(message.first_psn, at));
    if header.opcode.ends() {
        // Immediate data and the key to invalidate share a field of the request.
        header.immediate = request.immediate;
        header.invalidate = request.immediate;
        header.solicited = request.flags.contains(SendFlags::SOLICITED) && request.opcode.consumes_receive();
    }
    header.reth = Reth { address: request.remote_address, rkey: request.rkey, length: message.length };
    if stamp.frames {
        let offset = u64::from(message.bytes_before(at, stamp.mtu));
        header.frame = Some(Frame { message_psn: message.first_psn, response_bytes: 0 });
        header.reth = match request.opcode.is_write() {
            true => Reth { address: request.remote_address.wrapping_add(offset), ..header.reth },
            false => Reth { address: offset, rkey: 0, length: message.length },
        };
    }
    header.ack_request = acks.asks(header.psn, bytes, header.opcode.ends());
    header.ack_waits = stamp.is_patient && place == PacketPosition::Only;
    PacketHead::new(header, bytes as usize)
}

/// A request that is answered: READ (or a piece of it), atomic, FLUSH, ATOMIC WRITE.
fn only(stamp: &Stamp, message: &OutgoingMessage, burst: &Burst, acks: &mut AckPolicy) -> PacketHead {
    let request = &*message.request;
    let mut header = header(stamp, request, PacketPosition::Only, burst.psn);
    let (address, rkey) = (request.remote_address, request.rkey);
    let mut payload = 0;
    match request.opcode {
        SendOpcode::RdmaRead => {
            let offset = u64::from(message.bytes_before(burst.at, stamp.mtu));
            header.reth = Reth { address: address.wrapping_add(offset), rkey, length: burst.bytes };
            header.frame = stamp.frames.then_some(Frame { message_psn: burst.psn, response_bytes: stamp.mtu });
        }
        SendOpcode::Flush => {
            // Its range stands in 32 bits: the requester has checked that.
            header.reth = Reth { address, rkey, length: request.compare_add as u32 };
            header.flush = flush_header(request);
        }
        SendOpcode::AtomicWrite => {
            header.reth = Reth { address, rkey, length: message.length };
            payload = message.length as usize;
        }
        SendOpcode::CompareSwap => {
            header.atomic = AtomicEth { address, rkey, swap_add: request.swap, compare: request.compare_add };
        }
        _ => header.atomic = AtomicEth { address, rkey, swap_add: request.compare_add, compare: 0 },
    }
    header.ack_request = acks.asks(burst.psn, payload as u32, true);
    PacketHead::new(header, payload)
}

fn header(stamp: &Stamp, request: &SendRequest, place: PacketPosition, psn: u32) -> Header {
    let opcode = Opcode::new(stamp.service, operation(request.opcode), place);
    let opcode = opcode.expect("a reliable service has all operations, and only SEND and WRITE more than one packet");
    let mut header = Header::new(opcode, stamp.dest_qpn, psn);
    header.srqn = request.remote_srqn;
    header
}

/// FETH: placement type in bits 0 to 3, selectivity level in bits 4 and 5 (A19); the request has
/// them in bytes.
fn flush_header(request: &SendRequest) -> u32 {
    (request.swap & 0xf) as u32 | ((request.swap >> 8 & 3) as u32) << 4
}

/// The message, if it may travel as a record.
pub(crate) fn record(request: &SendRequest, length: u32) -> Option<Record> {
    let opcode = record_opcode(request.opcode).filter(|_| length <= RECORD_PAYLOAD_BYTES_MAX as u32)?;
    let writes = request.opcode.is_write();
    Some(Record {
        opcode,
        solicited: request.flags.contains(SendFlags::SOLICITED) && request.opcode.consumes_receive(),
        length: length as u16,
        rkey: if writes { request.rkey } else { 0 },
        address: if writes { request.remote_address } else { 0 },
        argument: if opcode.has_immediate() || opcode.has_ieth() { request.immediate } else { 0 },
    })
}

fn record_opcode(opcode: SendOpcode) -> Option<Opcode> {
    const fn only(byte: u8) -> Option<Opcode> {
        match Opcode::from_byte(byte) {
            Some(opcode) if is_record(opcode) => Some(opcode),
            _ => panic!("a record has an operation of one packet"),
        }
    }
    match opcode {
        SendOpcode::Send => const { only(0x04) },
        SendOpcode::SendWithImmediate => const { only(0x05) },
        SendOpcode::SendWithInvalidate => const { only(0x17) },
        SendOpcode::RdmaWrite => const { only(0x0a) },
        SendOpcode::RdmaWriteWithImmediate => const { only(0x0b) },
        _ => None,
    }
}

/// Bytes that a message of one packet takes in a frame of records. `None`: it goes by itself.
pub(crate) fn record_bytes(opcode: SendOpcode, length: u32) -> Option<u32> {
    let opcode = record_opcode(opcode).filter(|_| length <= RECORD_PAYLOAD_BYTES_MAX as u32)?;
    Some(head_bytes(opcode.has_reth(), opcode.has_immediate() || opcode.has_ieth()) as u32 + length)
}

pub(crate) fn operation(opcode: SendOpcode) -> Operation {
    match opcode {
        SendOpcode::Send => Operation::Send,
        SendOpcode::SendWithImmediate => Operation::SendImmediate,
        SendOpcode::SendWithInvalidate => Operation::SendInvalidate,
        SendOpcode::RdmaWrite => Operation::Write,
        SendOpcode::RdmaWriteWithImmediate => Operation::WriteImmediate,
        SendOpcode::RdmaRead => Operation::ReadRequest,
        SendOpcode::CompareSwap => Operation::CompareSwap,
        SendOpcode::FetchAdd => Operation::FetchAdd,
        SendOpcode::Flush => Operation::Flush,
        SendOpcode::AtomicWrite => Operation::AtomicWrite,
        SendOpcode::BindWindow | SendOpcode::LocalInvalidate => unreachable!("done by the requester alone"),
    }
}

/// PSNs that a READ takes: one for each response (IBTA 9.7.3.1).
pub(crate) fn packets_of(length: u32, mtu: u32) -> u32 {
    length.div_ceil(mtu).max(1)
}
