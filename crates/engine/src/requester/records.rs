//! Short messages that go out together, as the records of one frame (`freeflow_wire::records`).
//!
//! A frame of records takes the place of as many frames of one message each: PSNs, order, limits and counters are those
//! of its messages. It carries what one turn found, and none is held back for others. Where that is one message, or
//! memory that can't be read at once, messages go out by themselves, as they do when they go out again alone.
use crate::keys::Part;
use crate::requester::Requester;
use crate::requester::packets::is_patient;
use crate::transport::packets::record;
use crate::transport::requester::SAMPLES_MAX;
use crate::transport::window::{Burst, RecordRun, RunLimits};
use crate::transport::wire::record_room;
use crate::turn::{Budget, Turn};
use crate::{Environment, Progress, QpId, Source, SourceBody, Span, TransmitOutcome};
use alloc::vec::Vec;
use freeflow_verbs::{Access, Instant};
use freeflow_wire::records::{RECORDS_MAX, RecordsWriter};
use freeflow_wire::{psn_add, psn_ahead};

impl Requester {
    /// Takes the messages that are posted behind short ones which are about to go out, as many as go out with them.
    pub(crate) fn take_company<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) {
        let qp = self.qp(id);
        let Some(wire) = qp.wire.as_ref().filter(|wire| wire.carriage.is_none()) else { return };
        let Some(room) = record_room(qp.service, &wire.destination) else { return };
        let window_bytes = wire.requester.congestion.window_bytes();
        let Some(mut unsent) = wire.requester.window.unsent_records() else { return };
        // The last one may be longer than there is room for: then the next frame begins with it.
        while unsent.count < RECORDS_MAX && unsent.bytes < room && unsent.on_the_way < window_bytes {
            let is_taken = self.take_request(env, now, id, budget).is_none();
            if !is_taken || !self.wire(id).requester.window.add_newest(&mut unsent) {
                return;
            }
        }
    }

    /// The messages that may go out with this one, if there are any.
    pub(crate) fn plan_records(&mut self, id: QpId, burst: &Burst, budget: &Budget) -> Option<RecordRun> {
        let alone_until = &mut self.responder.completer.sender(id).alone_until;
        alone_until.take_if(|until| psn_ahead(burst.psn, *until) >= 0);
        if alone_until.is_some() {
            return None;
        }
        let qp = self.qp(id);
        let wire = qp.wire.as_ref()?;
        let room_bytes = record_room(qp.service, &wire.destination)?;
        let requester = &wire.requester;
        let window_bytes = requester.window_bytes();
        requester.window.plan_records(burst, &RunLimits { room_bytes, window_bytes, budget_bytes: budget.bytes })
    }

    /// Sends messages together. `None`: nothing went out, and they are to go by themselves.
    pub(crate) fn send_records<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        run: &RecordRun,
        budget: &mut Budget,
    ) -> Option<Turn> {
        match self.transmit_records(env, id, run) {
            Some(TransmitOutcome::Full) => return Some(Turn::Stop(Progress::More)),
            Some(TransmitOutcome::Sent) => {}
            Some(TransmitOutcome::Pending | TransmitOutcome::Fault) | None => {
                // Each by itself, and none of them is tried together with others again.
                let until = psn_add(run.psn, run.count);
                self.responder.completer.sender(id).alone_until = Some(until);
                return None;
            }
        }
        budget.bytes = budget.bytes.saturating_sub(run.cost_bytes);
        let window = &self.wire(id).requester.window;
        // Messages that go out again after a loss were charged before.
        let (fresh, repeats) = (window.fresh_records(run), window.repeats(run.psn));
        self.note_fresh(id, fresh);
        self.responder.completer.tally(id, |counters| {
            counters.packets_sent += u64::from(run.count);
            counters.bytes_sent += u64::from(run.bytes);
            counters.packets_retransmitted += if repeats { u64::from(run.count) } else { 0 };
        });
        let requester = self.responder.completer.sender(id);
        requester.unasked_bytes = 0;
        requester.window.note_records(run);
        if !repeats && requester.repair.is_empty() && requester.samples.len() < SAMPLES_MAX {
            requester.samples.push_back((psn_add(run.psn, run.count - 1), now));
        }
        if !repeats {
            self.wire_mut(id).responder.habit.note_answer(now);
        }
        self.responder.completer.use_place(id, run.charge);
        self.responder.completer.watch_burst(now, id, run.charge);
        Some(Turn::Continue)
    }

    /// Hands them to the environment. Nothing is noted of it. `None`: a key is not good any more.
    fn transmit_records<E: Environment>(&mut self, env: &mut E, id: QpId, run: &RecordRun) -> Option<TransmitOutcome> {
        let mut inline = core::mem::take(&mut self.responder.completer.sender(id).inline);
        inline.clear();
        let mut spans = core::mem::take(&mut self.responder.completer.from);
        spans.clear();
        let outcome = self.transmit_gathered(env, id, run, &mut inline, &mut spans);
        self.responder.completer.from = spans;
        self.responder.completer.sender(id).inline = inline;
        outcome
    }

    fn transmit_gathered<E: Environment>(
        &self,
        env: &mut E,
        id: QpId,
        run: &RecordRun,
        inline: &mut Vec<u8>,
        spans: &mut Vec<Span>,
    ) -> Option<TransmitOutcome> {
        let qp = self.qp(id);
        let wire = qp.wire.as_ref()?;
        let mut writer =
            RecordsWriter::new(qp.attributes.dest_qpn, run.psn, (true, is_patient(qp, wire, (run.psn, run.count))));
        for message in wire.requester.window.messages_of(run) {
            let request = &*message.request;
            writer.push(&record(request, message.length)?);
            if run.is_inline {
                inline.extend_from_slice(request.inline_data.get(..message.length as usize)?);
            } else {
                let (part, from) = (Part { pd: qp.sender_pd(), offset: 0, bytes: message.length.into() }, spans.len());
                self.responder.completer.keys.gather(request.sges(), part, Access(0), spans).ok()?;
                join(spans, from);
            }
        }
        let body = if run.is_inline { SourceBody::Bytes(inline) } else { SourceBody::Spans(spans) };
        Some(env.transmit_records(&wire.destination, writer.finish(), Source { prefix: &[], body }))
    }
}

/// Makes one of two spans where the one at `place` goes on where the one before it ends.
fn join(spans: &mut Vec<Span>, place: usize) {
    if place + 1 != spans.len() {
        return;
    }
    if let [.., before, last] = &mut spans[..]
        && (before.session, before.region) == (last.session, last.region)
        && before.address.checked_add(before.length.into()) == Some(last.address)
    {
        before.length += last.length;
        spans.pop();
    }
}
