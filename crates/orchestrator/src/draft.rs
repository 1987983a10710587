//! From a command to a plan: a draft is a state with changes laid over it, which are in no state yet.
use crate::DEFAULT_NETWORK;
use crate::check::Findings;
use crate::command::{Change, Command, Outcome, Plan, Reason, Refusal, USER_COUNT_MAX};
use crate::entries::{Stored, addresses_of, cursor_key, next_network_key, object_key, vnic_entry};
use crate::objects::{
    AnyObject, Cause, Group, Host, HostSpec, Kind, Labels, Metadata, Network, NetworkSpec, Object, ObjectKind,
    QosClass, Quota, Typed, Vnic, VnicSpec,
};
use crate::pool::Pool;
use crate::share::{Shares, entries_of_group};
use crate::state::{ClassEntry, NetworkEntry, State, VnicEntry};
use crate::writer::Writer;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::IpAddr;
use freeflow_protocol::admin::{OWN_LABELS, overlay_number};
use freeflow_verbs::NetworkId;

mod addresses;
mod rule;

/// Users of an object that a refusal names.
const USERS_NAMED_MAX: usize = 5;

impl State {
    /// The changes that a command by hand would make.
    ///
    /// # Errors
    /// [`Refusal`]: it can't be done, and nothing of it is.
    pub fn plan(&self, command: &Command) -> Result<Plan, Refusal> {
        self.plan_by(&Writer::Hand, command)
    }

    /// The changes that a command by this writer would make.
    ///
    /// # Errors
    /// [`Refusal`]: it can't be done, and nothing of it is.
    pub fn plan_by(&self, writer: &Writer, command: &Command) -> Result<Plan, Refusal> {
        // Containers' vNICs and the host itself are nobody's declaration.
        let is_own = matches!(command, Command::Attach { .. } | Command::Detach { .. } | Command::Begin { .. });
        let mut draft = Draft::of(self, if is_own { &Writer::Copy } else { writer });
        draft.shares.is_copy = !is_own && *writer == Writer::Copy;
        draft.shares.is_managers = matches!(writer, Writer::Manager(_));
        match command {
            Command::Apply { objects } => draft.apply(objects)?,
            Command::ApplyForCluster { objects } => {
                draft.is_for_cluster = true;
                draft.apply(objects)?;
            }
            Command::Delete { kind, name, version } => draft.delete(*kind, name, *version)?,
            Command::Attach { id, title, network, address, labels } => {
                draft.shares.is_hosts = true;
                draft.attach(id, title, network, *address, labels)?;
            }
            Command::Detach { id } if self.vnics.contains_key(id) => draft.delete(ObjectKind::Vnic, id, None)?,
            Command::Detach { .. } => {}
            Command::SetDataPath { network, path } => {
                let missing = || Refusal::new(Reason::NotFound, "no such network").about(ObjectKind::Network, network);
                let mut object = self.networks.get(network).ok_or_else(missing)?.object.clone();
                object.spec.data_path = *path;
                draft.network(0, &object)?;
            }
            Command::Begin { host, pool, range, bridge } => draft.begin(host, *pool, *range, bridge)?,
        }
        Ok(draft.finish())
    }
}

struct Draft<'a> {
    state: &'a State,
    writer: &'a Writer,
    /// Without holders: those are in `holders` and in the state.
    networks: BTreeMap<String, NetworkEntry>,
    groups: BTreeMap<String, Typed<Group>>,
    classes: BTreeMap<String, ClassEntry>,
    quotas: BTreeMap<String, Typed<Quota>>,
    vnics: BTreeMap<String, VnicEntry>,
    /// By network and address.
    holders: BTreeMap<(String, IpAddr), String>,
    /// Addresses that new vNICs of the same command ask for: not given to others that ask for none.
    asked: BTreeSet<(String, IpAddr)>,
    new_vnics: BTreeMap<String, u32>,
    cursors: BTreeMap<String, u32>,
    next_network: u32,
    /// Networks by the numbers of their overlays, where they were needed.
    overlays: Option<BTreeMap<u32, String>>,
    /// Its vNICs have addresses that go from host to host.
    is_for_cluster: bool,
    shares: Shares,
    writes: Vec<(String, Option<Vec<u8>>)>,
    results: BTreeMap<usize, Outcome>,
}

/// Those that others name come before these.
const fn rank(kind: ObjectKind) -> u8 {
    match kind {
        ObjectKind::Host | ObjectKind::QosClass | ObjectKind::Quota => 0,
        ObjectKind::Network => 1,
        ObjectKind::Group => 2,
        ObjectKind::Vnic => 3,
        ObjectKind::AccessRule => 4,
    }
}

/// Causes that a refusal names; of the others it says how many there are.
const CAUSE_COUNT_MAX: usize = 16;

fn refuse_if_bad(findings: Findings, kind: ObjectKind, name: &str) -> Result<(), Refusal> {
    let mut causes = findings.0;
    if causes.is_empty() {
        return Ok(());
    }
    let others = causes.len().saturating_sub(CAUSE_COUNT_MAX);
    if others > 0 {
        causes.truncate(CAUSE_COUNT_MAX);
        causes.push(Cause::new("", format!("and {others} more")));
    }
    let message = causes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Err(Refusal { causes, ..Refusal::new(Reason::Invalid, message).about(kind, name) })
}

/// Somebody else has changed it since it was read.
fn conflict(asked: u64, there: Option<u64>) -> Refusal {
    let there = match there {
        Some(there) => format!("it is at {there}"),
        None => "it is not there".into(),
    };
    Refusal::new(Reason::Conflict, format!("metadata.resourceVersion is {asked}, and {there}: read it again"))
}

/// The number after the largest, or if there is none, the smallest that is free.
fn free_number(used: impl Iterator<Item = u16>) -> u16 {
    let used: BTreeSet<u16> = used.collect();
    let next = used.last().map_or(Some(0), |last| last.checked_add(1));
    next.or_else(|| (0..u16::MAX).find(|number| !used.contains(number))).expect("there are fewer objects than numbers")
}

impl<'a> Draft<'a> {
    fn of(state: &'a State, writer: &'a Writer) -> Self {
        Self {
            state,
            writer,
            networks: BTreeMap::new(),
            groups: BTreeMap::new(),
            classes: BTreeMap::new(),
            quotas: BTreeMap::new(),
            vnics: BTreeMap::new(),
            holders: BTreeMap::new(),
            asked: BTreeSet::new(),
            new_vnics: BTreeMap::new(),
            cursors: BTreeMap::new(),
            next_network: state.next_network.value.max(1),
            overlays: None,
            is_for_cluster: false,
            shares: Shares::default(),
            writes: Vec::new(),
            results: BTreeMap::new(),
        }
    }

    /// The object to store for one that a writer gave, and the kind of change.
    fn settle<K: Kind>(
        &self,
        kind: ObjectKind,
        new: &Typed<K>,
        old: Option<&Typed<K>>,
    ) -> Result<(Typed<K>, Change), Refusal> {
        let name = new.metadata.name.as_str();
        let there = old.map(|old| old.metadata.resource_version);
        match (new.metadata.resource_version, there) {
            (None | Some(0), None) | (None, Some(_)) => {}
            (Some(asked), Some(there)) if there == Some(asked) => {}
            (Some(asked), there) => {
                return Err(conflict(asked, there.flatten()).about(kind, name));
            }
        }
        let changed = old.is_none_or(|old| old.spec != new.spec);
        let relabelled = old.is_some_and(|old| old.metadata.labels != new.metadata.labels);
        let old_metadata = old.map(|old| &old.metadata);
        let manager = self.writer.manager_after(kind, &new.metadata, old_metadata, changed || relabelled)?;
        let handed_over = old.is_some_and(|old| old.metadata.manager != manager);
        let change = match old {
            None => Change::Created,
            Some(_) if changed || relabelled || handed_over => Change::Configured,
            Some(_) => Change::Unchanged,
        };
        let generation = old.map_or(0, |old| old.metadata.generation.unwrap_or(1)) + u64::from(changed);
        let metadata = Metadata {
            name: name.into(),
            labels: new.metadata.labels.clone(),
            resource_version: there.flatten(),
            generation: Some(generation),
            manager,
        };
        Ok((Object::new::<K>(metadata, new.spec.clone()), change))
    }

    fn finish(mut self) -> Plan {
        if self.next_network != self.state.next_network.value.max(1) {
            self.writes.push((next_network_key(), Some(self.next_network.to_string().into_bytes())));
        }
        for (network, next) in &self.cursors {
            self.writes.push((cursor_key(network), Some(next.to_string().into_bytes())));
        }
        Plan { writes: self.writes, results: self.results.into_values().collect() }
    }

    fn get_network(&self, name: &str) -> Option<&NetworkEntry> {
        self.networks.get(name).or_else(|| self.state.networks.get(name))
    }

    fn group(&self, name: &str) -> Option<&Typed<Group>> {
        self.groups.get(name).or_else(|| self.state.groups.get(name))
    }

    fn has_class(&self, name: &str) -> bool {
        self.classes.contains_key(name) || self.state.classes.contains_key(name)
    }

    fn quota(&self, name: &str) -> Option<&Typed<Quota>> {
        self.quotas.get(name).or_else(|| self.state.quotas.get(name))
    }

    fn all_networks(&self) -> impl Iterator<Item = &NetworkEntry> {
        let old = self.state.networks.iter().filter(|(name, _)| !self.networks.contains_key(*name));
        old.map(|(_, entry)| entry).chain(self.networks.values())
    }

    fn holder(&self, network: &str, address: IpAddr) -> Option<&str> {
        let new = self.holders.get(&(network.to_string(), address));
        let old = || self.state.networks.get(network)?.holders.get(&address);
        new.or_else(old).map(String::as_str)
    }

    fn vnic_count(&self, network: &str) -> u32 {
        let old = self.state.networks.get(network).map_or(0, NetworkEntry::vnic_count);
        old + self.new_vnics.get(network).copied().unwrap_or(0)
    }

    fn apply(&mut self, objects: &[AnyObject]) -> Result<(), Refusal> {
        let mut seen = BTreeSet::new();
        for object in objects {
            if !seen.insert((object.kind(), object.name())) {
                let message = "it is there twice in one request";
                return Err(Refusal::new(Reason::Invalid, message).about(object.kind(), object.name()));
            }
            if let AnyObject::Vnic(vnic) = object {
                self.asked.extend(vnic.spec.addresses.iter().map(|address| (vnic.spec.network.clone(), *address)));
            }
        }
        let mut order: Vec<usize> = (0..objects.len()).collect();
        // Of vNICs those that ask for addresses first, so that the search for the others' does not begin at each again.
        let asks_nothing =
            |object: &AnyObject| matches!(object, AnyObject::Vnic(vnic) if vnic.spec.addresses.is_empty());
        order.sort_by_key(|&at| (rank(objects[at].kind()), asks_nothing(&objects[at])));
        for (done, &at) in order.iter().enumerate() {
            match &objects[at] {
                AnyObject::Network(object) => self.network(at, object)?,
                AnyObject::Group(object) => self.put_group(at, object)?,
                AnyObject::AccessRule(object) => self.rule(at, object)?,
                AnyObject::QosClass(object) => self.class(at, object)?,
                AnyObject::Quota(object) => self.put_quota(at, object)?,
                AnyObject::Vnic(object) => self.vnic(at, object, None)?,
                AnyObject::Host(object) => self.host(at, object)?,
            }
            let next = order.get(done + 1).map(|&next| rank(objects[next].kind()));
            if rank(objects[at].kind()) == rank(ObjectKind::Network) && next != Some(rank(ObjectKind::Network)) {
                self.check_overlaps()?;
            }
        }
        Ok(())
    }

    /// Notes what becomes of an object, and what is to be stored for it. False: nothing changes.
    fn note<K: Kind>(
        &mut self,
        at: usize,
        kind: ObjectKind,
        (object, what): (&Typed<K>, Change),
        stored: impl FnOnce(Stored<K::Spec>) -> Stored<K::Spec>,
    ) -> Result<bool, Refusal>
    where
        AnyObject: From<Typed<K>>,
    {
        let name = object.metadata.name.clone();
        let any: AnyObject = object.clone().into();
        if what != Change::Unchanged {
            let tenant = self.tenant_of(&any);
            let (key, bytes) = (object_key(kind, &name), stored(Stored::of(object)).bytes());
            let created = if what == Change::Created { self.shares.create(self.state, kind, &tenant) } else { Ok(()) };
            let stored = created.and_then(|()| self.shares.store(self.state, &key, &tenant, bytes.len()));
            stored.map_err(|refusal| refusal.about(kind, &name))?;
            self.writes.push((key, Some(bytes)));
        }
        self.results.insert(at, Outcome { kind, name, what, object: any });
        Ok(what != Change::Unchanged)
    }

    /// The object's tenant; "" where it belongs to none.
    fn tenant_of(&self, object: &AnyObject) -> String {
        let of_vnic = |vnic: &Typed<Vnic>| self.get_network(&vnic.spec.network).map(|entry| entry.tenant().into());
        match object {
            AnyObject::Vnic(vnic) => of_vnic(vnic),
            other => self.state.tenant_of(other),
        }
        .unwrap_or_default()
    }

    pub fn network(&mut self, at: usize, given: &Typed<Network>) -> Result<(), Refusal> {
        let kind = ObjectKind::Network;
        let name = given.metadata.name.as_str();
        let old = self.state.networks.get(name);
        let mut given = given.clone();
        if let Some(old) = old.filter(|_| given.spec.cidrs.is_empty()) {
            given.spec.cidrs.clone_from(&old.object.spec.cidrs);
            if given.spec.range.is_none() {
                given.spec.range.clone_from(&old.object.spec.range);
            }
        }
        if let Some(old) = old.filter(|old| given.spec.floating.is_none() && given.spec.cidrs == old.object.spec.cidrs)
        {
            given.spec.floating.clone_from(&old.object.spec.floating);
        }
        let mut findings = Findings::default();
        findings.metadata(&given.metadata);
        findings.labels("metadata.labels", &given.metadata.labels);
        if old.is_none_or(|old| old.own_bridge.is_none()) {
            findings.network(&given.spec);
        }
        self.check_named(&mut findings, given.spec.qos_class.as_deref(), given.spec.quota.as_deref());
        if old.is_none() {
            self.check_overlay(&mut findings, name);
        }
        if let Some(old) = old {
            self.check_kept(&mut findings, &given.spec, old);
        }
        refuse_if_bad(findings, kind, name)?;
        let (object, what) = self.settle::<Network>(kind, &given, old.map(|old| &old.object))?;
        let addresses = addresses_of(&object).map_err(|why| Refusal::new(Reason::Invalid, why).about(kind, name))?;
        let (id, tenant_number) = match old {
            Some(old) => (old.id, old.tenant_number),
            None => (self.new_network_id(), self.tenant_number(&object.spec.tenant)),
        };
        let own_bridge = old.and_then(|old| old.own_bridge.clone());
        self.put_network(
            at,
            what,
            NetworkEntry {
                object,
                id,
                pool: addresses.pool,
                range: addresses.range,
                floating: addresses.floating,
                pool6: addresses.pool6,
                own_bridge,
                tenant_number,
                holders: BTreeMap::new(),
                vnic_count: 0,
            },
        )
    }

    /// A new network has an overlay of its own: with the number of another one, which may be another tenant's, their
    /// containers would be in one segment, also where no host has both.
    fn check_overlay(&mut self, findings: &mut Findings, name: &str) {
        if self.shares.is_copy || name == DEFAULT_NETWORK {
            return;
        }
        let state = self.state;
        let there = || state.networks.keys().map(|name| (overlay_number(name), name.clone())).collect();
        let overlays = self.overlays.get_or_insert_with(there);
        if overlays.entry(overlay_number(name)).or_insert_with(|| name.into()) != name {
            findings.add(
                "metadata.name",
                "the number of its overlay follows from it, and is another network's: choose another name",
            );
        }
    }

    fn put_network(&mut self, at: usize, what: Change, entry: NetworkEntry) -> Result<(), Refusal> {
        let (id, number, bridge) = (Some(entry.id.0), Some(entry.tenant_number), entry.own_bridge.clone());
        let stored = |stored| Stored { id, number, bridge, ..stored };
        if self.note::<Network>(at, ObjectKind::Network, (&entry.object, what), stored)? {
            self.networks.insert(entry.name().into(), entry);
        }
        Ok(())
    }

    fn new_network_id(&mut self) -> NetworkId {
        let id = NetworkId(self.next_network);
        self.next_network += 1;
        id
    }

    fn tenant_number(&self, tenant: &str) -> u16 {
        let same = self.all_networks().find(|network| network.tenant() == tenant);
        same.map_or_else(
            || free_number(self.all_networks().map(|network| network.tenant_number)),
            |network| network.tenant_number,
        )
    }

    fn check_named(&self, findings: &mut Findings, class: Option<&str>, quota: Option<&str>) {
        if let Some(class) = class.filter(|class| !self.has_class(class)) {
            findings.add("spec.qosClass", format!("there is no QosClass {class}"));
        }
        if let Some(quota) = quota.filter(|quota| self.quota(quota).is_none()) {
            findings.add("spec.quota", format!("there is no Quota {quota}"));
        }
    }

    /// Checks the fields of a network that can't be changed.
    fn check_kept(&self, findings: &mut Findings, spec: &NetworkSpec, old: &NetworkEntry) {
        let was = &old.object.spec;
        let part = spec.floating.as_deref().and_then(|text| text.parse::<Pool>().ok());
        let is_in = |part: Option<Pool>, address: &IpAddr| match address {
            IpAddr::V4(address) => part.is_some_and(|part| part.contains(*address)),
            IpAddr::V6(_) => false,
        };
        if part != old.floating
            && old.holders.keys().any(|address| is_in(part, address) || is_in(old.floating, address))
        {
            findings.add("spec.floating", "can't be changed while vNICs have addresses of it");
        }
        if spec.tenant != was.tenant {
            findings.add("spec.tenant", format!("can't be changed; it is {}", was.tenant));
        }
        let why = if old.own_bridge.is_some() {
            "are those that `freeflow up` was given (--pool, --range), and can't be changed here"
        } else if old.vnic_count() > 0 {
            "can't be changed while vNICs have addresses of them"
        } else {
            return;
        };
        if spec.cidrs != was.cidrs {
            findings.add("spec.cidrs", format!("the network's addresses {why}"));
        }
        if spec.range != was.range {
            findings.add("spec.range", format!("the network's addresses {why}"));
        }
    }

    /// Networks of one tenant have no address in common.
    fn check_overlaps(&self) -> Result<(), Refusal> {
        for network in self.networks.values() {
            let others = || {
                self.all_networks().filter(|other| other.tenant() == network.tenant() && other.name() != network.name())
            };
            for (cidr, text) in network.cidrs() {
                let meets = |other: &&NetworkEntry| other.cidrs().any(|(other, _)| cidr.overlaps(other));
                if let Some(other) = others().find(meets) {
                    let at = network.object.spec.cidrs.iter().position(|own| *own == text).unwrap_or(0);
                    let mut findings = Findings::default();
                    findings.add(
                        format!("spec.cidrs[{at}]"),
                        format!("overlaps addresses of network {} of the same tenant", other.name()),
                    );
                    refuse_if_bad(findings, ObjectKind::Network, network.name())?;
                }
            }
        }
        Ok(())
    }

    fn class(&mut self, at: usize, given: &Typed<QosClass>) -> Result<(), Refusal> {
        let (kind, name) = (ObjectKind::QosClass, given.metadata.name.as_str());
        let mut findings = Findings::default();
        findings.metadata(&given.metadata);
        findings.labels("metadata.labels", &given.metadata.labels);
        findings.class(&given.spec);
        refuse_if_bad(findings, kind, name)?;
        let old = self.state.classes.get(name);
        let (object, what) = self.settle::<QosClass>(kind, given, old.map(|old| &old.object))?;
        let number = old.map_or_else(
            || free_number(self.state.classes.values().chain(self.classes.values()).map(|class| class.number)),
            |old| old.number,
        );
        if self.note::<QosClass>(at, kind, (&object, what), |stored| Stored { number: Some(number), ..stored })? {
            self.classes.insert(name.into(), ClassEntry { object, number });
        }
        Ok(())
    }

    fn put_quota(&mut self, at: usize, given: &Typed<Quota>) -> Result<(), Refusal> {
        let (kind, name) = (ObjectKind::Quota, given.metadata.name.as_str());
        let mut findings = Findings::default();
        findings.metadata(&given.metadata);
        findings.labels("metadata.labels", &given.metadata.labels);
        findings.quota(&given.spec);
        refuse_if_bad(findings, kind, name)?;
        let (object, what) = self.settle::<Quota>(kind, given, self.state.quotas.get(name))?;
        if self.note::<Quota>(at, kind, (&object, what), |stored| stored)? {
            self.quotas.insert(name.into(), object);
        }
        Ok(())
    }

    fn host(&mut self, at: usize, given: &Typed<Host>) -> Result<(), Refusal> {
        let (kind, name) = (ObjectKind::Host, given.metadata.name.as_str());
        let Some(old) = self.state.hosts.get(name) else {
            let message = "hosts are announced by their routers, and there is none of this name";
            return Err(Refusal::new(Reason::NotFound, message).about(kind, name));
        };
        let mut findings = Findings::default();
        findings.labels("metadata.labels", &given.metadata.labels);
        refuse_if_bad(findings, kind, name)?;
        let (object, what) = self.settle::<Host>(kind, given, Some(old))?;
        self.note::<Host>(at, kind, (&object, what), |stored| stored)?;
        Ok(())
    }

    /// A network that something of a tenant's names. Whether another tenant has it is not
    /// disclosed.
    fn check_network(&self, findings: &mut Findings, field: String, name: &str, tenant: &str) {
        if self.get_network(name).is_none_or(|network| network.tenant() != tenant) {
            findings.add(field, format!("tenant {tenant} has no Network {name}"));
        }
    }

    fn put_group(&mut self, at: usize, given: &Typed<Group>) -> Result<(), Refusal> {
        let (kind, name) = (ObjectKind::Group, given.metadata.name.as_str());
        let mut findings = Findings::default();
        findings.metadata(&given.metadata);
        findings.labels("metadata.labels", &given.metadata.labels);
        findings.group(&given.spec);
        for (member, selector) in given.spec.members.iter().enumerate() {
            for (number, network) in selector.networks.iter().enumerate() {
                let field = format!("spec.members[{member}].networks[{number}]");
                self.check_network(&mut findings, field, network, &given.spec.tenant);
            }
        }
        let old = self.state.groups.get(name);
        check_tenant(&mut findings, &given.spec.tenant, old.map(|old| old.spec.tenant.as_str()));
        refuse_if_bad(findings, kind, name)?;
        let (object, what) = self.settle::<Group>(kind, given, old)?;
        let before = old.map_or(0, |old| entries_of_group(&old.spec));
        let selected = self.shares.select(self.state, &given.spec.tenant, before, entries_of_group(&given.spec));
        selected.map_err(|refusal| refusal.about(kind, name))?;
        if self.note::<Group>(at, kind, (&object, what), |stored| stored)? {
            self.groups.insert(name.into(), object);
        }
        Ok(())
    }

    fn attach(
        &mut self,
        id: &str,
        title: &str,
        network: &str,
        address: Option<IpAddr>,
        labels: &Labels,
    ) -> Result<(), Refusal> {
        let kind = ObjectKind::Vnic;
        if let Some(old) = self.state.vnics.get(id) {
            let same =
                old.network() == network && address.is_none_or(|address| old.object.spec.addresses.contains(&address));
            if !same {
                let message = "it exists already, and is different";
                return Err(Refusal::new(Reason::AlreadyExists, message).about(kind, id));
            }
            let labels = attached_labels(&old.object.metadata.labels, labels);
            if old.object.metadata.labels == labels {
                return self.note::<Vnic>(0, kind, (&old.object, Change::Unchanged), |stored| stored).map(drop);
            }
            check_title(title, id)?;
            let mut object = old.object.clone();
            object.metadata.labels = labels;
            return self.vnic(0, &object, Some(title));
        }
        check_title(title, id)?;
        if crate::name_is_good(network) && self.get_network(network).is_none() {
            return Err(Refusal::new(Reason::NotFound, "no such network").about(ObjectKind::Network, network));
        }
        let metadata = Metadata { name: id.into(), labels: labels.clone(), ..Metadata::default() };
        let addresses = address.into_iter().collect();
        let spec = VnicSpec { network: network.into(), addresses, qos_class: None, quota: None, hosts: Vec::new() };
        self.vnic(0, &Object::new::<Vnic>(metadata, spec), Some(title))
    }

    /// `title`: of the container that it is made for, whose labels are as they are.
    fn vnic(&mut self, at: usize, given: &Typed<Vnic>, title: Option<&str>) -> Result<(), Refusal> {
        let (kind, id) = (ObjectKind::Vnic, given.metadata.name.as_str());
        let old = self.state.vnics.get(id);
        let mut given = given.clone();
        let mut findings = Findings::default();
        findings.metadata(&given.metadata);
        if title.is_none() {
            keep_own_labels(&mut findings, &mut given.metadata.labels, old.map(|old| &old.object.metadata.labels));
        }
        if title.is_some() || old.is_some_and(|old| old.object.metadata.labels == given.metadata.labels) {
            findings.label_size("metadata.labels", &given.metadata.labels);
        } else {
            findings.labels("metadata.labels", &given.metadata.labels);
        }
        findings.latency_class(&given.metadata.labels, old.map(|old| &old.object.metadata.labels));
        findings.vnic(&given.spec);
        if !self.is_for_cluster && old.is_none_or(|old| old.object.spec.hosts != given.spec.hosts) {
            findings.no_hosts(&given.spec);
        }
        self.check_named(&mut findings, given.spec.qos_class.as_deref(), given.spec.quota.as_deref());
        if let Some(old) = old {
            if given.spec.network != old.network() {
                findings.add("spec.network", format!("can't be changed; it is {}", old.network()));
            }
            for (number, address) in given.spec.addresses.iter().enumerate() {
                if !old.object.spec.addresses.contains(address) {
                    let is = match (address, old.address6) {
                        (IpAddr::V6(_), Some(is)) => IpAddr::V6(is),
                        _ => IpAddr::V4(old.address),
                    };
                    findings.add(format!("spec.addresses[{number}]"), format!("can't be changed; it is {is}"));
                }
            }
            given.spec.addresses.clone_from(&old.object.spec.addresses);
        } else if self.get_network(&given.spec.network).is_none() {
            findings.add("spec.network", format!("there is no Network {}", given.spec.network));
        }
        refuse_if_bad(findings, kind, id)?;
        if old.is_none() {
            given.spec.addresses = self.take_addresses(id, &given.spec)?;
        }
        let (object, what) = self.settle::<Vnic>(kind, &given, old.map(|old| &old.object))?;
        let title = title.or(old.map(|old| old.title.as_str())).unwrap_or(id);
        let stored = |stored| Stored { title: (title != id).then(|| title.to_string()), ..stored };
        if self.note::<Vnic>(at, kind, (&object, what), stored)? {
            let broken = |why: String| Refusal::new(Reason::Internal, why).about(kind, id);
            self.vnics.insert(id.into(), vnic_entry(object, title.into()).map_err(broken)?);
        }
        Ok(())
    }

    fn delete(&mut self, kind: ObjectKind, name: &str, version: Option<u64>) -> Result<(), Refusal> {
        let refuse = |reason, message: String| Err(Refusal::new(reason, message).about(kind, name));
        let Some(object) = self.state.object(kind, name) else {
            return refuse(Reason::NotFound, "it is not there".into());
        };
        if kind == ObjectKind::Host {
            return refuse(Reason::Conflict, "it can't be deleted: a host is there as long as its router is".into());
        }
        if self.state.networks.get(name).is_some_and(|entry| kind == ObjectKind::Network && entry.own_bridge.is_some())
        {
            return refuse(Reason::Conflict, "it is built in (`freeflow up` makes it) and can't be deleted".into());
        }
        let there = object.metadata().resource_version;
        if let Some(asked) = version.filter(|asked| there != Some(*asked)) {
            return Err(conflict(asked, there).about(kind, name));
        }
        self.writer.check_owned(kind, name, Some(object.metadata()))?;
        let mut users = self.state.users_of(kind, name);
        if !users.is_empty() {
            let more = users.len().saturating_sub(USERS_NAMED_MAX);
            let named = users[..users.len().min(USERS_NAMED_MAX)].join(", ");
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let message = format!("it is used by {named}{more}");
            users.truncate(USER_COUNT_MAX);
            return Err(Refusal { users, ..Refusal::new(Reason::InUse, message).about(kind, name) });
        }
        self.writes.push((object_key(kind, name), None));
        if kind == ObjectKind::Network && self.state.cursors.contains_key(name) {
            self.writes.push((cursor_key(name), None));
        }
        self.results.insert(0, Outcome { kind, name: name.into(), what: Change::Deleted, object });
        Ok(())
    }

    fn begin(&mut self, host: &str, pool: Pool, range: Option<Pool>, bridge: &str) -> Result<(), Refusal> {
        self.begin_host(host)?;
        let (kind, name) = (ObjectKind::Network, DEFAULT_NETWORK);
        let refuse =
            |reason, why: &str| Err(Refusal::new(reason, format!("with the pool {pool}: {why}")).about(kind, name));
        if range.is_some_and(|range| !pool.encloses(range)) {
            return refuse(Reason::Invalid, "the host's range is not a part of the network's pool");
        }
        let Some(old) = self.state.networks.get(name) else {
            let spec = NetworkSpec {
                tenant: crate::objects::DEFAULT_TENANT.into(),
                cidrs: alloc::vec![pool.to_string()],
                range: range.map(|range| range.to_string()),
                ..NetworkSpec::default()
            };
            let metadata = Metadata { name: name.into(), generation: Some(1), ..Metadata::default() };
            let entry = NetworkEntry {
                object: Object::new::<Network>(metadata, spec),
                id: self.new_network_id(),
                pool,
                range,
                floating: None,
                pool6: None,
                own_bridge: Some(bridge.into()),
                tenant_number: 0,
                holders: BTreeMap::new(),
                vnic_count: 0,
            };
            return self.put_network(1, Change::Created, entry);
        };
        if old.pool != pool || old.assigned() != range.unwrap_or(pool) {
            return refuse(Reason::AlreadyExists, "it exists already, and is different");
        }
        if old.own_bridge.as_deref() != Some(bridge) {
            let entry = NetworkEntry { own_bridge: Some(bridge.into()), holders: BTreeMap::new(), ..old.clone() };
            self.put_network(1, Change::Configured, entry)?;
        }
        Ok(())
    }

    /// There is one host, which may have got another name.
    fn begin_host(&mut self, host: &str) -> Result<(), Refusal> {
        let mut findings = Findings::default();
        let metadata = Metadata { name: host.into(), ..Metadata::default() };
        findings.metadata(&metadata);
        refuse_if_bad(findings, ObjectKind::Host, host)?;
        if self.state.hosts.contains_key(host) {
            return Ok(());
        }
        let former = self.state.hosts.values().next();
        let spec = former.map_or_else(HostSpec::default, |former| former.spec.clone());
        for name in self.state.hosts.keys() {
            self.writes.push((object_key(ObjectKind::Host, name), None));
        }
        let object = Object::new::<Host>(Metadata { generation: Some(1), ..metadata }, spec);
        self.note::<Host>(0, ObjectKind::Host, (&object, Change::Created), |stored| stored).map(drop)
    }
}

fn check_title(title: &str, id: &str) -> Result<(), Refusal> {
    if title.len() > crate::NAME_BYTES_MAX {
        return Err(Refusal::new(Reason::Invalid, "too long a name of a container").about(ObjectKind::Vnic, id));
    }
    Ok(())
}

/// Labels of a vNIC that is there and gets a container: what an earlier container asked for is nothing to this one.
fn attached_labels(old: &Labels, given: &Labels) -> Labels {
    let is_declared = !OWN_LABELS.iter().any(|key| old.contains_key(*key));
    let mut labels = if is_declared || given.is_empty() { old.clone() } else { Labels::new() };
    labels.extend(given.iter().map(|(key, value)| (key.clone(), value.clone())));
    labels
}

/// The labels that say whose container a vNIC belongs to stay as they were, also where they are not given.
fn keep_own_labels(findings: &mut Findings, labels: &mut Labels, old: Option<&Labels>) {
    for key in OWN_LABELS {
        let old = old.and_then(|old| old.get(key));
        match (labels.get(key), old) {
            (None, Some(old)) => {
                labels.insert(key.into(), old.clone());
            }
            (Some(given), old) if old != Some(given) => {
                findings.add(format!("metadata.labels.{key}"), "freeflow itself uses this label, for its containers");
            }
            _ => {}
        }
    }
}

fn check_tenant(findings: &mut Findings, tenant: &str, was: Option<&str>) {
    if let Some(was) = was.filter(|was| *was != tenant) {
        findings.add("spec.tenant", format!("can't be changed; it is {was}"));
    }
}
