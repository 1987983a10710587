//! Descriptors that come with a reply, and where in its file the memory begins that one stands for.
use freeflow_shm::Segment;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A descriptor that came with a reply.
#[derive(Debug)]
pub struct Passed {
    descriptor: OwnedFd,
    /// Of the memory, bytes: 0 but in a virtual machine.
    offset: u64,
}

impl Passed {
    pub fn new(descriptor: OwnedFd, offset: u64) -> Self {
        Self { descriptor, offset }
    }

    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Maps the memory that it stands for. Errors: as [`Segment::map_at`].
    pub fn map(&self, bytes: usize) -> io::Result<Segment> {
        Segment::map_at(self.descriptor.as_fd(), self.offset, bytes)
    }
}

impl AsFd for Passed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl From<Passed> for OwnedFd {
    fn from(passed: Passed) -> Self {
        passed.descriptor
    }
}
