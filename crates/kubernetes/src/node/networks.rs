//! The networks and declared vNICs of namespaces, as the API server has them.
//!
//! A name is a `Network` of the claim's namespace, else a `ClusterNetwork` that allows it, else a network that the
//! administrator shares with all namespaces, if there is any. The host is not asked: what is declared there by hand is
//! nobody's here.
use crate::declared::rules::{Allowed, Lookup};
use crate::node::grpc::Boxed;
use crate::node::rules::{Granted, Rules, SharedNetworks};

/// See the module.
pub struct NamespaceNetworks {
    pub lookup: Lookup,
    pub shared: SharedNetworks,
}

fn granted(allowed: Allowed) -> Granted {
    Granted { name: allowed.name, label_keys: allowed.label_keys }
}

impl Rules for NamespaceNetworks {
    fn network(&self, namespace: &str, name: &str) -> Boxed<Result<Granted, String>> {
        let (lookup, shared) = (self.lookup.clone(), self.shared.find(name));
        let (namespace, name) = (namespace.to_string(), name.to_string());
        Box::pin(async move {
            let found = lookup.network(&namespace, &name).await?.map(granted).or(shared);
            found.ok_or_else(|| {
                format!("the namespace {namespace} has no network {name}, and no ClusterNetwork {name} allows it")
            })
        })
    }

    fn vnic(&self, namespace: &str, name: &str) -> Boxed<Result<Granted, String>> {
        let (lookup, namespace, name) = (self.lookup.clone(), namespace.to_string(), name.to_string());
        Box::pin(async move {
            let found = lookup.vnic(&namespace, &name).await?.map(granted);
            found.ok_or_else(|| format!("the namespace {namespace} has no declared vNIC {name}"))
        })
    }
}
