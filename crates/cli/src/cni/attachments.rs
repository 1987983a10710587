//! Attachments: the vNICs that the plugin has given to network namespaces, one JSON file each in `RUN_DIR/cni`.
//!
//! An attachment is written before its vNIC is made and removed after that is gone, so that a vNIC with the label
//! `engine=cni` whose attachment is not there is no pod's. `freeflow up` ends such vNICs, and attachments whose
//! namespace is gone.
//!
//! Invariant: files come and go under the lock, and a namespace has one vNIC of a network at most.

use crate::admin::Admin;
use crate::cni::sandbox::{Identity, Sandbox, State};
use crate::container_names;
use crate::failure::{Context, Result, fail};
use freeflow_hostnet::ports;
use freeflow_hostnet::run_dir::{RunDir, lock_file, write_atomically};
use freeflow_protocol::admin::VnicStatus;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const LOCK: &str = ".lock";
const EXTENSION: &str = "json";
/// Value of the label `engine` of these vNICs.
pub const ENGINE: &str = "cni";

/// By what a runtime knows an attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Name of the runtime's network configuration.
    pub configuration: String,
    pub container: String,
    pub interface: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub key: Key,
    pub network: String,
    /// Id of the vNIC.
    pub vnic: String,
    /// Name for people.
    pub name: String,
    pub path: PathBuf,
    pub namespace: Identity,
    /// The vNIC's own interface in the namespace, if it has one.
    pub interface: Option<String>,
    pub is_complete: bool,
}

impl Attachment {
    /// As the path shows it, see [`Identity::seen_at`].
    pub fn is_alive(&self) -> bool {
        self.namespace.seen_at(&self.path) == State::Alive
    }
}

/// All of one run directory.
#[derive(Clone, Debug)]
pub struct Attachments {
    directory: PathBuf,
    run_dir: RunDir,
}

impl Attachments {
    pub fn of(run_dir: &RunDir) -> Self {
        Self { directory: run_dir.cni(), run_dir: run_dir.clone() }
    }

    /// The name begins with the namespace's inode number: a container's start looks at those of its own alone.
    fn path(&self, attachment: &Attachment) -> PathBuf {
        self.directory.join(format!("{}.{}.{EXTENSION}", attachment.namespace.inode, attachment.vnic))
    }

    fn read(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<Attachment> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let wanted = entries.filter(|entry| {
            let name = entry.file_name();
            name.to_str().is_some_and(|name| {
                Path::new(name).extension().is_some_and(|extension| extension == EXTENSION) && is_wanted(name)
            })
        });
        let mut all: Vec<Attachment> =
            wanted.filter_map(|entry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()).collect();
        all.sort_by(|one, other| one.vnic.cmp(&other.vnic));
        all
    }

    /// In order of vNIC, also those whose namespace is gone.
    pub fn list(&self) -> Vec<Attachment> {
        self.read(|_| true)
    }

    /// Whether there has ever been one.
    pub fn is_empty(&self) -> bool {
        !self.directory.exists()
    }

    /// Those whose namespace lives.
    pub fn live(&self) -> Vec<Attachment> {
        self.list().into_iter().filter(Attachment::is_alive).collect()
    }

    pub fn of_key(&self, key: &Key) -> Vec<Attachment> {
        self.list().into_iter().filter(|attachment| attachment.key == *key).collect()
    }

    fn with_inode(&self, inode: u64) -> Vec<Attachment> {
        let prefix = format!("{inode}.");
        self.read(|name| name.starts_with(&prefix))
    }

    /// Those of the network namespace at a path.
    pub fn at(&self, path: &Path) -> Result<Vec<Attachment>> {
        let inode = rustix::fs::stat(path).context(path.display())?.st_ino;
        let candidates = self.with_inode(inode);
        if candidates.is_empty() {
            return Ok(candidates);
        }
        let sandbox = Sandbox::open(path)?;
        Ok(candidates.into_iter().filter(|one| one.namespace == sandbox.identity).collect())
    }

    /// The attachment by which a process' network namespace has a vNIC in a network.
    ///
    /// # Errors
    /// The plugin is not done with it, or was killed.
    pub fn of_process(&self, pid: u32, network: &str) -> Result<Option<Attachment>> {
        let all = self.at(Path::new(&format!("/proc/{pid}/ns/net")))?;
        let Some(found) = all.into_iter().find(|attachment| attachment.network == network) else { return Ok(None) };
        if !found.is_complete {
            fail!("freeflow-cni has not finished the vNIC of this pod in the network {network}: make the pod again");
        }
        Ok(Some(found))
    }

    pub fn lock(&self) -> Result<File> {
        let what = || format!("can't make {}", self.directory.display());
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).context(what())?;
        Ok(lock_file(&self.directory.join(LOCK))?)
    }

    /// Notes an attachment that is to be made. One that a killed plugin left unfinished makes room.
    ///
    /// # Errors
    /// The runtime has it already, or the namespace has a vNIC in the network.
    pub fn begin(&self, attachment: &Attachment, admin: &mut Admin) -> Result<()> {
        let _lock = self.lock()?;
        let former = |other: &&Attachment| other.key == attachment.key && other.network == attachment.network;
        for other in self.list().iter().filter(former) {
            let is_same = other.namespace == attachment.namespace;
            if other.is_complete && is_same {
                fail!("it is attached already, as the vNIC {}: DEL comes first", other.vnic);
            }
            self.end(other, Some(admin))?;
        }
        for other in self.with_inode(attachment.namespace.inode) {
            if other.namespace != attachment.namespace {
                self.end(&other, Some(admin))?;
            } else if other.network == attachment.network {
                fail!(
                    "the network namespace has a vNIC in the network {} already, by {} of the configuration {}",
                    other.network,
                    other.key.interface,
                    other.key.configuration
                );
            }
        }
        self.write(attachment)
    }

    /// The attachment is whole.
    ///
    /// # Errors
    /// It was ended meanwhile.
    pub fn finish(&self, attachment: &Attachment) -> Result<()> {
        let _lock = self.lock()?;
        if !self.path(attachment).exists() {
            fail!("it was deleted while it was made");
        }
        self.write(attachment)
    }

    fn write(&self, attachment: &Attachment) -> Result<()> {
        let path = self.path(attachment);
        let text = serde_json::to_vec_pretty(attachment).expect("attachments are encodable");
        write_atomically(&path, &text, 0o600).context(format!("can't write {}", path.display()))
    }

    /// Ends an attachment. Without a router the vNIC is left for the next `freeflow up`. With the lock held.
    pub fn end(&self, attachment: &Attachment, admin: Option<&mut Admin>) -> Result<()> {
        ports::unplug(&self.run_dir, &attachment.vnic);
        if let Some(admin) = admin {
            admin.detach(&attachment.vnic)?;
            container_names::leave(&self.run_dir, admin, &attachment.vnic, false);
        }
        let path = self.path(attachment);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).context(path.display()),
            _ => Ok(()),
        }
    }

    /// Ends those whose namespace is gone, as `state` has it. Goes on after a failure, and gives the first one.
    pub fn settle(&self, admin: Option<&mut Admin>, state: impl Fn(&Attachment) -> State) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let _lock = self.lock()?;
        self.remove_unfinished();
        self.end_all(admin, |attachment| state(attachment) == State::Gone)
    }

    /// Ends those for which `is_over` holds, with the lock held. Goes on after a failure, and gives the first one.
    pub fn end_all(&self, mut admin: Option<&mut Admin>, is_over: impl Fn(&Attachment) -> bool) -> Result<()> {
        let mut first = Ok(());
        for attachment in self.list().iter().filter(|attachment| is_over(attachment)) {
            let ended = self.end(attachment, admin.as_deref_mut());
            first = first.and(ended);
        }
        first
    }

    /// Ends vNICs that a plugin asked for before it was killed, and that were made after their attachment had ended.
    pub fn end_orphans(&self, admin: &mut Admin) -> Result<()> {
        // In this order: a vNIC has its attachment before it is made.
        let vnics = admin.vnics()?;
        let attached: BTreeSet<String> = self.list().into_iter().map(|attachment| attachment.vnic).collect();
        let is_pods = |vnic: &&VnicStatus| vnic.labels.iter().any(|(key, value)| key == "engine" && value == ENGINE);
        let mut first = Ok(());
        for vnic in vnics.iter().filter(is_pods).filter(|vnic| !attached.contains(&vnic.id)) {
            ports::unplug(&self.run_dir, &vnic.id);
            first = first.and(admin.detach(&vnic.id));
        }
        first
    }

    /// Half-written files of killed processes: files are written under the lock, which the caller has.
    fn remove_unfinished(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_unfinished =
                path.extension().and_then(|extension| extension.to_str()).is_some_and(|text| text.starts_with("tmp"));
            if is_unfinished {
                let _ = fs::remove_file(path);
            }
        }
    }
}
