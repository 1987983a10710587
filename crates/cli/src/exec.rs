//! `freeflow exec`: another program in the namespaces of a running container.

use crate::arguments::Exec;
use crate::failure::{Context, EXIT_RUN_FAILED, Failure, Result, fail};
use crate::init::{self, Program};
use crate::record::{Records, State};
use crate::run::add_settings;
use crate::supervisor::{Running, watch};
use crate::sys::{self, Fork, Signals};
use crate::terminal;
use crate::view::drop_capabilities;
use freeflow_hostnet::run_dir::RunDir;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use std::fs::File;
use std::io::Read;
use std::io::Write;
use std::os::fd::AsFd;

pub fn exec(run_dir: &RunDir, arguments: Exec) -> Result<i32> {
    enter(run_dir, &arguments).map_err(|failure| failure.or_code(EXIT_RUN_FAILED))
}

fn enter(run_dir: &RunDir, arguments: &Exec) -> Result<i32> {
    let record = Records::of(run_dir).get(&arguments.name)?;
    let init = record.init.filter(|_| record.state == State::Running).and_then(|init| Some((init, init.open()?)));
    let Some((init, handle)) = init else {
        fail!("container {} is not running", record.name);
    };
    let known = record.environment.iter().filter_map(|setting| setting.split_once('='));
    let mut environment: Vec<(String, String)> =
        known.map(|(key, value)| (key.to_string(), value.to_string())).collect();
    add_settings(&mut environment, &arguments.environment)?;
    let working_directory = arguments.working_directory.clone().unwrap_or(record.working_directory);
    let program = Program { command: arguments.command.clone(), environment, working_directory, terminal: false };
    let signals = Signals::supervisor().context("signals")?;
    // The root may be a changed one (chroot), which a mount namespace does not remember.
    let root = File::open(format!("/proc/{}/root", init.pid)).context("the container's root")?;
    let all = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION;
    move_into_thread_name_spaces(handle.as_fd(), all).context(format!("can't enter container {}", arguments.name))?;
    rustix::process::fchdir(&root).context("the container's root")?;
    rustix::process::chroot(".").context("the container's root")?;
    drop((root, handle));
    // Of the container's own /dev/pts, so here.
    let terminal = if arguments.tty && terminal::is_present() { Some(terminal::open()?) } else { None };
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("pipe")?;
    match sys::fork().context("fork")? {
        Fork::Child => {
            drop(reader);
            let failure = match give_up_rights() {
                Ok(()) => init::exec(&program, terminal.map(|terminal| terminal.slave)),
                Err(failure) => failure.or_code(EXIT_RUN_FAILED),
            };
            let _ = File::from(writer).write_all(failure.to_string().as_bytes());
            sys::exit_now(i32::from(failure.code()))
        }
        Fork::Parent(child) => {
            drop(writer);
            let mut message = String::new();
            File::from(reader).read_to_string(&mut message).context("the program")?;
            let code = watch(&Running { pid: child, master: terminal.map(|terminal| terminal.master) }, &signals);
            if message.is_empty() {
                return Ok(code);
            }
            Err(Failure::new(message).with_code(u8::try_from(code).unwrap_or(EXIT_RUN_FAILED)))
        }
    }
}

fn give_up_rights() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("prctl")?;
    init::hold_tight()?;
    drop_capabilities()
}
