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

/// QPs of one page of the list: each takes a few hundred bytes.
pub(crate) const LIST_QPS_MAX: usize = 64;

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

impl MeteredVnics {
    /// Those of several shards, in an order that says whose each is, up to where one of them is full.
    pub fn merge(of_shards: Vec<Self>, order: &[u8]) -> Self {
        let mut of_shards: Vec<_> =
            of_shards.into_iter().map(|page| (page.vnics.into_iter().enumerate(), page.end)).collect();
        let (mut vnics, mut end) = (Vec::new(), None);
        for &shard in order {
            let Some((rest, end_of_shard)) = of_shards.get_mut(usize::from(shard)) else { break };
            let Some((index, vnic)) = rest.next() else { break };
            vnics.push(vnic);
            if let Some((_, qpn)) = end_of_shard.filter(|&(last, _)| last == index) {
                end = Some((vnics.len() - 1, qpn));
                break;
            }
        }
        Self { vnics, end }
    }
}

impl QpPage {
    /// One page of those of several shards, each of which began behind the same number.
    pub fn merge(pages: Vec<Self>) -> Self {
        let pages = pages.into_iter().map(|page| (page.rows, page.more)).collect();
        let (rows, more) = merge_pages(pages, |row: &QpRow| row.look.qpn.0, LIST_QPS_MAX);
        Self { rows, more }
    }
}

/// The worker's part of `Status`.
#[derive(Default)]
pub(crate) struct WorkerStatus {
    pub usage: Usage,
    /// Of the vNICs that were asked about.
    pub numbers: Vec<VnicNumbers>,
    pub direct: DirectCounts,
    pub moved_bytes: u64,
    pub cpu_us: u64,
}

impl WorkerStatus {
    /// Of all workers of a router.
    pub fn sum(of_workers: Vec<Self>) -> Self {
        of_workers.into_iter().fold(Self::default(), |mut sum, more| {
            sum.usage = sum.usage.plus(&more.usage);
            sum.numbers.extend(more.numbers);
            sum.direct.direct_ring_qps += more.direct.direct_ring_qps;
            sum.direct.grant_qps += more.direct.grant_qps;
            sum.moved_bytes += more.moved_bytes;
            sum.cpu_us += more.cpu_us;
            sum
        })
    }
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
    /// Of each worker.
    pub access: Vec<AccessCounts>,
}

impl WorkerMeter {
    /// Of all workers of a router.
    pub fn sum(of_workers: Vec<Self>) -> Self {
        of_workers.into_iter().fold(Self::default(), |mut sum, more| {
            sum.usage = sum.usage.plus(&more.usage);
            sum.cpu_us += more.cpu_us;
            sum.moved_bytes += more.moved_bytes;
            add_named(&mut sum.drops, more.drops);
            for (network, totals) in &more.totals {
                sum.totals.entry(*network).or_default().add_totals(totals);
            }
            sum.access.extend(more.access);
            sum
        })
    }
}

/// One page, in order of QPN, of those of several shards, each with whether there is more behind it.
pub(crate) fn merge_pages<T>(pages: Vec<(Vec<T>, bool)>, qpn: impl Fn(&T) -> u32, count_max: usize) -> (Vec<T>, bool) {
    let more = pages.iter().any(|(_, more)| *more);
    // Behind the end of a page that has more there may be others of its shard.
    let ends = pages.iter().filter(|(_, more)| *more).filter_map(|(rows, _)| rows.last().map(&qpn));
    let end = ends.min();
    let mut rows: Vec<T> = pages.into_iter().flat_map(|(rows, _)| rows).collect();
    rows.retain(|row| end.is_none_or(|end| qpn(row) <= end));
    rows.sort_unstable_by_key(&qpn);
    let is_cut = rows.len() > count_max;
    rows.truncate(count_max);
    (rows, more || is_cut)
}

/// Adds counts to those of the same names.
pub(crate) fn add_named(sum: &mut Vec<Named>, more: Vec<Named>) {
    for (name, count) in more {
        match sum.iter_mut().find(|(known, _)| *known == name) {
            Some((_, total)) => *total += count,
            None => sum.push((name, count)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page with vNICs that are known by how many QPs they hold.
    fn page(qps: &[u32], end: Option<(usize, u32)>) -> MeteredVnics {
        let vnic = |&qps: &u32| {
            let usage = Usage { qps, ..Usage::default() };
            MeteredVnic { numbers: VnicNumbers { usage, ..VnicNumbers::default() }, is_metered: false, qps: Vec::new() }
        };
        MeteredVnics { vnics: qps.iter().map(vnic).collect(), end }
    }

    fn merged(pages: Vec<MeteredVnics>, order: &[u8]) -> (Vec<u32>, Option<(usize, u32)>) {
        let MeteredVnics { vnics, end } = MeteredVnics::merge(pages, order);
        (vnics.iter().map(|vnic| vnic.numbers.usage.qps).collect(), end)
    }

    #[test]
    fn pages_of_qps_end_where_the_first_of_them_does() {
        let merged = |pages| merge_pages(pages, |&qpn: &u32| qpn, 4);
        assert_eq!(merged(vec![(vec![2, 4], false), (vec![1, 3], false)]), (vec![1, 2, 3, 4], false));
        assert_eq!(merged(vec![(vec![2, 8], true), (vec![1, 5, 9], false)]), (vec![1, 2, 5, 8], true));
        assert_eq!(merged(vec![(vec![2, 4, 6], false), (vec![1, 3], false)]), (vec![1, 2, 3, 4], true));
    }

    #[test]
    fn pages_of_shards_end_where_the_first_of_them_is_full() {
        let order = [1, 0, 1, 0];
        assert_eq!(merged(vec![page(&[2, 4], None), page(&[1, 3], None)], &order), (vec![1, 2, 3, 4], None));
        // A vNIC with more QPs, and one that found no room at all.
        assert_eq!(
            merged(vec![page(&[2, 4], None), page(&[1, 3], Some((1, 77)))], &order),
            (vec![1, 2, 3], Some((2, 77)))
        );
        assert_eq!(merged(vec![page(&[2, 4], None), page(&[1], None)], &order), (vec![1, 2], None));
        assert_eq!(merged(vec![page(&[2, 4], Some((0, 9))), page(&[1, 3], None)], &order), (vec![1, 2], Some((1, 9))));
    }
}
