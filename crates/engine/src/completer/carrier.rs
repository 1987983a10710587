//! Completer of messages that went by a carrier: results come in any order, completions in posting
//! order.
use crate::completer::Completer;
use crate::fault::Fault;
use crate::in_flight::{InFlightId, InFlightKind};
use crate::qp::SendPhase;
use crate::transport::carrier::{CarriedRequest, CarryProgress};
use crate::transport::wire::WireOperation;
use crate::{Carried, CarryFailure, Environment, QpId, Syndrome, Token};
use freeflow_verbs::{CompletionStatus, Instant, QpState};

impl Completer {
    /// The result of a message that a carrier took. A stale name does nothing.
    pub(crate) fn handle_carried<E: Environment>(&mut self, env: &mut E, now: Instant, token: Token, carried: Carried) {
        let operation = InFlightId::from_token(token);
        let kind = self.in_flight.get(operation).map(|operation| operation.kind);
        if kind != Some(InFlightKind::Wire(WireOperation::Carried)) {
            return;
        }
        let Some(id) = self.complete_wire(operation, WireOperation::Carried) else { return };
        if let Some(carriage) = &mut self.wire_mut(id).carriage {
            carriage.note(token, carried);
        }
        self.renew_retries(id);
        self.complete_carried(env, now, id);
        // A turn may wait for this message.
        self.push_ready(id);
    }

    /// Completes messages, oldest first, as far as their results are there.
    fn complete_carried<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        while self.qp(id).state() != QpState::Error {
            let Some(oldest) = self.oldest_carried(id) else { break };
            match oldest.progress {
                CarryProgress::Executed => {
                    let Some(message) = self.remove_carried(id) else { return };
                    self.succeed_message(env, now, id, message.request, message.length);
                }
                CarryProgress::Failed(failure) => {
                    self.end_carried(env, now, id, failure.fault());
                    return self.enter_error(env, id);
                }
                CarryProgress::UnderWay(_) | CarryProgress::Returned => return,
            }
        }
        if self.wire(id).is_idle() && self.qp(id).send.phase == SendPhase::Idle {
            self.finish_drain(env, id);
        }
    }

    /// The QP does no more work: the carrier need not go on trying, which it would for ever with `rnr_retry` 7.
    pub(crate) fn withdraw_carried<E: Environment>(&self, env: &mut E, id: QpId) {
        let carriage = self.qp(id).wire.as_ref().and_then(|wire| wire.carriage.as_ref());
        if carriage.is_some_and(|carriage| !carriage.has_results()) {
            env.withdraw(id);
        }
    }

    fn oldest_carried(&self, id: QpId) -> Option<&CarriedRequest> {
        self.wire(id).carriage.as_ref()?.messages.front()
    }

    pub(crate) fn remove_carried(&mut self, id: QpId) -> Option<CarriedRequest> {
        self.wire_mut(id).carriage.as_mut()?.messages.pop_front()
    }

    /// The oldest message that the carrier had fails.
    pub(crate) fn end_carried<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, fault: Fault) {
        if let Some(message) = self.remove_carried(id) {
            self.fail_message(env, now, id, message.request, fault);
        }
    }
}

impl CarryFailure {
    fn fault(self) -> Fault {
        let (status, syndrome) = match self {
            Self::InvalidRequest => (CompletionStatus::RemoteInvalidRequest, Syndrome::NakReceived),
            Self::RemoteAccess => (CompletionStatus::RemoteAccessError, Syndrome::NakReceived),
            Self::RemoteOperational => (CompletionStatus::RemoteOperationError, Syndrome::NakReceived),
            Self::ReceiverNotReady => (CompletionStatus::RnrRetryExceeded, Syndrome::ReceiverNotReady),
            Self::LocalMemory => (CompletionStatus::LocalProtectionError, Syndrome::LocalMemoryGone),
        };
        Fault::new(status, syndrome)
    }
}
