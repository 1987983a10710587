//! Messages of the kubelet's gRPC interfaces that are used here, with their numbers.
//!
//! Of the kubelet's `pkg/apis`: `pluginregistration/v1`, `dra/v1` (`v1beta1` is the same), `deviceplugin/v1beta1`. A
//! field that is missing here is one that the kubelet may send and that is passed over.
use prost::Message;
use std::collections::HashMap;

/// Of a plugin, to the kubelet.
#[derive(Clone, PartialEq, Message)]
pub struct PluginInfo {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub endpoint: String,
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// The kubelet's word on a registration.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A `ResourceClaim`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claim {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// Of NodePrepareResources and of NodeUnprepareResources.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ClaimsRequest {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PrepareResponse {
    /// By the claims' uids.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, Prepared>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Prepared {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<PreparedDevice>,
    /// Not empty: it failed.
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreparedDevice {
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    #[prost(string, tag = "2")]
    pub pool_name: String,
    #[prost(string, tag = "3")]
    pub device_name: String,
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct UnprepareResponse {
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, Unprepared>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Unprepared {
    #[prost(string, tag = "1")]
    pub error: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Empty {}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct DevicePluginOptions {
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// Of a device plugin, to the kubelet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegisterRequest {
    #[prost(string, tag = "1")]
    pub version: String,
    /// Name of its socket, beside the kubelet's.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    #[prost(string, tag = "3")]
    pub resource_name: String,
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListAndWatchResponse {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<PluginDevice>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PluginDevice {
    #[prost(string, tag = "1")]
    pub id: String,
    /// `Healthy` or `Unhealthy`.
    #[prost(string, tag = "2")]
    pub health: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllocateRequest {
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAllocateRequest {
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AllocateResponse {
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateResponse {
    #[prost(map = "string, string", tag = "4")]
    pub annotations: HashMap<String, String>,
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    #[prost(string, tag = "1")]
    pub name: String,
}
