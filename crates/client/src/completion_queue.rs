//! Completion queues: polling, arming, resizing, and the flush that follows the end of the router.
//!
//! Invariant: a request's slot is given back to its queue when its completion is *returned* by a poll, never before; so
//! no queue can have more unreturned completions than requests it may hold.
//!
//! Invariant: completions of a destroyed or reset QP are dropped, at the latest when they are polled.
use crate::channel::Channel;
use crate::lock;
use crate::patience::{Patience, Rest};
use crate::queue_pair::Rings;
use crate::registry::{Entry, Tag};
use crate::session::Session;
use crate::shared_receive_queue::Completed;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::layout::{CQ_DOORBELL_BASE, cq_bytes};
use freeflow_shm::{CompletionConsumer, Segment};
use freeflow_verbs::{CQE_COUNT_MAX, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, VerbsError};
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Attachments of one block of the table, a power of two.
const BLOCK: usize = 64;

/// A completion queue.
pub struct CompletionQueue {
    session: Arc<Session>,
    handle: Handle,
    cookie: u32,
    /// Keeps the channel as long as the CQ.
    channel: Option<Arc<Channel>>,
    capacity: AtomicU32,
    rest: Rest,
    inner: Mutex<Inner>,
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

struct Inner {
    ring: CompletionConsumer,
    /// Completions taken out of the ring before their turn: by a resize, or when a QP was destroyed.
    early: VecDeque<Completion>,
    attached: Attached,
    patience: Patience,
    /// The completions before this position of the ring were there when an event was taken: it told of them.
    told: u32,
    /// So it did of those in `early`.
    early_told: bool,
}

impl CompletionQueue {
    /// `cqe` entries at least. `timestamps`: each completion tells exactly when it was written.
    pub fn create(
        session: &Arc<Session>,
        context: Handle,
        cqe: u32,
        channel: Option<&Arc<Channel>>,
        timestamps: bool,
    ) -> Result<Self, VerbsError> {
        let entry = Entry { channel: channel.map(|channel| channel.handle()), ..Entry::default() };
        let cookie = lock(&session.objects).cqs.allocate(entry)?;
        let channel_handle = channel.map(|channel| channel.handle());
        let made = session
            .call(&Request::CreateCq { context, cqe, channel: channel_handle, cookie, timestamps })
            .and_then(|(reply, descriptors)| open_ring(session, reply, &descriptors));
        match made {
            Ok((handle, capacity, ring)) => Ok(Self {
                session: session.clone(),
                handle,
                cookie,
                channel: channel.cloned(),
                capacity: AtomicU32::new(capacity),
                rest: Rest::default(),
                inner: Mutex::new(Inner {
                    ring,
                    early: VecDeque::new(),
                    attached: Attached::default(),
                    patience: Patience::default(),
                    told: 0,
                    early_told: true,
                }),
            }),
            Err(error) => {
                lock(&session.objects).cqs.remove(cookie);
                Err(error)
            }
        }
    }

    /// Refused with Busy while a QP uses it.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroyCq { cq: self.handle })?;
        lock(&self.session.objects).cqs.remove(self.cookie);
        Ok(())
    }

    /// What events of this CQ are delivered with.
    pub fn set_tag(&self, tag: Tag) {
        if let Some(entry) = lock(&self.session.objects).cqs.get_mut(self.cookie) {
            entry.tag = tag;
        }
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.channel.as_ref()
    }

    /// Entries it holds.
    pub fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Hands up to `limit` completions to `take`, oldest first; says how many.
    ///
    /// # Errors
    /// DeviceFatal in a child of the process that made the CQ. When the router is gone there is no error: what is
    /// outstanding completes with WorkRequestFlushed.
    #[inline]
    pub fn poll(&self, limit: usize, mut take: impl FnMut(&Completion)) -> Result<usize, VerbsError> {
        if self.session.left_behind() {
            return Err(VerbsError::DeviceFatal);
        }
        let mut inner = lock(&self.inner);
        let count = inner.take_ready(limit, &mut take);
        if count > 0 {
            inner.patience.note_success(&self.rest);
            return Ok(count);
        }
        if self.session.is_dead() {
            return Ok(inner.attached.flush(limit, &mut take));
        }
        let step = inner.patience.next_step(&self.session, &self.rest);
        drop(inner);
        step.wait(&self.session, &self.rest);
        Ok(0)
    }

    /// Asks for one event on the channel, for the next completion or the next solicited one (or error). A completion that
    /// came since the last event and was not polled counts as the next one: whoever polls, finds nothing and arms must
    /// not sleep over what came in between. (IBTA 11.4.2.2 has the event at the next addition; that nobody can tell from
    /// an addition just after the arming. NICs compare with the consumer's count to the same effect.)
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbsError> {
        if self.session.left_behind() {
            return Err(VerbsError::DeviceFatal);
        }
        let inner = lock(&self.inner);
        inner.ring.arm(solicited_only);
        if inner.has_untold(solicited_only) && self.channel.is_some() {
            self.session.ring(CQ_DOORBELL_BASE + self.cookie);
        }
        Ok(())
    }

    /// An event of this CQ was taken: it tells of all that can be polled now.
    pub fn note_event(&self) {
        let mut inner = lock(&self.inner);
        inner.told = inner.ring.published();
        inner.early_told = true;
    }

    /// Makes room for `cqe` entries at least; what is in the queue stays.
    pub fn resize(&self, cqe: u32) -> Result<u32, VerbsError> {
        let mut inner = lock(&self.inner);
        if (inner.early.len() as u64) > u64::from(cqe) {
            return Err(VerbsError::InvalidArgument);
        }
        let (reply, descriptors) = self.session.call(&Request::ResizeCq { cq: self.handle, cqe })?;
        let (_, capacity, ring) = open_ring(&self.session, reply, &descriptors)?;
        inner.empty_ring();
        inner.ring = ring;
        inner.told = 0;
        self.capacity.store(capacity, Ordering::Relaxed);
        Ok(capacity)
    }

    /// Notifications wait for `count` completions, or for `period_us` microseconds after the first.
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<(), VerbsError> {
        self.session.command(&Request::ModerateCq { cq: self.handle, count, period_us })
    }

    pub(crate) fn attach(&self, rings: &Arc<Rings>, role: Role) {
        lock(&self.inner).attached.add(rings.cookie, Attachment::Qp(rings.clone(), role));
    }

    /// The completions of an XRC SRQ come here, whatever QP they arrived by.
    pub(crate) fn attach_srq(&self, cookie: u32, completed: &Arc<Completed>) {
        lock(&self.inner).attached.add(cookie, Attachment::Srq(completed.clone()));
    }

    pub(crate) fn detach(&self, cookie: u32) {
        lock(&self.inner).attached.remove(cookie);
    }

    /// Drops the completions of an XRC SRQ that is gone.
    pub(crate) fn purge_srq(&self, cookie: u32) {
        let mut inner = lock(&self.inner);
        inner.empty_ring();
        inner.early.retain(|completion| completion.qp_cookie != cookie);
    }

    /// Drops the completions of a QP of which the router will send no more.
    pub(crate) fn purge(&self, rings: &Rings) {
        let mut inner = lock(&self.inner);
        inner.empty_ring();
        inner.early.retain(|completion| {
            let doomed = rings.is_of(completion);
            if doomed {
                rings.give_back_shared(completion);
            }
            !doomed
        });
    }
}

impl Inner {
    #[inline]
    fn take_ready(&mut self, limit: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let mut count = 0;
        while count < limit
            && let Some(completion) = self.early.pop_front()
        {
            count += self.attached.give_back(&completion, take);
            self.ring.commit_carried_over(self.early.len() as u32);
        }
        let mut completion = Completion::default();
        let mut consumed = false;
        while count < limit && self.ring.poll(&mut completion) {
            consumed = true;
            count += self.attached.give_back(&completion, take);
        }
        if consumed {
            self.ring.commit();
        }
        count
    }

    /// Whether something (solicited) can be polled that no event told of.
    fn has_untold(&self, solicited_only: bool) -> bool {
        let solicited = |flags: CompletionFlags| flags.contains(CompletionFlags::SOLICITED);
        if !self.early_told && self.early.iter().any(|completion| !solicited_only || solicited(completion.flags)) {
            return true;
        }
        let mut position = self.ring.position();
        if is_told(position, self.told) {
            position = self.told;
        }
        while let Some(flags) = self.ring.flags_at(position) {
            if !solicited_only || solicited(flags) {
                return true;
            }
            position = position.wrapping_add(1);
        }
        false
    }

    /// Moves everything out of the ring, in order.
    fn empty_ring(&mut self) {
        let mut completion = Completion::default();
        let before = self.early.len();
        self.early_told |= before == 0;
        while self.ring.poll(&mut completion) {
            self.early.push_back(completion);
            self.early_told &= is_told(self.ring.position().wrapping_sub(1), self.told);
        }
        if self.early.len() > before {
            self.ring.commit();
        }
    }
}

/// Maps the ring of a created or resized CQ.
fn open_ring(
    session: &Session,
    reply: Reply,
    descriptors: &[std::os::fd::OwnedFd],
) -> Result<(Handle, u32, CompletionConsumer), VerbsError> {
    let (Reply::Cq { cq, cqe, segment_bytes }, [memory]) = (reply, descriptors) else {
        return Err(session.nonsense());
    };
    if segment_bytes < cq_bytes(cqe) as u64 {
        return Err(session.nonsense());
    }
    match Segment::map(memory.as_fd(), cq_bytes(cqe)) {
        Ok(segment) => {
            // A child that could reach the ring would only harm its parent; if the kernel can't, so be it.
            let _ = segment.set_dontfork();
            Ok((cq, cqe, CompletionConsumer::new(Arc::new(segment), cqe)))
        }
        Err(_) => {
            let _ = session.destroy(&Request::DestroyCq { cq });
            Err(VerbsError::NoMemory)
        }
    }
}

/// Whether a position lies before `told`. They run freely; what is farther ahead than a ring can hold lies far behind.
fn is_told(position: u32, told: u32) -> bool {
    (1..=CQE_COUNT_MAX).contains(&told.wrapping_sub(position))
}

/// Which of a QP's completions come to a CQ.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Role {
    pub sends: bool,
    pub receives: bool,
}

/// Whose completions come to a CQ.
enum Attachment {
    Qp(Arc<Rings>, Role),
    /// An XRC SRQ: the QP may be another process'.
    Srq(Arc<Completed>),
}

type Block = [Option<Attachment>; BLOCK];

/// The QPs and XRC SRQs whose completions come to a CQ, by cookie: a two-level table.
#[derive(Default)]
struct Attached {
    blocks: Vec<Option<Box<Block>>>,
}

impl Attached {
    fn add(&mut self, cookie: u32, attachment: Attachment) {
        let cookie = cookie as usize;
        if self.blocks.len() <= cookie / BLOCK {
            self.blocks.resize_with(cookie / BLOCK + 1, || None);
        }
        let block = self.blocks[cookie / BLOCK].get_or_insert_with(|| Box::new([const { None }; BLOCK]));
        block[cookie % BLOCK] = Some(attachment);
    }

    fn remove(&mut self, cookie: u32) {
        let cookie = cookie as usize;
        let Some(Some(block)) = self.blocks.get_mut(cookie / BLOCK) else { return };
        block[cookie % BLOCK] = None;
        if block.iter().all(Option::is_none) {
            self.blocks[cookie / BLOCK] = None;
        }
    }

    #[inline]
    fn get(&self, cookie: u32) -> Option<&Attachment> {
        let cookie = cookie as usize;
        let block = self.blocks.get(cookie / BLOCK)?.as_ref()?;
        block[cookie % BLOCK].as_ref()
    }

    /// Frees the slot of a completed request and returns the completion, unless its QP or SRQ is gone. Says how many it
    /// returned.
    #[inline]
    fn give_back(&self, completion: &Completion, take: &mut impl FnMut(&Completion)) -> usize {
        match self.get(completion.qp_cookie) {
            Some(Attachment::Qp(rings, _)) if rings.qpn == completion.qpn => rings.give_back(completion),
            Some(Attachment::Srq(completed)) => completed.add_one(),
            _ => return 0,
        }
        take(completion);
        1
    }

    /// The router is gone: completes what is outstanding, in the order of posting in each queue.
    fn flush(&self, limit: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let mut count = 0;
        for attachment in self.blocks.iter().flatten().flat_map(|block| block.iter().flatten()) {
            let Attachment::Qp(rings, role) = attachment else { continue };
            let mut completion = Completion {
                status: CompletionStatus::WorkRequestFlushed,
                qpn: rings.qpn,
                qp_cookie: rings.cookie,
                ..Completion::default()
            };
            while role.sends
                && count < limit
                && let Some((position, wr_id)) = rings.oldest_send()
            {
                completion.opcode = CompletionOpcode::Send;
                completion.flags = CompletionFlags(CompletionFlags::SEND_QUEUE);
                completion.ring_position = position;
                completion.work_request_id = wr_id;
                rings.give_back(&completion);
                take(&completion);
                count += 1;
            }
            while role.receives
                && count < limit
                && let Some((position, wr_id)) = rings.oldest_receive()
            {
                completion.opcode = CompletionOpcode::Receive;
                completion.flags = CompletionFlags(0);
                completion.ring_position = position;
                completion.work_request_id = wr_id;
                rings.give_back(&completion);
                take(&completion);
                count += 1;
            }
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_event_told_of_wraps() {
        assert!(is_told(4, 5) && is_told(u32::MAX, 0) && is_told(5, 5 + CQE_COUNT_MAX));
        assert!(!is_told(5, 5) && !is_told(6, 5) && !is_told(0, u32::MAX));
        assert!(!is_told(3_000_000_000, 0), "many completions were polled since the last event");
    }
}
