//! Selective repeat, the requester's part: what a report does. Which packets go out again, and when:
//! `transport::repair`; how: `requester::repair`.
//!
//! A report that names nothing asks for all from the missing packet on, as a sequence NAK does. Timeouts, RNR NAKs and
//! READ responses that are missing still go back to the oldest packet, which forgets all that reports said.
use crate::QpId;
use crate::completer::Completer;
use crate::transport::wire::record_room;
use freeflow_verbs::Instant;
use freeflow_wire::Header;
use freeflow_wire::Kept;

impl Completer {
    /// All before `header.psn` has arrived, that one is missing, and some behind it are kept.
    pub(crate) fn handle_report(&mut self, now: Instant, id: QpId, header: &Header) {
        let kept = Kept::from_fields(&header.reth);
        let qp = self.qp(id);
        let records = record_room(qp.service, &self.wire(id).destination).is_some();
        let requester = self.sender(id);
        if requester.not_ready {
            return;
        }
        if kept.last() == 0 {
            return self.go_back_for_loss(now, id);
        }
        let round_trip_ns = requester.congestion.smoothed_rtt_ns();
        requester.repair.hear(now, &requester.window, (header.psn, kept), round_trip_ns, records);
        self.repair(now, id);
        if !self.sender(id).repair.is_empty() && self.timers.armed(id).is_some() {
            self.arm(id);
        }
        // Packets that are kept leave room in the window.
        self.let_go_on(id);
    }

    /// Packets that have been missing for too long go out again, in the QP's next turn.
    pub(crate) fn repair(&mut self, now: Instant, id: QpId) {
        let requester = self.sender(id);
        let lost = requester.repair.ripen(now, requester.congestion.smoothed_rtt_ns());
        if lost > 0 {
            requester.congestion.lose_repaired(lost, requester.window.sent());
            // Later packets are acknowledged together with its repetition: that measures no round trip.
            requester.samples.clear();
            requester.clock.probe_since = now;
        }
        if requester.repair.due().is_none() {
            return;
        }
        requester.held = false;
        self.push_ready(id);
    }
}
