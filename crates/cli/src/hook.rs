//! `freeflow hook`: what a container engine runs for a container with the device `freeflow.io/net=NETWORK`.
//!
//! `createRuntime` comes when the container's namespaces and mounts are there and its root is not changed yet: it
//! attaches a vNIC under the container's id, puts a veth pair into its network namespace (unless that is the host's),
//! mounts the vNIC's directory, and only that, at `/run/freeflow`, its sysfs in `/sys/class`, and the drop-ins over the
//! image's libibverbs and librdmacm.
//! `poststop` detaches it. An error goes to stderr and, by its exit status, stops the container's start.

use crate::admin::{Admin, Presence};
use crate::bridges::{self, Bridge};
use crate::failure::{Context, Result};
use crate::fork::in_child;
use crate::inject::{Root, Sources};
use crate::ip;
use crate::process::Process;
use crate::run_dir::RunDir;
use crate::tools;
use freeflow_protocol::admin::{OWN_LABELS, VnicStatus};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Annotations `freeflow.io/label.KEY=VALUE` of a container are labels of its vNIC.
const LABEL_ANNOTATION: &str = "freeflow.io/label.";
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
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl Configuration {
    /// Labels of the vNIC, as whoever made the container wrote them. Those by which we know our own are ours.
    fn labels(&self) -> impl Iterator<Item = (String, String)> {
        let label = |(key, value): (&String, &String)| {
            let key = key.strip_prefix(LABEL_ANNOTATION)?;
            (!OWN_LABELS.contains(&key)).then(|| (key.to_string(), value.clone()))
        };
        self.annotations.iter().filter_map(label)
    }
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

fn read_configuration(bundle: &Path) -> Result<Configuration> {
    let path = bundle.join("config.json");
    let mut text = Vec::new();
    let file = File::open(&path).context(path.display())?;
    file.take(CONFIGURATION_BYTES_MAX).read_to_end(&mut text).context(path.display())?;
    serde_json::from_slice(&text).context(path.display())
}

pub fn create_runtime(run_dir: &RunDir, network: &str) -> Result<()> {
    let state = read_state()?;
    let Some(process) = Process::of(state.pid) else {
        crate::fail!("the container's process {} is not there", state.pid);
    };
    let configuration = read_configuration(&state.bundle)?;
    // As the runtime sees it before it changes into it.
    let root = state.bundle.join(&configuration.root.path);
    let library = fs::canonicalize(tools::library()?).context(tools::LIBRARY)?;
    let mut admin = Admin::connect(run_dir)?;
    // Names those there are, if there is no such network.
    admin.network(network)?;
    let name: String = state.id.chars().take(12).collect();
    let mut labels = vec![
        ("engine".to_string(), "oci".to_string()),
        ("pid".to_string(), process.pid.to_string()),
        ("start_ticks".to_string(), process.start_ticks.to_string()),
    ];
    labels.extend(configuration.labels());
    let vnic = admin.attach(&state.id, &name, network, None, labels)?;
    // A network that has a vNIC stays, so this is the one that the vNIC is in.
    let result = admin
        .network(network)
        .and_then(|network| bridges::ensure(run_dir, &network))
        .and_then(|bridge| equip(run_dir, &vnic, &bridge, process.pid, &root, &library));
    if result.is_err() {
        ip::unplug(run_dir, &vnic.id);
        let _ = admin.detach(&vnic.id);
    }
    result
}

fn equip(run_dir: &RunDir, vnic: &VnicStatus, bridge: &Bridge, pid: u32, root: &Path, library: &Path) -> Result<()> {
    if !ip::same_network(pid, std::process::id())? {
        ip::plug(run_dir, vnic, bridge, pid)?;
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
        root.replace_or_add_libraries(&sources)
    })
}

pub fn poststop(run_dir: &RunDir) -> Result<()> {
    let state = read_state()?;
    ip::unplug(run_dir, &state.id);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_are_labels() {
        let text = r#"{"root": {"path": "rootfs"}, "annotations": {"freeflow.io/label.tier": "web", "other": "x",
            "freeflow.io/label.engine": "freeflow", "freeflow.io/label.a/b": ""}}"#;
        let configuration: Configuration = serde_json::from_str(text).unwrap();
        let labels: Vec<(String, String)> = configuration.labels().collect();
        assert_eq!(labels, [("a/b".into(), "".into()), ("tier".into(), "web".into())]);
        let bare: Configuration = serde_json::from_str(r#"{"root": {"path": "r"}}"#).unwrap();
        assert_eq!(bare.labels().count(), 0);
    }
}
