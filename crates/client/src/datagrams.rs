//! Datagrams that come to a UD queue pair by direct rings, of any number of senders: each takes the next RECV when it
//! is polled, and the router takes others for what it delivers.
//!
//! Invariant: the next RECV is taken only when all before it have completed, so RECVs complete in the order of
//! posting. If the router has the next one, its completion is waited for.
//!
//! Invariant: datagrams of one sender complete in the order of sending, unless one is lost. The router may deliver
//! one while older ones stand in the ring. Then that one changes places with them ([`Datagrams::reorder`]).
//!
//! Nothing that a completion or the GRH says of the sender comes from the sender.
use crate::direct_ring::{CloseDrain, map_ring};
use crate::receive_side::{ReceiveQueue, ReceiveSide};
use crate::regions::{Cache, Held, SGES_MAX};
use crate::session::Session;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::{CreditList, DirectRingReceiver, OwnMemory, OwnRange, Staged, coarse_ns, monotonic_ns};
use freeflow_verbs::datagram::{GRH_BYTES, UD_MESSAGE_BYTES_MAX, grh, is_ipv6};
use freeflow_verbs::{
    Access, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Gid, GlobalRoute, Sge, VerbsError,
};
use std::collections::VecDeque;

/// Datagrams that no RECV was long enough for, of one look.
const DROPPED_MAX: u32 = 256;
/// A ring without a datagram for so many polls is not looked at until its sender has it notified, if there are several.
const POLLS_BEFORE_COLD: u64 = 4096;
/// Looks after which it is seen which rings are closed. (The router notifies of that, too.)
const POLLS_BEFORE_FOLLOW: u64 = 64;
/// How long a closed ring is looked at, and how many are.
const CLOSED_NS: u64 = 100_000_000;
const CLOSED_MAX: usize = 96;
/// Datagrams of one ring before another ring has its turn.
const TURN: u32 = 16;
/// Datagrams of the router's that changed places with older ones and wait: as many as a ring holds.
const DISPLACED_MAX: usize = 512;

/// Rings of one queue pair. Under the lock of its receive CQ.
pub(crate) struct Datagrams {
    own: OwnMemory,
    /// The RECV that completes next, by whichever way.
    next: u32,
    /// In the order in which they were accepted.
    rings: Vec<Ring>,
    /// The one that is looked at first.
    first: usize,
    /// RECVs are flushed: nothing comes by rings any more.
    is_over: bool,
    /// A RECV is in memory that only the router reaches: it delivers everything.
    is_refused: bool,
    wants_notifications: bool,
    keys: Cache,
    /// Polls of its CQ when it last brought something.
    active_at: u64,
}

struct Ring {
    receiver: DirectRingReceiver,
    place: u32,
    source_qpn: u32,
    source: Gid,
    route: GlobalRoute,
    is_closed: bool,
    /// When that was seen.
    closed_at_ns: u64,
    close_drain: CloseDrain,
    /// It is looked at in each poll.
    is_hot: bool,
    active_at: u64,
    /// Datagrams before this number of the ring were there when an event was taken, which reported them.
    reported: u32,
    must_commit: bool,
    order: Order,
    /// Those of the router's that came too early.
    displaced: VecDeque<Displaced>,
    /// The last header, and what it is of.
    header: (u32, bool, [u8; GRH_BYTES]),
}

/// The order of what the router delivers of a ring's sender and of what stands in the ring, where each says how many of
/// the router's came before.
struct Order {
    /// How many the router has delivered since the ring was opened, by the sender's reckoning.
    routed: u32,
    /// Those from before were in RECVs before this one; absent once all of these have completed.
    since: Option<u32>,
}

/// A datagram of the router's that had to leave its RECV.
struct Displaced {
    /// How many of the router's came before.
    routed: u32,
    completion: Completion,
    bytes: Vec<u8>,
}

/// A RECV's memory.
#[derive(Clone)]
struct Room {
    ranges: [OwnRange; SGES_MAX],
    count: usize,
    bytes: u64,
}

fn is_at_or_after(number: u32, other: u32) -> bool {
    number.wrapping_sub(other).cast_signed() >= 0
}

impl Ring {
    fn is_of(&self, other: &Self) -> bool {
        (self.source_qpn, self.source) == (other.source_qpn, other.source)
    }

    #[cold]
    fn note_closed(&mut self) {
        if self.closed_at_ns == 0 {
            self.closed_at_ns = coarse_ns();
        }
        (self.is_closed, self.is_hot) = (true, true);
    }

    #[inline]
    fn has_next(&self) -> bool {
        !self.displaced.is_empty() || self.receiver.peek().is_some()
    }

    fn is_empty(&self) -> bool {
        !self.has_next()
    }

    fn unreported(&self) -> u32 {
        let taken = self.receiver.taken();
        if is_at_or_after(self.reported, taken) { self.reported } else { taken }
    }

    fn is_any_unreported(&self) -> bool {
        !self.displaced.is_empty() || self.receiver.published() != self.unreported()
    }

    /// The router has delivered a datagram of this sender since the ring was opened. False: older ones are to be taken
    /// before.
    fn passes(&mut self) -> bool {
        let next = self.receiver.peek().map(|message| message.msn);
        self.order.passes(next, !self.displaced.is_empty())
    }

    /// Whether what comes next is one that the router had delivered.
    fn is_displaced_next(&self, message: Option<&Staged>) -> bool {
        let displaced = self.displaced.front().map(|displaced| displaced.routed);
        is_routed_next(displaced, message.map(|message| message.msn))
    }

    /// The message in hand is done with.
    fn take(&mut self, message: &Staged) {
        if self.displaced.is_empty() {
            self.order.routed = message.msn;
        }
        self.order.since = None;
        self.receiver.take();
        self.must_commit = true;
    }

    /// Writes a datagram to a RECV that is long enough. → its completion, but for what says which RECV.
    #[inline]
    fn deliver(&mut self, own: OwnMemory, message: &Staged, room: &mut Room) -> Completion {
        let header = *self.header(message);
        room.put(own, &header);
        self.receiver.copy_out(own, message, room.ranges[..room.count].iter().copied());
        let ipv6 = if is_ipv6(&header) { CompletionFlags::IPV6_HEADER } else { 0 };
        Completion {
            opcode: CompletionOpcode::Receive,
            flags: CompletionFlags(message.flags.0 | CompletionFlags::GRH | ipv6),
            byte_count: message.length + GRH_BYTES as u32,
            immediate: message.immediate,
            source_qpn: self.source_qpn,
            ..Completion::default()
        }
    }

    #[inline]
    fn header(&mut self, message: &Staged) -> &[u8; GRH_BYTES] {
        let has_immediate = message.flags.contains(CompletionFlags::WITH_IMMEDIATE);
        if (self.header.0, self.header.1) != (message.length, has_immediate) {
            let bytes = grh(self.source, &self.route, message.length, has_immediate);
            self.header = (message.length, has_immediate, bytes);
        }
        &self.header.2
    }
}

impl Order {
    /// Whether one that was delivered to this RECV counts.
    fn has_begun(&self, position: u32) -> bool {
        self.since.is_none_or(|since| is_at_or_after(position, since))
    }

    /// One was delivered that counts. `next`: what the ring's next one says. False: older ones stand in the ring, or
    /// wait behind it.
    fn passes(&mut self, next: Option<u32>, has_displaced: bool) -> bool {
        if has_displaced || next.is_some_and(|next| is_at_or_after(self.routed, next)) {
            return false;
        }
        self.count();
        true
    }

    /// → how many came before.
    fn count(&mut self) -> u32 {
        let before = self.routed;
        (self.routed, self.since) = (before.wrapping_add(1), None);
        before
    }
}

/// Of a datagram that the router delivered too early, and the ring's next one: whether the first comes first.
fn is_routed_next(displaced: Option<u32>, next: Option<u32>) -> bool {
    match (displaced, next) {
        (Some(displaced), Some(next)) => !is_at_or_after(displaced, next),
        (displaced, None) => displaced.is_some(),
        (None, Some(_)) => false,
    }
}

impl Room {
    /// Of the RECV at this position. `None`: the router must deliver to it.
    #[inline]
    fn of(
        regions: &Held<'_>,
        keys: &mut Cache,
        queue: &ReceiveQueue<'_>,
        side: &ReceiveSide,
        position: u32,
    ) -> Option<Self> {
        let mut sges = [Sge::default(); SGES_MAX + 1];
        let listed = side.ring.receive_at(position, &mut sges);
        let mut room = Self { ranges: [OwnRange::default(); SGES_MAX], count: 0, bytes: 0 };
        for sge in sges[..listed].iter().filter(|sge| sge.length > 0) {
            let range = regions.resolve(keys, sge, queue.pd, Access::LOCAL_WRITE)?;
            *room.ranges.get_mut(room.count)? = range;
            room.count += 1;
            room.bytes += u64::from(range.bytes);
        }
        Some(room)
    }

    /// Leaves the rest behind the first bytes, which `each` gets piece by piece.
    #[inline]
    fn split(&mut self, mut bytes: u32, mut each: impl FnMut(OwnRange)) {
        for range in &mut self.ranges[..self.count] {
            let taken = range.bytes.min(bytes);
            if taken > 0 {
                each(OwnRange { bytes: taken, ..*range });
            }
            *range = OwnRange { address: range.address.wrapping_add(u64::from(taken)), bytes: range.bytes - taken };
            bytes -= taken;
        }
    }

    fn put(&mut self, own: OwnMemory, bytes: &[u8]) {
        let mut left = bytes;
        self.split(bytes.len() as u32, |range| {
            let (now, later) = left.split_at(range.bytes as usize);
            own.put(now, range);
            left = later;
        });
    }
}

/// Whether the next RECV can be taken.
enum Turn {
    Ready(Room),
    /// None is posted, or the router has it.
    Later,
    Never,
}

impl Datagrams {
    pub fn new(next: u32, own: OwnMemory) -> Self {
        Self {
            own,
            next,
            rings: Vec::new(),
            first: 0,
            is_over: false,
            is_refused: false,
            wants_notifications: true,
            keys: Cache::default(),
            active_at: 0,
        }
    }

    /// Accepts the rings that were offered, and looks at those that were not looked at.
    #[cold]
    pub fn adopt(&mut self, session: &Session, queue: &ReceiveQueue<'_>) {
        let offered = queue.side.lock().ring.rings_offered();
        while queue.offers_seen() != offered && !self.is_over && !self.is_refused {
            let seen = match session.call(&Request::AcceptDatagramRing { qp: queue.handle }) {
                Ok((
                    Reply::IncomingDatagramRing { segment_bytes, place, offer, source_qpn, source, route, first },
                    fds,
                )) => {
                    if let Some(segment) = map_ring(segment_bytes, CreditList::Promised, &fds) {
                        let (receiver, _) = DirectRingReceiver::new(segment, CreditList::Promised);
                        self.add(receiver, place, (source_qpn, source, route, first));
                    }
                    offer
                }
                Err(VerbsError::NotFound) => offered,
                // It is asked again when something is notified.
                Ok(_) | Err(_) => break,
            };
            queue.set_offers_seen(seen);
            if is_at_or_after(seen, offered) {
                break;
            }
        }
        self.follow(queue);
        let wants = self.wants_notifications;
        for ring in self.rings.iter_mut().filter(|ring| !ring.is_hot && ring.has_next()) {
            ring.is_hot = true;
            ring.receiver.want_notifications(wants);
        }
    }

    fn add(&mut self, mut receiver: DirectRingReceiver, place: u32, about: (u32, Gid, GlobalRoute, u32)) {
        let (source_qpn, source, route, first) = about;
        for older in self.rings.iter_mut().filter(|ring| ring.place == place) {
            older.note_closed();
        }
        receiver.want_notifications(self.wants_notifications);
        receiver.open();
        let header = (0, false, grh(source, &route, 0, false));
        self.rings.push(Ring {
            receiver,
            place,
            source_qpn,
            source,
            route,
            is_closed: false,
            closed_at_ns: 0,
            close_drain: CloseDrain::default(),
            is_hot: true,
            active_at: self.active_at,
            reported: 0,
            must_commit: false,
            order: Order { routed: 0, since: Some(first) },
            displaced: VecDeque::new(),
            header,
        });
    }

    /// Lets go of rings that were closed and are empty.
    #[cold]
    fn follow(&mut self, queue: &ReceiveQueue<'_>) {
        let open = queue.side.lock().ring.rings_open();
        for ring in &mut self.rings {
            let is_open = open & 1 << (ring.place & 63) != 0;
            if !is_open || ring.is_closed {
                ring.note_closed();
            }
        }
        // Its sender may be about to put something there that it calls sent; not when it has another one.
        let (now_ns, is_crowded) = (coarse_ns(), self.rings.len() > CLOSED_MAX);
        let mut at = 0;
        while let Some(ring) = self.rings.get(at) {
            let is_left = is_crowded
                || now_ns.saturating_sub(ring.closed_at_ns) > CLOSED_NS
                || self.rings[at + 1..].iter().any(|newer| newer.is_of(ring));
            if ring.is_closed && is_left && ring.is_empty() {
                self.rings.remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Rings are not looked at that have brought nothing for long.
    #[cold]
    fn cool(&mut self, polls: u64) {
        if self.rings.len() < 2 || self.wants_notifications {
            return;
        }
        for ring in self
            .rings
            .iter_mut()
            .filter(|ring| ring.is_hot && !ring.is_closed && ring.active_at + POLLS_BEFORE_COLD < polls)
        {
            ring.receiver.want_notifications(true);
            ring.is_hot = ring.has_next();
            if ring.is_hot {
                ring.receiver.want_notifications(false);
            }
        }
    }

    pub fn next(&self) -> u32 {
        self.next
    }

    /// The router completed this RECV. False: it is to be given to [`Self::reorder`].
    #[inline(never)] // beside the peer's
    pub fn passes_whole(&mut self, completion: &Completion) -> bool {
        if completion.status != CompletionStatus::Success {
            return completion.status != CompletionStatus::WorkRequestFlushed && self.passes(completion.ring_position);
        }
        completion.ring_position == self.next && self.is_in_order(completion) && self.passes(completion.ring_position)
    }

    fn is_in_order(&mut self, completion: &Completion) -> bool {
        let Some(at) = self.ring_of(completion) else { return true };
        !self.is_behind(at) && self.rings[at].passes()
    }

    /// The ring whose datagrams are in one order with this one of the router's.
    fn ring_of(&self, completion: &Completion) -> Option<usize> {
        let (qpn, position) = (completion.source_qpn, completion.ring_position);
        self.rings.iter().rposition(|ring| ring.source_qpn == qpn && ring.order.has_begun(position))
    }

    #[inline]
    pub fn passes(&mut self, position: u32) -> bool {
        let passes = position == self.next;
        self.next = self.next.wrapping_add(u32::from(passes));
        passes
    }

    /// The RECV at this position has completed.
    pub fn passed(&self, position: u32) -> bool {
        is_at_or_after(self.next, position.wrapping_add(1))
    }

    pub fn resume_after(&mut self, position: u32) {
        self.next = position.wrapping_add(1);
    }

    #[inline(never)] // beside the peer's
    pub fn want_notifications(&mut self, wants: bool) {
        self.wants_notifications = wants;
        for ring in self.rings.iter_mut().filter(|ring| ring.is_hot) {
            ring.receiver.want_notifications(wants);
        }
    }

    pub fn note_reported(&mut self) {
        for ring in self.rings.iter_mut().filter(|ring| ring.is_any_unreported()) {
            ring.reported = ring.receiver.published();
        }
    }

    /// Whether a datagram can be taken that no event reported. One that waits for a RECV rings this doorbell when one
    /// is posted.
    pub fn has_unreported(&self, queue: &ReceiveQueue<'_>, doorbell: u32) -> bool {
        if self.is_over || self.rings.iter().all(Ring::is_empty) {
            return false;
        }
        let mut side = queue.side.lock();
        if side.ring.position() == self.next {
            side.waiting = Some(doorbell);
            return false;
        }
        drop(side);
        self.rings.iter().any(|ring| ring.has_next() && ring.is_any_unreported())
    }

    pub fn is_empty(&self) -> bool {
        self.is_over || self.rings.iter().all(Ring::is_empty)
    }

    pub fn is_idle_since(&self, polls: u64) -> bool {
        self.active_at < polls
    }

    /// RECVs are flushed.
    #[cold]
    pub fn end(&mut self) {
        self.is_over = true;
        self.leave();
    }

    fn leave(&mut self) {
        for ring in &mut self.rings {
            ring.receiver.leave();
        }
        self.rings.clear();
    }

    /// Takes the next datagram, if there is a RECV.
    #[inline]
    pub fn take(
        &mut self,
        session: &Session,
        queue: &ReceiveQueue<'_>,
        (polls, timestamps): (u64, bool),
    ) -> Option<Completion> {
        let count = self.rings.len();
        let mut at = self.first;
        for _ in 0..count {
            if at >= count {
                at = 0;
            }
            let ring = &self.rings[at];
            if ring.is_hot && ring.has_next() && !self.is_behind(at) {
                return self.take_of(session, queue, at, (polls, timestamps));
            }
            at += 1;
        }
        if polls.is_multiple_of(POLLS_BEFORE_FOLLOW) && count > 0 {
            self.follow(queue);
            if polls.is_multiple_of(POLLS_BEFORE_COLD) {
                self.cool(polls);
            }
        }
        None
    }

    /// An older ring of the same sender is not empty.
    #[inline]
    fn is_behind(&self, at: usize) -> bool {
        self.older_than(at).is_some()
    }

    #[inline]
    fn older_than(&self, at: usize) -> Option<usize> {
        self.rings[..at].iter().position(|older| older.is_closed && older.is_of(&self.rings[at]) && older.has_next())
    }

    fn take_of(
        &mut self,
        session: &Session,
        queue: &ReceiveQueue<'_>,
        at: usize,
        (polls, timestamps): (u64, bool),
    ) -> Option<Completion> {
        if self.is_over {
            return None;
        }
        let mut side = queue.side.lock();
        // Nothing is deregistered until the bytes are copied.
        let regions = session.regions.hold();
        let filled = match self.turn(&regions, queue, &side) {
            Turn::Ready(room) => self.fill(queue, &mut side, at, room, false),
            Turn::Later => None,
            Turn::Never => {
                // As to all others that come from now on.
                self.is_refused = true;
                self.leave();
                return None;
            }
        };
        let Some(mut completion) = filled else {
            // It completes once there is a RECV: an event from before says nothing of that.
            self.rings.iter_mut().for_each(|ring| ring.reported = ring.receiver.taken());
            // One whose datagrams are dropped does not keep the others waiting.
            self.first = at + 1;
            return None;
        };
        let ring = &mut self.rings[at];
        (ring.active_at, self.active_at) = (polls, polls);
        // One after the other, each some.
        self.first = if ring.receiver.taken().is_multiple_of(TURN) { at + 1 } else { at };
        completion.timestamp_ns = if timestamps { monotonic_ns() } else { 0 };
        Some(completion)
    }

    #[inline]
    fn turn(&mut self, regions: &Held<'_>, queue: &ReceiveQueue<'_>, side: &ReceiveSide) -> Turn {
        let next = self.next;
        if side.ring.position() == next || !is_at_or_after(next, side.ring.taken()) {
            return Turn::Later;
        }
        match Room::of(regions, &mut self.keys, queue, side, next) {
            Some(room) => Turn::Ready(room),
            None => Turn::Never,
        }
    }

    /// Puts the next datagram of a ring that fits into the next RECV. → what completes that. `is_claimed`: nobody else
    /// takes it.
    fn fill(
        &mut self,
        queue: &ReceiveQueue<'_>,
        side: &mut ReceiveSide,
        at: usize,
        mut room: Room,
        mut is_claimed: bool,
    ) -> Option<Completion> {
        let (position, own) = (self.next, self.own);
        let ring = &mut self.rings[at];
        for _ in 0..DROPPED_MAX {
            let message = ring.receiver.peek();
            let is_displaced = ring.is_displaced_next(message.as_ref());
            let bytes = match &message {
                _ if is_displaced => ring.displaced.front()?.bytes.len() as u64,
                Some(_) if ring.is_closed && !ring.close_drain.takes_another() => {
                    ring.receiver.leave();
                    self.rings.remove(at);
                    return None;
                }
                Some(message) => u64::from(message.length) + GRH_BYTES as u64,
                None => return None,
            };
            let is_too_long = bytes > room.bytes || bytes > UD_MESSAGE_BYTES_MAX + GRH_BYTES as u64;
            if !is_too_long {
                is_claimed = is_claimed || side.ring.claim_receive(position);
                if !is_claimed {
                    return None;
                }
            }
            let completion = match &message {
                _ if is_displaced => {
                    let displaced = ring.displaced.pop_front()?;
                    if is_too_long {
                        continue;
                    }
                    room.put(own, &displaced.bytes);
                    displaced.completion
                }
                Some(message) if is_too_long => {
                    // As if it had never come (class D).
                    ring.take(message);
                    continue;
                }
                Some(message) => ring.deliver(own, message, &mut room),
                None => return None,
            };
            if let Some(message) = message.filter(|_| !is_displaced) {
                side.ring.count_send(message.length);
                ring.take(&message);
            }
            self.next = position.wrapping_add(1);
            side.ring.set_claimed(self.next);
            return Some(Completion {
                work_request_id: side.ring.wr_id_at(position),
                qpn: queue.qpn,
                qp_cookie: queue.cookie,
                ring_position: position,
                ..completion
            });
        }
        None
    }

    /// The router has delivered a datagram while older ones of the same sender stand in the ring. It leaves its RECV
    /// to the oldest of them, and takes one after them. → what completes the RECV.
    #[cold]
    pub fn reorder(
        &mut self,
        session: &Session,
        queue: &ReceiveQueue<'_>,
        completion: &Completion,
        timestamps: bool,
    ) -> Completion {
        let position = completion.ring_position;
        let found = self.ring_of(completion);
        let is_whole = completion.status == CompletionStatus::Success && position == self.next;
        let Some(at) = found.filter(|&at| is_whole && self.rings[at].displaced.len() < DISPLACED_MAX) else {
            self.resume_after(position);
            return *completion;
        };
        let mut side = queue.side.lock();
        let regions = session.regions.hold();
        let Some(room) = Room::of(&regions, &mut self.keys, queue, &side, position) else {
            self.resume_after(position);
            return *completion;
        };
        let (mut bytes, own, count) = (Vec::new(), self.own, self.rings.len());
        room.clone().split(completion.byte_count, |range| own.append_to(&mut bytes, range));
        let ring = &mut self.rings[at];
        let routed = ring.order.count();
        ring.displaced.push_back(Displaced { routed, completion: *completion, bytes });
        // Nobody else has the RECV now.
        match self.fill(queue, &mut side, self.older_than(at).unwrap_or(at), room, true) {
            Some(filled) => Completion { timestamp_ns: if timestamps { monotonic_ns() } else { 0 }, ..filled },
            // It is still in its RECV.
            None => {
                let at = if self.rings.len() == count { Some(at) } else { self.ring_of(completion) };
                if let Some(at) = at {
                    self.rings[at].displaced.pop_back();
                }
                self.resume_after(position);
                *completion
            }
        }
    }

    /// Gives taken room back to the senders.
    #[inline(never)] // beside the peer's
    pub fn commit(&mut self) {
        for ring in self.rings.iter_mut().filter(|ring| ring.must_commit) {
            ring.must_commit = false;
            ring.receiver.commit();
        }
    }
}

#[cfg(test)]
mod tests;
