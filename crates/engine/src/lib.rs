//! Sans-IO RDMA transports: queue pairs and their state machine, keys and protection domains, the
//! responder, local delivery, timers. Packets, time and randomness are arguments; bytes move
//! through [`Environment`].
//!
//! Read in this order: `engine` (the parts, and where each call goes), `qp` (what a QP holds),
//! `requester` (the way of a send request), `responder` (whether it is taken),
//! `requester::delivery` (how its bytes move), `completer::completion` (how it ends). `transport`
//! is what a QP keeps for packets, `verbs` the control path.
//!
//! Invariant: all state is plain data in tables by index and generation, walked in order; given the
//! same seed, calls and answers of the environment, a run repeats itself exactly.
//!
//! ```
//! use core::net::Ipv4Addr;
//! use freeflow_engine::{Engine, Seed};
//! use freeflow_verbs::{Gid, NetworkId, VerbsError, VnicLimits};
//!
//! // Entropy is an argument: the same seed and calls give the same engine.
//! let mut engine = Engine::new(Seed([7; 32]));
//! let gid = Gid::from_ip(Ipv4Addr::new(10, 111, 0, 2).into());
//! let limits = VnicLimits { cq_count_max: 1, ..Default::default() };
//! let vnic = engine.create_vnic(NetworkId(1), gid, limits)?;
//! let session = engine.create_session(vnic)?;
//! let context = engine.open_context(session)?;
//!
//! engine.create_cq(session, context, 128)?;
//! assert_eq!(engine.create_cq(session, context, 128), Err(VerbsError::NoMemory));
//! # Ok::<(), VerbsError>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]
extern crate alloc;

mod array;
mod arrival;
mod completer;
mod counters;
mod engine;
mod environment;
mod fabric;
mod fault;
mod flush;
mod id;
mod in_flight;
mod interface;
mod keys;
mod limits;
mod multicast;
mod networks;
mod objects;
mod policy;
mod qp;
mod quarantine;
mod random;
mod requester;
mod responder;
mod schedule;
mod slab;
mod snapshot;
mod states;
mod syndrome;
mod table;
mod timers;
mod transport;
mod turn;
mod ud;
mod verbs;
mod violation;
mod window;
mod xrc;

pub use counters::{DirectTraffic, Failures, QpTraffic, Traffic, Usage, VnicCounters};
pub use engine::Engine;
pub use environment::{
    Admission, AtomicOutcome, AuthorizationRequest, Carried, CarriedHead, CarriedMessage, Carrier, CarryFailure,
    CarryOutcome, CopyOutcome, CqFull, Environment, EventTarget, Fabric, Fetch, Memory, MemorySide, Policy, Queues,
    Source, SourceBody, Span, SpanRegion, Subject, Token, TrafficKind,
};
pub use fabric::{Destination, HostId, IpInfo, PacketHead, Path, PeerAnswer, PeerInfo, TransmitOutcome};
pub use id::{AhId, ContextId, CqId, MrId, MwId, PdId, QpId, ReceiveQueueId, SessionId, SrqId, VnicId, XrcdId};
pub use interface::{MrKeys, Progress, QpInit, Refusal, SessionObjects};
pub use limits::{CHUNK_BYTES_MAX, REQUESTS_PER_RUN_MAX, grant_qp_capabilities, grant_srq_attributes};
pub use multicast::GroupChange;
pub use networks::{RefusalCounts, Refused};
pub use random::Seed;
pub use schedule::{Allowance, FairScheduler, Scheduler, Throttled, Used};
pub use snapshot::{SNAPSHOT_VERSION, SnapshotError};
pub use states::{Transition, modify_is_allowed, transition};
pub use syndrome::Syndrome;
pub use transport::{CarrierState, Drops, HostStatus, QpWireStatus, WireCounters, management_head};
pub use ud::{GRH_BYTES, UD_MESSAGE_BYTES_MAX};
pub use verbs::{DatagramPeer, Grantable, NotDirect, NotGrantable, QpStatus};
pub use violation::{Violation, ViolationKind};
