//! Wake-up handshakes between a side that may stop looking and a side that brings work.
//!
//! All are the same store-buffering pattern. One side publishes work, fences, and looks at the
//! other's word; the other stores its word, fences, and looks for work once more. The two SeqCst
//! fences are each other's partner: at least one of the two sees what the other stored, so no
//! wake-up is lost. Both may: then a wake-up comes for nothing.
//!
//! | word | stored by | says | looked at by | after |
//! |---|---|---|---|---|
//! | `POLLED` | router | 1: I look at the send queue by myself | library | publishing a send |
//! | `RECEIVES_WANTED` | router | 1: I wait for a receive | library | publishing a receive |
//! | `ROUTER_SLEEPS` | router | 1: I don't look at the doorbells | library | ringing one |
//! | `ARMED` | library | 1, 2: I wait for a completion (2: a solicited one) | router | publishing completions |
//! | `AWAITED` | library | n: I sleep until `COMPLETED` is n | router | publishing completions and storing `COMPLETED` |
//! | `WANTS_NOTIFICATION` | receiver of a direct ring | 1: I don't look at it | its sender | publishing a message |
//! | `STATE` | receiver of a direct ring | 2: I look once more, and never again | its sender | `WANTS_NOTIFICATION` was 1 |
//! | [`Parker`](crate::parker::Parker) | a thread of the router | 1: I sleep | other threads of it | putting something in a queue |
use crate::layout::{ARMED_NEXT, ARMED_NONE, ARMED_SOLICITED, DIRECT_RING_LEFT, DOORBELL_WORDS_PER_SUMMARY_BIT};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Stores a word of the table above; afterwards the caller looks for work once more.
#[inline]
pub fn announce(word: &AtomicU32, value: bool) {
    // Relaxed: ordered by the fence.
    word.store(u32::from(value), Ordering::Relaxed);
    // SeqCst; partner: the fence in `announced`.
    fence(Ordering::SeqCst);
}

/// Reads a word of the table above after the caller has published work.
#[inline]
pub fn announced(word: &AtomicU32) -> bool {
    // SeqCst; partner: the fence in `announce`.
    fence(Ordering::SeqCst);
    // Relaxed: ordered by the fence.
    word.load(Ordering::Relaxed) != 0
}

/// The receiver of a direct ring leaves it; afterwards the caller looks once more, and takes what
/// it finds.
pub fn leave(state: &AtomicU32, wants_notification: &AtomicU32) {
    // Relaxed: ordered by the fence in `announce`.
    state.store(DIRECT_RING_LEFT, Ordering::Relaxed);
    announce(wants_notification, true);
}

/// The sender, to which [`announced`] has said so after it published a message that the receiver
/// does not look: whether the receiver may never see it. (Either the last look comes after the
/// message was published, or this sees what was stored before that look.)
#[inline]
pub fn may_be_unseen(state: &AtomicU32) -> bool {
    // Relaxed: ordered by the fence in `announced`; partner: the fence in `leave`.
    state.load(Ordering::Relaxed) == DIRECT_RING_LEFT
}

/// Asks for an event at the next completion, or the next solicited one; afterwards the caller polls
/// once more. Being armed for any completion is not weakened by arming for solicited ones (IBTA
/// 11.4.2.2).
#[inline]
pub fn arm(armed: &AtomicU32, solicited_only: bool) {
    if solicited_only {
        // Relaxed: ordered by the fence. If it fails, the CQ stays armed as it was.
        let _ = armed.compare_exchange(ARMED_NONE, ARMED_SOLICITED, Ordering::Relaxed, Ordering::Relaxed);
    } else {
        // Relaxed: ordered by the fence.
        armed.store(ARMED_NEXT, Ordering::Relaxed);
    }
    // SeqCst; partner: the fence in `take_armed`.
    fence(Ordering::SeqCst);
}

/// After completions were published, of which one is solicited or none: whether an event is due. If
/// so, disarms.
#[inline]
pub fn take_armed(armed: &AtomicU32, solicited: bool) -> bool {
    // SeqCst; partner: the fence in `arm`.
    fence(Ordering::SeqCst);
    // Relaxed: ordered by the fence.
    match armed.load(Ordering::Relaxed) {
        ARMED_NEXT => {}
        ARMED_SOLICITED if solicited => {}
        _ => return false,
    }
    // Relaxed: the event itself goes through the kernel; what it announces was published before.
    // Another value than was loaded is a library that armed again meanwhile: this event answers it
    // too.
    armed.swap(ARMED_NONE, Ordering::Relaxed) != ARMED_NONE
}

/// An event count: how pollers sleep until the router brings completions. Each word has one side
/// that stores it, and nobody ever takes anything back, so any number of threads may sleep, or die
/// asleep.
#[derive(Clone, Copy)]
pub struct EventCount<'a> {
    /// Stored by the router.
    pub completed: &'a AtomicU64,
    /// Stored by the library.
    pub awaited: &'a AtomicU64,
}

impl EventCount<'_> {
    /// Library: the count before a look at the queues. If they are empty then, what comes later
    /// changes the count.
    #[inline]
    pub fn completed(&self) -> u64 {
        // Acquire; partner: the Release store in `advance`: the completions that are counted can be
        // seen.
        self.completed.load(Ordering::Acquire)
    }

    /// Library: says that it sleeps while the count is `seen`. Then it does, unless the count has
    /// changed (the futex looks).
    #[inline]
    pub fn await_next(&self, seen: u64) {
        // Relaxed: ordered by the fence.
        self.awaited.fetch_max(seen.wrapping_add(1), Ordering::Relaxed);
        // SeqCst; partner: the caller's fence between `advance` and `is_awaited`.
        fence(Ordering::SeqCst);
    }

    /// Router: completions are in their rings; `count` is one more than last time.
    #[inline]
    pub fn advance(&self, count: u64) {
        // Release; partner: the Acquire load in `completed`.
        self.completed.store(count, Ordering::Release);
    }

    /// Router, after [`Self::advance`] and a SeqCst fence: somebody may sleep who must be woken.
    /// (One who has seen `count` already and waits for the next may hide one who has not, so more
    /// than `count` counts too.)
    #[inline]
    pub fn is_awaited(&self, count: u64) -> bool {
        // Relaxed: ordered by the caller's fence, whose partner is the one in `await_next`.
        self.awaited.load(Ordering::Relaxed) >= count
    }
}

/// Between what a side has stored for several others and its looks at their words: one for all of
/// them.
#[inline]
pub fn fence_for_all() {
    fence(Ordering::SeqCst);
}

/// More doorbells than this in one look wait for the next: a library that rings all of them costs
/// others little.
pub const DOORBELLS_PER_LOOK_MAX: usize = 1024;

/// A bitmap of doorbells with a summary: bit i of the summary stands for words 16 i .. 16 i + 15.
#[derive(Clone, Copy)]
pub struct Doorbells<'a> {
    pub summary: &'a AtomicU64,
    /// At most 1024.
    pub words: &'a [AtomicU64],
    pub router_sleeps: &'a AtomicU32,
}

impl Doorbells<'_> {
    /// Library: rings a doorbell. True: the router sleeps and must be kicked.
    #[inline]
    pub fn ring(&self, doorbell: u32) -> bool {
        let word = doorbell as usize / 64;
        // Release; partner: the Acquire swap of the word in `take`: the request published before
        // comes with it.
        self.words[word].fetch_or(1 << (doorbell % 64), Ordering::Release);
        // Release; partner: the Acquire swap of the summary in `take`: the doorbell's word comes
        // with it.
        self.summary.fetch_or(1 << (word / DOORBELL_WORDS_PER_SUMMARY_BIT), Ordering::Release);
        announced(self.router_sleeps)
    }

    /// Router: takes doorbells that ring; whole groups, until they are [`DOORBELLS_PER_LOOK_MAX`]
    /// or more. The others go on ringing. False: none did.
    #[inline]
    pub fn take(&self, mut each: impl FnMut(u32)) -> bool {
        // Relaxed: only whether the swap is worth its price.
        if self.summary.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Acquire; partner: the Release `fetch_or` of the summary in `ring`.
        let mut summary = self.summary.swap(0, Ordering::Acquire);
        let mut count = 0;
        while summary != 0 {
            if count >= DOORBELLS_PER_LOOK_MAX {
                // Relaxed: what the bits stand for was acquired above, and the next swap reads on
                // from there.
                self.summary.fetch_or(summary, Ordering::Relaxed);
                break;
            }
            let group = summary.trailing_zeros() as usize * DOORBELL_WORDS_PER_SUMMARY_BIT;
            summary &= summary - 1;
            for (offset, word) in self.words.iter().skip(group).take(DOORBELL_WORDS_PER_SUMMARY_BIT).enumerate() {
                // Relaxed: only whether the swap is worth its price; ordered after the summary's
                // swap.
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                // Acquire; partner: the Release `fetch_or` of the word in `ring`.
                let mut bits = word.swap(0, Ordering::Acquire);
                while bits != 0 {
                    count += 1;
                    each(((group + offset) * 64) as u32 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
        count > 0
    }

    /// Router: nothing rings. Called again after `announce(router_sleeps, true)`, before it sleeps.
    #[inline]
    pub fn is_empty(&self) -> bool {
        // Relaxed: ordered by the fence in `announce`; what rings is taken by `take`.
        self.summary.load(Ordering::Relaxed) == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_storm_is_taken_in_looks_and_nothing_is_lost() {
        let words: Vec<AtomicU64> = (0..1024).map(|_| AtomicU64::new(u64::MAX)).collect();
        let (summary, router_sleeps) = (AtomicU64::new(u64::MAX), AtomicU32::new(0));
        let doorbells = Doorbells { summary: &summary, words: &words, router_sleeps: &router_sleeps };
        let mut rang = BTreeSet::new();
        loop {
            let before = rang.len();
            if !doorbells.take(|doorbell| assert!(rang.insert(doorbell))) {
                break;
            }
            assert!(rang.len() - before < 2 * DOORBELLS_PER_LOOK_MAX);
        }
        assert_eq!(rang.len(), 65_536);
    }
}
