//! Private copies of what was remapped: left where threads could not be frozen, and made by command
//! of the router when an arena is revoked that peers were granted.
//!
//! A copy is a private mapping of the arena's file with every page written. That loses no write of
//! other threads or of the router, so a region may lie over it. But pages that the program throws
//! away show the file again, which is empty then, unless a peer still has it mapped and writes
//! there. So such *exposed* copies become anonymous memory as soon as no region touches them and
//! threads can be frozen.
//!
//! Invariant: `copied` names the arenas of all `copies`, also of those arenas that are gone.
use crate::page_moves::{self, MOVE_BYTES_MAX, PageMove};
use crate::process_map::{Area, ProcessMap};
use crate::ranges::PAGE_BYTES;
use crate::stale::ALL;
use crate::table::{Arena, Copied, Table, protection};
use crate::threads::{is_window_possible, stack_in_use, with_others_frozen};
use freeflow_client::{Handle, Session};
use freeflow_verbs::VerbsError;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Looks for pages of an arena that is revoked: the program may move some away meanwhile.
const LOOKS_MAX: u32 = 16;

impl Table {
    /// A piece of an arena was made private.
    pub(super) fn note_copy(&mut self, at: usize, piece: &PageMove, is_exposed: bool) {
        let arena = &mut self.arenas[at];
        let Arena { number, serial, segment, file, .. } = *arena;
        arena.is_closed = true;
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
    pub(super) fn restore_copies(
        &mut self,
        session: &Session,
        maps: &ProcessMap,
        range: Range<u64>,
        number: u32,
    ) -> bool {
        let Some(file) = self.copied.iter().find(|copied| copied.number == number).map(|copied| copied.file) else {
            return true;
        };
        let is_copy = |area: &Area| !area.shared && area.file == file;
        let mut pieces = Vec::new();
        maps.visit(range.start, range.end, &mut |area| {
            let (mut from, end) = (range.start.max(area.start), range.end.min(area.end));
            while is_copy(area) && from < end {
                let to = end.min(from + MOVE_BYTES_MAX);
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
            let one = PageMove { target: piece.start, mirror: std::ptr::null_mut(), bytes, protection, done: false };
            let is_right = |area: &Area, _| is_copy(area);
            if is_stack || !is_window_possible() || !page_moves::make_anonymous(session, maps, &one, &is_right) {
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

    /// The router has taken an arena out of its table, because peers that were granted it shall not
    /// reach it any more: the process gets its own copies. False: some of it is still shown.
    pub fn revoke(&mut self, session: &Session, segment: Handle) -> bool {
        let is_match = |arena: &Arena| arena.serial == session.serial() && arena.segment == segment;
        let known = self.arenas.iter().position(is_match);
        let descriptor = match session.reopen_segment(segment) {
            Ok(descriptor) => descriptor,
            // An arena that is gone, as the router's answer to that was under way.
            Err(VerbsError::NotFound) if known.is_none() => return true,
            Err(_) => return false,
        };
        let Some(maps) = ProcessMap::open() else { return false };
        let mut hold = |body: &mut dyn FnMut()| with_others_frozen(session, body);
        if let Some(at) = known {
            return self.make_all_private(&maps, at, descriptor.as_fd(), &mut hold);
        }
        // Of `ibv_malloc`, which goes on giving the same addresses out.
        let Some(at) = self.adopt(session, segment, descriptor.as_fd()) else { return false };
        let done = self.make_all_private(&maps, at, descriptor.as_fd(), &mut hold);
        let arena = self.arenas.swap_remove(at);
        // SAFETY: it was made for this, and is used for nothing else.
        unsafe { arena.unmap() };
        done
    }

    /// An arena for a segment that is none, until it is taken back.
    fn adopt(&mut self, session: &Session, segment: Handle, file: BorrowedFd<'_>) -> Option<usize> {
        // SAFETY: all zeroes are valid; the struct is ours to write.
        let bytes = unsafe {
            let mut about: libc::stat = std::mem::zeroed();
            if libc::fstat(file.as_raw_fd(), &raw mut about) != 0 {
                return None;
            }
            about.st_size as u64
        };
        self.add_arena(session, segment, file, 0..bytes, true)
    }

    /// `hold` runs what it is given once, while no other thread changes the map, if that can be.
    fn make_all_private(
        &mut self,
        maps: &ProcessMap,
        at: usize,
        descriptor: BorrowedFd<'_>,
        hold: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> bool {
        self.arenas[at].is_closed = true;
        let mut looks = 0;
        loop {
            let Some(mut pieces) = shown_of(&self.arenas[at], maps) else { return false };
            if pieces.is_empty() {
                break;
            }
            if looks == LOOKS_MAX {
                return false;
            }
            looks += 1;
            let arena = &self.arenas[at];
            hold(&mut || {
                for piece in &mut pieces {
                    let one = *piece;
                    piece.done = page_moves::is_all(maps, &one, &|area, address| arena.shows(&one, area, address))
                        && page_moves::map_private(&one, descriptor, arena.offset_of(&one));
                }
            });
            for piece in pieces.iter().filter(|piece| piece.done) {
                page_moves::write_all(piece);
                self.note_copy(at, piece, true);
            }
        }
        // Where it was put, nothing of it is left, whoever took it away.
        let number = self.arenas[at].number;
        let gone: Vec<_> = self.remapped.iter().filter(|(_, of)| *of == number).map(|(range, _)| range).collect();
        gone.into_iter().for_each(|range| self.remapped.remove(range));
        let arena = &mut self.arenas[at];
        arena.remapped_bytes = 0;
        page_moves::punch(arena.mirror, arena.bytes as usize);
        // The command may come after the deregistration that it is for: nothing else asks for those.
        self.has_pending |= !self.exposed_copies(ALL).is_empty();
        true
    }
}

/// All that the process has mapped of an arena, but the library's own mapping of it. `None`: its map
/// can't be read.
fn shown_of(arena: &Arena, maps: &ProcessMap) -> Option<Vec<PageMove>> {
    let mut shown = Vec::new();
    let is_read = maps.visit(PAGE_BYTES, 1 << 56, &mut |area| {
        if arena.is_shown_in(area) {
            let mirror = arena.mirror.wrapping_add(area.offset as usize);
            let bytes = (area.end - area.start) as usize;
            shown.push(PageMove { target: area.start, mirror, bytes, protection: protection(area), done: false });
        }
        true
    });
    is_read.then_some(shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_map::FileId;
    use crate::ranges::RegionSpan;
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

    fn area_at(maps: &ProcessMap, address: *mut u8) -> Area {
        maps.area_at(address.addr() as u64).unwrap()
    }

    /// A table with one arena, all of whose pages are remapped, and filled with 7.
    struct Placed {
        table: Table,
        maps: ProcessMap,
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
            let mirror = page_moves::map_mirror(descriptor.as_fd(), bytes).unwrap();
            let target = map(bytes, libc::MAP_SHARED, descriptor.as_raw_fd());
            // SAFETY: mapped just now.
            unsafe { target.write_bytes(7, bytes) };
            let maps = ProcessMap::open().unwrap();
            let base = target.addr() as u64;
            let mut table = Table::new(0);
            table.arenas.push(Arena {
                number: 1,
                serial: 1,
                segment: 1,
                base,
                stretch_bytes: bytes as u64,
                bytes: bytes as u64,
                mirror,
                file: area_at(&maps, mirror).file,
                remapped_bytes: bytes as u64,
                is_closed: false,
                is_exclusive: true,
                is_shown_elsewhere: false,
                descriptor: None,
            });
            table.remapped.insert(base..base + bytes as u64, 1);
            Self { table, maps, descriptor, target }
        }

        fn make_private(&mut self) -> bool {
            self.table.make_all_private(&self.maps, 0, self.descriptor.as_fd(), &mut |body| body())
        }

        fn page(&self, at: usize) -> u8 {
            // SAFETY: inside the target.
            unsafe { self.target.add(at * PAGE + 5).read_volatile() }
        }

        /// Writes as a peer that has the arena mapped still.
        fn scribble(&self) {
            // SAFETY: the mirror maps as many bytes of the same file.
            unsafe { self.table.arenas[0].mirror.write_bytes(99, PAGES * PAGE) };
        }
    }

    #[test]
    fn a_zone_that_is_taken_back_leaves_copies_that_nobody_else_reaches() {
        for is_sealed in [false, true] {
            let mut remapped = Placed::new();
            if is_sealed {
                // SAFETY: the descriptor is open.
                let sealed = unsafe {
                    libc::fcntl(remapped.descriptor.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE)
                };
                assert_eq!(sealed, 0);
            }
            assert!(remapped.make_private());
            let area = area_at(&remapped.maps, remapped.target);
            assert!(!area.shared && area.writable && area.file == remapped.table.arenas[0].file);
            assert!(remapped.table.remapped.is_empty() && remapped.table.arenas[0].remapped_bytes == 0);
            assert!(remapped.table.arenas[0].is_closed);
            // Discarded pages are zero, also where the file could not be cut.
            // SAFETY: inside the target.
            unsafe { libc::madvise(remapped.target.cast(), PAGE, libc::MADV_DONTNEED) };
            assert_eq!(remapped.page(0), 0);
            remapped.scribble();
            assert!((1..PAGES).all(|at| remapped.page(at) == 7));
        }
    }

    #[test]
    fn what_the_program_moved_or_took_away_is_found() {
        let mut remapped = Placed::new();
        let elsewhere = map(2 * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        // SAFETY: pages of the target, which go over a mapping that is not used otherwise; rights
        // of others.
        unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let moved =
                libc::mremap(remapped.target.cast(), 2 * PAGE, 2 * PAGE, flags, elsewhere.cast::<libc::c_void>());
            assert_eq!(moved, elsewhere.cast());
            libc::mprotect(remapped.target.add(4 * PAGE).cast(), PAGE, libc::PROT_READ);
            libc::munmap(remapped.target.add(6 * PAGE).cast(), PAGE);
        }
        assert!(remapped.make_private());
        remapped.scribble();
        // SAFETY: moved there.
        assert_eq!(unsafe { elsewhere.add(PAGE).read_volatile() }, 7);
        assert!([2, 3, 4, 5, 7].into_iter().all(|at| remapped.page(at) == 7));
        assert!(!area_at(&remapped.maps, remapped.target.wrapping_add(4 * PAGE)).writable);
        assert!(remapped.table.remapped.is_empty());
    }

    #[test]
    fn exposed_copies_are_owed_until_no_region_touches_them() {
        let mut table = Placed::new().table;
        let file = FileId { device: (0, 1), inode: 77 };
        let copied = |number, is_exposed| Copied { number, serial: 1, segment: number, file, is_exposed };
        table.copied = vec![copied(1, true), copied(2, false)];
        table.copies.insert(0x1000..0x5000, 1);
        table.copies.insert(0x5000..0x9000, 2);
        table.add_region(1, RegionSpan { owner: 1, start: 0x2000, length: 0x1000, is_on_demand: false });
        assert_eq!(table.exposed_copies(0..1 << 56), [(0x1000..0x2000, 1), (0x3000..0x5000, 1)]);
        table.drop_copies(0..0x5000);
        assert_eq!(table.copied.iter().map(|copied| copied.number).collect::<Vec<_>>(), [2]);
        assert!(
            table.remove_region(RegionSpan { owner: 1, start: 0x2000, length: 0x1000, is_on_demand: false })
                && table.exposed_copies(0..1 << 56).is_empty()
        );
    }
}
