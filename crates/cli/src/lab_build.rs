//! Making and removing labs.
//!
//! Invariant: a lab's directory is the first thing that is made and the last that is removed, so
//! what a killed `lab up` leaves is found by the next `lab down`. Invariant: who makes or removes a
//! lab holds the lock of the run directory. Forked helpers hold it too, so a `lab down` waits until
//! the last helper of a killed `lab up` is done; programs that they start don't.

use crate::arguments::{LabUp, Up};
use crate::cni::attachments::Attachments;
use crate::failure::{Context, Failure, Result, fail};
use crate::fork::in_child;
use crate::holders::Holders;
use crate::hook;
use crate::lab::{self, HOST_COUNT_MAX, Lab, MTU_BYTES_MAX, MTU_BYTES_MIN};
use crate::process::Process;
use crate::record::{Record, Records};
use crate::{admin, keys, output, router, sys, up};
use freeflow_hostnet::addresses::{self, Detection, InterfaceAddress};
use freeflow_hostnet::links::{self, BridgeOptions, Change, Filter, PeerNamespace};
use freeflow_hostnet::run_dir::{RunDir, write_atomically};
use rustix::fs::{FlockOperation, flock};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use serde_json::json;
use std::fs::{self, DirBuilder, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The bridge that joins the hosts.
const FABRIC: &str = "fabric";
const KEY_FILE: &str = "host.key";
/// How long a killed process may take to vanish.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Mounts of a namespace over one another that are looked for.
const MOUNT_COUNT_MAX: usize = 8;

pub fn up(run_dir: &RunDir, arguments: &LabUp, name: &str) -> Result<()> {
    if !(1..=HOST_COUNT_MAX).contains(&arguments.hosts) {
        fail!("--hosts {}: a lab has 1 to {HOST_COUNT_MAX} hosts", arguments.hosts);
    }
    if !(MTU_BYTES_MIN..=MTU_BYTES_MAX).contains(&arguments.mtu) {
        fail!("--mtu {}: choose from {MTU_BYTES_MIN} to {MTU_BYTES_MAX}", arguments.mtu);
    }
    up::check_programs()?;
    make_directory(run_dir.path())?;
    // Now that it exists, its symbolic links can be resolved.
    let run_dir = &RunDir::new(run_dir.path())?;
    let lab = Lab::new(run_dir, name)?;
    let _lock = lock(run_dir)?;
    if lab.path.exists() {
        fail!("there is a lab {name:?} already (or what is left of one); end it with: freeflow lab down --lab {name}");
    }
    if let Err(failure) = build(&lab, arguments) {
        if let Err(left) = dismantle(&lab) {
            output::complaint(&left);
        }
        return Err(failure);
    }
    output::line(format!("Lab {name} is up: {} hosts, MTU {}.", arguments.hosts, arguments.mtu));
    for number in 1..=arguments.hosts {
        output::line(format!(
            "  {:<9}{:<17}{:<17}{}",
            lab::host_name(number),
            lab::host_address(number),
            lab::host_range(number),
            lab.host_path(number).display()
        ));
    }
    output::line("");
    output::line(format!("Next: freeflow{} lab run --host 1 -- ibv_devinfo", run_dir.option()));
    Ok(())
}

fn make_directory(path: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).context(format!("can't make {}", path.display()))
}

/// One lab of a run directory is made or removed at a time.
fn lock(run_dir: &RunDir) -> Result<File> {
    let what = || format!("can't lock {}", run_dir.path().display());
    let directory = File::open(run_dir.path()).context(what())?;
    flock(&directory, FlockOperation::LockExclusive).context(what())?;
    Ok(directory)
}

fn build(lab: &Lab, arguments: &LabUp) -> Result<()> {
    make_directory(&lab.path)?;
    let description = serde_json::to_vec_pretty(&lab::description(arguments.hosts, arguments.mtu));
    write_atomically(&lab.path.join("lab.json"), &description.expect("it is encodable"), 0o600)
        .context("can't describe the lab")?;
    make_namespace(&lab.fabric())?;
    for number in 1..=arguments.hosts {
        make_namespace(&lab.host(number)?.network_namespace())?;
    }
    wire(lab, arguments)?;
    introduce(lab, arguments.hosts, &arguments.wire)?;
    for number in 1..=arguments.hosts {
        let up = Up {
            mode: arguments.mode,
            workers: arguments.workers,
            shards: arguments.shards,
            shard_by: arguments.shard_by,
            move_bytes_min: arguments.move_bytes_min,
            attachment: arguments.attachment.clone(),
            pool: Some(up::SHARED_POOL.into()),
            range: Some(lab::host_range(number)),
            host: Some(lab::host_name(number)),
            address: Some(lab::host_address(number).into()),
            peers: Some(lab.host_path(number).join("peers.json")),
            ..Up::default()
        };
        let host = lab.host(number)?;
        in_child(|| {
            host.enter_network()?;
            up::up_silently(&host, &up)
        })
        .context(lab::host_name(number))?;
    }
    Ok(())
}

/// Makes a network namespace that lives as long as a mount on a file.
fn make_namespace(path: &Path) -> Result<()> {
    let what = || format!("can't make the network namespace {}", path.display());
    make_directory(path.parent().expect("a namespace is in a directory"))?;
    File::options().write(true).create_new(true).mode(0o600).open(path).context(what())?;
    in_child(|| {
        sys::unshare(UnshareFlags::NEWNET).context(what())?;
        mount_bind("/proc/self/ns/net", path).context(what())?;
        // Packets that cross a bridge here are nobody's to filter; where the kernel can't, there is
        // nothing to turn off.
        let _ = fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
        let _ = fs::write("/proc/sys/net/bridge/bridge-nf-call-ip6tables", "0");
        Ok(links::change("lo", Change::UP)?)
    })
}

/// Joins the hosts' namespaces by veth pairs and a bridge.
fn wire(lab: &Lab, arguments: &LabUp) -> Result<()> {
    let mtu = arguments.mtu;
    in_child(|| {
        lab::enter(&lab.fabric())?;
        links::add_bridge(FABRIC, BridgeOptions { is_multicast_flooded: true, ..BridgeOptions::default() })?;
        for number in 1..=arguments.hosts {
            let (port, host) = (lab::port(number), lab.host(number)?.network_namespace());
            let host = File::open(&host).context(host.display())?;
            links::add_veth(&port, ("eth0", PeerNamespace::Of(host.as_fd())), Some(mtu))?;
            links::change(&port, Change { bridge: Some(FABRIC), ..Change::UP })?;
        }
        Ok(links::change(FABRIC, Change { mtu_bytes: Some(mtu), ..Change::UP })?)
    })
    .context("can't join the hosts")?;
    for number in 1..=arguments.hosts {
        let host = lab.host(number)?;
        in_child(|| {
            host.enter_network()?;
            let address = InterfaceAddress { address: lab::host_address(number).into(), prefix_length: 24 };
            addresses::add("eth0", address, Detection::AsUsual)?;
            Ok(links::change("eth0", Change::UP)?)
        })
        .context(lab::host_name(number))?;
    }
    Ok(())
}

/// Makes each host's key, and a peers file that names all others.
fn introduce(lab: &Lab, hosts: u32, wire: &str) -> Result<()> {
    let mut entries = Vec::new();
    for number in 1..=hosts {
        entries.push(json!({
            "host": lab::host_name(number),
            "address": lab::host_address(number),
            "public_key": keys::key(&lab.host_path(number).join(KEY_FILE))?,
            "prefixes": [lab::host_range(number), lab::host_range6(number)],
        }));
    }
    for (number, own) in (1..).zip(&entries) {
        let others: Vec<_> = entries.iter().filter(|other| *other != own).collect();
        let file = json!({
            "host": lab::host_name(number),
            "address": lab::host_address(number),
            "key_file": KEY_FILE,
            "wire": wire,
            "peers": others,
        });
        let text = serde_json::to_vec_pretty(&file).expect("it is encodable");
        write_atomically(&lab.host_path(number).join("peers.json"), &text, 0o600).context("can't write peers.json")?;
    }
    Ok(())
}

pub fn down(run_dir: &RunDir, lab: &Lab, force: bool) -> Result<()> {
    if !lab.path.exists() {
        output::line(format!("There is no lab {:?} in {}.", lab.name, run_dir.path().display()));
        return Ok(());
    }
    let _lock = lock(run_dir)?;
    for namespace in namespaces(lab)? {
        if is_in(Path::new("/proc/self/ns/net"), &namespace) {
            fail!("this very command runs in the lab (lab enter); end the lab from outside");
        }
    }
    let mut names = Vec::new();
    for host in hosts(lab)? {
        names.extend(live_containers(&host));
    }
    if !names.is_empty() && !force && !up::confirmed(&names)? {
        fail!(
            "running: {}; end them first (freeflow lab stop NAME), or use: freeflow{} lab down --lab {} --force",
            names.join(", "),
            run_dir.option(),
            lab.name
        );
    }
    dismantle(lab)?;
    output::line(format!("Lab {} is down.", lab.name));
    Ok(())
}

/// The run directories that are there, by what lies in the lab's directory: its description may be missing.
fn hosts(lab: &Lab) -> Result<Vec<RunDir>> {
    let all = (1..=HOST_COUNT_MAX).filter(|&number| lab.host_path(number).exists());
    all.map(|number| lab.host(number)).collect()
}

/// The files that hold, or once held, the lab's network namespaces.
fn namespaces(lab: &Lab) -> Result<Vec<PathBuf>> {
    let hosts = hosts(lab)?;
    let all = hosts.iter().map(RunDir::network_namespace).chain([lab.fabric()]);
    Ok(all.filter(|namespace| namespace.exists()).collect())
}

/// Whether two files stand for the same namespace.
fn is_in(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    identity(one).is_some_and(|one| Some(one) == identity(other))
}

fn live_containers(host: &RunDir) -> Vec<String> {
    let records = Records::of(host).list();
    let own = records.into_iter().filter(Record::is_live).map(|record| record.name);
    let vnics = match admin::Admin::look(host) {
        admin::Presence::Running(mut admin) => admin.vnics().unwrap_or_default(),
        _ => Vec::new(),
    };
    let foreign = vnics.into_iter().filter(|vnic| hook::process_of(vnic).is_some_and(|process| process.is_alive()));
    let held = Holders::of(host).live().into_iter().map(|holder| holder.name);
    let of_pods = Attachments::of(host).live().into_iter().map(|attachment| attachment.name);
    own.chain(foreign.map(|vnic| vnic.name)).chain(held).chain(of_pods).collect()
}

/// Removes all there is of a lab, whole or not. Goes on after a failure and reports the first; then the directory
/// stays.
fn dismantle(lab: &Lab) -> Result<()> {
    let hosts = hosts(lab)?;
    let mut first = None;
    for host in &hosts {
        let down = in_child(|| {
            // Without its namespace, its interfaces are gone too; the rest is still to be ended.
            let _ = host.enter_network();
            up::take_down(host, true).map(|_| ())
        });
        if let Err(failure) = down.or_else(|_| router::kill(host)) {
            first.get_or_insert(failure);
        }
        host.unregister();
    }
    for namespace in namespaces(lab)? {
        if let Err(failure) = release(&namespace) {
            first.get_or_insert(failure);
        }
    }
    match first {
        Some(failure) => {
            Err(Failure::new(format!("{failure}; then again: freeflow lab down --lab {} --force", lab.name)))
        }
        None => remove_directory(lab),
    }
}

fn remove_directory(lab: &Lab) -> Result<()> {
    fs::remove_dir_all(&lab.path).context(format!("can't remove {}", lab.path.display()))?;
    if let Some(labs) = lab.path.parent() {
        // Unless there are others.
        let _ = fs::remove_dir(labs);
    }
    Ok(())
}

/// Ends every process in a network namespace, removes its interfaces and lets go of it. Containers
/// that were started since may have a copy of the mount: the namespace lives on in it for a while,
/// but nothing is in it.
fn release(namespace: &Path) -> Result<()> {
    for process in processes_in(namespace)? {
        process.signal(Signal::KILL).context("can't end a process of the lab")?;
        if !process.wait_end(END_TIMEOUT) {
            fail!("the process {} of the lab does not end", process.pid);
        }
    }
    let emptied = in_child(|| {
        // A file without a mount is what a killed `lab up` leaves.
        if lab::enter(namespace).is_ok() {
            for link in links::list(Filter::All)? {
                // The loopback and the kernel's own templates stay; one end of a pair takes the other with it.
                links::delete_if_there(&link.name);
            }
        }
        Ok(())
    });
    for _ in 0..MOUNT_COUNT_MAX {
        match unmount(namespace, UnmountFlags::DETACH) {
            Ok(()) => {}
            // Not a mount point (any more).
            Err(rustix::io::Errno::INVAL) => return emptied,
            Err(errno) => return Err(errno).context(format!("can't unmount {}", namespace.display())),
        }
    }
    emptied
}

/// Processes whose network namespace is the one that this file holds.
fn processes_in(namespace: &Path) -> Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let entry = entry.context("/proc")?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Some(process) = Process::of(pid) else { continue };
        if is_in(&entry.path().join("ns/net"), namespace) && process.is_alive() {
            found.push(process);
        }
    }
    Ok(found)
}
