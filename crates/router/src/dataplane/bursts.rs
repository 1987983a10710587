//! Bursts of packets that wait: for their payload, or for room in a socket.
use crate::memory::bounce::Bounce;
use freeflow_engine::{Destination, PacketHead, Token};

/// A burst whose payload is being fetched.
pub struct Burst {
    pub to: Destination,
    pub packets: Vec<PacketHead>,
}

/// A burst that is complete, and waits for room.
pub struct Unsent {
    pub token: Token,
    pub burst: Box<Burst>,
    /// Its payload is at the beginning.
    pub bounce: Bounce,
}
