//! `freeflow hook`: what a container engine runs for a container with the device `freeflow.io/net=NETWORK`,
//! `freeflow.io/vnic=NAME` or `freeflow.io/claim=…`, a Kubernetes claim's.
//!
//! `createRuntime` comes when the container's namespaces and mounts are there and its root is not
//! changed yet: it attaches a vNIC under the container's id, or takes the declared one for it; puts
//! a veth pair into its network namespace (unless that is the host's); mounts the vNIC's directory,
//! and only that, at `/run/freeflow`, its sysfs in `/sys/class`, and the drop-ins over the image's
//! libibverbs and librdmacm. `poststop` detaches it. An error goes to stderr and, by its exit
//! status, stops the container's start.
//!
//! A container whose network namespace has a vNIC of the CNI plugin in the network gets that one, which other
//! containers of its pod may have besides, and which stays when it ends.
//!
//! Invariant: network, name, address and labels of a vNIC come from the device alone. Of the container's
//! `config.json` only the path of its root is read, which the engine chooses. Annotations, environment, host name and
//! labels in there may be the image's (podman copies an image's annotations), and they cannot be
//! distinguished.

use crate::admin::{Admin, Presence};
use crate::cluster::{check_drained, meet};
use crate::cni::attachments::{Attachment, Attachments};
use crate::container_names;
use crate::failure::{Context, Result, fail};
use crate::fork::in_child;
use crate::holders::{Holder, Holders};
use crate::inject::{Root, Sources};
use crate::networks::plug;
use crate::process::Process;
use crate::record::Records;
use crate::supervisor::declared_vnic;
use crate::tools;
use freeflow_hostnet::ports::{self, Bridge};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_hostnet::{bridges, namespace};
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

/// All that is read of the container's `config.json`; see the module's invariant.
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

fn read_configuration(bundle: &Path) -> Result<Configuration> {
    let path = bundle.join("config.json");
    let mut text = Vec::new();
    let file = File::open(&path).context(path.display())?;
    file.take(CONFIGURATION_BYTES_MAX).read_to_end(&mut text).context(path.display())?;
    serde_json::from_slice(&text).context(path.display())
}

/// The vNIC that the device asks for.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// A new vNIC in this network, with these labels besides FreeFlow's own.
    Network(&'a str, &'a [(String, String)]),
    /// This declared vNIC.
    Vnic(&'a str),
}

pub fn create_runtime(run_dir: &RunDir, wanted: Wanted<'_>) -> Result<()> {
    let state = read_state()?;
    let Some(process) = Process::of(state.pid) else {
        fail!("the container's process {} is not there", state.pid);
    };
    let configuration = read_configuration(&state.bundle)?;
    // As the runtime sees it before it changes into it.
    let root = state.bundle.join(&configuration.root.path);
    let library = fs::canonicalize(tools::library()?).context(tools::LIBRARY)?;
    let mut admin = Admin::connect(run_dir)?;
    // Labels of its own need a vNIC of its own.
    if let Wanted::Network(network, []) = wanted
        && let Some(attachment) = Attachments::of(run_dir).of_process(process.pid, network)?
    {
        return join(run_dir, &attachment, process.pid, &root, &library);
    }
    let vnic = match wanted {
        Wanted::Network(network, labels) => {
            check_drained(run_dir, network)?;
            attach(run_dir, &mut admin, (network, labels), &state, process)?
        }
        Wanted::Vnic(name) => hold(run_dir, &mut admin, name, &state, process)?,
    };
    let meeting = meet(run_dir, &vnic.network);
    // A network that has a vNIC stays, so this is the one that the vNIC is in.
    let result = admin
        .network(&vnic.network)
        .and_then(|network| Ok(bridges::ensure(run_dir, &network)?))
        .and_then(|bridge| equip(run_dir, &vnic, &bridge, process.pid, &root, &library));
    if result.is_ok() {
        container_names::add(run_dir, &mut admin, &vnic, &short_name(&state));
        meeting.wait();
    }
    if result.is_err() {
        ports::unplug(run_dir, &vnic.id);
        let _ = match wanted {
            Wanted::Network(..) => admin.detach(&vnic.id),
            Wanted::Vnic(name) => Holders::of(run_dir).release(name, &state.id, Some(&mut admin)).map(|_| ()),
        };
    }
    result
}

/// The container's name for people: as podman shortens it.
fn short_name(state: &State) -> String {
    state.id.chars().take(12).collect()
}

/// Makes room for a container that is started again under its id, after an engine that died before it ran `poststop`.
fn settle_former(run_dir: &RunDir, admin: &mut Admin, state: &State) -> Result<()> {
    if !run_dir.path().join("vnics").join(&state.id).exists() {
        return Ok(());
    }
    let Some(former) = admin.vnics()?.into_iter().find(|vnic| vnic.id == state.id) else { return Ok(()) };
    match process_of(&former) {
        Some(process) if process.is_alive() => {
            fail!("the container has a vNIC in the network {} already: it can have one device", former.network)
        }
        Some(_) => {
            ports::unplug(run_dir, &former.id);
            admin.detach(&former.id)
        }
        // Not a container's; attaching says so.
        None => Ok(()),
    }
}

fn attach(
    run_dir: &RunDir,
    admin: &mut Admin,
    (network, own): (&str, &[(String, String)]),
    state: &State,
    process: Process,
) -> Result<VnicStatus> {
    // Names those there are, if there is no such network.
    admin.network(network)?;
    settle_former(run_dir, admin, state)?;
    let mut labels = vec![
        ("engine".to_string(), "oci".to_string()),
        ("pid".to_string(), process.pid.to_string()),
        ("start_ticks".to_string(), process.start_ticks.to_string()),
    ];
    labels.extend_from_slice(own);
    admin.attach(&state.id, &short_name(state), network, None, labels)
}

fn hold(run_dir: &RunDir, admin: &mut Admin, name: &str, state: &State, process: Process) -> Result<VnicStatus> {
    Records::of(run_dir).reconcile(Some(admin))?;
    let (vnic, _claimed) = declared_vnic(run_dir, name, false)?;
    let holder = Holder { vnic: vnic.id.clone(), container: state.id.clone(), name: short_name(state), process };
    Holders::of(run_dir).take(&holder, admin)?;
    Ok(vnic)
}

fn equip(run_dir: &RunDir, vnic: &VnicStatus, bridge: &Bridge, pid: u32, root: &Path, library: &Path) -> Result<()> {
    if !namespace::same_network(pid, std::process::id())? {
        plug(run_dir, vnic, bridge, pid)?;
    }
    inject(Path::new(&vnic.directory), pid, root, library)
}

/// Gives a container the vNIC of its pod.
fn join(run_dir: &RunDir, attachment: &Attachment, pid: u32, root: &Path, library: &Path) -> Result<()> {
    let directory = run_dir.vnics().join(&attachment.vnic);
    if !directory.exists() {
        fail!(
            "the pod's vNIC in the network {} is gone, since the host was taken down: make the pod again",
            attachment.network
        );
    }
    inject(&directory, pid, root, library)
}

/// Mounts what programs need of a vNIC.
fn inject(vnic_directory: &Path, pid: u32, root: &Path, library: &Path) -> Result<()> {
    let sources = Sources::open(vnic_directory, library)?;
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

pub fn poststop(run_dir: &RunDir, wanted: Wanted<'_>) -> Result<()> {
    let state = read_state()?;
    // The next router settles it where this one is absent: the process is recorded with the vNIC.
    let mut admin = match Admin::look(run_dir) {
        Presence::Running(admin) => Some(admin),
        Presence::Absent => None,
        Presence::Unusable(failure) => return Err(failure),
    };
    let had = match wanted {
        Wanted::Network(..) => {
            ports::unplug(run_dir, &state.id);
            admin.as_mut().map_or(Ok(()), |admin| admin.detach(&state.id))?;
            Some((state.id.as_str(), false))
        }
        Wanted::Vnic(name) => {
            // Another container's, if this one was refused it.
            let is_released = Holders::of(run_dir).release(name, &state.id, admin.as_mut())?;
            if is_released {
                ports::unplug(run_dir, name);
            }
            is_released.then_some((name, true))
        }
    };
    if let Some((admin, (vnic, is_declared))) = admin.as_mut().zip(had) {
        container_names::leave(run_dir, admin, vnic, is_declared);
    }
    Ok(())
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
    fn nothing_but_the_root_is_read_of_a_container() {
        let text = r#"{"root": {"path": "rootfs"}, "annotations": {"freeflow.io/label.tier": "web"}, "hostname": "x",
            "process": {"env": ["FREEFLOW_LABEL=tier=web"]}}"#;
        let configuration: Configuration = serde_json::from_str(text).unwrap();
        assert_eq!(format!("{configuration:?}"), r#"Configuration { root: ConfiguredRoot { path: "rootfs" } }"#);
    }
}
