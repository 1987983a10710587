//! Benchmarks: what the machine can do, what FreeFlow makes of it, and the ratio of the two, in one run.
//!
//! * [`limits`]: bare programs that show the physical limits of this machine.
//! * [`verbs`]: an ordinary verbs program, one end in each of two containers.
//! * [`host`], [`group`], [`suite`], [`perftest`]: a router in each mode, what is measured with it,
//!   and unmodified programs.
//! * [`direct`]: programs of one host among each other, beside what two cores can do without anybody between them.
//! * [`crowd`]: many pairs of containers at once.
//! * [`workers`]: one and two of the router's, for two pairs at once.
//! * [`lab`], [`wire`]: two hosts, and the traffic between them beside the network's limits.
//! * [`cm`]: connections by `librdmacm`, and rsockets beside the kernel's TCP.
//! * [`qos`]: caps, weights and priorities beside what unmodified programs get.
//! * [`neighbours`]: what a tenant's tricks add to another's control verbs and messages.
//! * [`cluster`]: many hosts of a cluster, simulated, and three of a laboratory.
//! * [`instructions`]: how many of them each call of the data path takes, beside what was reviewed.
//! * [`memory`]: what registrations and objects cost.
//! * [`report`], [`results`], [`table`], [`svg`], [`stats`]: tables, JSON, Markdown, plots and percentiles.
//!
//! Invariant: no figure is printed without the limit that bounds it, taken in the same run, and the hand-off before
//! and after, because the distance of the cores decides more than any program.
pub mod beside_tcp;
pub mod cluster;
pub mod cm;
pub mod crowd;
pub mod direct;
pub mod expectation;
pub mod group;
pub mod host;
pub mod instructions;
pub mod journal;
pub mod lab;
pub mod limits;
pub mod memory;
pub mod mpi;
pub mod neighbours;
pub mod perftest;
pub mod programs;
pub mod qos;
pub mod report;
pub mod results;
pub mod series;
pub mod stats;
pub mod suite;
pub mod svg;
pub mod sys;
pub mod table;
pub mod verbs;
pub mod wire;
pub mod workers;
