//! Private copies of what was placed: left where threads could not be held, and made by order of the router when a zone is
//! withdrawn that peers were granted.
//!
//! A copy is a private mapping of the zone's file with every page written. That loses no write of other threads or of the
//! router, so a region may lie over it. But pages that the program throws away show the file again, which is empty then,
//! unless a peer still has it mapped and writes there. So such *exposed* copies become anonymous memory as soon as no
//! region touches them and threads can be held.
//!
//! Invariant: `copied` names the zones of all `copies`, also of those zones that are gone.
use super::PAGE_BYTES;
use super::areas::{Area, Maps};
use super::moving::{self, Move, WINDOW_BYTES};
use super::table::{Copied, Table, Zone, protection, stack_in_use};
use freeflow_client::{Handle, Session};
use freeflow_verbs::VerbsError;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Looks for pages of a zone that is withdrawn: the program may move some away meanwhile.
const LOOKS_MAX: u32 = 16;

impl Table {
    /// A piece of a zone was made private.
    pub(super) fn note_copy(&mut self, at: usize, piece: &Move, is_exposed: bool) {
        let zone = &mut self.zones[at];
        let Zone { number, serial, segment, file, .. } = *zone;
        zone.is_closed = true;
        match self.copied.iter_mut().find(|copied| copied.number == number) {
            Some(copied) => copied.is_exposed |= is_exposed,
            None => self.copied.push(Copied { number, serial, segment, file, is_exposed }),
        }
        let range = piece.target..piece.target + piece.bytes as u64;
        self.copies.remove(range.clone());
        self.copies.insert(range, number);
    }

    /// No copies are in this range any more.
    pub(super) fn drop_copies(&mut self, range: Range<u64>) {
        if self.copies.within(range.clone()).is_empty() {
            return;
        }
        self.copies.remove(range);
        let left: BTreeSet<u32> = self.copies.iter().map(|(_, number)| number).collect();
        self.copied.retain(|copied| left.contains(&copied.number));
    }

    /// The exposed copies among these pages that no region touches.
    pub(super) fn exposed_copies(&self, pages: Range<u64>) -> Vec<(Range<u64>, u32)> {
        if !self.copied.iter().any(|copied| copied.is_exposed) {
            return Vec::new();
        }
        let is_exposed = |number| self.copied.iter().any(|copied| copied.number == number && copied.is_exposed);
        let copies = self.copies.within(pages).into_iter().filter(|(_, number)| is_exposed(*number));
        copies.flat_map(|(range, number)| self.touches.untouched(range).into_iter().map(move |r| (r, number))).collect()
    }

    /// Makes copies anonymous memory. False: not all of them, now.
    pub(super) fn restore_copies(&mut self, session: &Session, maps: &Maps, range: Range<u64>, number: u32) -> bool {
        let Some(file) = self.copied.iter().find(|copied| copied.number == number).map(|copied| copied.file) else {
            return true;
        };
        let is_copy = |area: &Area| !area.shared && area.file == file;
        let mut pieces = Vec::new();
        maps.visit(range.start, range.end, &mut |area| {
            let (mut from, end) = (range.start.max(area.start), range.end.min(area.end));
            while is_copy(area) && from < end {
                let to = end.min(from + WINDOW_BYTES);
                pieces.push((from..to, protection(area)));
                from = to;
            }
            true
        });
        let stack = stack_in_use();
        let mut left = Vec::new();
        for (piece, protection) in pieces {
            let is_stack = piece.start < stack.end && stack.start < piece.end;
            let bytes = (piece.end - piece.start) as usize;
            let one = Move { target: piece.start, alias: std::ptr::null_mut(), bytes, protection, done: false };
            let is_right = |area: &Area, _| is_copy(area);
            if is_stack || !moving::is_possible() || !moving::make_anonymous(session, maps, &one, &is_right) {
                left.push(piece);
            }
        }
        let all = left.is_empty();
        if all {
            self.drop_copies(range);
        } else {
            self.copies.remove(range);
            left.into_iter().for_each(|piece| self.copies.insert(piece, number));
        }
        all
    }

    /// The router has taken a zone out of its table, because peers that were granted it shall not reach it any more: the
    /// process gets its own copies. False: some of it is still shown.
    pub fn take_back(&mut self, session: &Session, segment: Handle) -> bool {
        let is_it = |zone: &Zone| zone.serial == session.serial() && zone.segment == segment;
        let known = self.zones.iter().position(is_it);
        let descriptor = match session.reopen_segment(segment) {
            Ok(descriptor) => descriptor,
            // A zone that is gone, as the router's answer to that was under way.
            Err(VerbsError::NotFound) if known.is_none() => return true,
            Err(_) => return false,
        };
        let Some(maps) = Maps::open() else { return false };
        let mut hold = |body: &mut dyn FnMut()| moving::with_others_held(session, body);
        if let Some(at) = known {
            return self.make_all_private(&maps, at, descriptor.as_fd(), &mut hold);
        }
        // Of `ibv_malloc`, which goes on giving the same addresses out.
        let Some(at) = self.adopt(session, segment, descriptor.as_fd()) else { return false };
        let done = self.make_all_private(&maps, at, descriptor.as_fd(), &mut hold);
        let zone = self.zones.swap_remove(at);
        // SAFETY: made by `map_alias`, and used for nothing else.
        unsafe { moving::unmap_alias(zone.alias, zone.bytes as usize) };
        done
    }

    /// A zone for a segment that is none, until it is taken back.
    fn adopt(&mut self, session: &Session, segment: Handle, file: BorrowedFd<'_>) -> Option<usize> {
        // SAFETY: all zeroes are valid; the struct is ours to write.
        let bytes = unsafe {
            let mut about: libc::stat = std::mem::zeroed();
            if libc::fstat(file.as_raw_fd(), &raw mut about) != 0 {
                return None;
            }
            about.st_size as u64
        };
        self.add_zone(session, segment, file, 0..bytes, true)
    }

    /// `hold` runs what it is given once, while no other thread changes the map, if that can be.
    fn make_all_private(
        &mut self,
        maps: &Maps,
        at: usize,
        descriptor: BorrowedFd<'_>,
        hold: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> bool {
        self.zones[at].is_closed = true;
        let mut looks = 0;
        loop {
            let mut pieces = shown_of(&self.zones[at], maps);
            if pieces.is_empty() {
                break;
            }
            if looks == LOOKS_MAX {
                return false;
            }
            looks += 1;
            let zone = &self.zones[at];
            hold(&mut || {
                for piece in &mut pieces {
                    let one = *piece;
                    piece.done = moving::is_all(maps, &one, &|area, address| zone.shows(&one, area, address))
                        && moving::map_private(&one, descriptor, zone.offset_of(&one));
                }
            });
            for piece in pieces.iter().filter(|piece| piece.done) {
                moving::write_all(piece);
                self.note_copy(at, piece, true);
            }
        }
        // Where it was put, nothing of it is left, whoever took it away.
        let number = self.zones[at].number;
        let gone: Vec<_> = self.placed.iter().filter(|(_, of)| *of == number).map(|(range, _)| range).collect();
        gone.into_iter().for_each(|range| self.placed.remove(range));
        let zone = &mut self.zones[at];
        zone.placed_bytes = 0;
        moving::punch(zone.alias, zone.bytes as usize);
        true
    }
}

/// All that the process has mapped of a zone, but the library's own mapping of it.
fn shown_of(zone: &Zone, maps: &Maps) -> Vec<Move> {
    let mut shown = Vec::new();
    maps.visit(PAGE_BYTES, 1 << 56, &mut |area| {
        if zone.is_shown_in(area) {
            let alias = zone.alias.wrapping_add(area.offset as usize);
            let bytes = (area.end - area.start) as usize;
            shown.push(Move { target: area.start, alias, bytes, protection: protection(area), done: false });
        }
        true
    });
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remap::areas::Identity;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::ptr;

    const PAGE: usize = PAGE_BYTES as usize;
    const PAGES: usize = 8;

    fn map(bytes: usize, flags: i32, descriptor: i32) -> *mut u8 {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address =
            unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        address.expose_provenance();
        address.cast()
    }

    fn area_at(maps: &Maps, address: *mut u8) -> Area {
        let mut found = None;
        maps.visit(address.addr() as u64, address.addr() as u64 + 1, &mut |area| {
            found = Some(*area);
            false
        });
        found.unwrap()
    }

    /// A table with one zone, all of whose pages are placed, and filled with 7.
    struct Placed {
        table: Table,
        maps: Maps,
        descriptor: OwnedFd,
        target: *mut u8,
    }

    impl Placed {
        fn new() -> Self {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let bytes = PAGES * PAGE;
            // SAFETY: the name is a C string; the descriptor is new.
            let descriptor = unsafe {
                let descriptor = libc::memfd_create(c"freeflow-test".as_ptr(), flags);
                assert!(descriptor >= 0 && libc::ftruncate(descriptor, bytes as i64) == 0);
                OwnedFd::from_raw_fd(descriptor)
            };
            let alias = moving::map_alias(descriptor.as_fd(), bytes).unwrap();
            let target = map(bytes, libc::MAP_SHARED, descriptor.as_raw_fd());
            // SAFETY: mapped just now.
            unsafe { target.write_bytes(7, bytes) };
            let maps = Maps::open().unwrap();
            let base = target.addr() as u64;
            let mut table = Table::new(0);
            table.zones.push(Zone {
                number: 1,
                serial: 1,
                segment: 1,
                base,
                stretch_bytes: bytes as u64,
                bytes: bytes as u64,
                alias,
                file: area_at(&maps, alias).file,
                placed_bytes: bytes as u64,
                is_closed: false,
                is_own: true,
                is_shown_elsewhere: false,
            });
            table.placed.insert(base..base + bytes as u64, 1);
            Self { table, maps, descriptor, target }
        }

        fn make_private(&mut self) -> bool {
            self.table.make_all_private(&self.maps, 0, self.descriptor.as_fd(), &mut |body| body())
        }

        fn page(&self, at: usize) -> u8 {
            // SAFETY: inside the target.
            unsafe { self.target.add(at * PAGE + 5).read_volatile() }
        }

        /// What a peer does that has the zone mapped still.
        fn scribble(&self) {
            // SAFETY: the alias maps as many bytes of the same file.
            unsafe { self.table.zones[0].alias.write_bytes(99, PAGES * PAGE) };
        }
    }

    #[test]
    fn a_zone_that_is_taken_back_leaves_copies_that_nobody_else_reaches() {
        for is_sealed in [false, true] {
            let mut placed = Placed::new();
            if is_sealed {
                // SAFETY: the descriptor is open.
                let sealed =
                    unsafe { libc::fcntl(placed.descriptor.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE) };
                assert_eq!(sealed, 0);
            }
            assert!(placed.make_private());
            let area = area_at(&placed.maps, placed.target);
            assert!(!area.shared && area.writable && area.file == placed.table.zones[0].file);
            assert!(placed.table.placed.is_empty() && placed.table.zones[0].placed_bytes == 0);
            assert!(placed.table.zones[0].is_closed);
            // What is thrown away is zero, also where the file could not be cut.
            // SAFETY: inside the target.
            unsafe { libc::madvise(placed.target.cast(), PAGE, libc::MADV_DONTNEED) };
            assert_eq!(placed.page(0), 0);
            placed.scribble();
            assert!((1..PAGES).all(|at| placed.page(at) == 7));
        }
    }

    #[test]
    fn what_the_program_moved_or_took_away_is_found() {
        let mut placed = Placed::new();
        let elsewhere = map(2 * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        // SAFETY: pages of the target, which go over a mapping that is not used otherwise; rights of others.
        unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let moved = libc::mremap(placed.target.cast(), 2 * PAGE, 2 * PAGE, flags, elsewhere.cast::<libc::c_void>());
            assert_eq!(moved, elsewhere.cast());
            libc::mprotect(placed.target.add(4 * PAGE).cast(), PAGE, libc::PROT_READ);
            libc::munmap(placed.target.add(6 * PAGE).cast(), PAGE);
        }
        assert!(placed.make_private());
        placed.scribble();
        // SAFETY: moved there.
        assert_eq!(unsafe { elsewhere.add(PAGE).read_volatile() }, 7);
        assert!([2, 3, 4, 5, 7].into_iter().all(|at| placed.page(at) == 7));
        assert!(!area_at(&placed.maps, placed.target.wrapping_add(4 * PAGE)).writable);
        assert!(placed.table.placed.is_empty());
    }

    #[test]
    fn exposed_copies_are_owed_until_no_region_touches_them() {
        let mut table = Placed::new().table;
        let file = Identity { device: (0, 1), inode: 77 };
        let copied = |number, is_exposed| Copied { number, serial: 1, segment: number, file, is_exposed };
        table.copied = vec![copied(1, true), copied(2, false)];
        table.copies.insert(0x1000..0x5000, 1);
        table.copies.insert(0x5000..0x9000, 2);
        table.note(1, 1, 0x2000, 0x1000);
        assert_eq!(table.exposed_copies(0..1 << 56), [(0x1000..0x2000, 1), (0x3000..0x5000, 1)]);
        table.drop_copies(0..0x5000);
        assert_eq!(table.copied.iter().map(|copied| copied.number).collect::<Vec<_>>(), [2]);
        assert!(table.unnote(1, 0x2000, 0x1000) && table.exposed_copies(0..1 << 56).is_empty());
    }
}
