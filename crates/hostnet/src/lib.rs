//! Changes to the host's network, by netlink and, where that is not enough, by `tc`, `iptables` and
//! `nft`. Used by the `freeflow` command and by the router's network reconciler; the data path
//! never comes here.
//!
//! From the top: [`reconciler`] compares the host with an [`inventory`] of networks and vNICs;
//! [`bridges`] has a bridge for each network, [`overlay`] joins those of several hosts, [`ports`]
//! plugs vNICs into them; [`fence`] has overlays believe the peers file, [`guard`] and
//! [`wire_guard`] keep everybody but routers from speaking RoCEv2; [`cdi`] names networks and vNICs
//! to container engines; [`run_dir`] says whose all of it is. Below: [`links`], [`addresses`],
//! [`firewall`], [`namespace`] and [`programs`].
//!
//! Everything acts on the calling thread's network namespace. Nothing here keeps a thread, or state
//! beyond the kernel's and the run directory's.
//!
//! ```
//! use freeflow_hostnet::run_dir::RunDir;
//! use std::path::Path;
//!
//! // All names on the host follow from the run directory, so that two routers never meet.
//! let one = RunDir::new(Path::new("/run/freeflow")).unwrap();
//! let other = RunDir::new(Path::new("/run/other")).unwrap();
//! assert_ne!(one.short_hash(), other.short_hash());
//! // A path too long for its sockets is refused before anything is made.
//! assert!(RunDir::new(Path::new(&format!("/run/{}", "x".repeat(100)))).is_err());
//! ```
#![forbid(unsafe_code)]

pub mod addresses;
pub mod bridges;
pub mod cdi;
mod error;
pub mod fence;
pub mod firewall;
pub mod guard;
pub mod inventory;
pub mod links;
pub mod namespace;
mod netlink;
pub mod overlay;
pub mod ports;
pub mod programs;
pub mod reconciler;
pub mod run_dir;
pub mod wire_guard;

pub use error::{Context, Error, Result};
