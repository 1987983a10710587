//! Between the state and the entries of a store: what an object is stored as, and how the state follows the entries.
use crate::cidr::Pool6;
use crate::command::Plan;
use crate::objects::{
    AccessRule, AnyObject, Group, Host, Kind, Metadata, Network, Object, ObjectKind, QosClass, Quota, Typed, Vnic,
};
use crate::pool::Pool;
use crate::state::{ClassEntry, Hidden, NetworkEntry, State, VnicEntry};
use crate::store::{Compare, Listing, Revision, Transaction, Write};
use crate::{VNIC_COUNT_MAX, name_is_good};
use alloc::collections::btree_map;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::IpAddr;
use freeflow_verbs::NetworkId;
use serde::{Deserialize, Serialize};

/// Before all keys of the store.
pub const KEY_PREFIX: &str = "/freeflow.io/v1/";
/// Keys of what no object shows.
const HIDDEN: &str = "hidden/";
const CURSORS: &str = "hidden/cursors/";
pub(crate) const NEXT_NETWORK: &str = "hidden/next-network";

/// Where an object is stored.
pub fn object_key(kind: ObjectKind, name: &str) -> String {
    format!("{KEY_PREFIX}{}/{name}", kind.plural())
}

/// Which object is stored there; `None`: none is.
pub fn object_of_key(key: &str) -> Option<(ObjectKind, &str)> {
    let (plural, name) = key.strip_prefix(KEY_PREFIX)?.split_once('/')?;
    let kind = ObjectKind::ALL.iter().find(|kind| kind.plural() == plural)?;
    Some((*kind, name))
}

pub(crate) fn cursor_key(network: &str) -> String {
    format!("{KEY_PREFIX}{CURSORS}{network}")
}

pub(crate) fn next_network_key() -> String {
    format!("{KEY_PREFIX}{NEXT_NETWORK}")
}

/// An object as it is stored: without what the store knows itself, and with what readers are not shown.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Stored<S> {
    pub metadata: Metadata,
    pub spec: S,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
    /// The tenant's or the class's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

impl<S: Clone + Serialize> Stored<S> {
    pub fn of<T>(object: &Object<S, T>) -> Self {
        let metadata = Metadata { resource_version: None, ..object.metadata.clone() };
        Self { metadata, spec: object.spec.clone(), id: None, number: None, bridge: None, title: None }
    }

    pub fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("objects have no keys but strings")
    }
}

fn stored<K: Kind>(bytes: &[u8], revision: Revision) -> Result<(Typed<K>, Stored<()>), String>
where
    K::Spec: for<'de> Deserialize<'de>,
{
    let Stored { metadata, spec, id, number, bridge, title } =
        serde_json::from_slice::<Stored<K::Spec>>(bytes).map_err(|error| error.to_string())?;
    let rest = Stored { metadata: Metadata::default(), spec: (), id, number, bridge, title };
    let metadata = Metadata { resource_version: Some(revision.0), ..metadata };
    Ok((Object::new::<K>(metadata, spec), rest))
}

/// The object in an entry of the store.
pub fn decode_object(key: &str, value: &[u8], revision: Revision) -> Option<AnyObject> {
    fn of<K: Kind>(value: &[u8], revision: Revision) -> Option<AnyObject>
    where
        AnyObject: From<Typed<K>>,
    {
        stored::<K>(value, revision).ok().map(|(object, _)| object.into())
    }
    let (kind, _) = object_of_key(key)?;
    match kind {
        ObjectKind::Network => of::<Network>(value, revision),
        ObjectKind::Group => of::<Group>(value, revision),
        ObjectKind::AccessRule => of::<AccessRule>(value, revision),
        ObjectKind::QosClass => of::<QosClass>(value, revision),
        ObjectKind::Quota => of::<Quota>(value, revision),
        ObjectKind::Vnic => of::<Vnic>(value, revision),
        ObjectKind::Host => of::<Host>(value, revision),
    }
}

impl State {
    /// The state in a store's entries.
    ///
    /// # Errors
    /// A sentence for people: which entry makes no sense, and why.
    pub fn of(listing: &Listing) -> Result<Self, String> {
        let mut state = Self::new();
        // Keys are in order, and `networks` comes before `vnics`.
        for entry in &listing.entries {
            let put = state.put(&entry.key, &entry.value, entry.modified);
            put.map_err(|why| format!("{}: {why}", entry.key))?;
        }
        state.revision = listing.revision;
        Ok(state)
    }

    /// The plan's writes were stored, as this revision.
    pub fn adopt(&mut self, plan: &Plan, revision: Revision) {
        for (key, value) in &plan.writes {
            let done = match value {
                Some(value) => self.put(key, value, revision),
                None => {
                    self.remove(key);
                    Ok(())
                }
            };
            done.expect("a plan of this state fits it");
        }
        self.revision = self.revision.max(revision);
    }

    /// The plan as a transaction that is done only if nobody else has changed what it changes.
    pub fn transaction(&self, plan: &Plan) -> Transaction {
        let compare = |(key, _): &(String, _)| Compare { key: key.clone(), modified: self.modified(key) };
        let write =
            |(key, value): &(String, Option<Vec<u8>>)| Write { key: key.clone(), value: value.clone(), lease: None };
        Transaction {
            compares: plan.writes.iter().map(compare).collect(),
            writes: plan.writes.iter().map(write).collect(),
        }
    }

    fn modified(&self, key: &str) -> Option<Revision> {
        let rest = key.strip_prefix(KEY_PREFIX)?;
        if rest == NEXT_NETWORK {
            return self.next_network.modified;
        }
        if let Some(network) = rest.strip_prefix(CURSORS) {
            return self.cursors.get(network).and_then(|cursor| cursor.modified);
        }
        let (kind, name) = object_of_key(key)?;
        let metadata = match kind {
            ObjectKind::Network => self.networks.get(name).map(|entry| &entry.object.metadata),
            ObjectKind::Group => self.groups.get(name).map(|object| &object.metadata),
            ObjectKind::AccessRule => self.rules.get(name).map(|object| &object.metadata),
            ObjectKind::QosClass => self.classes.get(name).map(|entry| &entry.object.metadata),
            ObjectKind::Quota => self.quotas.get(name).map(|object| &object.metadata),
            ObjectKind::Vnic => self.vnics.get(name).map(|entry| &entry.object.metadata),
            ObjectKind::Host => self.hosts.get(name).map(|object| &object.metadata),
        };
        metadata.and_then(|metadata| metadata.resource_version).map(Revision)
    }

    fn put(&mut self, key: &str, value: &[u8], revision: Revision) -> Result<(), String> {
        let rest = key.strip_prefix(KEY_PREFIX).ok_or("not a key of this store")?;
        if let Some(hidden) = rest.strip_prefix(HIDDEN) {
            return self.put_hidden(hidden, value, revision);
        }
        let (kind, name) = object_of_key(key).ok_or("not an object's key")?;
        if !name_is_good(name) {
            return Err("a bad name".into());
        }
        macro_rules! plain {
            ($kind:ident, $map:ident) => {{
                let (object, _) = stored::<$kind>(value, revision)?;
                same_name(name, &object.metadata)?;
                self.$map.insert(name.into(), object);
            }};
        }
        match kind {
            ObjectKind::Network => self.put_network(name, value, revision)?,
            ObjectKind::Vnic => self.put_vnic(name, value, revision)?,
            ObjectKind::QosClass => {
                let (object, rest) = stored::<QosClass>(value, revision)?;
                same_name(name, &object.metadata)?;
                let number = rest.number.ok_or("no number")?;
                self.classes.insert(name.into(), ClassEntry { object, number });
            }
            ObjectKind::Group => plain!(Group, groups),
            ObjectKind::AccessRule => plain!(AccessRule, rules),
            ObjectKind::Quota => plain!(Quota, quotas),
            ObjectKind::Host => plain!(Host, hosts),
        }
        let tenant = self.tenant_of_key(kind, name).unwrap_or_default().to_string();
        self.sizes.set(key, tenant, key.len() + value.len());
        Ok(())
    }

    fn tenant_of_key(&self, kind: ObjectKind, name: &str) -> Option<&str> {
        match kind {
            ObjectKind::Network => self.networks.get(name).map(|entry| entry.tenant()),
            ObjectKind::Group => self.groups.get(name).map(|group| group.spec.tenant.as_str()),
            ObjectKind::AccessRule => self.rules.get(name).map(|rule| rule.spec.tenant.as_str()),
            ObjectKind::Vnic => self.networks.get(self.vnics.get(name)?.network()).map(|entry| entry.tenant()),
            ObjectKind::QosClass | ObjectKind::Quota | ObjectKind::Host => None,
        }
    }

    fn put_hidden(&mut self, what: &str, value: &[u8], revision: Revision) -> Result<(), String> {
        let value = serde_json::from_slice(value).map_err(|error| error.to_string())?;
        let hidden = Hidden { value, modified: Some(revision) };
        match what.strip_prefix("cursors/") {
            Some(network) => {
                self.cursors.insert(network.into(), hidden);
            }
            None if what == "next-network" => self.next_network = hidden,
            None => return Err("not a key of this version".into()),
        }
        Ok(())
    }

    fn put_network(&mut self, name: &str, value: &[u8], revision: Revision) -> Result<(), String> {
        let (object, rest) = stored::<Network>(value, revision)?;
        same_name(name, &object.metadata)?;
        let before = self.networks.remove(name);
        let id = NetworkId(rest.id.ok_or("no id")?);
        if before.as_ref().is_none_or(|before| before.id != id) && self.networks.values().any(|other| other.id == id) {
            return Err("the id of another network".into());
        }
        let Addresses { pool, pool6, range, floating } = addresses_of(&object)?;
        let (holders, vnic_count) = before.map(|before| (before.holders, before.vnic_count)).unwrap_or_default();
        let (own_bridge, tenant_number) = (rest.bridge, rest.number.ok_or("no number")?);
        let entry =
            NetworkEntry { object, id, pool, range, floating, pool6, own_bridge, tenant_number, holders, vnic_count };
        self.networks.insert(name.into(), entry);
        Ok(())
    }

    fn put_vnic(&mut self, id: &str, value: &[u8], revision: Revision) -> Result<(), String> {
        let (object, rest) = stored::<Vnic>(value, revision)?;
        same_name(id, &object.metadata)?;
        self.forget_vnic(id);
        if self.vnics.len() >= VNIC_COUNT_MAX {
            return Err("too many vNICs".into());
        }
        let entry = vnic_entry(object, rest.title.unwrap_or_else(|| id.to_string()))?;
        let network = self.networks.get_mut(entry.network()).ok_or("its network is not there")?;
        let part = network.part(network.is_floating(entry.address));
        if part.is_none_or(|(pool, _)| !pool.is_assignable(entry.address)) {
            return Err("its address is none of its network".into());
        }
        let is_good = |address| part.and_then(|(_, pool6)| pool6).is_some_and(|pool| pool.is_assignable(address));
        if entry.address6.is_some_and(|address| !is_good(address)) {
            return Err("its IPv6 address is none of its network".into());
        }
        for &address in &entry.object.spec.addresses {
            if let Some(other) = network.holders.insert(address, id.into()) {
                return Err(format!("its address {address} is that of {other}, too"));
            }
        }
        network.vnic_count += 1;
        if let Some(class) = &entry.object.spec.qos_class {
            let pair = (entry.network().to_string(), class.clone());
            *self.own_classes.entry(pair).or_default() += 1;
        }
        self.vnics.insert(id.into(), entry);
        Ok(())
    }

    fn forget_vnic(&mut self, id: &str) {
        let Some(entry) = self.vnics.remove(id) else { return };
        if let Some(network) = self.networks.get_mut(entry.network()) {
            for address in &entry.object.spec.addresses {
                network.holders.remove(address);
            }
            network.vnic_count -= 1;
        }
        if let Some(class) = entry.object.spec.qos_class
            && let btree_map::Entry::Occupied(mut count) = self.own_classes.entry((entry.object.spec.network, class))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    fn remove(&mut self, key: &str) {
        let rest = key.strip_prefix(KEY_PREFIX).unwrap_or_default();
        if let Some(network) = rest.strip_prefix(CURSORS) {
            self.cursors.remove(network);
        }
        let Some((kind, name)) = object_of_key(key) else { return };
        self.sizes.remove(key);
        match kind {
            ObjectKind::Network => drop(self.networks.remove(name)),
            ObjectKind::Group => drop(self.groups.remove(name)),
            ObjectKind::AccessRule => drop(self.rules.remove(name)),
            ObjectKind::QosClass => drop(self.classes.remove(name)),
            ObjectKind::Quota => drop(self.quotas.remove(name)),
            ObjectKind::Vnic => self.forget_vnic(name),
            ObjectKind::Host => drop(self.hosts.remove(name)),
        }
    }
}

fn same_name(name: &str, metadata: &Metadata) -> Result<(), String> {
    if metadata.name == name { Ok(()) } else { Err(format!("it is called {}", metadata.name)) }
}

pub(crate) struct Addresses {
    pub pool: Pool,
    pub pool6: Option<Pool6>,
    pub range: Option<Pool>,
    pub floating: Option<Pool>,
}

/// The addresses of a network whose spec was found good.
pub(crate) fn addresses_of(object: &Typed<Network>) -> Result<Addresses, String> {
    let pools = || object.spec.cidrs.iter();
    let pool = pools().find_map(|text| text.parse().ok()).ok_or("no range of IPv4 addresses")?;
    let pool6 = pools().find_map(|text| text.parse().ok());
    let part = |text: &Option<String>| text.as_deref().map(str::parse).transpose().map_err(|_| "a bad range");
    let (range, floating) = (part(&object.spec.range)?, part(&object.spec.floating)?);
    if [range, floating].into_iter().flatten().any(|part| !Pool::encloses(pool, part)) {
        return Err("its range is not a part of it".into());
    }
    Ok(Addresses { pool, pool6, range, floating })
}

/// A vNIC that has its addresses.
pub(crate) fn vnic_entry(object: Typed<Vnic>, title: String) -> Result<VnicEntry, String> {
    let (mut v4, mut v6) = (None, None);
    for address in &object.spec.addresses {
        let twice = match *address {
            IpAddr::V4(address) => v4.replace(address).is_some(),
            IpAddr::V6(address) => v6.replace(address).is_some(),
        };
        if twice {
            return Err("two addresses of a family".into());
        }
    }
    let address = v4.ok_or("no IPv4 address")?;
    Ok(VnicEntry { object, title, address, address6: v6 })
}
