//! Results of operations in flight, and RECVs that somebody waits for.
use crate::fault::Fault;
use crate::in_flight::{InFlightId, InFlightKind};
use crate::qp::SendPhase;
use crate::transport::wire::WireOperation;
use crate::{Engine, Environment, MemorySide, Progress, QpId, ReceiveQueueId, Syndrome, Token};
use freeflow_verbs::{CompletionStatus, Instant, QpState};

impl Engine {
    // ---- results from elsewhere

    /// The QP of an operation in flight: of the request, or, of packets, at this end.
    pub fn qp_of(&self, token: Token) -> Option<QpId> {
        self.completer().in_flight.get(InFlightId::from_token(token)).map(|operation| operation.requester)
    }

    /// The result of a copy that was `Pending`. A token that is no longer awaited is ignored.
    pub fn handle_copied<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        token: Token,
        result: Result<(), MemorySide>,
    ) {
        let operation = InFlightId::from_token(token);
        let kind = match self.completer().in_flight.get(operation).map(|operation| operation.kind) {
            None | Some(InFlightKind::Atomic) => return,
            Some(InFlightKind::Wire(WireOperation::Carried | WireOperation::Landing)) => return,
            Some(InFlightKind::Wire(kind)) => return self.handle_wire_copied(env, now, operation, kind, result),
            Some(kind) => kind,
        };
        let Some((id, responder)) = self.requester.finish_in_flight(env, now, operation) else { return };
        match (kind, result, responder) {
            (InFlightKind::Chunk { bytes }, Ok(()), Some(responder)) => {
                self.requester.chunk_done(env, now, id, responder, bytes)
            }
            (InFlightKind::Chunk { .. }, Err(side), Some(responder)) => {
                self.requester.copy_failed(env, now, id, responder, side)
            }
            (_, Ok(()), _) => self.completer_mut().succeed_send(env, now, id),
            (_, Err(_), _) => {
                self.completer_mut().fail_send(
                    env,
                    now,
                    id,
                    Fault::new(CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone),
                );
            }
        }
    }

    /// The result of an atomic operation that was `Pending`: the value before it, or that the
    /// memory is not there.
    #[allow(clippy::result_unit_err)]
    pub fn handle_atomic_done<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        token: Token,
        result: Result<u64, ()>,
    ) {
        let operation = InFlightId::from_token(token);
        match self.completer().in_flight.get(operation).map(|operation| operation.kind) {
            Some(InFlightKind::Atomic) => {}
            Some(InFlightKind::Wire(WireOperation::Atomic)) => {
                return self.handle_wire_atomic(env, now, operation, result);
            }
            _ => return,
        }
        match (self.requester.finish_in_flight(env, now, operation), result) {
            (Some((id, responder)), Ok(value)) => {
                if let Some(responder) = responder {
                    self.completer_mut().count_received(id, responder);
                }
                self.qp_mut(id).send.phase = SendPhase::Original(value);
            }
            (Some((id, Some(responder))), Err(())) => self.requester.atomic_failed(env, now, id, responder),
            _ => {}
        }
    }

    // ---- waiting and waking

    /// A RECV was posted to a queue for which `want_receives` stands: flushes it (QP in error) or
    /// wakes waiting senders.
    pub fn handle_receive_posted<E: Environment>(&mut self, env: &mut E, now: Instant, queue: ReceiveQueueId) {
        match queue {
            ReceiveQueueId::Qp(id) => {
                let Some(qp) = self.completer().qps.get(id) else { return };
                if qp.state() == QpState::Error {
                    if self.completer_mut().flush(env, now, id) == Progress::More {
                        self.push_ready(id);
                    }
                    return;
                }
                let sender = self
                    .requester
                    .responder
                    .qpns
                    .get(qp.attributes.dest_qpn)
                    .and_then(|index| self.completer().qps.at(index));
                let sender = sender.map(|(sender, _)| sender);
                self.completer_mut().set_wanted(env, queue, false);
                self.requester.responder.wake_datagrams(id);
                if let Some(sender) = sender
                    && self.qp(sender).send.waits_for == Some(queue)
                {
                    self.completer_mut().stop_waiting(env, sender);
                    self.completer_mut().wake(sender);
                }
            }
            ReceiveQueueId::Srq(id) => {
                let Some(srq) = self.completer_mut().srqs.get_mut(id) else { return };
                let mut waiters = core::mem::take(&mut srq.waiters);
                self.completer_mut().set_wanted(env, queue, false);
                for sender in waiters.drain(..) {
                    if let Some(qp) = self.completer_mut().qps.get_mut(sender) {
                        if qp.send.waits_for == Some(queue) {
                            qp.send.waits_for = None;
                            self.completer_mut().wake(sender);
                        }
                        self.requester.responder.wake_datagrams(sender);
                    }
                }
                if let Some(srq) = self.completer_mut().srqs.get_mut(id) {
                    srq.waiters = waiters;
                }
            }
        }
    }
}
