//! Programs of one host among each other, beside what two cores can do with nobody between them.
//!
//! Each figure is the median of several runs, and so is its limit: the two alternate, so that what
//! disturbs one disturbs the other. Unmodified perftest programs where there is one for the figure,
//! the verbs harness elsewhere; both in containers of their own, as users start them, with memory
//! from `malloc` or `mmap`.
mod costs;
mod figures;
mod series;

pub use costs::{Costs, IdlePair, ObjectCost};
pub use series::{Run, Series, Value, Wanted, plots, table};

use crate::crowd::{Crowd, PairOfAgents};
use crate::host::{Freeflow, REPLY_MAX};
use crate::journal::Journal;
use crate::suite::{Pair, connect, ended};
use crate::verbs::flows::Flows;
use crate::verbs::mixed::Mix;
use crate::verbs::{Job, Memory, Operation, Outcome, Request, Traffic};
use crate::{limits, perftest};
use figures::Figure;
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs of each figure; the median counts.
    pub runs: usize,
    pub duration_ms: u64,
    pub limits: limits::Effort,
    /// Bytes that a limit copies in a run.
    pub copied_bytes: usize,
    /// Pairs of containers at once.
    pub pairs: usize,
    pub flows_ms: u64,
    /// Watching an idle pair.
    pub idle_s: f64,
    /// Objects of a kind, to see what one takes.
    pub objects: usize,
}

impl Effort {
    pub const FULL: Self = Self {
        runs: 5,
        duration_ms: 400,
        limits: limits::Effort { repetitions: 3, divisor: 2 },
        copied_bytes: 4 << 30,
        pairs: 128,
        flows_ms: 2000,
        idle_s: 5.0,
        objects: 500,
    };
    pub const QUICK: Self = Self {
        runs: 3,
        duration_ms: 150,
        limits: limits::Effort { repetitions: 1, divisor: 8 },
        copied_bytes: 1 << 30,
        pairs: 8,
        flows_ms: 800,
        idle_s: 2.0,
        objects: 100,
    };
}

/// A run of a perftest program does at least and at most so many.
const ITERATIONS_MIN: usize = 300;
const ITERATIONS_MAX: usize = 1_000_000;
/// `ib_write_lat` and others poll memory and never yield: through a router that shares their cores, few must do.
const ITERATIONS_FIRST: usize = 500;

/// One router, two containers, and what is measured with them.
struct Bench<'a> {
    host: &'a Freeflow,
    pair: Pair<'a>,
    effort: Effort,
    /// Of the server's container; unknown after it was made again.
    address: Option<String>,
    /// Iterations of a perftest program and size that fill the time.
    iterations: HashMap<(&'static str, usize), usize>,
    crowd: Option<Crowd>,
}

const COSTS_TABLE: &str = "idle pairs and memory";

/// Measures everything into `all` and `costs`, or the tables with `only` in their titles; the journal has what fails.
pub fn measure(
    freeflow: &Path,
    effort: Effort,
    only: &str,
    journal: &mut Journal,
    (all, costs): (&mut Vec<Series>, &mut Costs),
) -> Result<(), String> {
    let tables: Vec<_> = figures::TABLES.iter().filter(|(title, _)| title.contains(only)).collect();
    if !tables.is_empty() {
        let host = Freeflow::up(freeflow, "adaptive", false)?;
        let pair = Pair::new(&host)?;
        let mut bench = Bench { host: &host, pair, effort, address: None, iterations: HashMap::new(), crowd: None };
        for (title, figures) in tables {
            bench.table((journal, all), title, figures())?;
        }
    }
    if COSTS_TABLE.contains(only) {
        println!();
        journal.handoff("before").map_err(|error| error.to_string())?;
        match costs::measure(freeflow, effort) {
            Ok(measured) => *costs = measured,
            Err(error) => journal.fail(format!("direct, {COSTS_TABLE}: {error}")),
        }
        let tables = costs.tables();
        tables.into_iter().for_each(|table| journal.show(table));
        journal.handoff("after").map_err(|error| error.to_string())?;
    }
    Ok(())
}

impl Bench<'_> {
    /// One table, between two looks at the hand-off.
    fn table(
        &mut self,
        (journal, all): (&mut Journal, &mut Vec<Series>),
        title: &'static str,
        figures: Vec<Figure>,
    ) -> Result<(), String> {
        println!();
        journal.handoff("before").map_err(|error| error.to_string())?;
        let mut series: Vec<Series> = figures.iter().map(|figure| Series::new(title, figure.wanted.clone())).collect();
        for _ in 0..self.effort.runs {
            for (figure, series) in figures.iter().zip(&mut series) {
                self.sample(figure, series);
            }
        }
        self.crowd = None;
        journal.show(table(&format!("Within a host, direct: {title}"), &series));
        journal.handoff("after").map_err(|error| error.to_string())?;
        for one in &series {
            if let Some(failure) = &one.failure {
                journal.fail(format!("direct, {}: {failure}", one.wanted.what));
            }
        }
        all.extend(series);
        Ok(())
    }

    /// Another run of a figure, just after its limit. After a failure the pair is made again, and
    /// the figure not measured again.
    fn sample(&mut self, figure: &Figure, series: &mut Series) {
        if series.failure.is_some() {
            return;
        }
        let run = (figure.limit)(self).and_then(|limit| {
            let Value { value, p10, p99 } = (figure.value)(self)?;
            Ok(Run { value, limit, p10, p99 })
        });
        match run {
            Ok(run) => series.runs.push(run),
            Err(why) => {
                eprintln!("freeflow-bench: {}: {why}", figure.wanted.what);
                series.failure = Some(why);
                self.address = None;
                if let Err(error) = self.pair.renew() {
                    eprintln!("freeflow-bench: no new containers: {error}");
                }
            }
        }
    }

    /// The numbers that a perftest program prints. Its iterations are as many as fill the time, by
    /// what its last run showed.
    fn perftest(&mut self, program: &'static str, bytes: usize, more: &[&str]) -> Result<Vec<f64>, String> {
        if self.address.is_none() {
            self.address = Some(self.pair.server_address()?);
        }
        let address = self.address.clone().unwrap_or_default();
        let known = self.iterations.get(&(program, bytes)).copied();
        let iterations = known.unwrap_or(ITERATIONS_FIRST);
        let numbers = perftest::once(&mut self.pair, &address, program, (bytes, iterations), more)?;
        // #bytes #iterations t_min t_max t_typical t_avg ..., or: peak, average (Gb/s), million messages a second
        let a_second = match program.ends_with("_lat") {
            true => numbers.get(5).map(|average_us| 1e6 / (2.0 * average_us)),
            false => numbers.get(4).map(|millions| millions * 1e6),
        };
        let wanted = a_second.unwrap_or(0.0) * self.effort.duration_ms as f64 / 1e3;
        self.iterations.insert((program, bytes), (wanted as usize).clamp(ITERATIONS_MIN, ITERATIONS_MAX));
        if known.is_none() {
            // The first run only showed how many it takes.
            return self.perftest(program, bytes, more);
        }
        Ok(numbers)
    }

    /// The harness's stream, Gb/s.
    fn stream(&mut self, memory: Memory, operation: Operation, bytes: usize) -> Result<Value, String> {
        let slots = limits::relay_copy::slots(bytes);
        self.outcome(memory, Job { traffic: Traffic::Bandwidth, operation, bytes, slots, duration_ms: 0 })
    }

    /// The same of SENDs, whose receiver reads them.
    fn read_stream(&mut self, bytes: usize) -> Result<Value, String> {
        let (traffic, operation, slots) = (Traffic::BandwidthRead, Operation::Send, limits::relay_copy::slots(bytes));
        self.outcome(Memory::Ordinary, Job { traffic, operation, bytes, slots, duration_ms: 0 })
    }

    /// Of a job of this bench's duration.
    fn outcome(&mut self, memory: Memory, job: Job) -> Result<Value, String> {
        let job = Job { duration_ms: self.effort.duration_ms, ..job };
        let outcome = self.pair.outcome(memory, job)?;
        outcome.figures.map(Value::from).ok_or_else(|| "too few messages".to_owned())
    }

    /// Microseconds of a round trip of the harness.
    fn round_trip(&mut self, memory: Memory, operation: Operation, bytes: usize) -> Result<Value, String> {
        self.outcome(memory, Job { traffic: Traffic::Latency, operation, bytes, slots: 1, duration_ms: 0 })
    }

    /// A measurement while everything goes through the router.
    fn routed<T>(&mut self, measure: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        if let Err(error) = self.host.set_data_path("routed") {
            // Then there is no other path either.
            eprintln!("freeflow-bench: everything goes through the router as it is: {error}");
        }
        let outcome = measure(self);
        let _ = self.host.set_data_path("auto");
        outcome
    }

    /// Millions of messages a second of two kinds by turns.
    fn mix(&mut self, mix: Mix) -> Result<Value, String> {
        let mix = Mix { duration_ms: self.effort.duration_ms, ..mix };
        let Pair { runner, server, .. } = &mut self.pair;
        connect(runner, server, &Request::PrepareMix { mix })?;
        server.ask(&Request::ServeMix)?;
        runner.send(&Request::RunMix { mix })?;
        let within = REPLY_MAX + Duration::from_millis(mix.duration_ms);
        let outcome: Outcome = ended(runner.receive(within)?)?;
        ended(server.receive(within)?)?;
        self.pair.release()?;
        outcome.figures.map(Value::from).ok_or_else(|| "too few messages".to_owned())
    }

    /// The pairs that stream all at once; made at first use.
    fn crowd(&mut self, flows: Flows) -> Result<&mut Crowd, String> {
        if self.crowd.is_none() {
            let host = self.host;
            self.crowd = Some(Crowd::new(self.effort.pairs, flows, |number| {
                let runner = host.starting_agent(&format!("crowd-runner-{number}"), &[])?;
                let server = host.starting_agent(&format!("crowd-server-{number}"), &[])?;
                Ok(PairOfAgents { runner, server })
            })?);
        }
        self.crowd.as_mut().ok_or_else(|| "no pairs".to_owned())
    }
}
