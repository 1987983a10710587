//! The command as its caller sees it: help texts, refusals, exit statuses, JSON. Nothing here needs a router; that is
//! `tests/lifecycle/cli.sh`.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const FREEFLOW: &str = env!("CARGO_BIN_EXE_freeflow");
const NOBODY: &str = "65534";

/// A directory that goes away.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("freeflow-cli-{name}-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn freeflow(run_dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(FREEFLOW);
    command.env_remove("FREEFLOW_RUN_DIR").arg("--run-dir").arg(run_dir).args(arguments);
    command.output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}

/// The help of the command and of all its subcommands, found by reading the help itself.
fn all_help(path: &mut Vec<String>, into: &mut String) {
    let output = Command::new(FREEFLOW).args(path.iter()).arg("--help").output().unwrap();
    assert!(output.status.success());
    // Where clap leaves blanks at the end of a line, the list does not.
    let text: String = stdout(&output).lines().map(|line| format!("{}\n", line.trim_end())).collect();
    into.push_str(&format!("$ freeflow {}\n{text}\n", [path.as_slice(), &["--help".into()]].concat().join(" ")));
    let commands = text.lines().skip_while(|line| *line != "Commands:").skip(1);
    for line in commands.take_while(|line| line.starts_with("  ")) {
        path.push(line.split_whitespace().next().unwrap().to_string());
        all_help(path, into);
        path.pop();
    }
}

#[test]
fn the_help_is_the_checked_in_list() {
    let mut text = String::new();
    all_help(&mut Vec::new(), &mut text);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help.txt");
    if std::env::var_os("FREEFLOW_UPDATE").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        text == expected,
        "the help differs from tests/help.txt; if that is meant: FREEFLOW_UPDATE=1 cargo test -p freeflow-cli\n{text}"
    );
}

#[test]
fn without_root_one_line_says_what_is_needed_and_why() {
    let scratch = Scratch::new("nobody");
    // The build directory may be closed to others.
    let copy = scratch.0.join("freeflow");
    // Not by this process: a child of another test, between fork and exec, would hold the file open
    // for writing, and what is open so can't be run.
    assert!(Command::new("cp").arg(FREEFLOW).arg(&copy).status().unwrap().success());
    let commands: [&[&str]; 12] = [
        &["up"],
        &["down"],
        &["status"],
        &["run", "--", "true"],
        &["exec", "a", "--", "true"],
        &["stop", "a"],
        &["rm", "a"],
        &["ps"],
        &["network", "ls"],
        &["lab", "up", "--hosts", "2"],
        &["lab", "down"],
        &["lab", "run", "--host", "1", "--", "true"],
    ];
    for arguments in commands {
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]).arg(&copy);
            command
        } else {
            Command::new(&copy)
        };
        let output = command.args(arguments).output().unwrap();
        let text = stderr(&output);
        assert!(!output.status.success(), "{arguments:?}");
        assert_eq!(text.lines().count(), 1, "{arguments:?}: {text}");
        assert!(text.contains("needs root, because") && text.contains("sudo"), "{arguments:?}: {text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn wrong_usage_exits_with_2_and_leaves_stdout_empty() {
    let scratch = Scratch::new("usage");
    for arguments in [
        &["frobnicate"] as &[&str],
        &["run"],
        &["stop"],
        &["up", "--mode", "warp"],
        &["lab", "up"],
        &["lab", "run", "--", "true"],
        &["run", "--ip", "x", "--", "true"],
    ] {
        let output = freeflow(&scratch.0, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn the_version_needs_neither_root_nor_router() {
    let scratch = Scratch::new("version");
    let output = freeflow(&scratch.0, &["version"]);
    assert!(output.status.success());
    assert!(stdout(&output).starts_with(concat!("freeflow ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn doctor_lists_its_checks_as_json() {
    let scratch = Scratch::new("doctor");
    let output = freeflow(&scratch.0, &["doctor", "-o", "json"]);
    let checks: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = checks.as_array().unwrap();
    assert!(checks.len() >= 6);
    let mut missing = false;
    for check in checks {
        assert!(check["name"].is_string() && check["detail"].is_string());
        missing |= check["verdict"] == "missing";
        assert!(check["verdict"] == "ok" || check["remedy"].is_string(), "{check}");
    }
    assert_eq!(output.status.success(), !missing);
}

#[test]
fn without_a_router_the_remedy_is_named() {
    if !is_root() {
        return;
    }
    let scratch = Scratch::new("absent");
    for arguments in [&["status"] as &[&str], &["network", "ls", "-o", "json"], &["ps"]] {
        let output = freeflow(&scratch.0, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let text = stderr(&output);
        assert!(text.contains("no router is running") && text.trim_end().ends_with(" up"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
    let output = freeflow(&scratch.0, &["down"]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn ps_shows_records_as_json_and_settles_the_dead() {
    if !is_root() {
        return;
    }
    let scratch = Scratch::new("ps");
    let containers = scratch.0.join("containers");
    std::fs::create_dir_all(&containers).unwrap();
    let record = r#"{"id":"0123456789ab","name":"gone","network":"default","ip":"10.111.0.2","host":"h",
        "state":"running","exit_code":null,"note":null,"supervisor":{"pid":1,"start_ticks":99999999999},
        "init":{"pid":1,"start_ticks":99999999999},"command_pid":1,"command":["sleep","9"],"environment":[],
        "working_directory":"/","detached":true,"remove":false,"created_s":1,"finished_s":null}"#;
    std::fs::write(containers.join("gone.json"), record).unwrap();
    let output = freeflow(&scratch.0, &["ps", "-o", "json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), Value::Array(Vec::new()));
    let output = freeflow(&scratch.0, &["ps", "-a", "-o", "json"]);
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    let one = &all.as_array().unwrap()[0];
    for key in ["name", "ip", "network", "host", "status"] {
        assert!(one[key].is_string(), "{key}: {one}");
    }
    assert_eq!((one["name"].as_str(), one["status"].as_str()), (Some("gone"), Some("exited")));
    assert!(one["pid"].is_null() && one["exit_code"] == 137 && one["command"][0] == "sleep");
    let output = freeflow(&scratch.0, &["rm", "gone"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!containers.join("gone.json").exists());
}

#[test]
fn a_key_is_made_once_and_only_its_owner_may_read_it() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("key");
    let path = scratch.0.join("host.key");
    let peers_key = || freeflow(&scratch.0, &["peers", "key", path.to_str().unwrap()]);
    let first = peers_key();
    assert!(first.status.success(), "{}", stderr(&first));
    let is_key =
        |text: &str| text.len() == 65 && text.ends_with('\n') && text.trim_end().bytes().all(|c| c.is_ascii_hexdigit());
    let private = std::fs::read_to_string(&path).unwrap();
    assert!(is_key(&stdout(&first)) && is_key(&private) && stdout(&first) != private);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // Again: the same key, and the public one comes from the private one alone.
    assert_eq!(stdout(&peers_key()), stdout(&first));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), private);
    // RFC 7748, section 5.2: the first iteration.
    std::fs::write(&path, format!("09{}", "00".repeat(31))).unwrap();
    assert_eq!(stdout(&peers_key()).trim_end(), "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079");
    for (mode, text, part) in [(0o644, &*private, "others may read"), (0o600, "something", "not a key")] {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let output = peers_key();
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(stderr(&output).contains(part) && stderr(&output).lines().count() == 1, "{}", stderr(&output));
    }
}
