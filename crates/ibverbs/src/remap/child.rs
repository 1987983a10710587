//! `fork`: a child gets copies of its own of all that it sees of zones, before code of the program runs in it.
//!
//! The forking thread waits in the parent until the child has them (the other end of a pipe is closed then, also if the
//! child is killed), so that it writes nothing that the child could see. Other threads of the parent run on.
//!
//! In the child nothing is allocated or freed: the table is only read, and forgotten at its next use.
use super::areas::Maps;
use super::stale::ALL;
use super::table::{Table, protection};
use super::{LOCKED, Locked, moving, orders, thread_id};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Longest wait for a child, milliseconds. It copies a gigabyte in less than a second.
const CHILD_TIME_MAX_MS: i32 = 30_000;

/// The ends of the pipe of the fork under way; written under the table's lock.
static READ_END: AtomicI32 = AtomicI32::new(-1);
static WRITE_END: AtomicI32 = AtomicI32::new(-1);
/// The thread that forks has the lock for another reason: it leaves it alone.
static NESTED: AtomicU32 = AtomicU32::new(0);

fn locked() -> Option<&'static Locked> {
    LOCKED.get()
}

fn table(locked: &Locked) -> Option<&Table> {
    // SAFETY: this thread has the lock, from before the fork until after it.
    unsafe { (*locked.table.get()).as_ref() }
}

/// Runs in the parent before it forks.
pub(crate) extern "C" fn before_fork() {
    let Some(locked) = locked() else { return };
    if locked.owner.load(Ordering::Relaxed) == thread_id() {
        // A handler of a signal that interrupted this library.
        NESTED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    locked.take();
    if table(locked).is_some_and(Table::shows_zones) {
        let mut ends = [-1; 2];
        // SAFETY: `ends` is ours to write.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } == 0 {
            // Relaxed, these and below: the same thread, or its child.
            READ_END.store(ends[0], Ordering::Relaxed);
            WRITE_END.store(ends[1], Ordering::Relaxed);
        }
    }
}

fn close_end(end: &AtomicI32) {
    let descriptor = end.swap(-1, Ordering::Relaxed);
    if descriptor >= 0 {
        // SAFETY: made by `before_fork`, and closed once.
        unsafe { libc::close(descriptor) };
    }
}

/// Whether the table is not this fork's to give back.
fn is_nested() -> bool {
    NESTED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1)).is_ok()
}

/// Runs in the parent after it forked, or failed to.
pub(crate) extern "C" fn after_fork_in_parent() {
    let Some(locked) = locked() else { return };
    if is_nested() {
        return;
    }
    close_end(&WRITE_END);
    let descriptor = READ_END.load(Ordering::Relaxed);
    if descriptor >= 0 {
        wait_for_end(descriptor);
        close_end(&READ_END);
    }
    locked.give();
}

/// Until the child's end of the pipe is closed.
fn wait_for_end(descriptor: i32) {
    let deadline = moving::now_ns() + CHILD_TIME_MAX_MS as u64 * 1_000_000;
    loop {
        let left_ms = deadline.saturating_sub(moving::now_ns()) / 1_000_000;
        let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd of ours.
        let ready = unsafe { libc::poll(&raw mut polled, 1, left_ms as i32) };
        let interrupted = ready < 0 && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted;
        if !interrupted || left_ms == 0 {
            return;
        }
    }
}

/// Runs in the child, after it was counted.
pub(crate) fn after_fork_in_child() {
    let Some(locked) = locked() else { return };
    orders::forget_in_child();
    if is_nested() {
        // The table is half changed, perhaps: what is placed stays shared until the child begins another program.
        return;
    }
    if let Some(table) = table(locked) {
        take_copies(table);
    }
    close_end(&READ_END);
    close_end(&WRITE_END);
    locked.give();
}

fn take_copies(table: &Table) {
    let zones = table.zones();
    if let Some(maps) = Maps::open().filter(|_| table.shows_zones()) {
        maps.visit(ALL.start, ALL.end, &mut |area| {
            // Also where the program moved them.
            if let Some(zone) = zones.iter().find(|zone| zone.is_shown_in(area)) {
                let (alias, zone_bytes) = zone.alias();
                let bytes = (area.end - area.start).min((zone_bytes as u64).saturating_sub(area.offset));
                moving::copy_for_child(
                    area.start,
                    alias.wrapping_add(area.offset as usize),
                    bytes as usize,
                    protection(area),
                );
            }
            true
        });
    }
    for zone in zones {
        let (alias, bytes) = zone.alias();
        // SAFETY: made by `map_alias`; the table is forgotten before its next use.
        unsafe { moving::unmap_alias(alias, bytes) };
    }
}
