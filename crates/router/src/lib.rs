//! FFR, the per-host router: owns the memory maps, the rings and the engine; the only trusted part.
//!
//! Start with [`worker::Worker::turn`]: everything that moves bytes is named there. Four kinds of thread:
//! - the *worker* (`worker`, `wait`, `environment`, `transfer`): engine, rings, events;
//! - the *control* thread (`control`, `requests`, `vnics`, `admin`): sockets, handles, limits, processes that end;
//! - one *helper* a vNIC (`fallback`): memory that can't be mapped;
//! - one for the files of the synthetic sysfs (`sysfs`, `sysfs_counters`);
//! - `ff-peers`, which finds and trusts the routers of other hosts ([`peers`]), where there is a peers file.
//!
//! Two more come and go: one a vNIC that closes descriptors (`closer`), one a connection that holds threads (`hold`).
//!
//! The control thread hands the worker jobs and gets reactions back; neither waits for the other.
//!
//! Invariant: whatever a container writes into its rings or sends on its socket ends in an error reply or completion, or
//! in the end of that session, or that vNIC; never of another.
#![forbid(unsafe_code)]

mod account;
mod admin;
mod capture;
mod closer;
mod config;
mod control;
mod device;
mod environment;
mod events;
mod extents;
mod external;
mod fabric;
mod fallback;
mod hold;
mod imports;
mod jobs;
mod log;
mod memory;
mod moderation;
pub mod peers;
mod pollers;
mod remap;
mod requests;
mod requests_memory;
mod requests_qp;
mod rings;
mod router;
mod running;
mod sending;
mod session;
mod slab;
mod store;
mod sysfs;
mod sysfs_counters;
mod table;
mod targets;
mod transfer;
mod turns;
mod vnics;
mod wait;
mod wake;
mod wire;
mod wire_admin;
mod wire_options;
mod worker;

#[cfg(test)]
mod stall_tests;
#[cfg(test)]
mod void_tests;

pub use config::{Config, MACHINE_DIR, Mode};
pub use router::Router;
pub use wire_options::WireOptions;
