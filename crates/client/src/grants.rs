//! Memory of the peer that was granted: WRITEs, READs and atomics without the router.
//!
//! Invariant: a request whose bytes were copied by a grant counts only if the grants still hold
//! afterwards; else the router gets it, and does it again. An atomic is announced, and done only if they still hold
//! then: it is never done again.
use crate::payload::{Payload, QpContext};
use freeflow_protocol::FEATURE_DIRECT_ATOMICS;
use freeflow_protocol::library::{GrantAccess, REQUEST_BYTES, Reply, Request};
use freeflow_shm::revocation::Granted;
use freeflow_shm::{OwnMemory, OwnRange, RequestProducer, Segment, SendDescriptor};
use freeflow_verbs::{SendOpcode, VerbsError};
use std::os::fd::AsFd;

/// Grants of one QP; the one that was asked for first goes for another.
const GRANTS_MAX: usize = 512;
/// Keys that are counted at a time.
const KEY_USES_MAX: usize = 16;
/// Bytes that the router carries for a key before it is asked for a grant. A grant that is taken
/// back costs the peer a copy of its pages, and the router says how much more it has to do for
/// that.
const BYTES_BEFORE_GRANT: u64 = 128 << 10;
/// A request that reaches beyond what was granted counts a part of its bytes: a question helps only
/// if the region's memory has grown since.
const OVERLAP_SHARE: u64 = 64;
/// The most between two questions for a key: what one costs is then little beside them.
const BYTES_BETWEEN_MAX: u64 = 64 << 20;

/// A piece of the peer's memory.
struct Grant {
    rkey: u32,
    access: GrantAccess,
    /// As requests name it.
    address: u64,
    length: u64,
    /// Where it begins in the segment.
    offset: u64,
    segment: Segment,
    /// The how many-th answer it was.
    number: u64,
}

/// Where a request goes: one of the grants, and the place in its segment.
#[derive(Clone, Copy)]
pub(crate) struct GrantedRange {
    grant: usize,
    offset: usize,
}

/// A key that is used and not granted.
struct KeyUse {
    rkey: u32,
    access: GrantAccess,
    bytes: u64,
    threshold: u64,
}

#[derive(Default)]
struct GrantTable {
    /// By [`Grant::order`]; no two begin at one place, and none lies within another.
    grants: Vec<Grant>,
    /// The one that was used last.
    last: usize,
    /// Of answers.
    last_number: u64,
}

#[derive(Default)]
pub(crate) struct Grants {
    granted: Granted<GrantTable>,
    key_uses: Vec<KeyUse>,
}

/// The router's answer to a request for a grant.
enum Verdict {
    Given,
    /// The same as before: it does not reach as far as the request.
    Unchanged,
    /// It has to carry so much more first.
    Missing(u64),
}

impl Grant {
    fn order(&self) -> (u32, GrantAccess, u64) {
        (self.rkey, self.access, self.address)
    }

    fn lies_in(&self, other: &Self) -> bool {
        let is_kin = (self.rkey, self.access) == (other.rkey, other.access);
        let distance = self.address.wrapping_sub(other.address);
        is_kin && distance <= other.length && self.length <= other.length - distance
    }

    /// Where in the segment the bytes stand.
    #[inline]
    fn offset_of(&self, rkey: u32, access: GrantAccess, address: u64, bytes: u32) -> Option<usize> {
        let distance = address.wrapping_sub(self.address);
        let fits = distance <= self.length && u64::from(bytes) <= self.length - distance;
        (self.rkey == rkey && self.access == access && fits).then_some((self.offset + distance) as usize)
    }
}

impl GrantTable {
    #[inline]
    fn place(&mut self, request: &SendDescriptor<'_>, access: GrantAccess, bytes: u32) -> Option<GrantedRange> {
        loop {
            let last = self.grants.get(self.last);
            let offset = last.and_then(|last| last.offset_of(request.rkey, access, request.remote_address, bytes));
            if let Some(offset) = offset {
                return Some(GrantedRange { grant: self.last, offset });
            }
            if !self.turn((request.rkey, access, request.remote_address)) {
                return None;
            }
        }
    }

    /// The last one becomes the only one that can have this place. False: it is that already.
    #[cold]
    fn turn(&mut self, wanted: (u32, GrantAccess, u64)) -> bool {
        let at = self.grants.partition_point(|grant| grant.order() <= wanted).saturating_sub(1);
        std::mem::replace(&mut self.last, at) != at
    }

    /// Whether a grant has some of these bytes, and not all.
    fn overlaps(&self, request: &SendDescriptor<'_>, access: GrantAccess, bytes: u32) -> bool {
        let first = (request.rkey, access, request.remote_address);
        let end = (request.rkey, access, request.remote_address.saturating_add(u64::from(bytes)));
        let next = self.grants.partition_point(|grant| grant.order() <= first);
        let begins_inside = |grant: &Grant| grant.offset_of(first.0, access, first.2, 1).is_some();
        self.grants.get(next).is_some_and(|grant| grant.order() < end)
            || next.checked_sub(1).is_some_and(|before| begins_inside(&self.grants[before]))
    }

    fn insert(&mut self, mut grant: Grant) {
        self.last_number += 1;
        grant.number = self.last_number;
        // The router answers with a longer grant of a region that has grown.
        self.grants.retain(|old| !old.lies_in(&grant));
        if self.grants.len() >= GRANTS_MAX {
            let numbers = self.grants.iter().enumerate().map(|(at, grant)| (grant.number, at));
            if let Some((_, oldest)) = numbers.min() {
                self.grants.remove(oldest);
            }
        }
        self.last = self.grants.partition_point(|old| old.order() < grant.order());
        self.grants.insert(self.last, grant);
    }
}

impl Grants {
    /// Where a request goes; `None`: through the router.
    #[inline]
    pub fn find(
        &mut self,
        context: &QpContext<'_>,
        ring: &RequestProducer,
        request: &SendDescriptor<'_>,
        bytes: u32,
    ) -> Option<GrantedRange> {
        if bytes == 0 {
            // Whether it is allowed all the same is for the router to say.
            return None;
        }
        if !self.granted.table().grants.is_empty() && !self.are_current(ring) {
            self.granted.clear();
        }
        let access = GrantAccess::of(request.opcode)?;
        let place = self.granted.table_mut().place(request, access, bytes);
        if place.is_none() {
            // Copies: so no other request is ever made in memory.
            self.key_use(&{ *context }, ring, &{ *request }, access, bytes);
        }
        place
    }

    /// Nothing was taken back so far.
    #[inline]
    pub fn are_current(&self, ring: &RequestProducer) -> bool {
        self.granted.is_current(ring.revocations())
    }

    /// Carries out a WRITE or READ. False: the router shall.
    #[inline]
    pub fn reach(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        place: GrantedRange,
        payload: Payload<'_>,
    ) -> bool {
        let GrantedRange { grant, offset } = place;
        let mut is_write = false;
        let counts = self.granted.copy(ring.revocations(), |table| {
            let Grant { segment, access, .. } = &table.grants[grant];
            is_write = access.writes();
            if is_write {
                write(context, segment, offset, payload)
            } else {
                read(context, segment, offset, payload.ranges)
            }
        });
        if counts && context.session.is_surely_alive() {
            if is_write {
                ring.count_write(payload.bytes);
            } else {
                ring.count_read(payload.bytes);
            }
            return true;
        }
        self.granted.clear();
        false
    }

    /// Carries out an atomic; what was there before goes to `result`. False: the router shall.
    #[inline]
    pub fn change(
        &mut self,
        context: &QpContext<'_>,
        ring: &mut RequestProducer,
        place: GrantedRange,
        request: &SendDescriptor<'_>,
        result: OwnRange,
    ) -> bool {
        let GrantedRange { grant, offset } = place;
        if !offset.is_multiple_of(size_of::<u64>()) {
            // Regions may have their bytes at other addresses than requests name.
            return false;
        }
        let before = self.granted.once(ring.revocations(), ring.entered(), |table| {
            let segment = &table.grants[grant].segment;
            let before = if request.opcode == SendOpcode::CompareSwap {
                segment.compare_swap(offset, request.compare_add, request.swap)
            } else {
                segment.fetch_add(offset, request.compare_add)
            };
            before.ok()
        });
        // Without a router the request is flushed: nobody does it again.
        let Some(before) = before.filter(|_| context.session.is_surely_alive()) else {
            self.granted.clear();
            return false;
        };
        ring.count_atomic(result.bytes);
        context.own.store(before, result)
    }

    /// Counts what the router does for a key, and asks for a grant when that is worth it.
    #[cold]
    fn key_use(
        &mut self,
        context: &QpContext<'_>,
        ring: &RequestProducer,
        request: &SendDescriptor<'_>,
        access: GrantAccess,
        bytes: u32,
    ) {
        let overlaps = self.granted.table().overlaps(request, access, bytes);
        let cost = (u64::from(bytes) + REQUEST_BYTES) / if overlaps { OVERLAP_SHARE } else { 1 };
        let is_it = |key_use: &KeyUse| key_use.rkey == request.rkey && key_use.access == access;
        let at = self.key_uses.iter().position(is_it).unwrap_or_else(|| {
            if self.key_uses.len() >= KEY_USES_MAX {
                self.key_uses.remove(0);
            }
            let (rkey, threshold) = (request.rkey, BYTES_BEFORE_GRANT);
            self.key_uses.push(KeyUse { rkey, access, bytes: 0, threshold });
            self.key_uses.len() - 1
        });
        let key_use = &mut self.key_uses[at];
        key_use.bytes += cost;
        if key_use.bytes < key_use.threshold {
            return;
        }
        key_use.bytes = 0;
        let outcome = self.ask(context, ring, request, access, bytes);
        let key_use = &mut self.key_uses[at];
        key_use.threshold = match outcome {
            Ok(Verdict::Given) => BYTES_BEFORE_GRANT,
            Ok(Verdict::Unchanged) => (key_use.threshold * 2).min(BYTES_BETWEEN_MAX),
            // Of which some is on its way.
            Ok(Verdict::Missing(bytes)) => bytes.clamp(BYTES_BEFORE_GRANT, BYTES_BETWEEN_MAX),
            Err(VerbsError::NotSupported) => (key_use.threshold * 16).min(BYTES_BETWEEN_MAX),
            Err(_) => (key_use.threshold * 2).min(BYTES_BETWEEN_MAX),
        };
    }

    fn ask(
        &mut self,
        context: &QpContext<'_>,
        ring: &RequestProducer,
        request: &SendDescriptor<'_>,
        access: GrantAccess,
        bytes: u32,
    ) -> Result<Verdict, VerbsError> {
        if access == GrantAccess::Atomic && !context.session.speaks(FEATURE_DIRECT_ATOMICS) {
            return Err(VerbsError::NotSupported);
        }
        let (qp, rkey, address) = (context.handle, request.rkey, request.remote_address);
        let (reply, descriptors) =
            context.session.call(&Request::AskGrant { qp, rkey, address, length: bytes, access })?;
        if let Reply::NotEnoughCredit { missing } = reply {
            return Ok(Verdict::Missing(missing));
        }
        let Reply::Grant { address, length, offset, segment_bytes, grants_revoked, writable } = reply else {
            return Err(context.session.nonsense());
        };
        let memory = descriptors.first().ok_or(VerbsError::NotSupported)?;
        let fits = offset.checked_add(length).is_some_and(|end| end <= segment_bytes);
        if !fits || access.writes() && !writable {
            return Err(VerbsError::NotSupported);
        }
        // Mapped again, each of its pages would fault again.
        let is_same = |grant: &Grant| {
            grant.order() == (rkey, access, address) && (grant.length, grant.offset) == (length, offset)
        };
        if self.are_current(ring) && self.granted.table().grants.iter().any(is_same) {
            return Ok(Verdict::Unchanged);
        }
        let map = if access.writes() { Segment::map } else { Segment::map_for_reading };
        let segment = map(memory.as_fd(), segment_bytes as usize).map_err(|_| VerbsError::NoMemory)?;
        let _ = segment.set_dontfork();
        let grant = Grant { rkey, access, address, length, offset, segment, number: 0 };
        self.granted.admit(ring.revocations(), grants_revoked, |table| table.insert(grant));
        Ok(Verdict::Given)
    }
}

#[inline]
fn write(context: &QpContext<'_>, segment: &Segment, offset: usize, payload: Payload<'_>) -> bool {
    if !payload.inline.is_empty() {
        return segment.write(offset, payload.inline, true).is_ok();
    }
    if let [range] = payload.ranges {
        return context.own.copy_in(*range, segment, offset, true);
    }
    write_several(context.own, segment, offset, payload.ranges)
}

#[inline(never)]
fn write_several(own: OwnMemory, segment: &Segment, offset: usize, ranges: &[OwnRange]) -> bool {
    let mut at = offset;
    let last = ranges.len() - 1;
    for (index, range) in ranges.iter().enumerate() {
        if !own.copy_in(*range, segment, at, index == last) {
            return false;
        }
        at += range.bytes as usize;
    }
    true
}

#[inline]
fn read(context: &QpContext<'_>, segment: &Segment, offset: usize, ranges: &[OwnRange]) -> bool {
    if let [range] = ranges {
        return context.own.copy_out(segment, offset, *range);
    }
    read_several(context.own, segment, offset, ranges)
}

#[inline(never)]
fn read_several(own: OwnMemory, segment: &Segment, offset: usize, ranges: &[OwnRange]) -> bool {
    let mut at = offset;
    for range in ranges {
        if !own.copy_out(segment, at, *range) {
            return false;
        }
        at += range.bytes as usize;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 0x1000;
    const READ: GrantAccess = GrantAccess::Read;
    const WRITE: GrantAccess = GrantAccess::Write;

    fn grant(rkey: u32, access: GrantAccess, address: u64, length: u64) -> Grant {
        let segment = Segment::create("test", 4096).unwrap().0;
        Grant { rkey, access, address, length, offset: 0, segment, number: 0 }
    }

    fn request() -> SendDescriptor<'static> {
        SendDescriptor {
            wr_id: 0,
            opcode: SendOpcode::RdmaWrite,
            flags: freeflow_verbs::SendFlags(0),
            immediate: 0,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            remote_srqn: 0,
            sges: &[],
            inline: None,
        }
    }

    /// Where in its segment a request of 8 bytes goes.
    fn offset(grants: &mut GrantTable, rkey: u32, access: GrantAccess, remote_address: u64) -> Option<usize> {
        let request = SendDescriptor { remote_address, rkey, ..request() };
        let place = grants.place(&request, access, 8)?;
        assert_eq!(place.grant, grants.last);
        Some(place.offset)
    }

    #[test]
    fn every_piece_of_a_large_region_is_found_and_the_oldest_goes_for_one_more() {
        let mut grants = GrantTable::default();
        let count = GRANTS_MAX as u64;
        // In no order: 7 and the count have no common divisor.
        for at in 0..count {
            grants.insert(grant(5, WRITE, (at * 7 % count) * PIECE, PIECE));
        }
        for at in 0..count {
            assert_eq!(offset(&mut grants, 5, WRITE, at * PIECE + 16), Some(16));
        }
        for (rkey, access, address) in [(4, WRITE, 0), (6, WRITE, 0), (5, READ, 0), (5, WRITE, PIECE - 4)] {
            assert_eq!(offset(&mut grants, rkey, access, address), None);
        }
        grants.insert(grant(5, READ, 0, PIECE));
        assert_eq!(grants.grants.len(), GRANTS_MAX);
        assert_eq!((offset(&mut grants, 5, READ, 0), offset(&mut grants, 5, WRITE, 0)), (Some(0), None));
        assert_eq!(offset(&mut grants, 5, WRITE, 7 * PIECE), Some(0));
    }

    #[test]
    fn requests_that_reach_beyond_a_grant_are_known() {
        let mut grants = GrantTable::default();
        grants.insert(grant(5, WRITE, 4 * PIECE, PIECE));
        grants.insert(grant(5, WRITE, 6 * PIECE, PIECE));
        let overlaps = |rkey, access, remote_address, bytes: u64| {
            grants.overlaps(&SendDescriptor { remote_address, rkey, ..request() }, access, bytes as u32)
        };
        assert!(overlaps(5, WRITE, 4 * PIECE - 1, 2), "it begins before");
        assert!(overlaps(5, WRITE, 5 * PIECE - 1, 2), "it ends behind");
        assert!(overlaps(5, WRITE, 5 * PIECE, PIECE + 1) && overlaps(5, WRITE, 3 * PIECE, 9 * PIECE));
        for (rkey, access, address, bytes) in [
            (5, WRITE, 5 * PIECE, PIECE),
            (5, WRITE, 3 * PIECE, PIECE),
            (5, WRITE, 7 * PIECE, PIECE),
            (4, WRITE, 3 * PIECE, 9 * PIECE),
            (6, WRITE, 3 * PIECE, 9 * PIECE),
            (5, READ, 3 * PIECE, 9 * PIECE),
        ] {
            assert!(!overlaps(rkey, access, address, bytes), "{rkey} {access:?} {address:#x} {bytes:#x}");
        }
    }

    #[test]
    fn a_piece_that_has_grown_takes_the_place_of_what_lies_in_it() {
        let mut grants = GrantTable::default();
        for at in [2, 3, 5] {
            grants.insert(grant(5, WRITE, at * PIECE, PIECE));
        }
        grants.insert(grant(6, WRITE, 2 * PIECE, PIECE));
        grants.insert(grant(5, WRITE, 2 * PIECE, 2 * PIECE));
        assert_eq!(grants.grants.len(), 3);
        assert_eq!(offset(&mut grants, 5, WRITE, 3 * PIECE), Some(PIECE as usize));
        assert_eq!(offset(&mut grants, 6, WRITE, 2 * PIECE), Some(0));
        grants.insert(grant(5, WRITE, PIECE, 6 * PIECE));
        assert_eq!(offset(&mut grants, 5, WRITE, 5 * PIECE), Some(4 * PIECE as usize));
        assert_eq!(grants.grants.len(), 2);
    }
}
