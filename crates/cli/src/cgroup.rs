//! The router's own cgroup: it must not end, freeze or run out of memory or processes with the
//! session, container or engine from which `freeflow up` was started.
//!
//! In cgroup v2, and in the v1 hierarchies that can end or stop a process (memory, pids, freezer,
//! systemd's), the router has a cgroup of its own at the top, without limits. In the other v1
//! hierarchies, which only share out time and devices, it is at the top itself: a cgroup of its own
//! would be one more scheduling group, and `sched_yield` does not give way to another one.

use freeflow_hostnet::run_dir::RunDir;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Hierarchies in which the router stays where its caller is, separated by commas: v1 controllers,
/// `unified` for cgroup v2, or `all`. For whoever keeps count of it there, such as systemd of a
/// unit.
pub const KEEP_VARIABLE: &str = "FREEFLOW_CGROUP_KEEP";
const OWN: [&str; 4] = ["memory", "pids", "freezer", "name=systemd"];
const UNIFIED: &str = "unified";
/// The last process of a cgroup may be a moment behind the router.
const REMOVE_TRY_COUNT: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// One hierarchy, as `/proc/PID/cgroup` and `/proc/self/mountinfo` give it.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    controllers: Vec<String>,
    /// The process' cgroup in it.
    path: String,
    mount: PathBuf,
}

impl Hierarchy {
    fn name(&self) -> String {
        self.controllers.join(",")
    }

    fn has(&self, names: &[&str]) -> bool {
        self.controllers.iter().any(|controller| names.contains(&controller.as_str()))
    }

    fn is_kept(&self, kept: &str) -> bool {
        kept.split(',').map(str::trim).any(|name| name == "all" || self.has(&[name]))
    }

    /// Where the router belongs in it.
    fn wanted(&self, own: &str) -> String {
        if self.has(&OWN) || self.has(&[UNIFIED]) { format!("/{own}") } else { "/".into() }
    }
}

/// The name of the router's cgroup: one a run directory.
fn own_name(run_dir: &RunDir) -> String {
    format!("freeflow-{}", run_dir.short_hash())
}

/// Moves this process. Gives a line for each hierarchy in which it has to stay where it is.
pub fn enter_own(run_dir: &RunDir) -> Vec<String> {
    let kept = std::env::var(KEEP_VARIABLE).unwrap_or_default();
    let own = own_name(run_dir);
    let mut complaints = Vec::new();
    for hierarchy in hierarchies("self") {
        let wanted = hierarchy.wanted(&own);
        if hierarchy.path == wanted || hierarchy.is_kept(&kept) {
            continue;
        }
        let directory = hierarchy.mount.join(wanted.trim_start_matches('/'));
        if let Err(error) = enter(&directory) {
            complaints.push(format!("stays in cgroup {} of {}: {error}", hierarchy.path, hierarchy.name()));
        }
    }
    complaints
}

fn enter(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    fs::write(directory.join("cgroup.procs"), "0")
}

/// Removes the router's cgroups; it has ended.
pub fn remove_own(run_dir: &RunDir) {
    let own = own_name(run_dir);
    for hierarchy in hierarchies("self") {
        let directory = hierarchy.mount.join(&own);
        for _ in 0..REMOVE_TRY_COUNT {
            match fs::remove_dir(&directory) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(REMOVE_PAUSE),
                // An empty cgroup that can't be removed harms nobody.
                _ => break,
            }
        }
    }
}

/// The hierarchies in which a router is neither in its own cgroup nor at the top, with the cgroup that it is in.
pub fn foreign(run_dir: &RunDir, pid: u32) -> Vec<String> {
    let own = own_name(run_dir);
    hierarchies(&pid.to_string())
        .iter()
        .filter(|hierarchy| hierarchy.path != hierarchy.wanted(&own) && hierarchy.path != "/")
        .map(|hierarchy| format!("{} of {}", hierarchy.path, hierarchy.name()))
        .collect()
}

fn hierarchies(process: &str) -> Vec<Hierarchy> {
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    parse(&read(format!("/proc/{process}/cgroup")), &read("/proc/self/mountinfo".into()))
}

fn parse(cgroups: &str, mounts: &str) -> Vec<Hierarchy> {
    let line = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_unified = controllers.is_empty();
        let controllers: Vec<String> =
            if is_unified { vec![UNIFIED.into()] } else { controllers.split(',').map(str::to_owned).collect() };
        let mount = mounts.lines().find_map(|mount| {
            let (before, after) = mount.split_once(" - ")?;
            let mut after = after.split(' ');
            let (kind, _, options) = (after.next()?, after.next()?, after.next()?);
            let is_it = match is_unified {
                true => kind == "cgroup2",
                false => kind == "cgroup" && options.split(',').any(|option| option == controllers[0]),
            };
            is_it.then(|| before.split(' ').nth(4).map(PathBuf::from)).flatten()
        })?;
        Some(Hierarchy { controllers, path: path.to_owned(), mount })
    };
    cgroups.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "30 23 0:26 / /sys/fs/cgroup ro shared:9 - tmpfs tmpfs ro,mode=755\n\
        31 30 0:27 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw\n\
        32 30 0:28 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory\n\
        33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        34 30 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n";
    const CGROUPS: &str = "5:memory:/user/one\n4:cpu,cpuacct:/user:two\n3:pids:/x\n1:name=systemd:/\n0::/user.slice\n";

    #[test]
    fn hierarchies_are_found_and_the_router_has_its_place_in_each() {
        let all = parse(CGROUPS, MOUNTS);
        let seen: Vec<(String, &str, &Path, String)> =
            all.iter().map(|one| (one.name(), &*one.path, &*one.mount, one.wanted("own"))).collect();
        let row = |name: &str, path, mount, wanted: &str| (name.to_owned(), path, Path::new(mount), wanted.to_owned());
        // pids is mounted nowhere.
        assert_eq!(
            seen,
            [
                row("memory", "/user/one", "/sys/fs/cgroup/memory", "/own"),
                row("cpu,cpuacct", "/user:two", "/sys/fs/cgroup/cpu,cpuacct", "/"),
                row("name=systemd", "/", "/sys/fs/cgroup/systemd", "/own"),
                row("unified", "/user.slice", "/sys/fs/cgroup/unified", "/own"),
            ]
        );
    }

    #[test]
    fn what_is_to_be_kept_is_named() {
        let all = parse(CGROUPS, MOUNTS);
        let kept = |words: &str| -> Vec<bool> { all.iter().map(|one| one.is_kept(words)).collect() };
        assert_eq!(kept(""), [false; 4]);
        assert_eq!(kept("all"), [true; 4]);
        assert_eq!(kept("memory, cpuacct"), [true, true, false, false]);
        assert_eq!(kept("unified"), [false, false, false, true]);
    }
}
