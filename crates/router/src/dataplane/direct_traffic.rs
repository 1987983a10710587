//! Work of QPs on the direct path, in their counters.
//!
//! Each library counts in the header of its send queue (`freeflow_shm::Tally`). The worker adds
//! what those words have grown by to the counters of the QP's vNIC and of its peer's: every
//! [`INTERVAL`] while they grow, then less and less often, down to [`INTERVAL_IDLE`]; and once more
//! when the QP is modified or ends, so that nothing is lost with a process.
//!
//! Nothing wakes the worker for them, so while a QP may go past it, it wakes by itself. It looks at
//! [`LOOK_QPS_MAX`] QPs in one turn, so that many of them don't hold up the others' requests.
//!
//! Invariant: the words are believed in nothing but these sums. Whatever they hold, a look adds no more than
//! [`LOOK_MESSAGES_MAX`] and [`LOOK_BYTES_MAX`].
use crate::dataplane::publishing::INTERVAL;
use freeflow_engine::{DirectTraffic, QpId, VnicId};
use freeflow_shm::Tally;
use freeflow_verbs::{Duration, Instant};

/// How often the words are looked at when they have not grown for a while; else every [`INTERVAL`].
pub const INTERVAL_IDLE: Duration = Duration::from_millis(1000);
/// QPs of one turn: a cache line of each.
pub(crate) const LOOK_QPS_MAX: usize = 1024;
/// Most that one QP can have done between two looks: more than a processor does in a quarter of an
/// hour, if the worker was stopped for so long.
pub(crate) const LOOK_MESSAGES_MAX: u64 = 1 << 38;
pub(crate) const LOOK_BYTES_MAX: u64 = 1 << 44;

/// Last seen counts of one QP's library.
#[derive(Default)]
pub(crate) struct Counted {
    /// As last seen. The words outlive resets.
    pub(crate) seen: Tally,
    /// Of its last peer, which may have ended since.
    pub(crate) peer: Option<VnicId>,
    pub(crate) peer_qp: Option<QpId>,
    /// It is in [`Watch::ids`].
    pub(crate) is_watched: bool,
}

/// The QPs that may do something past the router.
pub struct Watch {
    pub(crate) ids: Vec<QpId>,
    /// The next one of the round under way.
    pub(crate) next: Option<usize>,
    /// In this round some words had grown.
    pub(crate) has_grown: bool,
    pub(crate) begun: Instant,
    pub(crate) interval: Duration,
}

impl Watch {
    pub fn new() -> Self {
        Self { ids: Vec::new(), next: None, has_grown: false, begun: Instant(0), interval: INTERVAL }
    }

    pub(crate) fn add(&mut self, now: Instant, id: QpId) {
        self.ids.push(id);
        if self.interval != INTERVAL {
            self.interval = INTERVAL;
            self.begun = now;
        }
    }

    /// How long until [`Worker::watch_direct`] has something to do; `None`: nothing goes past the router.
    #[inline]
    pub fn due_in(&self, now: Instant) -> Option<Duration> {
        match self.next {
            Some(_) => Some(Duration(0)),
            None => (!self.ids.is_empty()).then(|| self.begun + self.interval - now),
        }
    }

    /// Words grew in the last round.
    pub fn is_busy(&self) -> bool {
        !self.ids.is_empty() && self.interval == INTERVAL
    }

    pub(crate) fn end_round(&mut self) -> bool {
        self.next = None;
        let has_grown = std::mem::take(&mut self.has_grown);
        let longer = Duration((self.interval.0 * 2).min(INTERVAL_IDLE.0));
        self.interval = if has_grown { INTERVAL } else { longer };
        has_grown
    }
}

/// By how much free-running words have grown.
pub(crate) fn growth(before: &Tally, now: &Tally) -> DirectTraffic {
    let grown = |word: fn(&Tally) -> u64, most: u64| word(now).wrapping_sub(word(before)).min(most);
    DirectTraffic {
        sends: grown(|tally| tally.sends, LOOK_MESSAGES_MAX),
        writes: grown(|tally| tally.writes, LOOK_MESSAGES_MAX),
        sent_bytes: grown(|tally| tally.sent_bytes, LOOK_BYTES_MAX),
        sent_packets: grown(|tally| tally.sent_packets, LOOK_MESSAGES_MAX),
        reads: grown(|tally| tally.reads, LOOK_MESSAGES_MAX),
        atomics: grown(|tally| tally.atomics, LOOK_MESSAGES_MAX),
        read_bytes: grown(|tally| tally.read_bytes, LOOK_BYTES_MAX),
        read_packets: grown(|tally| tally.read_packets, LOOK_MESSAGES_MAX),
    }
}

/// Words of the receive queue of a UD QP, and of its send queue, say only how many datagrams there were.
pub(crate) fn of_datagrams(grown: &DirectTraffic) -> DirectTraffic {
    let DirectTraffic { sends, sent_bytes, .. } = *grown;
    DirectTraffic { sends, sent_bytes, sent_packets: sends, ..DirectTraffic::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_may_wrap_and_lie() {
        let before = Tally { sends: u64::MAX, sent_bytes: u64::MAX - 9, reads: 7, ..Tally::default() };
        let now = Tally { sends: 1, sent_bytes: 90, reads: 6, read_bytes: u64::MAX, ..Tally::default() };
        let grown = growth(&before, &now);
        assert_eq!((grown.sends, grown.sent_bytes), (2, 100));
        assert_eq!((grown.reads, grown.read_bytes), (LOOK_MESSAGES_MAX, LOOK_BYTES_MAX));
        assert_eq!(growth(&now, &now), DirectTraffic::default());
    }

    #[test]
    fn looks_get_rare_while_nothing_grows() {
        let (mut watch, id) = (Watch::new(), QpId { index: 0, generation: 0 });
        assert_eq!(watch.due_in(Instant(0)), None);
        watch.add(Instant(0), id);
        assert_eq!(watch.due_in(Instant(0) + INTERVAL), Some(Duration(0)));
        let mut waits = Vec::new();
        for has_grown in [false, false, false, true] {
            watch.has_grown = has_grown;
            watch.end_round();
            waits.push(watch.interval.0 / 1_000_000);
        }
        assert_eq!(waits, [500, 1000, 1000, 250]);
        watch.end_round();
        let now = Instant(0) + Duration::from_millis(300);
        watch.add(now, id);
        assert_eq!(watch.due_in(now), Some(INTERVAL), "whoever begins is looked at soon");
        watch.next = Some(1);
        assert_eq!(watch.due_in(now), Some(Duration(0)), "a round goes on at once");
    }
}
