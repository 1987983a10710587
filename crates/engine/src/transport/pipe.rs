//! The bytes that the way to a host holds: those of all QPs that arrive there in its least round trip.
//!
//! A limit of what may be on the way fits one length of way: 1 MiB is 8 Gb/s at 1 ms. So the congestion window of a QP
//! and the limit of a host grow by what was seen to arrive (Kleinrock's operating point, as BBR has it: CACM 60(2),
//! 2017), and a quarter more, so that they find out whether the way holds more. What is beyond that waits in a queue,
//! where the delay rule of `congestion` finds it.
//!
//! The round trip is the least that any QP measured since the first one led to the host. It never grows: a queue that
//! the limits allow must not be taken for a longer way, which would allow a longer queue. A way that really gets longer
//! is known as such once no QP leads to the host any more; until then limits are those of the shorter one.
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// The most that counts: with the quarter, 34 Gb/s at 10 ms. All that waits at the peer, at worst the quarter and the
/// limit of a short way, must fit into its receive buffer of 16 MiB, where the kernel counts up to twice a packet's
/// bytes.
const HELD_BYTES_MAX: u64 = 32 << 20;
/// Held by the limits of a short way already.
const HELD_BY_SHORT_WAY_BYTES: u64 = 512 * 1024;
/// So many round trips are looked at. In one, acknowledgements that come in a bunch (a hole was filled) would be more
/// than the way holds, and the limit would follow what it allows.
const ROUND_TRIPS: u64 = 2;
/// So much more is looked at: acknowledgements come in a bunch where a router waited for its core, too.
const NOISE: Duration = Duration::from_millis(2);
/// So many of these times are an epoch: the way does not hold less because a QP went back for a loss (as BBR's filter
/// of ten round trips has it).
const EPOCH_TIMES: u32 = 6;
/// So many of these times without a look are a pause.
const PAUSE_TIMES: u64 = 3;
/// The most that the limits of a short way grow by.
pub(crate) const EXTRA_BYTES_MAX: u64 = with_quarter(HELD_BYTES_MAX) - HELD_BY_SHORT_WAY_BYTES;

const fn with_quarter(bytes: u64) -> u64 {
    bytes + bytes / 4
}

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Pipe {
    /// 0: none was measured.
    least_rtt_ns: u64,
    /// The time that is looked at, and what arrived in it.
    since: Instant,
    arrived_bytes: u64,
    /// The most that the way held in such a time of this epoch, and of the one before.
    held_bytes: [u64; 2],
    /// Such times since the epoch began.
    times: u32,
}

impl Pipe {
    /// A round trip of some QP.
    pub fn measure(&mut self, rtt: Duration) {
        let least_ns = if self.least_rtt_ns == 0 { u64::MAX } else { self.least_rtt_ns };
        self.least_rtt_ns = least_ns.min(rtt.0.max(1));
    }

    /// Bytes were acknowledged.
    pub fn arrive(&mut self, now: Instant, bytes: u64) {
        self.arrived_bytes = self.arrived_bytes.saturating_add(bytes);
        let passed_ns = (now - self.since).0;
        let time_ns = self.least_rtt_ns.saturating_mul(ROUND_TRIPS).saturating_add(NOISE.0);
        if passed_ns < time_ns {
            return;
        }
        let held = u128::from(self.arrived_bytes) * u128::from(self.least_rtt_ns) / u128::from(passed_ns);
        let held_bytes = held.min(u128::from(HELD_BYTES_MAX)) as u64;
        self.times += 1;
        if passed_ns / PAUSE_TIMES >= time_ns {
            // The time before a pause says nothing any more.
            (self.held_bytes, self.times) = ([held_bytes; 2], 0);
        } else if self.times >= EPOCH_TIMES {
            (self.held_bytes, self.times) = ([held_bytes, self.held_bytes[0]], 0);
        } else {
            self.held_bytes[0] = self.held_bytes[0].max(held_bytes);
        }
        (self.since, self.arrived_bytes) = (now, 0);
    }

    /// Bytes that may be on the way more than on a short one.
    pub fn extra_bytes(&self) -> u64 {
        let held = self.held_bytes[0].max(self.held_bytes[1]).min(HELD_BYTES_MAX);
        with_quarter(held).saturating_sub(HELD_BY_SHORT_WAY_BYTES)
    }

    pub fn least_rtt(&self) -> Duration {
        Duration(self.least_rtt_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// So many bytes a millisecond arrive.
    fn run(pipe: &mut Pipe, now: &mut u64, milliseconds: u64, bytes: u64) {
        for _ in 0..milliseconds {
            *now += MS;
            pipe.arrive(Instant(*now), bytes);
        }
    }

    #[test]
    fn a_short_way_has_the_limits_that_it_always_had() {
        let (mut pipe, mut now) = (Pipe::default(), 5 * MS);
        pipe.measure(Duration(100_000));
        // 30 Gb/s.
        run(&mut pipe, &mut now, 50, 3_750_000);
        assert_eq!(pipe.extra_bytes(), 0);
        // All that two windows are, acknowledged at once after a wait.
        pipe.arrive(Instant(now + 100 * MS), 2 << 20);
        run(&mut pipe, &mut now, 50, 3_750_000);
        assert_eq!(pipe.extra_bytes(), 0);
    }

    #[test]
    fn a_long_way_holds_what_arrives_in_a_round_trip_and_a_quarter() {
        let (mut pipe, mut now) = (Pipe::default(), 5 * MS);
        assert_eq!(pipe.extra_bytes(), 0);
        pipe.measure(Duration(10 * MS));
        pipe.measure(Duration(14 * MS));
        assert_eq!(pipe.least_rtt(), Duration(10 * MS));
        run(&mut pipe, &mut now, 50, 1_000_000);
        assert_eq!(pipe.extra_bytes(), 12_500_000 - HELD_BY_SHORT_WAY_BYTES);
        run(&mut pipe, &mut now, 50, 10_000_000);
        assert_eq!(pipe.extra_bytes(), EXTRA_BYTES_MAX);
        // Little is sent; for a short time that says nothing.
        run(&mut pipe, &mut now, 100, 1);
        assert_eq!(pipe.extra_bytes(), EXTRA_BYTES_MAX);
        run(&mut pipe, &mut now, 300, 1);
        assert_eq!(pipe.extra_bytes(), 0);
        // Nobody looked, since nothing was sent.
        run(&mut pipe, &mut now, 50, 1_000_000);
        assert!(pipe.extra_bytes() > 10_000_000);
        pipe.arrive(Instant(now + 1000 * MS), 1_000_000);
        assert_eq!(pipe.extra_bytes(), 0);
    }

    /// Bytes that arrive in bunches, as many as the limit allows, are no reason for a larger one.
    #[test]
    fn bunches_do_not_widen_the_way() {
        for round_trip in [8, 10, 40, 100] {
            let (mut pipe, mut now) = (Pipe::default(), 5 * MS);
            pipe.measure(Duration(round_trip * MS));
            for _ in 0..100 {
                let bytes = (1 << 20) + pipe.extra_bytes();
                for part in [bytes, 0] {
                    now += round_trip * MS + 2 * MS;
                    pipe.arrive(Instant(now), part);
                }
            }
            assert!(pipe.extra_bytes() < 1 << 20, "{round_trip} ms: {}", pipe.extra_bytes());
        }
    }

    #[test]
    fn a_queue_is_no_longer_way() {
        let (mut pipe, mut now) = (Pipe::default(), 5 * MS);
        pipe.measure(Duration(100_000));
        for _ in 0..100 {
            // As far as the limits allow, in a queue.
            let bytes = (2 << 20) + pipe.extra_bytes();
            pipe.measure(Duration(bytes * MS / 1_000_000));
            run(&mut pipe, &mut now, 100, 1_000_000);
        }
        assert_eq!(pipe.extra_bytes(), 0);
    }
}
