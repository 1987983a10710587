//! A simulated fabric with faults, and checkers: engines exchange packets under virtual time, and
//! one seed replays a run.
//!
//! Read in this order: `plan` (what a seed stands for), `sim` (hosts, events, time), `world` (what
//! an engine sees of its host), `fabric` (what happens to packets), `shards` and `siblings` (hosts of
//! several engines), `carrier` and `lanes` (what takes messages past the fabric), `topology` (who
//! takes part), `run` (one run of a plan), `workload` (posts and completions), `faults` (what goes
//! wrong besides packets), `model` (what must come of them), `checker` (what must be true in the
//! end). `goodput` measures instead of checking.
//!
//! ```
//! let report = freeflow_sim::run(7, false);
//! assert!(report.wrongs.is_empty(), "{}", freeflow_sim::failure(&report));
//! assert!(report.completions > 0);
//!
//! // The seed is all: a second run is the same to the last packet.
//! assert_eq!(freeflow_sim::run(7, false).digest, report.digest);
//! ```
#![forbid(unsafe_code)]

pub mod carrier;
pub mod checker;
pub mod datagrams;
pub mod fabric;
pub mod faults;
pub mod goodput;
pub mod lanes;
pub mod model;
pub mod plan;
pub mod rng;
pub mod run;
pub mod shards;
pub mod siblings;
pub mod sim;
pub mod topology;
pub mod trace;
pub mod windows;
pub mod workload;
pub mod world;

use carrier::{CarrierCounts, CarrierModel};
use plan::Plan;
use run::Run;
use shards::ShardCounts;

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    pub seed: u64,
    pub has_carrier: bool,
    pub has_dialogues: bool,
    pub has_repairs: bool,
    pub has_crowds: bool,
    pub has_shards: bool,
    pub wrongs: Vec<String>,
    pub digest: u64,
    pub ended_at: u64,
    pub completions: u64,
    pub packets: u64,
    pub carried: CarrierCounts,
    pub restored: u64,
    /// Acknowledgements that went out behind an answer.
    pub acks_with_answers: u64,
    /// Reports of packets that were kept behind a missing one.
    pub reports: u64,
    /// Messages that went out as records.
    pub records: u64,
    pub shards: ShardCounts,
    /// Bursts that found no room on the way to another shard.
    pub refused: u64,
    pub trace: Vec<String>,
}

/// Runs a seed.
pub fn run(seed: u64, traces: bool) -> Report {
    run_plan(Plan::new(seed), traces)
}

pub fn run_plan(plan: Plan, traces: bool) -> Report {
    let (seed, has_dialogues, has_repairs) = (plan.seed, plan.dialogues, plan.repairs);
    let (has_crowds, has_shards) = (plan.crowds, plan.shards.iter().any(|count| *count > 1));
    let has_carrier = plan.host_model.carrier_model != CarrierModel::default();
    let mut run = Run::new(plan, traces);
    run.go();
    let acks_with_answers = run.acks_with_answers();
    Report {
        seed,
        has_carrier,
        has_dialogues,
        has_repairs,
        has_crowds,
        has_shards,
        wrongs: run.wrongs,
        digest: run.sim.digest,
        ended_at: run.sim.now,
        completions: run.completions,
        packets: run.sim.fabric.counts.carried,
        carried: run.sim.carrier_counts,
        restored: run.sim.restored,
        acks_with_answers,
        records: run.sim.hosts.iter().map(|host| host.world.records_sent).sum(),
        reports: run.sim.hosts.iter().map(|host| host.world.reports_sent).sum(),
        shards: run.sim.shard_counts,
        refused: run.sim.hosts.iter().map(|host| host.world.refused).sum(),
        trace: run.sim.trace.unwrap_or_default(),
    }
}

/// Description of a run that went wrong.
pub fn failure(report: &Report) -> String {
    let carrier = if report.has_carrier { " --carrier" } else { "" };
    let dialogues = if report.has_dialogues { " --dialogues" } else { "" };
    let repairs = if report.has_repairs { " --repairs" } else { "" };
    let crowds = if report.has_crowds { " --crowds" } else { "" };
    let of_one_kind = [carrier, dialogues, repairs, crowds].concat();
    // Their plans are of the other kinds, too.
    let options = if report.has_shards { " --shards" } else { &of_one_kind };
    let replay = format!("cargo run -p freeflow-sim -- --seed {}{options} --trace", report.seed);
    format!("seed {}: {}\nreplay: {replay}", report.seed, report.wrongs.join("\n"))
}
