//! `freeflow lab`: several hosts on one machine, each in a network namespace with its own router and run directory.
//!
//! ```text
//!           namespace fabric                       namespace hostN
//!   bridge fabric -- port1 ... portN  ==veth==  eth0 192.168.240.N, router, bridge of the vNICs, overlay
//! ```
//! Nothing of the machine's own network changes. A host's namespace is held by a mount at `netns`
//! in its run directory, and every command of that run directory acts inside it: `freeflow
//! --run-dir RUN_DIR/labs/LAB/host2 up`, and so on, so a lab's host is a host like any other.
//! [`crate::lab_build`] makes and removes labs; this file is what is done with one.
//!
//! `RUN_DIR/labs/LAB/`: `lab.json`, `fabric/netns`, `hostN/` (a run directory, and `netns`, `peers.json`, `host.key`).

use crate::arguments::{Format, LabAction, LabHost, LabOf};
use crate::exec;
use crate::failure::{Context, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_RUN_FAILED, Failure, Result, fail};
use crate::record::{Records, check_name};
use crate::{lab_build, lifecycle, output, router, run, show};
use freeflow_hostnet::guard;
use freeflow_hostnet::links::{self, Change, Filter};
use freeflow_hostnet::run_dir::RunDir;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const HOST_COUNT_MAX: u32 = 32;
/// MTU of a lab's links, bytes: between the smallest of IPv6 and a common one of jumbo frames.
pub const MTU_BYTES_MIN: u32 = 1280;
pub const MTU_BYTES_MAX: u32 = 9000;
const DEFAULT_NAME: &str = "lab";
const VERSION: u32 = 1;

/// Parameters of a lab.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    pub version: u32,
    pub hosts: u32,
    pub mtu: u32,
}

/// A lab by its directory; it need not be whole.
#[derive(Clone, Debug)]
pub struct Lab {
    pub name: String,
    pub path: PathBuf,
}

impl Lab {
    pub fn new(run_dir: &RunDir, name: &str) -> Result<Self> {
        check_name(name).map_err(|_| Failure::new(format!("{name:?} can't be a lab's name")))?;
        let lab = Self { name: name.to_string(), path: directory(run_dir).join(name) };
        // So that the longest path is refused before anything is made.
        lab.host(HOST_COUNT_MAX)?;
        Ok(lab)
    }

    /// The lab of that name, or the only one there is.
    pub fn pick(run_dir: &RunDir, name: Option<&str>) -> Result<Self> {
        if let Some(name) = name {
            return Self::new(run_dir, name);
        }
        let names = names(run_dir);
        match &names[..] {
            [] => Self::new(run_dir, DEFAULT_NAME),
            [only] => Self::new(run_dir, only),
            _ => Err(Failure::new(format!("there are several labs: {}; say which with --lab", names.join(", ")))),
        }
    }

    /// Of a lab that is there.
    pub fn description(&self) -> Result<Description> {
        let path = self.path.join("lab.json");
        let bytes = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if !self.path.exists() => {
                Failure::new(format!("there is no lab {:?}; make one with: freeflow lab up --hosts 2", self.name))
            }
            _ => Failure::new(format!("{}: {error}; end what is left with: freeflow lab down", path.display())),
        })?;
        let description: Description = serde_json::from_slice(&bytes).context(path.display())?;
        if description.version != VERSION || description.hosts > HOST_COUNT_MAX {
            fail!("{} is of another version of freeflow", path.display());
        }
        Ok(description)
    }

    pub fn host_path(&self, number: u32) -> PathBuf {
        self.path.join(host_name(number))
    }

    /// The run directory of a host, whether it exists or not.
    pub fn host(&self, number: u32) -> Result<RunDir> {
        Ok(RunDir::new(&self.host_path(number))?)
    }

    /// Of a host that is there.
    fn checked_host(&self, number: u32) -> Result<RunDir> {
        let count = self.description()?.hosts;
        if !(1..=count).contains(&number) {
            fail!("--host {number}: the lab {} has the hosts 1 to {count}", self.name);
        }
        self.host(number)
    }

    /// The host that a container runs on: the one that is asked for, or the only one that has a container of that name.
    fn host_of(&self, asked: Option<u32>, container: &str) -> Result<RunDir> {
        if let Some(number) = asked {
            return self.checked_host(number);
        }
        check_name(container)?;
        let mut found = Vec::new();
        for number in 1..=self.description()?.hosts {
            let host = self.host(number)?;
            if Records::of(&host).get(container).is_ok() {
                found.push((number, host));
            }
        }
        match found.len() {
            0 => Err(Failure::new(format!("no container of the lab is called {container:?}; see freeflow lab ps -a"))),
            1 => Ok(found.remove(0).1),
            _ => Err(Failure::new(format!(
                "several hosts have a container {container}: {}; say which with --host",
                found.iter().map(|(number, _)| number.to_string()).collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    pub fn fabric(&self) -> PathBuf {
        self.path.join("fabric").join("netns")
    }
}

/// Where the labs of a run directory are.
pub fn directory(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("labs")
}

/// In order of name.
fn names(run_dir: &RunDir) -> Vec<String> {
    let entries = fs::read_dir(directory(run_dir)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

pub fn description(hosts: u32, mtu: u32) -> Description {
    Description { version: VERSION, hosts, mtu }
}

pub fn host_name(number: u32) -> String {
    format!("host{number}")
}

/// A host's address for the others, in 192.168.240.0/24.
pub fn host_address(number: u32) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 240, u8::try_from(number).expect("a host's number is small"))
}

/// The part of the pool that a host gives out.
pub fn host_range(number: u32) -> String {
    format!("10.111.{number}.0/24")
}

/// The same of fd00:111::/64, for networks that have IPv6 addresses, too.
pub fn host_range6(number: u32) -> String {
    format!("fd00:111::{number:x}00/120")
}

/// The fabric's end of a host's link.
pub fn port(number: u32) -> String {
    format!("port{number}")
}

/// Puts this process into a namespace that a file holds.
pub fn enter(namespace: &Path) -> Result<()> {
    let what = || format!("can't enter the network namespace {}", namespace.display());
    let file = File::open(namespace).context(what())?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).context(what())
}

/// Does what is asked; the exit code.
pub fn lab(run_dir: &RunDir, action: LabAction) -> Result<i32> {
    match action {
        LabAction::Up(up) => lab_build::up(run_dir, &up, up.name.as_deref().unwrap_or(DEFAULT_NAME))?,
        LabAction::Down { of, force } => lab_build::down(run_dir, &Lab::pick(run_dir, of.lab.as_deref())?, force)?,
        LabAction::Status { of, output } => status(&of_name(run_dir, &of)?, output.format)?,
        LabAction::Ps { of, all, output } => containers(&of_name(run_dir, &of)?, all, output.format)?,
        LabAction::Run { at, run } => {
            return entered(run_dir, &at)
                .and_then(|host| run::run(&host, run))
                .map_err(|failure| failure.or_code(EXIT_RUN_FAILED));
        }
        LabAction::Exec { of, host, exec } => {
            return of_name(run_dir, &of)
                .and_then(|lab| exec::exec(&lab.host_of(host, &exec.name)?, exec))
                .map_err(|failure| failure.or_code(EXIT_RUN_FAILED));
        }
        LabAction::Stop { of, host, time, names } => {
            let lab = of_name(run_dir, &of)?;
            each(&lab, host, &names, |host, name| lifecycle::stop(host, &[name], Duration::from_secs(time)))?;
        }
        LabAction::Rm { of, host, force, names } => {
            let lab = of_name(run_dir, &of)?;
            each(&lab, host, &names, |host, name| lifecycle::remove(host, &[name], force))?;
        }
        LabAction::Logs { of, host, follow, name } => {
            lifecycle::logs(&of_name(run_dir, &of)?.host_of(host, &name)?, &name, follow)?;
        }
        LabAction::Cut { at } => set_link(run_dir, &at, "down")?,
        LabAction::Heal { at } => set_link(run_dir, &at, "up")?,
        LabAction::Enter { at, command } => return Err(become_program(run_dir, &at, &command)),
    }
    Ok(0)
}

fn of_name(run_dir: &RunDir, of: &LabOf) -> Result<Lab> {
    Lab::pick(run_dir, of.lab.as_deref())
}

/// The run directory of the host, in whose network namespace this process is now.
fn entered(run_dir: &RunDir, at: &LabHost) -> Result<RunDir> {
    let host = of_name(run_dir, &at.of)?.checked_host(at.host)?;
    host.enter_network()?;
    Ok(host)
}

/// Does something with each container, in its host's network namespace. The first failure is reported at the
/// end.
fn each(lab: &Lab, host: Option<u32>, names: &[String], act: impl Fn(&RunDir, String) -> Result<()>) -> Result<()> {
    let mut first = None;
    for name in names {
        let done = lab.host_of(host, name).and_then(|host| {
            host.enter_network()?;
            act(&host, name.clone())
        });
        if let Err(failure) = done {
            first.get_or_insert(failure);
        }
    }
    first.map_or(Ok(()), Err)
}

fn containers(lab: &Lab, all: bool, format: Format) -> Result<()> {
    let mut containers = Vec::new();
    for number in 1..=lab.description()?.hosts {
        containers.extend(show::list(&lab.host(number)?, all)?);
    }
    show::print(&containers, format);
    Ok(())
}

/// One host in the JSON form of `freeflow lab status`.
#[derive(Serialize)]
struct HostStatus {
    host: u32,
    name: String,
    address: Ipv4Addr,
    range: String,
    run_dir: PathBuf,
    /// The router's process; null when it does not run.
    router_pid: Option<u32>,
    /// `up`, or `down` when it is cut off.
    link: &'static str,
    containers: usize,
    /// Packets of its containers to guarded ports, dropped.
    dropped: u64,
}

/// The JSON form of `freeflow lab status`.
#[derive(Serialize)]
struct LabStatus {
    name: String,
    mtu: u32,
    hosts: Vec<HostStatus>,
}

fn status(lab: &Lab, format: Format) -> Result<()> {
    let description = lab.description()?;
    enter(&lab.fabric())?;
    let links = links::list(Filter::All)?;
    let is_up = |port: &str| links.iter().any(|link| link.name == port && link.is_up);
    let mut hosts = Vec::new();
    for number in 1..=description.hosts {
        let host = lab.host(number)?;
        host.enter_network()?;
        hosts.push(HostStatus {
            host: number,
            name: host_name(number),
            address: host_address(number),
            range: host_range(number),
            router_pid: router::recorded(&host).map(|process| process.pid),
            link: if is_up(&port(number)) { "up" } else { "down" },
            containers: Records::of(&host).list().iter().filter(|record| record.is_live()).count(),
            dropped: links::list(Filter::PortsOf(&host.bridge()))
                .unwrap_or_default()
                .iter()
                .map(|port| guard::dropped(&port.name))
                .sum(),
            run_dir: host.path().to_path_buf(),
        });
    }
    let status = LabStatus { name: lab.name.clone(), mtu: description.mtu, hosts };
    if format == Format::Json {
        output::json(&status);
        return Ok(());
    }
    output::line(format!("Lab {}: {} hosts, MTU {}", status.name, status.hosts.len(), status.mtu));
    let headings = ["HOST", "ADDRESS", "RANGE", "ROUTER", "LINK", "CONTAINERS", "DROPPED", "RUN DIRECTORY"];
    let mut rows = vec![headings.map(String::from).to_vec()];
    rows.extend(status.hosts.iter().map(|host| {
        vec![
            host.name.clone(),
            host.address.to_string(),
            host.range.clone(),
            host.router_pid.map_or("down".to_string(), |pid| pid.to_string()),
            host.link.to_string(),
            host.containers.to_string(),
            host.dropped.to_string(),
            host.run_dir.display().to_string(),
        ]
    }));
    output::table(&rows);
    Ok(())
}

/// Takes a host's link to the others down or up.
fn set_link(run_dir: &RunDir, at: &LabHost, state: &str) -> Result<()> {
    let lab = of_name(run_dir, &at.of)?;
    lab.checked_host(at.host)?;
    enter(&lab.fabric())?;
    links::change(&port(at.host), Change { is_up: Some(state == "up"), ..Change::default() })?;
    output::line(format!("The link of {} is {state}.", host_name(at.host)));
    Ok(())
}

/// Becomes a program in a host's network; comes back only with the reason why not.
fn become_program(run_dir: &RunDir, at: &LabHost, command: &[String]) -> Failure {
    if let Err(failure) = entered(run_dir, at) {
        return failure.or_code(EXIT_RUN_FAILED);
    }
    let error = std::process::Command::new(&command[0]).args(&command[1..]).exec();
    let code = if error.kind() == io::ErrorKind::NotFound { EXIT_NOT_FOUND } else { EXIT_NOT_EXECUTABLE };
    Failure::new(format!("can't run {}: {error}", command[0])).with_code(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_lab_is_meant_without_a_name() {
        let path = std::env::temp_dir().join(format!("freeflow-labs-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = fs::remove_dir_all(&path);
        let run_dir = RunDir::new(&path).unwrap();
        assert_eq!(Lab::pick(&run_dir, None).unwrap().name, DEFAULT_NAME);
        fs::create_dir_all(directory(&run_dir).join("one")).unwrap();
        assert_eq!(Lab::pick(&run_dir, None).unwrap().name, "one");
        fs::create_dir_all(directory(&run_dir).join("two")).unwrap();
        assert!(Lab::pick(&run_dir, None).unwrap_err().to_string().contains("one, two"));
        assert_eq!(Lab::pick(&run_dir, Some("two")).unwrap().name, "two");
        assert!(Lab::pick(&run_dir, Some("../x")).is_err());
        assert!(Lab::pick(&run_dir, Some("two")).unwrap().description().is_err());
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn hosts_have_addresses_and_ranges_of_their_own() {
        assert_eq!(host_address(HOST_COUNT_MAX).to_string(), "192.168.240.32");
        assert_eq!((host_range(2), host_range6(12)), ("10.111.2.0/24".into(), "fd00:111::c00/120".into()));
        assert_eq!((host_name(2), port(2)), ("host2".into(), "port2".into()));
    }
}
