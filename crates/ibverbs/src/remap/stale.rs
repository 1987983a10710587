//! Pages that the program took away from where they were placed, while a region covers them: unmapped, mapped again, moved.
//!
//! Caches of registrations (UCX, Open MPI) leave a region registered when its memory is unmapped. The addresses come back
//! with other memory behind them, and other regions over that.
//!
//! Invariant: before the router knows of a region, or of a change of one, each page that the region touches, its partial
//! first and last page too, is either shown by its zone in the process' own map, or placed nowhere: neither in the table nor
//! in the router's page table. So it is reached where the program sees it.
//!
//! Between that and the region before it, who uses the old region's key reaches the old pages, which nothing else is put
//! into: a zone's page is used again only after no mapping of the process shows it.
use super::areas::{Area, Maps};
use super::moving::{self, Move, Others};
use super::table::{Table, Zone, protection, without};
use freeflow_client::Session;
use std::ops::Range;

/// A piece of a placed range that is still where it was put, and its rights.
type Shown = (Range<u64>, i32);

/// All addresses that a process can map.
pub(super) const ALL: Range<u64> = 0..1 << 56;

impl Table {
    /// What of these pages the program took away is placed no more. To be called before a region covers them. Gives what that
    /// was: what touches it are regions from before it went.
    pub fn forget_gone(&mut self, session: &Session, pages: Range<u64>, maps: &mut Option<Maps>) -> Vec<Range<u64>> {
        let placed = self.placed.within(pages);
        let mut forgotten = Vec::new();
        if placed.is_empty() {
            return forgotten;
        }
        if maps.is_none() {
            *maps = Maps::open();
        }
        for (range, number) in placed {
            let Some(zone) = self.zone(number) else { continue };
            let Some(maps) = &*maps else {
                // The fallback reaches what is there, whatever that is.
                let _ = session.unmap_part(range);
                continue;
            };
            let (_, gone) = check(zone, maps, &range);
            for piece in gone {
                self.forget(session, maps, &piece, number);
                forgotten.push(piece);
            }
        }
        forgotten
    }

    /// What of these pages is in the zone of a session that is gone, and still shown there.
    pub(super) fn left_behind(&self, session: &Session, maps: &Maps, pages: Range<u64>) -> Vec<Range<u64>> {
        let placed = self.placed.within(pages).into_iter();
        let zones = placed.filter_map(|(range, number)| Some((range, self.zone(number)?)));
        let foreign = zones.filter(|(_, zone)| zone.serial != session.serial());
        foreign.flat_map(|(range, zone)| check(zone, maps, &range).0).map(|(piece, _)| piece).collect()
    }

    /// The program took these pages away from where they were placed. If it moved them elsewhere (`mremap`, so `realloc`)
    /// they become private there.
    pub(super) fn forget(&mut self, session: &Session, maps: &Maps, range: &Range<u64>, number: u32) {
        let Some(at) = self.zones.iter().position(|zone| zone.number == number) else { return };
        let zone = &self.zones[at];
        if zone.serial == session.serial() {
            let _ = session.unmap_part(range.clone());
        }
        let freed = self.take_home(session, maps, at, zone.offset_at(range.start)..zone.offset_at(range.end));
        self.placed.remove(range.clone());
        let zone = &mut self.zones[at];
        zone.placed_bytes -= range.end - range.start;
        if freed {
            moving::punch(zone.alias_of(range.start), (range.end - range.start) as usize);
        } else {
            // The program sees these pages at other addresses: none of them shall become another region's.
            (zone.is_closed, zone.is_shown_elsewhere) = (true, true);
            self.owed = true;
        }
    }

    /// Retries what could not be made private where the program moved it.
    pub(super) fn settle_moved(&mut self, session: &Session) {
        if !self.zones.iter().any(|zone| zone.is_shown_elsewhere) {
            return;
        }
        let Some(maps) = Maps::open() else { return };
        for at in 0..self.zones.len() {
            let zone = &self.zones[at];
            // What is placed is shown where it belongs.
            if zone.is_shown_elsewhere && zone.placed_bytes == 0 {
                let all = 0..zone.bytes;
                self.zones[at].is_shown_elsewhere = !self.take_home(session, &maps, at, all);
            }
            self.owed |= self.zones[at].is_shown_elsewhere;
        }
        drop(maps);
        self.tidy(session);
    }

    /// Makes pages of a zone that the program moved to other addresses private there. False: not all, now.
    fn take_home(&self, session: &Session, maps: &Maps, at: usize, offsets: Range<u64>) -> bool {
        let zone = &self.zones[at];
        let mut moved = moved_from(zone, maps, offsets);
        // Regions cover where the pages went: the router may write there, by address.
        let is_used = moved.iter().any(|one| self.is_touched(one.target..one.target + one.bytes as u64));
        let others = if is_used && !session.is_dead() { Others::Router } else { Others::Threads };
        moved.is_empty() || moving::move_out(session, maps, &mut moved, others, &zone.is_shown())
    }

    fn is_touched(&self, pages: Range<u64>) -> bool {
        let bytes = pages.end - pages.start;
        self.touches.untouched(pages).iter().map(|range| range.end - range.start).sum::<u64>() != bytes
    }
}

/// What of these ranges lies within `pages`, and in no hole.
pub(super) fn outside(ranges: Vec<Range<u64>>, pages: &Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let within = |range: Range<u64>| range.start.max(pages.start)..range.end.min(pages.end);
    let mut left: Vec<_> = ranges.into_iter().map(within).filter(|range| range.start < range.end).collect();
    for hole in holes {
        left = left.into_iter().flat_map(|range| without(range, hole)).collect();
    }
    left
}

/// Where the process sees these pages of a zone.
fn moved_from(zone: &Zone, maps: &Maps, wanted: Range<u64>) -> Vec<Move> {
    let mut moved = Vec::new();
    maps.visit(ALL.start, ALL.end, &mut |area| {
        let from = area.offset.max(wanted.start);
        let end = (area.offset + (area.end - area.start)).min(wanted.end);
        if zone.is_shown_in(area) && from < end {
            moved.push(Move {
                target: area.start + (from - area.offset),
                alias: zone.alias.wrapping_add(from as usize),
                bytes: (end - from) as usize,
                protection: protection(area),
                done: false,
            });
        }
        true
    });
    moved
}

/// Which pieces of a placed range still show their zone's pages, with their rights, and which do not.
pub(super) fn check(zone: &Zone, maps: &Maps, range: &Range<u64>) -> (Vec<Shown>, Vec<Range<u64>>) {
    let (mut there, mut gone) = (Vec::new(), Vec::new());
    let mut from = range.start;
    maps.visit(range.start, range.end, &mut |area: &Area| {
        let piece = range.start.max(area.start)..range.end.min(area.end);
        if zone.is_at(area, piece.start) {
            if from < piece.start {
                gone.push(from..piece.start);
            }
            from = piece.end;
            there.push((piece, protection(area)));
        }
        true
    });
    if from < range.end {
        gone.push(from..range.end);
    }
    (there, gone)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        table.note(1, 1, 0x4800, 0x10);
        assert!(table.is_touched(0x1000..0x5000) && table.is_touched(0x4000..0x9000));
        assert!(!table.is_touched(0x1000..0x4000) && !table.is_touched(0x5000..0x6000));
    }
}
