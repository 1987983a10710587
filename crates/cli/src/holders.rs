//! Which containers of engines have declared vNICs: one JSON file each in `RUN_DIR/holders`.
//!
//! A vNIC that a hook makes for a container is known by its own labels. A declared one has the
//! labels of its declaration, so its container is recorded here. A declared vNIC has one container
//! at most, of an engine or of `freeflow run`.
//!
//! Invariant: holders come and go under the lock of [`Records`].

use crate::admin::Admin;
use crate::failure::{Context, Result, fail};
use crate::process::Process;
use crate::record::{Records, check_name};
use freeflow_hostnet::run_dir::{RunDir, write_atomically};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;

/// A container of an engine that has a declared vNIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub vnic: String,
    /// The engine's id of the container.
    pub container: String,
    /// Name for people.
    pub name: String,
    pub process: Process,
}

/// All of one run directory.
#[derive(Clone, Debug)]
pub struct Holders {
    directory: PathBuf,
    records: Records,
}

impl Holders {
    pub fn of(run_dir: &RunDir) -> Self {
        Self { directory: run_dir.holders(), records: Records::of(run_dir) }
    }

    fn path(&self, vnic: &str) -> Result<PathBuf> {
        // A vNIC's name can be a file's, as a container's can.
        check_name(vnic)?;
        Ok(self.directory.join(format!("{vnic}.json")))
    }

    /// In order of vNIC, also those whose process has ended.
    pub fn list(&self) -> Vec<Holder> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut all: Vec<Holder> =
            entries.filter_map(|entry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()).collect();
        all.sort_by(|one, other| one.vnic.cmp(&other.vnic));
        all
    }

    /// Those whose process lives.
    pub fn live(&self) -> Vec<Holder> {
        self.list().into_iter().filter(|holder| holder.process.is_alive()).collect()
    }

    /// Gives a container its vNIC, unless another one has it.
    pub fn take(&self, holder: &Holder, admin: &mut Admin) -> Result<()> {
        let _lock = self.records.lock()?;
        if let Some(user) = self.records.user_of(&holder.vnic) {
            fail!("the vNIC {} is in use by the container {user}", holder.vnic);
        }
        let text = serde_json::to_vec_pretty(holder).expect("holders are encodable");
        let path = self.path(&holder.vnic)?;
        write_atomically(&path, &text, 0o600).context(path.display())?;
        admin.occupy(&holder.vnic, &holder.name, true).inspect_err(|_| {
            let _ = fs::remove_file(&path);
        })
    }

    /// Takes a container's vNIC back. False: the container does not have it.
    pub fn release(&self, vnic: &str, container: &str, admin: Option<&mut Admin>) -> Result<bool> {
        let _lock = self.records.lock()?;
        let held = self.list().into_iter().find(|holder| holder.vnic == vnic && holder.container == container);
        let Some(holder) = held else { return Ok(false) };
        self.remove(&holder, admin)?;
        Ok(true)
    }

    /// Takes back what ended containers had. With the lock of the records held.
    pub fn settle(&self, mut admin: Option<&mut Admin>) -> Result<()> {
        for holder in self.list().into_iter().filter(|holder| !holder.process.is_alive()) {
            self.remove(&holder, admin.as_deref_mut())?;
        }
        Ok(())
    }

    fn remove(&self, holder: &Holder, admin: Option<&mut Admin>) -> Result<()> {
        if let Some(admin) = admin {
            admin.occupy(&holder.vnic, &holder.name, false)?;
        }
        let path = self.path(&holder.vnic)?;
        fs::remove_file(&path).context(path.display())
    }
}
