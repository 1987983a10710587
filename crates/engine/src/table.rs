//! Numbers to slab indices: open addressing with linear probing, for keys and QPNs. Numbers are
//! drawn at random by the engine itself, so that a tenant can't aim at one chain; lookups cost one
//! or two cache lines.
use alloc::vec;
use alloc::vec::Vec;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Zero is never a number here: it marks an empty slot.
const EMPTY: u32 = 0;
const SLOTS_MIN: usize = 16;

#[derive(Clone, Copy)]
struct Slot {
    number: u32,
    index: u32,
}

pub(crate) struct NumberTable {
    slots: Vec<Slot>,
    count: usize,
}

/// Pairs of number and index, in order of number: how they lie in the slots is no state that
/// anybody can see.
impl Serialize for NumberTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut pairs: Vec<(u32, u32)> = self.pairs().collect();
        pairs.sort_unstable();
        pairs.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for NumberTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pairs = Vec::<(u32, u32)>::deserialize(deserializer)?;
        let mut table = Self::new();
        for (number, index) in pairs {
            if number == EMPTY || table.get(number).is_some() {
                return Err(D::Error::custom("a number stands twice, or is zero"));
            }
            table.insert(number, index);
        }
        Ok(table)
    }
}

impl NumberTable {
    pub fn new() -> Self {
        Self { slots: vec![Slot { number: EMPTY, index: 0 }; SLOTS_MIN], count: 0 }
    }

    /// Numbers and their indices, in no order.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.slots.iter().filter(|slot| slot.number != EMPTY).map(|slot| (slot.number, slot.index))
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn get(&self, number: u32) -> Option<u32> {
        if number == EMPTY {
            return None;
        }
        let mut at = self.home(number);
        loop {
            let slot = self.slots[at];
            if slot.number == number {
                return Some(slot.index);
            }
            if slot.number == EMPTY {
                return None;
            }
            at = self.after(at);
        }
    }

    /// # Panics
    /// If `number` is zero or already there (own bug).
    pub fn insert(&mut self, number: u32, index: u32) {
        assert!(number != EMPTY && self.get(number).is_none(), "a fresh number");
        if (self.count + 1) * 2 > self.slots.len() {
            self.grow();
        }
        self.place(Slot { number, index });
        self.count += 1;
    }

    pub fn remove(&mut self, number: u32) {
        if number == EMPTY {
            return;
        }
        let mut hole = self.home(number);
        while self.slots[hole].number != number {
            if self.slots[hole].number == EMPTY {
                return;
            }
            hole = self.after(hole);
        }
        self.count -= 1;
        // Close the gap: whoever could have stood in the hole moves there.
        let mut at = self.after(hole);
        while self.slots[at].number != EMPTY {
            let home = self.home(self.slots[at].number);
            if self.distance(home, at) >= self.distance(hole, at) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.slots[hole].number = EMPTY;
    }

    fn place(&mut self, slot: Slot) {
        let mut at = self.home(slot.number);
        while self.slots[at].number != EMPTY {
            at = self.after(at);
        }
        self.slots[at] = slot;
    }

    fn grow(&mut self) {
        let larger = vec![Slot { number: EMPTY, index: 0 }; self.slots.len() * 2];
        for slot in core::mem::replace(&mut self.slots, larger) {
            if slot.number != EMPTY {
                self.place(slot);
            }
        }
    }

    fn home(&self, number: u32) -> usize {
        let spread = number.wrapping_mul(0x9e37_79b1);
        (spread ^ (spread >> 15)) as usize & (self.slots.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.slots.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_as_a_map(steps in prop::collection::vec((1u32..60, any::<bool>()), 0..400)) {
            let mut table = NumberTable::new();
            let mut model = BTreeMap::new();
            for (turn, (number, add)) in steps.into_iter().enumerate() {
                if add && !model.contains_key(&number) {
                    table.insert(number, turn as u32);
                    model.insert(number, turn as u32);
                } else {
                    table.remove(number);
                    model.remove(&number);
                }
                for number in 0..60 {
                    prop_assert_eq!(table.get(number), model.get(&number).copied());
                }
            }
        }
    }
}
