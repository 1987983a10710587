//! Keys and values of a cluster as its hosts, its operators and its controllers write them, by their own types.
use crate::etcd::Writes;
use freeflow_cluster::{
    DEFAULT_ROOT, FULL_MESH_COUNT, Followed, Holdings, HostContainer, HostRecord, HostTraffic, HostVnic, HostVnics,
    Identity, Place, Problem,
};
use freeflow_orchestrator::objects::{AnyObject, parse_object};
use freeflow_orchestrator::{Command, Revision, State};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// The network whose blocks are given to hosts: as large as one can be, 3,584 blocks of 4,096 addresses.
pub const NETWORK: &str = "red";
const CIDR: &str = "11.0.0.0/8";
const PARTS_OF_VNICS: usize = 4;
/// A receipt's writer has as many digits.
const WRITER_DIGITS: usize = 32;

pub fn host_name(number: usize) -> String {
    format!("host-{number:05}")
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

/// A host's store writes this with each of its transactions, for when an answer is lost: a receipt, in the place of
/// the last one.
fn receipt(part: &str, store: &str, number: u64) -> Writes {
    let of = |number: u64| key(&format!("{part}/receipts/{store:0>WRITER_DIGITS$}/{number}"));
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
pub fn record_of(host: usize) -> Writes {
    let part = format!("hosts/{}", host_name(host));
    let mut writes = vec![
        (key(&format!("{part}/data/holdings")), encoded(&Holdings::default())),
        (key(&format!("{part}/data/record")), encoded(&record(host))),
    ];
    writes.extend(receipt(&part, "1", 1));
    writes
}

/// A transaction of a host's report.
pub fn followed(host: usize, followed: Followed, number: u64) -> Writes {
    let part = format!("said/{}", host_name(host));
    let mut writes = vec![(key(&format!("{part}/data/followed")), encoded(&followed.bounded()))];
    writes.extend(receipt(&part, "1", number));
    writes
}

/// Of a host that has followed up to here.
pub fn has_followed(revision: u64, ranges: BTreeMap<String, String>, problems: Vec<Problem>, now_s: u64) -> Followed {
    let release = env!("CARGO_PKG_VERSION").into();
    Followed { revision, ranges, reclaim_after_s: None, release, at_s: now_s, problems }
}

/// A container's vNIC, which has traffic.
fn vnic(host: usize, number: usize, now_s: u64) -> HostVnic {
    let (high, low) = octets(host);
    let name = format!("{:016x}", host * 10_007 + number);
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
    HostVnic {
        title: container.name.clone(),
        name,
        network: NETWORK.into(),
        tenant: "acme".into(),
        addresses: vec![Ipv4Addr::new(11, high, low, number as u8).into()],
        phase: "Ready".into(),
        since_s: 1_790_000_000,
        container: Some(container),
        traffic,
    }
}

fn all_vnics(host: usize, count: usize, now_s: u64) -> HostVnics {
    HostVnics::of((0..count).map(|number| vnic(host, number, now_s)).collect())
}

/// A transaction of a host's publisher: the members of networks.
pub fn members(host: usize, count: usize, number: u64) -> Writes {
    let part = format!("hosts/{}", host_name(host));
    let parts = all_vnics(host, count, 0).members().parts().into_iter();
    let write = |(number, value)| (key(&format!("{part}/data/members/{number}")), encoded(&value));
    parts.map(write).chain(receipt(&part, "2", number)).collect()
}

/// A transaction of a host's publisher: all its vNICs, with their traffic.
pub fn vnics(host: usize, count: usize, number: u64, now_s: u64) -> Writes {
    let all = all_vnics(host, count, now_s);
    let mut parts = HostVnics { at_s: now_s, ..all }.encoded().into_iter();
    let part = format!("vnics/{}", host_name(host));
    let mut writes: Writes =
        (0..PARTS_OF_VNICS).map(|number| (key(&format!("{part}/data/{number}")), parts.next())).collect();
    writes.extend(receipt(&part, "1", number));
    writes
}

/// A controller's transaction.
pub fn blocks(due: impl Iterator<Item = (String, Option<String>)>) -> Writes {
    let write =
        |(at, block): (String, Option<String>)| (key(&format!("blocks/data/{at}")), block.map(String::into_bytes));
    due.map(write).chain([(key("blocks/data/serial"), Some(Vec::new()))]).collect()
}

/// The host that has a declared vNIC.
pub fn place(vnic: &str, host: usize, address: IpAddr) -> Writes {
    let place = Place { host: host_name(host), next: None, moved: false, addresses: vec![address] };
    vec![(key(&format!("places/data/{vnic}")), encoded(&place))]
}

pub fn identity() -> Writes {
    let identity =
        Identity { id: "5d3c0a9be1f24c77".into(), version: 1, restored: 0, pool: None, full_mesh: FULL_MESH_COUNT };
    vec![(key("cluster/data/identity"), encoded(&identity))]
}

/// A request to join, and the answer that replaces it: as long as those of a host in a laboratory.
pub fn join_request(host: usize) -> Writes {
    vec![(key(&format!("requests/0123456789ab/data/{}/request", host_name(host))), Some(vec![b'x'; 600]))]
}

pub fn join_answer(host: usize) -> [Writes; 3] {
    let name = host_name(host);
    let of = |rest: &str, length: usize| (key(rest), Some(vec![b'x'; length]));
    let (high, low) = octets(host);
    [
        vec![of("admission/data/tokens/0123456789ab", 900), of(&format!("admission/data/hosts/{name}"), 250)],
        blocks([(format!("default/{name}"), Some(format!("10.{high}.{low}.0/24")))].into_iter()),
        vec![
            (key(&format!("requests/0123456789ab/data/{name}/request")), None),
            of(&format!("requests/0123456789ab/data/{name}/answer"), 1500),
        ],
    ]
}

pub fn object(kind: &str, name: &str, spec: Value) -> AnyObject {
    let value = json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    parse_object(&value).expect("an object")
}

fn rule(number: usize) -> AnyObject {
    let ends = json!({"tenant": "acme", "from": {"group": "clients"}, "to": {"group": "servers"}});
    let mut spec = ends;
    (spec["order"], spec["action"]) = (json!(number), json!("allow"));
    object("AccessRule", &format!("rule-{number:05}"), spec)
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

    /// The network, two groups, and as many rules.
    pub fn begin(&mut self, rules: usize) -> Writes {
        let network =
            object("Network", NETWORK, json!({"tenant": "acme", "cidrs": [CIDR], "floating": "11.224.0.0/11"}));
        let group = |name: &str| {
            object(
                "Group",
                name,
                json!({"tenant": "acme", "members": [{"networks": [NETWORK], "labels": {"role": name}}]}),
            )
        };
        let mut objects = vec![network, group("clients"), group("servers")];
        objects.extend((0..rules).map(rule));
        self.apply(objects)
    }

    /// One more rule.
    pub fn add_rule(&mut self, number: usize) -> Writes {
        self.apply(vec![rule(number)])
    }

    /// A declared vNIC.
    pub fn add_vnic(&mut self, name: &str, address: IpAddr) -> Writes {
        let spec = json!({"network": NETWORK, "addresses": [address.to_string()]});
        self.apply(vec![object("Vnic", name, spec)])
    }

    fn apply(&mut self, objects: Vec<AnyObject>) -> Writes {
        let plan = self.state.plan(&Command::ApplyForCluster { objects }).expect("it can be declared");
        self.revision += 1;
        self.state.adopt(&plan, Revision(self.revision));
        let write = |(at, value): &(String, Option<Vec<u8>>)| (key(&format!("declared/data/{at}")), value.clone());
        let serial = (key("declared/data/serial"), Some(Vec::new()));
        plan.writes.iter().map(write).chain([serial]).collect()
    }
}

impl Default for Declaration {
    fn default() -> Self {
        Self::new()
    }
}
