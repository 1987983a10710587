//! Which packets of a key have been taken: each is taken once (RFC 4303, 3.4.3, by blocks as RFC 6479 does it).
//!
//! Packets come in another order than they were sealed in: each of a router's sending sockets keeps its own order, a
//! full one is late by all that the others send meanwhile. A packet that is further behind than the window reaches is
//! refused, as one that was taken would be.
use alloc::boxed::Box;
use alloc::vec;

const WORD_BITS: u64 = u64::BITS as u64;
/// Blocks of the window; one of them is not yet full.
const WORD_COUNT: u64 = 1024;
/// So far behind the highest number a packet may be, at least.
pub const REPLAY_WINDOW: u64 = (WORD_COUNT - 1) * WORD_BITS;

/// The window of one key. It takes 8 KiB, whatever comes.
pub struct ReplayWindow {
    /// Bit i of word w: number 64 w + i was taken, for the `WORD_COUNT` highest w (modulo that count).
    words: Box<[u64]>,
    /// The block of the highest number that was taken.
    top: u64,
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self { words: vec![0; WORD_COUNT as usize].into_boxed_slice(), top: 0 }
    }
}

impl ReplayWindow {
    fn place(word: u64) -> usize {
        (word % WORD_COUNT) as usize
    }

    /// Whether a packet with this number may be taken.
    #[inline]
    pub fn is_new(&self, number: u64) -> bool {
        let word = number / WORD_BITS;
        if word > self.top {
            return true;
        }
        self.top - word < WORD_COUNT && self.words[Self::place(word)] & 1 << (number % WORD_BITS) == 0
    }

    /// Notes that it was taken: only of one that is new, and authentic.
    #[inline]
    pub fn note(&mut self, number: u64) {
        let word = number / WORD_BITS;
        if word > self.top {
            if word - self.top >= WORD_COUNT {
                self.words.fill(0);
            } else {
                (self.top + 1..=word).for_each(|fresh| self.words[Self::place(fresh)] = 0);
            }
            self.top = word;
        }
        self.words[Self::place(word)] |= 1 << (number % WORD_BITS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn take(window: &mut ReplayWindow, number: u64) -> bool {
        let is_new = window.is_new(number);
        if is_new {
            window.note(number);
        }
        is_new
    }

    #[test]
    fn each_number_is_taken_once() {
        let mut window = ReplayWindow::default();
        for number in 0..3 * REPLAY_WINDOW {
            assert!(take(&mut window, number), "{number}");
            assert!(!take(&mut window, number), "{number} again");
        }
        assert!(!take(&mut window, 0));
        assert!(take(&mut window, u64::MAX));
        assert!(!take(&mut window, u64::MAX) && !take(&mut window, 3 * REPLAY_WINDOW));
    }

    #[test]
    fn numbers_as_far_behind_as_the_window_reaches_are_taken() {
        for first in [0, 1, 63, 64, 12_345] {
            let mut window = ReplayWindow::default();
            let highest = first + REPLAY_WINDOW;
            assert!(take(&mut window, highest));
            for number in (first..highest).rev() {
                assert!(take(&mut window, number), "{number} behind {highest}");
            }
            assert!((first..=highest).all(|number| !take(&mut window, number)));
        }
        let mut window = ReplayWindow::default();
        assert!(take(&mut window, REPLAY_WINDOW + WORD_BITS));
        assert!(!take(&mut window, 0), "it may have been taken");
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_set(steps in prop::collection::vec((any::<bool>(), 0_u64..3 * REPLAY_WINDOW), 1..300)) {
            let (mut window, mut taken, mut highest) = (ReplayWindow::default(), BTreeSet::new(), 0_u64);
            for (ahead, step) in steps {
                let number = if ahead { highest + step % 5000 } else { highest.saturating_sub(step) };
                let is_new = take(&mut window, number);
                prop_assert!(!is_new || !taken.contains(&number), "{number} twice");
                if number + REPLAY_WINDOW >= highest {
                    prop_assert_eq!(is_new, !taken.contains(&number));
                }
                taken.insert(number);
                highest = highest.max(number);
            }
        }
    }
}
