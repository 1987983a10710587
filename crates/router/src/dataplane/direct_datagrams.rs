//! When a direct ring of datagrams may be opened, what its doorbell means, and its end: from one UD QP to another on
//! this host. Each QP sends by several and receives by several.
//!
//! A ring is for one address handle, receiver and Q_Key: the router does all checks of a datagram when the ring is
//! opened, and closes it when one of them may come out otherwise; when the access rules have changed it looks at all
//! rings again, some in each turn. The receiver's library gets from the router what it must not believe its sender:
//! GID, QPN and route.
//!
//! Invariant: there is one open ring at most from one QP to another: datagrams of both are in one order.
use crate::admission::account::Charge;
use crate::dataplane::datagram_rings::{
    DatagramRing, Datagrams, IncomingTerms, OfferedMemory, RINGS_MAX, RingFrom, RingState, RingTo, slot,
};
use crate::dataplane::direct_traffic::{growth, of_datagrams};
use crate::dataplane::policy::TURN_WORK_MAX;
use crate::dataplane::ports::Ports;
use crate::dataplane::worker::Worker;
use freeflow_engine::{CqId, DatagramPeer, NotDirect, QpId};
use freeflow_protocol::FEATURE_DIRECT_DATAGRAMS;
use freeflow_verbs::VerbsError;
use std::os::fd::OwnedFd;

/// Rings that a turn of the worker looks at when the access rules have changed.
const TURN_RINGS_MAX: u32 = 256;

/// Where a ring leads.
pub(crate) struct Place {
    peer: DatagramPeer,
    /// Its place at the receiver.
    there: usize,
    /// The RECV that the router has taken for a datagram which has not arrived yet.
    in_hand: Option<u32>,
}

impl Worker {
    /// The receiver of a ring that is asked for, and the place that it has for it.
    pub(crate) fn may_open_datagram_ring(&mut self, id: QpId, asked: DatagramRing) -> Result<Place, VerbsError> {
        let DatagramRing { address_handle, remote_qpn, qkey, place } = asked;
        if let Some(qp) = self.ports.qps.get_mut(id) {
            qp.direct.asked.ever = true;
        }
        let place = place as usize;
        if place >= RINGS_MAX {
            return Err(VerbsError::InvalidArgument);
        }
        // The receiver of the ring that was there hears of what is in it.
        self.carry_datagram_notifications(id);
        self.ports.close_datagram_ring(id, place);
        let peer = self.engine.datagram_peer(&mut self.ports, id, address_handle, (remote_qpn, qkey));
        let peer = peer.map_err(|reason| match reason {
            NotDirect::State => VerbsError::Busy,
            _ => VerbsError::NotSupported,
        })?;
        let to = peer.to;
        // All that was sent before is done: then the receiver knows it from what comes later.
        let is_idle = self.ports.qps.get(id).is_some_and(|qp| !qp.send.has_next());
        if !is_idle || !self.engine.is_send_idle(id) {
            return Err(VerbsError::Busy);
        }
        let sessions = self.ports.qps.get(id).zip(self.ports.qps.get(to)).map(|(qp, peer)| (qp.session, peer.session));
        let (from_session, to_session) = sessions.ok_or(VerbsError::Busy)?;
        let is_shared = self.engine.srq_of(to).is_some();
        // Else nobody looks at its receive queue's words.
        let to_features = self.ports.sessions.get(to_session).map_or(0, |session| session.features);
        let is_unknown = to_features & FEATURE_DIRECT_DATAGRAMS == 0;
        if is_shared || is_unknown || !self.may_pass_router(from_session) || !self.may_pass_router(to_session) {
            return Err(VerbsError::NotSupported);
        }
        let now = self.ports.now;
        let is_too_soon =
            |own: &Datagrams| own.state_to(to) != RingState::Missing || own.has_opened_lately(place, to, now);
        if self.ports.datagrams(id).is_some_and(is_too_soon) {
            return Err(VerbsError::Busy);
        }
        let there =
            self.ports.datagrams(to).map_or(Some(0), |datagrams| datagrams.place_from(now)).ok_or(VerbsError::Busy)?;
        // Last: it is opened.
        let receiver = self.ports.qps.get_mut(to).map(|qp| qp.direct.datagrams.get_or_insert_default());
        let may_offer = receiver.is_some_and(|datagrams| datagrams.offers.take(now));
        if may_offer {
            Ok(Place { peer, there, in_hand: self.engine.receive_in_hand(to) })
        } else {
            Err(VerbsError::Busy)
        }
    }

    /// The doorbell of a UD QP rang.
    pub(crate) fn carry_datagram_notifications(&mut self, id: QpId) {
        let Some(qp) = self.ports.qps.get(id) else { return };
        let Some(datagrams) = &qp.direct.datagrams else { return };
        let now = self.ports.now;
        let (mut notified, solicited) = qp.send.take_notified_rings();
        let mut receivers = Vec::new();
        while notified != 0 {
            let place = notified.trailing_zeros() as usize;
            notified &= notified - 1;
            let ring = datagrams.notified_to(place, now);
            receivers.extend(ring.map(|ring| (ring.receiver, solicited & 1 << place != 0)));
        }
        for (to, solicited) in receivers {
            self.ports.wake_receiver(to, self.engine.receive_cq(to), solicited);
        }
    }

    /// Counts what a UD QP has sent and received past the router, as its library says.
    pub(crate) fn count_datagrams(&mut self, id: QpId) -> bool {
        let Some(qp) = self.ports.qps.get_mut(id) else { return false };
        let (Some(datagrams), Some(receive)) = (&mut qp.direct.datagrams, &qp.receive) else { return false };
        let (sent, received) = (qp.send.tally(), receive.tally());
        let sent_before = std::mem::replace(&mut qp.direct.counted.seen, sent);
        let received_before = std::mem::replace(&mut datagrams.received, received);
        let Some(session) = self.ports.sessions.get(qp.session) else { return false };
        for (is_sent, before, now) in [(true, sent_before, sent), (false, received_before, received)] {
            if before == now {
                continue;
            }
            let grown = of_datagrams(&growth(&before, &now));
            if is_sent {
                self.engine.count_direct_sent(session.vnic, &grown);
                self.engine.count_direct_of_qps(Some(id), None, &grown);
            } else {
                self.engine.count_direct_received(session.vnic, &grown);
                self.engine.count_direct_of_qps(None, Some(id), &grown);
            }
        }
        sent_before != sent || received_before != received
    }

    /// The access rules have changed: some of the rings are looked at again. Whether there are more.
    pub(crate) fn review_datagram_rings(&mut self) -> bool {
        let work = self.ports.access.work();
        for _ in 0..TURN_RINGS_MAX {
            let Some((_, sender, place)) = self.ports.open_rings.next_for_review() else { return false };
            let ring = self.ports.datagrams(sender).and_then(|datagrams| datagrams.ring_to(place));
            let Some(RingTo { receiver, place: there, asked, .. }) = ring else { continue };
            let about = (asked.remote_qpn, asked.qkey);
            let found = self.engine.datagram_peer(&mut self.ports, sender, asked.address_handle, about);
            if found.ok() != self.ports.datagram_ring_from(receiver, there).map(|ring| ring.peer) {
                self.ports.close_datagram_ring(sender, place);
            }
            if self.ports.access.work() - work >= TURN_WORK_MAX {
                break;
            }
        }
        true
    }

    /// How far the ring from one QP to another has come.
    pub(crate) fn datagram_ring_state(&self, id: QpId, to: QpId) -> RingState {
        self.ports.datagrams(id).map_or(RingState::Missing, |datagrams| datagrams.state_to(to))
    }

    /// Whether any datagrams of a QP go by a ring now.
    pub(crate) fn uses_datagram_ring(&self, id: QpId) -> bool {
        self.ports.datagrams(id).is_some_and(|datagrams| datagrams.accepted_to != 0)
    }
}

impl Ports {
    fn datagrams(&self, id: QpId) -> Option<&Datagrams> {
        self.qps.get(id)?.direct.datagrams.as_deref()
    }

    /// `offered`: its memory, for the receiver.
    pub(crate) fn open_datagram_ring(
        &mut self,
        id: QpId,
        asked: DatagramRing,
        Place { peer, there, in_hand }: Place,
        (offered, charge): (OfferedMemory, Charge),
    ) {
        let (to, now, place) = (peer.to, self.now, asked.place as usize);
        self.close_datagram_ring_from(to, there);
        let Some(receiver) = self.qps.get_mut(to) else { return };
        let Some(receive) = &mut receiver.receive else { return };
        receive.share();
        // The one in hand is another sender's, and may be put back.
        let first = in_hand.unwrap_or(receive.catch_up());
        let datagrams = receiver.direct.datagrams.get_or_insert_default();
        datagrams.offered = datagrams.offered.wrapping_add(1);
        let offer = datagrams.offered;
        let (sender, offered, opened_at) = (id, Some(offered), now);
        let ring = RingFrom { sender, place, opened_at, offer, peer, first, offered, charge };
        *slot(&mut datagrams.from, there) = Some(ring);
        datagrams.open_from |= 1 << there;
        receive.set_rings_open(datagrams.open_from);
        receive.set_rings_offered(datagrams.offered);
        self.notify(to);
        for end in [id, to] {
            self.watch_datagrams(end);
        }
        let Some(qp) = self.qps.get_mut(id) else { return };
        let datagrams = qp.direct.datagrams.get_or_insert_default();
        *slot(&mut datagrams.to, place) =
            Some(RingTo { receiver: to, place: there, asked, opened_at, closed_at: None, accepted_after: 0 });
        datagrams.open_to |= 1 << place;
        qp.send.set_rings_open(datagrams.open_to);
        self.open_rings.insert((asked.address_handle, id, place));
    }

    /// There is something in a ring for the receiver, or there may be: it looks for that. `cq`: its RECVs'.
    pub(crate) fn wake_receiver(&mut self, to: QpId, cq: Option<CqId>, solicited: bool) {
        self.notify(to);
        let Some((cq, entry)) = cq.and_then(|cq| Some((cq, self.cqs.get(cq)?))) else { return };
        let (session, has_channel) = (entry.session, entry.channel.is_some());
        if has_channel {
            self.note_some(cq, solicited);
        }
        self.note_completed(session);
    }

    /// The ring that was offered first, and what its receiver has to know.
    pub(crate) fn accept_datagram_ring(&mut self, id: QpId) -> Option<(IncomingTerms, OwnedFd)> {
        let datagrams = self.qps.get_mut(id)?.direct.datagrams.as_mut()?;
        let (terms, descriptor) = datagrams.take_offer()?;
        if let Some(RingFrom { sender, place, .. }) = datagrams.from[terms.place as usize]
            && let Some(qp) = self.qps.get_mut(sender)
            && let Some(datagrams) = qp.direct.datagrams.as_mut()
        {
            datagrams.accepted_to |= 1 << place;
            if let Some(ring) = datagrams.to.get_mut(place).and_then(Option::as_mut) {
                ring.accepted_after = qp.send.taken();
            }
        }
        Some((terms, descriptor))
    }

    /// The QP sends by this ring no longer. What is in it stays there for the receiver.
    fn close_datagram_ring(&mut self, id: QpId, place: usize) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        let Some(datagrams) = qp.direct.datagrams.as_mut().filter(|datagrams| datagrams.is_open_to(place)) else {
            return;
        };
        datagrams.open_to &= !(1 << place);
        qp.send.set_rings_open(datagrams.open_to);
        datagrams.accepted_to &= !(1 << place);
        let Some(ring) = datagrams.to.get_mut(place).and_then(Option::as_mut) else { return };
        ring.closed_at = Some(self.now);
        let ring = *ring;
        self.open_rings.remove((ring.asked.address_handle, id, place));
        let Some(receiver) = self.qps.get_mut(ring.receiver) else { return };
        let Some(there) = &mut receiver.direct.datagrams else { return };
        let is_its = |from: &RingFrom| (from.sender, from.place) == (id, place);
        if !there.from.get(ring.place).is_some_and(|from| from.as_ref().is_some_and(is_its)) {
            return;
        }
        if let Some(RingFrom { offered: None, charge, .. }) = there.from[ring.place].take() {
            self.open_rings.keep(self.now, charge);
        }
        there.open_from &= !(1 << ring.place);
        if let Some(receive) = &receiver.receive {
            receive.set_rings_open(there.open_from);
        }
        // It takes what is in there, and lets it go.
        self.notify(ring.receiver);
    }

    fn datagram_ring_from(&self, id: QpId, place: usize) -> Option<&RingFrom> {
        self.datagrams(id)?.from.get(place)?.as_ref()
    }

    /// The same of the one at that place of the receiver.
    fn close_datagram_ring_from(&mut self, id: QpId, place: usize) {
        if let Some((sender, place)) = self.datagram_ring_from(id, place).map(|ring| (ring.sender, ring.place)) {
            self.close_datagram_ring(sender, place);
        }
    }

    /// An address handle ends: so do the rings that are for it.
    pub(crate) fn close_datagram_rings_by(&mut self, address_handle: u32) {
        for (_, sender, place) in self.open_rings.of_handle(address_handle) {
            self.close_datagram_ring(sender, place);
        }
    }

    /// All rings of a QP end, in either direction.
    pub(crate) fn close_all_datagram_rings(&mut self, id: QpId) {
        let Some(datagrams) = self.datagrams(id) else { return };
        let (places, count) = (datagrams.open_places_to(), datagrams.from.len());
        for place in places {
            self.close_datagram_ring(id, place);
        }
        for place in 0..count {
            self.close_datagram_ring_from(id, place);
        }
    }
}
