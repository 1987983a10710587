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
    /// → `Peers`.
    ListPeers,
    /// Reads the peers file again. → `Done`, or `Failed`, and then all stays as it was.
    ReloadPeers,
    /// What goes over the wire. QPs in order of their numbers, after the given one. → `Wire`.
    WireStatus { after_qpn: Option<u32> },
    /// Loses, delays or spoils packets on purpose from now on; `None`: no more. → `Done`.
    SetWireFaults { faults: Option<WireFaults> },
    /// Writes packets in pcapng form to the descriptor that comes along, until there are so many, so many seconds have
    /// passed, or the descriptor takes no more. → `Captured`, when that is over. One capture at a time.
    Capture { packet_count_max: Option<u64>, seconds_max: Option<u64> },
    /// Ends the router in order: sessions get DEVICE_FATAL. → `Done`, then the socket closes.
    Shutdown,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AdminReply {
    Done,
    Failed {
        code: AdminErrorCode,
        message: String,
    },
    Version {
        protocol_version: u32,
        version: String,
        pid: u32,
    },
    Status(RouterStatus),
    Vnic(VnicStatus),
    Vnics {
        vnics: Vec<VnicStatus>,
        more: bool,
    },
    Networks {
        networks: Vec<NetworkStatus>,
    },
    Wire(WireStatus),
    /// `lost`: came faster than they could be written. `error`: why it ended, if not as it was asked to.
    Captured {
        packets: u64,
        lost: u64,
        error: Option<String>,
    },
    Peers(PeersStatus),
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
    /// Other hosts of the peers file, and those of them that are connected.
    pub peer_count: u32,
    pub connected_peer_count: u32,
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

/// What this host knows of the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
pub struct PeerCounters {
    pub connections: u64,
    pub failed_dials: u64,
    pub sent_messages: u64,
    pub received_messages: u64,
    /// Announcements of addresses that the host may not have, or somebody else has.
    pub refused_announcements: u64,
    /// Descriptions of QPs with such addresses.
    pub refused_infos: u64,
    /// Connections ended because what came made no sense.
    pub protocol_errors: u64,
    /// Connections ended because nothing came, or nothing was taken, for too long.
    pub timeouts: u64,
}

/// A count and its name.
pub type Named = (String, u64);

/// What goes between this host and others as packets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WireStatus {
    /// Whether there are other hosts at all.
    pub open: bool,
    pub address: Option<IpAddr>,
    pub hosts: Vec<WireHost>,
    /// Of the sockets.
    pub counters: Vec<Named>,
    /// Packets that were received and that no QP acted upon, by reason.
    pub drops: Vec<Named>,
    pub faults: Option<WireFaults>,
    /// One page.
    pub qps: Vec<WireQp>,
    pub more_qps: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireHost {
    pub number: u32,
    pub address: IpAddr,
    /// A machine without FreeFlow.
    pub external: bool,
    /// Largest payload of a packet on the way there, bytes.
    pub mtu: u16,
    pub qp_count: u32,
    /// Sums over these QPs.
    pub counters: Vec<Named>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    pub counters: Vec<Named>,
}

/// Probabilities in parts per million, for each packet sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
