//! vNICs' interfaces: the veth pair between a container and its network's bridge.

use crate::addresses::{self, Detection, InterfaceAddress};
use crate::error::{Context, Error, Result, fail};
use crate::guard::Guard;
use crate::links::{self, Change, Filter, Link, PeerNamespace};
use crate::namespace::{in_network, network_of_process};
use crate::run_dir::RunDir;
use freeflow_protocol::admin::VnicStatus;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// vNICs that may share one network namespace, as containers of a pod do.
const VNICS_OF_NAMESPACE_MAX: usize = 100;

/// A bridge takes packets of a new port after some milliseconds, if it is well.
const FORWARDING_TIME: Duration = Duration::from_millis(100);

/// A network's bridge, as vNICs are plugged into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridge {
    pub name: String,
    /// [`NetworkStatus::id`](freeflow_protocol::admin::NetworkStatus::id) of its network.
    pub network: u32,
    /// Whether the host is there, as the gateway.
    pub has_gateway: bool,
}

/// The host's end of a vNIC's veth pair. Whose it is says its alias; its name says nothing: whoever
/// may declare vNICs chooses ids, and with a name that follows from an id could aim at the
/// interface of another's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    pub interface: String,
    /// [`NetworkStatus::id`](freeflow_protocol::admin::NetworkStatus::id) of the network that it was made for.
    pub network: u32,
    pub vnic: String,
    /// Into which it is plugged.
    pub bridge: Option<String>,
}

/// 15 characters, as many as an interface's name may have.
fn host_interface() -> Result<String> {
    let mut bytes = [0; 6];
    let length = getrandom(&mut bytes, GetRandomFlags::empty()).context("no random numbers")?;
    assert_eq!(length, bytes.len(), "getrandom gives up to 256 bytes whole");
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("ffv{digits}"))
}

fn alias(run_dir: &RunDir, network: u32, vnic_id: &str) -> String {
    format!("{}{network} {vnic_id}", alias_prefix(run_dir))
}

fn alias_prefix(run_dir: &RunDir) -> String {
    format!("freeflow {} vnic ", run_dir.short_hash())
}

/// All of this run directory's.
///
/// # Errors
/// The kernel can't be asked.
pub fn list(run_dir: &RunDir) -> Result<Vec<Port>> {
    let bridges: BTreeMap<u32, String> =
        links::list(Filter::Bridges)?.into_iter().map(|bridge| (bridge.index, bridge.name)).collect();
    let ends = links::list(Filter::VethEnds)?;
    let prefix = alias_prefix(run_dir);
    Ok(ends.iter().filter_map(|end| port_of(end, &prefix, &bridges)).collect())
}

fn port_of(end: &Link, prefix: &str, bridges: &BTreeMap<u32, String>) -> Option<Port> {
    let (network, vnic) = end.alias.as_ref()?.strip_prefix(prefix)?.split_once(' ')?;
    Some(Port {
        interface: end.name.clone(),
        network: network.parse().ok()?,
        vnic: vnic.to_string(),
        bridge: end.bridge.and_then(|index| bridges.get(&index)).cloned(),
    })
}

/// A vNIC's interface in its container.
#[derive(Debug)]
pub struct Plugged {
    /// Its name inside.
    pub interface: String,
    /// The name of the host's end.
    pub port: String,
    /// The namespace's default route is by it.
    pub has_default_route: bool,
    /// Why it does not have the vNIC's IPv6 address, if it does not.
    pub warning: Option<String>,
}

/// Gives a process' network namespace its end of the vNIC, its address and, where the network has a
/// gateway and no default route is there yet, that.
///
/// # Errors
/// The bridge is gone, the kernel refuses, or the guard that this host needs can't be put. Nothing is left then.
pub fn plug(run_dir: &RunDir, vnic: &VnicStatus, bridge: &Bridge, pid: u32) -> Result<Plugged> {
    plug_into(run_dir, vnic, bridge, network_of_process(pid)?.as_fd(), None)
}

/// The same for a network namespace. Without a name the interface has the first of `ff0`, `ff1`, … that is free there.
///
/// # Errors
/// Those of [`plug`]; or the namespace has an interface of that name.
pub fn plug_into(
    run_dir: &RunDir,
    vnic: &VnicStatus,
    bridge: &Bridge,
    namespace: BorrowedFd<'_>,
    name: Option<&str>,
) -> Result<Plugged> {
    let Bridge { name: bridge, network, has_gateway } = bridge;
    let Some(bridge_link) = links::find(bridge)? else {
        fail!("the bridge {bridge} is gone; make it again with freeflow up");
    };
    // A container of this id that is no more may have left its own.
    unplug(run_dir, &vnic.id);
    let host = host_interface()?;
    let inside = match name {
        Some(name) => name.to_string(),
        None => in_network(namespace, free_name)?,
    };
    links::add_veth(&host, (&inside, PeerNamespace::Of(namespace)), Some(bridge_link.mtu_bytes))?;
    let alias = alias(run_dir, *network, &vnic.id);
    // Guarded before it carries anything.
    let result = links::change(&host, Change { alias: Some(&alias), ..Change::default() })
        .and_then(|()| Guard::of(run_dir).put_on_new(&host))
        .and_then(|()| links::change(&host, Change { bridge: Some(bridge), ..Change::UP }))
        .and_then(|()| in_network(namespace, || configure(vnic, *has_gateway, &inside)));
    if result.is_err() {
        links::delete_if_there(&host);
    }
    let (has_default_route, warning) = result?;
    // Others have packets until they have found out by themselves.
    let _ = announce(&host, namespace, &inside);
    Ok(Plugged { interface: inside, port: host, has_default_route, warning })
}

/// Tells all of the network that the addresses are here now: they may have been another container's, or on another
/// host. The kernel does so (gratuitous ARP, RFC 5227; unsolicited neighbour advertisements, RFC 4861, 7.2.6) when an
/// interface's Ethernet address is set.
fn announce(host: &str, namespace: BorrowedFd<'_>, interface: &str) -> Result<()> {
    let until = Instant::now() + FORWARDING_TIME;
    // The bridge drops what comes before.
    while !links::get(host)?.is_running && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    in_network(namespace, || {
        for (family, setting) in [("ipv4", "arp_notify"), ("ipv6", "ndisc_notify")] {
            // A kernel without IPv6 has no such file.
            let _ = fs::write(format!("/proc/sys/net/{family}/conf/{interface}/{setting}"), "1");
        }
        let mac = links::get(interface)?.mac;
        links::change(interface, Change { mac: Some(&mac), ..Change::default() })
    })
}

/// Announces a vNIC's address once more, from the container of this process.
///
/// # Errors
/// The container is gone, or no interface there has the address.
pub fn announce_again(run_dir: &RunDir, vnic_id: &str, address: IpAddr, pid: u32) -> Result<()> {
    let port = list(run_dir)?.into_iter().find(|port| port.vnic == vnic_id);
    let port = port.ok_or_else(|| Error::new(format!("the vNIC {vnic_id} has no interface")))?;
    let namespace = network_of_process(pid)?;
    let inside = in_network(namespace.as_fd(), || addresses::interface_with(address))?;
    let inside = inside.ok_or_else(|| Error::new(format!("the container has no interface with {address}")))?;
    announce(&port.interface, namespace.as_fd(), &inside.name)
}

/// The first of `ff0`, `ff1`, … that the calling thread's namespace does not have.
fn free_name() -> Result<String> {
    let table = fs::read_to_string("/proc/thread-self/net/dev").context("the container's interfaces")?;
    let names: Vec<&str> = table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
    (0..VNICS_OF_NAMESPACE_MAX)
        .map(|number| format!("ff{number}"))
        .find(|name| !names.contains(&name.as_str()))
        .ok_or_else(|| Error::new("a hundred vNICs share this network namespace already"))
}

/// Gives whether it has made the default route, and a warning, if there is one.
fn configure(vnic: &VnicStatus, has_gateway: bool, interface: &str) -> Result<(bool, Option<String>)> {
    links::change("lo", Change::UP)?;
    let address = InterfaceAddress { address: vnic.address, prefix_length: vnic.prefix_length };
    addresses::add(interface, address, Detection::AsUsual)?;
    links::change(interface, Change::UP)?;
    let mut warning = None;
    if let Some(address) = vnic.address6
        && let Err(error) = configure_ipv6(interface, address, vnic.prefix_length6)
    {
        // The kernel may be without IPv6, or the interface's MTU below what that takes.
        warning = Some(format!("{interface} does not get the address {address}, which then is for RDMA only: {error}"));
    }
    let has_default_route = has_gateway && addresses::ensure_default_route(vnic.gateway, interface)?;
    Ok((has_default_route, warning))
}

/// Nobody else can have the address, so nobody is asked. The rest of the namespace may be without
/// IPv6, as engines often make it.
fn configure_ipv6(interface: &str, address: Ipv6Addr, prefix_length: u8) -> Result<()> {
    let settings = format!("/proc/sys/net/ipv6/conf/{interface}");
    fs::write(format!("{settings}/disable_ipv6"), "0").context("no IPv6 in this kernel")?;
    // No router is there, and other containers are none.
    fs::write(format!("{settings}/accept_ra"), "0").context("router advertisements")?;
    addresses::add(interface, InterfaceAddress { address: address.into(), prefix_length }, Detection::Skip)
}

/// Removes a vNIC's veth pair, if it is there.
pub fn unplug(run_dir: &RunDir, vnic_id: &str) {
    for port in list(run_dir).unwrap_or_default().iter().filter(|port| port.vnic == vnic_id) {
        links::delete_if_there(&port.interface);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn whose_an_interface_is_shows_in_its_alias_alone() {
        assert_eq!(host_interface().unwrap().len(), 15);
        assert_ne!(host_interface().unwrap(), host_interface().unwrap());
        let run_dir = |path| RunDir::new(Path::new(path)).unwrap();
        let (ours, other) = (run_dir("/run/freeflow"), run_dir("/tmp/elsewhere/b"));
        let bridges = [(4, "ffn1".to_string())].into();
        let port = |alias: Option<String>| {
            let end = Link { name: "ffv000000000001".into(), alias, bridge: Some(4), ..Link::default() };
            port_of(&end, &alias_prefix(&ours), &bridges)
        };
        let expected = Port {
            interface: "ffv000000000001".into(),
            network: 7,
            vnic: "web".into(),
            bridge: Some("ffn1".to_string()),
        };
        assert_eq!(port(Some(alias(&ours, 7, "web"))), Some(expected));
        let others = [alias(&other, 7, "web"), String::new(), format!("freeflow {} red 3", ours.short_hash())];
        for foreign in others.map(Some).into_iter().chain([None]) {
            assert_eq!(port(foreign), None);
        }
    }
}
