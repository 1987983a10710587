//! The `freeflow` command: brings a host up, runs programs in containers with a vNIC, shows what goes on.
//!
//! It talks to the router by `RUN_DIR/api.sock` (REST) and `RUN_DIR/admin.sock`; `ping` has a
//! session at each of two vNICs besides, and a second thread. It has no state of its own beyond the
//! run directory; what must outlive a call (a container) has a supervisor process, see
//! `supervisor`.
#![deny(unsafe_code)]

mod abilities;
mod admin;
mod argument_values;
mod arguments;
mod arguments_control;
mod arguments_test;
mod bug_report;
mod cgroup;
mod cluster;
mod cm;
mod cni;
mod complete;
mod connectivity;
mod container_names;
mod container_owner;
mod control;
mod docker;
mod doctor;
mod engine_container;
mod exec;
mod failure;
mod follower;
mod fork;
mod generate;
mod holders;
mod hook;
mod hosts_file;
mod init;
mod inject;
mod inject_sysfs;
mod inject_sysfs_several;
mod installation;
mod interruption;
mod keys;
mod lab;
mod lab_build;
mod lifecycle;
mod names;
mod networks;
mod output;
mod own_files;
mod peers;
mod ping;
mod process;
mod publisher;
mod qps;
mod record;
mod router;
mod run;
mod runtime;
mod service;
mod show;
mod supervisor;
mod sys;
mod terminal;
mod tools;
mod up;
mod view;
mod vm;
mod wire;

use arguments::{Arguments, Command, Format, LabAction, Network, Peers, Stage};
use arguments_control::Cluster;
use arguments_test::TestAction;
use clap::Parser;
use failure::{EXIT_RUN_FAILED, Failure, Result};
use freeflow_hostnet::run_dir::RunDir;
use hook::Wanted;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let arguments = Arguments::parse_from(command_line(std::env::args_os()));
    match dispatch(arguments) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(EXIT_RUN_FAILED)),
        Err(failure) => {
            output::complaint(&failure);
            ExitCode::from(failure.code())
        }
    }
}

/// The command line, where the program was called by the name of a runtime or a plugin: with that command.
fn command_line(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    let name = words.first().and_then(|word| Path::new(word).file_name());
    let command = [(runtime::PROGRAM, "runtime"), (cni::PROGRAM, "cni")]
        .into_iter()
        .find_map(|(program, command)| (name == Some(OsStr::new(program))).then_some(command));
    if let Some(command) = command {
        words.splice(0..1, ["freeflow".into(), command.into()]);
    }
    words
}

fn dispatch(arguments: Arguments) -> Result<i32> {
    let run_dir = RunDir::new(&arguments.run_dir)?;
    if let Some(result) = control::dispatch(&run_dir, &arguments.command) {
        return result;
    }
    let needs_nothing = needs_nothing(&arguments.command);
    if !needs_nothing {
        require_privilege(&arguments.command)?;
    }
    if !needs_nothing && !matches!(arguments.command, Command::Lab(_)) {
        run_dir.enter_network()?;
    }
    match arguments.command {
        Command::Up(up) => up::up(&run_dir, &up)?,
        Command::Down { force, all: true } => installation::down(&run_dir, force)?,
        Command::Down { force, .. } => up::down(&run_dir, force)?,
        Command::Status { output } => show::status(&run_dir, output.format)?,
        Command::Run(run) => return run::run(&run_dir, run),
        Command::Exec(exec) => return exec::exec(&run_dir, exec),
        Command::Stop { time, names } => lifecycle::stop(&run_dir, &names, Duration::from_secs(time))?,
        Command::Rm { force, names } => lifecycle::remove(&run_dir, &names, force)?,
        Command::Logs { follow, name } => lifecycle::logs(&run_dir, &name, follow)?,
        Command::Ps { hosts, output, .. } if hosts.all_hosts => {
            control::containers(&run_dir, &hosts, output.format == Format::Json)?;
        }
        Command::Ps { cm: true, output, .. } => cm::list(&run_dir, output.format)?,
        Command::Ps { qps: true, output, .. } => qps::list(&run_dir, output.format)?,
        Command::Ps { all, output, .. } => show::containers(&run_dir, all, output.format)?,
        Command::Ping(arguments) => ping::ping(&run_dir, &arguments)?,
        Command::Network(Network::Ls { output }) => show::networks(&run_dir, output.format)?,
        Command::Network(Network::Set { name, data_path }) => qps::set_network(&run_dir, &name, data_path)?,
        Command::Vm(action) => vm::vm(&run_dir, action)?,
        Command::Lab(action) => return lab::lab(&run_dir, action),
        Command::Wire(action) => wire::wire(&run_dir, action)?,
        Command::Capture(arguments) => wire::capture(&run_dir, &arguments)?,
        Command::Peers(action) => peers::peers(&run_dir, action)?,
        Command::Cluster(Cluster::Follow) => follower::follow(&run_dir)?,
        Command::Cluster(action) => cluster::cluster(&run_dir, action)?,
        Command::Host(action) => cluster::host(&run_dir, action)?,
        Command::Move(arguments) => cluster::move_vnic(&run_dir, &arguments)?,
        Command::Doctor { output } => doctor::doctor(&run_dir, output.format)?,
        Command::Test(action) => connectivity::test(&run_dir, &action)?,
        Command::Bugreport(arguments) => bug_report::bug_report(&run_dir, &arguments)?,
        Command::Version => show::version(&run_dir),
        Command::Generate { directory } => generate::generate(&directory)?,
        Command::Complete { words } => complete::complete(&run_dir, &words),
        Command::Apply(_)
        | Command::Get(_)
        | Command::Describe(_)
        | Command::Delete(_)
        | Command::Diff(_)
        | Command::Top(_) => {
            unreachable!("these were dispatched before")
        }
        Command::Runtime(arguments) => runtime::runtime(&run_dir, &arguments)?,
        Command::Docker(action) => docker::docker(&action)?,
        Command::Cni => return Ok(cni::cni(&run_dir)),
        Command::Hook(hook) => {
            let new = Wanted::Network(&hook.network, &hook.labels);
            let wanted = hook.vnic.as_deref().map_or(new, Wanted::Vnic);
            match hook.stage {
                Stage::CreateRuntime => hook::create_runtime(&run_dir, wanted)?,
                Stage::Poststop => hook::poststop(&run_dir, wanted)?,
            }
        }
    }
    Ok(0)
}

/// Whether a command needs neither rights nor the host's network.
fn needs_nothing(command: &Command) -> bool {
    match command {
        Command::Doctor { .. } | Command::Version | Command::Runtime(_) | Command::Generate { .. } => true,
        Command::Cni | Command::Docker(_) | Command::Complete { .. } => true,
        Command::Peers(Peers::Key { .. }) | Command::Move(_) | Command::Host(_) => true,
        Command::Test(TestAction::End(_)) => true,
        Command::Ps { hosts, .. } => hosts.all_hosts,
        Command::Cluster(action) => !matches!(action, Cluster::Follow),
        _ => false,
    }
}

fn require_privilege(command: &Command) -> Result<()> {
    if sys::is_privileged() {
        return Ok(());
    }
    if matches!(command, Command::Hook(_)) {
        return Err(Failure::new(container_owner::ROOTLESS));
    }
    let why = match command {
        Command::Lab(_) => "it makes network namespaces and starts routers",
        Command::Up(_) | Command::Down { .. } => "it makes network interfaces and starts the router",
        Command::Run(_) | Command::Exec(_) => "it makes namespaces, mounts and network interfaces",
        _ => "the router's admin socket is for root only",
    };
    let code = match command {
        Command::Run(_) | Command::Exec(_) => EXIT_RUN_FAILED,
        Command::Lab(LabAction::Run { .. } | LabAction::Exec { .. } | LabAction::Enter { .. }) => EXIT_RUN_FAILED,
        _ => failure::EXIT_FAILURE,
    };
    let remedy = if rustix::process::geteuid().is_root() {
        "give it CAP_SYS_ADMIN and CAP_NET_ADMIN (this root lacks them)"
    } else {
        "use sudo freeflow …"
    };
    Err(Failure::new(format!("this needs root, because {why}; {remedy}")).with_code(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_program_chooses_the_command() {
        let line = |text: &str| command_line(text.split(' ').map(OsString::from));
        assert_eq!(line("/usr/bin/freeflow-runtime --root /r list"), ["freeflow", "runtime", "--root", "/r", "list"]);
        assert_eq!(line("/opt/cni/bin/freeflow-cni"), ["freeflow", "cni"]);
        assert_eq!(line("/usr/bin/freeflow ps"), ["/usr/bin/freeflow", "ps"]);
        assert!(command_line(std::iter::empty()).is_empty());
    }
}
