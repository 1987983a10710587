//! The router as connection manager: the machine of `freeflow-cm` on the control thread, and what it lives in.
//!
//! Requests of libraries are answered here, at once. Messages between two vNICs of this host come
//! back to the machine from a queue, [`ROUND_LETTERS_MAX`] in a round of the control thread, so
//! that a flood of them holds nobody up. Those of other routers come by the peers thread, those of
//! external machines by the worker; either way they may get lost, and the machine repeats its own.
//!
//! - `admin`: what an operator sees;
//! - `environment`: what the machine asks of the router;
//! - `loopback_queue`: messages within this host;
//! - `addresses`: where addresses are;
//! - `pipe`: event channels;
//! - `steps`: what goes with a change of a queue pair.
mod addresses;
mod admin;
mod environment;
mod loopback_queue;
mod pipe;
mod preparation;
mod requests;
mod steps;

use crate::admission::access::{AccessPolicy, Incident, Rules};
use environment::World;
use freeflow_cm::{Limits, Machine, VnicRef};
use freeflow_protocol::admin::{CmCounts, CmMessages};
use freeflow_shm::monotonic_ns;
use freeflow_verbs::{Gid, Instant, NetworkId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The machine and its surroundings.
pub struct Cm {
    machine: Machine,
    world: World,
    /// When the first page of identifiers was last shown.
    counted: (CmCounts, Vec<CmMessages>),
}

impl Cm {
    pub fn new(
        peers: crate::peering::PeersHandle,
        worker: crate::dataplane::handle::WorkerHandle,
    ) -> std::io::Result<Self> {
        let (machine, world) = (Machine::new(Limits::default()), World::new(peers, worker)?);
        Ok(Self { machine, world, counted: Default::default() })
    }

    /// When the machine has something to do: time passed, messages wait, or policy has changed.
    pub fn next_due(&self) -> Option<Instant> {
        if !self.world.letters.is_empty() || self.machine.looks_at_policy() {
            return Some(Instant(0));
        }
        let reports = next_policy_due(&self.world.access.borrow(), now());
        [self.machine.poll_timeout(), reports].into_iter().flatten().min()
    }

    /// The access rules.
    pub fn access(&mut self) -> &mut AccessPolicy {
        self.world.access.get_mut()
    }

    /// These rules are in force from now on. What is connected to an address that is another
    /// network's now is connected to nobody.
    pub fn set_rules(&mut self, rules: Arc<Rules>) {
        let (address_map, world) = (rules.address_map.clone(), &mut self.world);
        let before = world.access.get_mut().rules().map(|rules| rules.address_map.clone()).unwrap_or_default();
        world.access.get_mut().set_rules(rules);
        if address_map == before {
            return;
        }
        for id in self.machine.list(None, usize::MAX) {
            let (Some(vnic), Some(remote)) = (world.places.vnic(id.vnic), id.remote) else { continue };
            if address_map.network_at(vnic.network, remote.gid) != before.network_at(vnic.network, remote.gid) {
                world.moved.insert((id.vnic, remote.gid));
            }
        }
        self.machine.handle_new_routes();
    }

    /// Disconnects what is not allowed any more, looking at so many connections at most; what there is to
    /// report.
    pub fn follow_policy(&mut self, now: Instant, count_max: usize) -> Vec<Incident> {
        if self.access().take_change() {
            self.machine.handle_policy_changed();
        }
        self.machine.poll_policy(&mut self.world, now, count_max);
        if !self.machine.looks_at_policy() {
            self.world.moved.clear();
        }
        self.access().take_incidents(now)
    }

    pub fn attach(&mut self, network: NetworkId, own: (Gid, Option<Gid>), external: Option<Gid>) -> VnicRef {
        let vnic = self.world.places.attach(network, own, external);
        self.machine.handle_new_address(own.0);
        own.1.into_iter().for_each(|ipv6| self.machine.handle_new_address(ipv6));
        vnic
    }

    pub fn detach(&mut self, vnic: VnicRef) {
        self.machine.destroy_vnic(&mut self.world, now(), vnic);
        if let Some(entry) = self.world.places.vnic(vnic) {
            for gid in std::iter::once(entry.gid).chain(entry.ipv6) {
                self.world.access.get_mut().remove_vnic(entry.network, gid);
            }
        }
        self.world.places.detach(vnic);
    }
}

/// Addresses that identifiers are connected to. Walks all of them.
fn remotes(machine: &Machine) -> BTreeSet<Gid> {
    let ids = machine.list(None, usize::MAX);
    ids.into_iter().filter_map(|id| id.remote).map(|remote| remote.gid).collect()
}

pub(super) fn now() -> Instant {
    Instant(monotonic_ns())
}

/// When the control thread has something to do for rules.
fn next_policy_due(access: &AccessPolicy, now: Instant) -> Option<Instant> {
    access.due_in(now).map(|wait| now + wait)
}
