//! Which QPs may have packets on the way to a host, and which wait for their turn; see
//! `transport::hosts`.
use crate::completer::Completer;
use crate::qp::{QueuePair, Teardown};
use crate::transport::hosts::{ALLOWANCE_BYTES, VnicQueue};
use crate::transport::wire::Wire;
use crate::{HostId, QpId};
use alloc::collections::{BTreeMap, BTreeSet};
use freeflow_verbs::Instant;
use freeflow_verbs::QpState;

impl Completer {
    /// Brings the sums up to date with what the QP has in flight; if that is less, others are
    /// called.
    pub(crate) fn sync_host(&mut self, id: QpId) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        let is_live = is_live(qp);
        let Some(wire) = &mut qp.wire else { return };
        wire.share.lapsed_bytes = wire.share.lapsed_bytes.min(wire.requester.in_flight_bytes());
        if !is_live {
            wire.share.allowance_bytes = 0;
        }
        let after = wire.takes_bytes(is_live);
        let before = core::mem::replace(&mut wire.share.taken_bytes, after);
        if before == after {
            return;
        }
        let (host, vnic) = (wire.destination.host, qp.vnic.index);
        self.hosts.flows.entry(host).or_default().account(vnic, before, after);
        if after < before {
            self.grant_waiting(host);
        }
    }

    /// Calls as many of those that wait as there is room for.
    pub(crate) fn grant_waiting(&mut self, host: HostId) {
        loop {
            let Some(flow) = self.hosts.flows.get_mut(&host) else { return };
            let Some(id) = flow.next(self.hosts.bytes_max) else { return };
            let qp = self.qps.get_mut(id).expect("a QP that goes is taken off the list");
            let (is_live, depth, vnic) = (is_live(qp), usize::from(qp.attributes.max_rd_atomic.max(1)), qp.vnic.index);
            let wire = qp.wire.as_mut().expect("a QP without a way is taken off the list");
            wire.share.listed = false;
            if !is_live {
                wire.share.waits_since = None;
                continue;
            }
            let (window, window_bytes) = (&wire.requester.window, wire.requester.congestion.window_bytes());
            // The responses of a READ are asked for all at once.
            let wish = window.plan(window_bytes, depth).map_or(0, |burst| window.charge(&burst));
            wire.share.allowance_bytes = wish.max(ALLOWANCE_BYTES);
            wire.share.taken_bytes += wire.share.allowance_bytes;
            flow.account(vnic, 0, wire.share.allowance_bytes);
            wire.requester.held = false;
            self.push_ready(id);
        }
    }

    /// Whether a burst of the QP may go out. If not, it is listed, and will be called.
    pub(crate) fn has_place(&mut self, now: Instant, id: QpId) -> bool {
        let qp = self.qps.get_mut(id).expect("the requester exists");
        let vnic = qp.vnic.index;
        let wire = qp.wire.as_mut().expect("the QP runs the packet transport");
        let flow = self.hosts.flows.entry(wire.destination.host).or_default();
        let share = &mut wire.share;
        if share.allowance_bytes > 0 || !share.listed && flow.admits(vnic, self.hosts.bytes_max) {
            self.excuse_wait(now, id);
            self.wire_mut(id).share.waits_since = None;
            return true;
        }
        if !share.listed {
            share.listed = true;
            share.waits_since.get_or_insert(now);
            flow.list(vnic, id);
        }
        false
    }

    /// A burst went to the fabric that counts so much.
    pub(crate) fn use_place(&mut self, id: QpId, bytes: u64) {
        let share = &mut self.wire_mut(id).share;
        share.allowance_bytes = share.allowance_bytes.saturating_sub(bytes);
        self.sync_host(id);
    }

    /// The QP's turn is over: its place is the next one's.
    pub(crate) fn leave_place(&mut self, id: QpId) {
        let Some(wire) = self.qps.get_mut(id).and_then(|qp| qp.wire.as_mut()) else { return };
        if !wire.share.listed {
            wire.share.waits_since = None;
        }
        if core::mem::take(&mut wire.share.allowance_bytes) > 0 {
            self.sync_host(id);
        }
    }

    /// The QP's way ends.
    pub(crate) fn leave_host(&mut self, id: QpId) {
        let qp = self.qps.get_mut(id).expect("the QP exists");
        let vnic = qp.vnic.index;
        let Some(wire) = &mut qp.wire else { return };
        let (host, share) = (wire.destination.host, core::mem::take(&mut wire.share));
        let Some(flow) = self.hosts.flows.get_mut(&host) else { return };
        if share.listed {
            flow.unlist(vnic, id);
        }
        flow.account(vnic, share.taken_bytes, 0);
        if flow.vnic_queues.get(&vnic) == Some(&VnicQueue::default()) {
            flow.vnic_queues.remove(&vnic);
        }
        if flow.is_unused() {
            self.hosts.flows.remove(&host);
        }
        self.grant_waiting(host);
    }

    // ---- time

    /// The QP waits for others and has nothing on the way: that is no silence of its peer.
    pub(crate) fn excuse_wait(&mut self, now: Instant, id: QpId) {
        let wire = self.wire_mut(id);
        let Some(since) = &mut wire.share.waits_since else { return };
        let waited = now - core::mem::replace(since, now);
        if !wire.requester.window.has_unacknowledged() {
            let clock = &mut wire.requester.clock;
            clock.silent_since = (clock.silent_since + waited).min(now);
            clock.probe_since = (clock.probe_since + waited).min(now);
        }
    }

    /// The QP's packets in flight count as lost, though nothing says so.
    pub(crate) fn lapse(&mut self, now: Instant, id: QpId) {
        let wire = self.wire_mut(id);
        wire.share.lapsed_bytes = wire.requester.in_flight_bytes();
        let host = wire.destination.host;
        self.hosts.arrive(now, host, 0);
        self.sync_host(id);
    }

    // ---- consistency

    /// Whether sums and lists are those of the QPs; false for what was read from damaged bytes.
    pub(crate) fn hosts_are_consistent(&self) -> bool {
        let mut sums: BTreeMap<(HostId, u32), u64> = BTreeMap::new();
        let mut listed = BTreeSet::new();
        for (id, qp) in self.qps.iter() {
            let Some(wire) = &qp.wire else { continue };
            let share = &wire.share;
            let lapsed = share.lapsed_bytes <= wire.requester.in_flight_bytes();
            if !lapsed
                || share.allowance_bytes > share.taken_bytes
                || share.taken_bytes != wire.takes_bytes(is_live(qp))
            {
                return false;
            }
            let place = (wire.destination.host, qp.vnic.index);
            let sum = sums.entry(place).or_default();
            let Some(more) = sum.checked_add(share.taken_bytes) else { return false };
            *sum = more;
            if share.listed {
                listed.insert((place, id));
            }
        }
        self.hosts.flows.iter().all(|(host, flow)| {
            let vnic_queues = flow.vnic_queues.iter();
            let sum =
                vnic_queues.clone().try_fold(0u64, |sum, (_, vnic_queue)| sum.checked_add(vnic_queue.taken_bytes));
            let busy: BTreeSet<u32> = vnic_queues
                .clone()
                .filter(|(_, vnic_queue)| !vnic_queue.listed.is_empty())
                .map(|(vnic, _)| *vnic)
                .collect();
            let ring: BTreeSet<u32> = flow.ring.iter().copied().collect();
            let is_right = vnic_queues.clone().all(|(vnic, vnic_queue)| {
                sums.remove(&(*host, *vnic)).unwrap_or(0) == vnic_queue.taken_bytes
                    && vnic_queue.listed.iter().all(|id| listed.remove(&((*host, *vnic), *id)))
            });
            is_right && sum == Some(flow.taken_bytes) && busy == ring && ring.len() == flow.ring.len()
        }) && listed.is_empty()
            && sums.values().all(|sum| *sum == 0)
    }
}

impl Wire {
    /// The share of the host's limit that the QP takes.
    pub fn takes_bytes(&self, is_live: bool) -> u64 {
        match is_live {
            true => {
                let counted = self.requester.in_flight_bytes() - self.share.lapsed_bytes;
                counted.saturating_add(self.share.allowance_bytes)
            }
            false => 0,
        }
    }
}

/// Whether what it has in flight may still be answered.
fn is_live(qp: &QueuePair) -> bool {
    qp.teardown == Teardown::None && matches!(qp.state(), QpState::ReadyToSend | QpState::SqDrain)
}
