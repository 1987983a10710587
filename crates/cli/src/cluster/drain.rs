//! `freeflow host drain` and `undrain`: a host that starts no containers with the cluster's vNICs.
use super::{file, remove};
use crate::arguments_control::HostAction;
use crate::failure::Result;
use crate::output;
use freeflow_cluster::{Drained, Operator};
use freeflow_hostnet::run_dir::RunDir;
use std::fs;

/// The operator, as the machine calls the user of this command.
fn operator() -> String {
    let named = ["SUDO_USER", "USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    let user = named.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{user}@{}", machine.trim())
}

/// For who wants to start a container there.
pub fn why_drained(host: &str, drained: &Drained) -> String {
    format!(
        "the host {host} was drained by {}: it starts no containers with the cluster's vNICs (freeflow host undrain {host})",
        drained.by
    )
}

/// The command.
pub fn host(run_dir: &RunDir, action: HostAction) -> Result<()> {
    match action {
        HostAction::Drain { host, stop, of } => {
            Operator::open(&file(run_dir, &of)?)?.drain(&host, Some(&Drained::new(&operator(), stop)))?;
            let rest = if stop { "those of freeflow run that have some are stopped" } else { "those that run go on" };
            output::line(format!("Host {host} starts no more containers with the cluster's vNICs; {rest}."));
            Ok(())
        }
        HostAction::Undrain { host, of } => {
            Operator::open(&file(run_dir, &of)?)?.drain(&host, None)?;
            output::line(format!("Host {host} starts containers with the cluster's vNICs."));
            Ok(())
        }
        HostAction::Remove { host, of } => remove(&file(run_dir, &of)?, &host),
    }
}
