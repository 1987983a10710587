//! Packets that came ahead of a missing one, and are kept until that has come; `responder::kept` acts upon them.
//!
//! Nothing of them has been executed, written or looked at but for the PSN, so that forgetting them is always right:
//! they are as good as lost then. Invariant: they stand in the order of their PSNs, each at most once, and count
//! against the limits of the vNIC (`Completer::keep`) as packets do that wait for a write.
use crate::IpInfo;
use crate::transport::packets::Packet;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_wire::Kept;
use freeflow_wire::{MASK_24, psn_ahead};
use serde::{Deserialize, Serialize};

/// How far behind the missing packet others are kept, PSNs.
pub(crate) const KEPT_PSNS_MAX: i32 = 4096;

/// Bytes of packets that one QP keeps.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// Bytes that a waiting packet takes besides its own.
pub(crate) const HELD_PACKET_BYTES: usize = 96;

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct KeptPackets {
    list: VecDeque<KeptPacket>,
    /// Bytes of all packets.
    bytes: usize,
}

#[derive(Serialize, Deserialize)]
struct KeptPacket {
    psn: u32,
    /// From the BTH to the padding.
    bytes: Vec<u8>,
    ip: IpInfo,
}

impl KeptPackets {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many packets stand before this one, or are this one. Most come in order.
    fn count_until(&self, psn: u32) -> usize {
        match self.list.back() {
            Some(last) if psn_ahead(last.psn, psn) > 0 => {
                self.list.partition_point(|kept| psn_ahead(kept.psn, psn) <= 0)
            }
            _ => self.list.len(),
        }
    }

    /// Takes the packet with this PSN out. Gives how many bytes do not wait any more.
    pub fn remove(&mut self, psn: u32) -> Option<usize> {
        let place = self.count_until(psn).checked_sub(1)?;
        let kept = self.list.get(place).filter(|kept| kept.psn == psn)?;
        let bytes = kept.bytes.len();
        self.list.remove(place);
        self.bytes -= bytes;
        Some(bytes + HELD_PACKET_BYTES)
    }

    pub fn has_room(&self, bytes: usize) -> bool {
        self.list.len() < KEPT_PSNS_MAX as usize && self.bytes + bytes <= KEPT_BYTES_MAX
    }

    /// A packet whose PSN is not there.
    pub fn insert(&mut self, packet: &Packet<'_>) {
        let bytes = bytes_of(packet);
        let place = self.count_until(packet.header.psn);
        self.bytes += bytes.len();
        self.list.insert(place, KeptPacket { psn: packet.header.psn, bytes, ip: packet.ip });
    }

    /// Takes the packet with this PSN out, and forgets all before it. Also gives how many bytes do not wait any more.
    pub fn take(&mut self, psn: u32) -> (Option<(Vec<u8>, IpInfo)>, usize) {
        let (mut freed, mut taken) = (0, None);
        while let Some(kept) = self.list.pop_front_if(|kept| psn_ahead(kept.psn, psn) <= 0) {
            self.bytes -= kept.bytes.len();
            freed += kept.bytes.len() + HELD_PACKET_BYTES;
            taken = (kept.psn == psn).then_some((kept.bytes, kept.ip));
        }
        (taken, freed)
    }

    /// Whether the first one has this PSN.
    pub fn begins_with(&self, psn: u32) -> bool {
        self.list.front().is_some_and(|kept| kept.psn == psn)
    }

    /// The list of them in a report, if `missing` is what is missing first.
    pub fn named(&self, missing: u32) -> Kept {
        let mut named = Kept::default();
        for kept in &self.list {
            if !named.note(kept.psn.wrapping_sub(missing) & MASK_24) {
                break;
            }
        }
        named
    }

    /// Forgets all. Gives how many bytes do not wait any more.
    pub fn clear(&mut self) -> usize {
        let freed = self.bytes + self.list.len() * HELD_PACKET_BYTES;
        self.list.clear();
        self.bytes = 0;
        freed
    }
}

/// Bytes that a packet takes if it is kept.
pub(crate) fn kept_bytes(packet: &Packet<'_>) -> usize {
    usize::from(packet.header.encode().length) + packet.payload.len() + usize::from(packet.header.pad)
}

/// The packet as it came.
pub(crate) fn bytes_of(packet: &Packet<'_>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(kept_bytes(packet));
    bytes.extend_from_slice(packet.header.encode().as_slice());
    bytes.extend_from_slice(packet.payload);
    bytes.resize(bytes.len() + usize::from(packet.header.pad), 0);
    bytes
}
