//! PID 1 of a `freeflow run` container: arranges the view, starts the command, passes signals on, reaps, and ends with
//! the command's exit status. The kernel ends everything else in the container with it.
//!
//! It reports to its supervisor over a seqpacket socket, one [`Report`] a message; the end of the connection says
//! that the command runs. Its supervisor's death kills it (PR_SET_PDEATHSIG).

use crate::failure::{Context, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_RUN_FAILED, Failure, Result};
use crate::sys::{self, Fork, Signals};
use crate::view::{View, drop_capabilities};
use freeflow_shm::fd::{receive_message, send_message};
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitOptions, set_dumpable_behavior, set_parent_process_death_signal, setsid,
};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// The namespaces are there; the supervisor may plug in the vNIC, then sends [`GO`]. With a terminal, its master
    /// end comes along.
    Ready,
    Failed {
        message: String,
        code: u8,
    },
}

/// The supervisor's leave to start the command.
pub const GO: &[u8] = b"go";

/// Program to run, and how.
#[derive(Clone, Debug)]
pub struct Program {
    pub command: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub working_directory: PathBuf,
    pub terminal: bool,
}

/// The body of the forked process.
pub fn main(view: &View, program: &Program, channel: OwnedFd) -> ! {
    match start(view, program, &channel) {
        Ok((command, signals)) => supervise(command, &signals),
        Err(failure) => {
            report(&channel, &Report::Failed { message: failure.to_string(), code: failure.code() }, &[]);
            sys::exit_now(i32::from(EXIT_RUN_FAILED))
        }
    }
}

fn report(channel: &OwnedFd, report: &Report, fds: &[BorrowedFd<'_>]) {
    let bytes = serde_json::to_vec(report).expect("reports are encodable");
    // A supervisor that can't hear it is dying, and this process with it.
    let _ = send_message(channel.as_fd(), &bytes, fds);
}

fn start(view: &View, program: &Program, channel: &OwnedFd) -> Result<(Pid, Signals)> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("prctl")?;
    hold_tight()?;
    sys::unshare(UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)
        .context("can't make namespaces (root with CAP_SYS_ADMIN is needed)")?;
    let replaced = view.enter()?;
    let mut program = program.clone();
    if !replaced {
        let directory = view.library.parent().unwrap_or(std::path::Path::new("/")).display().to_string();
        add_library_path(&mut program.environment, &directory);
    }
    let terminal = if program.terminal { Some(crate::terminal::open()?) } else { None };
    let master: Vec<BorrowedFd<'_>> = terminal.iter().map(|terminal| terminal.master.as_fd()).collect();
    report(channel, &Report::Ready, &master);
    let mut bytes = Vec::new();
    let (length, _) = receive_message(channel.as_fd(), &mut bytes, 0).context("the supervisor")?;
    if bytes.get(..length) != Some(GO) {
        // The supervisor gave up, or died before PR_SET_PDEATHSIG was set.
        sys::exit_now(i32::from(EXIT_RUN_FAILED));
    }
    drop_capabilities()?;
    // Blocked before the fork: the command's end must not be missed.
    drop(Signals::init().context("signals")?);
    let child = match sys::fork().context("fork")? {
        Fork::Parent(child) => child,
        Fork::Child => {
            let slave = terminal.map(|terminal| terminal.slave);
            let failure = exec(&program, slave);
            report(channel, &Report::Failed { message: failure.to_string(), code: failure.code() }, &[]);
            sys::exit_now(i32::from(failure.code()))
        }
    };
    // Nothing of the host stays open here, where the container's root could reach it; and the end of an output pipe
    // is the command's to report.
    let null =
        rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).context("/dev/null")?;
    rustix::stdio::dup2_stdin(&null).context("stdin")?;
    rustix::stdio::dup2_stdout(&null).context("stdout")?;
    rustix::stdio::dup2_stderr(&null).context("stderr")?;
    std::mem::forget((null, terminal));
    sys::close_from(3).context("close_range")?;
    Ok((child, Signals::init().context("signals")?))
}

/// Until its exec, nobody in the container may trace this process or take its descriptors: they are
/// the host's (the admin connection, namespaces, cgroups), and once the capabilities are dropped
/// the container's root has as many.
pub fn hold_tight() -> Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("prctl")
}

fn add_library_path(environment: &mut Vec<(String, String)>, directory: &str) {
    match environment.iter_mut().find(|(key, _)| key == "LD_LIBRARY_PATH") {
        Some((_, value)) => *value = format!("{directory}:{value}"),
        None => environment.push(("LD_LIBRARY_PATH".into(), directory.into())),
    }
}

/// Becomes the program; comes back only with the reason why not.
pub fn exec(program: &Program, slave: Option<OwnedFd>) -> Failure {
    match prepare_exec(program, slave) {
        Ok(mut command) => {
            let error = command.exec();
            let code = match error.kind() {
                io::ErrorKind::NotFound => EXIT_NOT_FOUND,
                _ => EXIT_NOT_EXECUTABLE,
            };
            Failure::new(format!("can't run {}: {}", program.command[0], plain(&error))).with_code(code)
        }
        Err(failure) => failure.or_code(EXIT_RUN_FAILED),
    }
}

fn prepare_exec(program: &Program, slave: Option<OwnedFd>) -> Result<Command> {
    setsid().context("setsid")?;
    if let Some(slave) = slave {
        crate::terminal::make_controlling(&slave)?;
    }
    std::env::set_current_dir(&program.working_directory)
        .context(format!("can't enter the working directory {}", program.working_directory.display()))?;
    sys::close_on_exec_from(3).context("close_range")?;
    sys::reset_signals();
    let mut command = Command::new(resolve(program));
    command.arg0(&program.command[0]).args(&program.command[1..]);
    command.env_clear().envs(program.environment.iter().map(|(key, value)| (key, value)));
    Ok(command)
}

/// The program's file, looked for in the PATH of its own environment.
fn resolve(program: &Program) -> PathBuf {
    let name = &program.command[0];
    if name.contains('/') {
        return PathBuf::from(name);
    }
    let path = program.environment.iter().rev().find(|(key, _)| key == "PATH").map_or("", |(_, value)| value.as_str());
    std::env::split_paths(path)
        .map(|directory| directory.join(name))
        .find(|candidate| freeflow_hostnet::programs::is_executable(candidate))
        // Not found: a path that can't exist, for the exec to say so.
        .unwrap_or_else(|| PathBuf::from("/proc/self/nonexistent").join(name))
}

fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program; check the name and the container's PATH".into(),
        io::ErrorKind::PermissionDenied => "permission denied; is it an executable file?".into(),
        _ => error.to_string(),
    }
}

/// Passes signals to the command and reaps until the command ends.
fn supervise(command: Pid, signals: &Signals) -> ! {
    loop {
        let _ = rustix::event::poll(
            &mut [rustix::event::PollFd::from_borrowed_fd(signals.fd(), rustix::event::PollFlags::IN)],
            None,
        );
        while let Some(signal) = signals.next() {
            if signal != Signal::CHILD.as_raw() {
                // It may have ended just now.
                let _ = sys::send_signal(command, signal);
            }
        }
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if pid == command {
                sys::exit_now(exit_code(status));
            }
        }
    }
}

/// The shell's number for how a process ended.
pub fn exit_code(status: rustix::process::WaitStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => i32::from(EXIT_RUN_FAILED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_path_is_put_first() {
        let mut environment = vec![("LD_LIBRARY_PATH".to_string(), "/a".to_string())];
        add_library_path(&mut environment, "/ff");
        assert_eq!(environment, [("LD_LIBRARY_PATH".into(), "/ff:/a".into())]);
    }

    #[test]
    fn programs_are_found_in_their_own_path() {
        let program = |name: &str, path: &str| Program {
            command: vec![name.into()],
            environment: vec![("PATH".into(), path.into())],
            working_directory: "/".into(),
            terminal: false,
        };
        assert_eq!(resolve(&program("sh", "/nowhere:/bin")), PathBuf::from("/bin/sh"));
        assert_eq!(resolve(&program("./x", "/bin")), PathBuf::from("./x"));
        assert!(!resolve(&program("sh", "")).exists());
    }
}
