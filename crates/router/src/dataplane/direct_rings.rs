//! When a direct ring may be opened, what its doorbell means, and its end.
//!
//! The state of it is in [`direct`](crate::dataplane::direct).
use crate::admission::account::Charge;
use crate::dataplane::direct::Incoming;
use crate::dataplane::ports::Ports;
use crate::dataplane::reasons::done_directly;
use crate::dataplane::worker::Worker;
use freeflow_engine::{Fetch, QpId, SessionId, SrqId};
use freeflow_protocol::admin::DataPath;
use freeflow_shm::RequestConsumer;
use freeflow_verbs::{NetworkId, QpType, VerbsError};
use std::os::fd::OwnedFd;

/// Messages of one look that a moderated CQ counts.
const NOTIFICATIONS_COUNTED_MAX: u32 = 64;

impl Worker {
    /// The QP at the other end, and the RECV of its that the next message takes.
    pub(crate) fn may_open_direct_ring(&mut self, id: QpId, is_numbered: bool) -> Result<(QpId, u32), VerbsError> {
        use freeflow_engine::NotDirect;
        let to = self.engine.direct_peer(id).map_err(|reason| match reason {
            NotDirect::State | NotDirect::NoPeer => VerbsError::Busy,
            NotDirect::Type | NotDirect::Multicast | NotDirect::OtherHost => VerbsError::NotSupported,
        })?;
        self.ports.leave_receives(id);
        let msn = self.ports.qps.get(id).map_or(0, |qp| qp.send.msn());
        let receive = self.ports.qps.get_mut(to).and_then(|peer| peer.receive.as_mut());
        let next = receive.map(|receive| (receive.catch_up(), receive.may_skip_to(msn)));
        let (Some(qp), Some(peer)) = (self.ports.qps.get(id), self.ports.qps.get(to)) else {
            return Err(VerbsError::Busy);
        };
        if !self.may_pass_router(qp.session) || !self.may_pass_router(peer.session) {
            return Err(VerbsError::NotSupported);
        }
        let (next, may_be_ahead) = next.ok_or(VerbsError::NotSupported)?;
        let is_unreliable = qp.service == QpType::Uc;
        if qp.service == QpType::Ud || is_numbered != is_unreliable || is_unreliable && self.engine.srq_of(to).is_some()
        {
            return Err(VerbsError::NotSupported);
        }
        let (agrees, msn) = if is_numbered {
            // Only the router knows which messages took RECVs.
            (self.engine.is_between_messages(id, to), next)
        } else {
            // All that was sent before is done: both count the same RECVs.
            let is_same_pair = qp.direct.pair == Some((to, peer.direct.incarnation));
            (msn == next || is_same_pair && may_be_ahead, msn)
        };
        if qp.direct.to.is_some() || qp.send.has_next() || !agrees { Err(VerbsError::Busy) } else { Ok((to, msn)) }
    }

    /// The doorbell of a QP rang that puts messages into a direct ring.
    pub(crate) fn carry_notification(&mut self, id: QpId) {
        self.carry_datagram_notifications(id);
        let Some(qp) = self.ports.qps.get_mut(id) else { return };
        // Also of a direct ring that is closed: what is in it is still to be taken.
        let (Some((count, solicited)), Some((to, _))) = (qp.send.take_notified(), qp.direct.pair) else { return };
        self.notify_receiver(to, count, solicited);
    }

    /// So many messages, of which one is solicited or none, came to a QP past the router.
    pub(crate) fn notify_receiver(&mut self, to: QpId, count: u32, solicited: bool) {
        self.ports.notify(to);
        let Some(cq) = self.engine.receive_cq(to) else { return };
        let Some(session) = self.ports.cqs.get(cq).map(|cq| cq.session) else { return };
        if self.ports.cqs.get(cq).is_some_and(|cq| cq.channel.is_some()) {
            for _ in 0..count.min(NOTIFICATIONS_COUNTED_MAX) {
                self.ports.note_completion(cq, solicited);
            }
        }
        self.ports.note_completed(session);
    }

    /// Everything direct of a QP ends, because its owner wants it so: who waits for what it has
    /// sent still hears of that.
    pub(crate) fn end_direct(&mut self, id: QpId) {
        self.carry_notification(id);
        self.ports.close_direct(id);
        self.count_direct(id);
        // Before the answer: then the library finds the command when it has that.
        let now = self.ports.now;
        self.ports.send_commands(now);
    }

    /// The policy of a network changes while traffic runs.
    pub fn set_data_path(&mut self, network: NetworkId, path: DataPath) {
        self.ports.policy.set(network, path);
        if self.ports.policy.allows(network) {
            return;
        }
        let is_there = |session: SessionId| {
            let vnic = self.ports.sessions.get(session).and_then(|session| self.ports.vnics.get(session.vnic));
            vnic.is_some_and(|vnic| vnic.network == network)
        };
        let ids: Vec<QpId> = self.ports.qps.iter().filter(|(_, qp)| is_there(qp.session)).map(|(id, _)| id).collect();
        for id in ids {
            self.ports.close_direct(id);
        }
    }

    /// RECVs that a direct ring to this QP lists; 0: it uses an SRQ.
    pub(crate) fn credit_count(&self, to: QpId) -> u32 {
        if self.engine.srq_of(to).is_some() {
            return 0;
        }
        let receive = self.ports.qps.get(to).and_then(|qp| qp.receive.as_ref());
        receive.map_or(1, RequestConsumer::slot_count)
    }

    /// Whether messages of a QP go by a direct ring now.
    pub fn uses_direct_ring(&self, id: QpId) -> bool {
        if self.uses_datagram_ring(id) {
            return true;
        }
        let to = self.ports.qps.get(id).and_then(|qp| qp.direct.to);
        to.and_then(|to| self.ports.qps.get(to)).is_some_and(|peer| peer.direct.is_accepted())
    }
}

impl Ports {
    /// → how many direct rings of the sender were closed before.
    pub(crate) fn open_direct_ring(
        &mut self,
        id: QpId,
        (to, srq): (QpId, Option<SrqId>),
        descriptor: OwnedFd,
        charge: Charge,
    ) -> u32 {
        if let Some(shared) = srq.and_then(|srq| self.srqs.get_mut(srq)) {
            shared.receive.share();
        }
        let mut incarnation = 0;
        if let Some(peer) = self.qps.get_mut(to) {
            incarnation = peer.direct.incarnation;
            if let Some(receive) = peer.receive.as_mut().filter(|_| srq.is_none()) {
                receive.share();
            }
            peer.direct.fed_by = Some(id);
            let descriptor = Some(descriptor);
            peer.direct.from = Some(Incoming { sender: id, descriptor, _charge: charge });
        }
        self.notify(to);
        self.begin_direct(id, to);
        let Some(qp) = self.qps.get_mut(id) else { return 0 };
        qp.direct.to = Some(to);
        qp.direct.pair = Some((to, incarnation));
        // Its library stores the number of the next message only when it has the answer; until then this is no news.
        qp.direct.msn = qp.send.msn();
        qp.direct.direct_rings_closed
    }

    /// Something is given to a QP, of which nothing is under way: its header is kept up to date from now on.
    pub(crate) fn begin_direct(&mut self, id: QpId, peer: QpId) {
        self.watch(id, peer);
        // DONE says something from the next look at the queue on: only then the last request is surely done.
        if let Some(qp) = self.qps.get_mut(id) {
            qp.direct.is_used = true;
            qp.direct.routed_at = done_directly(&qp.send);
        }
    }

    /// The QP's messages go through the router from now on. What is in its direct ring stays there for the
    /// receiver.
    pub(crate) fn close_direct_ring(&mut self, id: QpId) {
        self.leave_receives(id);
        let Some(qp) = self.qps.get_mut(id) else { return };
        if qp.direct.to.is_some() {
            qp.direct.direct_rings_closed = qp.direct.direct_rings_closed.wrapping_add(1);
            qp.send.set_direct_rings_closed(qp.direct.direct_rings_closed);
        }
        if let Some(to) = qp.direct.to.take()
            && let Some(peer) = self.qps.get_mut(to)
            && peer.direct.from.as_ref().is_some_and(|from| from.sender == id)
        {
            peer.direct.from = None;
            peer.direct.led_here = peer.direct.led_here.wrapping_add(1);
            if let Some(receive) = &peer.receive {
                receive.set_direct_rings_closed(peer.direct.led_here);
            }
        }
    }

    /// The RECVs of what a UC QP has put into a direct ring are left for that: its sender may begin again without its
    /// peer. (RC's peers begin again together.)
    fn leave_receives(&mut self, id: QpId) {
        if self.qps.get(id).is_some_and(|qp| qp.service == QpType::Uc && qp.direct.pair.is_some()) {
            self.follow_msn(id);
        }
    }

    fn skip_to(&mut self, pair: Option<(QpId, u32)>, msn: u32) {
        if let Some((to, incarnation)) = pair
            && let Some(peer) = self.qps.get_mut(to)
            && peer.direct.incarnation == incarnation
            && let Some(receive) = &mut peer.receive
        {
            receive.skip_to(msn);
        }
    }

    /// Everything direct of a QP ends, also what its peer does to it.
    pub(crate) fn close_direct(&mut self, id: QpId) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        let from = qp.direct.from.as_ref().map(|from| from.sender);
        self.revoke_grants_of(id);
        self.close_all_datagram_rings(id);
        self.close_direct_ring(id);
        if let Some(sender) = from {
            self.close_direct_ring(sender);
        }
    }

    /// The receiver's library shall look at its direct ring.
    pub(crate) fn notify(&mut self, to: QpId) {
        let Some(peer) = self.qps.get(to) else { return };
        if let Some(session) = self.sessions.get(peer.session) {
            session.segment.notify(peer.cookie);
        }
    }

    /// A request of a QP that does things past the router was asked for.
    #[cold]
    pub(crate) fn note_fetched(&mut self, id: QpId, taken: Fetch) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        if taken == Fetch::Empty {
            qp.send.store_done();
            return;
        }
        qp.direct.routed_at = done_directly(&qp.send);
        self.follow_msn(id);
    }

    /// The sender says how many RECVs of its peer it has used up.
    fn follow_msn(&mut self, id: QpId) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        let msn = qp.send.msn();
        if std::mem::replace(&mut qp.direct.msn, msn) == msn {
            return;
        }
        let pair = qp.direct.pair;
        self.skip_to(pair, msn);
    }
}
