//! Access rules, as one thread of the router knows them: the worker for queue pairs, the
//! control thread for rdma_cm. Each has an [`AccessPolicy`] of its own, with the same rules; what
//! rules refused and cut is counted in [`Rules`], which they share.
//!
//! The rules' answer about an address (its *profile*) is computed when it is first asked for, and
//! kept until the rules or the address' labels change. Who is on no host that is known is decided
//! by the address alone; of some of them that is kept.
//!
//! Two of two networks are judged by rules across them alone: by other profiles, and never without such a rule.
//!
//! Invariant: rules that are there but do not know a network allow nothing in it, and nothing across to it.
use crate::admission::address_map::AddressMap;
use crate::admission::inter_network::Across;
use crate::admission::tallies::Tallies;
use crate::admission::violations::{Resource, Share, Sum, ViolationClass, Violations};
use freeflow_engine::{AuthorizationRequest, Subject, TrafficKind, Violation};
use freeflow_orchestrator::access::{AccessTable, Known, Party, Profile, RuleIndex, Verdict};
use freeflow_orchestrator::objects::Labels;
use freeflow_verbs::{Duration, Gid, Instant, NetworkId};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Different incidents that wait to be reported, of all vNICs and of one; others are counted by rule only.
const INCIDENT_COUNT_MAX: usize = 4096;
const INCIDENT_OF_VNIC_COUNT_MAX: usize = 16;
/// Addresses without a party whose profiles are kept: who asks for one again and again is not looked up each time.
const UNKNOWN_COUNT_MAX: usize = 1024;
/// In the index of a rule: it is one of those that were in force before, and is not any more.
const WITHDRAWN: u32 = 1 << 31;
/// Between two reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(50);

/// Counts of a rule on this host since the router began.
#[derive(Debug, Default)]
pub struct Counts {
    refusals: AtomicU64,
    disconnections: AtomicU64,
}

/// Values of [`Counts`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounts {
    pub refusals: u64,
    /// Ends of connections on this host.
    pub disconnections: u64,
}

impl Counts {
    pub fn get(&self) -> RuleCounts {
        RuleCounts { refusals: self.refusals.load(Relaxed), disconnections: self.disconnections.load(Relaxed) }
    }
}

/// The rules in force.
#[derive(Debug, Default)]
pub struct Rules {
    table: AccessTable,
    pub address_map: Arc<AddressMap>,
    /// By the rules' indexes.
    counts: Vec<Arc<Counts>>,
    /// Refusals of a network's own `access`, without a rule.
    by_default: Arc<Counts>,
}

impl Rules {
    /// Rules that are there still go on counting.
    pub fn new(table: AccessTable, address_map: AddressMap, before: Option<&Rules>) -> Self {
        let count_of = |name: &String| before.and_then(|before| before.counts_of(Some(name))).cloned();
        let counts = table.rule_names().iter().map(|name| count_of(name).unwrap_or_default()).collect();
        let by_default = before.map(|before| before.by_default.clone()).unwrap_or_default();
        Self { table, address_map: Arc::new(address_map), counts, by_default }
    }

    /// None: of what no rule says anything about.
    pub fn counts_of(&self, rule: Option<&str>) -> Option<&Arc<Counts>> {
        let Some(rule) = rule else { return Some(&self.by_default) };
        self.counts.get(self.index_of(rule)?.0 as usize)
    }

    pub fn name_of(&self, rule: RuleIndex) -> Option<&str> {
        self.table.rule_name(rule)
    }

    fn index_of(&self, rule: &str) -> Option<RuleIndex> {
        let index = self.table.rule_names().binary_search_by(|name| name.as_str().cmp(rule)).ok()?;
        Some(RuleIndex(index as u32))
    }

    /// Of all rules, in their order.
    pub fn names(&self) -> &[String] {
        self.table.rule_names()
    }

    fn count(&self, rule: Option<RuleIndex>) -> &Counts {
        rule.and_then(|rule| self.counts.get(rule.0 as usize)).unwrap_or(&self.by_default)
    }
}

/// The vNIC that has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VnicIdentity {
    /// The vNIC's id.
    pub vnic: String,
    pub labels: Labels,
    /// Its addresses, if it has several: a rule that chooses one of them chooses the vNIC.
    pub addresses: Vec<IpAddr>,
}

/// One that has an address, here or on another host.
struct Entry {
    /// A vNIC of this host: what others announce of its address says nothing.
    is_here: bool,
    /// None: of a host that did not say.
    identity: Option<Arc<VnicIdentity>>,
    /// The rules' answer about it, and their generation.
    profile: Option<(u64, Profile)>,
}

struct Network {
    name: String,
    /// Everybody may talk to everybody, so nobody is looked at.
    is_open: bool,
    /// Some may talk to some of another network: it matters who they are.
    is_joined: bool,
}

/// Kind of a refusal or cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deed {
    Connection,
    Datagram,
    Multicast,
    /// A request of rdma_cm.
    Request,
    /// A connection of queue pairs, or of rdma_cm, that stood.
    Disconnect,
    DisconnectRequest,
}

impl Deed {
    /// Whether an established connection was ended.
    pub fn is_disconnection(self) -> bool {
        matches!(self, Self::Disconnect | Self::DisconnectRequest)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Connection => "connection refused",
            Self::Datagram => "datagram refused",
            Self::Multicast => "multicast refused",
            Self::Request => "rdma_cm request refused",
            Self::Disconnect => "connection disconnected",
            Self::DisconnectRequest => "rdma_cm connection disconnected",
        }
    }
}

/// Something refused or disconnected, for the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    pub deed: Deed,
    pub network: String,
    /// Of who wanted to talk, if it is known.
    pub vnic: Option<String>,
    pub from: Gid,
    pub to: Gid,
    /// The other network that `to` is in, if it is in another one.
    pub target: Option<String>,
    /// None: the network's own `access`, or no rule across the two.
    pub rule: Option<String>,
    /// How often since the last report.
    pub count: u64,
}

/// A policy violation, for the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViolationRecord {
    pub class: ViolationClass,
    pub network: String,
    /// Of who tried, if it is known.
    pub vnic: Option<String>,
    pub from: Gid,
    /// One of them, in words.
    pub peer: String,
    /// The other network whose that is, if it is one's.
    pub owner: Option<String>,
    pub count: u64,
}

/// Two that want to talk.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub from: Key,
    pub to: Key,
    /// One of them is a machine without FreeFlow: it counts as one of the other's network.
    pub is_external: bool,
}

impl Pair {
    fn is_across(&self) -> bool {
        self.from.0 != self.to.0
    }
}

/// An address, and the network that it is in.
pub type Key = (NetworkId, Gid);

const ALLOWED: Verdict = Verdict { allowed: true, rule: None };
const DENIED: Verdict = Verdict { allowed: false, rule: None };

#[derive(Default)]
pub struct AccessPolicy {
    /// None: nobody has said anything, and all may talk within their networks.
    rules: Option<Arc<Rules>>,
    /// Those before: what they allowed and these don't was withdrawn.
    before: Option<Arc<Rules>>,
    generation: u64,
    networks: BTreeMap<NetworkId, Network>,
    parties: HashMap<Key, Entry>,
    /// The rules' answers about addresses that nobody is known to have.
    unknown: HashMap<Key, Profile>,
    /// And of those that talk across networks.
    across: Across,
    /// Comparisons so far, at most: see [`AccessTable::work`].
    work: u64,
    /// Verdicts may have changed, and nobody has been notified yet.
    changed: bool,
    incidents: BTreeMap<(Key, Key, Deed, Option<RuleIndex>), u64>,
    /// The same with names: of rules that are not in force any more.
    named: Vec<Incident>,
    reported_at: Instant,
    violations: Violations,
    /// The same and what was refused, for `/metrics`.
    tallies: Tallies,
}

pub fn address_of(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| IpAddr::V6(Ipv6Addr::from(gid.0)), IpAddr::V4)
}

impl AccessPolicy {
    pub fn set_rules(&mut self, rules: Arc<Rules>) {
        self.name_incidents();
        self.before = self.rules.replace(rules);
        self.renew_tallies();
        self.generation += 1;
        self.unknown.clear();
        self.across.clear();
        self.changed = true;
        self.look_at_networks();
    }

    fn renew_tallies(&mut self) {
        let mut tallies = std::mem::take(&mut self.tallies);
        let index = |before: RuleIndex| {
            let name = self.before.as_ref()?.table.rule_name(before)?;
            self.rules.as_ref()?.index_of(name)
        };
        tallies.renew(index, |network| self.name_of(network).is_some());
        self.tallies = tallies;
    }

    /// Counts of this thread since the router began, of rules and networks that are there.
    pub fn tallies(&self) -> &Tallies {
        &self.tallies
    }

    /// Cost of looking at addresses so far, in comparisons: a bound for the work of one turn.
    pub fn work(&self) -> u64 {
        self.work
    }

    pub fn rules(&self) -> Option<&Arc<Rules>> {
        self.rules.as_ref()
    }

    fn look_at_networks(&mut self) {
        let rules = self.rules.as_ref();
        for network in self.networks.values_mut() {
            network.is_open = rules.is_none_or(|rules| rules.table.is_open(&network.name));
            network.is_joined = rules.is_some_and(|rules| rules.table.is_joined(&network.name));
        }
    }

    /// The name by which rules know a network.
    pub fn set_network(&mut self, network: NetworkId, name: &str) {
        let is_new = self.networks.get(&network).is_none_or(|network| network.name != name);
        if is_new {
            self.networks.insert(network, Network { name: name.into(), is_open: false, is_joined: false });
            // Of its name before.
            self.unknown.clear();
            self.across.clear();
            self.look_at_networks();
            self.changed = true;
        }
    }

    /// A vNIC of this host has this address, or has other labels now.
    pub fn set_vnic(&mut self, network: NetworkId, gid: Gid, identity: Arc<VnicIdentity>) {
        self.set(network, gid, Entry { is_here: true, identity: Some(identity), profile: None });
    }

    pub fn remove_vnic(&mut self, network: NetworkId, gid: Gid) {
        self.remove(network, gid, true);
    }

    /// The address is on another host; who has it, if that host says so.
    pub fn set_remote(&mut self, network: NetworkId, gid: Gid, identity: Option<Arc<VnicIdentity>>) {
        if self.parties.get(&(network, gid)).is_none_or(|entry| !entry.is_here) {
            self.set(network, gid, Entry { is_here: false, identity, profile: None });
        }
    }

    pub fn remove_remote(&mut self, network: NetworkId, gid: Gid) {
        self.remove(network, gid, false);
    }

    fn set(&mut self, network: NetworkId, gid: Gid, entry: Entry) {
        let same = |before: &Entry| before.identity == entry.identity && before.is_here == entry.is_here;
        if !self.parties.get(&(network, gid)).is_some_and(same) {
            self.unknown.remove(&(network, gid));
            self.across.remove((network, gid));
            self.parties.insert((network, gid), entry);
            self.changed |= self.matters(network);
        }
    }

    fn remove(&mut self, network: NetworkId, gid: Gid, is_here: bool) {
        if self.parties.get(&(network, gid)).is_some_and(|entry| entry.is_here == is_here) {
            self.parties.remove(&(network, gid));
            self.across.remove((network, gid));
            self.changed |= self.matters(network);
        }
    }

    /// Whether what stands is to be looked at again; says so once.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The network that has an address for those of `network`: see [`AddressMap::network_at`].
    pub fn network_at(&self, network: NetworkId, gid: Gid) -> NetworkId {
        self.rules.as_ref().map_or(network, |rules| rules.address_map.network_at(network, gid))
    }

    /// Whether verdicts depend on who is in a network.
    fn matters(&self, network: NetworkId) -> bool {
        self.networks.get(&network).map_or(self.rules.is_some(), |network| !network.is_open || network.is_joined)
    }

    /// The name by which rules know a network, with or without a vNIC here.
    fn name_in<'a>(&'a self, rules: &'a Rules, network: NetworkId) -> Option<&'a str> {
        rules.address_map.name(network).or_else(|| self.name_of_vnics(network))
    }

    /// The same, of a network with a vNIC here.
    fn name_of_vnics(&self, network: NetworkId) -> Option<&str> {
        self.networks.get(&network).map(|network| network.name.as_str())
    }

    fn name_of(&self, network: NetworkId) -> Option<String> {
        let declared = self.rules.as_deref().and_then(|rules| rules.address_map.name(network));
        declared.or_else(|| self.name_of_vnics(network)).map(str::to_owned)
    }

    /// Whether some of the one network may talk to some of the other.
    fn joins(&self, rules: &Rules, one: NetworkId, other: NetworkId) -> bool {
        let names = self.name_in(rules, one).zip(self.name_in(rules, other));
        names.is_some_and(|(one, other)| rules.table.joins(one, other))
    }

    /// The rules' answer about an address that is to talk to one of the network `other`.
    fn profile(&mut self, rules: &Rules, key: Key, other: NetworkId) -> Option<Profile> {
        let (is_across, network, other) = (key.0 != other, self.name_in(rules, key.0)?, self.name_in(rules, other)?);
        let identity = self.parties.get(&key).and_then(|entry| entry.identity.as_ref());
        let known = identity.map(|identity| Known { vnic: &identity.vnic, labels: &identity.labels });
        let own = [address_of(key.1)];
        let all = identity.map(|identity| identity.addresses.as_slice());
        let addresses = all.filter(|all| all.contains(&own[0])).unwrap_or(&own);
        let party = Party { network, addresses, known };
        let (profile, work) = if is_across {
            (rules.table.profile_across(&party, other), rules.table.work_across(network, other))
        } else {
            (rules.table.profile(&party), rules.table.work(network))
        };
        self.work += u64::from(work);
        Some(profile)
    }

    /// The rule that allowed what the network's own `access` disconnects now, if it was there until the last
    /// change.
    fn withdrawn(&mut self, pair: &Pair) -> Option<RuleIndex> {
        let before = self.before.clone()?;
        let (from, to) = (pair.from, pair.to);
        if pair.is_across() && !self.joins(&before, from.0, to.0) {
            return None;
        }
        let (from, to) = (self.profile(&before, from, to.0)?, self.profile(&before, to, from.0)?);
        let verdict = before.table.decide_connection(&from, &to);
        let rule = verdict.rule.filter(|_| verdict.allowed)?;
        let name = before.table.rule_name(rule)?;
        let is_there = self.rules.as_ref().is_some_and(|rules| rules.counts_of(Some(name)).is_some());
        (!is_there).then_some(RuleIndex(rule.0 | WITHDRAWN))
    }

    /// Finds what the profile of one of a pair is, and keeps it; what is kept of the other stays.
    fn look_at(&mut self, key: Key, pair: [Key; 2]) {
        let Some(profile) = self.rules.clone().and_then(|rules| self.profile(&rules, key, key.0)) else { return };
        match self.parties.get_mut(&key) {
            Some(entry) => entry.profile = Some((self.generation, profile)),
            None => {
                if self.unknown.len() >= UNKNOWN_COUNT_MAX
                    && let Some(&other) = self.unknown.keys().find(|other| !pair.contains(other))
                {
                    self.unknown.remove(&other);
                }
                self.unknown.insert(key, profile);
            }
        }
    }

    fn kept(&self, key: Key) -> Option<&Profile> {
        match self.parties.get(&key) {
            None => self.unknown.get(&key),
            Some(entry) => {
                let (generation, profile) = entry.profile.as_ref()?;
                (*generation == self.generation).then_some(profile)
            }
        }
    }

    fn verdict(&mut self, pair: &Pair, both: bool) -> Verdict {
        let Some(rules) = self.rules.clone() else { return Verdict { allowed: !pair.is_across(), rule: None } };
        if pair.is_across() {
            return self.verdict_across(&rules, pair, both);
        }
        let Some(network) = self.networks.get(&pair.from.0) else { return DENIED };
        if pair.is_external {
            return Verdict { allowed: rules.table.allows_external(&network.name), rule: None };
        }
        // One container is not kept from itself.
        if network.is_open || pair.from == pair.to {
            return ALLOWED;
        }
        let (from, to) = (pair.from, pair.to);
        for key in [from, to] {
            if self.kept(key).is_none() {
                self.look_at(key, [from, to]);
            }
        }
        let (Some(from), Some(to)) = (self.kept(from), self.kept(to)) else { return DENIED };
        if both { rules.table.decide_connection(from, to) } else { rules.table.decide(from, to) }
    }

    /// The same of two networks. What is kept is of such that are joined: others cost nothing.
    fn verdict_across(&mut self, rules: &Rules, pair: &Pair, both: bool) -> Verdict {
        let (from, to) = ((pair.from, pair.to.0), (pair.to, pair.from.0));
        if pair.is_external {
            return DENIED;
        }
        if self.across.get(from).is_none() || self.across.get(to).is_none() {
            if !self.joins(rules, pair.from.0, pair.to.0) {
                return DENIED;
            }
            for (end, opposite) in [(from, to), (to, from)] {
                if self.across.get(end).is_none()
                    && let Some(profile) = self.profile(rules, end.0, end.1)
                {
                    self.across.insert(end, opposite, profile);
                }
            }
        }
        let (Some(from), Some(to)) = (self.across.get(from), self.across.get(to)) else { return DENIED };
        if both { rules.table.decide_connection(from, to) } else { rules.table.decide(from, to) }
    }

    /// Whether `from` may begin to talk to `to`; a no is counted and noted.
    pub fn may_begin(&mut self, pair: &Pair, deed: Deed) -> bool {
        let verdict = self.verdict(pair, false);
        verdict.allowed || self.refuse(pair, deed, verdict.rule)
    }

    /// Whether the two may be connected, whoever began.
    pub fn may_be_connected(&mut self, pair: &Pair, deed: Deed) -> bool {
        let verdict = self.verdict(pair, true);
        verdict.allowed || self.refuse(pair, deed, verdict.rule)
    }

    /// Answers the engine's question.
    #[inline]
    pub fn authorize(&mut self, request: &AuthorizationRequest) -> bool {
        if self.rules.is_none() {
            return true;
        }
        let AuthorizationRequest { network, traffic, .. } = *request;
        let other = if request.is_external { network } else { request.other };
        let (from, to) = match request.subject {
            Subject::From => ((network, request.from), (other, request.to)),
            Subject::To => ((other, request.from), (network, request.to)),
        };
        let (from_known, to_known) = (self.parties.contains_key(&from), self.parties.contains_key(&to));
        let is_external = request.is_external && !(from_known && to_known);
        let pair = Pair { from, to, is_external };
        match traffic {
            TrafficKind::Connection => {
                if !to_known && !request.is_external {
                    self.note_aim(from, ViolationClass::Connection, to.1);
                }
                self.may_be_connected(&pair, Deed::Connection)
            }
            TrafficKind::Standing => self.may_be_connected(&pair, Deed::Disconnect),
            // It goes to nobody: that costs nothing to find out. But who comes to a network that is
            // not joined may change nothing here, and a yes would then stand.
            TrafficKind::Datagram if !to_known && !is_external && self.may_be_for_nobody(&pair) => true,
            TrafficKind::Datagram => self.may_begin(&pair, Deed::Datagram),
            TrafficKind::Multicast => self.may_begin(&pair, Deed::Multicast),
            TrafficKind::DirectDatagrams => self.verdict(&pair, false).allowed,
        }
    }

    fn may_be_for_nobody(&self, pair: &Pair) -> bool {
        !pair.is_across() || self.rules.as_ref().is_some_and(|rules| self.joins(rules, pair.from.0, pair.to.0))
    }

    /// Counts and notes a no; is one.
    fn refuse(&mut self, pair: &Pair, deed: Deed, rule: Option<RuleIndex>) -> bool {
        let is_disconnection = deed.is_disconnection();
        let rule = rule.or_else(|| if is_disconnection && !pair.is_external { self.withdrawn(pair) } else { None });
        let Some(rules) = &self.rules else { return false };
        let counts = rules.count(rule);
        let in_force = rule.filter(|rule| rule.0 & WITHDRAWN == 0);
        match deed {
            Deed::Disconnect => {
                counts.disconnections.fetch_add(1, Relaxed);
                self.tallies.of_refused(in_force, pair.from.0).disconnections += 1;
            }
            // Its queue pairs are counted.
            Deed::DisconnectRequest => {}
            _ => {
                counts.refusals.fetch_add(1, Relaxed);
                self.tallies.of_refused(in_force, pair.from.0).refusals += 1;
            }
        }
        let of_vnic = pair.from;
        let incident = (of_vnic, pair.to, deed, rule);
        if let Some(count) = self.incidents.get_mut(&incident) {
            *count += 1;
            return false;
        }
        let first = (of_vnic, (NetworkId(0), Gid([0; 16])), Deed::Connection, None);
        let end = (NetworkId(u32::MAX), Gid([0xff; 16]));
        let last = (of_vnic, end, Deed::DisconnectRequest, Some(RuleIndex(u32::MAX)));
        let count_of_vnic = self.incidents.range(first..=last).take(INCIDENT_OF_VNIC_COUNT_MAX).count();
        if self.incidents.len() < INCIDENT_COUNT_MAX && count_of_vnic < INCIDENT_OF_VNIC_COUNT_MAX {
            self.incidents.insert(incident, 1);
        }
        false
    }

    /// Counts and notes a policy violation.
    pub fn note_violation(&mut self, violation: &Violation) {
        self.tallies.count_violation(violation.network, ViolationClass::Engine(violation.kind));
        self.violations.note(violation);
    }

    /// Somebody looks for an address that nobody in its network has.
    pub fn note_aim(&mut self, (network, from): (NetworkId, Gid), class: ViolationClass, to: Gid) {
        self.tallies.count_violation(network, class);
        self.violations.add((network, from, class), Sum { count: 1, to, number: 0, owner: None });
    }

    /// A program of a vNIC asked so often for more than there may be.
    pub fn note_shortage(&mut self, (network, of): (NetworkId, Gid), share: Share, resource: Resource, count: u64) {
        let sum = Sum { count, to: of, number: 0, owner: None };
        self.violations.add((network, of, ViolationClass::Quota(share, resource)), sum);
    }

    /// Violations since the last time, if it is time to report them.
    pub fn take_violations(&mut self, now: Instant) -> Vec<ViolationRecord> {
        let mut named = Vec::new();
        for ((network, from, class), sum) in self.violations.take(now) {
            let Sum { count, to, number, owner } = sum;
            let has_it = |network: &NetworkId| self.parties.contains_key(&(*network, to));
            let is_own = has_it(&network) || to.is_multicast();
            // Another of its tenant goes before those of others, which have the address as well.
            let home = self.network_at(network, to);
            let others = || std::iter::once(home).chain(self.networks.keys().copied()).find(has_it);
            let owner = owner.or_else(|| if is_own { None } else { others() });
            let who = self.parties.get(&(network, from)).and_then(|entry| entry.identity.as_ref());
            named.push(ViolationRecord {
                class,
                network: self.name_of(network).unwrap_or_default(),
                vnic: who.map(|who| who.vnic.clone()),
                from,
                peer: class.aim(to, number),
                owner: owner.and_then(|owner| self.name_of(owner)),
                count,
            });
        }
        named
    }

    fn incidents_due(&self) -> Option<Instant> {
        let is_something = !self.incidents.is_empty() || !self.named.is_empty();
        is_something.then_some(self.reported_at + REPORT_INTERVAL)
    }

    /// In how long there is something to report.
    pub fn due_in(&self, now: Instant) -> Option<Duration> {
        let due = self.incidents_due().into_iter().chain(self.violations.due()).min()?;
        Some(if due > now { due - now } else { Duration(0) })
    }

    /// Refusals and disconnections since the last time, if it is time to report them.
    pub fn take_incidents(&mut self, now: Instant) -> Vec<Incident> {
        if self.incidents_due().is_none_or(|due| due > now) {
            return Vec::new();
        }
        self.reported_at = now;
        self.name_incidents();
        std::mem::take(&mut self.named)
    }

    /// Says of what was noted which rule it was.
    fn name_incidents(&mut self) {
        for (((network, from), (other, to), deed, rule), count) in std::mem::take(&mut self.incidents) {
            if self.named.len() >= INCIDENT_COUNT_MAX {
                break;
            }
            let entry = self.parties.get(&(network, from));
            let rule = rule.and_then(|RuleIndex(index)| match index & WITHDRAWN {
                0 => self.rules.as_ref()?.table.rule_name(RuleIndex(index)).map(str::to_owned),
                _ => {
                    let name = self.before.as_ref()?.table.rule_name(RuleIndex(index & !WITHDRAWN))?;
                    Some(format!("{name} (withdrawn)"))
                }
            });
            self.named.push(Incident {
                deed,
                network: self.name_of(network).unwrap_or_default(),
                vnic: entry.and_then(|entry| Some(entry.identity.as_ref()?.vnic.clone())),
                from,
                to,
                target: if other == network { None } else { self.name_of(other) },
                rule,
                count,
            });
        }
    }
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
