//! The specs and statuses of all kinds.
use super::{BitRate, ByteCount, DEFAULT_TENANT, Labels, MessageRate};
use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;
use freeflow_protocol::admin::DataPath;
use freeflow_verbs::{PRIORITY_DEFAULT, WEIGHT_DEFAULT};
use serde::{Deserialize, Serialize};

fn default_tenant() -> String {
    DEFAULT_TENANT.into()
}

const fn default_priority() -> u8 {
    PRIORITY_DEFAULT
}

const fn default_weight() -> u16 {
    WEIGHT_DEFAULT
}

/// Whether something may happen where no rule says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "described together; with a text for each the schema would be a list of constants")]
pub enum Access {
    #[default]
    Allow,
    Deny,
}

/// Access to machines without FreeFlow.
pub type ExternalAccess = Access;
/// Action of a rule.
pub type AccessAction = Access;

// ---- Network

/// A network of vNICs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetworkSpec {
    /// The tenant that owns the network; can't be changed.
    #[serde(default = "default_tenant")]
    pub tenant: String,
    /// One of IPv4 and at most one of IPv6. May overlap those of other tenants' networks, not of
    /// the tenant's own. Can't be changed while vNICs have addresses of it. A network that is there
    /// keeps those it has if none are given.
    #[serde(default)]
    pub cidrs: Vec<String>,
    /// The part of the IPv4 one that this host gives out, where several hosts share the network:
    /// all of it if none. Of the IPv6 one it gives out what stands at the same places.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// The part of the IPv4 one whose addresses go with their vNICs from host to host of a cluster: no host gives them
    /// out, nor those at the same places of the IPv6 one. A network that is there keeps the one it has if none is
    /// given; a network of a cluster has an eighth of its addresses for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floating: Option<String>,
    /// Data path between its vNICs.
    #[serde(default)]
    pub data_path: DataPath,
    /// Between its vNICs, where no rule says otherwise.
    #[serde(default)]
    pub access: Access,
    /// Whether its vNICs may talk to machines without FreeFlow. Which ones, the peers file says.
    #[serde(default)]
    pub external: ExternalAccess,
    /// Name of the QosClass of its vNICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos_class: Option<String>,
    /// Name of the Quota of its vNICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
}

/// A network on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkStatus {
    /// The host's own address in it, by family.
    pub gateways: Vec<IpAddr>,
    /// Name of its bridge.
    pub bridge: String,
    /// Its vNICs on this host.
    pub vnic_count: u32,
    /// IPv4 addresses that are left on this host.
    pub free_address_count: u64,
}

// ---- Group, AccessRule

/// vNICs for which everything that is given holds; one that gives nothing chooses all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct VnicSelector {
    /// All of these labels.
    #[serde(skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// In one of these networks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    /// With an address in one of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cidrs: Vec<String>,
    /// One of these ids.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vnics: Vec<String>,
}

/// vNICs of one tenant (uniRDMA: a routing group).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GroupSpec {
    /// Tenant of the group and its members.
    #[serde(default = "default_tenant")]
    pub tenant: String,
    /// A vNIC chosen by one of these is a member.
    pub members: Vec<VnicSelector>,
}

/// A group on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct GroupStatus {
    /// Of this host: the first of them.
    pub vnics: Vec<String>,
    /// How many there are on this host.
    pub vnic_count: u32,
}

/// One end of what a rule is about: all that is given must hold; nothing given: any vNIC of the tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct EndSelector {
    /// Name of a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// All of these labels.
    #[serde(skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Name of a network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// A range of addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cidr: Option<String>,
}

/// Directions in which a rule holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum AccessDirection {
    /// Traffic that either side begins.
    #[default]
    Both,
    /// Traffic that `from` begins: its rdma_cm requests, its datagrams.
    FromTo,
}

/// Which vNICs may connect to which. Of all rules that fit, the one with the highest `order`
/// decides, and of these `deny`; if none fits, the network's own `access` decides within a network,
/// and across networks nothing is allowed. Across two networks of the tenant `allow` needs a rule
/// whose ends name them, one each; `deny` holds there also without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AccessRuleSpec {
    /// Tenant of the rule and of both ends.
    #[serde(default = "default_tenant")]
    pub tenant: String,
    /// One end.
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

/// A rule on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct AccessRuleStatus {
    /// Requests that it refused on this host since the router began, and connections that it cut
    /// off.
    pub refusal_count: u64,
    /// Established connections that it ended.
    pub disconnection_count: u64,
}

// ---- QosClass, Quota

/// Limits of a rate, each with its burst; an absent one does not limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct LimitSpec {
    /// Payload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<BitRate>,
    /// Depth of the payload's bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<ByteCount>,
    /// Messages a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_rate: Option<MessageRate>,
    /// Depth of the messages' bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_burst: Option<u64>,
}

impl LimitSpec {
    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A class of service: limits, priority and weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct QosClassSpec {
    /// Of each QP by itself.
    #[serde(default, skip_serializing_if = "LimitSpec::is_none")]
    pub qp: LimitSpec,
    /// Of all QPs of a vNIC together.
    #[serde(default, skip_serializing_if = "LimitSpec::is_none")]
    pub vnic: LimitSpec,
    /// Of all vNICs of a tenant on this host that are of the class together.
    #[serde(default, skip_serializing_if = "LimitSpec::is_none")]
    pub tenant: LimitSpec,
    /// 0 (lowest) to 7, strict.
    #[serde(default = "default_priority")]
    #[cfg_attr(feature = "schema", schemars(range(max = freeflow_verbs::PRIORITY_MAX)))]
    pub priority: u8,
    /// Share among vNICs of one priority, 1 to 1000.
    #[serde(default = "default_weight")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = freeflow_verbs::WEIGHT_MAX)))]
    pub weight: u16,
}

/// A class on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct QosClassStatus {
    /// Networks that name it.
    pub networks: Vec<String>,
    /// vNICs that are of it.
    pub vnic_count: u32,
}

/// Numbers of objects; an absent one does not limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct QuotaAmounts {
    /// Queue pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qps: Option<u32>,
    /// Completion queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cqs: Option<u32>,
    /// Memory regions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mrs: Option<u32>,
    /// Lengths of all memory regions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered_bytes: Option<ByteCount>,
}

/// Most that may be held at a time; nothing is taken away when a quota shrinks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct QuotaSpec {
    /// Of each vNIC.
    pub per_vnic: QuotaAmounts,
    /// Of all vNICs of a network on this host together, if the network names the quota; nothing to a vNIC that does.
    pub per_network: QuotaAmounts,
    /// vNICs of a network on this host, if the network names the quota; nothing to a vNIC that does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vnics: Option<u32>,
}

/// A quota on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct QuotaStatus {
    /// Networks that name it.
    pub networks: Vec<String>,
    /// Objects that it refused since the router began.
    pub refusal_count: u64,
}

// ---- Vnic

/// A vNIC: its network and its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VnicSpec {
    /// Can't be changed.
    pub network: String,
    /// Asked for, one of a family at most; what is not asked for is allocated, and written back. Can't be changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// In the network's place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos_class: Option<String>,
    /// In the network's place, as to `perVnic`; the rest of a quota is for networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// Of a cluster: the hosts that may have it; all if none are given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
}

/// A vNIC on its host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct VnicStatus {
    /// Tenant of its network.
    pub tenant: String,
    /// Name of the container that it was made for, or its own.
    pub title: String,
    /// To be mounted into the container as `/run/freeflow`.
    pub directory: String,
    /// `Pending`, `Ready`, `Failed`.
    pub phase: String,
    /// Why it failed.
    pub reason: Option<String>,
    /// Processes that use it.
    pub session_count: u32,
    /// Queue pairs.
    pub qp_count: u32,
    /// Completion queues.
    pub cq_count: u32,
    /// Memory regions.
    pub mr_count: u32,
    /// Lengths of its memory regions, bytes.
    pub registered_bytes: u64,
    /// Limits of its requests, where they come from, and refusals: sentences for people.
    pub conditions: Vec<String>,
    /// Payload of its messages, bytes.
    pub sent_bytes: u64,
    /// Payload of messages to it, bytes.
    pub received_bytes: u64,
    /// Absent while it is `Pending`.
    pub resources: Option<VnicResources>,
}

/// A vNIC's use of the router, and the most that it may use while the others of the host use what
/// they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct VnicResources {
    /// Present use.
    pub used: ResourceAmounts,
    /// Most at present.
    pub limits: ResourceAmounts,
}

/// Amounts of the router's resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct ResourceAmounts {
    /// Lengths of all shared memory that the router maps.
    pub segment_bytes: u64,
    /// Of these, rings of QPs, CQs and SRQs, whose pages the router may have to pay for.
    pub ring_bytes: u64,
    /// Buffers of the slow path.
    pub bounce_bytes: u64,
    /// The router's heap, estimated by the number of objects.
    pub heap_bytes: u64,
    /// Stretches of its processes' memory that the router maps.
    pub page_table_ranges: u64,
    /// Mappings of the router's process.
    pub mappings: u64,
    /// Descriptors of the router's process.
    pub descriptors: u64,
    /// Router threads that stop its processes' threads.
    pub threads: u64,
}

// ---- Host

/// How a router waits for work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "described together; with a text for each the schema would be a list of constants")]
pub enum HostMode {
    /// As the latency classes of what runs on the host want it (label `freeflow.io/latency-class` of vNICs).
    Auto,
    Fastpath,
    #[default]
    Adaptive,
    Lowcpu,
}

/// A host: how its router waits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct HostSpec {
    /// The mode of `freeflow up --mode` if it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<HostMode>,
}

/// A host, as its router knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct HostStatus {
    /// Its address between hosts, with a peers file.
    pub address: Option<IpAddr>,
    /// `softroce`.
    pub backends: Vec<String>,
    /// `fastpath`, `adaptive`, `lowcpu`: what is in force, and why.
    pub mode: String,
    /// Why that mode is in force.
    pub reason: String,
    /// Of all vNICs that containers have here, the most demanding: `low`, `normal`, `background`.
    pub latency_class: String,
    /// `Ready`, or what is wrong.
    pub health: String,
    /// Other hosts of the peers file.
    pub peer_count: u32,
    /// Those of them that are connected.
    pub connected_peer_count: u32,
    /// Seconds since its router began.
    pub uptime_s: u64,
    /// Release of its router.
    pub version: String,
}
