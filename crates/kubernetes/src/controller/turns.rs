//! Turns where a round can't take all: namespaces come one after the other, and in each its resources.
//!
//! So a namespace with thousands of resources delays no other one.
use crate::declared::DeclaredKind;
use std::collections::{BTreeMap, VecDeque};

/// A resource by its kind, namespace and name.
pub type Key = (DeclaredKind, String, String);

/// Where the last round stopped.
#[derive(Default)]
pub struct Turns {
    /// The last namespace, and the last resource of each that waits. Those of the whole cluster are in the namespace
    /// "".
    namespace: Option<String>,
    last: BTreeMap<String, Key>,
}

/// The same from the first one on that comes after `last`.
fn from<T>(mut sorted: Vec<T>, is_before: impl Fn(&T) -> bool) -> VecDeque<T> {
    let first = sorted.partition_point(is_before) % sorted.len().max(1);
    sorted.rotate_left(first);
    sorted.into()
}

impl Turns {
    /// At most `count_max` of these, in the order of [`Key`].
    pub fn choose(&mut self, keys: impl IntoIterator<Item = Key>, count_max: usize) -> Vec<Key> {
        let mut keys: Vec<Key> = keys.into_iter().collect();
        keys.sort();
        if keys.len() <= count_max {
            return keys;
        }
        let mut by_namespace: BTreeMap<String, Vec<Key>> = BTreeMap::new();
        for key in keys {
            by_namespace.entry(key.1.clone()).or_default().push(key);
        }
        self.last.retain(|namespace, _| by_namespace.contains_key(namespace));
        let queues = by_namespace.into_iter().map(|(namespace, keys)| {
            let last = self.last.get(&namespace);
            (namespace, from(keys, |key| last.is_some_and(|last| key <= last)))
        });
        let mut queues =
            from(queues.collect(), |(namespace, _)| self.namespace.as_ref().is_some_and(|last| namespace <= last));
        let mut chosen = Vec::new();
        while chosen.len() < count_max
            && let Some((namespace, mut queue)) = queues.pop_front()
        {
            let Some(key) = queue.pop_front() else { continue };
            self.last.insert(namespace.clone(), key.clone());
            self.namespace = Some(namespace.clone());
            chosen.push(key);
            queues.push_back((namespace, queue));
        }
        chosen.sort();
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn keys(namespace: &str, count: usize) -> Vec<Key> {
        (0..count).map(|number| (DeclaredKind::Group, namespace.to_owned(), format!("g{number:04}"))).collect()
    }

    #[test]
    fn a_namespace_with_many_delays_no_other_one() {
        let mut turns = Turns::default();
        let all: Vec<Key> = [keys("a", 1000), keys("b", 1), keys("", 2)].concat();
        let mut seen = BTreeSet::new();
        for round in 0..200 {
            let chosen = turns.choose(all.clone(), 10);
            assert_eq!(chosen.len(), 10);
            assert!(chosen.is_sorted());
            for few in [keys("b", 1), keys("", 2)].concat() {
                assert!(chosen.contains(&few), "round {round}: {few:?}");
            }
            seen.extend(chosen);
        }
        assert_eq!(seen.len(), all.len(), "all of a namespace have their turn");
    }

    #[test]
    fn more_namespaces_than_turns_come_one_after_the_other() {
        let mut turns = Turns::default();
        let all: Vec<Key> = (0..25).flat_map(|number| keys(&format!("n{number:02}"), 3)).collect();
        let mut seen = BTreeMap::<String, usize>::new();
        for _ in 0..5 {
            turns.choose(all.clone(), 10).into_iter().for_each(|key| *seen.entry(key.1).or_default() += 1);
        }
        assert!(seen.len() == 25 && seen.values().all(|count| *count == 2), "{seen:?}");
        assert_eq!(turns.choose(keys("a", 3), 10), keys("a", 3));
        assert!(turns.choose([], 10).is_empty());
    }
}
