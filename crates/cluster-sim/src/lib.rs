//! A cluster of many hosts under virtual time: what etcd holds and sends, and how long it takes until all have
//! followed.
//!
//! Read in this order: `etcd` (keys, revisions and watchers, with times that are given), `words` (keys and values, by
//! the cluster's own types), `follower` (a host's real view and decisions), `world` (hosts, events, time), `scenes`
//! (what is tried, and measured). `costs` measures real time and memory of the same code on this machine, and `fan_out`
//! a real etcd. docs/SCALING.md has the figures, and says what is simulated, what is measured and what is neither.
//!
//! ```
//! use freeflow_cluster_sim::{scenes, world::{Pace, Setting}};
//!
//! let setting = Setting { hosts: 6, vnics: 2, rules: 1, pace: Pace::Fixed(1_000_000), ..Setting::default() };
//! let idle = scenes::idle(setting).expect("there are addresses for one network");
//! let (hosts, controllers) = (3 * idle.to_host.bytes, 3 * idle.to_controller.bytes);
//! assert_eq!(idle.sent.bytes, hosts + controllers);
//! ```
#![forbid(unsafe_code)]

pub mod control;
pub mod controller;
pub mod costs;
pub mod etcd;
pub mod fan_out;
pub mod follower;
pub mod scenes;
pub mod words;
pub mod world;
