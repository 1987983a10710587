//! Queue pairs: posting, and what a change of state does to their rings.
use crate::completion_queue::CompletionQueue;
use crate::completion_sources::Role;
use crate::inbox::LocalCompletion;
use crate::lock;
use crate::outgoing::ATOMIC_BYTES;
use crate::passed::Passed;
use crate::payload::QpContext;
use crate::receive_side::ReceiveSide;
use crate::registry::{Entry, Tag};
use crate::rings::{Rings, RingsParameters, SendSide};
use crate::session::Session;
use crate::shared_receive_queue::SharedReceiveQueue;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::layout::QueueShape;
use freeflow_shm::{BiasedGuard, OwnMemory, SendDescriptor, monotonic_ns};
use freeflow_verbs::{
    Completion, CompletionFlags, CompletionOpcode, Gid, PathMtu, QpAttributeMask, QpAttributes, QpCapabilities,
    QpState, QpType, SendFlags, SendOpcode, Sge, VerbsError,
};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Parameters for making a QP. Its type decides which must be there and which must not; the router
/// checks them. What must be there and what must not says its type; the router checks it.
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

    /// Opens an XRC target that another process made. It goes when the last that has it open
    /// destroys it.
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
            .and_then(|(reply, descriptors)| Made::from_reply(session, reply, &descriptors, cookie, wanted));
        let Made { handle, qpn, capabilities, rings } = match made {
            Ok(made) => made,
            Err(error) => {
                lock(&session.objects).queues.remove(cookie);
                return Err(error);
            }
        };
        if let Some(rings) = &rings {
            attach(rings, wanted);
            if passes_router(wanted.qp_type) || wanted.qp_type == QpType::Ud {
                let listener: Weak<Rings> = Arc::downgrade(rings);
                lock(&session.listeners).insert(cookie, listener);
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

    /// On return nothing of the QP's buffers is touched any more, and no completion of it will be
    /// polled (an XRC target's are its SRQs', and stay).
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

    /// Sets the tag that events of this QP carry.
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

    /// The capabilities that the router granted.
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
            // Nobody posts from here on: a thread that holds a ring's lock now is done before
            // `Rings::reset` has it.
            self.set_state(QpState::Reset);
        }
        if mask.contains(QpAttributeMask::STATE) && attributes.state == QpState::Error {
            self.drain_direct_ring();
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
                if let Some(cq) = &self.send_cq {
                    cq.reset_sends(rings);
                }
                match &self.recv_cq {
                    Some(cq) => cq.reset_receives(rings),
                    None => rings.reset_receives(),
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
    pub(crate) fn drain_direct_ring(&self) {
        if let (Some(cq), Some(rings)) = (&self.recv_cq, &self.rings) {
            cq.drain_direct_ring(rings);
        }
    }

    pub(crate) fn set_path_mtu(&self, mtu: PathMtu) {
        if let Some(rings) = &self.rings {
            rings.send.lock().ring.set_path_mtu(mtu);
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
        let side = rings.send.lock();
        // Under the lock: a flush looks at the ring under it after the session died, so nothing is
        // posted unflushed.
        self.session.live()?;
        if matches!(self.state(), QpState::Reset | QpState::Init | QpState::ReadyToReceive) {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(SendBatch { qp: self, rings, side, posted: false })
    }

    /// The same for the receive queue.
    ///
    /// # Errors
    /// InvalidArgument: the QP is in RESET, uses an SRQ, or is of XRC. DeviceFatal: the router is
    /// gone.
    #[inline]
    pub fn begin_receive(&self) -> Result<ReceiveBatch<'_>, VerbsError> {
        let rings = &**self.rings.as_ref().ok_or(VerbsError::InvalidArgument)?;
        if self.srq.is_some() || self.qp_type == QpType::XrcSend {
            return Err(VerbsError::InvalidArgument);
        }
        let side = rings.receive.lock();
        self.session.live()?;
        if self.state() == QpState::Reset {
            return Err(VerbsError::InvalidArgument);
        }
        Ok(ReceiveBatch { qp: self, rings, side, posted: false })
    }

    /// For a request that is carried out past the router.
    #[inline]
    fn context(&self, rings: &Rings, own: OwnMemory) -> QpContext<'_> {
        QpContext { session: &self.session, handle: self.handle, cookie: self.cookie, pd: rings.pd, own }
    }
}

/// Posts to a send queue; dropping it rings the doorbell once.
pub struct SendBatch<'a> {
    qp: &'a QueuePair,
    rings: &'a Rings,
    side: BiasedGuard<'a, SendSide>,
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
        if passes_router(self.qp.qp_type) {
            if let Some(own) = self.qp.session.own_memory()
                && self.carry_out(own, request)
            {
                self.complete(request, signaled);
                return Ok(());
            }
            let position = self.posted();
            let SendSide { ring, outgoing } = &mut *self.side;
            outgoing.note_routed(request, position, signaled);
            self.rings.posting_order.keep_near(ring.position());
        } else if self.qp.qp_type == QpType::Ud && self.push_datagram(&{ *request }, signaled) {
            return Ok(());
        }
        self.side.ring.publish_send(&{ *request });
        self.posted = true;
        self.note_post();
        Ok(())
    }

    /// Carries a datagram out, or takes note that the router gets it.
    #[inline(never)] // beside the others
    fn push_datagram(&mut self, request: &SendDescriptor<'_>, signaled: bool) -> bool {
        let qp = self.qp;
        // Acquire: pairs with `give_back`.
        let returned = self.rings.send_done.load(Ordering::Acquire);
        if let Some(own) = qp.session.own_memory()
            && qp.state() == QpState::ReadyToSend
        {
            let context = qp.context(self.rings, own);
            let SendSide { ring, outgoing } = &mut *self.side;
            if outgoing.carry_out_datagram(&context, ring, returned, request) {
                self.complete(request, signaled);
                return true;
            }
        }
        let position = self.posted();
        let SendSide { ring, outgoing } = &mut *self.side;
        outgoing.note_datagram_routed(&self.qp.session, request, position, signaled);
        self.rings.posting_order.keep_near(ring.position());
        false
    }

    #[inline]
    fn note_post(&self) {
        if let Some(cq) = &self.qp.send_cq {
            cq.note_post();
        }
    }

    /// The posting position of the next request.
    #[inline]
    fn posted(&self) -> u32 {
        self.side.ring.position().wrapping_add(self.rings.posting_order.others())
    }

    /// Carries a request out here, if that can be. False: the router shall.
    #[inline]
    fn carry_out(&mut self, own: OwnMemory, request: &SendDescriptor<'_>) -> bool {
        if self.qp.state() != QpState::ReadyToSend {
            return false;
        }
        let context = self.qp.context(self.rings, own);
        // Acquire: pairs with `give_back`.
        let returned = self.rings.send_done.load(Ordering::Acquire);
        let SendSide { ring, outgoing } = &mut *self.side;
        outgoing.carry_out(&context, ring, returned, request)
    }

    /// A request was carried out.
    #[inline]
    fn complete(&mut self, request: &SendDescriptor<'_>, signaled: bool) {
        let position = self.posted();
        if self.side.outgoing.note_done(position) {
            self.rings.posting_order.note_path_switch(self.side.ring.position());
        }
        self.rings.posting_order.add_direct();
        let (true, Some(inbox), Some(cq)) = (signaled, &self.rings.send_inbox, &self.qp.send_cq) else {
            return self.note_post();
        };
        let (opcode, byte_count) = match request.opcode {
            SendOpcode::RdmaWrite | SendOpcode::RdmaWriteWithImmediate => (CompletionOpcode::RdmaWrite, 0),
            SendOpcode::RdmaRead => (CompletionOpcode::RdmaRead, request.sges.iter().map(|sge| sge.length).sum()),
            SendOpcode::FetchAdd => (CompletionOpcode::FetchAdd, ATOMIC_BYTES),
            SendOpcode::CompareSwap => (CompletionOpcode::CompareSwap, ATOMIC_BYTES),
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
        self.rings.count_own();
        if inbox.push(LocalCompletion { completion, after: self.side.outgoing.signaled_until() }) {
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

/// Finds errors of a send request before it is posted: too many SGEs, too much inline payload, an
/// opcode that its transport lacks (IBTA table 92), inline data with an opcode that has no payload
/// to send.
///
/// UC has no packet for SEND_WITH_INV (IBTA table 38), so it has no such request either.
#[inline]
pub fn check_send(
    qp_type: QpType,
    capabilities: &QpCapabilities,
    request: &SendDescriptor<'_>,
) -> Result<(), VerbsError> {
    let opcode = request.opcode;
    let allowed = allows(qp_type, opcode);
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

/// Whether a transport has an opcode.
#[inline]
fn allows(qp_type: QpType, opcode: SendOpcode) -> bool {
    /// A bit for each opcode.
    const fn set(opcodes: &[SendOpcode]) -> u32 {
        match opcodes {
            [first, others @ ..] => 1 << *first as u32 | set(others),
            [] => 0,
        }
    }
    const DATAGRAMS: u32 = set(&[SendOpcode::Send, SendOpcode::SendWithImmediate]);
    const WRITES: u32 = set(&[SendOpcode::RdmaWrite, SendOpcode::RdmaWriteWithImmediate]);
    const LOCAL: u32 = set(&[SendOpcode::LocalInvalidate, SendOpcode::BindWindow]);
    let opcodes = match qp_type {
        QpType::Rc | QpType::XrcSend => u32::MAX,
        QpType::Uc => DATAGRAMS | WRITES | LOCAL,
        QpType::Ud => DATAGRAMS,
        QpType::XrcReceive => 0,
    };
    opcodes >> opcode as u32 & 1 != 0
}

/// Posts to a receive queue; dropping it rings the doorbell once.
pub struct ReceiveBatch<'a> {
    qp: &'a QueuePair,
    rings: &'a Rings,
    side: BiasedGuard<'a, ReceiveSide>,
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
            credits.publish(position, self.qp.session.regions.room(keys, sges, self.rings.pd));
        }
        self.posted = true;
        Ok(())
    }
}

impl ReceiveBatch<'_> {
    /// The router waits for a RECV, or an armed CQ hears of the datagram that did.
    #[cold]
    fn ring(&mut self) {
        if self.side.ring.must_ring_receive() {
            self.qp.session.ring(self.qp.cookie);
        }
        if let Some(doorbell) = self.side.waiting.take() {
            self.qp.session.ring(doorbell);
        }
    }
}

impl Drop for ReceiveBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.posted && (self.side.ring.must_ring_receive() || self.side.waiting.is_some()) {
            self.ring();
        }
    }
}

/// Whether requests of such a QP may go past the router to its peer.
#[inline]
fn passes_router(qp_type: QpType) -> bool {
    matches!(qp_type, QpType::Rc | QpType::Uc)
}

/// The state that the router leaves a new QP in.
fn first_state(wanted: &QpParameters<'_>) -> QpState {
    match (wanted.connection, wanted.qp_type) {
        (None, _) => QpState::Reset,
        (Some(_), QpType::Ud) => QpState::ReadyToSend,
        (Some(_), _) => QpState::Init,
    }
}

/// Registers with the CQs the completions of a QP that come to them.
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

/// A created or opened QP: its number, its limits, and its rings, mapped.
struct Made {
    handle: Handle,
    qpn: u32,
    capabilities: QpCapabilities,
    rings: Option<Arc<Rings>>,
}

impl Made {
    fn from_reply(
        session: &Session,
        reply: Reply,
        descriptors: &[Passed],
        cookie: u32,
        wanted: &QpParameters<'_>,
    ) -> Result<Self, VerbsError> {
        let Reply::Qp { qp: handle, qpn, capabilities, segment_bytes } = reply else {
            return Err(session.nonsense());
        };
        let memory = match descriptors {
            [] if !wanted.qp_type.sends() => return Ok(Self { handle, qpn, capabilities, rings: None }),
            [memory] if wanted.qp_type.sends() => memory,
            _ => return Err(session.nonsense()),
        };
        let send_shape =
            QueueShape::send(capabilities.max_send_wr, capabilities.max_send_sge, capabilities.max_inline_data);
        let receive_shape = QueueShape::receive(capabilities.max_recv_wr, capabilities.max_recv_sge);
        if segment_bytes < (send_shape.bytes() + receive_shape.bytes()) as u64 {
            return Err(session.nonsense());
        }
        let parameters = RingsParameters {
            cookie,
            qpn,
            qp_type: wanted.qp_type,
            pd: wanted.pd.unwrap_or_default(),
            handle,
            send_shape,
            receive_shape,
            srq: wanted.srq.map(|srq| srq.receives().clone()),
            send_inbox: wanted.send_cq.map(|cq| cq.inbox().clone()),
            receive_inbox: wanted.recv_cq.map(|cq| cq.inbox().clone()),
        };
        let Some(rings) = Rings::map(memory, parameters) else {
            let _ = session.destroy(&Request::DestroyQp { qp: handle });
            return Err(VerbsError::NoMemory);
        };
        Ok(Self { handle, qpn, capabilities, rings: Some(rings) })
    }
}
