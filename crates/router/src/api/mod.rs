//! The REST server of the control plane on `RUN_DIR/api.sock`: thread `ff-api`, beside the data
//! path and never in its way.
//!
//! - `caller`, `permission`: who somebody is, and what that lets them read and change;
//! - `server`, `users`, `stream`: connections, and what bounds them;
//! - `routes`, `query`, `failure`, `held`, `openapi`, `health`, `fresh`: HTTP;
//! - `follower`: the word of the process that follows a cluster for this host;
//! - `plane`, `meters`, `link`: what is asked of the control thread, which owns the state, and the way there;
//! - `feed`: what that thread says of its own accord;
//! - `host`: what this host does now, and what is done to it that is no object;
//! - `live`, `metrics`, `scrape`: what is counted, for programs here and for Prometheus;
//! - `watch`: who is told what has changed;
//! - `harness`: all of it without a control thread, for tests.
//!
//! Invariant: the server asks and the control thread answers when it comes to it; that thread never
//! waits for the server, and a question takes it a bounded time. Local users cost memory,
//! descriptors and time up to bounds that depend on their number alone, and not the admin's share.
pub(crate) mod caller;
pub(crate) mod failure;
pub mod feed;
pub(crate) mod follower;
mod fresh;
mod harness;
mod health;
mod held;
mod host;
mod link;
mod live;
pub(crate) mod meters;
mod metrics;
mod openapi;
mod openapi_host;
pub(crate) mod permission;
pub(crate) mod plane;
pub(crate) mod query;
mod routes;
mod scrape;
mod server;
mod stream;
mod users;
mod watch;

#[cfg(test)]
mod fake_plane_tests;

pub(crate) use feed::Feed;
pub use harness::{Harness, HarnessAnswer, HarnessRole};
pub(crate) use link::Link;
pub(crate) use server::{Api, ApiParts};

/// Before the paths of objects.
const BASE: &str = "/apis/freeflow.io/v1";

fn json_header() -> [(axum::http::HeaderName, &'static str); 1] {
    [(axum::http::header::CONTENT_TYPE, "application/json")]
}
