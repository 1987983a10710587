//! The shared receive queue that an XRC message names.
use crate::arrival::{Arrival, Nak, Rejection};
use crate::completer::Completer;
use crate::fault::Fault;
use crate::qp::{Claim, QueuePair};
use crate::responder::Responder;
use crate::xrc::{DomainId, XrcQueue};
use crate::{Environment, QpId, SessionId, SrqId, Syndrome, XrcdId};
use freeflow_verbs::{CompletionStatus, Instant, QpType, VerbsError};

impl Completer {
    /// A copy into a RECV that the target QP has in hand begins: gives the SRQ.
    pub(crate) fn reserve_queue(&mut self, target: QpId) -> Option<SrqId> {
        let pair = self.qp(target);
        let id = pair.srq.filter(|_| pair.target.is_some())?;
        self.srqs.get_mut(id)?.xrc.as_mut()?.in_flight += 1;
        Some(id)
    }

    pub(crate) fn release_queue(&mut self, id: SrqId) {
        if let Some(queue) = self.srqs.get_mut(id).and_then(|srq| srq.xrc.as_mut()) {
            queue.in_flight -= 1;
        }
    }

    /// A QP forgets what it has in hand: a RECV of an SRQ goes back to its owner, who has no room
    /// for another until it hears of it, and may be another process; but not to `gone`, who asks
    /// for nothing any more.
    pub(crate) fn return_receive<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        gone: Option<SessionId>,
    ) {
        let pair = self.qp(id);
        let srq = pair.srq.and_then(|srq| self.srqs.get(srq));
        let awaited = srq.is_some_and(|srq| Some(srq.session) != gone);
        if awaited && pair.receive.claim != Claim::None {
            self.fail_receive(env, now, id, Fault::new(CompletionStatus::WorkRequestFlushed, Syndrome::Flushed));
        }
    }

    /// The SRQ of the message in hand, or of the last one, if it is still there.
    pub(crate) fn live_queue(&self, pair: &QueuePair) -> Option<&XrcQueue> {
        let queue = self.srqs.get(pair.srq?)?.xrc.as_ref()?;
        (queue.number != 0).then_some(queue)
    }

    /// Whether the SRQ of the message in hand is still there; always so for what is no target QP.
    pub(crate) fn queue_is_there(&self, pair: &QueuePair) -> bool {
        pair.service != QpType::XrcReceive || self.live_queue(pair).is_some()
    }
}

impl Responder {
    pub(crate) fn domain_of(&self, session: SessionId, xrcd: XrcdId) -> Result<DomainId, VerbsError> {
        Ok(self.xrc.xrcds.owned(session, xrcd)?.domain)
    }

    // ---- requests

    /// Makes the SRQ that the request names the target QP's. A number that is unknown or of another
    /// domain is an invalid request (A14: invalid XRCETH).
    pub(crate) fn name_queue<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        arrival: &Arrival,
    ) -> Result<(), Rejection> {
        let responder = arrival.responder;
        let Some(srq) = self.find_queue(responder, arrival.srqn) else {
            return Err(self.refuse(env, responder, Nak::InvalidRequest(Syndrome::SharedQueue)));
        };
        if self.qp(responder).srq != Some(srq) {
            // A RECV left over from a message that never ended; the queue it came from does not get
            // it back.
            if self.qp(responder).receive.claim == Claim::Held {
                self.completer.fail_receive(
                    env,
                    now,
                    responder,
                    Fault::new(CompletionStatus::WorkRequestFlushed, Syndrome::Flushed),
                );
            }
            self.qp_mut(responder).srq = Some(srq);
        }
        Ok(())
    }

    fn find_queue(&self, target: QpId, number: u32) -> Option<SrqId> {
        let domain = self.qp(target).target.as_ref()?.domain;
        let (id, srq) = self.completer.srqs.at(self.xrc.numbers.get(number)?)?;
        (srq.xrc.as_ref()?.domain == domain).then_some(id)
    }
}
