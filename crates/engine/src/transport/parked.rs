//! Packets that waited while an earlier one was written elsewhere, and are written at once.
//!
//! Memory that only the slow path reaches costs two changes of threads for each write. Packets that wait behind one
//! and go on where it ends are taken along with it.
use crate::completer::Completer;
use crate::transport::wire::HELD_PACKET_BYTES;
use crate::{IpInfo, QpId};
use alloc::vec::Vec;
use freeflow_wire::Header;

/// Payload that is written at once, bytes.
const RUN_BYTES_MAX: usize = 256 << 10;

/// Payload of packets that follow each other.
pub(crate) struct Run<'a> {
    first: &'a [u8],
    /// All of it, if there is more than the first.
    bytes: Vec<u8>,
    last_bytes: u32,
}

impl<'a> Run<'a> {
    pub fn of(first: &'a [u8]) -> Self {
        Self { first, bytes: Vec::new(), last_bytes: first.len() as u32 }
    }

    /// Of the packet that was added last.
    pub fn last_bytes(&self) -> u32 {
        self.last_bytes
    }

    /// `None`: the first packet is alone.
    pub fn bytes(self) -> Option<Vec<u8>> {
        (!self.bytes.is_empty()).then_some(self.bytes)
    }

    fn len(&self) -> usize {
        self.bytes.len().max(self.first.len())
    }

    fn add(&mut self, payload: &[u8], expected: usize) {
        if self.bytes.is_empty() {
            self.bytes.reserve(expected);
            self.bytes.extend_from_slice(self.first);
        }
        self.bytes.extend_from_slice(payload);
        self.last_bytes = payload.len() as u32;
    }
}

impl Completer {
    /// Takes the next packet that waits at a QP, if there is one and it `follows`, which gets its header and its
    /// payload's length.
    pub(crate) fn take_parked(
        &mut self,
        id: QpId,
        run: &mut Run<'_>,
        follows: impl FnOnce(&Header, u64) -> bool,
    ) -> Option<Header> {
        let wire = self.wire_mut(id);
        let (bytes, IpInfo { congestion: false, .. }) = wire.parked.front()? else { return None };
        let (header, payload) = Header::parse(bytes).ok()?;
        if run.len() + payload.len() > RUN_BYTES_MAX || !follows(&header, payload.len() as u64) {
            return None;
        }
        run.add(payload, wire.parked_bytes.min(RUN_BYTES_MAX));
        let (held, payload_bytes) = (bytes.len(), payload.len() as u64);
        wire.parked_bytes -= held;
        wire.landing_bytes += held + HELD_PACKET_BYTES;
        wire.parked.pop_front();
        self.tally(id, |counters| {
            counters.packets_received += 1;
            counters.bytes_received += payload_bytes;
        });
        Some(header)
    }

    /// Packets that were taken with the one in hand are written, or won't be.
    pub(crate) fn let_run_go(&mut self, id: QpId) {
        let bytes = core::mem::take(&mut self.wire_mut(id).landing_bytes);
        if bytes > 0 {
            self.let_go(id, bytes);
        }
    }
}
