//! All state of an engine as bytes, and back: versioned, and the same bytes for the same state.
//!
//! A snapshot is [`MAGIC`], [`SNAPSHOT_VERSION`] and a checksum of the rest (little-endian), then the fields of [`Engine`] in
//! postcard's encoding. Not state, and not in it: the lists of the chunk in hand, which no call leaves anything in.
//!
//! Invariant: an engine that was restored behaves as the one that was written would have: a run that is cut into pieces at
//! any calls gives the same calls of the environment, the same answers and in the end the same snapshot.
use crate::Engine;
use crate::schedule::Scheduler;
use alloc::vec::Vec;
use thiserror::Error;

/// What every snapshot begins with.
const MAGIC: [u8; 8] = *b"ffengine";
/// Goes up with each change of what is written: there is no reading of other versions.
pub const SNAPSHOT_VERSION: u32 = 9;
const HEADER_BYTES: usize = MAGIC.len() + 4 + 8;

/// Why bytes are no snapshot that can be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SnapshotError {
    /// They do not begin as one.
    #[error("not a snapshot of an engine")]
    NotASnapshot,
    /// Another version's.
    #[error("a snapshot of version {found}, this is {SNAPSHOT_VERSION}")]
    Version { found: u32 },
    /// Cut off, changed, or contradicting themselves.
    #[error("a damaged snapshot")]
    Damaged,
}

/// What is written and read, field by field in this order (in groups, since a tuple has its limits); and what is made anew.
/// Taking an engine apart and putting it together names all its fields, so that a new one can't be forgotten.
macro_rules! state {
    ($(($($field:ident),* $(,)?)),* ; $($made:ident: $new:expr),*) => {
        impl Engine {
            fn encode(&self, bytes: Vec<u8>) -> Vec<u8> {
                let Self { $($($field,)*)* $($made: _),* } = self;
                let state = ($(($($field),*)),*);
                postcard::to_extend(&state, bytes).expect("plain data has an encoding")
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                let (($(($($field),*)),*), rest) = postcard::take_from_bytes(bytes).ok()?;
                rest.is_empty().then(|| Self { $($($field,)*)* $($made: $new),* })
            }
        }
    };
}

state! {
    (random, vnics, sessions, contexts, pds, cqs, srqs, ahs, keys, xrc, groups),
    (qps, qpns, resting, timers, flights, ready, peers, hosts, strangers, acks_owed, drops, policy, networks, schedule);
    from: Vec::with_capacity(freeflow_verbs::SGE_COUNT_MAX),
    to: Vec::with_capacity(freeflow_verbs::SGE_COUNT_MAX)
}

impl Engine {
    /// All state, for [`Engine::restore`]. Tokens, names and keys stay what they are; the environment's part (rings,
    /// memory, copies that are pending, what peers said) is not in it.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut bytes = self.encode(alloc::vec![0; HEADER_BYTES]);
        let checksum = checksum(&bytes[HEADER_BYTES..]);
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&SNAPSHOT_VERSION.to_le_bytes());
        bytes[12..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The engine that a snapshot was taken of.
    pub fn restore(snapshot: &[u8]) -> Result<Self, SnapshotError> {
        let header: &[u8; HEADER_BYTES] = snapshot.first_chunk().ok_or(SnapshotError::NotASnapshot)?;
        let (magic, rest) = header.split_at(MAGIC.len());
        let (version, expected) = rest.split_at(4);
        if magic != MAGIC {
            return Err(SnapshotError::NotASnapshot);
        }
        let found = u32::from_le_bytes(version.try_into().expect("four bytes"));
        if found != SNAPSHOT_VERSION {
            return Err(SnapshotError::Version { found });
        }
        let body = &snapshot[HEADER_BYTES..];
        if expected != checksum(body).to_le_bytes() {
            return Err(SnapshotError::Damaged);
        }
        Self::decode(body).filter(Self::is_consistent).ok_or(SnapshotError::Damaged)
    }

    /// Whether the tables that are followed without a second look lead to something.
    fn is_consistent(&self) -> bool {
        self.keys.is_consistent()
            && self.qpns.pairs().all(|(qpn, index)| self.qps.at(index).is_some() && !self.resting.has(qpn))
            && self.resting.is_consistent()
            && self.timers.owners().all(|qp| self.qps.get(qp).is_some())
            && self.flights.iter().all(|(_, flight)| flight.is_consistent())
            && self.hosts_are_consistent()
            && self.schedule.is_consistent()
            && self.vnics.iter().all(|(_, vnic)| self.networks.has(vnic.network))
    }
}

/// FNV-1a, 64 bits: against damage, not against forgers.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Arrays that are longer than serde's own.
pub(crate) mod array {
    use alloc::vec::Vec;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer, T: Serialize, const N: usize>(
        array: &[T; N],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        array.as_slice().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>, T: Deserialize<'de>, const N: usize>(
        deserializer: D,
    ) -> Result<[T; N], D::Error> {
        let items = Vec::<T>::deserialize(deserializer)?;
        items.try_into().map_err(|_| D::Error::custom("another length"))
    }
}
