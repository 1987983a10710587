//! Containers of engines, as the CDI hook has given them vNICs: one JSON file each in `RUN_DIR/engines`, and in
//! `RUN_DIR/engines/ended` the addresses of those that have ended, for a container that is started again under its id.
//!
//! An engine runs a container's hooks one after the other. Whoever makes or ends a container's record has the lock.

use crate::failure::{Context, Result, fail};
use crate::process::Process;
use crate::record::now_s;
use freeflow_hostnet::run_dir::{RunDir, lock_file, write_atomically};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// No container's id begins so.
const LOCK: &str = ".lock";
/// Longest id of a container, bytes: it becomes a file's name and a vNIC's.
const ID_BYTES_MAX: usize = 100;
/// An ended container's addresses are remembered as long, seconds.
const REMEMBERED_S: u64 = 24 * 3600;
/// Of so many containers at most; and those that are left when there are more.
const REMEMBERED_COUNT_MAX: usize = 1024;
const REMEMBERED_COUNT_KEPT: usize = 768;

/// A vNIC of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerVnic {
    pub id: String,
    pub network: String,
    /// It was declared, and stays when the container ends.
    pub is_declared: bool,
    /// The CNI plugin's, which the pod's other containers may have besides.
    #[serde(default)]
    pub is_of_pod: bool,
    /// `None`: its pod's.
    pub address: Option<IpAddr>,
    pub directory: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineContainer {
    pub id: String,
    pub process: Process,
    /// In the order of their devices.
    pub vnics: Vec<ContainerVnic>,
}

/// The addresses of an ended container.
#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    ended_s: u64,
    vnics: Vec<ContainerVnic>,
}

/// All of one run directory.
#[derive(Clone, Debug)]
pub struct EngineContainers {
    directory: PathBuf,
}

impl EngineContainers {
    pub fn of(run_dir: &RunDir) -> Self {
        Self { directory: run_dir.path().join("engines") }
    }

    /// Held as long as the file is open.
    pub fn lock(&self) -> Result<File> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).context(self.directory.display())?;
        Ok(lock_file(&self.directory.join(LOCK))?)
    }

    fn ended(&self) -> PathBuf {
        self.directory.join("ended")
    }

    /// `None`: it has no vNIC.
    pub fn get(&self, id: &str) -> Result<Option<EngineContainer>> {
        check_id(id)?;
        read(&self.directory.join(id))
    }

    /// Those whose process has ended without the engine's hooks.
    pub fn dead(&self) -> Vec<EngineContainer> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let all = entries.filter_map(|entry| read::<EngineContainer>(&entry.path()).ok().flatten());
        all.filter(|container| !container.process.is_alive()).collect()
    }

    pub fn put(&self, container: &EngineContainer) -> Result<()> {
        check_id(&container.id)?;
        write(&self.directory, &container.id, container)
    }

    /// Forgets a container that never began to run.
    pub fn remove(&self, id: &str) {
        let _ = fs::remove_file(self.directory.join(id));
    }

    /// A container has ended.
    pub fn end(&self, container: EngineContainer) -> Result<()> {
        let remembered = Remembered { ended_s: now_s(), vnics: container.vnics };
        write(&self.ended(), &container.id, &remembered)?;
        self.remove(&container.id);
        self.forget_oldest();
        Ok(())
    }

    /// Whether it had vNICs not long ago.
    pub fn has_ended(&self, id: &str) -> bool {
        check_id(id).is_ok() && self.ended().join(id).exists()
    }

    /// The address that the container's vNIC with this number had in this network, before it ended.
    pub fn former_address(&self, id: &str, number: usize, network: &str) -> Option<IpAddr> {
        check_id(id).ok()?;
        let remembered: Remembered = read(&self.ended().join(id)).ok()??;
        let vnic = remembered.vnics.get(number)?;
        let is_fresh = now_s().saturating_sub(remembered.ended_s) <= REMEMBERED_S;
        let is_own = !vnic.is_declared && !vnic.is_of_pod && vnic.network == network;
        vnic.address.filter(|_| is_fresh && is_own)
    }

    fn forget_oldest(&self) {
        let entries: Vec<PathBuf> =
            fs::read_dir(self.ended()).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        if entries.len() <= REMEMBERED_COUNT_MAX {
            return;
        }
        let age =
            |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let mut by_age: Vec<(SystemTime, PathBuf)> = entries.into_iter().map(|path| (age(&path), path)).collect();
        by_age.sort();
        for (_, path) in &by_age[..by_age.len() - REMEMBERED_COUNT_KEPT] {
            let _ = fs::remove_file(path);
        }
    }
}

fn check_id(id: &str) -> Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'+');
    let first = id.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !first || !id.bytes().all(is_plain) || id.len() > ID_BYTES_MAX || id == "ended" {
        fail!("a container with the id {id:?} can't have a vNIC");
    }
    Ok(())
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        // A host that lost its power may have left half a file; then the vNICs' own labels decide.
        text => Ok(serde_json::from_slice(&text.context(path.display())?).ok()),
    }
}

fn write(directory: &Path, name: &str, value: &impl Serialize) -> Result<()> {
    let (path, text) = (directory.join(name), serde_json::to_vec(value).expect("it is encodable"));
    let put = || write_atomically(&path, &text, 0o600);
    let written = put().or_else(|error| {
        if error.kind() != std::io::ErrorKind::NotFound {
            return Err(error);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        put()
    });
    written.context(format!("can't write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> (Self, EngineContainers) {
            let path = std::env::temp_dir().join(format!("freeflow-engines-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            let containers = EngineContainers::of(&RunDir::new(&path).unwrap());
            (Self(path), containers)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn container(id: &str, networks: &[&str]) -> EngineContainer {
        let vnic = |(number, network): (usize, &&str)| ContainerVnic {
            id: format!("{id}.{number}"),
            network: network.to_string(),
            is_declared: false,
            is_of_pod: false,
            address: Some([10, 50, 0, 2 + number as u8].into()),
            directory: PathBuf::from("/nowhere"),
        };
        let vnics = networks.iter().enumerate().map(vnic).collect();
        EngineContainer { id: id.into(), process: Process::current(), vnics }
    }

    #[test]
    fn an_ended_container_s_addresses_are_remembered_by_number_and_network() {
        let (_scratch, all) = Scratch::new("remembered");
        let web = container("web", &["red", "blue"]);
        assert_eq!(all.get("web").unwrap(), None);
        all.put(&web).unwrap();
        assert_eq!(all.get("web").unwrap(), Some(web.clone()));
        assert_eq!(all.former_address("web", 0, "red"), None, "it has not ended");
        all.end(web).unwrap();
        assert!(all.get("web").unwrap().is_none() && all.has_ended("web"));
        assert_eq!(all.former_address("web", 0, "red"), Some([10, 50, 0, 2].into()));
        assert_eq!(all.former_address("web", 1, "blue"), Some([10, 50, 0, 3].into()));
        assert_eq!(all.former_address("web", 0, "blue"), None);
        assert_eq!(all.former_address("web", 2, "red"), None);
        assert_eq!(all.former_address("other", 0, "red"), None);
    }

    #[test]
    fn old_and_half_files_count_for_nothing() {
        let (scratch, all) = Scratch::new("old");
        all.end(container("web", &["red"])).unwrap();
        let path = scratch.0.join("engines/ended/web");
        let text = fs::read_to_string(&path).unwrap();
        let mut remembered: Remembered = serde_json::from_str(&text).unwrap();
        remembered.ended_s -= REMEMBERED_S + 1;
        fs::write(&path, serde_json::to_vec(&remembered).unwrap()).unwrap();
        assert_eq!(all.former_address("web", 0, "red"), None);
        fs::write(&path, &text[..text.len() / 2]).unwrap();
        assert_eq!(all.former_address("web", 0, "red"), None);
        fs::write(scratch.0.join("engines/half"), "{").unwrap();
        assert_eq!(all.get("half").unwrap(), None);
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let (scratch, all) = Scratch::new("forgotten");
        for number in 0..=REMEMBERED_COUNT_MAX {
            all.end(container(&format!("c{number}"), &["red"])).unwrap();
        }
        let left = fs::read_dir(scratch.0.join("engines/ended")).unwrap().count();
        assert_eq!(left, REMEMBERED_COUNT_KEPT);
        assert!(all.has_ended(&format!("c{REMEMBERED_COUNT_MAX}")));
    }

    #[test]
    fn ids_that_lead_elsewhere_are_refused() {
        let (_scratch, all) = Scratch::new("ids");
        for bad in ["", ".", "..", "../x", "a/b", "ended", "-a", "a b", &"x".repeat(ID_BYTES_MAX + 1)] {
            assert!(all.get(bad).is_err() && !all.has_ended(bad), "{bad}");
        }
        assert!(all.get(&"a1".repeat(32)).unwrap().is_none());
    }
}
