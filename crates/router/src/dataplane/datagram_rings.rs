//! The direct rings of datagrams that a UD QP has. They are made and ended in
//! [`direct_datagrams`](crate::dataplane::direct_datagrams).
use crate::admission::account::Charge;
use freeflow_engine::{DatagramPeer, QpId};
use freeflow_protocol::library::DATAGRAM_RINGS_MAX;
use freeflow_shm::Tally;
use freeflow_verbs::{Duration, Gid, GlobalRoute, Instant};
use std::collections::BTreeSet;
use std::ops::Bound;
use std::os::fd::OwnedFd;

pub(crate) const RINGS_MAX: usize = DATAGRAM_RINGS_MAX as usize;
/// A receiver with [`RINGS_MAX`] rings keeps each for so long at least; then a new one takes the place of the oldest.
const KEPT_FOR: Duration = Duration::from_millis(1000);

/// Rings of datagrams of one QP.
#[derive(Default)]
pub(crate) struct Datagrams {
    /// Those that it sends by, by place. One that is closed stays until its place is used again: what is in it is
    /// still to be taken, and notified of.
    pub(crate) to: Vec<Option<RingTo>>,
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
}

/// Name of an open ring: address handle, sender, and its place there.
pub(crate) type RingKey = (u32, QpId, usize);

/// The open rings of all QPs, and how far the review of them is.
#[derive(Default)]
pub struct OpenRings {
    rings: BTreeSet<RingKey>,
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
    /// The RECV that the router takes next, when it is opened.
    pub(crate) first: u32,
    /// Until it is accepted.
    pub(crate) descriptor: Option<OwnedFd>,
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

    /// A ring to that receiver is open, and accepted or not.
    pub(crate) fn has_ring_to(&self, receiver: QpId) -> bool {
        self.open_places_to().into_iter().any(|place| self.ring_to(place).is_some_and(|ring| ring.receiver == receiver))
    }

    pub(crate) fn is_accepted_from(&self, sender: QpId) -> bool {
        self.from.iter().flatten().any(|ring| ring.sender == sender && ring.descriptor.is_none())
    }

    pub(crate) fn take_offer(&mut self) -> Option<(IncomingTerms, OwnedFd)> {
        let offers = self.from.iter_mut().enumerate().filter_map(|(place, ring)| Some((place, ring.as_mut()?)));
        let now = self.offered;
        let pending = offers.filter(|(_, ring)| ring.descriptor.is_some());
        let (place, ring) = pending.max_by_key(|(_, ring)| now.wrapping_sub(ring.offer))?;
        let DatagramPeer { source_qpn, source, route, .. } = ring.peer;
        let (place, offer, first) = (place as u32, ring.offer, ring.first);
        let terms = IncomingTerms { place, offer, source_qpn, source, route, first };
        Some((terms, ring.descriptor.take()?))
    }
}

/// How far a ring has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingState {
    Missing,
    Offered,
    Accepted,
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn rings_are_found_by_their_handle() {
        let mut rings = OpenRings::default();
        for ring in [key(1, 5, 0), key(2, 5, 1), key(2, 5, 63), key(2, 0, 7), key(3, 0, 0)] {
            rings.insert(ring);
        }
        assert_eq!(rings.of_handle(2), [key(2, 0, 7), key(2, 5, 1), key(2, 5, 63)]);
        assert_eq!(rings.of_handle(4), []);
    }
}
