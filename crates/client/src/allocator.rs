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
use freeflow_shm::{FreeList, Room, Segment};
use freeflow_verbs::VerbsError;
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
    pool.ranges.length_of(address - pool.address)
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
        let mapped =
            room.map(memory.as_fd(), memory.offset(), bytes).map_err(|_| VerbsError::NoMemory).and_then(|memory| {
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
