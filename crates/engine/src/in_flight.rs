//! Copies and atomics that the environment answered with `Pending`: what each touches.
use crate::slab::SlabId;
use crate::transport::wire::WireOperation;
use crate::{MwId, QpId, SrqId, Token};
use freeflow_verbs::SGE_COUNT_MAX;
use serde::{Deserialize, Serialize};

/// Index and generation of a [`Token`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InFlightId {
    pub index: u32,
    pub generation: u32,
}

impl SlabId for InFlightId {
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

impl InFlightId {
    pub fn token(self) -> Token {
        Token(u64::from(self.generation) << 32 | u64::from(self.index))
    }

    pub fn from_token(token: Token) -> Self {
        Self { index: token.0 as u32, generation: (token.0 >> 32) as u32 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum InFlightKind {
    /// So many bytes of payload.
    Chunk {
        bytes: u64,
    },
    Atomic,
    /// The value found by an atomic, on its way to local memory.
    AtomicResult,
    /// Of the packet transport: `InFlight::requester` is the QP, whichever side it is on.
    Wire(WireOperation),
}

const REGIONS_MAX: usize = 2 * SGE_COUNT_MAX;

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct InFlight {
    /// Either may be gone, with its process.
    pub requester: QpId,
    pub responder: Option<QpId>,
    pub kind: InFlightKind,
    /// The window through which the responder's memory is reached, if it is one.
    pub window: Option<MwId>,
    /// The SRQ of the RECV that a target QP fills.
    pub srq: Option<SrqId>,
    #[serde(with = "crate::array")]
    pub regions: [u32; REGIONS_MAX],
    pub region_count: u8,
}

impl InFlight {
    pub fn new(requester: QpId, responder: Option<QpId>, kind: InFlightKind, srq: Option<SrqId>) -> Self {
        Self { requester, responder, kind, window: None, srq, regions: [0; REGIONS_MAX], region_count: 0 }
    }

    /// False for one that was read from damaged bytes.
    pub fn is_consistent(&self) -> bool {
        usize::from(self.region_count) <= REGIONS_MAX
    }

    pub fn regions(&self) -> &[u32] {
        &self.regions[..usize::from(self.region_count)]
    }
}
