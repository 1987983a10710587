//! Cookies: the numbers by which the router names our objects in completions and events.
//!
//! They are given out in rotation, so that a number comes back late: a stale entry of a destroyed
//! object then finds nothing, instead of its successor.
use freeflow_protocol::library::{COOKIE_COUNT, Handle};
use freeflow_verbs::VerbsError;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// The caller's cookie in events of an object; the C drop-in puts the address of its own structure
/// here.
pub type Tag = usize;

#[derive(Debug, Default)]
pub(crate) struct Entry {
    pub tag: Tag,
    /// CQs: the channel that it reports to.
    pub channel: Option<Handle>,
    /// CQs: it was reported once because the router is gone.
    pub death_reported: bool,
}

#[derive(Debug)]
pub(crate) struct Registry {
    entries: BTreeMap<u32, Entry>,
    next: u32,
    limit: u32,
}

impl Registry {
    pub fn new(limit: u32) -> Self {
        Self { entries: BTreeMap::new(), next: 0, limit }
    }

    /// Takes a free cookie.
    pub fn allocate(&mut self, entry: Entry) -> Result<u32, VerbsError> {
        if self.entries.len() >= self.limit as usize {
            return Err(VerbsError::NoMemory);
        }
        loop {
            let cookie = self.next;
            self.next = (self.next + 1) % self.limit;
            if let std::collections::btree_map::Entry::Vacant(slot) = self.entries.entry(cookie) {
                slot.insert(entry);
                return Ok(cookie);
            }
        }
    }

    pub fn remove(&mut self, cookie: u32) {
        self.entries.remove(&cookie);
    }

    pub fn get(&self, cookie: u32) -> Option<&Entry> {
        self.entries.get(&cookie)
    }

    pub fn get_mut(&mut self, cookie: u32) -> Option<&mut Entry> {
        self.entries.get_mut(&cookie)
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.values_mut()
    }
}

/// The objects of a session that events may name.
#[derive(Debug)]
pub(crate) struct Objects {
    /// QPs and SRQs: their cookie is their doorbell too.
    pub queues: Registry,
    pub cqs: Registry,
}

impl Objects {
    pub fn new() -> Self {
        Self { queues: Registry::new(COOKIE_COUNT), cqs: Registry::new(COOKIE_COUNT) }
    }
}

/// Free-running count of an SRQ's completions that polls returned; QPs that use the SRQ share it.
#[derive(Debug, Default)]
pub(crate) struct CompletedCount(AtomicU32);

impl CompletedCount {
    pub fn add_one(&self) {
        // Release: pairs with the Acquire in `push`. The returned request's slot was read by the
        // router long before.
        self.0.fetch_add(1, Ordering::Release);
    }

    pub fn get(&self) -> u32 {
        // Acquire: pairs with the Release in `add_one`.
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_rotate_and_run_out() {
        let mut registry = Registry::new(3);
        assert_eq!(registry.allocate(Entry::default()), Ok(0));
        registry.remove(0);
        assert_eq!(registry.allocate(Entry::default()), Ok(1));
        assert_eq!(registry.allocate(Entry::default()), Ok(2));
        assert_eq!(registry.allocate(Entry::default()), Ok(0));
        assert_eq!(registry.allocate(Entry::default()), Err(VerbsError::NoMemory));
    }
}
