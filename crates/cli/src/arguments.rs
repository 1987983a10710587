//! The command line. Its help texts are a checked-in list: `tests/help.txt`.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Debug, Parser)]
#[command(
    name = "freeflow",
    version,
    about = "Virtual RDMA NICs for containers, with or without RDMA hardware",
    after_help = "First steps:\n  freeflow up\n  freeflow run --name a -d -- ib_write_bw\n  \
                  freeflow run -- ib_write_bw IP_OF_A\n  freeflow status",
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub struct Arguments {
    /// Where this host keeps its sockets and state; several hosts can live on one machine
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "FREEFLOW_RUN_DIR",
        default_value = crate::run_dir::DEFAULT,
        hide_env_values = true
    )]
    pub run_dir: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Bring this host up, or mend it: router, bridge, CDI device; returns when ready
    Up(Up),
    /// Take this host down
    Down {
        /// Also when containers are running: end them
        #[arg(long, short)]
        force: bool,
    },
    /// Show the router, its vNICs and where the bytes went
    Status {
        #[command(flatten)]
        output: Output,
    },
    /// Run a program in a light container with its own vNIC
    Run(Run),
    /// Run another program in a running container
    Exec(Exec),
    /// End containers: SIGTERM, then SIGKILL
    Stop {
        /// Seconds between the two
        #[arg(long, short, value_name = "SECONDS", default_value_t = 10)]
        time: u64,
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Remove ended containers
    Rm {
        /// Also running ones: end them first
        #[arg(long, short)]
        force: bool,
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show what a container started with -d has printed
    Logs {
        /// Go on until the container ends
        #[arg(long, short)]
        follow: bool,
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// List containers
    Ps {
        /// Ended ones too
        #[arg(long, short)]
        all: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Show virtual networks
    #[command(subcommand)]
    Network(Network),
    /// Find out what is missing on this machine, and how to mend it
    Doctor {
        #[command(flatten)]
        output: Output,
    },
    /// Show the version
    Version,
    /// The container runtimes' side of the CDI device
    #[command(hide = true)]
    Hook(Hook),
}

#[derive(Debug, Args)]
pub struct Up {
    /// How the router waits for work [default: adaptive]
    #[arg(long, value_name = "MODE")]
    pub mode: Option<Mode>,
    /// Addresses of the network `default` [default: 10.111.0.0/16, or another free range]
    #[arg(long, value_name = "CIDR")]
    pub pool: Option<String>,
    /// Name of this host [default: the machine's]
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// Where to put the CDI file [default: /etc/cdi, for the default run directory only]
    #[arg(long, value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Spin while there is work, then sleep
    Adaptive,
    /// Always sleep when idle
    Lowcpu,
    /// Never sleep: takes a whole core
    Fastpath,
}

impl Mode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Lowcpu => "lowcpu",
            Self::Fastpath => "fastpath",
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "The container has its own network, process, IPC and host name space, /proc, /sys, /dev and \
                        vNIC, and Docker's default capabilities less MKNOD. It shares the host's files: for \
                        containers from images use podman run --device freeflow.io/net=default.\n\nExit status: the \
                        program's; 128+N if signal N ended it; 125 if freeflow failed, 126 if the program can't be \
                        run, 127 if it was not found.")]
pub struct Run {
    /// Name of the container and its host name [default: a pair of words]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Virtual network
    #[arg(long, value_name = "NET", default_value = "default")]
    pub network: String,
    /// Address of the vNIC [default: the next free one]
    #[arg(long, value_name = "IP")]
    pub ip: Option<IpAddr>,
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
    Ls {
        #[command(flatten)]
        output: Output,
    },
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
pub struct Hook {
    /// The container's virtual network
    #[arg(long, default_value = "default")]
    pub network: String,
    pub stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stage {
    #[value(name = "createRuntime")]
    CreateRuntime,
    #[value(name = "poststop")]
    Poststop,
}
