//! One library connection as the control thread sees it: who it is, and the handles it was given.
//!
//! Invariant: a handle is looked up only in the table of the session that names it, so a handle of another session is
//! nothing but a number.
use crate::events::PipeId;
use freeflow_engine::{AhId, ContextId, CqId, MrId, PdId, QpId, SessionId, SrqId};
use freeflow_protocol::library::{Handle, Reply};
use freeflow_shm::Segment;
use freeflow_verbs::VerbsError;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// What a vNIC holds of the things that the engine doesn't count.
#[derive(Default)]
pub struct Account {
    pub mappings: AtomicU64,
    pub segment_bytes: AtomicU64,
    pub channels: AtomicU64,
}

/// Part of an [`Account`]; given back when dropped.
pub struct Charge {
    account: Arc<Account>,
    mappings: u64,
    segment_bytes: u64,
    channels: u64,
}

/// The limit would be passed.
pub struct OverLimit;

impl Charge {
    pub fn segment(account: &Arc<Account>, bytes: u64, mappings_max: u64, bytes_max: u64) -> Result<Self, OverLimit> {
        let charge = Self { account: account.clone(), mappings: 1, segment_bytes: bytes, channels: 0 };
        // Only the control thread adds, so what is read here can at most be too much.
        let mappings = account.mappings.fetch_add(1, Relaxed) + 1;
        let held = account.segment_bytes.fetch_add(bytes, Relaxed).saturating_add(bytes);
        if mappings > mappings_max || held > bytes_max { Err(OverLimit) } else { Ok(charge) }
    }

    pub fn channel(account: &Arc<Account>, channels_max: u64) -> Result<Self, OverLimit> {
        let charge = Self { account: account.clone(), mappings: 0, segment_bytes: 0, channels: 1 };
        if account.channels.fetch_add(1, Relaxed) + 1 > channels_max { Err(OverLimit) } else { Ok(charge) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.mappings.fetch_sub(self.mappings, Relaxed);
        self.account.segment_bytes.fetch_sub(self.segment_bytes, Relaxed);
        self.account.channels.fetch_sub(self.channels, Relaxed);
    }
}

pub struct ContextEntry {
    pub id: ContextId,
}

pub struct ChannelEntry {
    pub context: Handle,
    pub pipe: PipeId,
    pub _charge: Charge,
}

pub struct PdEntry {
    pub id: PdId,
    pub context: ContextId,
}

pub struct SegmentEntry {
    pub segment: Arc<Segment>,
    pub mapped_at: Option<u64>,
    pub _charge: Charge,
}

pub struct MrEntry {
    pub id: MrId,
    pub address: u64,
    pub length: u64,
}

pub struct CqEntry {
    pub id: CqId,
    pub channel: Option<Handle>,
    pub cookie: u32,
    /// The ring's, and the one before the last resize.
    pub charges: Vec<Charge>,
}

pub struct SrqEntry {
    pub id: SrqId,
    pub cookie: u32,
    pub _charge: Charge,
}

pub struct QpEntry {
    pub id: QpId,
    pub cookie: u32,
    pub _charge: Charge,
}

/// One kind of handles of one session. Handles begin at 1 and are not given out again.
pub struct Handles<T> {
    entries: BTreeMap<Handle, T>,
    last: Handle,
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), last: 0 }
    }
}

impl<T> Handles<T> {
    pub fn insert(&mut self, entry: T) -> Handle {
        // A session would need months to come around; even then no living handle is given twice.
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            if !self.entries.contains_key(&self.last) {
                break;
            }
        }
        self.entries.insert(self.last, entry);
        self.last
    }

    pub fn get(&self, handle: Handle) -> Result<&T, VerbsError> {
        self.entries.get(&handle).ok_or(VerbsError::NotFound)
    }

    pub fn get_mut(&mut self, handle: Handle) -> Result<&mut T, VerbsError> {
        self.entries.get_mut(&handle).ok_or(VerbsError::NotFound)
    }

    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        self.entries.remove(&handle)
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.values()
    }
}

/// Everything a session was given.
#[derive(Default)]
pub struct Objects {
    pub contexts: Handles<ContextEntry>,
    pub channels: Handles<ChannelEntry>,
    pub pds: Handles<PdEntry>,
    pub segments: Handles<SegmentEntry>,
    pub mrs: Handles<MrEntry>,
    pub cqs: Handles<CqEntry>,
    pub srqs: Handles<SrqEntry>,
    pub qps: Handles<QpEntry>,
    /// The handle of an AH stands in send requests, where the engine reads it: its own index.
    pub ahs: BTreeMap<Handle, AhId>,
    /// Cookies of QPs and SRQs, which are their doorbells; cookies of CQs.
    pub doorbells: BTreeSet<u32>,
    pub cq_cookies: BTreeSet<u32>,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Only `Hello` may come.
    New,
    Ready(SessionId),
}

pub struct Connection {
    pub socket: OwnedFd,
    pub pidfd: OwnedFd,
    /// `/proc/PID/mem` of the process that connected.
    pub memory: Arc<File>,
    pub pid: i32,
    pub vnic: String,
    pub phase: Phase,
    /// The worker has a job of this session; its next request waits.
    pub busy: bool,
    /// There may be a message to read.
    pub readable: bool,
    /// In the queue of connections to serve.
    pub queued: bool,
    /// It is to be removed once its job is back.
    pub closing: bool,
    /// Tells the job so.
    pub cancelled: Arc<AtomicBool>,
    /// A complaint was logged already.
    pub complained: bool,
    pub objects: Objects,
}

/// A reply and the descriptors that go with it.
pub struct Answer {
    pub reply: Reply,
    pub descriptors: Vec<OwnedFd>,
    /// The connection ends after it.
    pub last: bool,
}

impl Answer {
    pub fn of(reply: Reply) -> Self {
        Self { reply, descriptors: Vec::new(), last: false }
    }

    pub fn with(reply: Reply, descriptors: Vec<OwnedFd>) -> Self {
        Self { reply, descriptors, last: false }
    }

    pub fn done() -> Self {
        Self::of(Reply::Done)
    }

    pub fn last(error: VerbsError) -> Self {
        Self { reply: Reply::Failed(error), descriptors: Vec::new(), last: true }
    }
}

impl From<VerbsError> for Answer {
    fn from(error: VerbsError) -> Self {
        Self::of(Reply::Failed(error))
    }
}
