//! `freeflow up` and `freeflow down`.

use crate::admin::{Admin, Presence};
use crate::arguments::Up;
use crate::failure::{Context, Failure, Result};
use crate::process::Process;
use crate::record::{Record, Records};
use crate::run_dir::{RunDir, Settings};
use crate::{cdi, hook, ip, lifecycle, output, router, tools};
use freeflow_protocol::admin::{NetworkStatus, RouterStatus, VnicStatus};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

const DEFAULT_MODE: &str = "adaptive";
/// Pools tried when none is asked for: 10.111.0.0/16 and those after it.
const POOL_FIRST: u8 = 111;
const POOL_LAST: u8 = 126;
/// What containers get between SIGTERM and SIGKILL when the host goes down.
const STOP_TIME: Duration = Duration::from_secs(3);

pub fn up(run_dir: &RunDir, arguments: &Up) -> Result<()> {
    check_programs()?;
    run_dir.create()?;
    // Now that it exists, its symbolic links can be resolved.
    let run_dir = &RunDir::new(run_dir.path())?;
    let _lock = run_dir.lock()?;
    let mut settings = wanted(run_dir, arguments)?;
    let (mut admin, was_running) = match Admin::look(run_dir) {
        Presence::Running(mut admin) => {
            check_unchanged(run_dir, &mut admin, arguments)?;
            (admin, true)
        }
        Presence::Absent => {
            run_dir.store_settings(&settings)?;
            router::start(run_dir, &settings)?;
            (Admin::connect(run_dir)?, false)
        }
        Presence::Unusable(failure) => {
            return Err(Failure::new(format!("{failure}; or end it with: freeflow{} down --force", run_dir.option())));
        }
    };
    run_dir.register()?;
    let networks = admin.networks()?;
    for network in &networks {
        let bridge = bridge_of(run_dir, network);
        ip::make_bridge(&bridge, network.gateway, network.prefix_length)?;
        ip::accept_bridged(&bridge, true);
    }
    let lost = reconcile(run_dir, &mut admin, &networks)?;
    let names: Vec<String> = networks.iter().map(|network| network.name.clone()).collect();
    settings.cdi_file = cdi::write(run_dir, arguments.cdi_dir.as_deref(), &names)?.or(settings.cdi_file);
    run_dir.store_settings(&settings)?;
    let status = admin.status()?;
    greet(run_dir, &status, &networks, &settings, was_running);
    for name in lost {
        output::line(format!("Warning: container {name} lost its vNIC with the router's state; start it again."));
    }
    Ok(())
}

fn check_programs() -> Result<()> {
    tools::router()?;
    if ip::program().is_none() {
        crate::fail!("the program ip is missing; install it, for example: apt-get install iproute2");
    }
    Ok(())
}

/// What to start with: what is asked for, else what the last `up` had, else what suits this machine.
fn wanted(run_dir: &RunDir, arguments: &Up) -> Result<Settings> {
    let before = run_dir.settings();
    let asked_pool = match &arguments.pool {
        Some(text) => {
            if ip::parse_cidr(text).is_none_or(|(_, prefix_length)| !(8..=29).contains(&prefix_length)) {
                crate::fail!("--pool {text:?}: write an IPv4 range such as 10.111.0.0/16, of /8 to /29");
            }
            Some(text.clone())
        }
        None => None,
    };
    let pool = match asked_pool.or_else(|| before.as_ref().map(|before| before.pool.clone())) {
        Some(pool) => pool,
        None => free_pool(&run_dir.bridge())?,
    };
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mode = arguments.mode.map(|mode| mode.as_str().to_string());
    Ok(Settings {
        mode: mode.or_else(|| before.as_ref().map(|before| before.mode.clone())).unwrap_or(DEFAULT_MODE.into()),
        pool,
        host: arguments.host.clone().or_else(|| before.as_ref().map(|before| before.host.clone())).unwrap_or(machine),
        cdi_file: before.and_then(|before| before.cdi_file),
    })
}

/// The first pool that nothing in this network namespace uses.
fn free_pool(bridge: &str) -> Result<String> {
    let routes = ip::routes(bridge)?;
    (POOL_FIRST..=POOL_LAST)
        .map(|number| format!("10.{number}.0.0/16"))
        .find(|pool| {
            let range = ip::parse_cidr(pool).expect("a range as we write it");
            !routes.iter().any(|&route| ip::overlap(route, range))
        })
        .ok_or_else(|| Failure::new("the ranges 10.111.0.0/16 to 10.126.0.0/16 are all in use; choose one with --pool"))
}

/// A running router keeps its settings; asking for others is refused rather than ignored.
fn check_unchanged(run_dir: &RunDir, admin: &mut Admin, arguments: &Up) -> Result<()> {
    let status = admin.status()?;
    let pool = admin.network("default")?.pool;
    let mode = arguments.mode.map(|mode| mode.as_str());
    let same_pool = |asked: &str| {
        ip::parse_cidr(asked)
            .zip(ip::parse_cidr(&pool))
            .is_some_and(|(one, other)| one.1 == other.1 && ip::overlap(one, other))
    };
    let difference = if mode.is_some_and(|mode| mode != status.mode) {
        format!("mode {}", status.mode)
    } else if arguments.host.as_ref().is_some_and(|host| *host != status.host) {
        format!("host name {}", status.host)
    } else if arguments.pool.as_ref().is_some_and(|asked| !same_pool(asked)) {
        format!("pool {pool}")
    } else {
        return Ok(());
    };
    Err(Failure::new(format!(
        "the host is up with {difference}; to change that, first: freeflow{} down",
        run_dir.option()
    )))
}

fn bridge_of(run_dir: &RunDir, network: &NetworkStatus) -> String {
    if network.bridge.is_empty() { run_dir.bridge() } else { network.bridge.clone() }
}

/// Brings vNICs, interfaces and records into line with the containers that live. Names the containers whose vNIC the
/// router does not know any more.
fn reconcile(run_dir: &RunDir, admin: &mut Admin, networks: &[NetworkStatus]) -> Result<Vec<String>> {
    let records = Records::of(run_dir);
    records.reconcile(Some(admin))?;
    let vnics = admin.vnics()?;
    let live: Vec<Record> = records.list().into_iter().filter(Record::is_live).collect();
    let mut kept = BTreeSet::new();
    for vnic in &vnics {
        if is_wanted(vnic, &live) {
            kept.insert(ip::host_interface(&vnic.id));
        } else {
            ip::unplug(&vnic.id);
            admin.detach(&vnic.id)?;
        }
    }
    for network in networks {
        let bridge = bridge_of(run_dir, network);
        let ports: BTreeSet<String> = ip::ports(&bridge).into_iter().collect();
        for stale in ports.iter().filter(|name| ip::is_host_interface(name) && !kept.contains(*name)) {
            // It may go by itself, with its namespace.
            let _ = ip::run(&["link", "delete", "dev", stale]);
        }
        for vnic in vnics.iter().filter(|vnic| vnic.network == network.name) {
            let name = ip::host_interface(&vnic.id);
            // The bridge was deleted and made again.
            if kept.contains(&name) && !ports.contains(&name) && ip::exists(&name) {
                ip::run(&["link", "set", "dev", &name, "master", &bridge, "up"])?;
            }
        }
    }
    let known: BTreeSet<&str> = vnics.iter().map(|vnic| vnic.id.as_str()).collect();
    Ok(live.into_iter().filter(|record| !known.contains(record.id.as_str())).map(|record| record.name).collect())
}

fn is_wanted(vnic: &VnicStatus, live: &[Record]) -> bool {
    let engine = vnic.labels.iter().find(|(key, _)| key == "engine").map(|(_, value)| value.as_str());
    match engine {
        Some("freeflow") => live.iter().any(|record| record.id == vnic.id),
        Some("oci") => hook::process_of(vnic).is_none_or(|process| process.is_alive()),
        // Attached by somebody we don't know; not ours to end.
        _ => true,
    }
}

fn greet(run_dir: &RunDir, status: &RouterStatus, networks: &[NetworkStatus], settings: &Settings, was_running: bool) {
    let option = run_dir.option();
    let again = if was_running { " already" } else { "" };
    output::line(format!("FreeFlow {} is up{again} on host {}.", status.version, status.host));
    output::line(format!(
        "  router     process {}, mode {}, log {}",
        status.pid,
        status.mode,
        run_dir.router_log().display()
    ));
    output::line(format!("  socket     {}", run_dir.admin_socket().display()));
    for network in networks {
        output::line(format!(
            "  network    {}: {}, gateway {} on bridge {}",
            network.name,
            network.pool,
            network.gateway,
            bridge_of(run_dir, network)
        ));
    }
    output::line("  device     freeflow0 in every container: RoCE v2, 100 Gb/s, no RDMA hardware needed");
    output::line("  data path  routed-local: between containers of this host, copied once by the router");
    match &settings.cdi_file {
        Some(path) => output::line(format!("  podman     --device {}=default ({})", cdi::KIND, path.display())),
        None => {
            output::line("  podman     no CDI file (another run directory than the default has one with --cdi-dir)")
        }
    }
    if let Err(failure) = tools::library() {
        output::line(format!("  missing    {failure}"));
    }
    output::line("");
    output::line(format!("Next: freeflow{option} run -- ibv_devinfo"));
}

pub fn down(run_dir: &RunDir, force: bool) -> Result<()> {
    if !run_dir.path().exists() {
        output::line(format!("Nothing is up in {}.", run_dir.path().display()));
        return Ok(());
    }
    let _lock = run_dir.lock()?;
    let presence = Admin::look(run_dir);
    let (mut admin, unusable) = match presence {
        Presence::Running(admin) => (Some(admin), None),
        Presence::Absent => (None, None),
        Presence::Unusable(failure) => (None, Some(failure)),
    };
    if let Some(failure) = unusable
        && !force
    {
        return Err(Failure::new(format!("{failure}; or use: freeflow{} down --force", run_dir.option())));
    }
    let records = Records::of(run_dir);
    let live: Vec<Record> = records.list().into_iter().filter(Record::is_live).collect();
    let vnics = match &mut admin {
        Some(admin) => admin.vnics()?,
        None => Vec::new(),
    };
    let foreign: Vec<String> = vnics
        .iter()
        .filter(|vnic| hook::process_of(vnic).is_some_and(|process| process.is_alive()))
        .map(|vnic| vnic.name.clone())
        .collect();
    let names: Vec<String> = live.iter().map(|record| record.name.clone()).chain(foreign.iter().cloned()).collect();
    if !names.is_empty() && !force && !confirmed(&names)? {
        crate::fail!(
            "running: {}; end them first (freeflow{option} stop NAME), or use: freeflow{option} down --force",
            names.join(", "),
            option = run_dir.option()
        );
    }
    for record in &live {
        lifecycle::end(run_dir, record, Some(STOP_TIME))?;
    }
    for vnic in &vnics {
        ip::unplug(&vnic.id);
    }
    let process = router::recorded(run_dir).or_else(|| Process::of(admin.as_ref()?.pid));
    match admin {
        Some(admin) => admin.shutdown()?,
        None => router::kill(run_dir)?,
    }
    if let Some(process) = process {
        router::wait_end(process, false)?;
    }
    clean(run_dir, &records)?;
    output::line(format!("FreeFlow is down in {}.", run_dir.path().display()));
    for name in foreign {
        output::line(format!("Container {name} of another engine runs on without its vNIC."));
    }
    Ok(())
}

fn confirmed(names: &[String]) -> Result<bool> {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(false);
    }
    eprint!("End {} running containers ({})? [y/N] ", names.len(), names.join(", "));
    std::io::stderr().flush().context("terminal")?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).context("terminal")?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Removes what a router and its host leave, except logs and the records of ended containers.
fn clean(run_dir: &RunDir, records: &Records) -> Result<()> {
    records.reconcile(None)?;
    let bridge = run_dir.bridge();
    ip::accept_bridged(&bridge, false);
    ip::delete_bridge(&bridge)?;
    if let Some(file) = run_dir.settings().and_then(|settings| settings.cdi_file) {
        let _ = fs::remove_file(file);
    }
    run_dir.unregister();
    let gone: [PathBuf; 4] = [
        run_dir.admin_socket(),
        run_dir.router_pid(),
        run_dir.path().join("state.json"),
        run_dir.path().join("up.json"),
    ];
    for path in gone {
        let _ = fs::remove_file(path);
    }
    let _ = fs::remove_dir_all(run_dir.path().join("vnics"));
    Ok(())
}
