//! `freeflow cluster`: hosts that follow one declaration on etcd.
mod answers;
mod claims;
mod drain;
mod host;
mod join;
mod moving;
mod process;
mod tokens;
mod views;

pub use answers::{ClusterApi, RESTORE};
pub use claims::{Answer, Claimed, Claims, announce, claim, meet};
pub use drain::{host, why_drained};
pub use host::{Directory, Memory, Own, check_drained, prepare};
pub use join::{joined, renew_if_due};
pub use moving::move_vnic;
pub use process::{end, log_file, note_problems, note_state, problems, record, rotate_log, start};
pub use views::vnics;

use crate::arguments::Format;
use crate::arguments_control::{Cluster, OfCluster, ReclaimAfter};
use crate::control::api::{EXIT_PARTLY, Refusal, Trouble};
use crate::control::changes::{declared, list_of};
use crate::control::columns::SILENCE_S;
use crate::failure::{Failure, Result};
use crate::output;
use crate::record::now_s;
use freeflow_cluster::{ClusterError, ClusterFile, Drained, Followed, HostRecord, Operator, Problem, Removed, View};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_manifest::to_yaml;
use freeflow_orchestrator::CLUSTER_KINDS;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A refusal stays one, with what it names.
impl From<ClusterError> for Trouble {
    fn from(error: ClusterError) -> Self {
        match error {
            ClusterError::Refused(refusal) => Self::Refused(Box::new(Refusal::from(*refusal))),
            ClusterError::Partly(partly) => {
                Self::Failed(Failure::new(partly.to_string()).with_code(EXIT_PARTLY).in_lines())
            }
            other => Self::Failed(Failure::new(other.to_string())),
        }
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        Trouble::from(error).into()
    }
}

pub fn cluster(run_dir: &RunDir, action: Cluster) -> Result<()> {
    match action {
        Cluster::Authority(asked) => tokens::authority(&asked),
        Cluster::Init { pool, full_mesh, reclaim_after, of } => {
            tokens::init(&file_as_it_is(run_dir, of.cluster)?, pool.as_deref(), full_mesh, reclaim_after)
        }
        Cluster::Set { reclaim_after: ReclaimAfter(seconds), of } => {
            Operator::set_reclaim_after(&file(run_dir, &of)?, seconds)?;
            output::line(reclaims(seconds));
            Ok(())
        }
        Cluster::Token(action) => tokens::tokens(run_dir, action),
        Cluster::Status { of, output } => status(&file(run_dir, &of)?, output.format),
        Cluster::Remove { host, of } => remove(&file(run_dir, &of)?, &host),
        Cluster::Export { of } => export(&file(run_dir, &of)?),
        Cluster::Restored { of } => {
            Operator::restored(&file(run_dir, &of)?)?;
            output::line("Hosts follow etcd as it is now; look at what is declared: freeflow cluster status");
            Ok(())
        }
        Cluster::Follow | Cluster::Import { .. } => unreachable!("it was dispatched before"),
    }
}

/// For people.
fn reclaims(after_s: Option<u64>) -> String {
    match after_s {
        Some(seconds) => format!(
            "Blocks of a host that is silent for {} are taken back; its vNICs are stopped before.",
            output::duration(seconds)
        ),
        None => "Blocks of a host that is silent stay its, until it is removed.".into(),
    }
}

fn remove(file: &ClusterFile, host: &str) -> Result<()> {
    say_removed(host, &Operator::open(file)?.remove_host(host)?);
    Ok(())
}

fn say_removed(host: &str, Removed { blocks, is_pending, is_by_hand, token }: &Removed) {
    output::line(match is_pending {
        false => format!("Host {host} is forgotten; {blocks} blocks of addresses are free."),
        true => format!(
            "Host {host} is to be forgotten, and no controller has taken its user out of etcd yet: until one is up its \
             certificate works, it can write itself back, and its {blocks} blocks of addresses stay its."
        ),
    });
    if *is_by_hand {
        output::line(format!(
            "It had no token: if it has a user in etcd, that can write the host back: etcdctl user delete {host}; etcdctl \
             role delete {host}"
        ));
    }
    if let Some((id, uses)) = token {
        output::line(format!(
            "It had joined by the token {id}, by which {uses} more can: freeflow cluster token revoke {id}"
        ));
    }
}

/// In the order in which the objects can be made.
fn export(file: &ClusterFile) -> Result<()> {
    let state = Operator::open(file)?.state()?;
    let all = CLUSTER_KINDS.into_iter().flat_map(|kind| state.objects(kind));
    let objects: Vec<Value> = all.map(|object| declared(&json!(object))).collect();
    output::line(to_yaml(&list_of(&objects)).trim_end());
    Ok(())
}

/// The file that is given, else the one that this host follows by.
fn file(run_dir: &RunDir, of: &OfCluster) -> Result<ClusterFile> {
    file_of(run_dir, of.cluster.clone())
}

/// The same.
pub fn file_of(run_dir: &RunDir, given: Option<PathBuf>) -> Result<ClusterFile> {
    Ok(file_as_it_is(run_dir, given)?.as_own())
}

fn file_as_it_is(run_dir: &RunDir, given: Option<PathBuf>) -> Result<ClusterFile> {
    Ok(ClusterFile::read(&path_of(run_dir, given)?)?)
}

/// The path of that file.
pub fn path_of(run_dir: &RunDir, given: Option<PathBuf>) -> Result<PathBuf> {
    let given = given.or_else(|| run_dir.settings()?.cluster);
    given.ok_or_else(|| Failure::new("which cluster: --cluster FILE, or FREEFLOW_CLUSTER").with_code(2))
}

/// One host of the cluster, as `status` shows it.
#[derive(Serialize)]
struct HostStatus {
    name: String,
    #[serde(flatten)]
    record: Option<HostRecord>,
    revision: Option<u64>,
    /// Since it last said something, by the clock here and there.
    age_s: Option<u64>,
    /// Its blocks and declared vNICs were taken back, since it was silent for too long.
    reclaimed: bool,
    /// An operator has drained it.
    drained: Option<Drained>,
    problems: Vec<Problem>,
}

#[derive(Serialize)]
struct Status {
    cluster: String,
    /// Blocks of a host that is silent for so long are taken back, seconds; null: never.
    reclaim_after_s: Option<u64>,
    /// Of etcd's.
    revision: u64,
    /// The last one that changed what is declared.
    declared_revision: u64,
    hosts: Vec<HostStatus>,
}

fn host_status(name: &str, view: &View, now_s: u64) -> HostStatus {
    let record = view.hosts().get(name).map(|(_, record)| record.clone());
    let followed: Option<&Followed> = view.followed().get(name);
    HostStatus {
        name: name.into(),
        record,
        revision: followed.map(|followed| followed.revision),
        age_s: followed.map(|followed| now_s.saturating_sub(followed.at_s)),
        reclaimed: view.is_reclaimed(name),
        drained: view.drained().get(name).cloned(),
        problems: followed.map(|followed| followed.problems.clone()).unwrap_or_default(),
    }
}

fn status(file: &ClusterFile, format: Format) -> Result<()> {
    let view = Operator::open(file)?.view()?;
    let now_s = now_s();
    let names: BTreeSet<&String> = view.hosts().keys().chain(view.followed().keys()).collect();
    let status = Status {
        cluster: view.identity()?.id.clone(),
        reclaim_after_s: view.reclaim_after_s(),
        revision: view.revision().0,
        declared_revision: view.declared_revision().0,
        hosts: names.into_iter().map(|name| host_status(name, &view, now_s)).collect(),
    };
    if format == Format::Json {
        output::json(&status);
        return Ok(());
    }
    output::line(format!("Cluster {}: {} hosts", status.cluster, status.hosts.len()));
    let mut rows = vec![["HOST", "ADDRESS", "FOLLOWS", "SAID", "PROBLEMS"].map(String::from).to_vec()];
    for host in &status.hosts {
        let follows = match host.revision {
            Some(revision) if revision >= status.declared_revision => "all",
            Some(_) => "not all yet",
            None => "nothing yet",
        };
        let said = match host.age_s {
            Some(age_s) if host.reclaimed => format!("{} ago: its blocks were taken back", output::duration(age_s)),
            Some(age_s) if age_s > SILENCE_S => format!("{} ago: silent", output::duration(age_s)),
            Some(age_s) => format!("{} ago", output::duration(age_s)),
            None => "-".into(),
        };
        let said = if host.drained.is_some() { format!("{said}, drained") } else { said };
        let address = host.record.as_ref().map_or("-".into(), |record| record.address.to_string());
        rows.push(vec![host.name.clone(), address, follows.into(), said, host.problems.len().to_string()]);
    }
    output::table(&rows);
    for host in &status.hosts {
        host.problems.iter().for_each(|problem| output::line(format!("{}: {problem}", host.name)));
    }
    Ok(())
}

/// Reads the file of a host that is to follow by it.
pub fn read(path: &Path) -> Result<ClusterFile> {
    Ok(ClusterFile::read(path)?)
}
