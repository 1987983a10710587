//! `freeflow runtime`: an OCI runtime for engines without CDI (Docker before 25, containerd before 1.7).
//!
//! On `create` and `run` it changes the bundle's `config.json` as the CDI device would, so that the same hook makes
//! the vNIC; then it becomes the real runtime (runc, or crun), by the same command line. It leaves no process and has
//! no part in a container's life after that: the hook `poststop` stands in the real runtime's state.
//!
//! It is no container runtime of its own, and refuses a start that it doesn't understand rather than start a container
//! without its vNIC.

mod bundle;
mod policy;
mod words;

use crate::arguments::Runtime;
use crate::cni::attachments::Attachments;
use crate::container_owner::ROOTLESS;
use crate::failure::{Context, Failure, Result, fail};
use crate::{sys, tools};
use bundle::Bundle;
use freeflow_client::VNIC_COUNT_MAX;
use freeflow_hostnet::bridges::DEFAULT_NETWORK;
use freeflow_hostnet::cdi::{Kind, container_edits};
use freeflow_hostnet::programs::is_executable;
use freeflow_hostnet::run_dir::{RunDir, write_atomically};
use policy::{Device, SETTINGS, Settings, names_of};
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use words::{Action, Call, Log};

/// Name by which the program is this command.
pub const PROGRAM: &str = "freeflow-runtime";
const RUNTIMES: [&str; 2] = ["runc", "crun"];
const DIRECTORIES: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
/// In a run directory, the path of the real runtime that was found at the first start: one that is installed later
/// doesn't know the containers of the first.
const FOUND: &str = "runtime";
const PATH_BYTES_MAX: u64 = 4096;
/// The environment of the real runtime has its path here, by which a program that calls this one again is known.
const CALLED_VARIABLE: &str = "FREEFLOW_RUNTIME_CALLED";

/// Comes back only with a failure, which the engine reads in the runtime's log.
pub fn runtime(run_dir: &RunDir, arguments: &Runtime) -> Result<()> {
    let call = words::read(&arguments.words)?;
    let log = call.log.clone();
    become_runtime(run_dir, arguments, &call).inspect_err(|failure| {
        if let Some(log) = log {
            note(&log, failure);
        }
    })
}

fn become_runtime(run_dir: &RunDir, arguments: &Runtime, call: &Call) -> Result<()> {
    let settings = match call.action {
        Action::Pass => Settings::read_as_far_as_it_goes(arguments.config.as_deref()),
        _ => Settings::read(arguments.config.as_deref())?,
    };
    if let Some(caller) = std::env::var_os(CALLED_VARIABLE) {
        fail!(
            "{} calls {PROGRAM}, and so is no container runtime: name the real one as runtime in {SETTINGS}",
            caller.display()
        );
    }
    let program = real_runtime(run_dir, &settings, call)?;
    match &call.action {
        Action::Pass => {}
        Action::Start { bundle } => prepare(run_dir, arguments, &settings, bundle)?,
        Action::Checkpoint { id } => refuse_checkpoint(&program, call, id)?,
        Action::Restore => fail!(
            "containers of this runtime have a vNIC, and a restored one would not: its queue pairs are the router's"
        ),
    }
    let error = Command::new(&program).args(&arguments.words).env(CALLED_VARIABLE, &program).exec();
    Err(Failure::new(format!("can't run {}: {error}", program.display())))
}

fn real_runtime(run_dir: &RunDir, settings: &Settings, call: &Call) -> Result<PathBuf> {
    let own = std::fs::canonicalize(tools::own_path()?).context("this program")?;
    if let Some(path) = &settings.runtime {
        if !is_executable(path) {
            fail!("{} is no program: see runtime in {SETTINGS}", path.display());
        }
        // It would become itself for ever.
        if std::fs::canonicalize(path).context(path.display())? == own {
            fail!("{} is FreeFlow's own: name the real one as runtime in {SETTINGS}", path.display());
        }
        return Ok(path.clone());
    }
    let is_other = |path: &PathBuf| is_executable(path) && std::fs::canonicalize(path).is_ok_and(|path| path != own);
    let record = run_dir.path().join(FOUND);
    if let Some(path) = found(&record).filter(is_other) {
        return Ok(path);
    }
    let mut candidates = RUNTIMES.iter().flat_map(|name| DIRECTORIES.map(|place| Path::new(place).join(name)));
    let path = candidates.find(is_other).ok_or_else(|| {
        Failure::new(format!(
            "no runc and no crun in {}: install one, or name it in {SETTINGS}",
            DIRECTORIES.join(", ")
        ))
    })?;
    if matches!(call.action, Action::Start { .. }) {
        // Where no host is up there is no run directory, and the hook refuses the container.
        let _ = write_atomically(&record, path.as_os_str().as_bytes(), 0o600);
    }
    Ok(path)
}

/// The runtime that was found before.
fn found(record: &Path) -> Option<PathBuf> {
    let mut bytes = Vec::new();
    File::open(record).ok()?.take(PATH_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(PathBuf::from(std::ffi::OsString::from_vec(bytes))).filter(|path| path.is_absolute())
}

fn given(arguments: &Runtime) -> Vec<Device> {
    let networks = arguments.network.iter().map(|name| Device::new(Kind::Network, name));
    networks.chain(arguments.vnic.iter().map(|name| Device::new(Kind::Vnic, name))).collect()
}

/// Gives the bundle its vNICs.
fn prepare(run_dir: &RunDir, arguments: &Runtime, settings: &Settings, path: &Path) -> Result<()> {
    let mut bundle = Bundle::open(path)?;
    let (given, injected) = (given(arguments), bundle::devices_of(&bundle.configuration));
    let is_injected = !injected.is_empty();
    if is_injected && !given.is_empty() && given != injected {
        fail!(
            "this runtime gives containers {}, and CDI devices of this one {}: one of them has to decide",
            names_of(&given),
            names_of(&injected)
        );
    }
    let decided = if is_injected { injected } else { given };
    let absolute = std::path::absolute(bundle.path()).context(path.display())?;
    let fallback = || Ok(pod_network(run_dir, &bundle.configuration)?.unwrap_or_else(|| DEFAULT_NETWORK.into()));
    let devices = policy::devices(settings, decided, &bundle.configuration, &absolute, fallback)?;
    if devices.len() > VNIC_COUNT_MAX {
        fail!("a container can have {VNIC_COUNT_MAX} vNICs, and this one is to have {}", devices.len());
    }
    if devices.is_empty() {
        return Ok(());
    }
    if is_injected {
        return Ok(());
    }
    if !sys::is_privileged() {
        fail!("{ROOTLESS}");
    }
    for device in devices {
        let edits = container_edits(run_dir, &tools::own_path()?, (device.kind, &device.name));
        bundle::apply(&mut bundle.configuration, &edits)?;
    }
    bundle.write()
}

/// The network in which the CNI plugin has given the container's pod a vNIC.
///
/// # Errors
/// It has vNICs in several.
fn pod_network(run_dir: &RunDir, configuration: &Value) -> Result<Option<String>> {
    let namespaces = configuration["linux"]["namespaces"].as_array().into_iter().flatten();
    let path = namespaces.filter(|one| one["type"] == "network").find_map(|one| one["path"].as_str());
    let Some(path) = path.filter(|path| !path.is_empty()) else { return Ok(None) };
    let networks: Vec<String> =
        Attachments::of(run_dir).at(Path::new(path))?.into_iter().map(|attachment| attachment.network).collect();
    match networks.as_slice() {
        [] => Ok(None),
        [network] => Ok(Some(network.clone())),
        several => fail!("the pod has vNICs in the networks {}: name one", several.join(", ")),
    }
}

/// A container's state, as a runtime prints it.
#[derive(Debug, Deserialize)]
struct State {
    bundle: PathBuf,
}

/// Refuses for a container with a vNIC. One that the runtime doesn't know is the runtime's to refuse.
fn refuse_checkpoint(program: &Path, call: &Call, id: &OsStr) -> Result<()> {
    let mut command = Command::new(program);
    if let Some(root) = &call.root {
        command.arg("--root").arg(root);
    }
    command.env(CALLED_VARIABLE, program);
    let output = command.arg("state").arg(id).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.context(program.display())?;
    if !output.status.success() {
        return Ok(());
    }
    let state: State = serde_json::from_slice(&output.stdout).context("the container's state")?;
    if !bundle::devices_of(&Bundle::open(&state.bundle)?.configuration).is_empty() {
        fail!("the container has a vNIC, whose queue pairs are the router's: it can't be checkpointed");
    }
    Ok(())
}

/// Writes a failure where engines look for the runtime's last error.
fn note(log: &Log, failure: &Failure) {
    let line = match log.is_json {
        true => serde_json::json!({"level": "error", "msg": failure.to_string()}).to_string(),
        false => format!("level=error msg={:?}", failure.to_string()),
    };
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // The same text goes to standard error.
    if let Ok(file) = rustix::fs::open(&log.path, flags, Mode::from(0o644)) {
        let _ = writeln!(File::from(file), "{line}");
    }
}
