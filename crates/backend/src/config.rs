//! How sockets are to be opened.
use crate::seal::{KEY_PACKETS, KEY_TIME_NS};
use freeflow_verbs::Shard;
use std::io;
use std::net::IpAddr;

/// Addresses of one host, at most.
const ADDRESS_COUNT_MAX: usize = 64;
/// Sending sockets for each address, at most.
const SOURCE_PORT_COUNT_MAX: u16 = 256;

/// How [`Udp::open`](crate::Udp::open) opens.
#[derive(Clone, Debug)]
pub struct UdpConfig {
    /// This host's, v4, v6 or both; none of them unspecified.
    pub addresses: Vec<IpAddr>,
    /// Which of the host's engines receives here; [`Udp::open_all`](crate::Udp::open_all) sets it.
    pub shard: Shard,
    /// Sending sockets for each address, 1 to 256: their ports are from 0xc000 up. To peers with more engines than
    /// this, one for each of their engines.
    pub source_port_count: u16,
    /// Packets that [may be](crate::PacketRoute::spreads) take one of these after the other.
    pub spread: bool,
    /// Have the kernel cut batches up.
    pub gso: bool,
    /// Have the kernel put datagrams together.
    pub gro: bool,
    /// Differentiated services code point (0 to 63) of packets whose traffic class has none.
    pub dscp: u8,
    pub send_buffer_bytes: u32,
    pub receive_buffer_bytes: u32,
    /// Firewall mark of what is sent (SO_MARK), which takes CAP_NET_ADMIN or, from Linux 5.17 on,
    /// CAP_NET_RAW; none if 0.
    pub mark: u32,
    /// There may be peers with [frames](freeflow_wire::frame): what is sent has a UDP checksum.
    pub frames: bool,
    /// Packets and time, nanoseconds, after which the key of a sealed peer is replaced.
    pub key_packets: u64,
    pub key_time_ns: u64,
}

impl UdpConfig {
    /// Eight source ports that streams are spread over, GSO and GRO, DSCP 0, 4 MiB to send and 16 MiB to receive.
    pub fn new(addresses: Vec<IpAddr>) -> Self {
        Self {
            addresses,
            shard: Shard::ONLY,
            source_port_count: 8,
            spread: true,
            gso: true,
            gro: true,
            dscp: 0,
            send_buffer_bytes: 4 << 20,
            receive_buffer_bytes: 16 << 20,
            mark: 0,
            frames: false,
            key_packets: KEY_PACKETS,
            key_time_ns: KEY_TIME_NS,
        }
    }
}

/// Refuses what is out of range.
pub(crate) fn check(config: &UdpConfig) -> io::Result<()> {
    let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    let addresses = &config.addresses;
    if addresses.is_empty() || addresses.len() > ADDRESS_COUNT_MAX {
        return invalid(format!("{} addresses; there must be 1 to {ADDRESS_COUNT_MAX}", addresses.len()));
    }
    if let Some(address) = addresses.iter().find(|address| address.is_unspecified() || address.is_multicast()) {
        return invalid(format!("{address} is not an address of a host"));
    }
    if !(1..=SOURCE_PORT_COUNT_MAX).contains(&config.source_port_count) {
        return invalid(format!("{} source ports; there must be 1 to 256", config.source_port_count));
    }
    if config.dscp > 63 {
        return invalid(format!("DSCP {} is over 63", config.dscp));
    }
    Ok(())
}
