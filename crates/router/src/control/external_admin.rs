//! A peers file was read again, or networks changed: vNICs have other second GIDs.
use crate::base::log::{info, warning};
use crate::control::external::{ExternalPolicy, gids};
use crate::control::thread::Control;
use crate::dataplane::command::SetExternalGids;
use freeflow_engine::VnicId;
use freeflow_verbs::Gid;

impl Control {
    /// A peers file was read again: from now on vNICs have the GIDs that it gives them. Programs
    /// that run keep the table they were given, but can't use what was taken away.
    pub fn set_external_policy(&mut self, policy: ExternalPolicy) {
        let policy = policy.within(&self.state);
        // Another address of this host takes effect when the router is restarted.
        let policy = ExternalPolicy { gid: self.external.gid.or(policy.gid), ..policy };
        let before = std::mem::replace(&mut self.external, policy);
        let mut changed = Vec::new();
        for (_, entry) in self.vnics.iter() {
            let (network, shard) = (&entry.record.network, entry.engine_id.shard());
            let gid = self.external_gid(network, shard);
            if shard != 0 && self.external.gid(network).is_some() && before.gid(network).is_none() {
                warning!("a vNIC reaches external machines only when it is made again", vnic = entry.record.id);
            }
            if gid != before.gid(network).filter(|_| shard == 0) {
                info!("external GID of a vNIC changed", vnic = entry.record.id, has_one = gid.is_some());
                self.sysfs.set_gids(entry.engine_id, &gids(&entry.record, gid));
                changed.push((entry.engine_id, gid));
            }
        }
        if changed.is_empty() {
            return;
        }
        self.set_cm_externals(&self.external.clone());
        self.give_external_gids(changed);
    }

    pub(crate) fn give_external_gids(&mut self, gids: Vec<(VnicId, Option<Gid>)>) {
        for (shard, worker) in self.workers.all() {
            let gids: Vec<_> = gids.iter().copied().filter(|(vnic, _)| vnic.shard() == shard).collect();
            if !gids.is_empty() {
                worker.send(SetExternalGids { gids });
            }
        }
    }
}
