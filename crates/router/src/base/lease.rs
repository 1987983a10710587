//! Lease of a host that follows a cluster: until when it may use its blocks of addresses and its declared vNICs, and
//! the file that a restarted router finds it in.
//!
//! The follower extends it when etcd has the host's word. Time is CLOCK_BOOTTIME, which nobody sets, and which goes on
//! while the machine sleeps; a lease of another boot is over.
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Beside the store.
const FILE: &str = "cluster.lease";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Networks that are barred.
const BARRED_COUNT_MAX: usize = 4096;

/// The lease of a host whose blocks can be taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The host's word in etcd may name this time, seconds: after it all is taken back.
    pub after_s: u64,
    /// The end, by CLOCK_BOOTTIME, nanoseconds.
    pub until_ns: u64,
    /// Networks whose range here is not this host's block: they take no vNICs.
    pub barred: BTreeSet<String>,
    /// The machine's boot for which `until_ns` counts.
    boot: String,
}

/// A change, as the follower asks for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LeaseChange {
    /// `None`: no host's word in etcd names a time, so the host needs no lease.
    #[serde(default)]
    pub after_s: Option<u64>,
    #[serde(default)]
    pub until_ns: u64,
    /// The follower has looked at what the host has since its last word, so that a lease that was over can begin again.
    #[serde(default)]
    pub is_fresh: bool,
    /// See [`Lease::barred`]; `None`: as before.
    #[serde(default)]
    pub barred: Option<BTreeSet<String>>,
}

/// The lease as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseStatus {
    /// `None`: the host needs no lease.
    pub after_s: Option<u64>,
    pub until_ns: u64,
    pub is_over: bool,
}

impl Lease {
    /// Whether it is over at this time of this boot.
    pub fn is_over(&self, boot: &str, now_ns: u64) -> bool {
        self.boot != boot || now_ns >= self.until_ns
    }

    /// The lease after a change. `is_over`: of the one before, or vNICs that it ended are still being stopped.
    ///
    /// # Errors
    /// A sentence for people: the lease is over, or the change makes no sense.
    pub fn changed(
        before: Option<&Self>,
        is_over: bool,
        change: LeaseChange,
        (boot, now_ns): (&str, u64),
    ) -> Result<Option<Self>, String> {
        let LeaseChange { after_s, until_ns, is_fresh, barred } = change;
        if is_over && !is_fresh {
            return Err("the lease is over: the host has to look at what it has first".into());
        }
        let Some(after_s) = after_s else { return Ok(None) };
        if until_ns > now_ns.saturating_add(after_s.saturating_mul(1_000_000_000)) {
            return Err(format!("untilNs is more than {after_s} s away"));
        }
        if barred.as_ref().is_some_and(|barred| barred.len() > BARRED_COUNT_MAX) {
            return Err(format!("more than {BARRED_COUNT_MAX} networks"));
        }
        let barred = match (before.filter(|_| !is_fresh), barred) {
            // One that was given out in time stays given out.
            (Some(before), Some(barred)) => before.barred.intersection(&barred).cloned().collect(),
            (Some(before), None) => before.barred.clone(),
            (None, barred) => barred.unwrap_or_default(),
        };
        Ok(Some(Self { after_s, until_ns, barred, boot: boot.into() }))
    }

    /// The lease in a directory, if there is one. One that makes no sense is over.
    ///
    /// # Errors
    /// The directory can't be read.
    pub fn load(directory: &Path) -> io::Result<Option<Self>> {
        match fs::read(directory.join(FILE)) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text).unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Keeps a lease, or that there is none, also over a loss of power.
    ///
    /// # Errors
    /// The file can't be written, and what a router finds there is the lease from before.
    pub fn store(lease: Option<&Self>, directory: &Path) -> io::Result<()> {
        let path = directory.join(FILE);
        match lease {
            Some(lease) => {
                let new = path.with_extension("lease.new");
                let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
                file.write_all(&serde_json::to_vec(lease).map_err(io::Error::other)?)?;
                file.sync_all()?;
                fs::rename(&new, &path)?;
            }
            None => match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            },
        }
        File::open(directory)?.sync_all()
    }
}

/// The name of this boot of the machine.
///
/// # Errors
/// It can't be read.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const BOOT: &str = "one";

    fn change(after_s: u64, until_s: u64) -> LeaseChange {
        LeaseChange { after_s: Some(after_s), until_ns: until_s * S, ..LeaseChange::default() }
    }

    fn fresh(after_s: u64, until_s: u64) -> LeaseChange {
        LeaseChange { is_fresh: true, ..change(after_s, until_s) }
    }

    /// After a change at this time.
    fn after(before: Option<&Lease>, change: LeaseChange, now_s: u64) -> Result<Option<Lease>, String> {
        let is_over = before.is_some_and(|before| before.is_over(BOOT, now_s * S));
        Lease::changed(before, is_over, change, (BOOT, now_s * S))
    }

    #[test]
    fn a_lease_goes_on_while_it_is_extended_in_time() {
        let first = after(None, change(20, 114), 100).unwrap().expect("a lease");
        assert!(!first.is_over(BOOT, 114 * S - 1) && first.is_over(BOOT, 114 * S));
        // Longer, shorter, for another time.
        for (after_s, until_s) in [(20, 118), (20, 105), (50, 140)] {
            let next = after(Some(&first), change(after_s, until_s), 104).unwrap().expect("a lease");
            assert_eq!((next.after_s, next.until_ns), (after_s, until_s * S));
        }
        assert!(after(Some(&first), change(20, 125), 104).is_err(), "it ends after others may have what it is for");
        assert_eq!(after(Some(&first), LeaseChange::default(), 104), Ok(None));
    }

    #[test]
    fn one_that_is_over_begins_again_after_a_look_alone() {
        let first = after(None, change(20, 114), 100).unwrap();
        for late in [change(20, 130), LeaseChange::default()] {
            assert!(after(first.as_ref(), late, 114).unwrap_err().contains("is over"));
        }
        assert_eq!(after(first.as_ref(), fresh(20, 130), 120).unwrap().map(|lease| lease.until_ns), Some(130 * S));
        let none = LeaseChange { is_fresh: true, ..LeaseChange::default() };
        assert_eq!(after(first.as_ref(), none, 120), Ok(None));
        // Another boot has another clock.
        assert!(first.as_ref().is_some_and(|first| first.is_over("two", 1)));
        assert!(Lease::changed(first.as_ref(), true, change(20, 5), ("two", S)).is_err());
    }

    #[test]
    fn networks_are_barred_when_a_lease_begins_and_freed_when_it_goes_on() {
        let barred = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let with = |change: LeaseChange, names: &[&str]| LeaseChange { barred: Some(barred(names)), ..change };
        let first = after(None, with(fresh(20, 114), &["red", "blue"]), 100).unwrap().unwrap();
        let next = after(Some(&first), with(change(20, 118), &["red", "green"]), 104).unwrap().unwrap();
        assert_eq!(next.barred, barred(&["red"]));
        assert_eq!(after(Some(&next), change(20, 119), 105).unwrap().unwrap().barred, barred(&["red"]));
        let again = after(Some(&next), with(fresh(20, 118), &["green"]), 104).unwrap().unwrap();
        assert_eq!(again.barred, barred(&["green"]));
    }

    #[test]
    fn a_restarted_router_finds_its_lease_and_a_damaged_one_is_over() {
        let directory = std::env::temp_dir().join(format!("ff-lease-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        assert_eq!(Lease::load(&directory).unwrap(), None);
        let lease = Lease { boot: BOOT.into(), ..after(None, change(20, 114), 100).unwrap().unwrap() };
        Lease::store(Some(&lease), &directory).unwrap();
        assert_eq!(Lease::load(&directory).unwrap(), Some(lease));
        fs::write(directory.join(FILE), "{").unwrap();
        assert!(Lease::load(&directory).unwrap().is_some_and(|lease| lease.is_over(&boot_id().unwrap(), 0)));
        Lease::store(None, &directory).unwrap();
        Lease::store(None, &directory).unwrap();
        assert_eq!(Lease::load(&directory).unwrap(), None);
        fs::remove_dir_all(&directory).unwrap();
    }
}
