//! All state of an engine as bytes, and back: versioned, and the same bytes for the same state.
//!
//! A snapshot is [`MAGIC`], [`SNAPSHOT_VERSION`] and a checksum of the rest (little-endian), then
//! the fields of [`Engine`] in postcard's encoding. Not state, and not in it: the lists of the
//! chunk in hand, which no call leaves anything in.
//!
//! Invariant: an engine that was restored behaves as the one that was written would have: a run
//! that is cut into pieces at any calls gives the same calls of the environment, the same answers
//! and in the end the same snapshot.
use crate::Engine;
use crate::completer::Completer;
use crate::requester::Requester;
use crate::responder::Responder;
use crate::schedule::Scheduler;
use alloc::vec::Vec;
use freeflow_verbs::{Qpn, SGE_COUNT_MAX, Shard};
use thiserror::Error;

/// First bytes of every snapshot.
const MAGIC: [u8; 8] = *b"ffengine";
/// Goes up with each change of what is written: there is no reading of other versions.
pub const SNAPSHOT_VERSION: u32 = 17;
const HEADER_BYTES: usize = MAGIC.len() + 4 + 8;

/// Why bytes are no snapshot that can be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SnapshotError {
    /// They do not begin as one.
    #[error("not a snapshot of an engine")]
    NotASnapshot,
    /// Another version's.
    #[error("a snapshot of version {found}, this is {SNAPSHOT_VERSION}")]
    Version {
        /// The version that wrote them.
        found: u32,
    },
    /// Cut off, changed, or contradicting themselves.
    #[error("a damaged snapshot")]
    Damaged,
}

// Both functions name the fields of all parts, so that a new one can't be forgotten.
impl Engine {
    fn encode(&self, bytes: Vec<u8>) -> Vec<u8> {
        let Self { shard, requester, random, contexts, pds, networks, quarantine, unresolved } = self;
        let Requester { responder, groups } = requester;
        let Responder { completer, sessions, xrc, qpns, policy, schedule, peers, acks_owed, acks_waiting, drops } =
            responder;
        let Completer { vnics, cqs, srqs, ahs, keys, qps, timers, in_flight, ready, hosts, from: _, to: _ } = completer;
        // In groups, since a tuple has its limits.
        let state = (
            (shard, random, vnics, sessions, contexts, pds, cqs, srqs, ahs, keys, xrc, groups),
            (qps, qpns, quarantine, timers, in_flight, ready, peers),
            (hosts, unresolved, acks_owed, acks_waiting, drops, policy, networks, schedule),
        );
        postcard::to_extend(&state, bytes).expect("plain data has an encoding")
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (state, rest) = postcard::take_from_bytes(bytes).ok()?;
        let (
            (shard, random, vnics, sessions, contexts, pds, cqs, srqs, ahs, keys, xrc, groups),
            (qps, qpns, quarantine, timers, in_flight, ready, peers),
            (hosts, unresolved, acks_owed, acks_waiting, drops, policy, networks, schedule),
        ) = state;
        let (from, to) = (Vec::with_capacity(SGE_COUNT_MAX), Vec::with_capacity(SGE_COUNT_MAX));
        let completer = Completer { vnics, cqs, srqs, ahs, keys, qps, timers, in_flight, ready, hosts, from, to };
        let responder =
            Responder { completer, sessions, xrc, qpns, policy, schedule, peers, acks_owed, acks_waiting, drops };
        let requester = Requester { responder, groups };
        rest.is_empty().then_some(Self { shard, requester, random, contexts, pds, networks, quarantine, unresolved })
    }
}

impl Engine {
    /// All state, for [`Engine::restore`]. Tokens, names and keys stay what they are; the
    /// environment's part (rings, memory, copies that are pending, what peers said) is not in it.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut bytes = self.encode(alloc::vec![0; HEADER_BYTES]);
        let checksum = checksum(&bytes[HEADER_BYTES..]);
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&SNAPSHOT_VERSION.to_le_bytes());
        bytes[12..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The engine that a snapshot was taken of.
    ///
    /// # Errors
    /// [`SnapshotError`]: the bytes are not such a snapshot, or not whole.
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
        self.is_of_its_shard()
            && self.completer().keys.is_consistent()
            && self
                .requester
                .responder
                .qpns
                .pairs()
                .all(|(qpn, index)| self.completer().qps.at(index).is_some() && !self.quarantine.has(qpn))
            && self.quarantine.is_consistent()
            && self.completer().timers.owners().all(|qp| self.completer().qps.get(qp).is_some())
            && self.completer().in_flight.iter().all(|(_, operation)| operation.is_consistent())
            && self.completer().hosts_are_consistent()
            && self.requester.responder.schedule.is_consistent()
            && self.completer().vnics.iter().all(|(_, vnic)| self.networks.has(vnic.network))
    }

    /// Whether all names and numbers are such as the engine's shard gives.
    fn is_of_its_shard(&self) -> bool {
        let shard = self.shard;
        let Self { requester, contexts, pds, .. } = self;
        let Requester { responder, groups } = requester;
        let Responder { completer, sessions, xrc, qpns, .. } = responder;
        let Completer { vnics, cqs, srqs, ahs, keys, qps, in_flight, .. } = completer;
        let numbers = qpns.pairs().chain(xrc.numbers.pairs()).map(|(number, _)| Qpn(number));
        Shard::new(shard.index(), shard.count()) == Some(shard)
            && contexts.is_of(shard)
            && pds.is_of(shard)
            && sessions.is_of(shard)
            && xrc.xrcds.is_of(shard)
            && vnics.is_of(shard)
            && cqs.is_of(shard)
            && srqs.is_of(shard)
            && ahs.is_of(shard)
            && keys.regions.is_of(shard)
            && keys.windows.is_of(shard)
            && qps.is_of(shard)
            && in_flight.is_of(shard)
            && numbers.chain(groups.groups.keys().copied()).all(|number| shard.has_qpn(number))
    }
}

/// FNV-1a, 64 bits: against damage, not against forgers.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
