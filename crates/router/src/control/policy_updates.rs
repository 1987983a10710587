//! Changes of policy, on their way to the worker.
use crate::base::slab::Key;
use crate::control::thread::Control;
use crate::dataplane::command::{PolicyChanges, SetPolicy, VnicPolicy};

impl Control {
    /// Networks, classes or quotas have changed.
    pub(crate) fn publish_policy(&mut self) {
        self.set_external_policy(self.external.clone());
        let mut changes = self.applied.change(&self.state);
        let keys: Vec<Key> = self.vnics_by_id.values().copied().collect();
        changes.vnics = self.vnic_changes(&keys);
        self.submit_changes(changes);
    }

    /// These vNICs have changed.
    pub(crate) fn publish_vnics(&mut self, keys: &[Key]) {
        // A class of their own may bring a limit of their tenant along.
        let mut changes = self.applied.change(&self.state);
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
                self.announce_identity(key);
            }
        }
        changes
    }

    fn submit_changes(&mut self, policy: PolicyChanges) {
        if !policy.is_empty() {
            let policies = self.policies_of_shards(policy);
            for ((_, worker), policy) in self.workers.all().zip(policies) {
                worker.send(SetPolicy { policy });
            }
        }
    }
}
