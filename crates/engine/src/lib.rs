//! Sans-IO RDMA transports: queue pairs and their state machine, keys and protection domains, the responder, local
//! delivery, timers. Packets, time and randomness are arguments; bytes move through [`Environment`].
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

mod environment;
mod id;

pub use environment::{
    AtomicOutcome, CopyOutcome, CqFull, Environment, EventTarget, Fetch, MemorySide, Source, SourceBody, Span, Token,
};
pub use id::{AhId, ContextId, CqId, MrId, PdId, QpId, ReceiveQueueId, SessionId, SrqId, VnicId};

use freeflow_verbs::{
    Access, AddressHandleAttributes, Gid, Instant, NetworkId, QpAttributeMask, QpAttributes, QpCapabilities, QpState,
    QpType, Qpn, SrqAttributes, VerbsError, VnicLimits,
};

/// Entropy for keys, QPNs and first PSNs (xoshiro or the like, seeded by the caller from the operating system).
pub struct Seed(pub [u8; 32]);

/// What `run` did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing more is posted on this QP's send queue (or its state does not allow work).
    Idle,
    /// The budget is used up; there is more to do.
    More,
    /// Waits for a timer, a RECV or a pending copy; the engine itself will name the QP in `poll_ready` when it can go on.
    Waiting,
}

/// A verb that has to wait until copies in flight are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Error(VerbsError),
    /// Ask again once copies have finished (at the latest after the pending copies' `handle_copied`).
    InFlight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrKeys {
    pub mr: MrId,
    pub lkey: u32,
    pub rkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInit {
    pub pd: PdId,
    pub qp_type: QpType,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    pub srq: Option<SrqId>,
    pub capabilities: QpCapabilities,
    pub all_signaled: bool,
    /// Echoed in completions.
    pub cookie: u32,
}

/// Numbers for `status`, `ps` and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub sessions: u32,
    pub contexts: u32,
    pub pds: u32,
    pub qps: u32,
    pub cqs: u32,
    pub srqs: u32,
    pub mrs: u32,
    pub ahs: u32,
    pub registered_bytes: u64,
}

/// Counts since the vNIC was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnicCounters {
    pub messages: u64,
    pub bytes: u64,
    pub completions_with_error: u64,
    pub rnr_naks: u64,
    pub retries_exceeded: u64,
    pub remote_access_errors: u64,
    pub malformed_descriptors: u64,
    pub undeliverable: u64,
}

/// Capabilities as a QP would get them (limits checked, zeroes kept, nothing rounded down); EINVAL above a limit. Pure, so
/// that the control thread can size the rings before the worker creates the QP.
#[allow(clippy::unimplemented, unused_variables)]
pub fn grant_qp_capabilities(asked: &QpCapabilities, has_srq: bool) -> Result<QpCapabilities, VerbsError> { unimplemented!() }
/// The same for an SRQ.
#[allow(clippy::unimplemented, unused_variables)]
pub fn grant_srq_attributes(asked: &SrqAttributes) -> Result<SrqAttributes, VerbsError> { unimplemented!() }

/// The engine. Methods come in four families: getters; verbs (commands of the control path, each refusing objects of
/// another session with NotFound); `handle_*` (input); `poll_*` (output).
pub struct Engine {}

#[allow(unused_variables, clippy::unimplemented)]
impl Engine {
    pub fn new(seed: Seed) -> Self { unimplemented!() }

    // ---- vNICs and sessions (router only)
    pub fn create_vnic(&mut self, network: NetworkId, gid: Gid, limits: VnicLimits) -> Result<VnicId, VerbsError> { unimplemented!() }
    /// Its sessions must be gone.
    pub fn destroy_vnic(&mut self, vnic: VnicId) -> Result<(), VerbsError> { unimplemented!() }
    pub fn create_session(&mut self, vnic: VnicId) -> Result<SessionId, VerbsError> { unimplemented!() }
    /// Destroys everything of a process at once (it died or was cut off). Peers see what a vanished NIC shows: their
    /// requests run into retries. Pending copies that read or write its memory are forgotten: their later results are
    /// ignored by generation; requests of peers that waited for them fail or retry.
    pub fn destroy_session<E: Environment>(&mut self, env: &mut E, now: Instant, session: SessionId) { unimplemented!() }
    pub fn vnic_usage(&self, vnic: VnicId) -> Option<Usage> { unimplemented!() }
    pub fn vnic_counters(&self, vnic: VnicId) -> Option<VnicCounters> { unimplemented!() }
    pub fn usage(&self) -> Usage { unimplemented!() }

    // ---- verbs of one session
    pub fn open_context(&mut self, session: SessionId) -> Result<ContextId, VerbsError> { unimplemented!() }
    /// Busy while it has objects.
    pub fn close_context(&mut self, session: SessionId, context: ContextId) -> Result<(), VerbsError> { unimplemented!() }
    pub fn alloc_pd(&mut self, session: SessionId, context: ContextId) -> Result<PdId, VerbsError> { unimplemented!() }
    pub fn dealloc_pd(&mut self, session: SessionId, pd: PdId) -> Result<(), VerbsError> { unimplemented!() }
    pub fn register_mr(&mut self, session: SessionId, pd: PdId, address: u64, length: u64, iova: u64, access: Access) -> Result<MrKeys, VerbsError> { unimplemented!() }
    /// The keys are invalid as soon as this is first called; `InFlight` until no copy uses the region.
    pub fn deregister_mr(&mut self, session: SessionId, mr: MrId) -> Result<(), Refusal> { unimplemented!() }
    pub fn create_cq(&mut self, session: SessionId, context: ContextId, cqe: u32) -> Result<CqId, VerbsError> { unimplemented!() }
    pub fn destroy_cq(&mut self, session: SessionId, cq: CqId) -> Result<(), VerbsError> { unimplemented!() }
    pub fn create_srq(&mut self, session: SessionId, pd: PdId, attributes: SrqAttributes) -> Result<(SrqId, SrqAttributes), VerbsError> { unimplemented!() }
    pub fn modify_srq<E: Environment>(&mut self, env: &mut E, session: SessionId, srq: SrqId, limit: u32) -> Result<(), VerbsError> { unimplemented!() }
    pub fn query_srq(&self, session: SessionId, srq: SrqId) -> Result<SrqAttributes, VerbsError> { unimplemented!() }
    pub fn destroy_srq(&mut self, session: SessionId, srq: SrqId) -> Result<(), VerbsError> { unimplemented!() }
    /// Checks capabilities (EINVAL above the device's limits) and gives those granted.
    pub fn create_qp(&mut self, session: SessionId, init: QpInit) -> Result<(QpId, Qpn, QpCapabilities), VerbsError> { unimplemented!() }
    /// The state table of the standard with its required and optional attributes. To RESET: forgets everything, the
    /// caller resets the rings. To ERROR: flushes both queues.
    pub fn modify_qp<E: Environment>(&mut self, env: &mut E, now: Instant, session: SessionId, qp: QpId, attributes: &QpAttributes, mask: QpAttributeMask) -> Result<QpState, Refusal> { unimplemented!() }
    pub fn query_qp(&self, session: SessionId, qp: QpId) -> Result<QpAttributes, VerbsError> { unimplemented!() }
    pub fn destroy_qp<E: Environment>(&mut self, env: &mut E, now: Instant, session: SessionId, qp: QpId) -> Result<(), Refusal> { unimplemented!() }
    pub fn create_ah(&mut self, session: SessionId, pd: PdId, attributes: &AddressHandleAttributes) -> Result<AhId, VerbsError> { unimplemented!() }
    pub fn destroy_ah(&mut self, session: SessionId, ah: AhId) -> Result<(), VerbsError> { unimplemented!() }

    // ---- the data path
    /// Works off posted sends of one QP, at most about `budget_bytes` of payload (and a bounded number of requests).
    pub fn run<E: Environment>(&mut self, env: &mut E, now: Instant, qp: QpId, budget_bytes: u64) -> Progress { unimplemented!() }
    /// A RECV was posted to a queue for which `want_receives` stands: flushes it (QP in error) or wakes waiting senders.
    pub fn handle_receive_posted<E: Environment>(&mut self, env: &mut E, now: Instant, queue: ReceiveQueueId) { unimplemented!() }
    /// The result of a copy that was `Pending`. A token that is no longer awaited is ignored.
    pub fn handle_copied<E: Environment>(&mut self, env: &mut E, now: Instant, token: Token, result: Result<(), MemorySide>) { unimplemented!() }
    pub fn handle_atomic_done<E: Environment>(&mut self, env: &mut E, now: Instant, token: Token, result: Result<u64, ()>) { unimplemented!() }
    /// Expires timers up to `now`.
    pub fn handle_timeout<E: Environment>(&mut self, env: &mut E, now: Instant) { unimplemented!() }
    /// When `handle_timeout` is next needed.
    pub fn poll_timeout(&self) -> Option<Instant> { unimplemented!() }
    /// A QP that `Waiting` held back and that can go on now: call `run` for it.
    pub fn poll_ready(&mut self) -> Option<QpId> { unimplemented!() }
    /// Number of copies in flight that touch this session's memory.
    pub fn copies_in_flight(&self, session: SessionId) -> u32 { unimplemented!() }
}
