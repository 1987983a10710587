//! Transparent zero-copy: a registration of ordinary memory puts its whole pages into segments that the router has mapped
//! too, and the last deregistration puts private memory in their place again.
//!
//! *What is placed*: whole pages wholly inside a region, in private anonymous memory that is readable, writable and not
//! executable, and no stack in use. All else (edges, files, shared memory, huge pages, what is beyond a limit) stays as
//! it is, and the router reaches it by its fallback. No registration fails for any of this.
//!
//! *Zones*: a segment stands for one stretch of addresses, and a page's place in it is its distance from the stretch's
//! beginning. So pages that are neighbours in memory are neighbours in the zone, and the kernel and the router keep one
//! entry for both, in whatever order they came. A zone is sparse: what is not placed costs nothing.
//!
//! *Own zones*: what a region with remote rights places goes into zones that hold nothing else, as long as there are not
//! too many. The router can grant such a zone to a peer, which then reaches it directly, and nothing besides it. The
//! router takes it back by an order, which a thread of this library carries out (`orders`), by private copies (`copies`). By another
//! order those go into own zones again (`resharing`).
//!
//! Invariant: pages are moved only while no region touches them, but the one that is being registered or was just
//! deregistered; or while the router's own accesses stand still too, and only its session's regions touch them. So no peer writes to
//! them in the moment when their contents are in two places.
//!
//! Invariant: the router knows of a placed page after it was placed, and forgets it before it is taken back.
//!
//! Invariant: before anything is done to placed memory, the process' own map must say that it is still there: programs
//! unmap memory before they deregister it, and map other things there.
//!
//! Invariant: no page of a region goes into an own zone that was made for another registration. What a peer may still have
//! mapped is never used again: an own zone that is empty is destroyed.
pub(crate) mod areas;
pub(crate) mod calls;
mod child;
mod copies;
mod moving;
mod orders;
mod resharing;
mod stale;
mod table;

pub(crate) use orders::settle;

pub(crate) use child::{after_fork_in_child, after_fork_in_parent, before_fork};

use crate::sync::CallLock;
use areas::Maps;
use freeflow_client::{Session, fork};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use table::Table;

const PAGE_BYTES: u64 = 4096;
/// `off`: nothing is placed. For debugging.
const VARIABLE: &str = "FREEFLOW_REMAP";

/// The table of this process, for whoever holds its lock.
struct Locked {
    lock: CallLock,
    /// The thread that has it, for a handler of a signal that forks on this very thread.
    owner: AtomicI32,
    table: UnsafeCell<Option<Table>>,
}

// SAFETY: the table is reached only by the thread that holds the lock.
unsafe impl Sync for Locked {}

static LOCKED: OnceLock<Locked> = OnceLock::new();

fn locked() -> &'static Locked {
    LOCKED.get_or_init(|| Locked { lock: CallLock::new(), owner: AtomicI32::new(0), table: UnsafeCell::new(None) })
}

fn thread_id() -> i32 {
    // SAFETY: takes nothing.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

impl Locked {
    fn take(&self) {
        self.lock.lock();
        // Relaxed: only compared with the reader's own.
        self.owner.store(thread_id(), Ordering::Relaxed);
    }

    fn give(&self) {
        self.owner.store(0, Ordering::Relaxed);
        self.lock.unlock();
    }

    fn with<T>(&self, body: impl FnOnce(&mut Table) -> T) -> T {
        struct Given<'a>(&'a Locked);
        impl Drop for Given<'_> {
            fn drop(&mut self) {
                self.0.give();
            }
        }
        self.take();
        let _given = Given(self);
        // SAFETY: this thread has the lock, and nothing called from `body` comes here again.
        let table = unsafe { &mut *self.table.get() };
        if table.as_ref().is_none_or(|table| table.generation() != fork::generation()) {
            *table = Some(Table::new(fork::generation()));
        }
        body(table.as_mut().expect("filled just now"))
    }
}

fn is_enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| std::env::var_os(VARIABLE).is_none_or(|value| value != "off"))
}

/// The pages that a region touches.
fn touched(start: u64, length: u64) -> Range<u64> {
    let end = start.saturating_add(length).saturating_add(PAGE_BYTES - 1);
    start & !(PAGE_BYTES - 1)..if length == 0 { start & !(PAGE_BYTES - 1) } else { end & !(PAGE_BYTES - 1) }
}

/// The pages that are wholly inside a region.
fn whole(start: u64, length: u64) -> Range<u64> {
    let first = start.saturating_add(PAGE_BYTES - 1) & !(PAGE_BYTES - 1);
    first..(start.saturating_add(length) & !(PAGE_BYTES - 1)).max(first)
}

/// What shall become of a region's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// They stay where they are, as those of memory that is registered on demand.
    Stay,
    /// Into zones, with others.
    Together,
    /// Into zones of their own, if possible.
    Apart,
}

/// A region is about to be registered for `owner`. To be called before the router knows of the region; [`withdraw`]
/// undoes it. `maps`: the process' own map, if it was opened already.
pub(crate) fn place(
    session: &Arc<Session>,
    owner: usize,
    (start, length): (u64, u64),
    wish: Wish,
    mut maps: Option<Maps>,
) {
    locked().with(|table| {
        let renewed = table.forget_gone(session, touched(start, length), &mut maps);
        if wish != Wish::Stay && is_enabled() && !session.is_dead() {
            table.settle(session);
            table.move_in(session, whole(start, length), (renewed, maps), wish == Wish::Apart);
        }
        table.note(session.serial(), owner, start, length);
    });
}

/// A region that covers this memory is about to change, and stays where it is.
pub(crate) fn renew(session: &Session, start: u64, length: u64) {
    locked().with(|table| table.forget_gone(session, touched(start, length), &mut None));
}

/// A region was deregistered, or was not registered after all: nothing of it is used by the router any more. On return
/// its pages are private memory again, unless another region touches them.
pub(crate) fn withdraw(session: &Session, owner: usize, start: u64, length: u64) {
    session.outlast_peers();
    locked().with(|table| {
        if table.unnote(owner, start, length) {
            table.move_out(session, touched(start, length));
            table.settle(session);
        }
    });
}

/// All regions of `owner` are gone, also those that it left behind.
pub(crate) fn withdraw_all(session: &Session, owner: usize) {
    session.outlast_peers();
    locked().with(|table| {
        for (start, length) in table.left_by(owner) {
            if table.unnote(owner, start, length) {
                table.move_out(session, touched(start, length));
            }
        }
        table.settle(session);
        table.tidy(session);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_region() {
        assert_eq!(touched(0x1001, 0xffe), 0x1000..0x2000);
        assert_eq!(touched(0x1001, 0x1000), 0x1000..0x3000);
        assert_eq!(touched(0x1001, 0), 0x1000..0x1000);
        assert!(whole(0x1001, 0xfff).is_empty());
        assert!(whole(0x1001, 0x1ffe).is_empty());
        assert_eq!(whole(0x1001, 0x1fff), 0x2000..0x3000);
        assert_eq!(whole(0x1000, 0x2000), 0x1000..0x3000);
        assert!(whole(0x1000, 0).is_empty());
        assert!(whole(u64::MAX - 5, 5).is_empty());
    }
}
