//! The objects of this process: its identifiers and memberships by key, and its devices.
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
    pub devices: Mutex<Vec<Arc<Device>>>,
    /// Lists that `rdma_get_devices` gave out, by address: what keeps their devices.
    pub lists: Mutex<HashMap<usize, Vec<Arc<Device>>>>,
}

impl Process {
    fn new() -> Self {
        Self {
            born: Born::here(),
            next_key: AtomicU64::new(KEY_NONE + 1),
            table: Mutex::default(),
            devices: Mutex::default(),
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

    /// The devices of the current router, at least one. ENODEV without a router.
    pub fn devices() -> Outcome<Vec<Arc<Device>>> {
        let mut current = lock(&Self::current().devices);
        let mut count = 0;
        // SAFETY: a local.
        let list = unsafe { verbs::ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(libc::ENODEV);
        }
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: a list has so many devices.
        let newest = (0..count).map(|at| unsafe { *list.add(at) });
        // SAFETY: the context is open. libibverbs names another device once the router is another
        // one.
        let is = |device: &&Arc<Device>, newest| unsafe { (*device.context()).device } == newest;
        // One that can't be opened takes nothing from the others.
        let opened: Vec<Outcome<Arc<Device>>> = newest
            .map(|newest| match current.iter().find(|device| is(device, newest)) {
                Some(device) => Ok(device.clone()),
                None => Device::open(newest),
            })
            .collect();
        // SAFETY: from above, once.
        unsafe { verbs::ibv_free_device_list(list) };
        let error = opened.iter().find_map(|device| device.as_ref().err().copied());
        let devices: Vec<Arc<Device>> = opened.into_iter().flatten().collect();
        if devices.is_empty() {
            return Err(error.unwrap_or(libc::ENODEV));
        }
        current.clone_from(&devices);
        Ok(devices)
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
