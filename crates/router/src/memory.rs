//! The page table of one process: how the router reaches each byte of its address space.
//!
//! A range that the process mapped from one of its segments is *shared*: the router has the same memory mapped and
//! copies directly. Everything else is *fallback*: reached through a `/proc/PID/mem` descriptor, by the vNIC's helper
//! thread only. The page table decides, never the memory region.
//!
//! A library that lies about where it mapped a segment only misdirects copies of its own memory.
use crate::fallback::TenantMemory;
use freeflow_shm::Segment;
use std::sync::Arc;

/// End of the address space that a process can map (x86-64 with five levels of page tables has 2^56).
const ADDRESS_END: u64 = 1 << 56;
const PAGE_BYTES: u64 = 4096;

struct Range {
    start: u64,
    end: u64,
    segment: Arc<Segment>,
}

/// The address space of one process.
pub struct PageTable {
    /// By address, disjoint.
    ranges: Vec<Range>,
    /// Held since the session began; reads end of file once the process is gone.
    fallback: Arc<dyn TenantMemory>,
}

/// How one piece of memory is reached.
pub enum Reach<'a> {
    Shared { segment: &'a Arc<Segment>, offset: usize },
    Fallback { memory: &'a Arc<dyn TenantMemory> },
}

/// A piece that is reached in one way as a whole.
pub struct Piece<'a> {
    pub reach: Reach<'a>,
    pub bytes: usize,
}

/// Not a range that a mapping can have, or it overlaps another segment.
#[derive(Debug, PartialEq, Eq)]
pub struct BadRange;

impl PageTable {
    pub fn new(fallback: Arc<dyn TenantMemory>) -> Self {
        Self { ranges: Vec::new(), fallback }
    }

    /// Whether a segment of `bytes` can lie at `address`, on its own.
    pub fn is_mappable(address: u64, bytes: u64) -> bool {
        address != 0
            && bytes != 0
            && address.is_multiple_of(PAGE_BYTES)
            && address.checked_add(bytes).is_some_and(|end| end <= ADDRESS_END)
    }

    /// The process mapped `segment` at `address`.
    pub fn map(&mut self, address: u64, segment: Arc<Segment>) -> Result<(), BadRange> {
        let bytes = segment.bytes() as u64;
        if !Self::is_mappable(address, bytes) {
            return Err(BadRange);
        }
        let end = address + bytes;
        let at = self.ranges.partition_point(|range| range.end <= address);
        if self.ranges.get(at).is_some_and(|range| range.start < end) {
            return Err(BadRange);
        }
        self.ranges.insert(at, Range { start: address, end, segment });
        Ok(())
    }

    /// The process unmapped the segment it had at `address`.
    pub fn unmap(&mut self, address: u64) -> Option<Arc<Segment>> {
        let at = self.ranges.binary_search_by_key(&address, |range| range.start).ok()?;
        Some(self.ranges.remove(at).segment)
    }

    /// The longest piece at `address` that is reached in one way, at most `bytes` long.
    #[inline]
    pub fn piece(&self, address: u64, bytes: usize) -> Piece<'_> {
        let at = self.ranges.partition_point(|range| range.end <= address);
        let end = address.saturating_add(bytes as u64);
        match self.ranges.get(at) {
            Some(range) if range.start <= address => Piece {
                reach: Reach::Shared { segment: &range.segment, offset: (address - range.start) as usize },
                bytes: (end.min(range.end) - address) as usize,
            },
            Some(range) if range.start < end => {
                Piece { reach: self.by_fallback(), bytes: (range.start - address) as usize }
            }
            _ => Piece { reach: self.by_fallback(), bytes },
        }
    }

    fn by_fallback(&self) -> Reach<'_> {
        Reach::Fallback { memory: &self.fallback }
    }

    /// Whether a segment's memory was lost (SIGBUS): its owner made it impossible to reach.
    pub fn is_poisoned(&self) -> bool {
        self.ranges.iter().any(|range| range.segment.poisoned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn table() -> PageTable {
        PageTable::new(Arc::new(File::open("/proc/self/mem").unwrap()))
    }

    fn segment(bytes: usize) -> Arc<Segment> {
        Arc::new(Segment::create("test", bytes).unwrap().0)
    }

    fn describe(table: &PageTable, mut address: u64, mut bytes: usize) -> Vec<(Option<usize>, usize)> {
        let mut pieces = Vec::new();
        while bytes > 0 {
            let piece = table.piece(address, bytes);
            let offset = match piece.reach {
                Reach::Shared { offset, .. } => Some(offset),
                Reach::Fallback { .. } => None,
            };
            pieces.push((offset, piece.bytes));
            address += piece.bytes as u64;
            bytes -= piece.bytes;
        }
        pieces
    }

    #[test]
    fn a_range_is_cut_where_the_way_changes() {
        let mut table = table();
        table.map(0x20000, segment(8192)).unwrap();
        table.map(0x10000, segment(4096)).unwrap();
        assert_eq!(describe(&table, 0x10010, 16), [(Some(0x10), 16)]);
        assert_eq!(
            describe(&table, 0xfff0, 0x12020),
            [(None, 16), (Some(0), 4096), (None, 0xf000), (Some(0), 8192), (None, 16)]
        );
        assert_eq!(describe(&table, 0x21fff, 1), [(Some(8191), 1)]);
        assert!(table.unmap(0x20000).is_some());
        assert!(table.unmap(0x20000).is_none());
        assert_eq!(describe(&table, 0x20000, 8192), [(None, 8192)]);
    }

    #[test]
    fn overlaps_and_impossible_ranges_are_refused() {
        let mut table = table();
        table.map(0x10000, segment(8192)).unwrap();
        for address in [0, 0x11000, 0xf000, 0x10800, u64::MAX - 4095, 1 << 56] {
            assert_eq!(table.map(address, segment(8192)), Err(BadRange), "{address:#x}");
        }
        table.map(0x12000, segment(8192)).unwrap();
        table.map(0xe000, segment(8192)).unwrap();
    }
}
