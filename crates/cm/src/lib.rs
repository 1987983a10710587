//! The connection manager of a host's vNICs (IBTA 1.4 chapter 12, annex A11), and what Linux's
//! rdma_cm makes of it: port spaces, listeners, address resolution, events. Sans-IO: time,
//! randomness, packets and events are arguments.
//!
//! The router runs one [`Machine`]. Its users are *owners* (one is one process' session of one
//! vNIC), who hold *identifiers*. Both ends of a connection on one host are in one machine, and
//! talk by the same messages as all others.
//!
//! Identifiers (`id`) and connections (`connection`) are different things: an identifier that is
//! destroyed may leave a connection behind, an *orphan*, which asks for the end and waits for the
//! answer. `requests`, `resolving` and `connecting` are what libraries ask, `receive` and
//! `receive_request` what other machines say, `timeouts` what happens without either, `sending`
//! what goes out.
//!
//! It is not a subnet manager, knows no alternate paths, and looks at no queue pair: the library
//! changes its own, with what `InitQpAttributes` says.
//!
//! ```
//! use core::net::Ipv4Addr;
//! use freeflow_cm::{Environment, GID_COUNT, Limits, Machine, Owner, Packet, ScopedGid, Route, Scope, VnicRef};
//! use freeflow_protocol::cm::{CmAddress, CmEvent, CmReply, CmRequest, PortSpace};
//! use freeflow_verbs::{Gid, Instant, NetworkId, QpType, VerbsError};
//!
//! /// A host with one vNIC, and no way to anywhere.
//! struct Alone(ScopedGid);
//!
//! impl Environment for Alone {
//!     fn random(&mut self) -> u32 {
//!         7
//!     }
//!     fn addresses(&self, _: VnicRef) -> [Option<ScopedGid>; GID_COUNT] {
//!         [Some(self.0), None, None]
//!     }
//!     fn vnic_at(&self, place: ScopedGid) -> Option<VnicRef> {
//!         (place == self.0).then_some(VnicRef(1))
//!     }
//!     fn route(&self, _: VnicRef, _: Option<Gid>, _: Gid) -> Result<Route, VerbsError> {
//!         Err(VerbsError::Unreachable)
//!     }
//!     fn send(&mut self, _: Packet<'_>) {}
//!     fn notify(&mut self, _: Owner, _: u32, _: CmEvent) {}
//! }
//!
//! let gid = Gid::from_ip(Ipv4Addr::new(10, 111, 0, 2).into());
//! let mut env = Alone(ScopedGid { scope: Scope::Network(NetworkId(1)), gid });
//! let mut machine = Machine::new(Limits::default());
//! let mut ask = |request| machine.handle_request(&mut env, Instant(0), Owner(1), VnicRef(1), &request);
//!
//! let create = CmRequest::CreateId { channel: 1, port_space: PortSpace::Tcp, qp_type: QpType::Rc, cookie: 0 };
//! let Ok(Some(CmReply::Id { id })) = ask(create.clone()) else { panic!("no identifier") };
//! let local = CmAddress { gid, port: 7471 };
//! assert_eq!(ask(CmRequest::Bind { id, address: local }), Ok(Some(CmReply::Bound { local })));
//!
//! // A port belongs to the first that binds it.
//! let Ok(Some(CmReply::Id { id: second })) = ask(create) else { panic!("no identifier") };
//! assert_eq!(ask(CmRequest::Bind { id: second, address: local }), Err(VerbsError::AddressInUse));
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]
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
pub use environment::{
    Asked, Environment, EventChannel, GID_COUNT, Link, Owner, Packet, Route, Scope, ScopedGid, VnicRef,
};
pub use limits::{Limits, Timing};
pub use listing::IdStatus;
pub use machine::Machine;
