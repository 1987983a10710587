//! State of the worker beside the engine's objects: rings, doorbells, page tables, event pipes,
//! slow-path copiers.
use crate::admission::access::AccessPolicy;
use crate::base::deferred_drop::DeferredDrop;
use crate::base::wake::Waker;
use crate::dataplane::datagram_rings::OpenRings;
use crate::dataplane::direct::{Direct, Policy};
use crate::dataplane::direct_traffic::Watch;
use crate::dataplane::doorbells::DoorbellTable;
pub use crate::dataplane::doorbells::DoorbellTarget;
use crate::dataplane::event_pipes::{PipeId, Pipes};
use crate::dataplane::fabric::Fabric;
pub use crate::dataplane::moderation::Notify;
use crate::dataplane::moderation::{Moderation, Schedule};
use crate::dataplane::slow_path_counts::{QpSlowPath, SlowPathCounts};
use crate::dataplane::table::Table;
use crate::dataplane::totals::Retired;
use crate::dataplane::xrc_targets::Targets;
use crate::memory::blocking::Blocks;
use crate::memory::bounce::Postponed;
use crate::memory::copy_threads::CopyThreads;
use crate::memory::grants::Grants;
use crate::memory::page_table::PageTable;
use crate::memory::resharing::Lost;
use crate::memory::sharing::SlowPathUse;
use crate::memory::slow_path::{Abandoned, Finished, SlowPathCopier};
use crate::memory::transfers::Transfers;
use freeflow_engine::{ContextId, CqId, QpId, RefusalCounts, SessionId, SessionObjects, SrqId, VnicId};
use freeflow_shm::{CompletionProducer, Doorbell, RequestConsumer, SessionSegment};
use freeflow_verbs::{Instant, NetworkId, QpType};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Sender;

pub struct Vnic {
    pub network: NetworkId,
    /// A virtual machine's: nothing of it goes past the router.
    pub is_guest: bool,
    pub copier: Option<SlowPathCopier>,
    /// Slow-path copiers that were given up and have not ended yet.
    pub abandoned: Vec<Abandoned>,
    pub slow_path: SlowPathCounts,
    /// Copies that blocked the worker in its memory.
    pub blocked_count: u64,
    /// Its bounce buffers, bytes, and copies that wait for one.
    pub bounce_bytes: Arc<AtomicU64>,
    pub postponed: VecDeque<Postponed>,
    /// Refusals by limits when they were last looked at.
    pub refusals: RefusalCounts,
}

impl Vnic {
    pub fn new(network: NetworkId, is_guest: bool) -> Self {
        Self {
            network,
            is_guest,
            copier: None,
            abandoned: Vec::new(),
            slow_path: SlowPathCounts::default(),
            blocked_count: 0,
            bounce_bytes: Arc::new(AtomicU64::new(0)),
            postponed: VecDeque::new(),
            refusals: RefusalCounts::default(),
        }
    }
}

pub struct Session {
    pub vnic: VnicId,
    /// Features of the protocol that its library speaks.
    pub features: u64,
    pub segment: SessionSegment,
    pub kick: Arc<Doorbell>,
    pub memory: PageTable,
    /// Its revoked memory that the slow path reaches.
    pub lost: Lost,
    /// Its other memory that the slow path reaches.
    pub slow_path_use: SlowPathUse,
    /// Where it is ordered to take memory back.
    pub commands: Option<PipeId>,
    /// The object of each doorbell, by the library's cookie.
    pub doorbells: DoorbellTable,
    /// The same for CQs, which ring seldom.
    pub cq_bells: BTreeMap<u32, CqId>,
    /// The worker looks at the doorbells of its own accord; else the library kicks.
    pub active: bool,
    pub doorbell_seen: Instant,
    /// Turns that brought it completions.
    pub completed: u64,
    /// This turn is one, and it has not been notified yet.
    pub is_completed: bool,
    /// The epoch in which it was last busy.
    pub epoch: u64,
    pub failed: bool,
}

impl Session {
    /// One that has nothing yet, and was not heard of.
    pub fn new(vnic: VnicId, segment: SessionSegment, kick: Arc<Doorbell>, memory: PageTable) -> Self {
        Self {
            vnic,
            features: 0,
            segment,
            kick,
            memory,
            lost: Lost::default(),
            slow_path_use: SlowPathUse::default(),
            commands: None,
            doorbells: DoorbellTable::default(),
            cq_bells: BTreeMap::new(),
            active: false,
            doorbell_seen: Instant(0),
            completed: 0,
            is_completed: false,
            epoch: 0,
            failed: false,
        }
    }
}

pub struct Context {
    /// Asynchronous events.
    pub pipe: PipeId,
}

/// How the worker learns of new send requests of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// By its doorbell.
    Doorbell,
    /// In the active list, and nothing posted since.
    Polled { idle_since: Instant },
    /// In the active list: there is work.
    Running,
    /// The engine names it when it can go on; it is polled then, so no doorbell is needed.
    Waiting,
}

pub struct Qp {
    pub session: SessionId,
    pub context: ContextId,
    pub cookie: u32,
    pub service: QpType,
    pub send: RequestConsumer,
    /// Absent if it only sends. If it uses an SRQ, no RECVs are in it, and its positions number the
    /// messages that take one of the SRQ's.
    pub receive: Option<RequestConsumer>,
    pub receives_wanted: bool,
    pub attention: Attention,
    pub direct: Direct,
    pub slow_path: QpSlowPath,
}

pub struct Srq {
    pub session: SessionId,
    pub context: ContextId,
    pub cookie: u32,
    pub receive: RequestConsumer,
    pub receives_wanted: bool,
}

pub struct Cq {
    pub session: SessionId,
    pub context: ContextId,
    pub cookie: u32,
    pub ring: CompletionProducer,
    /// The ring before the last resize: the library may have armed that one.
    pub previous: Option<CompletionProducer>,
    pub channel: Option<PipeId>,
    /// Its completions have the exact time at which they were written.
    pub timestamps: bool,
    pub notify: Notify,
    pub moderation: Moderation,
}

pub struct Ports {
    pub now: Instant,
    /// Since when the router runs without a pause, see
    /// [`Worker::note_pause`](crate::dataplane::worker::Worker::note_pause).
    pub resumed_at: Instant,
    pub vnics: Table<VnicId, Vnic>,
    /// Work of vNICs that are gone.
    pub retired: Retired,
    pub sessions: Table<SessionId, Session>,
    pub contexts: Table<ContextId, Context>,
    pub cqs: Table<CqId, Cq>,
    pub srqs: Table<SrqId, Srq>,
    pub qps: Table<QpId, Qp>,
    /// QPs without rings.
    pub targets: Targets,
    pub pipes: Pipes,
    pub transfers: Transfers,
    /// vNICs with memory that blocked the worker.
    pub blocks: Blocks,
    /// The copy threads.
    pub copy_threads: CopyThreads,
    /// Other hosts.
    pub fabric: Fabric,
    /// The access rules.
    pub access: AccessPolicy,
    /// CQs with a channel and completions it has not been notified of.
    pub notify: Vec<CqId>,
    /// Sessions that got completions in this turn.
    pub completed: Vec<SessionId>,
    /// CQs that have to wait with it.
    pub schedule: Schedule,
    /// Sessions to be ended, and why.
    pub failures: Vec<(SessionId, &'static str)>,
    /// A short stretch of time; sessions busy in this one are counted.
    pub epoch: u64,
    pub busy_session_count: u32,
    /// Which networks' vNICs may reach each other past the router.
    pub policy: Policy,
    /// Memory that they reach so.
    pub grants: Grants,
    /// QPs that may do so.
    pub watch: Watch,
    /// Direct rings of datagrams.
    pub open_rings: OpenRings,
    pub finished: Sender<Finished>,
    pub waker: Arc<Waker>,
}

impl Ports {
    pub fn new(finished: Sender<Finished>, waker: Arc<Waker>) -> Self {
        Self {
            now: Instant(0),
            resumed_at: Instant(0),
            retired: Retired::default(),
            vnics: Table::new(),
            sessions: Table::new(),
            contexts: Table::new(),
            cqs: Table::new(),
            srqs: Table::new(),
            qps: Table::new(),
            targets: Targets::default(),
            pipes: Pipes::default(),
            transfers: Transfers::default(),
            blocks: Blocks::default(),
            copy_threads: CopyThreads::default(),
            fabric: Fabric::default(),
            access: AccessPolicy::default(),
            notify: Vec::new(),
            completed: Vec::new(),
            schedule: Schedule::new(),
            failures: Vec::new(),
            epoch: 1,
            busy_session_count: 0,
            policy: Policy::default(),
            grants: Grants::default(),
            watch: Watch::new(),
            open_rings: OpenRings::default(),
            finished,
            waker,
        }
    }

    /// Ends the session at the end of this turn; the first reason is logged.
    pub fn fail(&mut self, session: SessionId, reason: &'static str) {
        if let Some(entry) = self.sessions.get_mut(session)
            && !entry.failed
        {
            entry.failed = true;
            self.failures.push((session, reason));
        }
    }

    /// Counts the session among those that poll now.
    #[inline]
    pub fn note_busy(&mut self, session: SessionId) {
        let epoch = self.epoch;
        if let Some(entry) = self.sessions.get_mut(session)
            && entry.epoch != epoch
        {
            entry.epoch = epoch;
            self.busy_session_count += 1;
        }
    }

    /// Completions have come to the session: whoever of it sleeps in a poll is woken at the end of the turn.
    #[inline]
    pub fn note_completed(&mut self, session: SessionId) {
        if let Some(entry) = self.sessions.get_mut(session)
            && !entry.is_completed
        {
            entry.is_completed = true;
            self.completed.push(session);
        }
    }

    pub fn set_doorbell(&mut self, session: SessionId, cookie: u32, bell: Option<DoorbellTarget>) {
        let Some(session) = self.sessions.get_mut(session) else { return };
        session.doorbells.set(cookie, bell);
    }

    /// Removes a process' part of a QP: its rings, or its view of a target.
    pub fn remove_qp(&mut self, id: QpId, session: SessionId, cookie: u32) -> DeferredDrop {
        self.targets.retain(id, |viewer| (viewer.session, viewer.cookie) != (session, cookie));
        self.expel(id);
        let Some(qp) = self.qps.remove(id) else { return Vec::new() };
        self.set_doorbell(qp.session, qp.cookie, None);
        vec![Box::new(qp)]
    }

    pub fn remove_srq(&mut self, id: SrqId) -> DeferredDrop {
        let Some(srq) = self.srqs.remove(id) else { return Vec::new() };
        self.set_doorbell(srq.session, srq.cookie, None);
        vec![Box::new(srq)]
    }

    /// Everything of a session; the engine has destroyed it already.
    pub fn remove_session(&mut self, id: SessionId, objects: SessionObjects) -> DeferredDrop {
        self.targets.remove_session(id, &objects.qps);
        let cqs: DeferredDrop = objects.cqs.into_iter().flat_map(|cq| self.remove_cq(cq)).collect();
        let mut held: DeferredDrop = vec![
            // First: who reads them sees that it is over.
            Box::new(self.pipes.remove_session(id)),
            Box::new(self.qps.remove_all(objects.qps)),
            Box::new(self.srqs.remove_all(objects.srqs)),
            Box::new(cqs),
            Box::new(self.contexts.remove_all(objects.contexts)),
        ];
        if let Some(session) = self.sessions.remove(id) {
            held.push(Box::new(session));
        }
        held
    }
}
