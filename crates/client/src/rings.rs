//! The rings of a queue pair, as posts, its CQs and its direct ring see them.
use crate::datagrams::Datagrams;
use crate::inbox::Inbox;
use crate::incoming::{Arrivals, Incoming};
use crate::outgoing::Outgoing;
use crate::passed::Passed;
use crate::posting_order::PostingOrder;
use crate::receive_side::{ReceiveQueue, ReceiveSide};
use crate::regions::{Cache, SGES_MAX};
use crate::session::{NotificationListener, Session};
use crate::shared_receives::{Promisee, SharedReceives};
use freeflow_protocol::library::Handle;
use freeflow_shm::layout::QueueShape;
use freeflow_shm::{BiasedMutex, CreditWriter, OwnMemory, RequestProducer};
use freeflow_verbs::{Completion, CompletionFlags, QpType, Sge};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

/// The rings of a QP.
pub(crate) struct Rings {
    pub cookie: u32,
    pub qpn: u32,
    pub pd: Handle,
    handle: Handle,
    pub send: BiasedMutex<SendSide>,
    /// Send requests before this posting position are finished. Written by the poller of the send
    /// CQ.
    pub send_done: AtomicU32,
    pub posting_order: PostingOrder,
    /// Completions of this QP's sends that were put into the inbox of its CQ, under the lock of
    /// `send`, and those taken out, under that of the CQ.
    inbox_added: AtomicU32,
    inbox_taken: AtomicU32,
    pub receive: BiasedMutex<ReceiveSide>,
    /// Receives before this position are finished: messages, if it uses an SRQ. Written by the
    /// poller of the receive CQ.
    pub receive_done: AtomicU32,
    srq: Option<Arc<SharedReceives>>,
    /// Of its CQs.
    pub send_inbox: Option<Arc<Inbox>>,
    receive_inbox: Option<Arc<Inbox>>,
    /// There while messages may come by a direct ring. Under the lock of the receive CQ.
    has_incoming: AtomicBool,
    pub incoming: BiasedMutex<Option<Arrivals>>,
    is_datagram: bool,
    /// Rings of datagrams that were offered and that this side knows of. Under the lock of the receive CQ.
    offers_seen: AtomicU32,
    own: Weak<Self>,
}

/// The send queue, and the state of its direct path.
pub(crate) struct SendSide {
    pub ring: RequestProducer,
    pub outgoing: Outgoing,
}

/// Parameters of rings besides their memory.
pub(crate) struct RingsParameters {
    pub cookie: u32,
    pub qpn: u32,
    pub qp_type: QpType,
    pub pd: Handle,
    pub handle: Handle,
    pub send_shape: QueueShape,
    pub receive_shape: QueueShape,
    pub srq: Option<Arc<SharedReceives>>,
    pub send_inbox: Option<Arc<Inbox>>,
    pub receive_inbox: Option<Arc<Inbox>>,
}

impl Rings {
    /// Maps the rings of a QP. `None`: the process can't map more.
    pub fn map(memory: &Passed, parameters: RingsParameters) -> Option<Arc<Self>> {
        let RingsParameters { cookie, qpn, pd, handle, send_shape, receive_shape, .. } = parameters;
        let segment = memory.map(send_shape.bytes() + receive_shape.bytes()).ok()?;
        // See the CQ's.
        let _ = segment.set_dontfork();
        let segment = Arc::new(segment);
        let send = RequestProducer::new(segment.clone(), 0, send_shape);
        let receive = RequestProducer::new(segment, send_shape.bytes(), receive_shape);
        Some(Arc::new_cyclic(|own| Self {
            cookie,
            qpn,
            pd,
            handle,
            send: BiasedMutex::new(SendSide { ring: send, outgoing: Outgoing::new(parameters.qp_type) }),
            send_done: AtomicU32::new(0),
            posting_order: PostingOrder::default(),
            inbox_added: AtomicU32::new(0),
            inbox_taken: AtomicU32::new(0),
            receive: BiasedMutex::new(ReceiveSide {
                ring: receive,
                credits: None,
                keys: Cache::default(),
                waiting: None,
                ring_messages: 0,
            }),
            receive_done: AtomicU32::new(0),
            srq: parameters.srq,
            send_inbox: parameters.send_inbox,
            receive_inbox: parameters.receive_inbox,
            has_incoming: AtomicBool::new(false),
            incoming: BiasedMutex::new(None),
            is_datagram: parameters.qp_type == QpType::Ud,
            offers_seen: AtomicU32::new(0),
            own: own.clone(),
        }))
    }

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
            let next = self.posting_order.of_ring(completion.ring_position).wrapping_add(1);
            self.send_done.store(next, Ordering::Release);
        } else {
            if let Some(srq) = &self.srq {
                srq.completed().add_one();
            }
            self.receive_done.store(next, Ordering::Release);
        }
    }

    /// The same for a completion that is dropped: the QP's own queues are gone or reset, an SRQ is
    /// not.
    pub fn give_back_shared(&self, completion: &Completion) {
        if let Some(srq) = &self.srq
            && !completion.flags.contains(CompletionFlags::SEND_QUEUE)
        {
            srq.completed().add_one();
        }
    }

    /// The same for one that stood in the CQ's inbox; its position is a virtual one.
    #[inline]
    pub fn give_back_own(&self, completion: &Completion) {
        // Release: as in `give_back`.
        self.send_done.store(completion.ring_position.wrapping_add(1), Ordering::Release);
        // Relaxed, both: under the CQ's lock.
        self.inbox_taken.store(self.inbox_taken.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether a completion from the inbox has its turn: those of the router's that are older were
    /// returned.
    #[inline]
    pub fn has_turn(&self, after: u32) -> bool {
        (self.send_done.load(Ordering::Relaxed).wrapping_sub(after) as i32) >= 0
    }

    /// Whether completions of this QP's sends in the inbox may be older than one of the router's.
    #[inline]
    pub fn has_own(&self) -> bool {
        // Acquire; partner: the Release store in `count_own`, which comes before later requests are
        // posted. Relaxed: under the CQ's lock.
        self.inbox_added.load(Ordering::Acquire) != self.inbox_taken.load(Ordering::Relaxed)
    }

    /// A completion goes to the inbox. To be called with the lock of `send`.
    #[inline]
    pub fn count_own(&self) {
        // Release; partner: the Acquire load in `has_own`.
        self.inbox_added.store(self.inbox_added.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// The posting position of a request of the router's.
    pub fn posting_position(&self, completion: &Completion) -> u32 {
        self.posting_order.of_ring(completion.ring_position)
    }

    #[inline]
    pub fn has_incoming(&self) -> bool {
        // Relaxed: stored under the lock of the receive CQ, which the caller has.
        self.has_incoming.load(Ordering::Relaxed)
    }

    pub fn set_incoming(&self, incoming: Option<Arrivals>) {
        if incoming.is_none() && self.has_incoming() {
            self.receive.lock().credits = None;
        }
        let mut place = self.incoming.lock();
        // Relaxed: as above.
        self.has_incoming.store(incoming.is_some(), Ordering::Relaxed);
        *place = incoming;
    }

    /// Accepts what the router has to offer, if there is anything.
    pub fn accept(&self, session: &Session, own: OwnMemory) {
        if self.is_datagram {
            if !self.has_incoming() {
                if self.receive_queue().has_offers() {
                    let mut datagrams = Box::new(Datagrams::new(self.next_receive(), own));
                    datagrams.adopt(session, &self.receive_queue());
                    if datagrams.has_rings() {
                        self.set_incoming(Some(Arrivals::Datagrams(datagrams)));
                    }
                }
            } else if let Some(Arrivals::Datagrams(datagrams)) = self.incoming.lock().as_mut() {
                datagrams.adopt(session, &self.receive_queue());
            }
            return;
        }
        let may_accept = self.incoming.lock().as_ref().is_none_or(|incoming| incoming.is_over(self));
        if may_accept && let Some(incoming) = Incoming::accept(session, self, self.handle, own) {
            self.set_incoming(Some(Arrivals::Peer(incoming)));
        }
    }

    /// As datagrams of direct rings see it.
    #[inline]
    pub fn receive_queue(&self) -> ReceiveQueue<'_> {
        let Self { cookie, qpn, pd, handle, receive, offers_seen, .. } = self;
        ReceiveQueue { cookie: *cookie, qpn: *qpn, pd: *pd, handle: *handle, side: receive, offers_seen }
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The SRQ that it uses, and itself as that knows it.
    pub fn srq(&self) -> Option<(&Arc<SharedReceives>, Weak<dyn Promisee>)> {
        self.srq.as_ref().map(|srq| (srq, self.own.clone() as Weak<dyn Promisee>))
    }

    /// The RECV that is next, by whichever way; or the message that takes one.
    pub fn next_receive(&self) -> u32 {
        let next = self.incoming.lock().as_ref().map(Arrivals::next);
        next.unwrap_or_else(|| self.receive_done.load(Ordering::Acquire))
    }

    /// The sender learns of the RECVs that are posted from this position on, and from now on of
    /// each.
    pub fn begin_credits(&self, session: &Session, first: u32, credits: CreditWriter) {
        let mut side = self.receive.lock();
        let mut position = first;
        while position != side.ring.position() {
            let mut sges = [Sge::default(); SGES_MAX + 1];
            let count = side.ring.receive_at(position, &mut sges);
            let room = session.regions.room(&mut side.keys, &sges[..count], self.pd);
            credits.publish(position, room);
            position = position.wrapping_add(1);
        }
        side.credits = Some(credits);
    }

    /// The oldest unfinished send request: position and work request id.
    pub fn oldest_send(&self) -> Option<(u32, u64)> {
        let side = self.send.lock();
        let done = self.send_done.load(Ordering::Acquire);
        oldest(&side.ring, self.posting_order.to_ring(done, side.ring.position()))
    }

    pub fn oldest_receive(&self) -> Option<(u32, u64)> {
        if self.srq.is_some() {
            return None;
        }
        oldest(&self.receive.lock().ring, self.receive_done.load(Ordering::Acquire))
    }

    /// To be called with the lock of the send CQ, whose polls count what is done.
    pub fn reset_sends(&self) {
        let mut send = self.send.lock();
        send.ring.reset();
        send.outgoing.begin_anew();
        self.posting_order.reset();
        // Relaxed, both: under that lock.
        self.inbox_taken.store(self.inbox_added.load(Ordering::Relaxed), Ordering::Relaxed);
        // Release: as in `give_back`.
        self.send_done.store(0, Ordering::Release);
    }

    /// To be called with the lock of the receive CQ, whose polls count what is done.
    pub fn reset_receives(&self) {
        let mut receive = self.receive.lock();
        receive.ring.reset();
        (receive.credits, receive.ring_messages, receive.waiting) = (None, 0, None);
        self.receive_done.store(0, Ordering::Release);
    }
}

impl Promisee for Rings {
    fn renew_promise(&self) {
        if let Some(incoming) = self.incoming.lock().as_mut() {
            incoming.note_receives();
        }
    }
}

impl NotificationListener for Rings {
    fn notify(&self) {
        if let (Some(inbox), Some(own)) = (&self.receive_inbox, self.own.upgrade()) {
            inbox.add_notified(own);
        }
    }
}

fn oldest(ring: &RequestProducer, done: u32) -> Option<(u32, u64)> {
    (ring.position() != done).then(|| (done, ring.wr_id_at(done)))
}
