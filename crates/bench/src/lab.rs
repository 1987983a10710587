//! Two hosts made by `freeflow lab`, and programs in them: in a host's own network, or in containers.
use crate::host::Agent;
use crate::limits::end::{EndFigures, READY, THERE};
use crate::limits::wire::End;
use crate::sys;
use serde_json::Value;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

pub const HOST_COUNT: u32 = 2;
/// A host's end of its link.
const LINK: &str = "eth0";
/// Offloads by which the kernel takes whole batches at a link: GSO and GRO, of UDP and of TCP.
const OFFLOADS: [&str; 5] = ["gso", "tso", "gro", "tx-udp-segmentation", "rx-udp-gro-forwarding"];
const IPERF_PORT: u16 = 5201;
/// Tries to reach a server that is about to listen.
const CONNECT_ATTEMPTS_MAX: u32 = 100;
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Where a program runs.
#[derive(Clone, Debug)]
pub enum Location {
    /// In the network of a host, from 1.
    Host(u32),
    Container(String),
}

/// A lab with a run directory of its own; taken down when dropped.
pub struct Lab {
    program: PathBuf,
    run_dir: PathBuf,
    pub mtu: u32,
    router_pids: Vec<u32>,
}

/// One transfer by `iperf3`.
#[derive(Clone, Copy, Debug)]
pub struct Iperf {
    pub gbit_per_s: f64,
    /// Cores used by each side.
    pub sender_cores: f64,
    pub receiver_cores: f64,
}

impl Lab {
    /// Two hosts whose routers wait in the default mode.
    pub fn up(program: &Path, mtu: u32) -> Result<Self, String> {
        Self::up_with(program, mtu, "plain", "plain", &[])
    }

    /// The same once more beside it under a name of its own, with plain or sealed packets between its hosts, and other
    /// options of `lab up`.
    pub fn beside(&self, wire: &str, name: &str, options: &[&str]) -> Result<Self, String> {
        Self::up_with(&self.program, self.mtu, wire, name, options)
    }

    fn up_with(program: &Path, mtu: u32, wire: &str, name: &str, options: &[&str]) -> Result<Self, String> {
        let run_dir = PathBuf::from(format!("/tmp/ffwire.{}.{mtu}.{name}", std::process::id()));
        fs::create_dir_all(&run_dir).map_err(|error| format!("{}: {error}", run_dir.display()))?;
        let mut lab = Self { program: program.to_owned(), run_dir, mtu, router_pids: Vec::new() };
        let (hosts, mtu) = (HOST_COUNT.to_string(), mtu.to_string());
        let words = ["lab", "up", "--hosts", &hosts, "--mtu", &mtu, "--wire", wire];
        lab.call(&[&words, options].concat())?;
        let status = lab.status()?;
        let hosts = status.get("hosts").and_then(Value::as_array).cloned().unwrap_or_default();
        let pids = hosts.iter().map(|host| host.get("router_pid")?.as_u64()?.try_into().ok());
        lab.router_pids = pids.collect::<Option<_>>().ok_or("freeflow lab status names no router")?;
        Ok(lab)
    }

    fn status(&self) -> Result<Value, String> {
        let text = self.call(&["lab", "status", "-o", "json"])?;
        serde_json::from_str(&text).map_err(|error| format!("freeflow lab status: {error}"))
    }

    fn freeflow(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--run-dir").arg(&self.run_dir);
        command
    }

    fn call(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = self.freeflow();
        command.args(arguments);
        self.finish(command, &format!("freeflow {}", arguments.join(" ")))
    }

    /// Runs a command to its end; its output.
    fn finish(&self, mut command: Command, what: &str) -> Result<String, String> {
        // Not through pipes: a daemon that keeps them open would keep us reading.
        let (out, errors) = (self.run_dir.join("bench.out"), self.run_dir.join("bench.err"));
        let file = |path: &Path| fs::File::create(path).map_err(|error| format!("{}: {error}", path.display()));
        command.stdin(Stdio::null()).stdout(file(&out)?).stderr(file(&errors)?);
        let status = command.status().map_err(|error| format!("{what}: {error}"))?;
        let said = fs::read_to_string(&out).unwrap_or_default();
        if !status.success() {
            let complaint = fs::read_to_string(&errors).unwrap_or_default();
            return Err(format!("{what}: {status}: {} {}", complaint.trim(), said.trim()));
        }
        Ok(said)
    }

    /// A command that runs a program there.
    pub fn command(&self, place: &Location, argv: &[&str]) -> Command {
        let mut command = self.freeflow();
        match place {
            Location::Host(number) => command.args(["lab", "enter", "--host", &number.to_string(), "--"]),
            Location::Container(name) => command.args(["lab", "exec", name, "--"]),
        };
        command.args(argv);
        command
    }

    /// The address of a host for the other one.
    pub fn address(number: u32) -> Ipv4Addr {
        Ipv4Addr::new(192, 168, 240, u8::try_from(number).unwrap_or(0))
    }

    /// A container with an agent in it, which need not yet be there.
    pub fn agent(&self, number: u32, name: &str) -> Result<Agent, String> {
        let program = env::current_exe().map_err(|error| error.to_string())?;
        let mut command = self.freeflow();
        command.args(["lab", "run", "--host", &number.to_string(), "--rm", "--share-host", "--name", name, "--"]);
        command.arg(program).arg("agent");
        Agent::start(name, command)
    }

    /// Puts the routers and all containers where the bare programs are: ahead of what else runs on this machine.
    pub fn favour(&self) -> Result<(), String> {
        let text = self.call(&["lab", "ps", "-o", "json"])?;
        let containers: Vec<Value> =
            serde_json::from_str(&text).map_err(|error| format!("freeflow lab ps: {error}"))?;
        let pids = containers.iter().filter_map(|container| container.get("pid")?.as_u64());
        for pid in pids.chain(self.router_pids.iter().copied().map(u64::from)) {
            sys::first_in_line(&pid.to_string());
        }
        Ok(())
    }

    /// CPU time of all threads of a host's router so far, nanoseconds.
    pub fn router_cpu_ns(&self, number: u32) -> u64 {
        let pid = self.router_pids.get(number as usize - 1).copied().unwrap_or(0);
        sys::thread_cpu_ns(pid).map_or(0, |threads| threads.iter().map(|(_, ns)| ns).sum())
    }

    fn host_run_dir(&self, number: u32) -> PathBuf {
        self.run_dir.join("labs/lab").join(format!("host{number}"))
    }

    /// A host's router's status of the wire.
    pub fn wire_status(&self, number: u32) -> Result<Value, String> {
        let mut command = Command::new(&self.program);
        command.arg("--run-dir").arg(self.host_run_dir(number)).args(["wire", "status", "-o", "json"]);
        let text = self.finish(command, "freeflow wire status")?;
        serde_json::from_str(&text).map_err(|error| format!("freeflow wire status: {error}"))
    }

    /// Faults of packets that both routers send, as options of `freeflow wire faults`; `None`: nothing.
    pub fn set_faults(&self, options: Option<&[&str]>) -> Result<(), String> {
        for number in 1..=HOST_COUNT {
            let mut command = Command::new(&self.program);
            command.arg("--run-dir").arg(self.host_run_dir(number)).args(["wire", "faults"]);
            match options {
                Some(options) => command.args(options),
                None => command.arg("off"),
            };
            self.finish(command, "freeflow wire faults")?;
        }
        Ok(())
    }

    /// Whether batches cross the links between the hosts whole, for everybody.
    pub fn set_offloads(&self, on: bool) -> Result<(), String> {
        let state = if on { "on" } else { "off" };
        for number in 1..=HOST_COUNT {
            let mut argv = vec!["ethtool", "-K", LINK];
            argv.extend(OFFLOADS[..4].iter().flat_map(|&offload| [offload, state]));
            self.finish(self.command(&Location::Host(number), &argv), "ethtool")?;
        }
        Ok(())
    }

    /// Runs two bare ends against each other: what the one that begins saw, and the one that answers.
    pub fn ends(
        &self,
        answers: (&Location, &End),
        begins: (&Location, &End),
    ) -> Result<(EndFigures, EndFigures), String> {
        let mut answering = Ending::start(self, answers.0, answers.1)?;
        answering.await_ready()?;
        let first = Ending::start(self, begins.0, begins.1)?.figures();
        let second = answering.figures();
        // The end that broke off first knows why.
        match (first, second) {
            (Ok(first), Ok(second)) => Ok((first, second)),
            (Err(first), Err(second)) => Err(format!("{first}; {second}")),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    /// One TCP transfer of `seconds`, from one place to the other.
    pub fn iperf(&self, from: &Location, to: (&Location, Ipv4Addr), seconds: f64) -> Result<Iperf, String> {
        let port = IPERF_PORT.to_string();
        let mut server = self.command(to.0, &["iperf3", "-s", "-1", "-p", &port]);
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Killed(server.spawn().map_err(|error| format!("iperf3: {error}"))?);
        // iperf3 takes whole seconds only.
        let (address, seconds) = (to.1.to_string(), (seconds.ceil() as u32).max(1).to_string());
        let argv = ["iperf3", "-c", &address, "-p", &port, "-t", &seconds, "-J"];
        let mut figures = Err("iperf3: no server".to_owned());
        for _ in 0..CONNECT_ATTEMPTS_MAX {
            // It may say that it could not connect, and yet exit with 0.
            figures = self.finish(self.command(from, &argv), "iperf3").and_then(|text| iperf_figures(&text));
            // Of those that fail, only the one that comes too early is not served.
            if figures.is_ok() || !matches!(server.0.try_wait(), Ok(None)) {
                break;
            }
            thread::sleep(CONNECT_INTERVAL);
        }
        figures
    }
}

fn iperf_figures(text: &str) -> Result<Iperf, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("iperf3: {error}"))?;
    let figure = |path: &str| {
        let why = || format!("iperf3 names no {path}: {}", value.get("error").unwrap_or(&Value::Null));
        value.pointer(path).and_then(Value::as_f64).ok_or_else(why)
    };
    Ok(Iperf {
        gbit_per_s: figure("/end/sum_received/bits_per_second")? / 1e9,
        sender_cores: figure("/end/cpu_utilization_percent/host_total")? / 100.0,
        receiver_cores: figure("/end/cpu_utilization_percent/remote_total")? / 100.0,
    })
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(error) = self.call(&["lab", "down", "--force"]) {
            eprintln!("freeflow-bench: {error}");
        }
        let _ = fs::remove_dir_all(&self.run_dir);
    }
}

/// A process that does not outlive its reader.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A bare end that runs.
struct Ending {
    child: Killed,
    output: BufReader<std::process::ChildStdout>,
    what: String,
}

impl Ending {
    fn start(lab: &Lab, place: &Location, end: &End) -> Result<Self, String> {
        let program = env::current_exe().map_err(|error| error.to_string())?;
        let program = program.to_str().ok_or("the path of this program is no text")?;
        let text = serde_json::to_string(end).map_err(|error| error.to_string())?;
        let mut command = lab.command(place, &[program, "wire-end", &text]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", lab.program.display()))?;
        let output = child.stdout.take().ok_or("no pipe")?;
        let mut ending = Self { child: Killed(child), output: BufReader::new(output), what: format!("{end:?}") };
        if matches!(place, Location::Container(_)) {
            ending.give_place()?;
        }
        Ok(ending)
    }

    /// Puts it where bare programs put themselves, once it is there, and lets it go on.
    fn give_place(&mut self) -> Result<(), String> {
        self.await_line(THERE)?;
        for pid in sys::with_descendants(self.child.0.id()) {
            sys::first_in_line(&pid.to_string());
        }
        let mut input = self.child.0.stdin.take().ok_or("no pipe")?;
        input.write_all(b"\n").map_err(|error| format!("{}: {error}", self.what))
    }

    fn complain(&mut self, why: &str) -> String {
        let mut said = String::new();
        if let Some(mut errors) = self.child.0.stderr.take() {
            let _ = errors.read_to_string(&mut said);
        }
        format!("{}: {why}: {}", self.what, said.trim())
    }

    fn await_ready(&mut self) -> Result<(), String> {
        self.await_line(READY)
    }

    fn await_line(&mut self, wanted: &str) -> Result<(), String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(_) if line.trim() == wanted => Ok(()),
            _ => Err(self.complain(&format!("is not {wanted}"))),
        }
    }

    fn figures(mut self) -> Result<EndFigures, String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).map_err(|error| error.to_string())?;
        if read == 0 {
            return Err(self.complain("broke off"));
        }
        serde_json::from_str(&line).map_err(|error| format!("{}: {error}", self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_iperf() {
        let text = r#"{"end": {"sum_received": {"bits_per_second": 12.5e9},
            "cpu_utilization_percent": {"host_total": 50.0, "remote_total": 99.0}}}"#;
        let figures = iperf_figures(text).expect("figures");
        assert_eq!((figures.gbit_per_s, figures.sender_cores, figures.receiver_cores), (12.5, 0.5, 0.99));
        assert!(iperf_figures("{}").is_err());
        assert!(iperf_figures("error").is_err());
    }
}
