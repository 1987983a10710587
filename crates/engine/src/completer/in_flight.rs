//! Operations in flight: submitted to the environment, answered with `Pending`, so that nothing
//! that they touch goes away before they have completed.
//!
//! Invariant: `MemoryRegion::in_flight`, `Window::in_flight`, `Sender::in_flight` and
//! `Receiver::in_flight` count exactly the operations in the table. A process that dies takes what
//! is its own out of its operations; what is others' waits.
use crate::completer::Completer;
use crate::in_flight::{InFlight, InFlightId, InFlightKind};
use crate::qp::Teardown;
use crate::transport::wire::{Wire, WireOperation};
use crate::{MwId, QpId, SessionId, Span, Token};
use alloc::vec::Vec;
use freeflow_verbs::QpState;

impl Completer {
    /// Whether anything of this session takes part: a QP, a window, or memory that is read or
    /// written. (Not every region is that of a QP's own session: a PD may be shared, a target QP
    /// fills RECVs of its whole domain.)
    pub(crate) fn operation_touches(&self, operation: &InFlight, session: SessionId) -> bool {
        let owner = |region: &u32| self.keys.regions.at(*region).map(|(_, region)| region.session);
        self.operation_is_of(operation, session)
            || operation.regions().iter().any(|region| owner(region) == Some(session))
    }

    /// Whether it is between QPs of which one is this session's, or goes through a window of it.
    fn operation_is_of(&self, operation: &InFlight, session: SessionId) -> bool {
        let window = operation.window.and_then(|mw| self.keys.windows.get(mw));
        let is_its = |qp: QpId| self.qps.get(qp).is_some_and(|qp| qp.session == session);
        [Some(operation.requester), operation.responder].into_iter().flatten().any(is_its)
            || window.is_some_and(|window| window.session == session)
    }

    /// Notes that the operation with the token just given out goes on elsewhere. The spans it
    /// touches are in `self.from` and `self.to`.
    pub(crate) fn submit(&mut self, requester: QpId, responder: Option<QpId>, kind: InFlightKind) {
        let request = &self.qp(requester).send.request;
        let request_is_send = request.opcode.is_send();
        let remote = (responder.is_some() && !request.opcode.is_send()).then_some(request.rkey);
        let srq = responder.filter(|_| request_is_send).and_then(|responder| self.reserve_queue(responder));
        debug_assert!(self.qp(requester).send.in_flight.is_none(), "a requester has one operation in flight at most");
        let id = self.start(InFlight::new(requester, responder, kind, srq), remote);
        self.qp_mut(requester).send.in_flight = Some(id);
        if let Some(responder) = responder {
            self.qp_mut(responder).receive.in_flight += 1;
        }
    }

    /// The same for the packet transport; see [`Completer::submit_wire`].
    pub(crate) fn submit_for(&mut self, id: QpId, kind: InFlightKind, rkey: Option<u32>) {
        let fills = rkey.is_none() && matches!(kind, InFlightKind::Wire(WireOperation::Payload));
        let srq = Some(id).filter(|_| fills).and_then(|target| self.reserve_queue(target));
        self.start(InFlight::new(id, None, kind, srq), rkey);
    }

    fn start(&mut self, mut operation: InFlight, rkey: Option<u32>) -> InFlightId {
        for span in self.from.iter().chain(&self.to) {
            let index = span.region.index();
            operation.regions[usize::from(operation.region_count)] = index;
            operation.region_count += 1;
            self.keys.regions.at_mut(index).expect("a span's region is live").in_flight += 1;
        }
        operation.window = rkey.and_then(|key| self.reserve_window(key));
        self.in_flight.insert(operation)
    }

    /// A session ends: nothing of it takes part in an operation any more. Memory and QPs of others
    /// do until it has completed, since it may still write there; so a RECV that a message of this
    /// session claimed stays claimed.
    pub(crate) fn leave_in_flight(&mut self, session: SessionId) {
        let touched = self.in_flight.iter().filter(|(_, operation)| self.operation_touches(operation, session));
        let touched: Vec<InFlightId> = touched.map(|(id, _)| id).collect();
        for id in touched {
            let Some(mut operation) = self.in_flight.get(id).copied() else { continue };
            let count = core::mem::take(&mut operation.region_count);
            for at in 0..usize::from(count) {
                let index = operation.regions[at];
                let region = self.keys.regions.at_mut(index).expect("an operation keeps its regions");
                if region.session == session {
                    region.in_flight -= 1;
                } else {
                    operation.regions[usize::from(operation.region_count)] = index;
                    operation.region_count += 1;
                }
            }
            let is_its = |mw: &MwId| self.keys.windows.get(*mw).is_some_and(|window| window.session == session);
            if let Some(window) = operation.window.take_if(|mw| is_its(mw)) {
                self.release_window_use(window);
            }
            if let Some(requester) = self.qps.get_mut(operation.requester).filter(|qp| qp.session == session) {
                requester.send.responder = None;
            }
            if let Some(entry) = self.in_flight.get_mut(id) {
                *entry = operation;
            }
        }
    }

    /// Takes an operation out of the table; its token is stale from now on.
    pub(crate) fn complete_in_flight(&mut self, id: InFlightId) -> Option<InFlight> {
        let operation = self.in_flight.remove(id)?;
        for &region in operation.regions() {
            self.keys.regions.at_mut(region).expect("an operation keeps its regions").in_flight -= 1;
        }
        if let Some(requester) = self.qps.get_mut(operation.requester)
            && !matches!(operation.kind, InFlightKind::Wire(_))
        {
            requester.send.in_flight = None;
        }
        if let Some(responder) = operation.responder.and_then(|responder| self.qps.get_mut(responder)) {
            responder.receive.in_flight -= 1;
        }
        if let Some(window) = operation.window {
            self.release_window_use(window);
        }
        if let Some(srq) = operation.srq {
            self.release_queue(srq);
        }
        Some(operation)
    }

    /// Token for the operation that is about to be handed to the environment.
    pub(crate) fn next_token(&self) -> Token {
        self.in_flight.vacant().token()
    }

    /// Fills the list that `submit` reads with the one span of an atomic.
    pub(crate) fn note_atomic_span(&mut self, at: Span) {
        self.from.clear();
        self.to.clear();
        self.to.push(at);
    }

    // ---- operations in flight

    /// Notes that the operation with the token just given out goes on elsewhere, for this QP.
    /// `self.from` and `self.to` hold the spans that it touches; `rkey`: the key that a peer named,
    /// if any.
    pub(crate) fn submit_wire(&mut self, id: QpId, kind: WireOperation, rkey: Option<u32>) {
        self.submit_for(id, InFlightKind::Wire(kind), rkey);
        let qp = self.qp_mut(id);
        // A UD QP says so by its claim.
        if kind.writes()
            && let Some(wire) = &mut qp.wire
        {
            wire.writing = true;
        }
        if kind.is_requesters() {
            qp.send.wire_in_flight += 1;
        } else {
            qp.receive.in_flight += 1;
        }
    }

    /// Completes an operation of the packet transport; gives the QP if it goes on with what came of
    /// it.
    pub(crate) fn complete_wire(&mut self, operation: InFlightId, kind: WireOperation) -> Option<QpId> {
        let id = self.complete_in_flight(operation)?.requester;
        let qp = self.qps.get_mut(id)?;
        if kind.is_requesters() {
            qp.send.wire_in_flight -= 1;
        } else {
            qp.receive.in_flight -= 1;
        }
        let says_more = |wire: &Wire| kind == WireOperation::Response && wire.responder.is_closing();
        let lives = qp.state() != QpState::Error || qp.wire.as_deref().is_some_and(says_more);
        let goes_on = qp.teardown == Teardown::None && lives;
        if let Some(wire) = qp.wire.as_mut() {
            wire.writing &= !kind.writes();
            if !goes_on {
                wire.parked.clear();
                wire.responder.kept.clear();
                (wire.parked_bytes, wire.landing_bytes) = (0, 0);
            }
        }
        if !goes_on {
            self.let_go(id, usize::MAX);
            self.push_ready(id);
            return None;
        }
        if kind.writes() && self.qp(id).wire.is_some() {
            self.let_run_go(id);
        }
        Some(id)
    }
}
