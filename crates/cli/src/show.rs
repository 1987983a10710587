//! `freeflow status`, `ps`, `network ls` and `version`.

use crate::admin::{Admin, Presence};
use crate::arguments::Format;
use crate::cluster;
use crate::cm;
use crate::cni::attachments::{Attachment, Attachments, ENGINE as CNI};
use crate::container_names;
use crate::failure::Result;
use crate::holders::Holders;
use crate::output;
use crate::peers;
use crate::record::{OtherVnic, Record, Records, State, now_s};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::{NetworkStatus, RouterStatus, VnicStatus};
use serde::Serialize;
use std::net::{IpAddr, Ipv6Addr};

/// The JSON form of `freeflow status`: the router's own fields, and lists of networks and vNICs.
#[derive(Serialize)]
struct Status {
    #[serde(flatten)]
    router: RouterStatus,
    networks: Vec<NetworkStatus>,
    vnics: Vec<VnicStatus>,
}

/// Before it stands which worker copies for a vNIC, where there are several.
const STATE_COLUMN: usize = 8;

pub fn status(run_dir: &RunDir, format: Format) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    let mut vnics = admin.vnics()?;
    let status = Status { router: admin.status()?, networks: admin.networks()?, vnics: vnics.clone() };
    if format == Format::Json {
        output::json(&status);
        return Ok(());
    }
    let router = &status.router;
    let asleep = if router.sleeping { ", asleep" } else { "" };
    output::line(format!(
        "Host {}: router {} up {} (process {}, mode {}{}{asleep})",
        router.host,
        router.version,
        output::duration(router.uptime_s),
        router.pid,
        mode_text(router),
        describe_workers(router)
    ));
    for network in &status.networks {
        output::line(format!(
            "Network {}: {} on bridge {}, {} vNICs, data path {}",
            network.name,
            network.pool,
            network.bridge,
            network.vnic_count,
            network.data_path.name()
        ));
    }
    if let Some(path) = run_dir.settings().and_then(|settings| settings.cluster) {
        let problems = cluster::problems(run_dir);
        let (option, log) = (run_dir.option(), cluster::log_file(run_dir));
        let follows = match &problems {
            Some(_) => format!("followed, see freeflow{option} cluster status and {}", log.display()),
            None => format!("not followed, the process has ended: freeflow{option} up"),
        };
        output::line(format!("Cluster {}: {follows}", path.display()));
        problems.iter().flatten().for_each(output::line);
    }
    if router.peer_count > 0 {
        let peers = admin.peers()?.peers;
        // One setting holds for all of them.
        let wire = if peers.iter().any(|peer| peer.sealed) { "sealed" } else { "plain" };
        let (connected, count) = (router.connected_peer_count, router.peer_count);
        output::line(format!("Other hosts: {connected} of {count} connected, packets {wire}"));
        peers.iter().filter_map(peers::problem).for_each(output::line);
    }
    objects(router);
    let counters = &router.counters;
    output::line(format!(
        "Carried: {} messages, {}; of these past the router: {}, {}; copied through the slow path: {}; failed completions: {}",
        counters.messages,
        output::bytes(counters.bytes),
        counters.direct_messages,
        output::bytes(counters.direct_bytes),
        output::bytes(counters.slow_path_bytes),
        counters.completions_with_error
    ));
    if router.worker_count > 1 {
        output::line(format!("Copied by {} workers: {}", router.worker_count, output::bytes(router.moved_bytes)));
    }
    vnics.sort_by(|one, other| one.name.cmp(&other.name));
    vnic_table(&vnics, (router.worker_count > 1, router.shard_count > 1));
    Ok(())
}

/// The requested mode, and the one in force where it differs.
pub fn mode_text(router: &RouterStatus) -> String {
    if router.mode == router.mode_in_force {
        router.mode.clone()
    } else {
        format!("{} ({}: {})", router.mode, router.mode_in_force, router.mode_reason)
    }
}

fn vnic_table(vnics: &[VnicStatus], (has_workers, has_shards): (bool, bool)) {
    let mut rows = vec![
        ["VNIC", "IP", "NETWORK", "QPS", "MRS", "MESSAGES", "BYTES", "DIRECT", "STATE"].map(String::from).to_vec(),
    ];
    let own = |worker: String, shard: String| {
        let columns = [(has_workers, worker), (has_shards, shard)];
        columns.into_iter().filter_map(|(is_shown, text)| is_shown.then_some(text)).collect::<Vec<_>>()
    };
    rows[0].splice(STATE_COLUMN..STATE_COLUMN, own("WORKER".into(), "SHARD".into()));
    rows.extend(vnics.iter().map(|vnic| {
        let mut row = vec![
            vnic.name.clone(),
            addresses(vnic.address, vnic.address6),
            vnic.network.clone(),
            vnic.qp_count.to_string(),
            vnic.mr_count.to_string(),
            vnic.counters.messages.to_string(),
            output::bytes(vnic.counters.bytes),
            output::bytes(vnic.counters.direct_bytes),
            vnic.failed.as_ref().map_or("ok".to_string(), |reason| format!("failed: {reason}")),
        ];
        row.splice(STATE_COLUMN..STATE_COLUMN, own(vnic.worker.to_string(), vnic.shard.to_string()));
        row
    }));
    if rows.len() > 1 {
        output::line("");
        output::table(&rows);
    }
}

/// As in the columns of `freeflow get`: with a comma.
fn addresses(address: IpAddr, address6: Option<Ipv6Addr>) -> String {
    address6.map_or(address.to_string(), |address6| format!("{address},{address6}"))
}

fn objects(router: &RouterStatus) {
    output::line(format!(
        "Objects: {} sessions, {} QPs, {} CQs, {} MRs over {}",
        router.session_count,
        router.qp_count,
        router.cq_count,
        router.mr_count,
        output::bytes(router.registered_bytes)
    ));
    output::line(format!(
        "Direct: {} QPs send messages past the router, {} reach granted memory",
        router.direct_ring_qp_count, router.grant_qp_count
    ));
    output::line(cm::summary(&router.cm));
}

/// One container in the JSON form of `freeflow ps`, with one of its vNICs.
#[derive(Clone, Serialize)]
pub struct Container {
    name: String,
    id: String,
    ip: Option<IpAddr>,
    ip6: Option<Ipv6Addr>,
    network: String,
    host: String,
    /// The command's process, as the host numbers it; null when it has ended.
    pid: Option<u32>,
    /// `created`, `running`, `exited`.
    status: String,
    exit_code: Option<i32>,
    command: Vec<String>,
    /// `freeflow`, or `oci` for a container of podman or another engine.
    engine: &'static str,
    init_pid: Option<u32>,
    supervisor_pid: Option<u32>,
    created_s: Option<u64>,
    finished_s: Option<u64>,
    note: Option<String>,
}

impl From<Record> for Container {
    fn from(record: Record) -> Self {
        let live = record.is_live();
        let while_live = |pid: Option<u32>| pid.filter(|_| live);
        let status = match record.state {
            State::Created => "created",
            State::Running => "running",
            State::Exited => "exited",
        };
        Self {
            pid: while_live(record.command_pid),
            init_pid: while_live(record.init.map(|init| init.pid)),
            supervisor_pid: while_live(Some(record.supervisor.pid)),
            status: status.into(),
            name: record.name,
            id: record.id,
            ip: record.ip,
            ip6: record.ip6,
            network: record.network,
            host: record.host,
            exit_code: record.exit_code,
            command: record.command,
            engine: "freeflow",
            created_s: Some(record.created_s),
            finished_s: record.finished_s,
            note: record.note,
        }
    }
}

/// One for each vNIC.
fn rows_of(record: Record) -> Vec<Container> {
    let others = record.other_vnics.clone();
    let first = Container::from(record);
    let other =
        |vnic: OtherVnic| Container { id: vnic.id, network: vnic.network, ip: vnic.ip, ip6: vnic.ip6, ..first.clone() };
    let others: Vec<Container> = others.into_iter().map(other).collect();
    std::iter::once(first).chain(others).collect()
}

pub fn containers(run_dir: &RunDir, all: bool, format: Format) -> Result<()> {
    print(&list(run_dir, all)?, format);
    Ok(())
}

/// The containers of a host, in order of name, and those of other engines.
pub fn list(run_dir: &RunDir, all: bool) -> Result<Vec<Container>> {
    let mut admin = match Admin::look(run_dir) {
        Presence::Running(admin) => Some(admin),
        Presence::Absent => None,
        Presence::Unusable(failure) => return Err(failure),
    };
    if admin.is_none() && !run_dir.containers().exists() {
        // Nothing was ever brought up here: say so rather than show an empty list.
        Admin::connect(run_dir)?;
    }
    let records = Records::of(run_dir);
    if records.reconcile(admin.as_mut())?
        && let Some(admin) = &mut admin
    {
        container_names::update(run_dir, admin);
    }
    let mut containers: Vec<Container> =
        records.list().into_iter().filter(|record| all || record.state != State::Exited).flat_map(rows_of).collect();
    if let Some(admin) = &mut admin {
        containers.extend(foreign(run_dir, admin)?);
    }
    Ok(containers)
}

pub fn print(containers: &[Container], format: Format) {
    if format == Format::Json {
        output::json(&containers);
        return;
    }
    let mut rows = vec![["NAME", "IP", "NETWORK", "HOST", "PID", "STATUS", "COMMAND"].map(String::from).to_vec()];
    rows.extend(containers.iter().map(row));
    output::table(&rows);
}

/// Containers that an engine attached through the CDI hook, as far as their processes live.
fn foreign(run_dir: &RunDir, admin: &mut Admin) -> Result<Vec<Container>> {
    let host = admin.status()?.host;
    let vnics = admin.vnics()?;
    let holders = Holders::of(run_dir).live();
    let pods = pods(run_dir, &vnics, &host);
    let of_engines = vnics.into_iter().filter_map(|vnic| {
        let holder = holders.iter().find(|holder| holder.vnic == vnic.id);
        let process = holder.map(|holder| holder.process).or_else(|| crate::hook::process_of(&vnic))?;
        let command = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        let words = command.split(|&byte| byte == 0).filter(|word| !word.is_empty());
        process.is_alive().then(|| Container {
            name: holder.map_or(vnic.name, |holder| holder.name.clone()),
            id: vnic.id,
            ip: Some(vnic.address),
            ip6: vnic.address6,
            network: vnic.network,
            host: host.clone(),
            pid: Some(process.pid),
            status: "running".into(),
            exit_code: None,
            command: words.map(|word| String::from_utf8_lossy(word).into_owned()).collect(),
            engine: "oci",
            init_pid: Some(process.pid),
            supervisor_pid: None,
            created_s: None,
            finished_s: None,
            note: None,
        })
    });
    Ok(of_engines.chain(pods).collect())
}

/// Pods that have a vNIC of the CNI plugin, however many containers have it from them.
fn pods(run_dir: &RunDir, vnics: &[VnicStatus], host: &str) -> Vec<Container> {
    let pod = |attachment: Attachment| {
        let vnic = vnics.iter().find(|vnic| vnic.id == attachment.vnic)?;
        Some(Container {
            name: attachment.name,
            id: attachment.vnic,
            ip: Some(vnic.address),
            ip6: vnic.address6,
            network: vnic.network.clone(),
            host: host.into(),
            pid: None,
            status: "pod".into(),
            exit_code: None,
            command: Vec::new(),
            engine: CNI,
            init_pid: None,
            supervisor_pid: None,
            created_s: None,
            finished_s: None,
            note: None,
        })
    };
    Attachments::of(run_dir).live().into_iter().filter_map(pod).collect()
}

fn row(container: &Container) -> Vec<String> {
    const COMMAND_CHARACTERS_MAX: usize = 40;
    let since = |then: Option<u64>| then.map(|then| output::duration(now_s().saturating_sub(then)));
    let status = match (container.status.as_str(), container.exit_code) {
        ("running", _) => since(container.created_s).map_or("running".to_string(), |time| format!("up {time}")),
        ("exited", code) => format!(
            "exited ({}) {} ago",
            code.map_or("?".to_string(), |code| code.to_string()),
            since(container.finished_s).unwrap_or_default()
        ),
        (other, _) => other.to_string(),
    };
    let mut command = container.command.join(" ");
    if command.chars().count() > COMMAND_CHARACTERS_MAX {
        command = command.chars().take(COMMAND_CHARACTERS_MAX - 1).chain(['…']).collect();
    }
    vec![
        container.name.clone(),
        container.ip.map_or("-".to_string(), |ip| addresses(ip, container.ip6)),
        container.network.clone(),
        container.host.clone(),
        container.pid.map_or("-".to_string(), |pid| pid.to_string()),
        status,
        command,
    ]
}

pub fn networks(run_dir: &RunDir, format: Format) -> Result<()> {
    let networks = Admin::connect(run_dir)?.networks()?;
    if format == Format::Json {
        output::json(&networks);
        return Ok(());
    }
    let mut rows = vec![["NAME", "POOL", "GATEWAY", "BRIDGE", "VNICS", "DATA PATH"].map(String::from).to_vec()];
    rows.extend(networks.iter().map(|network| {
        vec![
            network.name.clone(),
            network.pool6.as_ref().map_or(network.pool.clone(), |pool6| format!("{},{pool6}", network.pool)),
            network.gateway.to_string(),
            freeflow_hostnet::bridges::of(run_dir, network).name,
            network.vnic_count.to_string(),
            network.data_path.name().into(),
        ]
    }));
    output::table(&rows);
    Ok(())
}

/// This program's version, and the running router's where it can be asked.
pub fn version(run_dir: &RunDir) {
    output::line(format!("freeflow {}", env!("CARGO_PKG_VERSION")));
    if let Presence::Running(admin) = Admin::look(run_dir) {
        output::line(format!("router   {} (process {}, {})", admin.version, admin.pid, run_dir.path().display()));
    }
}

/// Nothing where there is but the router's own.
pub fn describe_workers(router: &RouterStatus) -> String {
    let several = |count: u32, what: &str| if count == 1 { String::new() } else { format!(", {count} {what}") };
    several(router.worker_count, "workers") + &several(router.shard_count, "shards")
}
