//! The requests of an RC or UC queue pair that the posting thread carries out itself: by a direct ring to
//! the RECVs of the peer, and in memory of the peer that was granted.
//!
//! Invariant: a request is carried out here only if all requests that the router got before are
//! done, and their completions written; the router takes the next request only after this one. So
//! requests are executed in the order of posting. (How completions stay in order, `inbox` says.)
//!
//! Invariant: nothing is carried out here that the router would refuse: a key that is not known to
//! be good, a RECV that is too short, a payload too long are left to it, and it finds the fault.
//!
//! Messages of UC may be lost, by the router alone, and then take no RECV: it closes the direct ring
//! before it is done with one that is, and says at which RECV the next ring begins.
mod datagrams;

use crate::direct_ring::DirectRingTerms;
use crate::grants::Grants;
use crate::payload::{NO_RANGES, Payload, QpContext};
use crate::posting_order::FAR;
use crate::regions::Cache;
use datagrams::Datagrams;
use freeflow_protocol::FEATURE_NUMBERED_DIRECT_RINGS;
use freeflow_protocol::library::Request;
use freeflow_shm::{
    Credit, DIRECT_RING_MESSAGE_BYTES_MAX, DirectRingSender, RequestProducer, SendDescriptor, Staged, monotonic_ns,
    pause, sched_yield,
};
use freeflow_verbs::{Access, CompletionFlags, QpType, SendFlags, SendOpcode, VerbsError};
use std::ops::RangeInclusive;

/// Requests that the router gets before it is asked for a direct ring.
const REQUESTS_BEFORE_DIRECT_RING: u32 = 16;
/// The most requests between two such questions: what one costs is then little beside them.
const REQUESTS_BETWEEN_MAX: u32 = 1 << 11;
/// Messages of UC that a direct ring has to bring before a lost one closes it, or the next one comes
/// later.
const MESSAGES_WORTH_A_RING: u32 = 1 << 8;
/// How long a post waits for room in a full direct ring, or for a RECV, before the router gets the
/// request; half as long after it was in vain.
const FULL_NS_MAX: u64 = 64_000;
const FULL_NS_MIN: u64 = 1_000;
/// Requests that the router gets before a post waits for it to be done with them, so that the next
/// can be carried out here; and the most, if it takes too long.
const REQUESTS_BEFORE_WAIT: u32 = 32;
const REQUESTS_BEFORE_WAIT_MAX: u32 = 4096;
/// The longest such wait, for each [`REQUESTS_BEFORE_WAIT`]; and the longest of all.
const WAIT_NS: u64 = 200_000;
const WAIT_NS_MAX: u64 = 3_000_000;
/// A request of so many bytes may wait for [`FEW_REQUESTS`] of the router's, for as long as a copy
/// of them takes. Not a larger one: the router copies such while this thread goes on.
const WAITING_BYTES: RangeInclusive<u32> = 32 << 10..=256 << 10;
const FEW_REQUESTS: u32 = 2;
const FEW_WAIT_BYTES_PER_NS: u64 = 8;
/// Such waits in vain until the router has got [`REQUESTS_BEFORE_WAIT`] requests.
const FEW_WAITS_IN_VAIN: u32 = 4;
/// Bytes that an atomic reads and writes.
pub(crate) const ATOMIC_BYTES: u32 = 8;
/// Requests between two looks whether what is remembered is near; much less than [`FAR`].
const KEPT_NEAR_EVERY: u32 = 1 << 16;
/// Looks before each of which the waiting thread pauses; after them it gives way.
const PAUSES: u32 = 64;

/// State of the direct sends of a queue pair. Under the send queue's lock.
#[derive(Default)]
pub(crate) struct Outgoing {
    /// Of a UC queue pair.
    is_unreliable: bool,
    /// How many RECVs of the peer were used up since the last reset. Of UC: only while a direct ring
    /// is open.
    msn: u32,
    /// The last request was carried out here: the router has nothing of this queue.
    is_ours: bool,
    /// Requests that the router got since something was carried out here, and how many it takes to
    /// wait for it.
    routed: u32,
    routed_before_wait: u32,
    few_wait_left: u32,
    /// Completions of requests that the router got, one more than the posting position of the last
    /// one; before the last change over, and now.
    returned_before_change: u32,
    signaled_until: u32,
    open_ring: Option<OpenRing>,
    /// Messages put into direct rings since the last reset.
    ring_messages: u32,
    /// Requests that could have gone by a direct ring since it was last asked for one, and how many
    /// it takes.
    missed: u32,
    backoff: u32,
    /// Of the last direct ring: what `backoff` was before, and `ring_messages` at its begin.
    backoff_before: u32,
    opened_at: u32,
    /// Of a UD queue pair, instead of the ring.
    datagrams: Option<Box<Datagrams>>,
    pub keys: Cache,
    pub grants: Grants,
}

struct OpenRing {
    sender: DirectRingSender,
    /// As the queue's header said when it was opened.
    direct_rings_closed: u32,
    /// The peer's QP does not forbid WRITEs, whatever they name.
    takes_writes: bool,
    /// How long a post waits for room.
    full_ns: u64,
}

/// Whether the direct ring takes the next message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RingLook {
    Room,
    /// Not now.
    Full,
    /// Not by the direct ring.
    Never,
}

#[inline]
fn look(open: &mut OpenRing, msn: u32, bytes: u32) -> RingLook {
    match open.sender.credit(msn) {
        Credit::Routed => RingLook::Never,
        Credit::Bytes(capacity) if bytes > capacity => RingLook::Never,
        Credit::Bytes(_) if open.sender.has_room(bytes) => RingLook::Room,
        Credit::Bytes(_) | Credit::Missing => RingLook::Full,
    }
}

impl Outgoing {
    pub fn new(qp_type: QpType) -> Self {
        let datagrams = (qp_type == QpType::Ud).then(Box::default);
        Self { is_unreliable: qp_type == QpType::Uc, datagrams, ..Self::default() }
    }

    /// The QP was reset.
    pub fn begin_anew(&mut self) {
        let datagrams = self.datagrams.is_some().then(Box::default);
        *self = Self { is_unreliable: self.is_unreliable, datagrams, ..Self::default() };
    }

    /// Carries a request out. False: the router shall.
    #[inline]
    pub fn carry_out(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        match request.opcode {
            SendOpcode::Send | SendOpcode::SendWithImmediate => self.send(context, ring, returned, request),
            SendOpcode::RdmaWrite | SendOpcode::RdmaRead => self.reach(context, ring, returned, request),
            // Copies of the request: so no other is ever made in memory.
            SendOpcode::RdmaWriteWithImmediate => {
                self.write_with_immediate(&{ *context }, ring, returned, &{ *request })
            }
            SendOpcode::FetchAdd | SendOpcode::CompareSwap => self.change(&{ *context }, ring, returned, &{ *request }),
            _ => false,
        }
    }

    #[inline]
    fn send(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        if !self.has_direct_ring(context, ring) {
            return false;
        }
        let mut room = NO_RANGES;
        let Some(payload) = Payload::of(request, context, &mut self.keys, &mut room) else { return false };
        let may = context.session.is_surely_alive()
            && (self.is_ours || self.is_drained(ring, returned, payload.bytes) && self.is_open(ring))
            && self.finds_room(payload.bytes);
        let sent = may && self.publish(context, ring, request, payload, None);
        if sent {
            ring.count_send(payload.bytes);
        }
        sent
    }

    #[inline]
    fn reach(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        let mut room = NO_RANGES;
        let Some(payload) = Payload::of(request, context, &mut self.keys, &mut room) else { return false };
        let Some(place) = self.grants.find(context, ring, request, payload.bytes) else { return false };
        self.may_reach(context, ring, returned, payload.bytes) && self.grants.reach(context, ring, place, payload)
    }

    /// Whether a request of so many bytes may be carried out now in memory that was granted.
    #[inline(always)] // as a part of `reach`
    fn may_reach(&mut self, context: &QpContext<'_>, ring: &RequestProducer, returned: u32, bytes: u32) -> bool {
        context.session.is_surely_alive()
            && (self.is_ours || self.is_drained(ring, returned, bytes) && self.grants.are_current(ring))
    }

    /// An atomic. The router finds what is wrong with one that has another result than eight bytes in one piece.
    #[inline(never)]
    fn change(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        let ([sge], None) = (request.sges, request.inline) else { return false };
        if sge.length != ATOMIC_BYTES || !request.remote_address.is_multiple_of(u64::from(ATOMIC_BYTES)) {
            return false;
        }
        let result = context.session.regions.resolve(&mut self.keys, sge, context.pd, Access::LOCAL_WRITE);
        let Some(result) = result else { return false };
        let Some(place) = self.grants.find(context, ring, request, ATOMIC_BYTES) else { return false };
        self.may_reach(context, ring, returned, ATOMIC_BYTES)
            && self.grants.change(context, ring, place, request, result)
    }

    /// A WRITE with immediate data: both of these.
    #[inline(never)]
    fn write_with_immediate(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        if !self.has_direct_ring(context, ring) {
            return false;
        }
        let mut room = NO_RANGES;
        let Some(payload) = Payload::of(request, context, &mut self.keys, &mut room) else { return false };
        let place = match payload.bytes {
            // It names no memory, so the key does not matter (IBTA 9.7.4.1.6).
            0 if self.open_ring.as_ref().is_some_and(|open| open.takes_writes) => None,
            0 => return false,
            bytes => match self.grants.find(context, ring, request, bytes) {
                Some(place) => Some(place),
                None => return false,
            },
        };
        let is_current = |outgoing: &Self, ring: &RequestProducer| {
            outgoing.is_open(ring) && (place.is_none() || outgoing.grants.are_current(ring))
        };
        if !context.session.is_surely_alive()
            || !(self.is_ours || self.is_drained(ring, returned, payload.bytes) && is_current(self, ring))
            || !self.finds_room(0)
        {
            return false;
        }
        match place {
            Some(place) if !self.grants.reach(context, ring, place, payload) => return false,
            // Counted where its bytes were.
            Some(_) => {}
            None => ring.count_write(0),
        }
        self.publish(context, ring, request, Payload::NOTHING, Some(payload.bytes))
    }

    /// Everything that the router got is done; completions from before the last path switch were
    /// returned.
    #[inline]
    fn is_drained(&mut self, ring: &RequestProducer, returned: u32, bytes: u32) -> bool {
        let is_returned = returned.wrapping_sub(self.returned_before_change) as i32 >= 0;
        if !is_returned {
            return false;
        }
        ring.done() == ring.position()
            || self.routed >= self.routed_before_wait && self.waits_for(ring)
            || WAITING_BYTES.contains(&bytes) && self.waits_for_few(ring, bytes)
    }

    /// Whether the direct ring is still what it was before the router was done with the last
    /// request: if that failed, it is not.
    fn is_open(&self, ring: &RequestProducer) -> bool {
        self.open_ring.as_ref().is_some_and(|open| open.direct_rings_closed == ring.direct_rings_closed())
    }

    /// A request is large, and the router has few before it: a wait costs less than the router's copy
    /// would, if these are as large at most.
    #[cold]
    fn waits_for_few(&mut self, ring: &RequestProducer, bytes: u32) -> bool {
        let few = ring.position().wrapping_sub(ring.done()) <= FEW_REQUESTS;
        let at_most_ns = u64::from(bytes) / FEW_WAIT_BYTES_PER_NS * u64::from(FEW_REQUESTS);
        few && self.few_wait_left > 0 && {
            let is_done = wait_until(at_most_ns, || ring.done() == ring.position());
            // The router is slow, or busy with others: not again and again.
            self.few_wait_left = if is_done { FEW_WAITS_IN_VAIN } else { self.few_wait_left - 1 };
            is_done
        }
    }

    /// Waits until the router is done with what it got: a program that always has requests under
    /// way would never see that otherwise.
    #[cold]
    fn waits_for(&mut self, ring: &RequestProducer) -> bool {
        self.routed = 0;
        let is_done = {
            let at_most_ns = WAIT_NS * u64::from(self.routed_before_wait / REQUESTS_BEFORE_WAIT);
            wait_until(at_most_ns.min(WAIT_NS_MAX), || ring.done() == ring.position())
        };
        let before = self.routed_before_wait;
        self.routed_before_wait = if is_done {
            REQUESTS_BEFORE_WAIT
        } else {
            (before * 2).clamp(REQUESTS_BEFORE_WAIT, REQUESTS_BEFORE_WAIT_MAX)
        };
        is_done
    }

    /// A request was carried out: its posting position is one before `posted`. True: it is the
    /// first since the router got one.
    #[inline]
    pub fn note_done(&mut self, posted: u32) -> bool {
        let is_change = !self.is_ours;
        self.keep_near(posted);
        if is_change {
            self.is_ours = true;
            self.returned_before_change = self.signaled_until;
            (self.routed, self.routed_before_wait) = (0, REQUESTS_BEFORE_WAIT);
            self.few_wait_left = FEW_WAITS_IN_VAIN;
        }
        is_change
    }

    /// Positions run freely and are compared by their distance, so those that are remembered must
    /// not fall too far back. What is older than a queue can hold was returned.
    #[inline]
    fn keep_near(&mut self, posted: u32) {
        // For one request in so many: all positions pass by here.
        if !posted.is_multiple_of(KEPT_NEAR_EVERY) {
            return;
        }
        let nearest = posted.wrapping_sub(FAR);
        for position in [&mut self.signaled_until, &mut self.returned_before_change] {
            if posted.wrapping_sub(*position) > FAR {
                *position = nearest;
            }
        }
    }

    /// One more than the posting position of the last signaled request that the router got.
    pub fn signaled_until(&self) -> u32 {
        self.signaled_until
    }

    /// Whether the peer takes messages by a direct ring.
    #[inline]
    fn has_direct_ring(&mut self, context: &QpContext<'_>, ring: &mut RequestProducer) -> bool {
        if let Some(open) = &self.open_ring {
            if open.direct_rings_closed == ring.direct_rings_closed() {
                return open.sender.is_open();
            }
            self.open_ring = None;
            self.note_closed();
        }
        if self.is_unreliable && !context.session.speaks(FEATURE_NUMBERED_DIRECT_RINGS) {
            return false;
        }
        self.missed += 1;
        if self.missed > self.backoff.max(REQUESTS_BEFORE_DIRECT_RING) {
            self.open_direct_ring(&{ *context }, ring);
        }
        false
    }

    /// A ring that lost messages of UC have closed before it was worth its cost is asked for less and less often.
    #[cold]
    fn note_closed(&mut self) {
        if self.is_unreliable && self.ring_messages.wrapping_sub(self.opened_at) < MESSAGES_WORTH_A_RING {
            self.backoff = self.backoff_before;
        }
    }

    #[cold]
    fn open_direct_ring(&mut self, context: &QpContext<'_>, ring: &mut RequestProducer) {
        self.missed = 0;
        self.backoff = (self.backoff.max(REQUESTS_BEFORE_DIRECT_RING) * 2).min(REQUESTS_BETWEEN_MAX);
        if !wait_until(WAIT_NS_MAX, || ring.taken() == ring.position()) {
            // It has not been asked, so the next time is sooner.
            self.missed = self.backoff / 2;
            return;
        }
        let qp = context.handle;
        let request = if self.is_unreliable {
            Request::OpenNumberedDirectRing { qp }
        } else {
            // Not before: the router takes it for what is used up before the request that it takes
            // next.
            ring.set_msn(self.msn);
            Request::OpenDirectRing { qp }
        };
        match context.session.call(&request) {
            Ok((reply, descriptors)) => {
                let Some(terms) = DirectRingTerms::of(&reply) else { return };
                if let Some(msn) = terms.msn {
                    self.msn = msn;
                    ring.set_msn(msn);
                }
                let Some((segment, credits)) = terms.map(&descriptors) else { return };
                let DirectRingTerms { direct_rings_closed, takes_writes, .. } = terms;
                let sender = DirectRingSender::new(segment, credits);
                (self.backoff_before, self.backoff) = (self.backoff, 0);
                self.opened_at = self.ring_messages;
                self.open_ring = Some(OpenRing { sender, direct_rings_closed, takes_writes, full_ns: FULL_NS_MAX });
            }
            Err(VerbsError::NotSupported) => self.backoff = REQUESTS_BETWEEN_MAX,
            Err(_) => {}
        }
    }

    /// Whether the peer has a RECV for so many bytes, and the direct ring room. Waits a little for
    /// both: they come soon, if the peer polls.
    #[inline]
    fn finds_room(&mut self, bytes: u32) -> bool {
        let Some(open) = &mut self.open_ring else { return false };
        if bytes > DIRECT_RING_MESSAGE_BYTES_MAX {
            return false;
        }
        match look(open, self.msn, bytes) {
            RingLook::Room => true,
            RingLook::Never => false,
            RingLook::Full => self.awaits_room(bytes),
        }
    }

    /// The peer may be about to make room. One that does not poll is not waited for again and
    /// again.
    #[cold]
    fn awaits_room(&mut self, bytes: u32) -> bool {
        let Some(open) = &mut self.open_ring else { return false };
        let (msn, mut last) = (self.msn, RingLook::Full);
        wait_until(open.full_ns, || {
            last = look(open, msn, bytes);
            last != RingLook::Full
        });
        let open = self.open_ring.as_mut().expect("it was there");
        open.full_ns = match last {
            RingLook::Full => (open.full_ns / 2).max(FULL_NS_MIN),
            RingLook::Room | RingLook::Never => (open.full_ns * 2).min(FULL_NS_MAX),
        };
        last == RingLook::Room
    }

    /// Puts a message into the direct ring, which has room; `written`: the bytes of a WRITE that it
    /// reports. False: the peer's queue pair is in ERROR and may never see it; the router gets the
    /// request, and fails it.
    #[inline(always)] // with what is known of `written`
    fn publish(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        request: &SendDescriptor<'_>,
        payload: Payload<'_>,
        written: Option<u32>,
    ) -> bool {
        let Some(open) = &mut self.open_ring else { return false };
        let message = staged(request, payload.bytes, self.msn, written);
        open.sender.publish(context.own, &message, payload.inline, payload.ranges);
        let must_notify = open.sender.must_notify();
        if must_notify && open.sender.may_be_unseen() {
            return false;
        }
        self.msn = self.msn.wrapping_add(1);
        // The router has nothing of this queue, so it counts for whatever it takes next, and if the
        // peer ends.
        ring.set_msn(self.msn);
        self.ring_messages = self.ring_messages.wrapping_add(1);
        ring.set_ring_messages(self.ring_messages);
        if must_notify {
            ring.notify(message.flags.contains(CompletionFlags::SOLICITED));
            context.session.ring(context.cookie);
        }
        true
    }

    /// The router gets the next request of this queue: before it is published.
    #[inline]
    pub fn note_routed(&mut self, request: &SendDescriptor<'_>, posted: u32, signaled: bool) {
        self.is_ours = false;
        self.keep_near(posted);
        if request.opcode.consumes_receive() {
            self.msn = self.msn.wrapping_add(1);
        }
        if signaled {
            self.signaled_until = posted.wrapping_add(1);
        }
        self.routed = self.routed.saturating_add(1);
    }
}

/// A request's message, as a direct ring has it.
#[inline(always)] // with what is known of `written`
fn staged(request: &SendDescriptor<'_>, length: u32, msn: u32, written: Option<u32>) -> Staged {
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    let (has_immediate, solicited) = (request.opcode.has_immediate(), request.flags.contains(SendFlags::SOLICITED));
    Staged {
        length,
        msn,
        immediate: if has_immediate { request.immediate } else { 0 },
        flags: CompletionFlags(
            flag(has_immediate, CompletionFlags::WITH_IMMEDIATE) | flag(solicited, CompletionFlags::SOLICITED),
        ),
        written,
    }
}

/// Looks until it is so, for so long at most.
fn wait_until(at_most_ns: u64, mut is_so: impl FnMut() -> bool) -> bool {
    let mut began_ns = 0;
    for looks in 0_u32.. {
        if is_so() {
            return true;
        }
        if looks < PAUSES {
            pause();
            continue;
        }
        let now_ns = monotonic_ns();
        if began_ns == 0 {
            began_ns = now_ns;
        } else if now_ns - began_ns > at_most_ns {
            return false;
        }
        sched_yield();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_stays_near() {
        let mut outgoing = Outgoing::default();
        let mut posted = 0_u32;
        for _ in 0..20 {
            posted = posted.wrapping_add(FAR / 2);
            outgoing.note_done(posted);
            let distance = posted.wrapping_sub(outgoing.signaled_until());
            assert!(distance <= FAR, "{distance}");
        }
    }
}
