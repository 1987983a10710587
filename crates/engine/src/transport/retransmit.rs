//! What the requester does when answers don't come, or say that something was lost (IBTA 9.7.5.2, 9.7.6.1).
//!
//! One timer a QP, armed while messages are under way, for the earlier of two ends:
//!
//! * The **local ACK timeout**, exactly as the attributes say: 4.096 us * 2^timeout without progress and the requester goes back
//!   to the oldest packet; `retry_count` times, and at the next end the QP has failed (RETRY_EXC_ERR). Timeout 0: never.
//! * A **probe**, which is ours: a few round trips without progress and the oldest packet goes out once more, asking for an
//!   acknowledgement. It costs no retry. A lost last packet, a lost NAK or acknowledgement is made good in a millisecond where
//!   attributes say tens of them. What the peer then says tells what to do: an acknowledgement of just that packet means
//!   that all after it is lost as well.
//!
//! A third end concerns others: what was heard nothing of for a while does not count for its host any more (`hosts`).
//!
//! The timer is not moved by each acknowledgement: when it expires it looks when the last progress was, and is armed anew.
//!
//! While an RNR NAK's delay runs, the same timer runs for it, and nothing else does.
use super::hosts::LAPSE;
use super::packets::AckPolicy;
use super::requester::Clock;
use crate::limits::RNR_RETRY_FOREVER;
use crate::qp::SendPhase;
use crate::timers::{TimerKind, acknowledge_timeout, rnr_delay};
use crate::{Engine, Environment, QpId, Syndrome, TransmitOutcome};
use freeflow_verbs::{CompletionStatus, Duration, Instant};

use super::WireFlight;
use freeflow_wire::psn_add;

/// The least time without progress before a probe, and the longest between two.
///
/// The least is short because of losses. At round trips of 20 us and a packet in a hundred lost, a 10 Gb/s line carries 7.4 Gb/s
/// with 1 ms, 6.3 with 4 and 4.0 with 16; at one in twenty 2.0, 0.7 and 0.2 (`crates/sim/tests/goodput.txt` and the same table with
/// these values). It costs little where a peer is late and not gone: one packet a probe, each after twice the time, no retry, no cut
/// of the window; a READ that is asked for again while it is answered is answered once. Between two routers on a machine of two
/// cores with a load of 12, WRITEs, READs and SENDs of 680 MB had no probe and no duplicate; a single small message, whose peer
/// waits for a core longer than that, has both.
const PROBE_MIN: Duration = Duration::from_millis(1);
const PROBE_MAX: Duration = Duration::from_millis(1_000);
/// The same in smoothed round trips.
const PROBE_ROUND_TRIPS: u64 = 4;
/// Each probe doubles the time to the next, up to here.
const PROBE_DOUBLINGS_MAX: u32 = 10;

impl Clock {
    pub fn new(now: Instant) -> Self {
        Self { silent_since: now, probe_since: now, probe_count: 0, probed: None, lapse_since: now }
    }

    pub fn restart(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    fn probe_at(&self, smoothed_rtt_ns: u64) -> Instant {
        let least = PROBE_MIN.0.max(PROBE_ROUND_TRIPS * smoothed_rtt_ns).min(PROBE_MAX.0);
        let wait = (least << self.probe_count.min(PROBE_DOUBLINGS_MAX)).min(PROBE_MAX.0);
        self.probe_since + Duration(wait)
    }
}

impl Engine {
    // ---- the timer

    /// Messages are under way: the timer runs.
    pub(super) fn watch(&mut self, now: Instant, id: QpId) {
        if self.timers.armed(id).is_none() {
            self.sender(id).clock.restart(now);
            self.arm(id);
        }
    }

    /// A burst was sent that counts so much. If nothing else counts that is on the way, the timer may be armed for what
    /// is later than its lapse.
    pub(super) fn watch_burst(&mut self, now: Instant, id: QpId, bytes: u64) {
        let is_first = self.wire(id).share.in_flight_bytes() <= bytes;
        if is_first && self.timers.armed(id).is_some() {
            self.sender(id).clock.lapse_since = now;
            return self.arm(id);
        }
        self.watch(now, id);
    }

    /// Arms the timer for what ends first.
    fn arm(&mut self, id: QpId) {
        let timeout = acknowledge_timeout(self.qp(id).attributes.timeout);
        let requester = &self.wire(id).requester;
        let silence = timeout.map(|timeout| requester.clock.silent_since + timeout);
        let probe = requester.clock.probe_at(requester.congestion.smoothed_rtt_ns());
        let probe = (!requester.gated).then_some(probe);
        let counts = self.wire(id).share.in_flight_bytes() > 0;
        let lapse = counts.then_some(requester.clock.lapse_since + LAPSE);
        if let Some(at) = [silence, probe, lapse].into_iter().flatten().min() {
            self.timers.arm(id, TimerKind::Retransmit, at);
        }
    }

    pub(crate) fn wire_timeout<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, _kind: TimerKind) {
        let landing = self.wire(id).landing;
        let requester = self.sender(id);
        if core::mem::take(&mut requester.not_ready) {
            return self.push_ready(id);
        }
        if requester.window.is_empty() {
            return self.end_local_wait(id);
        }
        if landing || requester.fetching.is_some() {
            // It is this host that keeps the peer waiting, or the answer.
            requester.clock.restart(now);
            self.lapse(id);
            return self.arm(id);
        }
        self.excuse_wait(now, id);
        if self.is_held_by_limit(id) {
            self.excuse_limit(now, id);
        }
        let silent_since = self.sender(id).clock.silent_since;
        let timeout = acknowledge_timeout(self.qp(id).attributes.timeout);
        if timeout.is_some_and(|timeout| silent_since + timeout <= now) {
            return self.end_silence(env, now, id);
        }
        let requester = self.sender(id);
        if requester.clock.lapse_since + LAPSE <= now {
            requester.clock.lapse_since = now;
            self.lapse(id);
        }
        let requester = self.sender(id);
        if !requester.gated && requester.clock.probe_at(requester.congestion.smoothed_rtt_ns()) <= now {
            self.probe(env, now, id);
        }
        self.arm(id);
    }

    /// Whether it is a limit of rate that keeps the QP from sending.
    fn is_held_by_limit(&self, id: QpId) -> bool {
        use crate::schedule::Scheduler;
        self.schedule.is_waiting(id)
    }

    /// The QP waited for its limits and has nothing on the way: that is no silence of its peer.
    pub(crate) fn excuse_limit(&mut self, now: Instant, id: QpId) {
        let Some(wire) = &mut self.qp_mut(id).wire else { return };
        if !wire.requester.window.has_unacknowledged() {
            (wire.requester.clock.silent_since, wire.requester.clock.probe_since) = (now, now);
        }
    }

    /// A timer of local delivery, from before the path led to another host.
    fn end_local_wait(&mut self, id: QpId) {
        let send = &mut self.qp_mut(id).send;
        if send.phase == SendPhase::Waiting && !send.request.opcode.is_local() {
            send.phase = SendPhase::Begin;
        }
        self.push_ready(id);
    }

    /// No progress within the local ACK timeout.
    fn end_silence<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        if self.qp(id).send.retries_left == 0 {
            self.vnic_of(id).counters.retries_exceeded += 1;
            self.tally(id, |counters| counters.retries_exceeded += 1);
            return self.fail_head(env, now, id, (CompletionStatus::RetryExceeded, Syndrome::NoAnswer));
        }
        self.qp_mut(id).send.retries_left -= 1;
        self.vnic_of(id).counters.ack_timeouts += 1;
        self.tally(id, |counters| counters.ack_timeouts += 1);
        let requester = self.sender(id);
        (requester.clock.silent_since, requester.clock.probe_since) = (now, now);
        if requester.window.has_unacknowledged() {
            let sent = requester.window.sent();
            requester.congestion.collapse(sent);
        }
        self.go_back(id);
        self.arm(id);
    }

    /// Sends the oldest packet once more.
    fn probe<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let clock = &mut self.sender(id).clock;
        clock.probe_since = now;
        clock.probe_count += 1;
        if !self.gate_is_open(env, id) {
            return;
        }
        let Some(burst) = self.sender(id).window.plan_probe() else { return };
        let mut acks = AckPolicy { since_bytes: 0, every_bytes: 0, asked_psn: None };
        match self.transmit_burst(env, id, &burst, &mut acks) {
            Ok(TransmitOutcome::Sent) => {}
            Ok(TransmitOutcome::Pending) => {
                self.launch_wire(id, WireFlight::Request, None);
                self.sender(id).fetching = Some(burst);
            }
            // No room: the next probe. No memory: going back for it will find that, and fail the request.
            Ok(TransmitOutcome::Full | TransmitOutcome::Fault) | Err(_) => return,
        }
        self.count_burst(id, &burst);
        self.tally(id, |counters| counters.probes_sent += 1);
        self.sender(id).clock.probed = Some(psn_add(burst.psn, burst.packets - 1));
    }

    // ---- going back

    /// All that is not acknowledged goes out again.
    fn go_back(&mut self, id: QpId) {
        let requester = self.sender(id);
        requester.window.go_back();
        requester.samples.clear();
        requester.stuck = None;
        requester.clock.probed = None;
        requester.held = false;
        self.sync_host(id);
        self.push_ready(id);
    }

    /// The peer misses a packet, or an answer of it was lost. Said twice within a round trip, it is one loss: the second was
    /// on the way when the packets went out again.
    pub(super) fn go_back_for_loss(&mut self, now: Instant, id: QpId) {
        let requester = self.sender(id);
        let (oldest, sent) = (requester.window.oldest(), requester.window.sent());
        let round_trip = Duration(requester.congestion.smoothed_rtt_ns());
        let again = requester.went_back.is_some_and(|(psn, at)| psn == oldest && now - at < round_trip);
        if again || requester.not_ready || !requester.window.has_unacknowledged() {
            return;
        }
        requester.congestion.lose(sent);
        requester.went_back = Some((oldest, now));
        requester.clock.probe_since = now;
        self.go_back(id);
    }

    /// An RNR NAK of the oldest PSN: waits as long as it says and tries again, `rnr_retry` times (IBTA 9.7.5.2.8).
    pub(super) fn receiver_not_ready<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, timer: u8) {
        if self.wire(id).requester.not_ready {
            return;
        }
        self.vnic_of(id).counters.rnr_naks += 1;
        let qp = self.qp_mut(id);
        if qp.attributes.rnr_retry < RNR_RETRY_FOREVER {
            if qp.send.rnr_retries_left == 0 {
                self.vnic_of(id).counters.rnr_retries_exceeded += 1;
                self.tally(id, |counters| counters.rnr_retries_exceeded += 1);
                let fault = (CompletionStatus::RnrRetryExceeded, Syndrome::ReceiverNotReady);
                return self.fail_head(env, now, id, fault);
            }
            qp.send.rnr_retries_left -= 1;
        }
        // It answers: the retries for silence start afresh.
        qp.send.retries_left = qp.attributes.retry_count;
        self.go_back(id);
        // A receiver that is not ready is its program's doing, not the network's: that is charged anew.
        self.sender(id).window.recount();
        self.sender(id).not_ready = true;
        self.timers.arm(id, TimerKind::ReceiverNotReady, now + rnr_delay(timer));
    }

    /// The gate is open now.
    pub(super) fn peer_came<E: Environment>(&mut self, _env: &mut E, now: Instant, id: QpId) {
        let requester = self.sender(id);
        if core::mem::take(&mut requester.gated) && !requester.window.is_empty() && !requester.not_ready {
            requester.clock.restart(now);
            self.timers.cancel(id);
            self.watch(now, id);
        }
        self.push_ready(id);
    }
}
