//! Requesters that wait, for a RECV or for another requester, and what wakes them.
use crate::completer::Completer;
use crate::limits::RNR_GRACE_STEPS;
use crate::qp::SendPhase;
use crate::{Environment, EventTarget, QpId, ReceiveQueueId, SrqId};
use freeflow_verbs::{AsyncEventKind, QpState};

impl Completer {
    /// Lets a waiting requester try again.
    pub(crate) fn wake(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id)
            && qp.send.phase == SendPhase::Waiting
        {
            qp.send.offer_again();
            self.push_ready(id);
        }
    }

    /// Lets the UD senders that found this receiver busy try again.
    pub(crate) fn wake_waiters(&mut self, id: QpId) {
        if !self.qp(id).receive.datagrams.is_empty() {
            self.push_ready(id);
        }
        let mut waiters = core::mem::take(&mut self.qp_mut(id).receive.waiters);
        for waiter in waiters.drain(..) {
            self.wake(waiter);
        }
        self.qp_mut(id).receive.waiters = waiters;
    }

    /// Notes that a sender waits for a RECV in this queue.
    pub(crate) fn wait_for(&mut self, id: QpId, queue: ReceiveQueueId) {
        self.qp_mut(id).send.waits_for = Some(queue);
        if let ReceiveQueueId::Srq(srq) = queue
            && let Some(srq) = self.srqs.get_mut(srq)
        {
            srq.waiters.push(id);
        }
    }

    /// The sender waits for no RECV any more; the last one stops the doorbell of the queue.
    #[inline]
    pub(crate) fn stop_waiting<E: Environment>(&mut self, env: &mut E, id: QpId) {
        if let Some(queue) = self.qp_mut(id).send.waits_for.take() {
            self.leave_waiters(env, id, queue);
        }
    }

    #[cold]
    fn leave_waiters<E: Environment>(&mut self, env: &mut E, id: QpId, queue: ReceiveQueueId) {
        let still_wanted = match queue {
            ReceiveQueueId::Srq(srq) => self.srqs.get_mut(srq).is_some_and(|srq| {
                srq.waiters.retain(|waiter| *waiter != id);
                !srq.waiters.is_empty()
            }),
            ReceiveQueueId::Qp(owner) => self.qps.get(owner).is_some_and(|owner| owner.state() == QpState::Error),
        };
        if !still_wanted {
            self.set_wanted(env, queue, false);
        }
    }

    pub(crate) fn is_wanted(&self, queue: ReceiveQueueId) -> bool {
        match queue {
            ReceiveQueueId::Qp(id) => self.qps.get(id).is_some_and(|qp| qp.receive.wanted),
            ReceiveQueueId::Srq(id) => self.srqs.get(id).is_some_and(|srq| srq.wanted),
        }
    }

    pub(crate) fn set_wanted<E: Environment>(&mut self, env: &mut E, queue: ReceiveQueueId, wanted: bool) {
        let wanted_before = match queue {
            ReceiveQueueId::Qp(id) => self.qps.get_mut(id).map(|qp| &mut qp.receive.wanted),
            ReceiveQueueId::Srq(id) => self.srqs.get_mut(id).map(|srq| &mut srq.wanted),
        };
        if let Some(wanted_before) = wanted_before
            && *wanted_before != wanted
        {
            *wanted_before = wanted;
            env.want_receives(queue, wanted);
        }
    }

    /// SRQ_LIMIT_REACHED, once for each arming (IBTA 10.2.9.2).
    pub(crate) fn check_srq_limit<E: Environment>(&mut self, env: &mut E, id: SrqId) {
        let Some(srq) = self.srqs.get_mut(id) else { return };
        if srq.attributes.limit > 0 && env.srq_pending(id) < srq.attributes.limit {
            srq.attributes.limit = 0;
            env.raise(AsyncEventKind::SrqLimitReached, EventTarget::Srq(id));
        }
    }

    /// Progress was made: both retry counts start afresh.
    pub(crate) fn renew_retries(&mut self, id: QpId) {
        let qp = self.qp_mut(id);
        qp.send.retries_left = qp.attributes.retry_count;
        qp.send.rnr_retries_left = qp.attributes.rnr_retry;
        qp.send.grace_steps_left = RNR_GRACE_STEPS;
    }
}
