//! vNICs begin and end.
use crate::dataplane::command::{CreateVnic, DestroyVnic, DestroyedVnic, Execute, Execution, NewVnic};
use crate::dataplane::ports::Vnic;
use crate::dataplane::worker::Worker;
use freeflow_engine::VnicId;
use freeflow_verbs::{Instant, VerbsError};

impl Execute<CreateVnic> for Worker {
    fn execute(&mut self, now: Instant, CreateVnic { vnic, shaping, place }: CreateVnic) -> Execution<CreateVnic> {
        let made = self.create_vnic(&vnic).and_then(|id| {
            self.set_shaping(now, id, shaping)?;
            Ok(id)
        });
        let _ = made.map(|id| place.set(id));
        Execution::done(made)
    }
}

impl Execute<DestroyVnic> for Worker {
    fn execute(&mut self, now: Instant, DestroyVnic { vnic }: DestroyVnic) -> Execution<DestroyVnic> {
        Execution::done(vnic.get().map(|id| Box::new(self.destroy_vnic(now, id))))
    }
}

impl Worker {
    pub(crate) fn create_vnic(&mut self, vnic: &NewVnic) -> Result<VnicId, VerbsError> {
        let id = self.engine.create_dual_vnic(vnic.network, (vnic.gid, vnic.ipv6_gid), vnic.limits)?;
        self.engine.set_external_gid(id, vnic.external_gid)?;
        self.ports.copy_threads.assign(id);
        self.ports.access.set_network(vnic.network, &vnic.network_name);
        for gid in vnic.gids() {
            self.ports.access.set_vnic(vnic.network, gid, vnic.identity.clone());
        }
        self.ports.vnics.insert(id, Vnic::new(vnic.network, vnic.is_guest));
        Ok(id)
    }

    fn destroy_vnic(&mut self, now: Instant, id: VnicId) -> DestroyedVnic {
        let sessions = self.destroy_sessions_of(now, id);
        let numbers = self.vnic_numbers(id);
        if let Some((network, gid, ipv6_gid)) = self.engine.vnic_addresses(id) {
            for gid in std::iter::once(gid).chain(ipv6_gid) {
                self.ports.access.remove_vnic(network, gid);
            }
        }
        let error = self.engine.destroy_vnic(id).err();
        let vnic = self.ports.vnics.remove(id);
        self.ports.blocks.forget(id);
        if let Some(vnic) = &vnic {
            self.ports.retired.add(vnic.network, &numbers.counters);
            self.ports.copy_threads.release(id);
        }
        DestroyedVnic { numbers, sessions, vnic: vec![Box::new(vnic)], error }
    }
}
