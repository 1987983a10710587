//! The command line of `freeflow test` and `freeflow bugreport`.

use crate::arguments::Output;
use clap::{Args, Subcommand, ValueEnum};
use std::net::Ipv4Addr;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum TestAction {
    /// Check networks and hosts with short-lived vNICs: plain IP, RDMA, rdma_cm, declared rules
    Connectivity(Connectivity),
    /// One end of a test, in its container
    #[command(hide = true)]
    End(TestEnd),
}

#[derive(Debug, Args)]
#[command(
    after_help = "Without --peer, --all-hosts and --lab both ends are on this host. An end on another host is started \
                        there, by its operator: freeflow test connectivity --respond.\n\nExit status: 0 if all checks \
                        passed, else 1."
)]
pub struct Connectivity {
    /// A network to test; may be repeated [default: all, up to 16]
    #[arg(long = "network", value_name = "NET")]
    pub networks: Vec<String>,
    /// A label of the vNIC that asks, for groups and rules
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = crate::argument_values::parse_label)]
    pub labels: Vec<(String, String)>,
    /// A label of the vNIC that answers
    #[arg(long = "to-label", value_name = "KEY=VALUE", value_parser = crate::argument_values::parse_label)]
    pub to_labels: Vec<(String, String)>,
    /// Ask an end that answers on another host, at this address
    #[arg(long = "peer", value_name = "IP", conflicts_with_all = ["all_hosts", "lab", "respond"])]
    pub peers: Vec<Ipv4Addr>,
    /// Ask the ends that answer on other hosts of the cluster
    #[arg(long, conflicts_with_all = ["lab", "respond"])]
    pub all_hosts: bool,
    /// Test each two hosts of a lab of this machine
    #[arg(long, value_name = "LAB", num_args = 0..=1, conflicts_with = "respond")]
    pub lab: Option<Option<String>>,
    /// Answer other hosts, in one network, until the time is over or Ctrl-C
    #[arg(long)]
    pub respond: bool,
    /// How long to answer
    #[arg(long, value_name = "SECONDS", requires = "respond", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: u64,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    Ask,
    Answer,
    Respond,
}

#[derive(Debug, Args)]
pub struct TestEnd {
    #[arg(long, value_enum)]
    pub role: Role,
    #[arg(long)]
    pub peer: Option<Ipv4Addr>,
    #[arg(long, default_value_t = 600)]
    pub seconds: u64,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The archive has versions, what doctor and status say, configuration, declared objects, logs, counters \
                        and the state of interfaces, mounts and cgroups. Keys, tokens, certificates and environment \
                        variables of containers are left out. Look through it before you pass it on: it names hosts, \
                        addresses, networks and containers."
)]
pub struct BugReport {
    /// The archive [default: freeflow-bugreport-HOST-TIME.tar in the working directory]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}
