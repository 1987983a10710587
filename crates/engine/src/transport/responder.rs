//! State of the responder of a connected QP about its peer's packets; `responder::packets` acts on
//! it.
use crate::transport::answers::Answers;
use crate::transport::habit::Habit;
use crate::transport::kept::KeptPackets;
use crate::transport::packets::Packet;
use crate::transport::replay::Replays;
use freeflow_verbs::{Access, SendOpcode};
use freeflow_wire::{Header, MASK_24, Opcode, Operation, Reth, psn_add};
use serde::{Deserialize, Serialize};

/// Packets that ask for no acknowledgement are acknowledged after so many all the same, for the
/// requester's window.
pub(crate) const ACKNOWLEDGE_PACKETS: u32 = 64;

#[derive(Serialize, Deserialize)]
pub(crate) struct WireResponder {
    pub(crate) expected_psn: u32,
    /// Messages completed (IBTA 9.7.7.1), modulo 2^24.
    pub(crate) msn: u32,
    pub phase: Phase,
    /// The message that has begun and not ended.
    pub message: Option<IncomingMessage>,
    /// The write to account for when the operation in flight has completed.
    pub writing: Option<PendingWrite>,
    pub(crate) answers: Answers,
    pub(crate) replays: Replays,
    /// Packets since something was owed.
    pub(crate) unacknowledged: u32,
    /// It stands in `Engine::acks_owed`.
    pub(crate) listed: bool,
    pub(crate) habit: Habit,
    /// A request came with ECN's mark of congestion, and no answer has gone out since.
    pub(crate) owes_echo: bool,
    /// Packets behind a missing one.
    pub(crate) kept: KeptPackets,
}

/// How the responder looks at packets beyond the expected one, and whether it goes on at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// They show a gap.
    Listening,
    /// The gap has been reported: one sequence NAK is enough (IBTA 9.7.5.1.1). With selective repeat, each of them adds
    /// to what is kept.
    Gap,
    /// The expected one got an RNR NAK; they were under way already.
    NotReady,
    /// The QP is in ERROR by its responder's own decision.
    Closing,
}

/// A SEND or WRITE of several packets.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct IncomingMessage {
    pub writes: bool,
    /// XRC.
    pub srqn: u32,
    pub address: u64,
    pub rkey: u32,
    /// WRITE: as announced. (A SEND's is only in frames.)
    pub length: u64,
    /// Bytes.
    pub arrived: u64,
}

/// Packets of one message whose bytes are being written at once; or one whose atomic is being done. What is not a sum
/// is the last one's.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PendingWrite {
    pub packets: u32,
    pub psn: u32,
    pub opcode: Opcode,
    pub bytes: u32,
    /// Any of them.
    pub ack_request: bool,
    /// All of them let it wait.
    pub ack_waits: bool,
    pub solicited: bool,
    /// Immediate data, or the key to invalidate.
    pub argument: u32,
}

/// WRITEs of one packet each that were written one after the other.
#[derive(Clone, Copy, Default)]
pub(crate) struct Written {
    pub messages: u32,
    pub bytes: u64,
    /// As the path MTU has them.
    pub packets: u64,
}

/// Memory that a request of one packet names.
pub(crate) struct WriteTarget {
    pub address: u64,
    pub rkey: u32,
    pub length: u32,
    pub right: Access,
    /// FLUSH of all that the key names.
    pub whole: bool,
}

impl WireResponder {
    pub fn new(rq_psn: u32) -> Self {
        Self {
            expected_psn: rq_psn & MASK_24,
            msn: 0,
            phase: Phase::Listening,
            message: None,
            writing: None,
            answers: Answers::new(),
            replays: Replays::default(),
            unacknowledged: 0,
            listed: false,
            habit: Habit::new(),
            owes_echo: false,
            kept: KeptPackets::default(),
        }
    }

    /// It has had its last words, or is about to.
    pub fn is_closing(&self) -> bool {
        self.phase == Phase::Closing
    }

    pub fn complete_message(&mut self) {
        self.msn = psn_add(self.msn, 1);
    }
}

impl PendingWrite {
    pub fn new(packet: &Packet<'_>) -> Self {
        let header = packet.header;
        Self {
            packets: 1,
            psn: header.psn,
            opcode: header.opcode,
            bytes: packet.payload.len() as u32,
            ack_request: header.ack_request,
            ack_waits: header.ack_waits,
            solicited: header.solicited,
            argument: if header.opcode.has_ieth() { header.invalidate } else { header.immediate },
        }
    }

    pub fn first_psn(&self) -> u32 {
        psn_add(self.psn, (MASK_24 + 2) - self.packets)
    }

    /// The next packet of a WRITE without immediate data is written with these.
    pub fn extend(&mut self, header: &Header, bytes: u32) {
        self.packets += 1;
        self.bytes += bytes;
        (self.psn, self.opcode, self.solicited) = (header.psn, header.opcode, header.solicited);
        self.ack_request |= header.ack_request;
        self.ack_waits &= header.ack_waits;
    }
}

impl IncomingMessage {
    pub fn begin(writes: bool, srqn: u32, reth: &Reth) -> Self {
        Self { writes, srqn, address: reth.address, rkey: reth.rkey, length: u64::from(reth.length), arrived: 0 }
    }

    /// Whether a frame says of itself that it goes on where the message stands.
    pub fn is_next(&self, frame: &Reth) -> bool {
        let begins_at_0 = self.writes || (self.address, self.rkey) == (0, 0);
        begins_at_0
            && frame.address == self.address.wrapping_add(self.arrived)
            && frame.rkey == self.rkey
            && u64::from(frame.length) == self.length
    }
}

/// The request that a packet of a SEND or WRITE belongs to, as far as it shows.
pub(crate) fn send_opcode(opcode: Opcode) -> SendOpcode {
    match opcode.operation() {
        Operation::SendImmediate => SendOpcode::SendWithImmediate,
        Operation::SendInvalidate => SendOpcode::SendWithInvalidate,
        Operation::Write => SendOpcode::RdmaWrite,
        Operation::WriteImmediate => SendOpcode::RdmaWriteWithImmediate,
        _ => SendOpcode::Send,
    }
}

pub(crate) fn atomic_opcode(opcode: Opcode) -> SendOpcode {
    if opcode.operation() == Operation::CompareSwap { SendOpcode::CompareSwap } else { SendOpcode::FetchAdd }
}
