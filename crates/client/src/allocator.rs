//! Memory that the router reaches without a copy more: segments of its making, given out by the
//! page (`ibv_malloc`).
//!
//! First fit over a list of free ranges. Arenas are at least [`SEGMENT_BYTES`]; one that is wholly
//! free is given back. An arena is made of segments of [`SEGMENT_BYTES`] side by side: what a
//! program does to one of them, as to punch a hole, blocks its copies for no longer than the kernel
//! needs for that many pages.
//!
//! The pages of what is given out are allocated at once, so that they are charged to the program's
//! memory cgroup; the router allocates none.
//!
//! The memory stays valid when the router goes; a later router reaches it as it reaches any other
//! memory.
//!
//! A child of `fork` shares the memory with its parent, as any shared mapping. What the parent
//! allocated, the child can't free.
use crate::lock;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::{Room, Segment};
use freeflow_verbs::VerbsError;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

/// A segment, and the smallest arena, bytes.
const SEGMENT_BYTES: usize = 16 << 20;
/// Unit of allocation, bytes.
const PAGE_BYTES: usize = 4096;

static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

struct Pool {
    session: Arc<Session>,
    /// In the order of their addresses, without gaps.
    segments: Vec<(Handle, Segment)>,
    address: usize,
    ranges: FreeList,
}

/// Allocates whole pages; gives their address. The pages are zero at first use.
///
/// # Errors
/// InvalidArgument: no bytes. NoMemory: a limit of the vNIC is reached. DeviceFatal: the router is
/// gone.
pub fn allocate(session: &Arc<Session>, bytes: usize) -> Result<usize, VerbsError> {
    session.live()?;
    if bytes == 0 || bytes > isize::MAX as usize - PAGE_BYTES {
        return Err(VerbsError::InvalidArgument);
    }
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let mut pools = lock(&POOLS);
    for pool in pools.iter_mut().filter(|pool| Arc::ptr_eq(&pool.session, session)) {
        if let Some(offset) = pool.ranges.take(bytes) {
            return pool.give_out(offset, bytes);
        }
    }
    let mut pool = Pool::create(session, bytes.max(SEGMENT_BYTES))?;
    let offset = pool.ranges.take(bytes).ok_or(VerbsError::NoMemory)?;
    let given = pool.give_out(offset, bytes);
    if given.is_ok() {
        pools.push(pool);
    } else {
        pool.destroy();
    }
    given
}

/// Frees what [`allocate`] gave; says whether it knew the address.
pub fn release(address: usize) -> bool {
    let mut pools = lock(&POOLS);
    let Some(index) = pools.iter().position(|pool| pool.contains(address)) else { return false };
    let pool = &mut pools[index];
    if pool.session.left_behind() {
        return true;
    }
    let known = pool.ranges.give_back(address - pool.address);
    if known && pool.ranges.is_unused() && pool.destroy() {
        // The session's last holder may be this arena: it is dropped after the list's lock.
        let unused = pools.swap_remove(index);
        drop(pools);
        drop(unused);
    }
    known
}

/// Bytes that were allocated at that address.
pub fn usable_bytes(address: usize) -> Option<usize> {
    let pools = lock(&POOLS);
    let pool = pools.iter().find(|pool| pool.contains(address))?;
    pool.ranges.used.get(&(address - pool.address)).copied()
}

impl Pool {
    fn create(session: &Arc<Session>, bytes: usize) -> Result<Self, VerbsError> {
        let mut room = Room::reserve(bytes).map_err(|_| VerbsError::NoMemory)?;
        let mut pool = Self {
            session: session.clone(),
            segments: Vec::new(),
            address: room.address(),
            ranges: FreeList::new(bytes),
        };
        while room.bytes() > 0 {
            if let Err(error) = pool.add_segment(&mut room) {
                pool.destroy();
                return Err(error);
            }
        }
        Ok(pool)
    }

    /// One more, at the beginning of the room that is left.
    fn add_segment(&mut self, room: &mut Room) -> Result<(), VerbsError> {
        let bytes = room.bytes().min(SEGMENT_BYTES);
        let (reply, descriptors) = self.session.call(&Request::CreateSegment { length: bytes as u64 })?;
        let (Reply::Segment { segment: handle, length }, [memory]) = (reply, &descriptors[..]) else {
            return Err(self.session.nonsense());
        };
        if length < bytes as u64 {
            return Err(self.session.nonsense());
        }
        let mapped = room.map(memory.as_fd(), bytes).map_err(|_| VerbsError::NoMemory).and_then(|memory| {
            let address = memory.address() as u64;
            self.session.command(&Request::MapSegment { segment: handle, address })?;
            Ok(memory)
        });
        match mapped {
            Ok(memory) => {
                self.segments.push((handle, memory));
                Ok(())
            }
            Err(error) => {
                let _ = self.session.destroy(&Request::DestroySegment { segment: handle });
                Err(error)
            }
        }
    }

    /// The address of what [`FreeList::take`] gave, its pages allocated; it is given back where
    /// they can't be had.
    fn give_out(&mut self, offset: usize, bytes: usize) -> Result<usize, VerbsError> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let (index, inside) = (at / SEGMENT_BYTES, at % SEGMENT_BYTES);
            let count = (end - at).min(SEGMENT_BYTES - inside);
            if self.segments[index].1.populate(inside, count).is_err() {
                self.ranges.give_back(offset);
                return Err(VerbsError::NoMemory);
            }
            at += count;
        }
        Ok(self.address + offset)
    }

    fn contains(&self, address: usize) -> bool {
        (self.address..self.address + self.bytes()).contains(&address)
    }

    fn bytes(&self) -> usize {
        self.segments.iter().map(|(_, memory)| memory.bytes()).sum()
    }

    /// Of one that nothing is given out of. Refused while a memory region lies over any of it.
    fn destroy(&mut self) -> bool {
        while let Some((handle, _)) = self.segments.last() {
            if self.session.destroy(&Request::DestroySegment { segment: *handle }).is_err() {
                // Nothing of it is given out: what is left is an arena as any other.
                self.ranges = FreeList::new(self.bytes());
                return false;
            }
            self.segments.pop();
        }
        true
    }
}

/// Which bytes of an arena are free and which are given out.
#[derive(Debug, Default)]
struct FreeList {
    /// Offset to length; no two touch.
    free: BTreeMap<usize, usize>,
    used: BTreeMap<usize, usize>,
}

impl FreeList {
    fn new(bytes: usize) -> Self {
        Self { free: BTreeMap::from([(0, bytes)]), used: BTreeMap::new() }
    }

    fn take(&mut self, bytes: usize) -> Option<usize> {
        let (&offset, &length) = self.free.iter().find(|&(_, &length)| length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        self.used.insert(offset, bytes);
        Some(offset)
    }

    fn give_back(&mut self, offset: usize) -> bool {
        let Some(mut length) = self.used.remove(&offset) else { return false };
        let mut start = offset;
        if let Some(after) = self.free.remove(&(offset + length)) {
            length += after;
        }
        if let Some((&before, &before_length)) = self.free.range(..offset).next_back()
            && before + before_length == offset
        {
            start = before;
            length += before_length;
        }
        self.free.insert(start, length);
        true
    }

    fn is_unused(&self) -> bool {
        self.used.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_fit_and_merging() {
        let mut ranges = FreeList::new(4 * PAGE_BYTES);
        let a = ranges.take(PAGE_BYTES).unwrap();
        let b = ranges.take(2 * PAGE_BYTES).unwrap();
        let c = ranges.take(PAGE_BYTES).unwrap();
        assert_eq!((a, b, c), (0, PAGE_BYTES, 3 * PAGE_BYTES));
        assert_eq!(ranges.take(PAGE_BYTES), None);
        assert!(ranges.give_back(a));
        assert!(!ranges.give_back(a));
        assert!(ranges.give_back(c));
        assert_eq!(ranges.free.len(), 2);
        assert!(ranges.give_back(b));
        assert_eq!(ranges.free, BTreeMap::from([(0, 4 * PAGE_BYTES)]));
        assert!(ranges.is_unused());
    }
}
