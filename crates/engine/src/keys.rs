//! Keys of memory regions and windows, and the check that stands before every byte that is touched.
//!
//! Invariant: a [`Span`] is only made here, from a live key of the right protection domain with the
//! rights asked for, and lies wholly inside its region. The upper 24 bits of a key, its *prefix*,
//! are drawn at random and belong to one region or window at a time; all 32 bits are compared. An
//! lkey and an rkey of a region are the same number, its low byte random too; the low byte of a
//! window's key is its owner's to choose (IBTA 10.6.7.2.1). A wrong guess of a remote key costs the
//! guesser its QP.
use crate::random::Random;
use crate::slab::{Owned, Slab};
use crate::table::NumberTable;
use crate::window::MemoryWindow;
use crate::{MrId, MwId, PdId, QpId, SessionId, Span, SpanRegion};
use alloc::vec::Vec;
use freeflow_verbs::{Access, Sge, Shard, VerbsError};
use serde::{Deserialize, Serialize};

/// Keys of all vNICs together: half of the prefixes, so that drawing a fresh one ends soon.
pub(crate) const KEY_COUNT_MAX: usize = 1 << 23;

/// In the table: the index is that of a window.
const WINDOW: u32 = 1 << 31;

const LOW_BITS: u32 = 8;

/// No entry; see [`MemoryRegion::windows`].
pub(crate) const NOWHERE: u32 = u32::MAX;

/// Kept within 56 bytes, so that an entry of the table is one cache line long.
#[derive(Serialize, Deserialize)]
pub(crate) struct MemoryRegion {
    pub session: SessionId,
    pub pd: PdId,
    /// Where the process sees it.
    pub address: u64,
    /// Length less one: the whole address space has a length too.
    pub last: u64,
    /// Where requests name it.
    pub iova: u64,
    pub key: u32,
    /// Pending copies that touch it.
    pub in_flight: u32,
    /// First of the windows bound to it, or [`NOWHERE`].
    pub windows: u32,
    pub rights: u16,
    pub state: RegionState,
    pub backing: Backing,
}

const _: () = assert!(size_of::<Option<MemoryRegion>>() <= 56);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RegionState {
    Live,
    /// Its key is invalid until no copy uses it and the change, which takes something away, is made
    /// or given up.
    Changing,
    /// Its key is invalid; it goes when no copy uses it.
    Leaving,
}

/// Memory under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Backing {
    Process,
    /// Zeros; see [`SessionId::VOID`].
    Void,
}

/// Extent of a region, as its registration gives it.
#[derive(Clone, Copy)]
pub(crate) struct Placement {
    pub address: u64,
    pub last: u64,
    pub iova: u64,
    pub access: Access,
}

impl Owned for MemoryRegion {
    fn session(&self) -> SessionId {
        self.session
    }
}

impl MemoryRegion {
    pub fn new(session: SessionId, pd: PdId, placement: &Placement, backing: Backing) -> Self {
        let Placement { address, last, iova, access } = *placement;
        Self {
            session,
            pd,
            address,
            last,
            iova,
            key: 0,
            in_flight: 0,
            windows: NOWHERE,
            rights: access.0 as u16,
            state: RegionState::Live,
            backing,
        }
    }

    pub fn access(&self) -> Access {
        Access(u32::from(self.rights))
    }

    #[inline]
    pub fn is_on_demand(&self) -> bool {
        self.access().contains(Access::ON_DEMAND)
    }

    pub fn placement(&self) -> Placement {
        Placement { address: self.address, last: self.last, iova: self.iova, access: self.access() }
    }

    pub fn place(&mut self, placement: &Placement) {
        let Placement { address, last, iova, access } = *placement;
        (self.address, self.last, self.iova, self.rights) = (address, last, iova, access.0 as u16);
    }

    /// Whether a change takes nothing away from requests in flight: the same memory at the same
    /// addresses, in the same domain, reached in the same way, with at least the same rights.
    pub fn keeps_all(&self, after: &Placement, pd: PdId) -> bool {
        (self.address, self.last, self.iova) == (after.address, after.last, after.iova)
            && self.pd == pd
            && after.access.contains(self.access())
            && self.is_on_demand() == after.access.contains(Access::ON_DEMAND)
    }

    /// Bytes that count against the vNIC's limit: none for a region of all addresses, which is not
    /// memory by itself.
    pub fn registered_bytes(&self) -> u64 {
        self.last.wrapping_add(1)
    }

    #[inline]
    pub fn admits(&self, key: u32, pd: PdId, needed: Access) -> bool {
        self.key == key && self.pd == pd && self.access().contains(needed) && self.state == RegionState::Live
    }

    #[inline]
    pub fn span(&self, index: u32, address: u64, length: u32) -> Result<Span, KeyFault> {
        let offset = offset_within(self.iova, self.last, address, u64::from(length))?;
        debug_assert!(u64::from(length).saturating_sub(1) <= self.last - offset, "a span lies inside its region");
        let session = if self.backing == Backing::Void { SessionId::VOID } else { self.session };
        let region = SpanRegion::new(index, self.is_on_demand());
        Ok(Span { session, region, address: self.address.wrapping_add(offset), length })
    }
}

/// A key does not cover what is asked for: unknown, of another PD, without the right, or the range
/// leaves the region. A NIC does not report which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyFault;

/// Scope in which a remote key is used: a window may belong to one QP.
#[derive(Clone, Copy)]
pub(crate) struct Reach {
    pub pd: PdId,
    pub responder: QpId,
}

/// Owner of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyHolder {
    Region(u32),
    Window(u32),
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Keys {
    pub regions: Slab<MrId, MemoryRegion>,
    pub windows: Slab<MwId, MemoryWindow>,
    /// By prefix.
    pub table: NumberTable,
    pub key_count_max: usize,
}

impl Keys {
    pub fn new(shard: Shard, key_count_max: usize) -> Self {
        let (regions, windows) = (Slab::new(shard), Slab::new(shard));
        Self { regions, windows, table: NumberTable::new(), key_count_max }
    }

    /// Whether each key's holder is there.
    pub fn is_consistent(&self) -> bool {
        let is_there = |index: u32| match index & WINDOW {
            0 => self.regions.at(index).is_some(),
            _ => self.windows.at(index & !WINDOW).is_some(),
        };
        self.table.pairs().all(|(_, index)| is_there(index))
    }

    /// NoMemory if no key is left.
    pub fn check_room(&self) -> Result<(), VerbsError> {
        if self.table.len() < self.key_count_max { Ok(()) } else { Err(VerbsError::NoMemory) }
    }

    /// A number whose prefix nobody has.
    pub fn draw(&self, random: &mut Random) -> u32 {
        loop {
            let key = random.next_u32();
            if key >> LOW_BITS != 0 && self.table.get(key >> LOW_BITS).is_none() {
                return key;
            }
        }
    }

    /// Enters a region under a fresh key; there is room for it.
    pub fn register(&mut self, random: &mut Random, mut region: MemoryRegion) -> (MrId, u32) {
        let key = self.draw(random);
        region.key = key;
        let id = self.regions.adopt(region);
        self.table.insert(key >> LOW_BITS, id.index);
        (id, key)
    }

    /// The same for a window.
    pub fn register_window(&mut self, random: &mut Random, mut window: MemoryWindow) -> (MwId, u32) {
        let key = self.draw(random);
        window.key = key;
        let id = self.windows.adopt(window);
        self.table.insert(key >> LOW_BITS, id.index | WINDOW);
        (id, key)
    }

    /// From here on its key is unknown.
    pub fn invalidate(&mut self, id: MrId) {
        if let Some(region) = self.regions.get_mut(id)
            && region.state != RegionState::Leaving
        {
            region.state = RegionState::Leaving;
            self.table.remove(region.key >> LOW_BITS);
        }
    }

    pub fn remove(&mut self, id: MrId) -> Option<MemoryRegion> {
        self.invalidate(id);
        self.regions.disown(id)
    }

    pub fn remove_window(&mut self, id: MwId) -> Option<MemoryWindow> {
        let window = self.windows.disown(id)?;
        self.table.remove(window.key >> LOW_BITS);
        Some(window)
    }

    /// The object with this prefix of a key; whether the whole key is its own is another question.
    #[inline]
    pub fn holder(&self, key: u32) -> Option<KeyHolder> {
        let index = self.table.get(key >> LOW_BITS)?;
        Some(if index & WINDOW == 0 { KeyHolder::Region(index) } else { KeyHolder::Window(index & !WINDOW) })
    }

    /// The bytes that an lkey names, if it covers them. A length of zero must be dealt with before:
    /// it needs no key.
    #[inline(always)] // a span that is only checked is never made
    pub fn resolve(&self, key: u32, pd: PdId, address: u64, length: u32, needed: Access) -> Result<Span, KeyFault> {
        match self.holder(key) {
            Some(KeyHolder::Region(index)) => self.resolve_region(index, (key, pd), address, length, needed),
            _ => Err(KeyFault),
        }
    }

    #[inline(always)]
    pub fn resolve_region(
        &self,
        index: u32,
        (key, pd): (u32, PdId),
        address: u64,
        length: u32,
        needed: Access,
    ) -> Result<Span, KeyFault> {
        let (_, region) = self.regions.at(index).ok_or(KeyFault)?;
        if region.admits(key, pd, needed) { region.span(index, address, length) } else { Err(KeyFault) }
    }

    /// The bytes that an rkey names, which may be a window's (IBTA 10.6.7).
    #[inline(always)]
    pub fn resolve_remote(
        &self,
        key: u32,
        reach: Reach,
        address: u64,
        length: u32,
        needed: Access,
    ) -> Result<Span, KeyFault> {
        match self.holder(key) {
            Some(KeyHolder::Region(index)) => self.resolve_region(index, (key, reach.pd), address, length, needed),
            Some(KeyHolder::Window(index)) => self.resolve_window(index, (key, reach), (address, length), needed),
            None => Err(KeyFault),
        }
    }

    #[inline(never)]
    pub fn resolve_window(
        &self,
        index: u32,
        (key, reach): (u32, Reach),
        range: (u64, u32),
        needed: Access,
    ) -> Result<Span, KeyFault> {
        let span = self.window(index)?.span(key, reach, range, needed)?;
        let index = span.region.index();
        let (_, region) = self.regions.at(index).ok_or(KeyFault)?;
        Ok(Span { region: SpanRegion::new(index, region.is_on_demand()), ..span })
    }

    /// Whether an rkey gives these rights at all, wherever it lies.
    pub fn check_remote_rights(&self, key: u32, reach: Reach, needed: Access) -> Result<(), KeyFault> {
        let admitted = match self.holder(key).ok_or(KeyFault)? {
            KeyHolder::Window(index) => self.window(index)?.admits(key, reach, needed),
            KeyHolder::Region(index) => {
                self.regions.at(index).is_some_and(|(_, region)| region.admits(key, reach.pd, needed))
            }
        };
        if admitted { Ok(()) } else { Err(KeyFault) }
    }

    pub fn window(&self, index: u32) -> Result<&MemoryWindow, KeyFault> {
        self.windows.at(index).map(|(_, window)| window).ok_or(KeyFault)
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

/// Offset of a range within another one that is `last + 1` bytes long.
#[inline]
pub(crate) fn offset_within(start: u64, last: u64, address: u64, length: u64) -> Result<u64, KeyFault> {
    let offset = address.checked_sub(start).ok_or(KeyFault)?;
    let room = last.checked_sub(offset).ok_or(KeyFault)?;
    if length.saturating_sub(1) > room { Err(KeyFault) } else { Ok(offset) }
}

/// The rights a region is registered with: remote writing needs local writing (IBTA 10.6.3.5).
/// Optional bits are ignored; HUGETLB and ON_DEMAND are hints. FLUSH_PERSISTENT is NotSupported: no
/// memory here outlives a power failure.
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
    if required.contains(Access::FLUSH_PERSISTENT) {
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
        let mut keys = Keys::new(Shard::ONLY, KEY_COUNT_MAX);
        let placement = Placement { address, last: length.wrapping_sub(1), iova, access };
        let region = MemoryRegion::new(SESSION, PD, &placement, Backing::Process);
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
        let (keys, id, key) = with(0, 0, 0, Access(0));
        let resolve = |address, length| keys.resolve(key, PD, address, length, Access(0)).is_ok();
        assert!(resolve(0, u32::MAX) && resolve(u64::MAX, 1) && !resolve(u64::MAX, 2));
        assert_eq!(keys.regions.get(id).unwrap().registered_bytes(), 0);
    }

    #[test]
    fn domains_rights_and_invalid_keys() {
        let (mut keys, id, key) = with(0, 64, 0, Access::REMOTE_READ);
        let other = PdId { index: 2, generation: 0 };
        assert!(keys.resolve(key, PD, 0, 64, Access::REMOTE_READ).is_ok());
        assert!(keys.resolve(key, other, 0, 64, Access::REMOTE_READ).is_err());
        assert!(keys.resolve(key, PD, 0, 64, Access::LOCAL_WRITE).is_err());
        for bit in 0..32 {
            assert!(keys.resolve(key ^ 1 << bit, PD, 0, 64, Access(0)).is_err(), "all bits count");
        }
        keys.regions.get_mut(id).unwrap().state = RegionState::Changing;
        assert!(keys.resolve(key, PD, 0, 64, Access(0)).is_err());
        keys.regions.get_mut(id).unwrap().state = RegionState::Live;
        keys.invalidate(id);
        assert!(keys.resolve(key, PD, 0, 64, Access(0)).is_err());
        assert!(keys.remove(id).is_some());
        assert_eq!(keys.table.len(), 0);
    }

    #[test]
    fn keys_run_out() {
        let mut keys = Keys::new(Shard::ONLY, 3);
        let mut random = Random::new(&Seed([9; 32]));
        let placement = Placement { address: 0, last: 0, iova: 0, access: Access(0) };
        let region = || MemoryRegion::new(SESSION, PD, &placement, Backing::Process);
        let made: Vec<_> = (0..3).map(|_| keys.register(&mut random, region()).0).collect();
        assert_eq!(keys.check_room(), Err(VerbsError::NoMemory));
        keys.remove(made[1]);
        assert_eq!(keys.check_room(), Ok(()));
    }

    #[test]
    fn nothing_behind_a_void() {
        let mut keys = Keys::new(Shard::ONLY, KEY_COUNT_MAX);
        let placement = Placement { address: 0, last: u64::MAX, iova: 0, access: Access::LOCAL_WRITE };
        let region = MemoryRegion::new(SESSION, PD, &placement, Backing::Void);
        let (_, key) = keys.register(&mut Random::new(&Seed([9; 32])), region);
        let span = keys.resolve(key, PD, 0xdead_beef, 7, Access::LOCAL_WRITE).unwrap();
        assert_eq!((span.session, span.address, span.length), (SessionId::VOID, 0xdead_beef, 7));
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
        assert_eq!(check_access(Access::FLUSH_PERSISTENT), Err(NotSupported));
        let relaxed = Access(1 << 20).union(Access::LOCAL_WRITE).union(Access::REMOTE_WRITE).union(Access::MW_BIND);
        assert_eq!(check_access(relaxed), Ok(relaxed.required()));
        for hint in [Access::HUGETLB, Access::ON_DEMAND, Access::ZERO_BASED, Access::FLUSH_GLOBAL] {
            assert_eq!(check_access(hint), Ok(hint));
        }
    }
}
