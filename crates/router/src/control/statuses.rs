//! Statuses of objects: what is so, as this thread and the worker know it.
use crate::config::Mode;
use crate::control::resources;
use crate::control::thread::Control;
use crate::control::vnic_entry::directory;
use crate::dataplane::meters::VnicNumbers;
use freeflow_engine::{Refused, VnicId};
use freeflow_orchestrator::access::{Known, Party, Selectors};
use freeflow_orchestrator::objects::{
    AccessRuleStatus, AnyObject, GroupStatus, HostStatus, NetworkStatus, ObjectKind, QosClassStatus, QuotaStatus,
    VnicStatus,
};
use freeflow_orchestrator::{NetworkEntry, State, VnicEntry};
use freeflow_protocol::admin::PeerStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Members that a group's status names; others are counted.
const MEMBER_COUNT_MAX: usize = 1000;
/// Hosts that a Host's health names; others are counted.
const NAMED_PEER_COUNT_MAX: usize = 3;
/// Work done at a time: comparisons, vNICs looked at, vNICs that the worker is asked about.
const SLICE_WORK_MAX: u64 = 1 << 16;
const SLICE_COUNT_MAX: usize = 1024;
const SLICE_ASKED_MAX: usize = 256;

/// Counts for one object that take a look at all vNICs.
enum Tally {
    None,
    Group { tenant: String, selectors: Selectors, members: GroupStatus },
    Class { name: String, vnic_count: u32 },
    Quota { name: String, refusal_count: u64 },
}

impl Tally {
    fn of(object: &AnyObject) -> Self {
        match object {
            AnyObject::Group(group) => Self::Group {
                tenant: group.spec.tenant.clone(),
                selectors: Selectors::new(&group.spec.members),
                members: GroupStatus::default(),
            },
            AnyObject::QosClass(class) => Self::Class { name: class.metadata.name.clone(), vnic_count: 0 },
            AnyObject::Quota(quota) => Self::Quota { name: quota.metadata.name.clone(), refusal_count: 0 },
            _ => Self::None,
        }
    }

    /// Looks at a vNIC. Returns what that cost, and whether the worker has to be asked about it.
    fn look_at(&mut self, state: &State, vnic: &VnicEntry, network: &NetworkEntry) -> (u64, bool) {
        match self {
            Self::None => (0, false),
            Self::Group { tenant, .. } if tenant != network.tenant() => (1, false),
            Self::Group { selectors, members, .. } => {
                let known = Some(Known { vnic: vnic.id(), labels: &vnic.object.metadata.labels });
                let party = Party { network: vnic.network(), addresses: &vnic.object.spec.addresses, known };
                if selectors.select(&party) {
                    members.vnic_count += 1;
                    if members.vnics.len() < MEMBER_COUNT_MAX {
                        members.vnics.push(vnic.id().to_owned());
                    }
                }
                (u64::from(selectors.work()), false)
            }
            Self::Class { name, vnic_count } => {
                *vnic_count += u32::from(state.class_name_of(vnic) == Some(name));
                (1, false)
            }
            Self::Quota { name, .. } => {
                let of_network = network.object.spec.quota.as_deref();
                (1, of_network == Some(name) || state.quota_name_of(vnic) == Some(name))
            }
        }
    }

    /// Where a quota has its say: by a vNIC, by its network.
    fn count_refusals(&mut self, state: &State, id: &str, numbers: &VnicNumbers) {
        let Self::Quota { name: quota, refusal_count } = self else { return };
        let sum = |refused: &Refused| refused.qps + refused.cqs + refused.mrs + refused.registered_bytes;
        let Some(vnic) = state.vnic(id) else { return };
        let of_network = state.network(vnic.network()).and_then(|network| network.object.spec.quota.as_ref());
        if state.quota_name_of(vnic) == Some(quota) {
            *refusal_count += sum(&numbers.refusals.by_vnic);
        }
        if of_network == Some(quota) {
            *refusal_count += sum(&numbers.refusals.by_network);
        }
    }
}

type Then = Box<dyn FnOnce(&mut Control, Vec<AnyObject>) + Send>;

/// Objects whose statuses are being found out.
struct Gathering {
    objects: Vec<AnyObject>,
    /// Tenants of the networks and vNICs that are included; `None`: all.
    tenants: Option<BTreeSet<String>>,
    /// Of each object.
    tallies: Vec<Tally>,
    /// Of the vNICs among the objects.
    numbers: BTreeMap<String, VnicNumbers>,
    /// How far the look at all vNICs has come.
    after: Option<String>,
    then: Then,
}

impl Gathering {
    fn includes(&self, network: &NetworkEntry) -> bool {
        self.tenants.as_ref().is_none_or(|tenants| tenants.contains(network.tenant()))
    }
}

impl Control {
    /// The same objects with their statuses, some of which the worker knows alone: `then` runs on
    /// this thread, when it has answered. Objects that are gone meanwhile come without. What needs
    /// a look at all vNICs is done a slice at a time, with time for others in between. `tenants`:
    /// whose networks and vNICs statuses may name; `None`: all.
    pub(crate) fn with_status(
        &mut self,
        objects: Vec<AnyObject>,
        tenants: Option<BTreeSet<String>>,
        then: impl FnOnce(&mut Control, Vec<AnyObject>) + Send + 'static,
    ) {
        let tallies: Vec<Tally> = objects.iter().map(Tally::of).collect();
        let vnics = objects.iter().filter(|object| object.kind() == ObjectKind::Vnic);
        let asked = vnics.filter_map(|object| self.engine_id_of(object.name())).collect();
        let (numbers, after, then) = (BTreeMap::new(), None, Box::new(then));
        let gathering = Gathering { objects, tenants, tallies, numbers, after, then };
        self.ask_numbers(asked, gathering, |control, mut gathering, numbers| {
            gathering.numbers = numbers;
            if gathering.tallies.iter().all(|tally| matches!(tally, Tally::None)) {
                control.publish_statuses(gathering);
            } else {
                control.look_at_vnics(gathering);
            }
        });
    }

    fn engine_id_of(&self, id: &str) -> Option<(String, VnicId)> {
        Some((id.to_owned(), self.vnics.get(*self.vnics_by_id.get(id)?)?.engine_id))
    }

    /// At once if there is nothing to ask.
    fn ask_numbers(
        &mut self,
        asked: Vec<(String, VnicId)>,
        gathering: Gathering,
        next: impl FnOnce(&mut Control, Gathering, BTreeMap<String, VnicNumbers>) + Send + 'static,
    ) {
        if asked.is_empty() {
            return next(self, gathering, BTreeMap::new());
        }
        self.after_numbers(asked, gathering, next);
    }

    fn after_numbers(
        &mut self,
        asked: Vec<(String, VnicId)>,
        gathering: Gathering,
        next: impl FnOnce(&mut Control, Gathering, BTreeMap<String, VnicNumbers>) + Send + 'static,
    ) {
        let (ids, vnics): (Vec<String>, Vec<VnicId>) = asked.into_iter().unzip();
        self.read_vnics(vnics, false, move |control, numbers| {
            next(control, gathering, ids.into_iter().zip(numbers).collect());
        });
    }

    fn look_at_vnics(&mut self, mut gathering: Gathering) {
        let (mut work, mut asked, mut last) = (0, Vec::new(), None);
        let mut is_all = true;
        for (count, vnic) in self.state.vnics_after(gathering.after.as_deref()).enumerate() {
            if work >= SLICE_WORK_MAX || count >= SLICE_COUNT_MAX || asked.len() >= SLICE_ASKED_MAX {
                is_all = false;
                break;
            }
            last = Some(vnic.id());
            let network = self.state.network(vnic.network()).filter(|network| gathering.includes(network));
            let Some(network) = network else { continue };
            let mut is_asked = false;
            for tally in &mut gathering.tallies {
                let (cost, asks) = tally.look_at(&self.state, vnic, network);
                work += cost;
                is_asked |= asks;
            }
            asked.extend(is_asked.then(|| self.engine_id_of(vnic.id())).flatten());
        }
        gathering.after = last.map(str::to_owned);
        let next = move |control: &mut Control, mut gathering: Gathering, numbers: BTreeMap<String, VnicNumbers>| {
            for (id, numbers) in &numbers {
                gathering.tallies.iter_mut().for_each(|tally| tally.count_refusals(&control.state, id, numbers));
            }
            if is_all { control.publish_statuses(gathering) } else { control.look_at_vnics(gathering) }
        };
        if is_all {
            self.ask_numbers(asked, gathering, next);
        } else {
            // By way of the worker, so that others have their turn on this thread.
            self.after_numbers(asked, gathering, next);
        }
    }

    fn publish_statuses(&mut self, mut gathering: Gathering) {
        let mut networks: BTreeMap<(ObjectKind, &str), Vec<String>> = BTreeMap::new();
        let wants = |object: &AnyObject| matches!(object.kind(), ObjectKind::QosClass | ObjectKind::Quota);
        if gathering.objects.iter().any(wants) {
            for network in self.state.networks().filter(|network| gathering.includes(network)) {
                let spec = &network.object.spec;
                for (kind, named) in [(ObjectKind::QosClass, &spec.qos_class), (ObjectKind::Quota, &spec.quota)] {
                    if let Some(named) = named {
                        networks.entry((kind, named)).or_default().push(network.name().to_owned());
                    }
                }
            }
        }
        for (object, tally) in gathering.objects.iter_mut().zip(gathering.tallies) {
            let key = (object.kind(), object.name());
            let networks = networks.get(&key).cloned().unwrap_or_default();
            match (object, tally) {
                (AnyObject::Group(group), Tally::Group { members, .. }) => group.status = Some(members),
                (AnyObject::QosClass(class), Tally::Class { vnic_count, .. }) => {
                    class.status = Some(QosClassStatus { networks, vnic_count });
                }
                (AnyObject::Quota(quota), Tally::Quota { refusal_count, .. }) => {
                    quota.status = Some(QuotaStatus { networks, refusal_count });
                }
                (AnyObject::Network(network), _) => {
                    network.status = self.state.network(&network.metadata.name).map(network_status);
                }
                (AnyObject::AccessRule(rule), _) => {
                    let rules = self.cm.access().rules();
                    let counts = rules.and_then(|rules| rules.counts_of(Some(&rule.metadata.name)));
                    let counts = counts.map(|counts| counts.get()).unwrap_or_default();
                    rule.status = Some(AccessRuleStatus {
                        refusal_count: counts.refusals,
                        disconnection_count: counts.disconnections,
                    });
                }
                (AnyObject::Vnic(vnic), _) => {
                    let numbers = gathering.numbers.get(&vnic.metadata.name);
                    vnic.status = self.declared_vnic_status(&vnic.metadata.name, numbers);
                }
                (AnyObject::Host(host), _) => host.status = Some(self.host_status()),
                _ => {}
            }
        }
        (gathering.then)(self, gathering.objects);
    }

    fn declared_vnic_status(&self, id: &str, numbers: Option<&VnicNumbers>) -> Option<VnicStatus> {
        let vnic = self.state.vnic(id)?;
        let entry = self.vnics_by_id.get(id).and_then(|&key| self.vnics.get(key));
        let tenant = self.state.network(vnic.network())?.tenant().to_owned();
        let is_failed = numbers.is_some_and(|numbers| numbers.is_failed);
        let phase = match entry {
            None => "Pending",
            Some(_) if is_failed => "Failed",
            Some(_) => "Ready",
        };
        let numbers = numbers.copied().unwrap_or_default();
        Some(VnicStatus {
            tenant,
            title: vnic.title.clone(),
            directory: directory(&self.config.run_dir, id).display().to_string(),
            phase: phase.into(),
            reason: entry.and_then(|entry| entry.failed).filter(|_| is_failed).map(str::to_owned),
            session_count: numbers.usage.sessions,
            qp_count: numbers.usage.qps,
            cq_count: numbers.usage.cqs,
            mr_count: numbers.usage.mrs,
            registered_bytes: numbers.usage.registered_bytes,
            conditions: self.state.conditions_of(vnic).into_iter().chain(events_of(&numbers)).collect(),
            sent_bytes: numbers.counters.sent.bytes,
            received_bytes: numbers.counters.received.bytes,
            resources: entry.map(|entry| resources::of_vnic(entry, &numbers)),
        })
    }

    fn host_status(&self) -> HostStatus {
        let peers = self.peers.status().peers;
        HostStatus {
            address: self.external.host_address(),
            backends: vec!["softroce".into()],
            mode: Mode::from(self.mode.mode).name().into(),
            reason: self.mode.reason.clone(),
            latency_class: self.state.load(|id| self.occupied.contains_key(id)).class().name().into(),
            health: health(self.faults_found.clone(), &peers),
            peer_count: peers.len() as u32,
            connected_peer_count: peers.iter().filter(|peer| is_connected(peer)).count() as u32,
            uptime_s: freeflow_shm::monotonic_ns().saturating_sub(self.started.0) / 1_000_000_000,
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }
}

fn is_connected(peer: &PeerStatus) -> bool {
    peer.state == "up"
}

/// `Ready`, or what is wrong: here, and with the way to other hosts.
fn health(mut wrong: Vec<String>, peers: &[PeerStatus]) -> String {
    let mut lost = peers.iter().filter(|peer| !is_connected(peer)).map(|peer| peer.host.as_str());
    let named = lost.by_ref().take(NAMED_PEER_COUNT_MAX).collect::<Vec<_>>();
    let more = lost.count();
    if !named.is_empty() {
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        wrong.push(format!("not connected to {}{more} of {} hosts", named.join(", "), peers.len()));
    }
    if wrong.is_empty() { "Ready".into() } else { wrong.join("; ") }
}

/// Refusals and waits of a vNIC: sentences for people.
fn events_of(numbers: &VnicNumbers) -> Vec<String> {
    let mut lines = Vec::new();
    if numbers.blocked_copies > 0 {
        lines.push(format!(
            "its shared memory blocked the worker {} times; for a while after each only its slow-path copier reaches it",
            numbers.blocked_copies
        ));
    }
    for (whose, refused) in [("the vNIC's", numbers.refusals.by_vnic), ("the network's", numbers.refusals.by_network)] {
        for (what, count) in [
            ("QPs", refused.qps),
            ("CQs", refused.cqs),
            ("memory regions", refused.mrs),
            ("registered bytes", refused.registered_bytes),
            ("other objects", refused.others),
        ] {
            if count > 0 {
                let times = if count == 1 { "once".into() } else { format!("{count} times") };
                lines.push(format!("refused {times} with ENOMEM: more {what} than {whose} limit allows"));
            }
        }
    }
    let throttled = numbers.throttled;
    if throttled.waits > 0 {
        let seconds = throttled.time.0 as f64 / 1e9;
        lines.push(format!("held back by limits of rate {} times, {seconds:.3} s in all", throttled.waits));
    }
    lines
}

fn network_status(network: &NetworkEntry) -> NetworkStatus {
    let gateway6 = network.assigned6().map(|range| IpAddr::V6(range.gateway()));
    NetworkStatus {
        gateways: std::iter::once(IpAddr::V4(network.gateway())).chain(gateway6).collect(),
        bridge: network.own_bridge.clone().unwrap_or_default(),
        vnic_count: network.vnic_count(),
        free_address_count: network.free_address_count(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_protocol::admin::PeerCounters;

    fn peer(host: &str, state: &str) -> PeerStatus {
        PeerStatus {
            host: host.into(),
            address: [192, 0, 2, 1].into(),
            state: state.into(),
            state_s: 0,
            rtt_us: None,
            icrc: true,
            frames: true,
            sealed: true,
            problem: Some("x".repeat(200)),
            route_count: 0,
            counters: PeerCounters::default(),
        }
    }

    #[test]
    fn health_names_what_is_wrong() {
        let store = || vec!["store: full".to_owned()];
        assert_eq!(health(Vec::new(), &[]), "Ready");
        assert_eq!(health(store(), &[peer("a", "up")]), "store: full");
        let mut peers = vec![peer("a", "up"), peer("b", "dialing")];
        assert_eq!(health(Vec::new(), &peers), "not connected to b of 2 hosts");
        peers.extend(["c", "d", "e", "f"].map(|host| peer(host, "down")));
        assert_eq!(health(store(), &peers), "store: full; not connected to b, c, d and 2 more of 6 hosts");
    }
}
