//! Whose turn it is: queue pairs with work, in a ring of vNICs and within each in a ring of its own. So a tenant with a
//! thousand busy QPs gets as much of the worker as one with a single busy QP.
//!
//! Invariant: a vNIC is in the ring exactly while it has QPs listed, and once.
use crate::table::Id;
use freeflow_engine::{QpId, VnicId};
use std::collections::VecDeque;

/// A vNIC's place: its index. Generations don't matter, since QPs of a vNIC that is gone are found to be gone themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(usize);

impl From<VnicId> for Place {
    fn from(vnic: VnicId) -> Self {
        Self(vnic.index())
    }
}

#[derive(Default)]
pub struct Turns {
    /// vNICs that have QPs listed.
    ring: VecDeque<Place>,
    /// By place.
    queues: Vec<VecDeque<QpId>>,
    count: usize,
}

impl Turns {
    /// QPs listed.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Behind all others of its vNIC.
    #[inline]
    pub fn push(&mut self, place: Place, qp: QpId) {
        if self.queues.len() <= place.0 {
            self.queues.resize_with(place.0 + 1, VecDeque::new);
        }
        if self.queues[place.0].is_empty() {
            self.ring.push_back(place);
        }
        self.queues[place.0].push_back(qp);
        self.count += 1;
    }

    /// The next QP of the next vNIC.
    #[inline]
    pub fn pop(&mut self) -> Option<(Place, QpId)> {
        let place = self.ring.pop_front()?;
        let qp = self.queues[place.0].pop_front()?;
        if !self.queues[place.0].is_empty() {
            self.ring.push_back(place);
        }
        self.count -= 1;
        Some((place, qp))
    }

    pub fn remove(&mut self, place: Place, qp: QpId) {
        let Some(queue) = self.queues.get_mut(place.0) else { return };
        let before = queue.len();
        queue.retain(|&listed| listed != qp);
        self.count -= before - queue.len();
        if before > 0 && queue.is_empty() {
            self.ring.retain(|&listed| listed != place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qp(index: u32) -> QpId {
        QpId { index, generation: 0 }
    }

    #[test]
    fn a_thousand_queue_pairs_get_no_more_than_one() {
        let mut turns = Turns::default();
        (0..1000).for_each(|index| turns.push(Place(7), qp(index)));
        turns.push(Place(2), qp(5000));
        let mut of_one = 0;
        let mut of_many = vec![0; 1000];
        for _ in 0..4000 {
            let (place, next) = turns.pop().unwrap();
            match of_many.get_mut(next.index as usize) {
                Some(count) => *count += 1,
                None => of_one += 1,
            }
            turns.push(place, next);
        }
        assert_eq!(of_one, 2000);
        assert!(of_many.iter().all(|&count| count == 2));
        assert_eq!(turns.len(), 1001);
    }

    #[test]
    fn what_is_removed_has_no_turn() {
        let mut turns = Turns::default();
        turns.push(Place(0), qp(1));
        turns.push(Place(0), qp(2));
        turns.push(Place(1), qp(3));
        turns.remove(Place(0), qp(1));
        turns.remove(Place(1), qp(3));
        turns.remove(Place(9), qp(9));
        assert_eq!((turns.pop(), turns.pop(), turns.len()), (Some((Place(0), qp(2))), None, 0));
        turns.push(Place(1), qp(4));
        assert_eq!(turns.pop(), Some((Place(1), qp(4))));
    }
}
