//! Pages that the program took away from where they were remapped, while a region covers them:
//! unmapped, mapped again, moved.
//!
//! Caches of registrations (UCX, Open MPI) leave a region registered when its memory is unmapped.
//! The addresses come back with other memory behind them, and other regions over that.
//!
//! Invariant: before the router knows of a region, or of a change of one, each page that the region
//! touches, its partial first and last page too, is either shown by its arena in the process's own
//! map, or remapped nowhere: neither in the table nor in the router's page table. So it is reached
//! where the program sees it.
//!
//! Between that and the region before it, the old region's key reaches the old pages, and nothing
//! else is put into those: an arena's page is used again only after no mapping of the process shows
//! it.
use crate::page_moves::{self, PageMove};
use crate::process_map::{Area, ProcessMap};
use crate::ranges::without;
use crate::table::{Arena, Table, protection};
use freeflow_client::{Freeze, Session};
use std::ops::Range;

/// A remapped range beside the process's own map.
pub(super) struct Comparison {
    /// Pieces that still show their arena's pages, with their rights.
    pub shown: Vec<(Range<u64>, i32)>,
    /// Pieces that do not.
    pub gone: Vec<Range<u64>>,
}

/// All addresses that a process can map.
pub(super) const ALL: Range<u64> = 0..1 << 56;

impl Table {
    /// Forgets the pages among these that the program took away. To be called before a region
    /// covers them. Returns those pages: regions that touch them are older than what lies there
    /// now.
    pub fn forget_gone(
        &mut self,
        session: &Session,
        pages: Range<u64>,
        maps: &mut Option<ProcessMap>,
    ) -> Vec<Range<u64>> {
        let remapped = self.remapped.within(pages);
        let mut forgotten = Vec::new();
        if remapped.is_empty() {
            return forgotten;
        }
        if maps.is_none() {
            *maps = ProcessMap::open();
        }
        for (range, number) in remapped {
            let Some(arena) = self.arena(number) else { continue };
            let Some((maps, compared)) = maps.as_ref().and_then(|maps| Some((maps, compare(arena, maps, &range)?)))
            else {
                // The slow path reaches what is there, whatever that is.
                let _ = session.unmap_part(range);
                continue;
            };
            for piece in compared.gone {
                self.forget(session, maps, &piece, number);
                forgotten.push(piece);
            }
        }
        forgotten
    }

    /// The pages among these that an arena of a dead session still shows.
    pub(super) fn left_behind(&self, session: &Session, maps: &ProcessMap, pages: Range<u64>) -> Vec<Range<u64>> {
        let remapped = self.remapped.within(pages).into_iter();
        let arenas = remapped.filter_map(|(range, number)| Some((range, self.arena(number)?)));
        let foreign = arenas.filter(|(_, arena)| arena.serial != session.serial());
        let shown = foreign.filter_map(|(range, arena)| Some(compare(arena, maps, &range)?.shown));
        shown.flatten().map(|(piece, _)| piece).collect()
    }

    /// The program took these pages away from where they were remapped. If it moved them elsewhere
    /// (`mremap`, so `realloc`) they become private there.
    pub(super) fn forget(&mut self, session: &Session, maps: &ProcessMap, range: &Range<u64>, number: u32) {
        let Some(at) = self.arenas.iter().position(|arena| arena.number == number) else { return };
        let arena = &self.arenas[at];
        if arena.serial == session.serial() {
            let _ = session.unmap_part(range.clone());
        }
        let freed = self.restore_moved(session, maps, at, arena.offset_at(range.start)..arena.offset_at(range.end));
        self.remapped.remove(range.clone());
        self.partial.remove(range.clone());
        let arena = &mut self.arenas[at];
        arena.remapped_bytes -= range.end - range.start;
        if freed {
            page_moves::punch(arena.mirror_of(range.start), (range.end - range.start) as usize);
        } else {
            // The program sees these pages at other addresses: none of them shall become another
            // region's.
            (arena.is_closed, arena.is_shown_elsewhere) = (true, true);
            self.has_pending = true;
        }
    }

    /// Retries what could not be made private where the program moved it.
    pub(super) fn retry_moved(&mut self, session: &Session) {
        if !self.arenas.iter().any(|arena| arena.is_shown_elsewhere) {
            return;
        }
        let Some(maps) = ProcessMap::open() else { return };
        for at in 0..self.arenas.len() {
            let arena = &self.arenas[at];
            // Remapped pages are shown where they belong.
            if arena.is_shown_elsewhere && arena.remapped_bytes == 0 {
                let all = 0..arena.bytes;
                self.arenas[at].is_shown_elsewhere = !self.restore_moved(session, &maps, at, all);
            }
            self.has_pending |= self.arenas[at].is_shown_elsewhere;
        }
        drop(maps);
        self.tidy(session);
    }

    /// Makes pages of an arena that the program moved to other addresses private there. False: not
    /// all, now.
    fn restore_moved(&self, session: &Session, maps: &ProcessMap, at: usize, offsets: Range<u64>) -> bool {
        let arena = &self.arenas[at];
        let Some(mut moved) = moved_from(arena, maps, offsets) else { return false };
        // Regions cover where the pages went: the router may write there, by address.
        let is_used = moved.iter().any(|one| self.is_touched(one.target..one.target + one.bytes as u64));
        let freeze = if is_used && !session.is_dead() { Freeze::ThreadsAndRouter } else { Freeze::Threads };
        moved.is_empty() || page_moves::move_out(session, maps, &mut moved, false, freeze, &arena.is_shown())
    }

    pub(super) fn is_touched(&self, pages: Range<u64>) -> bool {
        let bytes = pages.end - pages.start;
        self.touches.untouched(pages).iter().map(|range| range.end - range.start).sum::<u64>() != bytes
    }
}

/// Parts of these ranges within `pages`, and in no hole.
pub(super) fn outside(ranges: Vec<Range<u64>>, pages: &Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let within = |range: Range<u64>| range.start.max(pages.start)..range.end.min(pages.end);
    let mut left: Vec<_> = ranges.into_iter().map(within).filter(|range| range.start < range.end).collect();
    for hole in holes {
        left = left.into_iter().flat_map(|range| without(range, hole)).collect();
    }
    left
}

/// Where the process sees these pages of an arena. `None`: its map can't be read.
fn moved_from(arena: &Arena, maps: &ProcessMap, wanted: Range<u64>) -> Option<Vec<PageMove>> {
    let mut moved = Vec::new();
    let is_read = maps.visit(ALL.start, ALL.end, &mut |area| {
        let from = area.offset.max(wanted.start);
        let end = (area.offset + (area.end - area.start)).min(wanted.end);
        if arena.is_shown_in(area) && from < end {
            moved.push(PageMove {
                target: area.start + (from - area.offset),
                mirror: arena.mirror.wrapping_add(from as usize),
                bytes: (end - from) as usize,
                protection: protection(area),
                done: false,
            });
        }
        true
    });
    is_read.then_some(moved)
}

/// Looks at a remapped range in the process's own map. `None`: that can't be read, and says nothing
/// of what is gone.
pub(super) fn compare(arena: &Arena, maps: &ProcessMap, range: &Range<u64>) -> Option<Comparison> {
    let (mut shown, mut gone) = (Vec::new(), Vec::new());
    let mut from = range.start;
    let is_read = maps.visit(range.start, range.end, &mut |area: &Area| {
        let piece = range.start.max(area.start)..range.end.min(area.end);
        if arena.is_at(area, piece.start) {
            if from < piece.start {
                gone.push(from..piece.start);
            }
            from = piece.end;
            shown.push((piece, protection(area)));
        }
        true
    });
    if from < range.end {
        gone.push(from..range.end);
    }
    is_read.then_some(Comparison { shown, gone })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::RegionSpan;

    #[test]
    fn what_is_free_is_found_once() {
        let ranges = || vec![0x1000..0x5000, 0x8000..0x9000];
        assert_eq!(outside(ranges(), &(0x2000..0x20000), &[]), [0x2000..0x5000, 0x8000..0x9000]);
        assert_eq!(
            outside(ranges(), &(0..0x20000), &[0x2000..0x3000, 0x7000..0xa000]),
            [0x1000..0x2000, 0x3000..0x5000]
        );
        assert!(outside(ranges(), &(0x5000..0x8000), &[]).is_empty());
    }

    #[test]
    fn a_region_over_one_page_of_many_touches_them() {
        let mut table = Table::new(0);
        table.add_region(1, RegionSpan { owner: 1, start: 0x4800, length: 0x10, is_on_demand: false });
        assert!(table.is_touched(0x1000..0x5000) && table.is_touched(0x4000..0x9000));
        assert!(!table.is_touched(0x1000..0x4000) && !table.is_touched(0x5000..0x6000));
    }
}
