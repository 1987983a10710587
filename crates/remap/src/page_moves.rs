//! Moving pages between private memory and arenas, while nobody writes them: in a freeze window
//! (`threads`).
use crate::late_writes::{LateWrites, LeavingPages, fill_new};
use crate::process_map::{Area, FileId, ProcessMap};
use crate::syscalls;
use crate::threads::{FreezeWindow, in_freeze_window};
use freeflow_client::{Freeze, Session};
use std::cell::Cell;
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest move in one window, bytes: a few milliseconds.
pub(crate) const MOVE_BYTES_MAX: u64 = 16 << 20;
/// The router freezes threads for a second. A move begins no later than this after it was asked to.
const BEGIN_WITHIN_NS: u64 = 300_000_000;
/// Nothing is put in place later than this: the process was stopped meanwhile, and its threads may
/// run.
const COMMIT_WITHIN_NS: u64 = 900_000_000;
/// `madvise(2)`, Linux 5.14.
const MADV_POPULATE_READ: i32 = 22;
const MADV_POPULATE_WRITE: i32 = 23;

/// One piece: pages of the process, and the same pages in an arena's mirror mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageMove {
    pub target: u64,
    pub mirror: *mut u8,
    pub bytes: usize,
    /// The rights of the memory once it is private.
    pub protection: i32,
    pub done: bool,
}

impl PageMove {
    pub fn range(&self) -> Range<u64> {
        self.target..self.target + self.bytes as u64
    }
}

fn at(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Where mirrors are mapped, if nothing is there: far from what the kernel chooses for programs. They come at any time,
/// by the thread of `commands`, and one of a few pages would fit where the program has just unmapped something.
const MIRRORS: Range<u64> = 0x6e00_0000_0000..0x6f00_0000_0000;
/// Mirrors begin at multiples of this, bytes.
const MIRROR_STEP: u64 = 2 << 20;

/// A hint to the kernel, another one each time.
fn next_mirror_address(bytes: usize) -> *mut c_void {
    static USED: AtomicU64 = AtomicU64::new(0);
    // Relaxed: under the table's lock; and two may be the same.
    let used = USED.fetch_add((bytes as u64).next_multiple_of(MIRROR_STEP), Ordering::Relaxed);
    at(MIRRORS.start + used % (MIRRORS.end - MIRRORS.start))
}

/// Maps an arena as a whole.
pub(crate) fn map_mirror(descriptor: BorrowedFd<'_>, bytes: usize) -> Option<*mut u8> {
    // SAFETY: a new mapping at an address of the kernel's choice. It is made without rights and
    // unlocked before it gets them, because under mlockall(MCL_FUTURE) all of an arena would be
    // allocated at once.
    unsafe {
        let hint = next_mirror_address(bytes);
        let mirror = syscalls::mmap(hint, bytes, libc::PROT_NONE, libc::MAP_SHARED, descriptor.as_raw_fd(), 0);
        if mirror == libc::MAP_FAILED {
            return None;
        }
        syscalls::munlock(mirror, bytes);
        if syscalls::mprotect(mirror, bytes, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            syscalls::munmap(mirror, bytes);
            return None;
        }
        mirror.expose_provenance();
        Some(mirror.cast())
    }
}

/// # Safety
/// `mirror` came from [`map_mirror`] with as many bytes, and is not used any more.
pub(crate) unsafe fn unmap_mirror(mirror: *mut u8, bytes: usize) {
    // SAFETY: the mapping is there and unused (this function's contract).
    unsafe { syscalls::munmap(mirror.cast(), bytes) };
}

/// Gives pages of an arena back to the system; they read as zeroes then. No remapped page is among
/// them.
pub(crate) fn punch(mirror: *mut u8, bytes: usize) {
    // SAFETY: pages of an arena of ours that nothing refers to any more.
    unsafe {
        if syscalls::madvise(mirror.cast(), bytes, libc::MADV_REMOVE) != 0 {
            // Sealed against writing for peers that may read it: zeroes all the same.
            mirror.write_bytes(0, bytes);
        }
    }
}

/// A second mapping of an arena's pages, present in the process, so that they are charged to its
/// container and not to the router. It moves to the target as it is, so the pages need no fault
/// there. `None`: there is no memory.
fn map_filled(piece: &PageMove) -> Option<*mut u8> {
    // SAFETY: inside an arena's mirror; an old size of 0 leaves it as it is. The new mapping is
    // ours alone.
    unsafe {
        let filled = syscalls::mremap(piece.mirror.cast(), 0, piece.bytes, libc::MREMAP_MAYMOVE, ptr::null_mut());
        if filled == libc::MAP_FAILED {
            return None;
        }
        if syscalls::madvise(filled, piece.bytes, MADV_POPULATE_WRITE) != 0 {
            if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
                syscalls::munmap(filled, piece.bytes);
                return None;
            }
            (0..piece.bytes).step_by(4096).for_each(|page| filled.cast::<u8>().add(page).write_volatile(0));
        }
        Some(filled.cast())
    }
}

/// Whether the pages of an area that are not there come without waiting for anybody: not so under
/// the program's own userfaultfd, which the access of `/proc/thread-self/mem` answers by an error.
/// One page stands for the area.
fn comes_at_once(piece: &PageMove) -> bool {
    let mut present = vec![0_u8; piece.bytes / 4096];
    // SAFETY: the vector has a byte for each page.
    if unsafe { libc::mincore(at(piece.target), piece.bytes, present.as_mut_ptr()) } != 0 {
        return false;
    }
    let Some(missing) = present.iter().position(|here| here & 1 == 0) else { return true };
    let Ok(memory) = std::fs::File::open("/proc/thread-self/mem") else { return false };
    std::os::unix::fs::FileExt::read_at(&memory, &mut [0], piece.target + missing as u64 * 4096).is_ok()
}

/// Makes sure that no page has to be waited for in the window.
fn populate_target(piece: &PageMove, how: i32) {
    // SAFETY: makes pages present, and changes nothing else. An error is found out later, or never.
    unsafe { syscalls::madvise(at(piece.target), piece.bytes, how) };
}

/// Whether a move may begin, and all areas are still `is_right`: until the window was open another
/// thread could change the map.
fn may_move(window: &FreezeWindow, maps: &ProcessMap, piece: &PageMove, is_right: &dyn Fn(&Area, u64) -> bool) -> bool {
    let is_unchanged = window.is_single_threaded() && !maps.has_query();
    (is_unchanged || is_all(maps, piece, is_right)) && window.is_younger(BEGIN_WITHIN_NS)
}

/// Whether a piece's target is mapped without a gap, and each area of it is right at the address
/// given with it.
pub(crate) fn is_all(maps: &ProcessMap, piece: &PageMove, is_right: &dyn Fn(&Area, u64) -> bool) -> bool {
    let end = piece.target + piece.bytes as u64;
    let mut reached = piece.target;
    maps.visit(piece.target, end, &mut |area| {
        let is_next = area.start <= reached && is_right(area, reached);
        reached = if is_next { area.end } else { reached };
        is_next
    });
    reached >= end
}

/// The result of an attempt to move pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    Done,
    /// Nothing has changed.
    NotNow,
    /// Nothing has changed, and the kernel never moves such memory.
    Never,
}

/// Puts private pages into their arena, and the arena's pages in their place, if all areas are
/// `is_right` at the address given with them. The private pages go `aside`, or away.
pub(crate) fn move_in(
    session: &Session,
    maps: &ProcessMap,
    piece: &PageMove,
    freeze: Freeze,
    aside: Option<&Aside>,
    is_right: &dyn Fn(&Area, u64) -> bool,
) -> Moved {
    if !comes_at_once(piece) {
        return Moved::NotNow;
    }
    let Some(filled) = map_filled(piece) else { return Moved::NotNow };
    // Regions touch these pages, and there is more in them.
    let mut late = if freeze == Freeze::ThreadsAndRouter { LateWrites::new(piece.bytes) } else { None };
    populate_target(piece, if late.is_some() { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ });
    if let (Some(late), None) = (&mut late, aside) {
        late.open_pipes();
    }
    let mut moved = Moved::NotNow;
    in_freeze_window(session, freeze, &mut |window| {
        if may_move(window, maps, piece, is_right) {
            moved = replace(piece, filled, aside, &mut late, window);
        }
    });
    if let (Moved::Done, Some(late)) = (moved, &mut late) {
        // SAFETY: the mirror has as many bytes.
        unsafe { late.carry_held(piece.mirror, true) };
    }
    if moved != Moved::Done {
        // SAFETY: made above, and still there.
        unsafe { syscalls::munmap(filled.cast(), piece.bytes) };
    }
    moved
}

/// After a call that moves a mapping has failed: memory that others manage or that is sealed, as
/// against a limit.
fn failed_move() -> Moved {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EINVAL | libc::EFAULT | libc::EPERM) => Moved::Never,
        _ => Moved::NotNow,
    }
}

/// In a window.
fn replace(
    piece: &PageMove,
    filled: *mut u8,
    aside: Option<&Aside>,
    late: &mut Option<LateWrites>,
    window: &FreezeWindow,
) -> Moved {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the target is readable private memory (checked just now, and only this thread runs),
    // `filled` an arena's own pages of the same length, apart from it. The new mapping has the
    // contents that the old one had.
    unsafe {
        if let Some(late) = late {
            late.hold(at(piece.target));
            let taken = late.take(at(piece.target).cast::<u8>());
            ptr::copy_nonoverlapping(taken.as_ptr(), filled, piece.bytes);
        } else {
            ptr::copy_nonoverlapping(at(piece.target).cast::<u8>(), filled, piece.bytes);
        }
        if !window.is_younger(COMMIT_WITHIN_NS) {
            return Moved::NotNow;
        }
        if let Some(aside) = aside
            && !aside.take(piece)
        {
            return failed_move();
        }
        let placed = syscalls::mremap(filled.cast(), piece.bytes, piece.bytes, flags, at(piece.target));
        if placed != libc::MAP_FAILED {
            if let Some(late) = late {
                late.carry_for_a_while(aside.map(|aside| aside.start.cast_const()), piece.mirror);
            }
            return Moved::Done;
        }
        let why = failed_move();
        if let Some(aside) = aside {
            aside.give_back(piece);
        }
        why
    }
}

/// Puts the pages that went aside back in the place of an arena's, with their contents, if all areas
/// are `is_right` at the address given with them. False: nothing has changed.
pub(crate) fn bring_back(
    session: &Session,
    maps: &ProcessMap,
    piece: &PageMove,
    freeze: Freeze,
    aside: &Aside,
    is_right: &dyn Fn(&Area, u64) -> bool,
) -> bool {
    let mut is_back = false;
    let Some(mut late) = LateWrites::new(piece.bytes) else { return false };
    in_freeze_window(session, freeze, &mut |window| {
        if may_move(window, maps, piece, is_right) {
            // SAFETY: the mirror shows the arena's pages; the pages aside are as many, private and
            // writable, and lie at the target afterwards.
            unsafe {
                ptr::copy_nonoverlapping(late.take(piece.mirror).as_ptr(), aside.start, piece.bytes);
                is_back = window.is_younger(COMMIT_WITHIN_NS) && aside.give_back(piece);
                if is_back {
                    late.carry_for_a_while(Some(piece.mirror), at(piece.target).cast());
                }
            }
        }
    });
    is_back
}

/// Maps an arena's pages at the target too, whatever was there: one step for every other thread.
///
/// # Safety
/// The mapping at the target may go.
unsafe fn duplicate(piece: &PageMove) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the target may be replaced (this function's contract). An old size of 0 leaves a
    // shared mapping in place and makes another of the same pages.
    unsafe { syscalls::mremap(piece.mirror.cast(), 0, piece.bytes, flags, at(piece.target)) != libc::MAP_FAILED }
}

/// Puts private memory in the place of an arena's pages, if they are still there, which `is_right`
/// says of each area. Marks those that were, and leaves those that are marked; false if not all.
/// `holds_more`: than regions.
pub(crate) fn move_out(
    session: &Session,
    maps: &ProcessMap,
    pieces: &mut [PageMove],
    holds_more: bool,
    freeze: Freeze,
    is_right: &dyn Fn(&PageMove, &Area, u64) -> bool,
) -> bool {
    for piece in pieces.iter().filter(|piece| !piece.done) {
        // SAFETY: makes pages of a mirror present, for reading.
        unsafe { syscalls::madvise(piece.mirror.cast(), piece.bytes, MADV_POPULATE_READ) };
    }
    let bytes_max = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
    let mut late = holds_more.then(|| LeavingPages::new(bytes_max)).flatten();
    in_freeze_window(session, freeze, &mut |window| {
        for piece in pieces.iter_mut().filter(|piece| !piece.done) {
            let one = *piece;
            piece.done = may_move(window, maps, &one, &|area, address| is_right(&one, area, address))
                && restore(maps, &one, late.as_mut());
        }
        if let Some(late) = &mut late {
            late.carry_all();
        }
    });
    pieces.iter().all(|piece| piece.done)
}

/// In a window. Mapped again in place, the memory becomes one area with its neighbours again: with
/// MAP_NORESERVE, if only that makes it so, as it is with memory of jemalloc. `late`: the mirror's
/// pages hold more than regions, and another process may see the new pages before they are filled.
fn restore(maps: &ProcessMap, piece: &PageMove, mut late: Option<&mut LeavingPages>) -> bool {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let target = at(piece.target).cast::<u8>();
    let mut is_first = true;
    // SAFETY: at the target lie the arena's pages (checked a moment ago, and only this thread
    // runs), or what was put there just now; the mirror shows the same pages.
    let mut make = |flags| unsafe {
        let contents = late
            .as_mut()
            .map(|late| if is_first { late.take(piece.mirror, piece.bytes) } else { late.look(target, piece.bytes) });
        is_first = false;
        let made = syscalls::mmap(target.cast(), piece.bytes, rights, flags, -1, 0) != libc::MAP_FAILED;
        if made && let Some(contents) = contents {
            fill_new(contents, target);
        }
        made
    };
    let other = flags | libc::MAP_NORESERVE;
    let made = make(flags)
        && (!has_neighbour(maps, piece)
            || is_joined(maps, piece)
            || make(other) && (is_joined(maps, piece) || make(flags)));
    // SAFETY: as above.
    unsafe {
        if !made {
            // Some kernels have unmapped it by then.
            duplicate(piece);
            return false;
        }
        if let Some(late) = late {
            late.add(piece.mirror, target, piece.bytes);
            // Nothing can be carried over once it has other rights.
            if piece.protection != rights {
                late.carry_all();
            }
        } else {
            populate_target(piece, MADV_POPULATE_WRITE);
            ptr::copy_nonoverlapping(piece.mirror, target, piece.bytes);
        }
        if piece.protection != rights {
            syscalls::mprotect(at(piece.target), piece.bytes, piece.protection);
        }
    }
    true
}

/// Whether there is private anonymous memory around it, or it can't be found out cheaply.
fn has_neighbour(maps: &ProcessMap, piece: &PageMove) -> bool {
    let end = piece.target + piece.bytes as u64;
    let mut found = !maps.has_query();
    if !found {
        maps.visit(piece.target - 1, end + 1, &mut |area| {
            let is_outside = area.start < piece.target || area.end > end;
            found |= is_outside && area.writable && !area.shared && area.file == FileId::default();
            true
        });
    }
    found
}

/// Whether the memory is one area with a neighbour. Also if that can't be found out cheaply.
fn is_joined(maps: &ProcessMap, piece: &PageMove) -> bool {
    let end = piece.target + piece.bytes as u64;
    let mut joined = !maps.has_query();
    if !joined {
        maps.visit(piece.target, end, &mut |area| {
            joined = area.start < piece.target || area.end > end;
            false
        });
    }
    joined
}

/// Gives the process its own copies of an arena's pages while other threads run: a private mapping
/// of the same file, and every page of it touched. To the allocator it is private memory, once the
/// arena's own pages are punched.
pub(crate) fn make_private(piece: &PageMove, descriptor: BorrowedFd<'_>, offset: u64) -> bool {
    map_private(piece, descriptor, offset) && {
        write_all(piece);
        true
    }
}

/// The first half of it: what is mapped shows the same bytes.
pub(crate) fn map_private(piece: &PageMove, descriptor: BorrowedFd<'_>, offset: u64) -> bool {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: at the target lie the arena's pages (checked a moment ago); what replaces them shows
    // the same bytes.
    unsafe {
        syscalls::mmap(at(piece.target), piece.bytes, rights, flags, descriptor.as_raw_fd(), offset as i64)
            != libc::MAP_FAILED
    }
}

/// The second half: each page becomes the process's own, without a change of its contents.
pub(crate) fn write_all(piece: &PageMove) {
    // SAFETY: makes pages present as a write would, and changes nothing else.
    let copied = unsafe { syscalls::madvise(at(piece.target), piece.bytes, MADV_POPULATE_WRITE) } == 0;
    let has_advice = copied || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL);
    for page in (0..piece.bytes as u64).step_by(4096).filter(|_| !copied) {
        if has_advice {
            // Some of it was unmapped meanwhile.
            // SAFETY: as above.
            unsafe { syscalls::madvise(at(piece.target + page), 4096, MADV_POPULATE_WRITE) };
            continue;
        }
        // SAFETY: mapped just now, and aligned. Other threads may write the word meanwhile: it is
        // put back only unchanged.
        let word = unsafe { AtomicU64::from_ptr(at(piece.target + page).cast()) };
        // Relaxed: it is about the write fault alone. Not an addition of 0, which the compiler
        // turns into a load.
        let mut before = word.load(Ordering::Relaxed);
        while let Err(now) = word.compare_exchange(before, before, Ordering::Relaxed, Ordering::Relaxed) {
            before = now;
        }
    }
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    if piece.protection != rights {
        // SAFETY: the range was mapped just now.
        unsafe { syscalls::mprotect(at(piece.target), piece.bytes, piece.protection) };
    }
}

/// Puts anonymous memory in the place of private copies, if all areas are `is_right` at the address
/// given with them. False: nothing has changed.
pub(crate) fn make_anonymous(
    session: &Session,
    maps: &ProcessMap,
    piece: &PageMove,
    is_right: &dyn Fn(&Area, u64) -> bool,
) -> bool {
    let Some(aside) = Aside::reserve(piece.bytes) else { return false };
    let mut done = false;
    in_freeze_window(session, Freeze::Threads, &mut |window| {
        done = may_move(window, maps, piece, is_right) && aside.exchange(maps, piece);
    });
    done
}

/// Addresses for pages that are about to be copied, or that come back later.
pub(crate) struct Aside {
    start: *mut u8,
    bytes: usize,
    /// The pages have left: the addresses may be anybody's by now.
    has_left: Cell<bool>,
}

// SAFETY: what lies there belongs to no thread; it is reached as raw bytes, under the table's lock.
unsafe impl Send for Aside {}

impl Aside {
    pub fn reserve(bytes: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { syscalls::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self { start: start.cast(), bytes, has_left: Cell::new(false) })
    }

    /// In a window. The target's pages go aside as they are.
    fn take(&self, piece: &PageMove) -> bool {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: only this thread runs, and puts something else in their place; the addresses aside
        // are ours.
        let taken =
            unsafe { syscalls::mremap(at(piece.target), piece.bytes, piece.bytes, flags, self.start.cast::<c_void>()) };
        taken != libc::MAP_FAILED
    }

    /// In a window. Pages that went aside go back, whatever is in their place.
    fn give_back(&self, piece: &PageMove) -> bool {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the pages have the contents that the program is to see there.
        let given =
            unsafe { syscalls::mremap(self.start.cast::<c_void>(), piece.bytes, piece.bytes, flags, at(piece.target)) };
        self.has_left.set(given != libc::MAP_FAILED);
        self.has_left.get()
    }

    /// In a window. The target's pages go aside, and new ones with their contents in their place.
    fn exchange(&self, maps: &ProcessMap, piece: &PageMove) -> bool {
        if !self.take(piece) {
            return false;
        }
        // SAFETY: the pages aside are ours; where they don't stay they go back as they were.
        let protect = |rights| unsafe { syscalls::mprotect(self.start.cast(), piece.bytes, rights) == 0 };
        let is_readable = piece.protection & libc::PROT_READ != 0 || protect(libc::PROT_READ);
        if is_readable && restore(maps, &PageMove { mirror: self.start, ..*piece }, None) {
            return true;
        }
        protect(piece.protection);
        self.give_back(piece);
        false
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if !self.has_left.get() {
            // SAFETY: reserved by `reserve`; what lies there is of no use to anybody.
            unsafe { syscalls::munmap(self.start.cast(), self.bytes) };
        }
    }
}

/// In a child of `fork`: its own copy of an arena's pages in their place. It has one thread. System
/// calls only.
///
/// # Safety
/// `bytes` bytes of an arena are mapped at `target`, and the mirror shows the same ones.
pub(crate) unsafe fn copy_for_child(target: u64, mirror: *const u8, bytes: usize, protection: i32) {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: this function's contract: all of the target is the arena's, and may be replaced.
    unsafe {
        if syscalls::mmap(at(target), bytes, rights, flags, -1, 0) == libc::MAP_FAILED {
            return;
        }
        // Each in one system call, where the kernel has it: what other threads of the parent write
        // meanwhile is copied too.
        syscalls::madvise(mirror.cast_mut().cast(), bytes, MADV_POPULATE_READ);
        syscalls::madvise(at(target), bytes, MADV_POPULATE_WRITE);
        ptr::copy_nonoverlapping(mirror, at(target).cast::<u8>(), bytes);
        if protection != rights {
            syscalls::mprotect(at(target), bytes, protection);
        }
    }
}
