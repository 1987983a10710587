//! Runs seeds: `freeflow-sim [--seed N] [--count N] [--carrier] [--dialogues] [--repairs] [--crowds]
//! [--shards] [--trace]`,
//! `freeflow-sim --goodput`.
#![forbid(unsafe_code)]
use freeflow_sim::{failure, goodput, plan::Plan, run_plan};
use std::process::ExitCode;

const USAGE: &str = "usage: freeflow-sim [--seed N] [--count N] [--carrier | --dialogues | --repairs | --crowds | --shards] [--trace] [--plan] \
     | --goodput";

#[derive(Default)]
struct Asked {
    seed: u64,
    count: u64,
    carrier: bool,
    dialogues: bool,
    repairs: bool,
    crowds: bool,
    shards: bool,
    traces: bool,
    plan: bool,
    goodput: bool,
}

fn main() -> ExitCode {
    let Some(asked) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if asked.goodput {
        print!("{}", goodput::table());
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    let (mut completions, mut packets) = (0, 0);
    let (mut between, mut strays, mut lost, mut relayed, mut refused) = (0, 0, 0, 0, 0);
    for seed in asked.seed..asked.seed + asked.count {
        let plan = match asked {
            Asked { carrier: true, .. } => Plan::with_carrier(seed),
            Asked { dialogues: true, .. } => Plan::with_dialogues(seed),
            Asked { repairs: true, .. } => Plan::with_repairs(seed),
            Asked { shards: true, .. } => Plan::with_shards(seed),
            Asked { crowds: true, .. } => Plan::with_crowds(seed),
            _ => Plan::new(seed),
        };
        if asked.plan {
            println!("{plan:#?}");
        }
        let report = run_plan(plan, asked.traces);
        for line in &report.trace {
            println!("{line}");
        }
        completions += report.completions;
        packets += report.packets;
        between += report.shards.packets;
        strays += report.shards.strays;
        lost += report.shards.strays_lost;
        relayed += report.shards.relayed;
        refused += report.refused;
        if !report.wrongs.is_empty() {
            failed += 1;
            println!("{}", failure(&report));
        }
    }
    println!("{} seeds, {failed} failed, {completions} completions, {packets} packets", asked.count);
    if asked.shards {
        println!(
            "{between} packets between shards, {refused} times no room; {strays} strays, {lost} lost, {relayed} relayed"
        );
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Asked> {
    let mut asked = Asked { count: 1, ..Asked::default() };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seed" => asked.seed = arguments.next()?.parse().ok()?,
            "--count" => asked.count = arguments.next()?.parse().ok()?,
            "--carrier" => asked.carrier = true,
            "--dialogues" => asked.dialogues = true,
            "--repairs" => asked.repairs = true,
            "--crowds" => asked.crowds = true,
            "--shards" => asked.shards = true,
            "--trace" => asked.traces = true,
            "--plan" => asked.plan = true,
            "--goodput" => asked.goodput = true,
            _ => return None,
        }
    }
    Some(asked)
}
