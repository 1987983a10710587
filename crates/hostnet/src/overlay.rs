//! The plain IP path between vNICs of different hosts, as any container overlay gives it: VXLAN
//! (RFC 7348) over the hosts' own addresses, one more port of the network's bridge.
//!
//! Every host sends what is for nobody it knows (broadcast, multicast, first packets) to each of
//! its peers, once each: a static list that follows the peers file. Where an Ethernet address lives
//! is learned from what comes in. Nothing needs multicast of the network below. VXLAN proves
//! nobody's identity: whoever can send UDP between the hosts can send into the overlay; the hosts'
//! own containers can't (see [`crate::guard`]). Packets under an address of the network come in only
//! from the host that has it ([`crate::fence`]). RDMA traffic does not go this way.

use crate::addresses;
use crate::error::{Context, Error, Result, fail};
use crate::fence::{self, Range};
use crate::guard::{Guard, VXLAN_UDP_PORT};
use crate::links::{self, Change, Filter, Link, Overlay, OverlayOptions};
use crate::run_dir::fnv1a;
use freeflow_protocol::admin::DEFAULT_OVERLAY_NUMBER;
use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;

/// The VXLAN network identifier of the network `default`: "ff".
pub const DEFAULT_VNI: u32 = DEFAULT_OVERLAY_NUMBER;
/// Bytes that VXLAN puts around a packet: outer IP, UDP, VXLAN and inner Ethernet headers.
const OVERHEAD_IPV4_BYTES: u32 = 20 + 8 + 8 + 14;
const OVERHEAD_IPV6_BYTES: u32 = 40 + 8 + 8 + 14;
/// Ethernet addresses that are learned of other hosts: containers choose their own.
const LEARNED_COUNT_MAX: u32 = 65_536;
/// The smallest packet that every IPv4 host must take (RFC 791), and so the least that an overlay must carry, bytes.
const MTU_BYTES_MIN: u32 = 576;
/// As the router takes.
const FILE_BYTES_MAX: u64 = 8 << 20;
const PEER_COUNT_MAX: usize = 1024;

/// The overlay's part of the peers file; the rest is the router's.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Peers {
    pub host: String,
    pub address: IpAddr,
    #[serde(default)]
    pub peers: Vec<Peer>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Peer {
    pub host: String,
    pub address: IpAddr,
    /// Addresses that its vNICs may have; the router has looked at them.
    #[serde(default)]
    pub prefixes: Vec<String>,
}

/// Reads a peers file.
///
/// # Errors
/// It can't be read, or can't be meant.
pub fn read(path: &Path) -> Result<Peers> {
    let what = || format!("the peers file {}", path.display());
    let mut text = Vec::new();
    File::open(path).context(what())?.take(FILE_BYTES_MAX).read_to_end(&mut text).context(what())?;
    let peers: Peers = serde_json::from_slice(&text).context(what())?;
    if peers.peers.len() > PEER_COUNT_MAX {
        fail!("{}: {} peers are more than {PEER_COUNT_MAX}", what(), peers.peers.len());
    }
    if let Some(other) = peers.peers.iter().find(|peer| peer.address.is_ipv4() != peers.address.is_ipv4()) {
        fail!("{}: the addresses of {} and {} are not of the same kind of IP", what(), peers.host, other.host);
    }
    Ok(peers)
}

/// The interface that has this host's address.
///
/// # Errors
/// None has it.
pub fn underlay(peers: &Peers) -> Result<Link> {
    let address = peers.address;
    addresses::interface_with(address)?.ok_or_else(|| {
        Error::new(format!("the peers file gives this host the address {address}, which none of its interfaces has"))
    })
}

/// The VXLAN device on a bridge.
pub fn name(bridge: &str) -> String {
    format!("ffx-{:08x}", fnv1a(bridge.as_bytes()) as u32)
}

/// Makes the overlay of a bridge, or corrects the one there is. Refuses a number that another one of this host has.
/// `pools`: the addresses of the network.
///
/// # Errors
/// That, or the kernel refuses.
pub fn make(bridge: &str, (vni, pools): (u32, &[Range]), peers: &Peers, guard: &Guard) -> Result<()> {
    let address = peers.address;
    let underlay = underlay(peers)?;
    let overhead = if address.is_ipv4() { OVERHEAD_IPV4_BYTES } else { OVERHEAD_IPV6_BYTES };
    let mtu_bytes = underlay.mtu_bytes.min(u32::from(u16::MAX)).saturating_sub(overhead);
    if mtu_bytes < MTU_BYTES_MIN {
        fail!("the MTU of {} is too small for an overlay", underlay.name);
    }
    let name = name(bridge);
    let identity = Overlay { vni, local: Some(address), underlay: underlay.index };
    let mut present = links::find(&name)?;
    if present.as_ref().is_some_and(|link| link.overlay != Some(identity)) {
        links::delete(&name)?;
        present = None;
    }
    if present.is_none() {
        if let Some(other) = others(&name)?.into_iter().find(|(_, number)| *number == vni) {
            fail!("its overlay's number {vni} is that of {}; the network needs another name", other.0);
        }
        links::add_overlay(&name, OverlayOptions { mtu_bytes: Some(mtu_bytes), ..options(identity) })
            .context("can't make the overlay between the hosts")?;
    }
    let guarded = guard.put(&name);
    let is_bare = !matches!(guarded, Ok(false));
    let fenced = guarded.and_then(|is_new| fence::put(&name, guard, is_new, pools, &owners(peers)));
    if fenced.is_err() && is_bare {
        // It may carry packets already, and has nothing any more that looks at them.
        links::delete_if_there(&name);
    }
    fenced?;
    links::change(&name, Change { bridge: Some(bridge), mtu_bytes: Some(mtu_bytes), ..Change::UP })?;
    links::change(bridge, Change { mtu_bytes: Some(mtu_bytes), ..Change::default() })?;
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    addresses::set_flooded_hosts(&name, &peers.peers.iter().map(|peer| peer.address).collect())
}

/// The address of each host, with each range that it has.
fn owners(peers: &Peers) -> Vec<(IpAddr, Range)> {
    let ranges = |peer: &Peer| {
        let address = peer.address;
        let ranges: Vec<Range> = peer.prefixes.iter().filter_map(|text| Range::parse(text)).collect();
        ranges.into_iter().map(move |range| (address, range))
    };
    peers.peers.iter().flat_map(ranges).collect()
}

fn options(identity: Overlay) -> OverlayOptions {
    OverlayOptions { identity, udp_port: VXLAN_UDP_PORT, learned_count_max: LEARNED_COUNT_MAX, mtu_bytes: None }
}

/// Other overlays of this network namespace, and their numbers.
fn others(name: &str) -> Result<Vec<(String, u32)>> {
    let all = links::list(Filter::Overlays)?.into_iter().filter(|link| link.name != name);
    Ok(all.filter_map(|link| Some((link.name, link.overlay?.vni))).collect())
}

/// Whether this machine can make an overlay, tried in a network namespace that goes away.
///
/// # Errors
/// It can't.
pub fn check_abilities() -> Result<()> {
    const PROBE: &str = "ffprobe9";
    links::add_overlay(PROBE, options(Overlay { vni: DEFAULT_VNI, local: None, underlay: 0 }))?;
    addresses::check_flooding(PROBE)
}

/// Removes the overlay of a bridge, if there is one.
///
/// # Errors
/// The kernel refuses.
pub fn delete(bridge: &str) -> Result<()> {
    let name = name(bridge);
    if links::exists(&name) { links::delete(&name) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(name: &str, text: &str) -> Result<Peers> {
        let path = std::env::temp_dir().join(format!("freeflow-overlay-{name}-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let peers = read(&path);
        std::fs::remove_file(&path).unwrap();
        peers
    }

    #[test]
    fn what_the_overlay_needs_is_read_and_the_rest_passed_over() {
        let text = r#"{"host": "h1", "address": "192.0.2.1", "key_file": "host.key", "control_port": 4790, "icrc": true,
            "peers": [{"host": "h2", "address": "192.0.2.2", "public_key": "00", "prefixes": ["10.111.2.0/24"]}]}"#;
        let peers = read_text("good", text).unwrap();
        assert_eq!((peers.host.as_str(), peers.peers.len()), ("h1", 1));
        assert_eq!(peers.peers[0].address, "192.0.2.2".parse::<IpAddr>().unwrap());
        assert_eq!(peers.peers[0].prefixes, ["10.111.2.0/24"]);
    }

    #[test]
    fn a_file_that_can_not_be_meant_is_refused() {
        for (name, text) in [
            ("empty", ""),
            ("no-address", r#"{"host": "h1"}"#),
            ("mixed", r#"{"host": "h1", "address": "::1", "peers": [{"host": "h2", "address": "192.0.2.2"}]}"#),
        ] {
            assert!(read_text(name, text).unwrap_err().to_string().contains("peers file"), "{name}");
        }
        assert!(read(Path::new("/no/such/file")).is_err());
    }

    #[test]
    fn interface_names_fit() {
        assert!(name("ff-0123abcd").len() <= 15 && name("a") != name("b"));
    }
}
