//! Memory that the program shares by a file of its own: System V and POSIX shared memory, memfds, anonymous shared
//! mappings, files on tmpfs.
//!
//! It is not moved: others have it mapped, too. The router maps the same file, and copies there as in an arena: a
//! *borrowed segment*. It stands for a stretch around a region, as far as the area of the process's map goes, so that
//! small regions next to each other are one segment. No peer is granted it. The router decides what can be borrowed;
//! what it refuses stays on the slow path.
//!
//! Invariant: before the router knows of a region, or of a change of one, each page that the region touches and that
//! the router's page table has in a borrowed segment shows that file's page in the process's own map.
//!
//! Invariant: a borrowed segment that no region touches is given up before the deregistration returns.
use crate::process_map::{Area, FileId, ProcessMap};
use crate::ranges::{NumberedRanges, TouchCounts, without};
use freeflow_client::{Handle, Session, file_system_of};
use freeflow_verbs::VerbsError;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Segments begin and end at multiples of this, or where their area does.
const STRETCH_BYTES: u64 = 64 << 20;
/// Borrowed segments of a process: each is one mapping of the router's.
const SEGMENT_COUNT_MAX: usize = 1024;
/// Files that are not asked for again.
const REFUSED_COUNT_MAX: usize = 64;
/// Of files that the router may map.
const FILE_SYSTEM: &str = "tmpfs";

struct BorrowedSegment {
    number: u32,
    session: Weak<Session>,
    handle: Handle,
    file: FileId,
    /// Its first address, and the place in the file that lies there.
    base: u64,
    offset: u64,
}

impl BorrowedSegment {
    fn session(&self) -> Option<Arc<Session>> {
        self.session.upgrade().filter(|session| !session.is_dead())
    }

    /// Whether an area shows, at `address`, the page that belongs there.
    fn is_at(&self, area: &Area, address: u64) -> bool {
        let shown = area.offset.wrapping_add(address - area.start);
        area.shared && area.file == self.file && shown == self.offset.wrapping_add(address - self.base)
    }
}

#[derive(Default)]
pub(crate) struct Borrowed {
    segments: Vec<BorrowedSegment>,
    /// Addresses that the router reaches in a borrowed segment, by the segment's number.
    ranges: NumberedRanges,
    last_number: u32,
    refused: VecDeque<FileId>,
    /// Whether files of a device can be borrowed.
    devices: BTreeMap<(u32, u32), bool>,
}

impl Borrowed {
    fn segment(&self, number: u32) -> Option<&BorrowedSegment> {
        self.segments.iter().find(|segment| segment.number == number)
    }

    fn ranges_of(&self, number: u32) -> Vec<Range<u64>> {
        self.ranges.iter().filter(|&(_, of)| of == number).map(|(range, _)| range).collect()
    }

    /// From now on the router reaches these addresses by the slow path.
    fn give_up(&mut self, range: Range<u64>, number: u32) {
        if let Some(session) = self.segment(number).and_then(BorrowedSegment::session) {
            let _ = session.unmap_part(range.clone());
        }
        self.ranges.remove(range);
    }

    /// Ends segments of which nothing is left, and those of sessions that have ended.
    fn tidy(&mut self) {
        let ranges = &mut self.ranges;
        self.segments.retain(|segment| {
            let of = |ranges: &NumberedRanges| ranges.iter().find(|&(_, number)| number == segment.number);
            let Some(session) = segment.session() else {
                while let Some((range, _)) = of(ranges) {
                    ranges.remove(range);
                }
                return false;
            };
            let is_used = of(ranges).is_some();
            if !is_used {
                let _ = session.destroy_segment(segment.handle);
            }
            is_used
        });
    }

    fn is_on_memory(&mut self, device: (u32, u32)) -> bool {
        *self.devices.entry(device).or_insert_with(|| {
            let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
            is_memory(device, &mounts)
        })
    }

    /// Has the router map the files under these pages that the program shares, as far as it has not yet. To be called
    /// after [`Self::forget_not_shown`], before the router knows of a region over them.
    /// `remapped` are the addresses that arenas have, `is_own` says whether a file is an arena's.
    pub fn borrow(
        &mut self,
        session: &Arc<Session>,
        pages: Range<u64>,
        maps: &mut Option<ProcessMap>,
        remapped: &NumberedRanges,
        is_own: &dyn Fn(FileId) -> bool,
    ) {
        if pages.is_empty() {
            return;
        }
        if maps.is_none() {
            *maps = ProcessMap::open();
        }
        let Some(maps) = &*maps else { return };
        let mut areas = Vec::new();
        maps.visit(pages.start, pages.end, &mut |area| {
            if area.shared && area.readable && area.writable && area.file != FileId::default() {
                areas.push(*area);
            }
            true
        });
        for area in areas {
            if is_own(area.file) || !self.may_be_borrowed(&area) {
                continue;
            }
            for gap in self.gaps(&area, &pages, remapped) {
                if !self.borrow_gap(session, &area, gap, &pages) {
                    return;
                }
            }
        }
    }

    fn may_be_borrowed(&mut self, area: &Area) -> bool {
        !self.refused.contains(&area.file) && self.is_on_memory(area.file.device)
    }

    /// The parts of an area that hold some of these pages, and of which nothing is in a segment yet.
    fn gaps(&self, area: &Area, pages: &Range<u64>, remapped: &NumberedRanges) -> Vec<Range<u64>> {
        let start = pages.start.max(area.start) & !(STRETCH_BYTES - 1);
        let end = pages.end.min(area.end).next_multiple_of(STRETCH_BYTES);
        let stretch = start.max(area.start)..end.min(area.end);
        let mut gaps = vec![stretch.clone()];
        let taken = self.ranges.within(stretch.clone()).into_iter().chain(remapped.within(stretch));
        for (hole, _) in taken {
            gaps = gaps.into_iter().flat_map(|gap| without(gap, &hole)).collect();
        }
        gaps.retain(|gap| gap.start < pages.end && pages.start < gap.end);
        gaps
    }

    /// False: no more can be borrowed now.
    fn borrow_gap(&mut self, session: &Arc<Session>, area: &Area, gap: Range<u64>, pages: &Range<u64>) -> bool {
        let needed = gap.start.max(pages.start)..gap.end.min(pages.end);
        for range in [gap, needed] {
            if self.segments.len() >= SEGMENT_COUNT_MAX {
                return false;
            }
            match session.borrow_segment(&range) {
                Ok(handle) => {
                    if session.map_part(handle, 0, range.clone()).is_err() {
                        // A segment of this library's lies there.
                        let _ = session.destroy_segment(handle);
                        self.refuse(area.file);
                        return true;
                    }
                    self.last_number += 1;
                    let (number, base) = (self.last_number, range.start);
                    let offset = area.offset.wrapping_add(base - area.start);
                    let session = Arc::downgrade(session);
                    self.segments.push(BorrowedSegment { number, session, handle, file: area.file, base, offset });
                    self.ranges.insert(range, number);
                    return true;
                }
                // A limit may leave room for what is needed alone.
                Err(VerbsError::NoMemory) => {}
                Err(VerbsError::DeviceFatal) => return false,
                Err(_) => {
                    self.refuse(area.file);
                    return true;
                }
            }
        }
        false
    }

    /// Gives up what the router has in borrowed segments of these pages and the program does not see there any more.
    pub fn forget_not_shown(&mut self, pages: Range<u64>, maps: &mut Option<ProcessMap>) {
        let ranges = self.ranges.within(pages);
        if ranges.is_empty() {
            return;
        }
        if maps.is_none() {
            *maps = ProcessMap::open();
        }
        for (range, number) in ranges {
            let gone = match (&*maps, self.segment(number)) {
                (Some(maps), Some(segment)) => not_shown(segment, maps, &range),
                _ => vec![range],
            };
            gone.into_iter().for_each(|piece| self.give_up(piece, number));
        }
        self.tidy();
    }

    /// Other memory is about to take these addresses, and the router to hear of that.
    pub fn forget(&mut self, pages: &Range<u64>) {
        let ranges = self.ranges.within(pages.clone());
        if !ranges.is_empty() {
            ranges.into_iter().for_each(|(range, number)| self.give_up(range, number));
            self.tidy();
        }
    }

    /// Gives up the segments among these pages that no region touches any more.
    pub fn give_back(&mut self, pages: Range<u64>, touches: &TouchCounts) {
        let mut numbers: Vec<u32> = self.ranges.within(pages).into_iter().map(|(_, number)| number).collect();
        numbers.dedup();
        if numbers.is_empty() {
            return;
        }
        for number in numbers {
            let ranges = self.ranges_of(number);
            if ranges.iter().all(|range| touches.untouched(range.clone()) == [range.clone()]) {
                ranges.into_iter().for_each(|range| self.give_up(range, number));
            }
        }
        self.tidy();
    }

    fn refuse(&mut self, file: FileId) {
        if self.refused.len() >= REFUSED_COUNT_MAX {
            self.refused.pop_front();
        }
        self.refused.push_back(file);
    }
}

/// Whether a device's files are the kernel's memory, by the text of `/proc/thread-self/mountinfo`. The mounts of
/// memfds, of System V and of anonymous memory are the kernel's own, and not there.
fn is_memory(device: (u32, u32), mounts: &str) -> bool {
    file_system_of(device, mounts).map_or(device.0 == 0, |kind| kind == FILE_SYSTEM)
}

/// The pieces of a range that show something else than the segment.
fn not_shown(segment: &BorrowedSegment, maps: &ProcessMap, range: &Range<u64>) -> Vec<Range<u64>> {
    let mut gone = vec![range.clone()];
    maps.visit(range.start, range.end, &mut |area| {
        let piece = range.start.max(area.start)..range.end.min(area.end);
        if segment.is_at(area, piece.start) {
            gone = std::mem::take(&mut gone).into_iter().flat_map(|left| without(left, &piece)).collect();
        }
        true
    });
    gone
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges, of one each")]
mod tests {
    use super::*;

    const MOUNTS: &str = "22 28 0:20 / /dev/shm rw,nosuid - tmpfs tmpfs rw,seclabel\n\
        23 28 0:21 / /proc rw shared:4 - proc proc rw\n\
        24 28 8:1 / / rw - ext4 /dev/sda1 rw\n\
        25 28 0:22 / /home/a\\040-\\040b rw - fuse.x x rw\n\
        26 28 0:23 / /dev/hugepages rw - hugetlbfs nodev rw\n";

    #[test]
    fn file_systems_of_memory_are_known() {
        let is = |major, minor| is_memory((major, minor), MOUNTS);
        assert!(is(0, 20), "tmpfs");
        assert!(is(0, 1), "a mount of the kernel's own");
        assert!(!is(0, 21) && !is(0, 22) && !is(0, 23) && !is(8, 1) && !is(8, 2));
    }

    fn segment(base: u64, offset: u64) -> BorrowedSegment {
        let file = FileId { device: (0, 1), inode: 7 };
        BorrowedSegment { number: 1, session: Weak::new(), handle: 1, file, base, offset }
    }

    #[test]
    fn a_page_is_shown_where_it_belongs_alone() {
        let file = FileId { device: (0, 1), inode: 7 };
        let rights = (true, true, false);
        let (readable, writable, executable) = rights;
        let area =
            Area { start: 0x10_000, end: 0x20_000, offset: 0x5000, file, readable, writable, executable, shared: true };
        let one = segment(0x12_000, 0x7000);
        assert!(one.is_at(&area, 0x12_000) && one.is_at(&area, 0x13_000));
        assert!(!segment(0x12_000, 0x8000).is_at(&area, 0x12_000), "another page");
        assert!(!one.is_at(&Area { shared: false, ..area }, 0x12_000), "a copy");
        let other = FileId { inode: 8, ..file };
        assert!(!one.is_at(&Area { file: other, ..area }, 0x12_000), "another file");
    }

    #[test]
    fn gaps_are_stretches_around_a_region_within_its_area() {
        let file = FileId { device: (0, 1), inode: 7 };
        let (start, end) = (STRETCH_BYTES / 2, 4 * STRETCH_BYTES);
        let area =
            Area { start, end, file, shared: true, readable: true, writable: true, offset: 0, executable: false };
        let (mut borrowed, nothing) = (Borrowed::default(), NumberedRanges::default());
        let pages = start + 0x5000..start + 0x6000;
        assert_eq!(borrowed.gaps(&area, &pages, &nothing), [start..STRETCH_BYTES]);
        borrowed.ranges.insert(start..STRETCH_BYTES, 1);
        borrowed.segments.push(segment(start, 0));
        assert!(borrowed.gaps(&area, &pages, &nothing).is_empty());
        let pages = start..STRETCH_BYTES + 0x1000;
        assert_eq!(borrowed.gaps(&area, &pages, &nothing), [STRETCH_BYTES..2 * STRETCH_BYTES]);
        assert_eq!(borrowed.gaps(&area, &(start..end), &nothing), [STRETCH_BYTES..end]);
        borrowed.forget(&(start + 0x1000..start + 0x2000));
        assert!(borrowed.ranges.within(start..end).is_empty(), "its session is gone");
    }
}
