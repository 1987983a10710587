//! The packet transport: what a QP keeps whose peer is on another host (IBTA chapter 9). What its
//! parts do with it stands in `engine::arrivals`, `completer`, `responder` and `requester`.
//!
//! Invariant: a packet acts on a QP only if its source host is the one that the QP's path leads to
//! (UD: if the source's owner says that it is of the same network). What is dropped is counted in
//! [`Drops`].
//!
//! Invariant: packets of a QP are acted upon one at a time, in the order of arrival: while the
//! payload of one is still being written elsewhere (`writing`), later ones are parked. Requests that come ahead of a
//! missing one are dropped, or (selective repeat) kept for when they are the expected ones.
pub(crate) mod answers;
pub(crate) mod carrier;
pub(crate) mod congestion;
pub(crate) mod counters;
pub(crate) mod datagrams;
pub(crate) mod habit;
pub(crate) mod hosts;
pub(crate) mod kept;
pub(crate) mod management;
pub(crate) mod packets;
pub(crate) mod parked;
pub(crate) mod peers;
pub(crate) mod pipe;
pub(crate) mod repair;
pub(crate) mod replay;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod unreliable;
pub(crate) mod window;
pub(crate) mod wire;

pub use carrier::CarrierState;
pub use counters::{Drops, QpWireStatus, WireCounters};
pub use hosts::HostStatus;
pub use management::management_head;
