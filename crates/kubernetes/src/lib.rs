//! FreeFlow in a Kubernetes cluster.
//!
//! - [`api`]: a client of the API server.
//! - [`node`]: the agent of each node, by which pods get vNICs.
//! - [`controller`]: what Kubernetes declares becomes FreeFlow's.
//! - [`declared`]: the custom resources, and FreeFlow's objects for them.
//! - [`install`]: FreeFlow's files, copied from a pod onto its node.
//! - [`log`]: lines on stderr.
//! - [`termination`]: the signals by which Kubernetes ends a pod.
//!
//! The program `freeflow-kubernetes` has a subcommand for each part.
#![forbid(unsafe_code)]

pub mod api;
pub mod controller;
pub mod declared;
pub mod install;
pub mod log;
pub mod node;
pub mod termination;
