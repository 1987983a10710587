//! Records of containers, one JSON file each in `RUN_DIR/containers`.
//!
//! Invariant: a record is made, replaced and removed only under the lock of [`Records`], and only whole files appear.
//! Invariant: a record whose supervisor lives belongs to that supervisor; others only touch it after its death.

use crate::admin::Admin;
use crate::failure::{Context, Failure, Result, fail};
use crate::holders::Holders;
use crate::process::Process;
use freeflow_hostnet::run_dir::{RunDir, lock_file, write_atomically};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest name of a container, bytes: it becomes a host name.
pub const NAME_BYTES_MAX: usize = 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its supervisor is setting it up.
    Created,
    Running,
    Exited,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The vNIC's id.
    pub id: String,
    /// The vNIC was declared, and stays when the container ends.
    #[serde(default)]
    pub is_declared: bool,
    pub name: String,
    pub network: String,
    pub ip: Option<IpAddr>,
    /// Those after the first.
    #[serde(default)]
    pub other_vnics: Vec<OtherVnic>,
    /// Its IPv6 address, in a network that has any.
    #[serde(default)]
    pub ip6: Option<Ipv6Addr>,
    pub host: String,
    pub state: State,
    pub exit_code: Option<i32>,
    /// Why it ended, if not by itself.
    pub note: Option<String>,
    pub supervisor: Process,
    pub init: Option<Process>,
    /// The command's own process, as the host numbers it.
    pub command_pid: Option<u32>,
    pub command: Vec<String>,
    pub environment: Vec<String>,
    pub working_directory: PathBuf,
    pub detached: bool,
    /// Remove the record at the end (`--rm`).
    pub remove: bool,
    /// Seconds since 1970.
    pub created_s: u64,
    pub finished_s: Option<u64>,
}

/// A vNIC of a container with several.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OtherVnic {
    pub id: String,
    pub network: String,
    pub ip: Option<IpAddr>,
    #[serde(default)]
    pub ip6: Option<Ipv6Addr>,
}

impl Record {
    /// The container does not have its vNICs any more: one that was declared stays, others go.
    pub fn leave_vnics(&self, admin: &mut Admin) -> Result<()> {
        let first = if self.is_declared { admin.occupy(&self.id, &self.name, false) } else { admin.detach(&self.id) };
        self.other_vnics.iter().map(|vnic| admin.detach(&vnic.id)).fold(first, Result::and)
    }

    /// The ids of its vNICs, in the order of their devices.
    pub fn vnic_ids(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.id.as_str()).chain(self.other_vnics.iter().map(|vnic| vnic.id.as_str()))
    }

    /// The networks of its vNICs, in the same order.
    pub fn networks(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.network.as_str()).chain(self.other_vnics.iter().map(|vnic| vnic.network.as_str()))
    }

    /// Whether it uses resources: being set up, or running.
    pub fn is_live(&self) -> bool {
        match self.state {
            State::Exited => false,
            State::Created => self.supervisor.is_alive(),
            State::Running => self.init.is_some_and(|init| init.is_alive()),
        }
    }
}

/// All containers of one run directory.
#[derive(Clone, Debug)]
pub struct Records {
    directory: PathBuf,
    logs: PathBuf,
    run_dir: RunDir,
}

impl Records {
    pub fn of(run_dir: &RunDir) -> Self {
        Self { directory: run_dir.containers(), logs: run_dir.path().join("logs"), run_dir: run_dir.clone() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.json"))
    }

    pub fn lock(&self) -> Result<File> {
        Ok(lock_file(&self.directory.join(".lock"))?)
    }

    /// In order of name.
    pub fn list(&self) -> Vec<Record> {
        let mut all: Vec<Record> = fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "json"))
            .filter_map(|entry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok())
            .collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    pub fn get(&self, name: &str) -> Result<Record> {
        check_name(name)?;
        let bytes = fs::read(self.path(name))
            .map_err(|_| Failure::new(format!("no container is called {name:?}; see freeflow ps -a")))?;
        serde_json::from_slice(&bytes).context(format!("the record of {name} is damaged; freeflow rm -f {name}"))
    }

    /// Whether a container can have this name.
    pub fn check_free(&self, name: &str) -> Result<()> {
        if self.path(name).exists() {
            fail!(
                "a container is called {name:?} already; choose another --name, or remove it with: freeflow rm -f {name}"
            );
        }
        Ok(())
    }

    /// Makes the record of a new container, unless its name is taken.
    pub fn reserve(&self, record: &Record) -> Result<()> {
        let _lock = self.lock()?;
        self.check_free(&record.name)?;
        if let Some(user) = self.user_of(&record.id) {
            fail!("the vNIC {} is in use by the container {user}", record.id);
        }
        self.write(record)
    }

    /// The container that has a vNIC, of ours or of an engine. With the lock held.
    pub fn user_of(&self, vnic: &str) -> Option<String> {
        // Until its supervisor has tidied up, too.
        let is_used = |other: &Record| other.is_live() || other.supervisor.is_alive();
        let is_user = |other: &Record| other.id == vnic && other.state != State::Exited && is_used(other);
        let ours = self.list().into_iter().find(is_user).map(|user| user.name);
        let holders = || Holders::of(&self.run_dir).live();
        ours.or_else(|| holders().into_iter().find(|holder| holder.vnic == vnic).map(|holder| holder.name))
    }

    /// Replaces the record; the caller is its supervisor, or that is dead.
    pub fn store(&self, record: &Record) -> Result<()> {
        let _lock = self.lock()?;
        self.write(record)
    }

    fn write(&self, record: &Record) -> Result<()> {
        let text = serde_json::to_vec_pretty(record).expect("records are encodable");
        write_atomically(&self.path(&record.name), &text, 0o600)
            .context(format!("can't write the record of {}", record.name))
    }

    /// Removes record and log of a container, if it is still the one with this id.
    pub fn remove(&self, name: &str, id: &str) -> Result<()> {
        let _lock = self.lock()?;
        self.remove_locked(name, id);
        Ok(())
    }

    fn remove_locked(&self, name: &str, id: &str) {
        let path = self.path(name);
        let current = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
        if current.is_none_or(|record| record.id == id) {
            let _ = fs::remove_file(path);
            let _ = fs::remove_file(self.logs.join(format!("{name}.log")));
        }
    }

    /// Settles what dead supervisors left behind: ends what remains of their containers, frees their vNICs, corrects
    /// their records. Without a router the vNICs are left for the next `freeflow up`. Whether there was anything.
    pub fn reconcile(&self, mut admin: Option<&mut Admin>) -> Result<bool> {
        let holders = Holders::of(&self.run_dir);
        let mut is_settled = holders.list().iter().any(|holder| !holder.process.is_alive());
        // Where nothing was ever brought up there is nothing to lock either.
        if !holders.list().is_empty() {
            let _lock = self.lock()?;
            holders.settle(admin.as_deref_mut())?;
        }
        for seen in self.list() {
            if seen.state == State::Exited || seen.supervisor.is_alive() {
                continue;
            }
            if let Some(init) = seen.init {
                // PR_SET_PDEATHSIG has done this already, unless the kernel is still at it.
                init.signal(Signal::KILL).context(format!("can't end container {}", seen.name))?;
                init.wait_end(Duration::from_secs(5));
            }
            let _lock = self.lock()?;
            let Ok(mut record) = self.get(&seen.name) else { continue };
            if record.id != seen.id || record.state == State::Exited || record.supervisor != seen.supervisor {
                continue;
            }
            if let Some(admin) = admin.as_deref_mut() {
                record.leave_vnics(admin)?;
            }
            is_settled = true;
            if record.remove || record.state == State::Created {
                self.remove_locked(&record.name, &record.id);
                continue;
            }
            record.state = State::Exited;
            record.exit_code = Some(128 + rustix::process::Signal::KILL.as_raw());
            record.note = Some("its supervisor was killed".into());
            record.finished_s = Some(now_s());
            self.write(&record)?;
        }
        Ok(is_settled)
    }
}

/// Whether a name can be a file's, a host's and a command line's.
pub fn check_name(name: &str) -> Result<()> {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let rest = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
    if first && rest && name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{name:?} can't be a container's name: 1 to {NAME_BYTES_MAX} letters, digits, '.', '_' and '-', the first of \
         them a letter or a digit"
    )))
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Seconds since 1970.
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["a", "web-1", "A.b_c", "0", &"x".repeat(63)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", ".a", "a/b", "a b", "..", "ä", &"x".repeat(64)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_name_is_reserved_once_and_removed_by_its_owner_only() {
        let directory = std::env::temp_dir().join(format!("freeflow-records-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let records = Records {
            directory: directory.clone(),
            logs: directory.clone(),
            run_dir: RunDir::new(&directory).unwrap(),
        };
        let record = record("one", "a");
        records.reserve(&record).unwrap();
        assert!(records.reserve(&record).unwrap_err().to_string().contains("already"));
        records.remove("a", "other").unwrap();
        assert_eq!(records.list().len(), 1);
        records.remove("a", "one").unwrap();
        assert!(records.list().is_empty() && records.get("a").is_err());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_dead_supervisor_is_settled() {
        let directory = std::env::temp_dir().join(format!("freeflow-reconcile-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let records = Records {
            directory: directory.clone(),
            logs: directory.clone(),
            run_dir: RunDir::new(&directory).unwrap(),
        };
        let dead = Process { pid: std::process::id(), start_ticks: 1 };
        let live = record("1", "live");
        let running = Record { supervisor: dead, state: State::Running, init: Some(dead), ..record("2", "running") };
        let created = Record { supervisor: dead, ..record("3", "created") };
        let transient = Record { remove: true, ..Record { name: "transient".into(), ..running.clone() } };
        for record in [&live, &running, &created, &transient] {
            records.reserve(record).unwrap();
        }
        records.reconcile(None).unwrap();
        let names: Vec<(String, State)> =
            records.list().into_iter().map(|record| (record.name, record.state)).collect();
        assert_eq!(names, [("live".into(), State::Created), ("running".into(), State::Exited)]);
        assert_eq!(records.get("running").unwrap().exit_code, Some(137));
        fs::remove_dir_all(&directory).unwrap();
    }

    fn record(id: &str, name: &str) -> Record {
        Record {
            id: id.into(),
            is_declared: false,
            name: name.into(),
            network: "default".into(),
            ip: None,
            other_vnics: Vec::new(),
            ip6: None,
            host: "host".into(),
            state: State::Created,
            exit_code: None,
            note: None,
            supervisor: Process::current(),
            init: None,
            command_pid: None,
            command: vec!["true".into()],
            environment: Vec::new(),
            working_directory: "/".into(),
            detached: false,
            remove: false,
            created_s: now_s(),
            finished_s: None,
        }
    }
}
