//! Memory that the router reaches without a copy more: segments of its making, given out by the page (`ibv_malloc`).
//!
//! First fit over a list of free ranges. Arenas are at least [`ARENA_BYTES`]; one that is wholly free is given back. An arena is made of
//! segments of [`ARENA_BYTES`] side by side: what a program does to one of them, as to punch a hole, blocks its copies for
//! no longer than the kernel needs for that many pages.
//!
//! The pages of what is given out are allocated at once, so that they are charged to the program's memory cgroup; the router allocates
//! none.
//!
//! The memory stays valid when the router goes; a later router reaches it as it reaches any other memory.
//!
//! A child of `fork` shares the memory with its parent, as any shared mapping. What the parent allocated, the child can't
//! free.
use crate::lock;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::{Room, Segment};
use freeflow_verbs::VerbsError;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

/// A segment, and the smallest arena, bytes.
const ARENA_BYTES: usize = 16 << 20;
/// Unit of allocation, bytes.
const PAGE_BYTES: usize = 4096;

static ARENAS: Mutex<Vec<Arena>> = Mutex::new(Vec::new());

struct Arena {
    session: Arc<Session>,
    /// In the order of their addresses, without gaps.
    segments: Vec<(Handle, Segment)>,
    address: usize,
    ranges: Ranges,
}

/// Allocates whole pages; gives their address. The pages are zero at first use.
///
/// # Errors
/// InvalidArgument: no bytes. NoMemory: a limit of the vNIC is reached. DeviceFatal: the router is gone.
pub fn allocate(session: &Arc<Session>, bytes: usize) -> Result<usize, VerbsError> {
    session.live()?;
    if bytes == 0 || bytes > isize::MAX as usize - PAGE_BYTES {
        return Err(VerbsError::InvalidArgument);
    }
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let mut arenas = lock(&ARENAS);
    for arena in arenas.iter_mut().filter(|arena| Arc::ptr_eq(&arena.session, session)) {
        if let Some(offset) = arena.ranges.take(bytes) {
            return arena.give_out(offset, bytes);
        }
    }
    let mut arena = Arena::create(session, bytes.max(ARENA_BYTES))?;
    let offset = arena.ranges.take(bytes).ok_or(VerbsError::NoMemory)?;
    let given = arena.give_out(offset, bytes);
    if given.is_ok() {
        arenas.push(arena);
    } else {
        arena.destroy();
    }
    given
}

/// Frees what [`allocate`] gave; says whether it knew the address.
pub fn release(address: usize) -> bool {
    let mut arenas = lock(&ARENAS);
    let Some(index) = arenas.iter().position(|arena| arena.contains(address)) else { return false };
    let arena = &mut arenas[index];
    if arena.session.left_behind() {
        return true;
    }
    let known = arena.ranges.give_back(address - arena.address);
    if known && arena.ranges.is_unused() && arena.destroy() {
        // The session's last holder may be this arena: it is dropped after the list's lock.
        let unused = arenas.swap_remove(index);
        drop(arenas);
        drop(unused);
    }
    known
}

/// Bytes that were allocated at that address.
pub fn usable_bytes(address: usize) -> Option<usize> {
    let arenas = lock(&ARENAS);
    let arena = arenas.iter().find(|arena| arena.contains(address))?;
    arena.ranges.used.get(&(address - arena.address)).copied()
}

impl Arena {
    fn create(session: &Arc<Session>, bytes: usize) -> Result<Self, VerbsError> {
        let mut room = Room::reserve(bytes).map_err(|_| VerbsError::NoMemory)?;
        let mut arena = Self {
            session: session.clone(),
            segments: Vec::new(),
            address: room.address(),
            ranges: Ranges::new(bytes),
        };
        while room.bytes() > 0 {
            if let Err(error) = arena.add_segment(&mut room) {
                arena.destroy();
                return Err(error);
            }
        }
        Ok(arena)
    }

    /// One more, at the beginning of the room that is left.
    fn add_segment(&mut self, room: &mut Room) -> Result<(), VerbsError> {
        let bytes = room.bytes().min(ARENA_BYTES);
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

    /// The address of what [`Ranges::take`] gave, its pages allocated; it is given back where they can't be had.
    fn give_out(&mut self, offset: usize, bytes: usize) -> Result<usize, VerbsError> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let (index, inside) = (at / ARENA_BYTES, at % ARENA_BYTES);
            let count = (end - at).min(ARENA_BYTES - inside);
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
                self.ranges = Ranges::new(self.bytes());
                return false;
            }
            self.segments.pop();
        }
        true
    }
}

/// Which bytes of an arena are free and which are given out.
#[derive(Debug, Default)]
struct Ranges {
    /// Offset to length; no two touch.
    free: BTreeMap<usize, usize>,
    used: BTreeMap<usize, usize>,
}

impl Ranges {
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
        let mut ranges = Ranges::new(4 * PAGE_BYTES);
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
