//! Real time and memory of a host's view on this machine, of many hosts. Memory is that of this process, so each figure
//! is measured in a process of its own.
use crate::etcd::{EVENT_BYTES_AROUND, Watched, Writes};
use crate::follower::{Follower, timed};
use crate::words::{self, Declaration, Networks, OwnVnics};
use crate::world::Setting;
use freeflow_cluster::{HostRecord, News, Scope, block_prefix};
use freeflow_orchestrator::store::Entry;
use freeflow_orchestrator::{Pool, Revision};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;

/// Repeated so often: the median counts.
const RUN_COUNT: usize = 9;

/// A cluster that stands still.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub setting: Setting,
    /// vNICs that are declared for all hosts, each with its place.
    pub declared_vnics: usize,
    /// Its view is measured, not that of another host.
    pub is_controller: bool,
}

#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    pub hosts: usize,
    pub vnics: usize,
    pub rules: usize,
    pub declared_vnics: usize,
    pub networks: usize,
    pub is_controller: bool,
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
    /// find out whether a controller has anything to do, if it is one.
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

impl Size {
    /// Keys that this one watches are those that are watched so, or by more.
    fn most(&self) -> Watched {
        if self.is_controller { Watched::ByControllers } else { Watched::ByAll }
    }

    fn scope(self) -> Scope {
        if self.is_controller { Scope::Said } else { Scope::Host }
    }
}

fn last(setting: Setting) -> (usize, HostRecord) {
    (setting.hosts - 1, words::record(setting.hosts - 1))
}

/// Those of a host in all networks, of one size for all hosts.
fn blocks_of(networks: Networks, host_count: usize, host: usize) -> Vec<(usize, Pool)> {
    let block = |network: usize| {
        let pool: Pool = networks.cidr(network).parse().expect("a range");
        let free = u64::from(pool.size()) / 8 * 7;
        let is_small = |prefix_length: &u8| free >> (32 - prefix_length) >= host_count as u64;
        let prefix_length = (block_prefix(pool)..32).find(is_small).expect("networks have blocks for all");
        let base = std::net::Ipv4Addr::from(u32::from(pool.base()) + ((host as u32) << (32 - prefix_length)));
        (network, format!("{base}/{prefix_length}").parse().expect("a range"))
    };
    (0..networks.count).map(block).collect()
}

/// All that is written, one transaction after another.
fn transactions(size: Size, networks: Networks) -> impl Iterator<Item = Writes> {
    let Size { setting, declared_vnics, .. } = size;
    let mut declaration = Declaration::new();
    let begin = declaration.begin(networks, setting.rules);
    let own = (0..declared_vnics).flat_map(move |number| {
        let (name, address) = (format!("declared-{number:05}"), networks.floating_address(number));
        [declaration.add_vnic(&name, address), words::place(&name, number % setting.hosts, address)]
    });
    let hosts = (0..setting.hosts).flat_map(move |host| {
        let blocks = blocks_of(networks, setting.hosts, host);
        let name = words::network_name;
        let ranges = blocks.iter().map(|(network, block)| (name(*network), block.to_string())).collect();
        let followed = words::has_followed(1, ranges, Vec::new(), 1_790_000_000);
        let mut all = vec![words::begins(host, &words::record(host)), words::followed(host, followed)];
        let network = setting.network_of(host);
        let block = blocks.iter().find(|(of, _)| *of == network);
        all.extend(block.into_iter().flat_map(|(_, block)| {
            let own = OwnVnics { count: setting.vnics, first: 0, block: *block, network };
            [words::members(host, &own), words::vnics(host, &own, 1_790_000_000)]
        }));
        let given = blocks
            .into_iter()
            .map(|(network, block)| (format!("{}/{}", name(network), words::host_name(host)), Some(block.to_string())));
        all.push(words::blocks(given, host as u64 + 1));
        all
    });
    [words::identity(), begin].into_iter().chain(own).chain(hosts)
}

/// As a watcher is told of it.
fn news(at: u64, writes: Writes) -> News {
    let at = Revision(at);
    let entry = |key: &String, value| Entry { key: key.clone(), value, created: at, modified: at, lease: None };
    let change = |(key, value): (String, Option<Vec<u8>>)| {
        let entry = value.map(|value| entry(&key, value));
        (key, entry)
    };
    News::Changed(at, writes.into_iter().map(change).collect())
}

/// All that is written, as far as who is measured hears of it.
fn heard(size: Size, networks: Networks) -> impl Iterator<Item = Writes> {
    transactions(size, networks).map(move |mut writes| {
        writes.retain(|(key, _)| words::watched(key) <= size.most());
        writes
    })
}

/// As a host that begins is told of all.
fn list(size: Size, networks: Networks) -> News {
    let writes = heard(size, networks).enumerate().map(|(at, writes)| news(at as u64 + 1, writes));
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
    let setting = size.setting;
    let networks = setting.networks().map_err(io::Error::other)?;
    let (number, record) = if size.is_controller { (0, words::record(0)) } else { last(setting) };
    let mut follower = Follower::new(number, record.clone(), size.scope());
    let before = memory()?.0;
    let (mut at, mut lengths) = (0, BTreeMap::new());
    for mut writes in transactions(size, networks) {
        at += 1;
        let length = |(key, value): &(String, Option<Vec<u8>>)| (key.len() + value.as_ref().map_or(0, Vec::len)) as u64;
        let kept = writes.iter().filter(|(_, value)| value.is_some());
        lengths.extend(kept.map(|write| (digest(&write.0), EVENT_BYTES_AROUND + length(write))));
        writes.retain(|(key, _)| words::watched(key) <= size.most());
        follower.take(news(at, writes));
    }
    let (keys, key_bytes) = (lengths.len() as u64, lengths.values().sum::<u64>());
    drop(lengths);
    let view_bytes = memory()?.0.saturating_sub(before);
    let declared_us = median_us(|| timed(|| follower.view.declared().expect("it makes sense")).1);
    follower.carry_out();
    let carry_out_us = median_us(|| follower.carry_out().took_ns);
    let control_us = if size.is_controller { median_us(|| follower.control().1) } else { 0.0 };
    let names_us = median_us(|| follower.names().1);
    let blocks = blocks_of(networks, setting.hosts, 0);
    let mut take = |of: &dyn Fn(u64) -> Writes| {
        median_us(|| {
            at += 1;
            let news = news(at, of(at));
            timed(|| follower.take(news)).1
        })
    };
    let take_followed_us = take(&|number| {
        let ranges = blocks.iter().map(|(network, block)| (words::network_name(*network), block.to_string())).collect();
        words::followed(0, words::has_followed(number, ranges, Vec::new(), 1_790_000_000 + number))
    });
    let own = OwnVnics { count: setting.vnics, first: 0, block: blocks[0].1, network: 0 };
    let take_members_us = take(&|number| words::members(0, &OwnVnics { first: number as usize % 2, ..own }));
    drop(follower);
    let (listed, mut again) = (list(size, networks), Follower::new(number, record, size.scope()));
    let (_, list_ns) = timed(|| again.take(listed));
    let list_ms = list_ns as f64 / 1e6;
    let list_peak_bytes = memory()?.1.saturating_sub(before);
    let Setting { hosts, vnics, rules, .. } = setting;
    Ok(Cost {
        hosts,
        vnics,
        rules,
        declared_vnics: size.declared_vnics,
        networks: networks.count,
        is_controller: size.is_controller,
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
