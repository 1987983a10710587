//! Writes of other processes (`process_vm_writev`, as MPI's ranks on one machine use it) that come to
//! pages while they move. Nobody freezes those processes, and such a write pins its page first: one
//! that has begun goes into the old page, after its contents were copied.
//!
//! The old page is kept for a moment therefore, and compared with the copy: bytes that differ are
//! carried over, unless the new page has others by then. A write that takes longer is lost still.
use crate::syscalls;
use crate::threads::now_ns;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{ptr, slice};

/// Longest piece whose old pages are kept: what a pipe holds, and a command of the router names.
pub(crate) const LATE_BYTES_MAX: usize = 64 << 10;
/// A write from the pinning of its page to its end, if the writer is not interrupted.
const WRITE_NS: u64 = 50_000;
/// Pieces that leave within that time.
const LEAVING_COUNT_MAX: usize = 8;

/// Bytes in a mapping of their own: a block of the heap could lie in the pages that move.
struct Buffer {
    start: *mut u8,
    bytes: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { syscalls::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then(|| Self { start: start.cast(), bytes })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped by `new`, and nobody else's.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and used no more.
        unsafe { syscalls::munmap(self.start.cast(), self.bytes) };
    }
}

pub(crate) struct LateWrites {
    /// The contents when they were copied, and afterwards.
    taken: Buffer,
    later: Buffer,
    /// Two pipes, which hold the old pages; without a mapping of them.
    pipes: Option<[OwnedFd; 4]>,
    held_bytes: usize,
}

impl LateWrites {
    /// `None`: so many bytes are not looked after, or there is no memory.
    pub fn new(bytes: usize) -> Option<Self> {
        if bytes > LATE_BYTES_MAX {
            return None;
        }
        Some(Self { taken: Buffer::new(bytes)?, later: Buffer::new(bytes)?, pipes: None, held_bytes: 0 })
    }

    /// Keeps pages that are about to lose their mapping. In a window; without the means it does
    /// nothing.
    pub fn hold(&mut self, pages: *mut c_void) {
        let Some(pipes) = &self.pipes else { return };
        let piece = libc::iovec { iov_base: pages, iov_len: self.taken.len() };
        // SAFETY: the pages are mapped, and only referred to.
        let held = unsafe { libc::vmsplice(pipes[1].as_raw_fd(), &raw const piece, 1, libc::SPLICE_F_NONBLOCK) };
        self.held_bytes = usize::try_from(held).unwrap_or(0);
    }

    /// Before [`Self::hold`], not in a window.
    pub fn open_pipes(&mut self) {
        let mut ends = [-1; 4];
        // SAFETY: two descriptors of `ends` each, which are new and nobody else's.
        unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) == 0 {
                if libc::pipe2(ends.as_mut_ptr().add(2), libc::O_CLOEXEC) == 0 {
                    self.pipes = Some(ends.map(|end| OwnedFd::from_raw_fd(end)));
                } else {
                    libc::close(ends[0]);
                    libc::close(ends[1]);
                }
            }
        }
    }

    /// The contents that are copied.
    ///
    /// # Safety
    /// As many bytes are readable there.
    pub unsafe fn take(&mut self, from: *const u8) -> &[u8] {
        // SAFETY: this function's contract.
        unsafe { copy_racing(from, self.taken.as_mut_ptr(), self.taken.len()) };
        &self.taken
    }

    /// The contents as they are now.
    ///
    /// # Safety
    /// As many bytes are readable there.
    pub unsafe fn look(&mut self, from: *const u8) -> &[u8] {
        // SAFETY: this function's contract.
        unsafe { copy_racing(from, self.later.as_mut_ptr(), self.later.len()) };
        &self.later
    }

    /// Carries over, as soon as it is there, what writes that have begun put into the old pages; these
    /// are mapped at `from`, or held. In a window, once they are nowhere else.
    ///
    /// # Safety
    /// As many bytes are readable at `from`, and writable at `to`, which is aligned to a word.
    pub unsafe fn carry_for_a_while(&mut self, from: Option<*const u8>, to: *mut u8) {
        let until = now_ns() + WRITE_NS;
        while now_ns() < until {
            // SAFETY: this function's contract.
            unsafe {
                match from {
                    Some(from) => self.carry_from(from, to),
                    None => self.carry_held(to, false),
                }
            }
        }
    }

    /// Carries over what was written to the old pages, which are mapped at `from`.
    ///
    /// # Safety
    /// As many bytes are readable there, and writable at `to`, which is aligned to a word.
    unsafe fn carry_from(&mut self, from: *const u8, to: *mut u8) {
        // SAFETY: this function's contract.
        unsafe {
            self.look(from);
            carry(&mut self.taken, &self.later, to);
        }
    }

    /// The same of pages that are held. Once before the last time.
    ///
    /// # Safety
    /// As many bytes are writable at `to`, which is aligned to a word.
    pub unsafe fn carry_held(&mut self, to: *mut u8, is_last: bool) {
        let Some(pipes) = &self.pipes else { return };
        let bytes = self.held_bytes;
        // SAFETY: descriptors of ours; the buffer has that many bytes; this function's contract.
        unsafe {
            let source = if is_last {
                &pipes[0]
            } else {
                let [from, into] = [&pipes[0], &pipes[3]].map(AsRawFd::as_raw_fd);
                if libc::tee(from, into, bytes, libc::SPLICE_F_NONBLOCK) != bytes as isize {
                    return;
                }
                &pipes[2]
            };
            if bytes > 0 && libc::read(source.as_raw_fd(), self.later.as_mut_ptr().cast(), bytes) == bytes as isize {
                carry(&mut self.taken[..bytes], &self.later[..bytes], to);
            }
        }
    }
}

/// Old pages of pieces that leave an arena one after the other, in one window: writes to them are
/// carried over while others follow.
pub(crate) struct LeavingPages {
    /// The contents of each when they were copied, and of one afterwards.
    taken: Buffer,
    later: Buffer,
    /// Bytes of the longest.
    bytes_max: usize,
    /// On the stack: a block of the heap could lie in the pages that move.
    pieces: [Option<LeavingPiece>; LEAVING_COUNT_MAX],
    next: usize,
}

#[derive(Clone, Copy)]
struct LeavingPiece {
    old: *const u8,
    new: *mut u8,
    bytes: usize,
    until_ns: u64,
}

impl LeavingPages {
    /// `None`: pieces so long are not looked after, or there is no memory.
    pub fn new(bytes_max: usize) -> Option<Self> {
        if bytes_max == 0 || bytes_max > LATE_BYTES_MAX {
            return None;
        }
        let (taken, later) = (Buffer::new(bytes_max * LEAVING_COUNT_MAX)?, Buffer::new(bytes_max)?);
        Some(Self { taken, later, bytes_max, pieces: [None; LEAVING_COUNT_MAX], next: 0 })
    }

    /// The contents of the next piece, which are copied.
    ///
    /// # Safety
    /// As many bytes are readable there.
    pub unsafe fn take(&mut self, old: *const u8, bytes: usize) -> &[u8] {
        while self.pieces[self.next].is_some() {
            self.carry();
        }
        let taken = &mut self.taken[self.next * self.bytes_max..][..bytes];
        // SAFETY: this function's contract.
        unsafe { copy_racing(old, taken.as_mut_ptr(), bytes) };
        taken
    }

    /// The contents of new pages that are made once more.
    ///
    /// # Safety
    /// As many bytes are readable there.
    pub unsafe fn look(&mut self, from: *const u8, bytes: usize) -> &[u8] {
        // SAFETY: this function's contract.
        unsafe { copy_racing(from, self.later.as_mut_ptr(), bytes) };
        &self.later[..bytes]
    }

    /// After [`Self::take`], once the old pages are nowhere but at `old`. In the window.
    ///
    /// # Safety
    /// As many bytes are readable at `old`, and writable at `new`, until [`Self::carry_all`] has
    /// returned; both are aligned to words.
    pub unsafe fn add(&mut self, old: *const u8, new: *mut u8, bytes: usize) {
        self.pieces[self.next] = Some(LeavingPiece { old, new, bytes, until_ns: now_ns() + WRITE_NS });
        self.next = (self.next + 1) % LEAVING_COUNT_MAX;
        self.carry();
    }

    /// Waits for writes to the last pieces. In the window.
    pub fn carry_all(&mut self) {
        while self.pieces.iter().any(Option::is_some) {
            self.carry();
        }
    }

    fn carry(&mut self) {
        for (number, slot) in self.pieces.iter_mut().enumerate() {
            let Some(LeavingPiece { old, new, bytes, until_ns }) = *slot else { continue };
            // A last look afterwards.
            if now_ns() >= until_ns {
                *slot = None;
            }
            let (taken, later) = (&mut self.taken[number * self.bytes_max..][..bytes], &mut self.later[..bytes]);
            // SAFETY: the contract of `add`.
            unsafe {
                copy_racing(old, later.as_mut_ptr(), bytes);
                carry(taken, later, new);
            }
        }
    }
}

/// Copies a program's bytes, which it or others may write meanwhile.
///
/// An instruction does it where there is one: `memcpy` must not race with writes, and a sanitizer's runtime, which
/// replaces it, reports what the program has freed within the pages.
///
/// # Safety
/// As many bytes are readable at `from`, and writable at `to`; they do not overlap.
unsafe fn copy_racing(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: this function's contract; the direction flag is clear by the ABI.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "rep movsb", inout("rcx") bytes => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    // SAFETY: this function's contract.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        from.copy_to_nonoverlapping(to, bytes);
    }
}

/// Puts the bytes that differ between two states of the old pages into the new ones, where those have
/// the earlier state. The later state is the earlier one of the next time.
///
/// # Safety
/// As many bytes are writable at `to`, which is aligned to a word.
unsafe fn carry(before: &mut [u8], after: &[u8], to: *mut u8) {
    let words = before.chunks_exact_mut(8).zip(after.chunks_exact(8));
    for (number, (before, after)) in words.enumerate().filter(|(_, (before, after))| **before != **after) {
        // SAFETY: this function's contract.
        let word = unsafe { AtomicU64::from_ptr(to.add(number * 8).cast()) };
        merge(word, before, after);
        before.copy_from_slice(after);
    }
}

/// Relaxed: whoever reads the word reads it as another process's write.
fn merge(word: &AtomicU64, before: &[u8], after: &[u8]) {
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
        let mut bytes = now.to_ne_bytes();
        for at in 0..bytes.len() {
            if bytes[at] == before[at] {
                bytes[at] = after[at];
            }
        }
        Some(u64::from_ne_bytes(bytes))
    });
}

/// Fills new pages, in which others may write already: bytes that are not zero are theirs.
///
/// # Safety
/// As many bytes are writable at `to`, which is aligned to a word.
pub(crate) unsafe fn fill_new(contents: &[u8], to: *mut u8) {
    for (number, content) in contents.chunks_exact(8).enumerate() {
        // SAFETY: this function's contract.
        merge(unsafe { AtomicU64::from_ptr(to.add(number * 8).cast()) }, &[0; 8], content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of this test's own.
    fn pages(bytes: usize) -> *mut u8 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let pages =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED);
        pages.cast()
    }

    #[test]
    fn writes_to_the_old_page_are_carried_over_where_the_new_one_is_unchanged() {
        let (old, new) = (pages(8192), pages(8192));
        let mut late = LateWrites::new(8192).unwrap();
        late.open_pipes();
        // SAFETY: pages of this test's own, of that many bytes.
        unsafe {
            old.write_bytes(7, 8192);
            late.hold(old.cast());
            fill_new(late.take(old), new);
            assert!((0..8192).all(|at| *new.add(at) == 7));
            *old.add(10) = 1;
            *old.add(11) = 1;
            *new.add(11) = 2;
            late.carry_held(new, false);
            assert_eq!([*new.add(9), *new.add(10), *new.add(11)], [7, 1, 2]);
            *old.add(8191) = 3;
            *old.add(10) = 4;
            late.carry_held(new, true);
            assert_eq!([*new.add(10), *new.add(11), *new.add(8191)], [4, 2, 3]);
            *old.add(12) = 5;
            late.carry_from(old, new);
            assert_eq!([*new.add(10), *new.add(12), *new.add(8190)], [4, 5, 7]);
        }
        assert!(LateWrites::new(LATE_BYTES_MAX + 4096).is_none());
    }

    #[test]
    fn writes_to_pieces_that_have_left_are_carried_over_while_others_leave() {
        let count = LEAVING_COUNT_MAX + 2;
        let (old, new) = (pages(count * 4096), pages(count * 4096));
        let mut leaving = LeavingPages::new(4096).unwrap();
        for at in 0..count {
            // SAFETY: pages of this test's own, of that many bytes.
            unsafe {
                let (old, new) = (old.add(at * 4096), new.add(at * 4096));
                old.write_bytes(7, 4096);
                fill_new(leaving.take(old, 4096), new);
                *old.add(100 + at) = 1;
                leaving.add(old, new, 4096);
            }
        }
        // SAFETY: as above.
        unsafe {
            *old.add(count * 4096 - 1) = 2;
            leaving.carry_all();
            assert!((0..count).all(|at| *new.add(at * 4096 + 100 + at) == 1 && *new.add(at * 4096 + 99) == 7));
            assert_eq!(*new.add(count * 4096 - 1), 2);
        }
        assert!(LeavingPages::new(LATE_BYTES_MAX + 4096).is_none() && LeavingPages::new(0).is_none());
    }

    #[test]
    fn new_pages_keep_what_others_wrote() {
        let new = pages(4096);
        // SAFETY: a page of this test's own.
        unsafe {
            *new.add(100) = 9;
            fill_new(&[7; 4096], new);
            assert!((0..4096).all(|at| *new.add(at) == if at == 100 { 9 } else { 7 }));
        }
    }
}
