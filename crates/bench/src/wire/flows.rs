//! Hundreds of flows at once: many pairs of containers, one on each host, with a few connections each.
use super::{Bench, Key, Sample};
use crate::host::{Agent, REPLY_MAX};
use crate::lab::Lab;
use crate::stats::Summary;
use crate::sys;
use crate::verbs::flows::{Flowed, Flows, Run, jain};
use crate::verbs::{Address, Operation, Reply, Request};
use std::time::Duration;

pub const FLOWS_A_PAIR: usize = 8;
const FLOWS: Flows = Flows { count: FLOWS_A_PAIR, bytes: 64 << 10, batch: 4 };
/// Containers that start at the same time.
const STARTING_MAX: usize = 16;
/// Time for all programs to hear when they begin.
const HEAD_START_NS: u64 = 500_000_000;
/// Sizes of a flow alone; the best counts.
const ALONE_BYTES: [usize; 2] = [64 << 10, 1 << 20];

struct PairOfAgents {
    runner: Agent,
    server: Agent,
}

pub fn measure(bench: &mut Bench<'_>) -> Result<(), String> {
    let mut pairs = start(bench.lab, bench.effort.pairs)?;
    bench.lab.favour()?;
    let runs = bench.effort.runs;
    let count = pairs.len() * FLOWS_A_PAIR;
    eprintln!("freeflow-bench: {count} flows between {} containers", 2 * pairs.len());
    let mut done = Ok(());
    for _ in 0..runs {
        bench.sample(Key::SingleFlow, 0, |bench| {
            let mut best: Option<Sample> = None;
            for bytes in ALONE_BYTES {
                let sample = bench.stream(Operation::Write, bytes)?;
                if best.is_none_or(|best| sample.figures.p50 > best.figures.p50) {
                    best = Some(sample);
                }
            }
            best.ok_or_else(|| "nothing measured".to_owned())
        });
        done = together(&mut pairs, bench.effort.flows_ms).map(|flowed| note(bench, &flowed));
        if done.is_err() {
            break;
        }
    }
    // All end at the same time; each would be waited for otherwise.
    for pair in &mut pairs {
        pair.runner.dismiss();
        pair.server.dismiss();
    }
    done
}

/// Containers on both hosts, their connections made.
fn start(lab: &Lab, count: usize) -> Result<Vec<PairOfAgents>, String> {
    let mut pairs = Vec::with_capacity(count);
    while pairs.len() < count {
        let from = pairs.len();
        for number in from..count.min(from + STARTING_MAX / 2) {
            let runner = lab.agent(1, &format!("flows-runner-{number}"))?;
            let server = lab.agent(2, &format!("flows-server-{number}"))?;
            pairs.push(PairOfAgents { runner, server });
        }
        for pair in &mut pairs[from..] {
            connect(pair)?;
        }
    }
    Ok(pairs)
}

fn connect(pair: &mut PairOfAgents) -> Result<(), String> {
    let prepare = |agent: &mut Agent| -> Result<Vec<Address>, String> {
        agent.ask(&Request::Hello)?;
        match agent.ask(&Request::PrepareFlows { flows: FLOWS })? {
            Reply::FlowsPrepared(addresses) => Ok(addresses),
            other => Err(format!("unexpected: {other:?}")),
        }
    };
    let runners = prepare(&mut pair.runner)?;
    let servers = prepare(&mut pair.server)?;
    pair.server.ask(&Request::ConnectFlows { peers: runners })?;
    pair.runner.ask(&Request::ConnectFlows { peers: servers })?;
    Ok(())
}

/// One run of all of them.
fn together(pairs: &mut [PairOfAgents], duration_ms: u64) -> Result<Vec<Flowed>, String> {
    let run = Run { begin_ns: sys::monotonic_ns() + HEAD_START_NS, duration_ms };
    for pair in pairs.iter_mut() {
        pair.runner.send(&Request::RunFlows { run })?;
    }
    let within = 2 * REPLY_MAX + Duration::from_millis(duration_ms);
    let receive = |pair: &mut PairOfAgents| match pair.runner.receive(within)? {
        Reply::Flowed(flowed) => Ok(flowed),
        other => Err(format!("unexpected: {other:?}")),
    };
    pairs.iter_mut().map(receive).collect()
}

fn note(bench: &mut Bench<'_>, flowed: &[Flowed]) {
    let gbit_per_s = |flowed: &Flowed| {
        let ns = flowed.counted_ns as f64;
        flowed.bytes.iter().map(|&bytes| bytes as f64 * 8.0 / ns).collect::<Vec<_>>()
    };
    let mut shares: Vec<f64> = flowed.iter().flat_map(gbit_per_s).collect();
    let total: f64 = shares.iter().sum();
    let fairness = jain(&shares);
    bench.sample(Key::AllFlows, 0, |_| Sample::of(total, None));
    bench.sample(Key::Fairness, 0, |_| Sample::of(fairness.ok_or("nothing arrived")?, None));
    let each = Summary::of(&mut shares);
    bench.sample(Key::EachFlow, FLOWS.bytes, |_| Ok(Sample { figures: each.ok_or("no flows")?, cost: None }));
}
