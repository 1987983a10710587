//! The order of turns: strict priority, then deficit round robin among the vNICs of one priority,
//! then turn by turn among the queue pairs of one vNIC. So a tenant with a thousand busy QPs gets
//! as much as one with a single busy QP.
//!
//! A vNIC that comes to the front gets its *quantum*, bytes after its weight, and stays in front
//! until that is used up. A run moves more than a quantum at times: that is a debt, which later
//! quanta pay before the vNIC is served again.
//!
//! Invariant: a place is in the ring of its priority exactly while it has QPs listed, and once.
use crate::QpId;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{PRIORITY_DEFAULT, PRIORITY_MAX, WEIGHT_DEFAULT};
use serde::{Deserialize, Serialize};

/// Bytes that each unit of weight brings: 64 KiB for the default weight.
const QUANTUM_BYTES: i64 = 656;
/// Upper bound of a debt: a few of the largest runs.
const DEBT_BYTES_MAX: i64 = 4 << 20;
const PRIORITY_COUNT: usize = PRIORITY_MAX as usize + 1;

#[derive(Clone, Serialize, Deserialize)]
struct SlotQueue {
    priority: u8,
    weight: u16,
    /// Bytes that it may still use; below zero: that it has used too many.
    deficit: i64,
    queue: VecDeque<QpId>,
}

impl Default for SlotQueue {
    fn default() -> Self {
        Self { priority: PRIORITY_DEFAULT, weight: WEIGHT_DEFAULT, deficit: 0, queue: VecDeque::new() }
    }
}

impl SlotQueue {
    fn quantum(&self) -> i64 {
        i64::from(self.weight) * QUANTUM_BYTES
    }

    /// A new visit, or so many at once.
    fn visit(&mut self, rounds: i64) {
        let quantum = self.quantum();
        self.deficit = (self.deficit + rounds * quantum).min(quantum);
    }
}

/// vNICs by their *slots*, small numbers that the caller gives out, and their listed QPs.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Order {
    places: Vec<SlotQueue>,
    rings: [VecDeque<u32>; PRIORITY_COUNT],
    /// Bit by bit, which rings have anybody in them.
    occupied: u8,
    /// The one that was served last, and goes on while its quantum lasts.
    current: Option<u32>,
    count: usize,
}

impl Order {
    /// QPs listed.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn set(&mut self, slot: u32, priority: u8, weight: u16) {
        self.make_room(slot);
        self.leave_ring(slot);
        let place = &mut self.places[slot as usize];
        (place.priority, place.weight) = (priority.min(PRIORITY_MAX), weight.max(1));
        place.deficit = 0;
        if !place.queue.is_empty() {
            self.enter_ring(slot, false);
        }
    }

    /// Behind all others of its vNIC.
    #[inline]
    pub fn push(&mut self, slot: u32, qp: QpId) {
        self.make_room(slot);
        let place = &mut self.places[slot as usize];
        place.queue.push_back(qp);
        self.count += 1;
        if place.queue.len() == 1 {
            let is_current = self.current == Some(slot);
            let goes_on = is_current && place.deficit > 0;
            if is_current && !goes_on {
                self.current = None;
            }
            self.enter_ring(slot, goes_on);
        }
    }

    /// The next QP of the vNIC whose turn it is.
    #[inline]
    pub fn pop(&mut self) -> Option<(u32, QpId)> {
        let priority = (u8::BITS - 1).checked_sub(self.occupied.leading_zeros())? as usize;
        let slot = self.next_in(priority)?;
        let place = &mut self.places[slot as usize];
        let qp = place.queue.pop_front()?;
        if place.queue.is_empty() {
            self.rings[priority].pop_front();
            self.note_occupied(priority);
        }
        self.current = Some(slot);
        self.count -= 1;
        Some((slot, qp))
    }

    /// The one in front once all in front of it have had their share.
    fn next_in(&mut self, priority: usize) -> Option<u32> {
        let ring = &mut self.rings[priority];
        for step in 0..=ring.len() {
            let slot = *ring.front()?;
            let place = &mut self.places[slot as usize];
            if self.current == Some(slot) {
                // Its visit goes on, or is over.
                self.current = None;
            } else {
                place.visit(1);
            }
            if place.deficit > 0 {
                return Some(slot);
            }
            if step < ring.len() {
                ring.rotate_left(1);
            }
        }
        // All are in debt: as many rounds as it takes until the first is not, at once.
        let rounds = ring.iter().map(|&slot| {
            let place = &self.places[slot as usize];
            (1 - place.deficit).div_euclid(place.quantum()) + 1
        });
        let rounds = rounds.min()?;
        ring.iter().for_each(|&slot| self.places[slot as usize].visit(rounds));
        let first = ring.iter().position(|&slot| self.places[slot as usize].deficit > 0)?;
        ring.rotate_left(first);
        ring.front().copied()
    }

    /// Charges the use of a vNIC's QPs.
    #[inline]
    pub fn charge(&mut self, slot: u32, cost: u64) {
        if let Some(place) = self.places.get_mut(slot as usize) {
            let cost = i64::try_from(cost).unwrap_or(i64::MAX);
            place.deficit = place.deficit.saturating_sub(cost).max(-DEBT_BYTES_MAX);
        }
    }

    pub fn remove(&mut self, slot: u32, qp: QpId) {
        let Some(place) = self.places.get_mut(slot as usize) else { return };
        let before = place.queue.len();
        place.queue.retain(|&listed| listed != qp);
        self.count -= before - place.queue.len();
        if before > 0 && place.queue.is_empty() {
            self.leave_ring(slot);
        }
    }

    fn make_room(&mut self, slot: u32) {
        if self.places.len() <= slot as usize {
            self.places.resize_with(slot as usize + 1, SlotQueue::default);
        }
    }

    fn enter_ring(&mut self, slot: u32, in_front: bool) {
        let priority = usize::from(self.places[slot as usize].priority);
        if in_front {
            self.rings[priority].push_front(slot);
        } else {
            self.rings[priority].push_back(slot);
        }
        self.occupied |= 1 << priority;
    }

    fn leave_ring(&mut self, slot: u32) {
        let priority = usize::from(self.places[slot as usize].priority);
        self.rings[priority].retain(|&listed| listed != slot);
        self.note_occupied(priority);
    }

    fn note_occupied(&mut self, priority: usize) {
        if self.rings[priority].is_empty() {
            self.occupied &= !(1 << priority);
        }
    }

    /// False for one that was read from damaged bytes.
    pub fn is_consistent(&self) -> bool {
        let mut listed = 0;
        for (priority, ring) in self.rings.iter().enumerate() {
            if (self.occupied >> priority & 1 == 1) == ring.is_empty() {
                return false;
            }
            for slot in ring {
                let Some(place) = self.places.get(*slot as usize) else { return false };
                let twice = ring.iter().filter(|other| *other == slot).count() > 1;
                if usize::from(place.priority) != priority || place.queue.is_empty() || twice {
                    return false;
                }
                listed += place.queue.len();
            }
        }
        let all = self.places.iter().map(|place| place.queue.len()).sum::<usize>();
        let sane = |place: &SlotQueue| {
            place.weight > 0
                && place.priority <= PRIORITY_MAX
                && (-DEBT_BYTES_MAX..=place.quantum()).contains(&place.deficit)
        };
        listed == all && self.count == all && self.places.iter().all(sane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use alloc::vec;
    use proptest::prelude::*;

    fn qp(index: u32) -> QpId {
        QpId { index, generation: 0 }
    }

    #[test]
    fn a_thousand_queue_pairs_get_no_more_than_one() {
        let mut order = Order::default();
        (0..1000).for_each(|index| order.push(7, qp(index)));
        order.push(2, qp(5000));
        let (mut of_one, mut of_many) = (0, vec![0; 1000]);
        for _ in 0..4000 {
            let (slot, next) = order.pop().unwrap();
            match of_many.get_mut(next.index as usize) {
                Some(count) => *count += 1,
                None => of_one += 1,
            }
            order.charge(slot, 256 << 10);
            order.push(slot, next);
        }
        assert!((1999..=2001).contains(&of_one), "{of_one}");
        assert!(of_many.iter().all(|&count| (1..=3).contains(&count)));
        assert_eq!(order.len(), 1001);
    }

    /// Bytes each slot gets when all always have work, in runs of these sizes.
    fn shares(weights: &[u16], runs: &[u64], bytes: u64) -> Vec<u64> {
        let mut order = Order::default();
        for (slot, weight) in weights.iter().enumerate() {
            order.set(slot as u32, 3, *weight);
            order.push(slot as u32, qp(slot as u32));
        }
        let (mut got, mut sum) = (vec![0; weights.len()], 0);
        while sum < bytes {
            let (slot, next) = order.pop().unwrap();
            let run = runs[slot as usize];
            (got[slot as usize], sum) = (got[slot as usize] + run, sum + run);
            order.charge(slot, run);
            order.push(slot, next);
        }
        got
    }

    #[test]
    fn weights_divide_bytes_whatever_the_runs_are() {
        for runs in [[256 << 10; 3], [64; 3], [64 << 10, 256 << 10, 4096]] {
            let got = shares(&[100, 200, 400], &runs, 2 << 30);
            let unit = got.iter().sum::<u64>() / 7;
            for (share, parts) in got.iter().zip([1, 2, 4]) {
                assert!(share.abs_diff(parts * unit) * 200 < parts * unit, "{got:?} of runs {runs:?}");
            }
        }
    }

    #[test]
    fn who_goes_away_after_each_run_loses_nothing_of_its_weight() {
        // As QPs do whose copies are done elsewhere: they are listed again when the next two others
        // had their turn.
        let mut order = Order::default();
        order.set(0, 3, 400);
        order.set(1, 3, 100);
        let (mut got, mut away) = ([0u64; 2], VecDeque::new());
        (0..8).for_each(|index| order.push(index % 2, qp(index)));
        for _ in 0..20_000 {
            let (slot, next) = order.pop().unwrap();
            got[slot as usize] += 65_536;
            order.charge(slot, 65_536);
            away.push_back((slot, next));
            if away.len() > 2 {
                let (slot, back) = away.pop_front().unwrap();
                order.push(slot, back);
            }
        }
        let ratio = got[0] * 100 / got[1];
        assert!((396..=404).contains(&ratio), "{got:?}");
    }

    #[test]
    fn strict_priority() {
        let mut order = Order::default();
        order.set(0, 0, 1000);
        order.set(1, 7, 1);
        order.push(0, qp(0));
        order.push(1, qp(1));
        for _ in 0..100 {
            assert_eq!(order.pop(), Some((1, qp(1))));
            order.charge(1, 1 << 20);
            order.push(1, qp(1));
        }
        order.set(1, 0, 1);
        assert_eq!(order.pop(), Some((0, qp(0))), "it is as good as the other now, and in debt to nobody");
        order.remove(1, qp(1));
        assert_eq!((order.pop(), order.len()), (None, 0));
    }

    #[test]
    fn who_is_alone_owes_nothing() {
        let mut order = Order::default();
        for _ in 0..1000 {
            order.push(0, qp(0));
            assert_eq!(order.pop(), Some((0, qp(0))));
            order.charge(0, 256 << 10);
        }
        order.push(0, qp(0));
        order.push(1, qp(1));
        let first: Vec<u32> = (0..2).filter_map(|_| order.pop()).map(|(slot, _)| slot).collect();
        assert_eq!(first, [1, 0], "one run's debt at most");
    }

    proptest! {
        /// Under any changes, each QP that is listed is served once, highest priority first,
        /// QPs of a vNIC in turn, and nobody of the same priority waits for ever.
        #[test]
        fn as_a_plain_model(steps in prop::collection::vec((0u8..6, 0u32..5, 0u32..12, 0u64..400_000), 1..400)) {
            let mut order = Order::default();
            let mut model: BTreeMap<u32, (u8, VecDeque<QpId>)> = (0..5).map(|slot| (slot, (3, VecDeque::new()))).collect();
            for (what, slot, index, cost) in steps {
                let (priority, queue) = model.get_mut(&slot).unwrap();
                match what {
                    0 => {
                        *priority = (index % 8) as u8;
                        order.set(slot, *priority, (1 + cost % 1000) as u16);
                    }
                    1 => {
                        queue.retain(|&listed| listed != qp(index));
                        order.remove(slot, qp(index));
                    }
                    2 | 3 if !queue.contains(&qp(index)) => {
                        queue.push_back(qp(index));
                        order.push(slot, qp(index));
                    }
                    _ => {
                        let highest = model.values().filter(|(_, queue)| !queue.is_empty()).map(|(p, _)| *p).max();
                        match order.pop() {
                            None => prop_assert_eq!(highest, None),
                            Some((slot, next)) => {
                                let (priority, queue) = model.get_mut(&slot).unwrap();
                                prop_assert_eq!(Some(*priority), highest);
                                prop_assert_eq!(queue.pop_front(), Some(next));
                                order.charge(slot, cost);
                            }
                        }
                    }
                }
                prop_assert!(order.is_consistent());
                prop_assert_eq!(order.len(), model.values().map(|(_, queue)| queue.len()).sum::<usize>());
            }
            // Everybody has its turn, in finite time, if what is served is served again and again.
            let mut unserved: alloc::collections::BTreeSet<u32> = Default::default();
            let top = model.values().filter(|(_, queue)| !queue.is_empty()).map(|(p, _)| *p).max();
            for (slot, (priority, queue)) in &model {
                if Some(*priority) == top && !queue.is_empty() {
                    unserved.insert(*slot);
                }
            }
            let mut turns = 0;
            while !unserved.is_empty() {
                let (slot, next) = order.pop().unwrap();
                unserved.remove(&slot);
                order.charge(slot, 262_144);
                order.push(slot, next);
                turns += 1;
                prop_assert!(turns < 20_000, "starved: {unserved:?}");
            }
        }
    }
}
