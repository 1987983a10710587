//! Declared objects, with `apiVersion`, `kind`, `metadata`, `spec` and `status`, as Kubernetes has
//! made them familiar.
//!
//! A `spec` is what is wanted, and belongs to who writes it; a `status` is what is so, and is
//! written by the router alone: what a writer says of it is ignored. Unknown fields are refused.
//! Defaults are written back, so that an object which was read shows everything that holds.
mod any;
mod kinds;
#[cfg(feature = "schema")]
mod schema;
mod units;

pub use any::{AnyObject, Cause, Invalid, ObjectKind, Typed, parse_object};
pub use kinds::{
    Access, AccessAction, AccessDirection, AccessRuleSpec, AccessRuleStatus, EndSelector, ExternalAccess, GroupSpec,
    GroupStatus, HostMode, HostSpec, HostStatus, LimitSpec, NetworkSpec, NetworkStatus, QosClassSpec, QosClassStatus,
    QuotaAmounts, QuotaSpec, QuotaStatus, ResourceAmounts, VnicResources, VnicSelector, VnicSpec, VnicStatus,
};
pub use units::{BitRate, ByteCount, MessageRate, UnitError};

use alloc::collections::BTreeMap;
use alloc::string::String;
use core::fmt::Debug;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// `apiVersion` of all objects.
pub const API_VERSION: &str = "freeflow.io/v1";
/// The tenant of networks that name none.
pub const DEFAULT_TENANT: &str = "default";

/// A label's name and value.
pub type Labels = BTreeMap<String, String>;

/// Name, labels and version of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Unique within the kind.
    pub name: String,
    /// Labels, by which selectors choose.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// The store's revision when the object was last changed. A writer that gives one changes the
    /// object only if it still has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<u64>,
    /// How often the spec was changed, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The manager of the object, whose requests alone change it. Set by the manager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manager: Option<Manager>,
}

/// A program that declares objects for its own users, such as Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manager {
    /// `kubernetes`.
    pub name: String,
    /// The command by which its users change the object, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

/// A kind of objects.
pub trait Kind {
    /// As `kind` has it: `QosClass`.
    const KIND: &'static str;
    /// In paths and commands: `qosclasses`.
    const PLURAL: &'static str;
    /// The wanted state.
    type Spec: Clone + Debug + PartialEq + Serialize + DeserializeOwned;
    /// The present state.
    type Status: Clone + Debug + PartialEq + Serialize + DeserializeOwned;
}

/// One object of a kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Object<S, T> {
    /// Always [`API_VERSION`].
    pub api_version: String,
    /// [`Kind::KIND`].
    pub kind: String,
    /// Name, labels and version.
    pub metadata: Metadata,
    /// The wanted state.
    pub spec: S,
    /// The present state, as the router gives it.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub status: Option<T>,
}

fn none<T>() -> Option<T> {
    None
}

macro_rules! kinds {
    ($($name:ident, $kind:literal, $plural:literal, $spec:ident, $status:ident;)*) => { $(
        #[doc = concat!("The kind `", $kind, "`.")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name;
        impl Kind for $name {
            const KIND: &'static str = $kind;
            const PLURAL: &'static str = $plural;
            type Spec = $spec;
            type Status = $status;
        }
    )*
        /// Kind and plural of all kinds.
        pub const KINDS: &[(&str, &str)] = &[$(($kind, $plural)),*];
    };
}

kinds! {
    Network, "Network", "networks", NetworkSpec, NetworkStatus;
    Group, "Group", "groups", GroupSpec, GroupStatus;
    AccessRule, "AccessRule", "accessrules", AccessRuleSpec, AccessRuleStatus;
    QosClass, "QosClass", "qosclasses", QosClassSpec, QosClassStatus;
    Quota, "Quota", "quotas", QuotaSpec, QuotaStatus;
    Vnic, "Vnic", "vnics", VnicSpec, VnicStatus;
    Host, "Host", "hosts", HostSpec, HostStatus;
}
