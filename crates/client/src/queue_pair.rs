//! Queue pairs: their rings, posting, and what a change of state does to both.
use crate::completion_queue::{CompletionQueue, Role};
use crate::inbox::{Inbox, Own};
use crate::incoming::{Incoming, SGES_MAX};
use crate::lock;
use crate::outgoing::{Home, Outgoing};
use crate::regions::Cache;
use crate::registry::{Entry, Tag};
use crate::session::Session;
use crate::shared_receive_queue::{Completed, SharedReceiveQueue};
use crate::virtual_positions::VirtualPositions;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::layout::QueueShape;
use freeflow_shm::{CreditWriter, OwnMemory, RequestProducer, Segment, SendDescriptor, monotonic_ns};
use freeflow_verbs::{
    Access, Completion, CompletionFlags, CompletionOpcode, Gid, PathMtu, QpAttributeMask, QpAttributes, QpCapabilities,
    QpState, QpType, SendFlags, SendOpcode, Sge, VerbsError,
};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// What a QP is made with. What must be there and what must not says its type; the router checks it.
pub struct QpParameters<'a> {
    pub qp_type: QpType,
    /// All but `XrcReceive`.
    pub pd: Option<Handle>,
    pub send_cq: Option<&'a Arc<CompletionQueue>>,
    /// RC, UC, UD.
    pub recv_cq: Option<&'a Arc<CompletionQueue>>,
    pub srq: Option<&'a Arc<SharedReceiveQueue>>,
    /// `XrcReceive`.
    pub xrcd: Option<Handle>,
    pub capabilities: QpCapabilities,
    pub all_signaled: bool,
    /// UD: its own multicast messages don't come back to it.
    pub block_own_multicast: bool,
    /// The identifier that it is for: the QP begins in INIT, a UD one in RTS.
    pub connection: Option<Handle>,
}

/// A queue pair.
pub struct QueuePair {
    pub(crate) session: Arc<Session>,
    handle: Handle,
    /// None: an XRC target, which takes its RECVs from the SRQs of its domain.
    rings: Option<Arc<Rings>>,
    cookie: u32,
    qpn: u32,
    qp_type: QpType,
    all_signaled: bool,
    capabilities: QpCapabilities,
    send_cq: Option<Arc<CompletionQueue>>,
    recv_cq: Option<Arc<CompletionQueue>>,
    srq: Option<Arc<SharedReceiveQueue>>,
    /// The state as last heard of: the router may have moved the QP to an error state since.
    state: AtomicU32,
    /// Held while the state changes.
    pub(crate) modifying: Mutex<()>,
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("qpn", &self.qpn).finish_non_exhaustive()
    }
}

/// The rings of a QP, as its CQs see them.
pub(crate) struct Rings {
    pub cookie: u32,
    pub qpn: u32,
    pub pd: Handle,
    handle: Handle,
    send: Mutex<SendSide>,
    /// Send requests before this virtual position are finished. Written by the poller of the send CQ.
    send_done: AtomicU32,
    virtual_positions: VirtualPositions,
    /// Completions of this QP's sends in the inbox of its CQ.
    inbox_count: AtomicU32,
    pub receive: Mutex<ReceiveSide>,
    /// Receives before this position are finished. Written by the poller of the receive CQ.
    receive_done: AtomicU32,
    srq: Option<Arc<Completed>>,
    /// Of its CQs.
    send_inbox: Option<Arc<Inbox>>,
    receive_inbox: Option<Arc<Inbox>>,
    /// There while messages may come by a channel. Under the lock of the receive CQ.
    has_incoming: AtomicBool,
    pub incoming: Mutex<Option<Incoming>>,
    own: Weak<Self>,
}

/// The send queue, and what does its requests.
pub(crate) struct SendSide {
    ring: RequestProducer,
    outgoing: Outgoing,
}

/// The receive queue, and who is told of its RECVs.
pub(crate) struct ReceiveSide {
    pub ring: RequestProducer,
    credits: Option<CreditWriter>,
    keys: Cache,
}

impl Rings {
    /// Whether a completion is of this QP.
    pub fn is_of(&self, completion: &Completion) -> bool {
        completion.qp_cookie == self.cookie && completion.qpn == self.qpn
    }

    /// Frees the slots that a polled completion stands for.
    #[inline]
    pub fn give_back(&self, completion: &Completion) {
        let next = completion.ring_position.wrapping_add(1);
        // Release: pairs with the Acquire loads where slots are claimed.
        if completion.flags.contains(CompletionFlags::SEND_QUEUE) {
            let next = self.virtual_positions.of_ring(completion.ring_position).wrapping_add(1);
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

    /// The same for one that stood in the CQ's inbox; its position is a virtual one.
    #[inline]
    pub fn give_back_own(&self, completion: &Completion) {
        // Release: as in `give_back`.
        self.send_done.store(completion.ring_position.wrapping_add(1), Ordering::Release);
        // Relaxed: under the CQ's lock, but for the addition.
        self.inbox_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a completion from the inbox has its turn: those of the router's that are older were returned.
    #[inline]
    pub fn has_turn(&self, after: u32) -> bool {
        (self.send_done.load(Ordering::Relaxed).wrapping_sub(after) as i32) >= 0
    }

    /// Whether completions of this QP's sends in the inbox may be older than one of the router's.
    #[inline]
    pub fn has_own(&self) -> bool {
        // Acquire; partner: the Release addition in `SendBatch::complete`, which comes before later requests are posted.
        self.inbox_count.load(Ordering::Acquire) != 0
    }

    /// The virtual position of a request of the router's.
    pub fn virtual_position(&self, completion: &Completion) -> u32 {
        self.virtual_positions.of_ring(completion.ring_position)
    }

    #[inline]
    pub fn has_incoming(&self) -> bool {
        // Relaxed: stored under the lock of the receive CQ, which the caller has.
        self.has_incoming.load(Ordering::Relaxed)
    }

    pub fn set_incoming(&self, incoming: Option<Incoming>) {
        if incoming.is_none() && self.has_incoming() {
            lock(&self.receive).credits = None;
        }
        let mut place = lock(&self.incoming);
        // Relaxed: as above.
        self.has_incoming.store(incoming.is_some(), Ordering::Relaxed);
        *place = incoming;
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The channel has news, or there is a new one: the CQ that its messages go to shall look.
    pub fn note_news(&self) {
        if let (Some(inbox), Some(own)) = (&self.receive_inbox, self.own.upgrade()) {
            inbox.add_fresh(own);
        }
    }

    /// The sender learns of the RECVs that are posted, from now on of each. → the RECV that is next.
    pub fn begin_credits(&self, session: &Session, credits: CreditWriter) -> u32 {
        let next = lock(&self.incoming).as_ref().map(Incoming::next);
        let mut side = lock(&self.receive);
        let first = next.unwrap_or_else(|| self.receive_done.load(Ordering::Acquire));
        let mut position = first;
        while position != side.ring.position() {
            let mut sges = [Sge::default(); SGES_MAX + 1];
            let count = side.ring.receive_at(position, &mut sges);
            let room = self.room(session, &mut side.keys, &sges[..count]);
            credits.publish(position, room);
            position = position.wrapping_add(1);
        }
        side.credits = Some(credits);
        first
    }

    /// How many bytes a RECV takes by a channel; `None`: the router must deliver to it.
    #[inline]
    fn room(&self, session: &Session, keys: &mut Cache, sges: &[Sge]) -> Option<u32> {
        if sges.len() > SGES_MAX {
            return None;
        }
        let mut room = 0_u32;
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            session.regions.resolve(keys, sge, self.pd, Access::LOCAL_WRITE)?;
            room = room.checked_add(sge.length)?;
        }
        Some(room)
    }

    /// The oldest unfinished send request: position and work request id.
    pub fn oldest_send(&self) -> Option<(u32, u64)> {
        let side = lock(&self.send);
        let done = self.send_done.load(Ordering::Acquire);
        oldest(&side.ring, self.virtual_positions.to_ring(done, side.ring.position()))
    }

    pub fn oldest_receive(&self) -> Option<(u32, u64)> {
        if self.srq.is_some() {
            return None;
        }
        oldest(&lock(&self.receive).ring, self.receive_done.load(Ordering::Acquire))
    }

    fn reset(&self) {
        let mut send = lock(&self.send);
        send.ring.reset();
        send.outgoing = Outgoing::default();
        self.virtual_positions.reset();
        self.inbox_count.store(0, Ordering::Relaxed);
        self.send_done.store(0, Ordering::Release);
        drop(send);
        let mut receive = lock(&self.receive);
        receive.ring.reset();
        receive.credits = None;
        self.receive_done.store(0, Ordering::Release);
    }
}

fn oldest(ring: &RequestProducer, done: u32) -> Option<(u32, u64)> {
    (ring.position() != done).then(|| (done, ring.wr_id_at(done)))
}

impl QueuePair {
    pub fn create(session: &Arc<Session>, wanted: &QpParameters<'_>) -> Result<Self, VerbsError> {
        Self::make(session, wanted, |cookie| Request::CreateQp {
            qp_type: wanted.qp_type,
            pd: wanted.pd,
            send_cq: wanted.send_cq.map(|cq| cq.handle()),
            recv_cq: wanted.recv_cq.map(|cq| cq.handle()),
            srq: wanted.srq.map(|srq| srq.handle()),
            xrcd: wanted.xrcd,
            capabilities: wanted.capabilities,
            all_signaled: wanted.all_signaled,
            block_own_multicast: wanted.block_own_multicast,
            cookie,
            connection: wanted.connection,
        })
    }

    /// Opens an XRC target that another process made. It goes when the last that has it open destroys it.
    pub fn open(session: &Arc<Session>, xrcd: Handle, qpn: u32) -> Result<Self, VerbsError> {
        let wanted = QpParameters {
            qp_type: QpType::XrcReceive,
            pd: None,
            send_cq: None,
            recv_cq: None,
            srq: None,
            xrcd: Some(xrcd),
            capabilities: QpCapabilities::default(),
            all_signaled: false,
            block_own_multicast: false,
            connection: None,
        };
        Self::make(session, &wanted, |cookie| Request::OpenQp { xrcd, qpn, cookie })
    }

    fn make(
        session: &Arc<Session>,
        wanted: &QpParameters<'_>,
        request: impl FnOnce(u32) -> Request,
    ) -> Result<Self, VerbsError> {
        let cookie = lock(&session.objects).queues.allocate(Entry::default())?;
        let made = session
            .call(&request(cookie))
            .and_then(|(reply, descriptors)| made(session, reply, &descriptors, cookie, wanted));
        let (handle, qpn, capabilities, rings) = match made {
            Ok(made) => made,
            Err(error) => {
                lock(&session.objects).queues.remove(cookie);
                return Err(error);
            }
        };
        let rings = rings.map(|rings| Arc::new_cyclic(|own| Rings { own: own.clone(), ..rings }));
        if let Some(rings) = &rings {
            attach(rings, wanted);
            if wanted.qp_type == QpType::Rc && wanted.srq.is_none() {
                lock(&session.listeners).insert(cookie, Arc::downgrade(rings));
            }
        }
        Ok(Self {
            session: session.clone(),
            handle,
            rings,
            cookie,
            qpn,
            qp_type: wanted.qp_type,
            all_signaled: wanted.all_signaled,
            capabilities,
            send_cq: wanted.send_cq.cloned(),
            recv_cq: wanted.recv_cq.cloned(),
            srq: wanted.srq.cloned(),
            state: AtomicU32::new(first_state(wanted) as u32),
            modifying: Mutex::new(()),
        })
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    /// On return nothing of the QP's buffers is touched any more, and no completion of it will be polled (an XRC
    /// target's are its SRQs', and stay).
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroyQp { qp: self.handle })?;
        lock(&self.session.listeners).remove(&self.cookie);
        self.purge();
        for cq in self.send_cq.iter().chain(&self.recv_cq) {
            cq.detach(self.cookie);
        }
        lock(&self.session.objects).queues.remove(self.cookie);
        Ok(())
    }

    fn purge(&self) {
        let Some(rings) = &self.rings else { return };
        if let Some(cq) = &self.send_cq {
            cq.purge(rings);
        }
        if let Some(cq) = &self.recv_cq
            && !self.send_cq.as_ref().is_some_and(|send_cq| Arc::ptr_eq(send_cq, cq))
        {
            cq.purge(rings);
        }
    }

    /// What events of this QP are delivered with.
    pub fn set_tag(&self, tag: Tag) {
        if let Some(entry) = lock(&self.session.objects).queues.get_mut(self.cookie) {
            entry.tag = tag;
        }
    }

    pub fn qpn(&self) -> u32 {
        self.qpn
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
    #[inline]
    pub fn state(&self) -> QpState {
        QpState::from_number(self.state.load(Ordering::Acquire)).unwrap_or(QpState::Error)
    }

    pub(crate) fn set_state(&self, state: QpState) {
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
        if mask.contains(QpAttributeMask::STATE) && attributes.state == QpState::Error {
            self.empty_channel();
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
            if let Some(rings) = &self.rings {
                rings.reset();
                if let Some(inbox) = &rings.send_inbox {
                    // A post that was under way when the completions were dropped.
                    inbox.purge(rings);
                }
            }
        }
        if mask.contains(QpAttributeMask::PATH_MTU) {
            self.set_path_mtu(attributes.path_mtu);
        }
        self.set_state(state);
        Ok(state)
    }

    /// Before ERROR: what the peer has sent until now comes before what is flushed.
    pub(crate) fn empty_channel(&self) {
        if let (Some(cq), Some(rings)) = (&self.recv_cq, &self.rings) {
            cq.empty_channel(rings);
        }
    }

    pub(crate) fn set_path_mtu(&self, mtu: PathMtu) {
        if let Some(rings) = &self.rings {
            lock(&rings.send).ring.set_path_mtu(mtu);
        }
    }

    pub fn query(&self) -> Result<QpAttributes, VerbsError> {
        let _alone = lock(&self.modifying);
        self.ask_state()
    }

    pub(crate) fn ask_state(&self) -> Result<QpAttributes, VerbsError> {
        match self.session.call(&Request::QueryQp { qp: self.handle })? {
            (Reply::QpAttributes(attributes), _) => {
                self.set_state(attributes.state);
                Ok(attributes)
            }
            _ => Err(self.session.nonsense()),
        }
    }

    /// Attaches a UD QP to a multicast group.
    pub fn attach_multicast(&self, gid: Gid) -> Result<(), VerbsError> {
        self.session.command(&Request::AttachMulticast { qp: self.handle, gid })
    }

    /// InvalidArgument: it is not attached.
    pub fn detach_multicast(&self, gid: Gid) -> Result<(), VerbsError> {
        self.session.command(&Request::DetachMulticast { qp: self.handle, gid })
    }

    /// Posts one send request.
    ///
    /// # Errors
    /// Those of [`Self::begin_send`] and [`SendBatch::push`].
    pub fn post(&self, request: &SendDescriptor<'_>) -> Result<(), VerbsError> {
        self.begin_send()?.push(request)
    }

    /// Takes the send queue's lock for a list of posts.
    ///
    /// # Errors
    /// InvalidArgument: the QP's state or type takes no sends. DeviceFatal: the router is gone.
    #[inline]
    pub fn begin_send(&self) -> Result<SendBatch<'_>, VerbsError> {
        let rings = &**self.rings.as_ref().ok_or(VerbsError::InvalidArgument)?;
        let side = lock(&rings.send);
        // Under the lock: a flush looks at the ring under it after the session died, so nothing is posted unflushed.
        self.session.live()?;
        if matches!(self.state(), QpState::Reset | QpState::Init | QpState::ReadyToReceive) {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(SendBatch { qp: self, rings, side, posted: false })
    }

    /// The same for the receive queue.
    ///
    /// # Errors
    /// InvalidArgument: the QP is in RESET, uses an SRQ, or is of XRC. DeviceFatal: the router is gone.
    #[inline]
    pub fn begin_receive(&self) -> Result<ReceiveBatch<'_>, VerbsError> {
        let rings = &**self.rings.as_ref().ok_or(VerbsError::InvalidArgument)?;
        if self.srq.is_some() || self.qp_type == QpType::XrcSend {
            return Err(VerbsError::InvalidArgument);
        }
        let side = lock(&rings.receive);
        self.session.live()?;
        if self.state() == QpState::Reset {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(ReceiveBatch { qp: self, rings, side, posted: false })
    }
}

/// Posts to a send queue; dropping it rings the doorbell once.
pub struct SendBatch<'a> {
    qp: &'a QueuePair,
    rings: &'a Rings,
    side: MutexGuard<'a, SendSide>,
    posted: bool,
}

impl SendBatch<'_> {
    /// Requests that can still be posted.
    #[inline]
    pub fn room(&self) -> u32 {
        // Acquire: pairs with `give_back`.
        let outstanding = self.posted().wrapping_sub(self.rings.send_done.load(Ordering::Acquire));
        self.qp.capabilities.max_send_wr.saturating_sub(outstanding)
    }

    /// # Errors
    /// NoMemory: the queue is full. InvalidArgument: see [`check_send`].
    pub fn push(&mut self, request: &SendDescriptor<'_>) -> Result<(), VerbsError> {
        self.push_here(request)
    }

    /// [`Self::push`] as a part of the caller: its request is then never made in memory.
    #[inline(always)]
    pub fn push_here(&mut self, request: &SendDescriptor<'_>) -> Result<(), VerbsError> {
        check_send(self.qp.qp_type, &self.qp.capabilities, request)?;
        if self.room() == 0 {
            return Err(VerbsError::NoMemory);
        }
        let signaled = self.qp.all_signaled || request.flags.contains(SendFlags::SIGNALED);
        if self.qp.qp_type == QpType::Rc {
            if let Some(own) = self.qp.session.own_memory()
                && self.carry_out(own, request)
            {
                self.complete(request, signaled);
                return Ok(());
            }
            let position = self.posted();
            let SendSide { ring, outgoing } = &mut *self.side;
            outgoing.hand_over(request, position, signaled);
            self.rings.virtual_positions.keep_near(ring.position());
        }
        self.side.ring.publish_send(request);
        self.posted = true;
        self.note_post();
        Ok(())
    }

    #[inline]
    fn note_post(&self) {
        if let Some(cq) = &self.qp.send_cq {
            cq.note_post();
        }
    }

    /// The virtual position of the next request.
    #[inline]
    fn posted(&self) -> u32 {
        self.side.ring.position().wrapping_add(self.rings.virtual_positions.others())
    }

    /// Carries a request out here, if that can be. False: the router shall.
    #[inline]
    fn carry_out(&mut self, own: OwnMemory, request: &SendDescriptor<'_>) -> bool {
        if self.qp.state() != QpState::ReadyToSend {
            return false;
        }
        let qp = self.qp;
        let home = Home { session: &qp.session, handle: qp.handle, cookie: qp.cookie, pd: self.rings.pd, own };
        // Acquire: pairs with `give_back`.
        let returned = self.rings.send_done.load(Ordering::Acquire);
        let SendSide { ring, outgoing } = &mut *self.side;
        outgoing.carry_out(&home, ring, returned, request)
    }

    /// A request was carried out.
    #[inline]
    fn complete(&mut self, request: &SendDescriptor<'_>, signaled: bool) {
        let position = self.posted();
        if self.side.outgoing.note_done(position) {
            self.rings.virtual_positions.note_change(self.side.ring.position());
        }
        self.rings.virtual_positions.add_other();
        let (true, Some(inbox), Some(cq)) = (signaled, &self.rings.send_inbox, &self.qp.send_cq) else {
            return self.note_post();
        };
        let (opcode, byte_count) = match request.opcode {
            SendOpcode::RdmaWrite | SendOpcode::RdmaWriteWithImmediate => (CompletionOpcode::RdmaWrite, 0),
            SendOpcode::RdmaRead => (CompletionOpcode::RdmaRead, request.sges.iter().map(|sge| sge.length).sum()),
            _ => (CompletionOpcode::Send, 0),
        };
        let completion = Completion {
            work_request_id: request.wr_id,
            opcode,
            byte_count,
            flags: CompletionFlags(CompletionFlags::SEND_QUEUE),
            qpn: self.rings.qpn,
            qp_cookie: self.rings.cookie,
            ring_position: position,
            timestamp_ns: if cq.has_timestamps() { monotonic_ns() } else { 0 },
            ..Completion::default()
        };
        // Release; partner: the Acquire load in `has_own`.
        self.rings.inbox_count.fetch_add(1, Ordering::Release);
        if inbox.push(Own { completion, after: self.side.outgoing.signaled_until() }) {
            cq.ring_armed();
        }
    }
}

impl Drop for SendBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.posted && self.side.ring.must_ring_send() {
            self.qp.session.ring(self.qp.cookie);
        }
    }
}

/// Bytes that an ATOMIC_WRITE writes.
const ATOMIC_WRITE_BYTES: usize = 8;

/// What can be wrong with a send request before it is posted: too many SGEs, too much inline payload, an opcode that
/// its transport lacks (IBTA table 92), inline data with an opcode that has no payload to send.
///
/// UC has no packet for SEND_WITH_INV (IBTA table 38), so it has no such request either.
#[inline]
pub fn check_send(
    qp_type: QpType,
    capabilities: &QpCapabilities,
    request: &SendDescriptor<'_>,
) -> Result<(), VerbsError> {
    let opcode = request.opcode;
    let allowed = matches!(qp_type, QpType::Rc | QpType::XrcSend) || allows(qp_type, opcode);
    let fits = match request.inline {
        Some(payload) if opcode.is_send() || opcode.is_write() => {
            payload.len() <= capabilities.max_inline_data as usize
        }
        Some(payload) => opcode == SendOpcode::AtomicWrite && payload.len() == ATOMIC_WRITE_BYTES,
        None => request.sges.len() <= capabilities.max_send_sge as usize,
    };
    if allowed && fits && request.inline.is_some() == request.flags.contains(SendFlags::INLINE) {
        Ok(())
    } else {
        Err(VerbsError::InvalidArgument)
    }
}

/// What transports other than RC have.
fn allows(qp_type: QpType, opcode: SendOpcode) -> bool {
    match qp_type {
        QpType::Rc | QpType::XrcSend => true,
        QpType::Uc => {
            opcode.is_write() || opcode.is_local() || (opcode.is_send() && opcode != SendOpcode::SendWithInvalidate)
        }
        QpType::Ud => matches!(opcode, SendOpcode::Send | SendOpcode::SendWithImmediate),
        QpType::XrcReceive => false,
    }
}

/// Posts to a receive queue; dropping it rings the doorbell once.
pub struct ReceiveBatch<'a> {
    qp: &'a QueuePair,
    rings: &'a Rings,
    side: MutexGuard<'a, ReceiveSide>,
    posted: bool,
}

impl ReceiveBatch<'_> {
    /// # Errors
    /// InvalidArgument: too many SGEs. NoMemory: the queue is full.
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), VerbsError> {
        let capabilities = &self.qp.capabilities;
        if sges.len() > capabilities.max_recv_sge as usize {
            return Err(VerbsError::InvalidArgument);
        }
        // Acquire: pairs with `give_back`.
        let outstanding = self.side.ring.position().wrapping_sub(self.rings.receive_done.load(Ordering::Acquire));
        if outstanding >= capabilities.max_recv_wr {
            return Err(VerbsError::NoMemory);
        }
        let position = self.side.ring.publish_receive(wr_id, sges);
        let ReceiveSide { credits, keys, .. } = &mut *self.side;
        if let Some(credits) = credits {
            credits.publish(position, self.rings.room(&self.qp.session, keys, sges));
        }
        self.posted = true;
        Ok(())
    }
}

impl Drop for ReceiveBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.posted && self.side.ring.must_ring_receive() {
            self.qp.session.ring(self.qp.cookie);
        }
    }
}

/// The state that the router leaves a new QP in.
fn first_state(wanted: &QpParameters<'_>) -> QpState {
    match (wanted.connection, wanted.qp_type) {
        (None, _) => QpState::Reset,
        (Some(_), QpType::Ud) => QpState::ReadyToSend,
        (Some(_), _) => QpState::Init,
    }
}

/// Tells the CQs which completions of a QP come to them.
fn attach(rings: &Arc<Rings>, wanted: &QpParameters<'_>) {
    match (wanted.send_cq, wanted.recv_cq) {
        (Some(send_cq), Some(recv_cq)) if Arc::ptr_eq(send_cq, recv_cq) => {
            send_cq.attach(rings, Role { sends: true, receives: true });
        }
        (send_cq, recv_cq) => {
            if let Some(cq) = send_cq {
                cq.attach(rings, Role { sends: true, receives: false });
            }
            if let Some(cq) = recv_cq {
                cq.attach(rings, Role { sends: false, receives: true });
            }
        }
    }
}

/// What a created or opened QP is: handle, number, what was granted, and its rings, mapped.
fn made(
    session: &Session,
    reply: Reply,
    descriptors: &[OwnedFd],
    cookie: u32,
    wanted: &QpParameters<'_>,
) -> Result<(Handle, u32, QpCapabilities, Option<Rings>), VerbsError> {
    let Reply::Qp { qp, qpn, capabilities, segment_bytes } = reply else {
        return Err(session.nonsense());
    };
    let memory = match descriptors {
        [] if !wanted.qp_type.sends() => return Ok((qp, qpn, capabilities, None)),
        [memory] if wanted.qp_type.sends() => memory,
        _ => return Err(session.nonsense()),
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
    let send = RequestProducer::new(segment.clone(), 0, send_shape);
    let receive = RequestProducer::new(segment, send_shape.bytes(), receive_shape);
    let rings = Rings {
        cookie,
        qpn,
        pd: wanted.pd.unwrap_or_default(),
        handle: qp,
        send: Mutex::new(SendSide { ring: send, outgoing: Outgoing::default() }),
        send_done: AtomicU32::new(0),
        virtual_positions: VirtualPositions::default(),
        inbox_count: AtomicU32::new(0),
        receive: Mutex::new(ReceiveSide { ring: receive, credits: None, keys: Cache::default() }),
        receive_done: AtomicU32::new(0),
        srq: wanted.srq.map(|srq| srq.completed().clone()),
        send_inbox: wanted.send_cq.map(|cq| cq.inbox().clone()),
        receive_inbox: wanted.recv_cq.map(|cq| cq.inbox().clone()),
        has_incoming: AtomicBool::new(false),
        incoming: Mutex::new(None),
        own: Weak::new(),
    };
    Ok((qp, qpn, capabilities, Some(rings)))
}
