//! Access rules of all tenants, compiled so that a question costs a few words of bits.
//!
//! Of all rules of a tenant that fit a pair, the one with the highest `order` decides, and among
//! equals one that denies; if none fits, the network's own `access` does. A party of another host
//! whose labels and id nobody has announced fits no selector that asks for them.
//!
//! From one network to another nothing is allowed, unless a rule that allows names the two, one at
//! each end, both of its own tenant: it *joins* them. Between these such rules alone allow, those
//! that deny hold as anywhere, and what no rule fits is denied.
//!
//! [`AccessTable::profile`] looks at a party once, [`AccessTable::decide`] at two profiles of the
//! same table. Who talks to somebody of a joined network has another profile for that:
//! [`AccessTable::profile_across`]. Not here: counting, enforcement (the router's `access`), and
//! whether objects are valid ([`crate::State`]).
use crate::AccessView;
use crate::objects::{
    Access, AccessDirection, AccessRuleSpec, EndSelector, GroupSpec, Labels, NetworkSpec, VnicSelector,
};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::net::IpAddr;
use core::str::FromStr;

const BITS: usize = u64::BITS as usize;

/// Addresses that begin alike, IPv4 or IPv6; host bits are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    base: IpAddr,
    prefix_length: u8,
}

/// Neither an address nor `ADDRESS/LENGTH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CidrError;

impl Cidr {
    /// Whether one of the range's addresses is this one.
    pub fn contains(self, address: IpAddr) -> bool {
        let (base, address, bits) = match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => (u128::from(base.to_bits()), u128::from(address.to_bits()), 32),
            (IpAddr::V6(base), IpAddr::V6(address)) => (base.to_bits(), address.to_bits(), 128),
            _ => return false,
        };
        (base ^ address).checked_shr(bits - u32::from(self.prefix_length)).unwrap_or(0) == 0
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (base, length) = text.split_once('/').map_or((text, None), |(base, length)| (base, Some(length)));
        let base: IpAddr = base.parse().map_err(|_| CidrError)?;
        let bits = if base.is_ipv4() { 32 } else { 128 };
        let prefix_length = length.map_or(Ok(bits), |length| length.parse::<u8>().map_err(|_| CidrError))?;
        if prefix_length > bits { Err(CidrError) } else { Ok(Self { base, prefix_length }) }
    }
}

/// One of two that want to talk.
#[derive(Clone, Copy, Debug)]
pub struct Party<'a> {
    /// Name of its network.
    pub network: &'a str,
    /// All of its addresses.
    pub addresses: &'a [IpAddr],
    /// Its id and labels, if they are known: it is of this host, or its router has announced them.
    pub known: Option<Known<'a>>,
}

/// A party whose vNIC is known.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// Id of the vNIC.
    pub vnic: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
}

/// Names a rule of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleIndex(pub u32);

/// Whether `from` may begin to talk to `to`, and which rule says so; none: the network's default,
/// or that of two networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The answer.
    pub allowed: bool,
    /// The rule that decided; `None`: the network's own `access`, or no rule across networks.
    pub rule: Option<RuleIndex>,
}

/// Which rules of its network, or of two that are joined, fit a party, as `from` and as `to`: one
/// bit each, in the order in which they decide. Good for the table that made it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// None: of a network that does not exist, or of two that are not joined: it talks to nobody.
    place: Option<NetworkPlace>,
    from: Box<[u64]>,
    to: Box<[u64]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NetworkPlace {
    /// The party's.
    network: u32,
    /// The same number: within the network. Another: across it and one that it is joined with.
    zone: u32,
}

/// All rules.
#[derive(Clone, Debug, Default)]
pub struct AccessTable {
    networks: Vec<Network>,
    network_of: BTreeMap<String, u32>,
    /// Of each network, by its number, and behind these of each two that are joined.
    zones: Vec<Zone>,
    /// By the numbers of two that are joined, the smaller one first.
    zone_across: BTreeMap<(u32, u32), u32>,
    groups: Vec<Group>,
    names: Vec<String>,
}

#[derive(Clone, Debug)]
struct Network {
    name: String,
    external: Access,
    /// See [`AccessTable::is_open`].
    is_open: bool,
    /// See [`AccessTable::is_joined`].
    is_joined: bool,
}

/// Where two parties are of, and the rules that can fit there.
#[derive(Clone, Debug)]
struct Zone {
    /// The answer if no rule fits.
    access: Access,
    /// The first that fits decides.
    rules: Vec<Arc<Rule>>,
    /// Those that rules name here, in order: nobody is compared with others.
    groups: Vec<usize>,
    /// See [`AccessTable::work`].
    work: u32,
    /// Those that hold in both directions.
    both: Box<[u64]>,
}

#[derive(Clone, Debug)]
struct Rule {
    index: RuleIndex,
    action: Access,
    from: End,
    to: End,
}

#[derive(Clone, Debug)]
struct End {
    /// `Some(None)`: a group that does not exist.
    group: Option<Option<usize>>,
    network: Option<String>,
    labels: Labels,
    cidrs: Option<Vec<Cidr>>,
}

#[derive(Clone, Debug)]
struct Group {
    members: Vec<Member>,
    work: u32,
}

#[derive(Clone, Debug)]
struct Member {
    labels: Labels,
    networks: Vec<String>,
    cidrs: Option<Vec<Cidr>>,
    vnics: Vec<String>,
}

/// None: no address is asked for. One that can't be read holds nothing.
fn cidrs_of<'a>(texts: impl ExactSizeIterator<Item = &'a String>) -> Option<Vec<Cidr>> {
    (texts.len() > 0).then(|| texts.filter_map(|text| text.parse().ok()).collect())
}

fn holds(cidrs: Option<&Vec<Cidr>>, addresses: &[IpAddr]) -> bool {
    cidrs.is_none_or(|cidrs| cidrs.iter().any(|cidr| addresses.iter().any(|address| cidr.contains(*address))))
}

fn has_labels(wanted: &Labels, party: &Party<'_>) -> bool {
    wanted.is_empty()
        || party.known.is_some_and(|known| wanted.iter().all(|(name, value)| known.labels.get(name) == Some(value)))
}

impl Member {
    fn new(selector: &VnicSelector) -> Self {
        Self {
            labels: selector.labels.clone(),
            networks: selector.networks.clone(),
            cidrs: cidrs_of(selector.cidrs.iter()),
            vnics: selector.vnics.clone(),
        }
    }

    fn fits(&self, party: &Party<'_>) -> bool {
        let is_named = || party.known.is_some_and(|known| self.vnics.iter().any(|vnic| vnic == known.vnic));
        (self.networks.is_empty() || self.networks.iter().any(|network| network == party.network))
            && (self.vnics.is_empty() || is_named())
            && has_labels(&self.labels, party)
            && holds(self.cidrs.as_ref(), party.addresses)
    }
}

/// Selectors of vNICs, compiled: to be made once and asked often.
#[derive(Clone, Debug)]
pub struct Selectors(Group);

impl Selectors {
    /// Compiles selectors; an address range that can't be read holds nothing.
    pub fn new(selectors: &[VnicSelector]) -> Self {
        Self(Group::new(selectors))
    }

    /// Whether one of them chooses a party (whose tenant is the selectors').
    pub fn select(&self, party: &Party<'_>) -> bool {
        self.0.has(party)
    }

    /// The most comparisons that [`Self::select`] makes.
    pub fn work(&self) -> u32 {
        self.0.work()
    }
}

/// How many things a selector lists: what it costs to ask it.
pub(crate) fn entry_count(selector: &VnicSelector) -> usize {
    1 + selector.labels.len() + selector.networks.len() + selector.cidrs.len() + selector.vnics.len()
}

impl Group {
    fn new(selectors: &[VnicSelector]) -> Self {
        let work = selectors.iter().map(entry_count).sum::<usize>() as u32;
        Self { members: selectors.iter().map(Member::new).collect(), work }
    }

    fn has(&self, party: &Party<'_>) -> bool {
        self.members.iter().any(|member| member.fits(party))
    }

    fn work(&self) -> u32 {
        self.work
    }
}

impl End {
    fn fits(&self, party: &Party<'_>, is_member: impl Fn(usize) -> bool) -> bool {
        self.network.as_deref().is_none_or(|network| network == party.network)
            && self.group.is_none_or(|group| group.is_some_and(is_member))
            && has_labels(&self.labels, party)
            && holds(self.cidrs.as_ref(), party.addresses)
    }

    fn work(&self) -> u32 {
        1 + self.labels.len() as u32
    }
}

/// The networks that a rule joins, in order, if both are its tenant's.
pub(crate) fn joined_by(rule: &AccessRuleSpec) -> Option<(&str, &str)> {
    let (one, other) = (rule.from.network.as_deref()?, rule.to.network.as_deref()?);
    (rule.action == Access::Allow && one != other).then(|| if one < other { (one, other) } else { (other, one) })
}

fn can_be_of(end: &EndSelector, network: &str) -> bool {
    end.network.as_deref().is_none_or(|wanted| wanted == network)
}

/// Whether a rule can fit one of each of two joined networks of its tenant.
fn holds_across(rule: &AccessRuleSpec, (one, other): (&str, &str)) -> bool {
    let (from, to) = (&rule.from, &rule.to);
    match rule.action {
        Access::Allow => joined_by(rule) == Some((one, other)),
        Access::Deny => can_be_of(from, one) && can_be_of(to, other) || can_be_of(from, other) && can_be_of(to, one),
    }
}

/// All rules, on their way into zones.
struct Rules<'a> {
    specs: Vec<(&'a str, &'a AccessRuleSpec)>,
    compiled: Vec<Arc<Rule>>,
    /// By tenant, in the order in which they decide.
    of_tenant: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Rules<'a> {
    fn new(mut specs: Vec<(&'a str, &'a AccessRuleSpec)>, group_of: &BTreeMap<(&str, &str), usize>) -> Self {
        // A rule's index goes by its name alone; what follows is the order in which they decide.
        specs.sort_unstable_by_key(|(name, _)| *name);
        let mut order: Vec<usize> = (0..specs.len()).collect();
        order.sort_by_key(|&index| (Reverse(specs[index].1.order), specs[index].1.action != Access::Deny));
        let mut of_tenant: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for index in order {
            of_tenant.entry(&specs[index].1.tenant).or_default().push(index);
        }
        let end = |tenant: &str, end: &EndSelector| End {
            group: end.group.as_deref().map(|name| group_of.get(&(tenant, name)).copied()),
            network: end.network.clone(),
            labels: end.labels.clone(),
            cidrs: cidrs_of(end.cidr.as_slice().iter()),
        };
        let compile = |(index, (_, spec)): (usize, &(&str, &AccessRuleSpec))| {
            let (from, to) = (end(&spec.tenant, &spec.from), end(&spec.tenant, &spec.to));
            Arc::new(Rule { index: RuleIndex(index as u32), action: spec.action, from, to })
        };
        let compiled = specs.iter().enumerate().map(compile).collect();
        Self { specs, compiled, of_tenant }
    }

    /// Those of a tenant that can hold somewhere, in the order in which they decide, and which of
    /// them hold in both directions.
    fn of(&self, tenant: &str, holds: impl Fn(&AccessRuleSpec) -> bool) -> (Vec<Arc<Rule>>, Box<[u64]>) {
        let of_tenant = self.of_tenant.get(tenant).map_or(&[][..], Vec::as_slice);
        let fitting: Vec<usize> = of_tenant.iter().copied().filter(|&index| holds(self.specs[index].1)).collect();
        let mut both = words(fitting.len());
        for (place, &index) in fitting.iter().enumerate() {
            if self.specs[index].1.direction == AccessDirection::Both {
                set(&mut both, place);
            }
        }
        (fitting.iter().map(|&index| self.compiled[index].clone()).collect(), both)
    }
}

impl AccessTable {
    /// The rules and groups declared in a state.
    pub fn of(view: AccessView<'_>) -> Self {
        let networks = view.networks().map(|network| (network.name(), &network.object.spec));
        let groups = view.groups().map(|group| (group.metadata.name.as_str(), &group.spec));
        Self::compile(networks, groups, view.rules().map(|rule| (rule.metadata.name.as_str(), &rule.spec)))
    }

    /// All objects by name. A rule fits in the networks of its tenant that its ends allow, and
    /// across two of them: see above. A group that does not exist or is another tenant's has no
    /// members.
    pub fn compile<'a>(
        networks: impl IntoIterator<Item = (&'a str, &'a NetworkSpec)>,
        groups: impl IntoIterator<Item = (&'a str, &'a GroupSpec)>,
        rules: impl IntoIterator<Item = (&'a str, &'a AccessRuleSpec)>,
    ) -> Self {
        let mut table = Self::default();
        let mut group_of: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (name, group) in groups {
            group_of.insert((&group.tenant, name), table.groups.len());
            table.groups.push(Group::new(&group.members));
        }
        let rules = Rules::new(rules.into_iter().collect(), &group_of);
        table.names = rules.specs.iter().map(|(name, _)| (*name).into()).collect();
        let mut tenants: Vec<&str> = Vec::new();
        for (name, network) in networks {
            let here = |rule: &AccessRuleSpec| can_be_of(&rule.from, name) && can_be_of(&rule.to, name);
            tenants.push(&network.tenant);
            table.add_network(name, network, rules.of(&network.tenant, here));
        }
        let mut joined = BTreeSet::new();
        for (_, rule) in &rules.specs {
            let Some(pair) = joined_by(rule).filter(|pair| joined.insert((rule.tenant.as_str(), *pair))) else {
                continue;
            };
            let numbers = [pair.0, pair.1].map(|name| {
                let number = table.number(name)?;
                (tenants[number as usize] == rule.tenant).then_some(number)
            });
            if let [Some(one), Some(other)] = numbers {
                table.join(one, other, rules.of(&rule.tenant, |rule| holds_across(rule, pair)));
            }
        }
        table
    }

    fn add_network(&mut self, name: &str, network: &NetworkSpec, (rules, both): (Vec<Arc<Rule>>, Box<[u64]>)) {
        let is_open = network.access == Access::Allow && rules.iter().all(|rule| rule.action == Access::Allow);
        self.network_of.insert(name.into(), self.networks.len() as u32);
        self.networks.push(Network { name: name.into(), external: network.external, is_open, is_joined: false });
        self.add_zone(network.access, rules, both);
    }

    /// After all networks.
    fn join(&mut self, one: u32, other: u32, (rules, both): (Vec<Arc<Rule>>, Box<[u64]>)) {
        for network in [one, other] {
            self.networks[network as usize].is_joined = true;
        }
        self.zone_across.insert((one.min(other), one.max(other)), self.zones.len() as u32);
        self.add_zone(Access::Deny, rules, both);
    }

    fn add_zone(&mut self, access: Access, rules: Vec<Arc<Rule>>, both: Box<[u64]>) {
        let ends = || rules.iter().flat_map(|rule| [&rule.from, &rule.to]);
        let mut groups: Vec<usize> = ends().filter_map(|end| end.group.flatten()).collect();
        groups.sort_unstable();
        groups.dedup();
        let of_groups: u32 = groups.iter().map(|&group| self.groups[group].work()).sum();
        let work = of_groups + ends().map(End::work).sum::<u32>();
        self.zones.push(Zone { access, work, groups, rules, both });
    }

    /// Names of the rules, by index.
    pub fn rule_names(&self) -> &[String] {
        &self.names
    }

    /// Name of a rule. `None`: no rule of this table.
    pub fn rule_name(&self, rule: RuleIndex) -> Option<&str> {
        self.names.get(rule.0 as usize).map(String::as_str)
    }

    /// Whether everybody in a network may talk to everybody there, so that nobody needs to be looked at.
    pub fn is_open(&self, network: &str) -> bool {
        self.network(network).is_some_and(|network| network.is_open)
    }

    /// The most comparisons that [`Self::profile`] makes for somebody of a network: for who has to look at many.
    pub fn work(&self, network: &str) -> u32 {
        self.number(network).map_or(0, |number| self.zones[number as usize].work)
    }

    /// Whether a network's vNICs may talk to machines without FreeFlow.
    pub fn allows_external(&self, network: &str) -> bool {
        self.network(network).is_some_and(|network| network.external == Access::Allow)
    }

    /// Whether a rule lets anybody of one of the two networks talk to somebody of the other.
    pub fn joins(&self, one: &str, other: &str) -> bool {
        self.across(one, other).is_some()
    }

    /// Whether [`Self::joins`] is so of a network and any other.
    pub fn is_joined(&self, network: &str) -> bool {
        self.network(network).is_some_and(|network| network.is_joined)
    }

    fn number(&self, network: &str) -> Option<u32> {
        self.network_of.get(network).copied()
    }

    fn network(&self, network: &str) -> Option<&Network> {
        self.number(network).map(|number| &self.networks[number as usize])
    }

    /// Where somebody of the first of two joined networks is that talks to somebody of the other.
    fn across(&self, network: &str, other: &str) -> Option<NetworkPlace> {
        let (network, other) = (self.number(network)?, self.number(other)?);
        let zone = *self.zone_across.get(&(network.min(other), network.max(other)))?;
        Some(NetworkPlace { network, zone })
    }

    /// Looks at a party: to be kept for as long as the table and the party's labels are as they are.
    pub fn profile(&self, party: &Party<'_>) -> Profile {
        let within = self.number(party.network).map(|network| NetworkPlace { network, zone: network });
        self.profile_at(party, within)
    }

    /// The same of a party that is to talk to somebody of another network of its tenant. It may
    /// talk to nobody where the two are not joined, which costs next to nothing to find.
    pub fn profile_across(&self, party: &Party<'_>, other: &str) -> Profile {
        self.profile_at(party, self.across(party.network, other))
    }

    /// The most comparisons that [`Self::profile_across`] makes for somebody of one of the two networks.
    pub fn work_across(&self, one: &str, other: &str) -> u32 {
        self.across(one, other).map_or(0, |place| self.zones[place.zone as usize].work)
    }

    fn profile_at(&self, party: &Party<'_>, place: Option<NetworkPlace>) -> Profile {
        let Some(at) = place else { return Profile { place, from: Box::default(), to: Box::default() } };
        let zone = &self.zones[at.zone as usize];
        let members: Vec<bool> = zone.groups.iter().map(|&group| self.groups[group].has(party)).collect();
        let is_member = |group: usize| zone.groups.binary_search(&group).is_ok_and(|place| members[place]);
        let (mut from, mut to) = (words(zone.rules.len()), words(zone.rules.len()));
        for (place, rule) in zone.rules.iter().enumerate() {
            if rule.from.fits(party, is_member) {
                set(&mut from, place);
            }
            if rule.to.fits(party, is_member) {
                set(&mut to, place);
            }
        }
        Profile { place, from, to }
    }

    /// The rules under which the two meet: both within a network, or one in each of two joined ones.
    fn meeting(&self, from: &Profile, to: &Profile) -> Option<&Zone> {
        let (from, to) = (from.place?, to.place?);
        let is_within = from.zone == from.network;
        (from.zone == to.zone && (from.network == to.network) == is_within).then(|| &self.zones[from.zone as usize])
    }

    /// Whether `from` may begin to talk to `to`.
    pub fn decide(&self, from: &Profile, to: &Profile) -> Verdict {
        let Some(zone) = self.meeting(from, to) else { return Verdict { allowed: false, rule: None } };
        for (word, both) in zone.both.iter().enumerate() {
            let fitting = from.from[word] & to.to[word] | both & from.to[word] & to.from[word];
            if fitting != 0 {
                let rule = &zone.rules[word * BITS + fitting.trailing_zeros() as usize];
                return Verdict { allowed: rule.action == Access::Allow, rule: Some(rule.index) };
            }
        }
        Verdict { allowed: zone.access == Access::Allow, rule: None }
    }

    /// Whether the two may be connected, whoever began: allowed in one direction at least. What is
    /// said of a refusal is why the first may not talk to the second.
    pub fn decide_connection(&self, one: &Profile, other: &Profile) -> Verdict {
        let forth = self.decide(one, other);
        if forth.allowed {
            return forth;
        }
        let back = self.decide(other, one);
        if back.allowed { back } else { forth }
    }

    /// Name of the party's network.
    pub fn network_of(&self, profile: &Profile) -> Option<&str> {
        Some(&self.networks[profile.place?.network as usize].name)
    }
}

fn words(bits: usize) -> Box<[u64]> {
    alloc::vec![0; bits.div_ceil(BITS)].into_boxed_slice()
}

fn set(words: &mut [u64], bit: usize) {
    words[bit / BITS] |= 1 << (bit % BITS);
}

#[cfg(test)]
mod tests;
