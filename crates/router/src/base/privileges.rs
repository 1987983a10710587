//! Privileges of each of the router's threads: its capabilities, and the system calls that it may
//! make ([`crate::base::system_calls`]).
//!
//! [`confine`] takes from the whole process what no thread needs once the process runs; each thread
//! that the router begins then calls [`enter`] first, and keeps what its kind needs. Who has the
//! least: those that parse bytes of tenants, peers and users. A thread that does not call [`enter`]
//! has what the thread has that began it.
//!
//! A capability that a thread has only for threads that it begins is permitted to it and not
//! effective: no call of its own has it.
//!
//! A system call that is refused answers EPERM, and nothing ends: a rarely used way fails as it
//! does without a right, and says so in the log. What must not be is that it goes unnoticed, so the
//! main thread has a line for each call that a kind of thread is refused.
use crate::base::log::warning;
use crate::base::system_calls::{self, Call, Filter};
use freeflow_shm::{RefusedCall, RefusedCalls, limit_calls, limit_capabilities, limit_programs};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

/// Capabilities of the process while it starts: for its sockets' options and ports, its limit of
/// descriptors, its directories.
const CAPABILITIES_OF_START: &[&str] = &[
    "CAP_CHECKPOINT_RESTORE",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_PTRACE",
    "CAP_SYS_RESOURCE",
];
/// Of those, what looks at tenants' processes.
const CAPABILITIES_OF_LOOKING: &[&str] = &["CAP_CHECKPOINT_RESTORE", "CAP_SYS_PTRACE"];

/// Capabilities of the process of near halves, all of them for threads that it begins.
const CAPABILITIES_OF_NEAR_HALVES: &[&str] = &["CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE"];

/// Capabilities that a unit that brings the host up needs besides: bridges and namespaces are the
/// command's, and so is ending containers.
const CAPABILITIES_OF_UNIT: &[&str] = &["CAP_KILL", "CAP_NET_RAW", "CAP_SETPCAP", "CAP_SYS_ADMIN"];

/// Lines about refused calls: more than there are ones that an honest thread may come upon.
const REFUSALS_KNOWN_MAX: usize = 1000;

/// The router's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadKind {
    Main,
    Api,
    ApiDisk,
    Attachment,
    Audit,
    Borrow,
    Capture,
    Closer,
    Control,
    SlowPath,
    Near,
    NearHalves,
    NetworkReconciler,
    Freezer,
    Guest,
    Identify,
    CopyThread,
    Peers,
    Store,
    Sysfs,
    Worker,
}

impl ThreadKind {
    pub const ALL: [Self; 21] = [
        Self::Main,
        Self::Api,
        Self::ApiDisk,
        Self::Attachment,
        Self::Audit,
        Self::Borrow,
        Self::Capture,
        Self::Closer,
        Self::Control,
        Self::SlowPath,
        Self::Near,
        Self::NearHalves,
        Self::NetworkReconciler,
        Self::Freezer,
        Self::Guest,
        Self::Identify,
        Self::CopyThread,
        Self::Peers,
        Self::Store,
        Self::Sysfs,
        Self::Worker,
    ];

    /// Its threads' name, before the number that some have.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "freeflow-router",
            Self::Api => "ff-api",
            Self::ApiDisk => "ff-api-disk",
            Self::Attachment => "ff-attachment",
            Self::Audit => "ff-audit",
            Self::Borrow => "ff-borrow",
            Self::Capture => "ff-capture",
            Self::Closer => "ff-closer",
            Self::Control => "ff-control",
            Self::SlowPath => "ff-slow-path",
            Self::Near => "ff-near",
            Self::NearHalves => "ff-near-halves",
            Self::NetworkReconciler => "ff-networks",
            Self::Freezer => "ff-freezer",
            Self::Guest => "ff-guest",
            Self::Identify => "ff-identify",
            Self::CopyThread => "ff-copy",
            Self::Peers => "ff-peers",
            Self::Store => "ff-store",
            Self::Sysfs => "ff-sysfs",
            Self::Worker => "ff-worker",
        }
    }

    fn capabilities(self) -> &'static [&'static str] {
        match self {
            // Opens the files that a process has mapped, by /proc/PID/map_files.
            Self::Borrow => &["CAP_CHECKPOINT_RESTORE", "CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE"],
            // Opens /proc/PID/mem of whoever connects, of whatever user.
            Self::Identify => &["CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE"],
            // Stops the threads of a process that moves its memory.
            Self::Freezer => &["CAP_SYS_PTRACE"],
            _ => &[],
        }
    }

    /// Capabilities that it has for threads which it begins, besides its own.
    fn hands_on(self) -> &'static [&'static str] {
        match self {
            Self::Control => &["CAP_CHECKPOINT_RESTORE", "CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE"],
            Self::Near | Self::NearHalves => &["CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE"],
            _ => &[],
        }
    }
}

fn capability_set(names: &[&str]) -> CapabilitySet {
    names.iter().filter_map(|name| CapabilitySet::from_name(name.strip_prefix("CAP_")?)).collect()
}

/// The programs of the filters of each kind. Set before the first thread begins, and empty where
/// the kernel has no filters; not in a process that is not confined, such as a test.
static FILTERS: OnceLock<BTreeMap<ThreadKind, Vec<Filter>>> = OnceLock::new();

/// Purpose of a process of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Router,
    /// A router whose vNICs' processes another process reaches: it does without that right itself.
    RouterWithNearHalves,
    /// The other process: near halves, and nothing else.
    NearHalves,
}

impl Role {
    fn capabilities(self) -> CapabilitySet {
        match self {
            Self::Router => capability_set(CAPABILITIES_OF_START),
            Self::RouterWithNearHalves => {
                capability_set(CAPABILITIES_OF_START) - capability_set(CAPABILITIES_OF_LOOKING)
            }
            Self::NearHalves => capability_set(CAPABILITIES_OF_NEAR_HALVES),
        }
    }
}

/// From now on this process has one role and nothing else: it gains no privileges, and has what
/// that takes to start. Call it before the first thread begins.
///
/// # Errors
/// Capabilities or signal handlers can't be set.
pub fn confine(role: Role) -> io::Result<Refusals> {
    if let Err(error) = limit_programs(CapabilitySet::empty()) {
        // No harm: this process executes nothing, so there is nothing that the bounding set would bound.
        warning!("can't empty the capability bounding set", error = error);
    }
    let all = role.capabilities();
    limit_capabilities(all, all)?;
    let refused = RefusedCalls::hear()?;
    let filters = limit_calls_of_start().unwrap_or_else(|error| {
        warning!("the router's system calls are not filtered", error = error);
        BTreeMap::new()
    });
    let _ = FILTERS.set(filters);
    Ok(Refusals { calls: refused, known: BTreeSet::new() })
}

/// Gives the filters for threads. Errors: the kernel has none.
fn limit_calls_of_start() -> io::Result<BTreeMap<ThreadKind, Vec<Filter>>> {
    let filters = ThreadKind::ALL.into_iter().map(|kind| Ok((kind, system_calls::filters(kind)?))).collect();
    for filter in system_calls::filters_of_start()? {
        limit_calls(&filter)?;
    }
    filters
}

/// The calling thread keeps what its kind needs. Does nothing in a process that is not confined.
pub fn enter(kind: ThreadKind) {
    let Some(filters) = FILTERS.get() else { return };
    let (effective, handed_on) = (capability_set(kind.capabilities()), capability_set(kind.hands_on()));
    if let Err(error) = limit_capabilities(effective | handed_on, effective) {
        // Better no thread than one with more than its kind may have.
        panic!("the thread {} can't be confined: {error}", kind.name());
    }
    let mut filters = filters.get(&kind).into_iter().flatten();
    if let Err(error) = filters.try_for_each(|filter| limit_calls(filter)) {
        // No memory for it. The thread has the filter of the process' start, and somebody may wait for it.
        warning!("a thread has no filter of its own", thread = kind.name(), error = error);
    }
}

/// System calls that filters have refused, and those of them that are in the log already. Readable
/// while there is something new.
pub struct Refusals {
    calls: RefusedCalls,
    known: BTreeSet<RefusedCall>,
}

impl Refusals {
    /// A line for each call of each kind of thread, once.
    pub fn log(&mut self) {
        while let Some(mut call) = self.calls.take() {
            let digits = |c: char| c.is_ascii_digit();
            call.thread = call.thread.trim_end_matches(digits).trim_end_matches('-').to_owned();
            if self.known.len() < REFUSALS_KNOWN_MAX && self.known.insert(call.clone()) {
                let name = system_calls::name(call.number).unwrap_or("?");
                warning!("a system call was refused", thread = call.thread, call = call.number, name = name);
            }
        }
    }
}

impl AsFd for Refusals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.calls.as_fd()
    }
}

/// Everything above as JSON, for tests, `doctor` and the unit file.
pub fn describe() -> Value {
    let names = |calls: Vec<Call>| calls.iter().map(Call::name).collect::<Vec<_>>();
    let thread = |kind: ThreadKind| json!({"capabilities": kind.capabilities(), "hands_on": kind.hands_on(), "calls": names(system_calls::of(kind))});
    let threads: BTreeMap<&str, Value> = ThreadKind::ALL.into_iter().map(|kind| (kind.name(), thread(kind))).collect();
    let in_unit = [CAPABILITIES_OF_START, CAPABILITIES_OF_UNIT].concat();
    let start = json!({"capabilities": CAPABILITIES_OF_START, "calls": names(system_calls::of_start())});
    let near_halves = json!({"capabilities": CAPABILITIES_OF_NEAR_HALVES});
    json!({"start": start, "threads": threads, "unit": {"capabilities": in_unit}, "near_halves": near_halves})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_capabilities_are_known() {
        let of_threads =
            ThreadKind::ALL.map(ThreadKind::capabilities).into_iter().chain(ThreadKind::ALL.map(ThreadKind::hands_on));
        for names in of_threads.chain([CAPABILITIES_OF_START]) {
            assert_eq!(capability_set(names).bits().count_ones() as usize, names.len(), "{names:?}");
            assert!(names.iter().all(|name| CAPABILITIES_OF_START.contains(name)));
        }
    }

    #[test]
    fn a_process_that_is_not_confined_stays_as_it_is() {
        let status = || std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let capabilities =
            || status().lines().filter(|line| line.starts_with("Cap")).map(str::to_owned).collect::<Vec<_>>();
        let before = capabilities();
        enter(ThreadKind::CopyThread);
        assert_eq!(capabilities(), before);
    }
}
