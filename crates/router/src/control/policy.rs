//! From what is declared to what the worker is told. Only what has changed is told, in one message after each command.
use crate::base::slab::Key;
use crate::control::thread::Control;
use crate::dataplane::command::{PolicyChanges, SetPolicy, VnicPolicy};
use freeflow_orchestrator::State;
use freeflow_protocol::admin::DataPath;
use freeflow_verbs::{NetworkId, NetworkLimits, RateLimit, TenantId};
use std::collections::BTreeMap;

/// What the worker was told of networks and tenants, last. Of vNICs, see [`crate::control::vnics::VnicEntry`].
#[derive(Debug, Default)]
pub struct Told {
    data_paths: BTreeMap<NetworkId, DataPath>,
    network_limits: BTreeMap<NetworkId, NetworkLimits>,
    tenants: BTreeMap<TenantId, RateLimit>,
}

/// What is in one map and not, or differently, in the other; what is in the other alone is back at its default.
fn changes<K: Copy + Ord, V: Copy + PartialEq + Default>(was: &BTreeMap<K, V>, is: &BTreeMap<K, V>) -> Vec<(K, V)> {
    let gone = was.keys().filter(|key| !is.contains_key(key)).map(|&key| (key, V::default()));
    let new = is.iter().filter(|(key, value)| was.get(key).copied().unwrap_or_default() != **value);
    gone.chain(new.map(|(&key, &value)| (key, value))).collect()
}

impl Told {
    /// What is declared of networks and tenants now, as a change to what was told before.
    pub fn change(&mut self, state: &State) -> PolicyChanges {
        let data_paths = state.networks().map(|network| state.data_path_of(network)).collect();
        let limits = state.networks().map(|network| {
            let amounts = state.network_amounts(network);
            let limits = NetworkLimits {
                qp_count_max: amounts.qps,
                cq_count_max: amounts.cqs,
                mr_count_max: amounts.mrs,
                registered_bytes_max: amounts.registered_bytes.map(|bytes| bytes.0),
            };
            (network.id, limits)
        });
        let network_limits = limits.collect();
        let tenants = state.tenant_limits().into_iter().collect();
        let found = PolicyChanges {
            data_paths: changes(&self.data_paths, &data_paths),
            network_limits: changes(&self.network_limits, &network_limits),
            tenants: changes(&self.tenants, &tenants),
            vnics: Vec::new(),
        };
        *self = Self { data_paths, network_limits, tenants };
        found
    }
}

impl Control {
    /// Networks, classes or quotas have changed.
    pub(crate) fn tell_policy(&mut self) {
        self.set_external_policy(self.external.clone());
        let mut changes = self.told.change(&self.state);
        let keys: Vec<Key> = self.vnics_by_id.values().copied().collect();
        changes.vnics = self.vnic_changes(&keys);
        self.submit_changes(changes);
    }

    /// These vNICs have changed.
    pub(crate) fn tell_vnics(&mut self, keys: &[Key]) {
        // A class of their own may bring a limit of their tenant along.
        let mut changes = self.told.change(&self.state);
        changes.vnics = self.vnic_changes(keys);
        self.submit_changes(changes);
    }

    fn vnic_changes(&mut self, keys: &[Key]) -> Vec<VnicPolicy> {
        let mut changes = Vec::new();
        for &key in keys {
            let Some(id) = self.vnics.get(key).map(|entry| entry.record.id.clone()) else { continue };
            let Some((_, record, shaping)) = self.record_of(&id) else { continue };
            let Some(entry) = self.vnics.get_mut(key) else { continue };
            let vnic = entry.engine_id;
            let new_shaping = (entry.shaping != shaping).then_some(shaping);
            let new_limits = (entry.record.limits != record.limits).then_some(record.limits);
            if new_shaping.is_some() || new_limits.is_some() {
                changes.push(VnicPolicy { vnic, shaping: new_shaping, limits: new_limits });
            }
            let is_relabeled = entry.record.labels != record.labels;
            (entry.shaping, entry.record) = (shaping, record);
            if is_relabeled {
                self.tell_identity(key);
            }
        }
        changes
    }

    fn submit_changes(&mut self, policy: PolicyChanges) {
        if !policy.is_empty() {
            self.worker.send(SetPolicy { policy });
        }
    }
}
