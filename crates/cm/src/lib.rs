//! The connection manager of a host's vNICs (IBTA 1.4 chapter 12, annex A11), and what Linux's rdma_cm makes of it: port
//! spaces, listeners, address resolution, events. Sans-IO: time, randomness, packets and events are arguments.
//!
//! The router runs one [`Machine`]. Its users are *owners* (one is one process' session of one vNIC), who hold
//! *identifiers*. Both ends of a connection on one host are in one machine, and talk by the same messages as all others.
//!
//! Identifiers (`id`) and connections (`connection`) are different things: an identifier that is destroyed may leave a
//! connection behind, an *orphan*, which asks for the end and waits for the answer. `requests`, `resolving` and `connecting` are
//! what libraries ask, `receive` and `receive_request` what other machines say, `timeouts` what happens without either, `sending`
//! what goes out.
//!
//! It is not a subnet manager, knows no alternate paths, and looks at no queue pair: the library changes its own, with what
//! `InitQpAttributes` says.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

mod address;
mod attributes;
mod connecting;
mod connection;
mod counts;
mod environment;
mod id;
mod limits;
mod listing;
mod machine;
mod policy;
mod ports;
mod receive;
mod receive_request;
mod requests;
mod resolving;
mod sending;
mod timeouts;

pub use counts::{Counts, MessageCounts};
pub use environment::{Asked, Channel, Environment, GID_COUNT, Link, Owner, Packet, Place, Route, Scope, VnicRef};
pub use limits::{Limits, Timing};
pub use listing::IdStatus;
pub use machine::Machine;
