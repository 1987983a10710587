//! Operations in flight: submitted to the environment, answered with `Pending`, so that nothing that they touch goes away
//! before they have completed.
//!
//! Invariant: `MemoryRegion::flights`, `Window::flights`, `Sender::flight` and `Receiver::flights` are exactly the flights
//! in the table. A process that dies takes what is its own out of its flights; what is others' waits for the landing.
use crate::completer::Completer;
use crate::flight::{Flight, FlightId, FlightKind};
use crate::qp::Teardown;
use crate::transport::wire::{Wire, WireFlight};
use crate::{MwId, QpId, SessionId, Span, Token};
use alloc::vec::Vec;
use freeflow_verbs::QpState;

impl Completer {
    /// Whether anything of this session takes part: a QP, a window, or memory that is read or written. (Not every region
    /// is that of a QP's own session: a PD may be shared, a target QP fills RECVs of its whole domain.)
    pub(crate) fn flight_touches(&self, flight: &Flight, session: SessionId) -> bool {
        let owner = |region: &u32| self.keys.regions.at(*region).map(|(_, region)| region.session);
        self.flight_is_of(flight, session) || flight.regions().iter().any(|region| owner(region) == Some(session))
    }

    /// Whether it is between QPs of which one is this session's, or goes through a window of it.
    fn flight_is_of(&self, flight: &Flight, session: SessionId) -> bool {
        let window = flight.window.and_then(|mw| self.keys.windows.get(mw));
        let is_its = |qp: QpId| self.qps.get(qp).is_some_and(|qp| qp.session == session);
        [Some(flight.requester), flight.responder].into_iter().flatten().any(is_its)
            || window.is_some_and(|window| window.session == session)
    }

    /// Notes that the operation with the token just given out goes on elsewhere. The spans it touches are in
    /// `self.from` and `self.to`.
    pub(crate) fn launch(&mut self, requester: QpId, responder: Option<QpId>, kind: FlightKind) {
        let request = &self.qp(requester).send.request;
        let request_is_send = request.opcode.is_send();
        let remote = (responder.is_some() && !request.opcode.is_send()).then_some(request.rkey);
        let srq = responder.filter(|_| request_is_send).and_then(|responder| self.board_queue(responder));
        let id = self.take_off(Flight::new(requester, responder, kind, srq), remote);
        self.qp_mut(requester).send.flight = Some(id);
        if let Some(responder) = responder {
            self.qp_mut(responder).receive.flights += 1;
        }
    }

    /// The same for the packet transport; see [`Engine::launch_wire`].
    pub(crate) fn launch_for(&mut self, id: QpId, kind: FlightKind, rkey: Option<u32>) {
        let fills = rkey.is_none() && matches!(kind, FlightKind::Wire(WireFlight::Payload));
        let srq = Some(id).filter(|_| fills).and_then(|target| self.board_queue(target));
        self.take_off(Flight::new(id, None, kind, srq), rkey);
    }

    fn take_off(&mut self, mut flight: Flight, rkey: Option<u32>) -> FlightId {
        for span in self.from.iter().chain(&self.to) {
            let index = span.region.index();
            flight.regions[usize::from(flight.region_count)] = index;
            flight.region_count += 1;
            self.keys.regions.at_mut(index).expect("a span's region is live").flights += 1;
        }
        flight.window = rkey.and_then(|key| self.board_window(key));
        self.flights.insert(flight)
    }

    /// A session ends: nothing of it takes part in a flight any more. Memory and QPs of others do until it has landed,
    /// since it may still write there; so a RECV that a message of this session claimed stays claimed.
    pub(crate) fn leave_flights(&mut self, session: SessionId) {
        let touched = self.flights.iter().filter(|(_, flight)| self.flight_touches(flight, session));
        let touched: Vec<FlightId> = touched.map(|(id, _)| id).collect();
        for id in touched {
            let Some(mut flight) = self.flights.get(id).copied() else { continue };
            let count = core::mem::take(&mut flight.region_count);
            for at in 0..usize::from(count) {
                let index = flight.regions[at];
                let region = self.keys.regions.at_mut(index).expect("a flight's region is live");
                if region.session == session {
                    region.flights -= 1;
                } else {
                    flight.regions[usize::from(flight.region_count)] = index;
                    flight.region_count += 1;
                }
            }
            let is_its = |mw: &MwId| self.keys.windows.get(*mw).is_some_and(|window| window.session == session);
            if let Some(window) = flight.window.take_if(|mw| is_its(mw)) {
                self.leave_window(window);
            }
            if let Some(requester) = self.qps.get_mut(flight.requester).filter(|qp| qp.session == session) {
                requester.send.responder = None;
            }
            if let Some(entry) = self.flights.get_mut(id) {
                *entry = flight;
            }
        }
    }

    /// Takes a flight out of the table; its token is stale from now on.
    pub(crate) fn land(&mut self, id: FlightId) -> Option<Flight> {
        let flight = self.flights.remove(id)?;
        for &region in flight.regions() {
            self.keys.regions.at_mut(region).expect("a flight's region is live").flights -= 1;
        }
        if let Some(requester) = self.qps.get_mut(flight.requester)
            && !matches!(flight.kind, FlightKind::Wire(_))
        {
            requester.send.flight = None;
        }
        if let Some(responder) = flight.responder.and_then(|responder| self.qps.get_mut(responder)) {
            responder.receive.flights -= 1;
        }
        if let Some(window) = flight.window {
            self.leave_window(window);
        }
        if let Some(srq) = flight.srq {
            self.leave_queue(srq);
        }
        Some(flight)
    }

    /// Token for the operation that is about to be handed to the environment.
    pub(crate) fn next_token(&self) -> Token {
        self.flights.vacant().token()
    }

    /// Fills the list that `launch` reads with the one span of an atomic.
    pub(crate) fn note_atomic_span(&mut self, at: Span) {
        self.from.clear();
        self.to.clear();
        self.to.push(at);
    }

    // ---- flights

    /// Notes that the operation with the token just given out goes on elsewhere, for this QP. `self.from` and `self.to`
    /// hold the spans that it touches; `rkey`: the key that a peer named, if any.
    pub(crate) fn launch_wire(&mut self, id: QpId, kind: WireFlight, rkey: Option<u32>) {
        self.launch_for(id, FlightKind::Wire(kind), rkey);
        let qp = self.qp_mut(id);
        // A UD QP says so by its claim.
        if kind.lands()
            && let Some(wire) = &mut qp.wire
        {
            wire.landing = true;
        }
        if kind.is_requesters() {
            qp.send.wire_flights += 1;
        } else {
            qp.receive.flights += 1;
        }
    }

    /// Takes a flight in; gives the QP if it goes on with what came of it.
    pub(crate) fn land_wire(&mut self, flight: FlightId, kind: WireFlight) -> Option<QpId> {
        let id = self.land(flight)?.requester;
        let qp = self.qps.get_mut(id)?;
        if kind.is_requesters() {
            qp.send.wire_flights -= 1;
        } else {
            qp.receive.flights -= 1;
        }
        let says_more = |wire: &Wire| kind == WireFlight::Response && wire.responder.is_closing();
        let lives = qp.state() != QpState::Error || qp.wire.as_deref().is_some_and(says_more);
        let goes_on = qp.teardown == Teardown::None && lives;
        if let Some(wire) = qp.wire.as_mut() {
            wire.landing &= !kind.lands();
            if !goes_on {
                wire.parked.clear();
                wire.parked_bytes = 0;
            }
        }
        if !goes_on {
            self.let_go(id, usize::MAX);
            self.push_ready(id);
            return None;
        }
        Some(id)
    }
}
