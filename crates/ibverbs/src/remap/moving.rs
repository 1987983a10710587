//! Moving pages between private memory and zones, while nobody writes them.
//!
//! In the *window* the calling thread has its signals blocked, and all other threads stand still (or there are none).
//! Nothing in it allocates, locks, logs or calls what the dynamic linker has not bound yet.
use super::areas::{Area, Maps};
use super::calls;
use super::orders;
use freeflow_client::Session;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Moved in one window: a few milliseconds.
pub(crate) const WINDOW_BYTES: u64 = 16 << 20;
/// The router holds threads for a second. So long after it was asked to, nothing is begun any more,
const BEGIN_WITHIN_NS: u64 = 300_000_000;
/// and after so long nothing is put in place: the process was stopped meanwhile, and its threads may run.
const COMMIT_WITHIN_NS: u64 = 900_000_000;
/// After threads could not be held, this long it is not tried again.
const PATIENCE_NS: u64 = 1_000_000_000;
/// `madvise(2)`, Linux 5.14.
const MADV_POPULATE_READ: i32 = 22;
const MADV_POPULATE_WRITE: i32 = 23;

/// One piece: pages of the process, and their place in a zone's alias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub target: u64,
    pub alias: *mut u8,
    pub bytes: usize,
    /// Restored memory gets these rights.
    pub protection: i32,
    pub done: bool,
}

fn at(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

pub(crate) fn now_ns() -> u64 {
    crate::cq_ex::clock_ns(libc::CLOCK_MONOTONIC)
}

/// Maps a zone as a whole, where the kernel likes.
pub(crate) fn map_alias(descriptor: BorrowedFd<'_>, bytes: usize) -> Option<*mut u8> {
    // SAFETY: a new mapping at an address of the kernel's choice. It is made without rights and unlocked before it gets
    // them, because under mlockall(MCL_FUTURE) all of a zone would be allocated at once.
    unsafe {
        let alias = calls::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, libc::MAP_SHARED, descriptor.as_raw_fd(), 0);
        if alias == libc::MAP_FAILED {
            return None;
        }
        calls::munlock(alias, bytes);
        if calls::mprotect(alias, bytes, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            calls::munmap(alias, bytes);
            return None;
        }
        alias.expose_provenance();
        Some(alias.cast())
    }
}

/// # Safety
/// `alias` came from [`map_alias`] with as many bytes, and is not used any more.
pub(crate) unsafe fn unmap_alias(alias: *mut u8, bytes: usize) {
    // SAFETY: the caller's.
    unsafe { calls::munmap(alias.cast(), bytes) };
}

/// Gives pages of a zone back to the system; they read as zeroes then. No placed page is among them.
pub(crate) fn punch(alias: *mut u8, bytes: usize) {
    // SAFETY: pages of a zone of ours that nothing refers to any more.
    unsafe {
        if calls::madvise(alias.cast(), bytes, libc::MADV_REMOVE) != 0 {
            // Sealed, once peers were let read it: zeroes all the same.
            alias.write_bytes(0, bytes);
        }
    }
}

/// A second mapping of a zone's pages, which the process has from now on: so they are its container's, not the router's.
/// It goes to the target as it is, so the pages need no fault there. `None`: there is no memory.
fn map_filled(piece: &Move) -> Option<*mut u8> {
    // SAFETY: inside a zone's alias; an old size of 0 leaves it as it is. The new mapping is ours alone.
    unsafe {
        let filled = calls::mremap(piece.alias.cast(), 0, piece.bytes, libc::MREMAP_MAYMOVE, ptr::null_mut());
        if filled == libc::MAP_FAILED {
            return None;
        }
        if calls::madvise(filled, piece.bytes, MADV_POPULATE_WRITE) != 0 {
            if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
                calls::munmap(filled, piece.bytes);
                return None;
            }
            (0..piece.bytes).step_by(4096).for_each(|page| filled.cast::<u8>().add(page).write_volatile(0));
        }
        Some(filled.cast())
    }
}

/// Whether the pages of an area that are not there come without waiting for anybody: not so under the program's own
/// userfaultfd, which the access of `/proc/self/mem` answers by an error. What holds for one page holds for the area.
fn comes_at_once(piece: &Move) -> bool {
    let mut present = vec![0_u8; piece.bytes / 4096];
    // SAFETY: the vector has a byte for each page.
    if unsafe { libc::mincore(at(piece.target), piece.bytes, present.as_mut_ptr()) } != 0 {
        return false;
    }
    let Some(missing) = present.iter().position(|here| here & 1 == 0) else { return true };
    let Ok(memory) = std::fs::File::open("/proc/self/mem") else { return false };
    std::os::unix::fs::FileExt::read_at(&memory, &mut [0], piece.target + missing as u64 * 4096).is_ok()
}

/// Makes sure that no page has to be waited for in the window.
fn populate_target(piece: &Move, how: i32) {
    // SAFETY: makes pages present, and changes nothing else. An error is found out later, or never.
    unsafe { calls::madvise(at(piece.target), piece.bytes, how) };
}

/// All signals but none, and back. By system call: the C library leaves out those that it uses itself.
fn block_signals(mask: u64) -> u64 {
    let (mask, mut before) = (mask, 0_u64);
    // SAFETY: both are valid signal sets of the kernel's size.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut before, size_of::<u64>());
    }
    before
}

/// Whether the calling thread is the only one, but for those that do nothing without the table's lock, which it has. Such
/// a thread is not asked for it.
fn is_alone() -> bool {
    // SAFETY: all zeroes are valid; the struct is ours to write, the path a C string. A directory of threads has two
    // links and one for each. The count is read afterwards: it only falls meanwhile, before such a thread ends.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        let is_known = libc::stat(c"/proc/self/task".as_ptr(), &raw mut about) == 0;
        is_known && about.st_nlink == 3 + orders::quiet_count()
    }
}

/// When threads could not be held, last.
static REFUSED_NS: AtomicU64 = AtomicU64::new(0);

/// Threads could be held, the last time that it was tried, or that is a while ago.
pub(crate) fn is_patient() -> bool {
    // Relaxed: a hint only.
    let refused = REFUSED_NS.load(Ordering::Relaxed);
    refused == 0 || now_ns().saturating_sub(refused) >= PATIENCE_NS
}

/// Whether it is worth trying to open a window.
pub(crate) fn is_possible() -> bool {
    is_patient() || is_alone()
}

/// What is known of the window that is open.
struct Window {
    /// When the threads were asked to stand still; `None` if there are none.
    asked_ns: Option<u64>,
}

impl Window {
    fn is_younger(&self, than_ns: u64) -> bool {
        self.asked_ns.is_none_or(|asked| now_ns() - asked < than_ns)
    }

    /// Whether something may be begun, and all areas there are still what they were thought to be: until the window was
    /// open another thread could change the map.
    fn may_move(&self, maps: &Maps, piece: &Move, is_right: &dyn Fn(&Area, u64) -> bool) -> bool {
        let is_sure = self.asked_ns.is_none() && !maps.has_query();
        (is_sure || is_all(maps, piece, is_right)) && self.is_younger(BEGIN_WITHIN_NS)
    }
}

/// Whether a piece's target is mapped without a gap, and each area of it is right at the address given with it.
pub(crate) fn is_all(maps: &Maps, piece: &Move, is_right: &dyn Fn(&Area, u64) -> bool) -> bool {
    let end = piece.target + piece.bytes as u64;
    let mut reached = piece.target;
    maps.visit(piece.target, end, &mut |area| {
        let is_next = area.start <= reached && is_right(area, reached);
        reached = if is_next { area.end } else { reached };
        is_next
    });
    reached >= end
}

/// Who else may read and write the pages that are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// The threads of this process.
    Threads,
    /// The router too, by address. The calling thread is that of `orders`, so never alone.
    Router,
}

/// Runs `body` in a window. False: there can't be one now.
fn in_window(session: &Session, others: Others, body: &mut dyn FnMut(&Window)) -> bool {
    let before = block_signals(u64::MAX);
    let quiet = others == Others::Router;
    let ran = if !quiet && is_alone() {
        body(&Window { asked_ns: None });
        true
    } else {
        // SAFETY: takes nothing.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
        is_patient()
            && session
                .with_threads_held(thread, quiet, &mut |asked_ns| body(&Window { asked_ns: Some(asked_ns) }))
                .inspect_err(|_| {
                    // What the router asks for is tried again when it asks: no registration shall do without for it.
                    if !quiet {
                        REFUSED_NS.store(now_ns(), Ordering::Relaxed);
                    }
                })
                .is_ok()
    };
    block_signals(before);
    ran
}

/// Puts private pages into their zone, and the zone's pages in their place, if all areas are `is_right` at the address
/// given with them. False: nothing has changed.
pub(crate) fn move_in(
    session: &Session,
    maps: &Maps,
    piece: &Move,
    others: Others,
    is_right: &dyn Fn(&Area, u64) -> bool,
) -> bool {
    if !comes_at_once(piece) {
        return false;
    }
    let Some(filled) = map_filled(piece) else { return false };
    populate_target(piece, MADV_POPULATE_READ);
    let mut placed = false;
    in_window(session, others, &mut |window| {
        placed = window.may_move(maps, piece, is_right) && place(piece, filled, window);
    });
    if !placed {
        // SAFETY: made above, and still there.
        unsafe { calls::munmap(filled.cast(), piece.bytes) };
    }
    placed
}

/// In a window.
fn place(piece: &Move, filled: *mut u8, window: &Window) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the target is readable private memory (checked just now, and only this thread runs), `filled` a zone's own
    // pages of the same length, apart from it. The new mapping has the contents that the old one had.
    unsafe {
        ptr::copy_nonoverlapping(at(piece.target).cast::<u8>(), filled, piece.bytes);
        window.is_younger(COMMIT_WITHIN_NS)
            && calls::mremap(filled.cast(), piece.bytes, piece.bytes, flags, at(piece.target)) != libc::MAP_FAILED
    }
}

/// Maps a zone's pages at the target too, whatever was there: one step for every other thread.
///
/// # Safety
/// What is mapped at the target may go.
unsafe fn duplicate(piece: &Move) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's. An old size of 0 leaves a shared mapping in place and makes another of the same pages.
    unsafe { calls::mremap(piece.alias.cast(), 0, piece.bytes, flags, at(piece.target)) != libc::MAP_FAILED }
}

/// Puts private memory in the place of a zone's pages, if they are still there, which `is_right` says of each area. Marks
/// those that were; false if not all.
pub(crate) fn move_out(
    session: &Session,
    maps: &Maps,
    pieces: &mut [Move],
    others: Others,
    is_right: &dyn Fn(&Move, &Area, u64) -> bool,
) -> bool {
    for piece in pieces.iter() {
        // SAFETY: makes pages of an alias present, for reading.
        unsafe { calls::madvise(piece.alias.cast(), piece.bytes, MADV_POPULATE_READ) };
    }
    in_window(session, others, &mut |window| {
        for piece in pieces.iter_mut() {
            let one = *piece;
            piece.done =
                window.may_move(maps, &one, &|area, address| is_right(&one, area, address)) && restore(maps, &one);
        }
    });
    pieces.iter().all(|piece| piece.done)
}

/// In a window. Made anew in place, the memory becomes one area with its neighbours again: with MAP_NORESERVE, if only that
/// makes it so, as it is with memory of jemalloc.
fn restore(maps: &Maps, piece: &Move) -> bool {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: at the target lie the zone's pages (checked a moment ago, and only this thread runs), or what was put there
    // just now; the alias shows the same pages.
    let make = |flags| unsafe { calls::mmap(at(piece.target), piece.bytes, rights, flags, -1, 0) != libc::MAP_FAILED };
    let made = make(flags)
        && (is_joined(maps, piece) || make(flags | libc::MAP_NORESERVE) && (is_joined(maps, piece) || make(flags)));
    // SAFETY: as above.
    unsafe {
        if !made {
            // Some kernels have unmapped it by then.
            duplicate(piece);
            return false;
        }
        populate_target(piece, MADV_POPULATE_WRITE);
        ptr::copy_nonoverlapping(piece.alias, at(piece.target).cast::<u8>(), piece.bytes);
        if piece.protection != rights {
            calls::mprotect(at(piece.target), piece.bytes, piece.protection);
        }
    }
    true
}

/// Whether the memory is one area with a neighbour. Also if that can't be told cheaply.
fn is_joined(maps: &Maps, piece: &Move) -> bool {
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

/// Runs `body` while all other threads stand still, or while they run, if they can't be held. For the thread of `orders`,
/// whose signals are blocked, and which is never alone. `body` is as in a window.
pub(crate) fn with_others_held(session: &Session, body: &mut dyn FnMut()) {
    // SAFETY: takes nothing.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
    let mut ran = false;
    if is_patient() {
        let held = session.with_threads_held(thread, false, &mut |_| {
            body();
            ran = true;
        });
        if held.is_err() {
            REFUSED_NS.store(now_ns(), Ordering::Relaxed);
        }
    }
    if !ran {
        body();
    }
}

/// Gives the process its own copies of a zone's pages while other threads run: a private mapping of the same file, and
/// every page of it touched. To the allocator it is private memory, once the zone's own pages are punched.
pub(crate) fn make_private(piece: &Move, descriptor: BorrowedFd<'_>, offset: u64) -> bool {
    map_private(piece, descriptor, offset) && {
        write_all(piece);
        true
    }
}

/// The first half of it: what is mapped shows the same bytes.
pub(crate) fn map_private(piece: &Move, descriptor: BorrowedFd<'_>, offset: u64) -> bool {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: at the target lie the zone's pages (checked a moment ago); what replaces them shows the same bytes.
    unsafe {
        calls::mmap(at(piece.target), piece.bytes, rights, flags, descriptor.as_raw_fd(), offset as i64)
            != libc::MAP_FAILED
    }
}

/// The second half: each page becomes the process' own, without a change of its contents.
pub(crate) fn write_all(piece: &Move) {
    // SAFETY: makes pages present as a write would, and changes nothing else.
    let copied = unsafe { calls::madvise(at(piece.target), piece.bytes, MADV_POPULATE_WRITE) } == 0;
    let has_advice = copied || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL);
    for page in (0..piece.bytes as u64).step_by(4096).filter(|_| !copied) {
        if has_advice {
            // Some of it was unmapped meanwhile.
            // SAFETY: as above.
            unsafe { calls::madvise(at(piece.target + page), 4096, MADV_POPULATE_WRITE) };
            continue;
        }
        // SAFETY: mapped just now, and aligned. Other threads may write the word meanwhile: it is put back only unchanged.
        let word = unsafe { AtomicU64::from_ptr(at(piece.target + page).cast()) };
        // Relaxed: it is about the write fault alone. Not an addition of 0, which the compiler turns into a load.
        let mut before = word.load(Ordering::Relaxed);
        while let Err(now) = word.compare_exchange(before, before, Ordering::Relaxed, Ordering::Relaxed) {
            before = now;
        }
    }
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    if piece.protection != rights {
        // SAFETY: the range was mapped just now.
        unsafe { calls::mprotect(at(piece.target), piece.bytes, piece.protection) };
    }
}

/// Puts anonymous memory in the place of private copies, if all areas are `is_right` at the address given with them. False:
/// nothing has changed.
pub(crate) fn make_anonymous(
    session: &Session,
    maps: &Maps,
    piece: &Move,
    is_right: &dyn Fn(&Area, u64) -> bool,
) -> bool {
    let Some(aside) = Aside::reserve(piece.bytes) else { return false };
    let mut done = false;
    in_window(session, Others::Threads, &mut |window| {
        done = window.may_move(maps, piece, is_right) && aside.exchange(maps, piece);
    });
    done
}

/// Addresses for pages that are about to be copied.
struct Aside {
    start: *mut u8,
    bytes: usize,
}

impl Aside {
    fn reserve(bytes: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { calls::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self { start: start.cast(), bytes })
    }

    /// In a window. The target's pages go aside, and new ones with their contents in their place.
    fn exchange(&self, maps: &Maps, piece: &Move) -> bool {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let (target, aside) = (at(piece.target), self.start.cast::<c_void>());
        // SAFETY: the target is private memory (checked a moment ago, and only this thread runs), and the other place is
        // ours; where the pages don't stay aside they go back as they were.
        unsafe {
            if calls::mremap(target, piece.bytes, piece.bytes, flags, aside) == libc::MAP_FAILED {
                return false;
            }
            let is_readable =
                piece.protection & libc::PROT_READ != 0 || calls::mprotect(aside, piece.bytes, libc::PROT_READ) == 0;
            if is_readable && restore(maps, &Move { alias: self.start, ..*piece }) {
                return true;
            }
            calls::mprotect(aside, piece.bytes, piece.protection);
            calls::mremap(aside, piece.bytes, piece.bytes, flags, target);
            false
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // SAFETY: reserved by `reserve`; what lies there is of no use to anybody.
        unsafe { calls::munmap(self.start.cast(), self.bytes) };
    }
}

/// In a child of `fork`: its own copy of a zone's pages in their place. It has one thread. Only system calls.
pub(crate) fn copy_for_child(target: u64, alias: *const u8, bytes: usize, protection: i32) {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: at the target lie the zone's pages (checked by the caller), and the alias shows the same ones.
    unsafe {
        if calls::mmap(at(target), bytes, rights, flags, -1, 0) == libc::MAP_FAILED {
            return;
        }
        // In one step each, where the kernel knows how: what other threads of the parent write meanwhile is copied too.
        calls::madvise(alias.cast_mut().cast(), bytes, MADV_POPULATE_READ);
        calls::madvise(at(target), bytes, MADV_POPULATE_WRITE);
        ptr::copy_nonoverlapping(alias, at(target).cast::<u8>(), bytes);
        if protection != rights {
            calls::mprotect(at(target), bytes, protection);
        }
    }
}
