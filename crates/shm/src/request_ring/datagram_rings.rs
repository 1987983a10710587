//! The words of the headers of a UD QP's queues that are about its direct rings, of which it has several in either
//! direction.
use super::{RequestConsumer, RequestProducer};
use crate::layout::queue;
use crate::sync::Ordering;

impl RequestProducer {
    /// The rings of datagrams that are open, a bit each.
    #[inline]
    pub fn rings_open(&self) -> u64 {
        // Acquire; partner: the Release store in `RequestConsumer::set_rings_open`: who sees that a ring is closed sees
        // what its sender had put there before it asked for that.
        self.view.wide_header::<{ queue::RINGS_OPEN }>().load(Ordering::Acquire)
    }

    /// How many rings of datagrams have been offered to a receive queue.
    #[inline]
    pub fn rings_offered(&self) -> u32 {
        // Relaxed: advice; what a ring is says the router's answer.
        self.view.header::<{ queue::RINGS_OFFERED }>().load(Ordering::Relaxed)
    }

    /// Says that there is a datagram in the ring at this place, below 64, of which its receiver wants to be notified;
    /// ring the doorbell then.
    pub fn notify_ring(&mut self, place: u32, solicited: bool) {
        let bit = 1 << (place & 63);
        if solicited {
            // Relaxed: comes with the next.
            self.view.wide_header::<{ queue::RINGS_SOLICITED }>().fetch_or(bit, Ordering::Relaxed);
        }
        // Release; partner: the Acquire swap in `RequestConsumer::take_notified_rings`.
        self.view.wide_header::<{ queue::RINGS_NOTIFIED }>().fetch_or(bit, Ordering::Release);
    }
}

impl RequestConsumer {
    /// The rings of datagrams, a bit each, with something of which the receivers want to be notified, since the last
    /// call; and those with something solicited.
    pub fn take_notified_rings(&self) -> (u64, u64) {
        // Acquire; partner: the Release `fetch_or` in `RequestProducer::notify_ring`.
        let notified = self.view.wide_header::<{ queue::RINGS_NOTIFIED }>().swap(0, Ordering::Acquire);
        let solicited = self.view.wide_header::<{ queue::RINGS_SOLICITED }>();
        // Only those of the rings that were notified of: another one's bit may have come between both, and belongs to
        // the next call. Relaxed: came with the first. A second notification of the same ring that comes between both
        // makes this one solicited instead.
        let taken = if notified == 0 { 0 } else { solicited.fetch_and(!notified, Ordering::Relaxed) };
        (notified, taken & notified)
    }

    /// Says which rings of datagrams are open.
    pub fn set_rings_open(&self, rings: u64) {
        // Release; partner: the Acquire load in `RequestProducer::rings_open`.
        self.view.wide_header::<{ queue::RINGS_OPEN }>().store(rings, Ordering::Release);
    }

    /// Says how many rings of datagrams have been offered.
    pub fn set_rings_offered(&self, count: u32) {
        // Relaxed: advice.
        self.view.header::<{ queue::RINGS_OFFERED }>().store(count, Ordering::Relaxed);
    }
}
