//! Each tenant's share of a host's room: objects, bytes, entries of selectors, and networks that
//! rules join.
//!
//! A tenant may have half of what the others leave, so that none of them, and not all but one of
//! them, can keep the next one out. An eighth of the bytes is left for objects that are no
//! tenant's.
use crate::access::{entry_count, joined_by};
use crate::command::{Reason, Refusal};
use crate::objects::{AccessRuleSpec, Cause, EndSelector, GroupSpec, ObjectKind};
use crate::state::State;
use crate::{
    JOINED_PAIRS_MAX, OBJECT_BYTES_MAX, OBJECT_COUNT_MAX, SELECTOR_ENTRIES_MAX, STATE_BYTES_MAX, VNIC_COUNT_MAX,
};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};

/// Bytes that objects take in a store; tenant "": nobody's.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sizes {
    all: usize,
    of_tenant: BTreeMap<String, usize>,
    of_key: BTreeMap<String, (String, usize)>,
}

impl Sizes {
    pub fn set(&mut self, key: &str, tenant: String, bytes: usize) {
        self.remove(key);
        self.all += bytes;
        *self.of_tenant.entry(tenant.clone()).or_default() += bytes;
        self.of_key.insert(key.into(), (tenant, bytes));
    }

    pub fn remove(&mut self, key: &str) {
        let Some((tenant, bytes)) = self.of_key.remove(key) else { return };
        self.all -= bytes;
        if let Some(of_tenant) = self.of_tenant.get_mut(&tenant) {
            *of_tenant -= bytes;
            if *of_tenant == 0 {
                self.of_tenant.remove(&tenant);
            }
        }
    }

    fn of_tenant(&self, tenant: &str) -> usize {
        self.of_tenant.get(tenant).copied().unwrap_or(0)
    }

    fn of_key(&self, key: &str) -> usize {
        self.of_key.get(key).map_or(0, |(_, bytes)| *bytes)
    }
}

/// Room that a draft has taken beyond that of its state.
#[derive(Default)]
pub(crate) struct Shares {
    /// The host itself attaches a vNIC: it may fill all places, where a tenant that declares vNICs may not.
    pub is_hosts: bool,
    /// A copy: its original was held to the shares, and had the objects in another order.
    pub is_copy: bool,
    /// The writer declares for its own users, who may make networks, too.
    pub is_managers: bool,
    /// New ones: of each kind, and of a tenant, whose old ones are counted here, too.
    created: BTreeMap<ObjectKind, usize>,
    objects: BTreeMap<(ObjectKind, String), usize>,
    /// More bytes, of all and of each tenant.
    bytes: usize,
    bytes_of: BTreeMap<String, usize>,
    /// By tenant: of all its groups and rules.
    entries: BTreeMap<String, usize>,
    /// By tenant: each two networks that rules join, and how many rules do.
    joined: BTreeMap<String, BTreeMap<(String, String), usize>>,
}

/// The share of `max` that somebody may have, if others have so much of it.
fn share(max: usize, others: usize) -> usize {
    max.saturating_sub(others) / 2
}

fn count_of(state: &State, kind: ObjectKind) -> (usize, usize) {
    match kind {
        ObjectKind::Vnic => (state.vnics.len(), VNIC_COUNT_MAX),
        ObjectKind::Network => (state.networks.len(), OBJECT_COUNT_MAX),
        ObjectKind::Group => (state.groups.len(), OBJECT_COUNT_MAX),
        ObjectKind::AccessRule => (state.rules.len(), OBJECT_COUNT_MAX),
        ObjectKind::QosClass => (state.classes.len(), OBJECT_COUNT_MAX),
        ObjectKind::Quota => (state.quotas.len(), OBJECT_COUNT_MAX),
        ObjectKind::Host => (0, OBJECT_COUNT_MAX),
    }
}

/// Of a tenant; `None`: only admins make that kind.
fn count_of_tenant(state: &State, kind: ObjectKind, tenant: &str, is_managers: bool) -> Option<usize> {
    match kind {
        ObjectKind::Network if is_managers => {
            Some(state.networks.values().filter(|network| network.tenant() == tenant).count())
        }
        ObjectKind::Vnic => {
            let own = state.networks.values().filter(|network| network.tenant() == tenant);
            Some(own.map(|network| network.vnic_count as usize).sum())
        }
        ObjectKind::Group => Some(state.groups.values().filter(|group| group.spec.tenant == tenant).count()),
        ObjectKind::AccessRule => Some(state.rules.values().filter(|rule| rule.spec.tenant == tenant).count()),
        ObjectKind::Network | ObjectKind::QosClass | ObjectKind::Quota | ObjectKind::Host => None,
    }
}

pub(crate) fn entries_of_group(spec: &GroupSpec) -> usize {
    spec.members.iter().map(entry_count).sum()
}

pub(crate) fn entries_of_rule(spec: &AccessRuleSpec) -> usize {
    let of = |end: &EndSelector| end.labels.len() + usize::from(end.cidr.is_some());
    1 + of(&spec.from) + of(&spec.to)
}

fn exhausted(message: String) -> Refusal {
    Refusal::new(Reason::Exhausted, message)
}

impl Shares {
    /// One more of a kind, which `tenant` has, if it is somebody's.
    pub fn create(&mut self, state: &State, kind: ObjectKind, tenant: &str) -> Result<(), Refusal> {
        let (count, max) = count_of(state, kind);
        let created = self.created.entry(kind).or_default();
        *created += 1;
        let all = count + *created;
        if all > max {
            return Err(exhausted(format!("there are {max} of the kind already, which is the most")));
        }
        if self.is_hosts || self.is_copy {
            return Ok(());
        }
        let count = || count_of_tenant(state, kind, tenant, self.is_managers);
        let Some(own) = count_of_tenant_cached(&mut self.objects, (kind, tenant), count) else { return Ok(()) };
        *own += 1;
        let share = share(max, all - *own);
        if *own > share {
            return Err(exhausted(format!("tenant {tenant} has {share} of the kind already, which is its share")));
        }
        Ok(())
    }

    /// An object takes so many bytes from now on.
    pub fn store(&mut self, state: &State, key: &str, tenant: &str, bytes: usize) -> Result<(), Refusal> {
        if bytes > OBJECT_BYTES_MAX {
            let message = format!("it takes {bytes} bytes; {OBJECT_BYTES_MAX} are the most");
            return Err(Refusal::new(Reason::Invalid, message));
        }
        // An object may always become smaller.
        let more = (key.len() + bytes).saturating_sub(state.sizes.of_key(key));
        if more == 0 {
            return Ok(());
        }
        self.bytes += more;
        let all = state.sizes.all + self.bytes;
        if all > STATE_BYTES_MAX {
            return Err(exhausted(format!("all objects together take {STATE_BYTES_MAX} bytes, which is the most")));
        }
        if tenant.is_empty() || self.is_copy {
            return Ok(());
        }
        let own = self.bytes_of.entry(tenant.to_string()).or_insert_with(|| state.sizes.of_tenant(tenant));
        *own += more;
        let share = share(STATE_BYTES_MAX / 8 * 7, all - *own);
        if *own > share {
            return Err(exhausted(format!("the objects of tenant {tenant} take {share} bytes, which is its share")));
        }
        Ok(())
    }

    /// Selectors of a tenant list `after` things instead of `before`.
    pub fn select(&mut self, state: &State, tenant: &str, before: usize, after: usize) -> Result<(), Refusal> {
        let count = || {
            let groups = state.groups.values().filter(|group| group.spec.tenant == tenant);
            let rules = state.rules.values().filter(|rule| rule.spec.tenant == tenant);
            groups.map(|group| entries_of_group(&group.spec)).sum::<usize>()
                + rules.map(|rule| entries_of_rule(&rule.spec)).sum::<usize>()
        };
        let entries = self.entries.entry(tenant.to_string()).or_insert_with(count);
        *entries = *entries - before + after;
        if after > before && *entries > SELECTOR_ENTRIES_MAX && !self.is_copy {
            return Err(exhausted(format!(
                "the groups and rules of tenant {tenant} would list {entries} labels, networks, addresses and vNICs; \
                 {SELECTOR_ENTRIES_MAX} are the most"
            )));
        }
        Ok(())
    }

    /// A rule becomes what it is now. Each two joined networks have a table of their own, where
    /// every rule may be that denies.
    pub fn join(
        &mut self,
        state: &State,
        before: Option<&AccessRuleSpec>,
        after: &AccessRuleSpec,
    ) -> Result<(), Refusal> {
        let tenant = &after.tenant;
        let pairs = self.joined.entry(tenant.clone()).or_insert_with(|| {
            let mut pairs = BTreeMap::new();
            let rules = state.rules.values().filter(|rule| rule.spec.tenant == *tenant);
            for pair in rules.filter_map(|rule| pair_of(&rule.spec)) {
                *pairs.entry(pair).or_default() += 1;
            }
            pairs
        });
        if let Some(pair) = before.and_then(pair_of)
            && let Some(count) = pairs.get_mut(&pair)
        {
            *count -= 1;
            if *count == 0 {
                pairs.remove(&pair);
            }
        }
        let Some(pair) = pair_of(after) else { return Ok(()) };
        *pairs.entry(pair).or_default() += 1;
        if pairs.len() > JOINED_PAIRS_MAX && !self.is_copy {
            let message = format!(
                "the rules of tenant {tenant} join {JOINED_PAIRS_MAX} pairs of networks already, which are the most"
            );
            let cause = Cause::new("spec.to.network", message);
            return Err(Refusal { causes: alloc::vec![cause.clone()], ..exhausted(cause.to_string()) });
        }
        Ok(())
    }
}

/// The networks that a rule joins.
fn pair_of(rule: &AccessRuleSpec) -> Option<(String, String)> {
    joined_by(rule).map(|(one, other)| (one.to_string(), other.to_string()))
}

fn count_of_tenant_cached<'a>(
    objects: &'a mut BTreeMap<(ObjectKind, String), usize>,
    (kind, tenant): (ObjectKind, &str),
    count: impl FnOnce() -> Option<usize>,
) -> Option<&'a mut usize> {
    use alloc::collections::btree_map::Entry;
    match objects.entry((kind, tenant.to_string())) {
        Entry::Occupied(there) => Some(there.into_mut()),
        Entry::Vacant(place) => Some(place.insert(count()?)),
    }
}
