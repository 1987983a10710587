//! One limit of rate: its two buckets, and who waits for them.
//!
//! Invariant: the timer of a gate (`due`) runs exactly while somebody stands in its line.
use super::bucket::Bucket;
use super::order::Order;
use super::{Allowance, Used};
use crate::QpId;
use freeflow_verbs::{Instant, RateLimit};
use serde::{Deserialize, Serialize};

/// Where only messages are limited, one counts as much as the default weight brings in a round.
const MESSAGE_COST: u64 = 64 * 1024;
const BITS_PER_BYTE: u64 = 8;
/// The depth of a bucket that nobody has said is what comes in this part of a second, but not less
/// than these.
const BURSTS_PER_S: u64 = 500;
const BURST_BYTES_MIN: u64 = 64 * 1024;
const BURST_MESSAGES_MIN: u64 = 16;

/// The rest of a limit's burst.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Levels {
    bytes: Option<Bucket>,
    messages: Option<Bucket>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct RateGate {
    levels: Levels,
    /// Waiting QPs; of a tenant by vNIC, else in slot 0.
    pub line: Order,
    /// The QP that was released from the line last and has not run since.
    pub released: Option<QpId>,
    /// When its timer ends.
    pub due: Option<Instant>,
}

/// Depths of the two buckets of a limit.
struct Depths {
    bytes: u64,
    messages: u64,
}

fn depths(limit: &RateLimit) -> Depths {
    let of_bits = |rate: u64| (rate / BITS_PER_BYTE / BURSTS_PER_S).max(BURST_BYTES_MIN);
    let of_messages = |rate: u64| (rate / BURSTS_PER_S).max(BURST_MESSAGES_MIN);
    let bytes = limit.burst_bytes.unwrap_or_else(|| of_bits(limit.bits_per_s.unwrap_or(0)));
    let messages = limit.burst_messages.unwrap_or_else(|| of_messages(limit.messages_per_s.unwrap_or(0)));
    Depths { bytes, messages }
}

fn change(bucket: &mut Option<Bucket>, now: Instant, rate: Option<u64>, depth: u64, scale: u64) {
    match (rate, bucket.as_mut()) {
        (None, _) => *bucket = None,
        (Some(rate), Some(bucket)) => bucket.change(now, rate, depth),
        (Some(rate), None) => *bucket = Some(Bucket::new(now, rate, depth, scale)),
    }
}

impl Levels {
    /// Another limit: what is in the buckets stays.
    pub fn change(&mut self, now: Instant, limit: &RateLimit) {
        let depths = depths(limit);
        change(&mut self.bytes, now, limit.bits_per_s, depths.bytes, BITS_PER_BYTE);
        change(&mut self.messages, now, limit.messages_per_s, depths.messages, 1);
    }

    /// Whether they are as those of a new gate.
    pub fn are_full(&self, now: Instant) -> bool {
        let is_full = |mut bucket: Bucket| {
            bucket.settle(now, false);
            bucket.is_full()
        };
        self.buckets().all(is_full)
    }

    fn buckets(&self) -> impl Iterator<Item = Bucket> {
        self.bytes.into_iter().chain(self.messages)
    }

    pub fn are_consistent(&self) -> bool {
        self.buckets().all(|bucket| bucket.is_consistent())
    }
}

impl RateGate {
    /// A gate with what is left of another, or full.
    pub fn new(now: Instant, limit: &RateLimit, left: Option<Levels>) -> Self {
        let line = Order::default();
        let mut gate = Self { levels: left.unwrap_or_default(), line, released: None, due: None };
        gate.change(now, limit);
        gate
    }

    pub fn change(&mut self, now: Instant, limit: &RateLimit) {
        self.levels.change(now, limit);
    }

    pub fn levels(&self) -> Levels {
        self.levels
    }

    pub fn settle(&mut self, now: Instant) {
        let is_awaited = !self.line.is_empty() || self.released.is_some();
        for bucket in self.levels.bytes.iter_mut().chain(&mut self.levels.messages) {
            bucket.settle(now, is_awaited);
        }
    }

    /// Whether nothing may go: no payload, or no message.
    pub fn is_short(&self) -> bool {
        self.levels.bytes.as_ref().is_some_and(|bucket| !bucket.has(0))
            || self.levels.messages.as_ref().is_some_and(|bucket| !bucket.has(1))
    }

    pub fn allowance(&self) -> Allowance {
        let messages = self.levels.messages.as_ref().map_or(u64::MAX, Bucket::tokens);
        Allowance {
            bytes: self.levels.bytes.as_ref().map_or(u64::MAX, |bucket| bucket.tokens().max(1)),
            messages: u32::try_from(messages).unwrap_or(u32::MAX),
        }
    }

    /// Cost of a use in the line, in the limit's unit.
    pub fn cost(&self, used: &Used) -> u64 {
        let of_messages = if self.levels.bytes.is_some() { 1 } else { MESSAGE_COST };
        (if self.levels.bytes.is_some() { used.bytes } else { 0 }) + u64::from(used.messages) * of_messages
    }

    pub fn take(&mut self, used: &Used) {
        if let Some(bucket) = &mut self.levels.bytes {
            bucket.take(used.bytes);
        }
        if let Some(bucket) = &mut self.levels.messages {
            bucket.take(u64::from(used.messages));
        }
    }

    /// When a gate that is short is worth another try.
    pub fn resumes_at(&self) -> Instant {
        let bytes = self.levels.bytes.as_ref().filter(|bucket| !bucket.has(0)).map(Bucket::resumes_at);
        let messages = self.levels.messages.as_ref().filter(|bucket| !bucket.has(1)).map(Bucket::resumes_at);
        bytes.max(messages).unwrap_or(Instant(0))
    }

    /// False for one that was read from damaged bytes.
    pub fn is_consistent(&self) -> bool {
        self.line.is_consistent() && self.due.is_some() != self.line.is_empty() && self.levels.are_consistent()
    }
}
