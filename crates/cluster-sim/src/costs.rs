//! Real time and memory of a controller's view on this machine, of many hosts. Memory is that of this process, so each
//! figure is measured in a process of its own.
use crate::etcd::{EVENT_BYTES_AROUND, Writes, is_followed};
use crate::follower::{Follower, timed};
use crate::words::{self, Declaration, NETWORK};
use freeflow_cluster::{Mesh, News, PeersOf, Scope, named};
use freeflow_orchestrator::store::Entry;
use freeflow_orchestrator::{Pool, Revision};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;

/// Repeated so often: the median counts.
const RUN_COUNT: usize = 9;
/// The network of [`words`] has no more for hosts.
const BLOCK_COUNT_MAX: usize = 3584;

/// A cluster that stands still.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub hosts: usize,
    /// Of each host.
    pub vnics: usize,
    pub rules: usize,
    /// vNICs that are declared for all hosts, each with its place.
    pub declared_vnics: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    pub hosts: usize,
    pub vnics: usize,
    pub rules: usize,
    pub declared_vnics: usize,
    pub keys: u64,
    pub key_bytes: u64,
    /// Of the view, by this process' memory before and after it took the news one by one.
    pub view_bytes: u64,
    /// The most while it takes all in one list, as a host does that begins.
    pub list_peak_bytes: u64,
    pub list_ms: f64,
    /// To take a word of another host, and the members of one that has others.
    pub take_followed_us: f64,
    pub take_members_us: f64,
    /// To read what is declared; to compare all, find the other hosts, and that; to find what others are called; to
    /// find out whether a controller has anything to do.
    pub declared_us: f64,
    pub carry_out_us: f64,
    pub names_us: f64,
    pub control_us: f64,
}

/// Bytes of this process in memory now, and the most that there ever were.
fn memory() -> io::Result<(u64, u64)> {
    let status = fs::read_to_string("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kilobytes.map(|count| count << 10).ok_or_else(|| io::Error::other(format!("/proc/self/status has no {name}")))
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}

/// The block of a host, in their order.
fn block(host: usize) -> String {
    let base = (11 << 24) + ((host as u32) << 12);
    format!("{}/20", std::net::Ipv4Addr::from(base)).parse::<Pool>().expect("a range").to_string()
}

/// All that is written, one transaction after another.
fn transactions(size: Size) -> impl Iterator<Item = Writes> {
    let mut declaration = Declaration::new();
    let begin = declaration.begin(size.rules);
    let own = (0..size.declared_vnics).flat_map(move |number| {
        let address = std::net::Ipv4Addr::from((11 << 24) + (224 << 16) + 10 + number as u32).into();
        let name = format!("declared-{number:05}");
        [declaration.add_vnic(&name, address), words::place(&name, number % size.hosts, address)]
    });
    let hosts = (0..size.hosts).flat_map(move |host| {
        let range = (NETWORK.to_owned(), block(host));
        let has_block = host < BLOCK_COUNT_MAX;
        let followed =
            words::has_followed(1, has_block.then_some(range).into_iter().collect(), Vec::new(), 1_790_000_000);
        let (record, members) = (words::record_of(host), words::members(host, size.vnics, 1));
        let own = words::followed(host, followed, 1);
        let given = (format!("{NETWORK}/{}", words::host_name(host)), Some(block(host)));
        let blocks = words::blocks(has_block.then_some(given).into_iter());
        [record, own, members, words::vnics(host, size.vnics, 1, 1_790_000_000), blocks]
    });
    [words::identity(), begin].into_iter().chain(own).chain(hosts)
}

/// As a controller is told of it.
fn news(at: u64, writes: Writes) -> News {
    let at = Revision(at);
    let entry = |key: &String, value| Entry { key: key.clone(), value, created: at, modified: at, lease: None };
    let change = |(key, value): (String, Option<Vec<u8>>)| {
        let entry = value.map(|value| entry(&key, value));
        (key, entry)
    };
    let followed = writes.into_iter().filter(|(key, _)| is_followed(key, true));
    News::Changed(at, followed.map(change).collect())
}

/// As a host that begins is told of all.
fn list(size: Size) -> News {
    let writes = transactions(size).enumerate().map(|(at, writes)| news(at as u64 + 1, writes));
    let mut all = BTreeMap::new();
    for news in writes {
        let News::Changed(_, changes) = news else { continue };
        all.extend(changes.into_iter().filter_map(|(key, entry)| Some((key, entry?))));
    }
    News::Listed(Revision(u64::MAX >> 2), all.into_values().collect())
}

fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

fn median_us(mut one: impl FnMut() -> u64) -> f64 {
    let mut all: Vec<u64> = (0..RUN_COUNT).map(|_| one()).collect();
    all.sort_unstable();
    all[RUN_COUNT / 2] as f64 / 1000.0
}

/// Measures it in this process, whose memory nothing else has grown before.
///
/// # Errors
/// The system does not say how much memory there is.
pub fn measure(size: Size) -> io::Result<Cost> {
    let mut follower = Follower::new(size.hosts - 1, Scope::Said);
    let before = memory()?.0;
    let (mut at, mut lengths) = (0, BTreeMap::new());
    for writes in transactions(size) {
        at += 1;
        let length = |(key, value): &(String, Option<Vec<u8>>)| (key.len() + value.as_ref().map_or(0, Vec::len)) as u64;
        let kept = writes.iter().filter(|(_, value)| value.is_some());
        lengths.extend(kept.map(|write| (digest(&write.0), EVENT_BYTES_AROUND + length(write))));
        follower.take(news(at, writes));
    }
    let (keys, key_bytes) = (lengths.len() as u64, lengths.values().sum::<u64>());
    drop(lengths);
    let view_bytes = memory()?.0.saturating_sub(before);
    let declared_us = median_us(|| timed(|| follower.view.declared().expect("it makes sense")).1);
    follower.carry_out();
    let carry_out_us = median_us(|| follower.carry_out().took_ns);
    let control_us = median_us(|| follower.control().1);
    let declared = follower.view.declared().expect("it makes sense");
    let own = words::record(size.hosts - 1);
    let peers = PeersOf::host(&words::host_name(size.hosts - 1), &own, &follower.view, &declared).peers;
    let mesh = Mesh::of(&words::host_name(size.hosts - 1), &follower.view, &declared);
    let names_us = median_us(|| timed(|| named(&follower.view, &declared, &mesh, &peers)).1);
    let mut take = |of: fn(u64, Size) -> Writes| {
        median_us(|| {
            at += 1;
            let news = news(at, of(at, size));
            timed(|| follower.take(news)).1
        })
    };
    let take_followed_us = take(|number, _| {
        let ranges = BTreeMap::from([(NETWORK.to_owned(), block(0))]);
        words::followed(0, words::has_followed(number, ranges, Vec::new(), 1_790_000_000 + number), number)
    });
    let take_members_us = take(|number, size| words::members(0, size.vnics + number as usize % 2, number));
    drop(follower);
    let (listed, mut anew) = (list(size), Follower::new(0, Scope::Said));
    let (_, list_ns) = timed(|| anew.take(listed));
    let list_ms = list_ns as f64 / 1e6;
    let list_peak_bytes = memory()?.1.saturating_sub(before);
    let Size { hosts, vnics, rules, declared_vnics } = size;
    Ok(Cost {
        hosts,
        vnics,
        rules,
        declared_vnics,
        keys,
        key_bytes,
        view_bytes,
        list_peak_bytes,
        list_ms,
        take_followed_us,
        take_members_us,
        declared_us,
        carry_out_us,
        names_us,
        control_us,
    })
}
