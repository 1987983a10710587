//! Declared policy, as it takes effect in the worker: in force when the command is done.
use crate::base::mode::Mode;
use crate::dataplane::command::{
    Execute, Execution, NameNetwork, PolicyChanges, SetAccessRules, SetExternalGids, SetMode, SetPolicy,
    SetVnicIdentity,
};
use crate::dataplane::worker::Worker;
use freeflow_engine::VnicId;
use freeflow_verbs::{Instant, Shaping};

impl Execute<SetPolicy> for Worker {
    fn execute(&mut self, now: Instant, SetPolicy { policy }: SetPolicy) -> Execution<SetPolicy> {
        self.set_policy(now, &policy);
        Execution::done(())
    }
}

impl Execute<SetExternalGids> for Worker {
    fn execute(&mut self, _: Instant, SetExternalGids { gids }: SetExternalGids) -> Execution<SetExternalGids> {
        for (id, gid) in gids {
            // One that is gone meanwhile needs none.
            let _ = self.engine.set_external_gid(id, gid);
        }
        Execution::done(())
    }
}

impl Execute<SetVnicIdentity> for Worker {
    fn execute(&mut self, _: Instant, command: SetVnicIdentity) -> Execution<SetVnicIdentity> {
        for &gid in &command.gids {
            self.ports.access.set_vnic(command.network, gid, command.identity.clone());
        }
        Execution::done(())
    }
}

impl Execute<NameNetwork> for Worker {
    fn execute(&mut self, _: Instant, NameNetwork { network, name }: NameNetwork) -> Execution<NameNetwork> {
        self.ports.access.set_network(network, &name);
        Execution::done(())
    }
}

impl Execute<SetAccessRules> for Worker {
    fn execute(&mut self, _: Instant, SetAccessRules { rules, gone }: SetAccessRules) -> Execution<SetAccessRules> {
        self.ports.access.set_rules(rules);
        if !gone.is_empty() {
            self.ports.fabric.forget_networks(|network| gone.contains(&network));
            self.ports.retired.forget(|network| gone.contains(&network));
        }
        Execution::done(())
    }
}

impl Execute<SetMode> for Worker {
    fn execute(&mut self, now: Instant, SetMode { mode }: SetMode) -> Execution<SetMode> {
        self.waiting.set_mode(mode);
        self.ports.copy_threads.set_mode(mode);
        if mode == Mode::Fastpath {
            // All doorbells are looked at from now on, as those of sessions that begin later.
            let all: Vec<_> = self.ports.sessions.iter().map(|(id, _)| id).collect();
            for session in all {
                self.mark_active(now, session);
            }
        }
        Execution::done(())
    }
}

impl Worker {
    /// An object that is gone meanwhile needs nothing.
    pub(crate) fn set_policy(&mut self, now: Instant, changes: &PolicyChanges) {
        for &(network, path) in &changes.data_paths {
            self.set_data_path(network, path);
        }
        for &(network, limits) in &changes.network_limits {
            self.engine.set_network_limits(network, limits);
        }
        let shapings: Vec<(VnicId, Shaping)> =
            changes.vnics.iter().filter_map(|change| Some((change.vnic, change.shaping?))).collect();
        self.set_shapings(now, &changes.tenants, &shapings);
        for change in &changes.vnics {
            if let Some(limits) = change.limits {
                let _ = self.engine.set_limits(change.vnic, limits);
            }
        }
    }
}
