//! Sharing memory that a registration left where it was: partial pages of regions, small regions,
//! pages that another region touched before. The slow path reaches them; when it has done so a few
//! times, their process is asked to put them into a segment.
//!
//! So memory that is registered and given up again costs its process nothing, and what is used
//! becomes as fast as whole pages.
//!
//! The command is advice. The next one takes twice as many accesses, whatever comes of it (nothing
//! does where a process is traced; a process that forks, or registers for each use, takes its memory
//! back soon); half as many again for each second without one. So a process freezes its threads for
//! a block a few times in a second at most.
use freeflow_protocol::library::SHARE_BYTES;
use freeflow_verbs::{Duration, Instant};
use std::collections::BTreeMap;

/// Accesses before the first command: a freeze of threads costs about as much as a few of them.
const USES_BEFORE_SHARING: u32 = 8;
/// The most before a later one.
const USES_MAX: u32 = 1 << 20;
/// Each such time without a command takes back one doubling.
const FORGIVEN: Duration = Duration::from_millis(1000);
/// Blocks of one process that are counted at a time; any others are left out while they are in use.
const BLOCK_COUNT_MAX: usize = 4096;
/// Blocks of one access that are counted: one that is longer finds the rest the next times.
const BLOCKS_OF_ACCESS_MAX: u64 = 256;

struct Block {
    uses: u32,
    needed: u32,
    /// When `needed` was doubled or halved, last.
    changed_at: Instant,
}

impl Block {
    fn new(now: Instant) -> Self {
        Self { uses: 0, needed: USES_BEFORE_SHARING, changed_at: now }
    }

    /// Whether a command is due.
    fn note(&mut self, now: Instant) -> bool {
        let halvings = (now - self.changed_at).0 / FORGIVEN.0;
        if halvings > 0 {
            self.needed = self.needed.checked_shr(halvings as u32).unwrap_or(0).max(USES_BEFORE_SHARING);
            self.changed_at = now;
        }
        self.uses += 1;
        let is_due = self.uses >= self.needed;
        if is_due {
            self.needed = self.needed.saturating_mul(2).min(USES_MAX);
            (self.uses, self.changed_at) = (0, now);
        }
        is_due
    }
}

/// Memory of one process that the slow path reaches, in blocks of [`SHARE_BYTES`], by their numbers.
#[derive(Default)]
pub struct SlowPathUse {
    blocks: BTreeMap<u64, Block>,
}

impl SlowPathUse {
    /// An access by the slow path. `is_due` gets the first address of each block that shall be shared
    /// now.
    pub fn note(&mut self, now: Instant, address: u64, bytes: u64, mut is_due: impl FnMut(u64)) {
        let first = address / SHARE_BYTES;
        let last = address.saturating_add(bytes.saturating_sub(1)) / SHARE_BYTES;
        for number in first..=last.min(first + BLOCKS_OF_ACCESS_MAX - 1) {
            if self.blocks.len() >= BLOCK_COUNT_MAX && !self.blocks.contains_key(&number) {
                self.make_room(number);
            }
            if self.blocks.entry(number).or_insert_with(|| Block::new(now)).note(now) {
                is_due(number * SHARE_BYTES);
            }
        }
    }

    /// Whether a command was sent for this address a while ago at most.
    pub fn was_asked(&self, address: u64) -> bool {
        self.blocks.get(&(address / SHARE_BYTES)).is_some_and(|block| block.needed > USES_BEFORE_SHARING)
    }

    /// Another block gives its place up: the next one that is used less, or else just the next.
    fn make_room(&mut self, number: u64) {
        const LOOKS: usize = 8;
        let around = self.blocks.range(number..).chain(self.blocks.iter()).take(LOOKS);
        if let Some(&least) = around.min_by_key(|(_, block)| block.needed + block.uses).map(|(number, _)| number) {
            self.blocks.remove(&least);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant(7);

    /// Accesses until a command is due.
    fn uses_until_due(memory: &mut SlowPathUse, now: Instant, address: u64) -> u32 {
        let mut due = Vec::new();
        (1..100_000)
            .find(|_| {
                memory.note(now, address, 1, |block| due.push(block));
                !due.is_empty()
            })
            .expect("no command")
    }

    #[test]
    fn a_command_is_due_after_some_accesses_and_the_next_one_after_twice_as_many() {
        let mut memory = SlowPathUse::default();
        for needed in [8, 16, 32, 64] {
            assert_eq!(uses_until_due(&mut memory, NOW, SHARE_BYTES + 7), needed);
        }
        assert_eq!(uses_until_due(&mut memory, NOW, 7), 8, "another block");
        memory.note(NOW, 2 * SHARE_BYTES, 1, |_| panic!("not yet"));
        assert_eq!([7, SHARE_BYTES, 2 * SHARE_BYTES].map(|at| memory.was_asked(at)), [true, true, false]);
        for _ in 0..13 {
            uses_until_due(&mut memory, NOW, 7);
        }
        assert_eq!(memory.blocks[&0].needed, 131_072);
    }

    #[test]
    fn time_without_a_command_takes_doublings_back() {
        let mut memory = SlowPathUse::default();
        for needed in [8, 16, 32, 64] {
            assert_eq!(uses_until_due(&mut memory, NOW, 0), needed);
        }
        assert_eq!(uses_until_due(&mut memory, NOW + Duration::from_millis(2500), 0), 32);
        assert_eq!(uses_until_due(&mut memory, NOW + Duration::from_millis(3499), 0), 64, "less than a second");
        assert_eq!(uses_until_due(&mut memory, NOW + Duration::from_millis(1_000_000), 0), 8);
    }

    #[test]
    fn an_access_uses_all_blocks_that_it_touches() {
        let mut memory = SlowPathUse::default();
        let mut due = Vec::new();
        for _ in 0..USES_BEFORE_SHARING {
            memory.note(NOW, SHARE_BYTES - 1, SHARE_BYTES + 2, |block| due.push(block));
        }
        assert_eq!(due, [0, SHARE_BYTES, 2 * SHARE_BYTES]);
        memory.note(NOW, 5 * SHARE_BYTES, 0, |_| panic!("nothing is due"));
        memory.note(NOW, u64::MAX, u64::MAX, |_| panic!("nothing is due"));
        memory.note(NOW, 0, u64::MAX, |_| {});
        assert!(memory.blocks.len() as u64 <= BLOCKS_OF_ACCESS_MAX + 5);
    }

    #[test]
    fn more_blocks_than_are_counted_leave_those_that_are_in_use() {
        let mut memory = SlowPathUse::default();
        for _ in 0..USES_BEFORE_SHARING - 1 {
            memory.note(NOW, 0, 1, |_| panic!("not yet"));
        }
        for number in 1..3 * BLOCK_COUNT_MAX as u64 {
            memory.note(NOW, number * SHARE_BYTES, 1, |_| panic!("used once"));
        }
        assert_eq!(memory.blocks.len(), BLOCK_COUNT_MAX);
        assert_eq!(uses_until_due(&mut memory, NOW, 0), 1);
    }
}
