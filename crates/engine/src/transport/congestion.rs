//! The congestion window of a connected QP: how many bytes of its packets may be on the way.
//!
//! Additive increase, multiplicative decrease, judged once a *round*: the time in which all that
//! was on the way when the round began is acknowledged. What it is driven by, and where the ideas
//! are from:
//!
//! * **Loss** (a gap that the responder reported, or a missing READ response) takes an eighth, at
//!   most once a round (RFC 5681, section 3.1, and RFC 6582: one cut for all losses of one window).
//!   An eighth and not a half, because go-back-N already pays for a loss with a window of packets
//!   sent twice, and because links here lose packets without being full: at one loss in a thousand
//!   packets of 4 KB, increase and decrease balance at about 360 KB.
//!   Where selective repeat mends it, a loss costs one packet, and one packet in fifty may get lost without a cut (BBR,
//!   draft-cardwell-ccwg-bbr, tolerates 2 %, too): an account takes one for each packet that is acknowledged, and gives
//!   fifty for each that is lost. It holds a dozen losses at most: an overflowing queue loses more than that at once.
//! * **Silence** for the whole local ACK timeout closes the window to its least, and it opens again
//!   by doubling to half of what it was (RFC 5681, sections 3.1 and 5).
//! * **Delay**: above a target (the least RTT of the last seconds, and an allowance) the window
//!   gives way in proportion to the excess, at most an eighth a round (Swift, SIGCOMM 2020: a
//!   target delay and a bounded decrease). Judged is the *least* RTT of a round (Copa, NSDI 2018,
//!   calls it the standing RTT): a queue delays all packets, a scheduler that lets a router wait
//!   for its core delays some. The allowance is far above the noise of shared cores; so delay
//!   speaks only where many QPs together keep a real queue.
//! * **Marks** (ECN) take a sixteenth, at most once a round.
//!
//! The window grows only when it was what held packets back (RFC 7661), and up to what the way is seen to hold
//! (`pipe`). Its increase is by time, as on a way of 200 us: on a longer one a round takes as much more. (The idea is
//! TCP Hybla's: Caini and Firrincieli, 2004.) Integers only: a run repeats itself.
use crate::transport::pipe::EXTRA_BYTES_MAX;
use freeflow_verbs::{Duration, Instant};
use freeflow_wire::psn_ahead;
use serde::{Deserialize, Serialize};

const WINDOW_START_BYTES: u64 = 128 * 1024;
/// The most on a short way; see `pipe`.
pub(crate) const WINDOW_BYTES_SHORT: u64 = 1024 * 1024;
pub(crate) const WINDOW_BYTES_MAX: u64 = WINDOW_BYTES_SHORT + EXTRA_BYTES_MAX;
/// The least window, in packets of the path MTU.
const WINDOW_PACKETS_MIN: u64 = 2;
/// A round's additive increase, if its least RTT is not longer than this; else as much for each such time.
const INCREASE_BYTES: u64 = 4096;
const INCREASE_RTT_NS: u64 = 200_000;
const LOSS_SHIFT: u32 = 3;
/// One repaired loss in so many packets is tolerated, and so many losses in a row.
const PACKETS_A_LOSS: u32 = 50;
const LOSSES_IN_A_ROW: u32 = 12;
const MARK_SHIFT: u32 = 4;
const DELAY_SHIFT_MAX: u32 = 3;
/// A round's least RTT may exceed the least ever seen by this.
const DELAY_ALLOWANCE: Duration = Duration::from_millis(2);
/// How long the least RTT is believed: one to two of these.
const LEAST_RTT_EPOCH: Duration = Duration::from_millis(5_000);
/// Weight of the past in the smoothed RTT: 7/8 (RFC 6298).
const SMOOTHING_SHIFT: u32 = 3;

#[derive(Serialize, Deserialize)]
pub(crate) struct Congestion {
    window_bytes: u64,
    /// Below it the window doubles each round.
    threshold_bytes: u64,
    least_bytes: u64,
    /// 0: none was measured.
    smoothed_rtt_ns: u64,
    /// Of this epoch and of the one before.
    least_rtt_ns: [u64; 2],
    epoch_ends: Instant,
    /// The round is over when all before this PSN is acknowledged. `None`: nothing ever was, there
    /// is no round to judge.
    round_ends: Option<u32>,
    /// All before it was acknowledged, when that was last looked at.
    acknowledged: u32,
    /// Packets that were acknowledged for losses to come.
    tolerance: u32,
    standing_rtt_ns: u64,
    held_back: bool,
    cut: bool,
    marked: bool,
}

impl Congestion {
    /// `packet_bytes`: what a full packet counts.
    pub fn new(packet_bytes: u64) -> Self {
        Self {
            window_bytes: WINDOW_START_BYTES,
            threshold_bytes: WINDOW_BYTES_MAX,
            least_bytes: WINDOW_PACKETS_MIN * packet_bytes,
            smoothed_rtt_ns: 0,
            least_rtt_ns: [u64::MAX; 2],
            epoch_ends: Instant(0),
            round_ends: None,
            acknowledged: 0,
            tolerance: PACKETS_A_LOSS * LOSSES_IN_A_ROW,
            standing_rtt_ns: u64::MAX,
            held_back: false,
            cut: false,
            marked: false,
        }
    }

    pub fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    pub fn smoothed_rtt_ns(&self) -> u64 {
        self.smoothed_rtt_ns
    }

    /// The window was full, and more was there to send.
    pub fn hold_back(&mut self) {
        self.held_back = true;
    }

    /// A packet's acknowledgement came after `rtt`; it was sent once.
    pub fn measure(&mut self, now: Instant, rtt: Duration) {
        let rtt_ns = rtt.0.max(1);
        self.smoothed_rtt_ns = match self.smoothed_rtt_ns {
            0 => rtt_ns,
            past => past - (past >> SMOOTHING_SHIFT) + (rtt_ns >> SMOOTHING_SHIFT),
        };
        if now >= self.epoch_ends {
            self.least_rtt_ns = [u64::MAX, self.least_rtt_ns[0]];
            self.epoch_ends = now + LEAST_RTT_EPOCH;
        }
        self.least_rtt_ns[0] = self.least_rtt_ns[0].min(rtt_ns);
        self.standing_rtt_ns = self.standing_rtt_ns.min(rtt_ns);
    }

    /// All before `oldest` is acknowledged, all before `sent` was sent. `most_bytes`: what the window may grow to.
    pub fn acknowledge(&mut self, oldest: u32, sent: u32, most_bytes: u64) {
        let packets = psn_ahead(oldest, self.acknowledged).max(0) as u32;
        self.tolerance = (self.tolerance + packets).min(PACKETS_A_LOSS * LOSSES_IN_A_ROW);
        self.acknowledged = oldest;
        match self.round_ends {
            Some(end) if psn_ahead(oldest, end) < 0 => return,
            Some(_) => self.judge(most_bytes),
            None => {}
        }
        self.begin_round(sent);
    }

    /// Packets were lost; all before `sent` was sent.
    pub fn lose(&mut self, sent: u32) {
        if !self.cut {
            self.shrink(self.window_bytes >> LOSS_SHIFT);
            self.begin_round(sent);
            self.cut = true;
        }
    }

    /// So many packets were lost, and go out again alone.
    pub fn lose_repaired(&mut self, packets: u32, sent: u32) {
        match self.tolerance.checked_sub(packets.saturating_mul(PACKETS_A_LOSS)) {
            Some(left) => self.tolerance = left,
            None => {
                self.tolerance = 0;
                self.lose(sent);
            }
        }
    }

    /// An answer says that packets of this connection meet a queue.
    pub fn mark(&mut self) {
        if !self.marked && !self.cut {
            self.marked = true;
            self.shrink(self.window_bytes >> MARK_SHIFT);
        }
    }

    /// Nothing came for the whole local ACK timeout.
    pub fn collapse(&mut self, sent: u32) {
        self.threshold_bytes = (self.window_bytes / 2).max(self.threshold_bytes.min(WINDOW_START_BYTES));
        self.window_bytes = self.least_bytes;
        self.begin_round(sent);
        self.cut = true;
    }

    /// After a pause the window of a long way is not sent at once: it opens from that of a short one by doubling
    /// (RFC 7661).
    pub fn rest(&mut self) {
        if self.window_bytes > WINDOW_BYTES_SHORT {
            self.threshold_bytes = self.threshold_bytes.max(self.window_bytes);
            self.window_bytes = WINDOW_BYTES_SHORT;
        }
    }

    fn judge(&mut self, most_bytes: u64) {
        if self.cut {
            return;
        }
        let least_ns = self.least_rtt_ns[0].min(self.least_rtt_ns[1]);
        let target_ns = least_ns.saturating_add(DELAY_ALLOWANCE.0);
        if self.standing_rtt_ns != u64::MAX && self.standing_rtt_ns > target_ns {
            let excess = u128::from(self.standing_rtt_ns - target_ns);
            let most = u128::from(self.window_bytes >> DELAY_SHIFT_MAX);
            self.shrink(((most * excess / u128::from(self.standing_rtt_ns)) as u64).max(1));
        } else if self.held_back && !self.marked {
            let round = if least_ns == u64::MAX { 1 } else { (least_ns / INCREASE_RTT_NS).max(1) };
            let increase = INCREASE_BYTES.saturating_mul(round).min(self.window_bytes);
            let increase = if self.window_bytes < self.threshold_bytes {
                self.window_bytes.min(self.threshold_bytes - self.window_bytes).max(increase)
            } else {
                increase
            };
            // The way may seem to hold less for a while: that is no loss.
            self.window_bytes =
                (self.window_bytes + increase).min(most_bytes.max(self.window_bytes)).min(WINDOW_BYTES_MAX);
        }
    }

    fn shrink(&mut self, bytes: u64) {
        self.window_bytes = (self.window_bytes - bytes).max(self.least_bytes);
        self.threshold_bytes = self.window_bytes;
    }

    fn begin_round(&mut self, sent: u32) {
        self.round_ends = Some(sent);
        self.standing_rtt_ns = u64::MAX;
        (self.held_back, self.cut, self.marked) = (false, false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u64 = 4096 + 64;
    const US: u64 = 1_000;

    /// A sender that always has more to send: rounds of the given RTTs, one measurement each.
    struct Sender {
        congestion: Congestion,
        psn: u32,
        now: Instant,
        most_bytes: u64,
    }

    impl Sender {
        fn new() -> Self {
            let mut congestion = Congestion::new(PACKET);
            congestion.acknowledge(0, 0, WINDOW_BYTES_SHORT);
            Self { congestion, psn: 0, now: Instant(1), most_bytes: WINDOW_BYTES_SHORT }
        }

        fn round(&mut self, rtts_us: &[u64]) {
            for rtt_us in rtts_us {
                self.congestion.measure(self.now, Duration(rtt_us * US));
            }
            self.now = self.now + Duration(rtts_us.iter().max().unwrap_or(&100) * US);
            self.congestion.hold_back();
            self.psn = freeflow_wire::psn_add(self.psn, 100);
            self.congestion.acknowledge(self.psn, self.psn, self.most_bytes);
        }

        fn window(&self) -> u64 {
            self.congestion.window_bytes()
        }
    }

    #[test]
    fn opens_by_doubling_to_the_most() {
        let mut sender = Sender::new();
        assert_eq!(sender.window(), WINDOW_START_BYTES);
        sender.round(&[100]);
        assert_eq!(sender.window(), 2 * WINDOW_START_BYTES);
        for _ in 0..10 {
            sender.round(&[100]);
        }
        assert_eq!(sender.window(), WINDOW_BYTES_SHORT);
    }

    #[test]
    fn opens_as_far_as_the_way_holds_and_its_increase_is_by_time() {
        let mut sender = Sender::new();
        sender.most_bytes = 20 << 20;
        for _ in 0..20 {
            sender.round(&[10_000]);
        }
        assert_eq!(sender.window(), 20 << 20);
        sender.most_bytes = WINDOW_BYTES_SHORT;
        sender.round(&[10_000]);
        assert_eq!(sender.window(), 20 << 20, "the way seems to hold less");
        sender.most_bytes = u64::MAX;
        sender.congestion.lose(sender.psn);
        let cut = sender.window();
        assert_eq!(cut, (20 << 20) - (20 << 20) / 8);
        sender.round(&[10_000]);
        sender.round(&[10_000]);
        assert_eq!(sender.window(), cut + 50 * INCREASE_BYTES);
        for _ in 0..1_000 {
            sender.round(&[10_000]);
        }
        assert_eq!(sender.window(), WINDOW_BYTES_MAX);
    }

    #[test]
    fn grows_only_when_it_held_back() {
        let mut congestion = Congestion::new(PACKET);
        for psn in 1..100 {
            congestion.acknowledge(psn, psn, WINDOW_BYTES_SHORT);
        }
        assert_eq!(congestion.window_bytes(), WINDOW_START_BYTES);
    }

    #[test]
    fn losses_of_one_round_count_once() {
        let mut sender = Sender::new();
        let before = sender.window();
        sender.congestion.lose(1_000);
        sender.congestion.lose(1_000);
        sender.congestion.acknowledge(999, 1_200, WINDOW_BYTES_SHORT);
        sender.congestion.lose(1_200);
        assert_eq!(sender.window(), before - before / 8);
        sender.congestion.acknowledge(1_000, 1_300, WINDOW_BYTES_SHORT);
        sender.congestion.lose(1_300);
        assert_eq!(sender.window(), (before - before / 8) - (before - before / 8) / 8);
    }

    #[test]
    fn after_a_loss_it_grows_by_one_step_a_round() {
        let mut sender = Sender::new();
        sender.congestion.lose(0);
        let cut = sender.window();
        sender.round(&[100]);
        assert_eq!(sender.window(), cut, "the round of the loss");
        sender.round(&[100]);
        assert_eq!(sender.window(), cut + INCREASE_BYTES);
    }

    #[test]
    fn noise_of_a_shared_core_does_not_close_it() {
        let mut sender = Sender::new();
        for _ in 0..1_000 {
            sender.round(&[100, 1_100, 2_100]);
            sender.round(&[1_900]);
        }
        assert_eq!(sender.window(), WINDOW_BYTES_SHORT);
    }

    #[test]
    fn a_standing_queue_closes_it_slowly_and_never_below_the_least() {
        let mut sender = Sender::new();
        sender.round(&[100]);
        let before = sender.window();
        sender.round(&[10_000, 12_000]);
        assert!(sender.window() < before && sender.window() >= before - before / 8);
        for _ in 0..10_000 {
            // Within the time that the least RTT is remembered.
            sender.congestion.measure(sender.now, Duration(1));
            sender.congestion.standing_rtt_ns = u64::MAX;
            sender.round(&[20_000]);
        }
        assert_eq!(sender.window(), 2 * PACKET);
    }

    #[test]
    fn a_longer_way_is_learnt() {
        let mut sender = Sender::new();
        sender.round(&[100]);
        for _ in 0..4_000 {
            sender.round(&[10_000]);
        }
        assert_eq!(sender.window(), WINDOW_BYTES_SHORT);
    }

    #[test]
    fn marks_are_gentle() {
        let mut sender = Sender::new();
        let before = sender.window();
        sender.congestion.mark();
        sender.congestion.mark();
        assert_eq!(sender.window(), before - before / 16);
    }

    #[test]
    fn silence_closes_it_and_it_opens_again() {
        let mut sender = Sender::new();
        for _ in 0..8 {
            sender.round(&[100]);
        }
        for _ in 0..7 {
            sender.congestion.collapse(0);
        }
        assert_eq!(sender.window(), 2 * PACKET);
        for _ in 0..8 {
            sender.round(&[100]);
        }
        assert!(sender.window() >= WINDOW_START_BYTES, "{}", sender.window());
    }

    #[test]
    fn few_losses_that_are_repaired_cost_nothing() {
        let mut sender = Sender::new();
        for _ in 0..100 {
            sender.round(&[100]);
        }
        for _ in 0..1_000 {
            sender.congestion.lose_repaired(2, sender.psn);
            sender.round(&[100]);
            assert_eq!(sender.window(), WINDOW_BYTES_SHORT);
        }
        // A queue that overflows, and one loss in 33 packets for ever.
        sender.congestion.lose_repaired(LOSSES_IN_A_ROW + 1, sender.psn);
        assert_eq!(sender.window(), WINDOW_BYTES_SHORT - WINDOW_BYTES_SHORT / 8);
        for _ in 0..100 {
            sender.congestion.lose_repaired(3, sender.psn);
            sender.round(&[100]);
        }
        assert!(sender.window() < WINDOW_BYTES_SHORT / 4);
    }

    /// One loss in a thousand packets: the window must hold what a link of 20 Gb/s and 50 to 200 us
    /// needs, and what go-back-N sends twice must stay a small part.
    #[test]
    fn one_loss_in_a_thousand_leaves_a_useful_window() {
        let mut sender = Sender::new();
        let (mut packets, mut losses, mut sum, mut rounds) = (0, 0, 0, 0);
        while losses < 1_000 {
            packets += sender.window() / PACKET;
            if packets >= 1_000 {
                packets -= 1_000;
                losses += 1;
                sender.congestion.lose(sender.psn);
            }
            sender.round(&[200]);
            sum += sender.window();
            rounds += 1;
        }
        let mean = sum / rounds;
        assert!((250_000..500_000).contains(&mean), "{mean}");
    }
}
