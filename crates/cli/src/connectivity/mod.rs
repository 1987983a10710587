//! `freeflow test connectivity`: short-lived vNICs that check, as programs would see it, what reaches what.
//!
//! ```text
//!   this command ── stdout ── asking end   (a container of freeflow run)
//!                                 │ stdin, a socket pair; or TCP, to an end that another host's operator has started
//!                             answering end
//! ```
//! Both ends use the library of all programs, at vNICs like all others: there is no way in for the test that programs
//! do not have. Nothing is started on another host: an operator of that host runs `--respond` there. Where declared
//! rules deny, the test is that nothing passes.

mod answering;
mod asking;
mod checks;
mod connection;
mod end;
mod endpoint;
mod ends;
mod messages;
mod plain_ip;
mod rules;

use crate::admin::Admin;
use crate::arguments::Format;
use crate::arguments_test::{Connectivity, TestAction};
use crate::failure::{Context as _, Failure, Result, fail};
use crate::interruption::Interruption;
use crate::lab::Lab;
use crate::{container_names, output};
use checks::{Check, Verdict};
use ends::{End, Partner};
use freeflow_hostnet::run_dir::RunDir;
use rules::Rules;
use serde::Serialize;
use std::net::Ipv4Addr;

/// Networks that are tested where none is named.
const NETWORK_COUNT_MAX: usize = 16;
const RESPONDER_PREFIX: &str = "connectivity-";

/// A check, and of which pair.
#[derive(Serialize)]
struct Row {
    network: String,
    from: String,
    to: String,
    #[serde(flatten)]
    check: Check,
}

/// The JSON form of `freeflow test connectivity`.
#[derive(Serialize)]
struct Report {
    passed: bool,
    checks: Vec<Row>,
}

/// Two ends, and how they are called.
struct Pair {
    from: End,
    to: Partner,
    network: String,
    to_name: String,
}

pub fn test(run_dir: &RunDir, action: &TestAction) -> Result<()> {
    match action {
        TestAction::Connectivity(arguments) if arguments.respond => respond(run_dir, arguments),
        TestAction::Connectivity(arguments) => connectivity(run_dir, arguments),
        TestAction::End(arguments) => end::end(arguments),
    }
}

fn respond(run_dir: &RunDir, arguments: &Connectivity) -> Result<()> {
    let signals = Interruption::new()?;
    let network = match &arguments.networks[..] {
        [] => "default".to_owned(),
        [network] => network.clone(),
        _ => fail!("--respond answers in one network; run it again for another one"),
    };
    let host = Admin::connect(run_dir)?.status()?.host;
    let end = End { run_dir: run_dir.clone(), host, network, labels: arguments.labels.clone() };
    ends::respond(&end, &responder(&end.host), arguments.seconds, &signals)
}

/// Name of the container that answers for a host: one that other hosts' files of names can have.
fn responder(host: &str) -> String {
    let letters = host.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' });
    let name: String = RESPONDER_PREFIX.chars().chain(letters).take(crate::record::NAME_BYTES_MAX).collect();
    name.trim_end_matches('-').to_owned()
}

fn connectivity(run_dir: &RunDir, arguments: &Connectivity) -> Result<()> {
    let signals = Interruption::new()?;
    let mut rows = Vec::new();
    let pairs = match &arguments.lab {
        Some(lab) => lab_pairs(&Lab::pick(run_dir, lab.as_deref())?, arguments, &mut rows)?,
        None => {
            hosts(run_dir, &mut rows)?;
            match arguments.all_hosts || !arguments.peers.is_empty() {
                true => peer_pairs(run_dir, arguments, &mut rows)?,
                false => own_pairs(run_dir, arguments)?,
            }
        }
    };
    if pairs.is_empty() && rows.is_empty() {
        fail!("there is nothing to test");
    }
    let is_table = arguments.output.format == Format::Table;
    if is_table {
        rows.iter().for_each(print);
    }
    for (number, pair) in pairs.iter().enumerate() {
        test_pair(pair, number, &signals, is_table, &mut rows)?;
    }
    conclude(rows, is_table)
}

fn test_pair(pair: &Pair, number: usize, signals: &Interruption, is_table: bool, rows: &mut Vec<Row>) -> Result<()> {
    for check in ends::run(&pair.from, &pair.to, number, signals)? {
        let (network, from) = (pair.network.clone(), pair.from.host.clone());
        let row = Row { network, from, to: pair.to_name.clone(), check };
        if is_table {
            print(&row);
        }
        rows.push(row);
    }
    Ok(())
}

fn print(row: &Row) {
    let pair = match row.from == row.to {
        true => row.from.clone(),
        false => format!("{} -> {}", row.from, row.to),
    };
    let Check { name, verdict, detail, remedy } = &row.check;
    output::line(format!("{:<8} {:<18} {pair:<20} {name:<15} {detail}", verdict.name(), row.network));
    if let Some(remedy) = remedy {
        output::line(format!("         -> {remedy}"));
    }
}

fn conclude(rows: Vec<Row>, is_table: bool) -> Result<()> {
    let count = |verdict| rows.iter().filter(|row| row.check.verdict == verdict).count();
    let (failed, skipped) = (count(Verdict::Failed), count(Verdict::Skipped));
    if is_table {
        let (passed, notes) = (count(Verdict::Ok), count(Verdict::Note));
        output::line(format!("{passed} checks passed, {notes} with a note, {failed} failed, {skipped} skipped"));
    } else {
        output::json(&Report { passed: failed == 0, checks: rows });
    }
    match failed {
        0 => Ok(()),
        1 => Err(Failure::new("1 check failed")),
        _ => Err(Failure::new(format!("{failed} checks failed"))),
    }
}

/// The networks to test, of those that there are.
fn networks(run_dir: &RunDir, arguments: &Connectivity) -> Result<Vec<String>> {
    let rules = Rules::read(run_dir)?;
    let known = rules.networks();
    if let Some(unknown) = arguments.networks.iter().find(|wanted| !known.contains(&wanted.as_str())) {
        fail!("no network is called {unknown:?}; there is: {}", known.join(", "));
    }
    if !arguments.networks.is_empty() {
        return Ok(arguments.networks.clone());
    }
    if known.len() > NETWORK_COUNT_MAX {
        output::complaint(format!(
            "{NETWORK_COUNT_MAX} of {} networks are tested; name others: --network",
            known.len()
        ));
    }
    Ok(known.into_iter().take(NETWORK_COUNT_MAX).map(str::to_owned).collect())
}

/// Within each network, and from each to the next one: whatever the rules say of that.
fn own_pairs(run_dir: &RunDir, arguments: &Connectivity) -> Result<Vec<Pair>> {
    let host = Admin::connect(run_dir)?.status()?.host;
    let names = networks(run_dir, arguments)?;
    let end = |network: &String, labels: &[(String, String)]| End {
        run_dir: run_dir.clone(),
        host: host.clone(),
        network: network.clone(),
        labels: labels.to_vec(),
    };
    let pair = |one: &String, other: &String| Pair {
        from: end(one, &arguments.labels),
        to: Partner::Here(end(other, &arguments.to_labels)),
        network: if one == other { one.clone() } else { format!("{one} -> {other}") },
        to_name: host.clone(),
    };
    let within = names.iter().map(|name| pair(name, name));
    let next = names.iter().skip(1).chain(names.first());
    let between = names.iter().zip(next).filter(|(one, other)| one != other).map(|(one, other)| pair(one, other));
    Ok(within.chain(between).collect())
}

/// Each two hosts of a lab, in both directions, and each host by itself.
fn lab_pairs(lab: &Lab, arguments: &Connectivity, rows: &mut Vec<Row>) -> Result<Vec<Pair>> {
    let count = lab.description()?.hosts;
    let numbers: Vec<u32> = (1..=count).collect();
    let mut pairs = Vec::new();
    for &from in &numbers {
        let run_dir = lab.host(from)?;
        hosts(&run_dir, rows)?;
        let own = networks(&run_dir, arguments)?;
        for &to in &numbers {
            let other = lab.host(to)?;
            let theirs = Rules::read(&other)?;
            for network in own.iter().filter(|network| theirs.networks().contains(&network.as_str())) {
                let end = |run_dir: &RunDir, number, labels: &Vec<_>| End {
                    run_dir: run_dir.clone(),
                    host: crate::lab::host_name(number),
                    network: network.clone(),
                    labels: labels.clone(),
                };
                pairs.push(Pair {
                    from: end(&run_dir, from, &arguments.labels),
                    to: Partner::Here(end(&other, to, &arguments.to_labels)),
                    network: network.clone(),
                    to_name: crate::lab::host_name(to),
                });
            }
        }
    }
    Ok(pairs)
}

/// This host with ends that answer on others.
fn peer_pairs(run_dir: &RunDir, arguments: &Connectivity, rows: &mut Vec<Row>) -> Result<Vec<Pair>> {
    let host = Admin::connect(run_dir)?.status()?.host;
    let names = match arguments.networks.is_empty() && !arguments.all_hosts {
        true => vec!["default".to_owned()],
        false => networks(run_dir, arguments)?,
    };
    let mut pairs = Vec::new();
    for network in &names {
        let partners = match arguments.all_hosts {
            true => responders(run_dir, network, &host)?,
            false => arguments.peers.iter().map(|address| (address.to_string(), *address)).collect(),
        };
        for (to_name, address) in partners {
            let from = End {
                run_dir: run_dir.clone(),
                host: host.clone(),
                network: network.clone(),
                labels: arguments.labels.clone(),
            };
            let to = Partner::There { address, labels: arguments.to_labels.clone() };
            pairs.push(Pair { from, to, network: network.clone(), to_name });
        }
    }
    if arguments.all_hosts {
        for network in names.iter().filter(|network| !pairs.iter().any(|pair: &Pair| pair.network == **network)) {
            let is_named = !arguments.networks.is_empty();
            let verdict = if is_named { Verdict::Failed } else { Verdict::Skipped };
            let check = Check::new("ends", verdict, "no end answers in this network")
                .with_remedy(format!("run on each host: freeflow test connectivity --respond --network {network}"));
            rows.push(Row { network: network.clone(), from: host.clone(), to: "-".into(), check });
        }
        for peer in Admin::connect(run_dir)?.peers()?.peers {
            let answers = responder(&peer.host);
            if !pairs.iter().any(|pair| pair.to_name == answers) {
                let check = Check::new("ends", Verdict::Failed, "no end answers there")
                    .with_remedy(format!("run on {}: freeflow test connectivity --respond", peer.host));
                rows.push(Row { network: "-".into(), from: host.clone(), to: peer.host, check });
            }
        }
    }
    Ok(pairs)
}

/// Ends that answer in a network, by the names that the hosts of a cluster have of each other's vNICs.
fn responders(run_dir: &RunDir, network: &str, host: &str) -> Result<Vec<(String, Ipv4Addr)>> {
    let file = container_names::file(run_dir, network);
    container_names::update_if_up(run_dir);
    let text = std::fs::read_to_string(&file).context(file.display())?;
    let own = responder(host);
    let found = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address: Ipv4Addr = words.next()?.parse().ok()?;
        let name = words.find(|name| name.starts_with(RESPONDER_PREFIX) && *name != own)?;
        let is_of_a_test = name[RESPONDER_PREFIX.len()..].contains("-asks") || name.ends_with("-answers");
        (!is_of_a_test).then(|| (name.to_owned(), address))
    });
    Ok(found.collect())
}

/// How this host's router sees the others.
fn hosts(run_dir: &RunDir, rows: &mut Vec<Row>) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    let host = admin.status()?.host;
    for peer in admin.peers()?.peers {
        let kind = if peer.sealed { "sealed" } else { "plain" };
        let trip = peer.rtt_us.map_or(String::new(), |us| format!(", round trip {us} us"));
        let check = match peer.state.as_str() {
            "up" => Check::new("router", Verdict::Ok, format!("connected, packets {kind}{trip}")),
            state => {
                let problem = peer.problem.map_or(String::new(), |problem| format!(": {problem}"));
                Check::new("router", Verdict::Failed, format!("{state}{problem}"))
                    .with_remedy("TCP 4790 and UDP 4791 have to be open; see freeflow peers ls on both hosts")
            }
        };
        rows.push(Row { network: "-".into(), from: host.clone(), to: peer.host, check });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answering_container_has_a_name_that_others_know() {
        assert_eq!(responder("h1.example.org"), "connectivity-h1-example-org");
        let long = responder(&"x".repeat(100));
        assert!(crate::record::check_name(&long).is_ok() && long.len() == 63, "{long}");
    }
}
