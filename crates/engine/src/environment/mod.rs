//! The engine's needs of the program that runs it. The engine sees no memory, no ring and no clock; the
//! router's worker implements the five traits over shared memory and sockets, tests implement them
//! over vectors.
//!
//! Invariant: no method has a default body, so each implementation says for itself what it does and
//! what it lacks.
mod carrier;
mod fabric;
mod memory;
mod policy;
mod queues;

pub use carrier::{Admission, Carried, CarriedHead, CarriedMessage, Carrier, CarryFailure, CarryOutcome};
pub use fabric::Fabric;
pub use memory::{AtomicOutcome, CopyOutcome, Memory, MemorySide, Source, SourceBody, Span, SpanRegion, Token};
pub use policy::{AuthorizationRequest, Policy, Subject, TrafficKind};
pub use queues::{CqFull, EventTarget, Fetch, Queues};

/// All that the engine needs.
pub trait Environment: Queues + Memory + Fabric + Carrier + Policy {}

impl<T: Queues + Memory + Fabric + Carrier + Policy> Environment for T {}
