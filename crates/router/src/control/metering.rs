//! Counts for the API: vNICs a few at a time, with or without their queue pairs, and those of the
//! host as a whole.
//!
//! A page costs the worker a bounded time: [`PAGE_VNICS_MAX`] vNICs, some QPs, and a look at each session there is.
use crate::admission::access::Rules;
use crate::admission::tallies::Tally;
use crate::admission::violations::ViolationClass;
use crate::api::meters::{HostMeter, MeterPage, NetworkMeter, Position, VnicMeter};
use crate::config::Mode;
use crate::control::resources;
use crate::control::shards::of_shard;
use crate::control::thread::Control;
use crate::control::vnic_entry::VnicEntry;
use crate::dataplane::command::{CountPaths, MeterHost, MeterVnics};
use crate::dataplane::meters::{AccessCounts, MeteredVnic, MeteredVnics, PathCounts, VnicNumbers, WorkerMeter};
use crate::dataplane::totals::Totals;
use freeflow_orchestrator::NetworkEntry;
use freeflow_orchestrator::objects::ResourceAmounts;
use freeflow_verbs::{NetworkId, RateLimit};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

const PAGE_VNICS_MAX: usize = 128;
/// vNICs that are passed over for one page, because they may not be seen.
const LOOK_VNICS_MAX: usize = 1024;

/// Without what the worker knows.
fn meter_of(entry: &VnicEntry, tenant: &str, tenant_limit: RateLimit) -> VnicMeter {
    let record = &entry.record;
    VnicMeter {
        id: record.id.clone(),
        title: record.name.clone(),
        tenant: tenant.to_owned(),
        network: record.network.clone(),
        address: record.address.into(),
        address6: record.address6,
        numbers: VnicNumbers::default(),
        malformed_messages: entry.malformed_messages,
        used: ResourceAmounts::default(),
        shaping: entry.shaping,
        tenant_limit,
        is_metered: false,
        qps: Vec::new(),
    }
}

fn violations_of(network: Option<NetworkId>, counts: &[AccessCounts]) -> [u64; ViolationClass::ALL.len()] {
    ViolationClass::ALL.map(|class| counts.iter().filter_map(|by| by.tallies.violations.get(&(network, class))).sum())
}

impl Control {
    /// vNICs after a position. `tenants`: whose; `None`: all.
    pub(crate) fn meter_page(
        &mut self,
        after: Option<Position>,
        with_qps: bool,
        tenants: Option<&BTreeSet<String>>,
        then: impl FnOnce(MeterPage) + Send + 'static,
    ) {
        let is_first = after.is_none();
        let (begin, qpn) = match after {
            None => (Bound::Unbounded, None),
            Some(Position { vnic, qpn: None }) => (Bound::Excluded(vnic), None),
            Some(Position { vnic, qpn }) => (Bound::Included(vnic), qpn),
        };
        // A vNIC that has gone since has no QPs left to go on with.
        let qpn = match &begin {
            Bound::Included(vnic) if self.vnics_by_id.contains_key(vnic) => qpn,
            _ => None,
        };
        let tenant_limits: BTreeMap<_, _> = self.state.tenant_limits().into_iter().collect();
        let (mut vnics, mut ids, mut next) = (Vec::new(), Vec::new(), None);
        for (looked, (id, &key)) in self.vnics_by_id.range::<String, _>((begin, Bound::Unbounded)).enumerate() {
            if looked == LOOK_VNICS_MAX || ids.len() == PAGE_VNICS_MAX {
                break;
            }
            next = Some(id.clone());
            let Some(entry) = self.vnics.get(key) else { continue };
            let tenant = self.state.network(&entry.record.network).map_or("", |network| network.tenant());
            if tenants.is_some_and(|tenants| !tenants.contains(tenant)) {
                continue;
            }
            ids.push(entry.engine_id);
            let of_tenant = entry.shaping.tenant.and_then(|id| tenant_limits.get(&id).copied());
            vnics.push(meter_of(entry, tenant, of_tenant.unwrap_or_default()));
        }
        let is_more =
            |id: &String| self.vnics_by_id.range::<String, _>((Bound::Excluded(id), Bound::Unbounded)).next().is_some();
        let next = next.filter(is_more).map(|vnic| Position { vnic, qpn: None });
        if ids.is_empty() {
            return then(MeterPage { vnics, next, read_ns: freeflow_shm::monotonic_ns() });
        }
        let (first, order): (freeflow_engine::VnicId, Vec<u8>) =
            (ids[0], ids.iter().map(|vnic| vnic.shard()).collect());
        let command = |shard| MeterVnics {
            vnics: of_shard(&ids, shard),
            with_qps,
            after_qpn: qpn.filter(|_| first.shard() == shard),
            counts_direct: is_first,
        };
        self.ask_all(command, move |control, of_shards| {
            let MeteredVnics { vnics: counted, end } = MeteredVnics::merge(of_shards, &order);
            let (mut vnics, mut next) = (vnics, next);
            if let Some((index, qpn)) = end {
                next = Some(Position { vnic: vnics[index].id.clone(), qpn: Some(qpn) });
            } else if let Some(last) = counted.len().checked_sub(1).filter(|_| counted.len() < vnics.len()) {
                next = Some(Position { vnic: vnics[last].id.clone(), qpn: None });
            }
            vnics.truncate(counted.len());
            for (vnic, MeteredVnic { numbers, is_metered, qps }) in vnics.iter_mut().zip(counted) {
                let entry = control.vnics_by_id.get(&vnic.id).and_then(|&key| control.vnics.get(key));
                vnic.used = entry.map(|entry| resources::used(entry, &numbers)).unwrap_or_default();
                (vnic.numbers, vnic.is_metered, vnic.qps) = (numbers, is_metered, qps);
            }
            then(MeterPage { vnics, next, read_ns: freeflow_shm::monotonic_ns() });
        });
    }

    /// Of each vNIC that has QPs, by id.
    pub(crate) fn meter_paths(&mut self, then: impl FnOnce(BTreeMap<String, PathCounts>) + Send + 'static) {
        self.ask_all(
            |_| CountPaths { rest: None, counts: BTreeMap::new() },
            move |control, counts| {
                let mut counts: BTreeMap<_, _> = counts.into_iter().flatten().collect();
                let named =
                    |(_, vnic): (_, &VnicEntry)| Some((vnic.record.id.clone(), counts.remove(&vnic.engine_id)?));
                then(control.vnics.iter().filter_map(named).collect());
            },
        );
    }

    pub(crate) fn meter_host(&mut self, then: impl FnOnce(HostMeter) + Send + 'static) {
        self.ask_all(
            |_| MeterHost {},
            move |control, counted| {
                let counted = WorkerMeter::sum(counted);
                let meter = control.host_meter(counted);
                then(meter);
            },
        );
    }

    fn host_meter(&mut self, mut worker: WorkerMeter) -> HostMeter {
        let peers = self.peers.status().peers;
        let mut counts = vec![AccessCounts::by(self.cm.access())];
        counts.append(&mut worker.access);
        let networks = self.network_meters(&std::mem::take(&mut worker.totals), &counts);
        let access = self.access_meter(&counts);
        HostMeter {
            host: self.config.host.clone(),
            uptime_s: freeflow_shm::monotonic_ns().saturating_sub(self.started.0) / 1_000_000_000,
            mode: Mode::from(self.mode.mode).name(),
            vnic_count: self.vnics.len() as u64,
            peer_count: peers.len() as u64,
            connected_peer_count: peers.iter().filter(|peer| peer.state == "up").count() as u64,
            revision: self.state.revision().0,
            lost_audit_lines: self.audit.lost_lines(),
            networks,
            violations: violations_of(None, &counts),
            access,
            cm_connections: self.cm.counts().established_count.into(),
            worker,
        }
    }

    fn network_meters(&self, totals: &BTreeMap<NetworkId, Totals>, counts: &[AccessCounts]) -> Vec<NetworkMeter> {
        let meter = |network: &NetworkEntry| NetworkMeter {
            tenant: network.tenant().to_owned(),
            network: network.name().to_owned(),
            totals: totals.get(&network.id).copied().unwrap_or_default(),
            violations: violations_of(Some(network.id), counts),
        };
        self.state.networks().map(meter).collect()
    }

    /// Of both threads; of networks that are there.
    fn access_meter(&self, counts: &[AccessCounts]) -> Vec<([String; 3], Tally)> {
        let networks: BTreeMap<NetworkId, &NetworkEntry> =
            self.state.networks().map(|network| (network.id, network)).collect();
        let mut sums: BTreeMap<[String; 3], Tally> = BTreeMap::new();
        let key = |rule: &str, network: Option<&NetworkEntry>| {
            let (tenant, name) = network.map_or(("", ""), |network| (network.tenant(), network.name()));
            [rule, tenant, name].map(str::to_owned)
        };
        for network in networks.values() {
            sums.insert(key("", Some(network)), Tally::default());
        }
        let rules = counts[0].rules.as_deref().map_or(&[][..], Rules::names);
        for rule in rules {
            sums.insert(key(rule, None), Tally::default());
        }
        for AccessCounts { rules: by, tallies } in counts {
            for (&(rule, network), tally) in &tallies.refused {
                let name = rule.map_or(Some(""), |rule| by.as_ref()?.name_of(rule));
                let network = network.map(|network| networks.get(&network).copied());
                // A network that is gone in the meantime has no lines.
                let (Some(name), false) = (name, network == Some(None)) else { continue };
                if !name.is_empty() && rules.binary_search_by(|rule| rule.as_str().cmp(name)).is_err() {
                    continue;
                }
                let sum = sums.entry(key(name, network.flatten())).or_default();
                sum.refusals += tally.refusals;
                sum.disconnections += tally.disconnections;
            }
        }
        sums.into_iter().collect()
    }
}
