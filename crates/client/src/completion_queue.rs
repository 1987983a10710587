//! Completion queues: polling, arming, resizing, and the flush that follows the end of the router.
//!
//! Invariant: a request's slot is given back to its queue when its completion is *returned* by a
//! poll, never before; so no queue can have more unreturned completions than requests it may hold.
//!
//! Invariant: completions of a destroyed or reset QP are dropped when they are polled at the latest.
//!
//! Completions come by the ring, from the router; by the inbox, from posters that carried their
//! requests out themselves; and by the direct rings of QPs whose RECVs complete here, which are
//! polled while they are *active*. A queue's come in its order: `inbox` says how for sends,
//! `incoming` for receives.
use crate::backoff::{Backoff, PostHint};
use crate::completion_channel::CompletionChannel;
use crate::completion_sources::{Attached, CompletionSource, Role};
use crate::direct_ring::Look;
use crate::inbox::Inbox;
use crate::incoming::Arrivals;
use crate::lock;
use crate::passed::Passed;
use crate::registry::{CompletedCount, Entry, Tag};
use crate::rings::Rings;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::layout::{CQ_DOORBELL_BASE, cq_bytes};
use freeflow_shm::{BiasedMutex, CompletionConsumer, coarse_ns};
use freeflow_verbs::{CQE_COUNT_MAX, Completion, CompletionFlags, VerbsError};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Active direct rings of one CQ.
const ACTIVE_MAX: usize = 64;
/// A direct ring without a message for this many polls becomes inactive, if it is one of several,
/// or pollers must yield.
const POLLS_BEFORE_INACTIVE: u64 = 4096;

/// A completion queue.
pub struct CompletionQueue {
    session: Arc<Session>,
    handle: Handle,
    cookie: u32,
    /// Keeps the channel as long as the CQ.
    channel: Option<Arc<CompletionChannel>>,
    capacity: AtomicU32,
    /// Each completion has the time when it was written.
    timestamps: bool,
    post_hint: PostHint,
    inbox: Arc<Inbox>,
    inner: BiasedMutex<Inner>,
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

struct Inner {
    ring: CompletionConsumer,
    doorbell: u32,
    /// Completions taken out of the ring or a channel before they are returned, in order: by a
    /// resize, or when a QP was destroyed, or because others came first; and whether they stood in
    /// the inbox.
    early: VecDeque<(Completion, bool)>,
    inbox: Arc<Inbox>,
    /// QPs whose direct rings are polled.
    active: Vec<Arc<Rings>>,
    /// Polls that looked at direct rings.
    polls: u64,
    timestamps: bool,
    attached: Attached,
    backoff: Backoff,
    /// The completions before this position of the ring were there when an event was taken, which
    /// reported them.
    reported: u32,
    /// The event reported those in `early`, too.
    early_reported: bool,
}

impl CompletionQueue {
    /// `cqe` entries at least. `timestamps`: each completion has the exact time when it was
    /// written.
    pub fn create(
        session: &Arc<Session>,
        context: Handle,
        cqe: u32,
        channel: Option<&Arc<CompletionChannel>>,
        timestamps: bool,
    ) -> Result<Self, VerbsError> {
        let entry = Entry { channel: channel.map(|channel| channel.handle()), ..Entry::default() };
        let cookie = lock(&session.objects).cqs.allocate(entry)?;
        let channel_handle = channel.map(|channel| channel.handle());
        let made = session
            .call(&Request::CreateCq { context, cqe, channel: channel_handle, cookie, timestamps })
            .and_then(|(reply, descriptors)| open_ring(session, reply, &descriptors));
        match made {
            Ok((handle, capacity, ring)) => {
                Ok(Self::with_ring(session, (handle, cookie), channel, (capacity, timestamps), ring))
            }
            Err(error) => {
                lock(&session.objects).cqs.remove(cookie);
                Err(error)
            }
        }
    }

    fn with_ring(
        session: &Arc<Session>,
        (handle, cookie): (Handle, u32),
        channel: Option<&Arc<CompletionChannel>>,
        (capacity, timestamps): (u32, bool),
        ring: CompletionConsumer,
    ) -> Self {
        let inbox = Arc::new(Inbox::new(channel.is_some()));
        Self {
            session: session.clone(),
            handle,
            cookie,
            channel: channel.cloned(),
            capacity: AtomicU32::new(capacity),
            timestamps,
            post_hint: PostHint::default(),
            inbox: inbox.clone(),
            inner: BiasedMutex::new(Inner {
                ring,
                doorbell: CQ_DOORBELL_BASE + cookie,
                inbox,
                active: Vec::new(),
                polls: 0,
                timestamps,
                early: VecDeque::new(),
                attached: Attached::default(),
                backoff: Backoff::default(),
                reported: 0,
                early_reported: true,
            }),
        }
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    pub(crate) fn has_timestamps(&self) -> bool {
        self.timestamps
    }

    /// The CQ is armed, and has a completion that did not come from the router, which sends the
    /// event.
    #[cold]
    pub(crate) fn ring_armed(&self) {
        self.session.ring(CQ_DOORBELL_BASE + self.cookie);
    }

    /// Refused with Busy while a QP uses it.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.session.destroy(&Request::DestroyCq { cq: self.handle })?;
        lock(&self.session.objects).cqs.remove(self.cookie);
        Ok(())
    }

    /// Sets the tag that events of this CQ carry.
    pub fn set_tag(&self, tag: Tag) {
        if let Some(entry) = lock(&self.session.objects).cqs.get_mut(self.cookie) {
            entry.tag = tag;
        }
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    pub fn channel(&self) -> Option<&Arc<CompletionChannel>> {
        self.channel.as_ref()
    }

    /// Entries it holds.
    pub fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Hands up to `limit` completions to `take`, oldest first; says how many.
    ///
    /// # Errors
    /// DeviceFatal in a child of the process that made the CQ. When the router is gone there is no
    /// error: what is outstanding completes with WorkRequestFlushed.
    #[inline]
    pub fn poll(&self, limit: usize, mut take: impl FnMut(&Completion)) -> Result<usize, VerbsError> {
        if self.session.left_behind() {
            return Err(VerbsError::DeviceFatal);
        }
        let mut inner = self.inner.lock();
        self.session.deliver_notifications();
        if self.inbox.has_notified() {
            inner.adopt(&self.session);
        }
        let count = inner.take_ready(&self.session, limit, &mut take);
        if count > 0 {
            let has_direct_rings = !inner.active.is_empty();
            inner.backoff.note_success(&self.session, has_direct_rings);
            return Ok(count);
        }
        if self.session.is_dead() {
            inner.close_direct_rings();
            return Ok(inner.attached.flush(limit, &mut take));
        }
        inner.drop_inactive(&self.session);
        let has_direct_rings = !inner.active.is_empty();
        let action = inner.backoff.next_action(&self.session, &self.post_hint, has_direct_rings);
        drop(inner);
        action.wait(&self.session);
        Ok(0)
    }

    /// A request was posted to a QP whose sends complete here: the polling thread does not only
    /// wait.
    #[inline]
    pub(crate) fn note_post(&self) {
        self.post_hint.note();
    }

    /// Asks for one event on the channel, for the next completion or the next solicited one (or
    /// error). A completion that came since the last event and was not polled counts as the next
    /// one: a program that polls, finds nothing and arms must not sleep over a completion that came
    /// in between. (IBTA 11.4.2.2 has the event at the next addition; nobody can distinguish that
    /// from an addition just after the arming. NICs compare with the consumer's count to the same
    /// effect.)
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbsError> {
        if self.session.left_behind() {
            return Err(VerbsError::DeviceFatal);
        }
        let mut inner = self.inner.lock();
        if self.channel.is_some() {
            self.inbox.arm(solicited_only, inner.ring.is_armed());
            // The router notifies of messages in direct rings from now on.
            inner.want_notifications(true);
        }
        inner.ring.arm(solicited_only);
        // Notifications from before the arming gave no event.
        self.session.deliver_notifications();
        if self.inbox.has_notified() {
            inner.adopt(&self.session);
        }
        if inner.has_unreported(solicited_only) && self.channel.is_some() {
            self.session.ring(inner.doorbell);
        }
        Ok(())
    }

    /// An event of this CQ was taken: it reports all that can be polled now.
    pub fn note_event(&self) {
        let mut inner = self.inner.lock();
        inner.backoff.note_event(coarse_ns());
        inner.reported = inner.ring.published();
        inner.early_reported = true;
        self.inbox.note_reported();
        for rings in &inner.active {
            if let Some(incoming) = rings.incoming.lock().as_mut() {
                incoming.note_reported();
            }
        }
    }

    /// Makes room for `cqe` entries at least; what is in the queue stays.
    pub fn resize(&self, cqe: u32) -> Result<u32, VerbsError> {
        let mut inner = self.inner.lock();
        let ready = inner.ring.published().wrapping_sub(inner.ring.position());
        let elsewhere = inner.early.len() + self.inbox.count();
        if elsewhere > 0 && elsewhere as u64 + u64::from(ready) > u64::from(cqe) {
            return Err(VerbsError::InvalidArgument);
        }
        let (reply, descriptors) = self.session.call(&Request::ResizeCq { cq: self.handle, cqe })?;
        let (_, capacity, ring) = open_ring(&self.session, reply, &descriptors)?;
        if inner.ring.is_armed() {
            // The router looks at both for now. Messages of direct rings ask the new one.
            ring.arm(inner.ring.is_armed_for_solicited());
        }
        inner.empty_ring(&self.session);
        inner.ring = ring;
        inner.reported = 0;
        self.capacity.store(capacity, Ordering::Relaxed);
        Ok(capacity)
    }

    /// Notifications wait for `count` completions, or for `period_us` microseconds after the first.
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<(), VerbsError> {
        self.session.command(&Request::ModerateCq { cq: self.handle, count, period_us })
    }

    pub(crate) fn attach(&self, rings: &Arc<Rings>, role: Role) {
        self.inner.lock().attached.add(rings.cookie, CompletionSource::Qp(rings.clone(), role));
    }

    /// The completions of an XRC SRQ come here, whatever QP they arrived by.
    pub(crate) fn attach_srq(&self, cookie: u32, completed: &Arc<CompletedCount>) {
        self.inner.lock().attached.add(cookie, CompletionSource::Srq(completed.clone()));
    }

    pub(crate) fn detach(&self, cookie: u32) {
        self.inner.lock().attached.remove(cookie);
    }

    /// Takes the messages of a QP's direct ring, and keeps them for later polls.
    pub(crate) fn drain_direct_ring(&self, rings: &Rings) {
        let mut inner = self.inner.lock();
        if rings.has_incoming() && !self.session.is_dead() {
            inner.empty_ring(&self.session);
            inner.drain_direct_ring(&self.session, rings);
        }
    }

    /// Drops the completions of an XRC SRQ that is gone.
    pub(crate) fn purge_srq(&self, cookie: u32) {
        let mut inner = self.inner.lock();
        inner.empty_ring(&self.session);
        inner.early.retain(|(completion, _)| completion.qp_cookie != cookie);
    }

    /// After [`Self::purge`], before a QP that is reset takes RECVs again. A poll that came in between may have found
    /// a direct ring, and what it knows of RECVs is out of date.
    pub(crate) fn reset_receives(&self, rings: &Rings) {
        let mut inner = self.inner.lock();
        inner.active.retain(|active| !std::ptr::eq(&raw const **active, rings));
        rings.set_incoming(None);
        rings.reset_receives();
    }

    /// After [`Self::purge`], before a QP that is reset takes sends again.
    pub(crate) fn reset_sends(&self, rings: &Rings) {
        // Polls count what they take of it, and that begins again.
        let _inner = self.inner.lock();
        rings.reset_sends();
        // Of a post that was under way when the completions were dropped.
        self.inbox.purge(rings);
    }

    /// Drops the completions of a QP of which the router will send no more.
    pub(crate) fn purge(&self, rings: &Rings) {
        let mut inner = self.inner.lock();
        inner.empty_ring(&self.session);
        self.inbox.purge(rings);
        inner.active.retain(|active| !std::ptr::eq(&raw const **active, rings));
        if inner.attached.receives_of(rings) {
            rings.set_incoming(None);
        }
        inner.early.retain(|(completion, _)| {
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
    fn take_ready(&mut self, session: &Session, limit: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let mut count = self.take_put_by(limit, take);
        // Once the router is known to be gone, outstanding requests are flushed, and so are
        // messages in a direct ring.
        if !self.active.is_empty() && !session.is_dead() {
            count += self.take_from_direct_rings(session, limit - count, take);
        }
        let mut completion = Completion::default();
        let mut consumed = false;
        while count < limit && self.ring.poll(&mut completion) {
            consumed = true;
            if self.is_next(session, &completion) {
                count += self.attached.give_back(&completion, take);
            } else {
                self.put_by(session, &completion);
                count += self.take_put_by(limit - count, take);
            }
        }
        if consumed {
            self.ring.commit();
            if !self.active.is_empty() && count < limit && !session.is_dead() {
                // Messages that came after those of the ring.
                count += self.take_from_direct_rings(session, limit - count, take);
            }
            if count == 0 && self.inbox.has_completions() {
                // The ring had what they waited for.
                count = self.take_put_by(limit, take);
            }
        }
        count
    }

    /// Returns what was put by, and what stands in the inbox.
    #[inline]
    fn take_put_by(&mut self, limit: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let mut count = 0;
        while count < limit
            && let Some((completion, is_own)) = self.early.pop_front()
        {
            count += match is_own {
                true => self.attached.give_back_own(&completion, take),
                false => self.attached.give_back(&completion, take),
            };
            self.ring.commit_carried_over(self.early.len() as u32);
        }
        while count < limit
            && self.inbox.has_completions()
            && let Some(completion) = self.inbox.take(|own| self.attached.has_turn(own))
        {
            count += self.attached.give_back_own(&completion, take);
        }
        count
    }

    fn take_from_direct_rings(&mut self, session: &Session, limit: usize, take: &mut impl FnMut(&Completion)) -> usize {
        self.polls += 1;
        let look = self.look();
        let mut count = 0;
        for rings in &self.active {
            let before = count;
            let mut incoming = rings.incoming.lock();
            let Some(incoming) = incoming.as_mut() else { continue };
            while count < limit
                && let Some(completion) = incoming.take(session, rings, look)
            {
                rings.give_back(&completion);
                take(&completion);
                count += 1;
            }
            if count > before {
                incoming.commit();
                incoming.want_notifications(look.armed.is_some());
            }
            incoming.renew_promise();
        }
        count
    }

    /// Whether a completion of the ring may be returned: nothing of its queue that is older stands
    /// elsewhere.
    #[inline]
    fn is_next(&self, session: &Session, completion: &Completion) -> bool {
        let Some(CompletionSource::Qp(rings, _)) = self.attached.get(completion.qp_cookie) else { return true };
        if completion.flags.contains(CompletionFlags::SEND_QUEUE) {
            return !rings.has_own();
        }
        !rings.has_incoming()
            || rings.incoming.lock().as_mut().is_none_or(|incoming| incoming.passes_whole(session, rings, completion))
    }

    #[inline]
    fn look(&self) -> Look {
        let armed = self.ring.is_armed().then_some(self.doorbell);
        Look { polls: self.polls, timestamps: self.timestamps, armed }
    }

    /// Puts a completion of the ring by, behind all of its queue that are older.
    #[cold]
    fn put_by(&mut self, session: &Session, completion: &Completion) {
        let (completion, look, early) = (*completion, self.look(), &mut self.early);
        if let Some(CompletionSource::Qp(rings, _)) = self.attached.get(completion.qp_cookie)
            && rings.is_of(&completion)
        {
            if completion.flags.contains(CompletionFlags::SEND_QUEUE) {
                let position = rings.posting_position(&completion);
                self.inbox.take_older(rings, position, |older| early.push_back((older, true)));
            } else if let Some(incoming) = rings.incoming.lock().as_mut() {
                return incoming
                    .put_by(session, rings, &completion, look, |completion| early.push_back((completion, false)));
            }
        }
        early.push_back((completion, false));
    }

    fn drain_direct_ring(&mut self, session: &Session, rings: &Rings) {
        let look = self.look();
        if let Some(incoming) = rings.incoming.lock().as_mut() {
            while let Some(completion) = incoming.take(session, rings, look) {
                self.early.push_back((completion, false));
                self.early_reported = false;
            }
            incoming.commit();
        }
    }

    /// QPs with notifications become active.
    #[cold]
    fn adopt(&mut self, session: &Session) {
        for rings in self.inbox.take_notified() {
            if !self.attached.receives_of(&rings) {
                continue;
            }
            if !self.early.is_empty() {
                // Completions put by were counted by nobody: they are returned first.
                self.inbox.add_notified(rings);
                continue;
            }
            if let Some(own) = session.own_memory() {
                rings.accept(session, own);
            }
            if !rings.has_incoming() {
                continue;
            }
            let is_active = self.active.iter().any(|active| Arc::ptr_eq(active, &rings));
            if !is_active && self.active.len() >= ACTIVE_MAX {
                self.cool_one();
            }
            if let Some(incoming) = rings.incoming.lock().as_mut() {
                if !is_active {
                    incoming.want_notifications(self.ring.is_armed());
                }
                // Also if another one is in its place now.
                incoming.set_polled(true);
                incoming.renew_promise();
            }
            if !is_active {
                self.active.push(rings);
            }
        }
    }

    /// The router is gone: RECVs are flushed, so direct rings bring nothing any more.
    #[cold]
    fn close_direct_rings(&mut self) {
        self.active.clear();
        self.attached.each_receiver(|rings| rings.set_incoming(None));
    }

    /// Ends the polling of direct rings that have brought nothing for long.
    #[inline]
    fn drop_inactive(&mut self, session: &Session) {
        let crowded = self.active.len() > 1 || !self.active.is_empty() && session.must_yield();
        if crowded && self.polls.is_multiple_of(POLLS_BEFORE_INACTIVE) {
            self.cool_idle();
        }
    }

    #[cold]
    fn cool_idle(&mut self) {
        let since = self.polls.saturating_sub(POLLS_BEFORE_INACTIVE);
        self.active.retain(|rings| {
            let mut incoming = rings.incoming.lock();
            let Some(incoming) = incoming.as_mut() else { return false };
            !incoming.is_idle_since(since) || !is_cooled(incoming)
        });
    }

    /// Makes room for another active direct ring: the one that has been active for longest goes.
    fn cool_one(&mut self) {
        let rings = self.active.remove(0);
        let is_cooled = rings.incoming.lock().as_mut().is_none_or(is_cooled);
        if !is_cooled {
            self.inbox.add_notified(rings);
        }
    }

    /// The CQ is armed: its direct rings are not polled, and their senders notify.
    fn want_notifications(&mut self, wants: bool) {
        for rings in &self.active {
            if let Some(incoming) = rings.incoming.lock().as_mut() {
                incoming.want_notifications(wants);
                incoming.renew_promise();
            }
        }
    }

    /// Whether something (solicited) can be polled that no event reported.
    fn has_unreported(&self, solicited_only: bool) -> bool {
        let solicited = |flags: CompletionFlags| flags.contains(CompletionFlags::SOLICITED);
        if !self.early_reported && self.early.iter().any(|(early, _)| !solicited_only || solicited(early.flags)) {
            return true;
        }
        if !solicited_only && self.inbox.has_unreported() {
            return true;
        }
        let has_unreported = |rings: &Arc<Rings>| {
            rings.incoming.lock().as_ref().is_some_and(|incoming| incoming.has_unreported(rings, self.doorbell))
        };
        if self.active.iter().any(has_unreported) {
            return true;
        }
        let mut position = self.ring.position();
        if is_reported(position, self.reported) {
            position = self.reported;
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
    fn empty_ring(&mut self, session: &Session) {
        let mut completion = Completion::default();
        let before = self.early.len();
        self.early_reported |= before == 0;
        while self.ring.poll(&mut completion) {
            self.put_by(session, &completion);
            self.early_reported &= is_reported(self.ring.position().wrapping_sub(1), self.reported);
        }
        if self.early.len() > before {
            self.ring.commit();
        }
    }
}

/// Ends the polling of a direct ring, whose sender notifies of its next message by the router.
/// False: there is one already.
fn is_cooled(incoming: &mut Arrivals) -> bool {
    incoming.want_notifications(true);
    let is_cooled = incoming.is_empty();
    if is_cooled {
        incoming.set_polled(false);
    }
    is_cooled
}

/// Maps the ring of a created or resized CQ.
fn open_ring(
    session: &Session,
    reply: Reply,
    descriptors: &[Passed],
) -> Result<(Handle, u32, CompletionConsumer), VerbsError> {
    let (Reply::Cq { cq, cqe, segment_bytes }, [memory]) = (reply, descriptors) else {
        return Err(session.nonsense());
    };
    if segment_bytes < cq_bytes(cqe) as u64 {
        return Err(session.nonsense());
    }
    match memory.map(cq_bytes(cqe)) {
        Ok(segment) => {
            // A child that could reach the ring would only harm its parent; if the kernel can't, so
            // be it.
            let _ = segment.set_dontfork();
            Ok((cq, cqe, CompletionConsumer::new(Arc::new(segment), cqe)))
        }
        Err(_) => {
            let _ = session.destroy(&Request::DestroyCq { cq });
            Err(VerbsError::NoMemory)
        }
    }
}

/// Whether a position lies before `reported`. They run freely; what is farther ahead than a ring
/// can hold lies far behind.
fn is_reported(position: u32, reported: u32) -> bool {
    (1..=CQE_COUNT_MAX).contains(&reported.wrapping_sub(position))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_that_an_event_reported_wrap() {
        assert!(is_reported(4, 5) && is_reported(u32::MAX, 0) && is_reported(5, 5 + CQE_COUNT_MAX));
        assert!(!is_reported(5, 5) && !is_reported(6, 5) && !is_reported(0, u32::MAX));
        assert!(!is_reported(3_000_000_000, 0), "many completions were polled since the last event");
    }
}
