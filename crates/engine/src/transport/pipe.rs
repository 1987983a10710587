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
/// So much more than a round trip is looked at: acknowledgements come in a bunch where a router waited for its core.
const NOISE: Duration = Duration::from_millis(2);
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
    /// Bytes that the way held in the last two of these times.
    held_bytes: [u64; 2],
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
        if passed_ns < self.least_rtt_ns.saturating_add(NOISE.0) {
            return;
        }
        let held = u128::from(self.arrived_bytes) * u128::from(self.least_rtt_ns) / u128::from(passed_ns);
        self.held_bytes = [held.min(u128::from(HELD_BYTES_MAX)) as u64, self.held_bytes[0]];
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
        // Nothing was to be sent for a while.
        run(&mut pipe, &mut now, 50, 0);
        assert_eq!(pipe.extra_bytes(), 0);
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
