//! The rings of posted requests: send queue, receive queue, shared receive queue. The library
//! produces, the router takes.
//!
//! The router trusts nothing in them: each word is loaded once, the copy is checked, and a request
//! that makes no sense is consumed and reported as [`Take::Malformed`].
//!
//! Invariant: what [`RequestConsumer`] fills in is within the limits of [`SendRequest`] and
//! [`ReceiveRequest`] and of the granted capabilities, whatever the slot holds.
use crate::claims::{Taker, claim, unclaim};
use crate::handshake::{announce, announced};
use crate::layout::{QueueShape, SGE_BYTES, direct_ring, queue, slot};
use crate::revocation::{Entered, entered, expel, is_inside, revoke};
use crate::segment::Segment;
use crate::slot::{HEAD, Line, PublishCursor, Slots, TakeCursor};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use crate::tally::{self, Tally};
use crate::view::QueueView;
use freeflow_verbs::{
    INLINE_BYTES_MAX, PathMtu, QpType, ReceiveRequest, SGE_COUNT_MAX, SendFlags, SendOpcode, SendRequest, Sge,
};
use std::sync::Arc;

mod datagram_rings;

const WORD_BYTES: usize = 8;
const SGE_WORDS: usize = SGE_BYTES / WORD_BYTES;
/// Messages in the direct rings between two QPs: in an open one, and in some that were closed.
const RING_BACKLOG_MAX: u32 = 16 * direct_ring::DESCRIPTOR_COUNT;
/// Bits of `SendFlags` that have a meaning.
const FLAGS_KNOWN: u8 = SendFlags::FENCE | SendFlags::SIGNALED | SendFlags::SOLICITED | SendFlags::INLINE;

// Words of a slot, from the byte offsets of the layout.
const WR_ID: usize = slot::WR_ID / WORD_BYTES;
const REMOTE_ADDRESS: usize = slot::REMOTE_ADDRESS / WORD_BYTES;
const RKEY_IMMEDIATE: usize = slot::RKEY / WORD_BYTES;
const COMPARE_ADD: usize = slot::COMPARE_ADD / WORD_BYTES;
const SWAP: usize = slot::SWAP / WORD_BYTES;
const SGE0: usize = slot::SGE0 / WORD_BYTES;
const RECEIVE_SGE0: usize = slot::RECEIVE_SGE0 / WORD_BYTES;

const _: () = {
    assert!(slot::OPCODE == HEAD * WORD_BYTES && slot::SEQUENCE == slot::OPCODE + 4);
    assert!(
        slot::FLAGS == slot::OPCODE + 1 && slot::SGE_COUNT == slot::OPCODE + 2 && slot::RESERVED == slot::OPCODE + 3
    );
    assert!(slot::RKEY == RKEY_IMMEDIATE * WORD_BYTES && slot::IMMEDIATE == slot::RKEY + 4);
    assert!(slot::REMOTE_SRQN == SWAP * WORD_BYTES + 4);
};

/// A send request as the library posts it.
#[derive(Clone, Copy, Debug)]
pub struct SendDescriptor<'a> {
    pub wr_id: u64,
    pub opcode: SendOpcode,
    /// INLINE is set or cleared according to `inline`.
    pub flags: SendFlags,
    /// Network byte order; or a key, see [`SendRequest`].
    pub immediate: u32,
    /// UD: the address handle in the low half, the remote QPN in the high half.
    pub remote_address: u64,
    /// UD: the Q_Key.
    pub rkey: u32,
    /// Atomics, BIND_MW and FLUSH only; see [`SendRequest`].
    pub compare_add: u64,
    /// The same. 32 bits, unless it is an atomic.
    pub swap: u64,
    /// XRC only, else 0.
    pub remote_srqn: u32,
    /// At most the granted number. Ignored with `inline`.
    pub sges: &'a [Sge],
    /// At most the granted number of bytes.
    pub inline: Option<&'a [u8]>,
}

/// Library side of a queue of requests. The caller never has more than `max_wr` requests
/// outstanding.
pub struct RequestProducer {
    view: QueueView,
    cursor: PublishCursor,
    /// By which packets are counted.
    mtu_shift: u32,
}

impl RequestProducer {
    /// Over the queue at `offset`. Panics if it doesn't fit the segment.
    pub fn new(segment: Arc<Segment>, offset: usize, shape: QueueShape) -> Self {
        let view = QueueView::new(segment, offset, shape);
        Self { view, cursor: PublishCursor::default(), mtu_shift: tally::mtu_shift(PathMtu::default()) }
    }

    /// The position that the next request gets.
    #[inline]
    pub fn position(&self) -> u32 {
        self.cursor.position()
    }

    /// Publishes a send request; gives its position. Panics if SGEs or inline payload are beyond
    /// the queue's shape.
    #[inline(always)] // so that a request is made in the slot, not in memory before
    pub fn publish_send(&mut self, request: &SendDescriptor<'_>) -> u32 {
        let mut flags = request.flags.0 & FLAGS_KNOWN & !SendFlags::INLINE;
        let mut sge_count = 0;
        let mut first = Sge::default();
        if let Some(bytes) = request.inline {
            flags |= SendFlags::INLINE;
            first.length = bytes.len() as u32;
            if request.opcode != SendOpcode::AtomicWrite {
                store_bytes(self.view.extension(self.cursor.position()), bytes);
            }
        } else if let [sge, further @ ..] = request.sges {
            sge_count = request.sges.len() as u8;
            first = *sge;
            if !further.is_empty() {
                store_sges(self.view.extension(self.cursor.position()), further);
            }
        }
        let mut line: Line = [0; 8];
        line[WR_ID] = request.wr_id;
        line[HEAD] = u64::from(u32::from_le_bytes([request.opcode as u8, flags, sge_count, 0]));
        line[REMOTE_ADDRESS] = request.remote_address;
        line[RKEY_IMMEDIATE] = u64::from(request.rkey) | u64::from(request.immediate) << 32;
        // Without operands COMPARE_ADD is the MSN: 0, none named.
        if request.opcode.has_operands() || request.opcode == SendOpcode::AtomicWrite || request.remote_srqn != 0 {
            store_operands(&mut line, request);
        }
        [line[SGE0], line[SGE0 + 1]] = sge_words(&first);
        self.cursor.publish(&self.view.slots, &line)
    }

    /// Publishes a receive request; gives its position. Panics if there are more SGEs than the
    /// queue's shape holds.
    #[inline]
    pub fn publish_receive(&mut self, wr_id: u64, sges: &[Sge]) -> u32 {
        let mut line: Line = [0; 8];
        line[WR_ID] = wr_id;
        line[HEAD] = u64::from(u32::from_le_bytes([0, 0, sges.len() as u8, 0]));
        for (words, sge) in line[RECEIVE_SGE0..].chunks_exact_mut(SGE_WORDS).zip(sges) {
            words.copy_from_slice(&sge_words(sge));
        }
        if let Some(further @ [_, ..]) = sges.get(slot::RECEIVE_SGES..) {
            store_sges(self.view.extension(self.cursor.position()), further);
        }
        self.cursor.publish(&self.view.slots, &line)
    }

    /// After publishing sends: the router does not look by itself, the doorbell must ring. Fences
    /// first.
    #[inline]
    pub fn must_ring_send(&self) -> bool {
        !announced(self.view.header::<{ queue::POLLED }>())
    }

    /// After publishing receives: the router waits for one, the doorbell must ring. Fences first.
    #[inline]
    pub fn must_ring_receive(&self) -> bool {
        announced(self.view.header::<{ queue::RECEIVES_WANTED }>())
    }

    /// The work request id of a request that is still outstanding.
    #[inline]
    pub fn wr_id_at(&self, position: u32) -> u64 {
        self.view.slots.slot(position).own_word(WR_ID)
    }

    /// How many requests the router has taken, of all ever posted: it has read them, with their
    /// extensions. It looks at them no more, unless it puts the last one back.
    #[inline]
    pub fn taken(&self) -> u32 {
        // Acquire; partner: the Release store in `RequestConsumer`.
        self.view.header::<{ queue::TAKEN }>().load(Ordering::Acquire)
    }

    // ---- what a library does past the router

    /// How many direct rings of a send queue were closed, or of a receive queue's: another number
    /// than a direct ring was opened, or accepted, with says that it is.
    #[inline]
    pub fn direct_rings_closed(&self) -> u32 {
        // Relaxed: advice; a message that is put into a direct ring just closed is like one that
        // was before.
        self.view.header::<{ queue::DIRECT_RINGS_CLOSED }>().load(Ordering::Relaxed)
    }

    /// How often grants were taken back: another number than a grant came with says that it is
    /// void.
    #[inline]
    pub fn grants_revoked(&self) -> u32 {
        // Relaxed: what counts is the look after the copy.
        self.revocations().load(Ordering::Relaxed)
    }

    /// The word of [`Self::grants_revoked`], for a [`Granted`](crate::revocation::Granted).
    #[inline]
    pub fn revocations(&self) -> &AtomicU32 {
        self.view.header::<{ queue::GRANTS_REVOKED }>()
    }

    /// The word by which the router knows of an atomic that is being done by a grant.
    #[inline]
    pub fn entered(&self) -> &AtomicU64 {
        self.view.wide_header::<{ queue::ENTERED }>()
    }

    /// Send requests before this position are done, and their completions can be polled. Only kept
    /// up to date while something is granted, or a direct ring open.
    #[inline]
    pub fn done(&self) -> u32 {
        // Acquire; partner: the Release store in `RequestConsumer::store_done`.
        self.view.header::<{ queue::DONE }>().load(Ordering::Acquire)
    }

    /// Says how many of the peer's RECVs are used up before the next request that is published.
    #[inline]
    pub fn set_msn(&mut self, msn: u32) {
        // Relaxed: the request that is published next brings it along.
        self.view.header::<{ queue::MSN }>().store(msn, Ordering::Relaxed);
    }

    /// Says how many messages were put into direct rings since the last reset.
    #[inline]
    pub fn set_ring_messages(&mut self, count: u32) {
        // Relaxed: as for the MSN.
        self.view.header::<{ queue::RING_MESSAGES }>().store(count, Ordering::Relaxed);
    }

    /// Says that there is a message in the direct ring of which the peer wants to be notified; ring
    /// the doorbell then.
    pub fn notify(&mut self, solicited: bool) {
        let notified = self.view.header::<{ queue::NOTIFIED }>();
        // Relaxed: this side alone stores it.
        let count = notified.load(Ordering::Relaxed).wrapping_add(1);
        if solicited {
            // Relaxed: comes with the next.
            self.view.header::<{ queue::NOTIFIED_SOLICITED }>().store(count, Ordering::Relaxed);
        }
        // Release; partner: the Acquire load in `RequestConsumer::take_notified`.
        notified.store(count, Ordering::Release);
    }

    /// A SEND of so many bytes was carried out past the router, for good: for the router's
    /// counters.
    #[inline]
    pub fn count_send(&mut self, bytes: u32) {
        tally::count::<{ tally::SEND }>(&self.view, self.mtu_shift, bytes);
    }

    /// The same of a WRITE.
    #[inline]
    pub fn count_write(&mut self, bytes: u32) {
        tally::count::<{ tally::WRITE }>(&self.view, self.mtu_shift, bytes);
    }

    /// The same of a READ.
    #[inline]
    pub fn count_read(&mut self, bytes: u32) {
        tally::count::<{ tally::READ }>(&self.view, self.mtu_shift, bytes);
    }

    /// The same of an atomic, of so many bytes.
    #[inline]
    pub fn count_atomic(&mut self, bytes: u32) {
        tally::count::<{ tally::ATOMIC }>(&self.view, self.mtu_shift, bytes);
    }

    /// By which packets are counted.
    pub fn set_path_mtu(&mut self, mtu: PathMtu) {
        self.mtu_shift = tally::mtu_shift(mtu);
    }

    /// Takes a RECV for a message of the direct ring. False: the router has it.
    #[inline]
    pub fn claim_receive(&self, position: u32) -> bool {
        claim(self.view.owner(position), position, Taker::Library)
    }

    /// Says that all RECVs before this position were taken, by whomever.
    #[inline]
    pub fn set_claimed(&self, position: u32) {
        // Release; partner: the Acquire load in `RequestConsumer::claimed`.
        self.view.header::<{ queue::CLAIMED }>().store(position, Ordering::Release);
    }

    /// The SGEs of a RECV whose slot is not in use again: how many were put into `into`.
    #[inline]
    pub fn receive_at(&self, position: u32, into: &mut [Sge]) -> usize {
        let slot = self.view.slots.slot(position);
        let [_, _, count, _] = (slot.own_word(HEAD) as u32).to_le_bytes();
        let count = (count as usize).min(into.len());
        let here = count.min(slot::RECEIVE_SGES);
        for (index, entry) in into[..here].iter_mut().enumerate() {
            let word = RECEIVE_SGE0 + index * SGE_WORDS;
            *entry = sge(slot.own_word(word), slot.own_word(word + 1));
        }
        if count > here && !load_sges(self.view.extension(position), &mut into[here..count]) {
            return 0;
        }
        count
    }

    /// Begins again at position 0 with no request published. Call it while the router takes none:
    /// after it answered the change to RESET and before the next change is asked for.
    pub fn reset(&mut self) {
        for position in 0..self.view.slots.count() {
            self.view.slots.slot(position).clear();
        }
        // Relaxed, all: the router looks at them again only after something was published.
        for owner in self.view.owners() {
            owner.store(0, Ordering::Relaxed);
        }
        self.view.header::<{ queue::MSN }>().store(0, Ordering::Relaxed);
        self.view.header::<{ queue::RING_MESSAGES }>().store(0, Ordering::Relaxed);
        self.view.header::<{ queue::CLAIMED }>().store(0, Ordering::Relaxed);
        self.cursor = PublishCursor::default();
    }

    pub fn segment(&self) -> &Segment {
        self.view.slots.segment()
    }
}

/// Result of the router's look at a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// Nothing is published.
    Empty,
    /// One request was copied out, checked and consumed.
    Ready,
    /// One request was consumed that makes no sense; only its work request id and position are
    /// filled in.
    Malformed,
}

/// Router side of a queue of requests.
pub struct RequestConsumer {
    view: QueueView,
    cursor: TakeCursor,
    /// The library takes requests too.
    is_shared: bool,
    /// Requests were left to it since the last call of [`Self::was_skipped`].
    is_skipped: bool,
    /// CLAIMED as last seen.
    claimed: u32,
    /// `NOTIFIED` when last looked at.
    notified: u32,
    max_wr: u32,
    /// How far ahead of what is known a peer may say that it has come.
    ahead_max: u32,
    max_sge: u8,
    max_inline: u32,
}

impl RequestConsumer {
    /// Over the queue at `offset`, with the granted capabilities. Panics if it doesn't fit the
    /// segment.
    pub fn new(
        segment: Arc<Segment>,
        offset: usize,
        shape: QueueShape,
        max_wr: u32,
        max_sge: u32,
        max_inline: u32,
    ) -> Self {
        let inline_limit = (INLINE_BYTES_MAX as u32).min(shape.extension_bytes);
        Self {
            view: QueueView::new(segment, offset, shape),
            cursor: TakeCursor::default(),
            is_shared: false,
            is_skipped: false,
            claimed: 0,
            notified: 0,
            max_wr: max_wr.min(shape.slot_count),
            // One without RECVs numbers messages that take those of another queue: any number of them may
            // have gone past the router.
            ahead_max: if max_wr == 0 { i32::MAX.cast_unsigned() } else { max_wr.min(shape.slot_count) },
            max_sge: max_sge.min(SGE_COUNT_MAX as u32) as u8,
            max_inline: max_inline.min(inline_limit),
        }
    }

    /// A request is published.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.cursor.has_next(&self.view.slots)
    }

    /// Takes the next send request. Fields that the request doesn't use are left at zero; SGEs
    /// beyond its count and inline bytes beyond its length are left as they were in `into`.
    #[inline]
    pub fn take_send(&mut self, service: QpType, into: &mut SendRequest) -> Take {
        let Some((position, line)) = self.cursor.take(&self.view.slots) else {
            return Take::Empty;
        };
        let take = self.read_send(service, position, &line, into);
        self.store_taken();
        take
    }

    #[inline]
    fn read_send(&self, service: QpType, position: u32, line: &Line, into: &mut SendRequest) -> Take {
        let [opcode, flags, sge_count, _] = (line[HEAD] as u32).to_le_bytes();
        let flags = SendFlags(flags & FLAGS_KNOWN);
        let inline = flags.contains(SendFlags::INLINE);
        into.work_request_id = line[WR_ID];
        into.ring_position = position;
        into.flags = flags;
        into.sge_count = 0;
        into.inline_length = 0;
        let Some(opcode) = SendOpcode::from_number(opcode) else {
            return Take::Malformed;
        };
        into.opcode = opcode;
        into.rkey = line[RKEY_IMMEDIATE] as u32;
        into.immediate = (line[RKEY_IMMEDIATE] >> 32) as u32;
        into.remote_address = line[REMOTE_ADDRESS];
        let operands = opcode.has_operands();
        into.compare_add = if operands { line[COMPARE_ADD] } else { 0 };
        into.swap = match opcode {
            _ if opcode.is_atomic() => line[SWAP],
            _ if operands => line[SWAP] & u64::from(u32::MAX),
            _ => 0,
        };
        into.remote_srqn = match (service, opcode.is_atomic()) {
            (QpType::XrcSend, true) => into.immediate,
            (QpType::XrcSend, false) => (line[SWAP] >> 32) as u32,
            _ => 0,
        };
        (into.address_handle, into.remote_qpn, into.remote_qkey) = if service == QpType::Ud {
            (line[REMOTE_ADDRESS] as u32, (line[REMOTE_ADDRESS] >> 32) as u32, into.rkey)
        } else {
            (0, 0, 0)
        };
        let first = sge(line[SGE0], line[SGE0 + 1]);
        if inline && opcode == SendOpcode::AtomicWrite {
            if first.length as usize > WORD_BYTES {
                return Take::Malformed;
            }
            into.inline_length = first.length as u16;
            into.inline_data[..WORD_BYTES].copy_from_slice(&line[COMPARE_ADD].to_le_bytes());
        } else if inline {
            if first.length > self.max_inline {
                return Take::Malformed;
            }
            into.inline_length = first.length as u16;
            load_bytes(self.view.extension(position), &mut into.inline_data, first.length as usize);
        } else {
            if sge_count > self.max_sge {
                return Take::Malformed;
            }
            into.sge_count = sge_count;
            into.sges[0] = first;
            if sge_count as usize > slot::SEND_SGES {
                let further = &mut into.sges[slot::SEND_SGES..sge_count as usize];
                if !load_sges(self.view.extension(position), further) {
                    into.sge_count = 0;
                    return Take::Malformed;
                }
            }
        }
        Take::Ready
    }

    /// Takes the next receive request. SGEs beyond its count are left as they were in `into`.
    #[inline]
    pub fn take_receive(&mut self, into: &mut ReceiveRequest) -> Take {
        let take = if self.is_shared {
            self.take_shared(into)
        } else {
            self.cursor
                .take(&self.view.slots)
                .map_or(Take::Empty, |(position, line)| self.read_receive(position, &line, into))
        };
        if take != Take::Empty {
            self.store_taken();
        }
        take
    }

    #[inline]
    fn read_receive(&self, position: u32, line: &Line, into: &mut ReceiveRequest) -> Take {
        let [opcode, flags, sge_count, reserved] = (line[HEAD] as u32).to_le_bytes();
        into.work_request_id = line[WR_ID];
        into.ring_position = position;
        into.sge_count = 0;
        if opcode != 0 || flags != 0 || reserved != 0 || sge_count > self.max_sge {
            return Take::Malformed;
        }
        for (to, words) in into.sges.iter_mut().zip(line[RECEIVE_SGE0..].chunks_exact(SGE_WORDS)) {
            *to = sge(words[0], words[1]);
        }
        if sge_count as usize > slot::RECEIVE_SGES {
            let further = &mut into.sges[slot::RECEIVE_SGES..sge_count as usize];
            if !load_sges(self.view.extension(position), further) {
                return Take::Malformed;
            }
        }
        into.sge_count = sge_count;
        Take::Ready
    }

    /// The next one that the library has not taken for itself.
    fn take_shared(&mut self, into: &mut ReceiveRequest) -> Take {
        self.catch_up();
        for _ in 0..=self.max_wr {
            let Some((position, line)) = self.cursor.take(&self.view.slots) else { return Take::Empty };
            let take = self.read_receive(position, &line, into);
            // Acquire: it is read before it is claimed. The library may post another one in its
            // place as soon as it has this one; then the claim fails.
            fence(Ordering::Acquire);
            if claim(self.view.owner(position), position, Taker::Router) {
                return take;
            }
        }
        Take::Empty
    }

    /// Numbers a message that takes a RECV of another queue: one of a QP that uses an SRQ.
    pub fn count_message(&mut self) -> u32 {
        let number = self.cursor.position();
        self.cursor.skip_to(number.wrapping_add(1));
        number
    }

    /// How many messages of this queue's direct rings `receiver`, the empty receive queue of a QP
    /// that uses an SRQ, has not taken, if both sides are to be believed.
    pub fn ring_backlog(&self, receiver: &Self) -> u32 {
        // Relaxed: it came with the request, whose publication was acquired.
        let put = self.view.header::<{ queue::RING_MESSAGES }>().load(Ordering::Relaxed);
        // Acquire; partner: the Release store in `RequestProducer::set_claimed`.
        let taken = receiver.view.header::<{ queue::CLAIMED }>().load(Ordering::Acquire);
        let left = put.wrapping_sub(taken);
        if left <= RING_BACKLOG_MAX { left } else { 0 }
    }

    /// From now on the library takes RECVs too, until the next reset.
    pub fn share(&mut self) {
        if !self.is_shared {
            self.claimed = self.claimed();
        }
        self.is_shared = true;
    }

    fn claimed(&self) -> u32 {
        // Acquire; partner: the Release store in `RequestProducer::set_claimed`.
        self.view.header::<{ queue::CLAIMED }>().load(Ordering::Acquire)
    }

    /// Goes on after those that the library has taken, so it says. → the next one.
    pub fn catch_up(&mut self) -> u32 {
        let claimed = self.claimed();
        // Only when it has changed: one that stays is on the other side of the circle of numbers one day.
        if self.is_shared && claimed != self.claimed {
            self.claimed = claimed;
            if (claimed.wrapping_sub(self.cursor.position()) as i32) > 0 {
                self.cursor.skip_to(claimed);
                self.is_skipped = true;
            }
        }
        self.cursor.position()
    }

    /// Whether a peer that is known may have come so far.
    pub fn may_skip_to(&mut self, position: u32) -> bool {
        position.wrapping_sub(self.catch_up()) <= self.ahead_max
    }

    /// Leaves the requests before `position` to the library. Nothing happens if it is none that may
    /// come next.
    pub fn skip_to(&mut self, position: u32) {
        if self.may_skip_to(position) {
            self.is_skipped |= position != self.cursor.position();
            self.cursor.skip_to(position);
        }
    }

    /// Whether requests were left to the library since the last call.
    pub fn was_skipped(&mut self) -> bool {
        std::mem::take(&mut self.is_skipped)
    }

    /// Everything that was taken so far is done, and its completions are written.
    #[inline]
    pub fn store_done(&self) {
        // Release; partner: the Acquire load in `RequestProducer::done`.
        self.view.header::<{ queue::DONE }>().store(self.cursor.position(), Ordering::Release);
    }

    /// How many of the peer's RECVs the sender has used up before the request that is taken next.
    #[inline]
    pub fn msn(&self) -> u32 {
        // Relaxed: it came with the request, whose publication was acquired.
        self.view.header::<{ queue::MSN }>().load(Ordering::Relaxed)
    }

    /// Says how many direct rings of a send queue were closed, or of a receive queue's.
    pub fn set_direct_rings_closed(&self, number: u32) {
        // Relaxed: advice.
        self.view.header::<{ queue::DIRECT_RINGS_CLOSED }>().store(number, Ordering::Relaxed);
    }

    /// All grants of the queue from before this number are void.
    pub fn set_grants_revoked(&self, number: u32) {
        revoke(self.view.header::<{ queue::GRANTS_REVOKED }>(), number);
    }

    /// The atomic that the library does by a grant now, if any. Look after [`Self::set_grants_revoked`].
    pub fn entered(&self) -> Option<Entered> {
        entered(self.view.wide_header::<{ queue::ENTERED }>())
    }

    /// Whether it still does that one.
    pub fn is_inside(&self, atomic: Entered) -> bool {
        is_inside(self.view.wide_header::<{ queue::ENTERED }>(), atomic)
    }

    /// The atomic that the library does now never counts.
    pub fn expel(&self) {
        expel(self.view.wide_header::<{ queue::ENTERED }>());
    }

    /// How many messages the library put into its direct ring, since the last call, of which the
    /// peer wants to be notified; and whether one was solicited.
    pub fn take_notified(&mut self) -> Option<(u32, bool)> {
        // Acquire; partner: the Release store in `RequestProducer::notify`.
        let notified = self.view.header::<{ queue::NOTIFIED }>().load(Ordering::Acquire);
        let count = notified.wrapping_sub(std::mem::replace(&mut self.notified, notified));
        let solicited = self.view.header::<{ queue::NOTIFIED_SOLICITED }>().load(Ordering::Relaxed);
        (count != 0).then(|| (count, notified.wrapping_sub(solicited) < count))
    }

    /// The RECV at this position, the last that was taken, was not used: it is taken again, by whoever comes first.
    /// False: another one was taken since.
    pub fn put_back(&mut self, position: u32) -> bool {
        if self.cursor.position() != position.wrapping_add(1) {
            return false;
        }
        self.cursor.skip_to(position);
        if self.is_shared {
            unclaim(self.view.owner(position), position, Taker::Router);
        }
        self.store_taken();
        true
    }

    /// The library's tally of requests that it carried out on the direct path, since the queue was
    /// made. It can be anything.
    pub fn tally(&self) -> Tally {
        Tally::load(&self.view)
    }

    /// Slots of the queue: no more are outstanding.
    pub fn slot_count(&self) -> u32 {
        self.max_wr.max(1).next_power_of_two()
    }

    /// Requests published and not taken, at most `max_wr`; a bounded number of loads (about log2 of
    /// `max_wr`). A hostile library can make it any number up to `max_wr`.
    pub fn pending(&self) -> u32 {
        self.cursor.pending(&self.view.slots, self.max_wr)
    }

    /// Says whether the router looks at this queue by itself; then a SeqCst fence. After `false`,
    /// look once more.
    #[inline]
    pub fn set_polled(&self, polled: bool) {
        announce(self.view.header::<{ queue::POLLED }>(), polled);
    }

    /// Says whether a post must ring the doorbell; then a SeqCst fence. After `true`, look once
    /// more.
    #[inline]
    pub fn set_receives_wanted(&self, wanted: bool) {
        announce(self.view.header::<{ queue::RECEIVES_WANTED }>(), wanted);
    }

    /// Begins again at position 0: the QP went to RESET.
    pub fn reset(&mut self) {
        self.cursor = TakeCursor::default();
        (self.is_shared, self.is_skipped) = (false, false);
        self.store_taken();
        self.store_done();
    }

    /// Requests taken since the last reset: also the next position.
    #[inline]
    pub fn taken(&self) -> u32 {
        self.cursor.position()
    }

    pub fn segment(&self) -> &Segment {
        self.view.slots.segment()
    }

    /// Only after a request's extension was read too: a producer that goes by this writes there
    /// again.
    #[inline]
    fn store_taken(&self) {
        // Release; partner: the Acquire load in `RequestProducer::taken`.
        self.view.header::<{ queue::TAKEN }>().store(self.cursor.position(), Ordering::Release);
    }
}

/// Stores the fields that few requests have: operands, the payload of an ATOMIC_WRITE, the SRQ of
/// an XRC request.
#[inline(never)]
fn store_operands(line: &mut Line, request: &SendDescriptor<'_>) {
    if request.opcode.has_operands() {
        line[COMPARE_ADD] = request.compare_add;
        line[SWAP] = request.swap;
    }
    if request.remote_srqn != 0 {
        let word = if request.opcode.is_atomic() { RKEY_IMMEDIATE } else { SWAP };
        line[word] = line[word] & u64::from(u32::MAX) | u64::from(request.remote_srqn) << 32;
    }
    if let (SendOpcode::AtomicWrite, Some(bytes)) = (request.opcode, request.inline) {
        line[COMPARE_ADD] = word_of(bytes);
    }
}

#[inline]
fn sge_words(sge: &Sge) -> [u64; SGE_WORDS] {
    [sge.address, u64::from(sge.length) | u64::from(sge.lkey) << 32]
}

#[inline]
fn sge(address: u64, length_lkey: u64) -> Sge {
    Sge { address, length: length_lkey as u32, lkey: (length_lkey >> 32) as u32 }
}

/// Writes SGEs to an extension; they are published with the slot.
fn store_sges(extension: &[AtomicU64], sges: &[Sge]) {
    assert!(sges.len() * SGE_WORDS <= extension.len(), "the library checks SGE counts against what was granted");
    for (words, sge) in extension.chunks_exact(SGE_WORDS).zip(sges) {
        let [address, length_lkey] = sge_words(sge);
        // Relaxed, both; published by the slot's head; partners: the loads in `load_sges`.
        words[0].store(address, Ordering::Relaxed);
        words[1].store(length_lkey, Ordering::Relaxed);
    }
}

/// Reads SGEs from an extension. False: it is too short for them.
fn load_sges(extension: &[AtomicU64], into: &mut [Sge]) -> bool {
    if into.len() * SGE_WORDS > extension.len() {
        return false;
    }
    for (to, words) in into.iter_mut().zip(extension.chunks_exact(SGE_WORDS)) {
        // Relaxed, both; ordered by the slot's head; partners: the stores in `store_sges`.
        *to = sge(words[0].load(Ordering::Relaxed), words[1].load(Ordering::Relaxed));
    }
    true
}

/// At most eight bytes, padded with zeros. Panics if there are more: the library checks.
fn word_of(bytes: &[u8]) -> u64 {
    let mut word = [0; WORD_BYTES];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Writes an inline payload to an extension, zero-padded to whole words; it is published with the
/// slot.
fn store_bytes(extension: &[AtomicU64], bytes: &[u8]) {
    assert!(bytes.len() <= extension.len() * WORD_BYTES, "the library checks inline lengths against what was granted");
    let mut chunks = bytes.chunks_exact(WORD_BYTES);
    let mut words = extension.iter();
    for (chunk, word) in chunks.by_ref().zip(words.by_ref()) {
        // Relaxed; published by the slot's head; partner: the loads in `load_bytes`.
        word.store(u64::from_le_bytes(chunk.try_into().unwrap_or_default()), Ordering::Relaxed);
    }
    let rest = chunks.remainder();
    if let (false, Some(word)) = (rest.is_empty(), words.next()) {
        let mut last = [0; WORD_BYTES];
        last[..rest.len()].copy_from_slice(rest);
        // Relaxed: as above.
        word.store(u64::from_le_bytes(last), Ordering::Relaxed);
    }
}

/// Reads an inline payload, in whole words. `length` was checked against the extension and
/// `INLINE_BYTES_MAX`.
fn load_bytes(extension: &[AtomicU64], into: &mut [u8; INLINE_BYTES_MAX], length: usize) {
    let words = extension.iter().take(length.div_ceil(WORD_BYTES));
    for (chunk, word) in into.chunks_exact_mut(WORD_BYTES).zip(words) {
        // Relaxed; ordered by the slot's head; partner: the stores in `store_bytes`.
        chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
    }
}

#[cfg(test)]
mod tests;
