//! A token bucket in whole numbers.
//!
//! The level is kept in the rate's own unit times nanoseconds, so that what a nanosecond brings is
//! a whole number and nothing is rounded: over any time exactly rate times time comes in. It goes
//! below zero by what was taken last: who is in debt waits.
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};

const NS_PER_S: i128 = 1_000_000_000;
/// Beyond any link; keeps products within their type.
const RATE_MAX: u64 = 1 << 50;
/// Waiting QPs are released when this much has come, not a single token: it bounds how often the
/// host wakes up for a limit.
const RESUME: Duration = Duration::from_millis(1);
/// While somebody waits, so much of the rate comes on top of the depth: the host's own lateness
/// costs no tokens.
const SLACK: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bucket {
    /// Units a second.
    rate: u64,
    /// Units that one token has.
    scale: u64,
    depth: i128,
    level: i128,
    /// Up to when it was filled.
    at: Instant,
}

impl Bucket {
    /// A full one; `rate` in units a second, `depth` in tokens of `scale` units.
    pub fn new(now: Instant, rate: u64, depth: u64, scale: u64) -> Self {
        let depth = i128::from(depth.max(1)) * i128::from(scale) * NS_PER_S;
        Self { rate: rate.clamp(1, RATE_MAX), scale, depth, level: depth, at: now }
    }

    /// Another rate or depth: what is in it stays, as far as there is room.
    pub fn change(&mut self, now: Instant, rate: u64, depth: u64) {
        self.settle(now, false);
        let level = self.level;
        *self = Self::new(now, rate, depth, self.scale);
        self.level = level.min(self.depth);
    }

    /// Fills it up to now.
    pub fn settle(&mut self, now: Instant, is_awaited: bool) {
        let gained = i128::from(self.rate) * i128::from((now - self.at).0);
        let slack = if is_awaited { i128::from(self.rate) * i128::from(SLACK.0) } else { 0 };
        self.level = (self.level + gained).min(self.depth + slack);
        self.at = self.at.max(now);
    }

    /// Whether as much as `tokens` is in it; with 0: whether anything is.
    pub fn has(&self, tokens: u64) -> bool {
        if tokens == 0 { self.level > 0 } else { self.level >= i128::from(tokens) * i128::from(self.scale) * NS_PER_S }
    }

    pub fn is_full(&self) -> bool {
        self.level >= self.depth
    }

    /// Whole tokens in it.
    pub fn tokens(&self) -> u64 {
        let whole = self.level.max(0) / (i128::from(self.scale) * NS_PER_S);
        u64::try_from(whole).unwrap_or(u64::MAX)
    }

    pub fn take(&mut self, tokens: u64) {
        self.level -= i128::from(tokens) * i128::from(self.scale) * NS_PER_S;
    }

    /// False for one that was read from damaged bytes.
    pub fn is_consistent(&self) -> bool {
        let limit = i128::MAX / 4;
        (1..=RATE_MAX).contains(&self.rate) && self.scale > 0 && self.level.abs() < limit && self.depth.abs() < limit
    }

    /// When so much has come that it is worth going on.
    pub fn resumes_at(&self) -> Instant {
        let token = i128::from(self.scale) * NS_PER_S;
        let worth = (i128::from(self.rate) * i128::from(RESUME.0)).max(token).min(self.depth);
        let missing = (worth - self.level).max(0);
        let span = missing / i128::from(self.rate) + i128::from(missing % i128::from(self.rate) != 0);
        self.at + Duration(u64::try_from(span).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nothing_is_rounded_in_a_day_of_odd_steps() {
        // 999,999,937 bits/s, looked at every 999,983 ns: each step brings a fraction of a bit.
        let (mut bucket, mut now, mut taken) = (Bucket::new(Instant(0), 999_999_937, 1 << 40, 8), Instant(0), 0u128);
        bucket.take(1 << 40);
        for _ in 0..100_000 {
            now = now + Duration(999_983);
            bucket.settle(now, false);
            let bytes = bucket.tokens();
            bucket.take(bytes);
            taken += u128::from(bytes);
        }
        let exact = 999_999_937u128 * u128::from(now.0) / 8_000_000_000;
        assert_eq!(taken, exact);
    }

    proptest! {
        /// The level is what a bucket of real numbers would have.
        #[test]
        fn as_a_bucket_of_real_numbers(
            rate in 1u64..=1 << 40,
            depth in 1u64..1 << 30,
            steps in prop::collection::vec((0u64..5_000_000, 0u64..100_000), 1..100),
        ) {
            let (mut bucket, mut now) = (Bucket::new(Instant(0), rate, depth, 8), Instant(0));
            let full = i128::from(depth) * 8 * NS_PER_S;
            let mut level = full;
            for (span, bytes) in steps {
                now = now + Duration(span);
                bucket.settle(now, false);
                level = (level + i128::from(rate) * i128::from(span)).min(full);
                prop_assert_eq!(bucket.level, level);
                if !bucket.has(0) {
                    let at = bucket.resumes_at();
                    let mut then = bucket;
                    then.settle(at, true);
                    prop_assert!(at > now && then.has(0) && then.at == at);
                    let mut before = bucket;
                    before.settle(Instant(at.0 - 1), true);
                    let worth = (i128::from(rate) * i128::from(RESUME.0)).max(8 * NS_PER_S).min(full);
                    prop_assert!(before.level < worth, "not later than needed");
                } else {
                    bucket.take(bytes);
                    level -= i128::from(bytes) * 8 * NS_PER_S;
                }
            }
        }

        /// However often the rate changes, what comes in is the sum of each rate times its time.
        #[test]
        fn changes_lose_and_give_nothing(steps in prop::collection::vec((1u64..1 << 36, 0u64..1_000_000), 1..50)) {
            let (mut bucket, mut now) = (Bucket::new(Instant(0), 1, 1 << 50, 1), Instant(0));
            bucket.take(1 << 50);
            let (mut expected, mut rate) = (0i128, 1u64);
            for (next, span) in steps {
                now = now + Duration(span);
                expected += i128::from(rate) * i128::from(span);
                bucket.change(now, next, 1 << 50);
                rate = next;
            }
            prop_assert_eq!(bucket.level, expected);
        }
    }
}
