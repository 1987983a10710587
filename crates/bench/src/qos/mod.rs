//! Declared rates, priorities and weights, beside the rates that unmodified perftest programs
//! between containers of one host get.
mod flow;
mod force;
mod series;

pub use series::{Run, Series, Wanted, plots, table};

use crate::host::Freeflow;
use crate::journal::Journal;
use crate::sys;
use flow::{Class, Flow};
use serde_json::Value;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Time for servers to listen, and times that a run is tried when one was not quick enough.
const LISTEN: Duration = Duration::from_millis(500);
const ATTEMPTS_MAX: usize = 3;
/// Seconds that perftest leaves out at both ends of a run: the buckets' bursts, and flows that
/// begin one after the other.
const MARGIN_S: u64 = 1;
/// Beside its own duration, a program may take so long.
const SLACK_MS: u64 = 15_000;

const CAPS_MBIT: [u32; 5] = [100, 1000, 5000, 10_000, 20_000];
const CAP_TOLERANCE: f64 = 0.01;
const FLOWS: usize = 10;
/// One share of ten flows.
const SHARE_MBIT: u32 = 100;
const SHARE_BYTES: usize = 32 << 10;
const SHARE_TOLERANCE: f64 = 0.02;
const COST_MBIT: [u32; 2] = [1000, 10_000];
const COST_BYTES: usize = 64 << 10;
/// Share of a core.
const COST_MAX: f64 = 0.06;
const WEIGHTS: [u16; 3] = [1, 2, 4];
const WEIGHT_TOLERANCE: f64 = 0.03;
/// So much is under way that a flow's program may be off its core for a while.
const BULK_BYTES: usize = 1 << 20;
/// More messages than go in any run.
const ENDLESS: u64 = 50_000_000;
const PING_BYTES: usize = 64;
const PING_P50_MAX: f64 = 3.0;
const PING_P99_MAX: f64 = 2.0;
/// With fewer, four programs and a router take turns, and the operating system's time slices are the 99th percentile.
const PING_P99_CORES_MIN: usize = 8;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs of each figure; the median counts.
    pub runs: usize,
    /// Of a capped flow.
    pub cap_s: u64,
    /// Of everything else.
    pub other_s: u64,
    pub pings: usize,
}

impl Effort {
    pub const FULL: Self = Self { runs: 5, cap_s: 10, other_s: 4, pings: 10_000 };
    pub const QUICK: Self = Self { runs: 3, cap_s: 2, other_s: 2, pings: 3000 };
}

/// A table: a router in this mode, so many flows, and a run that gives a figure for everything that is wanted.
struct Part {
    title: &'static str,
    mode: &'static str,
    flows: usize,
    wanted: fn() -> Vec<Wanted>,
    run: fn(&mut Bench<'_>) -> Result<Vec<Run>, String>,
}

const PARTS: [Part; 6] = [
    Part { title: "caps", mode: "adaptive", flows: 1, wanted: caps_wanted, run: |bench| bench.caps() },
    Part { title: "ten flows", mode: "adaptive", flows: FLOWS, wanted: shares_wanted, run: |bench| bench.shares() },
    Part { title: "limiter's cost", mode: "lowcpu", flows: 1, wanted: costs_wanted, run: |bench| bench.costs() },
    Part {
        title: "weights",
        mode: "adaptive",
        flows: WEIGHTS.len(),
        wanted: weights_wanted,
        run: |bench| bench.weights(),
    },
    Part { title: "priority", mode: "adaptive", flows: 2, wanted: pings_wanted, run: |bench| bench.pings() },
    Part { title: "in force", mode: "adaptive", flows: 1, wanted: force::wanted, run: |bench| bench.changes() },
];

fn bytes_in(mbit: u32, seconds: u64) -> u64 {
    u64::from(mbit) * 125_000 * seconds
}

fn rate(mbit: u32) -> String {
    if mbit >= 1000 { format!("{} Gbit/s", mbit / 1000) } else { format!("{mbit} Mbit/s") }
}

fn caps_wanted() -> Vec<Wanted> {
    let one = |&mbit: &u32| Wanted::within(format!("one flow, {}", rate(mbit)), "its cap", CAP_TOLERANCE);
    CAPS_MBIT.iter().map(one).collect()
}

fn shares_wanted() -> Vec<Wanted> {
    let one = |share| Wanted::within(format!("ten flows, share {share}"), "its cap", SHARE_TOLERANCE);
    (1..=FLOWS).map(one).collect()
}

fn costs_wanted() -> Vec<Wanted> {
    let one = |&mbit: &u32| {
        let wanted = |what: &str, at_most| Wanted {
            what: format!("{}, {what}", rate(mbit)),
            limit: "a core",
            unit: "cores",
            at_least: None,
            at_most,
        };
        [wanted("worker, capped", None), wanted("worker, uncapped", None), wanted("limiter's cost", Some(COST_MAX))]
    };
    COST_MBIT.iter().flat_map(one).collect()
}

fn weights_wanted() -> Vec<Wanted> {
    let one = |weight| Wanted::within(format!("weights 1:2:4, weight {weight}"), "its share", WEIGHT_TOLERANCE);
    WEIGHTS.iter().map(one).collect()
}

fn pings_wanted() -> Vec<Wanted> {
    let enough = sys::cpus().len() >= PING_P99_CORES_MIN;
    let bounds = [("p50", Some(PING_P50_MAX)), ("p99", enough.then_some(PING_P99_MAX))];
    let one = |(which, at_most)| Wanted {
        what: format!("64 B ping-pong beside a bulk flow, {which}"),
        limit: "unloaded",
        unit: "us",
        at_least: None,
        at_most,
    };
    bounds.into_iter().map(one).collect()
}

/// One router, and containers in networks of their own.
struct Bench<'a> {
    host: &'a Freeflow,
    flows: Vec<Flow>,
    effort: Effort,
}

/// Measures everything into `all`, or the tables with `only` in their titles; the journal has what fails.
pub fn measure(
    freeflow: &Path,
    effort: Effort,
    only: &str,
    journal: &mut Journal,
    all: &mut Vec<Series>,
) -> Result<(), String> {
    for part in PARTS.iter().filter(|part| part.title.contains(only)) {
        println!();
        journal.handoff("before").map_err(|error| error.to_string())?;
        let series = part.measure(freeflow, effort);
        journal.show(table(&format!("In control: {}", part.title), &series));
        journal.handoff("after").map_err(|error| error.to_string())?;
        if let Some(why) = series.iter().find_map(|one| one.failure.as_ref()) {
            journal.fail(format!("qos, {}: {why}", part.title));
        }
        all.extend(series);
    }
    Ok(())
}

impl Part {
    fn measure(&self, freeflow: &Path, effort: Effort) -> Vec<Series> {
        let mut series: Vec<Series> =
            (self.wanted)().into_iter().map(|wanted| Series::new(self.title, wanted)).collect();
        if let Err(why) = self.measure_into(freeflow, effort, &mut series) {
            series.iter_mut().for_each(|one| one.failure = Some(why.clone()));
        }
        series
    }

    fn measure_into(&self, freeflow: &Path, effort: Effort, series: &mut [Series]) -> Result<(), String> {
        let host = Freeflow::up(freeflow, self.mode, false)?;
        declare(&host, &vec![Class::UNCAPPED; self.flows], "auto")?;
        let flows = (1..=self.flows).map(|number| Flow::new(&host, number)).collect::<Result<_, _>>()?;
        let mut bench = Bench { host: &host, flows, effort };
        for _ in 0..effort.runs {
            for (one, run) in series.iter_mut().zip((self.run)(&mut bench)?) {
                one.runs.push(run);
            }
        }
        bench.flows.iter_mut().for_each(Flow::dismiss);
        Ok(())
    }
}

/// A class and a network for each flow.
fn declare(host: &Freeflow, classes: &[Class], data_path: &str) -> Result<(), String> {
    let one = |(index, class): (usize, &Class)| class.declaration(index + 1, data_path);
    host.apply(&classes.iter().enumerate().map(one).collect::<String>())
}

/// perftest's rate, Gb/s: of its table (`#bytes #iterations peak average MsgRate[Mpps]`) the last has the most digits.
fn gigabits(numbers: &[f64]) -> Result<f64, String> {
    match numbers {
        &[bytes, _, _, _, mega_a_second, ..] => Ok(bytes * 8.0 * mega_a_second / 1e3),
        _ => Err("too few numbers".to_owned()),
    }
}

/// Small enough that perftest's rate of messages has the digits, and so large that a queue of
/// perftest's 128 lasts while its program is off its core.
fn message_bytes(mbit: u32) -> usize {
    match mbit {
        ..=100 => 4 << 10,
        101..=1000 => 16 << 10,
        1001..=5000 => 64 << 10,
        _ => 256 << 10,
    }
}

fn stream(program: &[&str], bytes: usize, length: &[String]) -> Vec<String> {
    let size = bytes.to_string();
    let fixed = ["-F", "-N", "-Q", "1", "--report_gbits", "-s", &size];
    program.iter().copied().chain(fixed).chain(length.iter().map(String::as_str)).map(str::to_owned).collect()
}

fn iterations(count: u64) -> Vec<String> {
    vec!["-n".to_owned(), count.to_string()]
}

/// Polls for completions, for a duration. perftest does not wait for events here, nor with a duration.
const POLLING: &[&str] = &["ib_write_bw"];
/// Sleeps until there are completions: on few cores, many programs that poll would take the time
/// from the router that feeds them.
const SLEEPING: &[&str] = &["ib_send_bw", "-e"];

impl Bench<'_> {
    /// All flows at once, each with its size and for so long or so many; Gb/s of each.
    fn streams(&mut self, program: &[&str], each: &[(usize, Vec<String>)], within_ms: u64) -> Result<Vec<f64>, String> {
        self.attempts(|bench| {
            let argv: Vec<Vec<String>> = each.iter().map(|(bytes, length)| stream(program, *bytes, length)).collect();
            for (flow, argv) in bench.flows.iter_mut().zip(&argv) {
                flow.listen(argv)?;
            }
            thread::sleep(LISTEN);
            for (flow, argv) in bench.flows.iter_mut().zip(&argv) {
                flow.begin(argv)?;
            }
            for flow in &mut bench.flows {
                flow.await_end(within_ms)?;
            }
            // All of them, so that none is left running.
            let ends: Vec<_> = bench.flows.iter_mut().map(|flow| flow.end(within_ms)).collect();
            ends.into_iter().map(|numbers| gigabits(&numbers?)).collect()
        })
    }

    fn attempts<T>(&mut self, mut once: impl FnMut(&mut Self) -> Result<T, String>) -> Result<T, String> {
        for _ in 1..ATTEMPTS_MAX {
            match once(self) {
                Err(why) if why.contains("connect") => eprintln!("freeflow-bench: again: {why}"),
                result => return result,
            }
        }
        once(self)
    }

    /// The same for `seconds`, without the margins.
    fn streams_for(&mut self, bytes: usize, seconds: u64) -> Result<Vec<f64>, String> {
        let whole = seconds + 2 * MARGIN_S;
        let length = ["-D", &whole.to_string(), "-f", &MARGIN_S.to_string()].map(str::to_owned).to_vec();
        let each = vec![(bytes, length); self.flows.len()];
        self.streams(POLLING, &each, whole * 1000 + SLACK_MS)
    }

    fn caps(&mut self) -> Result<Vec<Run>, String> {
        let one = |&mbit: &u32| {
            declare(self.host, &[Class::capped(mbit)], "auto")?;
            let value = self.streams_for(message_bytes(mbit), self.effort.cap_s)?[0];
            Ok(Run { value, limit: f64::from(mbit) / 1e3 })
        };
        CAPS_MBIT.iter().map(one).collect()
    }

    fn shares(&mut self) -> Result<Vec<Run>, String> {
        let caps: Vec<u32> = (1..).map(|share| share * SHARE_MBIT).take(FLOWS).collect();
        declare(self.host, &caps.iter().map(|&cap| Class::capped(cap)).collect::<Vec<_>>(), "auto")?;
        let values = self.streams_for(SHARE_BYTES, self.effort.other_s)?;
        Ok(values.iter().zip(caps).map(|(&value, cap)| Run { value, limit: f64::from(cap) / 1e3 }).collect())
    }

    fn changes(&mut self) -> Result<Vec<Run>, String> {
        force::changes(self.host, &mut self.flows[0])
    }

    fn worker_cpu_s(&self) -> Result<f64, String> {
        let us = self.host.status()?.get("worker_cpu_us").and_then(Value::as_u64).ok_or("no worker_cpu_us")?;
        Ok(us as f64 / 1e6)
    }

    /// The worker's CPU seconds for the same bytes without a cap and with one, both by the time
    /// that the capped ones take.
    fn costs(&mut self) -> Result<Vec<Run>, String> {
        let mut runs = Vec::new();
        for mbit in COST_MBIT {
            let count = bytes_in(mbit, self.effort.other_s) / COST_BYTES as u64;
            let seconds = (count * COST_BYTES as u64) as f64 / (f64::from(mbit) * 125_000.0);
            let mut spent = |class: Class| {
                declare(self.host, &[class], "routed")?;
                let before = self.worker_cpu_s()?;
                self.streams(POLLING, &[(COST_BYTES, iterations(count))], self.effort.other_s * 1000 + SLACK_MS)?;
                Ok::<_, String>((self.worker_cpu_s()? - before) / seconds)
            };
            let (uncapped, capped) = (spent(Class::UNCAPPED)?, spent(Class::capped(mbit))?);
            runs.extend([capped, uncapped, capped - uncapped].map(|value| Run { value, limit: 1.0 }));
        }
        Ok(runs)
    }

    fn weights(&mut self) -> Result<Vec<Run>, String> {
        let class = |weight| Class { weight, ..Class::UNCAPPED };
        declare(self.host, &WEIGHTS.map(class), "routed")?;
        let values = self.streams_for(BULK_BYTES, self.effort.other_s)?;
        let share = values.iter().sum::<f64>() / f64::from(WEIGHTS.iter().sum::<u16>());
        let one = |(&value, weight): (&f64, u16)| Run { value, limit: share * f64::from(weight) };
        Ok(values.iter().zip(WEIGHTS).map(one).collect())
    }

    /// `ib_send_lat` of the first flow, of high priority, alone and then while the second one saturates the router.
    fn pings(&mut self) -> Result<Vec<Run>, String> {
        let class = |priority| Class { priority, ..Class::UNCAPPED };
        declare(self.host, &[class(7), class(0)], "routed")?;
        let alone = self.attempts(Self::ping)?;
        let beside = self.attempts(Self::beside_bulk)?;
        // #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%
        let run = |index: usize| Some(Run { value: *beside.get(index)?, limit: *alone.get(index)? });
        [4, 7].into_iter().map(|index| run(index).ok_or_else(|| "too few numbers".to_owned())).collect()
    }

    fn ping(&mut self) -> Result<Vec<f64>, String> {
        let (bytes, count) = (PING_BYTES.to_string(), self.effort.pings.to_string());
        let argv = ["ib_send_lat", "-F", "-e", "-s", &bytes, "-n", &count].map(str::to_owned);
        let flow = &mut self.flows[0];
        flow.listen(&argv)?;
        thread::sleep(LISTEN);
        flow.begin(&argv)?;
        flow.await_end(SLACK_MS)?;
        flow.end(SLACK_MS)
    }

    fn beside_bulk(&mut self) -> Result<Vec<f64>, String> {
        let argv = stream(SLEEPING, BULK_BYTES, &iterations(ENDLESS));
        self.flows[1].listen(&argv)?;
        thread::sleep(LISTEN);
        self.flows[1].begin(&argv)?;
        thread::sleep(Duration::from_secs(MARGIN_S));
        let ping = self.ping();
        if self.flows[1].stop()? {
            return ping;
        }
        Err("the bulk flow ended before the ping-pong".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perftest_s_rate_is_taken_where_it_has_digits() {
        let rate = gigabits(&[4096.0, 30_500.0, 0.0, 0.1, 0.003052]).expect("numbers");
        assert!((rate - 0.100_008).abs() < 1e-6);
        assert!(gigabits(&[1.0, 2.0]).is_err());
    }

    #[test]
    fn digits_suffice_for_what_is_wanted() {
        let caps = CAPS_MBIT.map(|mbit| (mbit, message_bytes(mbit), CAP_TOLERANCE));
        for (mbit, bytes, tolerance) in caps.into_iter().chain([(SHARE_MBIT, SHARE_BYTES, SHARE_TOLERANCE)]) {
            let mega_a_second = f64::from(mbit) / 8.0 / bytes as f64;
            assert!(0.5e-6 / mega_a_second < tolerance / 10.0, "{mbit}");
        }
    }

    #[test]
    fn every_part_wants_something() {
        assert!(PARTS.iter().all(|part| !(part.wanted)().is_empty() && part.flows >= 1));
    }
}
