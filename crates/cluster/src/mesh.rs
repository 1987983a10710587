//! The mesh: which hosts are peers of each other.
//!
//! Networks of one tenant may reach each other, and no others. So two hosts are peers where both are members of
//! networks of one tenant, and in a cluster of few hosts all are. The rule is the same for both ends, by the words of
//! both that etcd has.
use crate::records::FULL_MESH_COUNT;
use crate::view::View;
use freeflow_orchestrator::objects::DEFAULT_TENANT;
use freeflow_orchestrator::{DEFAULT_NETWORK, State};
use std::collections::{BTreeMap, BTreeSet};

/// The hosts that one host has for peers.
pub struct Mesh<'a> {
    view: &'a View,
    is_full: bool,
    /// The tenant of each network.
    tenants: BTreeMap<&'a str, &'a str>,
    /// Tenants of the host's networks.
    own: BTreeSet<&'a str>,
}

impl<'a> Mesh<'a> {
    /// Of the host with this name.
    pub fn of(own: &str, view: &'a View, declared: &'a State) -> Self {
        let is_full = Self::is_full_in(view);
        let declared = declared.networks().map(|network| (network.name(), network.tenant()));
        let tenants: BTreeMap<&str, &str> = declared.chain([(DEFAULT_NETWORK, DEFAULT_TENANT)]).collect();
        let mut mesh = Self { view, is_full, tenants, own: BTreeSet::new() };
        mesh.own = mesh.tenants_of(own).collect();
        mesh
    }

    fn tenants_of(&self, host: &str) -> impl Iterator<Item = &'a str> {
        self.view.members(host).filter_map(|(network, _)| self.tenants.get(network).copied())
    }

    /// Whether all hosts are peers of each other.
    pub fn is_full_in(view: &View) -> bool {
        let full_mesh = view.identity().map_or(FULL_MESH_COUNT, |identity| identity.full_mesh);
        u32::try_from(view.hosts().len()).is_ok_and(|count| count <= full_mesh)
    }

    /// Whether another host is a peer.
    pub fn has(&self, other: &str) -> bool {
        self.is_full || self.tenants_of(other).any(|tenant| self.own.contains(tenant))
    }

    /// Whether containers here may reach those of a network elsewhere.
    pub fn reaches(&self, network: &str) -> bool {
        self.is_full || self.tenants.get(network).is_some_and(|tenant| self.own.contains(tenant))
    }

    /// All hosts that are peers, but for one.
    pub fn peers(&self, but: &str) -> BTreeSet<String> {
        self.view.hosts().keys().filter(|other| *other != but && self.has(other)).cloned().collect()
    }

    /// Hosts that become peers of a host once it is a member of this network, but for that host. `None`: there is no
    /// such network.
    pub fn members_by(&self, network: &str, but: &str) -> Option<BTreeSet<String>> {
        let tenant = *self.tenants.get(network)?;
        let has_it = |other: &&String| self.is_full || self.tenants_of(other).any(|of_other| of_other == tenant);
        Some(self.view.hosts().keys().filter(|other| *other != but).filter(has_it).cloned().collect())
    }
}
