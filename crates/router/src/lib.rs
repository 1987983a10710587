//! FFR, the per-host router: owns the memory maps, the rings and the engine; the only trusted part.
//!
//! Start with [`worker::Worker::turn`]: everything that moves bytes is named there. Three kinds of thread:
//! - the *worker* (`worker`, `wait`, `environment`, `transfer`): engine, rings, events;
//! - the *control* thread (`control`, `requests`, `vnics`, `admin`): sockets, handles, limits, processes that end;
//! - one *helper* a vNIC (`fallback`): memory that can't be mapped.
//!
//! The control thread hands the worker jobs and gets reactions back; neither waits for the other.
//!
//! Invariant: whatever a container writes into its rings or sends on its socket ends in an error reply or completion, or
//! in the end of that session, or that vNIC; never of another.
#![forbid(unsafe_code)]

mod account;
mod admin;
mod closer;
mod config;
mod control;
mod device;
mod environment;
mod events;
mod fallback;
mod jobs;
mod log;
mod memory;
mod pollers;
mod requests;
mod rings;
mod router;
mod session;
mod slab;
mod store;
mod table;
mod transfer;
mod vnics;
mod wait;
mod wake;
mod worker;

#[cfg(test)]
mod stall_tests;

pub use config::{Config, MACHINE_DIR, Mode};
pub use router::Router;
