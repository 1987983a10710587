//! Re-sharing of memory that a revocation made private: the router asks for it once peers have used
//! that memory by the slow path for a while.
//!
//! Regions touch these pages, and the router reads and writes them by address at any time. So its
//! accesses are frozen in the window, as the process's threads are. The rest is as in a
//! registration.
use crate::process_map::FileId;
use crate::stale::outside;
use crate::table::{Pages, Table, is_enabled};
use crate::threads::may_try_freeze;
use freeflow_client::{Freeze, Handle, Session};
use std::ops::Range;
use std::sync::Arc;

impl Table {
    /// Puts the private copies of a segment into exclusive arenas, as far as regions touch them.
    /// Pages that can't be moved now stay as they are.
    pub fn reshare(&mut self, session: &Arc<Session>, segment: Handle) {
        if !is_enabled() || session.is_dead() || !may_try_freeze(Freeze::ThreadsAndRouter) {
            return;
        }
        let Some((copies, file)) = self.copies_of(session.serial(), segment) else { return };
        let _ = self.move_in_touched(session, Pages::Copies(file), copies, true);
    }

    /// The copies that took a segment's place and that regions of this session touch, and no
    /// others': the router's accesses for those would go on.
    fn copies_of(&self, serial: u64, segment: Handle) -> Option<(Vec<Range<u64>>, FileId)> {
        let copied = self.copied.iter().find(|copied| (copied.serial, copied.segment) == (serial, segment))?;
        let foreign = self.foreign_pages(serial);
        let copies = self.copies.iter().filter(|(_, number)| *number == copied.number).map(|(range, _)| range);
        let kept = copies.flat_map(|range| {
            let mut holes = self.pins.untouched(range.clone());
            holes.extend_from_slice(&foreign);
            outside(vec![range.clone()], &range, &holes)
        });
        Some((kept.collect(), copied.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::span;
    use crate::table::Copied;

    #[test]
    fn pages_that_this_session_s_regions_touch_are_re_shared() {
        let mut table = Table::new(0);
        let file = |inode| FileId { device: (0, 1), inode };
        let copied =
            |number, serial| Copied { number, serial, segment: 5, file: file(number.into()), is_exposed: true };
        table.copied = vec![copied(1, 8), copied(2, 9)];
        table.copies.insert(0x1000..0x9000, 2);
        table.copies.insert(0xa000..0xb000, 1);
        table.copies.insert(0xb000..0xc000, 2);
        table.add_region(9, span(1, 0x2000, 0x4000));
        table.add_region(9, span(1, 0xa000, 0x2000));
        #[allow(clippy::single_range_in_vec_init, reason = "a list of ranges, of one")]
        let expected = (vec![0x2000..0x6000, 0xb000..0xc000], file(2));
        assert_eq!(table.copies_of(9, 5), Some(expected));
        assert_eq!(table.copies_of(9, 6), None);
        // By another router, which would not stand still.
        table.add_region(7, span(2, 0x3800, 0x900));
        assert_eq!(table.copies_of(9, 5), Some((vec![0x2000..0x3000, 0x5000..0x6000, 0xb000..0xc000], file(2))));
        assert!(table.remove_region(span(2, 0x3800, 0x900)));
        table.drop_copies(0x2000..0x5000);
        assert_eq!(table.copies_of(9, 5), Some((vec![0x5000..0x6000, 0xb000..0xc000], file(2))));
        table.drop_copies(0..0xc000);
        assert_eq!(table.copies_of(9, 5), None, "its bookkeeping is gone");
    }
}
