//! `freeflow hook`: what a container engine runs for a container with the device `freeflow.io/net=NETWORK`.
//!
//! `createRuntime` comes when the container's namespaces and mounts are there and its root is not changed yet: it
//! attaches a vNIC under the container's id, puts a veth pair into its network namespace (unless that is the host's),
//! mounts the vNIC's directory, and only that, at `/run/freeflow`, its sysfs in `/sys/class`, and the drop-in over the
//! image's libibverbs.
//! `poststop` detaches it. An error goes to stderr and, by its exit status, stops the container's start.

use crate::admin::{Admin, Presence};
use crate::failure::{Context, Result};
use crate::fork::in_child;
use crate::guard::Guard;
use crate::inject::{Root, Sources};
use crate::ip;
use crate::process::Process;
use crate::run_dir::RunDir;
use crate::tools;
use freeflow_protocol::admin::VnicStatus;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Longest container state and configuration that are read, bytes.
const STATE_BYTES_MAX: u64 = 1 << 20;
const CONFIGURATION_BYTES_MAX: u64 = 16 << 20;

/// The OCI runtime's state of a container, as far as it is needed.
#[derive(Debug, Deserialize)]
struct State {
    id: String,
    #[serde(default)]
    pid: u32,
    bundle: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Configuration {
    root: ConfiguredRoot,
}

#[derive(Debug, Deserialize)]
struct ConfiguredRoot {
    path: PathBuf,
}

fn read_state() -> Result<State> {
    let mut text = Vec::new();
    std::io::stdin().take(STATE_BYTES_MAX).read_to_end(&mut text).context("the container's state")?;
    serde_json::from_slice(&text).context("the container's state on standard input")
}

/// The container's root as the runtime sees it before it changes into it.
fn root_path(bundle: &Path) -> Result<PathBuf> {
    let path = bundle.join("config.json");
    let mut text = Vec::new();
    let file = File::open(&path).context(path.display())?;
    file.take(CONFIGURATION_BYTES_MAX).read_to_end(&mut text).context(path.display())?;
    let configuration: Configuration = serde_json::from_slice(&text).context(path.display())?;
    Ok(bundle.join(configuration.root.path))
}

pub fn create_runtime(run_dir: &RunDir, network: &str) -> Result<()> {
    let state = read_state()?;
    let Some(process) = Process::of(state.pid) else {
        crate::fail!("the container's process {} is not there", state.pid);
    };
    let root = root_path(&state.bundle)?;
    let library = fs::canonicalize(tools::library()?).context(tools::LIBRARY)?;
    let mut admin = Admin::connect(run_dir)?;
    let status = admin.network(network)?;
    let bridge = if status.bridge.is_empty() { run_dir.bridge() } else { status.bridge };
    let name: String = state.id.chars().take(12).collect();
    let labels = vec![
        ("engine".to_string(), "oci".to_string()),
        ("pid".to_string(), process.pid.to_string()),
        ("start_ticks".to_string(), process.start_ticks.to_string()),
    ];
    let vnic = admin.attach(&state.id, &name, network, None, labels)?;
    let result = equip(&vnic, &bridge, &Guard::of(run_dir), process.pid, &root, &library);
    if result.is_err() {
        ip::unplug(&vnic.id);
        let _ = admin.detach(&vnic.id);
    }
    result
}

fn equip(vnic: &VnicStatus, bridge: &str, guard: &Guard, pid: u32, root: &Path, library: &Path) -> Result<()> {
    if !ip::same_network(pid, std::process::id())? {
        ip::plug(vnic, bridge, pid, guard)?;
    }
    let sources = Sources::open(Path::new(&vnic.directory), library)?;
    let process_root = File::open(format!("/proc/{pid}/root")).context("the container's process")?;
    let mounts = File::open(format!("/proc/{pid}/ns/mnt")).context("the container's mounts")?;
    in_child(|| {
        move_into_link_name_space(mounts.as_fd(), Some(LinkNameSpaceType::Mount))
            .context("can't enter the container's mount namespace")?;
        rustix::process::fchdir(&process_root).context("the container's root")?;
        rustix::process::chroot(".").context("the container's root")?;
        let root = Root::open(root)?;
        root.check_c_library()?;
        root.mount_vnic(&sources)?;
        root.mount_classes(&sources.classes);
        if root.replace_libraries(&sources)? == 0 {
            root.add_library(&sources)?;
        }
        Ok(())
    })
}

pub fn poststop(run_dir: &RunDir) -> Result<()> {
    let state = read_state()?;
    ip::unplug(&state.id);
    match Admin::look(run_dir) {
        Presence::Running(mut admin) => admin.detach(&state.id),
        // Whoever brings the router back settles it: the process is recorded with the vNIC.
        Presence::Absent => Ok(()),
        Presence::Unusable(failure) => Err(failure),
    }
}

/// The process recorded with the vNIC of an engine's container; `None` for other vNICs.
pub fn process_of(vnic: &VnicStatus) -> Option<Process> {
    let label = |key: &str| Some(vnic.labels.iter().find(|(known, _)| known == key)?.1.as_str());
    if label("engine") != Some("oci") {
        return None;
    }
    Some(Process { pid: label("pid")?.parse().ok()?, start_ticks: label("start_ticks")?.parse().ok()? })
}
