//! The objects of this process: its identifiers and memberships by key, and its device.
//!
//! A forked child has none of it: the connection, its identifiers and its pipes are the parent's.
//! The child gets tables of its own when it first asks, so it never waits for a lock that a thread
//! of its parent held; what it does to an object of its parent is refused ([`Born::check`]) before
//! anything is touched.
use crate::born::{Born, KEY_NONE, lock};
use crate::boundary::Outcome;
use crate::device::Device;
use crate::id::Id;
use crate::membership::Membership;
use crate::verbs;
use std::collections::{BTreeMap, HashMap};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Default)]
pub(crate) struct ObjectTable {
    /// Ordered, so that the end of a router is reported in the order of creation.
    pub ids: BTreeMap<u64, Arc<Id>>,
    pub memberships: HashMap<u64, Arc<Membership>>,
}

pub(crate) struct Process {
    born: Born,
    next_key: AtomicU64,
    pub table: Mutex<ObjectTable>,
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

    /// Of this process. A child leaves its parent's where it is: other threads of the parent may
    /// have held its locks.
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

    /// The device of the current router. ENODEV without one.
    pub fn device() -> Outcome<Arc<Device>> {
        let mut current = lock(&Self::current().device);
        let mut count = 0;
        // SAFETY: a local.
        let list = unsafe { verbs::ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(libc::ENODEV);
        }
        // SAFETY: a list ends with a null pointer.
        let newest = unsafe { *list };
        let outcome = match &*current {
            // SAFETY: the context is open. libibverbs names another device once the router is
            // another one.
            Some(device) if unsafe { (*device.context()).device } == newest => Ok(device.clone()),
            _ if newest.is_null() => Err(libc::ENODEV),
            _ => Device::open(newest).inspect(|device| *current = Some(device.clone())),
        };
        // SAFETY: from above, once.
        unsafe { verbs::ibv_free_device_list(list) };
        outcome
    }

    /// A key that no other object of this process has, before or after.
    pub fn new_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub fn table(&self) -> MutexGuard<'_, ObjectTable> {
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
    }
}
