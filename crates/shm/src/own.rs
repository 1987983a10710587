//! The process' own memory, as work requests name it: by address and length.
use crate::segment::{Segment, copy_bytes};
use std::ptr;

/// A piece of the process' own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnRange {
    pub address: u64,
    pub bytes: u32,
}

/// The right to copy out of and into memory that the program registered. Who has one may name any
/// range that the program registered with the rights that the copy needs, and that it has not
/// deregistered since.
#[derive(Clone, Copy, Debug)]
pub struct OwnMemory(());

impl OwnMemory {
    /// The right, for a process whose program keeps to the verbs' contract.
    ///
    /// # Safety
    /// As the verbs demand of a program: memory that is registered stays mapped, with the rights
    /// that it was registered with, until it is deregistered; and what a request names is not used
    /// otherwise until the request is done.
    pub unsafe fn promised() -> Self {
        Self(())
    }

    /// Copies one of the program's ranges into a segment. `last_bytes_last` as in
    /// [`Segment::write`]. False: it does not fit.
    #[inline]
    pub fn copy_in(self, from: OwnRange, to: &Segment, offset: usize, last_bytes_last: bool) -> bool {
        let Ok(to) = to.range(offset, from.bytes as usize) else { return false };
        // SAFETY: the range is readable by the contract of `OwnMemory::promised`, and `to` in bounds
        // and mapped.
        unsafe { copy_bytes(pointer(from.address), to, from.bytes as usize, last_bytes_last) };
        true
    }

    /// Copies a part of a segment to one of the program's ranges. False: it is not inside the
    /// segment.
    #[inline]
    pub fn copy_out(self, from: &Segment, offset: usize, to: OwnRange) -> bool {
        let Ok(from) = from.range(offset, to.bytes as usize) else { return false };
        // SAFETY: the range is writable by the contract of `OwnMemory::promised`, and `from` in
        // bounds and mapped.
        unsafe { copy_bytes(from, pointer(to.address), to.bytes as usize, true) };
        true
    }

    /// Copies bytes to one of the program's ranges, as far as it reaches.
    #[inline]
    pub fn put(self, from: &[u8], to: OwnRange) {
        let bytes = from.len().min(to.bytes as usize);
        // SAFETY: the range is writable by the contract of `OwnMemory::promised`.
        unsafe { copy_bytes(from.as_ptr(), pointer(to.address), bytes, false) };
    }

    /// Appends the bytes of one of the program's ranges.
    pub fn append_to(self, into: &mut Vec<u8>, from: OwnRange) {
        let (before, bytes) = (into.len(), from.bytes as usize);
        into.resize(before + bytes, 0);
        // SAFETY: the range is readable by the contract of `OwnMemory::promised`.
        unsafe { copy_bytes(pointer(from.address), into[before..].as_mut_ptr(), bytes, false) };
    }

    /// Stores a value in one of the program's ranges of eight bytes. False: it has another length.
    #[inline]
    pub fn store(self, value: u64, to: OwnRange) -> bool {
        let value = value.to_ne_bytes();
        if to.bytes as usize != value.len() {
            return false;
        }
        // SAFETY: the range is writable by the contract of `OwnMemory::promised`.
        unsafe { copy_bytes(value.as_ptr(), pointer(to.address), value.len(), true) };
        true
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_to_a_range_and_come_back() {
        let mut memory = [7_u8; 8];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the ranges are those of `memory`.
        let own = unsafe { OwnMemory::promised() };
        own.put(&[1, 2, 3, 4], OwnRange { address: address + 1, bytes: 3 });
        let mut read = vec![9];
        own.append_to(&mut read, OwnRange { address, bytes: 5 });
        assert_eq!(read, [9, 7, 1, 2, 3, 7]);
        assert_eq!(memory, [7, 1, 2, 3, 7, 7, 7, 7]);
    }
}
