//! Copies and atomics that the environment answered with `Pending`: what each touches, so that nothing of it goes away
//! before it has landed.
//!
//! Invariant: `MemoryRegion::flights`, `Sender::flight` and `Receiver::flights` are exactly the flights in the table.
use crate::slab::SlabId;
use crate::{Engine, QpId, SessionId, Span, Token};
use freeflow_verbs::SGE_COUNT_MAX;

/// Index and generation of a [`Token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightId {
    index: u32,
    generation: u32,
}

impl SlabId for FlightId {
    fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    fn index(self) -> u32 {
        self.index
    }

    fn generation(self) -> u32 {
        self.generation
    }
}

impl FlightId {
    pub fn token(self) -> Token {
        Token(u64::from(self.generation) << 32 | u64::from(self.index))
    }

    pub fn from_token(token: Token) -> Self {
        Self { index: token.0 as u32, generation: (token.0 >> 32) as u32 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlightKind {
    /// So many bytes of payload.
    Chunk {
        bytes: u64,
    },
    Atomic,
    /// The value found by an atomic, on its way to local memory.
    AtomicResult,
}

const REGIONS_MAX: usize = 2 * SGE_COUNT_MAX;

#[derive(Clone, Copy)]
pub(crate) struct Flight {
    pub requester: QpId,
    pub responder: Option<QpId>,
    pub kind: FlightKind,
    sessions: [SessionId; 2],
    regions: [u32; REGIONS_MAX],
    region_count: u8,
}

impl Flight {
    pub fn touches(&self, session: SessionId) -> bool {
        self.sessions.contains(&session)
    }
}

impl Engine {
    /// Notes that the operation with the token just given out goes on elsewhere. The spans it touches are in
    /// `self.from` and `self.to`.
    pub(crate) fn launch(&mut self, requester: QpId, responder: Option<QpId>, kind: FlightKind) {
        let own = self.qp(requester).session;
        let other = responder.map_or(own, |responder| self.qp(responder).session);
        let mut regions = [0; REGIONS_MAX];
        let mut region_count = 0;
        for span in self.from.iter().chain(&self.to) {
            regions[region_count] = span.mr_index;
            region_count += 1;
            self.keys.regions.at_mut(span.mr_index).expect("a span's region is live").flights += 1;
        }
        let sessions = [own, other];
        let flight = Flight { requester, responder, kind, sessions, regions, region_count: region_count as u8 };
        let id = self.flights.insert(flight);
        self.qp_mut(requester).send.flight = Some(id);
        if let Some(responder) = responder {
            self.qp_mut(responder).receive.flights += 1;
        }
    }

    /// Takes a flight out of the table; its token is stale from now on.
    pub(crate) fn land(&mut self, id: FlightId) -> Option<Flight> {
        let flight = self.flights.remove(id)?;
        for &region in &flight.regions[..usize::from(flight.region_count)] {
            self.keys.regions.at_mut(region).expect("a flight's region is live").flights -= 1;
        }
        self.qp_mut(flight.requester).send.flight = None;
        if let Some(responder) = flight.responder {
            self.qp_mut(responder).receive.flights -= 1;
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
}
