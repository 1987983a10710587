//! When something is due for each of many, and for which first.
use freeflow_verbs::Instant;
use std::collections::{BTreeMap, BTreeSet};

/// Invariant: the same times are in both, each once.
#[derive(Debug)]
pub struct Deadlines<K> {
    by_time: BTreeSet<(Instant, K)>,
    by_key: BTreeMap<K, Instant>,
}

impl<K> Default for Deadlines<K> {
    fn default() -> Self {
        Self { by_time: BTreeSet::new(), by_key: BTreeMap::new() }
    }
}

impl<K: Copy + Ord> Deadlines<K> {
    /// Something is due for it then, and at no other time; `None`: nothing is.
    pub fn set(&mut self, key: K, due: Option<Instant>) {
        let before = self.by_key.get(&key).copied();
        if before == due {
            return;
        }
        if let Some(before) = before {
            self.by_time.remove(&(before, key));
        }
        match due {
            Some(due) => {
                self.by_key.insert(key, due);
                self.by_time.insert((due, key));
            }
            None => drop(self.by_key.remove(&key)),
        }
    }

    pub fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|&(due, _)| due)
    }

    /// Takes out all that are due, in the order of the keys.
    pub fn take_due(&mut self, now: Instant) -> Vec<K> {
        let mut keys = Vec::new();
        while let Some(&(due, key)) = self.by_time.first()
            && due <= now
        {
            self.by_time.pop_first();
            self.by_key.remove(&key);
            keys.push(key);
        }
        keys.sort_unstable();
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_due_once_at_the_time_that_was_set_last() {
        let mut deadlines = Deadlines::default();
        for (key, due) in [(3, 10), (1, 10), (2, 5), (4, 30)] {
            deadlines.set(key, Some(Instant(due)));
        }
        deadlines.set(2, Some(Instant(40)));
        deadlines.set(4, None);
        deadlines.set(5, None);
        assert_eq!(deadlines.next(), Some(Instant(10)));
        assert_eq!(deadlines.take_due(Instant(9)).len(), 0);
        assert_eq!(deadlines.take_due(Instant(10)), [1, 3]);
        assert_eq!(deadlines.next(), Some(Instant(40)));
        assert_eq!((deadlines.take_due(Instant(40)), deadlines.next()), (vec![2], None));
    }
}
