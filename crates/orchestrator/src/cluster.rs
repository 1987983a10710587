//! Which objects are declared for all hosts of a cluster, where a host follows one.
use crate::DEFAULT_NETWORK;
use crate::command::Command;
use crate::objects::{AnyObject, ObjectKind};
use crate::state::State;

/// Kinds that are declared for all hosts, in the order in which they are made: those that others name come first.
pub const CLUSTER_KINDS: [ObjectKind; 6] = [
    ObjectKind::QosClass,
    ObjectKind::Quota,
    ObjectKind::Network,
    ObjectKind::Group,
    ObjectKind::Vnic,
    ObjectKind::AccessRule,
];

/// Whether an object can be declared for all hosts. The network `default` is each host's, as its `freeflow up` says.
pub fn is_clusters(kind: ObjectKind, name: &str) -> bool {
    CLUSTER_KINDS.contains(&kind) && (kind, name) != (ObjectKind::Network, DEFAULT_NETWORK)
}

impl State {
    /// Whether the object is the cluster's where the host of this state follows one, and not the host's own: of vNICs
    /// those that have addresses which go with them from host to host.
    pub fn is_clusters(&self, kind: ObjectKind, name: &str) -> bool {
        match kind {
            ObjectKind::Vnic => self.vnic(name).is_some_and(|vnic| {
                self.network(vnic.network()).is_some_and(|network| network.is_floating(vnic.address))
            }),
            _ => is_clusters(kind, name),
        }
    }

    /// The first object that a command changes and that is the cluster's, where the host follows one. A new vNIC is the
    /// host's own: it gets no address of a cluster's.
    pub fn clusters_object<'a>(&self, command: &'a Command) -> Option<(ObjectKind, &'a str)> {
        let is_clusters = |(kind, name): &(ObjectKind, &str)| self.is_clusters(*kind, name);
        let of = |object: &'a AnyObject| (object.kind(), object.name());
        match command {
            Command::Apply { objects } | Command::ApplyForCluster { objects } => {
                objects.iter().map(of).find(is_clusters)
            }
            Command::Delete { kind, name, .. } => Some((*kind, name.as_str())).filter(is_clusters),
            Command::Detach { id } => Some((ObjectKind::Vnic, id.as_str())).filter(is_clusters),
            Command::SetDataPath { network, .. } => Some((ObjectKind::Network, network.as_str())).filter(is_clusters),
            Command::Attach { .. } | Command::Begin { .. } => None,
        }
    }
}
