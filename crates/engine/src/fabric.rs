//! The network between hosts, as the engine sees it: hosts by number, paths to GIDs, bursts of
//! packets, the QPs behind QPNs.
use freeflow_verbs::{Gid, NetworkId, QpType, Qpn};
use freeflow_wire::HeaderBytes;
use freeflow_wire::frame::is_frame;
use serde::{Deserialize, Serialize};

/// Another host: a router that is trusted, or an external RDMA machine. Numbers are the
/// environment's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostId(pub u32);

/// How packets get to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Destination {
    /// The host.
    pub host: HostId,
    /// Packets of one flow keep their order and their UDP source port; different ones may take
    /// different ways.
    pub flow: u32,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit of the packets.
    pub hop_limit: u8,
    /// Largest payload that fits the way there, bytes: 256 … 4096.
    pub mtu: u16,
    /// The host takes [frames](freeflow_wire::frame): payload of a whole one. 0: it does not.
    pub frame_bytes: u16,
    /// The host takes reports of what was kept behind a missing packet, and sends such. Counts only with frames.
    pub selective: bool,
    /// The host takes [several messages in one frame](freeflow_wire::records). Counts only with frames.
    pub records: bool,
}

/// Where messages to an address go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Path {
    /// To a vNIC of this router, or to nobody.
    Local,
    /// As packets to another host.
    Wire(Destination),
}

/// The QP behind a QPN of another host, as its router describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// Network of its vNIC.
    pub network: NetworkId,
    /// The one that it is connected by.
    pub gid: Gid,
    /// Of a UD QP, whose messages may go by either: the vNIC's IPv6 address.
    pub ipv6_gid: Option<Gid>,
    /// Its type.
    pub service: QpType,
    /// The peer of a connected QP that is ready to receive.
    pub connected: Option<(Gid, Qpn)>,
}

impl PeerInfo {
    /// Whether messages may come to it by this address.
    pub fn has(&self, gid: Gid) -> bool {
        self.gid == gid || self.ipv6_gid == Some(gid)
    }
}

/// Answer of [`crate::Fabric::peer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerAnswer {
    /// The QP is known.
    Known(PeerInfo),
    /// Its router says that there is no such QP.
    Absent,
    /// It is being asked; [`crate::Engine::handle_peer_changed`] follows.
    Asked,
    /// The host is no router: nobody can be asked, and what it sends is of this GID.
    External(Gid),
}

/// One packet of a burst: its headers, and how many of the burst's payload bytes it takes. The
/// environment adds the padding that the header announces, and the ICRC.
#[derive(Clone, Copy)]
pub struct PacketHead {
    /// BTH and extension headers.
    pub header: HeaderBytes,
    /// The packet's part of the burst's payload, bytes.
    pub payload_bytes: u16,
}

impl PacketHead {
    /// `header.pad` is set to what the payload needs.
    pub fn new(mut header: freeflow_wire::Header, payload_bytes: usize) -> Self {
        header.pad = if header.frame.is_some() { 0 } else { (payload_bytes.wrapping_neg() & 3) as u8 };
        Self { header: header.encode(), payload_bytes: payload_bytes as u16 }
    }

    /// Whether it is a frame: there is neither padding nor an ICRC behind the payload.
    pub fn is_frame(&self) -> bool {
        is_frame(&self.header.bytes)
    }

    /// Bytes of the packet, without the ICRC.
    pub fn bytes(&self) -> usize {
        let payload_bytes = usize::from(self.payload_bytes);
        usize::from(self.header.length)
            + if self.is_frame() { payload_bytes } else { payload_bytes.next_multiple_of(4) }
    }
}

/// Answer of [`crate::Fabric::transmit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransmitOutcome {
    /// All packets of the burst are on their way (or lost on it).
    Sent,
    /// None of them: there is no room; try again in a later turn.
    Full,
    /// The payload is being fetched; the environment sends the burst itself when it has it, and
    /// then calls [`crate::Engine::handle_copied`]. Slices given are not needed any more.
    Pending,
    /// The memory is not there.
    Fault,
}

/// Fields of a received packet's IP header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpInfo {
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit that was left.
    pub hop_limit: u8,
    /// ECN: congestion was experienced.
    pub congestion: bool,
}
