//! Memory that the router reaches without a copy more: segments of its making, given out by the page (`ibv_malloc`).
//!
//! First fit over a list of free ranges. Segments are at least [`ARENA_BYTES`]; one that is wholly free is given back.
//! The memory stays valid when the router goes; a later router reaches it as it reaches any other memory.
//!
//! A child of `fork` shares the memory with its parent, as any shared mapping. What the parent allocated, the child can't
//! free.
use crate::lock;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::Segment;
use freeflow_verbs::VerbsError;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

/// Smallest segment, bytes.
const ARENA_BYTES: usize = 16 << 20;
/// Unit of allocation, bytes.
const PAGE_BYTES: usize = 4096;

static ARENAS: Mutex<Vec<Arena>> = Mutex::new(Vec::new());

struct Arena {
    session: Arc<Session>,
    handle: Handle,
    memory: Segment,
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
            return Ok(arena.memory.address() + offset);
        }
    }
    let mut arena = Arena::create(session, bytes.max(ARENA_BYTES))?;
    let offset = arena.ranges.take(bytes).ok_or(VerbsError::NoMemory)?;
    let address = arena.memory.address() + offset;
    arenas.push(arena);
    Ok(address)
}

/// Frees what [`allocate`] gave; says whether it knew the address.
pub fn release(address: usize) -> bool {
    let mut arenas = lock(&ARENAS);
    let Some(index) = arenas.iter().position(|arena| arena.contains(address)) else { return false };
    let arena = &mut arenas[index];
    if arena.session.left_behind() {
        return true;
    }
    let known = arena.ranges.give_back(address - arena.memory.address());
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
    arena.ranges.used.get(&(address - arena.memory.address())).copied()
}

impl Arena {
    fn create(session: &Arc<Session>, bytes: usize) -> Result<Self, VerbsError> {
        let (reply, descriptors) = session.call(&Request::CreateSegment { length: bytes as u64 })?;
        let (Reply::Segment { segment: handle, length }, [memory]) = (reply, &descriptors[..]) else {
            return Err(session.nonsense());
        };
        if length < bytes as u64 {
            return Err(session.nonsense());
        }
        let mapped =
            Segment::map(memory.as_fd(), length as usize).map_err(|_| VerbsError::NoMemory).and_then(|memory| {
                session.command(&Request::MapSegment { segment: handle, address: memory.address() as u64 })?;
                Ok(memory)
            });
        match mapped {
            Ok(memory) => {
                let ranges = Ranges::new(memory.bytes());
                Ok(Self { session: session.clone(), handle, memory, ranges })
            }
            Err(error) => {
                let _ = session.destroy(&Request::DestroySegment { segment: handle });
                Err(error)
            }
        }
    }

    fn contains(&self, address: usize) -> bool {
        (self.memory.address()..self.memory.address() + self.memory.bytes()).contains(&address)
    }

    /// Refused while a memory region lies over it.
    fn destroy(&self) -> bool {
        self.session.destroy(&Request::DestroySegment { segment: self.handle }).is_ok()
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
