//! IP addresses and routes of the calling thread's network namespace, and where an overlay sends
//! frames for addresses that it does not know.

use crate::error::{Context, Result};
use crate::links;
use crate::netlink::Netlink;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

/// An address of an interface, with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceAddress {
    pub address: IpAddr,
    pub prefix_length: u8,
}

impl fmt::Display for InterfaceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_length)
    }
}

/// Whether the kernel first asks whether somebody else has an IPv6 address (duplicate address detection).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detection {
    AsUsual,
    Skip,
}

fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn message_of(
    interface: &str,
    InterfaceAddress { address, prefix_length }: InterfaceAddress,
) -> Result<AddressMessage> {
    let mut message = AddressMessage::default();
    message.header.family = family_of(address);
    message.header.prefix_len = prefix_length;
    message.header.scope = if address.is_loopback() { AddressScope::Host } else { AddressScope::Universe };
    message.header.index = links::index(interface)?;
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    Ok(message)
}

/// Gives an interface an address.
///
/// # Errors
/// It has the address, or there is no such interface.
pub fn add(interface: &str, address: InterfaceAddress, detection: Detection) -> Result<()> {
    let mut message = message_of(interface, address)?;
    if detection == Detection::Skip {
        message.header.flags |= AddressHeaderFlags::Nodad;
    }
    Netlink::open()
        .and_then(|mut netlink| netlink.change(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL))
        .context(format!("can't give {interface} the address {address}"))
}

/// Takes an address from an interface.
///
/// # Errors
/// It does not have the address.
pub fn delete(interface: &str, address: InterfaceAddress) -> Result<()> {
    let message = message_of(interface, address)?;
    Netlink::open()
        .and_then(|mut netlink| netlink.change(RouteNetlinkMessage::DelAddress(message), 0))
        .context(format!("can't take the address {address} from {interface}"))
}

/// All addresses of a family, each with its interface's number.
fn list(family: AddressFamily) -> Result<Vec<(u32, InterfaceAddress)>> {
    let mut question = AddressMessage::default();
    question.header.family = family;
    let found = Netlink::open()
        .and_then(|mut netlink| netlink.list(&RouteNetlinkMessage::GetAddress(question)))
        .context("can't list the host's addresses")?;
    let one = |message: &RouteNetlinkMessage| {
        let RouteNetlinkMessage::NewAddress(message) = message else { return None };
        let local = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) => Some(*address),
            _ => None,
        });
        // IPv6 has the one without the other, unless the interface is one end of a tunnel.
        let address = local.or_else(|| {
            message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            })
        })?;
        Some((message.header.index, InterfaceAddress { address, prefix_length: message.header.prefix_len }))
    };
    Ok(found.iter().filter_map(one).collect())
}

/// IPv4 addresses of an interface.
///
/// # Errors
/// There is no such interface.
pub fn ipv4_of(interface: &str) -> Result<Vec<InterfaceAddress>> {
    let index = links::index(interface)?;
    let all = list(AddressFamily::Inet)?;
    Ok(all.into_iter().filter(|(of, _)| *of == index).map(|(_, address)| address).collect())
}

/// The interface that has this address.
///
/// # Errors
/// The kernel can't be asked.
pub fn interface_with(address: IpAddr) -> Result<Option<links::Link>> {
    let all = list(family_of(address))?;
    let Some((index, _)) = all.into_iter().find(|(_, one)| one.address == address) else { return Ok(None) };
    links::find_index(index)
}

/// A route of IPv4, as far as somebody here asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    table: u32,
    destination: (Ipv4Addr, u8),
    interface: Option<u32>,
}

fn list_routes() -> Result<Vec<Route>> {
    let mut question = RouteMessage::default();
    question.header.address_family = AddressFamily::Inet;
    let found = Netlink::open()
        .and_then(|mut netlink| netlink.list(&RouteNetlinkMessage::GetRoute(question)))
        .context("can't list the host's routes")?;
    let one = |message: &RouteNetlinkMessage| match message {
        RouteNetlinkMessage::NewRoute(message) => Some(route_of(message)),
        _ => None,
    };
    Ok(found.iter().filter_map(one).collect())
}

fn route_of(message: &RouteMessage) -> Route {
    let prefix_length = message.header.destination_prefix_length;
    let destination = (Ipv4Addr::UNSPECIFIED, prefix_length);
    let mut route = Route { table: message.header.table.into(), destination, interface: None };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => route.destination.0 = *address,
            RouteAttribute::Oif(index) => route.interface = Some(*index),
            RouteAttribute::Table(table) => route.table = *table,
            _ => {}
        }
    }
    route
}

/// Destinations of this namespace's IPv4 routes other than those over `except`, as (address, prefix length).
///
/// # Errors
/// The kernel can't be asked.
pub fn routes(except: &str) -> Result<Vec<(Ipv4Addr, u8)>> {
    let except = links::find(except)?.map(|link| link.index);
    let is_other = |route: &Route| route.interface.is_none() || route.interface != except;
    let all = list_routes()?.into_iter().filter(is_other).map(|route| route.destination);
    Ok(all.filter(|&(_, prefix_length)| prefix_length > 0).collect())
}

/// Makes a default route over an interface, unless this namespace has a default route. Gives whether it was made.
///
/// # Errors
/// There is no such interface, or the gateway can't be reached by it.
pub(crate) fn ensure_default_route(gateway: IpAddr, interface: &str) -> Result<bool> {
    let is_default = |route: &Route| route.table == u32::from(RouteHeader::RT_TABLE_MAIN) && route.destination.1 == 0;
    if list_routes()?.iter().any(is_default) {
        return Ok(false);
    }
    let mut message = RouteMessage::default();
    message.header.address_family = family_of(gateway);
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Boot;
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![RouteAttribute::Gateway(gateway.into()), RouteAttribute::Oif(links::index(interface)?)];
    Netlink::open()
        .and_then(|mut netlink| netlink.change(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL))
        .context(format!("can't make a route by {gateway}"))
        .map(|()| true)
}

/// Where an overlay sends frames for Ethernet addresses that it does not know: an entry of the address 0 for each host.
fn flooding_entry(overlay: u32, host: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = overlay;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes =
        vec![NeighbourAttribute::LinkLayerAddress(vec![0; 6]), NeighbourAttribute::Destination(host.into())];
    message
}

fn flooded_host(message: &NeighbourMessage) -> Option<IpAddr> {
    let is_flooding = |attribute: &NeighbourAttribute| matches!(attribute, NeighbourAttribute::LinkLayerAddress(address) if address[..] == [0; 6]);
    let host = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(host)) => Some(IpAddr::V4(*host)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(host)) => Some(IpAddr::V6(*host)),
        NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => <[u8; 4]>::try_from(bytes.as_slice())
            .map(IpAddr::from)
            .or_else(|_| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from))
            .ok(),
        _ => None,
    });
    host.filter(|_| message.attributes.iter().any(is_flooding))
}

/// The hosts to which an overlay sends what is for nobody known become these.
pub(crate) fn set_flooded_hosts(overlay: &str, wanted: &BTreeSet<IpAddr>) -> Result<()> {
    let index = links::index(overlay)?;
    let act = || -> io::Result<()> {
        let mut netlink = Netlink::open()?;
        let present = flooded_hosts(&mut netlink, index)?;
        for &stale in present.difference(wanted) {
            netlink.change(RouteNetlinkMessage::DelNeighbour(flooding_entry(index, stale)), 0)?;
        }
        for &new in wanted.difference(&present) {
            let entry = RouteNetlinkMessage::NewNeighbour(flooding_entry(index, new));
            netlink.change(entry, NLM_F_CREATE | NLM_F_APPEND)?;
        }
        Ok(())
    };
    act().context(format!("can't add the other hosts to {overlay}"))
}

fn flooded_hosts(netlink: &mut Netlink, overlay: u32) -> io::Result<BTreeSet<IpAddr>> {
    let mut question = NeighbourMessage::default();
    question.header.family = AddressFamily::Bridge;
    let found = netlink.list(&RouteNetlinkMessage::GetNeighbour(question))?;
    let one = |message: &RouteNetlinkMessage| match message {
        RouteNetlinkMessage::NewNeighbour(message) if message.header.ifindex == overlay => flooded_host(message),
        _ => None,
    };
    Ok(found.iter().filter_map(one).collect())
}

/// Whether the kernel lists an overlay's entries.
pub(crate) fn check_flooding(overlay: &str) -> Result<()> {
    let index = links::index(overlay)?;
    let entries = Netlink::open().and_then(|mut netlink| flooded_hosts(&mut netlink, index));
    entries.context(format!("can't list the entries of {overlay}")).map(drop)
}

/// `10.0.0.0/8`, or an address alone.
pub fn parse_cidr(text: &str) -> Option<(Ipv4Addr, u8)> {
    let (address, prefix_length) = text.split_once('/').unwrap_or((text, "32"));
    let prefix_length: u8 = prefix_length.parse().ok()?;
    (prefix_length <= 32).then_some((address.parse().ok()?, prefix_length))
}

/// Whether two ranges have an address in common.
pub fn overlap(one: (Ipv4Addr, u8), other: (Ipv4Addr, u8)) -> bool {
    let shorter = one.1.min(other.1);
    let mask = u32::MAX.checked_shl(32 - u32::from(shorter)).unwrap_or(0);
    u32::from(one.0) & mask == u32::from(other.0) & mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_or_not() {
        let range = |text| parse_cidr(text).unwrap();
        assert!(overlap(range("10.111.0.0/16"), range("10.0.0.0/8")));
        assert!(overlap(range("10.111.3.4"), range("10.111.0.0/16")));
        assert!(!overlap(range("10.112.0.0/16"), range("10.111.0.0/16")));
        assert!(overlap(range("0.0.0.0/0"), range("192.0.2.0/24")));
        assert_eq!(parse_cidr("10.0.0.0/33"), None);
        assert_eq!(parse_cidr("fe80::/64"), None);
    }

    #[test]
    fn the_host_of_a_flooding_entry_is_read_however_the_kernels_message_is_understood() {
        for host in ["192.0.2.7", "2001:db8::7"].map(|host| host.parse::<IpAddr>().unwrap()) {
            let mut entry = flooding_entry(3, host);
            assert_eq!(flooded_host(&entry), Some(host));
            let bytes = match host {
                IpAddr::V4(host) => host.octets().to_vec(),
                IpAddr::V6(host) => host.octets().to_vec(),
            };
            entry.attributes[1] = NeighbourAttribute::Destination(NeighbourAddress::Other(bytes));
            assert_eq!(flooded_host(&entry), Some(host));
            entry.attributes[0] = NeighbourAttribute::LinkLayerAddress(vec![2, 0, 0, 0, 0, 1]);
            assert_eq!(flooded_host(&entry), None);
        }
    }

    #[test]
    fn a_route_in_a_table_with_a_large_number_is_not_the_main_tables() {
        let mut message = RouteMessage::default();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        assert_eq!(route_of(&message).table, 254);
        message.header.destination_prefix_length = 24;
        message.attributes = vec![
            RouteAttribute::Table(1000),
            RouteAttribute::Oif(2),
            RouteAttribute::Destination(Ipv4Addr::new(192, 0, 2, 0).into()),
        ];
        let expected = Route { table: 1000, destination: ([192, 0, 2, 0].into(), 24), interface: Some(2) };
        assert_eq!(route_of(&message), expected);
    }
}
