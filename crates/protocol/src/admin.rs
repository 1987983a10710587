//! CLI and container hooks ↔ router, on the host's `RUN_DIR/admin.sock` (root only): attaching, and the
//! end of the router. And the statuses that the REST server shows, with its names in camelCase.
use crate::version::Offer;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// → `Version`.
    Hello { protocol: Offer },
    /// Makes a vNIC, its directory `RUN_DIR/vnics/ID` and the socket `router.sock` in it. → `Vnic`.
    /// The same `id` again with the same network gives the same vNIC (hooks are retried), with these labels.
    Attach { id: String, name: String, network: String, address: Option<IpAddr>, labels: Vec<(String, String)> },
    /// Ends every session of the vNIC, removes its directory and frees its address. Unknown ids are `Done`.
    Detach { id: String },
    /// One page of the vNICs after the given id, in order of id. → `Vnics`.
    ListVnics { after: Option<String> },
    /// → `Networks`.
    ListNetworks,
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
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Routed => "routed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "one for each request of an operator")]
pub enum AdminReply {
    Done,
    Failed {
        code: AdminErrorCode,
        message: String,
    },
    Version {
        protocol: Offer,
        version: String,
        pid: u32,
    },
    Vnic(VnicStatus),
    Vnics {
        vnics: Vec<VnicStatus>,
        more: bool,
    },
    Networks {
        networks: Vec<NetworkStatus>,
    },
    /// `lost`: came faster than they could be written. `error`: why it ended, if not as it was asked to.
    Captured {
        packets: u64,
        lost: u64,
        error: Option<String>,
    },
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct RouterStatus {
    pub version: String,
    pub pid: u32,
    pub run_dir: String,
    pub host: String,
    /// The mode it was started with: `fastpath`, `lowcpu`, `adaptive` or `auto`.
    pub mode: String,
    /// The mode in force, which a Host object may have changed, and why.
    pub mode_in_force: String,
    pub mode_reason: String,
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
    /// Threads that copy, and bytes that others than the router's own worker have copied.
    pub worker_count: u32,
    pub moved_bytes: u64,
    /// CPU time the worker thread has used, microseconds.
    pub worker_cpu_us: u64,
    /// Other hosts of the peers file, and those of them that are connected.
    pub peer_count: u32,
    pub connected_peer_count: u32,
    /// QPs whose messages go to their peer's memory directly, and QPs that have peers' memory granted to them, now.
    pub channel_qp_count: u32,
    pub grant_qp_count: u32,
    pub cm: CmCounts,
    pub counters: Counters,
}

/// Counts since the router, or the vNIC, began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct Counters {
    pub messages: u64,
    pub bytes: u64,
    /// Of these, what was carried out past the router, as the libraries say.
    pub direct_messages: u64,
    pub direct_bytes: u64,
    /// Bytes that one side or both reached by copying through `/proc/PID/mem`.
    pub fallback_bytes: u64,
    /// Copies that blocked the worker: pages of shared memory that were there and could not be had at once.
    pub blocked_copies: u64,
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
    /// In a network that has IPv6 addresses, too; and its prefix length.
    pub address6: Option<Ipv6Addr>,
    pub prefix_length6: u8,
    /// The directory to mount into the container as `/run/freeflow`; holds `router.sock`.
    pub directory: String,
    pub labels: Vec<(String, String)>,
    pub session_count: u32,
    pub qp_count: u32,
    pub mr_count: u32,
    pub registered_bytes: u64,
    /// Which of the router's workers copies for it, from 1.
    pub worker: u32,
    /// The router gave the vNIC up (hostile or stuck owner); why.
    pub failed: Option<String>,
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
pub const OWN_LABELS: [&str; 4] = ["engine", "supervisor", "pid", "start_ticks"];

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStatus {
    pub name: String,
    /// Never that of another network of this host's, not even of a later one of the same name.
    pub id: u32,
    /// Address pool, CIDR notation.
    pub pool: String,
    pub gateway: IpAddr,
    pub prefix_length: u8,
    /// Its IPv6 addresses, CIDR notation, if it has any.
    pub pool6: Option<String>,
    pub vnic_count: u32,
    pub bridge: String,
    pub data_path: DataPath,
}

/// Which way a QP's last request went, and the next one like it would go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum QpPath {
    /// Past the router: see [`QpStatus::channel`] and [`QpStatus::grants`].
    Direct,
    /// Through this host's router. A UD QP's path is that of its messages within the host.
    Routed,
    /// As packets to another host.
    Wire,
}

impl QpPath {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Routed => "routed",
            Self::Wire => "wire",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct QpStatus {
    /// Id of its vNIC.
    pub vnic: String,
    pub qpn: u32,
    /// `RC`, `UC`, `UD`, `XRC_SEND`, `XRC_RECV`.
    pub qp_type: String,
    /// `RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERR`.
    pub state: String,
    /// Whom it is connected to.
    pub peer_address: Option<IpAddr>,
    pub peer_qpn: Option<u32>,
    pub path: QpPath,
    /// It has a channel to its peer, by which SENDs that are not too long go directly.
    pub channel: bool,
    /// It writes or reads some of its peer's memory directly.
    pub grants: bool,
    /// Why it is routed.
    pub reason: Option<String>,
    /// Requests that completed with success since it was made.
    pub sent_messages: u64,
    /// Of these, past the router, as its library says.
    pub direct_messages: u64,
}

/// Connection management: what there is now, and messages since the router began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmCounts {
    pub id_count: u32,
    pub listener_count: u32,
    /// Being made, standing, ending; those that stand; those that a program here has not answered;
    /// those without an identifier.
    pub connection_count: u32,
    pub established_count: u32,
    pub half_open_count: u32,
    pub orphan_count: u32,
    /// `repeated`: of those sent.
    pub sent_messages: u64,
    pub repeated_messages: u64,
    /// `refused`: of those received, what had no effect.
    pub received_messages: u64,
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
    pub sent: u64,
    pub repeated: u64,
    pub received: u64,
    pub refused: u64,
}

/// Connection management of a host. `ids` is one page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmStatus {
    pub counts: CmCounts,
    pub messages: Vec<CmMessages>,
    pub ids: Vec<CmId>,
}

/// An identifier of connection management.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct CmId {
    /// Id of its vNIC.
    pub vnic: String,
    pub position: (u64, u32),
    /// `LISTEN`, `ESTABLISHED`, …
    pub state: String,
    /// `TCP`, `UDP`, `IB`, `IPOIB`.
    pub port_space: String,
    pub qp_type: String,
    /// Addresses and ports.
    pub local: Option<(IpAddr, u16)>,
    pub remote: Option<(IpAddr, u16)>,
    pub qpn: Option<u32>,
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
    pub peers: Vec<PeerStatus>,
    /// Connections from addresses that are no peer's.
    pub strangers: u64,
    /// Connections from a peer's address that did not prove to be it.
    pub refused_handshakes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct PeerStatus {
    pub host: String,
    pub address: IpAddr,
    /// `down`, `dialing`, `greeting`, `up`.
    pub state: String,
    /// How long it has been so, seconds.
    pub state_s: u64,
    /// Round trip of the last keep-alive, microseconds.
    pub rtt_us: Option<u64>,
    /// Packets between the two hosts carry an ICRC.
    pub icrc: bool,
    /// Addresses that are on that host.
    pub route_count: u32,
    pub counters: PeerCounters,
}

/// Counts since the router began, or the peer was last changed in the peers file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct PeerCounters {
    pub connections: u64,
    pub failed_dials: u64,
    pub sent_messages: u64,
    pub received_messages: u64,
    /// Announcements of addresses that the host may not have, or somebody else has.
    pub refused_announcements: u64,
    /// Descriptions of QPs with such addresses.
    pub refused_infos: u64,
    /// Messages of connection management, and those of them from or to addresses that they may not
    /// name. `dropped`: there were too many, in either direction; they are sent again.
    pub sent_cm: u64,
    pub received_cm: u64,
    pub refused_cm: u64,
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
    pub address: Option<IpAddr>,
    pub hosts: Vec<WireHost>,
    /// Of the sockets.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub counters: Vec<Named>,
    /// Packets that were received and that no QP acted upon, by reason.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub drops: Vec<Named>,
    pub faults: Option<WireFaults>,
    /// One page.
    pub qps: Vec<WireQp>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct WireHost {
    pub number: u32,
    pub address: IpAddr,
    /// A machine without FreeFlow.
    pub external: bool,
    /// Largest payload of a packet on the way there, bytes.
    pub mtu: u16,
    pub qp_count: u32,
    /// Sums over these QPs.
    #[serde(with = "counts")]
    #[cfg_attr(feature = "schema", schemars(with = "alloc::collections::BTreeMap<String, u64>"))]
    pub counters: Vec<Named>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename_all = "camelCase"))]
pub struct WireQp {
    pub qpn: u32,
    pub dest_qpn: u32,
    /// [`WireHost::number`].
    pub host: u32,
    /// How much may be on the way, and is.
    pub window_bytes: u64,
    pub in_flight_bytes: u64,
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
    pub seed: u64,
    pub loss_ppm: u32,
    pub duplicate_ppm: u32,
    /// Overtaken by a few later ones.
    pub reorder_ppm: u32,
    pub delay_ppm: u32,
    pub delay_ns: u64,
    /// One bit inverted.
    pub corrupt_ppm: u32,
}
