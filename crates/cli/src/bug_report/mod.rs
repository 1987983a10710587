//! `freeflow bugreport`: one archive with what a report of a fault needs.
//!
//! Invariant: a part is in the archive because this file lists it, and a field of a configuration file because it is
//! listed here, too. Keys, certificates, tokens, environment variables, and what containers print or have on their
//! command lines are never read. What is collected is then searched for texts that look like secrets (`redaction`).
//!
//! Each part stands for itself: one that can't be had is a line in `report.txt`, so that a report can be made while
//! the router is dead, or stuck.

mod archive;
mod redaction;
mod sources;

use crate::arguments_test::BugReport;
use crate::failure::{Context as _, Failure, Result};
use crate::interruption::Interruption;
use crate::record::now_s;
use crate::{cluster, output, router, tools};
use archive::Archive;
use freeflow_hostnet::programs::find_in;
use freeflow_hostnet::run_dir::RunDir;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

const PROGRAM_TIME: Duration = Duration::from_secs(20);
const VERSION_TIME: Duration = Duration::from_secs(5);
/// Lines of the journal.
const JOURNAL_LINES: &str = "5000";
const CDI_DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
const SERVICE_OPTIONS: &str = "/etc/default/freeflow";
const RUNTIME_SETTINGS: &str = "/etc/freeflow/runtime.json";
const ENGINES: [&str; 11] =
    ["podman", "docker", "dockerd", "containerd", "crio", "nerdctl", "runc", "crun", "kubelet", "etcd", "systemctl"];
const PROGRAM_DIRECTORIES: [&str; 5] = ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/sbin"];
/// Of what is declared, and of what the router shows.
const KINDS: [&str; 6] = ["networks", "groups", "accessrules", "qosclasses", "quotas", "vnics"];
const KERNEL_FILES: [&str; 9] = [
    "/proc/version",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/sys/vm/max_map_count",
    "/proc/sys/kernel/sched_autogroup_enabled",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/cgroups",
];
const PROCESS_FILES: [&str; 6] = ["status", "limits", "cgroup", "oom_score_adj", "stat", "io"];
/// Our own commands whose output is a part, with their options for JSON.
const OWN_COMMANDS: [(&str, &[&str]); 9] = [
    ("doctor.json", &["doctor", "-o", "json"]),
    ("status.json", &["status", "-o", "json"]),
    ("containers.json", &["ps", "-a", "-o", "json"]),
    ("qps.json", &["ps", "--qps", "-o", "json"]),
    ("cm.json", &["ps", "--cm", "-o", "json"]),
    ("network-list.json", &["network", "ls", "-o", "json"]),
    ("peers.json", &["peers", "ls", "-o", "json"]),
    ("wire.json", &["wire", "status", "-o", "json"]),
    ("host.json", &["get", "hosts", "-o", "json"]),
];
/// Fields of configuration files; all others are left out.
const PEERS_FIELDS: [&str; 12] = [
    "host",
    "address",
    "control_port",
    "icrc",
    "frames",
    "wire",
    "dscp",
    "peers",
    "public_key",
    "prefixes",
    "external",
    "network",
];
const CLUSTER_FIELDS: [&str; 4] = ["etcd", "root", "wire", "controller"];
const RUNTIME_FIELDS: [&str; 5] = ["runtime", "annotation", "environment", "networks", "vnics"];

pub fn bug_report(run_dir: &RunDir, arguments: &BugReport) -> Result<()> {
    let now = now_s();
    let path = arguments.output.clone().unwrap_or_else(|| default_name(run_dir, now));
    // Before there is a file: a signal leaves nothing of it.
    let interruption = Interruption::new()?;
    let mut report =
        Report { archive: Archive::create(&path, now)?, folder: "freeflow-bugreport", lines: Vec::new(), interruption };
    versions(&mut report)?;
    machine(&mut report)?;
    router_process(run_dir, &mut report)?;
    own_commands(run_dir, &mut report)?;
    configuration(run_dir, &mut report)?;
    logs(run_dir, &mut report)?;
    report.finish()?;
    output::line(path.display());
    output::complaint(
        "secrets are left out; names, addresses and logs are in it: look through it before you pass it on",
    );
    Ok(())
}

/// In the working directory; of the host's name only letters that need no quotes.
fn default_name(run_dir: &RunDir, now: u64) -> PathBuf {
    let settings = run_dir.settings().map(|settings| settings.host);
    let host = settings.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let host: String =
        host.chars().filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-').take(40).collect();
    PathBuf::from(format!("freeflow-bugreport-{host}-{now}.tar"))
}

/// The archive, and what became of each part.
struct Report {
    archive: Archive,
    folder: &'static str,
    lines: Vec<String>,
    interruption: Interruption,
}

impl Report {
    fn store(&mut self, name: &str, content: &[u8]) -> Result<()> {
        self.check_interruption()?;
        self.lines.push(format!("{name}: {} bytes", content.len()));
        self.archive.add(&format!("{}/{name}", self.folder), content)
    }

    fn check_interruption(&self) -> Result<()> {
        self.interruption.check("no report is left")
    }

    fn missing(&mut self, name: &str, why: impl std::fmt::Display) {
        self.lines.push(format!("{name}: not in this report: {}", redaction::text(&why.to_string())));
    }

    /// Of a text, whatever its bytes are.
    fn text(&mut self, name: &str, content: Result<Vec<u8>>) -> Result<()> {
        match content {
            Ok(content) => self.store(name, redaction::text(&String::from_utf8_lossy(&content)).as_bytes()),
            Err(failure) => {
                self.missing(name, failure);
                self.check_interruption()
            }
        }
    }

    fn document(&mut self, name: &str, value: Result<Value>) -> Result<()> {
        match value {
            Ok(value) => {
                let text = serde_json::to_vec_pretty(&redaction::document(value)).context(name)?;
                self.store(name, &text)
            }
            Err(failure) => {
                self.missing(name, failure);
                self.check_interruption()
            }
        }
    }

    fn finish(mut self) -> Result<()> {
        let lines = std::mem::take(&mut self.lines).join("\n") + "\n";
        self.archive.add(&format!("{}/report.txt", self.folder), lines.as_bytes())?;
        self.check_interruption()?;
        self.archive.finish()
    }
}

fn versions(report: &mut Report) -> Result<()> {
    let mut lines = vec![format!("freeflow {}", env!("CARGO_PKG_VERSION"))];
    let parts = [("command", tools::own_path()), ("router", tools::router()), ("library", tools::library())];
    lines.extend(parts.map(|(name, path)| match path {
        Ok(path) => format!("{name}: {}", path.display()),
        Err(failure) => format!("{name}: {failure}"),
    }));
    for engine in ENGINES {
        let Some(path) = find_in(engine, &PROGRAM_DIRECTORIES) else { continue };
        report.check_interruption()?;
        let said = sources::output(&path, &["--version"], VERSION_TIME, &report.interruption);
        let (text, note) = said.unwrap_or_else(|failure| (failure.to_string().into_bytes(), None));
        let text = String::from_utf8_lossy(&text);
        lines.push(format!("{engine}: {} {}", text.lines().next().unwrap_or(""), note.unwrap_or_default()));
    }
    report.text("versions.txt", Ok((lines.join("\n") + "\n").into_bytes()))
}

fn machine(report: &mut Report) -> Result<()> {
    let mut text = String::new();
    for file in KERNEL_FILES {
        let content = sources::kernel_file(file)
            .map_or_else(|failure| failure.to_string(), |content| String::from_utf8_lossy(&content).into_owned());
        text.push_str(&format!("== {file}\n{}\n", content.trim_end()));
    }
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    text.push_str(&format!("== processors\n{cores}\n"));
    report.text("kernel.txt", Ok(text.into_bytes()))?;
    report.text("mounts.txt", sources::kernel_file("/proc/self/mountinfo").map(|content| mounts(&content)))?;
    for (name, words) in [
        ("links.txt", &["-s", "link"][..]),
        ("addresses.txt", &["addr"][..]),
        ("routes.txt", &["route"][..]),
        ("routes6.txt", &["-6", "route"][..]),
    ] {
        program(report, name, "ip", words)?;
    }
    program(report, "bridge.txt", "bridge", &["link"])
}

/// Where is mounted and which kind of file system: sources and options of a file system may hold passwords.
fn mounts(content: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(content);
    let lines = text.lines().filter_map(|line| {
        let (own, file_system) = line.split_once(" - ")?;
        let fields: Vec<&str> = own.split(' ').collect();
        Some(format!("{} {} {}\n", fields.get(4)?, fields.get(5)?, file_system.split(' ').next()?))
    });
    lines.collect::<String>().into_bytes()
}

fn program(report: &mut Report, name: &str, program: &str, words: &[&str]) -> Result<()> {
    let Some(path) = find_in(program, &PROGRAM_DIRECTORIES) else {
        report.missing(name, format!("{program} is not installed"));
        return Ok(());
    };
    let printed = sources::output(&path, words, PROGRAM_TIME, &report.interruption);
    let content = printed.map(|(content, note)| {
        report.lines.extend(note.map(|note| format!("{name}: {note}")));
        content
    });
    report.text(name, content)
}

fn router_process(run_dir: &RunDir, report: &mut Report) -> Result<()> {
    let Some(process) = router::recorded(run_dir) else {
        report.missing("router-process.txt", "no router runs");
        return Ok(());
    };
    let mut text = format!("process {}\n", process.pid);
    for file in PROCESS_FILES {
        let path = format!("/proc/{}/{file}", process.pid);
        match sources::kernel_file(&path) {
            Ok(content) => text.push_str(&format!("== {file}\n{}\n", String::from_utf8_lossy(&content).trim_end())),
            Err(failure) => text.push_str(&format!("== {file}\n{failure}\n")),
        }
    }
    let count = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", process.pid)).map_or(0, Iterator::count);
    text.push_str(&format!("== counts\ndescriptors {}\nthreads {}\n", count("fd"), count("task")));
    report.text("router-process.txt", Ok(text.into_bytes()))
}

/// By processes of their own: a router that does not answer keeps none of them for long.
fn own_commands(run_dir: &RunDir, report: &mut Report) -> Result<()> {
    let own = tools::own_path()?;
    let directory = run_dir.path().to_string_lossy().into_owned();
    let json = |words: &[&str], interruption: &Interruption| -> Result<Value> {
        let all: Vec<&str> = ["--run-dir", &directory].into_iter().chain(words.iter().copied()).collect();
        let (printed, note) = sources::output(&own, &all, PROGRAM_TIME, interruption)?;
        // Complaints stand in front of it, or behind it.
        let text = String::from_utf8_lossy(&printed);
        let begin = text.find(['{', '[']).unwrap_or(text.len());
        let mut values = serde_json::Deserializer::from_str(&text[begin..]).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => Ok(value),
            _ => Err(Failure::new(format!("{} {}", text.trim(), note.unwrap_or_default()))),
        }
    };
    for (name, words) in OWN_COMMANDS {
        let value = json(words, &report.interruption);
        let value = if name == "containers.json" { value.map(without_arguments) } else { value };
        report.document(name, value)?;
    }
    for kind in KINDS {
        let value = json(&["get", kind, "-o", "json"], &report.interruption);
        report.document(&format!("declared/{kind}.json"), value)?;
    }
    if run_dir.settings().is_some_and(|settings| settings.cluster.is_some()) {
        let value = json(&["cluster", "status", "-o", "json"], &report.interruption);
        report.document("cluster-status.json", value)?;
    }
    let metrics = sources::metrics(&run_dir.path().join("api.sock"), PROGRAM_TIME, &report.interruption);
    report.text("metrics.txt", metrics)
}

/// Of a container's command line the program alone: its arguments may be anybody's.
fn without_arguments(mut containers: Value) -> Value {
    for container in containers.as_array_mut().into_iter().flatten() {
        if let Some(command) = container.get_mut("command").and_then(Value::as_array_mut) {
            command.truncate(1);
        }
    }
    containers
}

/// Listed fields of a document; the same list holds within them.
fn listed(value: Value, fields: &[&str]) -> Value {
    match value {
        Value::Object(object) => {
            let kept = object.into_iter().filter(|(name, _)| fields.contains(&name.as_str()));
            Value::Object(kept.map(|(name, value)| (name, listed(value, fields))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(|item| listed(item, fields)).collect()),
        other => other,
    }
}

fn listed_file(path: &Path, fields: &[&str]) -> Result<Value> {
    let value: Value = serde_json::from_slice(&sources::tail(path)?)
        .map_err(|error| Failure::new(format!("{}: line {}: no JSON", path.display(), error.line())))?;
    Ok(listed(value, fields))
}

fn configuration(run_dir: &RunDir, report: &mut Report) -> Result<()> {
    let settings = run_dir.settings();
    let value = settings.as_ref().map(|settings| serde_json::to_value(settings).context("up.json"));
    report.document("up.json", value.unwrap_or_else(|| Err(Failure::new("freeflow up has not been run"))))?;
    if let Some(path) = settings.as_ref().and_then(|settings| settings.peers.as_ref()) {
        report.document("peers-file.json", listed_file(path, &PEERS_FIELDS))?;
    }
    if let Some(path) = settings.as_ref().and_then(|settings| settings.cluster.as_ref()) {
        report.document("cluster-file.json", listed_file(path, &CLUSTER_FIELDS))?;
        report.document("cluster-problems.json", Ok(json!(cluster::problems(run_dir))))?;
    }
    if Path::new(RUNTIME_SETTINGS).exists() {
        report.document("runtime.json", listed_file(Path::new(RUNTIME_SETTINGS), &RUNTIME_FIELDS))?;
    }
    if Path::new(SERVICE_OPTIONS).exists() {
        report
            .text("service-options.txt", sources::tail(Path::new(SERVICE_OPTIONS)).map(|text| option_names(&text)))?;
    }
    cdi_files(run_dir, report)
}

/// Names of options: a value may be a token.
fn option_names(text: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words = lines.flat_map(|line| line.split(|letter: char| letter.is_whitespace() || "=\"'".contains(letter)));
    let names = words.filter(|word| word.starts_with("--") && word.len() > 2);
    names.map(|name| format!("{name}\n")).collect::<String>().into_bytes()
}

/// Those that `freeflow up` has written, by their names; of others their names.
fn cdi_files(run_dir: &RunDir, report: &mut Report) -> Result<()> {
    let own = run_dir.settings().and_then(|settings| settings.cdi_file);
    let mut names = Vec::new();
    for directory in CDI_DIRECTORIES {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let is_plain = entry.file_type().is_ok_and(|kind| kind.is_file());
            names.push(json!({"path": entry.path().to_string_lossy(), "plain": is_plain}));
        }
    }
    report.document("cdi-files.json", Ok(Value::Array(names)))?;
    match own {
        Some(path) => report.text("cdi.json", sources::tail(&path)),
        None => Ok(()),
    }
}

fn logs(run_dir: &RunDir, report: &mut Report) -> Result<()> {
    let cluster_log = cluster::log_file(run_dir);
    let numbered = |path: &Path| PathBuf::from(format!("{}.1", path.display()));
    let router_log = run_dir.router_log();
    let files = [
        ("router.log", router_log.clone()),
        ("router.log.1", numbered(&router_log)),
        ("audit.log", run_dir.path().join("audit.log")),
        ("cluster.log", cluster_log.clone()),
        ("cluster.log.1", numbered(&cluster_log)),
    ];
    for (name, path) in files {
        // Not each host has each of them.
        if path.symlink_metadata().is_ok() {
            report.text(name, sources::tail(&path))?;
        }
    }
    if run_dir.is_default() {
        program(report, "journal.txt", "journalctl", &["-u", "freeflow", "-n", JOURNAL_LINES, "--no-pager"])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_listed_is_kept() {
        let file = json!({"host": "h1", "key_file": "k", "inline_key": "SECRET", "peers": [{"host": "h2", "x": 1}]});
        assert_eq!(listed(file, &PEERS_FIELDS), json!({"host": "h1", "peers": [{"host": "h2"}]}));
        let containers = json!([{"name": "a", "command": ["db", "--password=x"]}]);
        assert_eq!(without_arguments(containers), json!([{"name": "a", "command": ["db"]}]));
        let text = b"# --secret\nFREEFLOW_UP=\"--state /var/lib/freeflow --join=abc --join def\"\n";
        assert_eq!(option_names(text), b"--state\n--join\n--join\n");
    }

    #[test]
    fn of_a_mount_its_place_and_kind_are_kept() {
        let line = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - cifs //u:p@server/share rw,password=x\nnonsense\n";
        assert_eq!(mounts(line), b"/mnt2 rw,noatime cifs\n");
    }
}
