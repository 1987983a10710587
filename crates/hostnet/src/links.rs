//! Interfaces of the calling thread's network namespace: bridges, veth pairs, overlays.

use crate::error::{Context, Error, Result};
use crate::netlink::Netlink;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    BridgeStpState, InfoBridge, InfoData, InfoKind, InfoVeth, InfoVxlan, LinkAttribute, LinkExtentMask, LinkFlags,
    LinkInfo, LinkMessage,
};
use rustix::io::Errno;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// An interface, as far as somebody here asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub alias: Option<String>,
    /// The interface number of the bridge that it is a port of.
    pub bridge: Option<u32>,
    pub mtu_bytes: u32,
    pub is_up: bool,
    /// It carries packets: the other end of a veth pair is up, and a bridge that it is a port of knows.
    pub is_running: bool,
    /// Its Ethernet address.
    pub mac: Vec<u8>,
    pub overlay: Option<Overlay>,
}

/// Identity of an overlay (VXLAN).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlay {
    /// VXLAN network identifier.
    pub vni: u32,
    /// This host's address.
    pub local: Option<IpAddr>,
    /// The interface number of the interface that has the address.
    pub underlay: u32,
}

/// Selection of interfaces to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter<'a> {
    All,
    Bridges,
    VethEnds,
    Overlays,
    /// The ports of the bridge of this name.
    PortsOf(&'a str),
}

impl From<&LinkMessage> for Link {
    fn from(message: &LinkMessage) -> Self {
        let is_up = message.header.flags.contains(LinkFlags::Up);
        let is_running = message.header.flags.contains(LinkFlags::Running);
        let mut link = Self { index: message.header.index, is_up, is_running, ..Self::default() };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Address(mac) => link.mac.clone_from(mac),
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
                LinkAttribute::Controller(index) => link.bridge = Some(*index),
                LinkAttribute::Mtu(bytes) => link.mtu_bytes = *bytes,
                LinkAttribute::LinkInfo(parts) => link.overlay = parts.iter().find_map(overlay_of),
                _ => {}
            }
        }
        link
    }
}

fn overlay_of(part: &LinkInfo) -> Option<Overlay> {
    let LinkInfo::Data(InfoData::Vxlan(attributes)) = part else { return None };
    let mut overlay = Overlay::default();
    for attribute in attributes {
        match attribute {
            InfoVxlan::Id(vni) => overlay.vni = *vni,
            InfoVxlan::Local(address) => overlay.local = Some((*address).into()),
            InfoVxlan::Local6(address) => overlay.local = Some((*address).into()),
            InfoVxlan::Link(index) => overlay.underlay = *index,
            _ => {}
        }
    }
    Some(overlay)
}

/// A message about an interface, without anything that a reader here passes over.
fn message(attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes = attributes;
    message
}

/// Counters are left out: nobody here reads them.
fn question(mut attributes: Vec<LinkAttribute>) -> LinkMessage {
    attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    message(attributes)
}

/// Interfaces of this network namespace.
///
/// # Errors
/// The kernel can't be asked, or there is no such bridge.
pub fn list(filter: Filter<'_>) -> Result<Vec<Link>> {
    let of_kind = |kind| vec![LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])];
    let attributes = match filter {
        Filter::All => Vec::new(),
        Filter::Bridges => of_kind(InfoKind::Bridge),
        Filter::VethEnds => of_kind(InfoKind::Veth),
        Filter::Overlays => of_kind(InfoKind::Vxlan),
        Filter::PortsOf(bridge) => vec![LinkAttribute::Controller(index(bridge)?)],
    };
    let what = "can't list the host's interfaces";
    let found = Netlink::open()
        .and_then(|mut netlink| netlink.list(&RouteNetlinkMessage::GetLink(question(attributes))))
        .context(what)?;
    let link = |message: &RouteNetlinkMessage| match message {
        RouteNetlinkMessage::NewLink(link) => Some(Link::from(link)),
        _ => None,
    };
    Ok(found.iter().filter_map(link).collect())
}

/// The interface of this name, if there is one.
///
/// # Errors
/// The kernel can't be asked.
pub fn find(name: &str) -> Result<Option<Link>> {
    ask(question(vec![LinkAttribute::IfName(name.to_string())]), name)
}

/// The interface of this number, if there is one.
pub(crate) fn find_index(index: u32) -> Result<Option<Link>> {
    let mut question = question(Vec::new());
    question.header.index = index;
    ask(question, &format!("number {index}"))
}

fn ask(question: LinkMessage, name: &str) -> Result<Option<Link>> {
    match Netlink::open().and_then(|mut netlink| netlink.get(RouteNetlinkMessage::GetLink(question))) {
        Ok(RouteNetlinkMessage::NewLink(link)) => Ok(Some(Link::from(&link))),
        Ok(_) => Ok(None),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error).context(format!("can't ask for the interface {name}")),
    }
}

fn is_absent(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NODEV.raw_os_error())
}

pub fn exists(name: &str) -> bool {
    find(name).is_ok_and(|link| link.is_some())
}

/// # Errors
/// There is no such interface.
pub fn get(name: &str) -> Result<Link> {
    find(name)?.ok_or_else(|| Error::new(format!("there is no interface {name}")))
}

pub(crate) fn index(name: &str) -> Result<u32> {
    get(name).map(|link| link.index)
}

/// The largest packet that an interface takes, bytes.
///
/// # Errors
/// There is no such interface.
pub fn mtu_bytes(name: &str) -> Result<u32> {
    get(name).map(|link| link.mtu_bytes)
}

/// # Errors
/// There is none, or it can't be deleted (the loopback, the kernel's own templates).
pub fn delete(name: &str) -> Result<()> {
    let message = message(vec![LinkAttribute::IfName(name.to_string())]);
    Netlink::open()
        .and_then(|mut netlink| netlink.change(RouteNetlinkMessage::DelLink(message), 0))
        .context(format!("can't delete the interface {name}"))
}

/// Deletes an interface that may have gone by itself, with its namespace.
pub fn delete_if_there(name: &str) {
    let _ = delete(name);
}

/// Changes to an interface. The default changes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change<'a> {
    pub is_up: Option<bool>,
    /// The name of the bridge that it becomes a port of.
    pub bridge: Option<&'a str>,
    pub mtu_bytes: Option<u32>,
    pub alias: Option<&'a str>,
    /// The same as before has the kernel announce it, where the interface's settings say so.
    pub mac: Option<&'a [u8]>,
}

impl Change<'_> {
    pub const UP: Self = Change { is_up: Some(true), bridge: None, mtu_bytes: None, alias: None, mac: None };
}

/// Changes an interface.
///
/// # Errors
/// There is none, or no such bridge, or the kernel refuses.
pub fn change(name: &str, change: Change<'_>) -> Result<()> {
    let mut attributes = Vec::new();
    attributes.extend(change.mtu_bytes.map(LinkAttribute::Mtu));
    attributes.extend(change.bridge.map(index).transpose()?.map(LinkAttribute::Controller));
    attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
    attributes.extend(change.alias.map(|alias| LinkAttribute::IfAlias(alias.to_string())));
    let mut message = message(attributes);
    message.header.index = index(name)?;
    if let Some(is_up) = change.is_up {
        message.header.change_mask = LinkFlags::Up;
        message.header.flags = if is_up { LinkFlags::Up } else { LinkFlags::empty() };
    }
    Netlink::open()
        .and_then(|mut netlink| netlink.change(RouteNetlinkMessage::SetLink(message), 0))
        .context(format!("can't change the interface {name}"))
}

fn add(name: &str, kind: InfoKind, data: Option<InfoData>, attributes: Vec<LinkAttribute>) -> Result<()> {
    let what = format!("can't make the interface {name}");
    let info = [LinkInfo::Kind(kind)].into_iter().chain(data.map(LinkInfo::Data)).collect();
    let own = [LinkAttribute::IfName(name.to_string()), LinkAttribute::LinkInfo(info)];
    let message = message(own.into_iter().chain(attributes).collect());
    Netlink::open()
        .and_then(|mut netlink| netlink.change(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL))
        .context(what)
}

/// How a bridge is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct BridgeOptions {
    /// The kernel chooses, and follows its ports, where there is none.
    pub mac: Option<[u8; 6]>,
    pub is_multicast_flooded: bool,
}

/// Makes a bridge without spanning tree, whose ports forward at once.
///
/// # Errors
/// The name is taken, or the kernel has no bridges.
pub fn add_bridge(name: &str, options: BridgeOptions) -> Result<()> {
    let mut data = vec![InfoBridge::StpState(BridgeStpState::Disabled), InfoBridge::ForwardDelay(0)];
    if options.is_multicast_flooded {
        data.push(InfoBridge::MulticastSnooping(false));
    }
    let mac = options.mac.map(|mac| LinkAttribute::Address(mac.to_vec()));
    add(name, InfoKind::Bridge, Some(InfoData::Bridge(data)), mac.into_iter().collect())
}

/// Where the peer of a veth pair is made.
#[derive(Clone, Copy, Debug)]
pub enum PeerNamespace<'a> {
    Own,
    OfProcess(u32),
    Of(BorrowedFd<'a>),
}

/// Makes a veth pair: one end here, the peer in a network namespace. Without an MTU both have the kernel's.
///
/// # Errors
/// A name is taken, or the kernel has no veth pairs.
pub fn add_veth(name: &str, peer: (&str, PeerNamespace<'_>), mtu_bytes: Option<u32>) -> Result<()> {
    let (peer_name, namespace) = peer;
    let mut attributes = vec![LinkAttribute::IfName(peer_name.to_string())];
    attributes.extend(mtu_bytes.map(LinkAttribute::Mtu));
    match namespace {
        PeerNamespace::Own => {}
        PeerNamespace::OfProcess(pid) => attributes.push(LinkAttribute::NetNsPid(pid)),
        PeerNamespace::Of(namespace) => attributes.push(LinkAttribute::NetNsFd(namespace.as_raw_fd())),
    }
    let data = InfoData::Veth(InfoVeth::Peer(message(attributes)));
    add(name, InfoKind::Veth, Some(data), mtu_bytes.map(LinkAttribute::Mtu).into_iter().collect())
}

/// Makes a device that takes packets from others' filters (ifb).
///
/// # Errors
/// The name is taken, or the kernel has none.
pub fn add_ifb(name: &str) -> Result<()> {
    add(name, InfoKind::Ifb, None, Vec::new())
}

/// How a VXLAN device is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OverlayOptions {
    pub identity: Overlay,
    pub udp_port: u16,
    pub learned_count_max: u32,
    /// The kernel's, where there is none.
    pub mtu_bytes: Option<u32>,
}

/// Makes a VXLAN device, which learns where Ethernet addresses are.
pub(crate) fn add_overlay(name: &str, options: OverlayOptions) -> Result<()> {
    let OverlayOptions { identity: Overlay { vni, local, underlay }, udp_port, learned_count_max, mtu_bytes } = options;
    let mut data = vec![
        InfoVxlan::Id(vni),
        InfoVxlan::Learning(true),
        InfoVxlan::Limit(learned_count_max),
        InfoVxlan::Port(udp_port),
    ];
    data.extend(local.map(|local| match local {
        IpAddr::V4(local) => InfoVxlan::Local(local),
        IpAddr::V6(local) => InfoVxlan::Local6(local),
    }));
    if underlay != 0 {
        data.push(InfoVxlan::Link(underlay));
    }
    add(name, InfoKind::Vxlan, Some(InfoData::Vxlan(data)), mtu_bytes.map(LinkAttribute::Mtu).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_an_interface_is_read_from_the_kernels_message() {
        let data =
            [InfoVxlan::Id(7), InfoVxlan::Link(3), InfoVxlan::Local([192, 0, 2, 1].into()), InfoVxlan::Port(4789)];
        let info = [LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(data.to_vec()))];
        let mut message = message(vec![
            LinkAttribute::IfName("ffx-1".into()),
            LinkAttribute::IfAlias("freeflow 0 red 3".into()),
            LinkAttribute::Controller(4),
            LinkAttribute::Mtu(1450),
            LinkAttribute::Address(vec![2, 0, 0, 0, 0, 9]),
            LinkAttribute::LinkInfo(info.to_vec()),
        ]);
        (message.header.index, message.header.flags) = (9, LinkFlags::Up | LinkFlags::Broadcast);
        let overlay = Overlay { vni: 7, local: Some([192, 0, 2, 1].into()), underlay: 3 };
        let expected = Link {
            index: 9,
            name: "ffx-1".into(),
            alias: Some("freeflow 0 red 3".into()),
            bridge: Some(4),
            mtu_bytes: 1450,
            is_up: true,
            is_running: false,
            mac: vec![2, 0, 0, 0, 0, 9],
            overlay: Some(overlay),
        };
        assert_eq!(Link::from(&message), expected);
    }

    #[test]
    fn every_namespace_has_a_loopback() {
        let loopback = get("lo").unwrap();
        assert!(loopback.index == 1 && loopback.mtu_bytes > 0 && exists("lo"));
        assert!(list(Filter::All).unwrap().contains(&loopback));
        assert!(!list(Filter::Bridges).unwrap().contains(&loopback));
        assert_eq!(find("no-such-link").unwrap(), None);
        assert!(list(Filter::PortsOf("no-such-link")).is_err() && delete("no-such-link").is_err());
    }
}
