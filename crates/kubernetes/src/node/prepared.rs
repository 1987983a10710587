//! Claims that are prepared: for each a CDI file, which engines read, and a record of whose it is.
//!
//! Both are named by the claim's uid. The record is written before the CDI file and removed after it, so that each CDI
//! file has a record. After a reboot the CDI files are gone (`/var/run`), and the kubelet has the claims of its pods
//! prepared once more.
use crate::log;
use freeflow_hostnet::cdi::{self, ClaimDevice};
use freeflow_hostnet::run_dir::{RunDir, write_atomically};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const CDI_PREFIX: &str = "freeflow-claim-";
const EXTENSION: &str = ".json";
const UID_BYTES_MAX: usize = 64;
const CDI_MODE: u32 = 0o644;
const RECORD_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o750;

/// The claim of a CDI file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub uid: String,
    pub namespace: String,
    pub name: String,
}

/// Where the files are, and what the hooks in them run.
#[derive(Clone, Debug)]
pub struct PreparedClaims {
    pub cdi: PathBuf,
    pub records: PathBuf,
    pub run_dir: RunDir,
    /// The `freeflow` command, as the host has it.
    pub program: PathBuf,
}

/// A uid becomes a part of files' and devices' names.
///
/// # Errors
/// It has characters that a uid has not.
pub fn check_uid(uid: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let ends = [uid.bytes().next(), uid.bytes().next_back()];
    let is_good = uid.len() <= UID_BYTES_MAX
        && uid.bytes().all(is_plain)
        && ends.into_iter().all(|end| end.is_some_and(|end| end != b'-'));
    is_good.then_some(()).ok_or_else(|| format!("{uid:?} is no uid of a claim"))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl PreparedClaims {
    fn cdi_file(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("{CDI_PREFIX}{uid}{EXTENSION}"))
    }

    fn record_file(&self, uid: &str) -> PathBuf {
        self.records.join(format!("{uid}{EXTENSION}"))
    }

    /// # Errors
    /// A directory can't be made.
    pub fn make_directories(&self) -> Result<(), String> {
        let make = |path: &Path, mode: u32| {
            let made = fs::DirBuilder::new().recursive(true).mode(mode).create(path);
            made.map_err(|error| format!("{}: {error}", path.display()))
        };
        make(&self.cdi, 0o755)?;
        make(&self.records, DIRECTORY_MODE)
    }

    /// Writes both files, where they differ from what is there. `record.uid` was checked.
    ///
    /// # Errors
    /// A file can't be written. A record may be left then, which goes with its claim.
    pub fn put(&self, record: &Record, devices: &[ClaimDevice]) -> Result<(), String> {
        let specification = cdi::claim_specification(&self.run_dir, &self.program, devices);
        let specification = serde_json::to_vec_pretty(&specification).expect("it is encodable");
        let record_text = serde_json::to_vec_pretty(record).expect("it is encodable");
        self.make_directories()?;
        let put = |path: PathBuf, text: &[u8], mode: u32| -> Result<(), String> {
            if fs::read(&path).ok().as_deref() == Some(text) {
                return Ok(());
            }
            write_atomically(&path, text, mode).map_err(|error| format!("{}: {error}", path.display()))
        };
        put(self.record_file(&record.uid), &record_text, RECORD_MODE)?;
        put(self.cdi_file(&record.uid), &specification, CDI_MODE)
    }

    /// Removes both; also what is there of one that is only half there.
    ///
    /// # Errors
    /// A file can't be removed.
    pub fn remove(&self, uid: &str) -> Result<(), String> {
        for path in [self.cdi_file(uid), self.record_file(uid)] {
            remove(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// All records. A CDI file of ours without one is removed, and so are a record of another form, and what an agent
    /// that was killed has left of a file that it wrote. Nothing is written meanwhile.
    ///
    /// # Errors
    /// A directory or a record can't be read. Nothing is removed then by that: containers that use the claim are there,
    /// and can't be started again without its CDI file.
    pub fn list(&self) -> Result<Vec<Record>, String> {
        remove_unfinished(&self.records, "")?;
        remove_unfinished(&self.cdi, CDI_PREFIX)?;
        let mut records: Vec<Record> = Vec::new();
        for uid in uids(&self.records, "")? {
            let path = self.record_file(&uid);
            let text = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            match serde_json::from_slice(&text).ok() {
                Some(record) if matches!(&record, Record { uid: own, .. } if *own == uid) => records.push(record),
                _ => {
                    log::line(&format!("the record of the claim {uid} has another form: removed"));
                    self.remove(&uid)?;
                }
            }
        }
        for uid in uids(&self.cdi, CDI_PREFIX)? {
            if !records.iter().any(|record| record.uid == uid) {
                log::line(&format!("the claim {uid} has a CDI file and no record: removed"));
                self.remove(&uid)?;
            }
        }
        Ok(records)
    }
}

/// Names of files that begin with the prefix and a uid: the uid, and what follows it. Other files are not ours.
fn named(directory: &Path, prefix: &str) -> Result<Vec<(String, String)>, String> {
    let failed = |error: io::Error| format!("{}: {error}", directory.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(prefix)).unwrap_or_default();
        let (uid, rest) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
        if check_uid(uid).is_ok() {
            found.push((uid.to_string(), rest.to_string()));
        }
    }
    found.sort();
    Ok(found)
}

fn uids(directory: &Path, prefix: &str) -> Result<Vec<String>, String> {
    let named = named(directory, prefix)?.into_iter();
    Ok(named.filter(|(_, rest)| rest == EXTENSION).map(|(uid, _)| uid).collect())
}

/// As [`write_atomically`] names them.
fn remove_unfinished(directory: &Path, prefix: &str) -> Result<(), String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    for (uid, rest) in named(directory, prefix)? {
        if rest.strip_prefix(".tmp").is_some_and(is_number) {
            let path = directory.join(format!("{prefix}{uid}{rest}"));
            remove(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_hostnet::cdi::{Kind, Labels};
    use std::os::unix::fs::PermissionsExt;

    fn claims(name: &str) -> PreparedClaims {
        let base = std::env::temp_dir().join(format!("freeflow-prepared-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&base);
        PreparedClaims {
            cdi: base.join("cdi"),
            records: base.join("records"),
            run_dir: RunDir::new(Path::new("/run/freeflow")).unwrap(),
            program: "/usr/bin/freeflow".into(),
        }
    }

    fn device() -> ClaimDevice {
        ClaimDevice { name: "u-1-vnic-0".into(), kind: Kind::Network, of: "red".into(), labels: Labels::new() }
    }

    #[test]
    fn files_come_and_go_together() {
        let claims = claims("together");
        let record = Record { uid: "u-1".into(), namespace: "a".into(), name: "c".into() };
        claims.put(&record, &[device()]).unwrap();
        let path = claims.cdi.join("freeflow-claim-u-1.json");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, CDI_MODE);
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        claims.put(&record, &[device()]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before, "what is right is left alone");
        assert_eq!(claims.list().unwrap(), [record]);
        // As after a reboot.
        fs::remove_file(&path).unwrap();
        assert_eq!(claims.list().unwrap().len(), 1);
        claims.remove("u-1").unwrap();
        claims.remove("u-1").unwrap();
        assert_eq!(claims.list().unwrap(), []);
        fs::remove_dir_all(claims.cdi.parent().unwrap()).unwrap();
    }

    #[test]
    fn halves_are_removed_and_others_files_left() {
        let claims = claims("halves");
        claims.make_directories().unwrap();
        let unfinished = ["freeflow-claim-u-2.tmp17", "freeflow-claim-u-9.tmp4294967"];
        let foreign = ["freeflow.json", "freeflow-claim-..json", "gpu.json", "gpu.tmp17"];
        for name in unfinished.iter().chain(&foreign).chain(&["freeflow-claim-u-2.json"]) {
            fs::write(claims.cdi.join(name), "{}").unwrap();
        }
        fs::write(claims.records.join("u-7.tmp17"), "{").unwrap();
        fs::write(claims.records.join("u-3.json"), "{").unwrap();
        fs::write(claims.records.join("u-4.json"), r#"{"uid": "u-5", "namespace": "", "name": ""}"#).unwrap();
        assert_eq!(claims.list().unwrap(), []);
        let mut left: Vec<_> = fs::read_dir(&claims.cdi).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["freeflow-claim-..json", "freeflow.json", "gpu.json", "gpu.tmp17"]);
        assert_eq!(fs::read_dir(&claims.records).unwrap().count(), 0);
        fs::remove_dir_all(claims.cdi.parent().unwrap()).unwrap();
    }

    /// As where the process has no descriptor left: that says nothing about the claim.
    #[test]
    fn a_record_that_cannot_be_read_now_costs_no_claim_its_device() {
        let claims = claims("unread");
        claims.make_directories().unwrap();
        fs::write(claims.cdi.join("freeflow-claim-u-6.json"), "{}").unwrap();
        let record = claims.records.join("u-6.json");
        fs::create_dir(&record).unwrap();
        assert!(claims.list().unwrap_err().contains("u-6.json"));
        assert!(record.exists() && claims.cdi.join("freeflow-claim-u-6.json").exists());
        fs::remove_dir_all(claims.cdi.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_uid_is_no_path() {
        assert!(check_uid("3f0e8a52-6c0f-4d0c-9c52-1f2d7ee3f7a1").is_ok());
        for bad in ["", "..", "../x", "a/b", "-a", "a-", "a.b", "a b", "a\0", &"x".repeat(65)] {
            assert!(check_uid(bad).is_err(), "{bad}");
        }
    }
}
