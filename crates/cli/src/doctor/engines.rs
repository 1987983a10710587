//! Whether this machine's container engines know CDI devices; and, in a container, whether it has a vNIC.

use super::Check;
use crate::container_owner::has_host_users;
use freeflow_hostnet::cdi;
use freeflow_hostnet::programs::find_in;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

const DIRECTORIES: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/usr/sbin", "/usr/local/sbin"];
const DOCKER_SETTINGS: &str = "/etc/docker/daemon.json";
const CONTAINERD_SETTINGS: &str = "/etc/containerd/config.toml";
/// Files by which engines mark a container.
const MARKS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];
const VNIC_SOCKET: &str = "/run/freeflow/router.sock";
const PAGE: &str = "docs/ENGINES.md";

type Version = (u32, u32);

/// Those that are installed.
pub fn installed() -> Vec<Check> {
    [
        ("dockerd", docker as fn(Version, &str) -> Check, DOCKER_SETTINGS),
        ("containerd", containerd, CONTAINERD_SETTINGS),
    ]
    .into_iter()
    .filter_map(|(program, check, settings)| {
        Some(check(version_of(program)?, &std::fs::read_to_string(settings).unwrap_or_default()))
    })
    .chain(version_of("podman").map(|version| podman(version, has_root())))
    .collect()
}

/// An engine that is started by this user works with the host's root.
fn has_root() -> bool {
    rustix::process::geteuid().is_root() && has_host_users()
}

fn podman(version: Version, has_root: bool) -> Check {
    const NAME: &str = "podman";
    let text = format!("podman {}.{}", version.0, version.1);
    if !has_root {
        let detail = format!("{text} is rootless for this user: a vNIC's interface and mounts need the host's root");
        return Check::note(NAME, detail, format!("sudo podman run --device {}=default, see {PAGE}", cdi::KIND));
    }
    if version < (4, 1) {
        let remedy = format!("podman 4.1 or newer, or --runtime freeflow-runtime, see {PAGE}");
        return Check::note(NAME, format!("{text} knows no CDI devices"), remedy);
    }
    Check::ok(NAME, format!("{text}: podman run --device {}=default", cdi::KIND))
}

fn version_of(program: &str) -> Option<Version> {
    let path = find_in(program, &DIRECTORIES)?;
    let output = Command::new(path).arg("--version").stdin(Stdio::null()).output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// The first word that begins like a version: `20.10.24+dfsg1,` or `v1.7.24`.
fn parse_version(text: &str) -> Option<Version> {
    text.split_whitespace().find_map(|word| {
        let mut parts = word.strip_prefix('v').unwrap_or(word).split('.');
        let major = parts.next()?.parse().ok()?;
        let minor: String = parts.next()?.chars().take_while(char::is_ascii_digit).collect();
        Some((major, minor.parse().ok()?))
    })
}

fn docker(version: Version, settings: &str) -> Check {
    const NAME: &str = "docker";
    let text = format!("Docker {}.{}", version.0, version.1);
    let is_on = serde_json::from_str::<Value>(settings).is_ok_and(|settings| settings["features"]["cdi"] == true);
    if version < (25, 0) {
        let detail = format!("{text} knows no CDI devices: containers need the runtime freeflow-runtime");
        return Check::note(NAME, detail, format!("name it in {DOCKER_SETTINGS}, see {PAGE}"));
    }
    if version < (28, 2) && !is_on {
        let remedy = format!("{{\"features\": {{\"cdi\": true}}}} in {DOCKER_SETTINGS}");
        return Check::note(NAME, format!("{text} knows CDI devices once that is switched on"), remedy);
    }
    Check::ok(NAME, format!("{text}: docker run --device {}=default", cdi::KIND))
}

fn containerd(version: Version, settings: &str) -> Check {
    const NAME: &str = "containerd";
    let text = format!("containerd {}.{}", version.0, version.1);
    let is_on = settings.lines().any(|line| line.split_whitespace().collect::<String>() == "enable_cdi=true");
    if version < (1, 7) {
        let detail = format!("{text} ignores Kubernetes' CDI devices: such a container starts without its vNIC");
        return Check::note(NAME, detail, format!("a runtime with BinaryName freeflow-runtime, see {PAGE}"));
    }
    if version.0 == 1 && !is_on {
        let remedy = format!("enable_cdi = true in {CONTAINERD_SETTINGS}, see {PAGE}");
        return Check::note(NAME, format!("{text} ignores Kubernetes' CDI devices until they are switched on"), remedy);
    }
    Check::ok(NAME, format!("{text} knows CDI devices"))
}

/// In a container, whether it has a vNIC.
pub fn inside() -> Option<Check> {
    const NAME: &str = "vNIC";
    if !MARKS.iter().any(|mark| Path::new(mark).exists()) {
        return None;
    }
    let node = format!("/dev/{}0", cdi::VERBS_DEVICE);
    Some(match (Path::new(VNIC_SOCKET).exists(), Path::new(&node).exists()) {
        (true, _) => Check::ok(NAME, format!("this container has one, by {VNIC_SOCKET}")),
        (false, true) => {
            Check::missing(NAME, format!("{node} is there and {VNIC_SOCKET} is not"), "start the container again")
        }
        (false, false) => Check::note(
            NAME,
            "this container has none: it was started without the device, or its engine ignores CDI devices",
            format!("--device {}=default, or another runtime: see {PAGE}", cdi::KIND),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn versions_are_found_in_what_engines_print() {
        for (text, version) in [
            ("Docker version 20.10.24+dfsg1, build 297e128", (20, 10)),
            ("Docker version 26.1.5+dfsg1, build a72d7cd", (26, 1)),
            ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", (1, 6)),
            ("containerd github.com/containerd/containerd/v2 v2.0.0 207ad71", (2, 0)),
        ] {
            assert_eq!(parse_version(text), Some(version), "{text}");
        }
        assert_eq!(parse_version("no version here, 7"), None);
    }

    #[test]
    fn engines_that_leave_a_vnic_out_are_noted() {
        for (version, has_root, verdict) in
            [((4, 3), true, Verdict::Ok), ((4, 3), false, Verdict::Note), ((3, 4), true, Verdict::Note)]
        {
            assert_eq!(podman(version, has_root).verdict, verdict, "{version:?} {has_root}");
        }
        let on = r#"{"features": {"cdi": true}}"#;
        for (version, settings, verdict) in [
            ((20, 10), on, Verdict::Note),
            ((26, 1), "", Verdict::Note),
            ((26, 1), on, Verdict::Ok),
            ((28, 2), "{", Verdict::Ok),
        ] {
            assert_eq!(docker(version, settings).verdict, verdict, "{version:?} {settings}");
        }
        let on = "[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true\n";
        for (version, settings, verdict) in [
            ((1, 6), on, Verdict::Note),
            ((1, 7), "# enable_cdi = true", Verdict::Note),
            ((1, 7), on, Verdict::Ok),
            ((2, 0), "", Verdict::Ok),
        ] {
            assert_eq!(containerd(version, settings).verdict, verdict, "{version:?} {settings}");
        }
    }
}
