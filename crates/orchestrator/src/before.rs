//! The state as it was stored before there were objects (`RUN_DIR/state.json`), and the entries that it becomes.
use crate::entries::{Stored, cursor_key, next_network_key, object_key};
use crate::name_is_good;
use crate::objects::{
    DEFAULT_TENANT, Labels, Metadata, Network as NetworkKind, NetworkSpec, Object, ObjectKind, Vnic as VnicKind,
    VnicSpec,
};
use crate::pool::Pool;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr};
use freeflow_protocol::admin::DataPath;
use serde::Deserialize;

const STATE_VERSION: u32 = 1;

#[derive(Clone, Debug, Deserialize)]
pub struct State {
    version: u32,
    networks: BTreeMap<String, Network>,
    vnics: BTreeMap<String, Vnic>,
    next_network: u32,
}

#[derive(Clone, Debug, Deserialize)]
struct Network {
    id: u32,
    name: String,
    pool: Pool,
    #[serde(default)]
    range: Option<Pool>,
    gateway: Ipv4Addr,
    bridge: String,
    #[serde(default)]
    data_path: DataPath,
    cursor: u32,
}

impl Network {
    fn assigned(&self) -> Pool {
        self.range.unwrap_or(self.pool)
    }
}

#[derive(Clone, Debug, Deserialize)]
struct Vnic {
    id: String,
    name: String,
    network: String,
    address: Ipv4Addr,
    labels: Vec<(String, String)>,
}

impl State {
    /// Whether this version of the code can use it, and whether it holds together.
    pub fn is_sound(&self) -> bool {
        let mut taken = BTreeSet::new();
        self.version == STATE_VERSION
            && self.networks.iter().all(|(name, network)| {
                *name == network.name
                    && name_is_good(name)
                    && network.id < self.next_network
                    && network.pool.encloses(network.assigned())
                    && network.gateway == network.assigned().gateway()
            })
            && self.vnics.iter().all(|(id, vnic)| {
                let network = self.networks.get(&vnic.network);
                *id == vnic.id
                    && name_is_good(id)
                    && network.is_some_and(|network| network.assigned().is_assignable(vnic.address))
                    && taken.insert((vnic.network.as_str(), vnic.address))
            })
    }

    /// The same as the entries of a store.
    pub fn entries(&self) -> Vec<(String, Option<Vec<u8>>)> {
        let metadata =
            |name: &str, labels| Metadata { name: name.into(), labels, resource_version: None, generation: Some(1) };
        let number = |value: u32| Some(value.to_string().into_bytes());
        let mut entries = Vec::new();
        for network in self.networks.values() {
            let spec = NetworkSpec {
                tenant: DEFAULT_TENANT.into(),
                cidrs: vec![network.pool.to_string()],
                range: network.range.map(|range| range.to_string()),
                data_path: network.data_path,
                ..NetworkSpec::default()
            };
            let object = Object::new::<NetworkKind>(metadata(&network.name, Labels::new()), spec);
            let (id, bridge) = (Some(network.id), Some(network.bridge.clone()));
            let stored = Stored { id, bridge, number: Some(0), ..Stored::of(&object) };
            entries.push((object_key(ObjectKind::Network, &network.name), Some(stored.bytes())));
            entries.push((cursor_key(&network.name), number(network.cursor)));
        }
        for vnic in self.vnics.values() {
            let addresses = vec![IpAddr::V4(vnic.address)];
            let spec = VnicSpec { network: vnic.network.clone(), addresses, qos_class: None, quota: None };
            let object = Object::new::<VnicKind>(metadata(&vnic.id, vnic.labels.iter().cloned().collect()), spec);
            let stored = Stored { title: Some(vnic.name.clone()), ..Stored::of(&object) };
            entries.push((object_key(ObjectKind::Vnic, &vnic.id), Some(stored.bytes())));
        }
        entries.push((next_network_key(), number(self.next_network)));
        entries
    }
}
