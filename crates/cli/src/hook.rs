//! `freeflow hook`: what a container engine runs for a container with the device `freeflow.io/net=NETWORK`,
//! `freeflow.io/vnic=NAME` or `freeflow.io/claim=…`, a Kubernetes claim's.
//!
//! `createRuntime` comes when the container's namespaces and mounts are there and its root is not
//! changed yet: it attaches a vNIC under the container's id, or takes the declared one for it; puts
//! a veth pair into its network namespace (unless that is the host's); mounts the vNIC's directory,
//! and only that, at `/run/freeflow`, its sysfs in `/sys/class`, a null device at
//! `/dev/infiniband/uverbs0`, and the drop-ins over the image's libibverbs and librdmacm. Of several
//! devices each has a hook of its own, which the engine runs one after the other; the second vNIC is
//! at `/run/freeflow1`, and so on. `poststop` detaches them. An error goes to stderr and, by its exit
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
use crate::container_owner::{ContainerOwner, ROOTLESS, has_host_users};
use crate::engine_container::{ContainerVnic, EngineContainer, EngineContainers};
use crate::failure::{Context, Failure, Result, fail};
use crate::fork::in_child;
use crate::holders::{Holder, Holders};
use crate::inject::{Root, Sources};
use crate::networks::plug;
use crate::process::Process;
use crate::record::Records;
use crate::supervisor::declared_vnic;
use crate::tools;
use freeflow_client::VNIC_COUNT_MAX;
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
    let mut admin = Admin::connect(run_dir).map_err(|failure| match has_host_users() {
        true => failure,
        false => Failure::new(format!("{ROOTLESS} ({failure})")),
    })?;
    let containers = EngineContainers::of(run_dir);
    let lock = containers.lock()?;
    let mut container = begin(run_dir, &mut admin, &state, process)?;
    let result = add_vnic(run_dir, &mut admin, wanted, &state, &mut container, (&root, &library), lock);
    // No program starts, and the engine may run no other hook for it. A record stays for what could not be taken back.
    if result.is_err() && take_back(run_dir, Some(&mut admin), &container).is_ok() {
        containers.remove(&state.id);
    }
    result
}

/// The container with the vNICs that the hooks of its devices before this one gave it. Makes room for one that is
/// started again under its id, after an engine that died before it ran `poststop`.
fn begin(run_dir: &RunDir, admin: &mut Admin, state: &State, process: Process) -> Result<EngineContainer> {
    let containers = EngineContainers::of(run_dir);
    match containers.get(&state.id)? {
        Some(container) if container.process == process => return Ok(container),
        Some(other) if other.process.is_alive() => {
            fail!("another container has this id already, and vNICs: its process is {}", other.process.pid)
        }
        Some(former) => {
            take_back(run_dir, Some(admin), &former)?;
            containers.end(former)?;
        }
        None => settle_unrecorded(run_dir, admin, state)?,
    }
    Ok(EngineContainer { id: state.id.clone(), process, vnics: Vec::new() })
}

/// `lock` is given back once the vNIC is recorded.
fn add_vnic(
    run_dir: &RunDir,
    admin: &mut Admin,
    wanted: Wanted<'_>,
    state: &State,
    container: &mut EngineContainer,
    (root, library): (&Path, &Path),
    lock: File,
) -> Result<()> {
    let number = container.vnics.len();
    if number == VNIC_COUNT_MAX {
        fail!("a container can have {VNIC_COUNT_MAX} vNICs, and this one is to have more");
    }
    if let Some(attachment) = pod_vnic(run_dir, wanted, container)? {
        return join(run_dir, &attachment, container, root, library);
    }
    let vnic = match wanted {
        Wanted::Network(network, labels) => {
            check_drained(run_dir, network)?;
            attach(run_dir, admin, (network, labels), container, &short_name(state))?
        }
        Wanted::Vnic(name) => hold(run_dir, admin, name, state, container.process)?,
    };
    container.vnics.push(ContainerVnic {
        id: vnic.id.clone(),
        network: vnic.network.clone(),
        is_declared: matches!(wanted, Wanted::Vnic(_)),
        is_of_pod: false,
        address: Some(vnic.address),
        directory: PathBuf::from(&vnic.directory),
    });
    EngineContainers::of(run_dir).put(container)?;
    drop(lock);
    let meeting = meet(run_dir, &vnic.network);
    // A network that has a vNIC stays, so this is the one that the vNIC is in.
    let bridge = bridges::ensure(run_dir, &admin.network(&vnic.network)?)?;
    equip(run_dir, (&vnic, container), &bridge, root, library)?;
    container_names::add(run_dir, admin, &vnic, &short_name(state));
    meeting.wait();
    Ok(())
}

/// The vNIC of the container's pod that the device means. Labels of its own need a vNIC of its own, and so does a
/// second device.
fn pod_vnic(run_dir: &RunDir, wanted: Wanted<'_>, container: &EngineContainer) -> Result<Option<Attachment>> {
    let Wanted::Network(network, []) = wanted else { return Ok(None) };
    let attachment = Attachments::of(run_dir).of_process(container.process.pid, network)?;
    Ok(attachment.filter(|attachment| container.vnics.iter().all(|vnic| vnic.id != attachment.vnic)))
}

/// Gives a container the vNIC of its pod.
fn join(
    run_dir: &RunDir,
    attachment: &Attachment,
    container: &mut EngineContainer,
    root: &Path,
    library: &Path,
) -> Result<()> {
    let directory = run_dir.vnics().join(&attachment.vnic);
    if !directory.exists() {
        fail!(
            "the pod's vNIC in the network {} is gone, since the host was taken down: make the pod again",
            attachment.network
        );
    }
    container.vnics.push(ContainerVnic {
        id: attachment.vnic.clone(),
        network: attachment.network.clone(),
        is_declared: false,
        is_of_pod: true,
        address: None,
        directory,
    });
    EngineContainers::of(run_dir).put(container)?;
    inject(container, root, library)
}

/// The container's name for people: as podman shortens it.
fn short_name(state: &State) -> String {
    state.id.chars().take(12).collect()
}

/// The id of a container's vNIC with this number, if it is made for it.
fn vnic_id(container: &str, number: usize) -> String {
    if number == 0 { container.to_string() } else { format!("{container}.{number}") }
}

/// A vNIC that a former version gave the container, or one that is not recorded since the host lost its power.
fn settle_unrecorded(run_dir: &RunDir, admin: &mut Admin, state: &State) -> Result<()> {
    let is_there = |number| run_dir.path().join("vnics").join(vnic_id(&state.id, number)).exists();
    let ids: Vec<String> =
        (0..VNIC_COUNT_MAX).take_while(|number| is_there(*number)).map(|n| vnic_id(&state.id, n)).collect();
    if ids.is_empty() {
        return Ok(());
    }
    for former in admin.vnics()?.into_iter().filter(|vnic| ids.contains(&vnic.id)) {
        match process_of(&former) {
            Some(process) if process.is_alive() => {
                fail!("another container has this id already, and a vNIC in the network {}", former.network)
            }
            Some(_) => {
                ports::unplug(run_dir, &former.id);
                admin.detach(&former.id)?;
            }
            // Not a container's; attaching says so.
            None => {}
        }
    }
    Ok(())
}

/// With the address that the container had before it was started again, unless that is another's by now.
fn attach(
    run_dir: &RunDir,
    admin: &mut Admin,
    (network, own): (&str, &[(String, String)]),
    container: &EngineContainer,
    name: &str,
) -> Result<VnicStatus> {
    let number = container.vnics.len();
    let labels = || {
        let mut labels = vec![
            ("engine".to_string(), "oci".to_string()),
            ("pid".to_string(), container.process.pid.to_string()),
            ("start_ticks".to_string(), container.process.start_ticks.to_string()),
        ];
        labels.extend_from_slice(own);
        labels
    };
    let id = vnic_id(&container.id, number);
    if let Some(address) = EngineContainers::of(run_dir).former_address(&container.id, number, network)
        && let Ok(vnic) = admin.attach(&id, name, network, Some(address), labels())
    {
        return Ok(vnic);
    }
    admin.attach(&id, name, network, None, labels()).map_err(|failure| {
        // Names those there are, if there is no such network.
        admin.network(network).err().unwrap_or(failure)
    })
}

fn hold(run_dir: &RunDir, admin: &mut Admin, name: &str, state: &State, process: Process) -> Result<VnicStatus> {
    Records::of(run_dir).reconcile(Some(admin))?;
    let (vnic, _claimed) = declared_vnic(run_dir, name, false)?;
    let holder = Holder { vnic: vnic.id.clone(), container: state.id.clone(), name: short_name(state), process };
    Holders::of(run_dir).take(&holder, admin)?;
    Ok(vnic)
}

/// Plugs the container's last vNIC in, and mounts what programs need of it.
fn equip(
    run_dir: &RunDir,
    (vnic, container): (&VnicStatus, &EngineContainer),
    bridge: &Bridge,
    root: &Path,
    library: &Path,
) -> Result<()> {
    let pid = container.process.pid;
    if !namespace::same_network(pid, std::process::id())? {
        plug(run_dir, vnic, bridge, pid)?;
    }
    inject(container, root, library)
}

/// Mounts what programs need of the container's last vNIC.
fn inject(container: &EngineContainer, root: &Path, library: &Path) -> Result<()> {
    let pid = container.process.pid;
    let directories: Vec<&Path> = container.vnics.iter().map(|vnic| vnic.directory.as_path()).collect();
    let (sources, number) = (Sources::open(&directories, library)?, directories.len() - 1);
    let process_root = File::open(format!("/proc/{pid}/root")).context("the container's process")?;
    let mounts = File::open(format!("/proc/{pid}/ns/mnt")).context("the container's mounts")?;
    let owner = ContainerOwner::of(pid)?;
    in_child(|| {
        move_into_link_name_space(mounts.as_fd(), Some(LinkNameSpaceType::Mount))
            .context("can't enter the container's mount namespace")?;
        rustix::process::fchdir(&process_root).context("the container's root")?;
        rustix::process::chroot(".").context("the container's root")?;
        let root = Root::open(root, owner)?;
        root.check_c_library()?;
        root.mount_vnic(&sources, number)?;
        root.mount_classes(&sources.classes);
        root.add_verbs_device(&sources, number);
        // They serve all vNICs.
        if number == 0 { root.replace_or_add_libraries(&sources) } else { Ok(()) }
    })
}

/// Takes a container's vNICs back. Without a router the vNICs are left for the next `freeflow up`, since their process
/// is recorded with them.
///
/// # Errors
/// The first one; the other vNICs are taken back all the same.
fn take_back(run_dir: &RunDir, mut admin: Option<&mut Admin>, container: &EngineContainer) -> Result<()> {
    let own = container.vnics.iter().filter(|vnic| !vnic.is_of_pod);
    let results = own.map(|vnic| take_one_back(run_dir, admin.as_deref_mut(), &container.id, vnic));
    results.fold(Ok(()), Result::and)
}

fn take_one_back(run_dir: &RunDir, mut admin: Option<&mut Admin>, container: &str, vnic: &ContainerVnic) -> Result<()> {
    if vnic.is_declared {
        // Another container's, if this one was refused it.
        if !Holders::of(run_dir).release(&vnic.id, container, admin.as_deref_mut())? {
            return Ok(());
        }
        ports::unplug(run_dir, &vnic.id);
    } else {
        ports::unplug(run_dir, &vnic.id);
        admin.as_deref_mut().map_or(Ok(()), |admin| admin.detach(&vnic.id))?;
    }
    if let Some(admin) = admin {
        container_names::leave(run_dir, admin, &vnic.id, vnic.is_declared);
    }
    Ok(())
}

/// Takes back what containers had whose engine has run no hook at their end.
///
/// # Errors
/// The first one; the other containers are settled all the same.
pub fn settle(run_dir: &RunDir, admin: &mut Admin) -> Result<()> {
    let containers = EngineContainers::of(run_dir);
    let mut settle_one = |container: EngineContainer| {
        let _lock = containers.lock()?;
        // Its engine may have started it again meanwhile.
        if containers.get(&container.id)?.as_ref() != Some(&container) {
            return Ok(());
        }
        take_back(run_dir, Some(admin), &container)?;
        containers.end(container)
    };
    let results: Vec<Result<()>> = containers.dead().into_iter().map(&mut settle_one).collect();
    results.into_iter().fold(Ok(()), Result::and)
}

/// The first of a container's hooks takes all its vNICs back.
pub fn poststop(run_dir: &RunDir, wanted: Wanted<'_>) -> Result<()> {
    let state = read_state()?;
    let containers = EngineContainers::of(run_dir);
    let _lock = containers.lock()?;
    let recorded = containers.get(&state.id)?;
    // Another one's, under the same id: this one was refused it.
    let is_others = recorded.as_ref().is_some_and(|container| container.process.is_alive());
    if is_others || recorded.is_none() && containers.has_ended(&state.id) {
        return Ok(());
    }
    let mut admin = match Admin::look(run_dir) {
        Presence::Running(admin) => Some(admin),
        Presence::Absent => None,
        Presence::Unusable(failure) => return Err(failure),
    };
    if let Some(container) = recorded {
        take_back(run_dir, admin.as_mut(), &container)?;
        return containers.end(container);
    }
    // Of a container that a former version gave its vNIC.
    let is_alive =
        |vnic: VnicStatus| vnic.id == state.id && process_of(&vnic).is_some_and(|process| process.is_alive());
    let had = match wanted {
        Wanted::Network(..) => {
            if let Some(admin) = admin.as_mut()
                && admin.vnics()?.into_iter().any(is_alive)
            {
                return Ok(());
            }
            ports::unplug(run_dir, &state.id);
            admin.as_mut().map_or(Ok(()), |admin| admin.detach(&state.id))?;
            Some((state.id.as_str(), false))
        }
        Wanted::Vnic(name) => {
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
