//! MPI between two containers: Open MPI and MPICH over UCX, beside their own TCP between the same containers and
//! their own shared memory (both ranks in one container), in the same run; between the two hosts of a lab beside their
//! own TCP. The program is tests/programs/mpi_speed.c.
//!
//! An implementation that is not installed is named, and the others are measured.
use crate::beside_tcp::is_installed;
use crate::cm::{Bound, Run, Series, Wanted, table};
use crate::host::{Agent, Freeflow, REPLY_MAX};
use crate::journal::Journal;
use crate::lab::Lab;
use crate::perftest::tail;
use crate::suite::{Pair, address_of};
use crate::verbs::{Reply, Request};
use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub const TITLE: &str = "MPI between two containers";
const TITLE_OF_HOSTS: &str = "MPI between two containers of two hosts";
/// Of the lab's links, as in the part `cm`.
const MTU: u32 = 4200;
const RUN_MS_MAX: u64 = 60_000;
/// Time for what the launcher started elsewhere to end after it.
const END_MS_MAX: u64 = 5000;
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/mpi_speed.c");
/// Stands for ssh: the other container's shell waits for the command in a file of a folder that both see.
const AGENT: &str = "#!/bin/sh
cd \"$(dirname \"$0\")\" || exit 1
shift
printf '%s' \"$*\" >new && mv new command
until [ -e code ]; do sleep 0.02; done
exit \"$(cat code)\"
";
const SERVE: &str = "until [ -e command ]; do sleep 0.02; done; sh command; echo $? >code.new; mv code.new code";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Implementation {
    OpenMpi,
    Mpich,
}

impl Implementation {
    const ALL: [Self; 2] = [Self::OpenMpi, Self::Mpich];

    fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        }
    }

    fn compiler(self) -> &'static str {
        match self {
            Self::OpenMpi => "mpicc.openmpi",
            Self::Mpich => "mpicc.mpich",
        }
    }

    fn launcher(self) -> &'static str {
        match self {
            Self::OpenMpi => "mpirun.openmpi",
            Self::Mpich => "mpiexec.mpich",
        }
    }

    /// The launcher's line. `hosts` has one address for both ranks, or one each; the first is the launcher's own.
    fn line(self, transport: Transport, hosts: &[&str], folder: &str) -> String {
        let (launcher, list, settings) = (self.launcher(), hosts.join(","), transport.settings(self));
        match self {
            Self::OpenMpi => {
                let slots = if hosts.len() == 1 { ":2" } else { "" };
                let only = "--mca oob_tcp_if_include ff0 --mca btl_tcp_if_include ff0";
                let agent = format!("--mca plm_rsh_agent {folder}/agent");
                // Else its daemons, which know nothing of each other, bind both ranks to the machine's first core.
                let free = "--bind-to none";
                format!("{launcher} --allow-run-as-root {free} --host {list}{slots} -n 2 {agent} {only} {settings}")
            }
            Self::Mpich => {
                let agent = format!("-launcher rsh -launcher-exec {folder}/agent -localhost {}", hosts[0]);
                format!("{launcher} {agent} -hosts {list} -n 2 {settings}")
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    /// Those that UCX chooses of the device.
    Default,
    Verbs,
    Tcp,
    /// Both ranks in one container.
    SharedMemory,
}

impl Transport {
    const ALL: [Self; 4] = [Self::Tcp, Self::SharedMemory, Self::Default, Self::Verbs];
    const OF_HOSTS: [Self; 2] = [Self::Tcp, Self::Default];

    /// Open MPI takes UCX for verbs alone, and its own modules for the rest.
    fn settings(self, implementation: Implementation) -> &'static str {
        match (implementation, self) {
            (Implementation::OpenMpi, Self::Default) => "--mca pml ucx --mca osc ucx -x UCX_NET_DEVICES=freeflow0:1",
            (Implementation::OpenMpi, Self::Verbs) => {
                "--mca pml ucx --mca osc ucx -x UCX_NET_DEVICES=freeflow0:1 -x UCX_TLS=rc_v,self"
            }
            (Implementation::OpenMpi, Self::Tcp) => "--mca pml ob1 --mca osc ^ucx --mca btl tcp,self",
            (Implementation::OpenMpi, Self::SharedMemory) => "--mca pml ob1 --mca osc ^ucx --mca btl vader,self",
            (Implementation::Mpich, Self::Default) => "",
            (Implementation::Mpich, Self::Verbs) => "-genv UCX_TLS rc_v,self -genv UCX_NET_DEVICES freeflow0:1",
            (Implementation::Mpich, Self::Tcp) => "-genv UCX_TLS tcp,self",
            (Implementation::Mpich, Self::SharedMemory) => "-genv UCX_TLS sm,self",
        }
    }

    fn beside(self) -> &'static str {
        if self == Self::Tcp { "its own TCP" } else { "its own shared memory" }
    }
}

/// A line of the program's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Test {
    name: &'static str,
    bytes: usize,
}

impl Test {
    fn is_latency(self) -> bool {
        self.name != "stream"
    }

    fn figure(self, text: &str) -> Option<f64> {
        let begin = format!("{} {} ", self.name, self.bytes);
        text.lines().find_map(|line| line.trim().strip_prefix(&begin)?.parse().ok())
    }
}

const PINGPONGS: [usize; 5] = [8, 1 << 10, 64 << 10, 1 << 20, 4 << 20];
const OTHERS: [Test; 7] = [
    Test { name: "stream", bytes: 1 << 20 },
    Test { name: "allreduce", bytes: 8 },
    Test { name: "allreduce", bytes: 1 << 20 },
    Test { name: "put", bytes: 8 },
    Test { name: "put", bytes: 1 << 20 },
    Test { name: "get", bytes: 8 },
    Test { name: "get", bytes: 1 << 20 },
];

#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    implementation: Implementation,
    transport: Transport,
    test: Test,
    beside: Transport,
    bound: Option<Bound>,
}

/// A share `floor` and `aim` of the speed of another way: of times the inverse.
fn share(test: Test, floor: f64, aim: f64) -> Bound {
    if test.is_latency() { Bound { floor: 1.0 / floor, aim: 1.0 / aim } } else { Bound { floor, aim } }
}

/// `TCP` is a floor for all that is sent, shared memory for the ping-pongs alone.
fn figures(implementation: Implementation) -> Vec<Figure> {
    let pingpongs = PINGPONGS.map(|bytes| Test { name: "pingpong", bytes });
    let mut figures = Vec::new();
    for transport in [Transport::Default, Transport::Verbs] {
        for test in pingpongs.into_iter().chain(OTHERS) {
            let (floor, aim) = if test.bytes < 64 << 10 { (0.2, 0.5) } else { (0.5, 1.0) };
            let of_memory = (test.name == "pingpong").then(|| share(test, floor, aim));
            let besides = [(Transport::Tcp, Some(share(test, 1.0, 2.0))), (Transport::SharedMemory, of_memory)];
            figures.extend(besides.map(|(beside, bound)| Figure { implementation, transport, test, beside, bound }));
        }
    }
    figures
}

/// The ping-pongs have bounds: programs that nobody tuned, and two cores for all.
fn figures_of_hosts(implementation: Implementation) -> Vec<Figure> {
    let pingpongs = PINGPONGS.map(|bytes| (Test { name: "pingpong", bytes }, Some(Bound { floor: 1.0, aim: 0.6 })));
    let all = pingpongs.into_iter().chain(OTHERS.map(|test| (test, None)));
    let (transport, beside) = (Transport::Default, Transport::Tcp);
    all.map(|(test, bound)| Figure { implementation, transport, test, beside, bound }).collect()
}

impl Figure {
    fn wanted(&self, place: &str) -> Wanted {
        let of = if self.transport == Transport::Default { "default transports" } else { "rc_v" };
        let (name, size) = (self.implementation.name(), crate::table::bytes(self.test.bytes));
        let what = format!("{name} {}, {size}, {of}{place}", self.test.name);
        let unit = if self.test.is_latency() { "us" } else { "MB/s" };
        Wanted { part: "programs", what, unit, limit: Some(self.beside.beside()), bound: self.bound }
    }
}

/// Measures all rows of the implementations that are installed, by turns.
///
/// # Errors
/// There is no host, no lab, or no container.
pub fn measure(freeflow: &Path, is_quick: bool, journal: &mut Journal, all: &mut Vec<Series>) -> Result<(), String> {
    let (runs, share) = if is_quick { (1, 20) } else { (5, 5) };
    {
        let host = Freeflow::up(freeflow, "adaptive", false)?;
        let Pair { runner, server, .. } = Pair::new(&host)?;
        let bench = Bench::new(runner, server, share)?;
        rows((TITLE, ""), figures, &Transport::ALL, bench, runs, journal, all)?;
    }
    let lab = Lab::up(freeflow, MTU)?;
    let bench = Bench::new(lab.agent(2, "mpi-runner")?, lab.agent(1, "mpi-server")?, share)?;
    rows((TITLE_OF_HOSTS, ", two hosts"), figures_of_hosts, &Transport::OF_HOSTS, bench, runs, journal, all)
}

fn rows(
    (title, place): (&'static str, &str),
    figures: fn(Implementation) -> Vec<Figure>,
    transports: &[Transport],
    mut bench: Bench,
    runs: usize,
    journal: &mut Journal,
    all: &mut Vec<Series>,
) -> Result<(), String> {
    println!();
    let missing = |name: &&str| !is_installed(name);
    for implementation in Implementation::ALL {
        if let Some(name) = [implementation.compiler(), implementation.launcher()].iter().find(|name| missing(name)) {
            println!("not measured: {name} is missing");
            continue;
        }
        bench.build(implementation)?;
        let figures = figures(implementation);
        let mut series: Vec<Series> = figures.iter().map(|figure| Series::new(title, figure.wanted(place))).collect();
        for _ in 0..runs {
            let outputs: Vec<_> =
                transports.iter().map(|&transport| (transport, bench.output(implementation, transport))).collect();
            for (figure, series) in figures.iter().zip(&mut series).filter(|(_, series)| series.failure.is_none()) {
                match run(figure, &outputs) {
                    Ok(run) => series.runs.push(run),
                    Err(why) => {
                        journal.fail(format!("programs, {}: {why}", series.wanted.what));
                        series.failure = Some(why);
                    }
                }
            }
        }
        journal.show(table(title, &series));
        all.extend(series);
    }
    Ok(())
}

/// A figure and the one beside it, of the transports' outputs.
fn run(figure: &Figure, outputs: &[(Transport, Result<String, String>)]) -> Result<Run, String> {
    let of = |transport: Transport| {
        let (_, output) = outputs.iter().find(|(each, _)| *each == transport).ok_or("no output")?;
        let text = output.as_ref().map_err(|why| format!("{transport:?}: {why}"))?;
        figure.test.figure(text).ok_or_else(|| format!("{transport:?}: no figure in: {}", tail(text)))
    };
    let (limit, value) = (of(figure.beside)?, of(figure.transport)?);
    Ok(Run { value, limit: Some(limit), p10: value, p99: value })
}

struct Bench {
    runner: Agent,
    server: Agent,
    /// Addresses of the launcher's end, and of the other one.
    addresses: [String; 2],
    folder: PathBuf,
    /// One of so many iterations is made.
    share: u32,
}

impl Bench {
    fn new(mut runner: Agent, mut server: Agent, share: u32) -> Result<Self, String> {
        let addresses = [address_of(&mut runner)?, address_of(&mut server)?];
        let folder = env::temp_dir().join(format!("ffmpi.{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let bench = Self { runner, server, addresses, folder, share };
        let agent = bench.folder.join("agent");
        fs::write(&agent, AGENT)
            .and_then(|()| fs::set_permissions(&agent, Permissions::from_mode(0o755)))
            .map_err(|error| format!("{}: {error}", agent.display()))?;
        Ok(bench)
    }

    fn program(&self, implementation: Implementation) -> PathBuf {
        self.folder.join(implementation.launcher()).with_extension("speed")
    }

    fn build(&self, implementation: Implementation) -> Result<(), String> {
        let mut command = Command::new(implementation.compiler());
        command.args(["-std=gnu11", "-O2", "-o"]).arg(self.program(implementation)).arg(SOURCE);
        let output = command.output().map_err(|error| format!("{}: {error}", implementation.compiler()))?;
        let errors = || format!("{}: {}", implementation.compiler(), String::from_utf8_lossy(&output.stderr));
        if output.status.success() { Ok(()) } else { Err(errors()) }
    }

    fn output(&mut self, implementation: Implementation, transport: Transport) -> Result<String, String> {
        for name in ["command", "code"] {
            let _ = fs::remove_file(self.folder.join(name));
        }
        let folder = self.folder.display().to_string();
        let is_apart = transport != Transport::SharedMemory;
        let both = self.addresses.each_ref().map(String::as_str);
        let line = implementation.line(transport, if is_apart { &both } else { &both[..1] }, &folder);
        let program = self.program(implementation);
        // Ended with all that it started, should it hang.
        let limit_s = RUN_MS_MAX / 1000 - 5;
        let quiet = "UCX_WARN_UNUSED_ENV_VARS=n UCX_LOG_LEVEL=error";
        let line = format!("cd {folder}; {quiet} exec timeout {limit_s} {line} {} {}", program.display(), self.share);
        let argv = |line: String| ["sh".to_owned(), "-c".to_owned(), line].to_vec();
        if is_apart {
            let serve =
                format!("cd {folder}; {}", SERVE.replace("sh command", &format!("timeout {limit_s} sh command")));
            self.server.ask(&Request::Start { argv: argv(serve) })?;
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
            self.server.ask(&Request::Finish { timeout_ms: END_MS_MAX })?;
        }
        result
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_a_figure() {
        let text = "pingpong 8 1.250\npingpong 65536 11.100\nstream 1048576 18265.786\n";
        let figure = |name, bytes| Test { name, bytes }.figure(text);
        assert_eq!((figure("pingpong", 8), figure("pingpong", 65536)), (Some(1.25), Some(11.1)));
        assert_eq!((figure("stream", 1 << 20), figure("pingpong", 6)), (Some(18_265.786), None));
    }

    #[test]
    fn rows_have_names_and_bounds_of_their_own() {
        let (of_one, of_two) = (Implementation::ALL.map(figures), Implementation::ALL.map(figures_of_hosts));
        let name = |figure: &Figure| format!("{} {}", figure.wanted("").what, figure.beside.beside());
        let mut names: Vec<String> = of_one.iter().flatten().map(name).collect();
        let figures: Vec<Figure> = of_one.into_iter().chain(of_two).flatten().collect();
        let of_hosts = figures_of_hosts(Implementation::Mpich).len() * Implementation::ALL.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), figures.len() - of_hosts);
        let is_right = |bound: Bound, test: Test| (bound.aim < bound.floor) == test.is_latency();
        assert!(figures.iter().all(|figure| figure.bound.is_none_or(|bound| is_right(bound, figure.test))));
    }

    #[test]
    fn a_transport_that_failed_fails_its_rows_alone() {
        let text = |us: f64| Ok(format!("pingpong 8 {us}\n"));
        let all = [text(10.0), Err("why".to_owned()), text(1.0), text(2.0)];
        let outputs: Vec<_> = Transport::ALL.into_iter().zip(all).collect();
        let figure = |transport, beside| {
            let test = Test { name: "pingpong", bytes: 8 };
            Figure { implementation: Implementation::Mpich, transport, test, beside, bound: None }
        };
        let ratio = |run: Run| (run.value, run.limit);
        assert_eq!(run(&figure(Transport::Verbs, Transport::Tcp), &outputs).map(ratio), Ok((2.0, Some(10.0))));
        assert!(run(&figure(Transport::Verbs, Transport::SharedMemory), &outputs).is_err());
    }

    #[test]
    fn the_first_host_is_the_launchers_own() {
        let line = Implementation::Mpich.line(Transport::Tcp, &["10.0.0.1", "10.0.0.2"], "/tmp/x");
        assert!(line.contains("-localhost 10.0.0.1 -hosts 10.0.0.1,10.0.0.2 "), "{line}");
        let line = Implementation::OpenMpi.line(Transport::SharedMemory, &["10.0.0.1"], "/tmp/x");
        assert!(line.contains("--host 10.0.0.1:2 "), "{line}");
    }
}
