//! Unmodified programs that speak both RDMA and TCP, each beside its own TCP between the same two containers: qperf,
//! fio and the migration of a QEMU guest. On one host, and between the two hosts of a lab.
//!
//! A program that is not installed leaves its rows empty, and the others are measured.
use crate::cm::{Bound, Run, Series, Wanted, table};
use crate::host::{Agent, Freeflow, REPLY_MAX};
use crate::journal::Journal;
use crate::lab::Lab;
use crate::perftest::tail;
use crate::suite::{Pair, address_of};
use crate::verbs::{Reply, Request};
use serde_json::Value;
use std::collections::BTreeSet;
use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Begin of both tables' titles.
pub const TITLE: &str = "Programs beside their own TCP";
const RUN_MS_MAX: u64 = 60_000;
/// Time for a server to listen.
const LISTEN: &str = "0.5";
/// Time for a guest to have its memory filled.
const BOOT: &str = "1.5";
/// Of the lab's links, as in the part `cm`.
const MTU: u32 = 4200;
const GUEST_MIB: u32 = 256;
/// The rest of the guest's memory stays zero.
const GUEST_RANDOM_MIB: u64 = 200;
/// Where the random part begins.
const GUEST_RANDOM_AT: u32 = 16 << 20;
/// Of the runtime that fio's RDMA client prints it sleeps so long, once it is connected, for the receiver to be ready.
const FIO_PAUSE_MS: f64 = 500.0;
/// `qperf` may ask for a connection before its server listens for it, and does not try again.
const ATTEMPTS_MAX: u32 = 5;
const FIRST_PORT: u16 = 22_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Rdma,
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    /// `qperf`'s latency (one way, as it prints it) or bandwidth.
    QperfLatency {
        bytes: usize,
    },
    QperfBandwidth {
        bytes: usize,
    },
    /// `depth` counts for RDMA alone: the TCP engine writes ahead into its socket.
    Fio {
        bytes: usize,
        depth: u32,
    },
    Migration,
}

impl Program {
    fn command(self) -> &'static str {
        match self {
            Self::QperfLatency { .. } | Self::QperfBandwidth { .. } => "qperf",
            Self::Fio { .. } => "fio",
            Self::Migration => "qemu-system-x86_64",
        }
    }

    fn what(self) -> String {
        let size = crate::table::bytes;
        match self {
            Self::QperfLatency { bytes } => format!("qperf rc_lat, {}", size(bytes)),
            Self::QperfBandwidth { bytes } => format!("qperf rc_bw, {}", size(bytes)),
            Self::Fio { bytes, depth } => format!("fio, WRITE {}, {depth} at a time", size(bytes)),
            Self::Migration => format!("QEMU, migration of {GUEST_MIB} MiB"),
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::QperfLatency { .. } => "us",
            Self::QperfBandwidth { .. } | Self::Fio { .. } => "MB/s",
            Self::Migration => "ms",
        }
    }

    fn bound(self) -> Bound {
        let aim = if self.unit() == "MB/s" { 2.0 } else { 0.5 };
        Bound { floor: 1.0, aim }
    }

    /// The figure in the client's output.
    fn figure(self, text: &str, transport: Transport) -> Option<f64> {
        match self {
            Self::QperfLatency { .. } => qperf_value(text, "latency").map(|seconds| seconds * 1e6),
            Self::QperfBandwidth { .. } => qperf_value(text, "bw").map(|bytes_per_s| bytes_per_s / 1e6),
            Self::Fio { .. } => {
                let report: Value = serde_json::from_str(text.get(text.find('{')?..=text.rfind('}')?)?).ok()?;
                let written = report.get("jobs")?.get(0)?.get("write")?;
                let value = |name: &str| written.get(name)?.as_f64();
                let pause_ms = if transport == Transport::Rdma { FIO_PAUSE_MS } else { 0.0 };
                let (bytes, span_ms) = (value("io_bytes")?, value("runtime")? - pause_ms);
                (bytes > 0.0 && span_ms > 0.0).then(|| bytes / span_ms / 1e3)
            }
            Self::Migration => {
                let is_whole = text.contains("Migration status: completed");
                let line = text.lines().find_map(|line| line.trim().strip_prefix("total time:"))?;
                line.split_whitespace().next()?.parse().ok().filter(|_| is_whole)
            }
        }
    }
}

/// A value of `qperf`'s report in its base unit, seconds or bytes a second.
fn qperf_value(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix(name)?.trim_start().strip_prefix('='))?;
    let mut words = line.split_whitespace();
    let value: f64 = words.next()?.parse().ok()?;
    let scale = match words.next()? {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "KB/sec" => 1e3,
        "MB/sec" => 1e6,
        "GB/sec" => 1e9,
        "sec" | "bytes/sec" => 1.0,
        _ => return None,
    };
    Some(value * scale)
}

fn programs() -> Vec<Program> {
    vec![
        Program::QperfLatency { bytes: 1 },
        Program::QperfBandwidth { bytes: 64 << 10 },
        Program::Fio { bytes: 4 << 10, depth: 1 },
        Program::Fio { bytes: 4 << 10, depth: 16 },
        Program::Fio { bytes: 1 << 20, depth: 4 },
        Program::Migration,
    ]
}

fn wanted(program: Program, has_bound: bool) -> Wanted {
    let place = if has_bound { "one host" } else { "two hosts" };
    Wanted {
        part: "programs",
        what: format!("{}, {place}", program.what()),
        unit: program.unit(),
        limit: Some("its own TCP"),
        bound: match program {
            _ if has_bound => Some(program.bound()),
            // Programs that nobody tuned, and two cores for all.
            Program::QperfLatency { .. } => Some(Bound { floor: 1.0, aim: 0.6 }),
            _ => None,
        },
    }
}

/// Measures all rows at both places, by turns.
///
/// # Errors
/// There is no host, no lab, or no container.
pub fn measure(freeflow: &Path, is_quick: bool, journal: &mut Journal, all: &mut Vec<Series>) -> Result<(), String> {
    let contents = Contents::new().map_err(|error| format!("the guest's memory: {error}"))?;
    let runs = if is_quick { 1 } else { 5 };
    {
        let host = Freeflow::up(freeflow, "adaptive", false)?;
        let Pair { runner, server, .. } = Pair::new(&host)?;
        let ends = Ends::new(runner, server, &contents, is_quick)?;
        all.extend(rows("Programs beside their own TCP, on one host", true, ends, runs, journal));
    }
    let lab = Lab::up(freeflow, MTU)?;
    let (server, runner) = (lab.agent(1, "beside-server")?, lab.agent(2, "beside-runner")?);
    let ends = Ends::new(runner, server, &contents, is_quick)?;
    all.extend(rows("Programs beside their own TCP, between two hosts", false, ends, runs, journal));
    Ok(())
}

fn rows(title: &'static str, has_bound: bool, mut ends: Ends<'_>, runs: usize, journal: &mut Journal) -> Vec<Series> {
    println!();
    let (present, missing): (Vec<Program>, Vec<Program>) =
        programs().into_iter().partition(|program| is_installed(program.command()));
    let names: BTreeSet<&str> = missing.iter().map(|program| program.command()).collect();
    for name in names {
        println!("not measured: {name} is missing");
    }
    let mut series: Vec<Series> =
        present.iter().map(|&program| Series::new(title, wanted(program, has_bound))).collect();
    for _ in 0..runs {
        for (&program, series) in present.iter().zip(&mut series).filter(|(_, series)| series.failure.is_none()) {
            match ends.run(program) {
                Ok(run) => series.runs.push(run),
                Err(why) => {
                    journal.fail(format!("programs, {}: {why}", series.wanted.what));
                    series.failure = Some(why);
                }
            }
        }
    }
    journal.show(table(title, &series));
    series
}

pub(crate) fn is_installed(command: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(command).is_file()))
}

/// Random bytes for the guest's memory, in a file that goes with this.
struct Contents(PathBuf);

impl Contents {
    fn new() -> io::Result<Self> {
        let contents = Self(env::temp_dir().join(format!("ffguest.{}", std::process::id())));
        let mut random = File::open("/dev/urandom")?.take(GUEST_RANDOM_MIB << 20);
        io::copy(&mut random, &mut File::create(&contents.0)?)?;
        Ok(contents)
    }
}

impl Drop for Contents {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Two containers, and how long programs run there.
struct Ends<'a> {
    runner: Agent,
    server: Agent,
    address: String,
    contents: &'a Path,
    port: u16,
    is_quick: bool,
}

impl<'a> Ends<'a> {
    fn new(runner: Agent, mut server: Agent, contents: &'a Contents, is_quick: bool) -> Result<Self, String> {
        let address = address_of(&mut server)?;
        Ok(Self { runner, server, address, contents: &contents.0, port: FIRST_PORT, is_quick })
    }

    fn run(&mut self, program: Program) -> Result<Run, String> {
        let limit = self.figure(program, Transport::Tcp)?;
        let value = self.figure(program, Transport::Rdma)?;
        Ok(Run { value, limit: Some(limit), p10: value, p99: value })
    }

    fn figure(&mut self, program: Program, transport: Transport) -> Result<f64, String> {
        // No port twice: the last connection may linger.
        self.port += 2;
        let (server, client) = self.lines(program, transport);
        let mut output = self.output(&server, &client);
        for _ in 1..ATTEMPTS_MAX {
            let too_early = |why: &String| program.command() == "qperf" && why.contains("Event rejected");
            if !output.as_ref().is_err_and(too_early) {
                break;
            }
            output = self.output(&server, &client);
        }
        let text = output?;
        program.figure(&text, transport).ok_or_else(|| format!("no figures in: {}", tail(&text)))
    }

    /// The shell's lines of server and client.
    fn lines(&self, program: Program, transport: Transport) -> (String, String) {
        let (address, port, is_rdma) = (&self.address, self.port, transport == Transport::Rdma);
        match program {
            Program::QperfLatency { bytes } => self.qperf(if is_rdma { "rc_lat" } else { "tcp_lat" }, bytes),
            Program::QperfBandwidth { bytes } => self.qperf(if is_rdma { "rc_bw" } else { "tcp_bw" }, bytes),
            Program::Fio { bytes, depth } => {
                let is_long = bytes >= 1 << 20;
                let mib = if is_long { 4096 } else { 400 } / if self.is_quick { 4 } else { 1 };
                // After the engine, which defines some of them.
                let common = format!("--port={port} --bs={bytes} --name=job");
                let (server, client) = if is_rdma {
                    let words = format!("--ioengine=rdma --iodepth={depth} --size={mib}m");
                    (words.clone(), format!("{words} --verb=write"))
                } else {
                    // Its reader counts short reads as whole ones, and ends when the writer does.
                    let words = "--ioengine=net --protocol=tcp";
                    (format!("{words} --listen --size=100g"), format!("{words} --size={mib}m"))
                };
                let client = format!("{client} --rw=write --hostname={address} --output-format=json");
                (format!("exec fio {server} --rw=read {common}"), format!("sleep {LISTEN}; exec fio {client} {common}"))
            }
            Program::Migration => {
                let scheme = if is_rdma { "rdma" } else { "tcp" };
                let qemu = format!("qemu-system-x86_64 -accel tcg -m {GUEST_MIB}M -nodefaults -nographic -S");
                let contents = self.contents.display();
                let loader = format!("-device loader,file={contents},addr={GUEST_RANDOM_AT:#x},force-raw=on");
                let monitor = format!(
                    "sleep {BOOT}; echo migrate_set_parameter max-bandwidth 100G; \
                     echo migrate {scheme}:{address}:{port}; echo info migrate; echo quit"
                );
                (
                    format!("exec {qemu} -monitor none -incoming {scheme}:0.0.0.0:{port}"),
                    format!("({monitor}) | {qemu} -monitor stdio {loader}"),
                )
            }
        }
    }

    fn qperf(&self, test: &str, bytes: usize) -> (String, String) {
        let (address, port, seconds) = (&self.address, self.port, if self.is_quick { 1 } else { 2 });
        let words = format!("-lp {port} {address} -t {seconds} -m {bytes} -cm 1 {test}");
        (format!("exec qperf -lp {port}"), format!("sleep {LISTEN}; exec qperf {words}"))
    }

    fn output(&mut self, server: &str, client: &str) -> Result<String, String> {
        let argv = |line: &str| ["sh", "-c", line].map(str::to_owned).to_vec();
        self.server.ask(&Request::Start { argv: argv(server) })?;
        let result = self.client(argv(client));
        // Some servers go on for ever.
        let stopped = self.server.ask(&Request::Finish { timeout_ms: 0 })?;
        result.map_err(|why| match stopped {
            Reply::Output { text, .. } if !text.trim().is_empty() => format!("{why}; the server: {}", tail(&text)),
            _ => why,
        })
    }

    fn client(&mut self, argv: Vec<String>) -> Result<String, String> {
        self.runner.ask(&Request::Start { argv })?;
        self.runner.send(&Request::Finish { timeout_ms: RUN_MS_MAX })?;
        match self.runner.receive(REPLY_MAX + Duration::from_millis(RUN_MS_MAX))? {
            Reply::Output { status: Some(0), text } => Ok(text),
            Reply::Output { status: Some(status), text } => Err(format!("exit {status}: {}", tail(&text))),
            Reply::Output { status: None, text } => Err(format!("took too long: {}", tail(&text))),
            other => Err(format!("unexpected: {other:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_units_of_their_rows() {
        let latency = Program::QperfLatency { bytes: 1 };
        assert_eq!(latency.figure("rc_lat:\n    latency  =  13.4 us\n", Transport::Rdma).map(f64::round), Some(13.0));
        assert_eq!(latency.figure("rc_lat:\n    latency  =  1.5 ms\n", Transport::Rdma), Some(1500.0));
        assert_eq!(latency.figure("rc_lat:\nfailed to connect\n", Transport::Rdma), None);
        let bandwidth = Program::QperfBandwidth { bytes: 1 };
        assert_eq!(bandwidth.figure("rc_bw:\n    bw  =  10.5 GB/sec\n", Transport::Rdma), Some(10_500.0));
        let fio = Program::Fio { bytes: 1, depth: 1 };
        let report = r#"fio: a note { "jobs": [ { "write": { "io_bytes": 200000000, "runtime": 1000 } } ] }"#;
        assert_eq!(fio.figure(report, Transport::Tcp), Some(200.0));
        assert_eq!(fio.figure(report, Transport::Rdma), Some(400.0), "without its pause");
        assert_eq!(fio.figure(&report.replace("200000000", "0"), Transport::Tcp), None, "it moved nothing");
        let done = "(qemu) info migrate\r\nMigration status: completed\r\ntotal time: 744 ms\r\ndowntime: 3 ms\r\n";
        assert_eq!(Program::Migration.figure(done, Transport::Rdma), Some(744.0));
        assert_eq!(Program::Migration.figure(&done.replace("completed", "failed"), Transport::Rdma), None);
    }

    #[test]
    fn rows_have_names_of_their_own_and_bounds() {
        let mut names = BTreeSet::new();
        for program in programs() {
            for has_bound in [true, false] {
                let wanted = wanted(program, has_bound);
                let is_latency = matches!(program, Program::QperfLatency { .. });
                assert_eq!(wanted.bound.is_some(), has_bound || is_latency);
                assert!(names.insert(wanted.what), "{program:?}");
            }
            let bound = program.bound();
            assert_eq!(bound.aim > bound.floor, program.unit() == "MB/s");
        }
    }
}
