//! How much is on the way to one host, from all QPs together; and which of them wait until it is less.
//!
//! A congestion window knows of its own QP alone. Hundreds of them that lead to one host overflow its receive buffer
//! together, and what is left of their windows after that are packets here and there. So there is a limit for each
//! host. A QP that finds it reached is *listed*. When room comes, listed QPs are *called*: each gets an allowance, which
//! counts as if it were on the way, and a turn of `run`; it sends a long burst then. What it did not use by the end of
//! that turn is the next one's, whatever its reason (congestion window, closed gate, RNR, memory that is not there).
//!
//! Called is a QP of the vNIC that has the least on the way to the host; of several such vNICs the one that was not
//! called for the longest time; and of its QPs the one that was listed first. So a tenant with a thousand QPs gets no more
//! than one with a single QP, if that one's congestion window lets it fill its half.
//!
//! A vNIC with a small share ([`SMALL_SHARE`]) is not held back, and neither are probes, UC and UD. READs count with the
//! bytes that come back.
//!
//! Invariant: `Share::taken_bytes` is what the window has in flight, less what has lapsed, and the allowance; and 0 for a
//! QP that is not in RTS or SQD, or is being torn down. [`Engine::sync_host`] follows each change of any of these.
//! `HostFlow::taken_bytes` is the sum over the QPs to that host, `Lane::taken_bytes` the same of one vNIC.
//!
//! Invariant: a QP stands in one lane's list exactly while it is `listed`, and once. A vNIC stands in the ring exactly
//! while its list is not empty, and once.
//!
//! Invariant: while a QP is listed, the limit is reached. So none waits for ever, since all that is taken is given back:
//! an allowance at the end of the turn that comes with it; bytes when they are acknowledged, when the requester goes back,
//! when the QP fails, is reset or destroyed, and (without any timeout, or while the memory of a hostile process keeps
//! answers from landing) when they lapse: nothing that was sent [`LAPSE`] ago is on the way any more.
use super::Wire;
use super::congestion::WINDOW_BYTES_MAX;
use super::window::BURST_BYTES_MAX;
use crate::qp::{QueuePair, Teardown};
use crate::{Engine, HostId, QpId};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Instant, QpState};
use serde::{Deserialize, Serialize};

/// Bytes that may be on the way to one host: two whole windows, so that one QP can have half of it beside any number of
/// others, and a queue of less than what the delay rule allows (2 ms) down to 8 Gb/s. The peer's receive buffer is of
/// 16 MiB, of which the kernel counts about twice the bytes of a packet; and several hosts may send to it.
const IN_FLIGHT_BYTES_MAX: u64 = 2 * WINDOW_BYTES_MAX;
/// A vNIC that has less than this part of the limit on the way need not wait, until twice the limit is reached.
const SMALL_SHARE: u64 = 32;
/// The least allowance: what a QP sends in a turn of a router.
const ALLOWANCE_BYTES: u64 = 64 * 1024;
/// Without progress for so long, what a QP has in flight does not count: it waits at the peer, or was lost.
pub(super) const LAPSE: Duration = Duration::from_millis(10);

const _: () = assert!(ALLOWANCE_BYTES >= BURST_BYTES_MAX as u64);

#[derive(Serialize, Deserialize)]
pub(crate) struct Hosts {
    bytes_max: u64,
    flows: BTreeMap<HostId, HostFlow>,
}

/// There while a QP leads to the host that ever sent something.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
struct HostFlow {
    taken_bytes: u64,
    /// By index of the vNIC.
    lanes: BTreeMap<u32, Lane>,
    /// vNICs that have QPs listed; the one that was called last comes last.
    ring: VecDeque<u32>,
}

/// Of one vNIC.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
struct Lane {
    taken_bytes: u64,
    listed: VecDeque<QpId>,
}

/// What a QP has of its host's limit.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Share {
    /// As the host's sum has it.
    taken_bytes: u64,
    /// It was called, and may still send so much.
    allowance_bytes: u64,
    /// In flight, and believed to be on the way no more.
    lapsed_bytes: u64,
    listed: bool,
    /// Listed or called, and since when; the time that its timer has been told of is not in it.
    waits_since: Option<Instant>,
}

/// A look at what is on the way to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostStatus {
    pub host: HostId,
    /// What called QPs are about to send is part of it.
    pub in_flight_bytes: u64,
    /// QPs that wait for others.
    pub waiting: usize,
}

impl Share {
    pub fn in_flight_bytes(&self) -> u64 {
        self.taken_bytes - self.allowance_bytes
    }

    /// Progress was made: what was sent is believed to be on the way again.
    /// True: it was not.
    pub fn renew(&mut self) -> bool {
        core::mem::take(&mut self.lapsed_bytes) > 0
    }

    pub fn is_listed(&self) -> bool {
        self.listed
    }
}

impl Default for Hosts {
    fn default() -> Self {
        Self { bytes_max: IN_FLIGHT_BYTES_MAX, flows: BTreeMap::new() }
    }
}

impl HostFlow {
    fn list(&mut self, vnic: u32, id: QpId) {
        let lane = self.lanes.entry(vnic).or_default();
        if lane.listed.is_empty() {
            self.ring.push_back(vnic);
        }
        lane.listed.push_back(id);
    }

    fn unlist(&mut self, vnic: u32, id: QpId) {
        let Some(lane) = self.lanes.get_mut(&vnic) else { return };
        lane.listed.retain(|listed| *listed != id);
        if lane.listed.is_empty() {
            self.ring.retain(|listed| *listed != vnic);
        }
    }

    /// Takes the one out that is called next. Less than an allowance makes no difference between vNICs.
    fn next(&mut self) -> Option<QpId> {
        let taken = |vnic: &u32| self.lanes.get(vnic).map_or(0, |lane| lane.taken_bytes / ALLOWANCE_BYTES);
        let (place, _) = self.ring.iter().enumerate().min_by_key(|(_, vnic)| taken(vnic))?;
        let vnic = self.ring.remove(place)?;
        let lane = self.lanes.get_mut(&vnic)?;
        let id = lane.listed.pop_front();
        if !lane.listed.is_empty() {
            self.ring.push_back(vnic);
        }
        id
    }

    /// Whether a QP of this vNIC need not wait: the limit is not reached, or the vNIC has next to nothing of it. (So a tenant
    /// that fills it with what never arrives does not stop one whose messages are few.)
    fn admits(&self, vnic: u32, bytes_max: u64) -> bool {
        if self.taken_bytes >= 2 * bytes_max {
            return false;
        }
        let own_bytes = || self.lanes.get(&vnic).map_or(0, |lane| lane.taken_bytes);
        self.taken_bytes < bytes_max || own_bytes() < bytes_max / SMALL_SHARE
    }

    fn account(&mut self, vnic: u32, before: u64, after: u64) {
        let lane = self.lanes.entry(vnic).or_default();
        lane.taken_bytes = lane.taken_bytes + after - before;
        self.taken_bytes = self.taken_bytes + after - before;
    }
}

/// Whether what it has in flight may still be answered.
fn is_live(qp: &QueuePair) -> bool {
    qp.teardown == Teardown::None && matches!(qp.state(), QpState::ReadyToSend | QpState::SqDrain)
}

impl Wire {
    /// What its QP takes of the host's limit.
    fn takes_bytes(&self, is_live: bool) -> u64 {
        match is_live {
            true => {
                let counted = self.requester.in_flight_bytes() - self.share.lapsed_bytes;
                counted.saturating_add(self.share.allowance_bytes)
            }
            false => 0,
        }
    }
}

impl Engine {
    /// Bytes that may be on the way to one host, besides the last burst. What is on the way already stays.
    pub fn set_host_bytes_max(&mut self, bytes: u64) {
        self.hosts.bytes_max = bytes.max(1);
        let hosts: Vec<HostId> = self.hosts.flows.keys().copied().collect();
        for host in hosts {
            self.call_waiting(host);
        }
    }

    /// Of all hosts that something is, or was, on the way to.
    pub fn host_flows(&self) -> impl Iterator<Item = HostStatus> + '_ {
        self.hosts.flows.iter().map(|(host, flow)| {
            let waiting = flow.lanes.values().map(|lane| lane.listed.len()).sum();
            HostStatus { host: *host, in_flight_bytes: flow.taken_bytes, waiting }
        })
    }

    /// Brings the sums up to date with what the QP has in flight; if that is less, others are called.
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
            self.call_waiting(host);
        }
    }

    /// Calls as many of those that wait as there is room for.
    fn call_waiting(&mut self, host: HostId) {
        loop {
            let Some(flow) = self.hosts.flows.get_mut(&host) else { return };
            if flow.taken_bytes >= self.hosts.bytes_max {
                return;
            }
            let Some(id) = flow.next() else { return };
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
    pub(super) fn has_place(&mut self, now: Instant, id: QpId) -> bool {
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
    pub(super) fn use_place(&mut self, id: QpId, bytes: u64) {
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
    pub(super) fn leave_host(&mut self, id: QpId) {
        let qp = self.qps.get_mut(id).expect("the QP exists");
        let vnic = qp.vnic.index;
        let Some(wire) = &mut qp.wire else { return };
        let (host, share) = (wire.destination.host, core::mem::take(&mut wire.share));
        let Some(flow) = self.hosts.flows.get_mut(&host) else { return };
        if share.listed {
            flow.unlist(vnic, id);
        }
        flow.account(vnic, share.taken_bytes, 0);
        if flow.lanes.get(&vnic) == Some(&Lane::default()) {
            flow.lanes.remove(&vnic);
        }
        if *flow == HostFlow::default() {
            self.hosts.flows.remove(&host);
        }
        self.call_waiting(host);
    }

    // ---- time

    /// The QP waits for others and has nothing on the way: that is no silence of its peer.
    pub(super) fn excuse_wait(&mut self, now: Instant, id: QpId) {
        let wire = self.wire_mut(id);
        let Some(since) = &mut wire.share.waits_since else { return };
        let waited = now - core::mem::replace(since, now);
        if !wire.requester.window.has_unacknowledged() {
            let clock = &mut wire.requester.clock;
            clock.silent_since = (clock.silent_since + waited).min(now);
            clock.probe_since = (clock.probe_since + waited).min(now);
        }
    }

    /// What the QP has in flight is on the way no more, though nothing tells that it was lost.
    pub(super) fn lapse(&mut self, id: QpId) {
        let wire = self.wire_mut(id);
        wire.share.lapsed_bytes = wire.requester.in_flight_bytes();
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
            let lanes = flow.lanes.iter();
            let sum = lanes.clone().try_fold(0u64, |sum, (_, lane)| sum.checked_add(lane.taken_bytes));
            let busy: BTreeSet<u32> =
                lanes.clone().filter(|(_, lane)| !lane.listed.is_empty()).map(|(vnic, _)| *vnic).collect();
            let ring: BTreeSet<u32> = flow.ring.iter().copied().collect();
            let is_right = lanes.clone().all(|(vnic, lane)| {
                sums.remove(&(*host, *vnic)).unwrap_or(0) == lane.taken_bytes
                    && lane.listed.iter().all(|id| listed.remove(&((*host, *vnic), *id)))
            });
            is_right && sum == Some(flow.taken_bytes) && busy == ring && ring.len() == flow.ring.len()
        }) && listed.is_empty()
            && sums.values().all(|sum| *sum == 0)
    }
}
