//! The vNICs of hosts, as each says, and names by them.
use crate::common::Cluster;
use crate::given::{Given, ROOT, network, record};
use crate::on_etcd::{file, init, say};
use freeflow_cluster::{
    HostVnic, HostVnics, MembersWriter, Mesh, Named, News, PeersOf, Scope, View, VnicsWriter, named,
};
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::store::Entry;
use std::net::IpAddr;

fn vnic(title: &str, network: &str, addresses: &[&str]) -> HostVnic {
    let addresses = addresses.iter().map(|address| address.parse().expect("an address")).collect();
    let (name, title, network) = (format!("id-{title}"), title.to_owned(), network.to_owned());
    HostVnic { name, title, network, addresses, since_s: 7, ..HostVnic::default() }
}

fn value(vnics: Vec<HostVnic>) -> Vec<u8> {
    let parts = HostVnics::of(vnics).members().parts();
    assert_eq!(parts.len(), 1);
    serde_json::to_vec(&parts[&0]).expect("members are encodable")
}

fn given() -> Given {
    Given::new()
        .declared(vec![network("red", "10.50.0.0/24"), network("blue", "10.60.0.0/24")])
        .host("h1", &record(1))
        .host("h2", &record(2))
        .block("red", "h1", "10.50.0.0/28")
        .block("red", "h2", "10.50.0.16/28")
        .block("blue", "h2", "10.60.0.16/28")
}

fn named_in(view: &View) -> Vec<Named> {
    let declared = view.declared().expect("it makes sense");
    let peers = PeersOf::host("h1", &record(1), view, &declared).peers;
    named(view, &declared, &Mesh::of("h1", view, &declared), &peers)
}

#[test]
fn others_name_their_own_addresses_alone() {
    let said = value(vec![
        vnic("web", "red", &["10.50.0.18"]),
        vnic("home", "default", &["10.111.2.5"]),
        // Another host's, another network's, the network default's in one that is declared, and nobody's.
        vnic("taken", "red", &["10.50.0.2"]),
        vnic("mixed", "blue", &["10.50.0.19"]),
        vnic("sly", "default", &["10.50.0.20"]),
        vnic("far", "red", &["192.0.2.9"]),
        vnic("none", "green", &["10.50.0.21"]),
    ]);
    let named = named_in(&given().key("hosts/h2/data/members/0", &said).view());
    let of = |one: &Named| (one.network.clone(), one.names.clone(), one.addresses.clone());
    let address = |text: &str| vec![text.parse::<IpAddr>().expect("an address")];
    let expected = [
        ("default".to_owned(), vec!["home".to_owned()], address("10.111.2.5")),
        ("red".to_owned(), vec!["web".to_owned()], address("10.50.0.18")),
    ];
    assert_eq!(named.iter().map(of).collect::<Vec<_>>(), expected);
    assert_eq!(named[0].since_s, 7);
}

#[test]
fn a_host_that_is_unknown_or_talks_nonsense_names_nothing() {
    let said = value(vec![vnic("web", "red", &["10.50.0.18"])]);
    let mut too_long = said.clone();
    too_long.resize(65 << 10, b' ');
    for (key, value) in [
        ("hosts/h9/data/members/0", said.as_slice()),
        ("hosts/h2/data/members/0", b"nonsense"),
        ("hosts/h2/data/members/4", said.as_slice()),
        ("hosts/h2/data/members/0", too_long.as_slice()),
        ("hosts/h2/data/members/x", said.as_slice()),
        ("hosts/../data/members/0", said.as_slice()),
        ("hosts/h2/receipts/members/0", said.as_slice()),
    ] {
        let view = given().key(key, value).view();
        assert!(named_in(&view).is_empty(), "{key}");
    }
}

/// Members of others are no reason to compare all that is declared with what this host has.
#[test]
fn news_of_members_give_a_host_nothing_to_follow() {
    let mut view = given().view();
    let entry = |vnics: Vec<HostVnic>, revision: u64| {
        let (key, revision) = (format!("{ROOT}/hosts/h2/data/members/0"), Revision(revision));
        Entry { key, value: value(vnics), created: revision, modified: revision, lease: None }
    };
    let mut change = |entry: Option<Entry>, revision: u64| {
        let key = format!("{ROOT}/hosts/h2/data/members/0");
        let before = view.members_version();
        assert!(!view.take(News::Changed(Revision(revision), vec![(key, entry)])));
        (view.members_version() != before, view.members("h2").map(|(_, members)| members.len()).sum::<usize>())
    };
    let web = || vec![vnic("web", "red", &["10.50.0.18"])];
    assert_eq!(change(Some(entry(web(), 101)), 101), (true, 1));
    assert_eq!(change(Some(entry(web(), 102)), 102), (false, 1));
    let mut busy = web();
    busy[0].traffic.messages_per_s = 5;
    assert_eq!(change(Some(entry(busy, 102)), 102), (false, 1), "it does something, and is the same");
    assert_eq!(change(None, 103), (true, 0));
}

#[test]
fn a_host_tells_of_its_vnics_as_long_as_its_record_is_there() {
    let etcd = Cluster::start(1, &[]);
    let file = file(&etcd, None);
    let mut operator = init(&file);
    say(&file, "h1", 1, 1, &[]);
    let record = operator.view().expect("read").hosts()["h1"].0;
    let mut writer = VnicsWriter::new(&file, "h1").expect("a store");
    let said = HostVnics::of(vec![vnic("web", "red", &["10.50.0.2"])]);
    assert!(writer.write(record, &said).expect("written").is_some_and(|bytes| bytes > 50));
    let view = operator.view_of(Scope::Vnics).expect("read");
    let there = &view.vnics()["h1"];
    assert!(there.is_same(&said) && there.age_s() < 60 && there.left_out == 0, "{there:?}");
    // As many as a host may have: it is told how many are left out.
    let all = HostVnics::of((0..16_384).map(|number| vnic(&format!("c{number}"), "red", &["10.50.0.2"])).collect());
    writer.write(record, &all).expect("etcd takes it");
    let there = operator.view_of(Scope::Vnics).expect("read").vnics()["h1"].clone();
    assert!(there.left_out > 0 && there.vnics.len() as u64 + there.left_out == 16_384, "{}", there.left_out);
    // Others know them by name, and of what they do nothing is told to hosts.
    let mut of_networks = MembersWriter::new(&file, "h1").expect("a store");
    let (wanted, none) = (said.members().parts(), Default::default());
    assert!(of_networks.write(record, &wanted, &none).expect("written").is_some_and(|bytes| bytes > 50));
    let there = operator.view_of(Scope::Host).expect("read").members_there("h1");
    assert_eq!(there, wanted);
    assert_eq!(of_networks.write(record, &wanted, &there).expect("it is there"), Some(0));
    assert_eq!(operator.view().expect("read").vnics().len(), 0);
    // Forgotten, and another one of this name since.
    operator.remove_host("h1").expect("forgotten");
    let is_gone = || {
        let view = operator.view_of(Scope::Vnics).expect("read");
        view.vnics().is_empty() && view.members("h1").next().is_none()
    };
    assert!(is_gone());
    let mut say_again = || {
        assert_eq!(writer.write(record, &said).expect("etcd answers"), None);
        assert_eq!(of_networks.write(record, &wanted, &none).expect("etcd answers"), None);
    };
    say_again();
    say(&file, "h1", 2, 1, &[]);
    say_again();
    assert!(is_gone());
}
