//! Names by which the containers of a network find each other: a hosts file for each network, `RUN_DIR/names/NETWORK`,
//! which `freeflow run` mounts at `/etc/hosts` of its containers.
//!
//! The files are written again by whoever makes vNICs or containers here, or ends them: from what the router has and,
//! where the host follows a cluster, from what the follower has noted of the other hosts. The router has no part in it.
//!
//! A container's start and end change its own entry alone, in `names.own`, so they cost the same on a host with
//! thousands of vNICs; whoever asks the router for all of them writes all again.
//!
//! Invariant: these files are read and written under the lock, and the router is asked for all under it, too: so the
//! last one to write has seen all that was there before.

use crate::admin::{Admin, Presence};
use crate::failure::{Context, Result};
use crate::holders::Holders;
use crate::record::{Record, Records};
use crate::{hosts_file, output};
use freeflow_cluster::Named;
use freeflow_hostnet::run_dir::{RunDir, lock_file, write_atomically};
use freeflow_protocol::admin::VnicStatus;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

const HOSTS_FILE: &str = "/etc/hosts";

fn directory(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("names")
}

/// The file of a network.
pub fn file(run_dir: &RunDir, network: &str) -> PathBuf {
    directory(run_dir).join(network)
}

fn others_file(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("names.others")
}

fn own_file(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("names.own")
}

fn lock_path(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("names.lock")
}

/// When a vNIC was made, seconds of Unix time: its directory is as old as it is.
pub fn since_s(directory: &Path) -> u64 {
    let made = fs::metadata(directory).and_then(|metadata| metadata.created().or_else(|_| metadata.modified()));
    made.ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map_or(0, |since| since.as_secs())
}

/// Names of containers that have a declared vNIC, with that.
fn containers(run_dir: &RunDir) -> Vec<(String, String)> {
    let records =
        Records::of(run_dir).list().into_iter().filter(|record| record.is_declared && Record::is_live(record));
    let holders = Holders::of(run_dir).live().into_iter().map(|holder| (holder.vnic, holder.name));
    records.map(|record| (record.id, record.name)).chain(holders).collect()
}

fn named(vnic: &VnicStatus, containers: &[(String, String)]) -> Named {
    let of_container = containers.iter().filter(|(id, name)| *id == vnic.id && *name != vnic.name);
    let names = std::iter::once(&vnic.name).chain(of_container.map(|(_, name)| name)).cloned().collect();
    let (network, addresses) = (vnic.network.clone(), vnic.addresses().collect());
    Named { network, names, addresses, since_s: since_s(Path::new(&vnic.directory)) }
}

/// Notes the names of the other hosts' vNICs, for all who write the files; whether they are others than before.
pub fn note_others(run_dir: &RunDir, others: &[Named]) -> Result<bool> {
    let (path, text) = (others_file(run_dir), serde_json::to_vec(others).expect("names are encodable"));
    let _lock = lock_file(&lock_path(run_dir))?;
    if fs::read(&path).is_ok_and(|there| there == text) {
        return Ok(false);
    }
    write_atomically(&path, &text, 0o600).context(path.display())?;
    Ok(true)
}

/// Those of other hosts, of a host that follows a cluster.
fn others(run_dir: &RunDir) -> Vec<Named> {
    let follows = run_dir.settings().is_some_and(|settings| settings.cluster.is_some());
    let text = if follows { fs::read(others_file(run_dir)).unwrap_or_default() } else { Vec::new() };
    serde_json::from_slice(&text).unwrap_or_default()
}

/// This host's, by the vNICs' ids. `None`: nobody has asked the router for all yet.
type Own = BTreeMap<String, Named>;

fn own(run_dir: &RunDir) -> Option<Own> {
    serde_json::from_slice(&fs::read(own_file(run_dir)).ok()?).ok()
}

fn note_own(run_dir: &RunDir, own: &Own) -> Result<()> {
    let (path, text) = (own_file(run_dir), serde_json::to_vec(own).expect("names are encodable"));
    write_atomically(&path, &text, 0o600).context(path.display())
}

/// Writes the file of each of these networks, where something has changed.
fn write_files(run_dir: &RunDir, own: &Own, networks: &[&str]) -> Result<()> {
    let others = others(run_dir);
    let base = String::from_utf8_lossy(&fs::read(HOSTS_FILE).unwrap_or_default()).into_owned();
    for network in networks {
        let of_network = own.values().chain(&others).filter(|vnic| vnic.network == *network).collect();
        let path = file(run_dir, network);
        hosts_file::rewrite(&path, &hosts_file::text(&base, network, of_network)).context(path.display())?;
    }
    Ok(())
}

/// Writes the files of all networks again, from what the router has.
pub fn write(run_dir: &RunDir, admin: &mut Admin) -> Result<()> {
    let _lock = lock_file(&lock_path(run_dir))?;
    let path = directory(run_dir);
    // Which names there are is no business of the machine's other users.
    DirBuilder::new().recursive(true).mode(0o700).create(&path).context(path.display())?;
    let (networks, vnics, containers) = (admin.networks()?, admin.vnics()?, containers(run_dir));
    let own: Own = vnics.iter().map(|vnic| (vnic.id.clone(), named(vnic, &containers))).collect();
    note_own(run_dir, &own)?;
    let names: Vec<&str> = networks.iter().map(|network| network.name.as_str()).collect();
    write_files(run_dir, &own, &names)?;
    for entry in fs::read_dir(&path).context(path.display())?.flatten() {
        if !entry.file_name().to_str().is_some_and(|name| names.contains(&name)) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Changes one vNIC's entry. `None`: there is none any more.
fn change(run_dir: &RunDir, admin: &mut Admin, id: &str, entry: impl FnOnce(&Named) -> Option<Named>) -> Result<()> {
    let whole = {
        let _lock = lock_file(&lock_path(run_dir))?;
        match own(run_dir) {
            Some(mut own) => match own.remove(id) {
                Some(before) => {
                    own.extend(entry(&before).map(|named| (id.to_owned(), named)));
                    note_own(run_dir, &own)?;
                    write_files(run_dir, &own, &[&before.network])?;
                    false
                }
                None => true,
            },
            None => true,
        }
    };
    if whole { write(run_dir, admin) } else { Ok(()) }
}

/// A container has begun to use a vNIC, which may be new. Nothing fails for a name.
pub fn add(run_dir: &RunDir, admin: &mut Admin, vnic: &VnicStatus, container: &str) {
    let added = || -> Result<bool> {
        let _lock = lock_file(&lock_path(run_dir))?;
        let Some(mut own) = own(run_dir).filter(|_| file(run_dir, &vnic.network).exists()) else { return Ok(false) };
        own.insert(vnic.id.clone(), named(vnic, &[(vnic.id.clone(), container.to_owned())]));
        note_own(run_dir, &own)?;
        write_files(run_dir, &own, &[&vnic.network])?;
        Ok(true)
    };
    let done = added().and_then(|done| if done { Ok(()) } else { write(run_dir, admin) });
    complain(done);
}

/// A container does not use its vNIC any more, which is gone unless it was declared.
pub fn leave(run_dir: &RunDir, admin: &mut Admin, id: &str, is_declared: bool) {
    // The first name is the vNIC's own.
    let bare = |before: &Named| Named { names: before.names.iter().take(1).cloned().collect(), ..before.clone() };
    complain(change(run_dir, admin, id, |before| is_declared.then(|| bare(before))));
}

/// As [`write`], for who has made or ended something: nothing fails for it.
pub fn update(run_dir: &RunDir, admin: &mut Admin) {
    complain(write(run_dir, admin));
}

fn complain(done: Result<()>) {
    if let Err(failure) = done {
        output::complaint(format!("warning: names of containers may be missing, or too many: {failure}"));
    }
}

/// With a connection of its own, where a router runs.
pub fn update_if_up(run_dir: &RunDir) {
    if let Presence::Running(mut admin) = Admin::look(run_dir) {
        update(run_dir, &mut admin);
    }
}

/// Leaves nothing.
pub fn remove(run_dir: &RunDir) {
    let _ = fs::remove_dir_all(directory(run_dir));
    let _ = fs::remove_file(others_file(run_dir));
    let _ = fs::remove_file(own_file(run_dir));
    let _ = fs::remove_file(lock_path(run_dir));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_noted_and_count_where_a_cluster_is_followed() {
        let path = std::env::temp_dir().join(format!("freeflow-names-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        let run_dir = RunDir::new(&path).unwrap();
        let other = Named {
            network: "red".into(),
            names: vec!["web".into()],
            addresses: vec![[10, 50, 0, 2].into()],
            since_s: 1,
        };
        assert!(note_others(&run_dir, std::slice::from_ref(&other)).unwrap());
        assert!(!note_others(&run_dir, std::slice::from_ref(&other)).unwrap());
        assert!(others(&run_dir).is_empty(), "it follows nobody");
        let settings =
            r#"{"mode": "adaptive", "pool": "10.111.0.0/16", "host": "h", "cdi_file": null, "cluster": "/c"}"#;
        fs::write(path.join("up.json"), settings).unwrap();
        assert_eq!(others(&run_dir), [other]);
        remove(&run_dir);
        assert!(others(&run_dir).is_empty());
        fs::remove_dir_all(&path).unwrap();
    }
}
