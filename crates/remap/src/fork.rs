//! `fork`: a child gets its own copies of all arena pages that it sees, before code of the program
//! runs in it.
//!
//! The forking thread waits in the parent until the child has them (then the other end of a pipe is
//! closed, also if the child is killed), so that it writes nothing that the child could see. Other
//! threads of the parent run on.
//!
//! Partial pages hold what no region covers: a frame of the forking thread's stack, the allocator's
//! records. They must be the child's own from the first moment, so they are made private before:
//! however long that takes, as the program could not go on with pages that its child shares.
//!
//! The forking thread is undisturbed (`lock`) from before the fork until it has returned from it, in
//! the parent and in the child.
//!
//! In the child nothing is allocated or freed: the table is only read, and forgotten at its next
//! use.
use crate::lock::{Held, locked_if_used};
use crate::process_map::ProcessMap;
use crate::stale::ALL;
use crate::table::{Table, protection};
use crate::threads::now_ns;
use crate::{commands, page_moves};
use freeflow_client::fork::generation;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Longest wait for a child, milliseconds. It copies a gigabyte in less than a second.
const CHILD_TIME_MAX_MS: i32 = 30_000;

/// The ends of the pipe of the fork under way; written under the table's lock.
static READ_END: AtomicI32 = AtomicI32::new(-1);
static WRITE_END: AtomicI32 = AtomicI32::new(-1);
/// Forks by a thread that holds the lock for another reason: they neither take it nor give it back.
static NESTED: AtomicU32 = AtomicU32::new(0);

/// Takes partial pages out of all arenas, by their command threads: they freeze the others, and the
/// forking thread cannot move its own stack. What none of them takes out becomes a private copy.
fn take_out(held: &mut Held<'_>) {
    let threads = held.current().map(|table| table.threads_with_partial_pages()).unwrap_or_default();
    threads.iter().filter(|thread| thread.is_here()).for_each(|thread| held.lend(&***thread, true));
    if let Some(table) = held.current() {
        table.leave_copies_of_partial_pages();
    }
}

/// Runs in the parent before it forks.
pub extern "C" fn before_fork() {
    let Some(locked) = locked_if_used() else { return };
    if locked.is_mine() {
        // The handler of a fault in this library.
        NESTED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let mut held = locked.hold_for_fork();
    take_out(&mut held);
    if held.current().is_some_and(|table| table.shows_arenas()) {
        let mut ends = [-1; 2];
        // SAFETY: `ends` is ours to write.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } == 0 {
            // Relaxed, these and below: the same thread, or its child.
            READ_END.store(ends[0], Ordering::Relaxed);
            WRITE_END.store(ends[1], Ordering::Relaxed);
        }
    }
    held.keep();
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
pub extern "C" fn after_fork_in_parent() {
    let Some(locked) = locked_if_used() else { return };
    if is_nested() {
        return;
    }
    let _held = locked.kept();
    close_end(&WRITE_END);
    let descriptor = READ_END.load(Ordering::Relaxed);
    if descriptor >= 0 {
        wait_for_end(descriptor);
        close_end(&READ_END);
    }
}

/// Until the child's end of the pipe is closed.
fn wait_for_end(descriptor: i32) {
    let deadline = now_ns() + CHILD_TIME_MAX_MS as u64 * 1_000_000;
    loop {
        let left_ms = deadline.saturating_sub(now_ns()) / 1_000_000;
        let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd of ours.
        let ready = unsafe { libc::poll(&raw mut polled, 1, left_ms as i32) };
        let interrupted = ready < 0 && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted;
        if !interrupted || left_ms == 0 {
            return;
        }
    }
}

/// Runs in the child, after its generation was counted. Async-signal-safe calls only.
pub fn after_fork_in_child() {
    let Some(locked) = locked_if_used() else { return };
    commands::reset_in_child();
    if is_nested() {
        // The table is half changed, perhaps: what is remapped stays shared until the child begins
        // another program.
        return;
    }
    let held = locked.kept();
    locked.reset_in_child();
    // An older one was forgotten by the parent: what was mapped there is the program's by now.
    if let Some(table) = held.table().filter(|table| table.generation().wrapping_add(1) == generation()) {
        take_copies(table);
    }
    close_end(&READ_END);
    close_end(&WRITE_END);
}

fn take_copies(table: &Table) {
    let arenas = table.arenas();
    if let Some(maps) = ProcessMap::open().filter(|_| table.shows_arenas()) {
        maps.visit(ALL.start, ALL.end, &mut |area| {
            // Also where the program moved them.
            if let Some(arena) = arenas.iter().find(|arena| arena.is_shown_in(area)) {
                let bytes = (area.end - area.start).min(arena.bytes.saturating_sub(area.offset));
                let mirror = arena.mirror.wrapping_add(area.offset as usize);
                // SAFETY: the arena is shown in this area, from `offset` on, and its mirror shows the same.
                unsafe { page_moves::copy_for_child(area.start, mirror, bytes as usize, protection(area)) };
            }
            true
        });
    }
    for arena in arenas {
        // SAFETY: the table is forgotten before its next use.
        unsafe { arena.unmap() };
        if let Some(kept) = &arena.descriptor {
            kept.close();
        }
    }
}
