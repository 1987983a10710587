//! Acknowledgements that wait for what the program answers, so that both go out together; when one waits is decided by
//! `transport::habit`.
//!
//! Invariant: an acknowledgement that waits goes out: behind the QP's next burst, at the end of its wait, or before the
//! QP is reset, goes, or has been in ERROR for a turn. For what it tells of has been executed, and a requester that
//! never heard of it would fail. Only policy silences a QP that owes one.
//!
//! Invariant: after a batch of datagrams whoever stands first in `acks_waiting` still waits, unless its QP has ended.
use crate::responder::Responder;
use crate::transport::answers::AckWait;
use crate::transport::habit::ANSWER_WAIT;
use crate::transport::peers::PeerGate;
use crate::transport::responder::Phase;
use crate::{Environment, QpId};
use freeflow_verbs::{Instant, QpState};

impl Responder {
    /// Whether what is owed after a batch of datagrams waits from now on.
    pub(crate) fn begin_wait(&mut self, now: Instant, id: QpId) -> bool {
        let receives = self.qp(id).receives();
        let wire = self.wire_mut(id);
        let expected = wire.responder.habit.expects_answer(now);
        let may_wait = receives && wire.is_to_router && wire.gate == PeerGate::Open;
        if !expected || !may_wait || !wire.responder.answers.may_wait() {
            return false;
        }
        let until = now + ANSWER_WAIT;
        wire.responder.answers.wait = AckWait::Until(until);
        self.acks_waiting.push_back((until, id));
        true
    }

    /// When the first wait ends.
    pub(crate) fn acks_due(&self) -> Option<Instant> {
        self.acks_waiting.front().map(|&(until, _)| until)
    }

    /// A run of the QP is over. If it sent what its acknowledgement waits for, that goes out behind it.
    #[inline]
    pub(crate) fn answered<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let Some(wire) = self.completer.qps.get(id).and_then(|qp| qp.wire.as_ref()) else { return };
        if wire.responder.answers.waits_until().is_some() && wire.responder.habit.has_answered() {
            self.completer.tally(id, |counters| counters.acks_with_answers += 1);
            self.end_wait(env, id);
        }
    }

    /// Ends the waits that are over.
    pub(crate) fn expire_waits<E: Environment>(&mut self, env: &mut E, now: Instant) {
        while let Some(&(until, id)) = self.acks_waiting.front()
            && until <= now
        {
            self.acks_waiting.pop_front();
            if self.waits_until(id) == Some(until) {
                self.wire_mut(id).responder.habit.give_up();
                self.end_wait(env, id);
            }
        }
    }

    /// The acknowledgement goes out, if one waits.
    pub(crate) fn end_wait<E: Environment>(&mut self, env: &mut E, id: QpId) {
        let qp = self.qp_mut(id);
        let is_in_error = qp.state() == QpState::Error;
        let Some(wire) = qp.wire.as_mut().filter(|wire| wire.responder.answers.waits_until().is_some()) else {
            return;
        };
        wire.responder.answers.wait = AckWait::Over;
        if is_in_error {
            // These are its last words: answers that bring something are not among them.
            wire.responder.answers.queue.clear();
            wire.responder.phase = Phase::Closing;
        }
        // Not past answers to requests that came again.
        let is_next = wire.responder.answers.queue.is_empty();
        self.drop_ended();
        if is_next { self.answer_now(env, id) } else { self.push_ready(id) }
    }

    /// The QP says nothing any more.
    pub(crate) fn silence(&mut self, id: QpId) {
        if let Some(wire) = &mut self.qp_mut(id).wire
            && wire.responder.answers.waits_until().is_some()
        {
            wire.responder.answers.clear_verdict();
            self.drop_ended();
        }
    }

    fn waits_until(&self, id: QpId) -> Option<Instant> {
        self.completer.qps.get(id)?.wire.as_ref()?.responder.answers.waits_until()
    }

    /// After this the first in `acks_waiting` still waits.
    pub(crate) fn drop_ended(&mut self) {
        while let Some(&(until, id)) = self.acks_waiting.front()
            && self.waits_until(id) != Some(until)
        {
            self.acks_waiting.pop_front();
        }
    }
}
