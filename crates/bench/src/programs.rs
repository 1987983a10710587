//! Unmodified programs that receive by an SRQ and choose their own memory: `ucx_perftest` between two
//! containers, beside what it gets of its own shared memory (both ends in one container), of its own
//! TCP between the same containers, and beside a hand-off, in the same run. Between the two hosts of a lab
//! beside its own TCP.
use crate::cm::{Bound, Run, Series, Wanted, table};
use crate::host::{Agent, Freeflow, REPLY_MAX};
use crate::journal::Journal;
use crate::lab::Lab;
use crate::perftest::tail;
use crate::suite::{Pair, address_of};
use crate::verbs::{Reply, Request};
use std::path::Path;
use std::time::Duration;

pub const TITLE: &str = "UCX between two containers";
const TITLE_OF_HOSTS: &str = "UCX between two containers of two hosts";
/// Of the lab's links, as in the part `cm`.
const MTU: u32 = 4200;
const RUN_MS_MAX: u64 = 30_000;
/// Time for the server to listen.
const LISTEN: &str = "0.4";

/// A transport, as UCX names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    /// Those that UCX chooses.
    Default,
    Verbs,
    Tcp,
    /// Both ends in one container.
    SharedMemory,
}

impl Transport {
    fn setting(self) -> &'static str {
        match self {
            Self::Default => "UCX_TLS=all",
            Self::Verbs => "UCX_TLS=rc_v,self",
            Self::Tcp => "UCX_TLS=tcp,self",
            Self::SharedMemory => "UCX_TLS=sm,self",
        }
    }
}

/// A figure that stands beside another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Transport(Transport),
    /// A hand-off: of a rate, one message for each.
    Handoff,
}

impl Beside {
    fn name(self) -> &'static str {
        match self {
            Self::Transport(Transport::Tcp) => "its own TCP",
            Self::Transport(_) => "its own shared memory",
            Self::Handoff => "a hand-off",
        }
    }
}

/// A test of `ucx_perftest`.
#[derive(Clone, Copy, Debug)]
struct Test {
    name: &'static str,
    bytes: usize,
    count: usize,
}

impl Test {
    fn is_latency(&self) -> bool {
        self.name.ends_with("_lat")
    }

    fn unit(&self) -> &'static str {
        match self.bytes {
            _ if self.is_latency() => "us",
            0..=4096 => "M/s",
            _ => "MB/s",
        }
    }

    /// The figure, of the program's last line: count; in us the median, the average and that over
    /// all; in MB/s two; in messages a second two.
    fn figure(&self, text: &str) -> Option<f64> {
        let line = |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>();
        let numbers = text.lines().rev().filter_map(line).find(|numbers| numbers.len() == 8)?;
        Some(match self.unit() {
            "us" => numbers[1],
            "M/s" => numbers[7] / 1e6,
            _ => numbers[5],
        })
    }
}

struct Figure {
    test: Test,
    transport: Transport,
    beside: Beside,
    bound: Option<Bound>,
}

const LATENCY: Test = Test { name: "tag_lat", bytes: 8, count: 100_000 };
const RATE: Test = Test { name: "tag_bw", bytes: 64, count: 500_000 };
const LONG: Test = Test { name: "tag_lat", bytes: 64 << 10, count: 5000 };
const STREAM: Test = Test { name: "tag_bw", bytes: 1 << 20, count: 4000 };

fn figures() -> Vec<Figure> {
    let bound = |floor, aim| Some(Bound { floor, aim });
    let shared_memory = Beside::Transport(Transport::SharedMemory);
    let of_verbs = [
        (LATENCY, Beside::Handoff, bound(20.0, 10.0)),
        (LATENCY, shared_memory, None),
        (RATE, Beside::Handoff, bound(0.18, 0.36)),
        (RATE, shared_memory, None),
        (LONG, shared_memory, None),
        (STREAM, shared_memory, bound(0.7, 1.0)),
    ];
    let of_verbs = of_verbs.map(|(test, beside, bound)| Figure { test, transport: Transport::Verbs, beside, bound });
    let of_default = [(LATENCY, 1.0, 0.5), (RATE, 1.0, 2.0), (LONG, 1.0, 0.5), (STREAM, 1.0, 2.0)];
    let of_default = of_default.map(|(test, floor, aim)| {
        let beside = Beside::Transport(Transport::Tcp);
        Figure { test, transport: Transport::Default, beside, bound: bound(floor, aim) }
    });
    of_verbs.into_iter().chain(of_default).collect()
}

/// Latencies have bounds: programs that nobody tuned, and two cores for all.
fn figures_of_hosts() -> Vec<Figure> {
    let bound = Some(Bound { floor: 1.0, aim: 0.6 });
    let all = [(LATENCY, bound), (RATE, None), (LONG, bound), (STREAM, None)];
    let beside = Beside::Transport(Transport::Tcp);
    all.into_iter().map(|(test, bound)| Figure { test, transport: Transport::Default, beside, bound }).collect()
}

impl Figure {
    fn wanted(&self, place: &str) -> Wanted {
        let Test { name, bytes, .. } = self.test;
        let of = if self.transport == Transport::Default { ", default transports" } else { "" };
        let what = format!("{name}, {}{of}{place}", crate::table::bytes(bytes));
        let (unit, limit, bound) = (self.test.unit(), Some(self.beside.name()), self.bound);
        Wanted { part: "programs", what, unit, limit, bound }
    }
}

/// Measures all rows, by turns.
///
/// # Errors
/// There is no host, no lab, or no container.
pub fn measure(freeflow: &Path, is_quick: bool, journal: &mut Journal, all: &mut Vec<Series>) -> Result<(), String> {
    let effort = if is_quick { (1, 5) } else { (5, 1) };
    {
        let host = Freeflow::up(freeflow, "adaptive", false)?;
        let Pair { runner, server, .. } = Pair::new(&host)?;
        let bench = Bench::new(runner, server, effort.1)?;
        all.extend(rows((TITLE, ""), &figures(), bench, effort.0, journal)?);
    }
    let lab = Lab::up(freeflow, MTU)?;
    let bench = Bench::new(lab.agent(2, "ucx-runner")?, lab.agent(1, "ucx-server")?, effort.1)?;
    all.extend(rows((TITLE_OF_HOSTS, ", two hosts"), &figures_of_hosts(), bench, effort.0, journal)?);
    Ok(())
}

fn rows(
    (title, place): (&'static str, &str),
    figures: &[Figure],
    mut bench: Bench,
    runs: usize,
    journal: &mut Journal,
) -> Result<Vec<Series>, String> {
    println!();
    let handoff_us = journal.handoff("before").map_err(|error| error.to_string())?.summary.p50 / 1e3;
    let mut series: Vec<Series> = figures.iter().map(|figure| Series::new(title, figure.wanted(place))).collect();
    for _ in 0..runs {
        for (figure, series) in figures.iter().zip(&mut series).filter(|(_, series)| series.failure.is_none()) {
            match bench.run(figure, handoff_us) {
                Ok(run) => series.runs.push(run),
                Err(why) => {
                    journal.fail(format!("programs, {}: {why}", series.wanted.what));
                    series.failure = Some(why);
                }
            }
        }
    }
    journal.show(table(title, &series));
    journal.handoff("after").map_err(|error| error.to_string())?;
    Ok(series)
}

struct Bench {
    runner: Agent,
    server: Agent,
    address: String,
    port: u16,
    /// One of so many iterations is made.
    share: usize,
}

impl Bench {
    fn new(runner: Agent, mut server: Agent, share: usize) -> Result<Self, String> {
        let address = address_of(&mut server)?;
        Ok(Self { runner, server, address, port: 21_000, share })
    }

    fn run(&mut self, figure: &Figure, handoff_us: f64) -> Result<Run, String> {
        let limit = match figure.beside {
            Beside::Handoff if figure.test.is_latency() => handoff_us,
            Beside::Handoff => 1.0 / handoff_us,
            Beside::Transport(transport) => self.figure(figure.test, transport)?,
        };
        let value = self.figure(figure.test, figure.transport)?;
        Ok(Run { value, limit: Some(limit), p10: value, p99: value })
    }

    fn figure(&mut self, test: Test, transport: Transport) -> Result<f64, String> {
        let text = self.output(test, transport)?;
        test.figure(&text).ok_or_else(|| format!("no figures in: {}", tail(&text)))
    }

    fn output(&mut self, test: Test, transport: Transport) -> Result<String, String> {
        self.port += 1;
        let (port, count, setting) = (self.port, (test.count / self.share).max(500), transport.setting());
        let words = format!("-p {port} -t {} -s {} -n {count} -w 1000 -f", test.name, test.bytes);
        let env = format!("env UCX_WARN_UNUSED_ENV_VARS=n UCX_LOG_LEVEL=error {setting} ucx_perftest");
        let (server, address) = (format!("{env} {words}"), self.address.as_str());
        let client = |address: &str| format!("sleep {LISTEN}; exec {env} {address} {words}");
        let argv = |line: String| ["sh", "-c"].map(str::to_owned).into_iter().chain([line]).collect::<Vec<_>>();
        let is_apart = transport != Transport::SharedMemory;
        let line = if is_apart { client(address) } else { format!("{server} >&- & {}", client("127.0.0.1")) };
        if is_apart {
            self.server.ask(&Request::Start { argv: argv(format!("exec {server}")) })?;
        }
        self.runner.ask(&Request::Start { argv: argv(line) })?;
        self.runner.send(&Request::Finish { timeout_ms: RUN_MS_MAX })?;
        let reply = self.runner.receive(REPLY_MAX + Duration::from_millis(RUN_MS_MAX))?;
        let result = match reply {
            Reply::Output { status: Some(0), text } => Ok(text),
            Reply::Output { status: Some(status), text } => Err(format!("exit {status}: {}", tail(&text))),
            Reply::Output { status: None, text } => Err(format!("took too long: {}", tail(&text))),
            other => Err(format!("unexpected: {other:?}")),
        };
        if is_apart {
            let timeout_ms = if result.is_ok() { 5000 } else { 0 };
            self.server.ask(&Request::Finish { timeout_ms })?;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
+--------------+--------------+------------------------------+---------------------+-----------------------+
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
                         20000      0.962     3.036     3.037        2.51       2.52      329332      329333
";

    #[test]
    fn the_last_line_has_the_figures() {
        assert_eq!(LATENCY.figure(OUTPUT), Some(0.962));
        assert_eq!(RATE.figure(OUTPUT), Some(0.329_333));
        assert_eq!(STREAM.figure(OUTPUT), Some(2.52));
        assert_eq!(LATENCY.figure("[1764241] ERROR no such device\n"), None);
    }

    #[test]
    fn rows_have_names_and_bounds_of_their_own() {
        let mut names: Vec<String> = figures()
            .iter()
            .map(|figure| {
                let wanted = figure.wanted("");
                format!("{} beside {}", wanted.what, wanted.limit.unwrap_or(""))
            })
            .collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), figures().len());
        let is_right = |figure: &Figure| {
            let less = figure.bound.is_none_or(|bound| (bound.aim < bound.floor) == figure.test.is_latency());
            less && figure.test.count >= 500
        };
        assert!(figures().iter().chain(&figures_of_hosts()).all(is_right));
    }
}
