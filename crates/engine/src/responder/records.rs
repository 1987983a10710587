//! WRITEs that come together, as records of one frame: what is the same for all of them is looked at once.
//!
//! This is `packets` for the common case, and decides nothing by itself: a message that is anything but a WRITE without
//! immediate data, of the expected PSN, with a good key, is left to the path that all messages take.
//!
//! Invariant: what was written is accounted for before anything else is decided about the QP: a message that waits,
//! fails, or takes the long path finds the state as if each before it had come by itself.
use crate::responder::Responder;
use crate::transport::answers::ResponseVerdict;
use crate::transport::packets::Packet;
use crate::transport::responder::{ACKNOWLEDGE_PACKETS, IncomingMessage, PendingWrite, Phase, Written};
use crate::{CopyOutcome, Environment, IpInfo, QpId, Source, SourceBody};
use freeflow_verbs::{Access, Instant, QpState};
use freeflow_wire::records::Records;
use freeflow_wire::{Operation, psn_add};

impl Responder {
    /// Writes messages from the front of a frame, as long as they are plain WRITEs. False: the first one is none, or
    /// the QP is not in the state for it.
    pub(crate) fn take_writes<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        records: &mut Records<'_>,
        ip: &IpInfo,
    ) -> bool {
        if !self.expects_writes(id, records.psn) {
            return false;
        }
        let (reach, mtu) = (self.reach(id), u64::from(self.completer.wire_mtu(id)));
        let (mut written, mut rest) = (Written::default(), *records);
        while let (psn, Some((record, payload))) = (rest.psn, rest.next()) {
            if record.opcode.operation() != Operation::Write || payload.is_empty() {
                break;
            }
            let (length, right) = (u32::from(record.length), Access::REMOTE_WRITE);
            let keys = &self.completer.keys;
            let Ok(span) = keys.resolve_remote(record.rkey, reach, record.address, length, right) else { break };
            let source = Source { prefix: &[], body: SourceBody::Bytes(payload) };
            let outcome = env.copy(self.completer.next_token(), source, &[span], true);
            *records = rest;
            if outcome == CopyOutcome::Done {
                written.messages += 1;
                written.bytes += u64::from(length);
                written.packets += u64::from(length).div_ceil(mtu);
                continue;
            }
            self.note_written(id, psn, &rest, written);
            let header = rest.header(psn, &record);
            let packet = Packet { header: &header, payload, ip: *ip };
            self.completer.tally(id, |counters| {
                counters.packets_received += 1;
                counters.bytes_received += u64::from(length);
            });
            self.completer.from.clear();
            self.completer.to.clear();
            self.completer.to.push(span);
            self.wire_mut(id).responder.message = Some(IncomingMessage::begin(true, 0, &header.reth));
            self.note_copy(env, now, id, (PendingWrite::new(&packet), Some(record.rkey)), outcome);
            return true;
        }
        self.note_written(id, records.psn, records, written);
        written.messages > 0
    }

    /// Whether a WRITE of this PSN needs no more than a good key.
    fn expects_writes(&self, id: QpId, psn: u32) -> bool {
        let qp = self.qp(id);
        let Some(wire) = &qp.wire else { return false };
        let responder = &wire.responder;
        let is_established = qp.state() != QpState::ReadyToReceive || qp.receive.established;
        psn == responder.expected_psn
            && responder.phase == Phase::Listening
            && responder.message.is_none()
            && responder.kept.is_empty()
            && !matches!(responder.answers.verdict, ResponseVerdict::Nak { .. })
            && is_established
            && qp.attributes.access.contains(Access::REMOTE_WRITE)
    }

    /// All before `psn` is there: the messages just written are the last ones.
    fn note_written(&mut self, id: QpId, psn: u32, asked: &Records<'_>, written: Written) {
        let count = written.messages;
        if count == 0 {
            return;
        }
        let responder = &mut self.wire_mut(id).responder;
        responder.expected_psn = psn;
        responder.msn = psn_add(responder.msn, count);
        responder.unacknowledged += count;
        if asked.ack_request || responder.unacknowledged >= ACKNOWLEDGE_PACKETS {
            self.owe_ack(id, psn_add(psn, freeflow_wire::MASK_24), asked.ack_waits);
        }
        self.completer.tally(id, |counters| {
            counters.packets_received += u64::from(count);
            counters.bytes_received += written.bytes;
            counters.acks_deferred += if asked.ack_request { u64::from(count - 1) } else { 0 };
        });
        self.completer.count_written(id, &written);
    }
}
