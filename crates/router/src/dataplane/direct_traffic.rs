//! What QPs do past the router, in its counters.
//!
//! Each library counts in the header of its send queue (`freeflow_shm::Tally`). The worker adds what those words have grown by to
//! the counters of the QP's vNIC and of its peer's: every [`INTERVAL`] while they grow, then less and less often, down to
//! [`INTERVAL_IDLE`]; and once more when the QP is modified or ends, so that nothing is lost with a process.
//!
//! Nothing wakes the worker for them, so while a QP may go past it, it wakes by itself. It looks at [`LOOK_QPS_MAX`] QPs in
//! one turn, so that many of them don't hold up the others' requests.
//!
//! Invariant: the words are believed in nothing but these sums. Whatever they hold, a look adds no more than
//! [`LOOK_MESSAGES_MAX`] and [`LOOK_BYTES_MAX`].
use crate::dataplane::ports::Rings;
use crate::dataplane::publishing::INTERVAL;
use crate::dataplane::worker::Worker;
use freeflow_engine::{DirectTraffic, QpId, VnicId};
use freeflow_shm::Tally;
use freeflow_verbs::{Duration, Instant};

/// How often the words are looked at when they have not grown for a while; else every [`INTERVAL`].
pub const INTERVAL_IDLE: Duration = Duration::from_millis(1000);
/// QPs of one turn: a cache line of each.
const LOOK_QPS_MAX: usize = 1024;
/// What one QP can have done between two looks: more than a processor does in a quarter of an hour, if the worker was stopped for so long.
const LOOK_MESSAGES_MAX: u64 = 1 << 38;
const LOOK_BYTES_MAX: u64 = 1 << 44;

/// What the router knows of the counts of one QP's library.
#[derive(Default)]
pub(crate) struct Counted {
    /// As last seen. The words outlive resets.
    seen: Tally,
    /// Of its last peer, which may have ended since.
    peer: Option<VnicId>,
    peer_qp: Option<QpId>,
    /// It is in [`Watch::ids`].
    is_watched: bool,
}

/// The QPs that may do something past the router.
pub struct Watch {
    ids: Vec<QpId>,
    /// The next one of the round under way.
    next: Option<usize>,
    /// In this round some words had grown.
    has_grown: bool,
    begun: Instant,
    interval: Duration,
}

impl Watch {
    pub fn new() -> Self {
        Self { ids: Vec::new(), next: None, has_grown: false, begun: Instant(0), interval: INTERVAL }
    }

    fn add(&mut self, now: Instant, id: QpId) {
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

    fn end_round(&mut self) -> bool {
        self.next = None;
        let has_grown = std::mem::take(&mut self.has_grown);
        let longer = Duration((self.interval.0 * 2).min(INTERVAL_IDLE.0));
        self.interval = if has_grown { INTERVAL } else { longer };
        has_grown
    }
}

/// By how much free-running words have grown.
fn growth(before: &Tally, now: &Tally) -> DirectTraffic {
    let grown = |word: fn(&Tally) -> u64, most: u64| word(now).wrapping_sub(word(before)).min(most);
    DirectTraffic {
        sends: grown(|tally| tally.sends, LOOK_MESSAGES_MAX),
        writes: grown(|tally| tally.writes, LOOK_MESSAGES_MAX),
        sent_bytes: grown(|tally| tally.sent_bytes, LOOK_BYTES_MAX),
        sent_packets: grown(|tally| tally.sent_packets, LOOK_MESSAGES_MAX),
        reads: grown(|tally| tally.reads, LOOK_MESSAGES_MAX),
        read_bytes: grown(|tally| tally.read_bytes, LOOK_BYTES_MAX),
        read_packets: grown(|tally| tally.read_packets, LOOK_MESSAGES_MAX),
    }
}

impl Rings {
    /// From now on the QP may reach its peer past the router.
    pub(crate) fn watch(&mut self, id: QpId, peer: QpId) {
        let of_peer = self.qps.get(peer).and_then(|peer| self.sessions.get(peer.session)).map(|session| session.vnic);
        let Some(qp) = self.qps.get_mut(id) else { return };
        let counted = &mut qp.direct.counted;
        counted.peer = of_peer.or(counted.peer);
        counted.peer_qp = Some(peer);
        if !std::mem::replace(&mut counted.is_watched, true) {
            self.watch.add(self.now, id);
        }
    }
}

impl Worker {
    /// Counts what a QP has done since the last look; whether it has done anything.
    pub(crate) fn count_direct(&mut self, id: QpId) -> bool {
        let Some(qp) = self.rings.qps.get_mut(id) else { return false };
        let Some(to) = qp.direct.counted.peer else { return false };
        let (now, peer_qp) = (qp.send.tally(), qp.direct.counted.peer_qp);
        let before = std::mem::replace(&mut qp.direct.counted.seen, now);
        let Some(session) = self.rings.sessions.get(qp.session).filter(|_| now != before) else { return false };
        let grown = growth(&before, &now);
        self.engine.count_direct(session.vnic, to, &grown);
        self.engine.count_direct_of_qps(id, peer_qp, &grown);
        true
    }

    /// Counts all that was done until now: somebody asks.
    pub(crate) fn count_all_direct(&mut self) {
        for at in 0..self.rings.watch.ids.len() {
            let id = self.rings.watch.ids[at];
            self.rings.watch.has_grown |= self.count_direct(id);
        }
    }

    /// The same, unless that would take long; then it is as of the last look, [`INTERVAL_IDLE`] ago at most.
    pub(crate) fn count_few_direct(&mut self) {
        if self.rings.watch.ids.len() <= LOOK_QPS_MAX {
            self.count_all_direct();
        }
    }

    /// Looks at some of the QPs, the first of a round or the next. Once all were looked at: whether something had grown.
    pub(crate) fn watch_direct(&mut self, now: Instant) -> Option<bool> {
        if self.rings.watch.next.is_none() {
            self.rings.watch.begun = now;
        }
        let mut at = self.rings.watch.next.unwrap_or(0);
        for _ in 0..LOOK_QPS_MAX {
            let Some(&id) = self.rings.watch.ids.get(at) else { return Some(self.rings.watch.end_round()) };
            self.rings.watch.has_grown |= self.count_direct(id);
            match self.rings.qps.get_mut(id).map(|qp| &mut qp.direct) {
                Some(direct) if direct.is_used() => at += 1,
                ended => {
                    if let Some(direct) = ended {
                        direct.counted.is_watched = false;
                    }
                    // In its place comes one that was not looked at yet.
                    self.rings.watch.ids.swap_remove(at);
                }
            }
        }
        self.rings.watch.next = Some(at);
        None
    }
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
