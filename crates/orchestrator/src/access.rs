//! Who may talk to whom: the access rules of all tenants, compiled so that a question costs a few words of bits.
//!
//! Of all rules of a tenant that fit a pair, the one with the highest `order` decides, and among equals one that denies; if none
//! fits, the network's own `access` does. Across networks nothing is allowed, whatever rules say. A party of another host whose
//! labels and id nobody has announced fits no selector that asks for them.
//!
//! [`AccessTable::profile`] looks at a party once, [`AccessTable::decide`] at two profiles of the same table.
//! Not here: counting, enforcement (the router's `access`), and whether objects are valid ([`crate::State`]).
use crate::AccessView;
use crate::objects::{
    Access, AccessDirection, AccessRuleSpec, EndSelector, GroupSpec, Labels, NetworkSpec, VnicSelector,
};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
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
    pub addresses: &'a [IpAddr],
    /// Its id and labels, if they are known: it is of this host, or its router has announced them.
    pub known: Option<Known<'a>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub vnic: &'a str,
    pub labels: &'a Labels,
}

/// Names a rule of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleIndex(pub u32);

/// Whether `from` may begin to talk to `to`, and which rule says so; none: the network's default, or two networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub allowed: bool,
    pub rule: Option<RuleIndex>,
}

/// Which rules of its network fit a party, as `from` and as `to`: one bit each, in the order in which they decide. Good for
/// the table that made it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// None: of a network that does not exist, which talks to nobody.
    zone: Option<u32>,
    from: Box<[u64]>,
    to: Box<[u64]>,
}

/// All rules.
#[derive(Clone, Debug, Default)]
pub struct AccessTable {
    zones: Vec<Zone>,
    zone_of: BTreeMap<String, u32>,
    groups: Vec<Group>,
    names: Vec<String>,
}

/// A network and the rules that can fit there.
#[derive(Clone, Debug)]
struct Zone {
    name: String,
    access: Access,
    external: Access,
    /// The first that fits decides.
    rules: Vec<Arc<Rule>>,
    /// Those that rules name here, in order: nobody is compared with others.
    groups: Vec<usize>,
    /// See [`AccessTable::is_open`].
    is_open: bool,
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

/// What chooses vNICs, compiled: to be made once and asked often.
#[derive(Clone, Debug)]
pub struct Selectors(Group);

impl Selectors {
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
        self.group.is_none_or(|group| group.is_some_and(is_member))
            && has_labels(&self.labels, party)
            && holds(self.cidrs.as_ref(), party.addresses)
    }

    fn work(&self) -> u32 {
        1 + self.labels.len() as u32
    }
}

impl AccessTable {
    /// What is declared.
    pub fn of(view: AccessView<'_>) -> Self {
        let networks = view.networks().map(|network| (network.name(), &network.object.spec));
        let groups = view.groups().map(|group| (group.metadata.name.as_str(), &group.spec));
        Self::compile(networks, groups, view.rules().map(|rule| (rule.metadata.name.as_str(), &rule.spec)))
    }

    /// All objects by name. A rule fits in the networks of its tenant that its ends allow, so none if they name two. A group that
    /// does not exist or is another tenant's has no members.
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
        let mut rules: Vec<(&str, &AccessRuleSpec)> = rules.into_iter().collect();
        // A rule's index goes by its name alone; what follows is the order in which they decide.
        rules.sort_unstable_by_key(|(name, _)| *name);
        table.names = rules.iter().map(|(name, _)| (*name).into()).collect();
        let mut order: Vec<usize> = (0..rules.len()).collect();
        order.sort_by_key(|&index| (Reverse(rules[index].1.order), rules[index].1.action != Access::Deny));
        let mut of_tenant: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for index in order {
            of_tenant.entry(&rules[index].1.tenant).or_default().push(index);
        }
        let end = |tenant: &str, end: &EndSelector| End {
            group: end.group.as_deref().map(|name| group_of.get(&(tenant, name)).copied()),
            labels: end.labels.clone(),
            cidrs: cidrs_of(end.cidr.as_slice().iter()),
        };
        let compiled: Vec<Arc<Rule>> = rules
            .iter()
            .enumerate()
            .map(|(index, (_, spec))| {
                let (from, to) = (end(&spec.tenant, &spec.from), end(&spec.tenant, &spec.to));
                Arc::new(Rule { index: RuleIndex(index as u32), action: spec.action, from, to })
            })
            .collect();
        for (name, network) in networks {
            let of_tenant = of_tenant.get(network.tenant.as_str()).map_or(&[][..], Vec::as_slice);
            let here = |end: &EndSelector| end.network.as_deref().is_none_or(|wanted| wanted == name);
            let fitting = of_tenant.iter().filter(|&&index| here(&rules[index].1.from) && here(&rules[index].1.to));
            let fitting: Vec<usize> = fitting.copied().collect();
            let mut both = words(fitting.len());
            for (place, _) in
                fitting.iter().enumerate().filter(|(_, index)| rules[**index].1.direction == AccessDirection::Both)
            {
                set(&mut both, place);
            }
            let rules = fitting.iter().map(|&index| compiled[index].clone()).collect();
            table.add_zone(name, network, rules, both);
        }
        table
    }

    fn add_zone(&mut self, name: &str, network: &NetworkSpec, rules: Vec<Arc<Rule>>, both: Box<[u64]>) {
        let ends = || rules.iter().flat_map(|rule| [&rule.from, &rule.to]);
        let mut groups: Vec<usize> = ends().filter_map(|end| end.group.flatten()).collect();
        groups.sort_unstable();
        groups.dedup();
        let of_groups: u32 = groups.iter().map(|&group| self.groups[group].work()).sum();
        let zone = Zone {
            name: name.into(),
            access: network.access,
            external: network.external,
            is_open: network.access == Access::Allow && rules.iter().all(|rule| rule.action == Access::Allow),
            work: of_groups + ends().map(End::work).sum::<u32>(),
            groups,
            rules,
            both,
        };
        self.zone_of.insert(name.into(), self.zones.len() as u32);
        self.zones.push(zone);
    }

    /// Names of the rules, by index.
    pub fn rule_names(&self) -> &[String] {
        &self.names
    }

    pub fn rule_name(&self, rule: RuleIndex) -> Option<&str> {
        self.names.get(rule.0 as usize).map(String::as_str)
    }

    /// Whether everybody in a network may talk to everybody there, so that nobody needs to be looked at.
    pub fn is_open(&self, network: &str) -> bool {
        self.zone(network).is_some_and(|zone| zone.is_open)
    }

    /// The most comparisons that [`Self::profile`] makes for somebody of a network: for who has to look at many.
    pub fn work(&self, network: &str) -> u32 {
        self.zone(network).map_or(0, |zone| zone.work)
    }

    /// Whether a network's vNICs may talk to machines without FreeFlow.
    pub fn allows_external(&self, network: &str) -> bool {
        self.zone(network).is_some_and(|zone| zone.external == Access::Allow)
    }

    /// Whether a rule lets anybody of one of the two networks talk to somebody of the other.
    pub fn joins(&self, _one: &str, _other: &str) -> bool {
        false
    }

    /// Whether [`Self::joins`] is so of a network and any other.
    pub fn is_joined(&self, _network: &str) -> bool {
        false
    }

    fn zone(&self, network: &str) -> Option<&Zone> {
        self.zone_of.get(network).map(|index| &self.zones[*index as usize])
    }

    /// Looks at a party: to be kept for as long as the table and the party's labels are as they are.
    pub fn profile(&self, party: &Party<'_>) -> Profile {
        let Some(&index) = self.zone_of.get(party.network) else {
            return Profile { zone: None, from: Box::default(), to: Box::default() };
        };
        let zone = &self.zones[index as usize];
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
        Profile { zone: Some(index), from, to }
    }

    /// The same of a party that is to talk to somebody of another network of its tenant.
    pub fn profile_across(&self, _party: &Party<'_>, _other: &str) -> Profile {
        Profile { zone: None, from: Box::default(), to: Box::default() }
    }

    /// The most comparisons that [`Self::profile_across`] makes for somebody of one of the two networks.
    pub fn work_across(&self, _one: &str, _other: &str) -> u32 {
        0
    }

    /// Whether `from` may begin to talk to `to`.
    pub fn decide(&self, from: &Profile, to: &Profile) -> Verdict {
        let (Some(index), true) = (from.zone, from.zone == to.zone) else {
            return Verdict { allowed: false, rule: None };
        };
        let zone = &self.zones[index as usize];
        for (word, both) in zone.both.iter().enumerate() {
            let fitting = from.from[word] & to.to[word] | both & from.to[word] & to.from[word];
            if fitting != 0 {
                let rule = &zone.rules[word * BITS + fitting.trailing_zeros() as usize];
                return Verdict { allowed: rule.action == Access::Allow, rule: Some(rule.index) };
            }
        }
        Verdict { allowed: zone.access == Access::Allow, rule: None }
    }

    /// Whether the two may be connected, whoever began: allowed in one direction at least. What is said of a refusal is why the
    /// first may not talk to the second.
    pub fn decide_connection(&self, one: &Profile, other: &Profile) -> Verdict {
        let forth = self.decide(one, other);
        if forth.allowed {
            return forth;
        }
        let back = self.decide(other, one);
        if back.allowed { back } else { forth }
    }

    /// Name of the network that a profile is of.
    pub fn network_of(&self, profile: &Profile) -> Option<&str> {
        Some(&self.zones[profile.zone? as usize].name)
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
