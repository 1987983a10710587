//! Messages that the peer of an RC queue pair puts into its direct ring: they take the RECVs in
//! order, together with those that the router delivers.
//!
//! Invariant: completions of a receive queue are handed on in the order of its positions, which are
//! the numbers of the messages, whichever way they came.
use crate::direct_ring::map_direct_ring;
use crate::lock;
use crate::regions::Cache;
use crate::rings::{ReceiveSide, Rings};
use crate::session::Session;
use freeflow_protocol::library::{Handle, Request};
use freeflow_shm::layout::direct_ring;
use freeflow_shm::{DirectRingReceiver, OwnMemory, OwnRange, Staged, monotonic_ns};
use freeflow_verbs::{
    Access, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, QpAttributeMask, QpAttributes, QpState,
    Sge,
};

/// Entries of a RECV that takes messages by a direct ring.
pub(crate) const SGES_MAX: usize = 4;

/// Messages of a direct ring that are still taken once its end is noticed, however long that takes:
/// their senders saw success. A full ring, and as many again for what a sender puts there in that
/// moment. More than that comes only from a peer that goes on regardless, and would for ever.
const CLOSE_DRAIN_COUNT_MAX: u32 = 2 * direct_ring::DESCRIPTOR_COUNT;

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
}

/// The messages that are still taken of a closed direct ring.
struct CloseDrain {
    left: u32,
}

impl Default for CloseDrain {
    fn default() -> Self {
        Self { left: CLOSE_DRAIN_COUNT_MAX }
    }
}

impl CloseDrain {
    #[cold]
    fn takes_another(&mut self) -> bool {
        let takes = self.left > 0;
        self.left = self.left.saturating_sub(1);
        takes
    }
}

impl Incoming {
    /// Accepts the direct ring that the peer has opened.
    pub fn accept(session: &Session, rings: &Rings, qp: Handle, own: OwnMemory) -> Option<Self> {
        let (reply, descriptors) = session.call(&Request::AcceptDirectRing { qp }).ok()?;
        let (segment, credit_count) = map_direct_ring(&reply, &descriptors)?;
        let (receiver, credits) = DirectRingReceiver::new(segment, credit_count);
        let direct_rings_closed = lock(&rings.receive).ring.direct_rings_closed();
        let next = rings.begin_credits(session, credits);
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
        })
    }

    /// The RECV that is taken next.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Another one may take its place: the router closed it, and nothing is left in it.
    pub fn is_over(&self, rings: &Rings) -> bool {
        let is_closed = lock(&rings.receive).ring.direct_rings_closed() != self.direct_rings_closed;
        is_closed && self.is_empty() || self.is_broken
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

    /// Whether a message can be taken.
    pub fn is_ready(&self) -> bool {
        !self.is_broken && self.receiver.peek().is_some_and(|message| message.msn == self.next)
    }

    /// Nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.is_broken || self.receiver.peek().is_none()
    }

    pub fn is_idle_since(&self, polls: u64) -> bool {
        self.active_at < polls
    }

    /// Takes the next message, if it is the RECVs' turn for one.
    #[inline]
    pub fn take(&mut self, session: &Session, rings: &Rings, (polls, timestamps): (u64, bool)) -> Option<Completion> {
        let message = self.receiver.peek()?;
        if message.msn != self.next || self.is_broken {
            return None;
        }
        self.active_at = polls;
        let receive = lock(&rings.receive);
        if receive.ring.direct_rings_closed() != self.direct_rings_closed && !self.close_drain.takes_another() {
            self.is_broken = true;
            return None;
        }
        if !receive.ring.claim_receive(self.next) {
            // The router has it: to flush it, or because the peer lies.
            (self.is_broken, self.is_disputed) = (true, true);
            return None;
        }
        let completion = self.fill(session, rings, &receive, (&message, self.next), timestamps);
        self.next = self.next.wrapping_add(1);
        receive.ring.set_claimed(self.next);
        drop(receive);
        self.receiver.take(&message);
        if completion.status != CompletionStatus::Success {
            self.is_broken = true;
            fail(session, rings);
        }
        Some(completion)
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
            let receive = lock(&rings.receive);
            let filled = self.fill(session, rings, &receive, (&message, position), timestamps);
            drop(receive);
            self.receiver.take(&message);
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
    fn fill(
        &mut self,
        session: &Session,
        rings: &Rings,
        receive: &ReceiveSide,
        (message, position): (&Staged, u32),
        timestamps: bool,
    ) -> Completion {
        let (opcode, status) = match message.written {
            None => (CompletionOpcode::Receive, self.deliver(session, rings, receive, (message, position))),
            // The RECV's buffers are not touched.
            Some(_) => (CompletionOpcode::ReceiveRdmaWithImmediate, CompletionStatus::Success),
        };
        Completion {
            work_request_id: receive.ring.wr_id_at(position),
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
    fn deliver(
        &mut self,
        session: &Session,
        rings: &Rings,
        receive: &ReceiveSide,
        (message, position): (&Staged, u32),
    ) -> CompletionStatus {
        let mut sges = [Sge::default(); SGES_MAX];
        let count = receive.ring.receive_at(position, &mut sges);
        let room: u64 = sges[..count].iter().map(|sge| u64::from(sge.length)).sum();
        if u64::from(message.length) > room {
            return CompletionStatus::LocalLengthError;
        }
        // Nothing is deregistered until the bytes are copied.
        let regions = session.regions.hold();
        let mut ranges = [OwnRange::default(); SGES_MAX];
        let mut left = message.length;
        for (range, sge) in ranges.iter_mut().zip(&sges[..count]) {
            let piece = Sge { length: sge.length.min(left), ..*sge };
            if piece.length == 0 {
                continue;
            }
            match regions.resolve(&mut self.keys, &piece, rings.pd, Access::LOCAL_WRITE) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_direct_ring_gives_what_it_holds_and_not_for_ever() {
        let mut close_drain = CloseDrain::default();
        assert!((0..=direct_ring::DESCRIPTOR_COUNT).all(|_| close_drain.takes_another()));
        let beyond = (0..10 * CLOSE_DRAIN_COUNT_MAX).filter(|_| close_drain.takes_another()).count();
        assert!(beyond < CLOSE_DRAIN_COUNT_MAX as usize && !close_drain.takes_another());
    }
}
