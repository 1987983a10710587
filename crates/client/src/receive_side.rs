//! The receive queue of a queue pair, as posts and its direct rings see it.
use crate::regions::Cache;
use freeflow_protocol::library::Handle;
use freeflow_shm::{BiasedMutex, CreditWriter, RequestProducer};
use std::sync::atomic::{AtomicU32, Ordering};

/// The receive queue, and the peer's view of its RECVs.
pub(crate) struct ReceiveSide {
    pub ring: RequestProducer,
    pub credits: Option<CreditWriter>,
    pub keys: Cache,
    /// Doorbell of an armed CQ to which a datagram that waits for a RECV would come.
    pub waiting: Option<u32>,
    /// If it uses an SRQ: messages taken out of direct rings since the last reset.
    pub ring_messages: u32,
}

impl ReceiveSide {
    /// The QP uses an SRQ: so many messages were taken out of its direct rings.
    pub fn count_ring_messages(&mut self, added: i32) {
        self.ring_messages = self.ring_messages.wrapping_add_signed(added);
        self.ring.set_claimed(self.ring_messages);
    }
}

/// A UD queue pair's, with what its datagrams' completions say of it.
#[derive(Clone, Copy)]
pub(crate) struct ReceiveQueue<'a> {
    pub cookie: u32,
    pub qpn: u32,
    pub pd: Handle,
    pub handle: Handle,
    pub side: &'a BiasedMutex<ReceiveSide>,
    /// Rings of datagrams that were offered and that this side knows of. Under the lock of the receive CQ.
    pub offers_seen: &'a AtomicU32,
}

impl ReceiveQueue<'_> {
    pub fn has_offers(&self) -> bool {
        self.side.lock().ring.rings_offered() != self.offers_seen()
    }

    pub fn offers_seen(&self) -> u32 {
        // Relaxed: under the lock of the receive CQ.
        self.offers_seen.load(Ordering::Relaxed)
    }

    pub fn set_offers_seen(&self, count: u32) {
        // Relaxed: as above.
        self.offers_seen.store(count, Ordering::Relaxed);
    }
}
