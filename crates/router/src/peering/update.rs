//! Updates of the peers thread to the worker and the control thread.
use super::prefix::Prefix;
use crate::admission::access::{Key, VnicIdentity};
use freeflow_engine::{HostId, PeerInfo};
use freeflow_protocol::peer::{MAD_BYTES, SealSecret};
use freeflow_protocol::version::Agreement;
use freeflow_verbs::{Gid, NetworkId, Qpn};
use std::net::IpAddr;
use std::sync::Arc;

/// Something that they have to know, in the order in which it became true.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The peers file's settings of this host. Comes first, and again when it was read again or a
    /// network was made.
    Settings(Settings),
    /// A host can be asked and will answer. `PeersGone` came just before: what is still needed must be asked for.
    HostUp { host: HostId, address: IpAddr, icrc: bool, epoch: u64, agreed: Agreement },
    /// Its router has so many engines, a number of [`Shard`](freeflow_verbs::Shard)s. Comes before anything else of a
    /// host that is up; one that does not say has one, unless its epoch is that of the connection before.
    Shards { host: HostId, count: u8 },
    /// Its link to this host takes frames with so much payload; 0: none.
    Frames { host: HostId, payload_bytes: u16 },
    /// It will seal packets with this key of its own, as soon as it hears that this host has it; until then with
    /// `in_use`.
    SealKey { host: HostId, id: u32, in_use: Option<u32>, secret: SealSecret },
    /// It has this key of ours.
    SealKeyHeld { host: HostId, id: u32 },
    /// It can't be asked any more. Routes and answers stay as they are, for now.
    HostDown { host: HostId },
    /// Where an address is; `None`: on no other host.
    Route { network: NetworkId, gid: Gid, host: Option<HostId> },
    /// The owner of an address of another host, as that host names it. Comes after the address'
    /// route, and again when it is another; `None`: it is not known any more.
    Party { network: NetworkId, gid: Gid, identity: Option<Arc<VnicIdentity>> },
    /// The host's policy has ended the connection of its QP `peer` with `qpn` of this host.
    Disconnected { host: HostId, qpn: Qpn, peer: Qpn },
    /// The QP behind a QPN of a host; `None`: nobody. An answer, or unasked.
    Peer { host: HostId, qpn: Qpn, info: Option<PeerInfo> },
    /// Nothing that the host said of its QPNs counts any more, nor that it was notified of ours.
    PeersGone { host: HostId },
    /// The same of its QPNs alone: it has other prefixes. What is still needed must be asked for.
    AskAgain { host: HostId },
    /// The host is out of the peers file, or has another public key there. `PeersGone` follows.
    Removed { host: HostId },
    /// The QPN by which a host's members of a multicast group are reached; `None`: it has none.
    Group { host: HostId, network: NetworkId, gid: Gid, qpn: Option<Qpn> },
    /// The host wants to know who is behind this QPN of ours: answer with
    /// [`super::PeersHandle::notify`], and notify it again when that changes.
    Asked { host: HostId, qpn: Qpn },
    /// Connection management: from a vNIC of that host to one here, maybe of another network. Both are what they say.
    Cm { host: HostId, from: Key, to: Key, mad: Box<Mad> },
}

/// A management datagram.
pub type Mad = [u8; MAD_BYTES];

/// The addresses of the vNICs that a management datagram goes between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadEnds {
    pub from: Gid,
    pub to: Gid,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Of this host, for packets.
    pub address: IpAddr,
    pub dscp: u8,
    /// Nothing goes to a router or comes from one that is not sealed.
    pub sealed: bool,
    /// Addresses of all other routers of the peers file, connected or not.
    pub routers: Vec<IpAddr>,
    pub external: Vec<ExternalPeers>,
}

/// RDMA machines without FreeFlow that vNICs of a network may talk to.
#[derive(Clone, Debug, PartialEq)]
pub struct ExternalPeers {
    pub network: NetworkId,
    pub allow: Vec<Prefix>,
}
