//! Messages that the peer of an RC or UC queue pair puts into its direct ring: they take the RECVs in
//! order, together with those that the router delivers.
//!
//! Invariant: completions of a receive queue are handed on in the order of its positions, which are
//! the numbers of the messages, whichever way they came.
//!
//! RECVs of an SRQ have no such positions: the messages are numbered by themselves, and each takes
//! the next RECV when it is polled ([`Shared`]).
use crate::datagrams::Datagrams;
use crate::direct_ring::{CloseDrain, DirectRingTerms, Look};
use crate::promises::PROMISED_MAX;
use crate::regions::{Cache, SGES_MAX};
use crate::rings::Rings;
use crate::session::{NotificationListener, Session};
use crate::shared_receives::{Promisee, SharedReceives, TakenReceive};
use freeflow_protocol::FEATURE_NUMBERED_DIRECT_RINGS;
use freeflow_protocol::library::{Handle, Request};
use freeflow_shm::{CreditList, DirectRingReceiver, OwnMemory, OwnRange, Staged, monotonic_ns};
use freeflow_verbs::{
    Access, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, QpAttributeMask, QpAttributes, QpState,
    SGE_COUNT_MAX, Sge,
};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// The receiving end of a queue pair's direct ring. Under the lock of its receive CQ.
pub(crate) struct Incoming {
    receiver: DirectRingReceiver,
    own: OwnMemory,
    /// The RECV that is taken next, by whichever way.
    next: u32,
    /// Something is wrong with it: nothing comes by it any more.
    is_broken: bool,
    /// The router has the RECV of the next message. If that is to flush it, the message has been
    /// there before.
    is_disputed: bool,
    /// `DIRECT_RINGS_CLOSED` of the receive queue when it was accepted.
    direct_rings_closed: u32,
    /// Messages that are still taken once it is closed.
    close_drain: CloseDrain,
    keys: Cache,
    /// Polls of its CQ when it last brought something.
    active_at: u64,
    /// Messages before this number of the ring were there when an event was taken, which reported
    /// them.
    reported: u32,
    shared: Option<Box<Shared>>,
}

/// A RECV that a message takes.
struct Receive<'a> {
    wr_id: u64,
    sges: &'a [Sge],
    pd: Handle,
}

/// Of a queue pair that uses an SRQ.
struct Shared {
    srq: Arc<SharedReceives>,
    /// Its queue pair.
    own: Weak<dyn Promisee>,
    /// How many further messages are promised RECVs.
    left: u32,
    /// The ring is polled: these count.
    is_polled: bool,
    /// The SRQ had no more to promise, and says so once it has.
    is_short: bool,
    /// The RECV of the message in hand.
    receive: TakenReceive,
    /// Completions that the router gave while an older message waited for a RECV in the ring.
    held: VecDeque<Completion>,
}

impl Shared {
    fn new(srq: &Arc<SharedReceives>, own: Weak<dyn Promisee>) -> Box<Self> {
        let receive = TakenReceive { wr_id: 0, sges: [Sge::default(); SGE_COUNT_MAX], sge_count: 0 };
        let (srq, held) = (srq.clone(), VecDeque::new());
        Box::new(Self { srq, own, left: 0, is_polled: false, is_short: false, receive, held })
    }

    fn set_polled(&mut self, is_polled: bool) {
        if std::mem::replace(&mut self.is_polled, is_polled) != is_polled {
            self.srq.count_ring(is_polled, self.left);
            self.is_short = false;
        }
    }

    fn take(&mut self) -> bool {
        let taken = self.srq.take(self.is_polled && self.left > 0, &mut self.receive);
        self.left -= u32::from(taken && self.left > 0);
        taken
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.set_polled(false);
        // Their RECVs are used up all the same.
        self.held.iter().for_each(|_| self.srq.completed().add_one());
    }
}

impl Incoming {
    /// Accepts the direct ring that the peer has opened.
    pub fn accept(session: &Session, rings: &Rings, qp: Handle, own: OwnMemory) -> Option<Self> {
        let (reply, descriptors) = session.call(&Request::AcceptDirectRing { qp }).ok()?;
        let terms = DirectRingTerms::of(&reply)?;
        let (segment, credits) = terms.map(&descriptors)?;
        let is_shared = credits == CreditList::Promised;
        let (receiver, credits) = DirectRingReceiver::new(segment, credits);
        let direct_rings_closed = if session.speaks(FEATURE_NUMBERED_DIRECT_RINGS) {
            terms.direct_rings_closed
        } else {
            rings.receive.lock().ring.direct_rings_closed()
        };
        let (next, srq) = (rings.next_receive(), rings.srq());
        let shared = match (is_shared, srq) {
            (true, Some((srq, own))) => Some(Shared::new(srq, own)),
            (false, None) => None,
            _ => return None,
        };
        if shared.is_none() {
            rings.begin_credits(session, next, credits);
        }
        receiver.open();
        let keys = Cache::default();
        let close_drain = CloseDrain::default();
        Some(Self {
            receiver,
            own,
            next,
            is_broken: false,
            is_disputed: false,
            direct_rings_closed,
            close_drain,
            keys,
            active_at: 0,
            reported: 0,
            shared,
        })
    }

    /// The RECV that is taken next.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Another one may take its place: the router closed it, and nothing is left in it.
    pub fn is_over(&self, rings: &Rings) -> bool {
        let is_closed = rings.receive.lock().ring.direct_rings_closed() != self.direct_rings_closed;
        (is_closed || self.is_broken) && self.is_empty()
    }

    /// The router completed the RECV at this position, and did not flush it. False: it goes to
    /// `put_by`.
    #[inline]
    pub fn passes_whole(&mut self, completion: &Completion) -> bool {
        completion.status != CompletionStatus::WorkRequestFlushed && self.passes(completion.ring_position)
    }

    /// The router delivered to the RECV at this position. False: messages of the direct ring come
    /// before it.
    #[inline]
    pub fn passes(&mut self, position: u32) -> bool {
        if position == self.next {
            self.next = position.wrapping_add(1);
            return true;
        }
        false
    }

    /// The RECV at this position was taken: whatever comes next comes after it.
    pub fn passed(&self, position: u32) -> bool {
        (self.next.wrapping_sub(position) as i32) > 0
    }

    /// The next message did not come by the direct ring, whatever the peer said: the ring goes on
    /// after that.
    pub fn resume_after(&mut self, position: u32) {
        self.next = position.wrapping_add(1);
    }

    /// Messages need no notification, because the ring is polled; or they do.
    #[inline]
    pub fn want_notifications(&mut self, wants: bool) {
        self.receiver.want_notifications(wants);
    }

    /// An event was taken: it reports all messages that are there now.
    pub fn note_reported(&mut self) {
        if self.is_any_unreported() {
            self.reported = self.receiver.published();
        }
    }

    /// The first message that no event reported.
    fn unreported(&self) -> u32 {
        let taken = self.receiver.taken();
        if self.reported.wrapping_sub(taken).cast_signed() > 0 { self.reported } else { taken }
    }

    /// Whether a message was published that no event reported.
    fn is_any_unreported(&self) -> bool {
        self.receiver.published().wrapping_sub(self.unreported()).cast_signed() > 0
    }

    /// Whether a message can be taken, and there is one that no event reported. One that waits for a
    /// RECV of an SRQ rings this doorbell when one is posted.
    pub fn has_unreported(&self, doorbell: u32) -> bool {
        if self.has_turn() {
            return true;
        }
        !self.is_broken
            && self.receiver.peek().is_some_and(|message| message.msn == self.next)
            && self.shared.as_ref().is_none_or(|shared| shared.srq.has_receive_or_rings(doorbell))
            && self.is_any_unreported()
    }

    /// Nothing is in it.
    pub fn is_empty(&self) -> bool {
        (self.is_broken || self.receiver.peek().is_none())
            && self.shared.as_ref().is_none_or(|shared| shared.held.is_empty())
    }

    /// A completion that was held has its turn.
    fn has_turn(&self) -> bool {
        let held = self.shared.as_ref().and_then(|shared| shared.held.front());
        held.is_some_and(|held| self.is_broken || held.ring_position == self.next)
    }

    /// The ring is polled, or no longer.
    pub fn set_polled(&mut self, is_polled: bool) {
        if let Some(shared) = &mut self.shared {
            shared.set_polled(is_polled);
        }
    }

    /// Promises RECVs of an SRQ to the messages that come next.
    #[inline]
    pub fn renew_promise(&mut self) {
        if let Some(shared) = &mut self.shared
            && shared.left <= PROMISED_MAX / 2
            && !shared.is_short
        {
            self.promise();
        }
    }

    /// RECVs were posted after there had not been enough.
    pub fn note_receives(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.is_short = false;
        }
        self.renew_promise();
    }

    fn promise(&mut self) {
        let Some(shared) = self.shared.as_mut().filter(|shared| shared.is_polled) else { return };
        let share = shared.srq.promise(shared.left, &shared.own);
        shared.is_short = share.is_all;
        shared.left += share.count;
        if shared.left > 0 {
            self.receiver.promise(self.receiver.taken().wrapping_add(shared.left), share.room);
        }
    }

    /// Whether what the router delivered must wait: an older message of the ring has no RECV yet.
    /// Then it is kept.
    #[cold]
    pub fn keeps(&mut self, completion: &Completion) -> bool {
        let waits = !self.is_broken && self.receiver.peek().is_some_and(|message| message.msn == self.next);
        let Some(shared) = self.shared.as_mut().filter(|shared| waits || !shared.held.is_empty()) else { return false };
        shared.held.push_back(*completion);
        true
    }

    pub fn is_idle_since(&self, polls: u64) -> bool {
        self.active_at < polls
    }

    /// Takes the next message, if it is the RECVs' turn for one.
    #[inline]
    pub fn take(&mut self, session: &Session, rings: &Rings, look: Look) -> Option<Completion> {
        if self.shared.is_some() {
            return self.take_shared(session, rings, look);
        }
        let message = self.receiver.peek()?;
        if message.msn != self.next || self.is_broken {
            return None;
        }
        self.active_at = look.polls;
        let receive = rings.receive.lock();
        if receive.ring.direct_rings_closed() != self.direct_rings_closed && !self.drains(rings) {
            self.is_broken = true;
            return None;
        }
        if !receive.ring.claim_receive(self.next) {
            // The router has it: to flush it, or because the peer lies.
            (self.is_broken, self.is_disputed) = (true, true);
            return None;
        }
        let mut sges = [Sge::default(); SGES_MAX];
        let count = receive.ring.receive_at(self.next, &mut sges);
        let taken = Receive { wr_id: receive.ring.wr_id_at(self.next), sges: &sges[..count], pd: rings.pd };
        let completion = self.fill::<SGES_MAX>(session, rings, &taken, (&message, self.next), look.timestamps);
        self.next = self.next.wrapping_add(1);
        receive.ring.set_claimed(self.next);
        drop(receive);
        self.receiver.take();
        if completion.status != CompletionStatus::Success {
            self.is_broken = true;
            fail(session, rings);
        }
        Some(completion)
    }

    /// Takes the next message for the next RECV of the SRQ; or what was held until now.
    #[inline(never)]
    fn take_shared(&mut self, session: &Session, rings: &Rings, look: Look) -> Option<Completion> {
        if self.has_turn()
            && let Some(held) = self.shared.as_mut()?.held.pop_front()
        {
            self.next = held.ring_position.wrapping_add(1);
            return Some(held);
        }
        let message = self.receiver.peek()?;
        if message.msn != self.next || self.is_broken {
            return None;
        }
        let mut shared = self.shared.take()?;
        let taken = self.takes_receive(&mut shared, rings, look.armed);
        let completion = taken.then(|| {
            self.active_at = look.polls;
            let TakenReceive { wr_id, ref sges, sge_count } = shared.receive;
            let receive = Receive { wr_id, sges: &sges[..sge_count], pd: shared.srq.pd() };
            let about = (&message, self.next);
            match sge_count {
                0..=SGES_MAX => self.fill::<SGES_MAX>(session, rings, &receive, about, look.timestamps),
                _ => self.fill::<SGE_COUNT_MAX>(session, rings, &receive, about, look.timestamps),
            }
        });
        self.shared = Some(shared);
        let completion = completion?;
        self.next = self.next.wrapping_add(1);
        self.receiver.take();
        if completion.status != CompletionStatus::Success {
            self.is_broken = true;
            fail(session, rings);
        }
        Some(completion)
    }

    /// A message of a ring that is closed is about to be taken. The next ring may be there already, and is accepted
    /// once the last message is.
    #[cold]
    fn drains(&mut self, rings: &Rings) -> bool {
        rings.notify();
        self.close_drain.takes_another()
    }

    /// Takes the next RECV of the SRQ for the next message. False: there is none, or the ring ends. `armed`: this
    /// doorbell rings when one is posted.
    fn takes_receive(&mut self, shared: &mut Shared, rings: &Rings, armed: Option<u32>) -> bool {
        let mut receive = rings.receive.lock();
        let is_closed = receive.ring.direct_rings_closed() != self.direct_rings_closed;
        // One that waits for a RECV does not count.
        if is_closed && shared.srq.has_receive() && !self.drains(rings) {
            self.is_broken = true;
            return false;
        }
        // Counted first: the router may find a RECV more than there is left for it, never one less.
        receive.count_ring_messages(1);
        let mut taken = shared.take();
        while !taken && armed.is_some_and(|doorbell| shared.srq.has_receive_or_rings(doorbell)) {
            // It was posted just now, or the router takes it.
            taken = shared.take();
        }
        if !taken {
            receive.count_ring_messages(-1);
            // It completes once one is posted: an event from before says nothing of that.
            self.reported = self.receiver.taken();
        }
        taken
    }

    /// The router has flushed the RECV at this position: the queue pair is in ERROR. A message that
    /// took it before was acknowledged: then the completion becomes that message's. The first
    /// flushed RECV without one ends the direct ring.
    #[cold]
    pub fn outlive_flush(&mut self, session: &Session, rings: &Rings, completion: &mut Completion, timestamps: bool) {
        if self.is_broken && !self.is_disputed {
            return;
        }
        (self.is_broken, self.is_disputed) = (true, true);
        self.receiver.leave();
        let position = completion.ring_position;
        let message = self.receiver.peek().filter(|message| message.msn == position);
        if let Some(message) = message {
            let receive = rings.receive.lock();
            let mut sges = [Sge::default(); SGES_MAX];
            let count = receive.ring.receive_at(position, &mut sges);
            let taken = Receive { wr_id: receive.ring.wr_id_at(position), sges: &sges[..count], pd: rings.pd };
            let filled = self.fill::<SGES_MAX>(session, rings, &taken, (&message, position), timestamps);
            drop(receive);
            self.receiver.take();
            self.receiver.commit();
            if filled.status == CompletionStatus::Success {
                *completion = filled;
                return;
            }
        }
        self.is_disputed = false;
    }

    /// Puts a message into the RECV at this position. → what completes that.
    #[inline(always)] // as `take` has always had it
    fn fill<const SGES: usize>(
        &mut self,
        session: &Session,
        rings: &Rings,
        receive: &Receive<'_>,
        (message, position): (&Staged, u32),
        timestamps: bool,
    ) -> Completion {
        let (opcode, status) = match message.written {
            None => (CompletionOpcode::Receive, self.deliver::<SGES>(session, receive, message)),
            // The RECV's buffers are not touched.
            Some(_) => (CompletionOpcode::ReceiveRdmaWithImmediate, CompletionStatus::Success),
        };
        Completion {
            work_request_id: receive.wr_id,
            status,
            opcode,
            flags: if status == CompletionStatus::Success { message.flags } else { CompletionFlags(0) },
            byte_count: message.written.unwrap_or(message.length),
            timestamp_ns: if timestamps { monotonic_ns() } else { 0 },
            immediate: message.immediate,
            qpn: rings.qpn,
            qp_cookie: rings.cookie,
            ring_position: position,
            ..Completion::default()
        }
    }

    /// Gives taken room back to the sender.
    #[inline]
    pub fn commit(&self) {
        self.receiver.commit();
    }

    #[inline]
    fn deliver<const SGES: usize>(
        &mut self,
        session: &Session,
        receive: &Receive<'_>,
        message: &Staged,
    ) -> CompletionStatus {
        let sges = &receive.sges[..receive.sges.len().min(SGES)];
        let count = sges.len();
        let room: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        if u64::from(message.length) > room {
            return CompletionStatus::LocalLengthError;
        }
        // Nothing is deregistered until the bytes are copied.
        let regions = session.regions.hold();
        let mut ranges = [OwnRange::default(); SGES];
        let mut left = message.length;
        for (range, sge) in ranges.iter_mut().zip(sges) {
            let piece = Sge { length: sge.length.min(left), ..*sge };
            if piece.length == 0 {
                continue;
            }
            match regions.resolve(&mut self.keys, &piece, receive.pd, Access::LOCAL_WRITE) {
                Some(found) => *range = found,
                None => return CompletionStatus::LocalProtectionError,
            }
            left -= piece.length;
        }
        self.receiver.copy_out(self.own, message, ranges[..count].iter().copied());
        CompletionStatus::Success
    }
}

/// A RECV could not be filled: the queue pair goes to ERROR, as the router would have it.
#[cold]
fn fail(session: &Session, rings: &Rings) {
    let attributes = QpAttributes { state: QpState::Error, ..QpAttributes::default() };
    let mask = QpAttributeMask(QpAttributeMask::STATE);
    let _ = session.call(&Request::ModifyQp { qp: rings.handle(), attributes, mask });
}

/// The receiving ends of direct rings. Under the lock of the receive CQ.
#[allow(clippy::large_enum_variant, reason = "the larger one is looked at for each message")]
pub(crate) enum Arrivals {
    /// Of an RC or UC queue pair.
    Peer(Incoming),
    Datagrams(Box<Datagrams>),
}

/// Calls the method of the same name.
macro_rules! each {
    ($self:ident, $arrivals:ident => $call:expr) => {
        match $self {
            Self::Peer($arrivals) => $call,
            Self::Datagrams($arrivals) => $call,
        }
    };
}

impl Arrivals {
    /// The RECV that is taken next.
    pub fn next(&self) -> u32 {
        each!(self, arrivals => arrivals.next())
    }

    /// Another ring may take its place.
    pub fn is_over(&self, rings: &Rings) -> bool {
        match self {
            Self::Peer(incoming) => incoming.is_over(rings),
            Self::Datagrams(_) => false,
        }
    }

    /// The router completed the RECV at this position, and did not flush it. False: it is to be put by.
    #[inline]
    pub fn passes_whole(&mut self, session: &Session, rings: &Rings, completion: &Completion) -> bool {
        match self {
            Self::Peer(incoming) => incoming.passes_whole(completion),
            Self::Datagrams(datagrams) => datagrams.passes_whole(&session.regions, &rings.receive_queue(), completion),
        }
    }

    /// Messages need no notification, because the rings are polled; or they do.
    #[inline]
    pub fn want_notifications(&mut self, wants: bool) {
        each!(self, arrivals => arrivals.want_notifications(wants));
    }

    /// An event was taken: it reports all messages that are there now.
    pub fn note_reported(&mut self) {
        each!(self, arrivals => arrivals.note_reported());
    }

    /// Whether a message can be taken, and there is one that no event reported. One that waits for a RECV rings this
    /// doorbell when one is posted.
    pub fn has_unreported(&self, rings: &Rings, doorbell: u32) -> bool {
        match self {
            Self::Peer(incoming) => incoming.has_unreported(doorbell),
            Self::Datagrams(datagrams) => datagrams.has_unreported(&rings.receive_queue(), doorbell),
        }
    }

    pub fn is_empty(&self) -> bool {
        each!(self, arrivals => arrivals.is_empty())
    }

    /// The rings are polled, or no longer.
    pub fn set_polled(&mut self, is_polled: bool) {
        if let Self::Peer(incoming) = self {
            incoming.set_polled(is_polled);
        }
    }

    #[inline]
    pub fn renew_promise(&mut self) {
        if let Self::Peer(incoming) = self {
            incoming.renew_promise();
        }
    }

    /// RECVs of an SRQ were posted after there had not been enough.
    pub fn note_receives(&mut self) {
        if let Self::Peer(incoming) = self {
            incoming.note_receives();
        }
    }

    pub fn is_idle_since(&self, polls: u64) -> bool {
        each!(self, arrivals => arrivals.is_idle_since(polls))
    }

    /// Takes the next message, if it is the RECVs' turn for one.
    #[inline]
    pub fn take(&mut self, session: &Session, rings: &Rings, look: Look) -> Option<Completion> {
        match self {
            Self::Peer(incoming) => incoming.take(session, rings, look),
            Self::Datagrams(datagrams) => take_datagram(datagrams, session, rings, look),
        }
    }

    /// Gives taken room back to the sender.
    #[inline]
    pub fn commit(&mut self) {
        each!(self, arrivals => arrivals.commit());
    }

    /// The router completed a RECV. `early` gets what comes before, and that RECV's completion, unless it is kept.
    pub fn put_by(
        &mut self,
        session: &Session,
        rings: &Rings,
        completion: &Completion,
        look: Look,
        mut early: impl FnMut(Completion),
    ) {
        let position = completion.ring_position;
        let is_flushed = completion.status == CompletionStatus::WorkRequestFlushed;
        match self {
            Self::Peer(incoming) => put_by_peer(incoming, session, rings, completion, look, early),
            // This RECV has completed already: no honest router says so.
            Self::Datagrams(datagrams) if datagrams.passed(position) => {}
            Self::Datagrams(datagrams) if is_flushed => {
                datagrams.end();
                datagrams.resume_after(position);
                early(*completion);
            }
            Self::Datagrams(datagrams) => {
                let (regions, queue) = (&session.regions, rings.receive_queue());
                early(match datagrams.passes_whole(regions, &queue, completion) {
                    true => *completion,
                    false => datagrams.reorder(regions, &queue, completion, look.timestamps),
                });
            }
        }
    }
}

#[inline(never)] // beside the peer's
fn take_datagram(datagrams: &mut Datagrams, session: &Session, rings: &Rings, look: Look) -> Option<Completion> {
    let taken = datagrams.take(&session.regions, &rings.receive_queue(), look);
    if taken.is_none()
        && datagrams.is_cut_short()
        && let Some(doorbell) = look.armed
    {
        session.ring(doorbell);
    }
    taken
}

fn put_by_peer(
    incoming: &mut Incoming,
    session: &Session,
    rings: &Rings,
    completion: &Completion,
    look: Look,
    mut early: impl FnMut(Completion),
) {
    let (mut completion, position) = (*completion, completion.ring_position);
    if !incoming.passes(position) {
        if incoming.passed(position) {
            // This RECV has completed already: no honest router says so.
            return;
        }
        while let Some(older) = incoming.take(session, rings, look) {
            early(older);
            if incoming.passes(position) {
                break;
            }
        }
        incoming.commit();
        if !incoming.passed(position) {
            if incoming.keeps(&completion) {
                return;
            }
            // The peer says of its messages what is not so. This one is here.
            incoming.resume_after(position);
        }
    }
    if completion.status == CompletionStatus::WorkRequestFlushed {
        incoming.outlive_flush(session, rings, &mut completion, look.timestamps);
    }
    early(completion);
}
