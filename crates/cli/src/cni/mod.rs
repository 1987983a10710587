//! `freeflow cni`: a CNI plugin (1.1, 1.0, 0.4 and 0.3.1), which runtimes call `freeflow-cni`.
//!
//! After another plugin it gives the pod's address a vNIC; alone it makes the interface as well, with an address of
//! FreeFlow's. The containers of the pod have no vNIC of their own then: the hook gives each of them the one that its
//! network namespace has, and `DEL` ends it.
//!
//! Invariant: a container is known by its network namespace, which the engine gives it, and by no name.

pub mod attachments;

mod add;
mod answer;
mod call;
mod configuration;
mod sandbox;

use crate::admin::{Admin, Presence};
use crate::failure::EXIT_FAILURE;
use crate::{output, sys};
use answer::{CniError, CniResult, Code, Coded, NEWEST, VERSIONS, Version, refuse};
use attachments::Attachments;
use call::{Call, Command};
use configuration::{Base, Configuration, Valid};
use freeflow_hostnet::run_dir::RunDir;
use serde_json::json;
use std::io::Read;

/// Name by which the program is this command.
pub const PROGRAM: &str = "freeflow-cni";
const CONFIGURATION_BYTES_MAX: u64 = 4 << 20;

/// The exit status; the answer goes to standard output.
pub fn cni(run_dir: &RunDir) -> i32 {
    let read = |name: &str| std::env::var(name).ok();
    let mut text = Vec::new();
    let answer = call::read(read).and_then(|call| {
        text = configuration_text(call.command)?;
        serve(run_dir, &call, &text)
    });
    match answer {
        Ok(answer) => {
            answer.into_iter().for_each(output::line);
            0
        }
        Err(error) => {
            output::line(error.text(configuration::version_of(&text).as_deref()));
            output::complaint(&error);
            i32::from(EXIT_FAILURE)
        }
    }
}

fn configuration_text(command: Command) -> CniResult<Vec<u8>> {
    let mut text = Vec::new();
    let read = std::io::stdin().take(CONFIGURATION_BYTES_MAX + 1).read_to_end(&mut text);
    match read {
        // A runtime may give none.
        Err(_) if command == Command::Version => Ok(Vec::new()),
        Err(error) => Err(CniError::new(Code::Io, format!("the network configuration on standard input: {error}"))),
        Ok(_) if text.len() as u64 > CONFIGURATION_BYTES_MAX => {
            refuse!(
                Code::Configuration,
                "the network configuration is larger than {} MiB",
                CONFIGURATION_BYTES_MAX >> 20
            )
        }
        Ok(_) => Ok(text),
    }
}

/// The answer, of commands that have one.
fn serve(run_dir: &RunDir, call: &Call, text: &[u8]) -> CniResult<Option<String>> {
    if call.command == Command::Version {
        let version = configuration::version_of(text).unwrap_or_else(|| NEWEST.into());
        return Ok(Some(json!({"cniVersion": version, "supportedVersions": VERSIONS}).to_string()));
    }
    let base = Base::read(text)?;
    let since = match call.command {
        Command::Check => Some(("CHECK", Version::V0_4)),
        Command::Gc => Some(("GC", Version::V1_1)),
        Command::Status => Some(("STATUS", Version::V1_1)),
        _ => None,
    };
    since.map_or(Ok(()), |(name, since)| base.check_version(name, since))?;
    if !sys::is_privileged() {
        refuse!(Code::Refused, "this needs the host's root, with CAP_SYS_ADMIN and CAP_NET_ADMIN");
    }
    run_dir.enter_network().coded(Code::Refused)?;
    match call.command {
        Command::Add => add::add(run_dir, call, &Configuration::of(base)?).map(|result| Some(result.to_string())),
        Command::Check => add::check(run_dir, call, &Configuration::of(base)?).map(|()| None),
        Command::Status => status(run_dir, &Configuration::of(base)?).map(|()| None),
        // An attachment can be ended, however wrong the rest of the configuration is by now.
        Command::Del => delete(run_dir, call, &base).map(|()| None),
        Command::Gc => collect(run_dir, &base).map(|()| None),
        Command::Version => unreachable!("it is answered above"),
    }
}

/// The router, where one runs. Where none does the next `freeflow up` ends vNICs that have no attachment.
fn router(run_dir: &RunDir) -> CniResult<Option<Admin>> {
    match Admin::look(run_dir) {
        Presence::Running(admin) => Ok(Some(admin)),
        Presence::Absent => Ok(None),
        Presence::Unusable(failure) => Err(CniError::new(Code::TryAgainLater, failure)),
    }
}

fn delete(run_dir: &RunDir, call: &Call, base: &Base) -> CniResult<()> {
    let attachments = Attachments::of(run_dir);
    if attachments.is_empty() {
        return Ok(());
    }
    let key = add::key_of(call, &base.name);
    let mut admin = router(run_dir)?;
    let _lock = attachments.lock()?;
    Ok(attachments.end_all(admin.as_mut(), |attachment| attachment.key == key)?)
}

/// Ends this configuration's attachments that the runtime does not list, if it lists some, and all whose namespace is
/// gone.
fn collect(run_dir: &RunDir, base: &Base) -> CniResult<()> {
    let valid = base.valid_attachments()?;
    let attachments = Attachments::of(run_dir);
    if attachments.is_empty() {
        return Ok(());
    }
    let mut admin = router(run_dir)?;
    let settled = attachments.settle(admin.as_mut(), |other| other.namespace.state_at(&other.path));
    let _lock = attachments.lock()?;
    let is_stale = |attachment: &attachments::Attachment| {
        let key = &attachment.key;
        let is_it = |one: &Valid| (&one.container, &one.interface) == (&key.container, &key.interface);
        key.configuration == base.name && valid.as_ref().is_some_and(|valid| !valid.iter().any(is_it))
    };
    let ended = attachments.end_all(admin.as_mut(), is_stale);
    let without = admin.as_mut().map_or(Ok(()), |admin| attachments.end_orphans(admin));
    Ok(settled.and(ended).and(without)?)
}

fn status(run_dir: &RunDir, configuration: &Configuration) -> CniResult<()> {
    let mut admin = Admin::connect(run_dir).coded(Code::NotAvailable)?;
    match &configuration.network {
        Some(network) => admin.network(network).map(drop).coded(Code::NotAvailable),
        None => Ok(()),
    }
}
