//! Guards against RoCEv2 packets that containers send to hosts by themselves: filters on the host's
//! end of each vNIC's veth pair.
//!
//! A packet to UDP 4791 that a router receives must come from a router: a container that may open
//! raw sockets can write any source address into its own. So what comes in from a container and is
//! a UDP datagram to a guarded port is dropped and counted, wherever it goes. Guarded are RoCEv2's
//! port, and the overlay's where there is one: a forged VXLAN packet would carry anything past
//! these filters.
//!
//! The filters are `tc`'s u32, which every kernel that runs containers has, with nothing to install beyond iproute2:
//! - IPv4, with options or without. A datagram's ports are in its first fragment, always (fragments
//!   are cut at multiples of 8 bytes, as long as a UDP header), so dropping that one is enough: the
//!   others never become a datagram.
//! - IPv6, directly or in a first fragment. Packets with other extension headers before their
//!   payload are dropped whole, but for hop-by-hop options before ICMPv6, which multicast needs: a
//!   filter that can't look behind any number of headers must not guess.
//! - VLAN tags (802.1Q, 802.1ad): dropped, whatever is inside. A vNIC has no VLANs, and the kernel
//!   would look through the tag of VLAN 0.
//!
//! Dropping is tc's action `drop`; where the kernel lacks it (`act_gact`) packets are redirected
//! into a device whose queue has no room. Both count.

use crate::error::{Context, Result};
use crate::links::{self, Change, PeerNamespace};
use crate::programs;
use crate::run_dir::{RunDir, fnv1a};
use std::fmt::Write;

/// RoCEv2's port (IBTA annex A17.3; IANA).
pub const ROCE_UDP_PORT: u16 = 4791;
/// The next header of ICMPv6 (IANA).
const ICMPV6: u8 = 58;
/// VXLAN's port (IANA).
pub const VXLAN_UDP_PORT: u16 = 4789;

/// Guards of a host, and those that it can do without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// UDP ports that nobody in a container may send to.
    pub ports: Vec<u16>,
    /// Whether a container must not be started without.
    pub required: bool,
    /// The device into which packets are redirected, should it be needed.
    sink: String,
}

impl Guard {
    /// As this host's settings have it: needed where the router has a wire, else as good as can be.
    pub fn of(run_dir: &RunDir) -> Self {
        let required = run_dir.settings().is_some_and(|settings| settings.peers.is_some());
        let mut ports = vec![ROCE_UDP_PORT];
        if required {
            ports.push(VXLAN_UDP_PORT);
        }
        Self { ports, required, sink: sink(&run_dir.bridge()) }
    }

    /// Puts the filters on an interface, unless they are there. Whether they were not: then it has no others now.
    ///
    /// # Errors
    /// This host needs them, and can't.
    pub fn put(&self, interface: &str) -> Result<bool> {
        let shown = ["filter", "show", "dev", interface, "ingress", "protocol", "ip", "prio", "1"];
        let present = tc(&shown).unwrap_or_default();
        if self.ports.iter().all(|port| present.contains(&format!("match 0000{port:04x}/0000ffff at 0"))) {
            return Ok(false);
        }
        // With all its filters, if it is there.
        remove_filters(interface);
        self.put_on_new(interface).map(|()| true)
    }

    /// The same on an interface that has just been made. `tc` runs once: starts of containers wait for it.
    ///
    /// # Errors
    /// Those of [`Self::put`].
    pub fn put_on_new(&self, interface: &str) -> Result<()> {
        let result = self
            .dropping(|action| tc_batch(&self.filters(interface, action)).inspect_err(|_| remove_filters(interface)));
        if self.required { result.context(format!("can't guard UDP {ROCE_UDP_PORT}")) } else { Ok(()) }
    }

    /// Puts filters with the action by which this kernel drops packets.
    pub(crate) fn dropping(&self, put: impl Fn(&str) -> Result<()>) -> Result<()> {
        // Where the sink is, it was needed before.
        if !links::exists(&self.sink) && put("drop").is_ok() {
            return Ok(());
        }
        self.make_sink()?;
        put(&format!("mirred egress redirect dev {}", self.sink))
    }

    /// Drops whatever comes out of a bridge to this host. Unlike the filters of [`Self::put`] a
    /// network can't be without.
    ///
    /// # Errors
    /// It can't be done.
    pub fn seal(&self, bridge: &str) -> Result<()> {
        let sealed = |action: &str| {
            remove_filters(bridge);
            tc_batch(&format!(
                "qdisc add dev {bridge} clsact\nfilter add dev {bridge} ingress protocol all prio 1 u32 match u32 0 0 \
                 action {action}\n"
            ))
        };
        self.dropping(sealed).context("can't keep it apart from the host")
    }

    /// The device into which packets are redirected where they can't be dropped.
    fn make_sink(&self) -> Result<()> {
        let present = links::find(&self.sink)?;
        // It is up once it has its queue.
        if present.as_ref().is_some_and(|sink| sink.is_up) {
            return Ok(());
        }
        if present.is_none() {
            // Somebody else may make it at the same time; whether it is there shows below.
            let _ = links::add_ifb(&self.sink);
        }
        tc(&["qdisc", "replace", "dev", &self.sink, "root", "pfifo", "limit", "0"])?;
        links::change(&self.sink, Change::UP)
    }

    /// Lines for `tc -batch`. Offsets count from the network header.
    fn filters(&self, interface: &str, action: &str) -> String {
        let mut text = format!("qdisc add dev {interface} clsact\n");
        let mut filter = |protocol: &str, priority: u8, rest: &str| {
            let _ = writeln!(text, "filter add dev {interface} ingress protocol {protocol} prio {priority} {rest}");
        };
        filter("ip", 1, "handle 1: u32 divisor 1");
        // UDP and the first fragment or whole: on behind the IPv4 header, however long.
        let udp = "u32 ht 800: match u8 17 0xff at 9 match u16 0 0x1fff at 6";
        filter("ip", 1, &format!("{udp} link 1: offset at 0 mask 0x0f00 shift 6 eat"));
        for port in &self.ports {
            filter("ipv6", 2, &format!("u32 match u8 17 0xff at 6 match u16 {port} 0xffff at 42 action {action}"));
            let fragment = "match u8 44 0xff at 6 match u8 17 0xff at 40 match u16 0 0xfff8 at 42";
            filter("ipv6", 2, &format!("u32 {fragment} match u16 {port} 0xffff at 50 action {action}"));
        }
        // Hop-by-hop options before ICMPv6 pass; every other way to put headers before a payload does not. A filter
        // that lets them pass would keep those behind it from looking: headers that differ in a bit are dropped.
        for bit in (0..8).map(|bit| 1_u8 << bit) {
            let other = !ICMPV6 & bit;
            filter("ipv6", 2, &format!("u32 match u8 0 0xff at 6 match u8 {other} {bit:#04x} at 40 action {action}"));
        }
        for header in [43, 60] {
            filter("ipv6", 2, &format!("u32 match u8 {header} 0xff at 6 action {action}"));
        }
        for header in [0, 43, 44, 60] {
            filter("ipv6", 2, &format!("u32 match u8 44 0xff at 6 match u8 {header} 0xff at 40 action {action}"));
        }
        filter("802.1q", 3, &format!("u32 match u32 0 0 action {action}"));
        filter("802.1ad", 4, &format!("u32 match u32 0 0 action {action}"));
        // The last ones: where they are, all are, also if whoever put them was ended on the way.
        for port in &self.ports {
            filter("ip", 1, &format!("u32 ht 1: match u16 {port} 0xffff at 2 action {action}"));
        }
        text
    }
}

fn sink(bridge: &str) -> String {
    format!("ffs-{:08x}", fnv1a(bridge.as_bytes()) as u32)
}

/// Removes what [`Guard::put`] made beside the filters, which go with their interfaces.
pub fn remove_sink(run_dir: &RunDir) {
    let sink = sink(&run_dir.bridge());
    links::delete_if_there(&sink);
}

/// Whether this machine can filter, tried in a network namespace that goes away.
///
/// # Errors
/// It can't.
pub fn check_abilities() -> Result<()> {
    links::add_veth("ffprobe0", ("ffprobe1", PeerNamespace::Own), None)?;
    Guard { ports: vec![ROCE_UDP_PORT], required: true, sink: "ffprobe2".into() }.put("ffprobe0").map(drop)
}

fn remove_filters(interface: &str) {
    let _ = tc(&["qdisc", "delete", "dev", interface, "clsact"]);
}

fn tc(arguments: &[&str]) -> Result<String> {
    programs::run("tc", arguments)
}

/// Several commands, one a line; the first that fails ends the rest.
fn tc_batch(lines: &str) -> Result<()> {
    programs::run_with_input("tc", &["-batch", "-"], lines)
}

/// Packets that the filters of an interface have dropped.
pub fn dropped(interface: &str) -> u64 {
    tc(&["-s", "filter", "show", "dev", interface, "ingress"]).map_or(0, |text| count(&text))
}

/// Sums the `Sent BYTES bytes N pkt` of all actions: each of ours drops.
fn count(text: &str) -> u64 {
    let packets = |line: &str| line.trim().strip_prefix("Sent ")?.split_whitespace().nth(2)?.parse::<u64>().ok();
    text.lines().filter_map(packets).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_packets_are_summed_over_actions() {
        let text = "filter protocol ip pref 1 u32 chain 0\n\taction order 1: gact action drop\n\tAction statistics:\n\
                    \tSent 3094 bytes 4 pkt (dropped 4, overlimits 0 requeues 0)\n\tbacklog 0b 0p requeues 0\n\
                    \tSent 59 bytes 1 pkt (dropped 0, overlimits 1 requeues 0)\n";
        assert_eq!(count(text), 5);
        assert_eq!(count(""), 0);
    }

    #[test]
    fn every_guarded_port_has_its_filters() {
        let guard = Guard { ports: vec![4791, 4789], required: true, sink: "s".into() };
        let text = guard.filters("veth", "drop");
        for port in ["4791", "4789"] {
            assert_eq!(text.matches(&format!("match u16 {port} 0xffff")).count(), 3, "{text}");
        }
        assert!(text.lines().count() < 32 && text.lines().all(|line| line.contains("dev veth")));
        // Nothing passes for good: the fence of an overlay is behind these.
        assert!(!text.contains("flowid"), "{text}");
        // By these it is known that all are there.
        assert!(text.lines().rev().take(2).all(|line| line.contains("u32 ht 1: match u16 47")), "{text}");
        // Every header but ICMPv6 behind hop-by-hop options is dropped.
        let options =
            text.lines().filter_map(|line| line.split_once("match u8 0 0xff at 6 match u8 ")?.1.split_once(" at 40"));
        let rules: Vec<(u8, u8)> = options
            .map(|(rule, _)| rule.split_once(" 0x").unwrap())
            .map(|(value, mask)| (value.parse().unwrap(), u8::from_str_radix(mask, 16).unwrap()))
            .collect();
        let passing: Vec<u8> =
            (0..=255).filter(|header: &u8| rules.iter().all(|(value, mask)| header & mask != *value)).collect();
        assert_eq!(passing, [58]);
    }
}
