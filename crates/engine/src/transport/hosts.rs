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
//! Invariant: while a QP is listed, the limit is reached. So none waits for ever, since all that is
//! taken is given back: an allowance at the end of the turn that comes with it; bytes when they are
//! acknowledged, when the requester goes back, when the QP fails, is reset or destroyed, and
//! (without any timeout, or while the memory of a hostile process keeps answers from landing) when
//! they lapse: nothing that was sent [`LAPSE`] ago is on the way any more.
use crate::transport::congestion::WINDOW_BYTES_MAX;
use crate::transport::window::BURST_BYTES_MAX;
use crate::{HostId, QpId};
use alloc::collections::{BTreeMap, VecDeque};
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// Bytes that may be on the way to one host: two whole windows, so that one QP can have half of it
/// beside any number of others, and a queue of less than what the delay rule allows (2 ms) down to
/// 8 Gb/s. The peer's receive buffer is of 16 MiB, of which the kernel counts about twice the bytes
/// of a packet; and several hosts may send to it.
const IN_FLIGHT_BYTES_MAX: u64 = 2 * WINDOW_BYTES_MAX;

/// A vNIC that has less than this part of the limit on the way need not wait, until twice the limit
/// is reached.
const SMALL_SHARE: u64 = 32;

/// The least allowance: what a QP sends in a turn of a router.
pub(crate) const ALLOWANCE_BYTES: u64 = 64 * 1024;

/// Without progress for so long, what a QP has in flight does not count: it waits at the peer, or
/// was lost.
pub(crate) const LAPSE: Duration = Duration::from_millis(10);

const _: () = assert!(ALLOWANCE_BYTES >= BURST_BYTES_MAX as u64);

#[derive(Serialize, Deserialize)]
pub(crate) struct Hosts {
    pub bytes_max: u64,
    pub flows: BTreeMap<HostId, HostFlow>,
}

/// There while a QP leads to the host that ever sent something.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostFlow {
    pub taken_bytes: u64,
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

impl HostFlow {
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

    /// Takes the one out that is called next. Less than an allowance makes no difference between
    /// vNICs.
    pub fn next(&mut self) -> Option<QpId> {
        let taken =
            |vnic: &u32| self.vnic_queues.get(vnic).map_or(0, |vnic_queue| vnic_queue.taken_bytes / ALLOWANCE_BYTES);
        let (place, _) = self.ring.iter().enumerate().min_by_key(|(_, vnic)| taken(vnic))?;
        let vnic = self.ring.remove(place)?;
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
    pub fn admits(&self, vnic: u32, bytes_max: u64) -> bool {
        if self.taken_bytes >= 2 * bytes_max {
            return false;
        }
        let own_bytes = || self.vnic_queues.get(&vnic).map_or(0, |vnic_queue| vnic_queue.taken_bytes);
        self.taken_bytes < bytes_max || own_bytes() < bytes_max / SMALL_SHARE
    }

    pub fn account(&mut self, vnic: u32, before: u64, after: u64) {
        let vnic_queue = self.vnic_queues.entry(vnic).or_default();
        vnic_queue.taken_bytes = vnic_queue.taken_bytes + after - before;
        self.taken_bytes = self.taken_bytes + after - before;
    }
}
