//! Transparent zero-copy: the registration of ordinary memory moves its whole pages into segments
//! that the router has mapped too, and the last deregistration puts private memory in their place
//! again.
//!
//! *Remapped* are whole pages wholly inside a region, in private anonymous memory that is readable,
//! writable and not executable, and no stack in use. Memory that the program shares by a file of
//! its own stays where it is, and the router maps that file, if it can (`borrowed`). All else
//! (edges, files on disk, memory beyond a limit) stays where it is, and the router reaches it by
//! its slow path. No registration fails for any of this.
//!
//! *Arenas*: a segment stands for one stretch of addresses, and a page's offset in it is its
//! distance from the stretch's beginning. So pages that are neighbours in memory are neighbours in
//! the arena, and the kernel and the router keep one entry for both, in whatever order they came.
//! An arena is sparse: offsets without a remapped page cost nothing. The library reaches it by a
//! *mirror mapping* of its own.
//!
//! *Small regions* are moved at once only if there have been few; later ones are once the router has used
//! them for a while (`small_regions`).
//!
//! *Exclusive arenas*: the pages of a region with remote rights go into arenas that hold nothing
//! else, as long as there are not too many. The router can grant such an arena to a peer, which
//! then reaches it directly, and nothing besides it. The router revokes that by a command, which a
//! thread of this crate carries out (`commands`) by private copies (`private_copies`). By another
//! command those go into exclusive arenas again (`resharing`).
//!
//! This crate knows the session with the router and the process's own mappings; of the verbs it
//! knows a region's addresses alone, and of C's structs nothing.
//!
//! Invariant: pages are moved only while no region touches them, but the one that is being
//! registered or was just deregistered; or while the router's own accesses are frozen too, and only
//! its session's regions touch them. So no peer writes to them in the moment when their contents
//! are in two places.
//!
//! Invariant: the router knows of a remapped page after it was remapped, and forgets it before it
//! is taken back.
//!
//! Invariant: before anything is done to remapped memory, the process's own map must say that it is
//! still there: programs unmap memory before they deregister it, and map other things there.
//!
//! Invariant: no page of a region goes into an exclusive arena that was made for another
//! registration. Memory that a peer may still have mapped is never used again: an exclusive arena
//! that is empty is destroyed.
//!
//! ```
//! use freeflow_verbs::VerbsError;
//!
//! // Before a region is registered: all of it must be mapped, writable where the access asks for it.
//! static CONSTANT: [u8; 4096] = [1; 4096];
//! let start = CONSTANT.as_ptr() as u64;
//! assert!(freeflow_remap::check_mapped(start, 4096, false).is_ok());
//! assert_eq!(freeflow_remap::check_mapped(start, 4096, true).err(), Some(VerbsError::BadAddress));
//! ```
mod arenas;
mod borrowed;
mod commands;
mod first_stack;
mod fork;
mod hints;
mod kept_descriptor;
mod late_writes;
mod lock;
mod move_budget;
mod moving_out;
mod objects;
mod page_moves;
mod pages;
mod precautions;
mod private_copies;
mod process_map;
mod ranges;
mod resharing;
mod sharing;
mod small_regions;
mod stale;
mod syscalls;
mod table;
mod threads;

pub use commands::wait_for_revocations;
pub use fork::{after_fork_in_child, after_fork_in_parent, before_fork};
pub use hints::note_stderr;
pub use pages::{check_mapped, populate};
pub use process_map::ProcessMap;
pub use ranges::RegionSpan;

use freeflow_client::{Session, Uncancelled};
use lock::locked;
use ranges::touched_pages;
use std::sync::Arc;

/// Where a region's pages shall lie while it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where they are, as those of memory that is registered on demand.
    Unmoved,
    /// In arenas, with pages of other regions.
    Shared,
    /// In arenas of their own, if possible.
    Exclusive,
}

/// Moves the pages of a region that is about to be registered, and counts the region. To be called
/// before the router knows of the region; [`release`] undoes it. `map`: the process's own map, if
/// it was opened already.
pub fn prepare(session: &Arc<Session>, region: RegionSpan, placement: Placement, mut map: Option<ProcessMap>) {
    let _uncancelled = Uncancelled::begin();
    locked().with(|table| {
        let renewed = table.forget_gone(session, region.touched_pages(), &mut map);
        table.borrowed.forget_not_shown(region.touched_pages(), &mut map);
        let may_move = placement != Placement::Unmoved && !session.is_dead();
        if may_move && !table::is_enabled() && hints::are_enabled() {
            // The router's commands show that the slow path is used.
            table.receives_commands(session);
        }
        if may_move && table::is_enabled() {
            table.retry_pending(session);
            // Without them, what is not moved now never will be.
            let receives_commands = table.receives_commands(session);
            table.borrow(session, region.touched_pages(), &mut map);
            let is_exclusive = placement == Placement::Exclusive;
            if !receives_commands || !table.leaves_in_place(&region, is_exclusive) {
                table.move_in(session, region.whole_pages(), table::Known { renewed, map }, is_exclusive);
            }
        }
        table.note_session(session);
        table.add_region(session.serial(), region);
    });
}

/// Forgets pages that the program has unmapped or moved. To be called before a region over this
/// memory changes its rights and stays where it is.
pub fn refresh(session: &Session, start: u64, length: u64) {
    locked().with(|table| {
        let (pages, mut map) = (touched_pages(start, length), None);
        table.forget_gone(session, pages.clone(), &mut map);
        table.borrowed.forget_not_shown(pages, &mut map);
    });
}

/// Ends the effect of [`prepare`], once the router uses nothing of the region any more. On return
/// its pages are private memory again, unless another region touches them.
pub fn release(session: &Session, region: RegionSpan) {
    let _uncancelled = Uncancelled::begin();
    session.outlast_peers();
    let mut held = locked().hold();
    let other_thread = held.with(|table| {
        if table.remove_region(region) {
            table.give_back(region.touched_pages());
            table.move_out(session, region.touched_pages());
            table.retry_pending(session);
        }
        table.thread_for_stack(session)
    });
    if let Some(thread) = other_thread.filter(|thread| thread.is_here()) {
        held.lend(&**thread, false);
    }
}

/// [`release`] for all regions of `owner` that are left.
pub fn release_all(session: &Session, owner: usize) {
    let _uncancelled = Uncancelled::begin();
    session.outlast_peers();
    locked().with(|table| {
        for region in table.regions_of(owner) {
            if table.remove_region(region) {
                table.give_back(region.touched_pages());
                table.move_out(session, region.touched_pages());
            }
        }
        table.retry_pending(session);
        table.tidy(session);
    });
}
