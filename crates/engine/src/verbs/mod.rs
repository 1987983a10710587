//! The verbs of the control path, and getters: what the router calls for a session, and for
//! `status`.
mod direct;
mod multicast;
mod numbers;
mod objects;
mod policy;
mod protection;
mod queue_pairs;
mod quotas;
mod regions;
mod shaping;
mod status;
mod windows;
mod wire_status;
mod xrc;

pub use direct::{DatagramPeer, Grantable, NotDirect, NotGrantable};
pub use status::QpStatus;
