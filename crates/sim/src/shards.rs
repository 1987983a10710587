//! Hosts that have several engines (shards), and the numbers by which these know each other; what happens between them
//! stands in [`crate::siblings`].
//!
//! To an engine, another shard of its host is another host, behind a link on which nothing is lost, doubled, overtaken
//! or damaged, and on which a sender may find no room. To engines of other hosts all shards are one host: a packet or a
//! question goes to the shard that has its QPN. A packet that a wrong socket received is handed on by that link.
use freeflow_engine::*;
use freeflow_verbs::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// Numbers by which engines know shards of their own host begin here.
const SHARD_BASE: u32 = 20_000;
/// Of a packet, in its BTH (IBTA 9.2.6).
pub const DEST_QPN: Range<usize> = 5..8;
/// Of the link between shards.
const MTU: u16 = 4096;
const FRAME_BYTES: u16 = 8192;

pub type Group = (NetworkId, Gid);

/// How the shards of a host get on with each other.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardModel {
    /// Packets of other hosts that the socket of another shard receives, parts of a million.
    pub strays: u64,
    /// Of packets, news and room that is given back, from one shard to another, at most.
    pub delay_ns_max: u64,
    /// A sender finds no room where so much is on the way to a shard.
    pub room_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardCounts {
    /// Packets that one shard sent to another one.
    pub packets: u64,
    /// Messages in them, in the company of another one.
    pub company: u64,
    pub strays: u64,
    /// Packets that found no room on the way from the wrong socket to their shard.
    pub strays_lost: u64,
    /// Copies of packets to a multicast group.
    pub relayed: u64,
}

/// How a packet came to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Line,
    /// From this engine: a shard of the same host sent it, or handed it on.
    Link(usize),
    /// The same of a packet to a multicast group that has members in both shards.
    Relayed(usize),
}

pub struct Packet {
    pub from: HostId,
    pub way: Way,
    pub ip: IpInfo,
    pub bytes: Vec<u8>,
}

/// Multicast groups as one of several shards knows them.
#[derive(Default)]
pub struct ShardGroups {
    pub own: BTreeMap<Group, Qpn>,
    /// Announced to other hosts, by the first shard.
    pub announced: BTreeMap<Group, Qpn>,
}

/// The number by which engines know a shard of their host.
pub fn host_of(shard: u8) -> HostId {
    HostId(SHARD_BASE + u32::from(shard))
}

/// The shard that a number is of.
pub fn shard_of(host: HostId) -> Option<u8> {
    host.0.checked_sub(SHARD_BASE).map(|shard| shard as u8)
}

/// How packets get to another shard.
pub fn destination(host: HostId) -> Destination {
    let (flow, traffic_class, hop_limit) = (0, 0, 64);
    let (mtu, frame_bytes, selective, records) = (MTU, FRAME_BYTES, true, true);
    Destination { host, flow, traffic_class, hop_limit, mtu, frame_bytes, selective, records }
}

/// The QP that a packet is for.
pub fn dest_qpn(packet: &[u8]) -> Option<Qpn> {
    let [high, middle, low] = *packet.get(DEST_QPN)?.first_chunk()?;
    Some(Qpn(u32::from_be_bytes([0, high, middle, low])))
}
