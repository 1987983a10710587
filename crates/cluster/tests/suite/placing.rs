//! Declared vNICs: which host gets each, which has to let it go, and where the others look for it.
use crate::given::{Given, Host, apply, object, record, run};
use freeflow_cluster::mirror::{Released, Wanted, carry_out};
use freeflow_cluster::{Held, Holdings, PeersOf, Place, View, due_places};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use serde_json::json;
use std::net::IpAddr;
use std::time::Duration;

const ADDRESS: &str = "10.50.0.226";

fn red() -> AnyObject {
    let spec = json!({"tenant": "red", "cidrs": ["10.50.0.0/24", "fd00:50::/64"], "floating": "10.50.0.224/27"});
    object("Network", "red", spec)
}

fn vnic(name: &str, hosts: &[&str]) -> AnyObject {
    object("Vnic", name, json!({"network": "red", "hosts": hosts}))
}

fn addresses() -> Vec<IpAddr> {
    [ADDRESS, "fd00:50::e2"].map(|text| text.parse().expect("an address")).to_vec()
}

fn at(host: &str) -> Place {
    Place { host: host.into(), next: None, moved: false, addresses: addresses() }
}

/// Three hosts and a declared vNIC.
fn given(hosts: &[&str]) -> Given {
    let given = Given::new().declared(vec![red(), vnic("database", hosts)]);
    (1..=3).fold(given, |given, number| given.host(&format!("h{number}"), &record(number)))
}

fn claims(number: u64) -> Holdings {
    Holdings { claims: [("database".to_owned(), number)].into(), ..Holdings::default() }
}

fn holds(held: Held) -> Holdings {
    Holdings { vnics: [("database".to_owned(), held)].into(), ..Holdings::default() }
}

fn released(at: u64) -> Holdings {
    holds(Held { at, released: true, refused: None })
}

fn due(view: &View) -> Vec<(String, Option<Place>)> {
    due_places(view, &view.declared().expect("it makes sense"), view.places())
}

fn placed(view: &View) -> Option<Place> {
    match &due(view)[..] {
        [] => None,
        [(name, Some(place))] if name == "database" => Some(place.clone()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vnic_goes_to_the_host_that_asked_first_and_may_have_it() {
    assert_eq!(placed(&given(&[]).view()), None, "nobody asks");
    let asked = |hosts: &[&str]| {
        let given = given(hosts).holdings("h2", &claims(20)).holdings("h3", &claims(10)).holdings("x", &claims(1));
        placed(&given.view())
    };
    assert_eq!(asked(&[]), Some(at("h3")));
    assert_eq!(asked(&["h2", "h1"]), Some(at("h2")));
    assert_eq!(asked(&["h1"]), None);
    // And not again.
    let (given, _) = given(&[]).holdings("h2", &claims(20)).place("database", &at("h2"));
    assert_eq!(placed(&given.view()), None);
}

#[test]
fn a_host_that_has_it_keeps_it_until_it_has_let_this_place_go() {
    let (given, revision) = given(&[]).place("database", &at("h1"));
    let asked = |words: Holdings| placed(&given.clone().holdings("h2", &claims(5)).holdings("h1", &words).view());
    for words in [
        Holdings::default(),
        holds(Held { at: revision, ..Held::default() }),
        // Words about an earlier place, and about a later one than it has.
        released(revision - 1),
        released(revision + 1),
    ] {
        assert_eq!(asked(words.clone()), None, "{words:?}");
    }
    assert_eq!(asked(released(revision)), Some(at("h2")));
    // Without another one it stays its own, and it may ask for it again itself.
    assert_eq!(placed(&given.clone().holdings("h1", &released(revision)).view()), None);
    let again = Holdings { claims: claims(3).claims, ..released(revision) };
    assert_eq!(placed(&given.clone().holdings("h1", &again).view()), Some(at("h1")));
    // Of another host the same words mean nothing.
    assert_eq!(placed(&given.holdings("h2", &claims(5)).holdings("h3", &released(revision)).view()), None);
}

#[test]
fn an_operators_move_comes_before_claims_and_waits_for_the_host() {
    let moving = Place { next: Some("h3".into()), ..at("h1") };
    let (given, revision) = given(&[]).holdings("h2", &claims(1)).place("database", &moving);
    assert_eq!(placed(&given.clone().view()), None);
    let given = given.holdings("h1", &released(revision));
    assert_eq!(placed(&given.clone().view()), Some(Place { moved: true, ..at("h3") }));
}

#[test]
fn a_place_is_over_when_its_vnic_is_and_its_host_says_so() {
    let given = Given::new().declared(vec![red()]).host("h1", &record(1)).host("h2", &record(2));
    let (given, revision) = given.place("database", &at("h1"));
    assert_eq!(due(&given.clone().view()), []);
    assert_eq!(due(&given.clone().holdings("h1", &released(revision)).view()), [("database".to_owned(), None)]);
    let (gone, _) = given.place("other", &at("h9"));
    assert_eq!(due(&gone.view()), [("other".to_owned(), None)], "its host was removed");
    // Declared again with other addresses: not as long as the former one is somewhere.
    let again = object("Vnic", "database", json!({"network": "red", "addresses": ["10.50.0.230"]}));
    let given = Given::new().declared(vec![red(), again]).host("h1", &record(1)).host("h2", &record(2));
    let (given, revision) = given.holdings("h2", &claims(1)).place("database", &at("h1"));
    assert_eq!(due(&given.clone().view()), []);
    assert_eq!(due(&given.holdings("h1", &released(revision)).view()), [("database".to_owned(), None)]);
}

#[test]
fn after_a_backup_a_vnic_is_where_a_host_says_that_it_has_it() {
    let had = |at| holds(Held { at, ..Held::default() });
    let all = given(&[]).holdings("h2", &claims(1)).holdings("h3", &had(70)).holdings("h1", &had(60));
    // Without a backup a word is none: a host that says so of what it has not had gets nothing.
    assert_eq!(placed(&all.clone().view()), Some(at("h2")));
    assert_eq!(placed(&all.clone().restored().view()), Some(at("h3")), "the place was lost");
    let (old, _) = all.clone().place("database", &at("h1"));
    assert_eq!(placed(&old.restored().view()), Some(at("h3")), "the place was an earlier one");
    let (old, _) = given(&[]).holdings("h2", &claims(1)).place("database", &at("h1"));
    assert_eq!(placed(&old.restored().view()), Some(at("h1")), "nobody says another thing");
    let (new, _) = all.restored().place("database", &at("h1"));
    assert_eq!(placed(&new.view()), None, "it was written since");
    // A vNIC that was declared since has been nobody's, and spec.hosts holds for words, too.
    let since = Given::new().restored().and(given(&[]).holdings("h3", &had(70)));
    assert_eq!(placed(&since.view()), None);
    let others = given(&["h1"]).holdings("h3", &had(70)).restored();
    assert_eq!(placed(&others.view()), None);
}

#[test]
fn a_host_that_says_nothing_more_asks_for_nothing() {
    let asked = || given(&[]).holdings("h2", &claims(1));
    assert_eq!(placed(&asked().view_of(Duration::from_secs(10))), Some(at("h2")));
    assert_eq!(placed(&asked().view_of(Duration::from_secs(20))), None);
}

#[test]
fn no_host_has_more_than_it_can_tell_of() {
    let names: Vec<String> = (0..1002).map(|number| format!("v{number}")).collect();
    let wide = object("Network", "wide", json!({"tenant": "red", "cidrs": ["10.64.0.0/16"]}));
    let wide = match wide {
        AnyObject::Network(mut network) => {
            network.spec.floating = Some("10.64.224.0/19".into());
            AnyObject::from(network)
        }
        other => other,
    };
    let vnic = |name: &String| object("Vnic", name, json!({"network": "wide"}));
    let declared = [wide].into_iter().chain(names.iter().map(vnic)).collect();
    let all = Holdings { claims: names.iter().map(|name| (name.clone(), 1)).collect(), ..Holdings::default() };
    let given = Given::new().declared(declared).host("h1", &record(1)).holdings("h1", &all);
    assert_eq!(due(&given.view()).len(), 1000);
}

fn wanted(given: Given, released: &Released) -> Wanted {
    let view = given.view();
    Wanted::of(&view, &view.declared().expect("it makes sense"), "h1", released)
}

fn has(host: &Host) -> Option<String> {
    host.0.vnic("database").map(|vnic| vnic.address.to_string())
}

#[test]
fn a_host_makes_the_vnics_that_it_has_and_no_others() {
    let given = given(&[]).block("red", "h1", "10.50.0.16/28");
    let none = Released::new();
    let mut host = Host::new();
    let here = |given: &Given| given.clone().place("database", &at("h1"));
    // No place: it is not made, and one that is there stays.
    assert_eq!(carry_out(&mut host, &wanted(given.clone(), &none)), Ok(vec![]));
    assert_eq!(has(&host), None);
    let (with, revision) = here(&given);
    assert_eq!(carry_out(&mut host, &wanted(with.clone(), &none)), Ok(vec![]));
    assert_eq!(has(&host).as_deref(), Some(ADDRESS));
    let made = host.0.revision();
    assert_eq!(carry_out(&mut host, &wanted(with.clone(), &none)), Ok(vec![]));
    assert_eq!(carry_out(&mut host, &wanted(given.clone(), &none)), Ok(vec![]));
    assert_eq!((has(&host).as_deref(), host.0.revision()), (Some(ADDRESS), made));
    // The host's own vNICs are nothing to the cluster.
    assert_eq!(host.attach("own", "red").as_deref(), Ok("10.50.0.18"));
    // Elsewhere, on its way, let go, or not declared any more: it goes.
    let moving = given.clone().place("database", &Place { next: Some("h2".into()), ..at("h1") }).0;
    let elsewhere = given.clone().place("database", &at("h2")).0;
    let undeclared = Given::new().declared(vec![red()]).host("h1", &record(1)).block("red", "h1", "10.50.0.16/28");
    let let_go = Released::from([("database".to_owned(), revision)]);
    for (gone, released) in [
        (moving, &none),
        (elsewhere, &none),
        (with.clone(), &let_go),
        (undeclared.place("database", &at("h1")).0, &none),
    ] {
        assert_eq!(carry_out(&mut host, &wanted(with.clone(), &none)), Ok(vec![]));
        assert_eq!(has(&host).as_deref(), Some(ADDRESS));
        assert_eq!(carry_out(&mut host, &wanted(gone, released)), Ok(vec![]));
        assert_eq!(has(&host), None);
    }
    assert!(host.0.vnic("own").is_some());
    // A place that was written since is another one.
    let earlier = Released::from([("database".to_owned(), revision - 1)]);
    assert_eq!(carry_out(&mut host, &wanted(with, &earlier)), Ok(vec![]));
    assert_eq!(has(&host).as_deref(), Some(ADDRESS));
    // After a backup neither more nor less is made than there is, until controllers have asked the hosts.
    let (old, _) = given.clone().place("database", &at("h2"));
    assert_eq!(carry_out(&mut host, &wanted(old.restored(), &none)), Ok(vec![]));
    assert_eq!(has(&host).as_deref(), Some(ADDRESS));
    let mut other = Host::new();
    let (old, _) = given.place("database", &at("h1"));
    assert_eq!(carry_out(&mut other, &wanted(old.restored(), &none)), Ok(vec![]));
    assert_eq!(has(&other), None);
    assert!(run(&mut host.0, &apply(vec![vnic("database", &[])])).is_ok());
    assert!(host.0.is_clusters(ObjectKind::Vnic, "database"));
}

#[test]
fn others_look_for_it_on_its_host_alone() {
    let prefixes = |given: Given, host: &str| -> Vec<String> {
        let view = given.view();
        let found = PeersOf::host("h1", &record(1), &view, &view.declared().expect("it makes sense"));
        assert_eq!(found.problems, []);
        found.peers.into_iter().find(|peer| peer.host == host).expect("a peer").prefixes
    };
    let given = given(&[]).block("red", "h2", "10.50.0.16/28");
    let single = [format!("{ADDRESS}/32"), "fd00:50::e2/128".to_owned()];
    for (host, other) in [("h2", "h3"), ("h3", "h2")] {
        let (with, _) = given.clone().place("database", &at(host));
        assert!(single.iter().all(|one| prefixes(with.clone(), host).contains(one)), "{host}");
        assert!(single.iter().all(|one| !prefixes(with.clone(), other).contains(one)), "{host}");
    }
    // On this host, or nowhere, it is no other's; nor is an address that a place of no vNIC has.
    let lost = Place { addresses: vec!["10.111.3.7".parse().expect("an address")], ..at("h3") };
    for given in [given.clone(), given.clone().place("database", &at("h1")).0, given.clone().place("lost", &lost).0] {
        assert!(["h2", "h3"].iter().all(|host| prefixes(given.clone(), host).iter().all(|one| !one.ends_with("/32"))));
    }
    // A block that has addresses of vNICs is believed of nobody.
    let view = given.block("red", "h3", "10.50.0.192/26").view();
    let found = PeersOf::host("h1", &record(1), &view, &view.declared().expect("it makes sense"));
    assert_eq!(found.peers[1].prefixes, ["10.111.3.0/24"]);
}
