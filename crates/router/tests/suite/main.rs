//! The router's tests in one binary: routers and raw clients that are threads of this process.
//! Apart from them, since what they do to their process would disturb others: `freeze` (its threads are stopped),
//! `process` and `crash` (children, which hold copies of descriptors until they execute), `tenants` (sockets whose last
//! close takes an hour, and children).
mod access;
mod cm;
mod cm_steps;
#[path = "../common/mod.rs"]
mod common;
mod control;
mod data;
mod datagrams;
mod grants;
mod imports;
mod memory;
mod moderation;
mod multicast;
mod peers;
mod peers_crowd;
mod policy;
mod removed;
mod sealed;
mod unreliable;
mod wire;
mod xrc;
