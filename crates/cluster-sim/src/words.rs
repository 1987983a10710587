//! Keys and values of a cluster as its hosts, its operators and its controllers write them, by their own types.
use crate::etcd::{Watched, Writes};
use freeflow_cluster::{
    DEFAULT_ROOT, FULL_MESH_COUNT, Followed, Holdings, HostContainer, HostRecord, HostTraffic, HostVnic, HostVnics,
    Identity, Place, Problem,
};
use freeflow_orchestrator::objects::{AnyObject, parse_object};
use freeflow_orchestrator::{Command, Pool, Revision, State};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// The first network of declared ones: all are of this size or smaller, one after another from here on.
const FIRST_BASE: u32 = 11 << 24;
const LARGEST_PREFIX: u8 = 8;
/// Networks begin below this: what is behind is loopback, or nobody's.
const END_BASE: u32 = 127 << 24;
/// Addresses of `default`, for as many hosts as there can be.
pub const DEFAULT_CIDR: &str = "10.0.0.0/8";
/// Bytes that are listed of one part at most: crates/etcd has that.
const LISTING_BYTES_MAX: u64 = 256 << 20;
/// Of a block's key and value, and around them.
pub const BLOCK_BYTES: u64 = 130;
pub const PARTS_OF_VNICS: usize = 4;
/// A receipt's writer has as many digits.
const WRITER_DIGITS: usize = 32;
/// Uses of a token: as many hosts ask by each.
const TOKEN_USES: usize = 256;

pub fn host_name(number: usize) -> String {
    format!("host-{number:05}")
}

pub fn host_number(name: &str) -> Option<usize> {
    name.strip_prefix("host-")?.parse().ok()
}

fn octets(number: usize) -> (u8, u8) {
    ((number >> 8) as u8, number as u8)
}

/// Of a host that was brought up with a range of its own.
pub fn record(number: usize) -> HostRecord {
    let (high, low) = octets(number);
    HostRecord {
        address: [172, 16, high, low].into(),
        control_port: 4790,
        public_key: format!("{number:064x}"),
        default_range: format!("10.{high}.{low}.0/24"),
    }
}

fn key(rest: &str) -> String {
    format!("{DEFAULT_ROOT}/{rest}")
}

/// Watchers have one range of keys, from the first part that they follow to the end of the last one: hosts from
/// `blocks/` to `places/`, controllers from `admission/` to `said/`.
pub fn watched(key: &str) -> Watched {
    let part = key.strip_prefix(DEFAULT_ROOT).and_then(|rest| rest.strip_prefix('/')?.split('/').next());
    match part {
        Some("admission" | "requests" | "said") => Watched::ByControllers,
        Some("vnics") | None => Watched::ByNobody,
        Some(_) => Watched::ByAll,
    }
}

/// A store writes this with its transactions, for when an answer is lost: a receipt, in the place of the last one. A
/// host's words, members and vNICs are written without.
fn receipt(part: &str, writer: &str, number: u64) -> Writes {
    let of = |number: u64| key(&format!("{part}/receipts/{writer:0>WRITER_DIGITS$}/{number}"));
    let mut writes = vec![(of(number), Some(b"done".to_vec()))];
    if number > 1 {
        writes.push((of(number - 1), None));
    }
    writes
}

fn encoded(value: &impl serde::Serialize) -> Option<Vec<u8>> {
    Some(serde_json::to_vec(value).expect("words are encodable"))
}

/// The first transaction of a host's report: it has no vNIC of the cluster's, and says that once.
pub fn begins(host: usize, record: &HostRecord) -> Writes {
    let part = format!("hosts/{}", host_name(host));
    let own = (key(&format!("{part}/data/record")), encoded(record));
    let mut writes = vec![(key(&format!("{part}/data/holdings")), encoded(&Holdings::default())), own];
    writes.extend(receipt(&part, "1", 1));
    writes
}

/// Another one.
pub fn followed(host: usize, followed: Followed) -> Writes {
    vec![(key(&format!("said/{}/data/followed", host_name(host))), encoded(&followed.bounded()))]
}

/// Of a host that has followed up to here.
pub fn has_followed(revision: u64, ranges: BTreeMap<String, String>, problems: Vec<Problem>, now_s: u64) -> Followed {
    let release = env!("CARGO_PKG_VERSION").into();
    Followed { revision, ranges, reclaim_after_s: None, release, at_s: now_s, problems }
}

/// The vNICs of a host: so many, of which the first one has this number.
#[derive(Clone, Copy, Debug)]
pub struct OwnVnics {
    pub count: usize,
    pub first: usize,
    /// Of the host's addresses.
    pub block: Pool,
    pub network: usize,
}

/// A container's vNIC, which has traffic.
fn vnic(host: usize, own: &OwnVnics, number: usize, now_s: u64) -> HostVnic {
    let name = format!("{:016x}", host * 1_000_003 + number);
    let container = HostContainer {
        name: format!("web-{number}"),
        engine: "freeflow".into(),
        pid: Some(100_000 + number as u32),
        program: "/usr/bin/server".into(),
        since_s: Some(1_790_000_000),
    };
    let traffic = HostTraffic {
        messages_per_s: 120_000 + now_s % 1000,
        bits_out_per_s: 9_000_000_000,
        bits_in_per_s: 4_000_000_000 + now_s % 1000,
        path: Some("routed".into()),
        ..HostTraffic::default()
    };
    let address = u32::from(own.block.base()) + 2 + number as u32 % (own.block.size() - 3);
    HostVnic {
        title: container.name.clone(),
        name,
        network: network_name(own.network),
        tenant: tenant_name(own.network),
        addresses: vec![Ipv4Addr::from(address).into()],
        phase: "Ready".into(),
        since_s: 1_790_000_000,
        container: Some(container),
        traffic,
    }
}

fn all_vnics(host: usize, own: &OwnVnics, now_s: u64) -> HostVnics {
    HostVnics::of((own.first..own.first + own.count).map(|number| vnic(host, own, number, now_s)).collect())
}

/// A transaction of a host's publisher: the members of networks, of which each part is another one than before.
pub fn members(host: usize, own: &OwnVnics) -> Writes {
    let part = format!("hosts/{}", host_name(host));
    let parts = all_vnics(host, own, 0).members().parts().into_iter();
    let write = |(number, value)| (key(&format!("{part}/data/members/{number}")), encoded(&value));
    parts.map(write).collect()
}

/// A transaction of a host's publisher: all its vNICs, with what they do.
pub fn vnics(host: usize, own: &OwnVnics, now_s: u64) -> Writes {
    vnics_parts(host, HostVnics { at_s: now_s, ..all_vnics(host, own, now_s) }.encoded())
}

/// The same again. Nobody follows it, so only the lengths of its values count.
pub fn vnics_again(host: usize, lengths: &[usize]) -> Writes {
    vnics_parts(host, lengths.iter().map(|length| vec![b' '; *length]).collect())
}

fn vnics_parts(host: usize, parts: Vec<Vec<u8>>) -> Writes {
    let (part, mut parts) = (format!("vnics/{}", host_name(host)), parts.into_iter());
    (0..PARTS_OF_VNICS).map(|number| (key(&format!("{part}/data/{number}")), parts.next())).collect()
}

/// A controller's transaction, by a store of its own.
pub fn blocks(due: impl Iterator<Item = (String, Option<String>)>, number: u64) -> Writes {
    let write =
        |(at, block): (String, Option<String>)| (key(&format!("blocks/data/{at}")), block.map(String::into_bytes));
    let serial = [(key("blocks/data/serial"), Some(Vec::new()))];
    let receipt = receipt("blocks", &format!("{number:x}"), 1);
    due.map(write).chain(serial).chain(receipt).collect()
}

/// The host that has a declared vNIC.
pub fn place(vnic: &str, host: usize, address: IpAddr) -> Writes {
    let place = Place { host: host_name(host), next: None, moved: false, addresses: vec![address] };
    vec![(key(&format!("places/data/{vnic}")), encoded(&place))]
}

pub fn identity() -> Writes {
    let pool = Some(DEFAULT_CIDR.into());
    let identity =
        Identity { id: "5d3c0a9be1f24c77".into(), version: 1, restored: 0, pool, full_mesh: FULL_MESH_COUNT };
    vec![(key("cluster/data/identity"), encoded(&identity))]
}

/// The token by which a host asks.
pub fn token_number(host: usize) -> usize {
    host / TOKEN_USES
}

fn token(host: usize) -> String {
    format!("{:012x}", token_number(host))
}

/// A request to join, and the answer that replaces it: as long as those of a host in a laboratory.
pub fn join_request(host: usize) -> Writes {
    vec![(key(&format!("requests/{}/data/{}/request", token(host), host_name(host))), Some(vec![b'x'; 600]))]
}

/// Words of a controller before it gives the host its block of `default`, and the answer, after that. Names of
/// hosts in a token's record are as many as have joined by it.
pub fn join_answer(host: usize, by_token: usize) -> [Writes; 2] {
    let (name, token) = (host_name(host), token(host));
    let of = |rest: &str, length: usize| (key(rest), Some(vec![b'x'; length]));
    let used = of(&format!("admission/data/tokens/{token}"), 900 + 13 * by_token.min(TOKEN_USES));
    let mut answer = vec![(key(&format!("requests/{token}/data/{name}/request")), None)];
    answer.push(of(&format!("joins/{token}/data/{name}/answer"), 1500));
    [vec![used, of(&format!("admission/data/hosts/{name}"), 250)], answer]
}

pub fn object(kind: &str, name: &str, spec: Value) -> AnyObject {
    let value = json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    parse_object(&value).expect("an object")
}

pub fn network_name(number: usize) -> String {
    format!("net-{number:04}")
}

fn tenant_name(number: usize) -> String {
    format!("tenant-{number:04}")
}

pub fn network_number(name: &str) -> Option<usize> {
    name.strip_prefix("net-")?.parse().ok()
}

fn rule(number: usize) -> AnyObject {
    let ends = json!({"tenant": tenant_name(0), "from": {"group": "clients"}, "to": {"group": "servers"}});
    let mut spec = ends;
    (spec["order"], spec["action"]) = (json!(number), json!("allow"));
    object("AccessRule", &format!("rule-{number:05}"), spec)
}

/// Networks, each of a tenant of its own, in which hosts have vNICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Networks {
    pub count: usize,
    /// Of each of them.
    pub prefix_length: u8,
}

impl Networks {
    /// So many, for so many hosts of so many vNICs each.
    ///
    /// # Errors
    /// They are larger than all addresses together, or have more blocks than anybody lists.
    pub fn of(count: usize, hosts: usize, vnics: usize) -> Result<Self, String> {
        let block_count = count * hosts;
        if block_count as u64 * BLOCK_BYTES > LISTING_BYTES_MAX {
            return Err(format!("{block_count} blocks, one of each of {count} networks for each host, fill no list"));
        }
        // Two blocks for each host, and an eighth for vNICs that move.
        let block = (vnics + 3).next_power_of_two().max(8);
        let has_room = |prefix_length: &u8| (1u64 << (32 - prefix_length)) * 7 / 8 >= (2 * hosts * block) as u64;
        let smallest = (LARGEST_PREFIX..=16).rev().find(has_room).unwrap_or(LARGEST_PREFIX);
        let prefix_length = if count == 1 { LARGEST_PREFIX } else { smallest };
        let end = u64::from(FIRST_BASE) + ((count as u64) << (32 - prefix_length));
        let too_many = format!("{count} networks of /{prefix_length} are more than there are addresses");
        (end <= u64::from(END_BASE)).then_some(Self { count, prefix_length }).ok_or(too_many)
    }

    fn base(self, number: usize) -> u32 {
        FIRST_BASE + ((number as u32) << (32 - self.prefix_length))
    }

    pub fn cidr(self, number: usize) -> String {
        format!("{}/{}", Ipv4Addr::from(self.base(number)), self.prefix_length)
    }

    /// The part for vNICs that move.
    fn floating(self, number: usize) -> (Ipv4Addr, String) {
        let size = 1u32 << (32 - self.prefix_length);
        let base = Ipv4Addr::from(self.base(number) + (size - size / 8));
        (base, format!("{base}/{}", self.prefix_length + 3))
    }

    /// An address for a vNIC that moves.
    pub fn floating_address(self, number: usize) -> IpAddr {
        Ipv4Addr::from(u32::from(self.floating(0).0) + 10 + number as u32).into()
    }
}

/// All that operators declare, planned as their command does.
pub struct Declaration {
    state: State,
    revision: u64,
}

impl Declaration {
    /// Of nothing.
    pub fn new() -> Self {
        Self { state: State::new(), revision: 0 }
    }

    /// The networks, two groups of the first one, and as many rules. In one transaction, however many they are.
    pub fn begin(&mut self, networks: Networks, rules: usize) -> Writes {
        let network = |number: usize| {
            let (_, floating) = networks.floating(number);
            let spec = json!({"tenant": tenant_name(number), "cidrs": [networks.cidr(number)], "floating": floating});
            object("Network", &network_name(number), spec)
        };
        let group = |name: &str| {
            let members = json!([{"networks": [network_name(0)], "labels": {"role": name}}]);
            object("Group", name, json!({"tenant": tenant_name(0), "members": members}))
        };
        let mut objects: Vec<AnyObject> = (0..networks.count).map(network).collect();
        objects.extend([group("clients"), group("servers")]);
        objects.extend((0..rules).map(rule));
        self.apply(objects)
    }

    /// One more rule.
    pub fn add_rule(&mut self, number: usize) -> Writes {
        self.apply(vec![rule(number)])
    }

    /// A declared vNIC.
    pub fn add_vnic(&mut self, name: &str, address: IpAddr) -> Writes {
        let spec = json!({"network": network_name(0), "addresses": [address.to_string()]});
        self.apply(vec![object("Vnic", name, spec)])
    }

    fn apply(&mut self, objects: Vec<AnyObject>) -> Writes {
        let plan = self.state.plan(&Command::ApplyForCluster { objects }).expect("it can be declared");
        self.revision += 1;
        self.state.adopt(&plan, Revision(self.revision));
        let write = |(at, value): &(String, Option<Vec<u8>>)| (key(&format!("declared/data/{at}")), value.clone());
        let serial = (key("declared/data/serial"), Some(Vec::new()));
        let receipt = receipt("declared", &format!("{:x}", self.revision), 1);
        plan.writes.iter().map(write).chain([serial]).chain(receipt).collect()
    }
}

impl Default for Declaration {
    fn default() -> Self {
        Self::new()
    }
}
