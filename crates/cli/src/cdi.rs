//! The CDI file that makes `--device freeflow.io/net=NETWORK` known to podman, Docker and others.
//!
//! It lies in `/etc/cdi` rather than `/var/run/cdi`, so that after a reboot the container's start fails with a reason
//! and the remedy (from the hook) instead of "unresolvable CDI device". Version 0.5.0 is the newest that podman 4.3
//! reads. The hooks' environment is given, lest a container's own LD_PRELOAD reach them.
//!
//! The device node is a null device under the name that a verbs device has: see `view.rs`.

use crate::failure::{Context, Result};
use crate::run_dir::{RunDir, write_atomically};
use crate::tools;
use crate::view::VERBS_DEVICE;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "/etc/cdi";
/// Where `/etc` can't be written.
const DIRECTORY_OF_RUN: &str = "/var/run/cdi";
const FILE: &str = "freeflow.json";
pub const KIND: &str = "freeflow.io/net";

fn device_node() -> Value {
    json!({"path": format!("/dev/{VERBS_DEVICE}"), "hostPath": "/dev/null", "permissions": "rw"})
}

fn specification(run_dir: &RunDir, program: &Path, networks: &[String]) -> Value {
    let mut environment = vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_string()];
    if let Ok(directory) = std::env::var("FREEFLOW_LIBDIR") {
        environment.push(format!("FREEFLOW_LIBDIR={directory}"));
    }
    let hook = |stage: &str, network: &str| {
        json!({
            "hookName": stage,
            "path": program,
            "args": ["freeflow", "--run-dir", run_dir.path(), "hook", "--network", network, stage],
            "env": environment,
        })
    };
    let devices: Vec<Value> = networks
        .iter()
        .map(|network| {
            json!({
                "name": network,
                "containerEdits": {
                    "deviceNodes": [device_node()],
                    "hooks": [hook("createRuntime", network), hook("poststop", network)],
                },
            })
        })
        .collect();
    json!({"cdiVersion": "0.5.0", "kind": KIND, "devices": devices})
}

/// Writes the file where asked, or for the default run directory where engines look for it. `None`: it was not asked
/// for, or the place can't be written.
pub fn write(run_dir: &RunDir, asked: Option<&Path>, networks: &[String]) -> Result<Option<PathBuf>> {
    let program = tools::own_path()?;
    let text = serde_json::to_vec_pretty(&specification(run_dir, &program, networks)).expect("it is encodable");
    let put = |directory: &Path| -> std::io::Result<PathBuf> {
        fs::create_dir_all(directory)?;
        let path = directory.join(FILE);
        if fs::read(&path).ok().as_ref() != Some(&text) {
            write_atomically(&path, &text, 0o644)?;
        }
        Ok(path)
    };
    if let Some(directory) = asked {
        let directory = std::path::absolute(directory).context(directory.display())?;
        return put(&directory).map(Some).context(format!("can't write {}/{FILE}", directory.display()));
    }
    if !run_dir.is_default() {
        return Ok(None);
    }
    Ok([DIRECTORY, DIRECTORY_OF_RUN].into_iter().find_map(|directory| put(Path::new(directory)).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_the_network_and_gives_hooks_a_clean_environment() {
        let run_dir = RunDir::new(Path::new("/run/freeflow")).unwrap();
        let value = specification(&run_dir, Path::new("/opt/bin/freeflow"), &["default".into()]);
        assert_eq!(value["cdiVersion"], "0.5.0");
        assert_eq!(value["kind"], "freeflow.io/net");
        let edits = &value["devices"][0]["containerEdits"];
        assert_eq!(edits["deviceNodes"][0]["path"], "/dev/infiniband/uverbs0");
        let hooks = edits["hooks"].as_array().unwrap();
        assert_eq!(hooks.len(), 2);
        for hook in hooks {
            assert_eq!(hook["env"][0], "PATH=/usr/sbin:/usr/bin:/sbin:/bin");
            assert_eq!(hook["path"], "/opt/bin/freeflow");
        }
        assert_eq!(hooks[0]["args"][5], "default");
        assert_eq!(hooks[1]["hookName"], "poststop");
    }
}
