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
use crate::direct_ring::{Look, map_ring};
use crate::receive_side::{ReceiveQueue, ReceiveSide};
use crate::regions::{Cache, Held, Regions};
use crate::session::Session;
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::{CreditList, DirectRingReceiver, OwnMemory, Staged, monotonic_ns};
use freeflow_verbs::datagram::{GRH_BYTES, UD_MESSAGE_BYTES_MAX, grh, is_ipv6};
use freeflow_verbs::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Gid, GlobalRoute, VerbsError};
use std::collections::VecDeque;

mod order;
mod room;
use order::{Order, is_at_or_after, is_routed_next};
use room::Room;

/// Datagrams that no RECV was long enough for, of one look.
const DROPPED_MAX: u32 = 256;
/// A ring without a datagram for so many polls is not looked at until its sender has it notified, if there are several.
const POLLS_BEFORE_COLD: u64 = 4096;
/// Looks after which it is seen which rings are closed. (The router notifies of that, too.)
const POLLS_BEFORE_FOLLOW: u64 = 64;
/// Closed rings with datagrams that wait for RECVs.
const CLOSED_MAX: usize = 64;
/// Where source and destination stand in a header.
const IPV4_ADDRESSES_AT: usize = 32;
const IPV6_ADDRESSES_AT: usize = 8;
/// Datagrams of one ring before another ring has its turn.
const TURN: u32 = 16;
/// Datagrams of the router's that changed places with older ones and wait: twice as many as a ring holds.
const DISPLACED_MAX: usize = 512;
/// Rings that have such.
const DISPLACING_MAX: usize = 64;

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
    /// The last look ended while there was more to drop.
    is_cut_short: bool,
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
    /// It is closed: datagrams before this number, those that were there when that was seen, are still taken.
    until: Option<u32>,
    /// It is looked at in each poll.
    is_hot: bool,
    active_at: u64,
    /// Datagrams before this number of the ring were there when an event was taken, which reported them.
    reported: u32,
    must_commit: bool,
    order: Order,
    /// Those of the router's that came too early.
    displaced: VecDeque<Displaced>,
    /// An event reported those.
    is_displaced_reported: bool,
    /// The last header, and what it is of.
    header: (u32, bool, [u8; GRH_BYTES]),
}

/// A datagram of the router's that had to leave its RECV.
struct Displaced {
    /// How many of the router's came before.
    routed: u32,
    completion: Completion,
    bytes: Vec<u8>,
}

impl Ring {
    fn new(
        receiver: DirectRingReceiver,
        place: u32,
        (source_qpn, source, route, first): (u32, Gid, GlobalRoute, u32),
    ) -> Self {
        Self {
            receiver,
            place,
            source_qpn,
            source,
            route,
            until: None,
            is_hot: true,
            active_at: 0,
            reported: 0,
            must_commit: false,
            order: Order::new(first),
            displaced: VecDeque::new(),
            is_displaced_reported: false,
            header: (0, false, grh(source, &route, 0, false)),
        }
    }

    fn is_of(&self, other: &Self) -> bool {
        (self.source_qpn, self.source) == (other.source_qpn, other.source)
    }

    /// Whether a datagram with this header went from this ring's sender to the address that the ring is for.
    fn has_addresses_of(&self, header: &[u8; GRH_BYTES]) -> bool {
        let own = &self.header.2;
        let from = if is_ipv6(own) { IPV6_ADDRESSES_AT } else { IPV4_ADDRESSES_AT };
        is_ipv6(own) == is_ipv6(header) && own[from..] == header[from..]
    }

    #[cold]
    fn note_closed(&mut self) {
        if self.until.is_none() {
            (self.until, self.is_hot) = (Some(self.receiver.published()), true);
        }
    }

    fn is_closed(&self) -> bool {
        self.until.is_some()
    }

    #[inline]
    fn peek(&self) -> Option<Staged> {
        if self.until == Some(self.receiver.taken()) { None } else { self.receiver.peek() }
    }

    fn published(&self) -> u32 {
        self.until.unwrap_or_else(|| self.receiver.published())
    }

    #[inline]
    fn has_next(&self) -> bool {
        !self.displaced.is_empty() || self.peek().is_some()
    }

    fn is_empty(&self) -> bool {
        !self.has_next()
    }

    fn unreported(&self) -> u32 {
        let taken = self.receiver.taken();
        if is_at_or_after(self.reported, taken) { self.reported } else { taken }
    }

    fn is_any_unreported(&self) -> bool {
        !self.displaced.is_empty() && !self.is_displaced_reported || self.published() != self.unreported()
    }

    fn note_reported(&mut self) {
        (self.reported, self.is_displaced_reported) = (self.published(), true);
    }

    /// One that waits completes once there is a RECV: an event from before says nothing of that.
    fn forget_reported(&mut self) {
        (self.reported, self.is_displaced_reported) = (self.receiver.taken(), false);
    }

    /// The router has delivered a datagram of this sender since the ring was opened. False: older ones are to be taken
    /// before.
    fn passes(&mut self) -> bool {
        let next = self.peek().map(|message| message.msn);
        self.order.passes(next, !self.displaced.is_empty())
    }

    /// Whether what comes next is one that the router had delivered.
    fn is_displaced_next(&self, message: Option<&Staged>) -> bool {
        let displaced = self.displaced.front().map(|displaced| displaced.routed);
        is_routed_next(displaced, message.map(|message| message.msn))
    }

    /// The message in hand is done with.
    fn take(&mut self, message: &Staged) {
        self.order.take(message.msn, !self.displaced.is_empty());
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

/// Whether the next RECV can be taken.
enum Turn {
    Ready(Room),
    /// None is posted, or the router has it.
    Later,
    Never,
}

/// Whether the next RECV was taken.
enum Filled {
    Done(Completion),
    /// There is none, or the router has it.
    Later,
    /// This ring has nothing for it.
    Nothing,
}

/// Lets go of rings that were closed and are empty.
#[cold]
fn follow(rings: &mut Vec<Ring>, queue: &ReceiveQueue<'_>) {
    let open = queue.side.lock().ring.rings_open();
    for ring in rings.iter_mut().filter(|ring| open & 1 << (ring.place & 63) == 0) {
        ring.note_closed();
    }
    let_go(rings, |rings, at| rings[at].is_empty());
    // Senders may leave something in each ring that they close, and open others without end.
    let_go(rings, |rings, at| {
        let is_older = |newer: &Ring| newer.is_closed() && newer.is_of(&rings[at]);
        let is_too_much = rings.iter().filter(|ring| ring.is_closed()).count() > CLOSED_MAX;
        rings[at].displaced.is_empty() && (is_too_much || rings[at + 1..].iter().any(is_older))
    });
}

/// Leaves closed rings of which `is_meant` says so, from the oldest on.
fn let_go(rings: &mut Vec<Ring>, is_meant: impl Fn(&[Ring], usize) -> bool) {
    let mut at = 0;
    while let Some(ring) = rings.get(at) {
        if ring.is_closed() && is_meant(rings, at) {
            rings.remove(at).receiver.leave();
        } else {
            at += 1;
        }
    }
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
            is_cut_short: false,
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
        follow(&mut self.rings, queue);
        let wants = self.wants_notifications;
        for ring in self.rings.iter_mut().filter(|ring| !ring.is_hot && ring.has_next()) {
            ring.is_hot = true;
            ring.receiver.want_notifications(wants);
        }
    }

    fn add(&mut self, mut receiver: DirectRingReceiver, place: u32, about: (u32, Gid, GlobalRoute, u32)) {
        for older in self.rings.iter_mut().filter(|ring| ring.place == place) {
            older.note_closed();
        }
        receiver.want_notifications(self.wants_notifications);
        receiver.open();
        self.rings.push(Ring { active_at: self.active_at, ..Ring::new(receiver, place, about) });
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
            .filter(|ring| ring.is_hot && !ring.is_closed() && ring.active_at + POLLS_BEFORE_COLD < polls)
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
    pub fn passes_whole(&mut self, regions: &Regions, queue: &ReceiveQueue<'_>, completion: &Completion) -> bool {
        if completion.status != CompletionStatus::Success {
            return completion.status != CompletionStatus::WorkRequestFlushed && self.passes(completion.ring_position);
        }
        completion.ring_position == self.next
            && self.is_in_order(regions, queue, completion)
            && self.passes(completion.ring_position)
    }

    fn is_in_order(&mut self, regions: &Regions, queue: &ReceiveQueue<'_>, completion: &Completion) -> bool {
        if !self.rings.iter().any(|ring| ring.source_qpn == completion.source_qpn) {
            return true;
        }
        let side = queue.side.lock();
        let regions = regions.hold();
        let room = Room::of(&regions, &mut self.keys, queue, &side, completion.ring_position);
        let found = room.and_then(|room| self.ring_of(completion, &room));
        found.is_none_or(|at| !self.is_behind(at) && self.rings[at].passes())
    }

    /// The ring whose datagrams are in one order with this one of the router's: from the same QP, by the same address.
    /// QPNs alone are not enough: there are other hosts, and groups.
    fn ring_of(&self, completion: &Completion, room: &Room) -> Option<usize> {
        let header = room.header(self.own)?;
        let (qpn, position) = (completion.source_qpn, completion.ring_position);
        let is_its =
            |ring: &Ring| ring.source_qpn == qpn && ring.order.has_begun(position) && ring.has_addresses_of(&header);
        self.rings.iter().rposition(is_its)
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
            ring.note_reported();
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
        if !is_at_or_after(self.next, side.ring.taken()) {
            // The router has it: there is an event when it completes it, or puts it back.
            return false;
        }
        drop(side);
        self.rings.iter().any(|ring| ring.has_next() && ring.is_any_unreported())
    }

    pub fn has_rings(&self) -> bool {
        !self.rings.is_empty()
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
    pub fn take(&mut self, regions: &Regions, queue: &ReceiveQueue<'_>, look: Look) -> Option<Completion> {
        let count = self.rings.len();
        let (mut at, mut drops_left) = (self.first, DROPPED_MAX);
        self.is_cut_short = false;
        for _ in 0..count {
            if at >= self.rings.len() {
                at = 0;
            }
            if self.rings.get(at).is_some_and(|ring| ring.is_hot && ring.has_next()) && !self.is_behind(at) {
                match self.take_of(regions, queue, at, (look, &mut drops_left)) {
                    Filled::Done(completion) => return Some(completion),
                    Filled::Later => {
                        self.commit();
                        return None;
                    }
                    Filled::Nothing => {}
                }
            }
            at += 1;
        }
        if drops_left < DROPPED_MAX {
            self.commit();
        }
        if look.polls.is_multiple_of(POLLS_BEFORE_FOLLOW) && count > 0 {
            follow(&mut self.rings, queue);
            if look.polls.is_multiple_of(POLLS_BEFORE_COLD) {
                self.cool(look.polls);
            }
        }
        None
    }

    /// [`Self::take`] found nothing, and there may be something all the same.
    pub fn is_cut_short(&self) -> bool {
        self.is_cut_short
    }

    /// An older ring of the same sender is not empty.
    #[inline]
    fn is_behind(&self, at: usize) -> bool {
        self.older_than(at).is_some()
    }

    #[inline]
    fn older_than(&self, at: usize) -> Option<usize> {
        self.rings[..at].iter().position(|older| older.is_closed() && older.is_of(&self.rings[at]) && older.has_next())
    }

    fn take_of(
        &mut self,
        regions: &Regions,
        queue: &ReceiveQueue<'_>,
        at: usize,
        (look, drops_left): (Look, &mut u32),
    ) -> Filled {
        if self.is_over {
            return Filled::Later;
        }
        let mut side = queue.side.lock();
        // Nothing is deregistered until the bytes are copied.
        let regions = regions.hold();
        let filled = match self.turn(&regions, queue, &side) {
            Turn::Ready(room) => self.fill(queue, &mut side, at, room, (false, drops_left)),
            Turn::Later => {
                if side.ring.position() == self.next && look.armed.is_some() {
                    // The thread that posts one does not know of the datagram.
                    side.waiting = look.armed;
                }
                Filled::Later
            }
            Turn::Never => {
                // As to all others that come from now on.
                self.is_refused = true;
                self.leave();
                return Filled::Later;
            }
        };
        // One whose datagrams are dropped does not keep the others waiting.
        let mut first = at + 1;
        let filled = match filled {
            Filled::Done(completion) => {
                let ring = &mut self.rings[at];
                (ring.active_at, self.active_at) = (look.polls, look.polls);
                // One after the other, each some.
                if !ring.receiver.taken().is_multiple_of(TURN) {
                    first = at;
                }
                let timestamp_ns = if look.timestamps { monotonic_ns() } else { 0 };
                Filled::Done(Completion { timestamp_ns, ..completion })
            }
            Filled::Later => {
                self.rings.iter_mut().for_each(Ring::forget_reported);
                Filled::Later
            }
            Filled::Nothing => Filled::Nothing,
        };
        self.first = first;
        filled
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
        (is_claimed, drops_left): (bool, &mut u32),
    ) -> Filled {
        let (position, own) = (self.next, self.own);
        let ring = &mut self.rings[at];
        loop {
            let message = ring.peek();
            let is_displaced_next = ring.is_displaced_next(message.as_ref());
            // One that had been delivered is not dropped: it waits for a longer RECV, and others pass it.
            let fits = |displaced: &Displaced| displaced.bytes.len() as u64 <= room.bytes;
            let is_displaced = is_displaced_next && ring.displaced.front().is_some_and(fits);
            if !is_displaced {
                let Some(message) = &message else { return Filled::Nothing };
                let bytes = u64::from(message.length) + GRH_BYTES as u64;
                if bytes > room.bytes.min(UD_MESSAGE_BYTES_MAX + GRH_BYTES as u64) {
                    if *drops_left == 0 {
                        self.is_cut_short = true;
                        ring.forget_reported();
                        return Filled::Nothing;
                    }
                    // As if it had never come (class D).
                    *drops_left -= 1;
                    ring.take(message);
                    continue;
                }
            }
            if !is_claimed && !side.ring.claim_receive(position) {
                return Filled::Later;
            }
            let completion = match (if is_displaced { ring.displaced.pop_front() } else { None }, message) {
                (Some(displaced), _) => {
                    room.put(own, &displaced.bytes);
                    displaced.completion
                }
                (None, Some(message)) => {
                    let completion = ring.deliver(own, &message, &mut room);
                    side.ring.count_send(message.length);
                    ring.take(&message);
                    completion
                }
                (None, None) => return Filled::Nothing,
            };
            self.next = position.wrapping_add(1);
            side.ring.set_claimed(self.next);
            return Filled::Done(Completion {
                work_request_id: side.ring.wr_id_at(position),
                qpn: queue.qpn,
                qp_cookie: queue.cookie,
                ring_position: position,
                ..completion
            });
        }
    }

    /// The router has delivered a datagram while older ones of the same sender stand in the ring. It leaves its RECV
    /// to the oldest of them, and takes one after them. → what completes the RECV.
    #[cold]
    pub fn reorder(
        &mut self,
        regions: &Regions,
        queue: &ReceiveQueue<'_>,
        completion: &Completion,
        timestamps: bool,
    ) -> Completion {
        let position = completion.ring_position;
        let changed = if completion.status == CompletionStatus::Success && position == self.next {
            self.change_places(regions, queue, completion)
        } else {
            None
        };
        let Some(filled) = changed else {
            // It stays in its RECV.
            self.resume_after(position);
            return *completion;
        };
        Completion { timestamp_ns: if timestamps { monotonic_ns() } else { 0 }, ..filled }
    }

    fn change_places(
        &mut self,
        regions: &Regions,
        queue: &ReceiveQueue<'_>,
        completion: &Completion,
    ) -> Option<Completion> {
        let (position, own) = (completion.ring_position, self.own);
        let mut side = queue.side.lock();
        let regions = regions.hold();
        let room = Room::of(&regions, &mut self.keys, queue, &side, position)?;
        let at = self.ring_of(completion, &room)?;
        let routed = self.rings[at].order.count();
        let displacing = self.rings.iter().filter(|ring| !ring.displaced.is_empty()).count();
        let displaced = self.rings[at].displaced.len();
        let has_place = displaced < DISPLACED_MAX && (displaced > 0 || displacing < DISPLACING_MAX);
        let following = position.wrapping_add(1);
        // It must not be lost: it is here.
        let fits_next = has_place
            && side.ring.position() != following
            && Room::of(&regions, &mut self.keys, queue, &side, following)
                .is_some_and(|next| next.bytes >= u64::from(completion.byte_count));
        let ring = &mut self.rings[at];
        if !fits_next {
            ring.order.is_ahead = true;
            return None;
        }
        let mut bytes = Vec::new();
        room.clone().split(completion.byte_count, |range| own.append_to(&mut bytes, range));
        ring.displaced.push_back(Displaced { routed, completion: *completion, bytes });
        ring.is_displaced_reported = false;
        // Nobody else has the RECV now.
        let oldest = self.older_than(at).unwrap_or(at);
        match self.fill(queue, &mut side, oldest, room, (true, &mut DROPPED_MAX.clone())) {
            Filled::Done(filled) => Some(filled),
            Filled::Later | Filled::Nothing => {
                let ring = &mut self.rings[at];
                ring.displaced.pop_back();
                ring.order.is_ahead = true;
                None
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
