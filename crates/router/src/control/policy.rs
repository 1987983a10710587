//! From what is declared to what the worker applies. Only changes are sent, in one message after each command.
use crate::dataplane::command::PolicyChanges;
use freeflow_orchestrator::State;
use freeflow_protocol::admin::DataPath;
use freeflow_verbs::{NetworkId, NetworkLimits, RateLimit, TenantId};
use std::collections::BTreeMap;

/// The networks and tenants of the last policy sent to the worker. Of vNICs, see
/// [`crate::control::vnics::VnicEntry`].
#[derive(Debug, Default)]
pub struct AppliedPolicy {
    data_paths: BTreeMap<NetworkId, DataPath>,
    network_limits: BTreeMap<NetworkId, NetworkLimits>,
    tenants: BTreeMap<TenantId, RateLimit>,
}

/// Entries of one map that are missing or different in the other; those of the other alone are back
/// at their default.
fn changes<K: Copy + Ord, V: Copy + PartialEq + Default>(was: &BTreeMap<K, V>, is: &BTreeMap<K, V>) -> Vec<(K, V)> {
    let gone = was.keys().filter(|key| !is.contains_key(key)).map(|&key| (key, V::default()));
    let new = is.iter().filter(|(key, value)| was.get(key).copied().unwrap_or_default() != **value);
    gone.chain(new.map(|(&key, &value)| (key, value))).collect()
}

impl AppliedPolicy {
    /// The declared networks and tenants, as a change to the last policy sent.
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
