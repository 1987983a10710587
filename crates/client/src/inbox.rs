//! What comes to a CQ past the router: completions of requests that the poster carried out itself, and news of channels.
//!
//! Invariant: completions of a QP's sends are returned in the order of posting. One that stands here says after which of the
//! router's it comes ([`Own::after`]); before one of the router's is returned, those of its QP that are older are taken from here.
use crate::lock;
use crate::queue_pair::Rings;
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
    completions: Mutex<Completions>,
    has_fresh: AtomicBool,
    /// QPs whose channels have news.
    fresh: Mutex<Vec<Arc<Rings>>>,
    /// The CQ was armed for any completion, and has not been told of one since, as far as is known here.
    is_armed: AtomicBool,
}

/// A completion of a request that the poster carried out; its position is a virtual one.
#[derive(Clone, Copy)]
pub(crate) struct Own {
    pub completion: Completion,
    /// It has its turn when those before this virtual position were returned that the router completed.
    pub after: u32,
}

#[derive(Default)]
struct Completions {
    queue: VecDeque<Own>,
    /// How many of them, from the first on, an event has told of.
    told: usize,
}

impl Inbox {
    pub fn new(has_channel: bool) -> Self {
        Self { has_channel, ..Self::default() }
    }

    /// Adds a completion. True: the CQ is armed, and its doorbell must ring.
    #[inline]
    pub fn push(&self, own: Own) -> bool {
        let mut completions = lock(&self.completions);
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

    /// Before the CQ itself is armed, which fences. `is_pending`: an event of an earlier arming is still to come.
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
    pub fn take(&self, has_turn: impl FnOnce(&Own) -> bool) -> Option<Completion> {
        let mut completions = lock(&self.completions);
        let own = *completions.queue.front().filter(|own| has_turn(own))?;
        completions.queue.pop_front();
        completions.told = completions.told.saturating_sub(1);
        self.recount(&completions);
        Some(own.completion)
    }

    /// Takes those of one QP that are older than a virtual position.
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

    fn remove(&self, mut is_doomed: impl FnMut(&Own) -> bool) {
        let mut completions = lock(&self.completions);
        let (mut at, told, mut kept_told) = (0, completions.told, 0);
        completions.queue.retain(|own| {
            let kept = !is_doomed(own);
            kept_told += usize::from(kept && at < told);
            at += 1;
            kept
        });
        completions.told = kept_told;
        self.recount(&completions);
    }

    /// Drops those of a QP that is gone.
    pub fn purge(&self, rings: &Rings) {
        self.remove(|own| rings.is_of(&own.completion));
        lock(&self.fresh).retain(|other| !std::ptr::eq(&raw const **other, rings));
    }

    /// An event has told of all that there is.
    pub fn note_told(&self) {
        let mut completions = lock(&self.completions);
        completions.told = completions.queue.len();
    }

    /// Whether there is something that no event told of.
    pub fn has_untold(&self) -> bool {
        let completions = lock(&self.completions);
        completions.queue.len() > completions.told
    }

    pub fn add_fresh(&self, rings: Arc<Rings>) {
        let mut fresh = lock(&self.fresh);
        fresh.push(rings);
        // Release; partner: the Acquire load in `has_fresh`.
        self.has_fresh.store(true, Ordering::Release);
    }

    #[inline]
    pub fn has_fresh(&self) -> bool {
        // Acquire; partner: the Release store in `add_fresh`.
        self.has_fresh.load(Ordering::Acquire)
    }

    pub fn take_fresh(&self) -> Vec<Arc<Rings>> {
        let mut fresh = lock(&self.fresh);
        // Relaxed: under the lock.
        self.has_fresh.store(false, Ordering::Relaxed);
        std::mem::take(&mut fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Own {
        Own { completion: Completion::default(), after: 0 }
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
