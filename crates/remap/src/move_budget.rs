//! How many registrations of small regions move their pages at once (`small_regions`).

/// Of a process that has made none before.
const MOVES_MAX: u64 = 64;
/// So often one more may.
const MOVE_EVERY_NS: u64 = 50_000_000;

/// Those that still may.
#[derive(Debug, Default)]
pub(crate) struct MoveBudget {
    /// When it would be full.
    full_at_ns: u64,
}

impl MoveBudget {
    pub fn take(&mut self, now_ns: u64) -> bool {
        let full_at_ns = self.full_at_ns.max(now_ns) + MOVE_EVERY_NS;
        let has_room = full_at_ns <= now_ns + MOVES_MAX * MOVE_EVERY_NS;
        if has_room {
            self.full_at_ns = full_at_ns;
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_at_once_and_then_one_now_and_then() {
        let mut budget = MoveBudget::default();
        let now = 1_000_000_000_000;
        assert_eq!((0..1000).filter(|_| budget.take(now)).count() as u64, MOVES_MAX);
        assert!(!budget.take(now + MOVE_EVERY_NS - 1) && budget.take(now + MOVE_EVERY_NS));
        assert!(!budget.take(now + MOVE_EVERY_NS));
        let later = now + 3600 * 1_000_000_000;
        assert_eq!((0..1000).filter(|_| budget.take(later)).count() as u64, MOVES_MAX);
    }
}
