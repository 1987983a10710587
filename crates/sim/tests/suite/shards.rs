//! Hosts of several engines, beside hosts of one: nothing that programs see is different.
use crate::seeds::{first, unbroken};
use freeflow_sim::plan::Plan;
use freeflow_sim::run_plan;
use freeflow_sim::shards::ShardCounts;

const SEEDS: u64 = 300;
const SEEDS_FULL: u64 = 100_000;

fn count() -> u64 {
    if std::env::var_os("FREEFLOW_TEST_FULL").is_some() { SEEDS_FULL } else { SEEDS }
}

#[test]
fn shards_break_nothing() {
    let (mut all, mut refused, mut completions) = (ShardCounts::default(), 0, 0);
    // A few at a time: all the reports of a long run are much memory.
    for begun in (0..count()).step_by(100) {
        for report in unbroken(first() + begun, 100, Plan::with_shards) {
            let ShardCounts { packets, company, strays, strays_lost, relayed } = report.shards;
            all.packets += packets;
            all.company += company;
            all.strays += strays;
            all.strays_lost += strays_lost;
            all.relayed += relayed;
            refused += report.refused;
            completions += report.completions;
        }
    }
    let few = completions < 200 * count() || all.packets < 100 * count() || all.strays < 100 * count();
    let fewer = all.company < count() || all.strays_lost < count() || all.relayed < count() / 10 || refused < count();
    assert!(!few && !fewer, "{completions} completions, {all:?}, {refused} times no room");
}

#[test]
fn a_seed_with_shards_replays() {
    for seed in 0..20 {
        let run = |traces| run_plan(Plan::with_shards(seed), traces);
        let (first, second) = (run(false), run(true));
        assert_eq!((first.digest, first.ended_at), (second.digest, second.ended_at), "seed {seed}");
        assert_eq!((first.shards, first.refused), (second.shards, second.refused), "seed {seed}");
    }
}

/// An engine that is written down and read back is the same shard.
#[test]
fn snapshots_of_shards_change_nothing() {
    for seed in 0..20 {
        let with = |restores| {
            let mut plan = Plan::with_shards(seed);
            plan.host_model.restores = restores;
            let report = run_plan(plan, false);
            (report.digest, report.ended_at, report.completions, report.wrongs)
        };
        assert_eq!(with(0), with(300_000), "seed {seed}");
    }
}
