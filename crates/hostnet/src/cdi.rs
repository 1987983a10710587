//! The CDI files that make `--device freeflow.io/net=NETWORK` and `--device freeflow.io/vnic=NAME`
//! known to podman, Docker and others: a new vNIC in a network, and a declared vNIC with its labels
//! and addresses. One file each, since a CDI file has one kind of devices.
//!
//! They lie in `/etc/cdi` rather than `/var/run/cdi`, so that after a reboot the container's start fails with a reason
//! and the remedy (from the hook) instead of "unresolvable CDI device". The hooks' environment is given, lest a
//! container's own LD_PRELOAD reach them.
//!
//! The files name no device node: an engine would look for it on the host where the container has a user namespace,
//! and several vNICs of one container need one each. The hook makes it.

use crate::error::{Context, Result};
use crate::inventory::Inventory;
use crate::run_dir::{RunDir, write_atomically};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The device file that a verbs device has on a machine with RDMA hardware. UCX looks whether it is a character device
/// that it may use, and leaves the verbs device alone otherwise; nobody opens it, since the drop-in needs none.
/// A number is still to come.
pub const VERBS_DEVICE: &str = "infiniband/uverbs";
const DIRECTORY: &str = "/etc/cdi";
/// Where `/etc` can't be written.
const DIRECTORY_OF_RUN: &str = "/var/run/cdi";
const FILE: &str = "freeflow.json";
/// Beside it, where there are declared vNICs.
const VNIC_FILE: &str = "freeflow-vnics.json";
pub const KIND: &str = "freeflow.io/net";
pub const VNIC_KIND: &str = "freeflow.io/vnic";
/// Of a Kubernetes claim's devices, which have a file for each claim.
pub const CLAIM_KIND: &str = "freeflow.io/claim";
/// The newest that podman 4.3 reads.
const VERSION: &str = "0.5.0";

/// Keys and values of a vNIC's labels.
pub type Labels = BTreeMap<String, String>;

/// Devices that containers can be given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    pub networks: Vec<String>,
    pub vnics: Vec<String>,
}

impl From<&Inventory> for Devices {
    fn from(inventory: &Inventory) -> Self {
        let named = |name: &&String| is_device_name(name);
        let declared = inventory.vnics.iter().filter(|vnic| vnic.is_declared);
        Self {
            networks: inventory.networks.iter().map(|network| &network.name).filter(named).cloned().collect(),
            vnics: declared.map(|vnic| &vnic.id).filter(named).cloned().collect(),
        }
    }
}

/// CDI requires a letter or digit at either end, and a container engine rejects a whole file for one
/// other name in it. So one tenant's name would cost all tenants their devices.
fn is_device_name(name: &str) -> bool {
    let is_plain = |end: Option<char>| end.is_some_and(|end| end.is_ascii_alphanumeric());
    is_plain(name.chars().next()) && is_plain(name.chars().next_back())
}

/// A kind of device, and the hook's option for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A new vNIC in a network.
    Network,
    /// A declared vNIC.
    Vnic,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Network => KIND,
            Self::Vnic => VNIC_KIND,
        }
    }

    pub fn option(self) -> &'static str {
        match self {
            Self::Network => "--network",
            Self::Vnic => "--vnic",
        }
    }
}

/// A hook of a container, with the name of its stage. `program` is the `freeflow` command.
fn hook(run_dir: &RunDir, program: &Path, (kind, name): (Kind, &str), labels: &Labels, stage: &str) -> Value {
    let mut environment = vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_string()];
    if let Ok(directory) = std::env::var("FREEFLOW_LIBDIR") {
        environment.push(format!("FREEFLOW_LIBDIR={directory}"));
    }
    let mut words = vec![json!("freeflow"), json!("--run-dir"), json!(run_dir.path()), json!("hook")];
    words.extend([json!(kind.option()), json!(name)]);
    // A word of its own could be taken for an option.
    words.extend(labels.iter().map(|(key, value)| json!(format!("--label={key}={value}"))));
    words.push(json!(stage));
    json!({"hookName": stage, "path": program, "args": words, "env": environment})
}

/// Changes of a container's configuration that give it a vNIC, in CDI's form (`containerEdits`).
pub fn container_edits(run_dir: &RunDir, program: &Path, device: (Kind, &str)) -> Value {
    labelled_edits(run_dir, program, device, &Labels::new())
}

fn labelled_edits(run_dir: &RunDir, program: &Path, device: (Kind, &str), labels: &Labels) -> Value {
    let hooks = ["createRuntime", "poststop"].map(|stage| hook(run_dir, program, device, labels, stage));
    json!({"hooks": hooks})
}

/// A device of a Kubernetes claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimDevice {
    /// Its name: letters, digits, `-`, `_` and `.`, a letter or digit at either end.
    pub name: String,
    pub kind: Kind,
    /// The network, or the declared vNIC.
    pub of: String,
    /// Of a new vNIC.
    pub labels: Labels,
}

/// The content of a CDI file for the devices of one Kubernetes claim. `program` is the `freeflow` command, as the host
/// has it.
pub fn claim_specification(run_dir: &RunDir, program: &Path, devices: &[ClaimDevice]) -> Value {
    let device = |device: &ClaimDevice| {
        let edits = labelled_edits(run_dir, program, (device.kind, &device.of), &device.labels);
        json!({"name": device.name, "containerEdits": edits})
    };
    let devices: Vec<Value> = devices.iter().map(device).collect();
    json!({"cdiVersion": VERSION, "kind": CLAIM_KIND, "devices": devices})
}

fn specification(run_dir: &RunDir, program: &Path, kind: Kind, names: &[String]) -> Value {
    let device =
        |name: &String| json!({"name": name, "containerEdits": container_edits(run_dir, program, (kind, name))});
    let devices: Vec<Value> = names.iter().map(device).collect();
    json!({"cdiVersion": VERSION, "kind": kind.name(), "devices": devices})
}

/// Writes the files where asked, or for the default run directory where engines look for them;
/// gives the path of the networks'. `None`: they were not asked for, or the place can't be written.
/// `program` is the `freeflow` command, which the hooks run.
///
/// # Errors
/// The place that was asked for can't be written.
pub fn write(run_dir: &RunDir, program: &Path, asked: Option<&Path>, devices: &Devices) -> Result<Option<PathBuf>> {
    let text = |kind, names: &[String]| {
        serde_json::to_vec_pretty(&specification(run_dir, program, kind, names)).expect("it is encodable")
    };
    let networks = text(Kind::Network, &devices.networks);
    let vnics = text(Kind::Vnic, &devices.vnics);
    let put = |path: &Path, text: &[u8]| -> std::io::Result<()> {
        if fs::read(path).ok().as_deref() != Some(text) {
            write_atomically(path, text, 0o644)?;
        }
        Ok(())
    };
    let put_all = |directory: &Path| -> std::io::Result<PathBuf> {
        fs::create_dir_all(directory)?;
        let path = directory.join(FILE);
        put(&path, &networks)?;
        match devices.vnics.is_empty() {
            // A file without devices is none.
            true => remove_if_there(&directory.join(VNIC_FILE))?,
            false => put(&directory.join(VNIC_FILE), &vnics)?,
        }
        Ok(path)
    };
    if let Some(directory) = asked {
        let directory = std::path::absolute(directory).context(directory.display())?;
        return put_all(&directory).map(Some).context(format!("can't write {}/{FILE}", directory.display()));
    }
    if !run_dir.is_default() {
        return Ok(None);
    }
    Ok([DIRECTORY, DIRECTORY_OF_RUN].into_iter().find_map(|directory| put_all(Path::new(directory)).ok()))
}

/// Removes what [`write`] made, by the path that it gave.
pub fn remove(file: &Path) {
    let _ = fs::remove_file(file);
    let _ = fs::remove_file(file.with_file_name(VNIC_FILE));
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_the_network_and_gives_hooks_a_clean_environment() {
        let run_dir = RunDir::new(Path::new("/run/freeflow")).unwrap();
        let value = specification(&run_dir, Path::new("/opt/bin/freeflow"), Kind::Network, &["default".into()]);
        assert_eq!(value["cdiVersion"], "0.5.0");
        assert_eq!(value["kind"], "freeflow.io/net");
        let edits = &value["devices"][0]["containerEdits"];
        let hooks = edits["hooks"].as_array().unwrap();
        assert_eq!(hooks.len(), 2);
        for hook in hooks {
            assert_eq!(hook["env"][0], "PATH=/usr/sbin:/usr/bin:/sbin:/bin");
            assert_eq!(hook["path"], "/opt/bin/freeflow");
        }
        assert_eq!(hooks[0]["args"][5], "default");
        assert_eq!(hooks[1]["hookName"], "poststop");
    }

    #[test]
    fn a_claims_devices_carry_its_labels_as_one_word_each() {
        let run_dir = RunDir::new(Path::new("/run/freeflow")).unwrap();
        let labels = Labels::from([("tier".into(), "a\" --x".into())]);
        let device = ClaimDevice { name: "u-vnic-0".into(), kind: Kind::Network, of: "red".into(), labels };
        let value = claim_specification(&run_dir, Path::new("/usr/bin/freeflow"), &[device]);
        assert_eq!((&value["kind"], &value["devices"][0]["name"]), (&json!(CLAIM_KIND), &json!("u-vnic-0")));
        let words = &value["devices"][0]["containerEdits"]["hooks"][0]["args"];
        let wanted = json!([
            "freeflow",
            "--run-dir",
            "/run/freeflow",
            "hook",
            "--network",
            "red",
            "--label=tier=a\" --x",
            "createRuntime"
        ]);
        assert_eq!(*words, wanted);
    }

    #[test]
    fn names_that_no_engine_takes_are_left_out() {
        let good = ["a", "a-b.c_d", "7", "database-1"];
        let bad = ["x-", "x.", "x_", "_x", "", "-"];
        assert!(good.iter().all(|name| is_device_name(name)));
        assert!(!bad.iter().any(|name| is_device_name(name)));
    }

    #[test]
    fn the_files_follow_what_is_declared() {
        let directory = std::env::temp_dir().join(format!("freeflow-cdi-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let run_dir = RunDir::new(Path::new("/run/elsewhere")).unwrap();
        let mut devices = Devices { networks: vec!["default".into()], vnics: vec!["database".into()] };
        let file = write(&run_dir, Path::new("/opt/bin/freeflow"), Some(&directory), &devices).unwrap().unwrap();
        let text = fs::read(directory.join(VNIC_FILE)).unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&value["kind"], &value["devices"][0]["name"]), (&json!(VNIC_KIND), &json!("database")));
        let hooks = &value["devices"][0]["containerEdits"]["hooks"];
        assert_eq!((&hooks[0]["args"][4], &hooks[0]["args"][5]), (&json!("--vnic"), &json!("database")));
        devices.vnics.clear();
        write(&run_dir, Path::new("/opt/bin/freeflow"), Some(&directory), &devices).unwrap();
        assert!(
            file.exists() && !directory.join(VNIC_FILE).exists(),
            "a CDI file without devices is refused by engines"
        );
        remove(&file);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir_all(&directory).unwrap();
    }
}
