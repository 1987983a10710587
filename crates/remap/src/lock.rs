//! The lock of the process's one [`Table`].
//!
//! A thread that holds it can *lend* it to a command thread (`commands`), which takes pages out of
//! arenas that the lender can't move, in the lender's name: nobody comes in between, and the lender
//! waits until it has the lock back.
//!
//! A thread that has the lock, or waits for it, is undisturbed: a signal handler that forked, or
//! called a verb, would wait for the thread that it interrupted. Forks go first.
use crate::syscalls::{self, thread_id};
use crate::table::Table;
use freeflow_client::{Undisturbed, fork};
use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// States of the lock.
const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and there may be threads that sleep until it changes.
const AWAITED: u32 = 2;
/// Held and lent, and the same.
const LENT: u32 = 3;
/// Looks before a thread sleeps.
const SPINS: u32 = 100;

/// The table of this process, for the thread that holds its lock.
pub(crate) struct LockedTable {
    state: AtomicU32,
    /// The thread that holds it, for a signal handler that forks on this very thread.
    owner: AtomicI32,
    /// The session whose command thread it is lent to, and whether that takes out what regions touch.
    borrower: AtomicU64,
    takes_partial: AtomicBool,
    /// Forks that wait for the lock.
    waiting_forks: AtomicU32,
    table: UnsafeCell<Option<Table>>,
}

// SAFETY: the table is reached only by the thread that holds the lock.
unsafe impl Sync for LockedTable {}

static LOCKED: OnceLock<LockedTable> = OnceLock::new();

pub(crate) fn locked() -> &'static LockedTable {
    LOCKED.get_or_init(LockedTable::new)
}

/// [`locked`], without making it: `None` in a process that never registered anything.
pub(crate) fn locked_if_used() -> Option<&'static LockedTable> {
    LOCKED.get()
}

/// A command thread, as the lock sees it.
pub(crate) trait Borrower {
    /// The session's serial number, which is not 0.
    fn serial(&self) -> u64;

    /// Makes it take the lock.
    fn wake(&self);

    /// Makes pages of this session private that no region touches any more, and `partial` pages
    /// whatever touches them. With the lock, or one that is lent.
    fn take_out(&self, table: &mut Table, partial: bool);
}

/// The held lock.
pub(crate) struct Held<'a> {
    locked: &'a LockedTable,
    /// Ends after the lock is given back. A command thread needs none: it takes no signals, and nobody
    /// cancels it.
    undisturbed: Option<Undisturbed>,
}

/// The way in which a command thread got the lock.
enum Got {
    Own,
    Lent,
}

impl LockedTable {
    fn new() -> Self {
        Self {
            state: AtomicU32::new(FREE),
            owner: AtomicI32::new(0),
            borrower: AtomicU64::new(0),
            takes_partial: AtomicBool::new(false),
            waiting_forks: AtomicU32::new(0),
            table: UnsafeCell::new(None),
        }
    }

    /// Waits until it can have the lock, or has it on loan as the command thread of session
    /// `borrower`. No session has the number 0.
    fn acquire(&self, borrower: u64) -> Got {
        let mut taken = HELD;
        let mut spins = 0;
        loop {
            // Acquire, here and below; partner: the Release stores in `give`, `lend` and `return_loan`.
            let state = self.state.load(Ordering::Acquire);
            // Relaxed: written before the state.
            if state == LENT && borrower != 0 && self.borrower.load(Ordering::Relaxed) == borrower {
                return Got::Lent;
            }
            let change = |to| self.state.compare_exchange(state, to, Ordering::Acquire, Ordering::Relaxed).is_ok();
            if state == FREE {
                if change(taken) {
                    return Got::Own;
                }
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else if state != HELD || change(AWAITED) {
                // Others may sleep by now.
                taken = AWAITED;
                syscalls::futex_wait(&self.state, if state == LENT { LENT } else { AWAITED });
            }
        }
    }

    fn held(&self, undisturbed: Option<Undisturbed>) -> Held<'_> {
        // Relaxed: only compared with the reader's own.
        self.owner.store(thread_id(), Ordering::Relaxed);
        Held { locked: self, undisturbed }
    }

    pub fn hold(&self) -> Held<'_> {
        let undisturbed = Undisturbed::begin();
        loop {
            // Relaxed: it decides about turns alone.
            match self.waiting_forks.load(Ordering::Relaxed) {
                0 => break,
                count => syscalls::futex_wait(&self.waiting_forks, count),
            }
        }
        self.acquire(0);
        self.held(Some(undisturbed))
    }

    /// [`Self::hold`], before threads that do anything else.
    pub fn hold_for_fork(&self) -> Held<'_> {
        let undisturbed = Undisturbed::begin();
        // Relaxed, both: as above.
        self.waiting_forks.fetch_add(1, Ordering::Relaxed);
        self.acquire(0);
        self.waiting_forks.fetch_sub(1, Ordering::Relaxed);
        syscalls::futex_wake_all(&self.waiting_forks);
        self.held(Some(undisturbed))
    }

    /// [`Self::hold`] for a command thread. What other threads want it to take out comes first. Until
    /// it has the lock it writes nothing that could be moved, as its thread-local data may be.
    pub fn hold_as(&self, task: &dyn Borrower) -> Held<'_> {
        while let Got::Lent = self.acquire(task.serial()) {
            // SAFETY: the lender has lent this thread the lock, and waits.
            if let Some(table) = unsafe { self.current_table() } {
                task.take_out(table, self.takes_partial.load(Ordering::Relaxed));
            }
            // Release; partner: the loads in `acquire` and `lend`.
            self.state.store(AWAITED, Ordering::Release);
            syscalls::futex_wake_all(&self.state);
        }
        self.held(None)
    }

    /// Whether the calling thread holds the lock.
    pub fn is_mine(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == thread_id()
    }

    /// The lock that this thread, or the parent of this child of `fork`, kept.
    pub fn kept(&self) -> Held<'_> {
        Held { locked: self, undisturbed: Some(Undisturbed::kept()) }
    }

    /// In a child of `fork`, which has no other threads: nobody waits.
    pub fn reset_in_child(&self) {
        self.waiting_forks.store(0, Ordering::Relaxed);
    }

    /// The table, unless it is that of the parent.
    ///
    /// # Safety
    /// The calling thread has the lock, and no other reference to the table.
    #[allow(clippy::mut_from_ref, reason = "the lock stands for the reference")]
    unsafe fn current_table(&self) -> Option<&mut Table> {
        // SAFETY: the lock is held, so no other thread reaches it.
        unsafe { (*self.table.get()).as_mut() }.filter(|table| table.generation() == fork::generation())
    }

    pub fn with<T>(&self, body: impl FnOnce(&mut Table) -> T) -> T {
        self.hold().with(body)
    }

    /// [`Self::with`] for a command thread.
    pub fn with_as<T>(&self, task: &dyn Borrower, body: impl FnOnce(&mut Table) -> T) -> T {
        self.hold_as(task).with(body)
    }
}

impl Held<'_> {
    /// The parent's table, in a child of `fork` too.
    pub fn table(&self) -> Option<&Table> {
        // SAFETY: the lock is held, and the reference is this one's.
        unsafe { (*self.locked.table.get()).as_ref() }
    }

    /// The table, if this process has used one.
    pub fn current(&mut self) -> Option<&mut Table> {
        // SAFETY: the lock is held, and the reference is this one's.
        unsafe { self.locked.current_table() }
    }

    pub fn with<T>(&mut self, body: impl FnOnce(&mut Table) -> T) -> T {
        // SAFETY: this thread holds the lock, and nothing called from `body` comes here again.
        let table = unsafe { &mut *self.locked.table.get() };
        if table.as_ref().is_none_or(|table| table.generation() != fork::generation()) {
            *table = Some(Table::new(fork::generation()));
        }
        body(table.as_mut().expect("filled just now"))
    }

    /// Lends the lock to a command thread that is in the table, and waits until that has taken pages
    /// out of arenas: partial ones whatever touches them, if `partial`. However long it takes: it
    /// waits for nobody but the router.
    pub fn lend(&mut self, task: &dyn Borrower, partial: bool) {
        let locked = self.locked;
        // Relaxed, all: ordered by the state.
        locked.owner.store(0, Ordering::Relaxed);
        locked.takes_partial.store(partial, Ordering::Relaxed);
        locked.borrower.store(task.serial(), Ordering::Relaxed);
        // Release; partner: the load in `acquire`.
        locked.state.store(LENT, Ordering::Release);
        syscalls::futex_wake_all(&locked.state);
        task.wake();
        // Acquire; partner: the store in `hold_as`.
        while locked.state.load(Ordering::Acquire) == LENT {
            syscalls::futex_wait(&locked.state, LENT);
        }
        locked.borrower.store(0, Ordering::Relaxed);
        locked.owner.store(thread_id(), Ordering::Relaxed);
    }

    /// It lasts until [`LockedTable::kept`] is dropped.
    pub fn keep(mut self) {
        if let Some(undisturbed) = self.undisturbed.take() {
            undisturbed.keep();
        }
        std::mem::forget(self);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.locked.owner.store(0, Ordering::Relaxed);
        // Release; partner: the load in `acquire`.
        if self.locked.state.swap(FREE, Ordering::Release) != HELD {
            syscalls::futex_wake_one(&self.locked.state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn one_thread_at_a_time_has_the_lock_and_forks_go_first() {
        let locked = LockedTable::new();
        let inside = AtomicBool::new(false);
        let count = AtomicU32::new(0);
        let turn = |held: Held<'_>| {
            assert!(!inside.swap(true, Ordering::Relaxed));
            assert!(locked.is_mine());
            std::hint::spin_loop();
            count.fetch_add(1, Ordering::Relaxed);
            inside.store(false, Ordering::Relaxed);
            drop(held);
        };
        std::thread::scope(|scope| {
            for fork in [false, false, true] {
                let (locked, turn) = (&locked, &turn);
                scope.spawn(move || {
                    (0..2000).for_each(|_| turn(if fork { locked.hold_for_fork() } else { locked.hold() }));
                });
            }
        });
        assert_eq!((count.load(Ordering::Relaxed), locked.state.load(Ordering::Relaxed)), (6000, FREE));
        assert!(!locked.is_mine());
    }

    #[test]
    fn a_kept_lock_is_held_until_it_is_dropped() {
        let locked = LockedTable::new();
        locked.hold_for_fork().keep();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(locked.hold()));
            std::thread::sleep(Duration::from_millis(5));
            assert!(!waiting.is_finished() && locked.is_mine());
            drop(locked.kept());
        });
    }
}
