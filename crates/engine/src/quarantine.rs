//! QPNs that were given back: they rest a while before a new QP may have them.
//!
//! The other end of a connection remembers its peer's QPN for some seconds after its end
//! (TimeWait), and so do packets that are still on their way. A QP that has the number of one that
//! just ended would be taken for that: `rdma_cm` rejects its requests as stale.
//!
//! QPNs are drawn at random, so that nobody can guess another's. To visit all numbers in an order
//! of one's own (a keyed permutation of a counter) would keep them apart as well, but who makes QPs
//! and destroys them, millions of them, would learn which are left.
//!
//! Invariant: what rests is no QP's, and is bounded: a tenant that makes and destroys QPs as fast
//! as it can makes numbers rest for less time, and never fills more than a sixteenth of those that
//! its shard has.
use crate::table::NumberTable;
use alloc::collections::{BTreeSet, VecDeque};
use freeflow_verbs::{Duration, Instant, Qpn};
use serde::{Deserialize, Serialize};

/// Longer than any connection manager's TimeWait: FreeFlow's take 2 s at most, Linux' a second by
/// default. Before it they may ask again for a few seconds whether the other end heard of the
/// disconnection.
const REST: Duration = Duration::from_millis(10_000);
/// 13,000 QPs destroyed a second, for as long as they rest; one in 128 of all numbers, or one in 16
/// of a shard's where there are most shards.
const QUARANTINED_MAX: usize = 1 << 17;
/// So many whose time has come leave for each that comes: all of them in the end, and never many at
/// once.
const LEAVE_AT_ONCE_MAX: usize = 2;

#[derive(Serialize, Deserialize)]
pub(crate) struct QpnQuarantine {
    /// The first to come is the first to leave.
    queue: VecDeque<(Qpn, Instant)>,
    /// The same numbers, to be looked up.
    numbers: NumberTable,
}

impl QpnQuarantine {
    pub fn new() -> Self {
        Self { queue: VecDeque::new(), numbers: NumberTable::new() }
    }

    pub fn has(&self, number: u32) -> bool {
        self.numbers.get(number).is_some()
    }

    /// A QP had this number until now.
    pub fn give_back(&mut self, now: Instant, qpn: Qpn) {
        for _ in 0..LEAVE_AT_ONCE_MAX {
            let is_over = self.queue.front().is_some_and(|(_, since)| now - *since >= REST);
            if !is_over && self.queue.len() < QUARANTINED_MAX {
                break;
            }
            let Some((rested, _)) = self.queue.pop_front() else { break };
            self.numbers.remove(rested.0);
        }
        self.queue.push_back((qpn, now));
        self.numbers.insert(qpn.0, 0);
    }

    /// Whether both parts hold the same.
    pub fn is_consistent(&self) -> bool {
        let len = self.queue.len();
        let distinct: BTreeSet<Qpn> = self.queue.iter().map(|(qpn, _)| *qpn).collect();
        let is_one_each = len == distinct.len() && len == self.numbers.len();
        len <= QUARANTINED_MAX && is_one_each && distinct.iter().all(|qpn| self.has(qpn.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_millis(1000);

    #[test]
    fn numbers_rest_for_their_time_and_leave_in_their_order() {
        let mut quarantine = QpnQuarantine::new();
        let start = Instant(5);
        for number in 1..=100 {
            quarantine.give_back(start, Qpn(number));
        }
        let almost = start + Duration(REST.0 - 1);
        quarantine.give_back(almost, Qpn(101));
        assert!((1..=101).all(|number| quarantine.has(number)), "nobody leaves before the time");
        // Each that comes lets two go.
        for number in 102..=151 {
            quarantine.give_back(start + REST, Qpn(number));
            assert!(quarantine.has(number) && quarantine.is_consistent());
        }
        assert!((1..=100).all(|number| !quarantine.has(number)) && quarantine.has(101));
        assert_eq!(quarantine.queue.len(), 51);
    }

    #[test]
    fn however_many_come_their_number_is_bounded() {
        let mut quarantine = QpnQuarantine::new();
        let count = QUARANTINED_MAX as u32 + 1000;
        for number in 1..=count {
            quarantine.give_back(Instant(0), Qpn(number));
        }
        assert_eq!(quarantine.queue.len(), QUARANTINED_MAX);
        assert!(quarantine.is_consistent() && !quarantine.has(1000) && quarantine.has(1001));
        // All are given up once their time has come, by those that come later.
        for number in 1..=count {
            if !quarantine.has(number) {
                quarantine.give_back(Instant(0) + REST + SECOND, Qpn(number));
            }
        }
        assert!(quarantine.is_consistent());
    }
}
