//! Addresses: none twice, none that a vNIC can't have, not again at once; and the state is what the store says.
use crate::common::*;
use freeflow_orchestrator::objects::ObjectKind;
use freeflow_orchestrator::store::Store;
use freeflow_orchestrator::{Change, Command, Reason};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::IpAddr;

#[test]
fn addresses_follow_the_gateway_and_are_not_reused_at_once() {
    let mut host = host();
    host.attach("a", "default", None).unwrap();
    host.attach("b", "default", None).unwrap();
    assert_eq!((host.address("a"), host.address("b")), ("10.111.0.2".into(), "10.111.0.3".into()));
    host.detach("b");
    // Not even by a router that has started again in between.
    host.state = host.rebuilt();
    host.attach("c", "default", None).unwrap();
    assert_eq!(host.address("c"), "10.111.0.4");
    assert_eq!(host.attach("c", "default", None), Ok(Change::Unchanged));
    assert_eq!(host.attach("c", "default", Some("10.111.0.4")), Ok(Change::Unchanged));
    assert_eq!(host.attach("c", "default", Some("10.111.0.5")), Err(Reason::AlreadyExists));
}

#[test]
fn a_small_pool_is_used_up_and_refilled() {
    let mut host = host_with("192.168.7.0/29");
    for id in ["a", "b", "c", "d", "e"] {
        host.attach(id, "default", None).unwrap();
    }
    assert_eq!(host.attach("f", "default", None), Err(Reason::Exhausted));
    host.detach("b");
    host.detach("b");
    host.attach("f", "default", None).unwrap();
    assert_eq!(host.address("f"), "192.168.7.3");
}

#[test]
fn a_host_gives_out_its_own_range_of_the_pool() {
    let mut host = host();
    let begin = |pool: &str, range: Option<&str>| Command::Begin {
        host: "h1".into(),
        pool: pool.parse().unwrap(),
        range: range.map(|text| text.parse().unwrap()),
        bridge: "ff0".into(),
    };
    assert!(host.run(&begin("10.111.0.0/16", None)).unwrap().is_empty());
    for other in [begin("10.112.0.0/16", None), begin("10.111.0.0/16", Some("10.111.2.0/24"))] {
        assert_eq!(host.run(&other).unwrap_err().reason, Reason::AlreadyExists);
    }
    assert_eq!(host.run(&begin("10.111.0.0/16", Some("10.112.2.0/24"))).unwrap_err().reason, Reason::Invalid);
    host.apply(&[named("Network", "n", json!({"cidrs": ["10.1.0.0/16"], "range": "10.1.2.0/29"}))]);
    for id in ["a", "b", "c", "d", "e"] {
        host.attach(id, "n", None).unwrap();
    }
    assert_eq!((host.address("a"), host.address("e")), ("10.1.2.2".into(), "10.1.2.6".into()));
    assert_eq!(host.attach("f", "n", None), Err(Reason::Exhausted));
    for other_hosts in ["10.1.0.2", "10.1.2.1", "10.1.2.7", "10.1.3.2"] {
        assert_eq!(host.attach("f", "n", Some(other_hosts)), Err(Reason::Invalid), "{other_hosts}");
    }
    assert_eq!(host.attach("g", "none", None), Err(Reason::NotFound));
    assert_eq!(host.attach("../g", "n", None), Err(Reason::Invalid));
    assert_eq!(host.attach("g", "n", Some("10.1.2.2")), Err(Reason::AlreadyExists));
}

#[test]
fn addresses_that_go_from_host_to_host_are_a_clusters_vnics_alone() {
    let cidrs = json!({"cidrs": ["10.1.0.0/24", "fd00:1::/64"], "floating": "10.1.0.224/27"});
    let vnic = |name: &str, spec: Value| named("Vnic", name, spec);
    // vNICs that are declared for the cluster get them, one after the other, and the IPv6 ones at the same places.
    let mut cluster = host();
    cluster.apply_for_cluster(&[named("Network", "n", cidrs.clone())]).unwrap();
    let made = cluster.apply_for_cluster(&[
        vnic("a", json!({"network": "n"})),
        vnic("b", json!({"network": "n"})),
        vnic("c", json!({"network": "n", "addresses": ["10.1.0.250"]})),
    ]);
    assert_eq!(made.unwrap().len(), 3);
    assert_eq!(
        [&cluster.address("a"), &cluster.address("b"), &cluster.address("c")],
        ["10.1.0.226", "10.1.0.227", "10.1.0.250"]
    );
    let six: IpAddr = "fd00:1::e2".parse().unwrap();
    assert_eq!(cluster.state.vnic("a").unwrap().object.spec.addresses[1], six);
    for other in ["10.1.0.5", "10.1.0.224", "10.1.0.255"] {
        let asked = vnic("d", json!({"network": "n", "addresses": [other]}));
        assert_eq!(cluster.apply_for_cluster(&[asked]).unwrap_err(), Reason::Invalid, "{other}");
    }
    // A host has a range of its own, and the same vNICs: it gives nobody else their addresses.
    let mut host = host();
    let ranged = json!({"cidrs": cidrs["cidrs"], "floating": cidrs["floating"], "range": "10.1.0.16/28"});
    host.apply_for_cluster(&[named("Network", "n", ranged)]).unwrap();
    let mirrored = json!({"network": "n", "addresses": ["10.1.0.226", "fd00:1::e2"]});
    host.apply_for_cluster(&[vnic("a", mirrored.clone())]).unwrap();
    assert_eq!(host.rebuilt(), host.state, "also from the store");
    host.attach("own", "n", None).unwrap();
    assert_eq!(host.address("own"), "10.1.0.18", "the cluster's vNIC has not moved the host's cursor");
    assert_eq!(host.attach("other", "n", Some("10.1.0.227")), Err(Reason::Invalid));
    assert_eq!(
        host.refused(&[vnic("e", json!({"network": "n", "addresses": ["10.1.0.227"]}))]).reason,
        Reason::Invalid
    );
    // Only such an object is the cluster's on this host.
    for (name, is_clusters) in [("a", true), ("own", false), ("none", false)] {
        assert_eq!(host.state.is_clusters(ObjectKind::Vnic, name), is_clusters, "{name}");
    }
    // The part stays while vNICs have addresses of it, and if none is given.
    let other = json!({"cidrs": cidrs["cidrs"], "floating": "10.1.0.192/27", "range": "10.1.0.16/28"});
    assert_eq!(host.apply_for_cluster(&[named("Network", "n", other)]).unwrap_err(), Reason::Invalid);
    host.apply_for_cluster(&[named("Network", "n", json!({"cidrs": cidrs["cidrs"], "range": "10.1.0.16/28"}))])
        .unwrap();
    assert_eq!(host.state.network("n").unwrap().floating, Some("10.1.0.224/27".parse().unwrap()));
    for bad in ["10.2.0.0/27", "10.1.0.16/29", "10.1.0.0/24", "x"] {
        let network = json!({"cidrs": ["10.1.0.0/24"], "floating": bad, "range": "10.1.0.16/28"});
        assert_eq!(host.refused(&[named("Network", "m", network)]).reason, Reason::Invalid, "{bad}");
    }
    // Without a range of its own a host gives out all but these.
    host.apply(&[named("Network", "small", json!({"cidrs": ["10.9.0.0/28"], "floating": "10.9.0.0/29"}))]);
    for (id, address) in [("s1", "10.9.0.8"), ("s2", "10.9.0.9")] {
        host.attach(id, "small", None).unwrap();
        assert_eq!(host.address(id), address);
    }
    let nowhere = named("Network", "plain", json!({"cidrs": ["10.8.0.0/24"]}));
    let asked = vnic("x", json!({"network": "plain"}));
    assert_eq!(cluster.apply_for_cluster(&[nowhere, asked]).unwrap_err(), Reason::Invalid);
}

#[test]
fn networks_with_ipv6_give_out_two_addresses() {
    let mut host = host();
    let cidrs = json!({"cidrs": ["10.1.0.0/16", "fd00:1::/64"], "range": "10.1.2.0/29"});
    host.apply(&[named("Network", "n", cidrs)]);
    let addresses = |host: &Host, id: &str| host.state.vnic(id).map(|vnic| vnic.object.spec.addresses.clone()).unwrap();
    let both = |v4: &str, v6: &str| vec![v4.parse::<IpAddr>().unwrap(), v6.parse().unwrap()];
    host.attach("a", "n", None).unwrap();
    assert_eq!(addresses(&host, "a"), both("10.1.2.2", "fd00:1::202"), "at the same place");
    // One that is asked for, and then is in the way of the next.
    host.attach("b", "n", Some("fd00:1::204")).unwrap();
    assert_eq!(addresses(&host, "b"), both("10.1.2.3", "fd00:1::204"));
    host.attach("c", "n", None).unwrap();
    assert_eq!(addresses(&host, "c"), both("10.1.2.4", "fd00:1::205"));
    for (other, reason) in [
        ("fd00:1::204", Reason::AlreadyExists),
        ("fd00:1::200", Reason::Invalid),
        ("fd00:1::201", Reason::Invalid),
        ("fd00:1::208", Reason::Invalid),
        ("fd00:1::2", Reason::Invalid),
        ("fd00:2::204", Reason::Invalid),
    ] {
        assert_eq!(host.attach("x", "n", Some(other)), Err(reason), "{other}");
    }
    host.attach("d", "n", None).unwrap();
    host.attach("e", "n", None).unwrap();
    let six: BTreeSet<IpAddr> = ["a", "b", "c", "d", "e"].iter().map(|id| addresses(&host, id)[1]).collect();
    assert_eq!(six.len(), 5);
    assert_eq!(host.attach("c", "n", Some("fd00:1::205")), Ok(Change::Unchanged));
    assert_eq!(host.attach("c", "n", Some("fd00:1::206")), Err(Reason::AlreadyExists));
    host.state = host.rebuilt();
    assert_eq!(addresses(&host, "c"), both("10.1.2.4", "fd00:1::205"), "after a restart");
    let change = named("Network", "n", json!({"cidrs": ["10.1.0.0/16"], "range": "10.1.2.0/29"}));
    assert_eq!(host.refused(&[change]).causes[0].field, "spec.cidrs");
    host.detach("b");
    host.attach("f", "n", Some("fd00:1::204")).unwrap();
    assert_eq!(addresses(&host, "f"), both("10.1.2.3", "fd00:1::204"), "it is free again");
}

#[test]
fn what_one_of_an_apply_asks_for_is_not_given_to_another() {
    let vnic = |name: &str, addresses: &[&str]| named("Vnic", name, json!({"network": "n", "addresses": addresses}));
    let network = named("Network", "n", json!({"cidrs": ["10.1.0.0/29", "fd00:1::/64"]}));
    let some = [
        vnic("none", &[]),
        vnic("v4", &["10.1.0.2"]),
        vnic("v6", &["fd00:1::2"]),
        vnic("both", &["10.1.0.3", "fd00:1::4"]),
        vnic("other", &["10.1.0.4"]),
    ];
    // Whichever comes first; the network has room for these five.
    for turn in 0..some.len() {
        for back in [false, true] {
            let mut host = host();
            let mut all = some.to_vec();
            all.rotate_left(turn);
            if back {
                all.reverse();
            }
            all.push(network.clone());
            host.apply(&all);
            check(&host);
            let six = |id: &str| host.state.vnic(id).and_then(|vnic| vnic.address6).map(|address| address.to_string());
            assert_eq!((host.address("v4").as_str(), six("v6").as_deref()), ("10.1.0.2", Some("fd00:1::2")));
            assert_eq!((host.address("both").as_str(), six("both").as_deref()), ("10.1.0.3", Some("fd00:1::4")));
            assert_eq!(host.address("other"), "10.1.0.4");
        }
    }
    // Of two that ask for the same one is refused, as ever.
    let mut host = host();
    host.apply(&[network]);
    let both = [vnic("a", &["10.1.0.2"]), vnic("b", &["10.1.0.2"])];
    assert_eq!(host.refused(&both).reason, Reason::AlreadyExists);
}

#[test]
fn the_last_vnic_costs_no_more_than_the_first() {
    let mut host = host_with("10.0.0.0/8");
    for number in 0..65_536 {
        host.attach(&format!("v{number}"), "default", None).unwrap();
    }
    assert_eq!(host.attach("one-more", "default", None), Err(Reason::Exhausted));
    host.detach("v7");
    host.attach("one-more", "default", None).unwrap();
    assert_eq!(host.state.network("default").unwrap().vnic_count(), 65_536);
}

fn check(host: &Host) {
    let mut taken = BTreeSet::new();
    for vnic in host.state.vnics() {
        let network = host.state.network(vnic.network()).unwrap();
        assert!(network.assigned().is_assignable(vnic.address), "{}", vnic.address);
        assert!(taken.insert((network.id, vnic.address)), "{} twice", vnic.address);
        assert_eq!(
            host.state.access().holder(vnic.network(), vnic.address.into()).map(|vnic| vnic.id()),
            Some(vnic.id())
        );
    }
    for network in host.state.networks() {
        let count = host.state.vnics().filter(|vnic| vnic.network() == network.name()).count();
        assert_eq!((network.vnic_count(), network.vnics().count()), (count as u32, count));
    }
    assert_eq!(host.rebuilt(), host.state);
}

fn step(host: &mut Host, dice: u64) {
    let name = |count: u64, shift: u64| format!("x{}", (dice >> shift) % count);
    let network = ["default", "n0", "n1", "n2"][(dice >> 8) as usize % 4];
    let address = format!("10.{}.0.{}", 1 + (dice >> 16) % 3, (dice >> 24) % 8);
    let kinds = [ObjectKind::Vnic, ObjectKind::Network, ObjectKind::QosClass, ObjectKind::Quota];
    let object = match dice % 10 {
        0..=2 => {
            let _ = host.attach(&name(12, 32), network, None);
            return;
        }
        3 => {
            let _ = host.attach(&name(12, 32), network, Some(&address));
            return;
        }
        4 => return host.detach(&name(12, 32)),
        5 => {
            let kind = kinds[(dice >> 40) as usize % 4];
            let name = if kind == ObjectKind::Network { network.to_owned() } else { name(12, 32) };
            return drop(host.run(&Command::Delete { kind, name, version: None }));
        }
        6 => {
            let tenant = ["red", "blue"][(dice >> 40) as usize % 2];
            let cidr = format!("10.{}.0.0/29", 1 + (dice >> 16) % 3);
            named("Network", network, json!({"tenant": tenant, "cidrs": [cidr], "quota": name(3, 44)}))
        }
        7 => named("Vnic", &name(12, 32), json!({"network": network, "qosClass": name(3, 44)})),
        8 => class(&name(3, 44), json!({"weight": 1 + dice % 5, "tenant": {"rate": "1Gbit"}})),
        _ => named("Quota", &name(3, 44), json!({"vnics": dice >> 50 & 7})),
    };
    let objects = vec![freeflow_orchestrator::objects::parse_object(&object).unwrap()];
    drop(host.run(&Command::Apply { objects }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn never_two_holders_and_the_store_says_all(steps in proptest::collection::vec(any::<u64>(), 0..80)) {
        let mut host = host_with("10.9.0.0/29");
        for dice in steps {
            let before = (host.state.clone(), host.store.revision());
            step(&mut host, dice);
            if host.store.revision() == before.1 {
                prop_assert_eq!(&host.state, &before.0);
            }
            check(&host);
        }
    }
}
