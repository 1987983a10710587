//! The command line. Its help texts are a checked-in list: `tests/help.txt`.

use crate::arguments_control::{
    AllHosts, Apply, Cluster, Delete, Describe, Diff, Get, HostAction, MoveVnic, Top, VmAction,
};
use crate::arguments_test::{BugReport, TestAction};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Debug, Parser)]
#[command(
    name = "freeflow",
    version,
    about = "Virtual RDMA NICs for containers; no RDMA hardware needed",
    after_help = "First steps:\n  freeflow up\n  freeflow run --name a -d -- ib_write_bw\n  \
                  freeflow run -- ib_write_bw a\n  freeflow status",
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub struct Arguments {
    /// Directory of this host's sockets and state; several hosts can run on one machine
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "FREEFLOW_RUN_DIR",
        default_value = freeflow_hostnet::run_dir::DEFAULT,
        hide_env_values = true
    )]
    pub run_dir: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start or repair this host: router, bridge, CDI device; returns when ready
    Up(Up),
    /// Stop this host
    Down {
        /// Stop running containers too
        #[arg(long, short)]
        force: bool,
        /// Stop every host and lab of this installation, in all run directories
        #[arg(long)]
        all: bool,
    },
    /// Show the router, its vNICs and bytes by path
    Status {
        #[command(flatten)]
        output: Output,
    },
    /// Run a program in a light container with its own vNIC
    Run(Run),
    /// Run another program in a running container
    Exec(Exec),
    /// Stop containers: SIGTERM, then SIGKILL
    Stop {
        /// Seconds between the two signals
        #[arg(long, short, value_name = "SECONDS", default_value_t = 10)]
        time: u64,
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Remove stopped containers
    Rm {
        /// Stop running containers first
        #[arg(long, short)]
        force: bool,
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show the output of a container started with -d
    Logs {
        /// Follow the output until the container ends
        #[arg(long, short)]
        follow: bool,
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List containers
    Ps {
        /// Include stopped containers
        #[arg(long, short, conflicts_with = "all_hosts")]
        all: bool,
        /// List queue pairs instead: peers, and the path of their messages
        #[arg(long, conflicts_with_all = ["all", "all_hosts"])]
        qps: bool,
        /// List rdma_cm identifiers instead: listeners, connections, message counts
        #[arg(long, conflicts_with_all = ["all", "qps", "all_hosts"])]
        cm: bool,
        #[command(flatten)]
        hosts: AllHosts,
        #[command(flatten)]
        output: Output,
    },
    /// Measure round trips between two containers of this host, and show their path
    Ping(Ping),
    /// Create or update objects from YAML or JSON files: networks, groups, rules, QoS classes, quotas, vNICs
    Apply(Apply),
    /// List or watch objects
    Get(Get),
    /// Show an object's spec, status and conditions
    Describe(Describe),
    /// Delete objects
    Delete(Delete),
    /// Show what apply would change
    Diff(Diff),
    /// Show rates, paths and limits of each vNIC and queue pair
    Top(Top),
    /// Show virtual networks, or change one
    #[command(subcommand)]
    Network(Network),
    /// Make vNICs for virtual machines
    #[command(subcommand)]
    Vm(VmAction),
    /// Create hosts from network namespaces on this machine, and use them
    #[command(subcommand)]
    Lab(LabAction),
    /// Show inter-host traffic counters; inject faults
    #[command(subcommand)]
    Wire(WireAction),
    /// Write the packets between this host and others to a file for Wireshark (pcapng)
    Capture(Capture),
    /// Show connections to other hosts; create this host's key
    #[command(subcommand)]
    Peers(Peers),
    /// Make a cluster of hosts that follow one declaration on etcd; show it
    #[command(subcommand)]
    Cluster(Cluster),
    /// Drain a host of a cluster, or remove it
    #[command(subcommand)]
    Host(HostAction),
    /// Move a declared vNIC to another host of a cluster, with its address; its container there is stopped
    Move(MoveVnic),
    /// Check this machine for missing parts, and show how to add them
    Doctor {
        #[command(flatten)]
        output: Output,
    },
    /// Test what reaches what, by vNICs of its own
    #[command(subcommand)]
    Test(TestAction),
    /// Collect what a report of a fault needs into one archive, without secrets
    Bugreport(BugReport),
    /// Start containers with a vNIC for an engine without CDI: an OCI runtime in front of runc or crun
    Runtime(Runtime),
    /// Register FreeFlow's OCI runtime with Docker, for versions before 25
    #[command(subcommand)]
    Docker(Docker),
    /// Give pods vNICs: a CNI plugin
    ///
    /// Container runtimes call it freeflow-cni, a link to freeflow, with their request in the environment and the
    /// network configuration on standard input.
    Cni,
    /// Show the version
    Version,
    /// The container runtimes' side of the CDI device
    #[command(hide = true)]
    Hook(Hook),
    /// Write man pages and shell completions into a directory
    #[command(hide = true)]
    Generate { directory: PathBuf },
    /// Names that may stand at the end of a command line, for shells
    #[command(hide = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
}

#[derive(Clone, Debug, Default, Args)]
pub struct Up {
    /// How the router waits for work [default: adaptive]
    #[arg(long, value_name = "MODE")]
    pub mode: Option<Mode>,
    /// Threads of the router that copy messages, 1 to 32, or auto [default: auto, which is 1 below eight processors]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub workers: Option<ThreadCount>,
    /// Engines of the router that work side by side, each with vNICs of its own: 1, 2, 4, 8, or auto [default: auto,
    /// which is 1 below 16 processors, and without --peers]
    #[arg(long, value_name = "N", value_parser = parse_shards)]
    pub shards: Option<ThreadCount>,
    /// Which vNICs share one of them [default: tenant]
    #[arg(long, value_enum)]
    pub shard_by: Option<ShardBy>,
    /// For tests: copies from this size on are always handed to those threads
    #[arg(long, value_name = "BYTES", hide = true)]
    pub move_bytes_min: Option<u32>,
    /// For tests: how the router reaches processes, itself or by another process
    #[arg(long, value_parser = ["local", "remote"], hide = true)]
    pub attachment: Option<String>,
    /// Addresses of the network `default` [default: 10.111.0.0/16, or another free range]
    #[arg(long, value_name = "CIDR")]
    pub pool: Option<String>,
    /// The part of the pool that this host gives out, where several hosts share the network [default: all of it]
    #[arg(long, value_name = "CIDR")]
    pub range: Option<String>,
    /// Name of this host [default: the peers file's, or the machine's]
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// The other hosts: who they are, where, and their keys
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
    /// Follow a cluster: what is declared, and who the other hosts are; off: no more. Needs --address, and --range
    /// unless the file is a controller's
    #[arg(long, value_name = "FILE", conflicts_with = "peers")]
    pub cluster: Option<PathBuf>,
    /// Join a cluster: the token, @FILE, or - for standard input
    #[arg(long, value_name = "TOKEN", conflicts_with_all = ["peers", "cluster", "range"])]
    pub join: Option<String>,
    /// How long to wait for a controller that admits this host
    #[arg(long, value_name = "SECONDS", requires = "join", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub join_time: Option<u64>,
    /// This host's address for other hosts [default: the peers file's; with --join that on the way to etcd]
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// Directory for persistent state; survives freeflow down [default: as before, the run
    /// directory, which down empties]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Serve metrics (Prometheus) by TCP too, to whoever asks: /metrics, /livez, /readyz; off: no
    /// more [default: as before, off]
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics_listen: Option<MetricsListen>,
    /// Where to put the CDI file [default: /etc/cdi, for the default run directory only]
    #[arg(long, value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
    /// Stay until the router ends, and stop it at SIGTERM: for containers and supervisors
    #[arg(long)]
    pub foreground: bool,
}

/// Value of `--metrics-listen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsListen(pub Option<SocketAddr>);

impl FromStr for MetricsListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "off" => Ok(Self(None)),
            Ok(address) => Ok(Self(Some(address))),
            Err(_) => Err("write an address and a port, such as 127.0.0.1:9464, or off".into()),
        }
    }
}

/// A number of threads, or as many as suit the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadCount {
    Auto,
    Count(u32),
}

impl ThreadCount {
    /// `None`: what suits the machine.
    pub fn count(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::Count(count) => Some(count),
        }
    }

    fn parse(text: &str, may_be: impl Fn(u32) -> bool, hint: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(count) if may_be(count) => Ok(Self::Count(count)),
            _ => Err(hint.into()),
        }
    }
}

/// Value of `--workers`.
fn parse_workers(text: &str) -> Result<ThreadCount, String> {
    ThreadCount::parse(text, |count| (1..=32).contains(&count), "write a number from 1 to 32, or auto")
}

/// Value of `--shards`.
fn parse_shards(text: &str) -> Result<ThreadCount, String> {
    ThreadCount::parse(text, |count| matches!(count, 1 | 2 | 4 | 8), "write 1, 2, 4, 8, or auto")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ShardBy {
    /// All vNICs of a tenant: they reach each other past the router
    Tenant,
    /// Each alone, unless its tenant has a limit or a quota: for vNICs that talk to other hosts
    Vnic,
}

impl ShardBy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Vnic => "vnic",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Spin while there is work, then sleep
    Adaptive,
    /// Always sleep when idle
    Lowcpu,
    /// Never sleep: takes a whole core
    Fastpath,
    /// One of these, as the latency classes of the containers want it
    Auto,
}

impl Mode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Lowcpu => "lowcpu",
            Self::Fastpath => "fastpath",
            Self::Auto => "auto",
        }
    }
}

#[derive(Debug, Args)]
// `lab run` has a group of this name of its own.
#[group(skip)]
#[command(after_help = "The container has its own network, process, IPC and host name space, /proc, /sys, /dev and \
                        vNIC, and Docker's default capabilities less MKNOD. It reads the host's files; what it \
                        writes is its own, at most 1 GiB, and goes with it, except in volumes. For containers from images use podman run --device freeflow.io/net=default.\n\nExit status: the \
                        program's; 128+N if signal N ended it; 125 if freeflow failed, 126 if the program can't be \
                        run, 127 if it was not found.")]
pub struct Run {
    /// Name of the container and its host name [default: a pair of words]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Virtual network; given again, of another vNIC
    #[arg(long, value_name = "NET", default_value = "default")]
    pub network: Vec<String>,
    /// Address of the first vNIC [default: the next free one]
    #[arg(long, value_name = "IP")]
    pub ip: Option<IpAddr>,
    /// A declared vNIC, with its network and address, in the place of a new one
    #[arg(long, value_name = "VNIC", conflicts_with_all = ["network", "ip", "labels"])]
    pub vnic: Option<String>,
    /// Wait until no other host of the cluster uses the declared vNIC
    #[arg(long, requires = "vnic", conflicts_with = "detach")]
    pub wait: bool,
    /// A label of the vNIC, for groups and rules
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = crate::argument_values::parse_label)]
    pub labels: Vec<(String, String)>,
    /// In the background: print the name and return once the program runs
    #[arg(long, short)]
    pub detach: bool,
    /// Remove the container when it ends
    #[arg(long)]
    pub rm: bool,
    /// Set an environment variable; without =VALUE, pass the caller's on
    #[arg(long = "env", short, value_name = "KEY[=VALUE]")]
    pub environment: Vec<String>,
    /// Show a file or directory of the host at another place
    #[arg(long = "volume", short, value_name = "FROM:TO[:ro]")]
    pub volumes: Vec<String>,
    /// Let the container write the host's files
    #[arg(long)]
    pub share_host: bool,
    /// Leave /etc/hosts as it is, without the names of the network's vNICs
    #[arg(long)]
    pub no_names: bool,
    /// Working directory [default: the caller's]
    #[arg(long = "workdir", short, value_name = "DIR")]
    pub working_directory: Option<PathBuf>,
    /// Pass standard input on (always so; for compatibility)
    #[arg(long, short)]
    pub interactive: bool,
    /// Give the program a terminal, if the caller has one
    #[arg(long, short)]
    pub tty: bool,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
// `lab exec` has a group of this name of its own.
#[group(skip)]
pub struct Exec {
    /// Set an environment variable; without =VALUE, pass the caller's on
    #[arg(long = "env", short, value_name = "KEY[=VALUE]")]
    pub environment: Vec<String>,
    /// Working directory [default: the container's]
    #[arg(long = "workdir", short, value_name = "DIR")]
    pub working_directory: Option<PathBuf>,
    /// Pass standard input on (always so; for compatibility)
    #[arg(long, short)]
    pub interactive: bool,
    /// Give the program a terminal, if the caller has one
    #[arg(long, short)]
    pub tty: bool,
    #[arg(value_name = "NAME")]
    pub name: String,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Network {
    /// List virtual networks
    #[command(visible_alias = "list")]
    Ls {
        #[command(flatten)]
        output: Output,
    },
    /// Change a virtual network, also while traffic runs; it stays so over restarts
    Set {
        /// The network, see freeflow network ls
        #[arg(value_name = "NETWORK")]
        name: String,
        /// Which way messages between containers of one host go
        #[arg(long, value_name = "PATH")]
        data_path: DataPathChoice,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DataPathChoice {
    /// Directly between containers of one tenant, else by the router; for now a network is one tenant's, so as direct
    Auto,
    /// Directly where that is possible, else by the router
    Direct,
    /// All by the router
    Routed,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The messages go between two QPs that this command makes at the containers' own vNICs, by the same \
                        library and router as their programs': nothing runs in the containers. FROM and TO are names, \
                        ids or addresses."
)]
pub struct Ping {
    /// How many round trips to measure, after some hundreds to warm up
    #[arg(long, short, value_name = "NUMBER", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub count: u32,
    /// Size of the messages, bytes
    #[arg(long, short, value_name = "BYTES", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub size: u32,
    #[command(flatten)]
    pub output: Output,
    /// The container whose vNIC begins
    #[arg(value_name = "FROM")]
    pub from: String,
    /// The one whose vNIC answers
    #[arg(value_name = "TO")]
    pub to: String,
}

#[derive(Debug, Subcommand)]
pub enum WireAction {
    /// Show other hosts, queue pairs with peers there, and counters
    Status {
        #[command(flatten)]
        output: Output,
    },
    /// Drop, delay or corrupt outgoing packets on purpose; each call replaces the last
    Faults(FaultArguments),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Off {
    Off,
}

#[derive(Debug, Args)]
pub struct FaultArguments {
    /// The word off: no more faults
    #[arg(value_name = "off", conflicts_with_all = ["loss", "duplicate", "reorder", "corrupt", "delay"])]
    pub off: Option<Off>,
    /// Share of packets to drop, such as 0.1%
    #[arg(long, value_name = "SHARE", value_parser = crate::argument_values::parse_share)]
    pub loss: Option<u32>,
    /// Share of packets to send twice
    #[arg(long, value_name = "SHARE", value_parser = crate::argument_values::parse_share)]
    pub duplicate: Option<u32>,
    /// Share of packets to send a few packets late
    #[arg(long, value_name = "SHARE", value_parser = crate::argument_values::parse_share)]
    pub reorder: Option<u32>,
    /// Share of packets to invert a bit of
    #[arg(long, value_name = "SHARE", value_parser = crate::argument_values::parse_share)]
    pub corrupt: Option<u32>,
    /// Time to hold packets back, such as 50us
    #[arg(long, value_name = "TIME", value_parser = crate::argument_values::parse_time)]
    pub delay: Option<u64>,
    /// Share of packets to hold back
    #[arg(long, value_name = "SHARE", value_parser = crate::argument_values::parse_share, default_value = "100%", requires = "delay")]
    pub delayed: u32,
    /// The same seed and packets give the same faults
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
}

#[derive(Debug, Args)]
pub struct Capture {
    /// The file; - for standard output [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub write: Option<PathBuf>,
    /// End after so many packets
    #[arg(long, short, value_name = "NUMBER")]
    pub count: Option<u64>,
    /// End after so many seconds
    #[arg(long, short, value_name = "SECONDS")]
    pub seconds: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub enum LabAction {
    /// Create hosts, connect them, and start each
    Up(LabUp),
    /// Stop a lab, or remove the remains of one
    Down {
        #[command(flatten)]
        of: LabOf,
        /// Stop running containers too
        #[arg(long, short)]
        force: bool,
    },
    /// Show the hosts of a lab
    Status {
        #[command(flatten)]
        of: LabOf,
        #[command(flatten)]
        output: Output,
    },
    /// List the containers of all hosts
    Ps {
        #[command(flatten)]
        of: LabOf,
        /// Include stopped containers
        #[arg(long, short)]
        all: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Run a program in a container of a host: freeflow run
    Run {
        #[command(flatten)]
        at: LabHost,
        #[command(flatten)]
        run: Run,
    },
    /// Run another program in a running container: freeflow exec
    Exec {
        #[command(flatten)]
        of: LabOf,
        /// Its host, where several have a container of that name
        #[arg(long, value_name = "N")]
        host: Option<u32>,
        #[command(flatten)]
        exec: Exec,
    },
    /// Stop containers: SIGTERM, then SIGKILL
    Stop {
        #[command(flatten)]
        of: LabOf,
        /// Their host, where several have containers of these names
        #[arg(long, value_name = "N")]
        host: Option<u32>,
        /// Seconds between the two signals
        #[arg(long, short, value_name = "SECONDS", default_value_t = 10)]
        time: u64,
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Remove stopped containers
    Rm {
        #[command(flatten)]
        of: LabOf,
        /// Their host, where several have containers of these names
        #[arg(long, value_name = "N")]
        host: Option<u32>,
        /// Stop running containers first
        #[arg(long, short)]
        force: bool,
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show the output of a container started with -d
    Logs {
        #[command(flatten)]
        of: LabOf,
        /// Its host, where several have a container of that name
        #[arg(long, value_name = "N")]
        host: Option<u32>,
        /// Follow the output until the container ends
        #[arg(long, short)]
        follow: bool,
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Disconnect a host from the others
    Cut {
        #[command(flatten)]
        at: LabHost,
    },
    /// Reconnect a host
    Heal {
        #[command(flatten)]
        at: LabHost,
    },
    /// Run a program in a host's own network, outside of any container
    Enter {
        #[command(flatten)]
        at: LabHost,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
        command: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct LabUp {
    /// How many hosts, up to 32
    #[arg(long, value_name = "N")]
    pub hosts: u32,
    /// Largest packet between the hosts, bytes, 1280 to 9000
    #[arg(long, value_name = "BYTES", default_value_t = 1500)]
    pub mtu: u32,
    /// Whether packets between the hosts are encrypted and authenticated
    #[arg(long, value_name = "KIND", value_parser = ["plain", "sealed"], default_value = "plain")]
    pub wire: String,
    /// How the routers wait for work [default: adaptive]
    #[arg(long, value_name = "MODE")]
    pub mode: Option<Mode>,
    /// Threads of each router that copy messages, 1 to 32, or auto [default: auto]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub workers: Option<ThreadCount>,
    /// Engines of each router that work side by side: 1, 2, 4, 8, or auto [default: auto]
    #[arg(long, value_name = "N", value_parser = parse_shards)]
    pub shards: Option<ThreadCount>,
    /// Which vNICs share one of them [default: tenant]
    #[arg(long, value_enum)]
    pub shard_by: Option<ShardBy>,
    /// For tests, as in `up`
    #[arg(long, value_name = "BYTES", hide = true)]
    pub move_bytes_min: Option<u32>,
    /// For tests, as in `up`
    #[arg(long, value_parser = ["local", "remote"], hide = true)]
    pub attachment: Option<String>,
    /// Name of the lab [default: lab]
    #[arg(long, alias = "lab", value_name = "LAB")]
    pub name: Option<String>,
}

#[derive(Debug, Args)]
pub struct LabOf {
    /// Name of the lab [default: the only one]
    #[arg(long, value_name = "LAB")]
    pub lab: Option<String>,
}

#[derive(Debug, Args)]
pub struct LabHost {
    #[command(flatten)]
    pub of: LabOf,
    /// Number of the host, from 1
    #[arg(long, value_name = "N")]
    pub host: u32,
}

#[derive(Debug, Subcommand)]
pub enum Peers {
    /// Create a private key file, if there is none yet, and print the public key
    Key {
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// List the other hosts
    Ls {
        #[command(flatten)]
        output: Output,
    },
    /// Reload the router's peers file
    Reload,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Output {
    /// Output format
    #[arg(long = "output", short = 'o', value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Engines call it freeflow-runtime, a link to freeflow. Without --network and --vnic an annotation \
                        of the container decides, freeflow.io/network or freeflow.io/vnic, and else it is the \
                        network default. The settings name the real runtime and who may choose which network."
)]
pub struct Runtime {
    /// The network of all containers of this runtime; given again, another vNIC of each
    #[arg(long, value_name = "NETWORK")]
    pub network: Vec<String>,
    /// The declared vNIC of the one container of this runtime
    #[arg(long, value_name = "VNIC", conflicts_with = "network")]
    pub vnic: Option<String>,
    /// The settings [default: /etc/freeflow/runtime.json, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The runtime's own command line
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "RUNC")]
    pub words: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
pub enum Docker {
    /// Add the runtime `freeflow` to Docker's settings
    Register(DockerSettings),
    /// Remove it from there
    Unregister(DockerSettings),
}

#[derive(Debug, Args)]
pub struct DockerSettings {
    /// Docker's settings
    #[arg(long, value_name = "FILE", default_value = "/etc/docker/daemon.json")]
    pub file: PathBuf,
    /// For packages: register once, which this file notes, and unregister only then
    #[arg(long, value_name = "FILE", hide = true)]
    pub mark: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Hook {
    /// The container's virtual network
    #[arg(long, default_value = "default")]
    pub network: String,
    /// The declared vNIC that the container gets, in the place of a new one
    #[arg(long, conflicts_with_all = ["network", "labels"])]
    pub vnic: Option<String>,
    /// A label of the vNIC, which rules and policies may select by
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = crate::argument_values::parse_label)]
    pub labels: Vec<(String, String)>,
    pub stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stage {
    #[value(name = "createRuntime")]
    CreateRuntime,
    #[value(name = "poststop")]
    Poststop,
}
