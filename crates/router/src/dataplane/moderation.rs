//! Moderation of a CQ's notifications: a channel is notified only after so many completions, or so long after the
//! first.
//!
//! Idle costs nothing: only a CQ that is moderated by time and has completions that its channel was not notified of
//! has a place in the schedule, which the worker's sleep respects.
use freeflow_engine::CqId;
use freeflow_verbs::{Duration, Instant};
use std::collections::BTreeSet;

/// Whether completions were written that a channel has not been notified of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    Nothing,
    Completions,
    Solicited,
}

/// Of one CQ.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moderation {
    /// 0: completions alone never suffice, unless `period` is 0 too.
    pub(crate) count: u32,
    /// 0: time alone never suffices.
    pub(crate) period: Duration,
    /// Completions that the channel has not been notified of.
    pub(crate) pending: u32,
    /// In the schedule.
    pub(crate) due: Option<Instant>,
    /// The channel is to be notified at the end of this turn.
    pub(crate) called: bool,
}

/// When CQs are due.
pub type Schedule = BTreeSet<(Instant, CqId)>;

impl Moderation {
    /// Completions that suffice.
    pub(crate) fn enough(&self) -> u32 {
        match (self.count, self.period) {
            (0, Duration(0)) => 1,
            (0, _) => u32::MAX,
            (count, _) => count,
        }
    }
}
