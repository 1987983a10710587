//! Routers of different hosts find and trust each other: thread `ff-peers`.
//!
//! - `file`: the peers file says which hosts there are, by what keys they are known, whose addresses they have;
//! - `state`: what is known of each host, a pure state machine; `claims` is its table of addresses and groups,
//!   `outbox` its part in connection management,
//!   `seals` in the keys of sealed packets, `shards` in the engines of routers;
//! - `channel`: Noise and frames, without sockets;
//! - `thread`: sockets and time around these two; `links` are its connections;
//! - `handle`, `update`: what other threads say to it, and hear of it.
//!
//! Invariant: whatever comes from the network ends in a counted refusal or in the end of that
//! connection. Memory, time and lines of the log that a stranger can cost are bounded, and peers
//! that behave are not disturbed.
mod channel;
mod claims;
mod deadlines;
mod file;
mod handle;
mod host;
mod identities;
mod link;
mod links;
mod notes;
mod numbers;
mod outbox;
mod prefix;
mod seals;
mod shards;
mod state;
mod thread;
mod update;

#[cfg(test)]
mod identities_tests;
#[cfg(test)]
mod many_hosts_tests;
#[cfg(test)]
mod prefixes_tests;
#[cfg(test)]
mod seals_tests;
#[cfg(test)]
mod shards_tests;
#[cfg(test)]
mod state_tests;

pub use crate::admission::access::VnicIdentity;
pub use channel::{ChannelError, Event, Identity, NoiseChannel};
pub use file::{External, FileError, KEY_BYTES, Key, PeerEntry, PeersFile, PrivateKey, key_text, parse_key};
pub use handle::{CmTickets, PeersHandle, SealMessage, Sink};
pub use prefix::{Prefix, PrefixError};
pub use state::{ConnectionId, Ending, HOST_NUMBER_MAX, Output, PING_INTERVAL, SILENCE_MAX, State};
pub use thread::Peers;
pub use update::{ExternalPeers, Mad, MadEnds, Settings, Update};
