//! Specs of the objects that Kubernetes declares, and FreeFlow's objects for them.
//!
//! Fields are those of FreeFlow's own kinds but for the tenant, which is the namespace, and names, which are those of
//! objects of the same namespace.
use super::names::{BadName, freeflow_name, tenant};
use freeflow_orchestrator::objects::{
    Access, AccessAction, AccessDirection, AccessRule, AccessRuleSpec as OwnRuleSpec, AnyObject, EndSelector,
    ExternalAccess, Group, GroupSpec as OwnGroupSpec, Kind as OwnKind, Labels, Metadata, Network,
    NetworkSpec as OwnNetworkSpec, Object, QosClass, QosClassSpec, Quota, QuotaSpec, Vnic, VnicSelector,
    VnicSpec as OwnVnicSpec,
};
use freeflow_protocol::admin::DataPath;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A spec that becomes an object of FreeFlow's.
pub trait Declared: DeserializeOwned + Serialize + JsonSchema {
    /// FreeFlow's object, without a manager.
    ///
    /// # Errors
    /// A name in it is none.
    fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName>;
}

fn named<K: OwnKind>(name: String, labels: Labels, spec: K::Spec) -> AnyObject
where
    AnyObject: From<Object<K::Spec, K::Status>>,
{
    Object::new::<K>(Metadata { name, labels, ..Metadata::default() }, spec).into()
}

/// The name of an object of the whole cluster, if one is named.
fn of_cluster(name: Option<String>) -> Result<Option<String>, BadName> {
    name.map(|name| freeflow_name(None, &name)).transpose()
}

fn all_named(namespace: Option<&str>, names: Vec<String>) -> Result<Vec<String>, BadName> {
    names.iter().map(|name| freeflow_name(namespace, name)).collect()
}

macro_rules! network_spec {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        pub struct $name {
            /// One range of IPv4 addresses and at most one of IPv6. Can't be changed while vNICs have addresses of
            /// them.
            #[schemars(length(min = 1, max = 2))]
            pub cidrs: Vec<String>,
            /// The part of the IPv4 range for declared vNICs where FreeFlow's hosts are a cluster: an eighth of it if
            /// none is given.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub floating: Option<String>,
            /// Data path between its vNICs.
            #[serde(default)]
            pub data_path: DataPath,
            /// Between its vNICs, where no AccessRule says otherwise.
            #[serde(default)]
            pub access: Access,
            /// Whether its vNICs may talk to machines without FreeFlow.
            #[serde(default)]
            pub external: ExternalAccess,
            /// Name of the QosClass of its vNICs.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub qos_class: Option<String>,
            /// Name of the Quota of its vNICs.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub quota: Option<String>,
            /// Keys of labels that pods may give their vNICs. Others never reach AccessRules and Groups.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            #[schemars(length(max = 64))]
            pub pod_labels: Vec<String>,
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl Declared for $name {
            fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName> {
                let spec = OwnNetworkSpec {
                    tenant: tenant(namespace)?,
                    cidrs: self.cidrs,
                    range: None,
                    floating: self.floating,
                    data_path: self.data_path,
                    access: self.access,
                    external: self.external,
                    qos_class: of_cluster(self.qos_class)?,
                    quota: of_cluster(self.quota)?,
                };
                Ok(named::<Network>(freeflow_name(namespace, name)?, Labels::new(), spec))
            }
        }
    };
}

network_spec! {
    /// A network of a namespace.
    NetworkSpec {}
}
network_spec! {
    /// A network for several namespaces. Its vNICs reach each other, whichever namespaces their pods are of, unless
    /// its `access` is `deny`.
    ClusterNetworkSpec {
        /// Namespaces whose pods may have vNICs of it; `*` alone stands for all.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        #[schemars(length(max = 1024))]
        allowed_namespaces: Vec<String>,
    }
}

/// vNICs of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GroupSpec {
    /// A vNIC chosen by one of these is a member. Networks and vNICs are those of the namespace.
    #[schemars(length(max = 16))]
    pub members: Vec<VnicSelector>,
}

impl Declared for GroupSpec {
    fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName> {
        let member = |selector: VnicSelector| {
            let (networks, vnics) = (all_named(namespace, selector.networks)?, all_named(namespace, selector.vnics)?);
            Ok(VnicSelector { networks, vnics, ..selector })
        };
        let members = self.members.into_iter().map(member).collect::<Result<_, BadName>>()?;
        let spec = OwnGroupSpec { tenant: tenant(namespace)?, members };
        Ok(named::<Group>(freeflow_name(namespace, name)?, Labels::new(), spec))
    }
}

/// Which vNICs of a namespace may connect to which. Of all rules that fit, the one with the highest `order` decides,
/// and of these `deny`; if none fits, the network's own `access` decides within a network, and across networks nothing
/// is allowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AccessRuleSpec {
    /// One end. Groups and networks are those of the namespace.
    pub from: EndSelector,
    /// The other end.
    pub to: EndSelector,
    /// Directions in which it holds.
    #[serde(default)]
    pub direction: AccessDirection,
    /// Its answer.
    pub action: AccessAction,
    /// Higher ones decide first.
    #[serde(default)]
    pub order: i32,
}

impl Declared for AccessRuleSpec {
    fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName> {
        let end = |end: EndSelector| {
            let of = |name: Option<String>| name.map(|name| freeflow_name(namespace, &name)).transpose();
            let (group, network) = (of(end.group)?, of(end.network)?);
            Ok::<_, BadName>(EndSelector { group, network, ..end })
        };
        let spec = OwnRuleSpec {
            tenant: tenant(namespace)?,
            from: end(self.from)?,
            to: end(self.to)?,
            direction: self.direction,
            action: self.action,
            order: self.order,
        };
        Ok(named::<AccessRule>(freeflow_name(namespace, name)?, Labels::new(), spec))
    }
}

/// A vNIC that keeps its address over restarts of pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VnicSpec {
    /// Name of a Network of the namespace. Can't be changed.
    pub network: String,
    /// One of a family at most; what is not given is allocated. Can't be changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    pub addresses: Vec<IpAddr>,
    /// Where FreeFlow's hosts are a cluster: the hosts that may have it; all if none are given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub hosts: Vec<String>,
    /// Labels by which AccessRules and Groups choose it. Those of the Kubernetes object stay there.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl Declared for VnicSpec {
    fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName> {
        let spec = OwnVnicSpec {
            network: freeflow_name(namespace, &self.network)?,
            addresses: self.addresses,
            qos_class: None,
            quota: None,
            hosts: self.hosts,
        };
        Ok(named::<Vnic>(freeflow_name(namespace, name)?, self.labels, spec))
    }
}

impl Declared for QosClassSpec {
    fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName> {
        Ok(named::<QosClass>(freeflow_name(namespace, name)?, Labels::new(), self))
    }
}

impl Declared for QuotaSpec {
    fn object(self, namespace: Option<&str>, name: &str) -> Result<AnyObject, BadName> {
        Ok(named::<Quota>(freeflow_name(namespace, name)?, Labels::new(), self))
    }
}
