//! The record that a capture keeps of each packet.
use std::net::SocketAddr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Received,
    Sent,
}

/// One packet as it is on the wire, with what is known of its IP and UDP headers.
#[derive(Clone, Copy, Debug)]
pub struct Captured<'a> {
    /// Nanoseconds since the epoch. Packets of one batch share it.
    pub time_ns: u64,
    pub direction: Direction,
    /// Address and UDP port.
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub traffic_class: u8,
    pub hop_limit: u8,
    /// IPv4 identification. Of a packet received: the one that its ICRC was computed with, or a guess where it fits
    /// none.
    pub identification: u16,
    /// BTH to ICRC.
    pub bytes: &'a [u8],
}

/// Takes captured packets. It is called from the data path: it must not block.
pub trait CaptureSink: Send {
    fn packet(&mut self, packet: &Captured<'_>);
}
