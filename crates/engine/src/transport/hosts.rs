//! How much is on the way to one host, from all QPs together; and which of them wait until it is
//! less.
//!
//! A congestion window knows of its own QP alone. Hundreds of them that lead to one host overflow
//! its receive buffer together, and what is left of their windows after that are packets here and
//! there. So there is a limit for each host. A QP that finds it reached is *listed*. When room
//! comes, listed QPs are *called*: each gets an allowance, which counts as if it were on the way,
//! and a turn of `run`; it sends a long burst then. What it did not use by the end of that turn is
//! the next one's, whatever its reason (congestion window, closed gate, RNR, memory that is not
//! there).
//!
//! Called is a QP of the vNIC that has the least on the way to the host; of several such vNICs the
//! one that was not called for the longest time; and of its QPs the one that was listed first. So a
//! tenant with a thousand QPs gets no more than one with a single QP, if that one's congestion
//! window lets it fill its half.
//!
//! On a long way more is on the way than waits anywhere: there the limit grows by what the way holds (`pipe`).
//!
//! A vNIC with a small share ([`SMALL_SHARE`]) is not held back, and neither are probes, UC and UD.
//! READs count with the bytes that come back.
//!
//! Invariant: `HostShare::taken_bytes` is what the window has in flight, less what has lapsed, and
//! the allowance; and 0 for a QP that is not in RTS or SQD, or is being torn down.
//! `Completer::sync_host` follows each change of any of these. `HostFlow::taken_bytes` is the sum
//! over the QPs to that host, `VnicQueue::taken_bytes` the same of one vNIC.
//!
//! Invariant: a QP stands in one lane's list exactly while it is `listed`, and once. A vNIC stands
//! in the ring exactly while its list is not empty, and once.
//!
//! Invariant: while a QP is listed, the limit is reached (where that has fallen: its vNIC is no small share, or those
//! together have reached theirs). So none waits for ever, since all that is
//! taken is given back: an allowance at the end of the turn that comes with it; bytes when they are
//! acknowledged, when the requester goes back, when the QP fails, is reset or destroyed, and
//! (without any timeout, or while the memory of a hostile process keeps answers from landing) when
//! they lapse: nothing that was sent [`LAPSE`] ago, or four round trips, is on the way any more.
use crate::transport::congestion::WINDOW_BYTES_SHORT;
use crate::transport::pipe::Pipe;
use crate::transport::window::BURST_BYTES_MAX;
use crate::{HostId, QpId};
use alloc::collections::{BTreeMap, VecDeque};
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// Bytes that may be on a short way to one host: two whole windows, so that one QP can have half of it
/// beside any number of others, and a queue of less than what the delay rule allows (2 ms) down to
/// 8 Gb/s. The peer's receive buffer is of 16 MiB, of which the kernel counts about twice the bytes
/// of a packet; and several hosts may send to it.
const IN_FLIGHT_BYTES_MAX: u64 = 2 * WINDOW_BYTES_SHORT;

/// A vNIC that has less than this part of the limit of a short way on the way need not wait, until that limit is
/// exceeded by as much again.
const SMALL_SHARE: u64 = 32;

/// The least allowance: what a QP sends in a turn of a router.
pub(crate) const ALLOWANCE_BYTES: u64 = 64 * 1024;

/// Without progress for so long, what a QP has in flight does not count: it waits at the peer, or
/// was lost. On a long way: for so many of the least round trips that any QP to the host measured,
/// so that nobody makes it longer by answering late.
const LAPSE: Duration = Duration::from_millis(10);
const LAPSE_ROUND_TRIPS: u64 = 4;
const LAPSE_MAX: Duration = Duration::from_millis(500);

const _: () = assert!(ALLOWANCE_BYTES >= BURST_BYTES_MAX as u64);

#[derive(Serialize, Deserialize)]
pub(crate) struct Hosts {
    /// Of a short way.
    pub bytes_max: u64,
    pub flows: BTreeMap<HostId, HostFlow>,
}

/// It goes when a QP leaves the host and nothing is on the way there, nor waits.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct HostFlow {
    pub taken_bytes: u64,
    /// The limit before it fell, or what was taken when bytes counted again, as far as that much is still taken: what
    /// others have on the way beyond the limit of today does not hold small shares back.
    high_bytes: u64,
    pub pipe: Pipe,
    /// By index of the vNIC.
    pub vnic_queues: BTreeMap<u32, VnicQueue>,
    /// vNICs that have QPs listed; the one that was called last comes last.
    pub ring: VecDeque<u32>,
}

/// Of one vNIC.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VnicQueue {
    pub taken_bytes: u64,
    pub listed: VecDeque<QpId>,
}

/// A QP's share of its host's limit.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct HostShare {
    /// As the host's sum has it.
    pub taken_bytes: u64,
    /// It was called, and may still send so much.
    pub allowance_bytes: u64,
    /// In flight, and believed to be on the way no more.
    pub lapsed_bytes: u64,
    pub listed: bool,
    /// Listed or called, and since when; the time for which its timer is set is not in it.
    pub waits_since: Option<Instant>,
}

/// A look at what is on the way to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostStatus {
    /// The host.
    pub host: HostId,
    /// Bytes in flight, with those that granted QPs are about to send.
    pub in_flight_bytes: u64,
    /// QPs that wait for others.
    pub waiting: usize,
}

impl HostShare {
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

impl Hosts {
    /// Bytes of a QP to a host were acknowledged: what the window of one may grow to, and whether the host's limit
    /// has grown.
    pub fn arrive(&mut self, now: Instant, host: HostId, bytes: u64) -> (u64, bool) {
        let Some(flow) = self.flows.get_mut(&host) else { return (WINDOW_BYTES_SHORT, false) };
        let before = flow.pipe.extra_bytes();
        flow.pipe.arrive(now, bytes);
        let extra = flow.pipe.extra_bytes();
        if extra < before {
            flow.high_bytes = flow.high_bytes.max(self.bytes_max.saturating_add(before)).min(flow.taken_bytes);
        }
        (WINDOW_BYTES_SHORT + extra, extra > before)
    }

    /// Bytes of a QP count again that had lapsed: as when the limit has fallen below what is taken.
    pub fn note_renewed(&mut self, host: HostId) {
        let Some(flow) = self.flows.get_mut(&host) else { return };
        if flow.taken_bytes > flow.limit_bytes(self.bytes_max) {
            flow.high_bytes = flow.taken_bytes;
        }
    }

    /// After so long without progress nothing of a QP to this host counts.
    pub fn lapse(&self, host: HostId) -> Duration {
        let least_ns = self.flows.get(&host).map_or(0, |flow| flow.pipe.least_rtt().0);
        Duration(least_ns.saturating_mul(LAPSE_ROUND_TRIPS)).clamp(LAPSE, LAPSE_MAX)
    }
}

impl HostFlow {
    /// Nothing is on the way, and nobody waits.
    pub fn is_unused(&self) -> bool {
        self.taken_bytes == 0 && self.vnic_queues.is_empty() && self.ring.is_empty()
    }

    /// Bytes that may be on the way, if on a short one it were so many.
    pub fn limit_bytes(&self, short_bytes: u64) -> u64 {
        short_bytes.saturating_add(self.pipe.extra_bytes())
    }

    pub fn list(&mut self, vnic: u32, id: QpId) {
        let vnic_queue = self.vnic_queues.entry(vnic).or_default();
        if vnic_queue.listed.is_empty() {
            self.ring.push_back(vnic);
        }
        vnic_queue.listed.push_back(id);
    }

    pub fn unlist(&mut self, vnic: u32, id: QpId) {
        let Some(vnic_queue) = self.vnic_queues.get_mut(&vnic) else { return };
        vnic_queue.listed.retain(|listed| *listed != id);
        if vnic_queue.listed.is_empty() {
            self.ring.retain(|listed| *listed != vnic);
        }
    }

    /// Takes the one out that is called next, if there is room for it. Less than an allowance makes no difference
    /// between vNICs.
    pub fn next(&mut self, short_bytes: u64) -> Option<QpId> {
        let limit = self.limit_bytes(short_bytes);
        // Only a limit that has fallen leaves room beyond it, for small shares.
        if self.taken_bytes >= limit && self.high_bytes <= limit {
            return None;
        }
        let taken =
            |vnic: &u32| self.vnic_queues.get(vnic).map_or(0, |vnic_queue| vnic_queue.taken_bytes / ALLOWANCE_BYTES);
        let (place, &vnic) = self.ring.iter().enumerate().min_by_key(|(_, vnic)| taken(vnic))?;
        if !self.admits(vnic, short_bytes) {
            return None;
        }
        self.ring.remove(place)?;
        let vnic_queue = self.vnic_queues.get_mut(&vnic)?;
        let id = vnic_queue.listed.pop_front();
        if !vnic_queue.listed.is_empty() {
            self.ring.push_back(vnic);
        }
        id
    }

    /// Whether a QP of this vNIC need not wait: the limit is not reached, or the vNIC has next to
    /// nothing of it. (So a tenant that fills it with what never arrives does not stop one whose
    /// messages are few.)
    pub fn admits(&self, vnic: u32, short_bytes: u64) -> bool {
        let limit = self.limit_bytes(short_bytes);
        if self.taken_bytes >= limit.max(self.high_bytes).saturating_add(short_bytes) {
            return false;
        }
        let own_bytes = || self.vnic_queues.get(&vnic).map_or(0, |vnic_queue| vnic_queue.taken_bytes);
        self.taken_bytes < limit || own_bytes() < short_bytes / SMALL_SHARE
    }

    pub fn account(&mut self, vnic: u32, before: u64, after: u64) {
        let vnic_queue = self.vnic_queues.entry(vnic).or_default();
        vnic_queue.taken_bytes = vnic_queue.taken_bytes + after - before;
        self.taken_bytes = self.taken_bytes + after - before;
        self.high_bytes = self.high_bytes.min(self.taken_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const HOST: HostId = HostId(0);

    /// One vNIC has all that a long way allows on it; then less arrives, and the limit falls.
    #[test]
    fn a_limit_that_falls_does_not_shut_small_shares_out() {
        let mut hosts = Hosts::default();
        let short = hosts.bytes_max;
        let flow = hosts.flows.entry(HOST).or_default();
        flow.pipe.measure(Duration(10 * MS));
        let mut now = Instant(MS);
        let mut arrive = |hosts: &mut Hosts, milliseconds: u64, bytes| {
            for _ in 0..milliseconds {
                now = now + Duration(MS);
                hosts.arrive(now, HOST, bytes);
            }
        };
        arrive(&mut hosts, 50, 2_000_000);
        let flow = hosts.flows.get_mut(&HOST).unwrap();
        let limit = flow.limit_bytes(short);
        assert!(limit > 10 * short);
        flow.account(1, 0, limit);
        assert!(!flow.admits(1, short) && flow.admits(2, short));
        arrive(&mut hosts, 300, 0);
        let flow = hosts.flows.get_mut(&HOST).unwrap();
        assert_eq!(flow.limit_bytes(short), short);
        assert!(!flow.admits(1, short) && flow.admits(2, short), "it has nothing on the way");
        let [one, two] = [1, 2].map(|index| QpId { index, generation: 1 });
        flow.list(1, one);
        assert_eq!(flow.next(short), None);
        flow.list(2, two);
        assert_eq!(flow.next(short), Some(two), "also if it waits already");
        assert_eq!(flow.next(short), None);
        flow.account(2, 0, short / SMALL_SHARE);
        assert!(!flow.admits(2, short) && flow.admits(3, short), "a small share is small");
        flow.account(3, 0, short);
        assert!(!flow.admits(4, short), "small shares together have their limit, too");
        // Room for them does not grow as the others' bytes arrive.
        flow.account(1, limit, limit / 2);
        assert!(flow.admits(4, short));
        flow.account(5, 0, short);
        assert!(!flow.admits(4, short));
        flow.account(1, limit / 2, 0);
        assert!(flow.taken_bytes < 3 * short && flow.admits(6, 2 * short));
    }

    #[test]
    fn bytes_that_count_again_do_not_shut_small_shares_out() {
        let mut hosts = Hosts::default();
        let short = hosts.bytes_max;
        hosts.flows.entry(HOST).or_default().account(1, 0, 5 * short);
        assert!(!hosts.flows[&HOST].admits(2, short));
        hosts.note_renewed(HOST);
        assert!(!hosts.flows[&HOST].admits(1, short) && hosts.flows[&HOST].admits(2, short));
    }
}
