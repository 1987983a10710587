//! `freeflow up` and `freeflow down`.

use crate::admin::{Admin, Presence};
use crate::arguments::{ShardBy, ThreadCount, Up};
use crate::cni::attachments::{Attachment, Attachments, ENGINE as CNI};
use crate::failure::{Context, Failure, Result, fail};
use crate::holders::Holders;
use crate::process::Process;
use crate::record::{Record, Records};
use crate::{cgroup, cluster, container_names, hook, lifecycle, networks, output, router, service, tools, vm};
use freeflow_cluster::is_host_name;
use freeflow_hostnet::addresses::{self, InterfaceAddress};
use freeflow_hostnet::cdi::{self, Devices};
use freeflow_hostnet::fence::Range;
use freeflow_hostnet::firewall::{self, Rule};
use freeflow_hostnet::guard::{self, Guard};
use freeflow_hostnet::links::{self, Change};
use freeflow_hostnet::overlay::{self, Peers};
use freeflow_hostnet::run_dir::{RunDir, Settings, write_atomically};
use freeflow_hostnet::wire_guard::{Family, WireGuard};
use freeflow_hostnet::{bridges, ports, programs};
use freeflow_protocol::admin::{DataPath, NetworkStatus, RouterStatus, VnicStatus};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, IsTerminal, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The pool of hosts that share a network, unless another is asked for.
pub const SHARED_POOL: &str = "10.111.0.0/16";
const DEFAULT_MODE: &str = "adaptive";
/// Pools tried when none is asked for: 10.111.0.0/16 and those after it.
const POOL_FIRST: u8 = 111;
const POOL_LAST: u8 = 126;
/// Time between SIGTERM and SIGKILL for containers when the host goes down.
const STOP_TIME: Duration = Duration::from_secs(3);

/// A host that is up.
struct Started {
    settings: Settings,
    status: RouterStatus,
    networks: Vec<NetworkStatus>,
    was_running: bool,
    /// Containers whose vNIC the router does not know any more.
    lost: Vec<String>,
}

pub fn up(run_dir: &RunDir, arguments: &Up) -> Result<()> {
    let signals = arguments.foreground.then(service::hold_signals).transpose()?;
    let started = start(run_dir, arguments)?;
    print_summary(run_dir, &started);
    for name in started.lost {
        output::line(format!("Warning: container {name} lost its vNIC with the router's state; start it again."));
    }
    service::report_ready(started.status.pid, signals.is_some());
    signals.map_or(Ok(()), |signals| service::stay(run_dir, started.status.pid, &signals))
}

/// Brings a host up and prints nothing.
pub fn up_silently(run_dir: &RunDir, arguments: &Up) -> Result<()> {
    start(run_dir, arguments).map(|_| ())
}

fn start(run_dir: &RunDir, arguments: &Up) -> Result<Started> {
    check_programs()?;
    run_dir.create()?;
    // Now that it exists, its symbolic links can be resolved.
    let run_dir = &RunDir::new(run_dir.path())?;
    let _lock = run_dir.lock()?;
    let state = arguments.state.as_deref().map(state_directory).transpose()?;
    let arguments = &*cluster::joined(run_dir, arguments, state.as_deref())?;
    let mut settings = resolve_settings(run_dir, arguments)?;
    let (mut admin, was_running) = match Admin::look(run_dir) {
        Presence::Running(mut admin) => {
            check_unchanged(run_dir, &mut admin, arguments, &settings)?;
            guard_wire(run_dir, &settings)?;
            (admin, true)
        }
        Presence::Absent => {
            // One of the settings before.
            cluster::end(run_dir)?;
            follow_or_not(run_dir, &settings)?;
            run_dir.store_settings(&settings)?;
            guard_wire(run_dir, &settings)?;
            router::start(run_dir, &settings)?;
            if let Some(state) = &settings.state {
                write_atomically(&state.join(KEPT_POOL), format!("{}\n", settings.pool).as_bytes(), 0o600)
                    .context(state.display())?;
            }
            (Admin::connect(run_dir)?, false)
        }
        Presence::Unusable(failure) => {
            return Err(Failure::new(format!("{failure}; or end it with: freeflow{} down --force", run_dir.option())));
        }
    };
    run_dir.register()?;
    for network in &admin.networks()? {
        let bridge = bridges::of(run_dir, network);
        if bridge.has_gateway {
            let gateway = InterfaceAddress { address: network.gateway, prefix_length: network.prefix_length };
            bridges::ensure_gateway(&bridge.name, &settings.host, gateway)?;
            firewall::accept_bridged(&bridge.name, Rule::Present);
        }
    }
    join(run_dir, &settings)?;
    if settings.cluster.is_some() {
        cluster::start(run_dir)?;
    }
    bridges::refresh(run_dir, || Ok(admin.networks()?))?;
    let lost = reconcile(run_dir, &mut admin)?;
    container_names::update(run_dir, &mut admin);
    let networks = {
        let _lock = bridges::lock(run_dir)?;
        let inventory = networks::inventory(&mut admin)?;
        let (program, asked) = (tools::own_path()?, arguments.cdi_dir.as_deref());
        settings.cdi_file = cdi::write(run_dir, &program, asked, &Devices::from(&inventory))?.or(settings.cdi_file);
        inventory.networks
    };
    run_dir.store_settings(&settings)?;
    let status = admin.status()?;
    Ok(Started { settings, status, networks, was_running, lost })
}

/// Before the router has a wire: nobody else may speak for this host.
fn guard_wire(run_dir: &RunDir, settings: &Settings) -> Result<()> {
    match settings.address {
        Some(address) => Ok(WireGuard::of(run_dir).put(Family::of(address))?),
        None => Ok(()),
    }
}

/// Makes the IP path to the other hosts' containers, where there are other hosts.
pub fn join(run_dir: &RunDir, settings: &Settings) -> Result<()> {
    let bridge = run_dir.bridge();
    let peers = settings.peers.as_deref().map(overlay::read).transpose()?;
    let pools: Vec<Range> = Range::parse(&settings.pool).into_iter().collect();
    match peers.filter(|peers| !peers.peers.is_empty()) {
        Some(peers) => overlay::make(&bridge, (overlay::DEFAULT_VNI, &pools), &peers, &Guard::of(run_dir))?,
        None => overlay::delete(&bridge)?,
    }
    Ok(())
}

/// Whether the programs are there without which no host is.
pub fn check_programs() -> Result<()> {
    tools::router()?;
    if programs::find("tc").is_none() {
        fail!("the program tc is missing; install it, for example: apt-get install iproute2");
    }
    Ok(())
}

/// The settings to start with: those asked for, else those of the last `up`, else what suits this machine.
fn resolve_settings(run_dir: &RunDir, arguments: &Up) -> Result<Settings> {
    let last = run_dir.settings();
    let asked_pool = match &arguments.pool {
        Some(text) => {
            if addresses::parse_cidr(text).is_none_or(|(_, prefix_length)| !(8..=29).contains(&prefix_length)) {
                fail!("--pool {text:?}: write an IPv4 range such as 10.111.0.0/16, of /8 to /29");
            }
            Some(text.clone())
        }
        None => None,
    };
    let cluster = cluster_file(arguments, last.as_ref())?;
    let state = match &arguments.state {
        Some(path) => Some(state_directory(path)?),
        None => last.as_ref().and_then(|last| last.state.clone()),
    };
    let among = match &cluster {
        Some(_) => Some(among_cluster(run_dir, arguments, last.as_ref(), state.as_deref())?),
        None => among_peers(arguments, last.as_ref())?,
    };
    // A kept state has a pool already.
    let kept = state.as_deref().and_then(kept_pool);
    let pool = match asked_pool.or_else(|| last.as_ref().map(|last| last.pool.clone())).or(kept) {
        Some(pool) => pool,
        // Hosts that share a network must agree on its addresses.
        None if among.is_some() => SHARED_POOL.to_string(),
        None => free_pool(&run_dir.bridge())?,
    };
    let range = arguments.range.clone().or_else(|| last.as_ref()?.range.clone());
    check_range(&pool, range.as_deref(), among.as_ref(), cluster.is_some())?;
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let own_name = among.as_ref().map(|(_, peers)| peers.host.clone());
    let host = arguments.host.clone().or(own_name).or_else(|| Some(last.as_ref()?.host.clone())).unwrap_or(machine);
    let mode = arguments.mode.map(|mode| mode.as_str().to_string());
    let workers = match arguments.workers {
        Some(asked) => asked.count(),
        None => last.as_ref().and_then(|last| last.workers),
    };
    let shards = match arguments.shards {
        Some(asked) => asked.count(),
        None => last.as_ref().and_then(|last| last.shards),
    };
    let shard_by = arguments.shard_by.map(|by| by.as_str().to_string());
    Ok(Settings {
        workers,
        shards,
        shard_by: shard_by.or_else(|| last.as_ref()?.shard_by.clone()),
        state,
        cluster,
        metrics_listen: match arguments.metrics_listen {
            Some(asked) => asked.0,
            None => last.as_ref().and_then(|last| last.metrics_listen),
        },
        move_bytes_min: arguments.move_bytes_min.or_else(|| last.as_ref()?.move_bytes_min),
        attachment: arguments.attachment.clone().or_else(|| last.as_ref()?.attachment.clone()),
        mode: mode.or_else(|| Some(last.as_ref()?.mode.clone())).unwrap_or(DEFAULT_MODE.into()),
        pool,
        host,
        range,
        address: among.as_ref().map(|(_, peers)| peers.address),
        peers: among.map(|(path, _)| path),
        program: tools::own_path().ok(),
        cdi_file: last.and_then(|last| last.cdi_file),
    })
}

/// The peers file and what it says, if this host has peers; what else is asked for must agree with it.
fn among_peers(arguments: &Up, last: Option<&Settings>) -> Result<Option<(PathBuf, Peers)>> {
    // Those of a cluster are not of a host that follows none any more.
    let of_last = last.filter(|last| last.cluster.is_none());
    let Some(path) = arguments.peers.clone().or_else(|| of_last?.peers.clone()) else {
        if arguments.address.is_some() {
            fail!("--address goes with --peers: a host without peers needs none");
        }
        return Ok(None);
    };
    let path = fs::canonicalize(&path).context(format!("the peers file {}", path.display()))?;
    let peers = overlay::read(&path)?;
    // Before a router is started with it.
    overlay::underlay(&peers)?;
    if let Some(asked) = arguments.address.filter(|asked| *asked != peers.address) {
        fail!("--address {asked}: the peers file {} gives this host {}", path.display(), peers.address);
    }
    if let Some(asked) = arguments.host.as_ref().filter(|asked| **asked != peers.host) {
        fail!("--host {asked}: the peers file {} calls this host {}", path.display(), peers.host);
    }
    Ok(Some((path, peers)))
}

/// The file of the cluster that this host is to follow, if it is to.
fn cluster_file(arguments: &Up, last: Option<&Settings>) -> Result<Option<PathBuf>> {
    let path = match &arguments.cluster {
        Some(path) if path.as_os_str() == "off" => return Ok(None),
        Some(path) => {
            let path = fs::canonicalize(path).context(format!("the cluster file {}", path.display()))?;
            // Before a router is started with it. One of before may be gone: the router does not need it.
            cluster::read(&path)?;
            path
        }
        // A peers file that is given now takes the cluster's place.
        None if arguments.peers.is_some() => return Ok(None),
        None => match last.and_then(|last| last.cluster.clone()) {
            Some(path) => path,
            None => return Ok(None),
        },
    };
    Ok(Some(path))
}

/// The peers file of a host that follows a cluster is its follower's.
fn among_cluster(
    run_dir: &RunDir,
    arguments: &Up,
    last: Option<&Settings>,
    state: Option<&Path>,
) -> Result<(PathBuf, Peers)> {
    let of_last = last.filter(|last| last.cluster.is_some());
    let Some(address) = arguments.address.or_else(|| of_last?.address) else {
        fail!("--cluster needs --address: this host's address for other hosts");
    };
    let host = arguments.host.clone().or_else(|| Some(of_last?.host.clone()));
    let host = host.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    if !is_host_name(&host) {
        fail!("--host {host:?}: a cluster's host has a name of at most 64 letters, digits and -, such as h1");
    }
    if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
        fail!("--address {address}: other hosts can't reach it");
    }
    let path = cluster::Directory::at(state.unwrap_or(run_dir.path())).peers_file();
    let peers = Peers { host, address, peers: Vec::new() };
    overlay::underlay(&peers)?;
    Ok((path, peers))
}

/// Before a router is started: the files of a host that follows a cluster, or that it follows none any more.
fn follow_or_not(run_dir: &RunDir, settings: &Settings) -> Result<()> {
    let directory = cluster::Directory::of(run_dir, settings);
    match (&settings.cluster, settings.address) {
        (Some(path), Some(address)) => {
            match cluster::read(path) {
                Ok(file) => {
                    cluster::prepare(&directory, &cluster::Own { host: &settings.host, address, wire: file.wire })
                }
                // The host has what it had.
                Err(failure) if directory.peers_file().exists() => {
                    output::complaint(format!("{failure}; the cluster is not followed until it is there"));
                    Ok(())
                }
                Err(failure) => Err(failure),
            }
        }
        _ => {
            directory.forget();
            Ok(())
        }
    }
}

/// Made if need be, so that its symbolic links can be resolved.
fn state_directory(path: &Path) -> Result<PathBuf> {
    let what = || format!("--state {}", path.display());
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).context(what())?;
    fs::canonicalize(path).context(what())
}

/// The file beside the state that says which pool it was made with.
const KEPT_POOL: &str = "pool";

fn kept_pool(state: &Path) -> Option<String> {
    let text = fs::read_to_string(state.join(KEPT_POOL)).ok()?;
    addresses::parse_cidr(text.trim()).map(|_| text.trim().to_string())
}

fn check_range(pool: &str, range: Option<&str>, among: Option<&(PathBuf, Peers)>, is_clusters: bool) -> Result<()> {
    let Some(range) = range else {
        if is_clusters {
            fail!("--cluster needs --range: the part of the pool {pool} that this host gives out");
        }
        if among.is_some_and(|(_, peers)| !peers.peers.is_empty()) {
            fail!("--peers needs --range: the part of the pool {pool} that this host gives out");
        }
        return Ok(());
    };
    let parts = addresses::parse_cidr(range).zip(addresses::parse_cidr(pool));
    if parts.is_none_or(|(range, pool)| range.1 > 29 || range.1 < pool.1 || !addresses::overlap(range, pool)) {
        fail!("--range {range:?}: write a part of the pool {pool}, such as 10.111.2.0/24, down to /29");
    }
    Ok(())
}

/// The first pool that nothing in this network namespace uses.
fn free_pool(bridge: &str) -> Result<String> {
    let routes = addresses::routes(bridge)?;
    (POOL_FIRST..=POOL_LAST)
        .map(|number| format!("10.{number}.0.0/16"))
        .find(|pool| {
            let range = addresses::parse_cidr(pool).expect("a range as we write it");
            !routes.iter().any(|&route| addresses::overlap(route, range))
        })
        .ok_or_else(|| Failure::new("the ranges 10.111.0.0/16 to 10.126.0.0/16 are all in use; choose one with --pool"))
}

/// A running router keeps its settings; asking for others is refused rather than ignored.
fn check_unchanged(run_dir: &RunDir, admin: &mut Admin, arguments: &Up, wanted: &Settings) -> Result<()> {
    let status = admin.status()?;
    let pool = admin.network("default")?.pool;
    let mode = arguments.mode.map(|mode| mode.as_str());
    let same_pool = |asked: &str| {
        addresses::parse_cidr(asked)
            .zip(addresses::parse_cidr(&pool))
            .is_some_and(|(one, other)| one.1 == other.1 && addresses::overlap(one, other))
    };
    let given = |field: fn(&Settings) -> Option<u32>| run_dir.settings().as_ref().and_then(field);
    let difference = if mode.is_some_and(|mode| mode != status.mode) {
        format!("mode {}", status.mode)
    } else if arguments.workers.is_some_and(|asked| is_other(asked, status.worker_count, given(|last| last.workers))) {
        format!("{} workers", status.worker_count)
    } else if arguments.shards.is_some_and(|asked| is_other(asked, status.shard_count, given(|last| last.shards))) {
        format!("{} shards", status.shard_count)
    } else if arguments.host.as_ref().is_some_and(|host| *host != status.host) {
        format!("host name {}", status.host)
    } else if arguments.pool.as_ref().is_some_and(|asked| !same_pool(asked)) {
        format!("pool {pool}")
    } else {
        let last = run_dir.settings();
        let last = |field: fn(&Settings) -> Option<String>| last.as_ref().and_then(field);
        let range = last(|last| last.range.clone());
        let metrics = last(|last| last.metrics_listen.map(|address| address.to_string()));
        let peers = last(|last| Some(last.peers.as_ref()?.display().to_string()));
        let state = last(|last| Some(last.state.as_ref()?.display().to_string()));
        let cluster = last(|last| Some(last.cluster.as_ref()?.display().to_string()));
        let address = run_dir.settings().and_then(|last| last.address);
        let shard_by = last(|last| last.shard_by.clone()).unwrap_or(ShardBy::Tenant.as_str().into());
        let path = |path: &PathBuf| fs::canonicalize(path).unwrap_or_else(|_| path.clone()).display().to_string();
        if arguments.range.is_some() && arguments.range != range {
            format!("range {}", range.as_deref().unwrap_or("of the whole pool"))
        } else if arguments.metrics_listen.is_some_and(|asked| asked.0.map(|address| address.to_string()) != metrics) {
            metrics.map_or("no --metrics-listen".to_string(), |address| format!("metrics on {address}"))
        } else if arguments.state.is_some() && arguments.state.as_ref().map(path) != state {
            format!("its state in {}", state.unwrap_or_else(|| run_dir.path().display().to_string()))
        } else if arguments.shard_by.is_some_and(|asked| asked.as_str() != shard_by) {
            format!("--shard-by {shard_by}")
        } else if wanted.cluster.as_ref().map(path) != cluster {
            cluster.map_or("no cluster".to_string(), |cluster| format!("cluster {cluster}"))
        } else if wanted.address != address {
            address.map_or("no address".to_string(), |address| format!("address {address}"))
        } else if arguments.peers.is_some() && arguments.peers.as_ref().map(path) != peers {
            peers.map_or("no peers".to_string(), |peers| format!("peers {peers}"))
        } else {
            return Ok(());
        }
    };
    Err(Failure::new(format!(
        "the host is up with {difference}; to change that, first: freeflow{} down",
        run_dir.option()
    )))
}

/// Whether a router with so many threads of a kind is not what is asked for; it was brought up with `given` of them.
fn is_other(asked: ThreadCount, count: u32, given: Option<u32>) -> bool {
    asked.count().map_or(given.is_some(), |asked| asked != count)
}

/// Brings vNICs, interfaces and records into line with the containers that live. Names the containers whose vNIC the
/// router does not know any more.
fn reconcile(run_dir: &RunDir, admin: &mut Admin) -> Result<Vec<String>> {
    let records = Records::of(run_dir);
    records.reconcile(Some(admin))?;
    let attachments = Attachments::of(run_dir);
    // Those that live are brought into line also where a dead one can't be ended.
    let settled = attachments.settle(Some(admin), |attachment| attachment.namespace.seen_at(&attachment.path));
    let settled = settled.and(hook::settle(run_dir, admin));
    // In this order: a container that starts meanwhile has a record before its vNIC, and that before its interface.
    let ports = ports::list(run_dir)?;
    let vnics = admin.vnics()?;
    let networks = admin.networks()?;
    let live: Vec<Record> = records.list().into_iter().filter(Record::is_live).collect();
    let attached = attachments.list();
    let mut kept = Vec::new();
    for vnic in &vnics {
        if is_in_use(vnic, &live, &attached) {
            kept.push(vnic.into());
        } else {
            admin.detach(&vnic.id)?;
        }
    }
    let guard = Guard::of(run_dir);
    for (port, network) in bridges::sweep(ports, &kept, &networks) {
        if !links::exists(&port.interface) {
            continue;
        }
        guard.put(&port.interface)?;
        // The bridge was deleted and made again.
        let bridge = bridges::of(run_dir, network).name;
        if port.bridge.as_ref() != Some(&bridge) {
            links::change(&port.interface, Change { bridge: Some(&bridge), ..Change::UP })?;
        }
    }
    let known: BTreeSet<&str> = vnics.iter().map(|vnic| vnic.id.as_str()).collect();
    // A router that has begun again does not know it.
    for record in live.iter().filter(|record| record.is_declared && known.contains(record.id.as_str())) {
        admin.occupy(&record.id, &record.name, true)?;
    }
    for holder in Holders::of(run_dir).live().iter().filter(|holder| known.contains(holder.vnic.as_str())) {
        admin.occupy(&holder.vnic, &holder.name, true)?;
    }
    let of_pods = attached.into_iter().map(|attachment| (attachment.vnic, attachment.name));
    let is_known = |record: &Record| record.vnic_ids().all(|id| known.contains(id));
    let records = live.into_iter().filter(|record| !is_known(record)).map(|record| record.name);
    settled?;
    Ok(records.chain(of_pods.filter(|(vnic, _)| !known.contains(vnic.as_str())).map(|(_, name)| name)).collect())
}

fn is_in_use(vnic: &VnicStatus, live: &[Record], attached: &[Attachment]) -> bool {
    let engine = vnic.labels.iter().find(|(key, _)| key == "engine").map(|(_, value)| value.as_str());
    match engine {
        Some("freeflow") => live.iter().any(|record| record.vnic_ids().any(|id| id == vnic.id)),
        Some("oci") => hook::process_of(vnic).is_none_or(|process| process.is_alive()),
        Some(CNI) => attached.iter().any(|attachment| attachment.vnic == vnic.id),
        // Attached by somebody we don't know; not ours to end.
        _ => true,
    }
}

fn print_summary(run_dir: &RunDir, started: &Started) {
    let Started { settings, status, networks, was_running, .. } = started;
    let option = run_dir.option();
    let again = if *was_running { " already" } else { "" };
    output::line(format!("FreeFlow {} is up{again} on host {}.", status.version, status.host));
    output::line(format!(
        "  router     process {}, mode {}{}, log {}",
        status.pid,
        crate::show::mode_text(status),
        crate::show::describe_workers(status),
        run_dir.router_log().display()
    ));
    output::line(format!("  socket     {}", run_dir.admin_socket().display()));
    for network in networks {
        let bridge = bridges::of(run_dir, network);
        let host = match bridge.has_gateway {
            true => format!("gateway {} on bridge {}", network.gateway, bridge.name),
            false => "without a gateway".into(),
        };
        output::line(format!("  network    {}: {}, {host}", network.name, network.pool));
    }
    output::line("  device     freeflow0 in every container: RoCE v2, 100 Gb/s, no RDMA hardware needed");
    match (&settings.cluster, &settings.peers, settings.address) {
        (Some(path), _, Some(address)) => output::line(format!("  cluster    {} at {address}", path.display())),
        (None, Some(path), Some(address)) => output::line(format!("  peers      {} at {address}", path.display())),
        _ => {}
    }
    if let Some(network) = networks.iter().find(|network| network.name == bridges::DEFAULT_NETWORK) {
        output::line(format!("  data path  {}", describe(network.data_path)));
    }
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

fn describe(path: DataPath) -> &'static str {
    match path {
        DataPath::Auto => "auto: between containers of this host directly where that is possible, else by the router",
        DataPath::Direct => {
            "direct: between containers of this host directly where that is possible, else by the router"
        }
        DataPath::Routed => "routed: between containers of this host, copied once by the router",
    }
}

pub fn down(run_dir: &RunDir, force: bool) -> Result<()> {
    if !run_dir.path().exists() {
        output::line(format!("Nothing is up in {}.", run_dir.path().display()));
        return Ok(());
    }
    let foreign = take_down(run_dir, force)?;
    output::line(format!("FreeFlow is down in {}.", run_dir.path().display()));
    for name in foreign {
        output::line(format!("Container {name} of another engine runs on without its vNIC."));
    }
    Ok(())
}

/// Takes a host down and prints nothing, but asks before it ends containers unless forced. Names
/// the containers of other engines that run on.
pub fn take_down(run_dir: &RunDir, force: bool) -> Result<Vec<String>> {
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
    let attached = vnics.iter().filter(|vnic| hook::process_of(vnic).is_some_and(|process| process.is_alive()));
    let held = Holders::of(run_dir).live().into_iter().map(|holder| holder.name);
    let of_pods = Attachments::of(run_dir).live().into_iter().map(|attachment| attachment.name);
    let foreign: Vec<String> = attached.map(|vnic| vnic.name.clone()).chain(held).chain(of_pods).collect();
    let names: Vec<String> = live.iter().map(|record| record.name.clone()).chain(foreign.iter().cloned()).collect();
    if !names.is_empty() && !force && !confirmed(&names)? {
        fail!(
            "running: {}; end them first (freeflow{option} stop NAME), or use: freeflow{option} down --force",
            names.join(", "),
            option = run_dir.option()
        );
    }
    for record in &live {
        lifecycle::end(run_dir, record, Some(STOP_TIME))?;
    }
    for port in ports::list(run_dir)? {
        links::delete_if_there(&port.interface);
    }
    // It would go on with what the router does no more.
    cluster::end(run_dir)?;
    let process = router::recorded(run_dir).or_else(|| Process::of(admin.as_ref()?.pid));
    match admin {
        Some(admin) => admin.shutdown()?,
        None => router::kill(run_dir)?,
    }
    if let Some(process) = process {
        router::wait_end(process, false)?;
    }
    cgroup::remove_own(run_dir);
    clean(run_dir, &records)?;
    Ok(foreign)
}

pub fn confirmed(names: &[String]) -> Result<bool> {
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
    firewall::accept_bridged(&bridge, Rule::Absent);
    overlay::delete(&bridge)?;
    bridges::delete(&bridge)?;
    bridges::remove_all(run_dir)?;
    guard::remove_sink(run_dir);
    if run_dir.settings().is_none_or(|settings| settings.peers.is_some()) {
        WireGuard::of(run_dir).remove();
    }
    if let Some(file) = run_dir.settings().and_then(|settings| settings.cdi_file) {
        cdi::remove(&file);
    }
    run_dir.unregister();
    for name in ["admin.sock", "api.sock", "router.pid", "state.redb", "up.json"] {
        let _ = fs::remove_file(run_dir.path().join(name));
    }
    container_names::remove(run_dir);
    let _ = fs::remove_dir_all(run_dir.path().join("cluster"));
    vm::remove_devices(run_dir);
    let _ = fs::remove_dir_all(run_dir.vnics());
    let _ = fs::remove_dir_all(run_dir.holders());
    let _ = fs::remove_dir_all(run_dir.cni());
    let _ = fs::remove_dir_all(run_dir.path().join("engines"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_a_part_of_the_pool_and_needed_among_peers() {
        let range = |range| check_range("10.111.0.0/16", range, None, false).is_ok();
        assert!(range(None) && range(Some("10.111.2.0/24")) && range(Some("10.111.0.0/16")));
        for bad in ["10.112.2.0/24", "10.0.0.0/8", "10.111.2.0/30", "10.111.2.0/x", "fd00::/64", ""] {
            assert!(!range(Some(bad)), "{bad}");
        }
        let other = overlay::Peer { host: "h2".into(), address: "192.0.2.2".parse().unwrap(), prefixes: Vec::new() };
        let peers = |peers| Some((PathBuf::new(), Peers { host: "h1".into(), address: [192, 0, 2, 1].into(), peers }));
        let needed = check_range("10.111.0.0/16", None, peers(vec![other]).as_ref(), false);
        assert!(needed.unwrap_err().to_string().contains("--range"));
        assert!(check_range("10.111.0.0/16", None, peers(Vec::new()).as_ref(), false).is_ok());
    }

    #[test]
    fn settings_of_a_host_without_peers_are_read() {
        let text = r#"{"mode": "adaptive", "pool": "10.111.0.0/16", "host": "h", "cdi_file": null}"#;
        let settings: Settings = serde_json::from_str(text).unwrap();
        assert_eq!((settings.range, settings.address, settings.peers), (None, None, None));
    }
}
