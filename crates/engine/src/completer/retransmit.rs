//! The requester's reaction when answers don't come, or say that something was lost (IBTA 9.7.5.2,
//! 9.7.6.1).
//!
//! One timer a QP, armed while messages are under way, for the earliest of these ends:
//!
//! * The **local ACK timeout**, exactly as the attributes say: 4.096 us * 2^timeout without
//!   progress and the requester goes back to the oldest packet; `retry_count` times, and at the
//!   next end the QP has failed (RETRY_EXC_ERR). Timeout 0: never.
//! * A **probe**, which is ours: a few round trips without progress and the oldest packet goes out
//!   once more, asking for an acknowledgement. It costs no retry. A lost last packet, a lost NAK or
//!   acknowledgement is made good in a millisecond where attributes say tens of them. What the peer
//!   then says decides: an acknowledgement of just that packet means that all after it is
//!   lost as well.
//!
//! * A packet that is **missing** at a peer which keeps later ones: it may be late, and goes out again when it
//!   has been for too long (`transport::repair`).
//!
//! A further end concerns others: what was heard nothing of for a while does not count for its host
//! any more (`hosts`).
//!
//! The timer is not moved by each acknowledgement: when it expires it looks when the last progress
//! was, and is armed again.
//!
//! While an RNR NAK's delay runs, the same timer runs for it, and nothing else does.
use crate::completer::Completer;
use crate::fault::Fault;
use crate::limits::RNR_RETRY_FOREVER;
use crate::timers::{TimerKind, acknowledge_timeout, rnr_delay};
use crate::transport::requester::Clock;
use crate::{Environment, QpId, Syndrome};
use freeflow_verbs::{CompletionStatus, Duration, Instant};

/// The least time without progress before a probe, and the longest between two.
///
/// The least is short because of losses. At round trips of 20 us and a packet in a hundred lost, a
/// 10 Gb/s line carries 7.4 Gb/s with 1 ms, 6.3 with 4 and 4.0 with 16; at one in twenty 2.0, 0.7
/// and 0.2 (`crates/sim/tests/goodput.txt` and the same table with these values). It costs little
/// where a peer is late and not gone: one packet a probe, each after twice the time, no retry, no
/// cut of the window; a READ that is asked for again while it is answered is answered once. Between
/// two routers on a machine of two cores with a load of 12, WRITEs, READs and SENDs of 680 MB had
/// no probe and no duplicate; a single small message, whose peer waits for a core longer than that,
/// has both.
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

    pub fn probe_at(&self, smoothed_rtt_ns: u64) -> Instant {
        let least = PROBE_MIN.0.max(PROBE_ROUND_TRIPS * smoothed_rtt_ns).min(PROBE_MAX.0);
        let wait = (least << self.probe_count.min(PROBE_DOUBLINGS_MAX)).min(PROBE_MAX.0);
        self.probe_since + Duration(wait)
    }
}

impl Completer {
    // ---- the timer

    /// Messages are under way: the timer runs.
    pub(crate) fn watch(&mut self, now: Instant, id: QpId) {
        if self.timers.armed(id).is_none() {
            let pause = self.hosts.lapse(self.wire(id).destination.host);
            let requester = self.sender(id);
            if requester.clock.silent_since + pause <= now {
                requester.congestion.rest();
            }
            requester.clock.restart(now);
            self.arm(id);
        }
    }

    /// A burst was sent that counts so much. If nothing else counts that is on the way, the timer
    /// may be armed for what is later than its lapse.
    pub(crate) fn watch_burst(&mut self, now: Instant, id: QpId, bytes: u64) {
        let is_first = self.wire(id).share.in_flight_bytes() <= bytes;
        if is_first && self.timers.armed(id).is_some() {
            self.sender(id).clock.lapse_since = now;
            return self.arm(id);
        }
        self.watch(now, id);
    }

    /// Arms the timer for what ends first.
    pub(crate) fn arm(&mut self, id: QpId) {
        let timeout = acknowledge_timeout(self.qp(id).attributes.timeout);
        let requester = &self.wire(id).requester;
        let silence = timeout.map(|timeout| requester.clock.silent_since + timeout);
        let probe = requester.clock.probe_at(requester.congestion.smoothed_rtt_ns());
        let probe = (!requester.gated).then_some(probe);
        let counts = self.wire(id).share.in_flight_bytes() > 0;
        let lapse = counts.then(|| requester.clock.lapse_since + self.hosts.lapse(self.wire(id).destination.host));
        let repair = requester.repair.ripens_at(requester.congestion.smoothed_rtt_ns());
        if let Some(at) = [silence, probe, lapse, repair].into_iter().flatten().min() {
            self.timers.arm(id, TimerKind::Retransmit, at);
        }
    }

    // ---- going back

    /// All that is not acknowledged goes out again.
    pub(crate) fn go_back(&mut self, id: QpId) {
        let requester = self.sender(id);
        requester.window.go_back();
        requester.samples.clear();
        requester.stuck = None;
        requester.clock.probed = None;
        requester.repair.clear();
        requester.alone_until = None;
        requester.held = false;
        self.sync_host(id);
        self.push_ready(id);
    }

    /// The peer misses a packet, or an answer of it was lost. Said twice within a round trip, it is
    /// one loss: the second was on the way when the packets went out again.
    pub(crate) fn go_back_for_loss(&mut self, now: Instant, id: QpId) {
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

    /// An RNR NAK of the oldest PSN: waits as long as it says and tries again, `rnr_retry` times
    /// (IBTA 9.7.5.2.8).
    pub(crate) fn receiver_not_ready<E: Environment>(&mut self, env: &mut E, now: Instant, id: QpId, timer: u8) {
        if self.wire(id).requester.not_ready {
            return;
        }
        self.vnic_of(id).counters.rnr_naks += 1;
        let qp = self.qp_mut(id);
        if qp.attributes.rnr_retry < RNR_RETRY_FOREVER {
            if qp.send.rnr_retries_left == 0 {
                self.vnic_of(id).counters.rnr_retries_exceeded += 1;
                self.tally(id, |counters| counters.rnr_retries_exceeded += 1);
                let fault = Fault::new(CompletionStatus::RnrRetryExceeded, Syndrome::ReceiverNotReady);
                return self.fail_head(env, now, id, fault);
            }
            qp.send.rnr_retries_left -= 1;
        }
        // It answers: the retries for silence start afresh.
        qp.send.retries_left = qp.attributes.retry_count;
        self.go_back(id);
        // A receiver that is not ready is its program's doing, not the network's: that is charged
        // again.
        self.sender(id).window.recount();
        self.sender(id).not_ready = true;
        self.timers.arm(id, TimerKind::ReceiverNotReady, now + rnr_delay(timer));
    }
}
