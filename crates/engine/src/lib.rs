//! Sans-IO RDMA transports: queue pairs and their state machine, keys and protection domains, the responder, local
//! delivery, timers. Packets, time and randomness are arguments; bytes move through [`Environment`].
//!
//! Read in this order: `qp` (what a QP holds), `requester` ([`Engine::run`], the way of a send request), `responder`
//! (whether it is taken), `delivery` (how its bytes move), `completion` (how it ends). What
//! only XRC and only multicast have stands in `xrc` and `multicast`, who may talk to whom in `policy`.
//!
//! Invariant: all state is plain data in tables by index and generation, walked in order; given the same seed, calls and
//! answers of the environment, a run repeats itself exactly.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

mod attempt;
mod completion;
mod control;
mod delivery;
mod direct;
mod environment;
mod fabric;
mod flight;
mod flush;
mod id;
mod keys;
mod limits;
mod multicast;
mod objects;
mod policy;
mod protection;
mod qp;
mod qp_verbs;
mod quotas;
mod random;
mod regions;
mod requester;
mod responder;
mod resting;
mod schedule;
mod slab;
mod snapshot;
mod states;
mod status;
mod syndrome;
mod table;
mod timers;
mod traffic;
mod transport;
mod ud;
mod windows;
mod xrc;

pub use attempt::{Attempt, AttemptKind};
pub use direct::{Grantable, NotDirect, NotGrantable};
pub use environment::{
    Asker, AtomicOutcome, CopyOutcome, CqFull, Environment, EventTarget, Fabric, Fetch, Means, Memory, MemorySide,
    Policy, Queues, Source, SourceBody, Span, SpanRegion, Talk, Token,
};
pub use fabric::{Destination, HostId, IpInfo, PacketHead, Path, PeerAnswer, PeerInfo, TransmitOutcome};
pub use id::{AhId, ContextId, CqId, MrId, MwId, PdId, QpId, ReceiveQueueId, SessionId, SrqId, VnicId, XrcdId};
pub use limits::{
    CHUNK_BYTES_MAX, REQUESTS_PER_RUN_MAX, UD_MESSAGE_BYTES_MAX, grant_qp_capabilities, grant_srq_attributes,
};
pub use multicast::GroupChange;
pub use quotas::{RefusalCounts, Refused};
pub use schedule::{Allowance, FairScheduler, QpTraffic, Scheduler, Throttled, Used};
pub use snapshot::{SNAPSHOT_VERSION, SnapshotError};
pub use states::{Transition, modify_is_allowed, transition};
pub use status::QpStatus;
pub use syndrome::Syndrome;
pub use traffic::{DirectTraffic, Traffic};
pub use transport::{Drops, HostStatus, QpWireStatus, WireCounters, management_head};
pub use ud::GRH_BYTES;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use flight::{Flight, FlightId};
use freeflow_verbs::{CompletionStatus, QpCapabilities, QpType, VerbsError};
use keys::Keys;
use multicast::Groups;
use objects::{AddressHandle, Context, Cq, Session, Srq, Vnic};
use policy::PolicyReview;
use protection::Pd;
use qp::QueuePair;
use quotas::Networks;
use random::Random;
use resting::Resting;
use serde::{Deserialize, Serialize};
use slab::Slab;
use table::NumberTable;
use timers::Timers;
use transport::{Hosts, Peers, Strangers};
use xrc::Xrc;

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
    /// All but `XrcReceive`.
    pub pd: Option<PdId>,
    pub qp_type: QpType,
    /// All but `XrcReceive`.
    pub send_cq: Option<CqId>,
    /// RC, UC, UD.
    pub recv_cq: Option<CqId>,
    /// RC, UC, UD; may be absent.
    pub srq: Option<SrqId>,
    /// `XrcReceive`.
    pub xrcd: Option<XrcdId>,
    pub capabilities: QpCapabilities,
    pub all_signaled: bool,
    /// UD: its own multicast messages don't come back to it.
    pub block_own_multicast: bool,
    /// Echoed in completions.
    pub cookie: u32,
}

/// Numbers for `status`, `ps` and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub sessions: u32,
    pub contexts: u32,
    pub pds: u32,
    pub qps: u32,
    pub cqs: u32,
    pub srqs: u32,
    pub mrs: u32,
    pub mws: u32,
    /// Opened domains.
    pub xrcds: u32,
    /// Groups that QPs are attached to.
    pub multicast_groups: u32,
    pub ahs: u32,
    pub registered_bytes: u64,
}

/// Names of what a session has.
#[derive(Clone, Debug, Default)]
pub struct SessionObjects {
    pub contexts: Vec<ContextId>,
    pub cqs: Vec<CqId>,
    pub srqs: Vec<SrqId>,
    pub qps: Vec<QpId>,
    pub xrcds: Vec<XrcdId>,
}

/// Counts since the vNIC was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VnicCounters {
    /// Requests that completed with success, and their payload.
    pub messages: u64,
    pub bytes: u64,
    /// Of these, what the requesters' libraries did past the router, as they say.
    pub direct_messages: u64,
    pub direct_bytes: u64,
    /// Of these, what went to another host, in part at least.
    pub wire_messages: u64,
    pub wire_bytes: u64,
    /// Flushes too.
    pub completions_with_error: u64,
    /// That this vNIC's requesters got.
    pub rnr_naks: u64,
    pub retries_exceeded: u64,
    /// Requests of peers that this vNIC's responders refused for their key.
    pub remote_access_errors: u64,
    /// In this vNIC's rings.
    pub malformed_descriptors: u64,
    /// Messages of this vNIC that found nobody (a retried one counts once).
    pub undeliverable: u64,
    pub sent: Traffic,
    pub received: Traffic,
    /// Requests of peers that reached this vNIC's responders.
    pub writes_received: u64,
    pub reads_received: u64,
    pub atomics_received: u64,
    /// Messages that came while no RECV was posted for them.
    pub receives_missing: u64,
    /// Times that no acknowledgement came in time and the requester tried once more.
    pub ack_timeouts: u64,
    /// RNR NAKs that came when no retry was left.
    pub rnr_retries_exceeded: u64,
    pub failures: Failures,
    /// Packets to and from other hosts.
    pub wire: WireCounters,
}

/// Completions with an error, as a requester and as a responder; the flushed ones are part of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    pub requester: u64,
    pub requester_flushed: u64,
    pub responder: u64,
    pub responder_flushed: u64,
    /// As a requester: REM_INV_REQ_ERR and REM_ACCESS_ERR.
    pub remote_invalid_requests: u64,
    pub remote_access_errors: u64,
    /// As a responder: LOC_LEN_ERR.
    pub local_length_errors: u64,
}

impl Failures {
    pub(crate) fn count(&mut self, of_requester: bool, status: CompletionStatus) {
        let flushed = u64::from(status == CompletionStatus::WorkRequestFlushed);
        if of_requester {
            self.requester += 1;
            self.requester_flushed += flushed;
            self.remote_invalid_requests += u64::from(status == CompletionStatus::RemoteInvalidRequest);
            self.remote_access_errors += u64::from(status == CompletionStatus::RemoteAccessError);
        } else {
            self.responder += 1;
            self.responder_flushed += flushed;
            self.local_length_errors += u64::from(status == CompletionStatus::LocalLengthError);
        }
    }
}

impl Usage {
    pub(crate) fn plus(self, other: &Self) -> Self {
        Self {
            sessions: self.sessions + other.sessions,
            contexts: self.contexts + other.contexts,
            pds: self.pds + other.pds,
            qps: self.qps + other.qps,
            cqs: self.cqs + other.cqs,
            srqs: self.srqs + other.srqs,
            mrs: self.mrs + other.mrs,
            mws: self.mws + other.mws,
            xrcds: self.xrcds + other.xrcds,
            multicast_groups: self.multicast_groups + other.multicast_groups,
            ahs: self.ahs + other.ahs,
            registered_bytes: self.registered_bytes + other.registered_bytes,
        }
    }
}

/// The engine. Methods come in four families: getters; verbs (commands of the control path, each refusing objects of
/// another session with NotFound); `handle_*` (input); `poll_*` (output).
///
/// After any call ask `poll_ready` until it is empty, running each QP it names, and `poll_timeout` before sleeping.
pub struct Engine {
    random: Random,
    vnics: Slab<VnicId, Vnic>,
    sessions: Slab<SessionId, Session>,
    contexts: Slab<ContextId, Context>,
    pds: Slab<PdId, Pd>,
    cqs: Slab<CqId, Cq>,
    srqs: Slab<SrqId, Srq>,
    ahs: Slab<AhId, AddressHandle>,
    keys: Keys,
    xrc: Xrc,
    groups: Groups,
    qps: Slab<QpId, QueuePair>,
    networks: Networks,
    schedule: schedule::Schedule,
    /// QPN to slab index.
    qpns: NumberTable,
    /// Not to be drawn again yet.
    resting: Resting,
    timers: Timers,
    flights: Slab<FlightId, Flight>,
    ready: VecDeque<QpId>,
    peers: Peers,
    hosts: Hosts,
    /// UD packets whose senders are being asked about.
    strangers: Strangers,
    /// QPs that owe an acknowledgement.
    acks_owed: VecDeque<QpId>,
    drops: Drops,
    policy: PolicyReview,
    /// Source and destination of the chunk in hand: kept to save allocations.
    from: Vec<Span>,
    to: Vec<Span>,
}

impl Engine {
    pub fn new(seed: Seed) -> Self {
        Self {
            random: Random::new(&seed),
            vnics: Slab::new(),
            sessions: Slab::new(),
            contexts: Slab::new(),
            pds: Slab::new(),
            cqs: Slab::new(),
            srqs: Slab::new(),
            ahs: Slab::new(),
            keys: Keys::new(keys::KEY_COUNT_MAX),
            xrc: Xrc::new(),
            groups: Groups::new(),
            qps: Slab::new(),
            networks: Networks::default(),
            schedule: schedule::Schedule::default(),
            qpns: NumberTable::new(),
            resting: Resting::new(),
            timers: Timers::new(),
            flights: Slab::new(),
            ready: VecDeque::new(),
            peers: Peers::default(),
            hosts: Hosts::default(),
            strangers: Strangers::default(),
            acks_owed: VecDeque::new(),
            drops: Drops::default(),
            policy: PolicyReview::default(),
            from: Vec::with_capacity(freeflow_verbs::SGE_COUNT_MAX),
            to: Vec::with_capacity(freeflow_verbs::SGE_COUNT_MAX),
        }
    }

    /// A QP that `Waiting` held back and that can go on now, or that has to flush: call `run` for it.
    pub fn poll_ready(&mut self) -> Option<QpId> {
        while let Some(id) = self.ready.pop_front() {
            if let Some(qp) = self.qps.get_mut(id) {
                qp.queued = false;
                return Some(id);
            }
        }
        None
    }

    pub(crate) fn push_ready(&mut self, id: QpId) {
        let qp = self.qp_mut(id);
        if !qp.queued {
            qp.queued = true;
            self.ready.push_back(id);
        }
    }

    /// A QP that our own bookkeeping says exists.
    pub(crate) fn qp(&self, id: QpId) -> &QueuePair {
        self.qps.get(id).expect("the QP exists")
    }

    pub(crate) fn qp_mut(&mut self, id: QpId) -> &mut QueuePair {
        self.qps.get_mut(id).expect("the QP exists")
    }

    pub(crate) fn vnic_of(&mut self, id: QpId) -> &mut Vnic {
        let vnic = self.qp(id).vnic;
        self.vnics.get_mut(vnic).expect("a vNIC outlives its QPs")
    }
}
