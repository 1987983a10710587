//! Objects that Kubernetes declares for FreeFlow: custom resources of the group `freeflow.io`.
//!
//! | kind | scope | FreeFlow's kind |
//! |---|---|---|
//! | `Network`, `Group`, `AccessRule`, `Vnic` | namespace, which is the tenant | the same |
//! | `ClusterNetwork` | cluster, for the namespaces that it lists | Network |
//! | `QosClass`, `Quota` | cluster | the same |
//!
//! - [`names`]: FreeFlow's names for them, which nobody else can give.
//! - [`claims`]: the networks and labels that a pod's claim may name. That is the contract with the node's agent.
//! - [`rules`]: the same, asked of the API server.
//! - [`crds`]: their definitions, generated from the types by which they are read.
mod specs;

pub mod claims;
pub mod crds;
pub mod names;
pub mod rules;

pub use specs::{AccessRuleSpec, ClusterNetworkSpec, Declared, GroupSpec, NetworkSpec, VnicSpec};

use crate::api::Kind;
use crate::api::objects::Metadata;
use freeflow_orchestrator::objects::{AnyObject, Manager, ObjectKind, QosClassSpec, QuotaSpec};
use freeflow_orchestrator::{KUBERNETES, OBJECT_BYTES_MAX};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The API group.
pub const GROUP: &str = "freeflow.io";
/// Its version.
pub const VERSION: &str = "v1alpha1";

/// Longest spec that is kept, bytes: what FreeFlow takes is shorter.
const SPEC_BYTES_MAX: usize = 2 * OBJECT_BYTES_MAX;

/// A custom resource. Its spec is read by its kind. All of them are kept: of its metadata no more than is needed.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "SentResource")]
pub struct Resource {
    pub metadata: Metadata,
    pub spec: Value,
    pub status: Option<Status>,
    /// Length of a spec that is not kept, bytes.
    too_long: Option<usize>,
}

#[derive(Deserialize)]
struct SentResource {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Value,
    status: Option<Status>,
}

impl From<SentResource> for Resource {
    fn from(sent: SentResource) -> Self {
        let SentResource { metadata, spec, status } = sent;
        let Metadata { name, namespace, uid, resource_version, generation, deletion_timestamp, finalizers, .. } =
            metadata;
        let metadata = Metadata {
            name,
            namespace,
            uid,
            resource_version,
            generation,
            deletion_timestamp,
            finalizers,
            ..Metadata::default()
        };
        let too_long = Some(spec.to_string().len()).filter(|bytes| *bytes > SPEC_BYTES_MAX);
        let spec = if too_long.is_some() { Value::Null } else { spec };
        Self { metadata, spec, status, too_long }
    }
}

/// The state of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// FreeFlow's name of the object.
    pub freeflow_name: String,
    /// `Accepted`: FreeFlow has taken the spec. `Enforced`: all hosts follow it. `Deleted`: while it waits for others.
    pub conditions: Vec<Condition>,
}

/// A condition as Kubernetes has made it familiar.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// Its name.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The generation of the spec that it is about.
    pub observed_generation: i64,
    /// When `status` became this.
    pub last_transition_time: String,
    /// One word for programs.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
}

/// A kind of custom resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the kinds, by their names")]
pub enum DeclaredKind {
    QosClass,
    Quota,
    ClusterNetwork,
    Network,
    Group,
    Vnic,
    AccessRule,
}

impl DeclaredKind {
    /// Those that others name come first.
    pub const ALL: [Self; 7] =
        [Self::QosClass, Self::Quota, Self::ClusterNetwork, Self::Network, Self::Group, Self::Vnic, Self::AccessRule];

    pub const fn name(self) -> &'static str {
        match self {
            Self::QosClass => "QosClass",
            Self::Quota => "Quota",
            Self::ClusterNetwork => "ClusterNetwork",
            Self::Network => "Network",
            Self::Group => "Group",
            Self::Vnic => "Vnic",
            Self::AccessRule => "AccessRule",
        }
    }

    pub const fn plural(self) -> &'static str {
        match self {
            Self::QosClass => "qosclasses",
            Self::Quota => "quotas",
            Self::ClusterNetwork => "clusternetworks",
            Self::Network => "networks",
            Self::Group => "groups",
            Self::Vnic => "vnics",
            Self::AccessRule => "accessrules",
        }
    }

    pub const fn is_namespaced(self) -> bool {
        matches!(self, Self::Network | Self::Group | Self::Vnic | Self::AccessRule)
    }

    /// Its place in the API.
    pub const fn api(self) -> Kind {
        Kind::new(GROUP, VERSION, self.plural())
    }

    /// FreeFlow's kind.
    pub const fn object_kind(self) -> ObjectKind {
        match self {
            Self::QosClass => ObjectKind::QosClass,
            Self::Quota => ObjectKind::Quota,
            Self::ClusterNetwork | Self::Network => ObjectKind::Network,
            Self::Group => ObjectKind::Group,
            Self::Vnic => ObjectKind::Vnic,
            Self::AccessRule => ObjectKind::AccessRule,
        }
    }

    fn scope(self, metadata: &Metadata) -> Option<&str> {
        self.is_namespaced().then_some(metadata.namespace.as_str())
    }

    /// FreeFlow's name of a resource of this kind.
    ///
    /// # Errors
    /// Its name is too long, or none that Kubernetes gives.
    pub fn freeflow_name(self, metadata: &Metadata) -> Result<String, names::BadName> {
        names::freeflow_name(self.scope(metadata), &metadata.name)
    }

    /// FreeFlow's object for a resource of this kind, with Kubernetes for its manager.
    ///
    /// # Errors
    /// A sentence for people: the field that is wrong, and why.
    pub fn object(self, resource: &Resource) -> Result<AnyObject, String> {
        if let Some(bytes) = resource.too_long {
            return Err(format!("spec: it has {bytes} bytes; {SPEC_BYTES_MAX} are the most"));
        }
        let metadata = &resource.metadata;
        let mut object = match self {
            Self::QosClass => self.read::<QosClassSpec>(resource),
            Self::Quota => self.read::<QuotaSpec>(resource),
            Self::ClusterNetwork => self.read::<ClusterNetworkSpec>(resource),
            Self::Network => self.read::<NetworkSpec>(resource),
            Self::Group => self.read::<GroupSpec>(resource),
            Self::Vnic => self.read::<VnicSpec>(resource),
            Self::AccessRule => self.read::<AccessRuleSpec>(resource),
        }?;
        let namespace = self.scope(metadata).map(|namespace| format!(" -n {namespace}")).unwrap_or_default();
        let change = format!("kubectl edit {}.{GROUP} {}{namespace}", self.plural(), metadata.name);
        object.metadata_mut().manager = Some(Manager { name: KUBERNETES.into(), change: Some(change) });
        Ok(object)
    }

    fn read<S: Declared>(self, resource: &Resource) -> Result<AnyObject, String> {
        let spec: S = serde_path_to_error::deserialize(&resource.spec)
            .map_err(|error| format!("spec.{}: {}", error.path(), error.inner()))?;
        let metadata = &resource.metadata;
        spec.object(self.scope(metadata), &metadata.name).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn resource(namespace: &str, name: &str, spec: Value) -> Resource {
        let metadata = Metadata { name: name.into(), namespace: namespace.into(), ..Metadata::default() };
        Resource { metadata, spec, ..Resource::default() }
    }

    fn object(kind: DeclaredKind, namespace: &str, name: &str, spec: Value) -> Value {
        let object = kind.object(&resource(namespace, name, spec)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(object.kind(), kind.object_kind());
        serde_json::to_value(object).unwrap()
    }

    #[test]
    fn a_namespace_is_a_tenant() {
        let network = object(
            DeclaredKind::Network,
            "team",
            "red",
            json!({"cidrs": ["10.1.0.0/24"], "qosClass": "slow", "quota": "small", "podLabels": ["role"]}),
        );
        assert_eq!(network["metadata"]["name"], "k8s.team.red");
        let change = "kubectl edit networks.freeflow.io red -n team";
        assert_eq!(network["metadata"]["manager"], json!({"name": "kubernetes", "change": change}));
        assert_eq!(network["spec"]["tenant"], "k8s.team");
        assert_eq!([&network["spec"]["qosClass"], &network["spec"]["quota"]], ["k8s._.slow", "k8s._.small"]);
        let group = object(
            DeclaredKind::Group,
            "team",
            "g",
            json!({"members": [{"networks": ["red"], "vnics": ["db"], "labels": {"a": "b"}}]}),
        );
        let member = &group["spec"]["members"][0];
        assert_eq!(*member, json!({"networks": ["k8s.team.red"], "vnics": ["k8s.team.db"], "labels": {"a": "b"}}));
        let ends = json!({"from": {"group": "g"}, "to": {"network": "red", "cidr": "10.1.0.0/28"}, "action": "allow"});
        let rule = object(DeclaredKind::AccessRule, "team", "r", ends);
        assert_eq!(rule["spec"]["from"]["group"], "k8s.team.g");
        assert_eq!(rule["spec"]["to"], json!({"network": "k8s.team.red", "cidr": "10.1.0.0/28"}));
        let vnic = json!({"network": "red", "addresses": ["10.1.0.9"], "labels": {"tier": "db"}});
        let vnic = object(DeclaredKind::Vnic, "team", "db", vnic);
        assert_eq!(vnic["metadata"]["labels"], json!({"tier": "db"}));
        assert_eq!(vnic["spec"], json!({"network": "k8s.team.red", "addresses": ["10.1.0.9"]}));
        let shared = json!({"cidrs": ["10.2.0.0/24"], "allowedNamespaces": ["*"]});
        let shared = object(DeclaredKind::ClusterNetwork, "", "all", shared);
        assert_eq!((&shared["metadata"]["name"], &shared["spec"]["tenant"]), (&json!("k8s._.all"), &json!("k8s._")));
        let class = object(DeclaredKind::QosClass, "", "slow", json!({"vnic": {"rate": "1Gbit"}}));
        assert_eq!(class["metadata"]["name"], "k8s._.slow");
    }

    #[test]
    fn no_more_of_a_resource_is_kept_than_is_needed() {
        let labels: std::collections::BTreeMap<String, String> =
            (0..2000).map(|number| (format!("key{number}"), "x".repeat(60))).collect();
        let value = json!({"metadata": {"name": "g", "namespace": "team", "annotations": {"a": "x"}, "labels": {"b": "y"},
            "finalizers": ["f"]}, "spec": {"members": [{"labels": labels}]}});
        let fat: Resource = serde_json::from_value(value).unwrap();
        assert!(fat.metadata.annotations.is_empty() && fat.metadata.labels.is_empty());
        assert_eq!((fat.metadata.finalizers.as_slice(), &fat.spec), (&["f".to_owned()][..], &Value::Null));
        let why = DeclaredKind::Group.object(&fat).unwrap_err();
        assert!(why.contains("131072 are the most"), "{why}");
        assert_eq!(DeclaredKind::Group.freeflow_name(&fat.metadata).unwrap(), "k8s.team.g");
    }

    #[test]
    fn others_names_are_no_way_out() {
        for (kind, spec) in [
            (DeclaredKind::Vnic, json!({"network": "../other.red"})),
            (DeclaredKind::Vnic, json!({"network": "other/red"})),
            (DeclaredKind::AccessRule, json!({"from": {"network": ""}, "to": {}, "action": "allow"})),
            (DeclaredKind::Group, json!({"members": [{"networks": ["_"]}]})),
            (DeclaredKind::Network, json!({"cidrs": ["10.1.0.0/24"], "tenant": "other"})),
            (DeclaredKind::Network, json!({"cidrs": ["10.1.0.0/24"], "qosClass": "A"})),
            (DeclaredKind::Network, json!({})),
            (DeclaredKind::Network, Value::Null),
        ] {
            assert!(kind.object(&resource("team", "x", spec.clone())).is_err(), "{spec}");
        }
        // At most an object of the namespace's own.
        let vnic = object(DeclaredKind::Vnic, "team", "x", json!({"network": "k8s.other.red"}));
        assert_eq!(vnic["spec"]["network"], "k8s.team.k8s.other.red");
        assert!(DeclaredKind::Quota.object(&resource("", &"x".repeat(61), json!({}))).is_err());
    }
}
