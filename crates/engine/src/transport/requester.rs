//! Requester of RC and XRC: posted requests become packets (IBTA 9.7.2, 9.7.3, 9.7.7).
//!
//! Read in this order: this file (which request may begin, which packets go out), `window` (what is under way), `packets`
//! (their headers), `completer` (what answers do), `retransmit` (timers, going back).
//!
//! A request is taken from the ring when the one before it has gone out, is checked as in local delivery, gets its PSNs and
//! joins the list of messages; its payload is read from the process' memory when its packets go out, and again when they go
//! out again, through its keys each time. What has to wait for earlier messages (a fence, a local operation, a request that
//! is refused here) waits in hand, in phase `Begin`.
//!
//! Invariant: requests complete in posting order: only the head of the list completes, and a request in hand only when the
//! list is empty.
//!
//! Invariant: nothing goes out while the gate is closed ([`Engine::gate_is_open`]); for the requester's timers that is a
//! peer that does not answer.
use super::WireFlight;
use super::congestion::Congestion;
use super::packets::{AckPolicy, Stamp, write, write_one};
use super::window::{Burst, Hold, MESSAGES_MAX, PACKET_OVERHEAD_BYTES, SendWindow};
use crate::keys::Part;
use crate::qp::SendPhase;
use crate::requester::{Budget, Fault, Turn};
use crate::{
    Engine, Environment, Fetch, MemorySide, PacketHead, Progress, QpId, Source, SourceBody, Syndrome, TransmitOutcome,
};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{Access, CompletionStatus, Instant, QpState, QpType, SendFlags, SendOpcode};
use freeflow_wire::{Service, psn_add, psn_ahead};
use serde::{Deserialize, Serialize};

/// Round trips that are measured at the same time.
const SAMPLES_MAX: usize = 8;
/// A long message asks for an acknowledgement so many times in a window.
const ACKS_PER_WINDOW: u64 = 4;

#[derive(Serialize, Deserialize)]
pub(crate) struct Requester {
    pub congestion: Congestion,
    pub(super) window: SendWindow,
    pub(super) clock: Clock,
    /// A turn ended for want of an answer or of memory: what ends the want names the QP in `poll_ready`.
    pub(super) held: bool,
    /// The gate was found closed since the last packet went out.
    pub(super) gated: bool,
    /// An RNR NAK came: nothing goes out until its timer expires.
    pub(super) not_ready: bool,
    /// The payload of these packets is being fetched.
    pub(super) fetching: Option<Burst>,
    /// The packets that would go out next, from this PSN on, can't: their memory is not there, or its key is not good any more.
    pub(super) stuck: Option<(u32, Stuck)>,
    /// The request in hand made no sense.
    malformed: bool,
    /// Payload sent since the last packet that asked for an acknowledgement.
    unasked_bytes: u32,
    /// Packets that asked for an acknowledgement, were sent once, and when.
    pub(super) samples: VecDeque<(u32, Instant)>,
    /// The last time that it went back for a loss, and the PSN that it went back to.
    pub(super) went_back: Option<(u32, Instant)>,
    /// Room for the headers of a burst.
    #[serde(skip)]
    heads: Vec<PacketHead>,
}

/// What its timer is about; see `retransmit`.
#[derive(Serialize, Deserialize)]
pub(super) struct Clock {
    /// Begin of the local ACK timeout that runs: the last progress, or the last timeout.
    pub silent_since: Instant,
    /// The same for probes, and how many there were since the last progress.
    pub probe_since: Instant,
    pub probe_count: u32,
    /// The PSN of the last probe, if nothing was acknowledged since.
    pub probed: Option<u32>,
    /// The same for what is in flight to lapse; see `hosts`.
    pub lapse_since: Instant,
}

/// Why the payload of packets can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stuck {
    Key,
    Memory,
}

impl Stuck {
    pub fn fault(self) -> Fault {
        let syndrome = match self {
            Self::Key => Syndrome::LocalKey,
            Self::Memory => Syndrome::LocalMemoryGone,
        };
        (CompletionStatus::LocalProtectionError, syndrome)
    }
}

impl Requester {
    /// `mtu`: see [`super::path_mtu`].
    pub fn new(sq_psn: u32, mtu: u32) -> Self {
        Self {
            congestion: Congestion::new(u64::from(mtu) + PACKET_OVERHEAD_BYTES),
            window: SendWindow::new(sq_psn, mtu),
            clock: Clock::new(Instant(0)),
            held: false,
            gated: false,
            not_ready: false,
            fetching: None,
            stuck: None,
            malformed: false,
            unasked_bytes: 0,
            samples: VecDeque::new(),
            went_back: None,
            heads: Vec::new(),
        }
    }

    /// To RTS: requests begin with this PSN.
    pub fn begin(&mut self, sq_psn: u32) {
        // From SQD the number does not change, and messages may be there (IBTA 10.3.1.5).
        if self.window.is_empty() {
            *self = Self::new(sq_psn, self.window.mtu());
        }
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.window.in_flight_bytes()
    }

    /// No request is under way (for SQD).
    pub fn is_idle(&self) -> bool {
        self.window.is_empty()
    }
}

impl Engine {
    pub(super) fn sender(&mut self, id: QpId) -> &mut Requester {
        &mut self.wire_mut(id).requester
    }

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
                self.timers.cancel(id);
                self.stop_waiting(env, id);
                self.qp_mut(id).send.phase = SendPhase::Begin;
            }
            // Begun by local delivery, which ends it.
            _ => return self.turn(env, now, id, budget),
        }
        let requester = &self.wire(id).requester;
        if requester.not_ready || requester.fetching.is_some() || requester.stuck.is_some() {
            return self.hold(id);
        }
        if budget.bytes == 0 {
            return Turn::Stop(Progress::More);
        }
        if !requester.window.has_unsent()
            && let Some(turn) = self.take_request(env, now, id, budget)
        {
            return turn;
        }
        if !self.gate_is_open(env, id) {
            let is_first = !core::mem::replace(&mut self.sender(id).gated, true);
            if is_first {
                self.note_gated(env, id);
            }
            self.watch(now, id);
            return self.hold(id);
        }
        self.sender(id).gated = false;
        self.send_burst(env, now, id, budget)
    }

    /// Nothing can go out before something comes.
    pub(super) fn hold(&mut self, id: QpId) -> Turn {
        self.sender(id).held = true;
        Turn::Stop(Progress::Waiting)
    }

    // ---- requests

    /// Makes a message of the next request; or says why none begins.
    fn take_request<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Option<Turn> {
        let qp = self.qps.get_mut(id).expect("the requester exists");
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
        let qp = self.qps.get_mut(id).expect("the requester exists");
        match env.fetch_send(id, &mut qp.send.request) {
            Fetch::Empty => return Turn::Stop(Progress::Idle),
            Fetch::Ready => {}
            Fetch::Malformed => {
                self.sender(id).malformed = true;
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
        qp.wire.as_ref().is_some_and(|wire| qp.service.is_reliable() && wire.requester.window.has_unsent())
    }

    /// Checks the request in hand; what it must wait for, if anything; and takes it into the list.
    fn begin_request<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        budget: &mut Budget,
    ) -> Option<Turn> {
        let requester = &self.wire(id).requester;
        let is_first = requester.window.is_empty();
        let checked = match requester.malformed {
            true => Err((CompletionStatus::LocalQpOperationError, Syndrome::MalformedDescriptor)),
            false => self.check_request(id),
        };
        let length = match checked {
            Ok(length) => length,
            Err(_) if !is_first => return Some(self.hold(id)),
            Err(fault) => {
                self.sender(id).malformed = false;
                self.fail_send(env, now, id, fault);
                return Some(Turn::Continue);
            }
        };
        let qp = self.qps.get_mut(id).expect("the requester exists");
        let wire = qp.wire.as_mut().expect("the QP runs the packet transport");
        let window = &mut wire.requester.window;
        let (opcode, flags) = (qp.send.request.opcode, qp.send.request.flags);
        // A fence waits for READs and atomics (IBTA 10.8.3.3).
        let fenced = flags.contains(SendFlags::FENCE) && window.answers_due() > 0;
        let most = (qp.attributes.capabilities.max_send_wr as usize).clamp(1, MESSAGES_MAX);
        if fenced || opcode.is_local() && !is_first || !window.has_room(opcode, length as u32, most) {
            return Some(self.hold(id));
        }
        if opcode.is_local() {
            (qp.send.length, qp.send.moved) = (length, 0);
            return Some(self.run_local(env, now, id));
        }
        if !self.pay(id, budget) {
            return Some(Turn::Stop(Progress::More));
        }
        let qp = self.qps.get_mut(id).expect("the requester exists");
        let window = &mut qp.wire.as_mut().expect("the QP runs the packet transport").requester.window;
        window.enlist(&mut qp.send.request, length as u32);
        qp.send.phase = SendPhase::Idle;
        if is_first {
            self.renew_retries(id);
        }
        None
    }

    // ---- packets

    /// Sends the next packets of the message that is being sent.
    fn send_burst<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, budget: &mut Budget) -> Turn {
        let depth = usize::from(self.qp(id).attributes.max_rd_atomic.max(1));
        let requester = self.sender(id);
        let burst = match requester.window.plan(requester.congestion.window_bytes(), depth) {
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
        if !self.has_place(now, id) {
            return self.hold(id);
        }
        budget.bytes = budget.bytes.saturating_sub(u64::from(burst.bytes.max(1)));
        // What goes out again after a loss was charged before.
        let fresh = self.sender(id).window.fresh(&burst);
        let mut acks = self.ack_policy(id);
        match self.transmit_burst(env, id, &burst, &mut acks) {
            Ok(TransmitOutcome::Sent) => {
                self.note_fresh(id, fresh);
                self.sender(id).window.note_next(&burst);
                self.burst_sent(now, id, &burst, &acks);
                self.use_place(id, charge);
                self.watch_burst(now, id, charge);
                Turn::Continue
            }
            Ok(TransmitOutcome::Full) => Turn::Stop(Progress::More),
            Ok(TransmitOutcome::Pending) => {
                self.note_fresh(id, fresh);
                self.launch_wire(id, WireFlight::Request, None);
                self.count_burst(id, &burst);
                let requester = self.sender(id);
                requester.window.note_next(&burst);
                requester.fetching = Some(burst);
                requester.unasked_bytes = acks.since_bytes;
                self.use_place(id, charge);
                self.watch_burst(now, id, charge);
                self.hold(id)
            }
            Ok(TransmitOutcome::Fault) => self.get_stuck(env, now, id, (burst.psn, Stuck::Memory)),
            Err(stuck) => self.get_stuck(env, now, id, (burst.psn, stuck)),
        }
    }

    fn ack_policy(&self, id: QpId) -> AckPolicy {
        let requester = &self.wire(id).requester;
        let every_bytes = (requester.congestion.window_bytes() / ACKS_PER_WINDOW) as u32;
        AckPolicy { since_bytes: requester.unasked_bytes, every_bytes, asked_psn: None }
    }

    /// Hands a burst to the environment. Nothing is noted of it.
    pub(super) fn transmit_burst<E: Environment>(
        &mut self,
        env: &mut E,
        id: QpId,
        burst: &Burst,
        acks: &mut AckPolicy,
    ) -> Result<TransmitOutcome, Stuck> {
        let (start, bytes) = self.gather_burst(id, burst)?;
        let mut heads = core::mem::take(&mut self.sender(id).heads);
        let token = self.next_token();
        let qp = self.qps.get(id).expect("the requester exists");
        let wire = qp.wire.as_ref().expect("the QP runs the packet transport");
        let window = &wire.requester.window;
        let message = window.message(burst.message);
        let body = match message.request.is_inline() {
            true => SourceBody::Bytes(inline_part(&message.request.inline_data, start, bytes)),
            false => SourceBody::Spans(&self.from),
        };
        let source = Source { prefix: &[], body };
        let service = if qp.service == QpType::Rc { Service::Rc } else { Service::Xrc };
        let stamp = Stamp { service, dest_qpn: qp.attributes.dest_qpn, mtu: window.mtu() };
        let outcome = if burst.packets == 1 {
            env.transmit(token, &wire.destination, &[write_one(&stamp, message, burst, acks)], source)
        } else {
            heads.clear();
            write(&stamp, message, burst, acks, &mut heads);
            env.transmit(token, &wire.destination, &heads, source)
        };
        self.sender(id).heads = heads;
        Ok(outcome)
    }

    /// Fills `self.from` with the payload that a burst carries. Gives its place in the message, and its bytes.
    fn gather_burst(&mut self, id: QpId, burst: &Burst) -> Result<(u32, u32), Stuck> {
        self.from.clear();
        self.to.clear();
        let qp = self.qps.get(id).expect("the requester exists");
        let window = &qp.wire.as_ref().expect("the QP runs the packet transport").requester.window;
        let message = window.message(burst.message);
        let request = &*message.request;
        let start = message.bytes_before(burst.at, window.mtu());
        let carries = !request.opcode.is_atomic() && request.opcode != SendOpcode::RdmaRead;
        let bytes = if carries { burst.bytes } else { 0 };
        if bytes > 0 && !request.is_inline() {
            let part = Part { pd: qp.sender_pd(), offset: u64::from(start), bytes: u64::from(bytes) };
            let gathered = self.keys.gather(request.sges(), part, Access(0), &mut self.from);
            gathered.map_err(|_| Stuck::Key)?;
        }
        Ok((start, bytes))
    }

    /// A burst went out.
    fn burst_sent(&mut self, now: Instant, id: QpId, burst: &Burst, acks: &AckPolicy) {
        self.count_burst(id, burst);
        let requester = self.sender(id);
        requester.unasked_bytes = acks.since_bytes;
        let repeats = requester.window.repeats(burst.psn);
        requester.window.note_sent(psn_add(burst.psn, burst.packets));
        if let Some(psn) = acks.asked_psn
            && !repeats
            && requester.samples.len() < SAMPLES_MAX
        {
            requester.samples.push_back((psn, now));
        }
    }

    pub(super) fn count_burst(&mut self, id: QpId, burst: &Burst) {
        let window = &self.wire(id).requester.window;
        let opcode = window.message(burst.message).request.opcode;
        let returns = opcode.is_atomic() || opcode == SendOpcode::RdmaRead;
        let (packets, bytes) = if returns { (1, 0) } else { (u64::from(burst.packets), u64::from(burst.bytes)) };
        let repeats = window.repeats(burst.psn);
        self.tally(id, |counters| {
            counters.packets_sent += packets;
            counters.bytes_sent += bytes;
            counters.packets_retransmitted += if repeats { packets } else { 0 };
        });
    }

    /// The memory of what goes out next can't be read. Its request fails when those before it are complete.
    fn get_stuck<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, stuck: (u32, Stuck)) -> Turn {
        self.sender(id).stuck = Some(stuck);
        self.look_at_stuck(env, now, id);
        match self.qp(id).state() {
            QpState::Error => Turn::Continue,
            _ => self.hold(id),
        }
    }

    /// The packets that can't be read may be the oldest ones now; or they are acknowledged, as those of a retry may be.
    pub(super) fn look_at_stuck<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let requester = self.sender(id);
        let Some((psn, stuck)) = requester.stuck else { return };
        if psn_ahead(psn, requester.window.oldest()) < 0 {
            requester.stuck = None;
        } else if requester.window.sends_oldest() {
            self.fail_head(env, now, id, stuck.fault());
        }
    }

    /// The payload of pending packets was fetched, and they went out; or it is not there.
    pub(super) fn request_fetched<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        result: Result<(), MemorySide>,
    ) {
        let requester = self.sender(id);
        let Some(burst) = requester.fetching.take() else { return };
        if result.is_ok() {
            requester.window.note_sent(psn_add(burst.psn, burst.packets));
            if requester.window.oldest() == burst.psn {
                // Until now nothing was on the way.
                requester.clock.restart(now);
            }
            if !requester.window.is_empty() {
                self.watch(now, id);
            }
        } else if requester.window.take_back(&burst) {
            self.sync_host(id);
            self.get_stuck(env, now, id, (burst.psn, Stuck::Memory));
        }
    }
}

fn inline_part(data: &[u8], start: u32, bytes: u32) -> &[u8] {
    let start = (start as usize).min(data.len());
    let end = (start + bytes as usize).min(data.len());
    &data[start..end]
}
