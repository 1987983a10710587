//! Seeds in bulk, seeds that once failed, and what must hold of any run: it repeats itself, snapshots or not.
use freeflow_sim::plan::Plan;
use freeflow_sim::{Report, failure, run, run_plan};

/// Of each of the two tests.
const SEEDS: u64 = 1000;
const SEEDS_FULL: u64 = 60_000;

/// Seeds that once failed, and why. A bug found by one stays here.
const ONCE_FAILED: [(u64, &str); 2] = [
    (7069, "XRC: RESET returned a RECV of the target, which the workload took for a QP in ERROR that flushes"),
    (4991, "UC: each message to a peer that is gone waited a fifth of a second for word of it"),
];

fn count() -> u64 {
    if std::env::var_os("FREEFLOW_TEST_FULL").is_some() { SEEDS_FULL } else { SEEDS }
}

/// `FREEFLOW_TEST_SEED` moves the row of seeds.
pub fn first() -> u64 {
    std::env::var("FREEFLOW_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0)
}

fn check(seeds: impl Iterator<Item = u64>) {
    let mut failures = Vec::new();
    let (mut completions, mut packets, mut restored) = (0, 0, 0);
    for seed in seeds {
        let report = run(seed, false);
        completions += report.completions;
        packets += report.packets;
        restored += report.restored;
        if !report.wrongs.is_empty() {
            failures.push(failure(&report));
        }
    }
    assert!(
        failures.is_empty(),
        "{} seeds failed; the first ones:\n{}",
        failures.len(),
        failures[..failures.len().min(5)].join("\n")
    );
    // A simulation that does nothing finds nothing.
    assert!(completions > 100 && packets > 100 && restored > 10, "{completions} {packets} {restored}");
}

#[test]
fn even_seeds() {
    check((0..count()).map(|seed| first() + 2 * seed));
}

#[test]
fn odd_seeds() {
    check((0..count()).map(|seed| first() + 2 * seed + 1));
}

#[test]
fn seeds_that_once_failed() {
    for (seed, why) in ONCE_FAILED {
        let report = run(seed, false);
        assert!(report.wrongs.is_empty(), "{why}: {}", failure(&report));
    }
}

#[test]
fn a_seed_replays() {
    for seed in 1..20 {
        let (first, second) = (run(seed, false), run(seed, true));
        assert_eq!((first.digest, first.ended_at), (second.digest, second.ended_at), "seed {seed}");
        assert!(!second.trace.is_empty());
        let carried = || run_plan(Plan::with_carrier(seed), false);
        let (first, second) = (carried(), carried());
        assert_eq!((first.digest, first.ended_at), (second.digest, second.ended_at), "seed {seed} with a carrier");
    }
}

/// Held to rates, runs bring the same things about, only later; with snapshots, too.
#[test]
fn limits_of_rate_break_nothing() {
    let (mut failures, mut later) = (Vec::new(), 0);
    for seed in 0..count() / 8 {
        let plain = run(seed, false);
        let shaped = run_plan(Plan { shaped: true, ..Plan::new(seed) }, false);
        later += u64::from(shaped.ended_at > plain.ended_at);
        if !shaped.wrongs.is_empty() {
            failures.push(failure(&shaped));
        }
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures[..failures.len().min(3)].join("\n"));
    // One run in ten at least; most have too little to do to meet a limit.
    assert!(later > count() / 80, "limits held back {later} runs only");
}

/// Reports of so many seeds' plans, none of which broke a promise.
pub fn unbroken(from: u64, count: u64, plan: fn(u64) -> Plan) -> Vec<Report> {
    let reports: Vec<Report> = (from..from + count).map(|seed| run_plan(plan(seed), false)).collect();
    let failures: Vec<String> = reports.iter().filter(|report| !report.wrongs.is_empty()).map(failure).collect();
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures[..failures.len().min(3)].join("\n"));
    reports
}

/// Where programs answer soon, acknowledgements wait for their answers, and ride or not: nothing else changes.
#[test]
fn acknowledgements_that_wait_break_nothing() {
    let (mut ridden, mut completions) = (0, 0);
    for report in unbroken(first(), count() / 2, Plan::with_dialogues) {
        ridden += report.acks_with_answers;
        completions += report.completions;
    }
    // A turn in eight is no dialogue's, and ends the habit.
    assert!(ridden > count() / 2 && completions > 4 * ridden, "{ridden} of {completions}");
}

/// On lines with many accidents, packets ahead of a missing one are kept, reported, and acted upon in their order.
#[test]
fn selective_repeat_breaks_nothing() {
    let (mut reports, mut completions) = (0, 0);
    for report in unbroken(first(), count() / 2, Plan::with_repairs) {
        reports += report.reports;
        completions += report.completions;
    }
    assert!(reports > 10 * count() && completions > 50 * count(), "{reports} of {completions}");
}

/// Many short messages at once go out as records of one frame, on lines with many accidents, to hosts with and without
/// selective repeat.
#[test]
fn records_break_nothing() {
    let (mut records, mut completions) = (0, 0);
    for report in unbroken(first(), count() / 2, Plan::with_crowds) {
        records += report.records;
        completions += report.completions;
    }
    assert!(records > 20 * count() && completions > 100 * count(), "{records} of {completions}");
}

/// Messages of RC QPs go by a carrier now and by the wire then, the way changes in the middle of
/// traffic, and lanes break: nothing else changes.
#[test]
fn a_carrier_breaks_nothing() {
    // Once: a QP could not be reset while its carrier tried a message for ever (rnr_retry 7, and no RECV came).
    unbroken(1_014_632, 1, Plan::with_carrier);
    let (mut executed, mut returned, mut packets) = (0, 0, 0);
    for report in unbroken(first(), count() / 4, Plan::with_carrier) {
        executed += report.carried.executed;
        returned += report.carried.returned;
        packets += report.packets;
    }
    // Of each QP, messages go both ways.
    assert!(
        executed > 2 * count() && returned > count() / 8 && packets > 20 * count(),
        "{executed} {returned} {packets}"
    );
}

/// The checkers see a carrier that breaks its word: it gives back messages that were executed.
#[test]
fn a_carrier_that_lies_is_found_out() {
    let lies = |seed| {
        let mut plan = Plan::with_carrier(seed);
        plan.host_model.carrier_model.breaks = 300_000;
        plan.host_model.carrier_model.lies = true;
        plan
    };
    let found = (0..100).filter(|seed| !run_plan(lies(*seed), false).wrongs.is_empty()).count();
    assert!(found > 10, "{found} of 100");
}

/// An engine that is written down and read back at any turns does the very same.
#[test]
fn snapshots_change_nothing() {
    for seed in 0..120 {
        let with = |restores| {
            let mut plan = match seed % 5 {
                0 => Plan::new(seed),
                1 => Plan::with_carrier(seed),
                2 => Plan::with_repairs(seed),
                3 => Plan::with_crowds(seed),
                _ => Plan::with_dialogues(seed),
            };
            plan.host_model.restores = restores;
            let report = run_plan(plan, false);
            (report.digest, report.ended_at, report.completions, report.wrongs)
        };
        let (never, often) = (with(0), with(300_000));
        assert_eq!(never, often, "seed {seed}");
    }
}
