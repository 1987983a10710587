//! Numbers that the worker gives when it is asked: vNICs, QPs, totals.
use crate::admission::access::{AccessPolicy, Rules};
use crate::admission::tallies::Tallies;
use crate::dataplane::reasons::Reason;
use crate::dataplane::slow_path_counts::{QpSlowPath, SlowPathCounts};
use crate::dataplane::totals::Totals;
use freeflow_engine::{QpStatus, QpTraffic, RefusalCounts, Throttled, Usage, VnicCounters};
use freeflow_protocol::admin::{Counters, Named, QpPath};
use freeflow_verbs::{Gid, NetworkId, QpState, QpType};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// The worker's numbers of a vNIC.
#[derive(Clone, Copy, Default)]
pub struct VnicNumbers {
    pub usage: Usage,
    pub counters: VnicCounters,
    pub slow_path: SlowPathCounts,
    pub blocked_copies: u64,
    /// Its bounce buffers, bytes.
    pub bounce_bytes: u64,
    pub is_failed: bool,
    /// Which worker copies for it.
    pub worker: u32,
    /// Refusals by quotas.
    pub refusals: RefusalCounts,
    /// Waits for rate limits.
    pub throttled: Throttled,
}

impl VnicNumbers {
    pub fn counters(&self, malformed_messages: u64) -> Counters {
        let engine = &self.counters;
        Counters {
            messages: engine.messages,
            bytes: engine.bytes,
            direct_messages: engine.direct_messages,
            direct_bytes: engine.direct_bytes,
            slow_path_bytes: self.slow_path.bytes(),
            blocked_copies: self.blocked_copies,
            completions_with_error: engine.completions_with_error,
            rnr_naks: engine.rnr_naks,
            retries_exceeded: engine.retries_exceeded,
            remote_access_errors: engine.remote_access_errors,
            malformed_descriptors: engine.malformed_descriptors,
            malformed_messages,
            undeliverable: engine.undeliverable,
        }
    }
}

/// QPs that do something past the router now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirectCounts {
    pub direct_ring_qps: u32,
    pub grant_qps: u32,
}

/// A QP, its vNIC by the engine's name.
pub(crate) struct QpRow {
    pub look: QpStatus,
    pub direct_ring: bool,
    pub grants: bool,
    pub path: QpPath,
    pub reason: Option<Reason>,
    pub traffic: QpTraffic,
    pub slow_path: QpSlowPath,
}

/// A page of QPs in order of number, and whether there are more.
pub(crate) struct QpPage {
    pub rows: Vec<QpRow>,
    pub more: bool,
}

pub(crate) const fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_SEND",
        QpType::XrcReceive => "XRC_RECV",
    }
}

pub(crate) const fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::ReadyToReceive => "RTR",
        QpState::ReadyToSend => "RTS",
        QpState::SqDrain => "SQD",
        QpState::SqError => "SQE",
        QpState::Error => "ERR",
    }
}

pub(crate) fn address(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| IpAddr::V6(Ipv6Addr::from(gid.0)), IpAddr::V4)
}

/// Traffic of a QP, and its state.
#[derive(Clone, Debug)]
pub(crate) struct QpMeter {
    pub qpn: u32,
    pub qp_type: &'static str,
    pub state: &'static str,
    pub peer: Option<(IpAddr, u32)>,
    pub path: QpPath,
    pub traffic: QpTraffic,
    pub slow_path: QpSlowPath,
    pub throttled: Throttled,
}

/// How many QPs of a vNIC take a path, and why not a better one.
pub(crate) type PathCounts = BTreeMap<(QpPath, Option<Reason>), u64>;

/// The worker's record of a vNIC.
pub(crate) struct MeteredVnic {
    pub numbers: VnicNumbers,
    pub is_metered: bool,
    pub qps: Vec<QpMeter>,
}

/// vNICs in the order in which they were asked about, up to where the page is full.
pub(crate) struct MeteredVnics {
    pub vnics: Vec<MeteredVnic>,
    /// Where the last one has more QPs: its index and its last QP.
    pub end: Option<(usize, u32)>,
}

/// The worker's part of `Status`.
pub(crate) struct WorkerStatus {
    pub usage: Usage,
    /// Of the vNICs that were asked about.
    pub numbers: Vec<VnicNumbers>,
    pub direct: DirectCounts,
    pub worker_count: u32,
    pub moved_bytes: u64,
    pub cpu_us: u64,
}

/// Counts of a thread, and the rules that they belong to.
#[derive(Clone, Default)]
pub(crate) struct AccessCounts {
    pub rules: Option<Arc<Rules>>,
    pub tallies: Tallies,
}

impl AccessCounts {
    pub fn by(access: &AccessPolicy) -> Self {
        Self { rules: access.rules().cloned(), tallies: access.tallies().clone() }
    }
}

#[derive(Default)]
pub(crate) struct WorkerMeter {
    pub usage: Usage,
    pub cpu_us: u64,
    pub moved_bytes: u64,
    /// Packets that were received and that no QP acted upon, by reason.
    pub drops: Vec<Named>,
    pub totals: BTreeMap<NetworkId, Totals>,
    pub access: AccessCounts,
}
