//! Counts, as the control thread gives them: vNICs by pages, and those of the host as a whole.
use crate::admission::tallies::Tally;
use crate::admission::violations::ViolationClass;
use crate::dataplane::meters::{QpMeter, VnicNumbers, WorkerMeter};
use crate::dataplane::totals::Totals;
use freeflow_orchestrator::objects::ResourceAmounts;
use freeflow_verbs::{RateLimit, Shaping};
use std::net::{IpAddr, Ipv6Addr};

/// Where a page ended: after this vNIC, or after a QP of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub vnic: String,
    pub qpn: Option<u32>,
}

/// Work of a vNIC, and its limits.
pub(crate) struct VnicMeter {
    pub id: String,
    pub title: String,
    pub tenant: String,
    pub network: String,
    pub address: IpAddr,
    pub address6: Option<Ipv6Addr>,
    pub numbers: VnicNumbers,
    pub malformed_messages: u64,
    /// Its use of the router.
    pub used: ResourceAmounts,
    pub shaping: Shaping,
    /// Of all vNICs of its tenant and class.
    pub tenant_limit: RateLimit,
    pub is_metered: bool,
    /// Those that were asked for.
    pub qps: Vec<QpMeter>,
}

pub(crate) struct MeterPage {
    pub vnics: Vec<VnicMeter>,
    pub next: Option<Position>,
    /// When they were read, by a clock that only counts, nanoseconds.
    pub read_ns: u64,
}

/// Counts of the host as a whole.
pub(crate) struct HostMeter {
    pub host: String,
    pub uptime_s: u64,
    pub mode: &'static str,
    pub vnic_count: u64,
    pub peer_count: u64,
    pub connected_peer_count: u64,
    pub revision: u64,
    pub lost_audit_lines: u64,
    /// In order of name.
    pub networks: Vec<NetworkMeter>,
    /// Violations in vain that are put down to no network, for each of [`ViolationClass::ALL`].
    pub violations: [u64; ViolationClass::ALL.len()],
    /// By rule (the empty name: the networks' own `access`), tenant and network (empty: of none
    /// that is known); where nothing is, nothing was refused.
    pub access: Vec<([String; 3], Tally)>,
    pub cm_connections: u64,
    pub worker: WorkerMeter,
}

/// Work of all vNICs of a network, those that are gone too.
#[derive(Default)]
pub(crate) struct NetworkMeter {
    pub tenant: String,
    pub network: String,
    pub totals: Totals,
    /// Violations in vain, for each of [`ViolationClass::ALL`].
    pub violations: [u64; ViolationClass::ALL.len()],
}
