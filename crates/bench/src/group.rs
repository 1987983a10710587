//! One scheduling group for a router and the programs it serves.
//!
//! Linux shares the CPU first between groups (cpu cgroups and, outside of them, login sessions) and
//! only then between the threads of each. `sched_yield` gives way only within a group, so between
//! pollers of different groups that share a core a hand-off lasts a time slice, milliseconds,
//! instead of a microsecond. With `--one-group` the router and its programs are put into one group,
//! ahead of all others; the limits always run in one. An experiment: such a group can starve the
//! machine (docs/decisions/0006-no-common-cpu-group.md), so the product makes none.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Root of cgroup v2, and of the cpu controller of cgroup v1.
const UNIFIED: &str = "/sys/fs/cgroup";
const LEGACY: &str = "/sys/fs/cgroup/cpu";
/// Most that either version takes; an ordinary group has 100 and 1024.
const WEIGHT_MAX: &str = "10000";
const SHARES_MAX: &str = "262144";
/// Time for the members to be gone.
const REMOVE_ATTEMPTS_MAX: u32 = 50;
const REMOVE_INTERVAL: Duration = Duration::from_millis(20);

/// A cpu cgroup of our own; removed when dropped, its members must have ended then.
pub struct Group {
    directory: PathBuf,
}

impl Group {
    pub fn new(name: &str) -> io::Result<Self> {
        let controllers = fs::read_to_string(Path::new(UNIFIED).join("cgroup.controllers")).unwrap_or_default();
        let unified = controllers.split_whitespace().any(|controller| controller == "cpu");
        let (root, file, value) = match unified {
            true => (UNIFIED, "cpu.weight", WEIGHT_MAX),
            false => (LEGACY, "cpu.shares", SHARES_MAX),
        };
        if unified {
            fs::write(Path::new(root).join("cgroup.subtree_control"), "+cpu")?;
        } else if !Path::new(LEGACY).join("cgroup.procs").exists() {
            return Err(io::Error::other("no cpu cgroups here"));
        }
        let directory = Path::new(root).join(name);
        fs::create_dir_all(&directory)?;
        let group = Self { directory };
        fs::write(group.directory.join(file), value)?;
        Ok(group)
    }

    /// Takes in a process with all its threads, and what it starts from now on.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..REMOVE_ATTEMPTS_MAX {
            if fs::remove_dir(&self.directory).is_ok() {
                return;
            }
            thread::sleep(REMOVE_INTERVAL);
        }
        eprintln!("freeflow-bench: {} is left over", self.directory.display());
    }
}
