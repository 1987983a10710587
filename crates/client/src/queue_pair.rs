//! Queue pairs: their rings, posting, and what a change of state does to both.
use crate::completion_queue::{CompletionQueue, Role};
use crate::lock;
use crate::registry::{Entry, Tag};
use crate::session::Session;
use crate::shared_receive_queue::{Completed, SharedReceiveQueue};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::layout::QueueShape;
use freeflow_shm::{RequestProducer, Segment, SendDescriptor};
use freeflow_verbs::{
    Completion, CompletionFlags, QpAttributeMask, QpAttributes, QpCapabilities, QpState, QpType, SendFlags, Sge,
    VerbsError,
};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// What a QP is made with.
pub struct QpParameters<'a> {
    pub qp_type: QpType,
    pub send_cq: &'a Arc<CompletionQueue>,
    pub recv_cq: &'a Arc<CompletionQueue>,
    pub srq: Option<&'a Arc<SharedReceiveQueue>>,
    pub capabilities: QpCapabilities,
    pub all_signaled: bool,
}

/// A queue pair.
pub struct QueuePair {
    session: Arc<Session>,
    handle: Handle,
    rings: Arc<Rings>,
    qp_type: QpType,
    capabilities: QpCapabilities,
    send_cq: Arc<CompletionQueue>,
    recv_cq: Arc<CompletionQueue>,
    srq: Option<Arc<SharedReceiveQueue>>,
    /// The state as last heard of: the router may have moved the QP to an error state since.
    state: AtomicU32,
    /// Held while the state changes.
    modifying: Mutex<()>,
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("qpn", &self.rings.qpn).finish_non_exhaustive()
    }
}

/// The rings of a QP, as its CQs see them.
pub(crate) struct Rings {
    pub cookie: u32,
    pub qpn: u32,
    send: Mutex<RequestProducer>,
    /// Send requests before this position are finished. Written by the poller of the send CQ.
    send_done: AtomicU32,
    receive: Mutex<RequestProducer>,
    /// The same for receives. Written by the poller of the receive CQ.
    receive_done: AtomicU32,
    srq: Option<Arc<Completed>>,
}

impl Rings {
    /// Whether a completion is of this QP.
    pub fn is_of(&self, completion: &Completion) -> bool {
        completion.qp_cookie == self.cookie && completion.qpn == self.qpn
    }

    /// Frees the slots that a polled completion stands for.
    pub fn give_back(&self, completion: &Completion) {
        let next = completion.ring_position.wrapping_add(1);
        // Release: pairs with the Acquire loads where slots are claimed.
        if completion.flags.contains(CompletionFlags::SEND_QUEUE) {
            self.send_done.store(next, Ordering::Release);
        } else if let Some(srq) = &self.srq {
            srq.add_one();
        } else {
            self.receive_done.store(next, Ordering::Release);
        }
    }

    /// The same for a completion that is dropped: the QP's own queues are gone or reset, an SRQ is not.
    pub fn give_back_shared(&self, completion: &Completion) {
        if let Some(srq) = &self.srq
            && !completion.flags.contains(CompletionFlags::SEND_QUEUE)
        {
            srq.add_one();
        }
    }

    /// The oldest unfinished send request: position and work request id.
    pub fn oldest_send(&self) -> Option<(u32, u64)> {
        oldest(&lock(&self.send), self.send_done.load(Ordering::Acquire))
    }

    pub fn oldest_receive(&self) -> Option<(u32, u64)> {
        if self.srq.is_some() {
            return None;
        }
        oldest(&lock(&self.receive), self.receive_done.load(Ordering::Acquire))
    }

    fn reset(&self) {
        let mut send = lock(&self.send);
        send.reset();
        self.send_done.store(0, Ordering::Release);
        drop(send);
        let mut receive = lock(&self.receive);
        receive.reset();
        self.receive_done.store(0, Ordering::Release);
    }
}

fn oldest(ring: &RequestProducer, done: u32) -> Option<(u32, u64)> {
    (ring.position() != done).then(|| (done, ring.wr_id_at(done)))
}

impl QueuePair {
    pub fn create(session: &Arc<Session>, pd: Handle, wanted: &QpParameters<'_>) -> Result<Self, VerbsError> {
        let cookie = lock(&session.objects).queues.allocate(Entry::default())?;
        let request = Request::CreateQp {
            pd,
            qp_type: wanted.qp_type,
            send_cq: wanted.send_cq.handle(),
            recv_cq: wanted.recv_cq.handle(),
            srq: wanted.srq.map(|srq| srq.handle()),
            capabilities: wanted.capabilities,
            all_signaled: wanted.all_signaled,
            cookie,
        };
        let made = session
            .call(&request)
            .and_then(|(reply, descriptors)| open_rings(session, reply, &descriptors, cookie, wanted.srq));
        let (handle, capabilities, rings) = match made {
            Ok(made) => made,
            Err(error) => {
                lock(&session.objects).queues.remove(cookie);
                return Err(error);
            }
        };
        let rings = Arc::new(rings);
        if Arc::ptr_eq(wanted.send_cq, wanted.recv_cq) {
            wanted.send_cq.attach(&rings, Role { sends: true, receives: true });
        } else {
            wanted.send_cq.attach(&rings, Role { sends: true, receives: false });
            wanted.recv_cq.attach(&rings, Role { sends: false, receives: true });
        }
        Ok(Self {
            session: session.clone(),
            handle,
            rings,
            qp_type: wanted.qp_type,
            capabilities,
            send_cq: wanted.send_cq.clone(),
            recv_cq: wanted.recv_cq.clone(),
            srq: wanted.srq.cloned(),
            state: AtomicU32::new(QpState::Reset as u32),
            modifying: Mutex::new(()),
        })
    }

    /// On return nothing of the QP's buffers is touched any more, and no completion of it will be polled.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroyQp { qp: self.handle })?;
        self.purge();
        self.send_cq.detach(self.rings.cookie);
        self.recv_cq.detach(self.rings.cookie);
        lock(&self.session.objects).queues.remove(self.rings.cookie);
        Ok(())
    }

    fn purge(&self) {
        self.send_cq.purge(&self.rings);
        if !Arc::ptr_eq(&self.send_cq, &self.recv_cq) {
            self.recv_cq.purge(&self.rings);
        }
    }

    /// What events of this QP are delivered with.
    pub fn set_tag(&self, tag: Tag) {
        if let Some(entry) = lock(&self.session.objects).queues.get_mut(self.rings.cookie) {
            entry.tag = tag;
        }
    }

    pub fn qpn(&self) -> u32 {
        self.rings.qpn
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    pub fn qp_type(&self) -> QpType {
        self.qp_type
    }

    /// What was granted.
    pub fn capabilities(&self) -> QpCapabilities {
        self.capabilities
    }

    pub fn srq(&self) -> Option<&Arc<SharedReceiveQueue>> {
        self.srq.as_ref()
    }

    /// The state as last heard of.
    pub fn state(&self) -> QpState {
        QpState::from_number(self.state.load(Ordering::Acquire)).unwrap_or(QpState::Error)
    }

    fn set_state(&self, state: QpState) {
        self.state.store(state as u32, Ordering::Release);
    }

    pub fn modify(&self, attributes: &QpAttributes, mask: QpAttributeMask) -> Result<QpState, VerbsError> {
        let _alone = lock(&self.modifying);
        let before = self.state();
        let resets = mask.contains(QpAttributeMask::STATE) && attributes.state == QpState::Reset;
        if resets {
            // Nobody posts from here on: whoever holds a ring's lock now is done before `Rings::reset` has it.
            self.set_state(QpState::Reset);
        }
        let request = Request::ModifyQp { qp: self.handle, attributes: *attributes, mask };
        let state = match self.session.call(&request) {
            Ok((Reply::QpModified { state }, _)) => state,
            Ok(_) => return Err(self.session.nonsense()),
            Err(error) => {
                self.set_state(before);
                return Err(error);
            }
        };
        if resets {
            self.purge();
            self.rings.reset();
        }
        self.set_state(state);
        Ok(state)
    }

    pub fn query(&self) -> Result<QpAttributes, VerbsError> {
        let _alone = lock(&self.modifying);
        match self.session.call(&Request::QueryQp { qp: self.handle })? {
            (Reply::QpAttributes(attributes), _) => {
                self.set_state(attributes.state);
                Ok(attributes)
            }
            _ => Err(self.session.nonsense()),
        }
    }

    /// Takes the send queue's lock for a list of posts.
    ///
    /// # Errors
    /// InvalidArgument: the QP's state takes no sends. DeviceFatal: the router is gone.
    pub fn begin_send(&self) -> Result<SendBatch<'_>, VerbsError> {
        let ring = lock(&self.rings.send);
        // Under the lock: a flush looks at the ring under it after the session died, so nothing is posted unflushed.
        self.session.live()?;
        if matches!(self.state(), QpState::Reset | QpState::Init | QpState::ReadyToReceive) {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(SendBatch { qp: self, ring, posted: false })
    }

    /// The same for the receive queue.
    ///
    /// # Errors
    /// InvalidArgument: the QP is in RESET, or uses an SRQ. DeviceFatal: the router is gone.
    pub fn begin_receive(&self) -> Result<ReceiveBatch<'_>, VerbsError> {
        if self.srq.is_some() {
            return Err(VerbsError::InvalidArgument);
        }
        let ring = lock(&self.rings.receive);
        self.session.live()?;
        if self.state() == QpState::Reset {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(ReceiveBatch { qp: self, ring, posted: false })
    }
}

/// Posts to a send queue; dropping it rings the doorbell once.
pub struct SendBatch<'a> {
    qp: &'a QueuePair,
    ring: MutexGuard<'a, RequestProducer>,
    posted: bool,
}

impl SendBatch<'_> {
    /// Requests that can still be posted.
    pub fn room(&self) -> u32 {
        // Acquire: pairs with `give_back`.
        let outstanding = self.ring.position().wrapping_sub(self.qp.rings.send_done.load(Ordering::Acquire));
        self.qp.capabilities.max_send_wr.saturating_sub(outstanding)
    }

    /// # Errors
    /// NoMemory: the queue is full. InvalidArgument: see [`check_send`].
    pub fn push(&mut self, request: &SendDescriptor<'_>) -> Result<(), VerbsError> {
        check_send(self.qp.qp_type, &self.qp.capabilities, request)?;
        if self.room() == 0 {
            return Err(VerbsError::NoMemory);
        }
        self.ring.publish_send(request);
        self.posted = true;
        Ok(())
    }
}

impl Drop for SendBatch<'_> {
    fn drop(&mut self) {
        if self.posted && self.ring.must_ring_send() {
            self.qp.session.ring(self.qp.rings.cookie);
        }
    }
}

/// What can be wrong with a send request before it is posted: too many SGEs, too much inline payload, an opcode that
/// its transport lacks (IBTA table 92), inline data with an opcode that has no payload to send, an odd atomic.
pub fn check_send(
    qp_type: QpType,
    capabilities: &QpCapabilities,
    request: &SendDescriptor<'_>,
) -> Result<(), VerbsError> {
    let opcode = request.opcode;
    let allowed = match qp_type {
        QpType::Rc => true,
        QpType::Uc => opcode.is_send() || opcode.is_write(),
        QpType::Ud => opcode.is_send(),
    };
    let fits = match request.inline {
        Some(payload) => {
            payload.len() <= capabilities.max_inline_data as usize && (opcode.is_send() || opcode.is_write())
        }
        None => request.sges.len() <= capabilities.max_send_sge as usize,
    };
    if allowed && fits && request.inline.is_some() == request.flags.contains(SendFlags::INLINE) {
        Ok(())
    } else {
        Err(VerbsError::InvalidArgument)
    }
}

/// Posts to a receive queue; dropping it rings the doorbell once.
pub struct ReceiveBatch<'a> {
    qp: &'a QueuePair,
    ring: MutexGuard<'a, RequestProducer>,
    posted: bool,
}

impl ReceiveBatch<'_> {
    /// # Errors
    /// InvalidArgument: too many SGEs. NoMemory: the queue is full.
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), VerbsError> {
        let capabilities = &self.qp.capabilities;
        if sges.len() > capabilities.max_recv_sge as usize {
            return Err(VerbsError::InvalidArgument);
        }
        // Acquire: pairs with `give_back`.
        let outstanding = self.ring.position().wrapping_sub(self.qp.rings.receive_done.load(Ordering::Acquire));
        if outstanding >= capabilities.max_recv_wr {
            return Err(VerbsError::NoMemory);
        }
        self.ring.publish_receive(wr_id, sges);
        self.posted = true;
        Ok(())
    }
}

impl Drop for ReceiveBatch<'_> {
    fn drop(&mut self) {
        if self.posted && self.ring.must_ring_receive() {
            self.qp.session.ring(self.qp.rings.cookie);
        }
    }
}

/// Maps the rings of a created QP.
fn open_rings(
    session: &Session,
    reply: Reply,
    descriptors: &[OwnedFd],
    cookie: u32,
    srq: Option<&Arc<SharedReceiveQueue>>,
) -> Result<(Handle, QpCapabilities, Rings), VerbsError> {
    let (Reply::Qp { qp, qpn, capabilities, segment_bytes }, [memory]) = (reply, descriptors) else {
        return Err(session.nonsense());
    };
    let send_shape =
        QueueShape::send(capabilities.max_send_wr, capabilities.max_send_sge, capabilities.max_inline_data);
    let receive_shape = QueueShape::receive(capabilities.max_recv_wr, capabilities.max_recv_sge);
    let bytes = send_shape.bytes() + receive_shape.bytes();
    if segment_bytes < bytes as u64 {
        return Err(session.nonsense());
    }
    let Ok(segment) = Segment::map(memory.as_fd(), bytes) else {
        let _ = session.destroy(&Request::DestroyQp { qp });
        return Err(VerbsError::NoMemory);
    };
    // See the CQ's.
    let _ = segment.set_dontfork();
    let segment = Arc::new(segment);
    let rings = Rings {
        cookie,
        qpn,
        send: Mutex::new(RequestProducer::new(segment.clone(), 0, send_shape)),
        send_done: AtomicU32::new(0),
        receive: Mutex::new(RequestProducer::new(segment, send_shape.bytes(), receive_shape)),
        receive_done: AtomicU32::new(0),
        srq: srq.map(|srq| srq.completed().clone()),
    };
    Ok((qp, capabilities, rings))
}
