//! The mesh: which hosts are peers, by the networks that each says it is in.
use crate::given::{Given, ROOT, object, record};
use freeflow_cluster::{HostRecord, Identity, Members, Mesh, News, PeersOf, View};
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::store::Entry;
use serde_json::json;
use std::collections::BTreeSet;

/// Numbers that are the same each time.
struct Draw(u64);

impl Draw {
    fn below(&mut self, count: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % count
    }
}

fn members(networks: &[&str]) -> Vec<u8> {
    let networks = networks.iter().map(|network| ((*network).to_owned(), Vec::new())).collect();
    serde_json::to_vec(&Members { networks }).expect("members are encodable")
}

/// Two networks of the tenant `red`, one of `blue`, and one that a tenant has called as `default`'s is.
fn given(full_mesh: u32) -> Given {
    let of = |name: &str, tenant: &str, cidr: &str| object("Network", name, json!({"tenant": tenant, "cidrs": [cidr]}));
    Given::with(Identity { id: "c".into(), version: 1, restored: 0, pool: None, full_mesh }).declared(vec![
        of("red", "red", "10.50.0.0/16"),
        of("crimson", "red", "10.51.0.0/16"),
        of("blue", "blue", "10.60.0.0/16"),
        of("plain", "default", "10.70.0.0/16"),
    ])
}

fn in_networks(given: Given, host: &str, networks: &[&str]) -> Given {
    given.key(&format!("hosts/{host}/data/members/0"), &members(networks))
}

fn peers_of(view: &View, host: &str) -> (BTreeSet<String>, Vec<String>) {
    let own = &view.hosts()[host].1;
    let found = PeersOf::host(host, own, view, &view.declared().expect("it makes sense"));
    let names = found.peers.into_iter().map(|peer| peer.host).collect();
    (names, found.problems.into_iter().map(|problem| problem.message).collect())
}

fn names(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn hosts_are_peers_by_tenant() {
    let hosts = |full_mesh| (1..=6).fold(given(full_mesh), |given, n| given.host(&format!("h{n}"), &record(n)));
    let of = |full_mesh| {
        let given = in_networks(hosts(full_mesh), "h1", &["red"]);
        let given = in_networks(in_networks(given, "h2", &["crimson", "blue"]), "h3", &["blue"]);
        in_networks(in_networks(given, "h4", &["default"]), "h5", &["plain", "gone"]).view()
    };
    let view = of(5);
    for (host, peers) in [
        ("h1", names(&["h2"])),
        ("h2", names(&["h1", "h3"])),
        ("h3", names(&["h2"])),
        ("h4", names(&["h5"])),
        ("h5", names(&["h4"])),
        ("h6", names(&[])),
    ] {
        assert_eq!(peers_of(&view, host), (peers, vec![]), "{host}");
    }
    // Of few hosts all are peers.
    let view = of(6);
    assert_eq!(peers_of(&view, "h6").0.len(), 5);
    assert!(Mesh::is_full_in(&view) && !Mesh::is_full_in(&of(5)));
    // A peer has all addresses that it is believed to have.
    let with_blocks = in_networks(in_networks(hosts(1), "h1", &["red"]), "h2", &["red"]);
    let view = with_blocks.block("red", "h2", "10.50.1.0/24").block("blue", "h2", "10.60.1.0/24").view();
    let found = PeersOf::host("h1", &record(1), &view, &view.declared().expect("it makes sense"));
    assert_eq!(found.peers[0].prefixes, ["10.111.2.0/24", "10.50.1.0/24", "10.60.1.0/24"]);
}

#[test]
fn a_host_is_a_peer_of_each_that_is_one_of_its_own() {
    let mut draw = Draw(1);
    for round in 0..200 {
        let count = 2 + draw.below(12) as u8;
        let mut given = given(draw.below(2) as u32 * 6);
        for number in 1..=count {
            let name = format!("h{number}");
            // Some take another's address or key, say nothing, or say it in several parts.
            let mut own = record(number);
            match draw.below(12) {
                0 => own.address = record(1 + draw.below(u64::from(count)) as u8).address,
                1 => own.public_key = record(1 + draw.below(u64::from(count)) as u8).public_key,
                _ => {}
            }
            given = given.host(&name, &own);
            for part in 0..draw.below(4) {
                let all = ["red", "crimson", "blue", "plain", "default", "gone"];
                let some: Vec<&str> = all.into_iter().filter(|_| draw.below(5) == 0).collect();
                given = given.key(&format!("hosts/{name}/data/members/{part}"), &members(&some));
            }
        }
        let view = given.view();
        let declared = view.declared().expect("it makes sense");
        let meshes: Vec<_> = view.hosts().keys().map(|host| (host, Mesh::of(host, &view, &declared))).collect();
        for (one, of_one) in &meshes {
            for (other, of_other) in &meshes {
                assert_eq!(of_one.has(other), of_other.has(one), "round {round}: {one} and {other}");
            }
            let own: BTreeSet<String> = of_one.peers(one);
            assert!(peers_of(&view, one).0.is_subset(&own), "round {round}: {one}");
        }
    }
}

/// Members are words of a host: it may say what it likes.
#[test]
fn words_of_a_host_give_it_no_more_than_a_connection() {
    let hosts = || {
        let given = (1..=3).fold(given(1), |given, n| given.host(&format!("h{n}"), &record(n)));
        let given = in_networks(given, "h1", &["red"]).block("red", "h1", "10.50.1.0/24");
        given.block("blue", "h3", "10.60.3.0/24")
    };
    // Nonsense is none, and stands in nobody's way.
    let mut long = members(&["red"]);
    long.resize(65 << 10, b' ');
    for (key, value) in [
        ("hosts/h3/data/members/0", b"nonsense".as_slice()),
        ("hosts/h3/data/members/0", long.as_slice()),
        ("hosts/h3/data/members/4", &members(&["red"])),
        ("hosts/h3/data/members/red", &members(&["red"])),
        ("hosts/h9/data/members/0", &members(&["red"])),
        ("said/h3/data/members/0", &members(&["red"])),
        ("hosts/h3/data/members/0", &members(&["../red", "red\n", "RED", ""])),
    ] {
        let view = in_networks(hosts(), "h2", &["red"]).key(key, value).view();
        assert_eq!(peers_of(&view, "h1"), (names(&["h2"]), vec![]), "{key}");
    }
    // One that says it is in another tenant's network is connected, with its own addresses and no others.
    let view = in_networks(hosts(), "h3", &["red"]).view();
    let found = PeersOf::host("h1", &record(1), &view, &view.declared().expect("it makes sense"));
    assert_eq!((found.peers[0].host.as_str(), found.problems.len()), ("h3", 0));
    assert_eq!(found.peers[0].prefixes, ["10.111.3.0/24", "10.60.3.0/24"]);
}

#[test]
fn another_network_of_a_host_is_a_change_of_the_mesh_and_another_member_is_none() {
    let mut view = given(1).host("h1", &record(1)).view();
    let mut change = |value: Vec<u8>, at: u64| {
        let key = format!("{ROOT}/hosts/h1/data/members/0");
        let entry = Entry { key: key.clone(), value, created: Revision(at), modified: Revision(at), lease: None };
        let before = (view.mesh_version(), view.members_version());
        assert!(!view.take(News::Changed(Revision(at), vec![(key, Some(entry))])));
        (view.mesh_version() != before.0, view.members_version() != before.1)
    };
    assert_eq!(change(members(&["red"]), 101), (true, true));
    assert_eq!(change(members(&["red"]), 102), (false, false));
    let with_one = br#"{"networks": {"red": [{"names": ["web"], "addresses": ["10.50.0.2"]}]}}"#;
    assert_eq!(change(with_one.to_vec(), 103), (false, true));
    assert_eq!(change(members(&["red", "blue"]), 104), (true, true));
    assert_eq!(change(b"{".to_vec(), 105), (true, true));
}

/// Records of more hosts than a test has numbers for.
fn far(number: u32) -> HostRecord {
    let [_, _, high, low] = number.to_be_bytes();
    HostRecord {
        address: [172, 16, high, low].into(),
        control_port: 4790,
        public_key: format!("{number:064x}"),
        default_range: format!("10.{}.{low}.0/24", 80 + high),
    }
}

#[test]
fn more_hosts_than_a_router_takes_are_said_by_those_that_are_in_their_networks() {
    let count = 1030;
    let name = |number: u32| format!("h{number:04}");
    let hosts = (1..=count).fold(given(64), |given, number| given.host(&name(number), &far(number)));
    let in_red = (1..=count).fold(hosts, |given, number| in_networks(given, &name(number), &["red"]));
    // Others are in no network together with them.
    let given = in_networks(in_red.host("x", &far(5000)), "x", &["blue"]);
    let view = in_networks(given.host("y", &far(5001)), "y", &["blue"]).view();
    let (peers, problems) = peers_of(&view, &name(1));
    assert_eq!((peers.len(), problems.len()), (1024, 5));
    assert!(problems[0].contains("more than 1024 hosts"), "{problems:?}");
    assert_eq!(peers_of(&view, "x"), (names(&["y"]), vec![]));
}

#[test]
fn names_are_those_of_networks_that_containers_may_reach() {
    let said = br#"{"networks": {"red": [{"names": ["web"], "addresses": ["10.50.2.2"]}],
        "blue": [{"names": ["other"], "addresses": ["10.60.2.2"]}]}}"#;
    let of = |full_mesh| {
        let given = given(full_mesh).host("h1", &record(1)).host("h2", &record(2));
        let given = given.block("red", "h2", "10.50.2.0/24").block("blue", "h2", "10.60.2.0/24");
        let view = in_networks(given, "h1", &["crimson"]).key("hosts/h2/data/members/0", said).view();
        let declared = view.declared().expect("it makes sense");
        let peers = PeersOf::host("h1", &record(1), &view, &declared).peers;
        let named = freeflow_cluster::named(&view, &declared, &Mesh::of("h1", &view, &declared), &peers);
        named.into_iter().map(|one| one.names.concat()).collect::<Vec<_>>()
    };
    assert_eq!(of(1), ["web"]);
    assert_eq!(of(64), ["other", "web"]);
}
