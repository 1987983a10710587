//! Requester of RC and XRC: posted requests become packets (IBTA 9.7.2, 9.7.3, 9.7.7).
//!
//! Read in this order: this file (which request may begin, which packets go out), `window` (what is
//! under way), `packets` (their headers), `completer::acknowledgements` (what answers do),
//! `completer::retransmit` (timers, going back).
//!
//! A request is taken from the ring when the one before it has gone out, is checked as in local
//! delivery, gets its PSNs and joins the list of messages; its payload is read from the process'
//! memory when its packets go out, and again when they go out again, through its keys each time. A
//! request that has to wait for earlier messages (a fence, a local operation, a request that is
//! refused here) waits in hand, in phase `Begin`.
//!
//! Invariant: requests complete in posting order: only the head of the list completes, and a
//! request in hand only when the list is empty.
//!
//! Invariant: nothing goes out while the gate is closed (`Responder::gate_is_open`); for the
//! requester's timers that is a peer that does not answer.
use crate::fault::Fault;
use crate::keys::Part;
use crate::qp::{QueuePair, SendPhase};
use crate::requester::Requester;
use crate::transport::congestion::WINDOW_BYTES_SHORT;
use crate::transport::habit::{PATIENT_PACKETS_MAX, PATIENT_TIMEOUT_MIN};
use crate::transport::packets::{AckPolicy, Stamp, write, write_one};
use crate::transport::requester::{ACKS_PER_WINDOW, SAMPLES_MAX, Stuck};
use crate::transport::window::{Burst, Hold, MESSAGES_MAX};
use crate::transport::wire::{Wire, WireOperation, frame_bytes};
use crate::turn::{Budget, Turn};
use crate::{Environment, Fetch, MemorySide, Progress, QpId, Source, SourceBody, Syndrome, TransmitOutcome};
use freeflow_verbs::{Access, CompletionStatus, Instant, QpState, QpType, SendFlags, SendOpcode};
use freeflow_wire::{Service, psn_add};

impl Requester {
    /// One step of a QP in RTS or SQD: takes requests, sends packets. In place of `Engine::turn`.
    pub(crate) fn wire_turn<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Turn {
        let send = &self.qp(id).send;
        match send.phase {
            SendPhase::Idle | SendPhase::Begin => {}
            SendPhase::Waiting if send.request.opcode.is_local() => return Turn::Stop(Progress::Waiting),
            SendPhase::Waiting => {
                // For a peer of this host, before its path led elsewhere.
                self.responder.completer.timers.cancel(id);
                self.responder.completer.stop_waiting(env, id);
                self.qp_mut(id).send.phase = SendPhase::Begin;
            }
            // Begun by local delivery, which ends it.
            _ => return self.turn(env, now, id, budget),
        }
        let requester = &self.wire(id).requester;
        let repeats = requester.repair.due().is_some();
        if requester.not_ready || requester.fetching.is_some() || requester.stuck.is_some() && !repeats {
            return self.hold(id);
        }
        if budget.bytes == 0 {
            return Turn::Stop(Progress::More);
        }
        if !repeats {
            if !requester.window.has_unsent()
                && let Some(turn) = self.take_request(env, now, id, budget)
            {
                return turn;
            }
            self.take_company(env, now, id, budget);
        }
        if !self.responder.gate_is_open(env, id) {
            let is_first = !core::mem::replace(&mut self.responder.completer.sender(id).gated, true);
            if is_first {
                self.responder.note_gated(env, id);
            }
            self.responder.completer.watch(now, id);
            return self.hold(id);
        }
        self.responder.completer.sender(id).gated = false;
        match repeats {
            true => self.send_repeat(env, now, id, budget),
            false => self.send_burst(env, now, id, budget),
        }
    }

    /// Nothing can go out before something comes.
    pub(crate) fn hold(&mut self, id: QpId) -> Turn {
        self.responder.completer.sender(id).held = true;
        Turn::Stop(Progress::Waiting)
    }

    // ---- requests

    /// Makes a message of the next request; or says why none begins.
    pub(crate) fn take_request<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Option<Turn> {
        let qp = self.responder.completer.qps.get_mut(id).expect("the requester exists");
        if qp.wire.as_ref().is_some_and(|wire| wire.has_returned()) {
            return self.take_returned(id);
        }
        if qp.send.phase == SendPhase::Idle {
            if qp.state() == QpState::SqDrain {
                return Some(Turn::Stop(Progress::Idle));
            }
            if budget.requests == 0 {
                return Some(Turn::Stop(Progress::More));
            }
            budget.requests -= 1;
            if let stop @ Turn::Stop(_) = self.fetch_for_wire(env, id) {
                return Some(stop);
            }
        }
        self.begin_request(env, now, id, budget)
    }

    /// Takes the next request of the ring in hand.
    pub(crate) fn fetch_for_wire<E: Environment>(&mut self, env: &mut E, id: QpId) -> Turn {
        let qp = self.responder.completer.qps.get_mut(id).expect("the requester exists");
        match env.fetch_send(id, &mut qp.send.request) {
            Fetch::Empty | Fetch::Later => return Turn::Stop(Progress::Idle),
            Fetch::Ready => {}
            Fetch::Malformed => {
                self.responder.completer.sender(id).malformed = true;
                self.vnic_of(id).counters.malformed_descriptors += 1;
            }
        }
        let send = &mut self.qp_mut(id).send;
        (send.phase, send.paid) = (SendPhase::Begin, false);
        Turn::Continue
    }

    /// Whether packets have not gone out that could.
    pub(crate) fn has_unsent(&self, id: QpId) -> bool {
        let qp = self.qp(id);
        let has_unsent = |wire: &Wire| {
            let requester = &wire.requester;
            requester.window.has_unsent() || requester.repair.due().is_some() || wire.has_returned()
        };
        qp.service.is_reliable() && qp.wire.as_deref().is_some_and(has_unsent)
    }

    /// Checks the request in hand; what it must wait for, if anything; and takes it into the list.
    fn begin_request<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Option<Turn> {
        let wire = self.wire(id);
        let is_first = wire.is_idle();
        let checked = match wire.requester.malformed {
            true => Err(Fault::new(CompletionStatus::LocalQpOperationError, Syndrome::MalformedDescriptor)),
            false => self.check_request(id),
        };
        let length = match checked {
            Ok(length) => length,
            Err(_) if !is_first => return Some(self.hold(id)),
            Err(fault) => {
                self.responder.completer.sender(id).malformed = false;
                self.responder.completer.fail_send(env, now, id, fault);
                return Some(Turn::Continue);
            }
        };
        let qp = self.responder.completer.qps.get_mut(id).expect("the requester exists");
        let wire = qp.wire.as_mut().expect("the QP runs the packet transport");
        let (opcode, flags) = (qp.send.request.opcode, qp.send.request.flags);
        // A fence waits for READs and atomics (IBTA 10.8.3.3).
        let fenced = flags.contains(SendFlags::FENCE) && wire.answers_due() > 0;
        let window = &mut wire.requester.window;
        let most = (qp.attributes.capabilities.max_send_wr as usize).clamp(1, MESSAGES_MAX);
        if fenced || opcode.is_local() && !is_first || !window.has_room(opcode, length as u32, most) {
            return Some(self.hold(id));
        }
        if opcode.is_local() {
            (qp.send.length, qp.send.moved) = (length, 0);
            return Some(self.responder.completer.run_local(env, now, id));
        }
        if !self.pay(id, budget) {
            return Some(Turn::Stop(Progress::More));
        }
        if self.wire(id).carriage.is_some()
            && let Some(turn) = self.offer_to_carrier(env, id, length as u32, budget)
        {
            return Some(turn);
        }
        let qp = self.responder.completer.qps.get_mut(id).expect("the requester exists");
        let window = &mut qp.wire.as_mut().expect("the QP runs the packet transport").requester.window;
        window.enlist(&mut qp.send.request, length as u32);
        qp.send.phase = SendPhase::Idle;
        if is_first {
            self.responder.completer.renew_retries(id);
        }
        None
    }

    // ---- packets

    /// Sends the next packets of the message that is being sent.
    fn send_burst<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) -> Turn {
        let depth = usize::from(self.qp(id).attributes.max_rd_atomic.max(1));
        let requester = self.responder.completer.sender(id);
        let burst = match requester.window.plan(requester.window_bytes(), depth) {
            Ok(burst) => burst,
            Err(hold) => {
                if hold == Hold::Congestion {
                    requester.congestion.hold_back();
                }
                return self.hold(id);
            }
        };
        let burst = requester.window.trimmed(burst, budget.chunk_bytes);
        let charge = requester.window.charge(&burst);
        if !self.responder.completer.has_place(now, id) {
            return self.hold(id);
        }
        if let Some(run) = self.plan_records(id, &burst, budget)
            && let Some(turn) = self.send_records(env, now, id, &run, budget)
        {
            return turn;
        }
        budget.bytes = budget.bytes.saturating_sub(u64::from(burst.bytes.max(1)));
        // Packets that go out again after a loss were charged before.
        let fresh = self.responder.completer.sender(id).window.fresh(&burst);
        let mut acks = self.ack_policy(id);
        match self.transmit_burst(env, id, &burst, &mut acks) {
            Ok(TransmitOutcome::Sent) => {
                self.note_fresh(id, fresh);
                self.responder.completer.sender(id).window.note_next(&burst);
                self.burst_sent(now, id, &burst, &acks);
                self.responder.completer.use_place(id, charge);
                self.responder.completer.watch_burst(now, id, charge);
                Turn::Continue
            }
            Ok(TransmitOutcome::Full) => Turn::Stop(Progress::More),
            Ok(TransmitOutcome::Pending) => {
                self.note_fresh(id, fresh);
                self.responder.completer.submit_wire(id, WireOperation::Request, None);
                self.count_burst(id, &burst);
                let requester = self.responder.completer.sender(id);
                requester.window.note_next(&burst);
                requester.fetching = Some(burst);
                requester.unasked_bytes = acks.since_bytes;
                self.responder.completer.use_place(id, charge);
                self.responder.completer.watch_burst(now, id, charge);
                self.hold(id)
            }
            Ok(TransmitOutcome::Fault) => self.get_stuck(env, now, id, (burst.psn, Stuck::Memory)),
            Err(stuck) => self.get_stuck(env, now, id, (burst.psn, stuck)),
        }
    }

    fn ack_policy(&self, id: QpId) -> AckPolicy {
        let requester = &self.wire(id).requester;
        let window_bytes = requester.congestion.window_bytes().min(WINDOW_BYTES_SHORT);
        let every_bytes = (window_bytes / ACKS_PER_WINDOW) as u32;
        AckPolicy { since_bytes: requester.unasked_bytes, every_bytes, asked_psn: None }
    }

    /// Hands a burst to the environment. Nothing is noted of it.
    pub(crate) fn transmit_burst<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        burst: &Burst,
        acks: &mut AckPolicy,
    ) -> Result<TransmitOutcome, Stuck> {
        let (start, bytes) = self.gather_burst(id, burst)?;
        let mut heads = core::mem::take(&mut self.responder.completer.sender(id).heads);
        let token = self.responder.completer.next_token();
        let qp = self.responder.completer.qps.get(id).expect("the requester exists");
        let wire = qp.wire.as_ref().expect("the QP runs the packet transport");
        let window = &wire.requester.window;
        let message = window.message(burst.message);
        let body = match message.request.is_inline() {
            true => SourceBody::Bytes(inline_part(&message.request.inline_data, start, bytes)),
            false => SourceBody::Spans(&self.responder.completer.from),
        };
        let source = Source { prefix: &[], body };
        let service = if qp.service == QpType::Rc { Service::Rc } else { Service::Xrc };
        let is_patient = is_patient(qp, wire, (burst.psn, 1));
        let frames = frame_bytes(qp.service, &wire.destination).is_some();
        let stamp = Stamp { service, dest_qpn: qp.attributes.dest_qpn, mtu: window.mtu(), frames, is_patient };
        let outcome = if burst.packets == 1 {
            env.transmit(token, &wire.destination, &[write_one(&stamp, message, burst, acks)], source)
        } else {
            heads.clear();
            write(&stamp, message, burst, acks, &mut heads);
            env.transmit(token, &wire.destination, &heads, source)
        };
        self.responder.completer.sender(id).heads = heads;
        Ok(outcome)
    }

    /// Fills `self.responder.completer.from` with the payload that a burst carries. Gives its place
    /// in the message, and its bytes.
    fn gather_burst(&mut self, id: QpId, burst: &Burst) -> Result<(u32, u32), Stuck> {
        self.responder.completer.from.clear();
        self.responder.completer.to.clear();
        let qp = self.responder.completer.qps.get(id).expect("the requester exists");
        let window = &qp.wire.as_ref().expect("the QP runs the packet transport").requester.window;
        let message = window.message(burst.message);
        let request = &*message.request;
        let start = message.bytes_before(burst.at, window.mtu());
        let carries = !request.opcode.is_atomic() && request.opcode != SendOpcode::RdmaRead;
        let bytes = if carries { burst.bytes } else { 0 };
        if bytes > 0 && !request.is_inline() {
            let part = Part { pd: qp.sender_pd(), offset: u64::from(start), bytes: u64::from(bytes) };
            let gathered = self.responder.completer.keys.gather(
                request.sges(),
                part,
                Access(0),
                &mut self.responder.completer.from,
            );
            gathered.map_err(|_| Stuck::Key)?;
        }
        Ok((start, bytes))
    }

    /// A burst went out.
    fn burst_sent(&mut self, now: Instant, id: QpId, burst: &Burst, acks: &AckPolicy) {
        self.count_burst(id, burst);
        let requester = self.responder.completer.sender(id);
        requester.unasked_bytes = acks.since_bytes;
        let repeats = requester.window.repeats(burst.psn);
        requester.window.note_sent(psn_add(burst.psn, burst.packets));
        if let Some(psn) = acks.asked_psn
            && !repeats
            && requester.repair.is_empty()
            && requester.samples.len() < SAMPLES_MAX
        {
            requester.samples.push_back((psn, now));
        }
        // More of a message says nothing new.
        if !repeats && burst.at == 0 {
            self.wire_mut(id).responder.habit.note_answer(now);
        }
    }

    pub(crate) fn count_burst(&mut self, id: QpId, burst: &Burst) {
        let window = &self.wire(id).requester.window;
        let opcode = window.message(burst.message).request.opcode;
        let returns = opcode.is_atomic() || opcode == SendOpcode::RdmaRead;
        let (packets, bytes) = if returns { (1, 0) } else { (u64::from(burst.packets), u64::from(burst.bytes)) };
        let repeats = window.repeats(burst.psn);
        self.responder.completer.tally(id, |counters| {
            counters.packets_sent += packets;
            counters.bytes_sent += bytes;
            counters.packets_retransmitted += if repeats { packets } else { 0 };
        });
    }

    /// The memory of what goes out next can't be read. Its request fails when those before it are
    /// complete.
    fn get_stuck<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, stuck: (u32, Stuck)) -> Turn {
        self.responder.completer.sender(id).stuck = Some(stuck);
        self.responder.completer.look_at_stuck(env, now, id);
        match self.qp(id).state() {
            QpState::Error => Turn::Continue,
            _ => self.hold(id),
        }
    }

    /// The payload of pending packets was fetched, and they went out; or it is not there.
    pub(crate) fn request_fetched<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        let requester = self.responder.completer.sender(id);
        let Some(burst) = requester.fetching.take() else { return };
        if result.is_ok() {
            if !requester.window.repeats(burst.psn) {
                self.wire_mut(id).responder.habit.note_answer(now);
                self.responder.answered(env, id);
            }
            let requester = self.responder.completer.sender(id);
            requester.window.note_sent(psn_add(burst.psn, burst.packets));
            if requester.window.oldest() == burst.psn {
                // Until now nothing was on the way.
                requester.clock.restart(now);
            }
            if !requester.window.is_empty() {
                self.responder.completer.watch(now, id);
            }
        } else if requester.window.take_back(&burst) {
            self.responder.completer.sync_host(id);
            self.get_stuck(env, now, id, (burst.psn, Stuck::Memory));
        } else if requester.window.plan_repeat(burst.psn).is_some() {
            // A repetition, or a probe: going back for it finds what is wrong, and fails the request in its turn.
            self.responder.completer.go_back(id);
        }
    }
}

/// Whether the acknowledgement of a message may wait for what the peer's program answers. Not if that would keep
/// anything here waiting: a window, a drain, a short timeout, a packet that goes out again.
pub(crate) fn is_patient(qp: &QueuePair, wire: &Wire, (psn, messages): (u32, u32)) -> bool {
    let window = &wire.requester.window;
    let timeout = qp.attributes.timeout;
    wire.is_to_router
        && qp.state() == QpState::ReadyToSend
        && (timeout == 0 || timeout >= PATIENT_TIMEOUT_MIN)
        && window.on_the_way() + messages <= PATIENT_PACKETS_MAX
        // The next request need not wait for the acknowledgement of this one.
        && window.len() < qp.attributes.capabilities.max_send_wr as usize
        && !window.repeats(psn)
}

fn inline_part(data: &[u8], start: u32, bytes: u32) -> &[u8] {
    let start = (start as usize).min(data.len());
    let end = (start + bytes as usize).min(data.len());
    &data[start..end]
}
