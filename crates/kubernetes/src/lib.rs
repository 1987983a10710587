//! FreeFlow in a Kubernetes cluster.
//!
//! - [`api`]: a client of the API server.
//! - [`node`]: the agent of each node, by which pods get vNICs.
//! - [`log`]: lines on stderr.
//!
//! The program `freeflow-kubernetes` has a subcommand for each part.
#![forbid(unsafe_code)]

pub mod api;
pub mod log;
pub mod node;
