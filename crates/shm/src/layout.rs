//! Layouts of the shared segments, version [`LAYOUT_VERSION`]. All little-endian, `repr(C)`,
//! offsets not pointers.
//!
//! Two sides share each segment: the *library* (in the container, hostile until proven otherwise)
//! and the *router*. Every word has exactly one writer, named here,
//! but for `ENTERED`, and the bits of doorbells and of rings to be notified. Either side keeps private
//! cursors; shared words are only ever loaded once, checked, and used from the copy.
//!
//! ```text
//! session segment   SessionHeader | doorbell words
//! QP segment        SQ: QueueHeader | slots | extensions     RQ: QueueHeader | slots | extensions | owners
//! SRQ segment       QueueHeader | slots | extensions | owners
//! CQ segment        CqHeader | entries
//! direct ring       header | descriptors | data | credits     (sender, receiver and router; see [`direct_ring`])
//! ```
//!
//! **Request slot** (64 bytes, one cache line), written by the library. A slot is *published* when
//! its `sequence` equals the free-running position plus one (u32, wrapping); the 64-bit word that
//! holds it (bytes 8 to 15) is stored last, with Release, and loaded first, with Acquire. Slots and
//! extensions are accessed in whole 64-bit words only. Positions map to slots modulo the (power of
//! two) slot count. The library never has more than `max_wr` requests outstanding, where
//! outstanding lasts until the completion was polled, so a slot is never overwritten before the
//! router took it. Further scatter/gather entries, or the inline payload, stand in the slot's own
//! extension (fixed stride), written before the slot is published.
//!
//! **Completion entry** (64 bytes), written by the router, published in the same way. The library
//! stores its free-running consumer count in `CqHeader::consumer`, which the router reads only when
//! the ring looks full.
//!
//! Invariant: a published slot's sequence never equals what a reader expects of an earlier or later
//! lap, because the sequence counts positions, not laps, and no other data is ever stored in its
//! place.
//!
//! **Who takes a RECV.** Two take RECVs of a queue that has an incoming direct ring: the library,
//! for messages that came by the direct ring, and the router, for all others and to flush. RECVs
//! are named by their positions, which are message sequence numbers: the n-th message of a
//! connection that needs a RECV takes the n-th one. `MSN` says how many the sender has used up when
//! it hands its next request to the router; a word for each slot settles who has its RECV (see
//! [`crate::claims`]). Those of an SRQ are taken in order, too, by whichever QP has a message; the
//! message sequence numbers of a QP that uses it are the positions of its own, empty receive queue.
//!
//! **Generations.** `GRANTS_REVOKED` of a send queue grows whenever memory granted to it is taken
//! back. Who copied looks at it afterwards, and leaves the request to the router if it has changed.
//! Who does an atomic looks before, between storing `ENTERED` and taking that back; the router waits
//! for the latter. That and `RINGS_NOTIFIED` are the words of a queue's header that two sides store.
//! `DIRECT_RINGS_CLOSED` is the same for its direct ring, but is looked at before: what is in a
//! direct ring stays there for the receiver.
//!
//! **Tally.** The library counts what it carries out past the router in words of the send queue's
//! header that it alone writes, on a cache line of their own. The router adds what they have grown
//! by to its counters, and believes them in nothing else.

/// Changes with every incompatible change in this file.
pub const LAYOUT_VERSION: u32 = 4;

/// Bytes of a request slot and of a completion entry.
pub const SLOT_BYTES: usize = 64;

/// Bytes of one scatter/gather entry.
pub const SGE_BYTES: usize = 16;

/// First word of a session segment.
pub const SESSION_MAGIC: u64 = u64::from_le_bytes(*b"FreeFlow");

/// Doorbells of a session, one bit each.
pub const DOORBELL_COUNT: usize = 65_536;
/// Doorbells below this one are of QPs and SRQs. From here on they are of CQs: one is rung when a
/// CQ was armed while it held completions that no event has reported.
pub const CQ_DOORBELL_BASE: u32 = 32_768;
/// 64-bit words of doorbells.
pub const DOORBELL_WORD_COUNT: usize = DOORBELL_COUNT / 64;
/// Doorbell words that one bit of the summary stands for.
pub const DOORBELL_WORDS_PER_SUMMARY_BIT: usize = DOORBELL_WORD_COUNT / 64;

/// 64-bit words of notifications: a bit for each cookie of a QP or SRQ.
pub const NOTIFICATION_WORD_COUNT: usize = CQ_DOORBELL_BASE as usize / 64;

/// Head of a session segment. Byte offsets.
pub mod session {
    /// u64, router: [`super::SESSION_MAGIC`].
    pub const MAGIC: usize = 0;
    /// u32, router: [`super::LAYOUT_VERSION`].
    pub const VERSION: usize = 8;
    /// u32, router: 1 while the router does not look at this session's doorbells: ring, then write
    /// the kick eventfd.
    pub const ROUTER_SLEEPS: usize = 64;
    /// u32, router: how a polling library waits: [`super::WAIT_SPIN`] or [`super::WAIT_YIELD`].
    pub const WAIT_POLICY: usize = 68;
    /// u32, router: one more than the processor that its worker ran on last; 0: it does not say.
    pub const ROUTER_CPU: usize = 72;
    /// u64, library sets bits, router swaps to 0: bit i stands for doorbell words 16 i .. 16 i +
    /// 15.
    pub const SUMMARY: usize = 128;
    /// u64, router: how many of its turns brought completions to this session; published after they
    /// are in their rings. Its lower half (in memory the first) is the futex that sleeping pollers
    /// wait on.
    pub const COMPLETED: usize = 192;
    /// u64, library: the highest value of COMPLETED that a sleeping poller waits for; it only
    /// grows.
    pub const AWAITED: usize = 256;
    /// u32, library: one more than the processor that last polled in vain.
    pub const LIBRARY_CPU: usize = 264;
    /// u64, router sets bits, library swaps to 0: bit i stands for words 8 i .. 8 i + 7 of
    /// [`NOTIFICATIONS`].
    pub const NOTIFICATION_SUMMARY: usize = 320;
    /// u64 x 1024, library sets bits, router swaps to 0.
    pub const DOORBELLS: usize = 4096;
    /// u64 x 512, router sets bits, library swaps to 0. One bit a QP, by its cookie: look at its
    /// incoming direct ring.
    pub const NOTIFICATIONS: usize = DOORBELLS + super::DOORBELL_WORD_COUNT * 8;
    /// Whole segment.
    pub const BYTES: usize = NOTIFICATIONS + super::NOTIFICATION_WORD_COUNT * 8;
}

/// The pollers of the machine fit its cores: spin freely.
pub const WAIT_SPIN: u32 = 0;
/// They don't: about twenty empty polls, then `sched_yield` after each, and sleep if that takes
/// long.
pub const WAIT_YIELD: u32 = 1;

/// Head of a queue of requests. Byte offsets from the queue's start.
pub mod queue {
    /// u32, router: 1 while the router looks at the slots of its own accord (no doorbell needed).
    /// Send queues only.
    pub const POLLED: usize = 0;
    /// u32, router: 1 if a post to this receive queue must ring the doorbell.
    pub const RECEIVES_WANTED: usize = 4;
    /// u32, router: counts the direct rings of this send queue that were closed; of a receive
    /// queue, those that led to it.
    pub const DIRECT_RINGS_CLOSED: usize = 8;
    /// u32, router: counts the times that something granted to this send queue was taken back: then
    /// all is.
    pub const GRANTS_REVOKED: usize = 12;
    /// u32, router: free-running count of requests taken.
    pub const TAKEN: usize = 64;
    /// u32, router: requests before this position are done, their completions written. Send queues
    /// of QPs with an outgoing direct ring or grants.
    pub const DONE: usize = 68;
    /// u32, library: RECVs before this position were taken, by itself or by the router. Receive
    /// queues with an incoming direct ring, and the SRQs of such. The empty receive queue of a QP
    /// that uses an SRQ: how many messages were taken out of direct rings since the last reset.
    pub const CLAIMED: usize = 128;
    /// u32, library: RECVs of the peer that are used up before the next request that the router
    /// takes. Send queues.
    pub const MSN: usize = 132;
    /// u32, library: counts messages put into the outgoing direct ring of which the peer wants to
    /// be notified. Send queues.
    pub const NOTIFIED: usize = 136;
    /// u32, library: the same for the last solicited one: the value of NOTIFIED then.
    pub const NOTIFIED_SOLICITED: usize = 140;

    /// u32, library: messages put into direct rings since the last reset. Send queues.
    pub const RING_MESSAGES: usize = 144;
    /// u32, router: rings of datagrams that were opened to this QP, free-running. Receive queues of UD QPs.
    pub const RINGS_OFFERED: usize = 148;
    /// u64, library: not 0 while it does an atomic by a grant; the router may expel it. Send queues. See
    /// [`crate::revocation`].
    pub const ENTERED: usize = 152;
    /// u64, router: a bit for each ring of datagrams that is open, by its place. Both queues of UD QPs.
    pub const RINGS_OPEN: usize = 160;
    /// u64, library sets bits, router swaps to 0: rings of datagrams with a message of which the receiver wants to be
    /// notified, by their places. Send queues of UD QPs.
    pub const RINGS_NOTIFIED: usize = 168;
    /// The same for a solicited one.
    pub const RINGS_SOLICITED: usize = 176;
    /// u64 each, library: what was carried out past the router since the queue was made, also over
    /// resets. Send queues; receive queues of UD QPs: what was taken out of direct rings, as SENDs. SENDs
    /// and WRITEs, their payload and the packets that a wire would need for it; READs and atomics, and the same
    /// of what they brought.
    pub const DIRECT_SENDS: usize = 192;
    pub const DIRECT_WRITES: usize = 200;
    pub const DIRECT_READS: usize = 208;
    pub const DIRECT_ATOMICS: usize = 216;
    pub const DIRECT_SENT_BYTES: usize = 224;
    pub const DIRECT_READ_BYTES: usize = 232;
    pub const DIRECT_SENT_PACKETS: usize = 240;
    pub const DIRECT_READ_PACKETS: usize = 248;
    /// Bytes before the slots.
    pub const BYTES: usize = 256;
}

/// A request slot. Byte offsets.
pub mod slot {
    /// u64: work request id.
    pub const WR_ID: usize = 0;
    /// u8: `SendOpcode` (send), 0 (receive).
    pub const OPCODE: usize = 8;
    /// u8: `SendFlags`.
    pub const FLAGS: usize = 9;
    /// u8: scatter/gather entries.
    pub const SGE_COUNT: usize = 10;
    /// u8: zero.
    pub const RESERVED: usize = 11;
    /// u32: position + 1; stored last.
    pub const SEQUENCE: usize = 12;
    /// u64: remote address; UD: address handle (u32), remote QPN (u32).
    pub const REMOTE_ADDRESS: usize = 16;
    /// u32: rkey; UD: Q_Key.
    pub const RKEY: usize = 24;
    /// u32: immediate, network byte order as posted; the key to invalidate; BIND_MW: the region's
    /// lkey; atomics of XRC: the number of the remote SRQ.
    pub const IMMEDIATE: usize = 28;
    /// u64: atomic compare or addend; BIND_MW, FLUSH: length; ATOMIC_WRITE inline: the payload.
    pub const COMPARE_ADD: usize = 32;
    /// u64: atomic swap. Else u32: rights of a window, or type and level of a FLUSH.
    pub const SWAP: usize = 40;
    /// u32: XRC: number of the remote SRQ, unless it is an atomic.
    pub const REMOTE_SRQN: usize = 44;
    /// First SGE: address u64, length u32, lkey u32. Inline: length holds the byte count, the
    /// payload is in the extension (ATOMIC_WRITE: in the slot).
    pub const SGE0: usize = 48;
    /// First SGE of a receive request; two more follow in the slot.
    pub const RECEIVE_SGE0: usize = 16;
    /// SGEs that stand in a send slot, in a receive slot.
    pub const SEND_SGES: usize = 1;
    pub const RECEIVE_SGES: usize = 3;
}

/// Head of a completion queue. Byte offsets.
pub mod cq {
    /// u32, library: 0 not armed, 1 armed for the next completion, 2 for the next solicited one.
    /// The router swaps it to 0 when it sends the event.
    pub const ARMED: usize = 0;
    /// u32, library: free-running count of entries consumed. The router stores the first value
    /// before the library gets the segment: minus the number of entries carried over by a resize
    /// (see `completion_ring`).
    pub const CONSUMER: usize = 64;
    /// Bytes before the entries.
    pub const BYTES: usize = 128;
}

pub const ARMED_NONE: u32 = 0;
pub const ARMED_NEXT: u32 = 1;
pub const ARMED_SOLICITED: u32 = 2;

/// A completion entry. Byte offsets.
pub mod entry {
    /// u64.
    pub const WR_ID: usize = 0;
    /// u8 `CompletionStatus`, u8 `CompletionOpcode`, u8 `CompletionFlags`, u8 vendor error.
    pub const STATUS: usize = 8;
    pub const OPCODE: usize = 9;
    pub const FLAGS: usize = 10;
    pub const VENDOR_ERROR: usize = 11;
    /// u32: position + 1; stored last.
    pub const SEQUENCE: usize = 12;
    /// u32 each.
    pub const BYTE_COUNT: usize = 16;
    pub const IMMEDIATE: usize = 20;
    pub const QPN: usize = 24;
    pub const SOURCE_QPN: usize = 28;
    pub const QP_COOKIE: usize = 32;
    pub const RING_POSITION: usize = 36;
    /// u64: CLOCK_MONOTONIC, ns.
    pub const TIMESTAMP: usize = 40;
    /// 16 bytes of zero.
    pub const RESERVED: usize = 48;
}

/// A direct ring: messages from one QP to its peer on the same host, past the router. Byte offsets.
///
/// The sender puts a message's payload into its descriptor if that has room, else into the ring of
/// data, where it never wraps: what does not fit before the end begins at the start. Both sides
/// reckon the places from the lengths. A descriptor is published as a slot is: by the sequence in
/// the upper half of its head.
pub mod direct_ring {
    /// u32, receiver: [`super::DIRECT_RING_OPEN`] once it takes messages,
    /// [`super::DIRECT_RING_LEFT`] once its RECVs are flushed.
    pub const STATE: usize = 0;
    /// u32, receiver: 1 if the sender must say to the router that there is a message: nobody looks.
    pub const WANTS_NOTIFICATION: usize = 4;
    /// u32, receiver: messages that it has freed, free-running.
    pub const FREED: usize = 64;
    /// Slots of descriptors. The first message is in slot 0, and each descriptor says in which slot
    /// the next one is.
    pub const DESCRIPTORS: usize = 4096;
    pub const DESCRIPTOR_BYTES: usize = 128;
    /// Slots. The sender uses no more than it needs, a page at a time.
    pub const DESCRIPTOR_COUNT: u32 = 256;
    /// Data.
    pub const DATA: usize = DESCRIPTORS + DESCRIPTOR_BYTES * DESCRIPTOR_COUNT as usize;
    pub const UNIT_BYTES: usize = 64;
    pub const UNIT_COUNT: u32 = 16384;
    /// Credits, where they have room before the descriptors; else behind the data.
    const CREDITS_BEFORE: usize = 128;
    const CREDITS_BEHIND: usize = DATA + UNIT_BYTES * UNIT_COUNT as usize;

    /// Where so many credits begin: u64 each, receiver: bytes that the RECV of a position takes (low half;
    /// [`super::CREDIT_ROUTED`]: leave it to the router) and the position plus one (high half), at
    /// position modulo the count. If the receiver uses an SRQ, there is one word: how many
    /// messages of the ring, free-running, are promised a RECV (high half), and the bytes that each
    /// of these takes (low half).
    pub fn credits(count: u32) -> usize {
        if CREDITS_BEFORE + count as usize * 8 <= DESCRIPTORS { CREDITS_BEFORE } else { CREDITS_BEHIND }
    }

    /// Bytes of the segment of a direct ring whose receiver has so many slots in its receive queue.
    pub fn bytes(credit_count: u32) -> usize {
        (credits(credit_count) + credit_count as usize * 8).max(CREDITS_BEHIND)
    }
}

pub const DIRECT_RING_OPEN: u32 = 1;
/// The receiver looks once more, and never again.
pub const DIRECT_RING_LEFT: u32 = 2;
/// The router must deliver to this RECV.
pub const CREDIT_ROUTED: u32 = u32::MAX;

/// A descriptor of a direct ring. Byte offsets.
pub mod descriptor {
    /// u32: bytes of the payload.
    pub const LENGTH: usize = 0;
    /// u32: position + 1; stored last.
    pub const SEQUENCE: usize = 4;
    /// u32: the RECV that it takes. A datagram: how many to its receiver the router got before.
    pub const MSN: usize = 8;
    /// u32: immediate, network byte order as posted.
    pub const IMMEDIATE: usize = 12;
    /// u8: `CompletionFlags` of the receiver's completion; then u8: 1, if it reports a WRITE.
    pub const FLAGS: usize = 16;
    /// u8: slot of the next message.
    pub const NEXT_SLOT: usize = 18;
    /// u32: bytes that the WRITE wrote; or the unit of data where the payload begins, if that is not
    /// here.
    pub const WRITTEN: usize = 20;
    /// Payload, unless it is longer than this has room for.
    pub const PAYLOAD: usize = 24;
    pub const PAYLOAD_BYTES_MAX: usize = super::direct_ring::DESCRIPTOR_BYTES - PAYLOAD;
}

/// Shape of one queue of requests: both sides compute the same offsets from the granted
/// capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueShape {
    /// Slots, a power of two.
    pub slot_count: u32,
    /// Bytes of one extension, a multiple of 64; may be 0.
    pub extension_bytes: u32,
    /// There is a word for each slot that says who takes it: receive queues.
    pub has_owners: bool,
}

impl QueueShape {
    /// A send queue of `max_wr` requests with so many SGEs and so much inline payload.
    pub fn send(max_wr: u32, max_sge: u32, max_inline: u32) -> Self {
        let sges = (max_sge as usize).saturating_sub(slot::SEND_SGES) * SGE_BYTES;
        Self::new(max_wr, sges.max(max_inline as usize))
    }

    /// A receive queue, of a QP or shared.
    pub fn receive(max_wr: u32, max_sge: u32) -> Self {
        let extension = (max_sge as usize).saturating_sub(slot::RECEIVE_SGES) * SGE_BYTES;
        Self { has_owners: true, ..Self::new(max_wr, extension) }
    }

    fn new(max_wr: u32, extension: usize) -> Self {
        Self {
            slot_count: max_wr.max(1).next_power_of_two(),
            extension_bytes: extension.next_multiple_of(SLOT_BYTES) as u32,
            has_owners: false,
        }
    }

    /// Bytes of the whole queue: header, slots, extensions, owners.
    pub fn bytes(self) -> usize {
        let owners = if self.has_owners { self.slot_count as usize * 4 } else { 0 };
        self.owners() + owners.next_multiple_of(SLOT_BYTES)
    }

    /// Where the owners begin.
    pub(crate) fn owners(self) -> usize {
        queue::BYTES + self.slot_count as usize * (SLOT_BYTES + self.extension_bytes as usize)
    }
}

/// Entries of a CQ's ring: a power of two at or above `cqe`.
pub fn cq_entry_count(cqe: u32) -> u32 {
    cqe.max(1).next_power_of_two()
}

/// Bytes of a CQ's segment.
pub fn cq_bytes(cqe: u32) -> usize {
    cq::BYTES + cq_entry_count(cqe) as usize * SLOT_BYTES
}

// The layout is an interface: a change here is a new LAYOUT_VERSION.
const _: () = {
    assert!(slot::SGE0 + SGE_BYTES == SLOT_BYTES);
    assert!(slot::RECEIVE_SGE0 + slot::RECEIVE_SGES * SGE_BYTES == SLOT_BYTES);
    assert!(entry::RESERVED + 16 == SLOT_BYTES);
    assert!(slot::SEQUENCE == entry::SEQUENCE);
    assert!(session::BYTES.is_multiple_of(4096) && session::NOTIFICATION_SUMMARY + 8 <= session::DOORBELLS);
    assert!(queue::DIRECT_SENDS.is_multiple_of(SLOT_BYTES) && queue::DIRECT_READ_PACKETS + 8 <= queue::BYTES);
    assert!(queue::BYTES.is_multiple_of(SLOT_BYTES) && direct_ring::DATA.is_multiple_of(4096));
    assert!(direct_ring::DESCRIPTOR_COUNT == 1 << 8 && descriptor::NEXT_SLOT == descriptor::FLAGS + 2);
    assert!(NOTIFICATION_WORD_COUNT == 8 * 64);
    assert!(DOORBELL_WORDS_PER_SUMMARY_BIT == 16);
};
