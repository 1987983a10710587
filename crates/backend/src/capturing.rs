//! Packets on their way out, for a capture.
use crate::batch::Pending;
use crate::capture::{Captured, Direction};
use crate::udp::{HOP_LIMIT, Udp, now_ns};
use std::net::SocketAddr;

impl Udp {
    /// Shows packets that were sent: the first of a batch.
    #[cold]
    pub(crate) fn capture_sent(&mut self, slot: usize, count_max: usize) {
        let batch = self.outbox.batch(slot);
        // Sealed packets were captured before they were sealed.
        let sink = self.capture.as_mut().filter(|_| !batch.sealed);
        let (Some(sink), lane) = (sink, &self.lanes[usize::from(batch.key.lane)]) else { return };
        let time_ns = now_ns();
        for (identification, bytes) in batch.packets().take(count_max) {
            sink.packet(&Captured {
                time_ns,
                direction: Direction::Sent,
                source: SocketAddr::new(lane.address, lane.port),
                destination: batch.to.to_socket(),
                traffic_class: batch.traffic_class,
                hop_limit: HOP_LIMIT,
                identification,
                bytes,
            });
        }
    }

    /// Shows a packet that is about to be sealed.
    #[cold]
    pub(crate) fn capture_plain(&mut self, pending: Pending) {
        self.outbox.batch_mut(pending.slot).clear_icrc(pending);
        let batch = self.outbox.batch(pending.slot);
        let (Some(sink), lane) = (&mut self.capture, &self.lanes[usize::from(batch.key.lane)]) else { return };
        sink.packet(&Captured {
            time_ns: now_ns(),
            direction: Direction::Sent,
            source: SocketAddr::new(lane.address, lane.port),
            destination: batch.to.to_socket(),
            traffic_class: batch.traffic_class,
            hop_limit: HOP_LIMIT,
            identification: 0,
            bytes: batch.text(pending),
        });
    }
}
