//! Limits of rate around a run of a QP: what it may use, and what it is charged; see `schedule`.
//!
//! Counted is what leaves a vNIC: each message once, when it begins, and its payload piece by
//! piece, as it goes. So a long message is spread over the time that its bytes take. A READ or
//! atomic is charged to who asks, with what it brings, and to the vNIC whose memory it comes from.
//! Packets that are sent again are not charged, acknowledgements neither; what a local delivery
//! begins again is.
//!
//! Invariant: `QueuePair::used` is zero between runs, but for what went out while a datagram was
//! handled.
use crate::qp::SendPhase;
use crate::requester::Requester;
use crate::schedule::Scheduler;
use crate::turn::{Budget, Turn};
use crate::{Environment, Progress, QpId, Used};
use freeflow_verbs::{Instant, QpState};

/// A metered message moves in pieces of what is allowed, but not of less.
const CHUNK_BYTES_MIN: u64 = 4096;

impl Requester {
    // ---- a run

    /// The part of the budget that a QP may use; zero of everything if its limits have run out.
    #[inline]
    pub(crate) fn meter(&mut self, now: Instant, id: QpId, bytes: u64) -> Budget {
        match self.responder.completer.qps.get(id) {
            Some(qp) if self.responder.schedule.is_metered(qp.vnic) => self.metered_budget(now, id, bytes),
            _ => Budget::unmetered(bytes),
        }
    }

    #[cold]
    fn metered_budget(&mut self, now: Instant, id: QpId, bytes: u64) -> Budget {
        self.settle_used(id);
        let qp = self.qp(id);
        let vnic = qp.vnic;
        let budget = Budget::unmetered(bytes);
        // A QP that flushes sends nothing.
        let flushes = matches!(qp.state(), QpState::Error | QpState::SqError);
        let was_waiting = self.responder.schedule.is_waiting(id);
        if flushes {
            if was_waiting {
                self.responder.schedule.give_up(now, id);
            }
            return budget;
        }
        let Some(allowance) = self.responder.schedule.allowance(now, vnic, id) else {
            return Budget { bytes: 0, messages: 0, metered: true, answers: false, ..budget };
        };
        if was_waiting {
            self.excuse_limit(now, id);
        }
        let chunk_bytes = allowance.bytes.clamp(CHUNK_BYTES_MIN, budget.chunk_bytes);
        let bytes = bytes.min(allowance.bytes);
        Budget { bytes, chunk_bytes, messages: allowance.messages, metered: true, ..budget }
    }

    /// A run is over: charges it; whoever has more to send than it may waits.
    #[inline]
    pub(crate) fn end_run<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &Budget,
        (owes, sends): (Progress, Progress),
    ) -> (Progress, Progress) {
        self.settle_used(id);
        if budget.metered { self.end_metered(env, now, id, (owes, sends)) } else { (owes, sends) }
    }

    #[cold]
    fn end_metered<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        (owes, sends): (Progress, Progress),
    ) -> (Progress, Progress) {
        let Some(qp) = self.responder.completer.qps.get(id) else { return (owes, sends) };
        let (vnic, flushes) = (qp.vnic, matches!(qp.state(), QpState::Error | QpState::SqError));
        let wants_more = owes == Progress::More || sends == Progress::More;
        let (mut outcome, mut goes_on) = ((owes, sends), false);
        if wants_more && !flushes && self.responder.schedule.allowance(now, vnic, id).is_some() {
            // It uses up what is there before the next is let out.
            goes_on = true;
        } else if wants_more && !flushes {
            if owes != Progress::More && !self.has_something(env, now, id) {
                outcome = (owes, Progress::Idle);
            } else {
                self.responder.schedule.wait(now, vnic, id);
                goes_on = true;
                let held = |progress| if progress == Progress::More { Progress::Waiting } else { progress };
                outcome = (held(owes), held(sends));
            }
        }
        if !goes_on {
            self.responder.schedule.finish(now, vnic, id);
        }
        self.responder.wake_eligible();
        outcome
    }

    /// Whether there is a request to send: one that was begun, or one more in the ring, which is
    /// taken in hand.
    fn has_something<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) -> bool {
        let qp = self.qp(id);
        if qp.send.phase != SendPhase::Idle || self.has_unsent(id) {
            return true;
        }
        let fetched = match qp.wire.is_some() && qp.service.is_reliable() {
            true => self.fetch_for_wire(env, id),
            false => self.fetch(env, now, id),
        };
        matches!(fetched, Turn::Continue)
    }

    /// Charges the use of a QP since the last charge.
    #[inline]
    fn settle_used(&mut self, id: QpId) {
        if let Some(qp) = self.responder.completer.qps.get_mut(id)
            && qp.used != Used::default()
        {
            let used = core::mem::take(&mut qp.used);
            self.responder.schedule.charge(qp.vnic, id, &used);
        }
    }

    /// A message begins. False: the limit of messages has run out.
    #[inline]
    pub(crate) fn pay(&mut self, id: QpId, budget: &mut Budget) -> bool {
        let qp = self.qp_mut(id);
        if qp.send.paid || qp.send.request.opcode.is_local() {
            return true;
        }
        if budget.messages == 0 {
            return false;
        }
        budget.messages -= 1;
        qp.send.paid = true;
        qp.used.messages += 1;
        true
    }

    /// The same of a burst, with messages that begin again.
    #[inline]
    pub(crate) fn note_fresh(&mut self, id: QpId, (bytes, messages): (u32, u32)) {
        let used = &mut self.qp_mut(id).used;
        used.bytes += u64::from(bytes);
        used.messages += messages;
    }

    /// A READ or atomic within the host: whether it waits, since the vNIC that it reads from may
    /// send nothing now.
    pub(crate) fn reads_too_much(&mut self, now: Instant, id: QpId, responder: QpId) -> bool {
        let (vnic, home) = (self.qp(id).vnic, self.qp(responder).vnic);
        if home == vnic || !self.responder.schedule.is_metered(home) {
            return false;
        }
        self.responder.schedule.wait_for(now, (vnic, id), (home, responder))
    }

    /// Payload of a READ or atomic within the host leaves the responder, too.
    pub(crate) fn note_read(&mut self, id: QpId, responder: QpId, bytes: u64) {
        let (vnic, peer) = (self.qp(id).vnic, self.qp(responder).vnic);
        if vnic != peer && self.responder.schedule.is_metered(peer) {
            self.responder.schedule.charge(peer, responder, &Used { bytes, messages: 0 });
        }
    }

    // ---- time

    pub(crate) fn expire_limits(&mut self, now: Instant) {
        if self.responder.schedule.poll_timeout().is_some_and(|at| at <= now) {
            self.responder.schedule.handle_timeout(now);
            self.responder.wake_eligible();
        }
    }
}
