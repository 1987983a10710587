//! Moving pages out of arenas: at deregistrations, and before forks.
//!
//! Pages become private memory in a freeze window, as many as are moved in a few milliseconds. Where
//! the threads can't be frozen they become private copies (`private_copies`).
use crate::first_stack;
use crate::kept_descriptor::KeptDescriptor;
use crate::late_writes::LATE_BYTES_MAX;
use crate::page_moves::{self, MOVE_BYTES_MAX, PageMove};
use crate::process_map::{Area, ProcessMap};
use crate::stale::{ALL, Comparison, compare, outside};
use crate::table::{Table, move_bytes_max, runs_max};
use crate::threads::{is_window_possible, stack_in_use};
use freeflow_client::{Freeze, Session};
use std::ops::Range;
use std::os::fd::AsFd;

/// Pieces in one window; where a look at one area costs a look at many, less.
const PIECE_COUNT_MAX: usize = 256;
const PIECE_COUNT_BY_TEXT_MAX: usize = 16;

/// How many of these pieces are moved in one window: at least one.
fn count_in_window(pieces: &[PageMove], maps: &ProcessMap) -> usize {
    let count_max = if maps.has_query() { PIECE_COUNT_MAX } else { PIECE_COUNT_BY_TEXT_MAX };
    let mut bytes = 0;
    let fits = |piece: &&PageMove| {
        bytes += piece.bytes as u64;
        bytes <= MOVE_BYTES_MAX
    };
    pieces.iter().take(count_max).take_while(fits).count().max(1)
}

impl Table {
    /// Takes back what is remapped of these pages and touched by no region any more, or by regions on
    /// demand alone.
    pub fn move_out(&mut self, session: &Session, pages: Range<u64>) {
        let found = self.unpinned(pages.clone());
        let copies = self.exposed_copies(pages);
        if found.is_empty() && copies.is_empty() {
            return;
        }
        let Some(maps) = ProcessMap::open() else {
            self.has_pending = true;
            return;
        };
        let (mut free, mut touched) = (Vec::new(), Vec::new());
        for (range, number) in found {
            let pieces = if self.is_touched(range.clone()) { &mut touched } else { &mut free };
            pieces.extend(self.begin_to_move_out(session, &maps, range, number));
        }
        self.move_out_pieces(session, &maps, free, Freeze::Threads);
        self.move_out_pieces(session, &maps, touched, Freeze::ThreadsAndRouter);
        for (range, number) in copies {
            if self.restore_copies(session, &maps, range.clone(), number) {
                // Nothing is left there that could be shared again for peers.
                let _ = session.unmap_part(range);
            } else {
                self.has_pending = true;
            }
        }
        drop(maps);
        self.tidy(session);
    }

    /// Remapped pages among these that nothing keeps in their arenas; those that regions on demand
    /// touch are ranges of their own.
    fn unpinned(&self, pages: Range<u64>) -> Vec<(Range<u64>, u32)> {
        let mut found = Vec::new();
        for (range, number) in self.remapped.within(pages) {
            for range in self.pins.untouched(range) {
                let free = self.touches.untouched(range.clone());
                found.extend(outside(vec![range.clone()], &range, &free).into_iter().map(|range| (range, number)));
                found.extend(free.into_iter().map(|range| (range, number)));
            }
        }
        found
    }

    /// Takes a remapped range out of the router's table. Returns the pieces to be made private memory.
    fn begin_to_move_out(
        &mut self,
        session: &Session,
        maps: &ProcessMap,
        range: Range<u64>,
        number: u32,
    ) -> Vec<PageMove> {
        let is_own = self.arena(number).is_some_and(|arena| arena.serial == session.serial());
        if is_own && session.unmap_part(range.clone()).is_err() {
            self.has_pending = true;
            return Vec::new();
        }
        self.pieces_to_move_out(session, maps, &range, number)
    }

    /// The pieces of a remapped range to be made private memory, which the router uses no more. Forgets
    /// what is gone.
    pub(super) fn pieces_to_move_out(
        &mut self,
        session: &Session,
        maps: &ProcessMap,
        range: &Range<u64>,
        number: u32,
    ) -> Vec<PageMove> {
        let Some(arena) = self.arena(number) else { return Vec::new() };
        let Some(Comparison { shown, gone }) = compare(arena, maps, range) else {
            self.has_pending = true;
            return Vec::new();
        };
        let stack = stack_in_use();
        let mut pieces = Vec::new();
        for (shown, protection) in shown {
            let Some(arena) = self.arena(number) else { break };
            let piece = arena.piece(&shown, protection);
            if shown.start >= stack.end || stack.start >= shown.end {
                let mut from = shown.start;
                while from < shown.end {
                    let end = self.end_of_alike(from..shown.end.min(from + move_bytes_max(from)));
                    pieces.push(arena.piece(&(from..end), protection));
                    from = end;
                }
            } else if self.command_thread(session.serial()).is_some()
                || !self.leave_private_copy(Some(session), maps, number, &piece)
            {
                (self.has_pending, self.has_pending_stack) = (true, true);
            }
        }
        for piece in gone {
            self.forget(session, maps, &piece, number);
        }
        pieces
    }

    /// The end of the pages at the beginning that go in one piece, long ranges of partial ones apart
    /// from others.
    fn end_of_alike(&self, range: Range<u64>) -> u64 {
        let most = LATE_BYTES_MAX as u64;
        if range.end - range.start <= most {
            return range.end;
        }
        match self.partial.within(range.clone()).into_iter().next() {
            Some((first, _)) if first.start == range.start => first.end.min(range.start + most),
            Some((first, _)) => first.start,
            None => range.end,
        }
    }

    /// Makes pieces of arenas private memory, many in one window. `freeze`: the accesses that must be
    /// kept out, which are the router's too if regions touch these pages.
    pub(super) fn move_out_pieces(
        &mut self,
        session: &Session,
        maps: &ProcessMap,
        pieces: Vec<PageMove>,
        freeze: Freeze,
    ) {
        let (aside, pieces): (Vec<_>, Vec<_>) =
            pieces.into_iter().partition(|piece| self.aside_pages.contains_key(&piece.target));
        let (mut partial, mut whole): (Vec<_>, Vec<_>) =
            pieces.into_iter().partition(|piece| !self.partial.within(piece.range()).is_empty());
        for mut piece in aside {
            let Some(at) = self.arena_of(&piece) else { continue };
            let (arena, aside) = (&self.arenas[at], &mut self.aside_pages);
            piece.done = first_stack::move_out(aside, session, maps, &piece, freeze, &arena.is_shown());
            self.end_move_out(session, maps, &piece);
        }
        let arenas = &self.arenas;
        let is_shown = |piece: &PageMove, area: &Area, address| {
            arenas.iter().any(|arena| arena.has_mirror_of(piece) && arena.shows(piece, area, address))
        };
        // Partial pages join the memory beside the region, and whole ones between them both ends.
        for (pieces, holds_more) in [(&mut partial, true), (&mut whole, false)] {
            // Of this kind: what keeps partial pages where they are need not keep whole ones.
            let mut is_refused = false;
            let mut left = &mut pieces[..];
            while !left.is_empty() && !is_refused {
                let (batch, rest) = left.split_at_mut(count_in_window(left, maps));
                let mut done_count = 0;
                // Those that are left over, too, as long as there are fewer each time: the window was
                // open for too long.
                while !page_moves::move_out(session, maps, batch, holds_more, freeze, &is_shown) {
                    let count = batch.iter().filter(|piece| piece.done).count();
                    if count == done_count {
                        break;
                    }
                    done_count = count;
                }
                // No window, and there would be none for the others: each try would cost the same time.
                is_refused = batch.iter().all(|piece| !piece.done);
                left = rest;
            }
        }
        for piece in whole.iter().chain(&partial) {
            self.end_move_out(session, maps, piece);
        }
    }

    /// Records that a piece is private memory, or makes it a private copy where it is not: the threads
    /// can't be frozen.
    fn end_move_out(&mut self, session: &Session, maps: &ProcessMap, piece: &PageMove) {
        let Some(number) = self.arena_of(piece).map(|at| self.arenas[at].number) else { return };
        if piece.done {
            self.end_remapping(number, piece);
        } else if !self.leave_private_copy(Some(session), maps, number, piece) {
            self.has_pending = true;
        }
    }

    /// A piece shows pages of its arena no more.
    fn end_remapping(&mut self, number: u32, piece: &PageMove) {
        let Some(arena) = self.arenas.iter_mut().find(|arena| arena.number == number) else { return };
        arena.remapped_bytes -= piece.bytes as u64;
        self.remapped.remove(piece.range());
        self.partial.remove(piece.range());
        page_moves::punch(piece.mirror, piece.bytes);
    }

    fn arena_of(&self, piece: &PageMove) -> Option<usize> {
        self.arenas.iter().position(|arena| arena.has_mirror_of(piece))
    }

    /// Private copies, which cost an area of the map each, and no freeze: also of pages that this
    /// thread has in its stack. `session`: the router may be asked for the arena's descriptor.
    pub(super) fn leave_private_copy(
        &mut self,
        session: Option<&Session>,
        maps: &ProcessMap,
        number: u32,
        piece: &PageMove,
    ) -> bool {
        let Some(at) = self.arenas.iter().position(|arena| arena.number == number) else { return false };
        let arena = &self.arenas[at];
        let is_full = (self.remapped.len() + self.copies.len()) as u64 >= 2 * runs_max();
        let own = session.filter(|session| arena.serial == session.serial());
        let asked = match (&arena.descriptor, own) {
            (Some(kept), _) if kept.get().is_some() => None,
            (_, Some(session)) => session.reopen_segment(arena.segment).ok(),
            _ => None,
        };
        let kept = arena.descriptor.as_ref().and_then(KeptDescriptor::get);
        let Some(descriptor) = kept.or(asked.as_ref().map(AsFd::as_fd)) else { return false };
        // A fork cannot do without.
        if is_full && session.is_some() {
            return false;
        }
        // It waited for the router: the program may have taken the pages away meanwhile.
        if !page_moves::is_all(maps, piece, &|area, address| arena.is_shown()(piece, area, address))
            || !page_moves::make_private(piece, descriptor, arena.offset_of(piece))
        {
            return false;
        }
        let is_exposed = arena.is_exclusive;
        self.note_copy(at, piece, is_exposed);
        // Taken back once threads can be frozen.
        self.has_pending |= is_exposed;
        self.end_remapping(number, piece);
        true
    }

    /// Tries once more what could not be taken back.
    pub fn retry_pending(&mut self, session: &Session) {
        if self.has_pending && is_window_possible() {
            (self.has_pending, self.has_pending_stack) = (false, false);
            self.move_out(session, ALL);
            self.retry_moved(session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_a_limit_of_pieces_and_of_bytes() {
        let piece = |bytes| PageMove { target: 0, mirror: std::ptr::null_mut(), bytes, protection: 0, done: false };
        let maps = ProcessMap::open().unwrap();
        let text = ProcessMap::open().unwrap().by_text();
        let small = vec![piece(4096); 1000];
        assert_eq!(count_in_window(&small, &text), PIECE_COUNT_BY_TEXT_MAX);
        assert!(count_in_window(&small, &maps) <= PIECE_COUNT_MAX && count_in_window(&small[..3], &maps) == 3);
        assert_eq!(count_in_window(&[piece(6 << 20); 5], &maps), 2);
        assert_eq!(count_in_window(&[piece(MOVE_BYTES_MAX as usize), piece(4096)], &maps), 1);
    }
}
