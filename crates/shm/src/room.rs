//! Address space kept free for segments that are to lie side by side.
use crate::segment::{Segment, page_multiple};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::BorrowedFd;

/// A range of addresses without memory; segments are mapped from its beginning on, which leaves the
/// rest.
///
/// Invariant: the range that is left is a mapping of its own, which nobody else knows.
pub struct Room {
    address: usize,
    bytes: usize,
}

impl Room {
    /// Room for `bytes`, rounded up to pages. Errors: EINVAL for 0 or too many; ENOMEM.
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        let bytes = page_multiple(bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags)? };
        Ok(Self { address: base as usize, bytes })
    }

    /// Where what is left begins.
    pub fn address(&self) -> usize {
        self.address
    }

    /// The room left.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// [`Segment::map_at`] at the beginning of what is left. Errors: EINVAL for what is no multiple of
    /// pages, or too much.
    pub fn map(&mut self, fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<Segment> {
        if bytes > self.bytes || page_multiple(bytes)? != bytes {
            return Err(io::Error::from(rustix::io::Errno::INVAL));
        }
        let at = self.address;
        // Also if it fails: the range may not be this room's any more.
        self.address += bytes;
        self.bytes -= bytes;
        // SAFETY: the range is the beginning of this room's own mapping, in which nothing lies.
        unsafe { Segment::map_over(fd, offset, bytes, at) }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the range is this room's own, and nothing lies in it.
            let _ = unsafe { rustix::mm::munmap(self.address as *mut _, self.bytes) };
        }
    }
}
