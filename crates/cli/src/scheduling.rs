//! One scheduling group for a router and the containers it serves.
//!
//! Linux shares a core first between groups (cpu cgroups and, outside of them, login sessions) and only then between the
//! threads of each. `sched_yield` gives way only within a group, so between a router and a polling program of another
//! group a hand-off would last a whole slice, milliseconds, instead of a microsecond. So the router and what `freeflow
//! run` starts share one cpu cgroup, with the weight of one ordinary group on each core.
//!
//! Where there are no cpu cgroups to write, everything works, only slower on crowded cores; `freeflow doctor` says so.

use crate::run_dir::RunDir;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

/// Root of cgroup v2, and of the cpu controller of cgroup v1.
const UNIFIED: &str = "/sys/fs/cgroup";
const LEGACY: &str = "/sys/fs/cgroup/cpu";
/// What an ordinary group weighs, and the most there is, in either version.
const UNIFIED_WEIGHT: (usize, usize) = (100, 10_000);
const LEGACY_WEIGHT: (usize, usize) = (1024, 262_144);
/// Members that have just ended still count for a moment.
const REMOVE_TRY_COUNT_MAX: u32 = 25;
const REMOVE_INTERVAL: Duration = Duration::from_millis(20);

/// The cpu cgroup of one run directory; it may not exist (yet).
pub struct Group {
    directory: PathBuf,
    weight_file: &'static str,
    weight: usize,
    unified: bool,
}

impl Group {
    /// None: this machine has no cpu cgroups.
    pub fn of(run_dir: &RunDir) -> Option<Self> {
        let controllers = fs::read_to_string(Path::new(UNIFIED).join("cgroup.controllers")).unwrap_or_default();
        let unified = controllers.split_whitespace().any(|controller| controller == "cpu");
        if !unified && !Path::new(LEGACY).join("cgroup.procs").exists() {
            return None;
        }
        let (root, weight_file, (ordinary, most)) =
            if unified { (UNIFIED, "cpu.weight", UNIFIED_WEIGHT) } else { (LEGACY, "cpu.shares", LEGACY_WEIGHT) };
        let cores = available_parallelism().map_or(1, usize::from);
        let directory = Path::new(root).join(format!("freeflow-{}", run_dir.short_hash()));
        Some(Self { directory, weight_file, weight: (ordinary * cores).min(most), unified })
    }

    fn create(&self) -> io::Result<()> {
        if self.directory.is_dir() {
            return Ok(());
        }
        if self.unified {
            fs::write(Path::new(UNIFIED).join("cgroup.subtree_control"), "+cpu")?;
        }
        fs::create_dir_all(&self.directory)?;
        fs::write(self.directory.join(self.weight_file), self.weight.to_string())
    }

    /// A way in for a process that can't see the cgroups (any more): it gives this to [`join`].
    pub fn door(&self) -> io::Result<File> {
        self.create()?;
        OpenOptions::new().write(true).open(self.directory.join("cgroup.procs"))
    }

    /// Whether processes can be put into it.
    pub fn works(&self) -> bool {
        let existed = self.directory.is_dir();
        let works = self.door().is_ok();
        if !existed {
            let _ = fs::remove_dir(&self.directory);
        }
        works
    }

    /// Its members have ended, or are about to.
    pub fn remove(&self) {
        for _ in 0..REMOVE_TRY_COUNT_MAX {
            if fs::remove_dir(&self.directory).is_ok() || !self.directory.is_dir() {
                return;
            }
            std::thread::sleep(REMOVE_INTERVAL);
        }
    }
}

/// The way into the run directory's group, if there is one.
pub fn door(run_dir: &RunDir) -> Option<File> {
    Group::of(run_dir)?.door().ok()
}

/// Moves a process, with what it starts from now on; 0 is the calling one. It is no failure where that is not possible.
pub fn join(door: Option<&File>, pid: u32) {
    if let Some(mut door) = door {
        let _ = door.write_all(pid.to_string().as_bytes());
    }
}
