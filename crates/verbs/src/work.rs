//! Work requests (`struct ibv_send_wr`, `struct ibv_recv_wr`).
use crate::limits::{INLINE_BYTES_MAX, SGE_COUNT_MAX};
use serde::{Deserialize, Serialize};

/// A scatter/gather entry; same layout as `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(C)]
pub struct Sge {
    /// First byte, in the region's own addressing.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: u32,
}

/// Numbers equal `enum ibv_wr_opcode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum SendOpcode {
    /// WRITE.
    RdmaWrite = 0,
    /// WRITE with immediate data, which consumes a RECV.
    RdmaWriteWithImmediate = 1,
    /// SEND.
    #[default]
    Send = 2,
    /// SEND with immediate data.
    SendWithImmediate = 3,
    /// READ.
    RdmaRead = 4,
    /// Compare and swap of eight bytes.
    CompareSwap = 5,
    /// Fetch and add of eight bytes.
    FetchAdd = 6,
    /// Takes a window's binding away (`IBV_WR_LOCAL_INV`).
    LocalInvalidate = 7,
    /// Binds a memory window of either type (`IBV_WR_BIND_MW`, and what `ibv_bind_mw` posts).
    BindWindow = 8,
    /// SEND that invalidates an rkey of the receiver's.
    SendWithInvalidate = 9,
    /// Makes earlier WRITEs to a range globally visible (IBTA annex A19).
    Flush = 14,
    /// Writes eight aligned bytes at once (IBTA annex A19).
    AtomicWrite = 15,
}

impl SendOpcode {
    /// All opcodes, in order of their numbers.
    pub const ALL: [Self; 12] = [
        Self::RdmaWrite,
        Self::RdmaWriteWithImmediate,
        Self::Send,
        Self::SendWithImmediate,
        Self::RdmaRead,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::LocalInvalidate,
        Self::BindWindow,
        Self::SendWithInvalidate,
        Self::Flush,
        Self::AtomicWrite,
    ];

    /// The opcode with this number of `enum ibv_wr_opcode`.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            0..=9 => Some(Self::ALL[number as usize]),
            14 => Some(Self::Flush),
            15 => Some(Self::AtomicWrite),
            _ => None,
        }
    }

    /// Whether it carries immediate data.
    pub const fn has_immediate(self) -> bool {
        matches!(self, Self::RdmaWriteWithImmediate | Self::SendWithImmediate)
    }

    /// Whether it is a SEND of any kind.
    pub const fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendWithImmediate | Self::SendWithInvalidate)
    }

    /// Whether it is a WRITE, with or without immediate data.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::RdmaWrite | Self::RdmaWriteWithImmediate)
    }

    /// Reads, changes and returns eight bytes.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Has operands in `compare_add` and `swap`.
    pub const fn has_operands(self) -> bool {
        self.is_atomic() || matches!(self, Self::BindWindow | Self::Flush)
    }

    /// Done by the requester's own NIC: no message is sent.
    pub const fn is_local(self) -> bool {
        matches!(self, Self::LocalInvalidate | Self::BindWindow)
    }

    /// Whether the responder consumes a RECV for it.
    pub const fn consumes_receive(self) -> bool {
        self.is_send() || self.has_immediate()
    }
}

/// Bit values equal `enum ibv_send_flags`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendFlags(pub u8);

impl SendFlags {
    /// Waits until earlier READs and atomics of the queue are done.
    pub const FENCE: u8 = 1;
    /// Gives a completion also on success.
    pub const SIGNALED: u8 = 1 << 1;
    /// Asks the receiver for a solicited event.
    pub const SOLICITED: u8 = 1 << 2;
    /// The payload is in the request.
    pub const INLINE: u8 = 1 << 3;

    /// Whether `bit` is set.
    pub const fn contains(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

/// Operation of an atomic request on its eight bytes (IBTA 9.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AtomicOperation {
    /// Stores `swap` if the value equals `compare`; returns the old value.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds `add` modulo 2^64; returns the old value.
    FetchAdd {
        /// Addend.
        add: u64,
    },
}

/// A send request, copied out of the ring: nothing in it points into shared memory, and its counts are within bounds.
/// Serialized, it is only what its counts say.
#[derive(Clone, Debug)]
pub struct SendRequest {
    /// The program's `wr_id`.
    pub work_request_id: u64,
    /// Operation.
    pub opcode: SendOpcode,
    /// [`SendFlags`].
    pub flags: SendFlags,
    /// Position in the send ring: a free-running count.
    pub ring_position: u32,
    /// Valid entries of `sges`.
    pub sge_count: u8,
    /// Bytes of `inline_data` in use, if `flags` has INLINE; the SGEs are then unused.
    pub inline_length: u16,
    /// Immediate data in network byte order, as posted. SEND_WITH_INV and LOCAL_INV: the rkey to
    /// invalidate. BIND_MW: the lkey of the region.
    pub immediate: u32,
    /// WRITE, READ, atomics, FLUSH, ATOMIC_WRITE: where. BIND_MW: first address of the window.
    pub remote_address: u64,
    /// The same operations: the key. BIND_MW: the key that the window gets; its upper 24 bits name the window.
    pub rkey: u32,
    /// FETCH_ADD: the addend. CMP_SWAP: the value to compare with. BIND_MW, FLUSH: length, bytes.
    pub compare_add: u64,
    /// CMP_SWAP: the value to store. BIND_MW: the window's rights ([`crate::Access`]). FLUSH: placement type
    /// (`enum ibv_placement_type`, bits 0 to 7) and selectivity level (`enum ibv_selectivity_level`, bits 8 to 15).
    pub swap: u64,
    /// XRC: number of the shared receive queue at the target.
    pub remote_srqn: u32,
    /// UD: handle of the address handle (the router's number, from its creation).
    pub address_handle: u32,
    /// UD: QPN of the receiver.
    pub remote_qpn: u32,
    /// UD: Q_Key of the receiver.
    pub remote_qkey: u32,
    /// Memory of the payload; the first `sge_count` count.
    pub sges: [Sge; SGE_COUNT_MAX],
    /// Payload of an inline request; the first `inline_length` bytes count.
    pub inline_data: [u8; INLINE_BYTES_MAX],
}

impl Default for SendRequest {
    fn default() -> Self {
        Self {
            work_request_id: 0,
            opcode: SendOpcode::Send,
            flags: SendFlags(0),
            ring_position: 0,
            sge_count: 0,
            inline_length: 0,
            immediate: 0,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            remote_srqn: 0,
            address_handle: 0,
            remote_qpn: 0,
            remote_qkey: 0,
            sges: [Sge::default(); SGE_COUNT_MAX],
            inline_data: [0; INLINE_BYTES_MAX],
        }
    }
}

impl SendRequest {
    /// The valid scatter/gather entries.
    pub fn sges(&self) -> &[Sge] {
        &self.sges[..usize::from(self.sge_count).min(SGE_COUNT_MAX)]
    }

    /// Whether the payload is in the request.
    pub fn is_inline(&self) -> bool {
        self.flags.contains(SendFlags::INLINE)
    }

    /// Length of the local payload, bytes.
    pub fn payload_bytes(&self) -> u64 {
        if self.is_inline() {
            u64::from(self.inline_length)
        } else {
            self.sges().iter().map(|sge| u64::from(sge.length)).sum()
        }
    }
}

/// A receive request, copied out of the ring; see [`SendRequest`].
#[derive(Clone, Debug)]
pub struct ReceiveRequest {
    /// The program's `wr_id`.
    pub work_request_id: u64,
    /// Position in the receive ring: a free-running count.
    pub ring_position: u32,
    /// Valid entries of `sges`.
    pub sge_count: u8,
    /// Memory for the payload; the first `sge_count` count.
    pub sges: [Sge; SGE_COUNT_MAX],
}

impl Default for ReceiveRequest {
    fn default() -> Self {
        Self { work_request_id: 0, ring_position: 0, sge_count: 0, sges: [Sge::default(); SGE_COUNT_MAX] }
    }
}

impl ReceiveRequest {
    /// The valid scatter/gather entries.
    pub fn sges(&self) -> &[Sge] {
        &self.sges[..usize::from(self.sge_count).min(SGE_COUNT_MAX)]
    }

    /// Room for payload, bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.sges().iter().map(|sge| u64::from(sge.length)).sum()
    }
}
