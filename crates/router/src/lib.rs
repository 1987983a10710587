//! FFR, the per-host router: owns the memory maps, the rings and the engine; the only trusted part.
//!
//! Start with [`worker::Worker::turn`]: everything that moves bytes is named there. Five kinds of thread:
//! - the *worker* (`worker`, `wait`, `environment`, `transfer`): engine, rings, events;
//! - the *control* thread (`control`, `requests`, `vnics`, `admin`): sockets, handles, limits, processes that end;
//! - *movers* (`movers`): copies for the worker, where there are several workers;
//! - one *helper* a vNIC (`fallback`): memory that can't be mapped;
//! - one for the files of the synthetic sysfs (`sysfs`, `sysfs_counters`);
//! - `ff-api`, the REST server of the control plane (`api`), and `ff-audit`, which writes who changed what (`audit`);
//! - `ff-peers`, which finds and trusts the routers of other hosts ([`peers`]), where there is a peers file.
//!
//! Two more come and go: one a vNIC that closes descriptors (`closer`), one a connection that holds threads (`hold`).
//!
//! The control thread hands the worker jobs and gets reactions back; neither waits for the other.
//!
//! Invariant: whatever a container writes into its rings or sends on its socket ends in an error reply or completion, or
//! in the end of that session, or that vNIC; never of another.
#![forbid(unsafe_code)]

mod accept;
mod access;
mod access_admin;
mod account;
mod across;
mod admin;
mod admin_audit;
mod api;
mod attempts;
mod audit;
mod bells;
mod blocks;
mod bounce;
mod calls;
mod capture;
mod closer;
mod cm;
mod commands;
mod config;
mod control;
mod device;
mod direct;
mod direct_admin;
mod direct_traffic;
mod environment;
mod events;
mod extents;
mod external;
mod fabric;
mod fallback;
mod follower;
mod gate;
mod grants;
mod hold;
mod homes;
mod identify;
mod imports;
mod jobs;
mod log;
mod log_file;
mod machine;
mod memory;
mod metering;
mod mode;
mod moderation;
mod movers;
pub mod peers;
mod policy;
mod pollers;
pub mod privileges;
mod reasons;
mod remap;
mod requests;
mod requests_memory;
mod requests_qp;
mod resharing;
mod resources;
mod rings;
mod router;
mod running;
mod sending;
mod session;
mod shaping;
mod shares;
mod slab;
mod statuses;
mod storing;
mod sysfs;
mod sysfs_counters;
mod table;
mod tallies;
mod targets;
mod totals;
mod transfer;
mod vnic_room;
mod vnics;
mod wait;
mod wake;
mod wire;
mod wire_admin;
mod wire_options;
mod withdrawal;
mod worker;
mod worker_lock;

#[cfg(test)]
mod blocking_memory;
#[cfg(test)]
mod control_tests;
#[cfg(test)]
mod grants_tests;
#[cfg(test)]
mod lone_worker;
#[cfg(test)]
mod movers_tests;
#[cfg(test)]
mod stall_tests;
#[cfg(test)]
mod void_tests;
#[cfg(test)]
mod worker_lock_tests;

pub use config::{Config, MACHINE_DIR, Mode};
pub use follower::HostHelper;
pub use log_file::{
    keep as keep_log_file, rotate_here as rotate_log_file_here, rotate_if_full as rotate_log_file_if_full,
};
pub use machine::default_limits;
pub use movers::{MoverOptions, WORKERS_MAX};
pub use router::Router;
pub use wire_options::WireOptions;
