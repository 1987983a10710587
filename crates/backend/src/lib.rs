//! The carrier of a router's RoCEv2 packets: UDP sockets on port 4791 ([`Udp`]).
//!
//! It knows packets only as bytes that begin with a BTH: what they mean is the engine's business. It sees to everything
//! below: addresses and source ports, the ICRC, seals, batches of segments (GSO) and their undoing (GRO), path MTU,
//! counters, faults injected for tests, capture.
//!
//! Invariant: after [`Udp::open`] and outside of `set_…`, `remove_…`, changes of keys, error paths that re-read an MTU
//! and a capture sink, nothing here allocates, locks or logs.
//!
//! Unsafe code is in `sys` only.
#![deny(unsafe_code)]

mod batch;
mod capture;
mod capturing;
mod config;
mod counters;
mod faults;
mod group;
mod lanes;
mod open;
mod path;
pub mod pcapng;
mod peers;
mod receive;
mod seal;
mod sealing;
mod sys;
mod udp;

pub use batch::{BATCH_COUNT_MAX, BATCH_PACKET_COUNT_MAX};
pub use capture::{CaptureSink, Captured, Direction};
pub use config::UdpConfig;
pub use counters::WireCounters;
pub use faults::{Faults, HELD_COUNT_MAX};
pub use lanes::{FLOWCELL_BYTES, PacketRoute};
pub use path::{frame_payload, path_mtu};
pub use peers::{PEER_COUNT_MAX, Peer, PeerIndex};
pub use receive::{Datagram, Received};
pub use seal::{KEY_HELD_NS, KEY_PACKETS, KEY_TIME_NS, KeyOffer, SealSecret};
pub use udp::{BURST_BYTES_MAX, PACKET_BYTES_MAX, REFERENCE_BYTES_MIN, Udp};
