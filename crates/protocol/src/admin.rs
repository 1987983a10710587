//! CLI and container hooks ↔ router, on the host's `RUN_DIR/admin.sock` (root only): attaching,
//! captures, and the end of the router. And the statuses that the REST server shows, with its names
//! in camelCase.
use crate::fnv1a;
use crate::version::Offer;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr};
use serde::{Deserialize, Serialize};

/// A request of the command or of a hook. Fields: `id` is a vNIC's, `labels` are its key and value
/// pairs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum AdminRequest {
    /// → `Version`.
    Hello { protocol: Offer },
    /// Makes a vNIC, its directory `RUN_DIR/vnics/ID` and the socket `router.sock` in it. → `Vnic`.
    /// The same `id` again with the same network gives the same vNIC (hooks are retried), with these labels.
    Attach { id: String, name: String, network: String, address: Option<IpAddr>, labels: Vec<(String, String)> },
    /// Ends every session of the vNIC, removes its directory and frees its address. Unknown ids are `Done`.
    Detach { id: String },
    /// Writes packets in pcapng form to the descriptor that comes along, until there are so many, so many seconds have
    /// passed, or the descriptor takes no more. → `Captured`, when that is over. One capture at a time.
    Capture { packet_count_max: Option<u64>, seconds_max: Option<u64> },
    /// Ends the router in order: sessions get DEVICE_FATAL. → `Done`, then the socket closes.
    Shutdown,
    /// A container has a vNIC that was declared, or has it no more: then it says nothing if another
    /// one has it by now. → `Done`. Not remembered over restarts of the router.
    Occupy { id: String, container: String, occupied: bool },
}

/// Which way messages between two vNICs of a network on one host may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DataPath {
    /// Directly between vNICs of one tenant, else through the router.
    #[default]
    Auto,
    /// Directly where that is possible.
    Direct,
    /// All through the router, which then counts and limits them itself.
    Routed,
}

impl DataPath {
    /// The name in objects and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Routed => "routed",
        }
    }
}

/// Answer to an [`AdminRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "one for each request of an operator")]
#[allow(missing_docs, reason = "fields are explained at the enum and at each variant")]
pub enum AdminReply {
    /// The request is carried out, and has no other answer.
    Done,
    /// The request is refused; nothing has changed.
    Failed { code: AdminErrorCode, message: String },
    /// Answer to `Hello`: `version` is the router's release, `pid` its process.
    Version { protocol: Offer, version: String, pid: u32 },
    /// Answer to `Attach`.
    Vnic(VnicStatus),
    /// `lost`: came faster than they could be written. `error`: why it ended, if not as it was asked to.
    Captured { packets: u64, lost: u64, error: Option<String> },
}

/// Kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminErrorCode {
    /// An argument that can't be.
    Invalid,
    /// No such vNIC or network.
    NotFound,
    /// The id has a vNIC of another network.
    AlreadyExists,
    /// No address, or no room for another vNIC.
    Exhausted,
    /// The caller, or a rule, does not allow it.
    NotPermitted,
    /// A file or a socket failed.
    Io,
}

/// Numbers of a router as a whole, for `freeflow status` and the REST server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct RouterStatus {
    /// Its release.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its run directory.
    pub run_dir: String,
    /// Name of the host.
    pub host: String,
    /// The mode it was started with: `fastpath`, `lowcpu`, `adaptive` or `auto`.
    pub mode: String,
    /// The mode in force, which a Host object may have changed, and why.
    pub mode_in_force: String,
    /// Why that mode is in force.
    pub mode_reason: String,
    /// Whether the worker sleeps just now.
    pub sleeping: bool,
    /// Seconds since it began.
    pub uptime_s: u64,
    /// VNICs.
    pub vnic_count: u32,
    /// Processes that use a vNIC.
    pub session_count: u32,
    /// Queue pairs.
    pub qp_count: u32,
    /// Completion queues.
    pub cq_count: u32,
    /// Shared receive queues.
    pub srq_count: u32,
    /// Protection domains.
    pub pd_count: u32,
    /// Memory regions.
    pub mr_count: u32,
    /// Memory windows.
    pub mw_count: u32,
    /// Opened XRC domains.
    pub xrcd_count: u32,
    /// Lengths of all memory regions, bytes.
    pub registered_bytes: u64,
    /// Segments that it shares with processes.
    pub segment_count: u32,
    /// Lengths of these segments, bytes.
    pub segment_bytes: u64,
    /// Threads that copy, and bytes that others than the router's own worker have copied.
    pub worker_count: u32,
    /// Engines that work side by side, each with vNICs of its own.
    pub shard_count: u32,
    /// Bytes that others than its own worker have copied.
    pub moved_bytes: u64,
    /// CPU time the worker thread has used, microseconds.
    pub worker_cpu_us: u64,
    /// Other hosts of the peers file, and those of them that are connected.
    pub peer_count: u32,
    /// Peers that are connected.
    pub connected_peer_count: u32,
    /// QPs whose messages go to their peer's memory directly, and QPs that have peers' memory granted to them, now.
    pub direct_ring_qp_count: u32,
    /// QPs that have peers' memory granted to them.
    pub grant_qp_count: u32,
    /// Connection management.
    pub cm: CmCounts,
    /// All vNICs together.
    pub counters: Counters,
}

/// Counts since the router, or the vNIC, began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct Counters {
    /// Requests that completed with success.
    pub messages: u64,
    /// Payload of these, bytes.
    pub bytes: u64,
    /// Of these, what was carried out past the router, as the libraries say.
    pub direct_messages: u64,
    /// Payload of the direct ones, bytes.
    pub direct_bytes: u64,
    /// Bytes that one side or both reached by copying through `/proc/PID/mem`.
    pub slow_path_bytes: u64,
    /// Copies that blocked the worker: pages of shared memory that were there and could not be had at once.
    pub blocked_copies: u64,
    /// Completions with an error, flushed ones too.
    pub completions_with_error: u64,
    /// RNR NAKs that requesters got.
    pub rnr_naks: u64,
    /// Requests that failed for want of an acknowledgement.
    pub retries_exceeded: u64,
    /// Requests of peers that were refused for their key.
    pub remote_access_errors: u64,
    /// Descriptors in shared memory that made no sense.
    pub malformed_descriptors: u64,
    /// Control messages refused as malformed.
    pub malformed_messages: u64,
    /// Messages for a QP that is not there, not connected back, or of another network.
    pub undeliverable: u64,
}

/// A vNIC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "HostVnic", rename_all = "camelCase"))]
pub struct VnicStatus {
    /// Its id, unique on this host.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Name of its network.
    pub network: String,
    /// Its address.
    pub address: IpAddr,
    /// Prefix length of its network.
    pub prefix_length: u8,
    /// Gateway of its network.
    pub gateway: IpAddr,
    /// In a network that has IPv6 addresses, too; and its prefix length.
    pub address6: Option<Ipv6Addr>,
    /// Prefix length of the IPv6 network.
    pub prefix_length6: u8,
    /// The directory to mount into the container as `/run/freeflow`; holds `router.sock`.
    pub directory: String,
    /// Names and values.
    pub labels: Vec<(String, String)>,
    /// Processes that use it.
    pub session_count: u32,
    /// Queue pairs.
    pub qp_count: u32,
    /// Memory regions.
    pub mr_count: u32,
    /// Lengths of its memory regions, bytes.
    pub registered_bytes: u64,
    /// Which of the router's workers copies for it, from 1.
    pub worker: u32,
    /// Which of the router's shards has it, from 0.
    pub shard: u32,
    /// The router gave the vNIC up (hostile or stuck owner); why.
    pub failed: Option<String>,
    /// Its traffic.
    pub counters: Counters,
}

impl VnicStatus {
    /// All that it has.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        core::iter::once(self.address).chain(self.address6.map(IpAddr::V6))
    }
}

/// Labels by which the CLI and container hooks know vNICs again that they made: whoever else makes
/// or changes vNICs may not give them.
pub const OWN_LABELS: [&str; 5] = ["engine", "supervisor", "pid", "start_ticks", "guest_memory"];

/// The number of the overlay of the network `default`: "ff".
pub const DEFAULT_OVERLAY_NUMBER: u32 = 0x6666;
/// VXLAN network identifiers have 24 bits.
const OVERLAY_NUMBER_MAX: u64 = (1 << 24) - 1;

/// The number of the overlay of another network, by its name: each host numbers its networks by itself. Of two names
/// with one number the containers would share an overlay.
#[must_use]
pub fn overlay_number(network: &str) -> u32 {
    let hash = fnv1a(network.as_bytes());
    match (((hash >> 40) ^ (hash >> 16) ^ hash) & OVERLAY_NUMBER_MAX) as u32 {
        0 | DEFAULT_OVERLAY_NUMBER => 1,
        number => number,
    }
}

/// A network of this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "HostNetwork", rename_all = "camelCase"))]
pub struct NetworkStatus {
    /// Its name.
    pub name: String,
    /// Never that of another network of this host's, not even of a later one of the same name.
    pub id: u32,
    /// Address pool, CIDR notation.
    pub pool: String,
    /// Address of the host in it.
    pub gateway: IpAddr,
    /// Prefix length of the pool.
    pub prefix_length: u8,
    /// Its IPv6 addresses, CIDR notation, if it has any.
    pub pool6: Option<String>,
    /// VNICs in it.
    pub vnic_count: u32,
    /// Name of its bridge.
    pub bridge: String,
    /// Data path between its vNICs.
    pub data_path: DataPath,
}

/// Which way a QP's last request went, and the next one like it would go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum QpPath {
    /// Past the router: see [`QpStatus::direct_ring`] and [`QpStatus::grants`].
    Direct,
    /// Through this host's router. A UD QP's path is that of its messages within the host.
    Routed,
    /// As packets to another host.
    Wire,
}

impl QpPath {
    /// The name in lists.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Routed => "routed",
            Self::Wire => "wire",
        }
    }
}

/// A QP and its path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct QpStatus {
    /// Id of its vNIC.
    pub vnic: String,
    /// Its number.
    pub qpn: u32,
    /// `RC`, `UC`, `UD`, `XRC_SEND`, `XRC_RECV`.
    pub qp_type: String,
    /// `RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERR`.
    pub state: String,
    /// The address it is connected to.
    pub peer_address: Option<IpAddr>,
    /// Number of the peer's QP.
    pub peer_qpn: Option<u32>,
    /// Path of its last request.
    pub path: QpPath,
    /// It has a direct ring to its peer, by which SENDs that are not too long go directly.
    pub direct_ring: bool,
    /// It writes or reads some of its peer's memory directly.
    pub grants: bool,
    /// Why it is routed.
    pub reason: Option<String>,
    /// Requests that completed with success since it was made.
    pub sent_messages: u64,
    /// Of these, past the router, as its library says.
    pub direct_messages: u64,
    /// How often its requests reached memory, at either end, through `/proc/PID/mem`.
    pub slow_path_accesses: u64,
    /// Bytes of these.
    pub slow_path_bytes: u64,
    /// Why, the last time.
    pub slow_path_reason: Option<String>,
}

/// Connection management: what there is now, and messages since the router began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmCounts {
    /// Identifiers.
    pub id_count: u32,
    /// Identifiers that listen.
    pub listener_count: u32,
    /// Being made, standing, ending; those that stand; those that a program here has not answered;
    /// those without an identifier.
    pub connection_count: u32,
    /// Established connections.
    pub established_count: u32,
    /// Requests that a program here has not answered.
    pub half_open_count: u32,
    /// Connections without an identifier.
    pub orphan_count: u32,
    /// `repeated`: of those sent.
    pub sent_messages: u64,
    /// Copies among those sent.
    pub repeated_messages: u64,
    /// `refused`: of those received, what had no effect.
    pub received_messages: u64,
    /// Messages among those received that had no effect.
    pub refused_messages: u64,
    /// Datagrams that were no valid message.
    pub malformed_messages: u64,
    /// Requests that found no room.
    pub overflows: u64,
    /// Messages that did not leave because there were too many.
    pub lost_messages: u64,
    /// Messages from or to machines that may not be spoken to.
    pub misdirected_messages: u64,
}

/// Messages of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmMessages {
    /// `Req`, `Rep`, …
    pub kind: String,
    /// Messages that went out, copies too.
    pub sent: u64,
    /// Copies among those sent.
    pub repeated: u64,
    /// Messages that came.
    pub received: u64,
    /// Messages among those received that had no effect.
    pub refused: u64,
}

/// Connection management of a host. `ids` is one page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmStatus {
    /// Numbers of all vNICs together.
    pub counts: CmCounts,
    /// Messages by kind; kinds without any are left out.
    pub messages: Vec<CmMessages>,
    /// One page of identifiers.
    pub ids: Vec<CmId>,
}

/// An identifier of connection management.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmId {
    /// Id of its vNIC.
    pub vnic: String,
    /// Place in the list; the next page begins behind it.
    pub position: (u64, u32),
    /// `LISTEN`, `ESTABLISHED`, …
    pub state: String,
    /// `TCP`, `UDP`, `IB`, `IPOIB`.
    pub port_space: String,
    /// `RC`, `UD`, …
    pub qp_type: String,
    /// Addresses and ports.
    pub local: Option<(IpAddr, u16)>,
    /// Address and port of the other end.
    pub remote: Option<(IpAddr, u16)>,
    /// Number of its QP.
    pub qpn: Option<u32>,
    /// Number of the other end's QP.
    pub remote_qpn: Option<u32>,
}

/// State of the other hosts, as this host knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct PeersStatus {
    /// The peers file; none was given if this is empty.
    pub file: String,
    /// Name of this host in it.
    pub host: String,
    /// Hosts of the peers file, but for this one.
    pub peers: Vec<PeerStatus>,
    /// Connections from addresses that are no peer's.
    pub unknown_connections: u64,
    /// Connections from a peer's address that did not prove to be it.
    pub refused_handshakes: u64,
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct PeerStatus {
    /// Its name in the peers file.
    pub host: String,
    /// Its address.
    pub address: IpAddr,
    /// `down`, `dialing`, `greeting`, `up`.
    pub state: String,
    /// How long it has been so, seconds.
    pub state_s: u64,
    /// Round trip of the last keep-alive, microseconds.
    pub rtt_us: Option<u64>,
    /// Packets between the two hosts carry an ICRC.
    pub icrc: bool,
    /// Packets of RC between the two hosts are frames.
    pub frames: bool,
    /// Packets between the two hosts are sealed, as this host's peers file says.
    pub sealed: bool,
    /// Why the last connection ended, while there is none.
    pub problem: Option<String>,
    /// Addresses that are on that host.
    pub route_count: u32,
    /// Its counts.
    pub counters: PeerCounters,
}

/// Counts since the router began, or the peer was last changed in the peers file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct PeerCounters {
    /// Connections that came up.
    pub connections: u64,
    /// Attempts to connect that failed.
    pub failed_dials: u64,
    /// Messages to it.
    pub sent_messages: u64,
    /// Messages of it.
    pub received_messages: u64,
    /// Announcements of addresses that the host may not have, or somebody else has.
    pub refused_announcements: u64,
    /// Descriptions of QPs with such addresses.
    pub refused_infos: u64,
    /// Messages of connection management, and those of them from or to addresses that they may not
    /// name. `dropped`: there were too many, in either direction; they are sent again.
    pub sent_cm: u64,
    /// Messages of connection management that came.
    pub received_cm: u64,
    /// Messages of connection management that were refused.
    pub refused_cm: u64,
    /// Messages of connection management that were dropped.
    pub dropped_cm: u64,
    /// Connections ended because what came made no sense.
    pub protocol_errors: u64,
    /// Connections ended because nothing came, or nothing was taken, for too long.
    pub timeouts: u64,
}

/// A count and its name.
pub type Named = (String, u64);

/// Counts as an object whose fields are their names.
mod counts {
    use super::Named;
    use alloc::collections::BTreeMap;
    use alloc::string::String;
    use alloc::vec::Vec;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(counts: &[Named], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(counts.iter().map(|(name, count)| (name, count)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Named>, D::Error> {
        Ok(BTreeMap::<String, u64>::deserialize(deserializer)?.into_iter().collect())
    }
}

/// Traffic between this host and others as packets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct WireStatus {
    /// Whether there are other hosts at all.
    pub open: bool,
    /// Address of this host.
    pub address: Option<IpAddr>,
    /// Hosts that packets go to.
    pub hosts: Vec<WireHost>,
    /// Of the sockets.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub counters: Vec<Named>,
    /// Packets that were received and that no QP acted upon, by reason.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub drops: Vec<Named>,
    /// Faults that are injected, if any are.
    pub faults: Option<WireFaults>,
    /// One page.
    pub qps: Vec<WireQp>,
}

/// A host that packets go to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct WireHost {
    /// The router's number for it.
    pub number: u32,
    /// Its address.
    pub address: IpAddr,
    /// A machine without FreeFlow.
    pub external: bool,
    /// Largest payload of a packet on the way there, bytes.
    pub mtu: u16,
    /// The same of a frame; 0: there are none.
    pub frame_bytes: u16,
    /// All packets to and from it are sealed.
    pub sealed: bool,
    /// QPs with a peer there.
    pub qp_count: u32,
    /// Sums over these QPs.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub counters: Vec<Named>,
}

/// A QP with a peer on another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct WireQp {
    /// Its number.
    pub qpn: u32,
    /// Number of the peer's QP.
    pub dest_qpn: u32,
    /// [`WireHost::number`].
    pub host: u32,
    /// How much may be on the way, and is.
    pub window_bytes: u64,
    /// Bytes that are on the way.
    pub in_flight_bytes: u64,
    /// Smoothed round-trip time, nanoseconds.
    pub smoothed_rtt_ns: u64,
    /// Those that are not 0.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub counters: Vec<Named>,
}

/// Probabilities in parts per million, for each packet sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
#[serde(default)]
pub struct WireFaults {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Lost.
    pub loss_ppm: u32,
    /// Sent twice.
    pub duplicate_ppm: u32,
    /// Overtaken by a few later ones.
    pub reorder_ppm: u32,
    /// Delayed by `delay_ns`.
    pub delay_ppm: u32,
    /// The delay, nanoseconds.
    pub delay_ns: u64,
    /// One bit inverted.
    pub corrupt_ppm: u32,
}
