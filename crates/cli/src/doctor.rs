//! `freeflow doctor`: what is missing on this machine, and how to mend it.

mod engines;

use crate::admin::{Admin, Presence};
use crate::arguments::Format;
use crate::failure::{Failure, Result, fail};
use crate::fork::in_child;
use crate::{abilities, cgroup, cluster, output, sys, tools};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_hostnet::wire_guard::{Family, WireGuard};
use freeflow_hostnet::{cdi, firewall, guard, programs};
use rustix::thread::UnshareFlags;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Something is less than it could be.
    Note,
    /// FreeFlow can't work.
    Missing,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    detail: String,
    remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, detail: detail.into(), remedy: None }
    }

    fn note(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Note, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    fn missing(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Missing, detail: detail.into(), remedy: Some(remedy.into()) }
    }
}

pub fn doctor(run_dir: &RunDir, format: Format) -> Result<()> {
    let root = sys::is_privileged();
    let mut checks = vec![
        privilege(root),
        kernel(),
        missing_pages(),
        file("router", tools::router()),
        file("library", tools::library()),
        ip_program(),
        cores(),
        autogroup(),
    ];
    if root {
        // A lab's host has a network of its own; without it the checks say what is missing.
        let _ = run_dir.enter_network();
        checks.extend([interfaces(), namespaces(), wire(), wire_guard(run_dir), router(run_dir)]);
        checks.extend(rights(run_dir));
        checks.extend([device(run_dir), firewall()]);
        checks.extend(cluster(run_dir));
    }
    if !root {
        checks.extend(engines::inside());
    }
    checks.extend(no_podman());
    checks.extend(engines::installed());
    checks.push(test_programs());
    let missing = checks.iter().filter(|check| check.verdict == Verdict::Missing).count();
    match format {
        Format::Json => output::json(&checks),
        Format::Table => print(&checks),
    }
    if missing > 0 {
        fail!(
            "{missing} essential {} missing; the remedies are above",
            if missing == 1 { "thing is" } else { "things are" }
        );
    }
    Ok(())
}

fn print(checks: &[Check]) {
    for check in checks {
        let sign = match check.verdict {
            Verdict::Ok => "ok      ",
            Verdict::Note => "note    ",
            Verdict::Missing => "MISSING ",
        };
        output::line(format!("{sign} {:<12} {}", check.name, check.detail));
        if let Some(remedy) = &check.remedy {
            output::line(format!("         {:<12} -> {remedy}", ""));
        }
    }
}

fn privilege(root: bool) -> Check {
    if root {
        return Check::ok("root", "may make interfaces, namespaces and mounts");
    }
    Check::missing(
        "root",
        "not root, or without CAP_SYS_ADMIN and CAP_NET_ADMIN",
        "run freeflow as root, for example: sudo freeflow doctor",
    )
}

/// The mount calls need Linux 5.2, close_range 5.9.
fn kernel() -> Check {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 11) {
        return Check::ok("kernel", format!("Linux {release}; no module is needed"));
    }
    Check::missing("kernel", format!("Linux {release} is too old"), "use Linux 5.11 or newer")
}

/// Whether the router can leave pages of shared memory to those whose they are.
fn missing_pages() -> Check {
    match freeflow_shm::refuses_missing_pages() {
        Ok(()) => Check::ok("userfaultfd", "containers pay for the memory that they share with the router"),
        Err(error) => Check::note(
            "userfaultfd",
            format!(
                "not to be had ({error}): memory that a container shares can be charged to the router's memory cgroup"
            ),
            "use a kernel with CONFIG_USERFAULTFD, on x86-64",
        ),
    }
}

fn file(name: &'static str, found: Result<std::path::PathBuf>) -> Check {
    match found {
        Ok(path) => Check::ok(name, path.display().to_string()),
        Err(failure) => Check::missing(name, failure.to_string(), "build it: make"),
    }
}

fn ip_program() -> Check {
    match programs::find("tc") {
        Some(path) => Check::ok("iproute2", path.display().to_string()),
        None => Check::missing("iproute2", "the program tc is not installed", "apt-get install iproute2"),
    }
}

fn cores() -> Check {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    match count {
        0..=2 => Check::note(
            "cores",
            format!("{count}: router and programs share them"),
            "for benchmarks use four or more; with few, keep to --mode adaptive or lowcpu",
        ),
        _ => Check::ok("cores", count.to_string()),
    }
}

/// `sched_yield` gives way only within a scheduling group, and with this setting each container's session is one.
fn autogroup() -> Check {
    const SETTING: &str = "/proc/sys/kernel/sched_autogroup_enabled";
    const NAME: &str = "scheduling";
    match std::fs::read_to_string(SETTING) {
        Ok(value) if value.trim() == "1" => Check::note(
            NAME,
            "each container is a scheduling group of its own (autogroup): polling programs that share cores give way late, \
             on some kernels (6.18) by seconds",
            "where cores are few: sysctl -w kernel.sched_autogroup_enabled=0",
        ),
        _ => Check::ok(NAME, "polling programs that share cores give way at once"),
    }
}

fn interfaces() -> Check {
    match abilities::check_interfaces() {
        Ok(()) => Check::ok("interfaces", "bridges and veth pairs can be made"),
        Err(failure) => Check::missing(
            "interfaces",
            failure.to_string(),
            "load the modules bridge and veth (modprobe), or allow CAP_NET_ADMIN",
        ),
    }
}

/// Checks for hosts with peers: containers must not speak RoCEv2 by themselves, and the overlay is
/// VXLAN.
fn wire() -> Check {
    match abilities::check_wire() {
        Ok(()) => Check::ok("other hosts", "packets can be filtered and an overlay be made"),
        Err(failure) => Check::note(
            "other hosts",
            failure.to_string(),
            "to have peers, install iproute2 (its tc) and load sch_ingress, cls_u32, act_gact and vxlan",
        ),
    }
}

/// Hosts with peers need it: only the router may speak RoCEv2 for the host.
fn wire_guard(run_dir: &RunDir) -> Check {
    const NAME: &str = "wire guard";
    let needed = run_dir.settings().and_then(|settings| settings.address).map(Family::of);
    let tried = abilities::check_wire_guards();
    if let Some(needed) = needed {
        let in_force = WireGuard::of(run_dir).in_force();
        if !in_force.iter().any(|guard| guard.family == needed) {
            let detail =
                format!("any program of this host can send to UDP {}: the guard is gone", guard::ROCE_UDP_PORT);
            return Check::missing(NAME, detail, format!("freeflow{} up", run_dir.option()));
        }
        let all: Vec<String> = in_force
            .iter()
            .map(|guard| format!("{} by {}, {} packets dropped", guard.family, guard.tool, guard.dropped))
            .collect();
        return Check::ok(NAME, format!("in force: {}", all.join("; ")));
    }
    let works: Vec<String> =
        tried.iter().filter_map(|(family, tool)| Some(format!("{family} by {}", tool.as_ref().ok()?))).collect();
    match tried.into_iter().find_map(|(family, tool)| Some((family, tool.err()?))) {
        None => Check::ok(NAME, format!("tried, for when there are peers: {}", works.join("; "))),
        Some((family, failure)) => {
            Check::note(NAME, format!("{family}: {failure}"), "to have peers, install iptables or nftables")
        }
    }
}

/// Where this host follows a cluster.
fn cluster(run_dir: &RunDir) -> Option<Check> {
    const NAME: &str = "cluster";
    let path = run_dir.settings()?.cluster?;
    let option = run_dir.option();
    Some(match cluster::problems(run_dir).as_deref() {
        None => Check::missing(NAME, "nobody follows it: the process has ended", format!("freeflow{option} up")),
        Some([]) => Check::ok(NAME, format!("followed, by {}", path.display())),
        Some([first, others @ ..]) => {
            let more = if others.is_empty() { String::new() } else { format!(", and {} more", others.len()) };
            Check::note(NAME, format!("{first}{more}"), format!("see {}", cluster::log_file(run_dir).display()))
        }
    })
}

fn namespaces() -> Check {
    let flags = UnshareFlags::NEWNS | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC | UnshareFlags::NEWPID;
    match in_child(|| sys::unshare(flags).map_err(|error| Failure::new(error.to_string()))) {
        Ok(()) => Check::ok("namespaces", "mount, PID, UTS and IPC namespaces can be made"),
        Err(failure) => Check::missing("namespaces", failure.to_string(), "allow CAP_SYS_ADMIN"),
    }
}

fn router(run_dir: &RunDir) -> Check {
    match Admin::look(run_dir) {
        Presence::Running(admin) => Check::ok("host", format!("up, router {} (process {})", admin.version, admin.pid)),
        Presence::Absent => Check::note("host", "not up", format!("freeflow{} up", run_dir.option())),
        Presence::Unusable(failure) => Check::missing(
            "host",
            failure.to_string(),
            format!("freeflow{0} down --force; freeflow{0} up", run_dir.option()),
        ),
    }
}

/// Of a router that runs: whether each of its threads is confined, and what it has of the caller of `freeflow up`.
fn rights(run_dir: &RunDir) -> Option<Check> {
    const NAME: &str = "rights";
    let pid = crate::router::recorded(run_dir)?.pid;
    let threads: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("status")).ok())
        .collect();
    let count = |field: &str, value: &str| {
        let line = format!("\n{field}:\t{value}\n");
        threads.iter().filter(|status| status.contains(&line)).count()
    };
    let all = threads.len();
    let confined = count("NoNewPrivs", "1").min(count("CapBnd", "0000000000000000"));
    let without = count("CapEff", "0000000000000000");
    if confined < all {
        let remedy = format!("freeflow{0} down; freeflow{0} up", run_dir.option());
        return Some(Check::note(NAME, format!("{confined} of the router's {all} threads are confined"), remedy));
    }
    let filtered = match count("Seccomp", "2") == all {
        true => "system calls are filtered",
        false => "system calls are not filtered: the kernel lacks seccomp filters",
    };
    let detail =
        format!("all {all} threads of the router are confined, {without} of them without any capability; {filtered}");
    let foreign = cgroup::foreign(run_dir, pid);
    if !foreign.is_empty() {
        let detail = format!("{detail}; it shares a cgroup with who started it: {}", foreign.join(", "));
        return Some(Check::note(NAME, detail, format!("let root write cgroups, or unset {}", cgroup::KEEP_VARIABLE)));
    }
    let adjustment = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap_or_default();
    if adjustment.trim() != crate::router::OOM_SCORE_ADJUSTMENT {
        let detail =
            format!("{detail}; out of memory, the kernel may end the router (oom_score_adj {})", adjustment.trim());
        return Some(Check::note(NAME, detail, "start it with CAP_SYS_RESOURCE"));
    }
    Some(Check::ok(NAME, detail))
}

fn device(run_dir: &RunDir) -> Check {
    match run_dir.settings().and_then(|settings| settings.cdi_file).filter(|path| path.exists()) {
        Some(path) => Check::ok("CDI", format!("{} in {}", cdi::KIND, path.display())),
        None => Check::note("CDI", "no CDI file: container engines do not know the device", "freeflow up writes it"),
    }
}

fn firewall() -> Check {
    if !firewall::bridged_packets_are_filtered() {
        return Check::ok("firewall", "does not see packets between containers");
    }
    let iptables = programs::find_in("iptables", &["/usr/sbin", "/sbin"]);
    Check::ok(
        "firewall",
        match iptables {
            Some(_) => "iptables sees packets between containers; freeflow up lets them pass",
            None => "sees packets between containers; iptables is not installed, so it has no rules",
        },
    )
}

/// Of one that is installed says [`engines::installed`].
fn no_podman() -> Option<Check> {
    let absent = programs::find_in("podman", &[]).is_none();
    let note =
        || Check::note("podman", "not installed (optional)", "for containers from images: apt-get install podman");
    absent.then(note)
}

fn test_programs() -> Check {
    let wanted = [("ib_write_bw", "perftest"), ("ibv_devinfo", "ibverbs-utils")];
    let absent: Vec<&str> = wanted
        .into_iter()
        .filter(|(program, _)| programs::find_in(program, &[]).is_none())
        .map(|(_, package)| package)
        .collect();
    if absent.is_empty() {
        return Check::ok("test tools", "perftest and ibverbs-utils are installed (optional)");
    }
    Check::note("test tools", "not installed (optional)", format!("apt-get install {}", absent.join(" ")))
}
