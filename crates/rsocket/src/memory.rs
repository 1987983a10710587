//! Memory of our own that is registered: whole pages, so that nothing else of the program shares
//! them.
use crate::ffi::{Outcome, errno, ibv_dereg_mr, ibv_reg_mr, not_null};
use crate::stream::{Ring, TargetSlots};
use crate::wire::{IOMAP_BYTES, IomapEntry, TARGET_BYTES, TARGET_COUNT, Target};
use freeflow_abi::{ibv_mr, ibv_pd};
use libc::c_int;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub const LOCAL_WRITE: c_int = 1;
pub const REMOTE_WRITE: c_int = 1 << 1;
const PAGE_BYTES: usize = 4096;

/// Registered pages. The other end may write into them at any time if they were registered so: they
/// are only reached by raw copies and as atomics, never by reference. So concurrent use mixes bytes
/// and breaks nothing; locks of the connection keep each side's copies apart.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    bytes: usize,
    mr: *mut ibv_mr,
}

// SAFETY: plain memory and a handle; verbs may be called from any thread.
unsafe impl Send for Memory {}
// SAFETY: the type's own rule: raw copies and atomics only.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Errors
    /// Those of `mmap` and `ibv_reg_mr`.
    ///
    /// # Safety
    /// `pd` exists, and outlives this.
    pub unsafe fn register(pd: *mut ibv_pd, bytes: usize, access: c_int) -> Outcome<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        // SAFETY: new pages.
        let base = unsafe {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(errno());
        }
        // SAFETY: this function's contract; the pages are ours.
        match not_null(unsafe { ibv_reg_mr(pd, base, bytes, access) }) {
            Ok(mr) => Ok(Self { base: base.cast(), bytes, mr }),
            Err(error) => {
                // SAFETY: nobody uses them.
                unsafe { libc::munmap(base, bytes) };
                Err(error)
            }
        }
    }

    #[must_use]
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    #[must_use]
    pub fn lkey(&self) -> u32 {
        // SAFETY: registered as long as this lives.
        unsafe { (*self.mr).lkey }
    }

    /// The first `bytes` as the other end names them.
    #[must_use]
    pub fn target(&self, bytes: u32) -> Target {
        // SAFETY: as above.
        Target { address: self.address(), key: unsafe { (*self.mr).rkey }, bytes }
    }

    /// # Safety
    /// `from` is valid for `bytes` bytes.
    pub unsafe fn fill(&self, offset: usize, from: *const u8, bytes: usize) {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside of the buffer");
        // SAFETY: inside; the rest is this function's contract. Our own pages do not overlap the
        // program's.
        unsafe { ptr::copy_nonoverlapping(from, self.base.add(offset), bytes) };
    }

    /// # Safety
    /// `to` is valid for `bytes` bytes.
    pub unsafe fn extract(&self, offset: usize, to: *mut u8, bytes: usize) {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside of the buffer");
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(self.base.add(offset), to, bytes) };
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes, "outside of the list");
        // SAFETY: aligned, inside, and reached as an atomic only.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: ours; the QP that used it is gone.
        unsafe {
            ibv_dereg_mr(self.mr);
            libc::munmap(self.base.cast(), self.bytes);
        }
    }
}

/// The buffers of a direction, which both stay until the connection ends: the other end, or a
/// request, may still name the first.
#[derive(Debug)]
pub struct Rings {
    pub first: Memory,
    /// `None`: there was no memory for it.
    grown: OnceLock<Option<Memory>>,
}

impl Rings {
    #[must_use]
    pub fn new(first: Memory) -> Self {
        Self { first, grown: OnceLock::new() }
    }

    #[must_use]
    #[inline]
    pub fn of(&self, ring: Ring) -> &Memory {
        match (ring, self.grown.get()) {
            (Ring::Grown, Some(Some(grown))) => grown,
            _ => &self.first,
        }
    }

    /// Makes the longer one, or tries to, once.
    pub fn grow(&self, make: impl FnOnce() -> Outcome<Memory>) -> Option<&Memory> {
        self.grown.get_or_init(|| make().ok()).as_ref()
    }
}

/// Our target list with our I/O map behind it: the other end writes both.
#[derive(Debug)]
pub struct Lists(pub Memory);

impl Lists {
    #[must_use]
    pub fn bytes(iomap_count: u16) -> usize {
        TARGET_BYTES * TARGET_COUNT as usize + IOMAP_BYTES * usize::from(iomap_count)
    }

    /// An entry of the I/O map as it stands now.
    #[must_use]
    pub fn iomap_entry(&self, index: u16) -> IomapEntry {
        let at = Self::bytes(index);
        // Acquire: pairs with whoever placed the entry for the other end, before its message
        // arrived.
        let [offset, address, rest] = [0, 8, 16].map(|word| self.0.word(at + word).load(Ordering::Acquire));
        IomapEntry { offset, target: Target::from_words(address, rest).unwrap_or_default() }
    }
}

impl TargetSlots for &Lists {
    fn take(&mut self, slot: usize) -> Option<Target> {
        let at = slot * TARGET_BYTES;
        let (address, rest) = (self.0.word(at), self.0.word(at + 8));
        // Acquire: as above.
        let target = Target::from_words(address.load(Ordering::Acquire), rest.load(Ordering::Acquire))?;
        // The other end writes here again only when it has read all that this target takes.
        // Relaxed: nothing was sent into it yet, and posting a request orders.
        address.store(0, Ordering::Relaxed);
        rest.store(0, Ordering::Relaxed);
        Some(target)
    }
}
