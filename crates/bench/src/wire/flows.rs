//! Hundreds of flows at once: many pairs of containers, one on each host, with a few connections each.
use super::{Bench, Key, Sample};
use crate::crowd::{Crowd, PairOfAgents, gbit_per_s};
use crate::stats::Summary;
use crate::verbs::Operation;
use crate::verbs::flows::{Flowed, Flows, jain};

pub const FLOWS_A_PAIR: usize = 8;
const FLOWS: Flows = Flows { count: FLOWS_A_PAIR, bytes: 64 << 10, batch: 4 };
/// Sizes of a flow alone; the best counts.
const ALONE_BYTES: [usize; 2] = [64 << 10, 1 << 20];

pub fn measure(bench: &mut Bench<'_>) -> Result<(), String> {
    let lab = bench.lab;
    let mut crowd = Crowd::new(bench.effort.pairs, FLOWS, |number| {
        let runner = lab.agent(1, &format!("flows-runner-{number}"))?;
        let server = lab.agent(2, &format!("flows-server-{number}"))?;
        Ok(PairOfAgents { runner, server })
    })?;
    lab.favour()?;
    eprintln!("freeflow-bench: {} flows between {} containers", crowd.len() * FLOWS_A_PAIR, 2 * crowd.len());
    for _ in 0..bench.effort.runs {
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
        let flowed = crowd.run(bench.effort.flows_ms)?;
        note(bench, &flowed);
    }
    Ok(())
}

fn note(bench: &mut Bench<'_>, flowed: &[Flowed]) {
    let mut shares = gbit_per_s(flowed);
    let total: f64 = shares.iter().sum();
    let fairness = jain(&shares);
    bench.sample(Key::AllFlows, 0, |_| Sample::of(total, None));
    bench.sample(Key::Fairness, 0, |_| Sample::of(fairness.ok_or("nothing arrived")?, None));
    let each = Summary::of(&mut shares);
    bench.sample(Key::EachFlow, FLOWS.bytes, |_| Ok(Sample { figures: each.ok_or("no flows")?, cost: None }));
}
