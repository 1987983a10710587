//! Fence of an overlay: a packet under an address of the network comes in only from the host that has the address, by
//! the peers file. So a host that has not heard that its vNIC is another's by now is heard by nobody who has, by plain
//! IP as by RDMA, and neither is a container that takes an address of another host's.
//!
//! A VXLAN device does not tell filters which host a packet came from. The outer headers still lie before the inner
//! ones, where tc's u32 reaches them by negative offsets. Looked at are the sources of IPv4 and IPv6 packets and the
//! sender of ARP; sources that are not the network's (none yet, link-local, others that containers choose) pass.
//! Whoever can forge the packets of another host can forge these, too: VXLAN proves nothing.
//!
//! The rules are in one of two generations. A new one is whole before the old one goes, so no packet passes between
//! them, and none is lost. A generation has a priority and two hash tables for each kind of packet: single addresses by
//! the last byte of the inner source, ranges by that of the outer one. The tables stay when their priority goes, and
//! are emptied then. The interface's alias names the generation, and what it was made of.

use crate::error::{Context, Result};
use crate::guard::Guard;
use crate::links::{self, Change};
use crate::programs::{self, word_after};
use crate::run_dir::fnv1a;
use std::fmt::Write;
use std::net::IpAddr;

/// Bytes of the UDP, VXLAN and inner Ethernet headers, which lie between the outer IP header and the inner one.
const BETWEEN_BYTES: i32 = 8 + 8 + 14;
/// Behind those of the guard.
const PRIORITY_FIRST: u32 = 20;
const PRIORITIES_OF_GENERATION: u32 = 10;
/// The guard has the first one.
const TABLE_FIRST: u32 = 0x100;
const TABLES_OF_GENERATION: u32 = 0x10;
const ALIAS: &str = "freeflow fence ";
/// In the place of what a generation was made of: the other one may be there, too, and count.
const UNFINISHED: u64 = 0;

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    base: IpAddr,
    prefix_length: u8,
}

impl Range {
    /// `10.1.0.0/16`, `fd00::/64`.
    pub fn parse(text: &str) -> Option<Self> {
        let (base, prefix_length) = text.split_once('/')?;
        let (base, prefix_length) = (base.parse::<IpAddr>().ok()?, prefix_length.parse::<u8>().ok()?);
        (usize::from(prefix_length) <= 8 * octets(base).len()).then_some(Self { base, prefix_length })
    }

    fn is_single(self) -> bool {
        usize::from(self.prefix_length) == 8 * octets(self.base).len()
    }

    fn overlaps(self, other: Self) -> bool {
        let shorter = usize::from(self.prefix_length.min(other.prefix_length));
        let (own, others) = (octets(self.base), octets(other.base));
        let is_same = |bit: usize| (own[bit / 8] ^ others[bit / 8]) & (0x80 >> (bit % 8)) == 0;
        own.len() == others.len() && (0..shorter).all(is_same)
    }

    /// Words of u32 that match an address at an offset which is in the range.
    fn matches(self, offset: i32) -> String {
        let mut text = String::new();
        let mut left = u32::from(self.prefix_length);
        for (pair, offset) in octets(self.base).chunks(2).zip((offset..).step_by(2)) {
            let mask = (0xffff_u32 << (16 - left.min(16))) & 0xffff;
            let value = u32::from(pair[0]) << 8 | u32::from(pair[1]);
            if mask != 0 {
                let _ = write!(text, " match u16 {:#06x} {mask:#06x} at {offset}", value & mask);
            }
            left = left.saturating_sub(16);
        }
        text
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// A kind of packet, with the offset of its source from its own header.
struct Kind {
    protocol: &'static str,
    unspecified: IpAddr,
    source: i32,
}

const KINDS: [Kind; 3] = [
    Kind { protocol: "ip", unspecified: IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), source: 12 },
    Kind { protocol: "arp", unspecified: IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), source: 14 },
    Kind { protocol: "ipv6", unspecified: IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), source: 8 },
];

/// Offset of the outer source, for peers that have addresses of this kind.
fn outer_source(peer: IpAddr) -> i32 {
    let (header, source) = if peer.is_ipv4() { (20, 12) } else { (40, 8) };
    source - header - BETWEEN_BYTES
}

/// The hash key that is the last byte of an address of so many bytes at an offset.
fn hash_key(offset: i32, length: usize) -> String {
    let last = offset + i32::try_from(length).unwrap_or_default() - 1;
    let word = last & !3;
    format!("hashkey mask {:#010x} at {word}", 0xff_u32 << (8 * (3 - (last - word))))
}

fn last_byte(address: IpAddr) -> u8 {
    octets(address).last().copied().unwrap_or_default()
}

/// Priority of a kind of packet in a generation.
fn priority(generation: u32, kind: usize) -> u32 {
    PRIORITY_FIRST + generation * PRIORITIES_OF_GENERATION + kind as u32
}

/// Tables of a kind of packet in a generation: of single addresses, of ranges.
fn tables(generation: u32, kind: usize) -> [u32; 2] {
    let first = TABLE_FIRST + generation * TABLES_OF_GENERATION + 2 * kind as u32;
    [first, first + 1]
}

/// The rules of an interface.
struct Rules<'a> {
    interface: &'a str,
    pools: &'a [Range],
    /// Address of each host, and a range that it has of the network.
    owners: Vec<(IpAddr, Range)>,
}

impl<'a> Rules<'a> {
    fn of(interface: &'a str, pools: &'a [Range], owners: &[(IpAddr, Range)]) -> Self {
        let of_network = |(_, range): &&(IpAddr, Range)| pools.iter().any(|pool| pool.overlaps(*range));
        Self { interface, pools, owners: owners.iter().filter(of_network).copied().collect() }
    }

    fn digest(&self) -> u64 {
        fnv1a(format!("{:?} {:?}", self.pools, self.owners).as_bytes())
    }

    /// The beginning of a line of `tc -batch` about a kind of packet.
    fn filter(&self, verb: &str, kind: usize, priority: u32) -> String {
        format!("filter {verb} dev {} ingress protocol {} prio {priority}", self.interface, KINDS[kind].protocol)
    }

    fn pools_of(&self, kind: usize) -> impl Iterator<Item = &Range> {
        self.pools.iter().filter(move |pool| pool.base.is_ipv4() == KINDS[kind].unspecified.is_ipv4())
    }

    /// Lines that fill the tables, and then have packets looked up in them.
    fn lines(&self, generation: u32, action: &str) -> String {
        let mut text = String::new();
        for (number, kind) in KINDS.iter().enumerate() {
            let add = self.filter("add", number, priority(generation, number));
            let [singles, ranges] = tables(generation, number);
            let is_of_kind = |range: &Range| range.base.is_ipv4() == kind.unspecified.is_ipv4();
            for (peer, range) in self.owners.iter().filter(|(_, range)| is_of_kind(range)) {
                let bucket = match range.is_single() {
                    true => format!("{singles:x}:{:x}:", last_byte(range.base)),
                    false => format!("{ranges:x}:{:x}:", last_byte(*peer)),
                };
                let outer = Range { base: *peer, prefix_length: 8 * octets(*peer).len() as u8 };
                let (inner, outer) = (range.matches(kind.source), outer.matches(outer_source(*peer)));
                let _ = writeln!(text, "{add} u32 ht {bucket}{inner}{outer} flowid :1");
            }
            for pool in self.pools_of(number) {
                let inner = pool.matches(kind.source);
                let by_inner = hash_key(kind.source, octets(pool.base).len());
                let _ = writeln!(text, "{add} u32{inner} link {singles:x}: {by_inner}");
                if let Some((peer, _)) = self.owners.first() {
                    let by_outer = hash_key(outer_source(*peer), octets(*peer).len());
                    let _ = writeln!(text, "{add} u32{inner} link {ranges:x}: {by_outer}");
                }
                let _ = writeln!(text, "{add} u32{inner} action {action}");
            }
        }
        text
    }

    /// Leaves nothing of a generation but its tables, which are made if need be; also of one that was begun only.
    fn clear(&self, generation: u32) -> Result<()> {
        let mut text = String::new();
        for (number, kind) in KINDS.iter().enumerate() {
            let add = self.filter("add", number, priority(generation, number));
            for table in tables(generation, number) {
                let _ = writeln!(text, "{add} handle {table:x}: u32 divisor 256");
            }
            // A table shows its rules only while its priority has some.
            let nobody = Range { base: kind.unspecified, prefix_length: 8 * octets(kind.unspecified).len() as u8 };
            let _ = writeln!(text, "{add} u32{} flowid :1", nobody.matches(kind.source));
        }
        // Those that are there are refused.
        let _ = programs::run_with_input("tc", &["-force", "-batch", "-"], &text);
        let mut text = String::new();
        for (number, kind) in KINDS.iter().enumerate() {
            let priority = priority(generation, number);
            let shown = ["filter", "show", "dev", self.interface, "ingress", "protocol", kind.protocol, "prio"];
            let shown = programs::run("tc", &[&shown[..], &[&priority.to_string()]].concat())?;
            let _ = writeln!(text, "{}", self.filter("delete", number, priority));
            let prefixes = tables(generation, number).map(|table| format!("{table:x}:"));
            let handles = shown.lines().filter_map(|line| word_after(line, "fh"));
            let is_rule = |handle: &String| {
                prefixes.iter().any(|prefix| handle.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty()))
            };
            for handle in handles.filter(is_rule) {
                // All priorities of an interface share the tables; the guard's is there for sure.
                let _ = writeln!(text, "{} handle {handle} u32", self.filter("delete", 0, 1));
            }
        }
        programs::run_with_input("tc", &["-batch", "-"], &text)
    }
}

/// Fences an overlay's interface that has its guard. `is_new`: it has no other filters. `pools`: the addresses of the
/// network. `owners`: the address of each host, and a range that it has, of this network or another.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn put(
    interface: &str,
    guard: &Guard,
    is_new: bool,
    pools: &[Range],
    owners: &[(IpAddr, Range)],
) -> Result<()> {
    let rules = Rules::of(interface, pools, owners);
    let digest = rules.digest();
    let noted = links::find(interface)?.and_then(|link| link.alias).as_deref().and_then(generation_of);
    let present = noted.filter(|_| !is_new);
    if present.is_some_and(|(_, of)| of == digest) {
        return Ok(());
    }
    let note = |generation: u32, of: u64| {
        links::change(interface, Change { alias: Some(&alias_of(generation, of)), ..Change::default() })
    };
    // If this ends, or fails, while both are there, or none, the alias is one that nobody takes for done.
    if let Some((former, _)) = noted {
        note(former, UNFINISHED)?;
    }
    let generation = present.map_or(0, |(generation, _)| 1 - generation);
    let install = |action: &str| {
        rules.clear(generation)?;
        programs::run_with_input("tc", &["-batch", "-"], &rules.lines(generation, action))
    };
    guard.dropping(install).context("can't fence the overlay between the hosts")?;
    if present.is_some() {
        note(generation, UNFINISHED)?;
        rules.clear(1 - generation)?;
    }
    note(generation, digest)
}

fn alias_of(generation: u32, digest: u64) -> String {
    format!("{ALIAS}{generation} {digest:016x}")
}

fn generation_of(alias: &str) -> Option<(u32, u64)> {
    let (generation, digest) = alias.strip_prefix(ALIAS)?.split_once(' ')?;
    let generation = generation.parse().ok().filter(|generation| *generation < 2)?;
    Some((generation, u64::from_str_radix(digest, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Range {
        Range::parse(text).unwrap()
    }

    #[test]
    fn ranges_overlap_within_a_family() {
        for (one, other) in [("10.1.0.0/16", "10.1.2.3/32"), ("10.1.2.0/24", "10.1.0.0/16"), ("::/0", "fd00::/64")] {
            assert!(range(one).overlaps(range(other)), "{one} {other}");
        }
        for (one, other) in [("10.1.0.0/16", "10.2.0.0/16"), ("10.1.2.3/32", "10.1.2.2/32"), ("0.0.0.0/0", "::/0")] {
            assert!(!range(one).overlaps(range(other)), "{one} {other}");
        }
        assert!(Range::parse("10.1.0.0/33").is_none() && Range::parse("10.1.0.0").is_none());
    }

    #[test]
    fn matches_are_pairs_of_bytes() {
        assert_eq!(range("10.5.0.0/20").matches(14), " match u16 0x0a05 0xffff at 14 match u16 0x0000 0xf000 at 16");
        assert_eq!(
            range("192.0.2.1/32").matches(-38),
            " match u16 0xc000 0xffff at -38 match u16 0x0201 0xffff at -36"
        );
        assert_eq!(range("fd00:50::/32").matches(8), " match u16 0xfd00 0xffff at 8 match u16 0x0050 0xffff at 10");
        assert_eq!(range("fd00::1/128").matches(8).matches("match").count(), 8);
    }

    #[test]
    fn outer_sources_are_found_from_inner_headers() {
        let (four, six) = ("192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap());
        assert_eq!((outer_source(four), outer_source(six)), (-38, -62));
        assert_eq!(hash_key(outer_source(four), 4), "hashkey mask 0x00ff0000 at -36");
        assert_eq!(hash_key(outer_source(six), 16), "hashkey mask 0x00ff0000 at -48");
        assert_eq!(hash_key(12, 4), "hashkey mask 0x000000ff at 12");
        assert_eq!(hash_key(14, 4), "hashkey mask 0x00ff0000 at 16");
    }

    #[test]
    fn rules_are_of_the_network_alone_and_end_with_a_refusal() {
        let owner = |address: &str, text: &str| (address.parse().unwrap(), range(text));
        let owners = [("192.0.2.1", "10.5.1.0/24"), ("192.0.2.1", "10.6.1.0/24"), ("192.0.2.2", "10.5.224.2/32")]
            .map(|(a, b)| owner(a, b));
        let pools = [range("10.5.0.0/16")];
        let rules = Rules::of("vx", &pools, &owners);
        let text = rules.lines(1, "drop");
        let of_ip: Vec<&str> = text.lines().filter(|line| line.contains("protocol ip prio 30 ")).collect();
        assert_eq!(of_ip.len(), 5, "{text}");
        assert!(of_ip[0].contains("ht 111:1:") && of_ip[1].contains("ht 110:2:"), "{text}");
        assert!(of_ip[4].ends_with("action drop") && !text.contains("0x0a06") && !text.contains("ipv6"), "{text}");
        assert_ne!(rules.digest(), Rules::of("vx", &pools, &[]).digest());
        // Where nobody else has any of the network.
        assert_eq!(Rules::of("vx", &pools, &[]).lines(0, "drop").matches("action drop").count(), 2);
    }

    #[test]
    fn an_alias_says_what_the_rules_were_made_of() {
        assert_eq!(generation_of(&alias_of(1, 77)), Some((1, 77)));
        for other in ["", "freeflow fence", "freeflow fence 2 0000", "freeflow 1 red 3", "freeflow fence 1 x"] {
            assert_eq!(generation_of(other), None, "{other}");
        }
    }
}
