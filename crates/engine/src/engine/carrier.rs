//! Messages that go by a carrier instead of the wire; see [`crate::Carrier`].
use crate::in_flight::InFlightId;
use crate::{
    Admission, Carried, CarriedHead, CarrierState, Engine, Environment, HostId, MemorySide, QpId, Span, Token,
};
use alloc::vec::Vec;
use freeflow_verbs::{Instant, QpType};

impl Engine {
    // ---- which way

    /// Offers requests of an RC QP to the carrier from now on, as soon as all that went by the wire
    /// is acknowledged. False: the QP is not there, or runs no packet transport.
    pub fn use_carrier(&mut self, id: QpId) -> bool {
        let Some(qp) = self.completer_mut().qps.get_mut(id) else { return false };
        let Some(wire) = qp.wire.as_mut().filter(|_| qp.service == QpType::Rc) else { return false };
        wire.carriage.get_or_insert_default().is_wanted = true;
        self.push_ready(id);
        true
    }

    /// Requests go by the wire from now on, as soon as the carrier has none of the QP's any more.
    pub fn use_wire(&mut self, id: QpId) {
        let qp = self.completer_mut().qps.get_mut(id);
        if let Some(carriage) = qp.and_then(|qp| qp.wire.as_mut()).and_then(|wire| wire.carriage.as_mut()) {
            carriage.is_wanted = false;
            self.push_ready(id);
        }
    }

    /// Which way the requests of a QP take; `None` if it runs no packet transport.
    pub fn carrier_state(&self, id: QpId) -> Option<CarrierState> {
        let wire = self.completer().qps.get(id)?.wire.as_ref()?;
        Some(wire.carrier_state())
    }

    // ---- requester

    /// The carrier takes messages of a QP again, after [`crate::CarryOutcome::Later`].
    pub fn handle_carrier_ready(&mut self, id: QpId) {
        if self.completer().qps.get(id).is_some() {
            self.push_ready(id);
        }
    }

    /// The result of a message that was [`crate::CarryOutcome::Taken`]. A token that is no longer
    /// awaited is ignored.
    pub fn handle_carried<E: Environment>(&mut self, env: &mut E, now: Instant, token: Token, carried: Carried) {
        self.completer_mut().handle_carried(env, now, token, carried);
    }

    // ---- responder

    /// A carrier has brought a message from a QP of that host, whose router is trusted to have let
    /// it out. Appends the memory that the message is written to, or (READ) read from: none unless
    /// it is admitted.
    pub fn admit_carried<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        from: HostId,
        head: &CarriedHead,
        spans: &mut Vec<Span>,
    ) -> Admission {
        self.requester.responder.admit_carried(env, now, from, head, spans)
    }

    /// The bytes of an admitted message are where they belong, or the memory of one side is not
    /// there; what the requester's engine gets.
    pub fn handle_landed<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        token: Token,
        result: Result<(), MemorySide>,
    ) -> Carried {
        let operation = InFlightId::from_token(token);
        let (id, carried) = self.requester.responder.handle_landed(env, now, operation, result);
        if let Some(id) = id {
            self.push_ready(id);
            self.resume_parked(env, now, id);
        }
        carried
    }
}
