//! Starting and ending the router process.

use crate::cgroup;
use crate::failure::{Context, Failure, Result, fail};
use crate::process::{Process, poll_readable};
use crate::sys::{self, Fork};
use crate::tools;
use freeflow_hostnet::run_dir::{RunDir, Settings};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long a router may take until it is ready.
const START_TIMEOUT: Duration = Duration::from_secs(15);
/// All of the caller's environment that the router, and the command that it runs, may see.
pub const ENVIRONMENT: [&str; 2] = ["PATH", "FREEFLOW_LIBDIR"];
/// The kernel should take almost anything before the router, on which all containers depend.
pub const OOM_SCORE_ADJUSTMENT: &str = "-900";
/// How long it may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the router in a session of its own and returns when it accepts work.
pub fn start(run_dir: &RunDir, settings: &Settings) -> Result<()> {
    let program = tools::router()?;
    let log_path = run_dir.router_log();
    let log = File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .context(format!("can't write {}", log_path.display()))?;
    let before = log.metadata().map_or(0, |metadata| metadata.len());
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("pipe")?;
    let child = match sys::fork().context("fork")? {
        Fork::Child => {
            let failure = become_router(&program, run_dir, settings, &log, writer.as_fd());
            use std::io::Write;
            let _ = writeln!(&log, "{failure}");
            sys::exit_now(1)
        }
        Fork::Parent(child) => child,
    };
    drop(writer);
    let ready = poll_readable(&reader, Some(START_TIMEOUT)).context("the router")?;
    let mut byte = [0];
    if ready && File::from(reader).read(&mut byte).is_ok_and(|length| length > 0) {
        return Ok(());
    }
    let _ = rustix::process::kill_process(child, Signal::KILL);
    let said = last_line(&log_path, before);
    let why = if ready { "did not start" } else { "was not ready in time" };
    Err(Failure::new(format!("the router {why}: {said} (more in {})", log_path.display())))
}

/// The forked child's way to the exec; comes back only with the reason why not.
fn become_router(
    program: &Path,
    run_dir: &RunDir,
    settings: &Settings,
    log: &File,
    ready: std::os::fd::BorrowedFd<'_>,
) -> Failure {
    let prepare = || -> Result<Command> {
        rustix::process::setsid().context("setsid")?;
        sys::close_on_exec_from(3).context("close_range")?;
        sys::reset_signals();
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        let mut complaints = cgroup::enter_own(run_dir);
        // Lower than it was only with CAP_SYS_RESOURCE.
        if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJUSTMENT) {
            complaints.push(format!("keeps its oom_score_adj: {error}"));
        }
        for complaint in complaints {
            use std::io::Write;
            let mut log = log;
            let _ = writeln!(log, "the router {complaint}");
        }
        let ready_fd = sys::keep_on_exec(ready).context("fcntl")?;
        let mut command = Command::new(program);
        command
            .arg("--run-dir")
            .arg(run_dir.path())
            .args(["--mode", &settings.mode, "--pool", &settings.pool, "--host", &settings.host])
            .args(["--bridge", &run_dir.bridge()])
            .args(settings.workers.iter().flat_map(|count| ["--workers".into(), count.to_string()]))
            .args(settings.shards.iter().flat_map(|count| ["--shards".into(), count.to_string()]))
            .args(settings.shard_by.iter().flat_map(|by| ["--shard-by", by]))
            .args(settings.move_bytes_min.iter().flat_map(|bytes| ["--move-bytes-min".into(), bytes.to_string()]))
            .args(settings.attachment.iter().flat_map(|attachment| ["--attachment", attachment]))
            .args(settings.metrics_listen.iter().flat_map(|address| ["--metrics-listen".into(), address.to_string()]))
            .args(settings.state.iter().flat_map(|path| [OsStr::new("--state-dir"), path.as_os_str()]))
            .args(tools::own_path().iter().flat_map(|path| [OsStr::new("--command"), path.as_os_str()]))
            .args(settings.range.iter().flat_map(|range| ["--range", range]))
            .args(settings.peers.iter().flat_map(|path| [OsStr::new("--peers"), path.as_os_str()]))
            .args(settings.cluster.iter().map(|_| "--follows-cluster"))
            .args(["--ready-fd", &ready_fd.to_string()])
            .env_clear()
            .envs(ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("log")?)
            .stderr(log.try_clone().context("log")?);
        Ok(command)
    };
    match prepare() {
        Ok(mut command) => Failure::new(format!("can't run {}: {}", program.display(), command.exec())),
        Err(failure) => failure,
    }
}

/// The last line the router has written since.
fn last_line(log: &Path, since: u64) -> String {
    const TAIL_BYTES: u64 = 4096;
    let tail = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(since.max(end.saturating_sub(TAIL_BYTES))))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = tail().unwrap_or_default();
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").trim().to_string()
}

/// The router of this run directory by its own record, if it lives.
pub fn recorded(run_dir: &RunDir) -> Option<Process> {
    let pid = fs::read_to_string(run_dir.router_pid()).ok()?.trim().parse().ok()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    // The kernel keeps 15 characters of a name.
    if name.trim() != "freeflow-router" { None } else { Process::of(pid) }
}

/// Ends a router that does not listen, by its process.
pub fn kill(run_dir: &RunDir) -> Result<()> {
    match recorded(run_dir) {
        Some(process) => wait_end(process, true),
        None => Ok(()),
    }
}

/// Waits until a router has ended; one that was asked to and does not is killed.
pub fn wait_end(process: Process, at_once: bool) -> Result<()> {
    if at_once || !process.wait_end(END_TIMEOUT) {
        process.signal(Signal::KILL).context("can't end the router")?;
        if !process.wait_end(END_TIMEOUT) {
            fail!("the router (process {}) does not end", process.pid);
        }
    }
    Ok(())
}
