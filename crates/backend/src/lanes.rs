//! Which of the sending sockets a packet takes.
//!
//! Receivers put datagrams of one source port together (GRO), and hand them to the socket of the first one. So each
//! engine of a peer has sockets of its own here: those whose number, modulo the peer's engines, is the engine's.
//!
//! A flow that may be [spread](PacketRoute::spreads) takes another of them for each *flowcell* (Presto, SIGCOMM 2015):
//! after [`FLOWCELL_BYTES`] of bulk data to its peer. All flows to a peer change at once, so that packets of many QPs
//! still share batches. Before a change all that is batched for the peer is sent: only the network reorders.
use crate::peers::PeerIndex;
use freeflow_verbs::Shard;

/// Where a packet goes.
#[derive(Clone, Copy, Debug)]
pub struct PacketRoute {
    pub to: PeerIndex,
    /// Its destination QPN, which says which of the peer's engines has it.
    pub qpn: u32,
    /// Chooses among the source ports: packets of equal `to`, `qpn` and `flow` keep their order.
    pub flow: u32,
    /// The receiver puts packets of this flow in order: they may take another source port from burst to burst.
    pub spreads: bool,
    /// The whole byte. Where its DSCP is 0, the configured one is set.
    pub traffic_class: u8,
}

/// Bulk data to a peer after which flows to it that may be spread change their source ports: several whole batches.
pub const FLOWCELL_BYTES: u32 = 1 << 20;
/// Shorter packets are no bulk data. Peers that get only such keep one port for each flow.
pub(crate) const BULK_PACKET_BYTES_MIN: usize = 1024;

/// Sockets to be opened where `source_port_count` are wanted: each engine of a peer has one.
pub(crate) fn lane_count(source_port_count: u16) -> u16 {
    source_port_count.max(u16::from(Shard::COUNT_MAX))
}

/// The number of the socket for packets of a flow to an engine of a peer that has `shards`.
#[inline]
pub(crate) fn lane_of(flow: u32, shard: u8, shards: u8, source_port_count: u16) -> u16 {
    let shards = u16::from(shards);
    u16::from(shard) + shards * spread(flow, (source_port_count / shards).max(1))
}

/// Which of `count` sockets a flow takes (a multiplicative hash: flows are often consecutive numbers).
#[inline]
fn spread(flow: u32, count: u16) -> u16 {
    let mixed = flow.wrapping_mul(0x9e37_79b1);
    ((u64::from(mixed) * u64::from(count)) >> 32) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_spread_over_all_sockets() {
        for count in [1, 7, 8, 256] {
            let mut used = vec![0_u32; usize::from(count)];
            for flow in 0x11..0x11 + 4096 {
                used[usize::from(spread(flow, count))] += 1;
            }
            let mean = 4096 / u32::from(count);
            assert!(used.iter().all(|&flows| flows > mean / 2 && flows < mean * 2), "{count}: {used:?}");
        }
    }

    #[test]
    fn no_socket_has_packets_for_two_engines() {
        for (ports, shards) in [(1, 8), (7, 2), (8, 1), (8, 4), (9, 8), (256, 8)] {
            let mut used = vec![None; usize::from(lane_count(ports))];
            for (flow, shard) in (0..4096).flat_map(|flow| (0..shards).map(move |shard| (flow, shard))) {
                let lane = lane_of(flow, shard, shards, ports);
                assert_eq!(*used[usize::from(lane)].get_or_insert(shard), shard, "{ports} ports, {shards} shards");
            }
            let in_use = used.iter().flatten().count() as u16;
            assert_eq!(in_use, (ports - ports % u16::from(shards)).max(shards.into()), "{ports}, {shards}");
        }
    }
}
