//! The other hosts that this one is connected to: which they are, and when a container that starts has them.
use super::Follower;
use crate::admin::Admin;
use freeflow_cluster::Mesh;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A host that has become a peer is waited for so long by containers that start.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// Between two looks at who is a peer, where others' networks have changed.
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// Peers of this host, as they were last carried out.
#[derive(Default)]
pub struct Peers {
    /// Version of the mesh that was looked at, and when.
    version: Option<u64>,
    looked_at: Option<Instant>,
    /// Hosts that were peers by that, and which of them the peers file has, since when.
    selected: BTreeSet<String>,
    since: BTreeMap<String, Instant>,
    /// The peers file has all of them.
    is_written: bool,
    /// Networks of which the other hosts are met: containers that start need not wait.
    met: BTreeSet<String>,
}

impl Peers {
    /// The peers file has these hosts now.
    pub fn note_written<'a>(&mut self, mesh: (u64, BTreeSet<String>), hosts: impl Iterator<Item = &'a String>) {
        let now = Instant::now();
        let mut before = std::mem::take(&mut self.since);
        self.since = hosts.map(|host| (host.clone(), before.remove(host).unwrap_or(now))).collect();
        (self.version, self.selected, self.is_written) = (Some(mesh.0), mesh.1, true);
    }

    /// Those of these hosts that may be connected soon.
    fn fresh(&self, hosts: &BTreeSet<String>) -> BTreeSet<String> {
        let is_fresh = |(_, since): &(&String, &Instant)| since.elapsed() < CONNECT_TIME;
        let fresh = self.since.iter().filter(is_fresh).map(|(host, _)| host);
        fresh.filter(|host| hosts.contains(*host)).cloned().collect()
    }
}

impl Follower {
    /// All is to be compared where other hosts are peers than the peers file has.
    pub(super) fn look_at_mesh(&mut self) {
        let (Some(declared), version) = (&self.declared, self.view.mesh_version()) else { return };
        // Others may change their networks all the time; whoever starts a container here does not wait for that.
        let is_early = self.peers.looked_at.is_some_and(|at| at.elapsed() < LOOK_PAUSE);
        if self.peers.version == Some(version) || (is_early && self.claims.meetings().is_empty()) {
            return;
        }
        (self.peers.version, self.peers.looked_at) = (Some(version), Some(Instant::now()));
        let selected = Mesh::of(&self.host, &self.view, declared).peers(&self.host);
        if selected != self.peers.selected {
            (self.peers.is_written, self.is_due) = (false, true);
        }
    }

    /// Whether others have changed their networks, or members of them, and that was too early to be looked at.
    pub(super) fn is_look_due(&self) -> bool {
        let is_mesh_new = self.peers.version != Some(self.view.mesh_version());
        self.declared.is_some() && (is_mesh_new || self.named.0 != Some(self.view.members_version()))
    }

    /// Has the host be in the networks of containers that start, and says of which the other hosts are met.
    pub(super) fn meet_others(&mut self) {
        let own: BTreeSet<&str> = self.view.members(&self.host).map(|(network, _)| network).collect();
        let is_full = Mesh::is_full_in(&self.view);
        self.peers.met.retain(|network| is_full || own.contains(network.as_str()));
        let asked = self.claims.meetings();
        for network in self.claims.take_entered() {
            self.publisher.enter(&network, !own.contains(network.as_str()));
        }
        let Some(declared) = self.declared.as_ref().filter(|_| !asked.is_empty()) else {
            // Nothing was followed yet, as where etcd is away from the beginning: nobody is waited for.
            return self.claims.set_met(self.peers.met.clone(), &asked);
        };
        let mesh = Mesh::of(&self.host, &self.view, declared);
        // Without etcd nobody is met, and nobody is waited for.
        let is_away = self.behind.is_some() || self.standing.is_none() || self.check_identity().is_err();
        let (mut met, mut for_now, mut connected) = (Vec::new(), BTreeSet::new(), None);
        for network in asked {
            // Of no network of the cluster's: it is the router's to refuse it.
            let Some(others) = mesh.members_by(&network, &self.host) else {
                for_now.insert(network);
                continue;
            };
            let is_in = own.contains(network.as_str());
            self.publisher.enter(&network, !is_in);
            if is_away || others.is_empty() {
                for_now.insert(network);
                continue;
            }
            let is_ready = (is_full || is_in) && self.peers.is_written && !self.publisher.is_naming();
            if is_ready && self.are_connected(&others, &mut connected) {
                met.push(network);
            }
        }
        self.peers.met.extend(met);
        self.claims.set_met(self.peers.met.clone(), &for_now);
    }

    /// Whether the router is connected to all of these that have become peers a short time ago.
    fn are_connected(&self, others: &BTreeSet<String>, connected: &mut Option<BTreeSet<String>>) -> bool {
        let fresh = self.peers.fresh(others);
        if fresh.is_empty() {
            return true;
        }
        let up = || -> BTreeSet<String> {
            let status = Admin::connect(&self.run_dir).and_then(|mut admin| admin.peers());
            let peers = status.map(|status| status.peers).unwrap_or_default();
            peers.into_iter().filter(|peer| peer.state == "up").map(|peer| peer.host).collect()
        };
        fresh.is_subset(connected.get_or_insert_with(up))
    }
}
