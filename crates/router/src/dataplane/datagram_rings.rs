//! The direct rings of datagrams that a UD QP has. They are made and ended in
//! [`direct_datagrams`](crate::dataplane::direct_datagrams).
use crate::admission::account::Charge;
use freeflow_engine::{DatagramPeer, QpId};
use freeflow_protocol::library::DATAGRAM_RINGS_MAX;
use freeflow_shm::Tally;
use freeflow_verbs::{Duration, Gid, GlobalRoute, Instant};
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
    pub(crate) address_handle: u32,
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
