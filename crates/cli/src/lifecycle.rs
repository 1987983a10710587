//! `freeflow stop`, `rm` and `logs`.

use crate::admin::{Admin, Presence};
use crate::container_names;
use crate::failure::{Context, Failure, Result, fail};
use crate::holders::Holders;
use crate::output;
use crate::process::poll_readable;
use crate::record::{Record, Records, State};
use freeflow_hostnet::ports;
use freeflow_hostnet::run_dir::RunDir;
use rustix::process::Signal;
use std::fs::File;
use std::io::{self, Read, Write};
use std::time::Duration;

/// How long a killed container may take to vanish.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a followed log is looked at.
const LOG_INTERVAL: Duration = Duration::from_millis(100);

pub fn stop(run_dir: &RunDir, names: &[String], time: Duration) -> Result<()> {
    each(names, |name| {
        let record = Records::of(run_dir).get(name).map_err(|failure| hint_engine(run_dir, name, failure))?;
        end(run_dir, &record, Some(time))?;
        output::line(name);
        Ok(())
    })
}

pub fn remove(run_dir: &RunDir, names: &[String], force: bool) -> Result<()> {
    let records = Records::of(run_dir);
    each(names, |name| {
        let record = records.get(name).map_err(|failure| hint_engine(run_dir, name, failure))?;
        if record.is_live() && !force {
            fail!("container {name} is running; stop it first, or use: freeflow{} rm -f {name}", run_dir.option());
        }
        end(run_dir, &record, None)?;
        records.remove(name, &record.id)?;
        output::line(name);
        Ok(())
    })
}

/// Does all that can be done; the first failure is reported at the end.
fn each(names: &[String], mut act: impl FnMut(&str) -> Result<()>) -> Result<()> {
    let mut first = None;
    for name in names {
        if let Err(failure) = act(name) {
            first.get_or_insert(failure);
        }
    }
    first.map_or(Ok(()), Err)
}

/// A name that is a vNIC's but no container's of ours: a declared one's, or that of a container of podman or another
/// engine.
fn hint_engine(run_dir: &RunDir, name: &str, failure: Failure) -> Failure {
    let known = Admin::connect(run_dir).and_then(|mut admin| admin.vnics()).unwrap_or_default();
    let Some(vnic) = known.iter().find(|vnic| vnic.name == name || vnic.id == name) else { return failure };
    let ours = Records::of(run_dir).list().into_iter().find(|record| record.id == vnic.id && record.is_live());
    let engines = Holders::of(run_dir).live().into_iter().find(|holder| holder.vnic == vnic.id);
    Failure::new(match (ours, engines) {
        (Some(record), _) => format!("{name} is no container but a vNIC, which the container {} has", record.name),
        (None, Some(holder)) => {
            let container = holder.name;
            format!(
                "{name} is no container but a vNIC, which the container {container} of a container engine has; use that, \
                 for example podman stop {container}"
            )
        }
        (None, None) if vnic.labels.iter().any(|(label, engine)| label == "engine" && engine == "oci") => {
            format!("{name} was started by a container engine; use that, for example podman stop")
        }
        (None, None) => format!(
            "{name} is no container but a vNIC, which no container has; if it is declared, freeflow delete vnic {name} \
             ends it"
        ),
    })
}

/// Ends a container and waits until nothing is left of it but the record. Without a time it is killed at once.
pub fn end(run_dir: &RunDir, record: &Record, time: Option<Duration>) -> Result<()> {
    let what = || format!("can't end container {}", record.name);
    if record.state != State::Exited {
        if let Some(init) = record.init {
            let mut ended = false;
            if let Some(time) = time {
                init.signal(Signal::TERM).context(what())?;
                ended = init.wait_end(time);
            }
            if !ended {
                init.signal(Signal::KILL).context(what())?;
                ended = init.wait_end(END_TIMEOUT);
            }
            if !ended {
                fail!("{}: its processes do not end (are they blocked in the kernel?)", what());
            }
        } else {
            // Still being set up: its supervisor cleans up on no signal but this leaves nothing to run.
            record.supervisor.signal(Signal::KILL).context(what())?;
        }
        if !record.supervisor.wait_end(END_TIMEOUT) {
            fail!("{}: its supervisor (process {}) does not end", what(), record.supervisor.pid);
        }
    }
    let mut admin = match Admin::look(run_dir) {
        Presence::Running(admin) => Some(admin),
        _ => None,
    };
    // Somebody else may use a declared vNIC by now.
    if record.state != State::Exited || !record.is_declared {
        record.vnic_ids().for_each(|id| ports::unplug(run_dir, id));
    }
    let is_settled = Records::of(run_dir).reconcile(admin.as_mut())?;
    // Its supervisor has done it otherwise.
    if let Some(admin) = admin.as_mut().filter(|_| is_settled) {
        container_names::update(run_dir, admin);
    }
    Ok(())
}

pub fn logs(run_dir: &RunDir, name: &str, follow: bool) -> Result<()> {
    let records = Records::of(run_dir);
    let record = records.get(name)?;
    if !record.detached {
        fail!("container {name} runs in the foreground: its output went there; logs are kept for freeflow run -d");
    }
    let path = run_dir.log(name);
    let mut log = File::open(&path).context(format!("can't read the log {}", path.display()))?;
    let supervisor = record.supervisor.open();
    let mut bytes = [0u8; 64 * 1024];
    loop {
        // Whether it had ended before the last look at the file, so that nothing is missed.
        let ended = match &supervisor {
            Some(handle) => poll_readable(handle, Some(Duration::ZERO)).unwrap_or(false),
            None => true,
        };
        loop {
            let length = log.read(&mut bytes).context("log")?;
            if length == 0 {
                break;
            }
            match io::stdout().write_all(&bytes[..length]).and_then(|()| io::stdout().flush()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(error).context("standard output"),
            }
        }
        if !follow || ended {
            return Ok(());
        }
        if let Some(handle) = &supervisor {
            let _ = poll_readable(handle, Some(LOG_INTERVAL));
        }
    }
}
