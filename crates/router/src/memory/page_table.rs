//! The page table of one process: how the router reaches each byte of its address space.
//!
//! A range that the process mapped from one of its segments is *shared*: the router has the same memory mapped and
//! copies directly. Everything else is the *slow path*: reached through a `/proc/PID/mem` descriptor, by the vNIC's
//! copier thread only. The page table decides, never the memory region.
//!
//! A segment is mapped as a whole (`ibv_malloc`) or in *parts*: the pages of ordinary memory that a registration put
//! there. Neighbouring parts become one range, so that a heap registered piece by piece stays a short table; every
//! operation is logarithmic in its length. What takes ranges out takes [`STEP_RANGE_COUNT_MAX`] at a time, or about.
//!
//! A library that lies about where it mapped a segment only misdirects copies of its own memory.
use crate::memory::lease::SegmentLease;
use crate::memory::slow_path::TenantMemory;
use freeflow_protocol::library::Handle;
use freeflow_shm::Segment;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range as Span;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// End of the address space that a process can map (x86-64 with five levels of page tables has 2^56).
const ADDRESS_END: u64 = 1 << 56;
const PAGE_BYTES: u64 = 4096;

/// Ranges that one process can have: twice what the kernel lets it map by default.
const RANGE_COUNT_MAX: usize = 131_072;
/// Ranges that all processes of one vNIC can have.
pub const VNIC_RANGE_COUNT_MAX: u64 = 4 * RANGE_COUNT_MAX as u64;
/// Ranges that are taken out at a time, and ranges of a segment that others are granted.
const STEP_RANGE_COUNT_MAX: usize = 1024;

struct Range {
    end: u64,
    segment: Arc<Segment>,
    /// Where in the segment the range begins.
    offset: u64,
    /// Mapped by [`PageTable::map_part`].
    is_part: bool,
}

/// A segment that ranges name.
struct Known {
    segment: Arc<Segment>,
    /// Of its ranges.
    starts: BTreeSet<u64>,
    origin: Option<Origin>,
}

/// The session's name of a segment, and the state kept of it.
#[derive(Clone)]
pub struct Origin {
    pub handle: Handle,
    pub lease: Arc<SegmentLease>,
}

/// Where a byte lies: in which segment, and the stretch around it that lies there in one piece.
pub struct MappedRange<'a> {
    pub segment: &'a Arc<Segment>,
    pub origin: &'a Origin,
    pub addresses: Span<u64>,
    /// Where in the segment the stretch begins.
    pub offset: u64,
}

/// The address space of one process.
pub struct PageTable {
    /// By start, disjoint.
    ranges: BTreeMap<u64, Range>,
    /// Each segment that a range names, by its place in the router's memory.
    segments: HashMap<usize, Known>,
    /// Counts how often something was taken out: who looked a range up before must look again.
    revoked: u64,
    /// Ranges of all processes of the vNIC.
    vnic_range_count: Arc<AtomicU64>,
    /// Held since the session began; reads end of file once the process is gone.
    slow_path: Arc<dyn TenantMemory>,
}

/// How one piece of memory is reached.
pub enum Reach<'a> {
    Shared {
        segment: &'a Arc<Segment>,
        offset: usize,
    },
    SlowPath {
        memory: &'a Arc<dyn TenantMemory>,
    },
    /// No memory: reads as zeros, and forgets what is written (a null MR's).
    Void,
}

impl Reach<'_> {
    /// Whether its memory was lost (SIGBUS).
    pub fn is_poisoned(&self) -> bool {
        matches!(self, Self::Shared { segment, .. } if segment.poisoned())
    }
}

/// A piece that is reached in one way as a whole.
pub struct Piece<'a> {
    pub reach: Reach<'a>,
    pub bytes: usize,
}

/// Not a range that a mapping can have, or it overlaps another segment.
#[derive(Debug, PartialEq, Eq)]
pub struct BadRange;

/// Nobody else's as long as it is held.
fn name_of(segment: &Arc<Segment>) -> usize {
    Arc::as_ptr(segment).addr()
}

impl PageTable {
    pub fn new(slow_path: Arc<dyn TenantMemory>, vnic_range_count: Arc<AtomicU64>) -> Self {
        Self { ranges: BTreeMap::new(), segments: HashMap::new(), revoked: 0, vnic_range_count, slow_path }
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
        self.check_free(address, bytes)?;
        self.insert(address, Range { end: address + bytes, segment, offset: 0, is_part: false });
        Ok(())
    }

    /// The process unmapped the segment it had at `address`; it may have been taken out before.
    pub fn unmap(&mut self, address: u64, segment: &Arc<Segment>) -> Option<Arc<Segment>> {
        let range = self.ranges.get(&address)?;
        if range.is_part || !Arc::ptr_eq(&range.segment, segment) {
            return None;
        }
        self.remove(address).map(|range| range.segment)
    }

    /// A segment that is mapped gets its name.
    pub fn set_origin(&mut self, segment: &Arc<Segment>, origin: Origin) {
        if let Some(known) = self.known_mut(segment) {
            known.origin.get_or_insert(origin);
        }
    }

    /// The process mapped `bytes` of `segment`, from `offset` on, at `address`.
    pub fn map_part(&mut self, address: u64, segment: Arc<Segment>, offset: u64, bytes: u64) -> Result<(), BadRange> {
        self.check_free(address, bytes)?;
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= segment.bytes() as u64);
        if !inside || !offset.is_multiple_of(PAGE_BYTES) || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(BadRange);
        }
        let (mut start, mut first, mut end) = (address, offset, address + bytes);
        let continues =
            |range: &Range, at: u64| range.is_part && range.offset == at && Arc::ptr_eq(&range.segment, &segment);
        if self.ranges.get(&end).is_some_and(|after| continues(after, offset + bytes))
            && let Some(after) = self.remove(end)
        {
            end = after.end;
        }
        if let Some((&before_start, before)) = self.ranges.range(..address).next_back()
            && before.end == address
            && continues(before, offset.wrapping_sub(address - before_start))
            && let Some(before) = self.remove(before_start)
        {
            (start, first) = (before_start, before.offset);
        }
        self.insert(start, Range { end, segment, offset: first, is_part: true });
        Ok(())
    }

    /// How far of `address..end` can be taken back in one step.
    pub fn step_end(&self, address: u64, end: u64) -> u64 {
        self.ranges.range(address..end).nth(STEP_RANGE_COUNT_MAX).map_or(end, |(&start, _)| start)
    }

    /// The process is about to take back the parts of `address..end`: from now on they are reached by the slow
    /// path. Segments that are mapped as a whole are left alone.
    pub fn unmap_parts(&mut self, address: u64, end: u64) {
        let (mut reached, mut is_some) = (address, false);
        while let Some((start, range)) = self.first_at(reached)
            && start < end
        {
            reached = range.end;
            if !range.is_part {
                continue;
            }
            let (segment, origin) = (range.segment.clone(), self.known(&range.segment).and_then(|k| k.origin.clone()));
            if let Some(origin) = &origin {
                origin.lease.note_taken_back();
            }
            let Some(range) = self.remove(start) else { return };
            is_some = true;
            if start < address {
                let segment = range.segment.clone();
                self.insert(start, Range { end: address, segment, offset: range.offset, is_part: true });
            }
            if range.end > end {
                let offset = range.offset + (end - start);
                self.insert(end, Range { end: range.end, segment: range.segment, offset, is_part: true });
            }
            if let Some(origin) = origin {
                self.set_origin(&segment, origin);
            }
        }
        self.revoked += u64::from(is_some);
    }

    /// Whether some range is of this segment.
    pub fn has(&self, segment: &Arc<Segment>) -> bool {
        self.known(segment).is_some()
    }

    /// The place of a byte, if a segment that has a name holds it.
    pub fn place(&self, address: u64) -> Option<MappedRange<'_>> {
        let (start, range) = self.first_at(address).filter(|(start, _)| *start <= address)?;
        let origin = self.known(&range.segment)?.origin.as_ref()?;
        Some(MappedRange { segment: &range.segment, origin, addresses: start..range.end, offset: range.offset })
    }

    /// From the first to the last address at which something of a segment is mapped.
    pub fn extent(&self, segment: &Arc<Segment>) -> Option<Span<u64>> {
        let starts = &self.known(segment)?.starts;
        let last = self.ranges.get(starts.last()?)?;
        Some(*starts.first()?..last.end)
    }

    /// How much of a segment is mapped: what it costs to take it back.
    pub fn mapped_bytes(&self, segment: &Arc<Segment>) -> u64 {
        let starts = self.known(segment).into_iter().flat_map(|known| &known.starts);
        starts.filter_map(|start| self.ranges.get(start).map(|range| range.end - start)).sum()
    }

    /// Whether one more range of a segment can be taken out with all others in one step.
    pub fn has_few_ranges(&self, segment: &Arc<Segment>) -> bool {
        self.known(segment).is_none_or(|known| known.starts.len() < STEP_RANGE_COUNT_MAX)
    }

    /// The session's names of the segments of which parts lie between two addresses.
    pub fn parts_between(&self, address: u64, end: u64) -> BTreeSet<Handle> {
        let mut handles = BTreeSet::new();
        let (mut reached, mut before) = (address, None);
        while let Some((start, range)) = self.first_at(reached)
            && start < end
        {
            reached = range.end;
            let segment = Arc::as_ptr(&range.segment);
            if range.is_part && before.replace(segment) != Some(segment) {
                let origin = self.known(&range.segment).and_then(|known| known.origin.as_ref());
                handles.extend(origin.map(|origin| origin.handle));
            }
        }
        handles
    }

    /// Everything of a segment is reached by the slow path from now on.
    pub fn take_out(&mut self, segment: &Arc<Segment>) {
        let starts = self.known(segment).map(|known| known.starts.clone()).unwrap_or_default();
        self.revoked += u64::from(!starts.is_empty());
        for start in starts {
            self.remove(start);
        }
    }

    /// Changes whenever something is taken out by [`Self::unmap_parts`] or [`Self::take_out`].
    pub fn revoked(&self) -> u64 {
        self.revoked
    }

    fn check_free(&self, address: u64, bytes: u64) -> Result<(), BadRange> {
        // Relaxed: a count; only the worker adds.
        let is_full =
            self.ranges.len() >= RANGE_COUNT_MAX || self.vnic_range_count.load(Relaxed) >= VNIC_RANGE_COUNT_MAX;
        if is_full || !Self::is_mappable(address, bytes) {
            return Err(BadRange);
        }
        match self.first_at(address) {
            Some((start, _)) if start < address + bytes => Err(BadRange),
            _ => Ok(()),
        }
    }

    fn insert(&mut self, start: u64, range: Range) {
        let unknown = || Known { segment: range.segment.clone(), starts: BTreeSet::new(), origin: None };
        self.segments.entry(name_of(&range.segment)).or_insert_with(unknown).starts.insert(start);
        self.ranges.insert(start, range);
        // Relaxed: as in `check_free`.
        self.vnic_range_count.fetch_add(1, Relaxed);
    }

    fn known(&self, segment: &Arc<Segment>) -> Option<&Known> {
        self.segments.get(&name_of(segment))
    }

    fn known_mut(&mut self, segment: &Arc<Segment>) -> Option<&mut Known> {
        self.segments.get_mut(&name_of(segment))
    }

    fn remove(&mut self, start: u64) -> Option<Range> {
        let range = self.ranges.remove(&start)?;
        // Relaxed: as in `check_free`.
        self.vnic_range_count.fetch_sub(1, Relaxed);
        let known = self.known_mut(&range.segment)?;
        known.starts.remove(&start);
        if known.starts.is_empty() {
            self.segments.remove(&name_of(&range.segment));
        }
        Some(range)
    }

    /// The range that holds `address`, or else the next one.
    #[inline]
    fn first_at(&self, address: u64) -> Option<(u64, &Range)> {
        if let Some((&start, range)) = self.ranges.range(..=address).next_back()
            && range.end > address
        {
            return Some((start, range));
        }
        self.ranges.range(address..).next().map(|(&start, range)| (start, range))
    }

    /// The longest piece at `address` that is reached in one way, at most `bytes` long.
    #[inline]
    pub fn piece(&self, address: u64, bytes: usize) -> Piece<'_> {
        let end = address.saturating_add(bytes as u64);
        match self.first_at(address) {
            Some((start, range)) if start <= address => Piece {
                reach: Reach::Shared { segment: &range.segment, offset: (range.offset + (address - start)) as usize },
                bytes: (end.min(range.end) - address) as usize,
            },
            Some((start, _)) if start < end => Piece { reach: self.by_slow_path(), bytes: (start - address) as usize },
            _ => Piece { reach: self.by_slow_path(), bytes },
        }
    }

    /// The same for a part of a span.
    #[inline]
    pub fn piece_of(&self, span: &freeflow_engine::Span, address: u64, bytes: usize) -> Piece<'_> {
        if span.region.is_on_demand() {
            return Piece { reach: self.by_slow_path(), bytes };
        }
        self.piece(address, bytes)
    }

    pub fn slow_path(&self) -> &Arc<dyn TenantMemory> {
        &self.slow_path
    }

    /// Any of it, as if nothing were shared.
    pub fn by_slow_path(&self) -> Reach<'_> {
        Reach::SlowPath { memory: &self.slow_path }
    }

    /// Whether a segment's memory was lost (SIGBUS): its owner made it impossible to reach.
    pub fn is_poisoned(&self) -> bool {
        self.segments.values().any(|known| known.segment.poisoned())
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        // Relaxed: as in `check_free`.
        self.vnic_range_count.fetch_sub(self.ranges.len() as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn table() -> PageTable {
        table_of(&Arc::default())
    }

    fn table_of(vnic_range_count: &Arc<AtomicU64>) -> PageTable {
        PageTable::new(Arc::new(File::open("/proc/self/mem").unwrap()), vnic_range_count.clone())
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
                Reach::SlowPath { .. } | Reach::Void => None,
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
        let upper = segment(8192);
        table.map(0x20000, upper.clone()).unwrap();
        table.map(0x10000, segment(4096)).unwrap();
        assert_eq!(describe(&table, 0x10010, 16), [(Some(0x10), 16)]);
        assert_eq!(
            describe(&table, 0xfff0, 0x12020),
            [(None, 16), (Some(0), 4096), (None, 0xf000), (Some(0), 8192), (None, 16)]
        );
        assert_eq!(describe(&table, 0x21fff, 1), [(Some(8191), 1)]);
        assert!(table.unmap(0x20000, &segment(4096)).is_none());
        assert!(table.unmap(0x20000, &upper).is_some());
        assert!(table.unmap(0x20000, &upper).is_none());
        assert_eq!(describe(&table, 0x20000, 8192), [(None, 8192)]);
    }

    #[test]
    fn what_is_on_demand_is_reached_by_address() {
        let mut table = table();
        table.map_part(0x10000, segment(0x4000), 0, 0x4000).unwrap();
        let is_shared = |is_on_demand| {
            let region = freeflow_engine::SpanRegion::new(7, is_on_demand);
            let session = freeflow_engine::SessionId::VOID;
            let span = freeflow_engine::Span { session, region, address: 0x11000, length: 0x1000 };
            let piece = table.piece_of(&span, span.address, 0x800);
            (matches!(piece.reach, Reach::Shared { .. }), piece.bytes, region.index())
        };
        assert_eq!((is_shared(false), is_shared(true)), ((true, 0x800, 7), (false, 0x800, 7)));
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

    #[test]
    fn parts_become_one_and_are_cut() {
        let mut table = table();
        let arena = segment(0x10000);
        table.map_part(0x20000, arena.clone(), 0, 0x1000).unwrap();
        table.map_part(0x22000, arena.clone(), 0x2000, 0x1000).unwrap();
        table.map_part(0x21000, arena.clone(), 0x1000, 0x1000).unwrap();
        assert_eq!(table.ranges.len(), 1);
        assert_eq!(describe(&table, 0x1f000, 0x5000), [(None, 0x1000), (Some(0), 0x3000), (None, 0x1000)]);
        assert_eq!(table.map_part(0x22000, arena.clone(), 0x4000, 0x1000), Err(BadRange));
        assert_eq!(table.map_part(0x30000, arena.clone(), 0xf000, 0x2000), Err(BadRange));
        table.map_part(0x23000, arena.clone(), 0x8000, 0x2000).unwrap();
        assert_eq!(table.ranges.len(), 2);
        table.unmap_parts(0x21000, 0x24000);
        assert_eq!(describe(&table, 0x20000, 0x5000), [(Some(0), 0x1000), (None, 0x3000), (Some(0x9000), 0x1000)]);
        assert_eq!((table.mapped_bytes(&arena), table.mapped_bytes(&segment(4096))), (0x2000, 0));
        assert!(table.has(&arena));
        assert_eq!(table.unmap(0x20000, &arena).map(|_| ()), None);
        table.unmap_parts(0, u64::MAX);
        assert!(!table.has(&arena) && table.ranges.is_empty());
    }

    #[test]
    fn whole_segments_are_not_taken_back_by_parts() {
        let mut table = table();
        let whole = segment(0x2000);
        table.map(0x10000, whole.clone()).unwrap();
        table.unmap_parts(0x10000, 0x11000);
        assert_eq!(describe(&table, 0x10000, 0x2000), [(Some(0), 0x2000)]);
        assert!(table.unmap(0x10000, &whole).is_some());
    }

    #[test]
    fn a_hundred_thousand_parts_are_no_burden() {
        let mut table = table();
        let arena = segment(100_000 * 0x1000);
        for i in 0..100_000_u64 {
            let page = i * 0x1000;
            table.map_part(0x1000_0000 + 2 * page, arena.clone(), page, 0x1000).unwrap();
        }
        assert_eq!(table.ranges.len(), 100_000);
        for i in 0..100_000_u64 {
            let address = 0x1000_0000 + 2 * i * 0x1000;
            table.unmap_parts(address, address + 0x1000);
        }
        assert!(table.segments.is_empty());
    }

    /// As one library can have it: each segment but the last as a whole, then that one page by page.
    #[test]
    fn many_ranges_beside_many_segments_go_in_steps() {
        let (count, wholes) = (20_000_u64, 8_000_u64);
        let mut table = table();
        for i in 0..wholes {
            table.map(0x1_0000_0000 + 0x2000 * i, segment(4096)).unwrap();
        }
        let last = segment(count as usize * 0x1000);
        for i in 0..count {
            table.map_part(0x1000_0000 + 0x2000 * i, last.clone(), 0x1000 * i, 0x1000).unwrap();
        }
        assert!(!table.has_few_ranges(&last) && table.has_few_ranges(&segment(4096)));
        let (mut reached, mut steps) = (0, 0);
        while reached < ADDRESS_END {
            let (until, before) = (table.step_end(reached, ADDRESS_END), table.ranges.len());
            table.unmap_parts(reached, until);
            assert!(before - table.ranges.len() <= STEP_RANGE_COUNT_MAX + 1 && until > reached);
            (reached, steps) = (until, steps + 1);
        }
        assert!(!table.has(&last) && table.ranges.len() as u64 == wholes);
        assert!(steps <= (count + wholes) / STEP_RANGE_COUNT_MAX as u64 + 1, "{steps}");
    }

    #[test]
    fn only_what_was_taken_out_is_counted() {
        let mut table = table();
        let arena = segment(0x3000);
        table.unmap_parts(0x10000, 0x20000);
        table.take_out(&arena);
        table.map(0x30000, segment(4096)).unwrap();
        table.unmap_parts(0, ADDRESS_END);
        assert_eq!(table.revoked(), 0);
        table.map_part(0x10000, arena.clone(), 0, 0x1000).unwrap();
        table.map_part(0x12000, arena.clone(), 0x2000, 0x1000).unwrap();
        table.unmap_parts(0x11000, 0x12000);
        assert_eq!(table.revoked(), 0);
        table.unmap_parts(0x10000, 0x11000);
        assert_eq!(table.revoked(), 1);
        table.take_out(&arena);
        assert_eq!(table.revoked(), 2);
    }
    #[test]
    fn processes_of_a_vnic_share_its_ranges() {
        let count = Arc::default();
        let one = segment(8192);
        let mut first = table_of(&count);
        for address in [0x10000, 0x20000, 0x30000] {
            first.map_part(address, one.clone(), 0, 8192).unwrap();
        }
        first.unmap_parts(0x11000, 0x22000);
        assert_eq!(count.load(Relaxed), 2);
        // As if other processes had all but one of them.
        count.fetch_add(VNIC_RANGE_COUNT_MAX - 3, Relaxed);
        let mut second = table_of(&count);
        second.map_part(0x10000, one.clone(), 0, 4096).unwrap();
        assert_eq!(second.map_part(0x40000, one.clone(), 0, 4096), Err(BadRange));
        assert_eq!(second.map(0x40000, one.clone()), Err(BadRange));
        drop(first);
        second.map(0x40000, one).unwrap();
        drop(second);
        assert_eq!(count.load(Relaxed), VNIC_RANGE_COUNT_MAX - 3);
    }
}
