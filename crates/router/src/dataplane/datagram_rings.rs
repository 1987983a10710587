//! The direct rings of datagrams that a UD QP has. They are made and ended in
//! [`direct_datagrams`](crate::dataplane::direct_datagrams).
use crate::admission::account::Charge;
use freeflow_engine::{DatagramPeer, QpId};
use freeflow_protocol::library::DATAGRAM_RINGS_MAX;
use freeflow_shm::Tally;
use freeflow_verbs::{Duration, Gid, GlobalRoute, Instant};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use std::os::fd::OwnedFd;

pub(crate) const RINGS_MAX: usize = DATAGRAM_RINGS_MAX as usize;
/// A receiver with [`RINGS_MAX`] rings keeps each for so long at least; then a new one takes the place of the oldest.
/// After its close a ring is charged for as long.
const KEPT_FOR: Duration = Duration::from_millis(1000);

/// Rings that one QP may be offered at once, and in each second from then on: its library maps each one in a poll.
const OFFERS_MAX: u32 = 64;
const OFFER_INTERVAL: Duration = Duration(1_000_000_000 / OFFERS_MAX as u64);
/// A QP does not open a ring so soon after the last one to that receiver, or at that place.
const REOPENED_AFTER: Duration = Duration::from_millis(100);
/// A sender may still notify of a closed ring for so long, which it may not know of yet.
const NOTIFIED_FOR: Duration = Duration::from_millis(100);

/// Rings of datagrams of one QP.
#[derive(Default)]
pub(crate) struct Datagrams {
    /// Those that it sends by, by place. One that is closed stays until its place is used again: what is in it is
    /// still to be taken, and notified of.
    pub(crate) to: Vec<Option<RingTo>>,
    /// Of these, those that are open and accepted.
    pub(crate) accepted_to: u64,
    /// Those that it may still be offered.
    pub(crate) offers: Offers,
    /// Those that it receives by, by place, while they are open.
    pub(crate) from: Vec<Option<RingFrom>>,
    /// As its queues' headers say.
    pub(crate) open_to: u64,
    pub(crate) open_from: u64,
    pub(crate) offered: u32,
    /// Datagrams received by them, as its library says: as last seen.
    pub(crate) received: Tally,
}

#[derive(Clone, Copy)]
pub(crate) struct RingTo {
    pub(crate) receiver: QpId,
    /// Its place there.
    pub(crate) place: usize,
    pub(crate) asked: DatagramRing,
    pub(crate) opened_at: Instant,
    pub(crate) closed_at: Option<Instant>,
    /// How many requests the router had taken of its sender when it was accepted.
    pub(crate) accepted_after: u32,
}

/// A number that grows with time, up to [`OFFERS_MAX`].
#[derive(Default)]
pub(crate) struct Offers {
    taken: u32,
    since: Instant,
}

impl Offers {
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let earned = (now - self.since).0 / OFFER_INTERVAL.0;
        self.since = self.since + Duration(earned * OFFER_INTERVAL.0);
        self.taken = self.taken.saturating_sub(u32::try_from(earned).unwrap_or(u32::MAX));
        let may_take = self.taken < OFFERS_MAX;
        self.taken += u32::from(may_take);
        may_take
    }
}

/// Name of an open ring: address handle, sender, and its place there.
pub(crate) type RingKey = (u32, QpId, usize);

/// The open rings of all QPs, and how far the review of them is.
#[derive(Default)]
pub struct OpenRings {
    rings: BTreeSet<RingKey>,
    /// Charges of accepted ones that were closed: receivers keep them for a while.
    leaving: VecDeque<(Instant, Charge)>,
    review: Option<Review>,
    /// The last one that was reviewed. A review begins after it, so that one change after the other does not keep it
    /// from the last ones.
    reviewed: Option<RingKey>,
}

struct Review {
    /// Where it began, and ends when it has gone round.
    until: Option<RingKey>,
    has_wrapped: bool,
}

impl OpenRings {
    pub(crate) fn insert(&mut self, ring: RingKey) {
        self.rings.insert(ring);
    }

    pub(crate) fn remove(&mut self, ring: RingKey) {
        self.rings.remove(&ring);
    }

    /// A ring is closed that its receiver has.
    pub(crate) fn keep(&mut self, now: Instant, charge: Charge) {
        self.leaving.push_back((now, charge));
    }

    #[inline]
    pub(crate) fn let_go(&mut self, now: Instant) {
        while self.leaving.front().is_some_and(|&(at, _)| now - at >= KEPT_FOR) {
            self.leaving.pop_front();
        }
    }

    /// Those for an address handle.
    pub(crate) fn of_handle(&self, address_handle: u32) -> Vec<RingKey> {
        let first = (address_handle, QpId { index: 0, generation: 0 }, 0);
        self.rings.range(first..).take_while(|&&(handle, _, _)| handle == address_handle).copied().collect()
    }

    /// All of them are to be reviewed.
    pub(crate) fn begin_review(&mut self) {
        self.review = (!self.rings.is_empty()).then_some(Review { until: self.reviewed, has_wrapped: false });
    }

    /// The next one to be reviewed.
    pub(crate) fn next_for_review(&mut self) -> Option<RingKey> {
        let review = self.review.as_mut()?;
        let after = self.reviewed.map_or(Bound::Unbounded, Bound::Excluded);
        let mut next = self.rings.range((after, Bound::Unbounded)).next();
        if next.is_none() && !review.has_wrapped {
            review.has_wrapped = true;
            next = self.rings.first();
        }
        let is_round = |ring: &RingKey| review.has_wrapped && review.until.is_none_or(|until| *ring > until);
        match next.copied().filter(|ring| !is_round(ring)) {
            Some(ring) => self.reviewed = Some(ring),
            None => self.review = None,
        }
        self.reviewed.filter(|_| self.review.is_some())
    }
}

pub(crate) struct RingFrom {
    pub(crate) sender: QpId,
    /// Its place there.
    pub(crate) place: usize,
    pub(crate) opened_at: Instant,
    pub(crate) offer: u32,
    pub(crate) peer: DatagramPeer,
    /// The RECV that the router takes next, when it is opened, or has in hand and may put back.
    pub(crate) first: u32,
    /// Until it is accepted.
    pub(crate) offered: Option<OfferedMemory>,
    pub(crate) charge: Charge,
}

/// Descriptor of a ring's memory, for its receiver.
pub(crate) struct OfferedMemory {
    pub(crate) descriptor: OwnedFd,
    pub(crate) _charge: Charge,
}

/// A ring as its sender asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatagramRing {
    pub address_handle: u32,
    pub remote_qpn: u32,
    pub qkey: u32,
    pub place: u32,
}

/// A ring as its receiver has to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IncomingTerms {
    pub place: u32,
    pub offer: u32,
    pub source_qpn: u32,
    pub source: Gid,
    pub route: GlobalRoute,
    pub first: u32,
}

/// A place of a list that grows as needed.
pub(crate) fn slot<T>(list: &mut Vec<Option<T>>, place: usize) -> &mut Option<T> {
    if list.len() <= place {
        list.resize_with(place + 1, || None);
    }
    &mut list[place]
}

impl Datagrams {
    pub(crate) fn ring_to(&self, place: usize) -> Option<RingTo> {
        self.to.get(place).copied().flatten()
    }

    pub(crate) fn is_open_to(&self, place: usize) -> bool {
        self.open_to & 1 << place != 0
    }

    pub(crate) fn open_places_to(&self) -> Vec<usize> {
        (0..self.to.len()).filter(|&place| self.is_open_to(place)).collect()
    }

    /// Where a new ring to it goes; `Some` with it: one that is there is closed for that.
    pub(crate) fn place_from(&self, now: Instant) -> Option<usize> {
        if let Some(place) = (0..RINGS_MAX).find(|&place| self.from.get(place).is_none_or(Option::is_none)) {
            return Some(place);
        }
        let rings = self.from.iter().enumerate().filter_map(|(place, ring)| Some((place, ring.as_ref()?.opened_at)));
        let oldest = rings.min_by_key(|&(_, opened_at)| opened_at.0);
        oldest.filter(|&(_, opened_at)| now - opened_at >= KEPT_FOR).map(|(place, _)| place)
    }

    /// How far the ring to that receiver has come.
    pub(crate) fn state_to(&self, receiver: QpId) -> RingState {
        let is_it = |(_, ring): &(usize, RingTo)| ring.receiver == receiver;
        let open = self.open_places_to().into_iter().filter_map(|place| Some((place, self.ring_to(place)?)));
        match open.into_iter().find(is_it) {
            Some((place, ring)) if self.accepted_to & 1 << place != 0 => RingState::Accepted(ring.accepted_after),
            Some(_) => RingState::Offered,
            None => RingState::Missing,
        }
    }

    /// Whether a ring like this one was opened a moment ago.
    pub(crate) fn has_opened_lately(&self, place: usize, receiver: QpId, now: Instant) -> bool {
        let rings = self.to.iter().enumerate().filter_map(|(at, ring)| Some((at, ring.as_ref()?)));
        rings
            .filter(|&(at, ring)| at == place || ring.receiver == receiver)
            .any(|(_, ring)| now - ring.opened_at < REOPENED_AFTER)
    }

    /// The ring at that place, if its receiver hears of what is in it.
    pub(crate) fn notified_to(&self, place: usize, now: Instant) -> Option<RingTo> {
        self.ring_to(place).filter(|ring| ring.closed_at.is_none_or(|at| now - at < NOTIFIED_FOR))
    }

    pub(crate) fn take_offer(&mut self) -> Option<(IncomingTerms, OwnedFd)> {
        let offers = self.from.iter_mut().enumerate().filter_map(|(place, ring)| Some((place, ring.as_mut()?)));
        let now = self.offered;
        let pending = offers.filter(|(_, ring)| ring.offered.is_some());
        let (place, ring) = pending.max_by_key(|(_, ring)| now.wrapping_sub(ring.offer))?;
        let DatagramPeer { source_qpn, source, route, .. } = ring.peer;
        let (place, offer, first) = (place as u32, ring.offer, ring.first);
        let terms = IncomingTerms { place, offer, source_qpn, source, route, first };
        Some((terms, ring.offered.take()?.descriptor))
    }
}

/// How far a ring has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingState {
    Missing,
    Offered,
    /// After so many requests of its sender that the router had taken.
    Accepted(u32),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::account::{Account, Commons};
    use freeflow_verbs::VnicLimits;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;

    fn key(address_handle: u32, qp: u32, place: usize) -> RingKey {
        (address_handle, QpId { index: qp, generation: 1 }, place)
    }

    fn rest(rings: &mut OpenRings) -> Vec<RingKey> {
        std::iter::from_fn(|| rings.next_for_review()).collect()
    }

    #[test]
    fn a_review_looks_at_each_ring() {
        let mut rings = OpenRings::default();
        rings.begin_review();
        assert_eq!(rings.next_for_review(), None);
        let all: Vec<RingKey> = (0..5).map(|handle| key(handle, 9 - handle, 0)).collect();
        all.iter().for_each(|&ring| rings.insert(ring));
        assert_eq!(rings.next_for_review(), None, "nothing has changed");
        rings.begin_review();
        assert_eq!(rest(&mut rings), all);
        assert_eq!(rings.next_for_review(), None);
        // Changes in the midst of it.
        rings.begin_review();
        assert_eq!((rings.next_for_review(), rings.next_for_review()), (Some(all[0]), Some(all[1])));
        rings.begin_review();
        rings.remove(all[1]);
        rings.remove(all[3]);
        assert_eq!(rest(&mut rings), [all[2], all[4], all[0]]);
        for round in 0..6 {
            rings.begin_review();
            assert_eq!(rings.next_for_review(), Some([all[2], all[4], all[0]][round % 3]), "it goes on");
        }
    }

    #[test]
    fn offers_are_bounded_at_once_and_in_a_second() {
        let (mut offers, begin) = (Offers::default(), Instant(5_000_000_000));
        let take_all = |offers: &mut Offers, now: Instant| (0..1000).filter(|_| offers.take(now)).count();
        assert_eq!(take_all(&mut offers, begin), 64);
        assert_eq!(take_all(&mut offers, begin + Duration(OFFER_INTERVAL.0 - 1)), 0);
        assert_eq!(take_all(&mut offers, begin + Duration::from_millis(500)), 32);
        assert_eq!(take_all(&mut offers, begin + Duration::from_millis(1000)), 32);
        assert_eq!(take_all(&mut offers, Instant(u64::MAX / 2)), 64);
    }

    /// A sender that keeps its mapping wakes nobody for ever.
    #[test]
    fn who_sends_by_a_closed_ring_is_soon_heard_no_more() {
        let (qp, at) = (QpId { index: 1, generation: 1 }, Instant(7_000_000_000));
        let asked = DatagramRing { address_handle: 1, remote_qpn: 2, qkey: 3, place: 2 };
        let ring = |closed_at| RingTo { receiver: qp, place: 0, asked, opened_at: at, closed_at, accepted_after: 0 };
        let mut datagrams =
            Datagrams { to: vec![None, Some(ring(None)), Some(ring(Some(at)))], ..Datagrams::default() };
        let heard = |datagrams: &Datagrams, now| [0, 1, 2].map(|place| datagrams.notified_to(place, now).is_some());
        assert_eq!(heard(&datagrams, at + Duration::from_millis(99)), [false, true, true]);
        assert_eq!(heard(&datagrams, at + Duration::from_millis(100)), [false, true, false]);
        let later = at + Duration::from_millis(99);
        let other = QpId { index: 2, generation: 1 };
        assert!(datagrams.has_opened_lately(63, qp, later) && datagrams.has_opened_lately(2, other, later));
        assert!(!datagrams.has_opened_lately(63, other, later));
        datagrams.to.truncate(2);
        assert!(!datagrams.has_opened_lately(1, qp, at + REOPENED_AFTER));
    }

    #[test]
    fn a_closed_ring_is_charged_for_a_while() {
        let account = Arc::new(Account::new(Arc::new(Commons::new(1000, 1000))));
        let (mut rings, closed_at) = (OpenRings::default(), Instant(7_000_000_000));
        rings.keep(closed_at, Charge::datagram_ring(&account, &VnicLimits::default()).unwrap());
        for (later, count) in [(999, 1), (1000, 0)] {
            rings.let_go(closed_at + Duration::from_millis(later));
            assert_eq!(account.segments.load(Relaxed), count);
        }
    }

    #[test]
    fn rings_are_found_by_their_handle() {
        let mut rings = OpenRings::default();
        for ring in [key(1, 5, 0), key(2, 5, 1), key(2, 5, 63), key(2, 0, 7), key(3, 0, 0)] {
            rings.insert(ring);
        }
        assert_eq!(rings.of_handle(2), [key(2, 0, 7), key(2, 5, 1), key(2, 5, 63)]);
        assert_eq!(rings.of_handle(4), []);
    }
}
