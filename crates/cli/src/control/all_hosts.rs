//! `ps` and `top` of all hosts of a cluster, as each has last said.
use super::columns::{age, text};
use super::top::{TopRound, amount, rounds};
use crate::arguments_control::{AllHosts, Top, TopSort};
use crate::cluster;
use crate::failure::{Failure, Result};
use crate::output;
use crate::record::now_s;
use freeflow_cluster::{ClusterFile, Follow, News, Operator, Scope, View};
use freeflow_hostnet::run_dir::RunDir;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// How long etcd may take for the first answer.
const ANSWER_TIME: Duration = Duration::from_secs(20);

/// The cluster of which all hosts are to be shown.
fn file(run_dir: &RunDir, hosts: &AllHosts) -> Result<ClusterFile> {
    let of_environment = || std::env::var_os("FREEFLOW_CLUSTER").map(PathBuf::from);
    cluster::file_of(run_dir, hosts.cluster.clone().or_else(of_environment))
}

/// Hosts that could not tell of all their vNICs.
fn notes(view: &View) -> Vec<String> {
    let all = view.vnics().iter().filter(|(_, said)| said.left_out > 0);
    all.map(|(host, said)| format!("{} more vNICs of host {host} are left out", said.left_out)).collect()
}

/// `ps --all-hosts`.
pub fn containers(run_dir: &RunDir, hosts: &AllHosts, is_json: bool) -> Result<()> {
    let view = Operator::open(&file(run_dir, hosts)?)?.view_of(Scope::Vnics)?;
    let all: Vec<Value> =
        cluster::vnics(&view).into_iter().filter(|vnic| !vnic["status"]["container"].is_null()).collect();
    if is_json {
        let flat = |vnic: &Value| {
            let (status, container) = (&vnic["status"], &vnic["status"]["container"]);
            json!({
                "name": container["name"], "vnic": vnic["metadata"]["name"], "addresses": vnic["spec"]["addresses"],
                "network": vnic["spec"]["network"], "host": status["host"], "pid": container["pid"],
                "engine": container["engine"], "program": container["program"],
                "created_s": container["sinceSeconds"], "age_s": status["ageSeconds"],
            })
        };
        output::json(&all.iter().map(flat).collect::<Vec<_>>());
        return Ok(());
    }
    let heading = ["NAME", "IP", "NETWORK", "HOST", "PID", "STATUS", "PROGRAM", "AGE"];
    let mut rows = vec![heading.map(String::from).to_vec()];
    rows.extend(all.iter().map(|vnic| {
        let container = &vnic["status"]["container"];
        let since = container["sinceSeconds"].as_u64().map(|since| output::duration(now_s().saturating_sub(since)));
        vec![
            text(&container["name"]),
            text(&vnic["spec"]["addresses"]),
            text(&vnic["spec"]["network"]),
            text(&vnic["status"]["host"]),
            text(&container["pid"]),
            since.map_or("running".into(), |since| format!("up {since}")),
            text(&container["program"]),
            age(&vnic["status"]["ageSeconds"]),
        ]
    }));
    output::table(&rows);
    notes(&view).into_iter().for_each(output::line);
    Ok(())
}

/// Rounds of `top --all-hosts`: what hosts have said by then.
struct AllTraffic {
    follow: Follow,
    view: View,
}

impl AllTraffic {
    fn open(run_dir: &RunDir, hosts: &AllHosts) -> Result<Self> {
        let file = file(run_dir, hosts)?;
        let (follow, view) = (Follow::start_of(&file, Scope::Vnics)?, View::new(&file.root, Scope::Vnics));
        let mut all = Self { follow, view };
        match all.follow.next(ANSWER_TIME) {
            Some(News::Behind(error)) => return Err(Failure::new(format!("etcd does not answer: {error}"))),
            Some(news) => all.view.take(news),
            None => return Err(Failure::new("etcd does not answer")),
        };
        all.view.identity()?;
        Ok(all)
    }

    /// The rows, the highest first.
    fn round(&mut self, weight: impl Fn(&Value) -> f64) -> TopRound {
        let mut behind = None;
        while let Some(news) = self.follow.next(Duration::ZERO) {
            behind = if let News::Behind(error) = &news { Some(error.to_string()) } else { None };
            self.view.take(news);
        }
        let mut all = cluster::vnics(&self.view);
        let name = |vnic: &Value| (text(&vnic["status"]["title"]), text(&vnic["status"]["host"]));
        all.sort_by(|one, other| weight(other).total_cmp(&weight(one)).then_with(|| name(one).cmp(&name(other))));
        let heading =
            ["NAME", "NETWORK", "TENANT", "HOST", "MSG/S", "OUT BIT/S", "IN BIT/S", "PATH", "HELD", "ERRORS", "AGE"];
        let mut table = vec![heading.map(String::from).to_vec()];
        let amount = |value: &Value| amount(value.as_f64().unwrap_or_default());
        table.extend(all.iter().map(|vnic| {
            let (status, traffic) = (&vnic["status"], &vnic["status"]["traffic"]);
            vec![
                text(&status["title"]),
                text(&vnic["spec"]["network"]),
                text(&status["tenant"]),
                text(&status["host"]),
                amount(&traffic["messagesPerSecond"]),
                amount(&traffic["bitsPerSecondOut"]),
                amount(&traffic["bitsPerSecondIn"]),
                text(&traffic["path"]),
                format!("{}%", text(&traffic["heldPercent"])),
                text(&traffic["errors"]),
                age(&status["ageSeconds"]),
            ]
        }));
        let away = behind.map(|error| format!(", etcd does not answer: {error}")).unwrap_or_default();
        let title = format!("freeflow top: {} vNICs of {} hosts{away}; q ends it", all.len(), self.view.vnics().len());
        table.extend(notes(&self.view).into_iter().map(|note| vec![note]));
        TopRound { title, table, json: json!({"vnics": all}) }
    }
}

/// `top --all-hosts`.
pub fn top(run_dir: &RunDir, arguments: &Top) -> Result<i32> {
    let mut all = AllTraffic::open(run_dir, &arguments.hosts)?;
    let weight = |vnic: &Value| {
        let number = |field: &str| vnic["status"]["traffic"][field].as_f64().unwrap_or_default();
        match arguments.sort {
            TopSort::Rate => number("bitsPerSecondOut") + number("bitsPerSecondIn"),
            TopSort::Messages => number("messagesPerSecond"),
            TopSort::Held => number("heldPercent"),
            TopSort::Errors => number("errors"),
            TopSort::Name => 0.0,
        }
    };
    rounds(arguments, || Ok(all.round(weight)))
}
