//! Routers with one worker and with two, and two threads that post at once: WRITEs of two pairs of
//! containers, all routed.
//!
//! Not an expectation below [`CORES_MIN`] cores: two posting threads, the router's own and two
//! workers want five of them.
use crate::expectation::Expectation;
use crate::host::{Freeflow, REPLY_MAX};
use crate::journal::Journal;
use crate::limits::relay_copy;
use crate::stats::median;
use crate::suite::{Pair, ended};
use crate::svg::{Plot, Row};
use crate::sys;
use crate::table::{Table, bytes, figure};
use crate::verbs::{Job, Memory, Operation, Request, Traffic};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

const WORKERS: [u32; 2] = [1, 2];
const PAIRS: u32 = 2;
const SIZES: [usize; 2] = [64 << 10, 1 << 20];
const CORES_MIN: usize = 8;
/// Rate of two workers on [`CORES_MIN`] cores, times that of one.
const RATIO_MIN: f64 = 1.7;

/// One size of message.
#[derive(Clone, Debug, Serialize)]
pub struct Scaling {
    pub bytes: usize,
    /// At hand: of this process.
    pub cores: usize,
    /// Gb/s of both pairs together in each run, by a router with one worker and by one with two.
    pub one: Vec<f64>,
    pub two: Vec<f64>,
    pub failure: Option<String>,
}

impl Scaling {
    /// The median over the runs, each beside the one just before it.
    pub fn ratio(&self) -> Option<f64> {
        let ratios: Vec<f64> = self.one.iter().zip(&self.two).map(|(one, two)| two / one).collect();
        median(&ratios).filter(|_| self.failure.is_none())
    }

    pub fn expectation(&self) -> Option<Expectation> {
        Some(Expectation {
            what: format!("two workers, two pairs, {} WRITE stream, times one worker", bytes(self.bytes)),
            value: self.ratio()?,
            at_least: (self.cores >= CORES_MIN).then_some(RATIO_MIN),
            at_most: None,
            aim: None,
        })
        .filter(|expectation| expectation.at_least.is_some())
    }
}

/// A router and the pairs on it, in that order of need: the pairs go first.
struct Side<'a> {
    pairs: Vec<Pair<'a>>,
}

impl<'a> Side<'a> {
    fn new(host: &'a Freeflow) -> Result<Self, String> {
        host.set_data_path("routed")?;
        let pairs = (1..=PAIRS).map(|number| Pair::numbered(host, number)).collect::<Result<_, _>>()?;
        Ok(Self { pairs })
    }

    /// Gb/s of all pairs at once.
    fn run(&mut self, job: Job) -> Result<f64, String> {
        for pair in &mut self.pairs {
            pair.connect(Memory::Ordinary, job)?;
        }
        for pair in &mut self.pairs {
            pair.runner.send(&Request::Run { job })?;
        }
        let within = REPLY_MAX + Duration::from_millis(job.duration_ms);
        let mut sum = 0.0;
        for pair in &mut self.pairs {
            let outcome = ended(pair.runner.receive(within)?)?;
            sum += outcome.figures.ok_or("too few messages")?.p50;
        }
        self.pairs.iter_mut().try_for_each(Pair::release)?;
        Ok(sum)
    }
}

/// Both routers are up all the time, and take turns.
pub fn measure(
    freeflow: &Path,
    (runs, duration_ms): (usize, u64),
    journal: &mut Journal,
    all: &mut Vec<Scaling>,
) -> Result<(), String> {
    let up = |count: u32| Freeflow::up_with(freeflow, "adaptive", &["--workers", &count.to_string()]);
    let hosts: Vec<Freeflow> = WORKERS.iter().map(|&count| up(count)).collect::<Result<_, _>>()?;
    let mut sides: Vec<Side<'_>> = hosts.iter().map(Side::new).collect::<Result<_, _>>()?;
    println!();
    journal.handoff("before").map_err(|error| error.to_string())?;
    for size in SIZES {
        let mut scaling =
            Scaling { bytes: size, cores: sys::cpus().len(), one: Vec::new(), two: Vec::new(), failure: None };
        let slots = relay_copy::slots(size);
        let job = Job { traffic: Traffic::Bandwidth, operation: Operation::Write, bytes: size, slots, duration_ms };
        for _ in 0..runs {
            let figures = sides.iter_mut().map(|side| side.run(job)).collect::<Result<Vec<_>, _>>();
            match figures.as_deref() {
                Ok(&[one, two]) => {
                    scaling.one.push(one);
                    scaling.two.push(two);
                }
                Ok(_) => unreachable!("two sides"),
                Err(error) => {
                    scaling.failure = Some(error.clone());
                    break;
                }
            }
        }
        let failure = scaling.failure.clone();
        all.push(scaling);
        if let Some(failure) = failure {
            // An end that failed leaves the other waiting.
            return Err(failure);
        }
    }
    let table = table(all);
    journal.show(table);
    journal.handoff("after").map_err(|error| error.to_string())?;
    Ok(())
}

pub fn plot(list: &[Scaling]) -> Option<Plot> {
    let row = |one: &Scaling| {
        let ends = |pick: fn(f64, f64) -> f64| one.one.iter().zip(&one.two).map(|(one, two)| two / one).reduce(pick);
        let label = format!("WRITE {}", bytes(one.bytes));
        let (least, most) = (ends(f64::min), ends(f64::max));
        Row { group: label.clone(), label, value: one.ratio(), least, most, floor: None, aim: None }
    };
    let rows: Vec<Row> = list.iter().map(row).collect();
    let axis = "two workers, times one: more is better".to_owned();
    (!rows.is_empty()).then(|| Plot { title: "Workers".to_owned(), axis, rows })
}

fn table(list: &[Scaling]) -> Table {
    let cores = list.first().map_or(0, |one| one.cores);
    let few = if cores < CORES_MIN {
        format!(": too few for the ratio to mean anything, which wants {CORES_MIN}")
    } else {
        String::new()
    };
    let title = format!("Workers: routed WRITE streams of two pairs, {cores} cores at hand{few}");
    let mut table = Table::new(&title, &["size", "one worker", "two workers", "unit", "ratio"]);
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure);
    for one in list {
        table.row(vec![
            bytes(one.bytes),
            or_dash(median(&one.one)),
            or_dash(median(&one.two)),
            "Gb/s".to_owned(),
            or_dash(one.ratio()),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_expected_only_where_there_are_cores() {
        let on = |cores| Scaling {
            bytes: 65536,
            cores,
            one: vec![10.0, 20.0, 10.0],
            two: vec![18.0, 30.0, 17.0],
            failure: None,
        };
        assert_eq!((on(2).ratio(), on(2).expectation()), (Some(1.7), None));
        assert!(on(8).expectation().is_some_and(|expectation| expectation.met()));
        assert_eq!(Scaling { failure: Some("it broke".into()), ..on(8) }.expectation(), None);
    }
}
