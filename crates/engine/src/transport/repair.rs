//! Knowledge of a requester about packets that are missing at its peer while later ones are kept there, and when each
//! goes out again; `completer::repair` and `requester::repair` act upon it.
//!
//! A report replaces what was known before. A missing packet (a *hole*) may be late instead of lost: it goes out again
//! when it is still missing a quarter of a round trip after it was first heard of; and once more for each further
//! round trip after which a report still names it. Time and not a count of later packets, since at high rates many
//! packets overtake one that is late by microseconds (RFC 8985 reasons the same way). Where a hole is filled too soon
//! for its repetition to have done it, packets come later than that: they get twice the time from then on, a whole
//! round trip at most, until some repetitions in a row were needed.
use crate::transport::window::SendWindow;
use alloc::collections::VecDeque;
use freeflow_verbs::{Duration, Instant};
use freeflow_wire::Kept;
use freeflow_wire::records::RECORDS_MAX;
use freeflow_wire::{psn_add, psn_ahead};
use serde::{Deserialize, Serialize};

/// Round trip that is assumed until one was measured, and the least.
const ROUND_TRIP_GUESS_NS: u64 = 200_000;
const ROUND_TRIP_MIN_NS: u64 = 8_000;
/// How late a packet may be: at first, and at most; quarters of a round trip.
const QUARTERS_MIN: u32 = 1;
const QUARTERS_MAX: u32 = 4;
/// After so many repetitions in a row that were needed packets have the least time again.
const REPAIRS_IN_A_ROW: u32 = 16;

#[derive(Serialize, Deserialize)]
pub(crate) struct Repair {
    /// In the order of their PSNs.
    holes: VecDeque<Hole>,
    /// Sum of what the packets that are kept count in the congestion window, though they have left the network.
    kept_bytes: u64,
    /// How late a packet may be, quarters of a round trip.
    quarters: u32,
    /// Repetitions that were needed since one was not.
    repairs: u32,
    /// Holes that [`Self::ripen`] has not named as lost yet.
    lost: u32,
}

#[derive(Serialize, Deserialize)]
struct Hole {
    psn: u32,
    /// When it was first heard of.
    since: Instant,
    /// When it went out again.
    repeated: Option<Instant>,
    /// It shall go out again.
    is_due: bool,
    /// It may have gone out with its neighbours, and got lost with them.
    is_record: bool,
}

/// Counts frames that were lost, by their holes in order: records in a row may have been one frame.
#[derive(Default)]
struct Losses {
    count: u32,
    /// The last record, and how many there are in its row.
    row: Option<(u32, usize)>,
}

impl Losses {
    fn note(&mut self, hole: &Hole) {
        self.row = match self.row {
            Some((last, records)) if hole.is_record && hole.psn == psn_add(last, 1) && records < RECORDS_MAX => {
                Some((hole.psn, records + 1))
            }
            _ => {
                self.count += 1;
                hole.is_record.then_some((hole.psn, 1))
            }
        };
    }
}

fn round_trip(smoothed_ns: u64) -> u64 {
    if smoothed_ns == 0 { ROUND_TRIP_GUESS_NS } else { smoothed_ns.max(ROUND_TRIP_MIN_NS) }
}

impl Repair {
    pub fn new() -> Self {
        Self { holes: VecDeque::new(), kept_bytes: 0, quarters: QUARTERS_MIN, repairs: 0, lost: 0 }
    }

    /// How late a packet may be.
    fn tolerance(&self, smoothed_ns: u64) -> Duration {
        Duration(round_trip(smoothed_ns) / 4 * u64::from(self.quarters))
    }

    pub fn is_empty(&self) -> bool {
        self.holes.is_empty()
    }

    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// A report: `first` is missing, and these are kept behind it. A hole that has gone out again, and is named more
    /// than a round trip later, was lost again.
    /// `records`: short messages go out together.
    pub fn hear(
        &mut self,
        now: Instant,
        window: &SendWindow,
        (first, kept): (u32, Kept),
        smoothed_ns: u64,
        records: bool,
    ) {
        let again = Duration(round_trip(smoothed_ns) / 4 * 5);
        let mut before = core::mem::take(&mut self.holes);
        let (mut holes, mut lost) = (VecDeque::new(), Losses::default());
        self.kept_bytes = window.look_behind(first, kept, |psn, may_be_record| {
            while let Some(hole) = before.pop_front_if(|hole| psn_ahead(hole.psn, psn) < 0) {
                self.note_filled(now, &hole, smoothed_ns);
            }
            let known = before.pop_front_if(|hole| hole.psn == psn);
            let is_record = records && may_be_record;
            let mut hole = known.unwrap_or(Hole { psn, since: now, repeated: None, is_due: false, is_record });
            if !hole.is_due && hole.repeated.is_some_and(|at| at + again <= now) {
                hole.is_due = true;
                lost.note(&hole);
            }
            holes.push_back(hole);
        });
        self.holes = holes;
        self.lost += lost.count;
    }

    fn note_filled(&mut self, now: Instant, hole: &Hole, smoothed_ns: u64) {
        let Some(repeated) = hole.repeated else { return };
        if now - repeated < Duration(round_trip(smoothed_ns) / 2) {
            (self.quarters, self.repairs) = ((2 * self.quarters).min(QUARTERS_MAX), 0);
        } else if self.repairs < REPAIRS_IN_A_ROW {
            self.repairs += 1;
        } else {
            (self.quarters, self.repairs) = (QUARTERS_MIN, 0);
        }
    }

    /// Holes that are late for too long shall go out again. Gives how many became due since the last time.
    pub fn ripen(&mut self, now: Instant, smoothed_ns: u64) -> u32 {
        let (late, mut lost) = (self.tolerance(smoothed_ns), Losses::default());
        for hole in &mut self.holes {
            if !hole.is_due && hole.repeated.is_none() && hole.since + late <= now {
                hole.is_due = true;
                lost.note(hole);
            }
        }
        core::mem::take(&mut self.lost) + lost.count
    }

    /// When the next one will be late for too long.
    pub fn ripens_at(&self, smoothed_ns: u64) -> Option<Instant> {
        let late = self.tolerance(smoothed_ns);
        let waiting = self.holes.iter().filter(|hole| !hole.is_due && hole.repeated.is_none());
        waiting.map(|hole| hole.since + late).min()
    }

    /// The next one to go out again.
    pub fn due(&self) -> Option<u32> {
        self.holes.iter().find(|hole| hole.is_due).map(|hole| hole.psn)
    }

    /// It went out.
    pub fn note_repeated(&mut self, now: Instant) {
        if let Some(hole) = self.holes.iter_mut().find(|hole| hole.is_due) {
            (hole.is_due, hole.repeated) = (false, Some(now));
        }
    }

    /// All before this PSN has arrived.
    pub fn advance(&mut self, now: Instant, oldest: u32, smoothed_ns: u64) {
        while let Some(hole) = self.holes.pop_front_if(|hole| psn_ahead(hole.psn, oldest) < 0) {
            self.note_filled(now, &hole, smoothed_ns);
        }
        if self.holes.is_empty() {
            self.kept_bytes = 0;
        }
    }

    /// Everything goes out again.
    pub fn clear(&mut self) {
        self.holes.clear();
        (self.kept_bytes, self.lost) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_in_a_row_are_one_loss() {
        let lost = |holes: &[(u32, bool)]| {
            let mut losses = Losses::default();
            for &(psn, is_record) in holes {
                let (since, repeated, is_due) = (Instant(1), None, true);
                losses.note(&Hole { psn, since, repeated, is_due, is_record });
            }
            losses.count
        };
        let row = |psns: core::ops::Range<u32>| psns.map(|psn| (psn_add(psn, 0), true)).collect::<alloc::vec::Vec<_>>();
        assert_eq!(lost(&row(5..5 + RECORDS_MAX as u32)), 1);
        assert_eq!(lost(&row(5..6 + RECORDS_MAX as u32)), 2, "more than a frame has");
        assert_eq!(lost(&row(0xff_fff0..0x100_0000 + 8)), 1, "over the end of the PSNs");
        assert_eq!(lost(&[(1, true), (2, true), (4, true)]), 2, "a row ends");
        assert_eq!(lost(&[(1, false), (2, false), (3, true), (4, false), (5, true), (6, true)]), 5);
    }
}
