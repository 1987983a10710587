//! Messages between the library and its router ([`library`], [`cm`]), between the CLI and a router
//! ([`admin`]), between a router and the guest agent of a virtual machine ([`guest`]), and between the routers of two
//! hosts ([`peer`]). The last two have transports of their own.
//!
//! Transport of the first two: Unix `SOCK_SEQPACKET`; one message a datagram, at most
//! [`MESSAGE_BYTES_MAX`]; descriptors ride along by SCM_RIGHTS, in the order that each message's
//! documentation gives. Every request gets one reply, in order.
//!
//! Decoding is total: any bytes give a message or a [`DecodeError`], never a panic, and trailing bytes are an error.
//!
//! Invariant: the first request on a library connection is `Hello`; where the two sides have no
//! version in common (see [`version`]), the reply says so and the connection ends. Everything after
//! it may assume the version and the features that both sides speak.
//!
//! ```
//! use freeflow_protocol::library::{Reply, Request};
//! use freeflow_protocol::{DecodeError, decode, encode};
//!
//! let mut bytes = encode(&Request::AllocPd { context: 3 });
//! assert_eq!(decode(&bytes), Ok(Request::AllocPd { context: 3 }));
//!
//! bytes.push(0);
//! assert_eq!(decode::<Request>(&bytes), Err(DecodeError::TrailingBytes));
//! assert_eq!(decode::<Reply>(&[0xff; 8]), Err(DecodeError::Malformed));
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]
extern crate alloc;

pub mod admin;
pub mod attachment;
pub mod cm;
pub mod guest;
pub mod library;
pub mod peer;
pub mod version;

use alloc::vec::Vec;
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;
use version::Offer;

/// Feature bit: the router takes [`library::Request::BorrowSegment`].
pub const FEATURE_BORROWED_SEGMENTS: u64 = 1;

/// Feature bit: the router takes [`library::Request::OpenNumberedDirectRing`], and says of a direct
/// ring that is accepted how many led there before.
pub const FEATURE_NUMBERED_DIRECT_RINGS: u64 = 1 << 1;

/// Feature bit: the router grants memory for atomics ([`library::GrantAccess::Atomic`]), and waits for a library that
/// has announced one (`ENTERED` in the header of its send queue).
pub const FEATURE_DIRECT_ATOMICS: u64 = 1 << 2;

/// Feature bit: the router takes [`library::Request::OpenDatagramRing`] and
/// [`library::Request::AcceptDatagramRing`].
pub const FEATURE_DIRECT_DATAGRAMS: u64 = 1 << 3;

/// Feature bit: replies with memory are [`library::Reply::Placed`]. In force in virtual machines, and nowhere else.
pub const FEATURE_PLACED_REPLIES: u64 = 1 << 4;

/// Versions and features of this release on library and admin sockets. Enums of messages grow at
/// the end only, and a new variant is sent only after its feature bit was agreed on.
pub const PROTOCOL: Offer = Offer { features: FEATURES, ..Offer::only(1) };

const FEATURES: u64 = FEATURE_BORROWED_SEGMENTS
    | FEATURE_NUMBERED_DIRECT_RINGS
    | FEATURE_DIRECT_ATOMICS
    | FEATURE_DIRECT_DATAGRAMS
    | FEATURE_PLACED_REPLIES;

/// Firewall mark (SO_MARK) of RoCEv2 packets that a router sends: no other packet to that port
/// leaves a host. It keeps clear of the bits that kube-proxy, Cilium, Calico, AWS' CNI and
/// Tailscale give their own meanings.
pub const ROUTER_MARK: u32 = 0x1062;

/// Largest message either side sends, bytes. Lists that could grow beyond it are paged.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Not a message of this protocol version.
    #[error("malformed message")]
    Malformed,
    /// A message, and then more bytes.
    #[error("bytes after the end of a message")]
    TrailingBytes,
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("message too long")]
    TooLong,
}

/// Encodes one message.
///
/// # Panics
/// Never for the messages of this crate: they hold no type that postcard can't encode.
pub fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    postcard::to_allocvec(message).expect("messages of this crate are encodable")
}

/// Decodes one message; the bytes may come from an enemy.
///
/// # Errors
/// [`DecodeError`]: the bytes are no message, or not just one.
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, DecodeError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLong);
    }
    match postcard::take_from_bytes::<M>(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(DecodeError::TrailingBytes),
        Err(_) => Err(DecodeError::Malformed),
    }
}
/// FNV-1a, 64 bits: names, not security.
#[must_use]
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
