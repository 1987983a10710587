//! A segment: one mapping of a memfd that another process maps too, or a part of one ([`Segment::part`]).
//!
//! Only the router makes segments ([`Segment::create`]); they are sealed, so that no one can shrink
//! or grow them. Memory may still fail under a mapping (no page to be had, or a file that was never
//! sealed): with the guard of [`crate::install_sigbus_guard`] the mapping is then *poisoned*
//! instead of the process killed.
//!
//! Invariant: a `Segment` owns its address range from its making to its drop; no reference into it
//! outlives it.
use crate::missing::{self, AddressRange, Missing};
use crate::sigbus::Registration;
use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use thiserror::Error;

/// The range is not inside the segment, or an atomic's eight bytes are not aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("not inside the segment")]
pub struct OutOfBounds;

/// An access that was not made, or not as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessError {
    /// The range is not inside the segment, or an atomic's eight bytes are not aligned.
    #[error("not inside the segment")]
    OutOfBounds,
    /// A page is not there, and this process is not to allocate it: [`Segment::refuse_missing`].
    #[error("a page is missing")]
    Missing,
}

impl From<OutOfBounds> for AccessError {
    fn from(_: OutOfBounds) -> Self {
        Self::OutOfBounds
    }
}

impl From<Missing> for AccessError {
    fn from(_: Missing) -> Self {
        Self::Missing
    }
}

/// Bytes that become visible last when a payload is written with `last_bytes_last`.
const TAIL_BYTES: usize = 8;

/// Longest name of a memfd, bytes (memfd_create(2): 249).
const NAME_BYTES_MAX: usize = 200;

/// Another segment's mapping, and what is dropped with the part of it.
struct PartOf {
    _whole: Arc<Segment>,
    _held: Box<dyn Any + Send + Sync>,
}

/// One mapping of a memfd, readable and writable, unmapped on drop; or a part of one.
pub struct Segment {
    base: NonNull<u8>,
    bytes: usize,
    /// Of the mapping.
    registration: Registration,
    part_of: Option<PartOf>,
    /// Accesses are guarded calls.
    refuses_missing: bool,
}

// SAFETY: the mapping belongs to no thread; every access is an atomic one or a copy of bytes that
// have no meaning to Rust.
unsafe impl Send for Segment {}
// SAFETY: as above; all methods that take `&self` tolerate concurrent writers, since other
// processes are such anyway.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes a memfd of `bytes` (rounded up to pages) zero bytes, sealed against shrinking, growing
    /// and further seals, and maps it. The descriptor is close-on-exec; pass it on and drop it.
    ///
    /// Errors: EINVAL for 0 or more than `isize::MAX` bytes; ENOMEM when [`crate::Segment`]s of
    /// this process reach their limit.
    pub fn create(name: &str, bytes: usize) -> io::Result<(Self, OwnedFd)> {
        Self::create_sealed(name, bytes, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
    }

    /// The same, but further seals may be set: [`forbid_writing`].
    pub fn create_sealable(name: &str, bytes: usize) -> io::Result<(Self, OwnedFd)> {
        Self::create_sealed(name, bytes, SealFlags::SHRINK | SealFlags::GROW)
    }

    fn create_sealed(name: &str, bytes: usize, seals: SealFlags) -> io::Result<(Self, OwnedFd)> {
        let fd = sealed_memory(name, bytes, seals)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let segment = Self::map_with(fd.as_fd(), 0, page_multiple(bytes)?, rights, None)?;
        Ok((segment, fd))
    }

    /// Maps the first `bytes` of a file. Errors: EINVAL for 0 or too many; `UnexpectedEof` if the
    /// file is shorter.
    pub fn map(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map_given(fd, 0, bytes, ProtFlags::READ | ProtFlags::WRITE, None)
    }

    /// Maps `bytes` of a file from `offset` on, a multiple of the page. Errors: as [`Self::map`].
    pub fn map_at(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<Self> {
        Self::map_given(fd, offset, bytes, ProtFlags::READ | ProtFlags::WRITE, None)
    }

    /// A part of a segment, by itself: nothing beyond it is reached by it. The mapping stays as long as any part does;
    /// where one part is poisoned, all are. `held` is dropped with the part.
    ///
    /// # Errors
    /// EINVAL: not inside, empty, or `offset` is no multiple of the page.
    pub fn part(
        of: &Arc<Self>,
        offset: usize,
        bytes: usize,
        held: impl Any + Send + Sync,
    ) -> Result<Self, rustix::io::Errno> {
        let base = of.range(offset, bytes).ok().and_then(NonNull::new).ok_or(rustix::io::Errno::INVAL)?;
        if bytes == 0 || !offset.is_multiple_of(crate::sys::page_bytes()) {
            return Err(rustix::io::Errno::INVAL);
        }
        let part_of = Some(PartOf { _whole: of.clone(), _held: Box::new(held) });
        Ok(Self { base, bytes, registration: of.registration, part_of, refuses_missing: of.refuses_missing })
    }

    /// The same at `address`, in the place of what is mapped there. If that fails, it may be
    /// unmapped.
    ///
    /// # Safety
    /// Nothing lies in `address..address + bytes`, which is the caller's to map.
    pub(crate) unsafe fn map_over(fd: BorrowedFd<'_>, offset: u64, bytes: usize, address: usize) -> io::Result<Self> {
        Self::map_given(fd, offset, bytes, ProtFlags::READ | ProtFlags::WRITE, Some(address))
    }

    /// The same for reading only: a write to it is a SIGSEGV, so nothing of this process may hand
    /// it out for writing.
    pub fn map_for_reading(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map_given(fd, 0, bytes, ProtFlags::READ, None)
    }

    /// A file of another's making, which may be too short.
    fn map_given(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        rights: ProtFlags,
        at: Option<usize>,
    ) -> io::Result<Self> {
        page_multiple(bytes)?;
        let end = offset.checked_add(bytes as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let about = rustix::fs::fstat(fd)?;
        // A character device, such as `/dev/dax0.0`, has no length to look at, and refuses to map what it has not.
        let is_device = FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice;
        if is_device || u64::try_from(about.st_size).is_ok_and(|length| length >= end) {
            Self::map_with(fd, offset, bytes, rights, at)
        } else {
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the segment is shorter than said"))
        }
    }

    /// Maps `bytes` of a file that another process made and may change as it likes: shrink it, punch holes into it.
    /// Both numbers are multiples of the file's pages. An access to a page that is not there, or lies beyond the
    /// file's end, answers [`AccessError::Missing`]; this process allocates no page of it.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file is shorter; what `mmap` says, so EPERM where the file is sealed against writing;
    /// as [`Self::refuse_missing`].
    pub fn borrow(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<Self> {
        let end = offset.checked_add(page_multiple(bytes)? as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let length = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if length.checked_next_multiple_of(crate::sys::page_bytes() as u64).is_none_or(|length| length < end) {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than its mapping"));
        }
        let mut segment = Self::map_with(fd, offset, bytes, ProtFlags::READ | ProtFlags::WRITE, None)?;
        segment.refuse_missing()?;
        Ok(segment)
    }

    /// `at`: only by [`Self::map_over`].
    fn map_with(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        rights: ProtFlags,
        at: Option<usize>,
    ) -> io::Result<Self> {
        let flags = MapFlags::SHARED | if at.is_some() { MapFlags::FIXED } else { MapFlags::empty() };
        let at = std::ptr::without_provenance_mut(at.unwrap_or(0));
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists,
        // and one at a given address none of anybody else's, by the caller of `map_over`.
        let base = unsafe { rustix::mm::mmap(at, bytes, rights, flags, fd, offset)? };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap without MAP_FIXED gives no null");
        match Registration::new(base.as_ptr() as usize, page_multiple(bytes)?) {
            Ok(registration) => Ok(Self { base, bytes, registration, part_of: None, refuses_missing: false }),
            Err(error) => {
                // SAFETY: the range was mapped above and nobody knows of it.
                let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
                Err(error)
            }
        }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it is mapped in this process.
    pub fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// The word at `offset`. Panics if it is outside or not aligned: offsets come from our own
    /// layout.
    #[inline]
    pub fn u32(&self, offset: usize) -> &AtomicU32 {
        let word = self.pointer(offset, 4, 4).cast();
        // SAFETY: in bounds and aligned (checked), mapped as long as `self` lives; any bytes are a
        // valid AtomicU32.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// The word at `offset`. Panics if it is outside or not aligned: offsets come from our own
    /// layout.
    #[inline]
    pub fn u64(&self, offset: usize) -> &AtomicU64 {
        let word = self.pointer(offset, 8, 8).cast();
        // SAFETY: in bounds and aligned (checked), mapped as long as `self` lives; any bytes are a
        // valid AtomicU64.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// Has the processor fetch the cache line at `offset`, which is read soon. Otherwise of no effect, also outside.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(start) = self.range(offset, 1) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, which reads nothing that the program sees and faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// A pointer to `bytes` bytes at `offset`. Panics if they are outside or not aligned.
    #[inline]
    pub(crate) fn pointer(&self, offset: usize, bytes: usize, align: usize) -> *mut u8 {
        let start = self.range(offset, bytes).expect("an offset of our own layout is inside its segment");
        assert!((start as usize).is_multiple_of(align), "an offset of our own layout is aligned");
        start
    }

    /// A SIGBUS hit this mapping (only known where the guard is installed): contents are lost, its
    /// owner must be failed.
    #[inline]
    pub fn poisoned(&self) -> bool {
        self.registration.poisoned()
    }

    /// The children of this process do not get the mapping.
    pub fn set_dontfork(&self) -> io::Result<()> {
        // SAFETY: changes nothing in this process; the range is a mapping of ours.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, rustix::mm::Advice::LinuxDontFork)? };
        Ok(())
    }

    /// From now on [`Self::read`], [`Self::write`], [`Self::copy`] and the atomic operations
    /// allocate no page: where one is missing they answer [`AccessError::Missing`], and what they
    /// did up to there stands. Rings can't be reached so.
    ///
    /// Errors: ENOSYS or EPERM where the kernel can't, see [`crate::refuses_missing_pages`];
    /// ENOMEM.
    pub fn refuse_missing(&mut self) -> io::Result<()> {
        missing::refuse(self.address(), page_multiple(self.bytes)?)?;
        self.refuses_missing = true;
        Ok(())
    }

    /// Has the kernel allocate the pages of a range now: they are charged to this process' memory
    /// cgroup.
    ///
    /// Errors: ENOMEM; EFAULT where a page can't be had.
    pub fn populate(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let start = self.range(offset, bytes).map_err(io::Error::other)?;
        // SAFETY: the range is inside this mapping; no byte of it changes.
        match unsafe { rustix::mm::madvise(start.cast(), bytes, rustix::mm::Advice::LinuxPopulateWrite) } {
            // Linux before 5.14: they come with the first touch.
            Err(rustix::io::Errno::INVAL) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Copies bytes out.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), AccessError> {
        let from = self.range(offset, into.len())?;
        // SAFETY: `from` is in bounds (checked) and mapped; `into` is ours, so they don't overlap.
        // Other processes may write meanwhile: then these bytes are a mixture, which is what such a
        // program asked for; memcpy reads them as bytes and decides nothing by them.
        unsafe { self.access(None, &mut SegmentAccess::read(from, into))? };
        bytes_are_fixed();
        Ok(())
    }

    /// Copies bytes in. With `last_bytes_last` the last eight bytes become visible after all
    /// others: in one store if their address is a multiple of eight, else in order.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8], last_bytes_last: bool) -> Result<(), AccessError> {
        let to = self.range(offset, from.len())?;
        // SAFETY: `to` is in bounds (checked) and mapped for writing; `from` is a slice.
        unsafe { self.access(None, &mut SegmentAccess::copy(from.as_ptr(), to, from.len(), last_bytes_last)) }
    }

    /// Copies bytes from one segment to another or within one; the ranges may overlap.
    /// `last_bytes_last` as in [`Self::write`].
    #[inline]
    pub fn copy(
        from: &Self,
        from_offset: usize,
        to: &Self,
        to_offset: usize,
        bytes: usize,
        last_bytes_last: bool,
    ) -> Result<(), AccessError> {
        let source = from.range(from_offset, bytes)?;
        let target = to.range(to_offset, bytes)?;
        // SAFETY: both are in bounds (checked) and mapped.
        unsafe { to.access(Some(from), &mut SegmentAccess::copy(source, target, bytes, last_bytes_last)) }
    }

    /// Reads a byte of each page of a range: whether all of them are there, as far as it is a
    /// matter of [`Self::refuse_missing`].
    #[inline]
    pub fn probe(&self, offset: usize, bytes: usize) -> Result<(), AccessError> {
        let start = self.range(offset, bytes)?;
        if !self.refuses_missing || bytes == 0 {
            return Ok(());
        }
        // SAFETY: in bounds (checked) and mapped.
        unsafe { self.access(None, &mut SegmentAccess::Probe { start, bytes }) }
    }

    /// Atomic compare and swap of the eight bytes at `offset`; gives what was there before.
    pub fn compare_swap(&self, offset: usize, compare: u64, swap: u64) -> Result<u64, AccessError> {
        let (word, mut before) = (self.atomic(offset)?, 0);
        // SAFETY: in bounds and aligned (checked), mapped as long as `self` lives.
        unsafe { self.access(None, &mut SegmentAccess::CompareSwap { word, compare, swap, before: &mut before })? };
        Ok(before)
    }

    /// Atomic addition to the eight bytes at `offset`, wrapping; gives what was there before.
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64, AccessError> {
        let (word, mut before) = (self.atomic(offset)?, 0);
        // SAFETY: in bounds and aligned (checked), mapped as long as `self` lives.
        unsafe { self.access(None, &mut SegmentAccess::FetchAdd { word, add, before: &mut before })? };
        Ok(before)
    }

    /// Makes an access to this segment, and perhaps to another.
    ///
    /// # Safety
    /// The memory that the access names lies in these segments or is this process' own.
    #[inline]
    unsafe fn access(&self, other: Option<&Self>, access: &mut SegmentAccess<'_>) -> Result<(), AccessError> {
        if !self.refuses_missing && other.is_none_or(|other| !other.refuses_missing) {
            // SAFETY: this function's contract is that of `SegmentAccess::make`.
            unsafe { access.make() };
            return Ok(());
        }
        let range = |segment: &Self| {
            let bytes = if segment.refuses_missing { segment.bytes } else { 0 };
            AddressRange { start: segment.address(), bytes }
        };
        let ranges = [range(self), other.map_or(AddressRange::NONE, range)];
        // SAFETY: this function's contract; copies and atomic operations hold nothing where they are
        // given up.
        unsafe { missing::guarded(make_access, access, ranges).map_err(AccessError::from) }
    }

    /// The word at an offset that a tenant named.
    fn atomic(&self, offset: usize) -> Result<*mut u64, OutOfBounds> {
        let word = self.range(offset, 8)?;
        if (word as usize).is_multiple_of(8) { Ok(word.cast()) } else { Err(OutOfBounds) }
    }

    /// Where `bytes` bytes at `offset` begin, if all of them are inside.
    #[inline]
    pub(crate) fn range(&self, offset: usize, bytes: usize) -> Result<*mut u8, OutOfBounds> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(OutOfBounds);
        }
        // SAFETY: `offset` is at most `self.bytes`, the length of the one mapping that `base`
        // begins.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.part_of.is_some() {
            return;
        }
        // First, so that the guard never takes what is mapped here next for this segment.
        self.registration.release();
        // SAFETY: the range is ours, and nothing borrows from a segment that is dropped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({} bytes at {:#x})", self.bytes, self.address())
    }
}

/// An operation on the bytes of a segment. It holds nothing that has a destructor:
/// [`missing::guarded`] may give it up.
enum SegmentAccess<'a> {
    Read { from: *const u8, to: *mut u8, bytes: usize },
    Copy { from: *const u8, to: *mut u8, bytes: usize, last_bytes_last: bool },
    Probe { start: *const u8, bytes: usize },
    CompareSwap { word: *mut u64, compare: u64, swap: u64, before: &'a mut u64 },
    FetchAdd { word: *mut u64, add: u64, before: &'a mut u64 },
}

impl SegmentAccess<'_> {
    #[inline]
    fn read(from: *const u8, into: &mut [u8]) -> Self {
        Self::Read { from, to: into.as_mut_ptr(), bytes: into.len() }
    }

    #[inline]
    fn copy(from: *const u8, to: *mut u8, bytes: usize, last_bytes_last: bool) -> Self {
        Self::Copy { from, to, bytes, last_bytes_last }
    }

    /// # Safety
    /// The memory that it names is readable or writable, as it needs, and the word aligned.
    #[inline]
    unsafe fn make(&mut self) {
        match self {
            // SAFETY: this function's contract; the two don't overlap, as `to` is a slice of this
            // process'.
            Self::Read { from, to, bytes } => unsafe {
                libc::memcpy(to.cast(), from.cast(), *bytes);
            },
            // SAFETY: this function's contract is that of `copy_bytes`.
            Self::Copy { from, to, bytes, last_bytes_last } => unsafe {
                copy_bytes(*from, *to, *bytes, *last_bytes_last);
            },
            Self::Probe { start, bytes } => {
                let page_bytes = crate::sys::page_bytes();
                let first = *start as usize;
                let mut at = 0;
                while at < *bytes {
                    // SAFETY: this function's contract; any bytes are a valid u8.
                    unsafe { start.add(at).read_volatile() };
                    at = ((first + at + page_bytes) & !(page_bytes - 1)) - first;
                }
            }
            Self::CompareSwap { word, compare, swap, before } => {
                // SAFETY: this function's contract; any bytes are a valid AtomicU64.
                let word = unsafe { AtomicU64::from_ptr(*word) };
                // AcqRel, Acquire; partners: the atomics of the application, and of this router for
                // other QPs, on the same bytes.
                **before = match word.compare_exchange(*compare, *swap, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(before) | Err(before) => before,
                };
            }
            Self::FetchAdd { word, add, before } => {
                // SAFETY: this function's contract; any bytes are a valid AtomicU64.
                let word = unsafe { AtomicU64::from_ptr(*word) };
                // AcqRel; partners: as in `CompareSwap`.
                **before = word.fetch_add(*add, Ordering::AcqRel);
            }
        }
    }
}

/// # Safety
/// `access` points to an [`Access`] of which the contract of [`SegmentAccess::make`] holds.
unsafe extern "C" fn make_access(access: *mut std::ffi::c_void) {
    // SAFETY: this function's contract.
    unsafe { (*access.cast::<SegmentAccess<'_>>()).make() }
}

/// A memfd of `bytes` (rounded up to pages) zero bytes with these seals. The descriptor is
/// close-on-exec.
///
/// Errors: EINVAL for 0 or more than `isize::MAX` bytes.
fn sealed_memory(name: &str, bytes: usize, seals: SealFlags) -> io::Result<OwnedFd> {
    let bytes = page_multiple(bytes)?;
    let fd = sealable_file(name)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}

/// An empty memfd that can be sealed.
fn sealable_file(name: &str) -> io::Result<OwnedFd> {
    let name: String = name.chars().filter(|c| *c != '\0').take(NAME_BYTES_MAX / 4).collect();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(match rustix::fs::memfd_create(name.as_str(), flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3.
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(name.as_str(), flags)?,
        other => other?,
    })
}

/// A memfd with these bytes, which nobody can change.
pub fn sealed_file(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = sealable_file(name)?;
    if rustix::io::pwrite(&file, bytes, 0)? != bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Memory for others, sealed against shrinking, growing and further seals, and not mapped here.
pub fn foreign_memory(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    sealed_memory(name, bytes, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

/// From now on nobody can map this memory for writing, nor write to its file; mappings that there
/// are stay as they are.
pub fn forbid_writing(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
}

pub(crate) fn page_multiple(bytes: usize) -> io::Result<usize> {
    match bytes.checked_next_multiple_of(crate::sys::page_bytes()) {
        Some(rounded) if bytes > 0 && isize::try_from(rounded).is_ok() => Ok(rounded),
        _ => Err(io::Error::from(rustix::io::Errno::INVAL)),
    }
}

/// Copies bytes between ranges that may overlap and that others may write meanwhile.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes` bytes.
#[inline]
pub(crate) unsafe fn copy_bytes(from: *const u8, to: *mut u8, bytes: usize, last_bytes_last: bool) {
    if !last_bytes_last {
        // SAFETY: this function's contract; memmove allows overlap. Concurrent writers make the
        // bytes a mixture, no more.
        unsafe { libc::memmove(to.cast(), from.cast(), bytes) };
        return;
    }
    let mut tail = [0; TAIL_BYTES];
    if bytes < TAIL_BYTES {
        let tail = &mut tail[..bytes];
        // SAFETY: this function's contract; `tail` has `bytes` bytes.
        unsafe { libc::memcpy(tail.as_mut_ptr().cast(), from.cast(), bytes) };
        settle_copy();
        // SAFETY: this function's contract: `to` is writable for `bytes` bytes.
        return unsafe { store_in_order(to, tail) };
    }
    let head_bytes = bytes - TAIL_BYTES;
    // SAFETY: this function's contract. The tail is read first: where the ranges overlap, the head
    // would overwrite it.
    unsafe {
        libc::memcpy(tail.as_mut_ptr().cast(), from.add(head_bytes).cast(), TAIL_BYTES);
        libc::memmove(to.cast(), from.cast(), head_bytes);
    }
    settle_copy();
    // SAFETY: this function's contract: the tail is the last of `to`'s `bytes` bytes.
    unsafe { store_in_order(to.add(head_bytes), &tail) };
}

/// Between the bytes that come first and the last ones.
#[inline]
fn settle_copy() {
    bytes_are_fixed();
    // Release; partner: whatever load the receiving program polls its buffer with, acquire or
    // stronger.
    fence(Ordering::Release);
}

/// After bytes were copied out of shared memory: keeps the compiler, which knows memcpy, from
/// reading the source again where the copy is meant. Costs nothing.
#[inline]
fn bytes_are_fixed() {
    // SeqCst, compiler only; partner: none, it is about this thread's own loads.
    compiler_fence(Ordering::SeqCst);
}

/// Stores bytes in ascending order, each naturally aligned piece of up to eight at once.
///
/// # Safety
/// `to` is writable for `bytes.len()` bytes.
#[inline]
unsafe fn store_in_order(to: *mut u8, bytes: &[u8]) {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        // SAFETY: `done` is below `bytes.len()`.
        let at = unsafe { to.add(done) };
        let aligned = |size: usize| (at as usize).is_multiple_of(size);
        // Release, all four; partner: the receiving program's load. SAFETY of each: `at` is aligned
        // (checked) and writable for the piece, which `rest` holds.
        if let (Some(piece), true) = (rest.first_chunk::<8>(), aligned(8)) {
            // SAFETY: see above.
            unsafe { AtomicU64::from_ptr(at.cast()) }.store(u64::from_ne_bytes(*piece), Ordering::Release);
            done += 8;
        } else if let (Some(piece), true) = (rest.first_chunk::<4>(), aligned(4)) {
            // SAFETY: see above.
            unsafe { AtomicU32::from_ptr(at.cast()) }.store(u32::from_ne_bytes(*piece), Ordering::Release);
            done += 4;
        } else if let (Some(piece), true) = (rest.first_chunk::<2>(), aligned(2)) {
            // SAFETY: see above.
            unsafe { AtomicU16::from_ptr(at.cast()) }.store(u16::from_ne_bytes(*piece), Ordering::Release);
            done += 2;
        } else {
            // SAFETY: see above; a byte is always aligned.
            unsafe { AtomicU8::from_ptr(at) }.store(rest[0], Ordering::Release);
            done += 1;
        }
    }
}
