//! etcd as a [`Store`](freeflow_orchestrator::Store), for hosts that are one cluster: the same rules as for the
//! embedded store of one host, and the same conformance suite.
//!
//! - [`Client`]: calls of etcd's gRPC interface, over TLS, to whichever member answers.
//! - [`EtcdStore`]: transactions that are done exactly once or not at all, also when the answer is lost.
//! - [`Auth`]: users and their rights.
//! - [`address_of`]: names of servers, by the hosts file.
//! - [`Follower`]: the present keys, then every change of them, without a gap, whatever happens on the way.
//!
//! Invariant: a transaction of which [`EtcdStore`] says that it failed is not done later either, except where it says
//! that it does not know (`StoreError::Unknown`).
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

mod auth;
mod client;
mod endpoint;
mod error;
mod follower;
mod messages;
mod names;
mod store;

pub use auth::{Auth, Right};
pub use client::Client;
pub use endpoint::{Endpoints, Identity};
pub use error::EtcdError;
pub use follower::{Follower, KeyChange, NEWS_COUNT, News, Part};
pub use names::{HOSTS_FILE, address_of, host_names};
pub use store::EtcdStore;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// A hash of nothing, whose keys are the system's random numbers.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
