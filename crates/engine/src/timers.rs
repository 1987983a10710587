//! All timers in one table: at most one a QP (its requester waits for one thing at a time), in a
//! heap by deadline.
//!
//! Invariant: `places[qp.index]` is the heap position of that QP's timer, or `NOWHERE`; equal
//! deadlines expire in order of QP index, so that a run replays.
use crate::QpId;
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Instant, Qpn};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TimerKind {
    /// Wait after an RNR NAK (IBTA 9.7.5.2.8).
    ReceiverNotReady,
    /// Local ACK timeout (IBTA 9.7.6.1.3).
    Acknowledge,
    /// The packet transport's: no answer came, whether in the time of a probe or of the local ACK
    /// timeout.
    Retransmit,
    /// A look again whether a RECV came for a message without acknowledgement.
    RnrGrace,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Timer {
    at: Instant,
    qp: QpId,
    kind: TimerKind,
}

const NOWHERE: u32 = u32::MAX;

pub(crate) struct Timers {
    heap: Vec<Timer>,
    places: Vec<u32>,
}

/// The timers in order of expiry; the heap follows from them.
impl Serialize for Timers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut timers = self.heap.clone();
        timers.sort_unstable_by_key(|timer| (timer.at, timer.qp.index));
        timers.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Timers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut timers = Self::new();
        for Timer { at, qp, kind } in Vec::<Timer>::deserialize(deserializer)? {
            let taken = timers.places.get(qp.index as usize).is_some_and(|place| *place != NOWHERE);
            if taken || qp.index > Qpn::MASK {
                return Err(D::Error::custom("two timers of one QP, or a QP that can't be"));
            }
            timers.arm(qp, kind, at);
        }
        Ok(timers)
    }
}

impl Timers {
    pub fn new() -> Self {
        Self { heap: Vec::new(), places: Vec::new() }
    }

    /// Sets the QP's timer; an earlier one is replaced.
    pub fn arm(&mut self, qp: QpId, kind: TimerKind, at: Instant) {
        self.cancel(qp);
        let index = qp.index as usize;
        if self.places.len() <= index {
            self.places.resize(index + 1, NOWHERE);
        }
        self.heap.push(Timer { at, qp, kind });
        self.rise(self.heap.len() - 1);
    }

    pub fn cancel(&mut self, qp: QpId) {
        if let Some(place) = self.place(qp) {
            self.remove(place);
        }
    }

    /// The kind of timeout that the QP's timer is armed for.
    pub fn armed(&self, qp: QpId) -> Option<TimerKind> {
        self.place(qp).map(|place| self.heap[place].kind)
    }

    /// Takes one timer that is due.
    pub fn expire(&mut self, now: Instant) -> Option<(QpId, TimerKind)> {
        let first = *self.heap.first()?;
        if first.at > now {
            return None;
        }
        self.remove(0);
        Some((first.qp, first.kind))
    }

    pub fn next(&self) -> Option<Instant> {
        self.heap.first().map(|timer| timer.at)
    }

    /// The QPs that have one.
    pub fn owners(&self) -> impl Iterator<Item = QpId> {
        self.heap.iter().map(|timer| timer.qp)
    }

    fn place(&self, qp: QpId) -> Option<usize> {
        let place = *self.places.get(qp.index as usize)?;
        (place != NOWHERE && self.heap[place as usize].qp == qp).then_some(place as usize)
    }

    fn remove(&mut self, place: usize) {
        let gone = self.heap.swap_remove(place);
        self.places[gone.qp.index as usize] = NOWHERE;
        if place < self.heap.len() {
            self.sink(place);
            self.rise(place);
        }
    }

    fn rise(&mut self, mut place: usize) {
        while place > 0 {
            let parent = (place - 1) / 2;
            if !self.before(place, parent) {
                break;
            }
            self.swap(place, parent);
            place = parent;
        }
        self.note(place);
    }

    fn sink(&mut self, mut place: usize) {
        loop {
            let mut least = place;
            for child in [2 * place + 1, 2 * place + 2] {
                if child < self.heap.len() && self.before(child, least) {
                    least = child;
                }
            }
            if least == place {
                break;
            }
            self.swap(place, least);
            place = least;
        }
        self.note(place);
    }

    fn before(&self, left: usize, right: usize) -> bool {
        let (left, right) = (&self.heap[left], &self.heap[right]);
        (left.at, left.qp.index) < (right.at, right.qp.index)
    }

    fn swap(&mut self, left: usize, right: usize) {
        self.heap.swap(left, right);
        self.note(left);
        self.note(right);
    }

    fn note(&mut self, place: usize) {
        let index = self.heap[place].qp.index as usize;
        self.places[index] = place as u32;
    }
}

/// 4.096 us * 2^timeout; `None` for 0, which means for ever (IBTA 9.7.6.1.3).
pub(crate) fn acknowledge_timeout(timeout: u8) -> Option<Duration> {
    if timeout == 0 { None } else { Some(Duration(4096u64 << timeout.min(31))) }
}

/// IBTA table 45, in units of 10 us.
const RNR_DELAYS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How long a sender waits after an RNR NAK that carries this code.
pub(crate) fn rnr_delay(code: u8) -> Duration {
    Duration::from_micros(u64::from(RNR_DELAYS[usize::from(code & 31)]) * 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    fn qp(index: u32) -> QpId {
        QpId { index, generation: 7 }
    }

    proptest! {
        #[test]
        fn expires_in_order(steps in prop::collection::vec((0u32..20, 0u64..50, 0u8..3), 0..300)) {
            let mut timers = Timers::new();
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for (index, at, what) in steps {
                match what {
                    0 => { timers.cancel(qp(index)); model.remove(&index); }
                    1 => {
                        while let Some((id, _)) = timers.expire(Instant(at)) {
                            let first = model.iter().map(|(index, at)| (*at, *index)).min().unwrap();
                            prop_assert_eq!(id, qp(first.1));
                            prop_assert!(first.0 <= at);
                            model.remove(&first.1);
                        }
                    }
                    _ => { timers.arm(qp(index), TimerKind::Acknowledge, Instant(at)); model.insert(index, at); }
                }
                prop_assert_eq!(timers.next(), model.values().min().map(|at| Instant(*at)));
                for index in 0..20 {
                    prop_assert_eq!(timers.armed(qp(index)).is_some(), model.contains_key(&index));
                }
            }
        }
    }

    #[test]
    fn delays_of_the_standard() {
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(12), Duration::from_micros(640));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
        assert_eq!(acknowledge_timeout(0), None);
        assert_eq!(acknowledge_timeout(14), Some(Duration(67_108_864)));
    }
}
