//! The networks and declared vNICs that a namespace's claims may name, as the API server has them now.
use super::claims::Named;
use super::names::freeflow_name;
use super::{ClusterNetworkSpec, DeclaredKind, NetworkSpec, Resource};
use crate::api::{ApiError, Client, Collection};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;

/// A network, or a declared vNIC, that a claim may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// FreeFlow's name.
    pub name: String,
    /// Keys of labels that the pod may give its vNIC.
    pub label_keys: BTreeSet<String>,
}

/// Looks up what claims name.
#[derive(Clone)]
pub struct Lookup {
    client: Client,
}

fn unanswered(error: &ApiError) -> String {
    format!("it is not known which networks the namespace may use: {error}")
}

fn spec<S: DeserializeOwned>(resource: Resource) -> Result<S, String> {
    serde_json::from_value(resource.spec).map_err(|error| format!("the network's spec: {error}"))
}

impl Lookup {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    async fn find(&self, kind: DeclaredKind, namespace: &str, name: &str) -> Result<Option<Resource>, String> {
        let collection: Collection<Resource> = match kind.is_namespaced() {
            true => Collection::of_namespace(&self.client, &kind.api(), namespace),
            false => Collection::all(&self.client, &kind.api()),
        };
        let found = collection.find(name).await.map_err(|error| unanswered(&error))?;
        // One that is being deleted gets no new users.
        Ok(found.filter(|resource| resource.metadata.deletion_timestamp.is_none()))
    }

    /// The network of that name for claims of a namespace: its own `Network`, or else a `ClusterNetwork` for it.
    /// `None`: there is none that it may use; whether others have one is not said.
    ///
    /// # Errors
    /// A sentence for the pod's events: the API server does not say.
    pub async fn network(&self, namespace: &str, name: &str) -> Result<Option<Allowed>, String> {
        // A name that is none is asked about nowhere.
        if freeflow_name(Some(namespace), name).is_err() {
            return Ok(None);
        }
        let allowed = |name: String, keys: &[String]| Allowed { name, label_keys: keys.iter().cloned().collect() };
        if let Some(found) = self.find(DeclaredKind::Network, namespace, name).await? {
            let spec: NetworkSpec = spec(found)?;
            let named = Named::Network(name, &spec).for_claim_of(namespace)?;
            return Ok(Some(allowed(named, &spec.pod_labels)));
        }
        let Some(found) = self.find(DeclaredKind::ClusterNetwork, namespace, name).await? else { return Ok(None) };
        let spec: ClusterNetworkSpec = spec(found)?;
        let named = Named::ClusterNetwork(name, &spec).for_claim_of(namespace);
        Ok(named.ok().map(|named| allowed(named, &spec.pod_labels)))
    }

    /// The declared vNIC of that name for claims of a namespace: its own `Vnic`, if it has one. Its labels are its own.
    ///
    /// # Errors
    /// A sentence for the pod's events: the API server does not say.
    pub async fn vnic(&self, namespace: &str, name: &str) -> Result<Option<Allowed>, String> {
        let Ok(freeflow) = freeflow_name(Some(namespace), name) else { return Ok(None) };
        let found = self.find(DeclaredKind::Vnic, namespace, name).await?;
        Ok(found.map(|_| Allowed { name: freeflow, label_keys: BTreeSet::new() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::test_server::TestServer;
    use serde_json::json;

    async fn server() -> TestServer {
        TestServer::start(|seen| {
            let network = json!({"metadata": {"name": "red"}, "spec": {"cidrs": ["10.1.0.0/24"], "podLabels": ["role"]}});
            let shared = |allowed: &[&str]| {
                json!({"metadata": {"name": "all"}, "spec": {"cidrs": ["10.1.0.0/24"], "allowedNamespaces": allowed}})
            };
            let going = json!({"metadata": {"name": "going", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}});
            let found = match seen.path.strip_prefix("/apis/freeflow.io/v1alpha1/").unwrap_or_default() {
                "namespaces/team-a/networks/red" | "namespaces/team-a/vnics/db" => network,
                "namespaces/team-a/networks/going" => going,
                "clusternetworks/all" => shared(&["*"]),
                "clusternetworks/some" => shared(&["team-b"]),
                "clusternetworks/broken" => return (500, String::new()),
                _ => return (404, json!({"kind": "Status", "code": 404, "reason": "NotFound"}).to_string()),
            };
            (200, found.to_string())
        })
        .await
    }

    #[tokio::test]
    async fn a_namespace_names_its_own_and_what_is_shared_with_it() {
        let server = server().await;
        let lookup = Lookup::new(server.client());
        let allowed = |name: &str, keys: &[&str]| {
            Ok(Some(Allowed { name: name.into(), label_keys: keys.iter().map(|key| (*key).to_owned()).collect() }))
        };
        assert_eq!(lookup.network("team-a", "red").await, allowed("k8s.team-a.red", &["role"]));
        assert_eq!(lookup.network("team-a", "all").await, allowed("k8s._.all", &[]));
        assert_eq!(lookup.network("team-b", "some").await, allowed("k8s._.some", &[]));
        assert_eq!(lookup.vnic("team-a", "db").await, allowed("k8s.team-a.db", &[]));
        for (namespace, name) in [("team-b", "red"), ("team-b", "none"), ("team-a", "some"), ("team-a", "going")] {
            assert_eq!(lookup.network(namespace, name).await, Ok(None), "{namespace}/{name}");
        }
        assert_eq!(lookup.vnic("team-b", "db").await, Ok(None));
        // Without an answer nothing is allowed.
        assert!(lookup.network("team-a", "broken").await.unwrap_err().contains("not known"));
        let before = server.seen().len();
        for bad in ["../../team-a/networks/red", "k8s.team-a.red/", "", "_"] {
            assert_eq!(lookup.network("team-b", bad).await, Ok(None));
            assert_eq!(lookup.vnic("team-b", bad).await, Ok(None));
        }
        assert_eq!(server.seen().len(), before, "bad names were asked about");
    }
}
