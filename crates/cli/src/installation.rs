//! `freeflow down --all`: all hosts and labs of one installation, which are the machine's that its router runs.
//!
//! Not here: how a host is taken down (`up`), or a lab (`lab_build`).

use crate::failure::{Context, Failure, Result};
use crate::lab::{self, Lab};
use crate::process::Process;
use crate::{lab_build, output, router, tools, up};
use freeflow_hostnet::run_dir::{RunDir, registered};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Ends the path of a program whose file was replaced or removed, in /proc.
const DELETED: &str = " (deleted)";

/// Goes on after a failure and reports the first.
pub fn down(run_dir: &RunDir, force: bool) -> Result<()> {
    let own = Programs { command: tools::own_path()?, router: fs::canonicalize(tools::router()?).context("router")? };
    let (mut hosts, mut labs) = (BTreeSet::new(), BTreeSet::new());
    for path in registered().into_iter().chain([run_dir.path().to_owned()]) {
        let Some(host) = RunDir::new(&path).ok().filter(|host| host.path().is_dir()) else { continue };
        if !own.have(&host) {
            continue;
        }
        match lab_of(&host) {
            Some(lab) => labs.insert(lab),
            None => hosts.insert(host.path().to_owned()),
        };
    }
    if hosts.is_empty() && labs.is_empty() {
        output::line("Nothing of this installation is up.");
    }
    let of_labs = labs.into_iter().map(|(base, name)| {
        let base = RunDir::new(&base)?;
        lab_build::down(&base, &Lab::new(&base, &name)?, force)
    });
    let of_hosts = hosts.into_iter().map(|path| up::down(&RunDir::new(&path)?, force));
    let failures: Vec<Failure> = of_labs.chain(of_hosts).filter_map(Result::err).collect();
    failures.into_iter().next().map_or(Ok(()), Err)
}

/// Files of an installation.
struct Programs {
    command: PathBuf,
    router: PathBuf,
}

impl Programs {
    /// Whether a host is this installation's: by its router, and by its settings if none runs.
    fn have(&self, host: &RunDir) -> bool {
        match router::recorded(host) {
            Some(process) => runs(process, &self.router),
            None => host.settings().is_some_and(|settings| settings.program.as_ref() == Some(&self.command)),
        }
    }
}

/// Whether a process runs this program of this file system: one of the same path in a container's is another.
fn runs(process: Process, program: &Path) -> bool {
    let Ok(path) = fs::read_link(format!("/proc/{}/exe", process.pid)) else { return false };
    let Some(path) = path.to_str().map(|path| path.trim_end_matches(DELETED)) else { return false };
    let root = |pid: &str| fs::metadata(format!("/proc/{pid}/root/")).map(|root| (root.dev(), root.ino())).ok();
    Path::new(path) == program && root(&process.pid.to_string()).is_some_and(|one| Some(one) == root("self"))
}

/// The run directory that a host's lab lies in, and the lab's name.
fn lab_of(host: &RunDir) -> Option<(PathBuf, String)> {
    let lab = host.path().parent().filter(|_| host.network_namespace().exists())?;
    let base = RunDir::new(lab.parent()?.parent()?).ok()?;
    let is_lab = lab.parent() == Some(&lab::directory(&base));
    is_lab.then(|| Some((base.path().to_owned(), lab.file_name()?.to_str()?.to_owned())))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_program() {
        let own = tools::own_path().unwrap();
        assert!(runs(Process::current(), &own));
        assert!(!runs(Process::current(), Path::new("/usr/lib/freeflow/freeflow-router")));
    }

    #[test]
    fn a_host_without_a_router_is_known_by_its_settings() {
        let path = std::env::temp_dir().join(format!("freeflow-settings-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let host = RunDir::new(&path).unwrap();
        let own = Programs { command: "/opt/bin/freeflow".into(), router: "/opt/lib/freeflow/freeflow-router".into() };
        assert!(!own.have(&host));
        for (program, is_own) in [(r#""/opt/bin/freeflow""#, true), (r#""/usr/bin/freeflow""#, false), ("null", false)]
        {
            let text = r#"{"mode": "adaptive", "pool": "10.111.0.0/16", "host": "h", "cdi_file": null, "program": P}"#;
            fs::write(path.join("up.json"), text.replace('P', program)).unwrap();
            assert_eq!(own.have(&host), is_own, "{program}");
        }
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn hosts_of_labs_are_known_by_their_place() {
        let base = std::env::temp_dir().join(format!("freeflow-installation-{}", std::process::id()));
        let host = base.join("labs/trial/host1");
        fs::create_dir_all(&host).unwrap();
        let of = |path: &Path| lab_of(&RunDir::new(path).unwrap());
        assert_eq!(of(&host), None);
        fs::write(host.join("netns"), "").unwrap();
        let base = fs::canonicalize(&base).unwrap();
        assert_eq!(of(&host), Some((base.clone(), "trial".into())));
        assert_eq!(of(&base), None);
        fs::remove_dir_all(&base).unwrap();
    }
}
