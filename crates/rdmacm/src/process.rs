//! What this process has: its identifiers and memberships by key, and its device.
//!
//! A forked child has none of it: the connection, its identifiers and its pipes are the parent's. The child gets tables of its
//! own when it first asks, so it never waits for a lock that a thread of its parent held; what it does to an object of its parent
//! is refused ([`Born::check`]) before anything is touched.
use crate::boundary::Outcome;
use crate::device::Device;
use crate::id::Id;
use crate::multicast::Membership;
use std::collections::{BTreeMap, HashMap};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The key of nothing: of records that only wake somebody up.
pub(crate) const KEY_NONE: u64 = 0;

/// Locks, whatever became of an earlier holder: a panic is an error at the boundary, and what is locked here is left
/// consistent between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Born(u32);

impl Born {
    pub fn here() -> Self {
        Self(std::process::id())
    }

    pub fn is_here(self) -> bool {
        self == Self::here()
    }

    /// EIO for what a parent left behind.
    pub fn check(self) -> Outcome<()> {
        if self.is_here() { Ok(()) } else { Err(libc::EIO) }
    }
}

#[derive(Default)]
pub(crate) struct Table {
    /// Ordered, so that the end of a router is told in the order of creation.
    pub ids: BTreeMap<u64, Arc<Id>>,
    pub memberships: HashMap<u64, Arc<Membership>>,
}

pub(crate) struct Process {
    born: Born,
    next_key: AtomicU64,
    pub table: Mutex<Table>,
    pub device: Mutex<Option<Arc<Device>>>,
    /// Lists that `rdma_get_devices` gave out, by address: what keeps their device.
    pub lists: Mutex<HashMap<usize, Arc<Device>>>,
}

impl Process {
    fn new() -> Self {
        Self {
            born: Born::here(),
            next_key: AtomicU64::new(KEY_NONE + 1),
            table: Mutex::default(),
            device: Mutex::default(),
            lists: Mutex::default(),
        }
    }

    /// Of this process. A child leaves its parent's where it is: other threads of the parent may have held its locks.
    pub fn current() -> &'static Self {
        static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());
        loop {
            // Acquire, both: pairs with the Release below.
            let known = CURRENT.load(Ordering::Acquire);
            // SAFETY: what was put there is never freed.
            if let Some(process) = unsafe { known.as_ref() }
                && process.born.is_here()
            {
                return process;
            }
            let fresh = Box::into_raw(Box::new(Self::new()));
            match CURRENT.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: never freed from here on.
                Ok(_) => return unsafe { &*fresh },
                // SAFETY: made above, and nobody has seen it.
                Err(_) => drop(unsafe { Box::from_raw(fresh) }),
            }
        }
    }

    /// A key that no other object of this process has, before or after.
    pub fn new_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_never_given_twice() {
        let process = Process::current();
        let (one, two) = (process.new_key(), process.new_key());
        assert!(one != two && one != KEY_NONE && two != KEY_NONE);
        assert!(ptr::eq(process, Process::current()));
        assert_eq!(Born::here().check(), Ok(()));
        assert_eq!(Born(0).check(), Err(libc::EIO));
    }
}
