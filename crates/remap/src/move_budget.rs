//! How many registrations of small regions move their pages at once (`small_regions`).

/// Of a process that has moved none before. A region counts the blocks that its bytes fill, one at least: a move costs
/// a freeze of the threads and a copy, and what is moved is copied back when its region goes.
const BLOCKS_MAX: u64 = 64;
const BLOCK_BYTES: u64 = 64 << 10;
/// So often one more may.
const BLOCK_EVERY_NS: u64 = 50_000_000;

/// Those that still may.
#[derive(Debug, Default)]
pub(crate) struct MoveBudget {
    /// When it would be full.
    full_at_ns: u64,
}

impl MoveBudget {
    pub fn take(&mut self, now_ns: u64, bytes: u64) -> bool {
        let blocks = bytes.div_ceil(BLOCK_BYTES).max(1);
        let full_at_ns = self.full_at_ns.max(now_ns) + blocks * BLOCK_EVERY_NS;
        let has_room = full_at_ns <= now_ns + BLOCKS_MAX * BLOCK_EVERY_NS;
        if has_room {
            self.full_at_ns = full_at_ns;
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(budget: &mut MoveBudget, now_ns: u64, bytes: u64) -> u64 {
        (0..1000).filter(|_| budget.take(now_ns, bytes)).count() as u64
    }

    #[test]
    fn a_few_at_once_and_then_one_now_and_then() {
        let (mut budget, now) = (MoveBudget::default(), 1_000_000_000_000);
        assert_eq!(taken(&mut budget, now, 4096), BLOCKS_MAX);
        assert!(!budget.take(now + BLOCK_EVERY_NS - 1, 1) && budget.take(now + BLOCK_EVERY_NS, 1));
        assert!(!budget.take(now + BLOCK_EVERY_NS, BLOCK_BYTES));
        let later = now + 3600 * 1_000_000_000;
        assert_eq!(taken(&mut budget, later, BLOCK_BYTES), BLOCKS_MAX);
    }

    #[test]
    fn larger_regions_count_as_several() {
        let (mut budget, now) = (MoveBudget::default(), 1_000_000_000_000);
        assert_eq!(taken(&mut budget, now, 16 * BLOCK_BYTES), 4);
        let now = now + 100 * BLOCK_EVERY_NS;
        assert_eq!((taken(&mut budget, now, 15 * BLOCK_BYTES + 1), taken(&mut budget, now, BLOCK_BYTES)), (4, 0));
        assert!(!budget.take(now + 15 * BLOCK_EVERY_NS, 16 * BLOCK_BYTES));
        assert!(budget.take(now + 16 * BLOCK_EVERY_NS, 16 * BLOCK_BYTES));
    }
}
