//! Tables indexed by the engine's names: index and generation, so that a stale name finds nothing.
use freeflow_engine::{ContextId, CqId, QpId, SessionId, SrqId, VnicId};
use std::marker::PhantomData;

/// A name of the engine.
pub trait Id: Copy {
    fn index(self) -> usize;
    fn generation(self) -> u32;
    fn of(index: usize, generation: u32) -> Self;
}

macro_rules! id {
    ($($name:ident),*) => { $(
        impl Id for $name {
            fn index(self) -> usize {
                self.index as usize
            }
            fn generation(self) -> u32 {
                self.generation
            }
            fn of(index: usize, generation: u32) -> Self {
                Self { index: index as u32, generation }
            }
        }
    )* };
}
id!(VnicId, SessionId, ContextId, CqId, SrqId, QpId);

/// The router's part beside each of the engine's objects.
pub struct Table<I, T> {
    slots: Vec<Option<(u32, T)>>,
    count: usize,
    id: PhantomData<I>,
}

impl<I: Id, T> Table<I, T> {
    pub fn new() -> Self {
        Self { slots: Vec::new(), count: 0, id: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// The engine gives an index out again only after its object is destroyed, and then the slot here is empty too.
    pub fn insert(&mut self, id: I, value: T) {
        if self.slots.len() <= id.index() {
            self.slots.resize_with(id.index() + 1, || None);
        }
        let slot = &mut self.slots[id.index()];
        assert!(slot.is_none(), "an object of the engine was destroyed and its rings were not");
        *slot = Some((id.generation(), value));
        self.count += 1;
    }

    pub fn get(&self, id: I) -> Option<&T> {
        match self.slots.get(id.index()) {
            Some(Some((generation, value))) if *generation == id.generation() => Some(value),
            _ => None,
        }
    }

    pub fn get_mut(&mut self, id: I) -> Option<&mut T> {
        match self.slots.get_mut(id.index()) {
            Some(Some((generation, value))) if *generation == id.generation() => Some(value),
            _ => None,
        }
    }

    pub fn remove(&mut self, id: I) -> Option<T> {
        self.get(id)?;
        self.count -= 1;
        self.slots[id.index()].take().map(|(_, value)| value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let (generation, value) = slot.as_ref()?;
            Some((I::of(index, *generation), value))
        })
    }

    /// Removes those that are there.
    pub fn remove_all(&mut self, ids: Vec<I>) -> Vec<T> {
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }
}
