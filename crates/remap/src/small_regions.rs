//! Whole pages of small regions. To move them costs a freeze of all threads, whatever they hold, and a program that
//! registers a buffer for each use would stop its threads each time. So a few registrations move them at once, as those
//! of a program that registers its buffers and then begins; from then on they stay where they are until the router has
//! used them for a while, as partial pages do (`sharing`).
//!
//! They come to lie where their registration would have put them: in exclusive arenas if peers have rights to them.
use crate::hints::Obstacle;
use crate::precautions::{devices_may_write, devices_may_write_lately};
use crate::ranges::{PAGE_BYTES, RegionSpan, joined};
use crate::table::{Extent, Pages, Table, extent};
use crate::threads::now_ns;
use freeflow_client::Session;
use std::ops::Range;
use std::sync::Arc;

/// Whole pages of a region up to which it is small, bytes.
const SMALL_BYTES_MAX: u64 = 1 << 20;

fn is_small(region: &RegionSpan) -> bool {
    let pages = region.whole_pages();
    !region.is_on_demand && !pages.is_empty() && pages.end - pages.start <= SMALL_BYTES_MAX
}

impl Table {
    /// Whether the pages of a region that is about to be registered stay where they are for now. To be called once for
    /// each registration.
    pub fn leaves_in_place(&mut self, region: &RegionSpan, is_exclusive: bool) -> bool {
        if !is_small(region) || extent() != Extent::All {
            return false;
        }
        if is_exclusive {
            self.small_remote.insert(*region);
        }
        let pages = region.whole_pages();
        let bytes = pages.end - pages.start;
        // In an arena of a session that has ended, or a private copy of one: sharing does not move these.
        let is_elsewhere = !self.remapped.within(pages.clone()).is_empty() || !self.copies.within(pages).is_empty();
        !is_elsewhere && !self.move_budget.take(now_ns(), bytes) && !devices_may_write_lately()
    }

    /// The small regions of a session that have whole pages there.
    fn small_regions_at(&self, serial: u64, addresses: &Range<u64>) -> Vec<RegionSpan> {
        let from = addresses.start.saturating_sub(SMALL_BYTES_MAX + 2 * PAGE_BYTES);
        let owners = self.owners.iter().filter(|(_, of)| **of == serial);
        let regions = owners.flat_map(|(&owner, _)| {
            let bound = |start| RegionSpan { owner, start, length: 0, is_on_demand: false };
            self.regions.range(bound(from)..bound(addresses.end)).map(|(&region, _)| region)
        });
        let is_there = |pages: Range<u64>| pages.start < addresses.end && addresses.start < pages.end;
        regions.filter(|region| is_small(region) && is_there(region.whole_pages())).collect()
    }

    /// Whole pages of small regions between two addresses, which must not be moved while devices may write to them.
    pub(super) fn kept_from_moving(&self, serial: u64, addresses: &Range<u64>) -> Vec<Range<u64>> {
        if extent() != Extent::All || !devices_may_write() {
            return Vec::new();
        }
        self.small_regions_at(serial, addresses).iter().map(RegionSpan::whole_pages).collect()
    }

    /// Puts the whole pages of small regions between two addresses into arenas, as their registration would have.
    pub(super) fn share_small_regions(
        &mut self,
        session: &Arc<Session>,
        addresses: &Range<u64>,
    ) -> Result<(), Obstacle> {
        if extent() != Extent::All {
            return Ok(());
        }
        let serial = session.serial();
        let regions = self.small_regions_at(serial, addresses).into_iter();
        let (remote, local): (Vec<_>, Vec<_>) = regions.partition(|region| self.small_remote.contains(region));
        for region in remote {
            self.move_in_whole(session, self.unplaced(serial, region.whole_pages()), true)?;
        }
        // Neighbours in one piece.
        let pages = joined(local.iter().map(RegionSpan::whole_pages).collect());
        let pages = pages.into_iter().flat_map(|pages| self.unplaced(serial, pages)).collect();
        self.move_in_whole(session, pages, false)
    }

    fn move_in_whole(
        &mut self,
        session: &Arc<Session>,
        pages: Vec<Range<u64>>,
        is_exclusive: bool,
    ) -> Result<(), Obstacle> {
        match self.move_in_touched(session, Pages::Whole, pages, is_exclusive) {
            // Variables of the program: they go with the partial pages.
            Err(Obstacle::PrivateFile) => Ok(()),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranges::span;

    #[test]
    fn a_region_is_small_by_its_whole_pages() {
        assert!(is_small(&span(1, 0x1000, 0x1000)) && is_small(&span(1, 0x1001, SMALL_BYTES_MAX + 0x1ffe)));
        assert!(!is_small(&span(1, 0x1000, SMALL_BYTES_MAX + 0x1000)));
        assert!(!is_small(&span(1, 0x1001, 0x1000)), "it has none");
        assert!(!is_small(&RegionSpan { is_on_demand: true, ..span(1, 0x1000, 0x1000) }));
    }

    #[test]
    fn small_regions_are_found_by_any_page_of_theirs() {
        let mut table = Table::new(0);
        let all = [span(1, 0x1_0000, 0x1000), span(2, 0x1f_f800, SMALL_BYTES_MAX + 0x800), span(3, 0x20_1000, 0x1000)];
        for (region, serial) in all.iter().zip([9, 9, 8]) {
            table.add_region(serial, *region);
        }
        table.add_region(9, span(1, 0x20_0000, 0x100_0000));
        assert_eq!(table.small_regions_at(9, &(0x1_0000..0x2_0000)), [all[0]]);
        assert_eq!(table.small_regions_at(9, &(0x20_0000..0x21_0000)), [all[1]]);
        assert_eq!(table.small_regions_at(9, &(0x20_f000..0x20_f001)), [all[1]]);
        assert_eq!(table.small_regions_at(9, &(0x2f_f000..0x30_0000)), [all[1]]);
        assert!(table.small_regions_at(9, &(0x30_0000..0x31_0000)).is_empty());
        assert_eq!(table.small_regions_at(8, &(0x20_0000..0x21_0000)), [all[2]]);
    }
}
