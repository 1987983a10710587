//! Pages of the first thread's stack. The kernel lets that area grow and does not join it with
//! memory that is mapped there later, so these pages go aside when they are shared, and come back
//! themselves: afterwards the stack is one area again.
//!
//! While such a page is shared, the C library takes the area above it for all of the stack
//! (`pthread_getattr_np`). The kernel goes on letting the stack grow.
use crate::page_moves::{self, Aside, Moved, PageMove};
use crate::process_map::{Area, ProcessMap};
use crate::ranges::PAGE_BYTES;
use freeflow_client::{Freeze, Session};
use std::collections::BTreeMap;

/// The stack ends a little above the program's name; so far below, the kernel maps nothing else
/// (`mmap_base`: a gap of 128 MiB at least).
const STACK_BYTES_MAX: u64 = 64 << 20;

/// Pages that were put aside, by the address where they belong.
pub(crate) type AsidePages = BTreeMap<u64, Aside>;

/// Whether an address lies in the first thread's stack, which may be several areas.
pub(crate) fn is_first_stack(address: u64) -> bool {
    // SAFETY: takes a number and gives one.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) };
    let end = (name & !(PAGE_BYTES - 1)) + 2 * PAGE_BYTES;
    (end.saturating_sub(STACK_BYTES_MAX)..end).contains(&address)
}

/// The first address of an area whose page may be moved. The lowest page of the first thread's stack
/// stays: that stack grows from it, and can't once the page is another mapping's.
pub(crate) fn first_movable(maps: &ProcessMap, area: &Area) -> u64 {
    if !is_first_stack(area.end - 1) {
        return area.start;
    }
    let mut is_lowest = true;
    maps.visit(area.start - PAGE_BYTES, area.start, &mut |_| {
        is_lowest = false;
        true
    });
    area.start + if is_lowest { PAGE_BYTES } else { 0 }
}

/// Puts one page of the stack aside, and the arena's in its place, as [`page_moves::move_in`].
pub(crate) fn move_in(
    pages: &mut AsidePages,
    session: &Session,
    maps: &ProcessMap,
    piece: &PageMove,
    freeze: Freeze,
    is_right: &dyn Fn(&Area, u64) -> bool,
) -> Moved {
    let Some(aside) = Aside::reserve(piece.bytes) else { return Moved::NotNow };
    let moved = page_moves::move_in(session, maps, piece, freeze, Some(&aside), is_right);
    if moved == Moved::Done {
        pages.insert(piece.target, aside);
    }
    moved
}

/// Brings one page back, if the arena's is still there, which `is_shown` says. False: it is not
/// aside, or that can't be done now.
pub(crate) fn move_out(
    pages: &mut AsidePages,
    session: &Session,
    maps: &ProcessMap,
    piece: &PageMove,
    freeze: Freeze,
    is_shown: &dyn Fn(&PageMove, &Area, u64) -> bool,
) -> bool {
    let Some(aside) = pages.get(&piece.target) else { return false };
    let moved = page_moves::bring_back(session, maps, piece, freeze, aside, &|area, at| is_shown(piece, area, at));
    if moved {
        pages.remove(&piece.target);
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stack_is_known_by_its_end() {
        // SAFETY: takes a number and gives one.
        let name = unsafe { libc::getauxval(libc::AT_EXECFN) };
        assert!(is_first_stack(name) && is_first_stack(name - (8 << 20)));
        // This test has a thread of its own.
        let own = 0_u8;
        let heap = Box::new(0_u8);
        assert!(!is_first_stack((&raw const own).addr() as u64));
        assert!(!is_first_stack((&raw const *heap).addr() as u64));
        assert!(!is_first_stack(name - STACK_BYTES_MAX) && !is_first_stack(name + 2 * PAGE_BYTES));
    }
}
