//! Which objects are declared for all hosts of a cluster, where a host follows one.
use crate::DEFAULT_NETWORK;
use crate::command::Command;
use crate::objects::ObjectKind;

/// Kinds that are declared for all hosts, in the order in which they are made: those that others name come first.
pub const CLUSTER_KINDS: [ObjectKind; 5] =
    [ObjectKind::QosClass, ObjectKind::Quota, ObjectKind::Network, ObjectKind::Group, ObjectKind::AccessRule];

/// Whether the object is the cluster's where a host follows one, and not the host's own. The network `default` is each
/// host's, as its `freeflow up` says.
pub fn is_clusters(kind: ObjectKind, name: &str) -> bool {
    CLUSTER_KINDS.contains(&kind) && (kind, name) != (ObjectKind::Network, DEFAULT_NETWORK)
}

impl Command {
    /// The first object that it changes and that is a cluster's, where the host follows one.
    pub fn clusters_object(&self) -> Option<(ObjectKind, &str)> {
        let changed = match self {
            Self::Apply { objects } => {
                return objects
                    .iter()
                    .map(|object| (object.kind(), object.name()))
                    .find(|(kind, name)| is_clusters(*kind, name));
            }
            Self::Delete { kind, name, .. } => (*kind, name.as_str()),
            Self::SetDataPath { network, .. } => (ObjectKind::Network, network.as_str()),
            Self::Attach { .. } | Self::Detach { .. } | Self::Begin { .. } => return None,
        };
        is_clusters(changed.0, changed.1).then_some(changed)
    }
}
