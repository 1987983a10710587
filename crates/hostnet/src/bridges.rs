//! This host's bridges, one a network, and the CDI files that name them all.
//!
//! The network `default` has the bridge that `up` makes, on which the host is the gateway. Every
//! other network is *sealed*: its bridge is made when its first container starts, the host has no
//! address on it, and whatever containers send to the host itself is dropped as it leaves the
//! bridge. So two networks can have the same addresses: their frames never meet, nothing of theirs
//! is routed, and where the kernel shows bridged packets to netfilter, it follows no connections of
//! theirs, which it could not distinguish.
//!
//! A bridge's alias says whose it is, and that it is whole: it is written last. It is that of one
//! network by its number: a network that is deleted and made again, by another tenant perhaps, has
//! another bridge, where no container of the former is.
//!
//! Bridges come and go under `bridges.lock`, and what networks there are is asked under it: by what
//! was so before, the bridge of a network that has just begun would go.

use crate::addresses::{self, Detection, InterfaceAddress};
use crate::error::{Context, Result, fail};
use crate::fence::Range;
use crate::firewall::{self, Rule};
use crate::guard::Guard;
use crate::inventory::Vnic;
use crate::links::{self, BridgeOptions, Change, Filter, Link};
use crate::overlay;
use crate::ports::{self, Bridge, Port};
use crate::run_dir::{RunDir, fnv1a, lock_file};
use freeflow_protocol::admin::{NetworkStatus, overlay_number};
use std::collections::BTreeMap;
use std::fs::{self, File};

pub const DEFAULT_NETWORK: &str = "default";

fn is_default(network: &NetworkStatus) -> bool {
    network.name == DEFAULT_NETWORK
}

/// The bridge of a network, whether it is there or not.
pub fn of(run_dir: &RunDir, network: &NetworkStatus) -> Bridge {
    let name = match is_default(network) {
        true if network.bridge.is_empty() => run_dir.bridge(),
        true => network.bridge.clone(),
        false => sealed_name(run_dir, network),
    };
    Bridge { name, network: network.id, has_gateway: is_default(network) }
}

/// 15 characters, the same for the same network of the same run directory.
fn sealed_name(run_dir: &RunDir, network: &NetworkStatus) -> String {
    let path = run_dir.path().as_os_str().as_encoded_bytes();
    let key = [path, b"\0", network.name.as_bytes(), b"\0", &network.id.to_le_bytes()].concat();
    format!("ffn{:012x}", fnv1a(&key) >> 16)
}

fn alias(run_dir: &RunDir, network: &NetworkStatus) -> String {
    format!("{}{} {}", alias_prefix(run_dir), network.name, network.id)
}

fn alias_prefix(run_dir: &RunDir) -> String {
    format!("freeflow {} ", run_dir.short_hash())
}

/// Held while bridges come or go.
///
/// # Errors
/// The file can't be locked.
pub fn lock(run_dir: &RunDir) -> Result<File> {
    lock_file(&run_dir.path().join("bridges.lock"))
}

/// The bridge of a network, made if need be. The default network's is `up`'s to make.
///
/// # Errors
/// The kernel refuses, or another network's bridge has the name.
pub fn ensure(run_dir: &RunDir, network: &NetworkStatus) -> Result<Bridge> {
    let bridge = of(run_dir, network);
    if bridge.has_gateway {
        return Ok(bridge);
    }
    let _lock = lock(run_dir)?;
    make_sealed(run_dir, network, &bridge.name).context(format!("the network {}", network.name))?;
    Ok(bridge)
}

fn make_sealed(run_dir: &RunDir, network: &NetworkStatus, bridge: &str) -> Result<()> {
    let settings = run_dir.settings();
    let guard = Guard::of(run_dir);
    let mut is_whole = false;
    for other in sealed_bridges(run_dir)? {
        if other.network == network.name && other.id < network.id {
            // Of one that had the name before. Its overlay has the number that this one's needs.
            remove(run_dir, &other)?;
        } else if other.network == network.name && other.id > network.id {
            fail!("it was deleted and made again meanwhile");
        } else if other.bridge == bridge && other.network != network.name {
            fail!("its bridge {bridge} is that of the network {}; one of them needs another name", other.network);
        } else if other.bridge == bridge {
            is_whole = true;
        }
    }
    if !is_whole {
        let host = settings.as_ref().map_or("", |settings| settings.host.as_str());
        ensure_bare(bridge, host)?;
        guard.seal(bridge)?;
        firewall::isolate_bridged(bridge, Rule::Present);
        links::change(bridge, Change::UP)?;
    }
    if let Some(settings) = settings {
        join(bridge, network, settings.peers.as_deref(), &guard)?;
    }
    if !is_whole {
        links::change(bridge, Change { alias: Some(&alias(run_dir, network)), ..Change::default() })?;
    }
    Ok(())
}

/// Joins the bridge with those of the same network on other hosts, where there are any. Networks
/// that have the same name are the same.
fn join(bridge: &str, network: &NetworkStatus, peers: Option<&std::path::Path>, guard: &Guard) -> Result<()> {
    let peers = peers.map(overlay::read).transpose()?;
    let pools = [Some(&network.pool), network.pool6.as_ref()].into_iter().flatten();
    let pools: Vec<Range> = pools.filter_map(|text| Range::parse(text)).collect();
    match peers.filter(|peers| !peers.peers.is_empty()) {
        Some(peers) => overlay::make(bridge, (overlay_number(&network.name), &pools), &peers, guard),
        None => overlay::delete(bridge),
    }
}

/// A sealed bridge that is whole, and its network.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sealed {
    bridge: String,
    network: String,
    id: u32,
}

impl Sealed {
    fn is_of(&self, network: &NetworkStatus) -> bool {
        self.network == network.name && self.id == network.id
    }
}

/// Those of this run directory.
fn sealed_bridges(run_dir: &RunDir) -> Result<Vec<Sealed>> {
    let bridges = links::list(Filter::Bridges)?;
    let prefix = alias_prefix(run_dir);
    Ok(bridges.iter().filter_map(|bridge| sealed_of(bridge, &prefix)).collect())
}

fn sealed_of(bridge: &Link, prefix: &str) -> Option<Sealed> {
    let network = bridge.alias.as_ref()?.strip_prefix(prefix)?;
    // Those of earlier versions have no number, and are nobody's any more.
    let (network, id) = network.split_once(' ').unwrap_or((network, "0"));
    Some(Sealed { bridge: bridge.name.clone(), network: network.into(), id: id.parse().ok()? })
}

/// Makes again what the peers file, or a bridge that somebody deleted, asks for: bridges of
/// networks that have vNICs. The networks are asked for with the lock held.
///
/// # Errors
/// They can't be asked for, or a bridge can't be made or removed.
pub fn refresh(run_dir: &RunDir, networks: impl FnOnce() -> Result<Vec<NetworkStatus>>) -> Result<()> {
    let _lock = lock(run_dir)?;
    let networks = networks()?;
    // All of them, whatever one has: it may be another tenant's than the rest.
    let mut result = Ok(());
    for network in networks.iter().filter(|network| !is_default(network) && network.vnic_count > 0) {
        let bridge = of(run_dir, network).name;
        let made = make_sealed(run_dir, network, &bridge).context(format!("the network {}", network.name));
        result = result.and(made);
    }
    result.and(remove_others(run_dir, &networks))
}

/// With the lock held since before the networks were asked for.
pub(crate) fn remove_others(run_dir: &RunDir, networks: &[NetworkStatus]) -> Result<()> {
    for sealed in sealed_bridges(run_dir)? {
        if !networks.iter().any(|present| sealed.is_of(present)) {
            remove(run_dir, &sealed)?;
        }
    }
    Ok(())
}

/// With what is plugged into it: a network goes after its vNICs, so these are nobody's.
fn remove(run_dir: &RunDir, sealed: &Sealed) -> Result<()> {
    let bridge = sealed.bridge.as_str();
    for port in ports::list(run_dir)?.iter().filter(|port| port.bridge.as_deref() == Some(bridge)) {
        links::delete_if_there(&port.interface);
    }
    firewall::isolate_bridged(bridge, Rule::Absent);
    overlay::delete(bridge)?;
    delete(bridge)
}

/// Removes all of them, as `down` does.
///
/// # Errors
/// The kernel refuses.
pub fn remove_all(run_dir: &RunDir) -> Result<()> {
    let _lock = lock(run_dir)?;
    remove_others(run_dir, &[])?;
    let _ = std::fs::remove_file(run_dir.path().join("bridges.lock"));
    Ok(())
}

/// The network that an interface belongs in: the one that it was made for, if its vNIC is in it
/// still. A vNIC that got the same id later, in a network of somebody else's, has nothing to do
/// with it.
fn network_of<'a>(
    port: &Port,
    vnics: &BTreeMap<&str, &Vnic>,
    networks: &'a [NetworkStatus],
) -> Option<&'a NetworkStatus> {
    let vnic = vnics.get(port.vnic.as_str())?;
    networks.iter().find(|network| network.id == port.network && network.name == vnic.network)
}

/// Deletes the interfaces whose vNIC is not there (any more), and names the networks of the others.
/// Invariant: the interfaces were listed before the vNICs. A container has its vNIC before its
/// interface, so one that starts meanwhile keeps it.
pub fn sweep<'a>(ports: Vec<Port>, vnics: &[Vnic], networks: &'a [NetworkStatus]) -> Vec<(Port, &'a NetworkStatus)> {
    let vnics = vnics.iter().map(|vnic| (vnic.id.as_str(), vnic)).collect();
    let mut kept = Vec::new();
    for port in ports {
        match network_of(&port, &vnics, networks) {
            Some(network) => kept.push((port, network)),
            None => links::delete_if_there(&port.interface),
        }
    }
    kept
}

/// Makes the bridge with the gateway's address in this network namespace, or corrects the one there is.
/// `host` distinguishes the MAC addresses of bridges that an overlay joins.
///
/// # Errors
/// The kernel refuses.
pub fn ensure_gateway(bridge: &str, host: &str, gateway: InterfaceAddress) -> Result<()> {
    ensure_bare(bridge, host)?;
    let mut is_present = false;
    for address in addresses::ipv4_of(bridge)? {
        if address == gateway {
            is_present = true;
        } else {
            addresses::delete(bridge, address)?;
        }
    }
    if !is_present {
        addresses::add(bridge, gateway, Detection::AsUsual)?;
    }
    links::change(bridge, Change::UP)
}

/// Makes a bridge on which the host has no address, unless it is there.
fn ensure_bare(bridge: &str, host: &str) -> Result<()> {
    if !links::exists(bridge) {
        // A fixed MAC address: else it changes with the ports, and with it everyone's neighbour tables go stale.
        let hash = fnv1a(format!("{bridge}@{host}").as_bytes()).to_be_bytes();
        let mac = [0x02, 0xff, hash[0], hash[1], hash[2], hash[3]];
        links::add_bridge(bridge, BridgeOptions { mac: Some(mac), ..BridgeOptions::default() })
            .context(format!("can't make the bridge {bridge}"))?;
    }
    // The host has no IPv6 address on it, whatever its ports carry. Where the kernel has no IPv6
    // there is nothing to turn off.
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{bridge}/disable_ipv6"), "1");
    Ok(())
}

/// Deletes a bridge, if it is there.
///
/// # Errors
/// The kernel refuses.
pub fn delete(bridge: &str) -> Result<()> {
    if links::exists(bridge) { links::delete(bridge) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn network(name: &str, id: u32) -> NetworkStatus {
        NetworkStatus {
            name: name.into(),
            id,
            pool: "10.1.0.0/16".into(),
            gateway: "10.1.0.1".parse().unwrap(),
            prefix_length: 16,
            pool6: None,
            vnic_count: 0,
            bridge: String::new(),
            data_path: Default::default(),
        }
    }

    #[test]
    fn names_fit_and_differ_by_network_and_run_directory() {
        let one = RunDir::new(Path::new("/run/freeflow")).unwrap();
        let other = RunDir::new(Path::new("/tmp/elsewhere/b")).unwrap();
        let (red, blue, later) = (network("red", 1), network("blue", 2), network("red", 3));
        let name = |network| sealed_name(&one, network);
        let names = [name(&red), name(&blue), name(&later), sealed_name(&other, &red)];
        assert!(names.iter().all(|name| name.len() == 15));
        assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
        assert_eq!(names[0], name(&red));
    }

    #[test]
    fn whose_a_bridge_is_shows_in_its_alias() {
        let run_dir = RunDir::new(Path::new("/run/freeflow")).unwrap();
        let found = |alias: Option<String>| {
            let bridge = Link { name: "ffn1".into(), alias, ..Link::default() };
            sealed_of(&bridge, &alias_prefix(&run_dir))
        };
        let sealed = found(Some(alias(&run_dir, &network("a.b", 3)))).unwrap();
        assert_eq!(sealed, Sealed { bridge: "ffn1".into(), network: "a.b".into(), id: 3 });
        assert!(sealed.is_of(&network("a.b", 3)) && !sealed.is_of(&network("a.b", 4)));
        for foreign in [None, Some(String::new()), Some("freeflow 0 a".into())] {
            assert_eq!(found(foreign), None);
        }
    }

    #[test]
    fn an_interface_belongs_in_the_network_that_it_was_made_for() {
        let vnic = |network: &str| Vnic { id: "web".into(), network: network.into(), is_declared: true };
        let port = Port { interface: "ffv1".into(), network: 3, vnic: "web".into(), bridge: None };
        let networks = [network("red", 3), network("blue", 4)];
        let (red, blue) = (vnic("red"), vnic("blue"));
        assert_eq!(network_of(&port, &[("web", &red)].into(), &networks), Some(&networks[0]));
        assert_eq!(network_of(&port, &[("web", &blue)].into(), &networks), None);
        // Its vNIC was deleted.
        assert_eq!(network_of(&port, &[("other", &red)].into(), &networks), None);
        // Made again by another tenant.
        assert_eq!(network_of(&port, &[("web", &red)].into(), &[network("red", 5)]), None);
    }

    #[test]
    fn overlays_have_numbers_of_their_own() {
        let numbers: std::collections::BTreeSet<u32> =
            (0..200).map(|number| overlay_number(&format!("net-{number}"))).collect();
        assert!(numbers.len() >= 199 && numbers.iter().all(|&number| number > 0 && number < 1 << 24));
        assert!(!numbers.contains(&overlay::DEFAULT_VNI));
    }
}
