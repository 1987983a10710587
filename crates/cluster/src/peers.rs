//! The other hosts, as a host's peers file has them.
//!
//! A host writes its own record as it likes, so a record is believed only where it takes nothing that another says of
//! itself for longer: an address, or a key. A range of `default` is believed where it has no addresses of a network
//! that is declared, nor of the range of such a host; one of a host that has a block of `default` only in that block,
//! so that it takes nothing which hosts are given later. And no two ranges overlap, whoever gave them: a router refuses
//! the whole file otherwise. All of that is decided by the records of all hosts; those that are peers
//! ([`crate::Mesh`]) are then in the file.
use crate::mesh::Mesh;
use crate::records::{HostRecord, Problem};
use crate::view::View;
use freeflow_orchestrator::{Cidr, DEFAULT_NETWORK, NetworkEntry, Pool, State};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Hosts and prefixes that a router takes.
const PEER_COUNT_MAX: usize = 1024;
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
        let (own, mesh) = (own.to_owned(), Mesh::of(own, view, declared));
        let believed = all.believe((&own, own_record), view, &mesh);
        // In the file; this host is none of its own peers, and what it has is looked at nevertheless.
        let peers: BTreeSet<&str> = believed.iter().filter(|one| one.is_peer).map(|one| one.name.as_str()).collect();
        let is_peer = |name: &str| peers.contains(name) || name == own;
        let mut taken = Ranges::default();
        let mut prefixes = single_addresses(&believed, view, declared, &mut all.problems);
        let mut count: usize = prefixes.values().map(Vec::len).sum();
        for (name, cidr, what) in ranges(&believed, view, declared) {
            if let Some(why) = why_not(cidr, &taken, &what, declared) {
                if is_peer(name) {
                    all.problems.push(Problem::about("Host", name, format!("{why}: its addresses are not reached")));
                }
                continue;
            }
            taken.add(cidr);
            if !is_peer(name) {
                continue;
            }
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
        for Believed { name, record, .. } in believed.into_iter().filter(|one| one.is_peer) {
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

    /// Hosts whose records are believed, this one first, and which of them are peers.
    fn believe<'a>(
        &mut self,
        (own, own_record): (&'a String, &'a HostRecord),
        view: &'a View,
        mesh: &Mesh<'_>,
    ) -> Vec<Believed<'a>> {
        let mut all = vec![Believed { name: own, record: own_record, is_peer: false }];
        let mut known = Known::default();
        known.add(own, own_record);
        let mut count = 0;
        for (name, record) in by_age(view).filter(|(name, _)| *name != own) {
            let is_in_mesh = mesh.has(name);
            let is_of_family = own_record.address.is_ipv4() == record.address.is_ipv4();
            let why = match known.taken(record) {
                Some((of, why)) if is_in_mesh || of == own => why,
                Some(_) => continue,
                None if !is_of_family && is_in_mesh => "its address is of another kind of IP".into(),
                None if is_in_mesh && count >= PEER_COUNT_MAX => {
                    format!("there are more than {PEER_COUNT_MAX} hosts with networks of this host's tenants")
                }
                None => {
                    count += usize::from(is_in_mesh);
                    known.add(name, record);
                    all.push(Believed { name, record, is_peer: is_in_mesh });
                    continue;
                }
            };
            self.problems.push(Problem::about("Host", name, format!("{why}: it is left out")));
        }
        all
    }
}

/// A host whose record is believed.
struct Believed<'a> {
    name: &'a String,
    record: &'a HostRecord,
    is_peer: bool,
}

/// Addresses and keys of hosts that are believed.
#[derive(Default)]
struct Known<'a> {
    by_address: BTreeMap<IpAddr, &'a String>,
    by_key: BTreeMap<&'a str, &'a String>,
}

impl<'a> Known<'a> {
    fn add(&mut self, name: &'a String, record: &'a HostRecord) {
        self.by_address.insert(record.address, name);
        self.by_key.insert(&record.public_key, name);
    }

    /// The host of which a record takes something, and why it is none then.
    fn taken(&self, record: &HostRecord) -> Option<(&'a String, String)> {
        let of_address = self.by_address.get(&record.address).map(|name| (*name, "address"));
        let of_key = || self.by_key.get(record.public_key.as_str()).map(|name| (*name, "key"));
        of_address.or_else(of_key).map(|(name, what)| (name, format!("{name} has its {what}")))
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

/// The addresses of declared vNICs of peers, which go with them: those of their networks that no block has.
fn single_addresses<'a>(
    believed: &[Believed<'a>],
    view: &View,
    declared: &State,
    problems: &mut Vec<Problem>,
) -> BTreeMap<&'a str, Vec<Cidr>> {
    let peers = believed.iter().filter(|one| one.is_peer);
    let hosts: BTreeMap<&str, &'a str> = peers.map(|one| (one.name.as_str(), one.name.as_str())).collect();
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
fn ranges<'a>(believed: &[Believed<'a>], view: &View, declared: &State) -> Vec<(&'a str, Cidr, String)> {
    let hosts: BTreeMap<&str, &'a str> = believed.iter().map(|one| (one.name.as_str(), one.name.as_str())).collect();
    let mut ranges = Vec::new();
    for network in declared.networks() {
        for (host, block) in view.blocks_of(network.name()) {
            let is_free = network.floating.is_none_or(|part| !part.encloses(block) && !block.encloses(part));
            let Some(name) = hosts.get(host).filter(|_| is_free && network.pool.encloses(block)) else { continue };
            let mut network = network.clone();
            network.range = Some(block);
            let what = format!("its block of the network {}", network.name());
            ranges.push((*name, Cidr::from(block), what.clone()));
            ranges.extend(network.assigned6().map(|part| (*name, Cidr::from(part), what)));
        }
    }
    let own = said_ranges(believed.iter().map(|one| (one.name, one.record)), view).into_iter();
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
