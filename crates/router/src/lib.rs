//! FFR, the per-host router: owns the memory maps, the rings and the engine; the only trusted part.
//!
//! A plane is a folder:
//!
//! | folder | what it has | thread |
//! |---|---|---|
//! | [`router`] | start, run directory, orderly end | |
//! | `api` | the REST server | `ff-api` |
//! | `control` | sessions, vNICs, what is declared, connection management | `ff-control` |
//! | `peering` | routers of other hosts: who they are, what they announce | `ff-peers` |
//! | `dataplane` | engine, rings, doorbells, packets | `ff-worker` |
//! | `attachment` | how a vNIC's processes, their memory and their events are reached | `ff-identify`, `ff-attachment`, `ff-guest` |
//! | `memory` | page tables, copies, grants | `ff-worker`, `ff-copy-K`, a slow-path copier a vNIC |
//! | `admission` | rules, addresses, violations, accounts | whoever has an instance |
//! | `audit` | who changed what | `ff-audit` |
//! | `base` | log, wakers, slabs, privileges | |
//!
//! Invariant: whatever a container writes into its rings or sends on its socket ends in an error
//! reply or completion, or in the end of that session, or that vNIC; never of another.
#![forbid(unsafe_code)]

mod admission;
mod api;
mod attachment;
mod audit;
mod base;
mod config;
mod control;
mod dataplane;
mod memory;
mod network_reconciler;
pub mod peering;
mod router;

pub use admission::access::RuleCounts;
pub use api::{Harness, HarnessAnswer, HarnessRole};
pub use attachment::guest::channel::ControlChannel;
pub use attachment::near_halves::{NearHalfService, NearHalves, begin_near_half};
pub use base::log_file::{
    keep as keep_log_file, rotate_here as rotate_log_file_here, rotate_if_full as rotate_log_file_if_full,
};
pub use base::machine::default_limits;
pub use base::privileges;
pub use config::{Config, MACHINE_DIR, Mode, ShardBy};
pub use control::placement::default_shard_count;
pub use dataplane::wire_options::WireOptions;
pub use memory::copy_threads::{CopyThreadOptions, WORKERS_MAX};
pub use network_reconciler::ReconcilerProcess;
pub use router::Router;
