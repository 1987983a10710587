//! The command line of declared control: apply, get, describe, delete, diff, top, cluster.

use crate::arguments::Output;
use clap::{Args, Subcommand, ValueEnum};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

const KINDS: &str = "Kinds: network (net), group, accessrule (rule), qosclass (qos), quota, vnic, host; in any spelling, also \
                     plural.";
const STATUSES: &str = "Exit status: 0 done; 1 failed; 2 wrong usage; 3 refused as invalid or in conflict; 4 not found; \
                        5 not permitted.";
const MANAGED: &str = "Objects that have a manager, such as Kubernetes, are changed and deleted there: here they are \
                       refused (exit status 3), also to root, unless --take-over is given.";

/// Which way objects are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line each
    Table,
    /// A longer line each
    Wide,
    /// As the API has it
    Json,
    /// As they can be applied again
    Yaml,
}

impl Format {
    /// Lines for people.
    pub fn is_text(self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub struct ObjectOutput {
    /// Output format
    #[arg(long = "output", short = 'o', value_name = "FORMAT", default_value = "table")]
    pub format: Format,
}

/// Of what is declared: this host's, or all hosts'.
#[derive(Debug, Args)]
pub struct OfCluster {
    /// For all hosts of a cluster, by an operator's file
    #[arg(long, value_name = "FILE", env = "FREEFLOW_CLUSTER", hide_env_values = true)]
    pub cluster: Option<PathBuf>,
}

/// Of containers and their traffic: this host's, or all hosts'.
#[derive(Debug, Args)]
pub struct AllHosts {
    /// Of all hosts of a cluster, as each has last said
    #[arg(long)]
    pub all_hosts: bool,
    /// The cluster's file [default: FREEFLOW_CLUSTER, or the one that this host follows by]
    #[arg(long, value_name = "FILE", requires = "all_hosts")]
    pub cluster: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = format!("All objects are changed together or none is. The same again changes nothing. Of a cluster more than 100 \
                        objects are changed in parts, after all were checked; what then fails is said by name (exit \
                        status 6).\n\n{MANAGED}\n\n{STATUSES}"))]
pub struct Apply {
    /// YAML or JSON: a file, a folder of files, or - for standard input; may be given several times
    #[arg(long = "file", short = 'f', required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Check and report, but change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Also objects that have a manager, such as Kubernetes, that is gone
    #[arg(long)]
    pub take_over: bool,
    #[command(flatten)]
    pub of: OfCluster,
    #[command(flatten)]
    pub output: ObjectOutput,
}

#[derive(Debug, Args)]
#[command(after_help = format!("{KINDS}\n\n{STATUSES}"))]
pub struct Get {
    #[arg(value_name = "KIND")]
    pub kind: String,
    /// Of a vNIC also that of its container, without -w
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Only objects with these labels
    #[arg(long = "selector", short = 'l', value_name = "KEY=VALUE,…")]
    pub labels: Option<String>,
    /// Watch: print each change
    #[arg(long, short)]
    pub watch: bool,
    #[command(flatten)]
    pub of: OfCluster,
    #[command(flatten)]
    pub output: ObjectOutput,
}

#[derive(Debug, Args)]
#[command(after_help = format!("{KINDS}\n\n{STATUSES}"))]
pub struct Describe {
    #[arg(value_name = "KIND")]
    pub kind: String,
    /// Without one: all; for the host: this one; of a vNIC also that of its container
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    #[command(flatten)]
    pub of: OfCluster,
    #[command(flatten)]
    pub output: ObjectOutput,
}

#[derive(Debug, Args)]
#[command(after_help = format!("{KINDS}\n\n{MANAGED}\n\n{STATUSES}"))]
pub struct Delete {
    #[arg(value_name = "KIND", required_unless_present = "files", requires = "names")]
    pub kind: Option<String>,
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// The objects of a file, a folder of files, or - for standard input
    #[arg(long = "file", short = 'f', value_name = "FILE", conflicts_with = "kind")]
    pub files: Vec<PathBuf>,
    /// Check and report, but change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Also objects that have a manager, such as Kubernetes, that is gone
    #[arg(long)]
    pub take_over: bool,
    /// Ignore objects that do not exist
    #[arg(long)]
    pub ignore_not_found: bool,
    #[command(flatten)]
    pub of: OfCluster,
    #[command(flatten)]
    pub output: ObjectOutput,
}

#[derive(Debug, Args)]
#[command(after_help = "Exit status: 0 nothing would change; 1 something would; 2 and above: it failed.")]
pub struct Diff {
    /// YAML or JSON: a file, a folder of files, or - for standard input; may be given several times
    #[arg(long = "file", short = 'f', required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub of: OfCluster,
    #[command(flatten)]
    pub output: ObjectOutput,
}

/// By what `top` sorts: the highest first, names from a to z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopSort {
    /// Bits a second in and out
    Rate,
    /// Messages a second
    Messages,
    /// How much of the time limits held something back
    Held,
    /// Completions with an error
    Errors,
    /// Name of the container, or of the vNIC
    Name,
}

#[derive(Debug, Args)]
#[command(
    after_help = "On a terminal it redraws until q or Ctrl-C. OUT, IN: payload; bits as READs go, from who is read. PATH: which way most \
                        messages went. HELD: time for which limits held the vNIC or QP back; a vNIC adds up its QPs."
)]
pub struct Top {
    /// End after so many rounds [default: 1 where it does not print to a terminal, else none]
    #[arg(long, short = 'n', value_name = "ROUNDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    /// End after one round
    #[arg(long, conflicts_with = "rounds")]
    pub once: bool,
    /// Between two rounds
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = parse_delay)]
    pub delay: Duration,
    /// Queue pairs too
    #[arg(long, conflicts_with = "all_hosts")]
    pub qps: bool,
    #[command(flatten)]
    pub hosts: AllHosts,
    /// Order of the rows
    #[arg(long, value_name = "COLUMN", default_value = "rate")]
    pub sort: TopSort,
    #[command(flatten)]
    pub output: crate::arguments::Output,
}

fn parse_delay(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("write seconds, 0.1 to 3600".into()),
    }
}

#[derive(Debug, Args)]
pub struct MoveVnic {
    /// A vNIC that is declared for the cluster
    #[arg(value_name = "VNIC")]
    pub vnic: String,
    /// Host that gets it
    #[arg(long, value_name = "HOST")]
    pub to: String,
    /// Also from a host that can't be reached
    #[arg(long)]
    pub force: bool,
    /// Longest wait until the host has it
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub seconds: u64,
    #[command(flatten)]
    pub of: OfCluster,
}

#[derive(Debug, Subcommand)]
pub enum Cluster {
    /// Make the keys and certificates of a cluster to be, for etcd, operators and controllers
    Authority(Authority),
    /// Make a cluster in etcd, once
    Init {
        /// Addresses of the network `default`, of which hosts that join get a part [default: 10.111.0.0/16]
        #[arg(long, value_name = "CIDR")]
        pool: Option<String>,
        /// Up to so many hosts all are connected to each other; of more hosts those that have networks of a tenant
        /// together [default: 64]
        #[arg(long, value_name = "HOSTS")]
        full_mesh: Option<u32>,
        /// Take blocks of addresses back from a host that is silent for so long: 20s to 365d, or never [default: 24h]
        #[arg(long, value_name = "TIME", value_parser = parse_reclaim_after)]
        reclaim_after: Option<ReclaimAfter>,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Change what `init` has set
    Set {
        /// Take blocks of addresses back from a host that is silent for so long: 20s to 365d, or never
        #[arg(long, value_name = "TIME", required = true, value_parser = parse_reclaim_after)]
        reclaim_after: ReclaimAfter,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Tokens, by which hosts join
    #[command(subcommand)]
    Token(TokenAction),
    /// Show its hosts: how far each has followed, and what it can't follow
    Status {
        #[command(flatten)]
        of: OfCluster,
        #[command(flatten)]
        output: crate::arguments::Output,
    },
    /// Print all that is declared, as YAML that can be applied again: a backup
    Export {
        #[command(flatten)]
        of: OfCluster,
    },
    /// Declare all that `export` has printed, in a cluster where nothing is declared
    Import {
        /// YAML or JSON: a file, a folder of files, or - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Also where something is declared: objects of the file are changed, others stay
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Have hosts follow an etcd that was restored from a backup
    Restored {
        #[command(flatten)]
        of: OfCluster,
    },
    /// Forget a host that is gone for good; its addresses may be others' then
    Remove {
        #[arg(value_name = "HOST")]
        host: String,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Follow the cluster, as the process that `freeflow up` starts
    #[command(hide = true)]
    Follow,
}

#[derive(Debug, Subcommand)]
pub enum HostAction {
    /// Start no more containers with the cluster's vNICs on a host; those that run go on
    Drain {
        #[arg(value_name = "HOST")]
        host: String,
        /// Stop those of `freeflow run`, too
        #[arg(long)]
        stop: bool,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Start containers on a host again that was drained
    Undrain {
        #[arg(value_name = "HOST")]
        host: String,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Forget a host that is gone for good: the same as `freeflow cluster remove`
    Remove {
        #[arg(value_name = "HOST")]
        host: String,
        #[command(flatten)]
        of: OfCluster,
    },
}

#[derive(Debug, Args)]
pub struct Authority {
    /// A directory that is not there yet
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Addresses of the machines that etcd's members run on: one, or three
    #[arg(long, value_name = "IP", required = true, value_delimiter = ',')]
    pub etcd: Vec<IpAddr>,
    /// Before all keys in etcd
    #[arg(long, value_name = "PATH", default_value = freeflow_cluster::DEFAULT_ROOT)]
    pub root: String,
    /// Packets between hosts are encrypted and authenticated
    #[arg(long)]
    pub sealed: bool,
}

#[derive(Debug, Subcommand)]
pub enum TokenAction {
    /// Make a token and print it
    Create {
        /// Hosts that can join by it
        #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=256))]
        uses: u32,
        /// For how long it is good: 90s, 30m, 24h or 7d, up to 30d
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_token_time)]
        expires: Duration,
        #[command(flatten)]
        of: OfCluster,
    },
    /// Show tokens: uses that are left, until when, and who has joined by each
    List {
        #[command(flatten)]
        of: OfCluster,
        #[command(flatten)]
        output: crate::arguments::Output,
    },
    /// End a token: nobody joins by it any more
    Revoke {
        #[arg(value_name = "ID")]
        id: String,
        #[command(flatten)]
        of: OfCluster,
    },
}

/// Seconds; `None`: never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimAfter(pub Option<u64>);

fn parse_reclaim_after(text: &str) -> Result<ReclaimAfter, String> {
    if text == "never" {
        return Ok(ReclaimAfter(None));
    }
    match parse_long_time(text)?.as_secs() {
        seconds if freeflow_cluster::RECLAIM_AFTER_S.contains(&seconds) => Ok(ReclaimAfter(Some(seconds))),
        _ => Err("write a time from 20s to 365d, or never".into()),
    }
}

fn parse_token_time(text: &str) -> Result<Duration, String> {
    match parse_long_time(text)? {
        Duration::ZERO => Err("a token that is good for no time is none".into()),
        time if time > freeflow_cluster::TOKEN_TIME_MAX => Err("a token is good for 30d at most".into()),
        time => Ok(time),
    }
}

fn parse_long_time(text: &str) -> Result<Duration, String> {
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).unwrap_or_default();
    let unit_s = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err("a time has a unit: s, m, h or d".into()),
    };
    let count: u32 = digits.parse().map_err(|_| "not a time, like 24h".to_string())?;
    Ok(Duration::from_secs(u64::from(count) * unit_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_token_has_a_unit() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), ("24h", 86_400), ("30d", 30 * 86_400)] {
            assert_eq!(parse_token_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for (text, seconds) in [("20s", Some(20)), ("365d", Some(365 * 86_400)), ("never", None)] {
            assert_eq!(parse_reclaim_after(text), Ok(ReclaimAfter(seconds)), "{text}");
        }
        for bad in ["", "19s", "366d", "Never", "0", "-1h"] {
            assert!(parse_reclaim_after(bad).is_err(), "{bad}");
        }
        for bad in ["", "h", "24", "0h", "31d", "-1h", "1.5h", "4294967296d", "1\u{e9}"] {
            assert!(parse_token_time(bad).is_err(), "{bad}");
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum VmAction {
    /// Make a vNIC for a virtual machine, and print QEMU's arguments for it
    #[command(
        after_help = "The same again prints the same arguments, of the vNIC that is there. In the guest, the agent \
                            freeflow-guest serves the vNIC to programs."
    )]
    Attach {
        /// Name of the virtual machine
        #[arg(value_name = "NAME")]
        name: String,
        /// Virtual network
        #[arg(long, value_name = "NET", default_value = "default")]
        network: String,
        /// Address of the vNIC [default: the next free one]
        #[arg(long, value_name = "IP")]
        address: Option<IpAddr>,
        /// Size of the shared-memory device: bytes, or with M or G
        #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = crate::argument_values::parse_device_size)]
        size: u64,
        #[command(flatten)]
        output: Output,
    },
    /// List vNICs of virtual machines
    #[command(visible_alias = "list")]
    Ls {
        #[command(flatten)]
        output: Output,
    },
    /// End the vNIC of a virtual machine
    Detach {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}
