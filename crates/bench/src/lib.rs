//! Benchmarks: what the machine can do, what FreeFlow makes of it, and the ratio of the two, in one run.
//!
//! * [`limits`]: bare programs that show the physical limits of this machine.
//! * [`verbs`]: an ordinary verbs program, one end in each of two containers.
//! * [`host`], [`group`], [`suite`], [`perftest`]: a router in each mode, what is measured with it, and unmodified programs.
//! * [`lab`], [`wire`]: two hosts, and the traffic between them beside the network's limits.
//! * [`memory`]: what registrations and objects cost.
//! * [`report`], [`table`], [`stats`]: tables, JSON and percentiles.
//!
//! Invariant: no figure is printed without the limit that bounds it, taken in the same run, and the hand-off before
//! and after, because the distance of the cores decides more than any program.
pub mod group;
pub mod host;
pub mod lab;
pub mod limits;
pub mod memory;
pub mod perftest;
pub mod report;
pub mod stats;
pub mod suite;
pub mod sys;
pub mod table;
pub mod verbs;
pub mod wire;
