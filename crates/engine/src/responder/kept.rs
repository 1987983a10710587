//! Selective repeat, the responder's part: packets that come ahead of a missing one are kept, and reported.
//!
//! Only between routers that agreed on it, for RC QPs with frames (`is_selective`); for all others a packet ahead of
//! the expected one is dropped, and one sequence NAK asks for all from there on (IBTA 9.7.5.1.1).
//!
//! A kept packet is acted upon when it is the expected one, by the very path of one that just came. So the invariants
//! of `packets` hold as they stand: nothing is executed, written or completed out of order.
//!
//! A report is a sequence NAK with the list of what is kept. It says what is so *now*: a packet that it does not name
//! is not kept, whatever an earlier one said, since kept packets may be dropped (a RECV that is missing, a limit). It
//! stands for the acknowledgement of all before the missing packet, and goes out after a batch of datagrams; what has
//! come within the same batch needs none.
use crate::completer::Completer;
use crate::qp::Teardown;
use crate::responder::Responder;
use crate::transport::kept::{KEPT_PSNS_MAX, kept_bytes};
use crate::transport::packets::Packet;
use crate::transport::responder::Phase;
use crate::transport::wire::{HELD_BYTES_OF_VNIC_MAX, is_selective};
use crate::{Environment, QpId};
use freeflow_verbs::Instant;
use freeflow_wire::{Header, NakCode, Syndrome, psn_add, psn_ahead};

/// Bytes that may wait at all QPs of a vNIC when another packet is kept behind a gap, which may last: the rest is for
/// packets that wait for a write, and for datagrams.
const KEPT_OF_VNIC_MAX: usize = HELD_BYTES_OF_VNIC_MAX / 2;

impl Completer {
    /// Nothing is kept any more: it is as good as lost.
    pub(crate) fn forget_kept(&mut self, id: QpId) {
        if let Some(wire) = &mut self.qp_mut(id).wire
            && !wire.responder.kept.is_empty()
        {
            let freed = wire.responder.kept.clear();
            self.let_go(id, freed);
        }
    }
}

impl Responder {
    /// Whether packets ahead of the expected one are kept.
    pub(crate) fn keeps(&self, id: QpId) -> bool {
        let qp = self.qp(id);
        qp.wire.as_ref().is_some_and(|wire| is_selective(qp.service, &wire.destination))
    }

    /// A packet is missing before this one.
    pub(crate) fn keep_ahead(&mut self, id: QpId, packet: &Packet<'_>) {
        let responder = &mut self.wire_mut(id).responder;
        if !matches!(responder.phase, Phase::Listening | Phase::Gap) {
            return;
        }
        let is_known = responder.phase == Phase::Gap;
        if psn_ahead(packet.header.psn, responder.expected_psn) < KEPT_PSNS_MAX {
            // The later copy counts: the other may be of an earlier connection with the same numbers.
            if let Some(freed) = responder.kept.remove(packet.header.psn) {
                self.completer.let_go(id, freed);
                self.completer.tally(id, |counters| counters.duplicate_requests += 1);
            }
            self.keep_one(id, packet);
        }
        // Of a gap behind which nothing is kept one report is enough, as with go-back-N.
        if !is_known || !self.wire(id).responder.kept.is_empty() {
            self.owe_report(id);
        }
    }

    fn keep_one(&mut self, id: QpId, packet: &Packet<'_>) {
        let bytes = kept_bytes(packet);
        if self.wire(id).responder.kept.has_room(bytes) && self.completer.keep_within(id, bytes, KEPT_OF_VNIC_MAX) {
            self.wire_mut(id).responder.kept.insert(packet);
        } else {
            self.drops.parked_overflow += 1;
        }
    }

    /// The requester gets to know what is missing, and what is kept, at the latest by [`Self::flush_acks`].
    fn owe_report(&mut self, id: QpId) {
        let responder = &mut self.wire_mut(id).responder;
        responder.phase = Phase::Gap;
        responder.unacknowledged = 0;
        responder.answers.owe_nak(responder.expected_psn, Syndrome::Nak(NakCode::PsnSequence));
        if !core::mem::replace(&mut responder.listed, true) {
            self.acks_owed.push_back(id);
        }
    }

    /// Acts upon kept packets as long as they are the expected ones; if others are left, their gap is reported.
    pub(crate) fn take_kept<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        while let Some(qp) = self.completer.qps.get_mut(id) {
            let receives = qp.receives() && qp.teardown == Teardown::None;
            let Some(wire) = qp.wire.as_mut().filter(|wire| !wire.responder.kept.is_empty()) else { return };
            let responder = &mut wire.responder;
            let listens = matches!(responder.phase, Phase::Listening | Phase::Gap);
            if wire.writing || !receives || !listens {
                return;
            }
            let (taken, freed) = responder.kept.take(responder.expected_psn);
            let (is_last, phase) = (!responder.kept.begins_with(psn_add(responder.expected_psn, 1)), responder.phase);
            let is_empty = responder.kept.is_empty();
            self.completer.let_go(id, freed);
            let Some((bytes, ip)) = taken else {
                if phase == Phase::Listening && !is_empty {
                    self.owe_report(id);
                }
                return;
            };
            let Ok((header, payload)) = Header::parse(&bytes) else { continue };
            // The requester waits for word of all that it does not repeat.
            let header = Header { ack_request: header.ack_request || is_last, ack_waits: false, ..header };
            self.handle_expected(env, now, id, &Packet { header: &header, payload, ip });
        }
    }
}
