//! The other hosts, as a host's peers file has them.
//!
//! A host writes its own record as it likes, so a record is believed only where it takes nothing that another says of
//! itself for longer: an address, or a key. A range of `default` is believed where it has no addresses of a network
//! that is declared, nor of the range of such a host; one of a host that has a block of `default` only in that block,
//! so that it takes nothing which hosts are given later. And no two ranges overlap, whoever gave them: a router refuses
//! the whole file otherwise.
use crate::records::{HostRecord, Problem};
use crate::view::View;
use freeflow_orchestrator::{Cidr, DEFAULT_NETWORK, NetworkEntry, Pool, State};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Hosts and prefixes that a router takes.
const PEER_COUNT_MAX: usize = 256;
const PREFIX_COUNT_MAX: usize = 4096;
const ALL_PREFIX_COUNT_MAX: usize = 65_536;

/// Ranges of which no two overlap.
#[derive(Default)]
pub(crate) struct Ranges {
    /// The last address of each by its first one.
    by_first: BTreeMap<IpAddr, IpAddr>,
}

impl Ranges {
    pub fn overlaps(&self, cidr: Cidr) -> bool {
        let (first, last) = cidr.bounds();
        // Addresses of a family are together in this order; of ranges that begin earlier the last one ends last.
        let before = self.by_first.range(..=last).next_back();
        before.is_some_and(|(_, end)| end.is_ipv4() == last.is_ipv4() && *end >= first)
    }

    fn add(&mut self, cidr: Cidr) {
        let (first, last) = cidr.bounds();
        self.by_first.insert(first, last);
    }
}

impl FromIterator<Cidr> for Ranges {
    fn from_iter<I: IntoIterator<Item = Cidr>>(cidrs: I) -> Self {
        Self { by_first: cidrs.into_iter().map(|cidr| cidr.bounds()).collect() }
    }
}

/// Another host, with the field names of the peers file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// Its name.
    pub host: String,
    /// Its address.
    pub address: IpAddr,
    /// Of the control channel.
    pub control_port: u16,
    /// 64 hexadecimal digits.
    pub public_key: String,
    /// Addresses that it is believed to have.
    pub prefixes: Vec<String>,
}

/// All of them, and who is none, though it says so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersOf {
    /// In order of name.
    pub peers: Vec<Peer>,
    /// Why some are left out.
    pub problems: Vec<Problem>,
}

impl PeersOf {
    /// Those of a host, with its record as it is here: whatever others say, that is what it is.
    pub fn host(own: &str, own_record: &HostRecord, view: &View, declared: &State) -> Self {
        let mut all = Self::default();
        let own = own.to_owned();
        let mut believed: Vec<(&String, &HostRecord)> = vec![(&own, own_record)];
        for (name, record) in by_age(view).filter(|(name, _)| **name != own) {
            let is_of_family = own_record.address.is_ipv4() == record.address.is_ipv4();
            let why = match taken(record, &believed) {
                Some(why) => why,
                None if !is_of_family => "its address is of another kind of IP".into(),
                None if believed.len() > PEER_COUNT_MAX => format!("there are more than {PEER_COUNT_MAX} hosts"),
                None => {
                    believed.push((name, record));
                    continue;
                }
            };
            all.problems.push(Problem::about("Host", name, format!("{why}: it is left out")));
        }
        let mut taken = Ranges::default();
        let mut prefixes = single_addresses(&believed, view, declared, &mut all.problems);
        let mut count: usize = prefixes.values().map(Vec::len).sum();
        for (name, cidr, what) in ranges(&believed, view, declared) {
            if let Some(why) = why_not(cidr, &taken, &what, declared) {
                all.problems.push(Problem::about("Host", name, format!("{why}: its addresses are not reached")));
                continue;
            }
            taken.add(cidr);
            let of_host = prefixes.entry(name).or_default();
            let why = match () {
                () if of_host.len() >= PREFIX_COUNT_MAX => format!("more than {PREFIX_COUNT_MAX} ranges of addresses"),
                () if count >= ALL_PREFIX_COUNT_MAX => format!("all hosts have more than {ALL_PREFIX_COUNT_MAX}"),
                () => {
                    count += 1;
                    of_host.push(cidr);
                    continue;
                }
            };
            all.problems.push(Problem::about("Host", name, format!("{why}; {what} is not reached")));
        }
        for (name, record) in believed.into_iter().skip(1) {
            // A router takes no host without addresses.
            let Some(of_host) = prefixes.get(name.as_str()) else { continue };
            let mut prefixes: Vec<String> = of_host.iter().map(Cidr::to_string).collect();
            prefixes.sort_unstable();
            let HostRecord { address, control_port, .. } = *record;
            let public_key = record.public_key.clone();
            all.peers.push(Peer { host: name.clone(), address, control_port, public_key, prefixes });
        }
        all.peers.sort_by(|one, other| one.host.cmp(&other.host));
        all
    }
}

/// Records in the order in which they were written.
fn by_age(view: &View) -> impl Iterator<Item = (&String, &HostRecord)> {
    let mut by_age: Vec<_> = view.hosts().iter().collect();
    by_age.sort_by_key(|(name, (since, _))| (*since, *name));
    by_age.into_iter().map(|(name, (_, record))| (name, record))
}

/// Hosts' ranges of `default`, as they are looked at: first those that controllers have given.
fn said_ranges<'a>(
    hosts: impl Iterator<Item = (&'a String, &'a HostRecord)>,
    view: &View,
) -> Vec<(&'a str, Cidr, &'static str)> {
    let range = |(name, record): (&'a String, &HostRecord)| {
        let (range, block) = (record.default_range.parse::<Pool>().ok()?, view.block(DEFAULT_NETWORK, name));
        let what = if block.is_none_or(|block| block.encloses(range)) { OWN_RANGE } else { NOT_ITS_BLOCK };
        Some((block.is_none(), (name.as_str(), Cidr::from(range), what)))
    };
    let mut all: Vec<_> = hosts.filter_map(range).collect();
    all.sort_by_key(|(is_by_hand, _)| *is_by_hand);
    all.into_iter().map(|(_, range)| range).collect()
}

/// The ranges of hosts' own networks that others believe.
pub(crate) fn own_ranges<'a>(view: &'a View, declared: &State) -> Vec<(&'a str, Cidr)> {
    let (mut believed, mut taken) = (Vec::new(), Ranges::default());
    for (name, cidr, what) in said_ranges(by_age(view), view) {
        if why_not(cidr, &taken, what, declared).is_none() {
            taken.add(cidr);
            believed.push((name, cidr));
        }
    }
    believed
}

/// Why a record takes what is another's.
fn taken(record: &HostRecord, believed: &[(&String, &HostRecord)]) -> Option<String> {
    believed.iter().find_map(|(name, other)| {
        let has_address = other.address == record.address;
        let has_key = other.public_key == record.public_key;
        (has_address || has_key).then(|| format!("{name} has its {}", if has_address { "address" } else { "key" }))
    })
}

/// The addresses of declared vNICs, which go with them: those of their networks that no block has.
fn single_addresses<'a>(
    believed: &[(&'a String, &HostRecord)],
    view: &View,
    declared: &State,
    problems: &mut Vec<Problem>,
) -> BTreeMap<&'a str, Vec<Cidr>> {
    let hosts: BTreeMap<&str, &'a str> = believed.iter().map(|(name, _)| (name.as_str(), name.as_str())).collect();
    let mut single = BTreeMap::<&str, Vec<Cidr>>::new();
    let mut count = 0;
    for (name, (_, place)) in view.places() {
        let Some(host) = hosts.get(place.host.as_str()) else { continue };
        let Some(vnic) = declared.vnic(name) else { continue };
        let is_floating = declared.network(vnic.network()).is_some_and(|network| network.is_floating(vnic.address));
        let of_host = single.entry(host).or_default();
        let addresses = &vnic.object.spec.addresses;
        // Half of them are left for ranges, however many vNICs there are.
        let has_room = |count: usize, max: usize| count + addresses.len() <= max / 2;
        if !(has_room(of_host.len(), PREFIX_COUNT_MAX) && has_room(count, ALL_PREFIX_COUNT_MAX)) {
            problems.push(Problem::about("Vnic", name, "there are too many that move: it is not reached"));
        } else if is_floating {
            count += addresses.len();
            of_host.extend(addresses.iter().copied().map(Cidr::single));
        }
    }
    single
}

/// All ranges of hosts, those that controllers have given first; with what each is.
fn ranges<'a>(
    believed: &[(&'a String, &'a HostRecord)],
    view: &View,
    declared: &State,
) -> Vec<(&'a str, Cidr, String)> {
    let mut ranges = Vec::new();
    for network in declared.networks() {
        for (name, _) in believed {
            let is_free =
                |block: &Pool| network.floating.is_none_or(|part| !part.encloses(*block) && !block.encloses(part));
            let block = view.block(network.name(), name).filter(|block| network.pool.encloses(*block));
            let block = block.filter(is_free);
            let Some(block) = block else { continue };
            let mut network = network.clone();
            network.range = Some(block);
            let what = format!("its block of the network {}", network.name());
            ranges.push((name.as_str(), Cidr::from(block), what.clone()));
            ranges.extend(network.assigned6().map(|part| (name.as_str(), Cidr::from(part), what)));
        }
    }
    let own = said_ranges(believed.iter().copied(), view).into_iter();
    ranges.extend(own.map(|(name, cidr, what)| (name, cidr, what.to_owned())));
    ranges
}

const OWN_RANGE: &str = "its range of the network default";
const NOT_ITS_BLOCK: &str = "the range of the network default that it says it has";

fn why_not(cidr: Cidr, taken: &Ranges, what: &str, declared: &State) -> Option<String> {
    if what == NOT_ITS_BLOCK {
        return Some(format!("{what}, {cidr}, is not in its block of that"));
    }
    if taken.overlaps(cidr) {
        return Some(format!("{what}, {cidr}, overlaps another host's"));
    }
    let has = |network: &&NetworkEntry| Cidr::from(network.pool).overlaps(cidr);
    let network = declared.networks().find(has).filter(|_| what == OWN_RANGE)?;
    Some(format!("{what}, {cidr}, has addresses of the network {}", network.name()))
}
