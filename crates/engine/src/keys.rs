//! Memory regions and their keys: registration, and the check that stands before every byte that is touched.
//!
//! Invariant: a [`Span`] is only made here, from a live key of the right protection domain with the rights asked for,
//! and lies wholly inside its region. An lkey and an rkey of a region are the same random number; a guess of one has a
//! chance of one in 2^32 for each live region and costs the guesser its QP.
use crate::slab::{Owned, Slab};
use crate::table::NumberTable;
use crate::{MrId, PdId, SessionId, Span};
use alloc::vec::Vec;
use freeflow_verbs::{Access, Sge, VerbsError};

use crate::random::Random;

pub(crate) struct MemoryRegion {
    pub session: SessionId,
    pub pd: PdId,
    /// Where the process sees it.
    pub address: u64,
    pub length: u64,
    /// Where requests name it.
    pub iova: u64,
    pub access: Access,
    pub key: u32,
    /// Pending copies that touch it.
    pub flights: u32,
    pub state: RegionState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionState {
    Live,
    /// Its key is invalid; it goes when no copy uses it.
    Leaving,
}

impl Owned for MemoryRegion {
    fn session(&self) -> SessionId {
        self.session
    }
}

/// A key does not cover what is asked for: unknown, of another PD, without the right, or the range leaves the region.
/// A NIC does not tell which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyFault;

pub(crate) struct Keys {
    pub regions: Slab<MrId, MemoryRegion>,
    table: NumberTable,
}

impl Keys {
    pub fn new() -> Self {
        Self { regions: Slab::new(), table: NumberTable::new() }
    }

    /// Enters a region under a fresh key.
    pub fn register(&mut self, random: &mut Random, mut region: MemoryRegion) -> (MrId, u32) {
        let key = loop {
            let key = random.next_u32();
            if key != 0 && self.table.get(key).is_none() {
                break key;
            }
        };
        region.key = key;
        let id = self.regions.adopt(region);
        self.table.insert(key, id.index);
        (id, key)
    }

    /// From here on its key is unknown.
    pub fn invalidate(&mut self, id: MrId) {
        if let Some(region) = self.regions.get_mut(id)
            && region.state == RegionState::Live
        {
            region.state = RegionState::Leaving;
            self.table.remove(region.key);
        }
    }

    pub fn remove(&mut self, id: MrId) -> Option<MemoryRegion> {
        self.invalidate(id);
        self.regions.disown(id)
    }

    /// The bytes that a key names, if it covers them. A length of zero must be dealt with before: it needs no key.
    pub fn resolve(&self, key: u32, pd: PdId, address: u64, length: u32, needed: Access) -> Result<Span, KeyFault> {
        let index = self.table.get(key).ok_or(KeyFault)?;
        let (_, region) = self.regions.at(index).ok_or(KeyFault)?;
        if region.pd != pd || !region.access.contains(needed) {
            return Err(KeyFault);
        }
        let offset = address.checked_sub(region.iova).ok_or(KeyFault)?;
        let room = region.length.checked_sub(offset).ok_or(KeyFault)?;
        if u64::from(length) > room {
            return Err(KeyFault);
        }
        Ok(Span { session: region.session, mr_index: index, address: region.address.wrapping_add(offset), length })
    }

    /// Checks the first `bytes` of a scatter/gather list.
    pub fn check(&self, sges: &[Sge], pd: PdId, bytes: u64, needed: Access) -> Result<(), KeyFault> {
        let mut left = bytes;
        for sge in sges {
            let length = left.min(u64::from(sge.length)) as u32;
            if length > 0 {
                self.resolve(sge.lkey, pd, sge.address, length, needed)?;
            }
            left -= u64::from(length);
        }
        if left == 0 { Ok(()) } else { Err(KeyFault) }
    }

    /// Appends to `spans` the bytes from `offset` on, `bytes` of them, of a scatter/gather list.
    pub fn gather(&self, sges: &[Sge], part: Part, access: Access, spans: &mut Vec<Span>) -> Result<(), KeyFault> {
        let (mut skip, mut left) = (part.offset, part.bytes);
        for sge in sges {
            if left == 0 {
                break;
            }
            let whole = u64::from(sge.length);
            if skip >= whole {
                skip -= whole;
                continue;
            }
            let length = (whole - skip).min(left);
            let address = sge.address.checked_add(skip).ok_or(KeyFault)?;
            spans.push(self.resolve(sge.lkey, part.pd, address, length as u32, access)?);
            left -= length;
            skip = 0;
        }
        if left == 0 { Ok(()) } else { Err(KeyFault) }
    }
}

/// A piece of a scatter/gather list.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub pd: PdId,
    pub offset: u64,
    pub bytes: u64,
}

/// The rights a region is registered with: remote writing needs local writing (IBTA 10.6.3.5); what FreeFlow does not do
/// is refused, optional bits are ignored, HUGETLB is a hint.
pub(crate) fn check_access(access: Access) -> Result<Access, VerbsError> {
    let required = access.required();
    let known = Access(0x3ff);
    if required.0 & !known.0 != 0 {
        return Err(VerbsError::InvalidArgument);
    }
    let writes_remotely = required.intersects(Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC));
    if writes_remotely && !required.contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::InvalidArgument);
    }
    let unsupported =
        Access::ON_DEMAND.union(Access::ZERO_BASED).union(Access::FLUSH_GLOBAL).union(Access::FLUSH_PERSISTENT);
    if required.intersects(unsupported) {
        return Err(VerbsError::NotSupported);
    }
    Ok(required)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Seed;

    const SESSION: SessionId = SessionId { index: 3, generation: 0 };
    const PD: PdId = PdId { index: 1, generation: 0 };

    fn with(address: u64, length: u64, iova: u64, access: Access) -> (Keys, MrId, u32) {
        let mut keys = Keys::new();
        let region = MemoryRegion {
            session: SESSION,
            pd: PD,
            address,
            length,
            iova,
            access,
            key: 0,
            flights: 0,
            state: RegionState::Live,
        };
        let (id, key) = keys.register(&mut Random::new(&Seed([9; 32])), region);
        (keys, id, key)
    }

    #[test]
    fn ranges() {
        let (keys, _, key) = with(0x1000, 0x100, 0x7000, Access::LOCAL_WRITE);
        let resolve = |address, length| keys.resolve(key, PD, address, length, Access(0)).map(|span| span.address);
        assert_eq!(resolve(0x7000, 0x100), Ok(0x1000));
        assert_eq!(resolve(0x70ff, 1), Ok(0x10ff));
        assert_eq!(resolve(0x70ff, 2), Err(KeyFault));
        assert_eq!(resolve(0x6fff, 1), Err(KeyFault));
        assert_eq!(resolve(u64::MAX, u32::MAX), Err(KeyFault));
        assert_eq!(resolve(0x7101, 0), Err(KeyFault));
    }

    #[test]
    fn the_last_bytes_of_the_address_space() {
        let (keys, _, key) = with(0x1000, 0x1000, u64::MAX - 0xfff, Access(0));
        let resolve = |address, length| keys.resolve(key, PD, address, length, Access(0)).is_ok();
        assert!(resolve(u64::MAX, 1));
        assert!(!resolve(u64::MAX, 2));
        assert!(!resolve(0, 1));
    }

    #[test]
    fn domains_rights_and_invalid_keys() {
        let (mut keys, id, key) = with(0, 64, 0, Access::REMOTE_READ);
        let other = PdId { index: 2, generation: 0 };
        assert!(keys.resolve(key, PD, 0, 64, Access::REMOTE_READ).is_ok());
        assert!(keys.resolve(key, other, 0, 64, Access::REMOTE_READ).is_err());
        assert!(keys.resolve(key, PD, 0, 64, Access::LOCAL_WRITE).is_err());
        assert!(keys.resolve(key ^ 1, PD, 0, 64, Access(0)).is_err());
        keys.invalidate(id);
        assert!(keys.resolve(key, PD, 0, 64, Access(0)).is_err());
        assert!(keys.remove(id).is_some());
    }

    #[test]
    fn a_piece_of_a_list() {
        let (keys, _, key) = with(0x1000, 0x100, 0x1000, Access(0));
        let sge = |address, length| Sge { address, length, lkey: key };
        let list = [sge(0x1000, 8), Sge::default(), sge(0x1020, 16), sge(0x1040, 8)];
        let mut spans = Vec::new();
        keys.gather(&list, Part { pd: PD, offset: 4, bytes: 24 }, Access(0), &mut spans).unwrap();
        let found: Vec<_> = spans.iter().map(|span| (span.address, span.length)).collect();
        assert_eq!(found, [(0x1004, 4), (0x1020, 16), (0x1040, 4)]);
        assert!(keys.gather(&list, Part { pd: PD, offset: 4, bytes: 29 }, Access(0), &mut spans).is_err());
        assert!(keys.check(&list, PD, 32, Access(0)).is_ok());
        assert!(keys.check(&list, PD, 33, Access(0)).is_err());
    }

    #[test]
    fn registration_rights() {
        use VerbsError::{InvalidArgument, NotSupported};
        assert_eq!(check_access(Access::REMOTE_WRITE), Err(InvalidArgument));
        assert_eq!(check_access(Access::REMOTE_ATOMIC), Err(InvalidArgument));
        assert_eq!(check_access(Access(1 << 12)), Err(InvalidArgument));
        assert_eq!(check_access(Access::ON_DEMAND), Err(NotSupported));
        assert_eq!(check_access(Access::ZERO_BASED), Err(NotSupported));
        assert_eq!(check_access(Access::FLUSH_GLOBAL), Err(NotSupported));
        let relaxed = Access(1 << 20).union(Access::LOCAL_WRITE).union(Access::REMOTE_WRITE).union(Access::MW_BIND);
        assert_eq!(check_access(relaxed), Ok(relaxed.required()));
        assert!(check_access(Access::HUGETLB).is_ok());
    }
}
