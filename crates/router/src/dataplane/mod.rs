//! The data plane: the thread `ff-worker`, which has the engine and every ring. Read [`worker::Worker::turn`] first.

pub mod bursts;
pub mod capture;
pub mod command;
pub mod counters;
pub(crate) mod datagram_rings;
pub mod direct;
pub mod direct_counting;
mod direct_datagrams;
pub mod direct_rings;
pub mod direct_traffic;
pub mod doorbells;
pub mod environment;
pub mod event;
pub mod event_pipes;
pub mod execute;
pub mod fabric;
pub mod handle;
pub mod idle;
pub mod meters;
pub mod moderation;
pub mod network_totals;
pub mod notification;
pub mod paths;
pub mod policy;
pub mod pollers;
pub mod ports;
pub mod publishing;
pub mod qp_changes;
pub mod reasons;
pub mod routes;
pub mod run_queue;
mod seals;
pub mod shaping;
mod shard_groups;
pub(crate) mod siblings;
pub(crate) mod slow_path_counts;
pub mod table;
pub mod totals;
pub mod transmit;
pub mod waiting;
pub mod wire;
pub mod wire_options;
pub mod wire_status;
pub mod worker;
pub mod worker_lock;
pub mod xrc_targets;

#[cfg(test)]
pub mod lone_worker;
#[cfg(test)]
pub mod messages_tests;
#[cfg(test)]
pub mod stall_tests;
#[cfg(test)]
pub mod worker_lock_tests;
