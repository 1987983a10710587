//! Sharing of memory that registrations left where it was, once the router has used it by the slow
//! path for a while: the partial first and last pages of regions, regions within a page, small regions
//! (`small_regions`), pages that a smaller region touched before a larger one was registered,
//! initialised variables.
//!
//! Regions touch these pages, so the router's accesses are frozen too, as in `resharing`. They go
//! into shared arenas, which are never granted: a partial page holds bytes of the program that no
//! key names.
//!
//! Such a page may hold anything of the program: variables, a frame of a thread's stack, blocks of
//! the heap and the allocator's records of them. While it lies in an arena nobody but this process
//! and the router reaches it. A child of `fork` must not see it there for a moment even, so partial
//! pages become private again before each fork (`fork`).
use crate::commands::Task;
use crate::first_stack;
use crate::hints::Obstacle;
use crate::precautions::obstacle_to_partial_pages;
use crate::process_map::{Area, FileId, ProcessMap};
use crate::ranges::{RegionSpan, joined, without};
use crate::stale::{compare, outside};
use crate::table::{ExclusiveArenas, Pages, Table, is_enabled};
use crate::threads::{may_try_freeze, stack_in_use};
use freeflow_client::{Freeze, OwnMapping, Session};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Pages of a file that are the program's own once they are written.
fn is_private_file(area: &Area) -> bool {
    area.readable && area.writable && !area.executable && !area.shared && area.file != FileId::default()
}

impl Table {
    /// Puts the pages that regions of this session touch between two addresses into shared arenas,
    /// as far as they are in none. Pages that can't be moved now stay where they are. `count`: how
    /// often that was asked for.
    pub fn share(&mut self, session: &Arc<Session>, addresses: Range<u64>, count: u32) {
        if session.is_dead() {
            return;
        }
        let serial = session.serial();
        let outcome = if !is_enabled() {
            Err(Obstacle::SwitchedOff)
        } else if !may_try_freeze(Freeze::ThreadsAndRouter) {
            Err(Obstacle::NotMoved)
        } else {
            let kept = self.kept_from_moving(serial, &addresses);
            let small = if kept.is_empty() { self.share_small_regions(session, &addresses) } else { Ok(()) };
            small.and_then(|()| self.share_partial_pages(session, &addresses, &kept))
        };
        if self.hints.are_wanted() {
            self.note_unplaced((serial, addresses), count, outcome.err());
        }
    }

    fn share_partial_pages(
        &mut self,
        session: &Arc<Session>,
        addresses: &Range<u64>,
        kept: &[Range<u64>],
    ) -> Result<(), Obstacle> {
        let unplaced = outside(self.unplaced(session.serial(), addresses.clone()), addresses, kept);
        match obstacle_to_partial_pages() {
            Some(obstacle) if !unplaced.is_empty() => Err(obstacle),
            _ if !kept.is_empty() && unplaced.is_empty() => Err(Obstacle::Devices),
            _ => self.move_in_touched(session, Pages::Touched, unplaced, false),
        }
    }

    /// Counts a block that is in no arena still, for the hint.
    fn note_unplaced(&mut self, (serial, addresses): (u64, Range<u64>), count: u32, obstacle: Option<Obstacle>) {
        let block = addresses.start;
        let Some(unplaced) = self.unplaced(serial, addresses).into_iter().next() else { return };
        if !self.hints.note(block, count) {
            return;
        }
        let is_there = |region: &&RegionSpan| {
            let pages = region.touched_pages();
            pages.start < unplaced.end && unplaced.start < pages.end
        };
        if let Some(&region) = self.regions.keys().find(is_there) {
            self.hints.give(region, &unplaced, obstacle);
        }
    }

    /// Puts pages that regions touch into arenas: for the thread of `commands`. Those that can't be
    /// moved now stay where they are, as does what follows after an error.
    pub(super) fn move_in_touched(
        &mut self,
        session: &Arc<Session>,
        pages: Pages,
        ranges: Vec<Range<u64>>,
        is_exclusive: bool,
    ) -> Result<(), Obstacle> {
        if ranges.is_empty() {
            return Ok(());
        }
        let Some(maps) = ProcessMap::open() else { return Ok(()) };
        // This thread's stack may be a neighbour of what is moved. What is moved here can be taken out
        // here: both keep off the same pages.
        let stack = stack_in_use();
        let mut spots: Vec<Range<u64>> = Vec::new();
        self.variables.clear();
        let mut is_of_file = false;
        for range in ranges.into_iter().flat_map(|range| without(range, &stack)) {
            maps.visit(range.start, range.end, &mut |area| {
                let from = first_stack::first_movable(&maps, area);
                let spot = range.start.max(from)..range.end.min(area.end);
                if !spot.is_empty() {
                    self.note_variables(area, spot.start);
                    if !self.is_immovable(area) && self.may_move(session, pages, area, spot.start) {
                        spots.push(spot);
                    } else {
                        is_of_file |= is_private_file(area);
                    }
                }
                true
            });
        }
        let end = spots.iter().map(|spot| spot.end).max().unwrap_or(0);
        let mut exclusive = is_exclusive.then_some(ExclusiveArenas::until(end));
        for spot in spots {
            self.move_in_spot(session, &maps, pages, spot, &mut exclusive)?;
        }
        if is_of_file { Err(Obstacle::PrivateFile) } else { Ok(()) }
    }

    /// The pages there that regions touch (not on demand alone) and that are in no arena; none that regions of other
    /// sessions touch, whose routers would not stand still.
    pub(super) fn unplaced(&self, serial: u64, addresses: Range<u64>) -> Vec<Range<u64>> {
        let mut holes = self.pins.untouched(addresses.clone());
        holes.extend(self.remapped.within(addresses.clone()).into_iter().map(|(range, _)| range));
        holes.extend(self.foreign_pages(serial));
        outside(vec![addresses.clone()], &addresses, &holes)
    }

    /// The pages that regions of other sessions touch, but for those that have ended.
    pub(super) fn foreign_pages(&self, serial: u64) -> Vec<Range<u64>> {
        let others: BTreeSet<u64> = self.owners.values().copied().filter(|&of| of != serial).collect();
        let alive: BTreeSet<u64> = others.into_iter().filter(|&of| !self.has_ended(of)).collect();
        if alive.is_empty() {
            return Vec::new();
        }
        let is_foreign = |region: &&RegionSpan| self.owners.get(&region.owner).is_none_or(|of| alive.contains(of));
        self.regions.keys().filter(is_foreign).map(RegionSpan::touched_pages).collect()
    }

    /// Remapped pages that no region of those touching them covers as a whole, or did not when they were
    /// moved: shared here, or left of a larger region that has ended.
    fn partial_pages(&self) -> Vec<(Range<u64>, u32)> {
        let remapped = self.remapped.iter();
        remapped
            .flat_map(|(range, number)| {
                let mut pages = self.wholes.untouched(range.clone());
                pages.extend(self.partial.within(range).into_iter().map(|(range, _)| range));
                joined(pages).into_iter().map(move |range| (range, number))
            })
            .collect()
    }

    /// The threads of the sessions that have partial pages in arenas.
    pub fn threads_with_partial_pages(&self) -> Vec<Arc<OwnMapping<Task>>> {
        let numbers: BTreeSet<u32> = self.partial_pages().into_iter().map(|(_, number)| number).collect();
        let serials: BTreeSet<u64> =
            numbers.into_iter().filter_map(|number| self.arena(number)).map(|arena| arena.serial).collect();
        serials.into_iter().filter_map(|serial| self.command_thread(serial).cloned()).collect()
    }

    /// Makes the partial pages of a session private memory, whatever touches them.
    pub fn take_out_partial_pages(&mut self, session: &Session) {
        let is_own = |number| self.arena(number).is_some_and(|arena| arena.serial == session.serial());
        let partial: Vec<_> = self.partial_pages().into_iter().filter(|&(_, number)| is_own(number)).collect();
        let Some(maps) = ProcessMap::open() else { return };
        for span in self.spans_of(&partial) {
            if session.unmap_part(span).is_err() {
                self.has_pending = true;
                return;
            }
        }
        let ranges = partial.into_iter();
        let pieces =
            ranges.flat_map(|(range, number)| self.pieces_to_move_out(session, &maps, &range, number)).collect();
        self.move_out_pieces(session, &maps, pieces, Freeze::ThreadsAndRouter);
        drop(maps);
        self.tidy(session);
    }

    /// The same addresses in fewer ranges: with what lies between them, if none of it is remapped.
    fn spans_of(&self, ranges: &[(Range<u64>, u32)]) -> Vec<Range<u64>> {
        let mut spans: Vec<Range<u64>> = Vec::new();
        let mut last = None;
        for (range, number) in ranges {
            match spans.last_mut() {
                Some(span) if last == Some(number) && self.remapped.within(span.end..range.start).is_empty() => {
                    span.end = range.end;
                }
                _ => spans.push(range.clone()),
            }
            last = Some(number);
        }
        spans
    }

    /// Makes all partial pages private copies, for a fork, where no command thread took them out: their
    /// router is gone, or this is a child by a bare `clone`. The router hears nothing of it.
    pub fn leave_copies_of_partial_pages(&mut self) {
        let partial = self.partial_pages();
        if partial.is_empty() {
            return;
        }
        let Some(maps) = ProcessMap::open() else { return };
        for (range, number) in partial {
            let Some(arena) = self.arena(number) else { continue };
            let Some(compared) = compare(arena, &maps, &range) else { continue };
            for (shown, protection) in compared.shown {
                if let Some(piece) = self.arena(number).map(|arena| arena.piece(&shown, protection)) {
                    self.leave_private_copy(None, &maps, number, &piece);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]
mod tests {
    use super::*;
    use crate::ranges::span;

    #[test]
    fn pages_that_are_touched_and_in_no_arena_are_to_be_shared() {
        let mut table = Table::new(0);
        table.add_region(9, span(1, 0x1010, 0x20));
        table.add_region(9, span(1, 0x3ff0, 0x2020));
        table.remapped.insert(0x4000..0x6000, 1);
        assert_eq!(table.unplaced(9, 0..0x10000), [0x1000..0x2000, 0x3000..0x4000, 0x6000..0x7000]);
        assert_eq!(table.unplaced(9, 0x2000..0x4000), [0x3000..0x4000]);
        // By another router, which would not stand still.
        table.add_region(8, span(2, 0x6800, 8));
        assert_eq!(table.unplaced(9, 0..0x10000), [0x1000..0x2000, 0x3000..0x4000]);
        assert!(table.unplaced(8, 0..0x10000).is_empty());
    }

    #[test]
    fn a_page_is_partial_unless_a_region_covers_it() {
        let mut table = Table::new(0);
        let large = span(1, 0x3ff0, 0x2020);
        table.add_region(9, large);
        table.add_region(9, span(1, 0x4100, 8));
        table.remapped.insert(0x3000..0x7000, 1);
        assert_eq!(table.partial_pages(), [(0x3000..0x4000, 1), (0x6000..0x7000, 1)]);
        assert_eq!(table.spans_of(&table.partial_pages()), [0x3000..0x4000, 0x6000..0x7000]);
        // Moved as one of a region that covered it, which may not be there any more.
        table.partial.insert(0x5000..0x7000, 0);
        assert_eq!(table.partial_pages(), [(0x3000..0x4000, 1), (0x5000..0x7000, 1)]);
        table.partial.remove(0x5000..0x7000);
        table.remapped.insert(0x9000..0xa000, 1);
        table.remapped.insert(0xc000..0xd000, 2);
        assert_eq!(table.spans_of(&table.partial_pages()), [0x3000..0x4000, 0x6000..0xa000, 0xc000..0xd000]);
        assert!(table.remove_region(large));
        assert_eq!(table.partial_pages()[0], (0x3000..0x7000, 1));
    }
}
