//! The part of a CQ that is filled without the router: completions of requests that the poster
//! carried out itself, and notifications of direct rings.
//!
//! Invariant: completions of a QP's sends are returned in the order of posting. One that stands
//! here says after which of the router's it comes ([`LocalCompletion::after`]); before one of the
//! router's is returned, those of its QP that are older are taken from here.
use crate::lock;
use crate::rings::Rings;
use freeflow_shm::BiasedMutex;
use freeflow_shm::handshake::fence_for_all;
use freeflow_verbs::Completion;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Default)]
pub(crate) struct Inbox {
    /// Somebody may arm the CQ.
    has_channel: bool,
    /// How many there are, for a look without the lock.
    count: AtomicU32,
    completions: BiasedMutex<Completions>,
    has_notified: AtomicBool,
    /// QPs whose direct rings have messages.
    notified: Mutex<Vec<Arc<Rings>>>,
    /// The CQ was armed for any completion, and has not been notified of one since, as far as is
    /// known here.
    is_armed: AtomicBool,
}

/// A completion of a request that the poster carried out; its position is a virtual one.
#[derive(Clone, Copy)]
pub(crate) struct LocalCompletion {
    pub completion: Completion,
    /// It has its turn when those before this posting position were returned that the router
    /// completed.
    pub after: u32,
}

#[derive(Default)]
struct Completions {
    queue: VecDeque<LocalCompletion>,
    /// How many of them, from the first on, an event has reported.
    reported: usize,
}

impl Inbox {
    pub fn new(has_channel: bool) -> Self {
        Self { has_channel, ..Self::default() }
    }

    /// Adds a completion. True: the CQ is armed, and its doorbell must ring.
    #[inline]
    pub fn push(&self, own: LocalCompletion) -> bool {
        let mut completions = self.completions.lock();
        completions.queue.push_back(own);
        // Release; partner: the Acquire load in `has_completions`.
        self.count.store(completions.queue.len() as u32, Ordering::Release);
        drop(completions);
        self.has_channel && self.take_armed()
    }

    fn take_armed(&self) -> bool {
        // SeqCst; partner: the fence in `CompletionConsumer::arm`.
        fence_for_all();
        // Relaxed, both: ordered by the fence.
        self.is_armed.load(Ordering::Relaxed) && self.is_armed.swap(false, Ordering::Relaxed)
    }

    /// Before the CQ itself is armed, which fences. `is_pending`: an event of an earlier arming is
    /// still to come.
    pub fn arm(&self, solicited_only: bool, is_pending: bool) {
        // Relaxed, both: ordered by the fence of the arming.
        if !solicited_only {
            self.is_armed.store(true, Ordering::Relaxed);
        } else if !is_pending {
            // The router sent the event of the earlier arming, of which nobody knew here.
            self.is_armed.store(false, Ordering::Relaxed);
        }
    }

    #[inline]
    pub fn has_completions(&self) -> bool {
        // Acquire; partner: the Release store in `push`.
        self.count.load(Ordering::Acquire) != 0
    }

    pub fn count(&self) -> usize {
        // Relaxed: a past value will do.
        self.count.load(Ordering::Relaxed) as usize
    }

    /// Takes the first one, if `has_turn` says so of it.
    pub fn take(&self, has_turn: impl FnOnce(&LocalCompletion) -> bool) -> Option<Completion> {
        let mut completions = self.completions.lock();
        let own = *completions.queue.front().filter(|own| has_turn(own))?;
        completions.queue.pop_front();
        completions.reported = completions.reported.saturating_sub(1);
        self.recount(&completions);
        Some(own.completion)
    }

    /// Takes those of one QP that are older than a posting position.
    #[cold]
    pub fn take_older(&self, rings: &Rings, position: u32, mut each: impl FnMut(Completion)) {
        self.remove(|own| {
            let is_older = (own.completion.ring_position.wrapping_sub(position) as i32) < 0;
            let taken = rings.is_of(&own.completion) && is_older;
            if taken {
                each(own.completion);
            }
            taken
        });
    }

    fn recount(&self, completions: &Completions) {
        // Release: as in `push`.
        self.count.store(completions.queue.len() as u32, Ordering::Release);
    }

    fn remove(&self, mut is_doomed: impl FnMut(&LocalCompletion) -> bool) {
        let mut completions = self.completions.lock();
        let (mut at, reported, mut kept_reported) = (0, completions.reported, 0);
        completions.queue.retain(|own| {
            let kept = !is_doomed(own);
            kept_reported += usize::from(kept && at < reported);
            at += 1;
            kept
        });
        completions.reported = kept_reported;
        self.recount(&completions);
    }

    /// Drops those of a QP that is gone.
    pub fn purge(&self, rings: &Rings) {
        self.remove(|own| rings.is_of(&own.completion));
        lock(&self.notified).retain(|other| !std::ptr::eq(&raw const **other, rings));
    }

    /// An event has reported all completions.
    pub fn note_reported(&self) {
        let mut completions = self.completions.lock();
        completions.reported = completions.queue.len();
    }

    /// Whether there is a completion that no event reported.
    pub fn has_unreported(&self) -> bool {
        let completions = self.completions.lock();
        completions.queue.len() > completions.reported
    }

    pub fn add_notified(&self, rings: Arc<Rings>) {
        let mut notified = lock(&self.notified);
        if !notified.last().is_some_and(|last| Arc::ptr_eq(last, &rings)) {
            notified.push(rings);
        }
        // Release; partner: the Acquire load in `has_notified`.
        self.has_notified.store(true, Ordering::Release);
    }

    #[inline]
    pub fn has_notified(&self) -> bool {
        // Acquire; partner: the Release store in `add_notified`.
        self.has_notified.load(Ordering::Acquire)
    }

    pub fn take_notified(&self) -> Vec<Arc<Rings>> {
        let mut notified = lock(&self.notified);
        // Relaxed: under the lock.
        self.has_notified.store(false, Ordering::Relaxed);
        std::mem::take(&mut notified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> LocalCompletion {
        LocalCompletion { completion: Completion::default(), after: 0 }
    }

    #[test]
    fn sends_past_the_router_end_no_sleep_for_solicited_ones() {
        let inbox = Inbox::new(true);
        inbox.arm(false, false);
        assert!(inbox.push(own()) && !inbox.push(own()));
        // The event of the first came from the router.
        inbox.arm(false, false);
        inbox.arm(true, false);
        assert!(!inbox.push(own()));
        // It is still to come.
        inbox.arm(false, false);
        inbox.arm(true, true);
        assert!(inbox.push(own()));
    }
}
