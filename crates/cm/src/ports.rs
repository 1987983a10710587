//! Owners of ports. Each vNIC has its own ports; the external address, which several vNICs share,
//! gives each port to one.
//!
//! However many identifiers share a port, and however few ports are left: no question costs more
//! than O(log n).
use crate::address::{is_ipv4, is_wildcard};
use crate::limits::{decrement, keeps_to_its_share};
use crate::{ScopedGid, VnicRef};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use freeflow_protocol::cm::PortSpace;
use freeflow_protocol::library::Handle;
use freeflow_verbs::{Gid, VerbsError};

/// Ports that are given to who asks for any: Linux's `ip_local_port_range`.
const EPHEMERAL_FIRST: u16 = 32_768;
const EPHEMERAL_LAST: u16 = 60_999;
const EPHEMERAL_COUNT: u32 = (EPHEMERAL_LAST - EPHEMERAL_FIRST) as u32 + 1;
/// Random tries before the next free one is taken.
const RANDOM_TRIES: u32 = 32;

/// A port of a vNIC.
pub(crate) type PortKey = (VnicRef, PortSpace, u16);

/// Facts that decide whether another may have the same port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PortClaim {
    pub gid: Gid,
    /// It is there for its own family alone.
    pub af_only: bool,
    /// It says that it shares.
    pub reuse: bool,
    pub listening: bool,
}

impl PortClaim {
    /// As Linux: AddressNotAvailable beside a wildcard, AddressInUse at the same address.
    fn check_beside(&self, other: &Self) -> Result<(), VerbsError> {
        let shares = !other.listening && self.reuse && other.reuse;
        let apart = self.af_only && other.af_only && is_ipv4(self.gid) != is_ipv4(other.gid);
        if shares || apart {
            return Ok(());
        }
        if is_wildcard(self.gid) || is_wildcard(other.gid) {
            return Err(VerbsError::AddressNotAvailable);
        }
        if self.gid == other.gid { Err(VerbsError::AddressInUse) } else { Ok(()) }
    }
}

/// Owners of a vNIC's ports.
#[derive(Default)]
struct PortUse {
    /// How many of each kind; there are few kinds, whatever their number.
    claims: BTreeMap<PortClaim, u32>,
    listeners: BTreeSet<Handle>,
}

/// Owner of a port at an external address, and how many of its identifiers have it.
struct Reservation {
    vnic: VnicRef,
    users: u32,
}

/// Which ephemeral ports somebody has.
struct Taken {
    words: Box<[u64; Self::WORDS]>,
    count: u32,
}

impl Taken {
    const WORDS: usize = EPHEMERAL_COUNT.div_ceil(u64::BITS) as usize;
    /// Of the last word: what is no port.
    const BEYOND: u64 = !0 << (EPHEMERAL_COUNT % u64::BITS);

    fn set(&mut self, number: u32, taken: bool) {
        let (word, bit) = (&mut self.words[(number / u64::BITS) as usize], 1 << (number % u64::BITS));
        debug_assert_ne!(*word & bit != 0, taken);
        *word ^= bit;
        self.count = if taken { self.count + 1 } else { self.count - 1 };
    }
}

impl Default for Taken {
    fn default() -> Self {
        Self { words: Box::new([0; Self::WORDS]), count: 0 }
    }
}

/// Ephemeral ports at an external address.
#[derive(Default)]
struct Shared {
    taken: Taken,
    by_vnic: BTreeMap<VnicRef, u32>,
}

impl Shared {
    /// Whether the vNIC may have one more: whoever is greedy, something is left for the next.
    fn is_fair(&self, vnic: VnicRef) -> bool {
        let held = self.by_vnic.get(&vnic).copied().unwrap_or(0);
        keeps_to_its_share(held, EPHEMERAL_COUNT - self.taken.count)
    }
}

fn ephemeral(port: u16) -> Option<u32> {
    (EPHEMERAL_FIRST..=EPHEMERAL_LAST).contains(&port).then(|| u32::from(port - EPHEMERAL_FIRST))
}

#[derive(Default)]
pub(crate) struct Ports {
    bound: BTreeMap<PortKey, PortUse>,
    /// Ephemeral ones among them.
    taken: BTreeMap<(VnicRef, PortSpace), Taken>,
    external: BTreeMap<(ScopedGid, PortSpace, u16), Reservation>,
    /// Ephemeral ones among them.
    shared: BTreeMap<(ScopedGid, PortSpace), Shared>,
}

impl Ports {
    /// Listeners at a port.
    pub fn listeners(&self, key: PortKey) -> impl Iterator<Item = Handle> {
        self.bound.get(&key).into_iter().flat_map(|port| port.listeners.iter().rev().copied())
    }

    pub fn enter(&mut self, key: PortKey, handle: Handle, port_claim: PortClaim) {
        if let (false, Some(number)) = (self.bound.contains_key(&key), ephemeral(key.2)) {
            self.taken.entry((key.0, key.1)).or_default().set(number, true);
        }
        let port = self.bound.entry(key).or_default();
        *port.claims.entry(port_claim).or_default() += 1;
        if port_claim.listening {
            port.listeners.insert(handle);
        }
    }

    /// `stand`: as it entered.
    pub fn leave(&mut self, key: PortKey, handle: Handle, port_claim: PortClaim) {
        let Some(port) = self.bound.get_mut(&key) else { return };
        decrement(&mut port.claims, port_claim);
        if port_claim.listening {
            port.listeners.remove(&handle);
        }
        if !port.claims.is_empty() {
            return;
        }
        self.bound.remove(&key);
        if let (Some(number), Some(taken)) = (ephemeral(key.2), self.taken.get_mut(&(key.0, key.1))) {
            taken.set(number, false);
            if taken.count == 0 {
                self.taken.remove(&(key.0, key.1));
            }
        }
    }

    /// A port that nobody of the vNIC has, nor anybody at the external address where it is wanted.
    /// The search begins anywhere.
    pub fn any(
        &self,
        vnic: VnicRef,
        port_space: PortSpace,
        external: Option<ScopedGid>,
        mut random: impl FnMut() -> u32,
    ) -> Option<u16> {
        let own = self.taken.get(&(vnic, port_space));
        let shared = external.and_then(|place| self.shared.get(&(place, port_space)));
        if shared.is_some_and(|shared| !shared.is_fair(vnic)) {
            return None;
        }
        let taken_in = |word: usize| {
            let beyond = if word == Taken::WORDS - 1 { Taken::BEYOND } else { 0 };
            own.map_or(0, |own| own.words[word]) | shared.map_or(0, |shared| shared.taken.words[word]) | beyond
        };
        let is_free = |number: &u32| taken_in((number / u64::BITS) as usize) & 1 << (number % u64::BITS) == 0;
        let start = random() % EPHEMERAL_COUNT;
        let next_free = || {
            let (first, bit) = ((start / u64::BITS) as usize, start % u64::BITS);
            (0..=Taken::WORDS).find_map(|step| {
                let word = (first + step) % Taken::WORDS;
                let free = !taken_in(word) & if step == 0 { !0 << bit } else { !0 };
                (free != 0).then(|| word as u32 * u64::BITS + free.trailing_zeros())
            })
        };
        let lucky = (0..RANDOM_TRIES).map(|_| random() % EPHEMERAL_COUNT).find(is_free);
        lucky.or_else(next_free).map(|number| EPHEMERAL_FIRST + number as u16)
    }

    /// Whether one that wants to stand at this port may do so beside those that have it. `itself`:
    /// how it stands there now.
    pub fn check(&self, key: PortKey, wanted: PortClaim, itself: Option<PortClaim>) -> Result<(), VerbsError> {
        let Some(port) = self.bound.get(&key) else { return Ok(()) };
        let others = port.claims.iter().filter(|(port_claim, count)| **count > u32::from(itself == Some(**port_claim)));
        others.map(|(port_claim, _)| port_claim).try_for_each(|port_claim| wanted.check_beside(port_claim))
    }

    /// False: another has it, or the vNIC has its share of ephemeral ones.
    pub fn reserve_external(&mut self, place: ScopedGid, port_space: PortSpace, port: u16, vnic: VnicRef) -> bool {
        let key = (place, port_space, port);
        if let Some(reservation) = self.external.get_mut(&key) {
            let granted = reservation.vnic == vnic;
            reservation.users += u32::from(granted);
            return granted;
        }
        if let Some(number) = ephemeral(port) {
            let shared = self.shared.entry((place, port_space)).or_default();
            if !shared.is_fair(vnic) {
                return false;
            }
            shared.taken.set(number, true);
            *shared.by_vnic.entry(vnic).or_default() += 1;
        }
        self.external.insert(key, Reservation { vnic, users: 1 });
        true
    }

    pub fn release_external(&mut self, place: ScopedGid, port_space: PortSpace, port: u16) {
        let key = (place, port_space, port);
        let Some(reservation) = self.external.get_mut(&key) else { return };
        reservation.users -= 1;
        if reservation.users > 0 {
            return;
        }
        let vnic = reservation.vnic;
        self.external.remove(&key);
        if let (Some(number), Some(shared)) = (ephemeral(port), self.shared.get_mut(&(place, port_space))) {
            shared.taken.set(number, false);
            decrement(&mut shared.by_vnic, vnic);
            if shared.taken.count == 0 {
                self.shared.remove(&(place, port_space));
            }
        }
    }

    /// The vNIC that serves this port at an external address.
    pub fn external_owner(&self, place: ScopedGid, port_space: PortSpace, port: u16) -> Option<VnicRef> {
        self.external.get(&(place, port_space, port)).map(|reservation| reservation.vnic)
    }

    pub fn is_empty(&self) -> bool {
        self.bound.is_empty() && self.taken.is_empty() && self.external.is_empty() && self.shared.is_empty()
    }
}
