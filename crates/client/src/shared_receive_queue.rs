//! Shared receive queues: basic ones, and those for XRC, which have a CQ of their own.
use crate::completion_queue::CompletionQueue;
use crate::lock;
use crate::passed::Passed;
use crate::registry::{Entry, Tag};
use crate::session::Session;
use crate::shared_receives::{Posts, SharedReceives};
use freeflow_protocol::library::{Handle, Reply, Request, XrcQueue};
use freeflow_shm::RequestProducer;
use freeflow_shm::layout::QueueShape;
use freeflow_verbs::{Sge, SrqAttributes, VerbsError};
use std::fmt;
use std::sync::Arc;

/// A shared receive queue.
pub struct SharedReceiveQueue {
    session: Arc<Session>,
    handle: Handle,
    cookie: u32,
    attributes: SrqAttributes,
    /// Number by which XRC senders name it; 0 for a basic one.
    number: u32,
    /// XRC: where its RECVs complete.
    cq: Option<Arc<CompletionQueue>>,
    receives: Arc<SharedReceives>,
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl SharedReceiveQueue {
    /// `xrc`: the XRC domain that it is in, and the CQ of its RECVs.
    pub fn create(
        session: &Arc<Session>,
        pd: Handle,
        wanted: SrqAttributes,
        xrc: Option<(Handle, &Arc<CompletionQueue>)>,
    ) -> Result<Self, VerbsError> {
        let cookie = lock(&session.objects).queues.allocate(Entry::default())?;
        let queue = xrc.map(|(xrcd, cq)| XrcQueue { xrcd, cq: cq.handle() });
        let made = session
            .call(&Request::CreateSrq { pd, attributes: wanted, cookie, xrc: queue })
            .and_then(|(reply, descriptors)| open_ring(session, reply, &descriptors));
        let (handle, number, attributes, ring) = match made {
            Ok(made) => made,
            Err(error) => {
                lock(&session.objects).queues.remove(cookie);
                return Err(error);
            }
        };
        let receives = SharedReceives::new(session, pd, cookie, attributes.max_wr, ring);
        let cq = xrc.map(|(_, cq)| cq.clone());
        if let Some(cq) = &cq {
            cq.attach_srq(cookie, receives.completed());
        }
        Ok(Self { session: session.clone(), handle, cookie, attributes, number, cq, receives })
    }

    /// Refused with Busy while a QP uses it. An XRC one takes its completions along.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroySrq { srq: self.handle })?;
        if let Some(cq) = &self.cq {
            cq.purge_srq(self.cookie);
            cq.detach(self.cookie);
        }
        lock(&self.session.objects).queues.remove(self.cookie);
        Ok(())
    }

    /// Sets the tag that events of this SRQ carry.
    pub fn set_tag(&self, tag: Tag) {
        if let Some(entry) = lock(&self.session.objects).queues.get_mut(self.cookie) {
            entry.tag = tag;
        }
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Number by which XRC senders name it; `None` for a basic one.
    pub fn number(&self) -> Option<u32> {
        self.cq.is_some().then_some(self.number)
    }

    /// The attributes that the router granted.
    pub fn attributes(&self) -> SrqAttributes {
        self.attributes
    }

    pub fn query(&self) -> Result<SrqAttributes, VerbsError> {
        match self.session.call(&Request::QuerySrq { srq: self.handle })? {
            (Reply::SrqAttributes(attributes), _) => Ok(attributes),
            _ => Err(self.session.nonsense()),
        }
    }

    /// Arms the limit event.
    pub fn set_limit(&self, limit: u32) -> Result<(), VerbsError> {
        self.session.command(&Request::ModifySrq { srq: self.handle, limit })?;
        self.receives.note_limit(limit);
        Ok(())
    }

    pub(crate) fn receives(&self) -> &Arc<SharedReceives> {
        &self.receives
    }

    /// Takes the queue's lock for a list of posts.
    pub fn begin(&self) -> Result<SrqBatch<'_>, VerbsError> {
        Ok(SrqBatch { sge_count_max: self.attributes.max_sge as usize, posts: self.receives.begin()? })
    }
}

/// Posts to an SRQ; dropping it rings the doorbell once.
pub struct SrqBatch<'a> {
    sge_count_max: usize,
    posts: Posts<'a>,
}

impl SrqBatch<'_> {
    /// # Errors
    /// InvalidArgument: too many SGEs. NoMemory: the queue is full.
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), VerbsError> {
        if sges.len() > self.sge_count_max {
            return Err(VerbsError::InvalidArgument);
        }
        self.posts.push(wr_id, sges)
    }
}

fn open_ring(
    session: &Session,
    reply: Reply,
    descriptors: &[Passed],
) -> Result<(Handle, u32, SrqAttributes, RequestProducer), VerbsError> {
    let (Reply::Srq { srq, number, attributes, segment_bytes }, [memory]) = (reply, descriptors) else {
        return Err(session.nonsense());
    };
    let shape = QueueShape::receive(attributes.max_wr, attributes.max_sge);
    if segment_bytes < shape.bytes() as u64 {
        return Err(session.nonsense());
    }
    match memory.map(shape.bytes()) {
        Ok(segment) => {
            // See the CQ's.
            let _ = segment.set_dontfork();
            Ok((srq, number, attributes, RequestProducer::new(Arc::new(segment), 0, shape)))
        }
        Err(_) => {
            let _ = session.destroy(&Request::DestroySrq { srq });
            Err(VerbsError::NoMemory)
        }
    }
}
