//! `freeflow run`: from the command line to a plan, in the foreground or the background.

use crate::arguments::Run;
use crate::failure::{Context, EXIT_RUN_FAILED, Failure, Result, fail};
use crate::init::Program;
use crate::record::check_name;
use crate::supervisor::{Plan, supervise};
use crate::sys::{self, Fork};
use crate::view::Volume;
use crate::{terminal, tools};
use freeflow_hostnet::run_dir::RunDir;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub fn run(run_dir: &RunDir, arguments: Run) -> Result<i32> {
    let detached = arguments.detach;
    let plan = plan(arguments).map_err(|failure| failure.or_code(EXIT_RUN_FAILED))?;
    let result = if detached { in_background(run_dir, &plan) } else { supervise(run_dir, &plan, |_| {}) };
    result.map_err(|failure| failure.or_code(EXIT_RUN_FAILED))
}

fn plan(arguments: Run) -> Result<Plan> {
    // A declared vNIC is somebody's already: the container is called as it is.
    let name = arguments.name.or_else(|| arguments.vnic.clone());
    if let Some(name) = &name {
        check_name(name)?;
    }
    let working_directory = match arguments.working_directory {
        Some(directory) if directory.is_absolute() => directory,
        Some(directory) => fail!("the working directory {} is not an absolute path", directory.display()),
        None => std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
    };
    Ok(Plan {
        name,
        networks: arguments.network,
        ip: arguments.ip,
        vnic: arguments.vnic,
        waits: arguments.wait,
        labels: arguments.labels,
        detached: arguments.detach,
        remove: arguments.rm,
        share_host: arguments.share_host,
        with_names: !arguments.no_names,
        volumes: arguments.volumes.iter().map(|text| parse_volume(text)).collect::<Result<_>>()?,
        program: Program {
            command: arguments.command,
            environment: environment(&arguments.environment)?,
            working_directory,
            terminal: arguments.tty && !arguments.detach && terminal::is_present(),
        },
        library: std::fs::canonicalize(tools::library()?).context(tools::LIBRARY)?,
    })
}

/// Environment of a container's program: little of the caller's, and the `-e` settings.
fn environment(settings: &[String]) -> Result<Vec<(String, String)>> {
    let caller = |key: &str| std::env::var(key).ok();
    let mut environment = vec![
        ("PATH".to_string(), caller("PATH").unwrap_or_else(|| PATH.to_string())),
        ("HOME".to_string(), caller("HOME").unwrap_or_else(|| "/root".to_string())),
        ("container".to_string(), "freeflow".to_string()),
    ];
    for key in ["TERM", "LANG", "LC_ALL"] {
        environment.extend(caller(key).map(|value| (key.to_string(), value)));
    }
    add_settings(&mut environment, settings)?;
    Ok(environment)
}

/// Applies `-e` options.
pub fn add_settings(environment: &mut Vec<(String, String)>, settings: &[String]) -> Result<()> {
    for setting in settings {
        let (key, value) = match setting.split_once('=') {
            Some((key, value)) => (key.to_string(), Some(value.to_string())),
            None => (setting.clone(), std::env::var(setting).ok()),
        };
        if key.is_empty() || key.contains('\0') {
            fail!("-e {setting:?}: write KEY=VALUE, or KEY alone to pass the caller's on");
        }
        environment.retain(|(known, _)| *known != key);
        environment.extend(value.map(|value| (key, value)));
    }
    Ok(())
}

fn parse_volume(text: &str) -> Result<Volume> {
    let parts: Vec<&str> = text.split(':').collect();
    let (source, target, read_only) = match parts[..] {
        [source, target] | [source, target, "rw"] => (source, target, false),
        [source, target, "ro"] => (source, target, true),
        _ => fail!("-v {text:?}: write FROM:TO or FROM:TO:ro"),
    };
    let (source, target) = (PathBuf::from(source), PathBuf::from(target));
    if !source.is_absolute() || !target.is_absolute() || target == Path::new("/") {
        fail!("-v {text:?}: both have to be absolute paths, and not to /");
    }
    if !source.exists() {
        fail!("-v {text:?}: there is no {}", source.display());
    }
    Ok(Volume { source, target, read_only })
}

/// Forks the supervisor into the background and waits until it says that the program runs, or why not.
fn in_background(run_dir: &RunDir, plan: &Plan) -> Result<i32> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("pipe")?;
    match sys::fork().context("fork")? {
        Fork::Child => {
            drop(reader);
            sys::exit_now(background(run_dir, plan, writer))
        }
        Fork::Parent(_) => {
            drop(writer);
            let mut answer = String::new();
            File::from(reader).read_to_string(&mut answer).context("the supervisor")?;
            match answer.split_once(' ') {
                Some(("started", name)) => {
                    crate::output::line(name);
                    Ok(0)
                }
                Some((code, message)) => Err(Failure::new(message).with_code(code.parse().unwrap_or(EXIT_RUN_FAILED))),
                None => fail!("the container's supervisor died"),
            }
        }
    }
}

fn background(run_dir: &RunDir, plan: &Plan, writer: OwnedFd) -> i32 {
    let answer = std::cell::RefCell::new(Some(File::from(writer)));
    let note = |text: String| {
        if let Some(mut writer) = answer.borrow_mut().take() {
            let _ = writer.write_all(text.as_bytes());
        }
    };
    // The output goes to a file without a name until the container has one.
    let log = run_dir.path().join("logs").join(format!(".starting-{}", std::process::id()));
    let result = redirect(&log).and_then(|()| {
        supervise(run_dir, plan, |name| {
            let renamed = std::fs::rename(&log, run_dir.log(name));
            match renamed {
                Ok(()) => note(format!("started {name}")),
                Err(error) => note(format!("{EXIT_RUN_FAILED} can't keep the log of {name}: {error}")),
            }
        })
    });
    match result {
        Ok(code) => code,
        Err(failure) => {
            let _ = std::fs::remove_file(&log);
            note(format!("{} {failure}", failure.code()));
            i32::from(failure.code())
        }
    }
}

/// Leaves the caller's session; input from nowhere, output into the log.
fn redirect(log: &Path) -> Result<()> {
    rustix::process::setsid().context("setsid")?;
    let what = || format!("can't write the log {}", log.display());
    let file = File::options().create(true).append(true).mode(0o600).open(log).context(what())?;
    let null = File::open("/dev/null").context("/dev/null")?;
    rustix::stdio::dup2_stdin(&null).context(what())?;
    rustix::stdio::dup2_stdout(&file).context(what())?;
    rustix::stdio::dup2_stderr(&file).context(what())?;
    sys::close_on_exec_from(3).context(what())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_parsed() {
        let volume =
            |source: &str, target: &str, read_only| Volume { source: source.into(), target: target.into(), read_only };
        assert_eq!(parse_volume("/tmp:/data").unwrap(), volume("/tmp", "/data", false));
        assert_eq!(parse_volume("/tmp:/data:ro").unwrap(), volume("/tmp", "/data", true));
        for bad in ["/tmp", "/tmp:/data:xx", "tmp:/data", "/tmp:data", "/tmp:/", "/no/such/file:/data", "a:b:c:d"] {
            assert!(parse_volume(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_last_setting_of_a_variable_holds() {
        let mut environment = vec![("A".to_string(), "1".to_string())];
        add_settings(&mut environment, &["A=2".into(), "B=x=y".into(), "FREEFLOW_NOT_SET_ANYWHERE".into()]).unwrap();
        assert_eq!(environment, [("A".into(), "2".into()), ("B".into(), "x=y".into())]);
        assert!(add_settings(&mut environment, &["=1".into()]).is_err());
    }
}
