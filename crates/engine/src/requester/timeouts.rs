//! Timers of the packet transport: retransmission, probes, silence; see `completer::retransmit`.
use crate::fault::Fault;
use crate::qp::SendPhase;
use crate::requester::Requester;
use crate::schedule::Scheduler;
use crate::timers::{TimerKind, acknowledge_timeout};
use crate::transport::packets::AckPolicy;
use crate::transport::wire::WireOperation;
use crate::{Environment, QpId, Syndrome, TransmitOutcome};
use freeflow_verbs::{CompletionStatus, Instant};
use freeflow_wire::psn_add;

impl Requester {
    pub(crate) fn wire_timeout<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, _kind: TimerKind) {
        let writing = self.wire(id).writing;
        let requester = self.responder.completer.sender(id);
        if core::mem::take(&mut requester.not_ready) {
            return self.push_ready(id);
        }
        if requester.window.is_empty() {
            return self.end_local_wait(id);
        }
        self.responder.completer.repair(now, id);
        let requester = self.responder.completer.sender(id);
        if writing || requester.fetching.is_some() {
            // It is this host that keeps the peer waiting, or the answer.
            requester.clock.restart(now);
            self.responder.completer.lapse(now, id);
            return self.responder.completer.arm(id);
        }
        self.responder.completer.excuse_wait(now, id);
        if self.is_held_by_limit(id) {
            self.excuse_limit(now, id);
        }
        let silent_since = self.responder.completer.sender(id).clock.silent_since;
        let timeout = acknowledge_timeout(self.qp(id).attributes.timeout);
        if timeout.is_some_and(|timeout| silent_since + timeout <= now) {
            return self.end_silence(env, now, id);
        }
        let lapse = self.responder.completer.hosts.lapse(self.wire(id).destination.host);
        let requester = self.responder.completer.sender(id);
        if requester.clock.lapse_since + lapse <= now {
            requester.clock.lapse_since = now;
            self.responder.completer.lapse(now, id);
        }
        let requester = self.responder.completer.sender(id);
        if !requester.gated && requester.clock.probe_at(requester.congestion.smoothed_rtt_ns()) <= now {
            self.probe(env, now, id);
        }
        self.responder.completer.arm(id);
    }

    /// Whether it is a limit of rate that keeps the QP from sending.
    fn is_held_by_limit(&self, id: QpId) -> bool {
        self.responder.schedule.is_waiting(id)
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
            self.responder.completer.tally(id, |counters| counters.retries_exceeded += 1);
            return self.responder.completer.fail_head(
                env,
                now,
                id,
                Fault::new(CompletionStatus::RetryExceeded, Syndrome::NoAnswer),
            );
        }
        self.qp_mut(id).send.retries_left -= 1;
        self.vnic_of(id).counters.ack_timeouts += 1;
        self.responder.completer.tally(id, |counters| counters.ack_timeouts += 1);
        let requester = self.responder.completer.sender(id);
        (requester.clock.silent_since, requester.clock.probe_since) = (now, now);
        if requester.window.has_unacknowledged() {
            let sent = requester.window.sent();
            requester.congestion.collapse(sent);
        }
        self.responder.completer.go_back(id);
        self.responder.completer.arm(id);
    }

    /// Sends the oldest packet once more.
    fn probe<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId) {
        let clock = &mut self.responder.completer.sender(id).clock;
        clock.probe_since = now;
        clock.probe_count += 1;
        if !self.responder.gate_is_open(env, id) {
            return;
        }
        let Some(burst) = self.responder.completer.sender(id).window.plan_probe() else { return };
        let mut acks = AckPolicy { since_bytes: 0, every_bytes: 0, asked_psn: None };
        match self.transmit_burst(env, id, &burst, &mut acks) {
            Ok(TransmitOutcome::Sent) => {}
            Ok(TransmitOutcome::Pending) => {
                self.responder.completer.submit_wire(id, WireOperation::Request, None);
                self.responder.completer.sender(id).fetching = Some(burst);
            }
            // No room: the next probe. No memory: going back for it will find that, and fail the
            // request.
            Ok(TransmitOutcome::Full | TransmitOutcome::Fault) | Err(_) => return,
        }
        self.count_burst(id, &burst);
        self.responder.completer.tally(id, |counters| counters.probes_sent += 1);
        self.responder.completer.sender(id).clock.probed = Some(psn_add(burst.psn, burst.packets - 1));
    }

    /// The gate is open now.
    pub(crate) fn peer_came<E: Environment>(&mut self, _env: &mut E, now: Instant, id: QpId) {
        let requester = self.responder.completer.sender(id);
        if core::mem::take(&mut requester.gated) && !requester.window.is_empty() && !requester.not_ready {
            requester.clock.restart(now);
            self.responder.completer.timers.cancel(id);
            self.responder.completer.watch(now, id);
        }
        self.push_ready(id);
    }
}
