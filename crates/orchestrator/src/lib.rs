//! FFO: what operators declare ([`objects`]), and what follows from it. A pure state machine: no
//! I/O, no clock, no randomness.
//!
//! [`State`] is all there is to remember. A [`Command`] is planned, which changes nothing, and
//! gives a [`Plan`]: the entries of a [`Store`] to write in one transaction. Once they are stored,
//! the state adopts them. What a state is follows from the entries alone, so that a state which
//! adopted plans one after another, and one which was built from the store, are equal.
//!
//! Invariant: within a network no two vNICs have the same address, and none has the gateway's, the network's or the
//! broadcast address.
//!
//! ```
//! use freeflow_orchestrator::store::Committed;
//! use freeflow_orchestrator::{Command, MemoryStore, Reason, State, Store};
//!
//! let (mut state, mut store) = (State::new(), MemoryStore::new());
//! let mut run = |command: &Command| {
//!     let plan = state.plan(command)?;
//!     // The router commits the plan, and only then is it in force.
//!     let committed = store.commit(&state.transaction(&plan)).expect("memory does not fail");
//!     let Committed::Done(revision) = committed else { panic!("nobody else writes") };
//!     state.adopt(&plan, revision);
//!     Ok::<_, freeflow_orchestrator::Refusal>(state.vnic("a").map(|vnic| vnic.address.to_string()))
//! };
//!
//! let pool = "10.111.0.0/16".parse().expect("a range");
//! run(&Command::Begin { host: "h1".into(), pool, range: None, bridge: "ff0".into() })?;
//! let attach = |id: &str, network: &str| Command::Attach {
//!     id: id.into(),
//!     title: id.into(),
//!     network: network.into(),
//!     address: None,
//!     labels: Default::default(),
//! };
//! assert_eq!(run(&attach("a", "default"))?.as_deref(), Some("10.111.0.2"));
//! assert_eq!(run(&attach("b", "nowhere")).expect_err("no such network").reason, Reason::NotFound);
//! # Ok::<(), freeflow_orchestrator::Refusal>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]
extern crate alloc;

pub mod access;
mod check;
mod cidr;
mod cluster;
mod command;
pub mod conformance;
mod draft;
mod entries;
mod memory_store;
pub mod mode;
pub mod objects;
mod policy;
mod pool;
mod selector;
mod share;
mod state;
pub mod store;
mod writer;

pub use check::{check_label_name, check_label_value};
pub use cidr::{Cidr, CidrError, Pool6};
pub use cluster::{CLUSTER_KINDS, is_clusters};
pub use command::{Change, Command, Outcome, Plan, Reason, Refusal, USER_COUNT_MAX};
pub use entries::{KEY_PREFIX, decode_object, object_key, object_of_key};
pub use memory_store::{Delta, MemoryStore};
pub use pool::{Pool, PoolError};
pub use selector::Selector;
pub use state::{AccessView, ClassEntry, NetworkEntry, State, VnicEntry};
pub use store::{Revision, Store};
pub use writer::{KUBERNETES, KUBERNETES_PREFIX, Writer};

/// The network that is there from the start.
pub const DEFAULT_NETWORK: &str = "default";
/// Its addresses; the gateway is the first of them.
pub const DEFAULT_POOL: &str = "10.111.0.0/16";
/// Longest name of an object, bytes.
pub const NAME_BYTES_MAX: usize = 128;
/// vNICs of one host.
pub const VNIC_COUNT_MAX: usize = 65_536;
/// Objects of each other kind. A tenant may have half of what the others leave, of these and of vNICs.
pub const OBJECT_COUNT_MAX: usize = 4096;
/// One object in the store, and all of them together, bytes.
pub const OBJECT_BYTES_MAX: usize = 64 << 10;
/// Most bytes of all objects together, keys included.
pub const STATE_BYTES_MAX: usize = 64 << 20;
/// Most entries in the selectors of a tenant's groups and rules, all together.
pub const SELECTOR_ENTRIES_MAX: usize = 8192;
/// Pairs of networks that the rules of a tenant join.
pub const JOINED_PAIRS_MAX: usize = 64;
/// Labels of one vNIC, and bytes of them all together.
pub const LABEL_COUNT_MAX: usize = 64;
/// Most bytes of an object's labels, names and values together.
pub const LABEL_BYTES_MAX: usize = 8192;

/// Whether a name can be a file name and part of a command line: letters, digits, `.`, `_`, `-`; no leading dot.
pub fn name_is_good(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}
