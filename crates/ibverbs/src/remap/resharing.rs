//! Sharing again what a withdrawal made private: where peers use the memory by the router, that orders it after a while.
//!
//! Regions touch these pages, and the router reads and writes them by address at any time. So all of that stands still in
//! the window, as the process' threads do. Otherwise it is what a registration does.
use super::areas::{Identity, Maps};
use super::moving;
use super::table::{Apart, Pages, Table, without};
use super::touched;
use freeflow_client::{Handle, Session};
use std::ops::Range;
use std::sync::Arc;

impl Table {
    /// Puts the private copies of a segment into own zones, as far as regions touch them. What can't be moved now stays as it is.
    pub fn share_again(&mut self, session: &Arc<Session>, segment: Handle) {
        if !super::is_enabled() || session.is_dead() || !moving::is_patient() {
            return;
        }
        let Some((copies, file)) = self.copies_of(session.serial(), segment) else { return };
        let Some(maps) = Maps::open() else { return };
        let pages = Pages::Copies(file);
        let mut spots: Vec<Range<u64>> = Vec::new();
        // This thread's stack is its own, and may be a neighbour of what is moved.
        let stack = 0_u8;
        let stack = (&raw const stack).addr() as u64;
        for range in copies {
            maps.visit(range.start, range.end, &mut |area| {
                let spot = range.start.max(area.start)..range.end.min(area.end);
                if !(area.start..area.end).contains(&stack) && self.may_move(session, pages, area, spot.start) {
                    spots.push(spot);
                }
                true
            });
        }
        let end = spots.iter().map(|spot| spot.end).max().unwrap_or(0);
        let mut apart = Some(Apart::until(end));
        for spot in spots {
            if !self.move_in_spot(session, &maps, pages, spot, &mut apart) {
                return;
            }
        }
    }

    /// The copies that took a segment's place and that regions of this session touch, and no others': the router's accesses for those
    /// would go on.
    fn copies_of(&self, serial: u64, segment: Handle) -> Option<(Vec<Range<u64>>, Identity)> {
        let copied = self.copied.iter().find(|copied| (copied.serial, copied.segment) == (serial, segment))?;
        let is_foreign = |owner: &usize| self.owners.get(owner).is_none_or(|of| *of != serial);
        let regions = self.regions.keys().filter(|(owner, ..)| is_foreign(owner));
        let foreign: Vec<Range<u64>> = regions.map(|&(_, start, length)| touched(start, length)).collect();
        let copies = self.copies.iter().filter(|(_, number)| *number == copied.number).map(|(range, _)| range);
        let kept = copies.flat_map(|range| {
            let mut kept = vec![range.clone()];
            let untouched = self.touches.untouched(range);
            for hole in untouched.iter().chain(&foreign) {
                kept = kept.into_iter().flat_map(|piece| without(piece, hole)).collect();
            }
            kept
        });
        Some((kept.collect(), copied.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remap::table::Copied;

    #[test]
    fn what_this_session_s_regions_touch_is_shared_again() {
        let mut table = Table::new(0);
        let file = |inode| Identity { device: (0, 1), inode };
        let copied =
            |number, serial| Copied { number, serial, segment: 5, file: file(number.into()), is_exposed: true };
        table.copied = vec![copied(1, 8), copied(2, 9)];
        table.copies.insert(0x1000..0x9000, 2);
        table.copies.insert(0xa000..0xb000, 1);
        table.copies.insert(0xb000..0xc000, 2);
        table.note(9, 1, 0x2000, 0x4000);
        table.note(9, 1, 0xa000, 0x2000);
        #[allow(clippy::single_range_in_vec_init, reason = "a list of ranges, of one")]
        let expected = (vec![0x2000..0x6000, 0xb000..0xc000], file(2));
        assert_eq!(table.copies_of(9, 5), Some(expected));
        assert_eq!(table.copies_of(9, 6), None);
        // By another router, which would not stand still.
        table.note(7, 2, 0x3800, 0x900);
        assert_eq!(table.copies_of(9, 5), Some((vec![0x2000..0x3000, 0x5000..0x6000, 0xb000..0xc000], file(2))));
        assert!(table.unnote(2, 0x3800, 0x900));
        table.drop_copies(0x2000..0x5000);
        assert_eq!(table.copies_of(9, 5), Some((vec![0x5000..0x6000, 0xb000..0xc000], file(2))));
        table.drop_copies(0..0xc000);
        assert_eq!(table.copies_of(9, 5), None, "its bookkeeping is gone");
    }
}
