//! CLI and container hooks ↔ router, on the host's `RUN_DIR/admin.sock` (root only).
use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// → `Version`.
    Hello { protocol_version: u32 },
    /// → `Status`.
    Status,
    /// Makes a vNIC, its directory `RUN_DIR/vnics/ID` and the socket `router.sock` in it. → `Vnic`.
    /// The same `id` again with the same network gives the same vNIC (hooks are retried).
    Attach { id: String, name: String, network: String, address: Option<IpAddr>, labels: Vec<(String, String)> },
    /// Ends every session of the vNIC, removes its directory and frees its address. Unknown ids are `Done`.
    Detach { id: String },
    /// One page of the vNICs after the given id, in order of id. → `Vnics`.
    ListVnics { after: Option<String> },
    /// → `Networks`.
    ListNetworks,
    /// Ends the router in order: sessions get DEVICE_FATAL. → `Done`, then the socket closes.
    Shutdown,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AdminReply {
    Done,
    Failed { code: AdminErrorCode, message: String },
    Version { protocol_version: u32, version: String, pid: u32 },
    Status(RouterStatus),
    Vnic(VnicStatus),
    Vnics { vnics: Vec<VnicStatus>, more: bool },
    Networks { networks: Vec<NetworkStatus> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminErrorCode {
    Invalid,
    NotFound,
    AlreadyExists,
    Exhausted,
    NotPermitted,
    Io,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterStatus {
    pub version: String,
    pub pid: u32,
    pub run_dir: String,
    pub host: String,
    /// `fastpath`, `lowcpu` or `adaptive`.
    pub mode: String,
    /// Whether the worker sleeps just now.
    pub sleeping: bool,
    pub uptime_s: u64,
    pub vnic_count: u32,
    pub session_count: u32,
    pub qp_count: u32,
    pub cq_count: u32,
    pub srq_count: u32,
    pub pd_count: u32,
    pub mr_count: u32,
    pub mw_count: u32,
    /// Opened XRC domains.
    pub xrcd_count: u32,
    pub registered_bytes: u64,
    pub segment_count: u32,
    pub segment_bytes: u64,
    /// CPU time the worker thread has used, microseconds.
    pub worker_cpu_us: u64,
    pub counters: Counters,
}

/// Counts since the router, or the vNIC, began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    pub messages: u64,
    pub bytes: u64,
    /// Bytes that one side or both reached by copying through `/proc/PID/mem`.
    pub fallback_bytes: u64,
    pub completions_with_error: u64,
    pub rnr_naks: u64,
    pub retries_exceeded: u64,
    pub remote_access_errors: u64,
    /// Descriptors in shared memory that made no sense.
    pub malformed_descriptors: u64,
    /// Control messages refused as malformed.
    pub malformed_messages: u64,
    /// Messages for a QP that is not there, not connected back, or of another network.
    pub undeliverable: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VnicStatus {
    pub id: String,
    pub name: String,
    pub network: String,
    pub address: IpAddr,
    pub prefix_length: u8,
    pub gateway: IpAddr,
    /// The directory to mount into the container as `/run/freeflow`; holds `router.sock`.
    pub directory: String,
    pub labels: Vec<(String, String)>,
    pub session_count: u32,
    pub qp_count: u32,
    pub mr_count: u32,
    pub registered_bytes: u64,
    /// The router gave the vNIC up (hostile or stuck owner); why.
    pub failed: Option<String>,
    pub counters: Counters,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStatus {
    pub name: String,
    /// Address pool, CIDR notation.
    pub pool: String,
    pub gateway: IpAddr,
    pub prefix_length: u8,
    pub vnic_count: u32,
    pub bridge: String,
}
