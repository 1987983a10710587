//! A library's tally of requests that it has carried out on the direct path: words of its send
//! queue's header, for the router's counters.
//!
//! The library alone stores them, one post at a time: no atomic addition. The words of one look
//! need not be of one moment; what is missing in one look is there in the next.
use crate::layout::queue;
use crate::sync::{AtomicU64, Ordering};
use crate::view::{QueueView, TALLY};
use freeflow_verbs::PathMtu;

// Words of `QueueView::tally`. Each four, and each two, stand side by side: a request's kind and
// direction are indexes.
const MESSAGES: usize = (queue::DIRECT_SENDS - TALLY) / 8;
const BYTES: usize = (queue::DIRECT_SENT_BYTES - TALLY) / 8;
const PACKETS: usize = (queue::DIRECT_SENT_PACKETS - TALLY) / 8;

const _: () = {
    assert!(queue::DIRECT_WRITES == queue::DIRECT_SENDS + 8 && queue::DIRECT_READS == queue::DIRECT_SENDS + 16);
    assert!(queue::DIRECT_ATOMICS == queue::DIRECT_READS + 8);
    assert!(queue::DIRECT_READ_BYTES == queue::DIRECT_SENT_BYTES + 8);
    assert!(queue::DIRECT_READ_PACKETS == queue::DIRECT_SENT_PACKETS + 8);
};

/// Free-running counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub sends: u64,
    pub writes: u64,
    /// Of both: payload, and the packets that a wire would need.
    pub sent_bytes: u64,
    pub sent_packets: u64,
    pub reads: u64,
    pub atomics: u64,
    /// Of both: what they brought, bytes, and its packets.
    pub read_bytes: u64,
    pub read_packets: u64,
}

impl Tally {
    pub(crate) fn load(view: &QueueView) -> Self {
        // Relaxed: counts and nothing else; partner: the store in `grow`.
        let word = |index: usize| view.tally()[index].load(Ordering::Relaxed);
        Self {
            sends: word(MESSAGES + SEND),
            writes: word(MESSAGES + WRITE),
            sent_bytes: word(BYTES),
            sent_packets: word(PACKETS),
            reads: word(MESSAGES + READ),
            atomics: word(MESSAGES + ATOMIC),
            read_bytes: word(BYTES + 1),
            read_packets: word(PACKETS + 1),
        }
    }
}

/// Kinds of requests, for [`count`].
pub(crate) const SEND: usize = 0;
pub(crate) const WRITE: usize = 1;
pub(crate) const READ: usize = 2;
pub(crate) const ATOMIC: usize = 3;

/// Counts one request of the library's. `mtu_shift`: the binary logarithm of the path MTU in bytes.
#[inline(always)] // a dozen instructions
pub(crate) fn count<const KIND: usize>(view: &QueueView, mtu_shift: u32, bytes: u32) {
    let direction = if KIND == READ || KIND == ATOMIC { 1 } else { 0 };
    // An empty message is a packet, too.
    let packets = 1 + (bytes.saturating_sub(1) >> (mtu_shift & 31));
    let words = view.tally();
    grow(&words[MESSAGES + KIND], 1);
    grow(&words[BYTES + direction], u64::from(bytes));
    grow(&words[PACKETS + direction], u64::from(packets));
}

#[inline]
fn grow(word: &AtomicU64, more: u64) {
    // Relaxed, both: this side alone stores it; partner: the load in `Tally::load`.
    word.store(word.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

pub(crate) const fn mtu_shift(mtu: PathMtu) -> u32 {
    mtu.bytes().trailing_zeros()
}
