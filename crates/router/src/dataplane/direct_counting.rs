//! The looks at what QPs do past the router; how often is in [`direct_traffic`](crate::dataplane::direct_traffic).
use crate::dataplane::direct_traffic::{LOOK_QPS_MAX, growth};
use crate::dataplane::ports::Ports;
use crate::dataplane::reasons::done_directly;
use crate::dataplane::worker::Worker;
use freeflow_engine::QpId;
use freeflow_verbs::{Instant, QpType};

impl Ports {
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

    /// The same of a UD QP, which may have many peers.
    pub(crate) fn watch_datagrams(&mut self, id: QpId) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        if !std::mem::replace(&mut qp.direct.is_used, true) {
            qp.direct.routed_at = done_directly(&qp.send);
        }
        if !std::mem::replace(&mut qp.direct.counted.is_watched, true) {
            self.watch.add(self.now, id);
        }
    }
}

impl Worker {
    /// Counts what a QP has done since the last look; whether it has done anything.
    pub(crate) fn count_direct(&mut self, id: QpId) -> bool {
        let Some(qp) = self.ports.qps.get_mut(id) else { return false };
        if qp.service == QpType::Ud {
            return self.count_datagrams(id);
        }
        let Some(to) = qp.direct.counted.peer else { return false };
        let (now, peer_qp) = (qp.send.tally(), qp.direct.counted.peer_qp);
        let before = std::mem::replace(&mut qp.direct.counted.seen, now);
        let Some(session) = self.ports.sessions.get(qp.session).filter(|_| now != before) else { return false };
        let grown = growth(&before, &now);
        self.engine.count_direct(session.vnic, to, &grown);
        self.engine.count_direct_of_qps(Some(id), peer_qp, &grown);
        true
    }

    /// Counts all that was done until now: somebody asks.
    pub(crate) fn count_all_direct(&mut self) {
        for at in 0..self.ports.watch.ids.len() {
            let id = self.ports.watch.ids[at];
            self.ports.watch.has_grown |= self.count_direct(id);
        }
    }

    /// The same, unless that would take long; then it is as of the last look, [`INTERVAL_IDLE`] ago at most.
    pub(crate) fn count_few_direct(&mut self) {
        if self.ports.watch.ids.len() <= LOOK_QPS_MAX {
            self.count_all_direct();
        }
    }

    /// Looks at some of the QPs, the first of a round or the next. Once all were looked at: whether
    /// something had grown.
    pub(crate) fn watch_direct(&mut self, now: Instant) -> Option<bool> {
        if self.ports.watch.next.is_none() {
            self.ports.watch.begun = now;
        }
        let mut at = self.ports.watch.next.unwrap_or(0);
        for _ in 0..LOOK_QPS_MAX {
            let Some(&id) = self.ports.watch.ids.get(at) else { return Some(self.ports.watch.end_round()) };
            self.ports.watch.has_grown |= self.count_direct(id);
            match self.ports.qps.get_mut(id).map(|qp| &mut qp.direct) {
                Some(direct) if direct.is_used() => at += 1,
                ended => {
                    if let Some(direct) = ended {
                        direct.counted.is_watched = false;
                    }
                    // In its place comes one that was not looked at yet.
                    self.ports.watch.ids.swap_remove(at);
                }
            }
        }
        self.ports.watch.next = Some(at);
        None
    }
}
