//! The lock of the process's one [`Table`].
use crate::syscalls::thread_id;
use crate::table::Table;
use freeflow_client::{CallLock, fork};
use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

/// The table of this process, for the thread that holds its lock.
pub(crate) struct LockedTable {
    lock: CallLock,
    /// The thread that holds it, for a signal handler that forks on this very thread.
    owner: AtomicI32,
    table: UnsafeCell<Option<Table>>,
}

// SAFETY: the table is reached only by the thread that holds the lock.
unsafe impl Sync for LockedTable {}

static LOCKED: OnceLock<LockedTable> = OnceLock::new();

pub(crate) fn locked() -> &'static LockedTable {
    LOCKED.get_or_init(|| LockedTable { lock: CallLock::new(), owner: AtomicI32::new(0), table: UnsafeCell::new(None) })
}

/// [`locked`], without making it: `None` in a process that never registered anything.
pub(crate) fn locked_if_used() -> Option<&'static LockedTable> {
    LOCKED.get()
}

impl LockedTable {
    pub fn take(&self) {
        self.lock.lock();
        // Relaxed: only compared with the reader's own.
        self.owner.store(thread_id(), Ordering::Relaxed);
    }

    pub fn give(&self) {
        self.owner.store(0, Ordering::Relaxed);
        self.lock.unlock();
    }

    /// Whether the calling thread holds the lock.
    pub fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == thread_id()
    }

    /// The table as it is.
    ///
    /// # Safety
    /// The calling thread holds the lock, and has no other reference to the table.
    pub unsafe fn table(&self) -> Option<&Table> {
        // SAFETY: the lock is held, so no other thread reaches it.
        unsafe { (*self.table.get()).as_ref() }
    }

    pub fn with<T>(&self, body: impl FnOnce(&mut Table) -> T) -> T {
        struct Given<'a>(&'a LockedTable);
        impl Drop for Given<'_> {
            fn drop(&mut self) {
                self.0.give();
            }
        }
        self.take();
        let _given = Given(self);
        // SAFETY: this thread holds the lock, and nothing called from `body` comes here again.
        let table = unsafe { &mut *self.table.get() };
        if table.as_ref().is_none_or(|table| table.generation() != fork::generation()) {
            *table = Some(Table::new(fork::generation()));
        }
        body(table.as_mut().expect("filled just now"))
    }
}
