//! The plain IP path between vNICs of different hosts, as any container overlay gives it: VXLAN (RFC 7348) over the hosts'
//! own addresses, one more port of the network's bridge.
//!
//! Every host sends what is for nobody it knows (broadcast, multicast, first packets) to each of its peers, once each: a
//! static list that follows the peers file. Where an Ethernet address lives is learned from what comes in. Nothing needs
//! multicast of the network below. VXLAN proves nobody's identity: whoever can send UDP between the hosts can send into the
//! overlay; the hosts' own containers can't (see [`crate::guard`]). RDMA traffic does not go this way.

use crate::failure::{Context, Failure, Result};
use crate::guard::Guard;
use crate::ip;
use crate::run_dir::fnv1a;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;

/// VXLAN's port (IANA).
pub const UDP_PORT: u16 = 4789;
/// The VXLAN network identifier of the network `default`: "ff".
pub const DEFAULT_VNI: u32 = 0x6666;
/// What VXLAN puts around a packet: outer IP, UDP, VXLAN and inner Ethernet headers, bytes.
const OVERHEAD_IPV4_BYTES: u32 = 20 + 8 + 8 + 14;
const OVERHEAD_IPV6_BYTES: u32 = 40 + 8 + 8 + 14;
/// Ethernet addresses that are learned of other hosts: containers choose their own.
const LEARNED_COUNT_MAX: u32 = 65_536;
/// The smallest packet that every IPv4 host must take (RFC 791), and so the least that an overlay must carry, bytes.
const MTU_BYTES_MIN: u32 = 576;
const FILE_BYTES_MAX: u64 = 1 << 20;
const PEER_COUNT_MAX: usize = 1024;
/// Stands for all addresses that are not known.
const ANY_MAC: &str = "00:00:00:00:00:00";

/// What of the peers file the overlay needs; the rest is the router's.
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
}

/// Reads a peers file.
pub fn read(path: &Path) -> Result<Peers> {
    let what = || format!("the peers file {}", path.display());
    let mut text = Vec::new();
    File::open(path).context(what())?.take(FILE_BYTES_MAX).read_to_end(&mut text).context(what())?;
    let peers: Peers = serde_json::from_slice(&text).context(what())?;
    if peers.peers.len() > PEER_COUNT_MAX {
        crate::fail!("{}: {} peers are more than {PEER_COUNT_MAX}", what(), peers.peers.len());
    }
    if let Some(other) = peers.peers.iter().find(|peer| peer.address.is_ipv4() != peers.address.is_ipv4()) {
        crate::fail!("{}: the addresses of {} and {} are not of the same kind of IP", what(), peers.host, other.host);
    }
    Ok(peers)
}

/// The interface that has this host's address.
pub fn underlay(peers: &Peers) -> Result<String> {
    let address = peers.address;
    ip::interface_with(address)?.ok_or_else(|| {
        Failure::new(format!("the peers file gives this host the address {address}, which none of its interfaces has"))
    })
}

/// The VXLAN device on a bridge.
pub fn name(bridge: &str) -> String {
    format!("ffx-{:08x}", fnv1a(bridge.as_bytes()) as u32)
}

/// Makes the overlay of a bridge, or corrects the one there is. Refuses a number that another one of this host has.
pub fn make(bridge: &str, vni: u32, peers: &Peers, guard: &Guard) -> Result<()> {
    let address = peers.address;
    let underlay = underlay(peers)?;
    let overhead = if address.is_ipv4() { OVERHEAD_IPV4_BYTES } else { OVERHEAD_IPV6_BYTES };
    let mtu = ip::mtu(&underlay)?.min(u32::from(u16::MAX)).saturating_sub(overhead);
    if mtu < MTU_BYTES_MIN {
        crate::fail!("the MTU of {underlay} is too small for an overlay");
    }
    let name = name(bridge);
    if ip::exists(&name) && !is_as_wanted(&name, vni, &underlay, address)? {
        ip::run(&["link", "delete", "dev", &name])?;
    }
    if !ip::exists(&name) {
        if let Some(other) = others(&name)?.into_iter().find(|(_, number)| *number == vni) {
            crate::fail!("its overlay's number {vni} is that of {}; the network needs another name", other.0);
        }
        ip::batch(&[format!(
            "link add name {name} mtu {mtu} type vxlan id {vni} local {address} dev {underlay} dstport {UDP_PORT} \
             maxaddress {LEARNED_COUNT_MAX}"
        )])
        .context("can't make the overlay between the hosts")?;
    }
    guard.put(&name)?;
    ip::batch(&[
        format!("link set dev {name} mtu {mtu} master {bridge} up"),
        format!("link set dev {bridge} mtu {mtu}"),
    ])?;
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    follow(&name, peers)
}

/// Other overlays of this network namespace, and their numbers.
fn others(name: &str) -> Result<Vec<(String, u32)>> {
    let text = ip::run(&["-d", "-o", "link", "show", "type", "vxlan"])?;
    let one = |line: &str| {
        let other = line.split_whitespace().nth(1)?.trim_end_matches(':').to_string();
        Some((other, ip::word_after(line, "id")?.parse().ok()?))
    };
    Ok(text.lines().filter_map(one).filter(|(other, _)| other != name).collect())
}

fn is_as_wanted(name: &str, vni: u32, underlay: &str, address: IpAddr) -> Result<bool> {
    let text = ip::run(&["-d", "-o", "link", "show", "dev", name])?;
    let has = |keyword: &str, value: &str| ip::word_after(&text, keyword).as_deref() == Some(value);
    let local = if address.is_ipv4() { "local" } else { "local6" };
    Ok((has(local, &address.to_string()) || has("local", &address.to_string()))
        && has("dev", underlay)
        && has("id", &vni.to_string()))
}

/// Makes the list of hosts that get what is for nobody known that of the peers file.
fn follow(name: &str, peers: &Peers) -> Result<()> {
    let wanted: BTreeSet<String> = peers.peers.iter().map(|peer| peer.address.to_string()).collect();
    let present: BTreeSet<String> = ip::bridge(&["fdb", "show", "dev", name])?
        .lines()
        .filter(|line| line.starts_with(ANY_MAC))
        .filter_map(|line| ip::word_after(line, "dst"))
        .collect();
    for stale in present.difference(&wanted) {
        ip::bridge(&["fdb", "delete", ANY_MAC, "dev", name, "dst", stale])?;
    }
    for new in wanted.difference(&present) {
        ip::bridge(&["fdb", "append", ANY_MAC, "dev", name, "dst", new])?;
    }
    Ok(())
}

/// Whether this machine can make an overlay, tried in a network namespace that goes away.
pub fn check_abilities() -> Result<()> {
    ip::batch(&[format!(
        "link add name ffprobe9 type vxlan id {DEFAULT_VNI} dstport {UDP_PORT} maxaddress {LEARNED_COUNT_MAX}"
    )])?;
    ip::bridge(&["fdb", "show", "dev", "ffprobe9"]).map(|_| ())
}

/// Removes the overlay of a bridge, if there is one.
pub fn delete(bridge: &str) -> Result<()> {
    let name = name(bridge);
    if ip::exists(&name) {
        ip::run(&["link", "delete", "dev", &name])?;
    }
    Ok(())
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
