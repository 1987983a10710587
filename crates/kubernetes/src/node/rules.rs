//! Which networks and declared vNICs a claim of a namespace may name.
//!
//! Invariant: a tenant's name never is a name on the host by itself. It is looked up among what its namespace may use,
//! and the answer is the host's name.
use crate::node::grpc::Boxed;
use std::collections::BTreeSet;

/// A network, or a declared vNIC, that a namespace may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Its name on the host.
    pub name: String,
    /// Labels that a claim, or its pod, may set.
    pub label_keys: BTreeSet<String>,
}

/// The rule; a refusal is a text for the pod's events.
pub trait Rules: Send + Sync + 'static {
    fn network(&self, namespace: &str, name: &str) -> Boxed<Result<Granted, String>>;
    fn vnic(&self, namespace: &str, name: &str) -> Boxed<Result<Granted, String>>;
}

/// Networks that the administrator shares with all namespaces, and no others.
#[derive(Clone, Debug)]
pub struct SharedNetworks(pub BTreeSet<String>);

impl SharedNetworks {
    pub fn find(&self, name: &str) -> Option<Granted> {
        self.0.contains(name).then(|| Granted { name: name.into(), label_keys: BTreeSet::new() })
    }
}
