//! Memory of the peer that was granted: WRITEs and READs without the router.
//!
//! Invariant: a request whose bytes were copied by a grant counts only if the grants still hold afterwards; else the router
//! gets it, and does it again.
use crate::outgoing::{Home, Payload};
use freeflow_protocol::library::{Reply, Request};
use freeflow_shm::{OwnRange, RequestProducer, Segment, SendDescriptor};
use freeflow_verbs::{SendOpcode, VerbsError};
use std::os::fd::AsFd;

/// Grants of one QP.
const GRANTS_MAX: usize = 64;
/// Keys that are counted at a time.
const WISHES_MAX: usize = 16;
/// What the router does for a key, in bytes, before it is asked for a grant. A grant that is taken back costs the peer a
/// copy of its pages.
const BYTES_BEFORE_GRANT: u64 = 128 << 10;
/// The most between two questions for a key: what one costs is then little beside them.
const BYTES_BETWEEN_MAX: u64 = 64 << 20;
/// What a request costs besides its bytes, in bytes.
const REQUEST_BYTES: u64 = 4096;

/// A piece of the peer's memory.
struct Grant {
    rkey: u32,
    writes: bool,
    /// As requests name it.
    address: u64,
    length: u64,
    /// Where it begins in the segment.
    offset: u64,
    segment: Segment,
}

/// Where a request goes: one of the grants, and the place in its segment.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    grant: usize,
    offset: usize,
}

/// A key that is used and not granted.
struct Wish {
    rkey: u32,
    writes: bool,
    bytes: u64,
    threshold: u64,
}

#[derive(Default)]
pub(crate) struct Grants {
    grants: Vec<Grant>,
    /// The one that was used last.
    last: usize,
    /// As the queue's header said when the first of them came.
    withdrawn: u32,
    wishes: Vec<Wish>,
}

impl Grant {
    /// Where in the segment the bytes stand.
    #[inline]
    fn offset_of(&self, rkey: u32, writes: bool, address: u64, bytes: u32) -> Option<usize> {
        let distance = address.wrapping_sub(self.address);
        let fits = distance <= self.length && u64::from(bytes) <= self.length - distance;
        (self.rkey == rkey && self.writes == writes && fits).then_some((self.offset + distance) as usize)
    }
}

impl Grants {
    /// Where a WRITE or READ goes; `None`: through the router.
    #[inline]
    pub fn find(
        &mut self,
        home: &Home<'_>,
        ring: &RequestProducer,
        request: &SendDescriptor<'_>,
        bytes: u32,
    ) -> Option<Place> {
        if bytes == 0 {
            // Whether it is allowed all the same is for the router to say.
            return None;
        }
        if !self.grants.is_empty() && ring.grants_withdrawn() != self.withdrawn {
            self.drop_all();
        }
        let writes = request.opcode != SendOpcode::RdmaRead;
        let place = self.place(request, writes, bytes);
        if place.is_none() {
            self.wish(home, ring, request, writes, bytes);
        }
        place
    }

    /// Nothing was taken back so far.
    pub fn are_current(&self, ring: &RequestProducer) -> bool {
        ring.grants_withdrawn() == self.withdrawn
    }

    /// Carries out a WRITE or READ. False: the router shall.
    #[inline]
    pub fn reach(&mut self, home: &Home<'_>, ring: &mut RequestProducer, place: Place, payload: &Payload<'_>) -> bool {
        let Place { grant, offset } = place;
        let Grant { segment, writes, .. } = &self.grants[grant];
        let copied =
            if *writes { write(home, segment, offset, payload) } else { read(home, segment, offset, payload.ranges()) };
        if copied && ring.still_granted(self.withdrawn) && home.session.is_surely_alive() {
            if *writes {
                ring.count_write(payload.bytes);
            } else {
                ring.count_read(payload.bytes);
            }
            return true;
        }
        self.drop_all();
        false
    }

    #[inline]
    fn place(&mut self, request: &SendDescriptor<'_>, writes: bool, bytes: u32) -> Option<Place> {
        let offset = |grant: &Grant| grant.offset_of(request.rkey, writes, request.remote_address, bytes);
        if let Some(offset) = self.grants.get(self.last).and_then(offset) {
            return Some(Place { grant: self.last, offset });
        }
        let mut grants = self.grants.iter().enumerate();
        let (grant, offset) = grants.find_map(|(at, grant)| Some((at, offset(grant)?)))?;
        self.last = grant;
        Some(Place { grant, offset })
    }

    fn drop_all(&mut self) {
        self.grants.clear();
        self.last = 0;
    }

    /// Counts what the router does for a key, and asks for a grant when that is worth it.
    #[cold]
    fn wish(
        &mut self,
        home: &Home<'_>,
        ring: &RequestProducer,
        request: &SendDescriptor<'_>,
        writes: bool,
        bytes: u32,
    ) {
        let is_it = |wish: &Wish| wish.rkey == request.rkey && wish.writes == writes;
        let at = self.wishes.iter().position(is_it).unwrap_or_else(|| {
            if self.wishes.len() >= WISHES_MAX {
                self.wishes.remove(0);
            }
            let (rkey, threshold) = (request.rkey, BYTES_BEFORE_GRANT);
            self.wishes.push(Wish { rkey, writes, bytes: 0, threshold });
            self.wishes.len() - 1
        });
        let wish = &mut self.wishes[at];
        wish.bytes += u64::from(bytes) + REQUEST_BYTES;
        if wish.bytes < wish.threshold || self.grants.len() >= GRANTS_MAX {
            return;
        }
        wish.bytes = 0;
        let outcome = self.ask(home, ring, request, writes, bytes);
        let wish = &mut self.wishes[at];
        wish.threshold = match outcome {
            Ok(()) => BYTES_BEFORE_GRANT,
            Err(VerbsError::NotSupported) => (wish.threshold * 16).min(BYTES_BETWEEN_MAX),
            Err(_) => (wish.threshold * 2).min(BYTES_BETWEEN_MAX),
        };
    }

    fn ask(
        &mut self,
        home: &Home<'_>,
        ring: &RequestProducer,
        request: &SendDescriptor<'_>,
        writes: bool,
        bytes: u32,
    ) -> Result<(), VerbsError> {
        let (qp, rkey, address) = (home.handle, request.rkey, request.remote_address);
        let (reply, descriptors) =
            home.session.call(&Request::AskGrant { qp, rkey, address, length: bytes, writes })?;
        let Reply::Grant { address, length, offset, segment_bytes, grants_withdrawn, writable } = reply else {
            return Err(home.session.nonsense());
        };
        let memory = descriptors.first().ok_or(VerbsError::NotSupported)?;
        let fits = offset.checked_add(length).is_some_and(|end| end <= segment_bytes);
        if !fits || writes && !writable {
            return Err(VerbsError::NotSupported);
        }
        let map = if writes { Segment::map } else { Segment::map_for_reading };
        let segment = map(memory.as_fd(), segment_bytes as usize).map_err(|_| VerbsError::NoMemory)?;
        let _ = segment.set_dontfork();
        if self.withdrawn != grants_withdrawn {
            self.drop_all();
        }
        if ring.grants_withdrawn() == grants_withdrawn {
            self.withdrawn = grants_withdrawn;
            self.grants.push(Grant { rkey, writes, address, length, offset, segment });
        }
        Ok(())
    }
}

#[inline]
fn write(home: &Home<'_>, segment: &Segment, offset: usize, payload: &Payload<'_>) -> bool {
    if !payload.inline.is_empty() {
        return segment.write(offset, payload.inline, true).is_ok();
    }
    let mut at = offset;
    let last = payload.ranges().len() - 1;
    for (index, range) in payload.ranges().iter().enumerate() {
        if !home.own.copy_in(*range, segment, at, index == last) {
            return false;
        }
        at += range.bytes as usize;
    }
    true
}

#[inline]
fn read(home: &Home<'_>, segment: &Segment, offset: usize, ranges: &[OwnRange]) -> bool {
    let mut at = offset;
    for range in ranges {
        if !home.own.copy_out(segment, at, *range) {
            return false;
        }
        at += range.bytes as usize;
    }
    true
}
