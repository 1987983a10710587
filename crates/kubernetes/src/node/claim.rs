//! A `ResourceClaim` (`resource.k8s.io`, of all versions from v1beta1 on), as far as the node needs it.
use crate::api::objects::Metadata;
use serde::Deserialize;
use serde_json::Value;

/// The driver's name in claims, classes and slices, and the domain of its CDI devices.
pub const DRIVER: &str = "freeflow.io";

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResourceClaim {
    pub metadata: Metadata,
    pub status: ClaimStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ClaimStatus {
    pub allocation: Option<Allocation>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Allocation {
    pub devices: AllocatedDevices,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct AllocatedDevices {
    pub results: Vec<AllocatedDevice>,
    pub config: Vec<Config>,
}

/// A device that a request was given.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AllocatedDevice {
    pub request: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    pub admin_access: Option<bool>,
}

/// Parameters of a class, or of the claim itself.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Config {
    pub source: String,
    /// Those that it is for; empty: all.
    pub requests: Vec<String>,
    pub opaque: Option<OpaqueConfig>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct OpaqueConfig {
    pub driver: String,
    pub parameters: Value,
}

/// The name of a request without that of a subrequest.
pub fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

impl Config {
    /// Whether it is ours and for this request.
    pub fn is_for(&self, request: &str) -> bool {
        let is_ours = self.opaque.as_ref().is_some_and(|opaque| opaque.driver == DRIVER);
        let is_named = |name: &String| name == request || name == base_request(request);
        is_ours && (self.requests.is_empty() || self.requests.iter().any(is_named))
    }
}

impl ResourceClaim {
    /// The pod that the claim was made for, by name and uid, if it was made of a template: such a claim has no other.
    pub fn pod(&self) -> Option<(&str, &str)> {
        let is_pod = |api: &str, kind: &str| api == "v1" && kind == "Pod";
        let owner = self.metadata.owner_references.iter().find(|owner| owner.controller == Some(true))?;
        is_pod(&owner.api_version, &owner.kind).then_some((owner.name.as_str(), owner.uid.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parameters_are_for_requests_and_their_alternatives() {
        let config = |driver: &str, requests: Value| -> Config {
            let opaque = json!({"driver": driver, "parameters": {}});
            serde_json::from_value(json!({"source": "FromClaim", "requests": requests, "opaque": opaque})).unwrap()
        };
        assert!(config(DRIVER, json!([])).is_for("a"));
        assert!(config(DRIVER, json!(["a"])).is_for("a/fast") && config(DRIVER, json!(["a/fast"])).is_for("a/fast"));
        assert!(!config(DRIVER, json!(["a/fast"])).is_for("a/slow") && !config(DRIVER, json!(["b"])).is_for("a"));
        assert!(!config("gpu.example.com", json!([])).is_for("a"));
    }

    #[test]
    fn a_claim_of_a_template_belongs_to_its_pod() {
        let owned = |owner: Value| -> ResourceClaim {
            serde_json::from_value(json!({"metadata": {"ownerReferences": [owner]}})).unwrap()
        };
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u", "controller": true});
        assert_eq!(owned(pod.clone()).pod(), Some(("web", "u")));
        let mut other = pod;
        other["controller"] = json!(false);
        assert_eq!(owned(other).pod(), None);
        assert_eq!(ResourceClaim::default().pod(), None);
    }
}
