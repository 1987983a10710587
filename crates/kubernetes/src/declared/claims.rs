//! Which networks and labels a pod's claim may name.
//!
//! A claim of the namespace NS names a `Network` of NS, or a `ClusterNetwork` whose `allowedNamespaces` has NS or is
//! `*`. It can't name another namespace's network, nor one that was declared by hand: names are taken for those of
//! objects of NS or of the whole cluster, never for FreeFlow's own. Labels are those whose keys the network's
//! `podLabels` has. Administrators, in a DeviceClass, are not bound by `podLabels`.
use super::names::freeflow_name;
use super::specs::{ClusterNetworkSpec, NetworkSpec};
use freeflow_orchestrator::objects::Labels;

/// A network as a claim names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named<'a> {
    /// A `Network` of the claim's namespace, and its spec as the API server has it.
    Network(&'a str, &'a NetworkSpec),
    /// A `ClusterNetwork`.
    ClusterNetwork(&'a str, &'a ClusterNetworkSpec),
}

impl Named<'_> {
    fn pod_labels(&self) -> &[String] {
        match self {
            Self::Network(_, spec) => &spec.pod_labels,
            Self::ClusterNetwork(_, spec) => &spec.pod_labels,
        }
    }

    /// FreeFlow's name of the network, if a claim of this namespace may have a vNIC of it.
    ///
    /// # Errors
    /// A sentence for people, which says the same whether there is such a network or not.
    pub fn for_claim_of(&self, namespace: &str) -> Result<String, String> {
        let name = match self {
            Self::Network(name, _) => freeflow_name(Some(namespace), name),
            Self::ClusterNetwork(name, spec) => {
                if !is_allowed(&spec.allowed_namespaces, namespace) {
                    return Err(no_cluster_network(name, namespace));
                }
                freeflow_name(None, name)
            }
        };
        name.map_err(|error| error.to_string())
    }

    /// Those of a pod's labels that its vNIC gets.
    pub fn labels_of_pod(&self, labels: &Labels) -> Labels {
        let is_allowed = |(key, _): &(&String, &String)| self.pod_labels().contains(key);
        labels.iter().filter(is_allowed).map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Checks labels that a claim asks for.
    ///
    /// # Errors
    /// A sentence for people: a key that the network does not allow.
    pub fn check_labels(&self, labels: &Labels) -> Result<(), String> {
        match labels.keys().find(|key| !self.pod_labels().contains(key)) {
            Some(key) => Err(format!("the network does not allow pods the label {key:?} (its podLabels lists keys)")),
            None => Ok(()),
        }
    }
}

fn is_allowed(allowed: &[String], namespace: &str) -> bool {
    matches!(allowed, [all] if all == "*") || allowed.iter().any(|one| one == namespace)
}

/// Of a ClusterNetwork that is not there, or not for this namespace.
pub fn no_cluster_network(name: &str, namespace: &str) -> String {
    format!("there is no ClusterNetwork {name:?} for pods of the namespace {namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn network() -> NetworkSpec {
        serde_json::from_value(json!({"cidrs": ["10.1.0.0/24"], "podLabels": ["role"]})).unwrap()
    }

    fn shared(allowed: &[&str]) -> ClusterNetworkSpec {
        serde_json::from_value(json!({"cidrs": ["10.1.0.0/24"], "allowedNamespaces": allowed})).unwrap()
    }

    #[test]
    fn a_claim_names_networks_of_its_namespace() {
        let spec = network();
        assert_eq!(Named::Network("red", &spec).for_claim_of("team-a"), Ok("k8s.team-a.red".into()));
        for bad in ["k8s.team-b.red", "../red", "_.red", "team-b/red", ""] {
            let name = Named::Network(bad, &spec).for_claim_of("team-a");
            // At most a network of the claim's own namespace that has such a name.
            assert!(name.is_err() || name == Ok(format!("k8s.team-a.{bad}")), "{name:?}");
        }
        for (allowed, is_fine) in
            [(&["team-a"][..], true), (&["*"], true), (&[], false), (&["team-b"], false), (&["team-b", "*"], false)]
        {
            let name = Named::ClusterNetwork("all", &shared(allowed)).for_claim_of("team-a");
            assert_eq!(name.is_ok(), is_fine, "{allowed:?}");
            assert!(name.is_err() || name == Ok("k8s._.all".into()));
        }
    }

    #[test]
    fn labels_are_those_that_the_network_allows() {
        let spec = network();
        let named = Named::Network("red", &spec);
        let labels = |keys: &[&str]| keys.iter().map(|key| ((*key).to_string(), "x".to_string())).collect::<Labels>();
        assert_eq!(named.labels_of_pod(&labels(&["app", "role"])), labels(&["role"]));
        assert!(named.check_labels(&labels(&["role"])).is_ok());
        assert!(named.check_labels(&labels(&["app", "role"])).unwrap_err().contains("app"));
    }
}
