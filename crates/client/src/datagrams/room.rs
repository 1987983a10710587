//! The memory of a RECV that a datagram takes.
use crate::receive_side::{ReceiveQueue, ReceiveSide};
use crate::regions::{Cache, Held, SGES_MAX};
use freeflow_shm::{OwnMemory, OwnRange};
use freeflow_verbs::datagram::GRH_BYTES;
use freeflow_verbs::{Access, Sge};

/// A RECV's memory.
#[derive(Clone)]
pub(super) struct Room {
    pub ranges: [OwnRange; SGES_MAX],
    pub count: usize,
    pub bytes: u64,
}

impl Room {
    /// Of the RECV at this position. `None`: the router must deliver to it.
    #[inline]
    pub fn of(
        regions: &Held<'_>,
        keys: &mut Cache,
        queue: &ReceiveQueue<'_>,
        side: &ReceiveSide,
        position: u32,
    ) -> Option<Self> {
        let mut sges = [Sge::default(); SGES_MAX + 1];
        let listed = side.ring.receive_at(position, &mut sges);
        if listed > SGES_MAX {
            // More than these may follow.
            return None;
        }
        let mut room = Self { ranges: [OwnRange::default(); SGES_MAX], count: 0, bytes: 0 };
        for sge in sges[..listed].iter().filter(|sge| sge.length > 0) {
            let range = regions.resolve(keys, sge, queue.pd, Access::LOCAL_WRITE)?;
            room.ranges[room.count] = range;
            room.count += 1;
            room.bytes += u64::from(range.bytes);
        }
        Some(room)
    }

    /// Leaves the rest behind the first bytes, which `each` gets piece by piece.
    #[inline]
    pub fn split(&mut self, mut bytes: u32, mut each: impl FnMut(OwnRange)) {
        for range in &mut self.ranges[..self.count] {
            let taken = range.bytes.min(bytes);
            if taken > 0 {
                each(OwnRange { bytes: taken, ..*range });
            }
            *range = OwnRange { address: range.address.wrapping_add(u64::from(taken)), bytes: range.bytes - taken };
            bytes -= taken;
        }
    }

    pub fn put(&mut self, own: OwnMemory, bytes: &[u8]) {
        let mut left = bytes;
        self.split(bytes.len() as u32, |range| {
            let (now, later) = left.split_at(range.bytes as usize);
            own.put(now, range);
            left = later;
        });
    }

    /// The header before a datagram that it got.
    pub fn header(&self, own: OwnMemory) -> Option<[u8; GRH_BYTES]> {
        let mut bytes = Vec::with_capacity(GRH_BYTES);
        self.clone().split(GRH_BYTES as u32, |range| own.append_to(&mut bytes, range));
        bytes.try_into().ok()
    }
}
