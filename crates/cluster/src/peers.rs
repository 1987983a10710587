//! The other hosts, as a host's peers file has them.
//!
//! A host writes its own record as it likes, so a record is believed only where it takes nothing that another says of
//! itself for longer: an address, or a key. A range of `default` is believed where it has no addresses of a network
//! that is declared, nor of the range of such a host. And no two ranges overlap, whoever gave them: a router refuses
//! the whole file otherwise.
use crate::records::{HostRecord, Problem};
use crate::view::View;
use freeflow_orchestrator::{Cidr, NetworkEntry, Pool, State};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Hosts and prefixes that a router takes.
const PEER_COUNT_MAX: usize = 256;
const PREFIX_COUNT_MAX: usize = 4096;

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
        let mut taken = Vec::new();
        let mut prefixes = single_addresses(&believed, view, declared);
        for (name, cidr, what) in ranges(&believed, view, declared) {
            if let Some(why) = why_not(cidr, &taken, &what, declared) {
                all.problems.push(Problem::about("Host", name, format!("{why}: its addresses are not reached")));
                continue;
            }
            taken.push(cidr);
            let of_host = prefixes.entry(name).or_default();
            match of_host.len() < PREFIX_COUNT_MAX {
                true => of_host.push(cidr),
                false => {
                    let why = format!("more than {PREFIX_COUNT_MAX} ranges of addresses; {what} is not reached");
                    all.problems.push(Problem::about("Host", name, why));
                }
            }
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

/// The ranges of hosts' own networks that others believe.
pub(crate) fn own_ranges<'a>(view: &'a View, declared: &State) -> Vec<(&'a str, Cidr)> {
    let mut believed: Vec<(&str, Cidr)> = Vec::new();
    for (name, record) in by_age(view) {
        let Ok(range) = record.default_range.parse::<Pool>() else { continue };
        let (cidr, taken) = (Cidr::from(range), believed.iter().map(|(_, cidr)| *cidr).collect::<Vec<_>>());
        if why_not(cidr, &taken, OWN_RANGE, declared).is_none() {
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
) -> BTreeMap<&'a str, Vec<Cidr>> {
    let hosts: BTreeMap<&str, &'a str> = believed.iter().map(|(name, _)| (name.as_str(), name.as_str())).collect();
    let mut single = BTreeMap::<&str, Vec<Cidr>>::new();
    for (name, (_, place)) in view.places() {
        let Some(host) = hosts.get(place.host.as_str()) else { continue };
        let Some(vnic) = declared.vnic(name) else { continue };
        let is_floating = declared.network(vnic.network()).is_some_and(|network| network.is_floating(vnic.address));
        let of_host = single.entry(host).or_default();
        // Half of them are left for ranges, however many vNICs a host has.
        if is_floating && of_host.len() + 2 <= PREFIX_COUNT_MAX / 2 {
            of_host.extend(vnic.object.spec.addresses.iter().copied().map(Cidr::single));
        }
    }
    single
}

/// All ranges of hosts, those that controllers have given first; with what each is.
fn ranges<'a>(believed: &[(&'a String, &HostRecord)], view: &View, declared: &State) -> Vec<(&'a str, Cidr, String)> {
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
    let own = |(name, record): &(&'a String, &HostRecord)| {
        let range: Pool = record.default_range.parse().ok()?;
        Some((name.as_str(), Cidr::from(range), OWN_RANGE.to_owned()))
    };
    ranges.extend(believed.iter().filter_map(own));
    ranges
}

const OWN_RANGE: &str = "its range of the network default";

fn why_not(cidr: Cidr, taken: &[Cidr], what: &str, declared: &State) -> Option<String> {
    if taken.iter().any(|other| other.overlaps(cidr)) {
        return Some(format!("{what}, {cidr}, overlaps another host's"));
    }
    let has = |network: &&NetworkEntry| Cidr::from(network.pool).overlaps(cidr);
    let network = declared.networks().find(has).filter(|_| what == OWN_RANGE)?;
    Some(format!("{what}, {cidr}, has addresses of the network {}", network.name()))
}
