//! The other hosts that this one is connected to: which they are, and when a container that starts has them.
use crate::admin::Admin;
use crate::cluster::Claims;
use crate::publisher::Publisher;
use freeflow_cluster::{Mesh, View};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::State;
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

    /// Whether this version of the mesh was looked at.
    pub fn knows(&self, version: u64) -> bool {
        self.version == Some(version)
    }

    /// Looks who is a peer. Whether other hosts are than the peers file has: then all is to be compared.
    pub fn look(&mut self, host: &str, view: &View, declared: &State, is_urgent: bool) -> bool {
        let version = view.mesh_version();
        // Others may change their networks all the time; whoever starts a container here does not wait for that.
        let is_early = self.looked_at.is_some_and(|at| at.elapsed() < LOOK_PAUSE);
        if self.knows(version) || (is_early && !is_urgent) {
            return false;
        }
        (self.version, self.looked_at) = (Some(version), Some(Instant::now()));
        let is_other = Mesh::of(host, view, declared).peers(host) != self.selected;
        self.is_written &= !is_other;
        is_other
    }

    /// Has the host be in the networks of containers that start, and says of which the other hosts are met. `declared`:
    /// `None` where nothing was followed yet, as where etcd is away from the beginning.
    pub fn meet(&mut self, with: &Meeting<'_>) {
        let Meeting { host, view, claims, publisher, .. } = with;
        let own: BTreeSet<&str> = view.members(host).map(|(network, _)| network).collect();
        let is_full = Mesh::is_full_in(view);
        self.met.retain(|network| is_full || own.contains(network.as_str()));
        let asked = claims.meetings();
        for network in claims.take_entered() {
            publisher.enter(&network, !own.contains(network.as_str()));
        }
        let Some(declared) = with.declared.filter(|_| !asked.is_empty()) else {
            return claims.set_met(self.met.clone(), &asked);
        };
        let mesh = Mesh::of(host, view, declared);
        let (mut met, mut for_now, mut connected) = (Vec::new(), BTreeSet::new(), None);
        for network in asked {
            // Of no network of the cluster's: it is the router's to refuse it.
            let Some(others) = mesh.members_by(&network, host) else {
                for_now.insert(network);
                continue;
            };
            let is_in = own.contains(network.as_str());
            publisher.enter(&network, !is_in);
            publisher.hurry();
            if with.is_away || others.is_empty() {
                for_now.insert(network);
                continue;
            }
            let is_ready = (is_full || is_in) && self.is_written && !publisher.is_naming();
            if is_ready && self.are_connected(with.run_dir, &others, &mut connected) {
                met.push(network);
            }
        }
        self.met.extend(met);
        claims.set_met(self.met.clone(), &for_now);
    }

    /// Whether the router is connected to all of these that have become peers a short time ago.
    fn are_connected(
        &self,
        run_dir: &RunDir,
        others: &BTreeSet<String>,
        connected: &mut Option<BTreeSet<String>>,
    ) -> bool {
        let fresh = self.fresh(others);
        if fresh.is_empty() {
            return true;
        }
        let up = || -> BTreeSet<String> {
            let status = Admin::connect(run_dir).and_then(|mut admin| admin.peers());
            let peers = status.map(|status| status.peers).unwrap_or_default();
            peers.into_iter().filter(|peer| peer.state == "up").map(|peer| peer.host).collect()
        };
        fresh.is_subset(connected.get_or_insert_with(up))
    }
}

/// All that it takes to meet others.
pub struct Meeting<'a> {
    pub run_dir: &'a RunDir,
    pub host: &'a str,
    pub view: &'a View,
    pub declared: Option<&'a State>,
    pub claims: &'a Claims,
    pub publisher: &'a Publisher,
    /// etcd is, or does not count: nobody is met, and nobody is waited for.
    pub is_away: bool,
}
