//! Unmodified perftest programs between the two containers: what users will run first.
use crate::host::REPLY_MAX;
use crate::suite::Pair;
use crate::verbs::{Reply, Request};
use serde::Serialize;
use std::thread;
use std::time::Duration;

/// Time for the server to listen, and times that the client tries.
const LISTEN: Duration = Duration::from_millis(300);
const ATTEMPTS_MAX: usize = 3;
/// Longest that one program may run.
const RUN_MS_MAX: u64 = 15_000;

/// Program, message size, iterations. `ib_write_lat` polls memory without ever yielding, so it gets few.
const PROGRAMS: [(&str, usize, usize); 9] = [
    ("ib_send_lat", 64, 5000),
    ("ib_write_lat", 64, 200),
    ("ib_read_lat", 64, 5000),
    ("ib_send_bw", 64, 200_000),
    ("ib_send_bw", 65536, 10_000),
    ("ib_write_bw", 64, 200_000),
    ("ib_write_bw", 65536, 10_000),
    ("ib_write_bw", 1 << 20, 2000),
    ("ib_read_bw", 65536, 10_000),
];

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub mode: String,
    pub program: &'static str,
    pub bytes: usize,
    pub failure: Option<String>,
    /// Latency programs: half a round trip (READ: a whole one), microseconds.
    pub typical_us: Option<f64>,
    pub p99_us: Option<f64>,
    /// Bandwidth programs.
    pub average_gbit_per_s: Option<f64>,
    pub million_per_s: Option<f64>,
}

/// The figures of the program's own table: its last line of numbers.
pub(crate) fn numbers(text: &str) -> Option<Vec<f64>> {
    let line = |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>();
    text.lines().rev().filter_map(line).find(|numbers| numbers.len() >= 5)
}

fn figure(mode: &str, program: &'static str, bytes: usize, output: Result<String, String>) -> Figure {
    let mut figure = Figure {
        mode: mode.to_owned(),
        program,
        bytes,
        failure: None,
        typical_us: None,
        p99_us: None,
        average_gbit_per_s: None,
        million_per_s: None,
    };
    match output.and_then(|text| numbers(&text).ok_or_else(|| format!("no table in: {}", tail(&text)))) {
        Err(failure) => figure.failure = Some(failure),
        // #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%
        Ok(numbers) if program.ends_with("_lat") => {
            figure.typical_us = numbers.get(4).copied();
            figure.p99_us = numbers.get(7).copied();
        }
        // #bytes #iterations BW peak, BW average (both Gb/s), MsgRate (Mpps)
        Ok(numbers) => {
            figure.average_gbit_per_s = numbers.get(3).copied();
            figure.million_per_s = numbers.get(4).copied();
        }
    }
    figure
}

/// The last words of a program that failed.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" | ")
}

fn output_of(pair: &mut Pair<'_>, server_address: &str, program: &str, arguments: &[String]) -> Result<String, String> {
    let argv = |more: &[&str]| {
        let words = std::iter::once(program.to_owned()).chain(arguments.iter().cloned());
        words.chain(more.iter().map(|&word| word.to_owned())).collect::<Vec<_>>()
    };
    pair.server.ask(&Request::Start { argv: argv(&[]) })?;
    let mut result = Err("did not start".to_owned());
    for _ in 0..ATTEMPTS_MAX {
        thread::sleep(LISTEN);
        pair.runner.ask(&Request::Start { argv: argv(&[server_address]) })?;
        pair.runner.send(&Request::Finish { timeout_ms: RUN_MS_MAX })?;
        let reply = pair.runner.receive(REPLY_MAX + Duration::from_millis(RUN_MS_MAX))?;
        result = match reply {
            Reply::Output { status: Some(0), text } => Ok(text),
            Reply::Output { status: Some(status), text } => Err(format!("exit {status}: {}", tail(&text))),
            Reply::Output { status: None, text } => Err(format!("took too long: {}", tail(&text))),
            other => Err(format!("unexpected: {other:?}")),
        };
        if !matches!(&result, Err(why) if why.contains("connect")) {
            break;
        }
    }
    let timeout_ms = if result.is_ok() { 2000 } else { 0 };
    pair.server.ask(&Request::Finish { timeout_ms })?;
    result
}

/// One run of one program: the numbers of its own table, in its order.
pub fn once(
    pair: &mut Pair<'_>,
    server_address: &str,
    program: &'static str,
    (bytes, iterations): (usize, usize),
    more: &[&str],
) -> Result<Vec<f64>, String> {
    let (bytes, iterations) = (bytes.to_string(), iterations.to_string());
    let words = ["-F", "-s", &bytes, "-n", &iterations].into_iter().chain(more.iter().copied());
    let gigabits = program.ends_with("_bw").then_some("--report_gbits");
    let arguments: Vec<String> = words.chain(gigabits).map(str::to_owned).collect();
    let text = output_of(pair, server_address, program, &arguments)?;
    numbers(&text).ok_or_else(|| format!("{program}: no table in: {}", tail(&text)))
}

/// All programs, in one mode. `server_address` is the virtual address of the server's container.
pub fn run(pair: &mut Pair<'_>, mode: &str, server_address: &str, quick: bool) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (program, bytes, count) in PROGRAMS {
        let count = if quick { (count / 5).max(50) } else { count };
        let mut arguments: Vec<String> = ["-F", "-s"].map(str::to_owned).to_vec();
        arguments.extend([bytes.to_string(), "-n".to_owned(), count.to_string()]);
        if program.ends_with("_bw") {
            arguments.push("--report_gbits".to_owned());
        }
        let output = output_of(pair, server_address, program, &arguments);
        figures.push(figure(mode, program, bytes, output));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_tables() {
        let text = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n 64      1000          1.57           9.84         1.60     \t       1.62        \t0.17   \t\t1.83    \t\t9.84   \n----\n";
        let figure = figure("adaptive", "ib_send_lat", 64, Ok(text.to_owned()));
        assert_eq!((figure.typical_us, figure.p99_us, figure.failure), (Some(1.60), Some(1.83), None));
    }

    #[test]
    fn bandwidth_tables() {
        let text = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n 65536      5000             97.54              97.52     \t\t   0.186\n----";
        let figure = figure("adaptive", "ib_write_bw", 65536, Ok(text.to_owned()));
        assert_eq!((figure.average_gbit_per_s, figure.million_per_s), (Some(97.52), Some(0.186)));
    }

    #[test]
    fn no_table_is_a_failure_with_the_last_words() {
        let figure = figure("adaptive", "ib_write_bw", 64, Ok("\nCouldn't connect\n".to_owned()));
        assert_eq!(figure.failure.as_deref(), Some("no table in: Couldn't connect"));
    }
}
