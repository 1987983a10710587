//! The host side: a router of our own, two containers, an agent in each.
//!
//! Invariant: nothing here starts a thread, because the limits fork between the measurements (see [`crate::sys`]).
use crate::group::Group;
use crate::sys;
use crate::verbs::{Reply, Request};
use serde_json::Value;
use std::env;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Longest that an agent may take to answer, beside the work it was asked for.
pub const REPLY_MAX: Duration = Duration::from_secs(20);
/// Longest that a container may take to end when its agent has nothing more to read.
const END_MAX: Duration = Duration::from_secs(5);

/// How a router waits (its `--mode`).
pub const MODES: [&str; 3] = ["fastpath", "lowcpu", "adaptive"];

/// A router with a run directory of its own; taken down when dropped.
pub struct Freeflow {
    program: PathBuf,
    run_dir: PathBuf,
    pub router_pid: u32,
    /// Dropped last: its members have ended then. `None`: everything stays in the group it was started in.
    group: Option<Group>,
}

impl Freeflow {
    /// Starts a router in this mode; in one scheduling group with the containers, unless everything is to be left as it
    /// is started.
    pub fn up(program: &Path, mode: &str, one_group: bool) -> Result<Self, String> {
        let mut host = Self::up_with(program, mode, &[])?;
        if one_group {
            match Group::new(&format!("freeflow-bench.{}.{mode}", std::process::id())) {
                Ok(group) => host.group = Some(group),
                Err(error) => eprintln!("freeflow-bench: everything stays in its own scheduling group: {error}"),
            }
            host.take_in(host.router_pid)?;
        }
        Ok(host)
    }

    /// The same with more options of `freeflow up`, and everything left as it is.
    pub fn up_with(program: &Path, mode: &str, options: &[&str]) -> Result<Self, String> {
        // Short, because socket paths are.
        let kind = options.concat();
        let run_dir = PathBuf::from(format!("/tmp/ffbench.{}.{mode}{kind}", std::process::id()));
        fs::create_dir_all(&run_dir).map_err(|error| format!("{}: {error}", run_dir.display()))?;
        let mut host = Self { program: program.to_owned(), run_dir, router_pid: 0, group: None };
        host.call(&[&["up", "--mode", mode], options].concat())?;
        let status = host.status()?;
        let pid = status.get("pid").and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
        host.router_pid = pid.ok_or("freeflow status names no pid")?;
        Ok(host)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--run-dir").arg(&self.run_dir);
        command
    }

    fn call(&self, arguments: &[&str]) -> Result<String, String> {
        let what = format!("freeflow {}", arguments.join(" "));
        // Not through pipes: a daemon that keeps them open would keep us reading.
        let (out, errors) = (self.run_dir.join("bench.out"), self.run_dir.join("bench.err"));
        let file = |path: &Path| fs::File::create(path).map_err(|error| format!("{}: {error}", path.display()));
        let mut command = self.command();
        command.args(arguments).stdin(Stdio::null()).stdout(file(&out)?).stderr(file(&errors)?);
        let status = command.status().map_err(|error| format!("{}: {error}", self.program.display()))?;
        if !status.success() {
            let said = fs::read_to_string(&errors).unwrap_or_default();
            return Err(format!("{what}: {status}: {}", said.trim()));
        }
        fs::read_to_string(&out).map_err(|error| error.to_string())
    }

    pub fn status(&self) -> Result<Value, String> {
        let text = self.call(&["status", "-o", "json"])?;
        serde_json::from_str(&text).map_err(|error| format!("freeflow status: {error}"))
    }

    /// CPU time of all the router's threads so far, nanoseconds.
    pub fn router_cpu_ns(&self) -> u64 {
        sys::thread_cpu_ns(self.router_pid).map_or(0, |threads| threads.iter().map(|(_, ns)| ns).sum())
    }

    /// A container with an agent in it.
    pub fn agent(&self, name: &str) -> Result<Agent, String> {
        let mut agent = self.starting_agent(name, &[])?;
        agent.ask(&Request::Hello)?;
        self.take_in(self.pid_of(name)?)?;
        Ok(agent)
    }

    /// The same, run by another program, and not waited for: its answer to a `Hello` shows that it is there.
    pub fn starting_agent(&self, name: &str, under: &[String]) -> Result<Agent, String> {
        self.starting_agent_in(None, name, under)
    }

    /// The same in a declared network.
    pub fn starting_agent_in(&self, network: Option<&str>, name: &str, under: &[String]) -> Result<Agent, String> {
        let program = env::current_exe().map_err(|error| error.to_string())?;
        let mut command = self.command();
        command.args(["run", "--rm", "--share-host", "--name", name]);
        if let Some(network) = network {
            command.args(["--network", network]);
        }
        command.arg("--").args(under).arg(program).arg("agent");
        Agent::start(name, command)
    }

    /// A container with another program and these of the host's files, in the background.
    pub fn start(&self, name: &str, files: &[&str], argv: &[String]) -> Result<(), String> {
        let volumes: Vec<String> = files.iter().map(|file| format!("{file}:{file}")).collect();
        let mut words = vec!["run", "-d", "--name", name];
        words.extend(volumes.iter().flat_map(|volume| ["-v", volume.as_str()]));
        words.push("--");
        words.extend(argv.iter().map(String::as_str));
        self.call(&words).map(|_| ())
    }

    pub fn is_running(&self, name: &str) -> Result<bool, String> {
        Ok(self.container(name)?.is_some_and(|row| row.get("status").and_then(Value::as_str) == Some("running")))
    }

    /// Output of its program.
    pub fn logs(&self, name: &str) -> Result<String, String> {
        self.call(&["logs", name])
    }

    pub fn remove(&self, name: &str) -> Result<(), String> {
        self.call(&["rm", "-f", name]).map(|_| ())
    }

    /// Declares what this YAML says.
    pub fn apply(&self, declaration: &str) -> Result<(), String> {
        let file = self.run_dir.join("bench.yaml");
        fs::write(&file, declaration).map_err(|error| format!("{}: {error}", file.display()))?;
        let file = file.to_str().ok_or("a path that is no text")?;
        self.call(&["apply", "-f", file]).map(|_| ())
    }

    pub fn delete(&self, kind: &str, name: &str) -> Result<(), String> {
        self.call(&["delete", kind, name]).map(|_| ())
    }

    /// Which way messages of the default network take: `auto`, `direct` or `routed`.
    ///
    /// # Errors
    /// A `freeflow` that knows no such choice.
    pub fn set_data_path(&self, path: &str) -> Result<(), String> {
        self.call(&["network", "set", "default", "--data-path", path]).map(|_| ())
    }

    fn take_in(&self, pid: u32) -> Result<(), String> {
        self.group.as_ref().map_or(Ok(()), |group| group.add(pid)).map_err(|error| format!("scheduling group: {error}"))
    }

    fn container(&self, name: &str) -> Result<Option<Value>, String> {
        let text = self.call(&["ps", "-o", "json"])?;
        let list: Vec<Value> = serde_json::from_str(&text).map_err(|error| format!("freeflow ps: {error}"))?;
        Ok(list.into_iter().find(|container| container.get("name").and_then(Value::as_str) == Some(name)))
    }

    /// The process of a container, as the host numbers it.
    fn pid_of(&self, name: &str) -> Result<u32, String> {
        let pid = self.container(name)?.and_then(|container| container.get("pid")?.as_u64());
        pid.and_then(|pid| u32::try_from(pid).ok()).ok_or_else(|| format!("freeflow ps names no process of {name}"))
    }
}

impl Drop for Freeflow {
    fn drop(&mut self) {
        if let Err(error) = self.call(&["down", "--force"]) {
            eprintln!("freeflow-bench: {error}");
        }
        let _ = fs::remove_dir_all(&self.run_dir);
    }
}

/// The host's end of an agent; dropped, it ends the container.
pub struct Agent {
    name: String,
    child: Child,
    input: Option<std::process::ChildStdin>,
    output: std::process::ChildStdout,
    unread: Vec<u8>,
}

impl Agent {
    /// An agent that `command` runs in a container. Whether it is there shows its answer to a `Hello`.
    pub fn start(name: &str, mut command: Command) -> Result<Self, String> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".to_owned());
        };
        Ok(Self { name: name.to_owned(), child, input: Some(input), output, unread: Vec::new() })
    }

    /// Lets the container end by itself meanwhile; dropping waits for it.
    pub fn dismiss(&mut self) {
        self.input = None;
    }

    pub fn send(&mut self, request: &Request) -> Result<(), String> {
        let mut line = serde_json::to_string(request).map_err(|error| error.to_string())?;
        line.push('\n');
        let input = self.input.as_mut().ok_or("closed")?;
        input.write_all(line.as_bytes()).map_err(|error| format!("{}: {error}", self.name))
    }

    /// The next reply; other lines are not ours. A `Failed` one is an error.
    pub fn receive(&mut self, within: Duration) -> Result<Reply, String> {
        let deadline = Instant::now() + within;
        loop {
            while let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(Reply::Failed(why)) => return Err(format!("{}: {why}", self.name)),
                    Ok(reply) => return Ok(reply),
                    Err(_) => eprint!("{}: {}", self.name, String::from_utf8_lossy(&line)),
                }
            }
            let mut bytes = [0; 4096];
            match self.readable(deadline).and_then(|()| self.output.read(&mut bytes)) {
                Ok(0) => return Err(format!("{}: ended", self.name)),
                Ok(count) => self.unread.extend_from_slice(&bytes[..count]),
                Err(error) => return Err(format!("{}: {error}", self.name)),
            }
        }
    }

    fn readable(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis() as i32;
        let mut wanted = libc::pollfd { fd: self.output.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        match unsafe { libc::poll(&mut wanted, 1, left) } {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")),
            ready if ready < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    pub fn ask(&mut self, request: &Request) -> Result<Reply, String> {
        self.send(request)?;
        self.receive(REPLY_MAX)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.input = None;
        let deadline = Instant::now() + END_MAX;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        // SAFETY: our own child, not yet waited for. `freeflow run` passes the signal on.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        thread::sleep(Duration::from_millis(500));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
