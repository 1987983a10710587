//! `freeflow-router`: reads its command line, runs a [`Router`], ends in order on SIGTERM and SIGINT.
#![forbid(unsafe_code)]
use clap::Parser;
use freeflow_hostnet::reconciler;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::{DEFAULT_POOL, Pool};
use freeflow_protocol::library::REVOCATION_TIME_MAX_MS;
use freeflow_router::privileges::{self, Role, ThreadKind};
use freeflow_router::{
    Config, CopyThreadOptions, MACHINE_DIR, Mode, NearHalfService, NearHalves, ReconcilerProcess, Router, ShardBy,
    WORKERS_MAX, WireOptions, default_limits, default_shard_count,
};
use freeflow_shm::termination_signals;
use freeflow_verbs::{Duration, Shard, VnicLimits};
use rustix::event::{PollFd, PollFlags};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// FreeFlow's router: carries the RDMA traffic of this host's containers. Started by `freeflow up`; needs root.
#[derive(Parser)]
#[command(name = "freeflow-router", version)]
struct Arguments {
    /// Directory of sockets and state; each router needs its own
    #[arg(long, default_value = "/run/freeflow")]
    run_dir: PathBuf,
    /// Directory of state.redb, what is declared [default: the run directory]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The freeflow command, which CDI files name; bridges and CDI files follow when networks have come or gone
    #[arg(long, value_name = "PROGRAM", hide = true)]
    command: Option<PathBuf>,
    /// Be the process that changes the host's network, for the router at the other end of standard input
    #[arg(long, requires = "command", hide = true)]
    reconcile_networks: bool,
    /// For tests: how processes are reached, by the router itself or by another process
    #[arg(long, value_enum, default_value_t = AttachmentKind::Local, hide = true)]
    attachment: AttachmentKind,
    /// Be the process that reaches vNICs' processes, for the router at the other end of standard input
    #[arg(long, hide = true)]
    near_halves: bool,
    /// How the worker waits when there is nothing to do
    #[arg(long, value_enum, default_value_t = Mode::Adaptive)]
    mode: Mode,
    /// Threads that copy messages, 1 to 32 [default: 1 below eight processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    workers: Option<u32>,
    /// Engines that work side by side, each with vNICs of its own: 1, 2, 4 or 8 [default: 1 below 16 processors, and
    /// without --peers]
    #[arg(long, value_name = "N", value_parser = parse_shards)]
    shards: Option<u8>,
    /// Which vNICs share one of them
    #[arg(long, value_enum, default_value_t = ShardBy::Tenant)]
    shard_by: ShardBy,
    /// For tests: copies from this size on are always handed to those threads
    #[arg(long, value_name = "BYTES", hide = true)]
    move_bytes_min: Option<u32>,
    /// Bind the worker to this processor
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,
    /// Name of this host in `status` [default: the system's]
    #[arg(long)]
    host: Option<String>,
    /// Name of the bridge of the default network
    #[arg(long, default_value = "freeflow0")]
    bridge: String,
    /// Address pool of the default network
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_POOL)]
    pool: Pool,
    /// The part of the pool that this host gives out, where hosts share a network [default: all of it]
    #[arg(long, value_name = "CIDR")]
    range: Option<Pool>,
    /// The other hosts: who they are, where, and their keys
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Objects that a cluster declares for all hosts are changed by its follower alone
    #[arg(long)]
    follows_cluster: bool,
    /// How the sockets to them are opened: JSON, some of the fields of `WireOptions`, such as {"gso": false}
    #[arg(long, value_name = "JSON", value_parser = WireOptions::parse)]
    wire_options: Option<WireOptions>,
    /// Limits of each vNIC: JSON, some of the fields of `VnicLimits`, such as {"qp_count_max": 100}
    #[arg(long, value_name = "JSON", value_parser = parse_limits)]
    limits: Option<VnicLimits>,
    /// Directory that all routers of this machine share
    #[arg(long, value_name = "DIR", default_value = MACHINE_DIR)]
    machine_dir: PathBuf,
    /// Serve /metrics, /livez and /readyz by TCP too, to whoever asks
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// Print what each thread may do, as JSON, and end
    #[arg(long, hide = true)]
    privileges: bool,
    /// Write the line "ready" to this descriptor once the sockets listen
    #[arg(long, value_name = "N")]
    ready_fd: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum AttachmentKind {
    Local,
    Remote,
}

fn parse_shards(text: &str) -> Result<u8, String> {
    let count = text.parse().ok().filter(|&count| Shard::new(0, count).is_some());
    count.ok_or_else(|| "write 1, 2, 4 or 8".into())
}

/// The given fields, and the defaults for the others. An unknown field is an error.
fn parse_limits(text: &str) -> Result<VnicLimits, String> {
    let given: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut all = serde_json::to_value(default_limits()).map_err(|error| error.to_string())?;
    for (name, value) in given {
        *all.get_mut(&name).ok_or_else(|| format!("no limit is named {name}"))? = value;
    }
    serde_json::from_value(all).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.privileges {
        println!("{:#}", privileges::describe());
        return ExitCode::SUCCESS;
    }
    let ended = if arguments.reconcile_networks {
        reconcile_networks(&arguments)
    } else if arguments.near_halves {
        serve_near_halves()
    } else {
        run(arguments)
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("freeflow-router: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(io::Error::other(
            "needs root: it reads other processes' memory and serves their sockets; try sudo",
        ));
    }
    let run_dir = std::path::absolute(&arguments.run_dir)?;
    freeflow_router::keep_log_file(&run_dir.join("router.log"));
    // While this process may still begin others.
    let near_halves = match arguments.attachment {
        AttachmentKind::Local => None,
        AttachmentKind::Remote => Some(NearHalves::start_process()?),
    };
    let role = if near_halves.is_some() { Role::RouterWithNearHalves } else { Role::Router };
    let reconciler = arguments.command.map(|command| ReconcilerProcess::start(&command, &run_dir)).transpose()?;
    // Before any thread begins, so that all of them leave the signals to this one, and have no more rights than it has.
    let signals = termination_signals()?;
    let mut refusals = privileges::confine(role)?;
    let log_is_full = freeflow_router::rotate_log_file_here()?;
    let router = Router::start(Config {
        run_dir,
        state_dir: arguments.state_dir.map(std::path::absolute).transpose()?,
        network_reconciler: reconciler,
        near_halves,
        mode: arguments.mode,
        copy_threads: CopyThreadOptions { workers: arguments.workers, move_bytes_min: arguments.move_bytes_min },
        shard_count: arguments.shards.unwrap_or_else(|| default_shard_count(arguments.peers.is_some())),
        shard_by: arguments.shard_by,
        cpu: arguments.cpu,
        host: arguments.host.unwrap_or_else(host_name),
        bridge: arguments.bridge,
        pool: arguments.pool,
        range: arguments.range,
        peers: arguments.peers.map(std::path::absolute).transpose()?,
        wire: arguments.wire_options.unwrap_or_default(),
        limits: arguments.limits.unwrap_or_else(default_limits),
        revocation_time: Duration::from_millis(REVOCATION_TIME_MAX_MS),
        metrics_listen: arguments.metrics_listen,
        follows_cluster: arguments.follows_cluster,
        machine_dir: arguments.machine_dir,
    })?;
    if let Some(number) = arguments.ready_fd {
        OpenOptions::new().write(true).open(format!("/proc/self/fd/{number}"))?.write_all(b"ready\n")?;
    }
    privileges::enter(ThreadKind::Main);
    loop {
        let descriptors = [signals.as_fd(), router.ended(), refusals.as_fd(), log_is_full.as_fd()];
        let mut polled = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        while let Err(rustix::io::Errno::INTR) = rustix::event::poll(&mut polled, None) {}
        let ends = polled[..2].iter().any(|fd| !fd.revents().is_empty());
        refusals.log();
        freeflow_router::rotate_log_file_if_full();
        if ends {
            break;
        }
    }
    let stopped = router.stop();
    refusals.log();
    stopped
}

/// The network reconciler's process; it ends with the router.
fn reconcile_networks(arguments: &Arguments) -> io::Result<()> {
    reconciler::confine().map_err(io::Error::other)?;
    let router = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let run_dir = RunDir::new(&arguments.run_dir).map_err(io::Error::other)?;
    let command = arguments.command.as_deref().unwrap_or(Path::new("freeflow"));
    reconciler::serve(router, &run_dir, command);
    Ok(())
}

/// The near halves' process; it ends with the router.
fn serve_near_halves() -> io::Result<()> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    // It takes as many descriptors as it may, which it can't once it is confined.
    let mut service = NearHalfService::new(socket);
    let mut refusals = privileges::confine(Role::NearHalves)?;
    privileges::enter(ThreadKind::NearHalves);
    // The process' name, too.
    rustix::thread::set_name(c"ff-near-halves")?;
    loop {
        let mut polled = [service.as_fd(), refusals.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        while let Err(rustix::io::Errno::INTR) = rustix::event::poll(&mut polled, None) {}
        let has_come = !polled[0].revents().is_empty();
        refusals.log();
        if has_come && !service.begin_next() {
            return Ok(());
        }
    }
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim_end().to_owned()
}
