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

/// Uses before the first command: a freeze of threads costs about as much as a few of them.
const USES_BEFORE_SHARING: u32 = 8;
/// An access to all of a block counts as so many: to copy it and to move it cost more than the freeze.
const USES_OF_WHOLE_BLOCK: u32 = 2;
/// The most before a later one.
const USES_MAX: u32 = 1 << 20;
/// Each such time without a command takes back one doubling.
const FORGIVEN: Duration = Duration::from_millis(1000);
/// Blocks of one process that are counted at a time.
const BLOCK_COUNT_MAX: usize = 4096;
/// Of so many accesses to other blocks than these, one is counted in the place of one of these: so a block that is used
/// again and again earns its command before it goes, also where blocks are used in turn.
const MISSES_PER_PLACE: u32 = 16;
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

    /// Whether a command is due, after so many more uses.
    fn note(&mut self, now: Instant, uses: u32) -> bool {
        let halvings = (now - self.changed_at).0 / FORGIVEN.0;
        if halvings > 0 {
            self.needed = self.needed.checked_shr(halvings as u32).unwrap_or(0).max(USES_BEFORE_SHARING);
            self.changed_at = now;
        }
        self.uses += uses;
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
    /// Accesses to blocks that found no place.
    misses: u32,
    /// The block that gave up its place last.
    evicted: u64,
}

impl SlowPathUse {
    /// An access by the slow path. `is_due` gets the first address of each block that shall be shared
    /// now.
    pub fn note(&mut self, now: Instant, address: u64, bytes: u64, mut is_due: impl FnMut(u64)) {
        let first = address / SHARE_BYTES;
        let last = address.saturating_add(bytes.saturating_sub(1)) / SHARE_BYTES;
        for number in first..=last.min(first + BLOCKS_OF_ACCESS_MAX - 1) {
            if self.blocks.len() >= BLOCK_COUNT_MAX && !self.blocks.contains_key(&number) && !self.make_room() {
                continue;
            }
            let start = number * SHARE_BYTES;
            let is_whole = address <= start && start - address + SHARE_BYTES <= bytes;
            let uses = if is_whole { USES_OF_WHOLE_BLOCK } else { 1 };
            if self.blocks.entry(number).or_insert_with(|| Block::new(now)).note(now, uses) {
                is_due(start);
            }
        }
    }

    /// Whether a command was sent for this address a while ago at most.
    pub fn was_asked(&self, address: u64) -> bool {
        self.blocks.get(&(address / SHARE_BYTES)).is_some_and(|block| block.needed > USES_BEFORE_SHARING)
    }

    /// Once in a while a block gives its place up: of the next few the one that was used least since its last command.
    fn make_room(&mut self) -> bool {
        const LOOKS: usize = 8;
        self.misses += 1;
        if self.misses < MISSES_PER_PLACE {
            return false;
        }
        self.misses = 0;
        let next = self.blocks.range(self.evicted..).chain(self.blocks.iter()).take(LOOKS);
        let least = next.min_by_key(|(_, block)| (block.uses, block.needed)).map(|(&number, _)| number);
        if let Some(number) = least {
            self.evicted = number;
            self.blocks.remove(&number);
        }
        true
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
        for turn in 1..=USES_BEFORE_SHARING {
            memory.note(NOW, SHARE_BYTES - 1, SHARE_BYTES + 2, |block| due.push((turn, block)));
        }
        assert_eq!(due, [(4, SHARE_BYTES), (8, 0), (8, 2 * SHARE_BYTES)], "and all of a block counts twice");
        memory.note(NOW, 5 * SHARE_BYTES, 0, |_| panic!("nothing is due"));
        memory.note(NOW, u64::MAX, u64::MAX, |_| panic!("nothing is due"));
        memory.note(NOW, 0, u64::MAX, |_| {});
        assert!(memory.blocks.len() as u64 <= BLOCKS_OF_ACCESS_MAX + 5);
    }

    #[test]
    fn more_blocks_than_are_counted_all_earn_their_commands() {
        const COUNT: u64 = 2 * BLOCK_COUNT_MAX as u64;
        let mut memory = SlowPathUse::default();
        let mut shared = std::collections::BTreeSet::new();
        // In turn, as buffers of a ring. What is shared is not used by the slow path any more.
        let rounds = (0..1000).find(|_| {
            for number in (0..COUNT).filter(|number| !shared.contains(number)).collect::<Vec<_>>() {
                memory.note(NOW, number * SHARE_BYTES, 1, |block| {
                    shared.insert(block / SHARE_BYTES);
                });
            }
            assert!(memory.blocks.len() <= BLOCK_COUNT_MAX);
            shared.len() as u64 == COUNT
        });
        assert!(rounds.is_some_and(|rounds| rounds < 200), "{rounds:?} rounds, {} shared", shared.len());
    }
}
