//! One library connection as the control thread sees it: who it is, and the handles it was given.
//!
//! Invariant: a handle is looked up only in the table of the session that names it, so a handle of another session is
//! nothing but a number.
use crate::admission::account::Charge;
use crate::attachment::AttachedProcess;
use crate::control::passes::{ContextName, Pass};
use crate::dataplane::event_pipes::PipeId;
use crate::memory::extents::Extents;
use crate::memory::lease::SegmentLease;
use freeflow_cm::Owner;
use freeflow_engine::{AhId, ContextId, CqId, MrId, MrKeys, MwId, PdId, QpId, SessionId, SrqId, XrcdId};
use freeflow_protocol::encode;
use freeflow_protocol::library::{Handle, Reply};
use freeflow_shm::Segment;
use freeflow_verbs::VerbsError;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub struct ContextEntry {
    pub id: ContextId,
    /// Names it to other processes; an imported context has none of its own.
    pub pass: Option<Pass>,
    /// Of an imported context: where the objects come from that are imported into it.
    pub exporter: Option<ContextName>,
    pub imported_pd_count: u32,
    pub _charge: Charge,
}

pub struct ChannelEntry {
    pub context: Handle,
    pub pipe: PipeId,
    pub _charge: Charge,
}

pub struct PdEntry {
    pub id: PdId,
    pub context: ContextId,
    /// The context that it was imported into.
    pub import: Option<Handle>,
}

pub struct SegmentEntry {
    pub segment: Arc<Segment>,
    pub mapped_at: Option<u64>,
    pub lease: Arc<SegmentLease>,
    pub _import: Option<Charge>,
}

pub struct MrEntry {
    pub id: MrId,
    pub pd: PdId,
    pub lkey: u32,
    pub rkey: u32,
    pub length: u64,
    /// The addresses it lies over; none if it is null, all addresses, or another process'.
    pub extent: Option<Range<u64>>,
    /// Another process registered it.
    pub import: Option<Charge>,
}

impl MrEntry {
    pub fn new(keys: &MrKeys, pd: PdId, address: u64, length: u64) -> Self {
        Self {
            id: keys.mr,
            pd,
            lkey: keys.lkey,
            rkey: keys.rkey,
            length,
            extent: extent(address, length),
            import: None,
        }
    }
}

/// A region of all addresses (implicit ODP) lies over nothing that could not be taken from under it.
fn extent(address: u64, length: u64) -> Option<Range<u64>> {
    let end = address.checked_add(length)?;
    (length > 0 && end < u64::MAX).then_some(address..end)
}

pub struct MwEntry {
    pub id: MwId,
}

pub struct XrcdEntry {
    pub id: XrcdId,
    pub context: ContextId,
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
    pub is_datagram: bool,
    /// The rings'; an XRC target has none.
    pub _charge: Option<Charge>,
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
    /// Of `mrs`.
    pub extents: Extents,
    pub mws: Handles<MwEntry>,
    pub xrcds: Handles<XrcdEntry>,
    pub cqs: Handles<CqEntry>,
    pub srqs: Handles<SrqEntry>,
    pub qps: Handles<QpEntry>,
    /// The handle of an AH stands in send requests, where the engine reads it: its own index.
    pub ahs: BTreeMap<Handle, AhId>,
    /// It manages connections.
    pub cm: Option<Owner>,
    /// The command pipe is open.
    pub commands: Option<Charge>,
    /// Cookies of QPs and SRQs, which are their doorbells; cookies of CQs.
    pub doorbells: BTreeSet<u32>,
    pub cq_cookies: BTreeSet<u32>,
}

impl Objects {
    /// The charge for memory and descriptors; that for the rest is given back at once.
    pub fn into_memory(self) -> impl Send {
        (self.segments, self.qps, self.srqs, self.cqs, self.channels, self.contexts, self.commands)
    }
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
    /// The process that connected.
    pub process: Box<dyn AttachedProcess>,
    pub pid: i32,
    pub vnic: String,
    pub phase: Phase,
    /// The worker has a job of this session; its next request waits.
    pub busy: bool,
    /// epoll does not report its messages.
    pub muted: bool,
    /// It is to be removed once its job is back.
    pub closing: bool,
    /// Notifies the job.
    pub cancelled: Arc<AtomicBool>,
    /// A complaint was logged already.
    pub complained: bool,
    pub objects: Objects,
    /// Descriptors that it should not have sent; to be closed like the socket.
    pub unwanted: Vec<OwnedFd>,
    /// Also held by what was opened of the process: it counts until the last of that is closed.
    pub charge: Arc<Charge>,
}

/// How a library finds memory that the router has made for it.
pub enum NamedMemory {
    /// All of a file.
    File(OwnedFd),
    /// From there on of the one file that its vNIC shares.
    Offset(u64),
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

    /// A reply with memory, which comes before what else it brings.
    pub fn with_memory(reply: Reply, memory: NamedMemory, others: Vec<OwnedFd>) -> Self {
        match memory {
            NamedMemory::File(file) => Self::with(reply, Vec::from_iter(std::iter::once(file).chain(others))),
            NamedMemory::Offset(offset) => Self::with(Reply::Placed { offset, reply: encode(&reply) }, others),
        }
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

/// Result of a request.
#[allow(clippy::large_enum_variant, reason = "it lives for a moment")]
pub(crate) enum Handled {
    Answered(Answer),
    /// The worker has it.
    Submitted,
}

/// Objects that a request took out: they are dropped before the answer goes out, so that their
/// charge is there again.
pub(crate) struct Freed {
    pub bytes: u64,
    pub thing: Box<dyn Any + Send>,
}

pub(crate) type Outcome = Result<Handled, VerbsError>;
