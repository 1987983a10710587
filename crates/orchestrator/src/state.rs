//! The state: every declared object, with the indexes that planning needs (addresses by network,
//! what each tenant has, who uses a name). Commands are planned in `draft`, which changes nothing;
//! a plan is adopted in `entries`, which alone changes the state.
use crate::cidr::{Cidr, Pool6};
use crate::objects::{AccessRule, AnyObject, Group, Host, Kind, Network, ObjectKind, QosClass, Quota, Typed, Vnic};
use crate::pool::Pool;
use crate::share::Sizes;
use crate::store::Revision;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ops::Bound;
use freeflow_protocol::admin::OWN_LABELS;
use freeflow_verbs::{Gid, NetworkId};

/// A network, with its address ranges parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkEntry {
    /// The object, without status.
    pub object: Typed<Network>,
    /// Not that of any other network that there was.
    pub id: NetworkId,
    /// Its IPv4 range.
    pub pool: Pool,
    /// The part of it that this host gives out; `None`: all.
    pub range: Option<Pool>,
    /// The part of it that goes with vNICs of a cluster from host to host.
    pub floating: Option<Pool>,
    /// Its IPv6 range.
    pub pool6: Option<Pool6>,
    /// The network that `freeflow up` has made: the host's bridge that gives it its IP path.
    pub own_bridge: Option<String>,
    /// Its tenant, as a small number: the same in all networks of the tenant.
    pub(crate) tenant_number: u16,
    /// The holder of each address.
    pub(crate) holders: BTreeMap<IpAddr, String>,
    pub(crate) vnic_count: u32,
}

impl NetworkEntry {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.object.metadata.name
    }

    /// Its tenant.
    pub fn tenant(&self) -> &str {
        &self.object.spec.tenant
    }

    /// The addresses that this host gives out.
    pub fn assigned(&self) -> Pool {
        self.range.unwrap_or(self.pool)
    }

    /// The first of them: each host is the gateway of its own vNICs.
    pub fn gateway(&self) -> Ipv4Addr {
        self.assigned().gateway()
    }

    /// The IPv6 addresses that this host gives out: those at the places of its IPv4 ones. So hosts
    /// that share a network need not agree on a second range.
    pub fn assigned6(&self) -> Option<Pool6> {
        let pool6 = self.pool6?;
        Some(self.range.map_or(pool6, |range| pool6.part(self.pool, range)))
    }

    /// The part of its addresses that this host gives out, or that which goes with vNICs of a cluster, if there is one.
    pub(crate) fn part(&self, is_floating: bool) -> Option<(Pool, Option<Pool6>)> {
        if !is_floating {
            return Some((self.assigned(), self.assigned6()));
        }
        let floating = self.floating?;
        Some((floating, self.pool6.map(|pool6| pool6.part(self.pool, floating))))
    }

    /// Whether the address goes with a vNIC of a cluster.
    pub fn is_floating(&self, address: Ipv4Addr) -> bool {
        self.floating.is_some_and(|floating| floating.contains(address))
    }

    /// Its vNICs on this host.
    pub fn vnic_count(&self) -> u32 {
        self.vnic_count
    }

    /// Their ids, in order of address.
    pub fn vnics(&self) -> impl Iterator<Item = &str> {
        self.holders.iter().filter(|(address, _)| address.is_ipv4()).map(|(_, id)| id.as_str())
    }

    /// IPv4 addresses that are left on this host.
    pub fn free_address_count(&self) -> u64 {
        u64::from(self.assigned().size()).saturating_sub(3 + u64::from(self.vnic_count()))
    }

    /// Each of its ranges, and as the spec has it.
    pub(crate) fn cidrs(&self) -> impl Iterator<Item = (Cidr, &str)> {
        self.object.spec.cidrs.iter().filter_map(|text| Some((text.parse().ok()?, text.as_str())))
    }

    /// The first and the last address of each of its ranges.
    pub fn bounds(&self) -> impl Iterator<Item = (Gid, Gid)> {
        let gids = |(first, last)| (Gid::from_ip(first), Gid::from_ip(last));
        self.cidrs().map(move |(cidr, _)| gids(cidr.bounds()))
    }
}

/// A vNIC, with its addresses parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct VnicEntry {
    /// The object, without status.
    pub object: Typed<Vnic>,
    /// Name of the container that it was made for, or its own.
    pub title: String,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// Its IPv6 address.
    pub address6: Option<Ipv6Addr>,
}

impl VnicEntry {
    /// Its id, the object's name.
    pub fn id(&self) -> &str {
        &self.object.metadata.name
    }

    /// Name of its network.
    pub fn network(&self) -> &str {
        &self.object.spec.network
    }

    /// It was made for a container, and goes with it.
    pub fn is_of_container(&self) -> bool {
        self.title != self.id() || OWN_LABELS.iter().any(|key| self.object.metadata.labels.contains_key(*key))
    }

    /// GID of its IPv4 address.
    pub fn gid(&self) -> Gid {
        Gid::from_ip(IpAddr::V4(self.address))
    }

    /// GID of its IPv6 address.
    pub fn ipv6_gid(&self) -> Option<Gid> {
        self.address6.map(|address| Gid::from_ip(IpAddr::V6(address)))
    }
}

/// A class of service.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassEntry {
    /// The object, without status.
    pub object: Typed<QosClass>,
    /// A small one.
    pub(crate) number: u16,
}

/// A number that no object shows, and when it was last written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hidden {
    pub value: u32,
    pub modified: Option<Revision>,
}

/// Everything the orchestrator remembers. Built from a store's entries ([`State::of`]), and changed as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    pub(crate) networks: BTreeMap<String, NetworkEntry>,
    pub(crate) groups: BTreeMap<String, Typed<Group>>,
    pub(crate) rules: BTreeMap<String, Typed<AccessRule>>,
    pub(crate) classes: BTreeMap<String, ClassEntry>,
    pub(crate) quotas: BTreeMap<String, Typed<Quota>>,
    pub(crate) vnics: BTreeMap<String, VnicEntry>,
    pub(crate) hosts: BTreeMap<String, Typed<Host>>,
    /// By network, where the search for a free address begins: an address is not given out again at once.
    pub(crate) cursors: BTreeMap<String, Hidden>,
    /// The next network's id.
    pub(crate) next_network: Hidden,
    /// How many vNICs name a class of their own, by network and class.
    pub(crate) own_classes: BTreeMap<(String, String), u32>,
    /// Bytes that all of it takes in the store.
    pub(crate) sizes: Sizes,
    pub(crate) revision: Revision,
}

/// The part of a state that decides which addresses may talk, see [`State::access`].
#[derive(Clone, Copy)]
pub struct AccessView<'a>(&'a State);

impl<'a> AccessView<'a> {
    /// All networks, in order of name.
    pub fn networks(self) -> impl Iterator<Item = &'a NetworkEntry> {
        self.0.networks.values()
    }

    /// The network with this name.
    pub fn network(self, name: &str) -> Option<&'a NetworkEntry> {
        self.0.networks.get(name)
    }

    /// In order of name.
    pub fn rules(self) -> impl Iterator<Item = &'a Typed<AccessRule>> {
        self.0.rules.values()
    }

    /// All groups, in order of name.
    pub fn groups(self) -> impl Iterator<Item = &'a Typed<Group>> {
        self.0.groups.values()
    }

    /// The group with this name.
    pub fn group(self, name: &str) -> Option<&'a Typed<Group>> {
        self.0.groups.get(name)
    }

    /// All vNICs, in order of id.
    pub fn vnics(self) -> impl Iterator<Item = &'a VnicEntry> {
        self.0.vnics.values()
    }

    /// The vNIC with this id.
    pub fn vnic(self, id: &str) -> Option<&'a VnicEntry> {
        self.0.vnics.get(id)
    }

    /// The holder of an address of a network.
    pub fn holder(self, network: &str, address: IpAddr) -> Option<&'a VnicEntry> {
        self.0.vnics.get(self.0.networks.get(network)?.holders.get(&address)?)
    }
}

impl State {
    /// A state without objects, at revision 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The store's revision that this is.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Those after an id, in order of id: for who takes a few at a time.
    pub fn vnics_after(&self, after: Option<&str>) -> impl Iterator<Item = &VnicEntry> {
        following(&self.vnics, after)
    }

    /// All of a kind in order of name, without statuses.
    pub fn objects(&self, kind: ObjectKind) -> Box<dyn Iterator<Item = AnyObject> + '_> {
        fn all<K: Kind>(of: &BTreeMap<String, Typed<K>>) -> Box<dyn Iterator<Item = AnyObject> + '_>
        where
            Typed<K>: Clone,
            AnyObject: From<Typed<K>>,
        {
            Box::new(of.values().cloned().map(AnyObject::from))
        }
        match kind {
            ObjectKind::Network => Box::new(self.networks.values().map(|entry| entry.object.clone().into())),
            ObjectKind::Group => all::<Group>(&self.groups),
            ObjectKind::AccessRule => all::<AccessRule>(&self.rules),
            ObjectKind::QosClass => Box::new(self.classes.values().map(|entry| entry.object.clone().into())),
            ObjectKind::Quota => all::<Quota>(&self.quotas),
            ObjectKind::Vnic => Box::new(self.vnics.values().map(|entry| entry.object.clone().into())),
            ObjectKind::Host => all::<Host>(&self.hosts),
        }
    }

    /// Without its status.
    pub fn object(&self, kind: ObjectKind, name: &str) -> Option<AnyObject> {
        match kind {
            ObjectKind::Network => self.networks.get(name).map(|entry| entry.object.clone().into()),
            ObjectKind::Group => self.groups.get(name).cloned().map(AnyObject::from),
            ObjectKind::AccessRule => self.rules.get(name).cloned().map(AnyObject::from),
            ObjectKind::QosClass => self.classes.get(name).map(|entry| entry.object.clone().into()),
            ObjectKind::Quota => self.quotas.get(name).cloned().map(AnyObject::from),
            ObjectKind::Vnic => self.vnics.get(name).map(|entry| entry.object.clone().into()),
            ObjectKind::Host => self.hosts.get(name).cloned().map(AnyObject::from),
        }
    }

    /// All networks, in order of name.
    pub fn networks(&self) -> impl Iterator<Item = &NetworkEntry> {
        self.networks.values()
    }

    /// The network with this name.
    pub fn network(&self, name: &str) -> Option<&NetworkEntry> {
        self.networks.get(name)
    }

    /// In order of id.
    pub fn vnics(&self) -> impl Iterator<Item = &VnicEntry> {
        self.vnics.values()
    }

    /// The vNIC with this id.
    pub fn vnic(&self, id: &str) -> Option<&VnicEntry> {
        self.vnics.get(id)
    }

    /// The quota with this name.
    pub fn quota(&self, name: &str) -> Option<&Typed<Quota>> {
        self.quotas.get(name)
    }

    /// The class with this name.
    pub fn class(&self, name: &str) -> Option<&ClassEntry> {
        self.classes.get(name)
    }

    /// The host with this name.
    pub fn host(&self, name: &str) -> Option<&Typed<Host>> {
        self.hosts.get(name)
    }

    /// An object's tenant; `None` for kinds that belong to nobody.
    pub fn tenant_of(&self, object: &AnyObject) -> Option<String> {
        match object {
            AnyObject::Network(network) => Some(network.spec.tenant.clone()),
            AnyObject::Group(group) => Some(group.spec.tenant.clone()),
            AnyObject::AccessRule(rule) => Some(rule.spec.tenant.clone()),
            AnyObject::Vnic(vnic) => self.networks.get(&vnic.spec.network).map(|entry| entry.tenant().into()),
            AnyObject::QosClass(_) | AnyObject::Quota(_) | AnyObject::Host(_) => None,
        }
    }

    /// Members of a group on this host, in order of id.
    pub fn access(&self) -> AccessView<'_> {
        AccessView(self)
    }

    /// `Network a`, `Vnic b`: who names a class or a quota.
    pub(crate) fn users_of(&self, kind: ObjectKind, name: &str) -> Vec<String> {
        use alloc::format;
        let is = |of: &Option<String>| of.as_deref() == Some(name);
        let mut users = Vec::new();
        match kind {
            ObjectKind::QosClass | ObjectKind::Quota => {
                let pick = |class: &Option<String>, quota: &Option<String>| {
                    is(if kind == ObjectKind::QosClass { class } else { quota })
                };
                let networks = self.networks.values().map(|entry| &entry.object);
                users.extend(
                    networks
                        .filter(|network| pick(&network.spec.qos_class, &network.spec.quota))
                        .map(|network| format!("Network {}", network.metadata.name)),
                );
                let vnics = self.vnics.values().map(|entry| &entry.object);
                users.extend(
                    vnics
                        .filter(|vnic| pick(&vnic.spec.qos_class, &vnic.spec.quota))
                        .map(|vnic| format!("Vnic {}", vnic.metadata.name)),
                );
            }
            ObjectKind::Group => users.extend(
                self.rules
                    .values()
                    .filter(|rule| is(&rule.spec.from.group) || is(&rule.spec.to.group))
                    .map(|rule| format!("AccessRule {}", rule.metadata.name)),
            ),
            ObjectKind::Network => {
                users.extend(
                    self.networks.get(name).into_iter().flat_map(|entry| entry.vnics()).map(|id| format!("Vnic {id}")),
                );
                let chosen = |group: &&Typed<Group>| {
                    group.spec.members.iter().any(|member| member.networks.iter().any(|network| network == name))
                };
                users.extend(self.groups.values().filter(chosen).map(|group| format!("Group {}", group.metadata.name)));
                users.extend(
                    self.rules
                        .values()
                        .filter(|rule| is(&rule.spec.from.network) || is(&rule.spec.to.network))
                        .map(|rule| format!("AccessRule {}", rule.metadata.name)),
                );
            }
            ObjectKind::AccessRule | ObjectKind::Vnic | ObjectKind::Host => {}
        }
        users
    }
}

fn following<'a, T>(map: &'a BTreeMap<String, T>, after: Option<&str>) -> impl Iterator<Item = &'a T> + use<'a, T> {
    let begin = after.map_or(Bound::Unbounded, Bound::Excluded);
    map.range::<str, _>((begin, Bound::Unbounded)).map(|(_, value)| value)
}

impl State {
    /// Those of a kind after a name, in order of name, without statuses: for who takes a few at a time.
    pub fn objects_after(&self, kind: ObjectKind, after: Option<&str>) -> Box<dyn Iterator<Item = AnyObject> + '_> {
        match kind {
            ObjectKind::Network => Box::new(following(&self.networks, after).map(|entry| entry.object.clone().into())),
            ObjectKind::Group => Box::new(following(&self.groups, after).cloned().map(AnyObject::from)),
            ObjectKind::AccessRule => Box::new(following(&self.rules, after).cloned().map(AnyObject::from)),
            ObjectKind::QosClass => Box::new(following(&self.classes, after).map(|entry| entry.object.clone().into())),
            ObjectKind::Quota => Box::new(following(&self.quotas, after).cloned().map(AnyObject::from)),
            ObjectKind::Vnic => Box::new(following(&self.vnics, after).map(|entry| entry.object.clone().into())),
            ObjectKind::Host => Box::new(following(&self.hosts, after).cloned().map(AnyObject::from)),
        }
    }
}
