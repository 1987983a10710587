//! The networks and declared vNICs of namespaces, as the API server has them.
//!
//! A name is a `Network` of the claim's namespace, else a `ClusterNetwork` that allows it, else a network that the
//! administrator shares with all namespaces. The host is not asked: what is declared there by hand is nobody's here.
use crate::api::{ApiError, Client, Collection};
use crate::declared::claims::Named;
use crate::declared::names::freeflow_name;
use crate::declared::{ClusterNetworkSpec, DeclaredKind, NetworkSpec, Resource};
use crate::node::grpc::Boxed;
use crate::node::rules::{Granted, Rules, SharedNetworks};
use serde::de::DeserializeOwned;

/// See the module.
pub struct NamespaceNetworks {
    pub client: Client,
    pub shared: SharedNetworks,
}

fn unread(error: &ApiError) -> String {
    format!("the networks of the namespace can't be read: {error}")
}

fn spec<T: DeserializeOwned>(resource: Resource) -> Result<T, String> {
    let name = resource.metadata.name;
    serde_json::from_value(resource.spec).map_err(|error| format!("the network {name} is not understood: {error}"))
}

async fn network(client: Client, shared: Option<Granted>, namespace: String, name: String) -> Result<Granted, String> {
    let own = Collection::<Resource>::of_namespace(&client, &DeclaredKind::Network.api(), &namespace);
    if let Some(found) = own.find(&name).await.map_err(|error| unread(&error))? {
        let spec: NetworkSpec = spec(found)?;
        let freeflow = Named::Network(&name, &spec).for_claim_of(&namespace)?;
        return Ok(Granted { name: freeflow, label_keys: spec.pod_labels.into_iter().collect() });
    }
    let clusters = Collection::<Resource>::all(&client, &DeclaredKind::ClusterNetwork.api());
    if let Some(found) = clusters.find(&name).await.map_err(|error| unread(&error))? {
        let spec: ClusterNetworkSpec = spec(found)?;
        // One that is not for this namespace is as one that is not there.
        if let Ok(freeflow) = Named::ClusterNetwork(&name, &spec).for_claim_of(&namespace) {
            return Ok(Granted { name: freeflow, label_keys: spec.pod_labels.into_iter().collect() });
        }
    }
    shared.ok_or_else(|| {
        format!("the namespace {namespace} has no network {name}, and no ClusterNetwork {name} allows the namespace")
    })
}

async fn vnic(client: Client, namespace: String, name: String) -> Result<Granted, String> {
    let all = Collection::<Resource>::of_namespace(&client, &DeclaredKind::Vnic.api(), &namespace);
    let found = all.find(&name).await.map_err(|error| unread(&error))?;
    found.ok_or_else(|| format!("the namespace {namespace} has no declared vNIC {name}"))?;
    let name = freeflow_name(Some(&namespace), &name).map_err(|error| error.to_string())?;
    Ok(Granted { name, label_keys: Default::default() })
}

impl Rules for NamespaceNetworks {
    fn network(&self, namespace: &str, name: &str) -> Boxed<Result<Granted, String>> {
        Box::pin(network(self.client.clone(), self.shared.find(name), namespace.into(), name.into()))
    }

    fn vnic(&self, namespace: &str, name: &str) -> Boxed<Result<Granted, String>> {
        Box::pin(vnic(self.client.clone(), namespace.into(), name.into()))
    }
}
