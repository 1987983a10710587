//! From what is declared to one host.
use crate::given::{Given, Host, delete, network, object, record, run};
use freeflow_cluster::mirror::{Wanted, carry_out, own_objects, present_of};
use freeflow_orchestrator::objects::ObjectKind;
use serde_json::json;

/// All kinds, each of which names another.
fn declared() -> Given {
    Given::new().host("h1", &record(1)).declared(vec![
        object(
            "AccessRule",
            "may",
            json!({"tenant": "red", "from": {"group": "servers"}, "to": {}, "action": "allow"}),
        ),
        object("Group", "servers", json!({"tenant": "red", "members": [{"networks": ["red"]}]})),
        object(
            "Network",
            "red",
            json!({"tenant": "red", "cidrs": ["10.50.0.0/24", "fd00:50::/64"], "qosClass": "slow", "quota": "small"}),
        ),
        object("QosClass", "slow", json!({"priority": 1})),
        object("Quota", "small", json!({})),
    ])
}

fn wanted(given: Given) -> Wanted {
    let view = given.view();
    Wanted::of(&view, &view.declared().expect("it makes sense"), "h1", &Default::default())
}

#[test]
fn a_host_gets_all_of_it_and_its_own_block() {
    let mut host = Host::new();
    let all = wanted(declared().block("red", "h1", "10.50.0.16/28"));
    assert_eq!(carry_out(&mut host, &all), Ok(vec![]));
    let names = ["QosClass slow", "Quota small", "Network default", "Network red", "Group servers", "AccessRule may"];
    assert_eq!(host.names(), names);
    assert_eq!(host.attach("a", "red").as_deref(), Ok("10.50.0.18"));
    // The same again changes nothing.
    let before = host.0.revision();
    assert_eq!(carry_out(&mut host, &all), Ok(vec![]));
    assert_eq!(host.0.revision(), before);
    // A change of one is a change of one.
    run(&mut host.0, &crate::given::apply(vec![object("QosClass", "slow", json!({"priority": 3}))])).expect("done");
    assert_eq!(carry_out(&mut host, &all), Ok(vec![]));
    assert_eq!(host.0.revision().0, before.0 + 2);
}

#[test]
fn a_network_waits_for_its_block_and_others_do_not_wait_for_it() {
    let mut host = Host::new();
    let problems = carry_out(&mut host, &wanted(declared())).expect("the host answers");
    assert_eq!(host.names(), ["QosClass slow", "Quota small", "Network default"]);
    let about: Vec<_> = problems.iter().filter_map(|problem| problem.name.as_deref()).collect();
    // The rule names the group, and that the network.
    assert_eq!(about, ["red", "servers", "may"], "{problems:?}");
    // A block that is not of this network is none.
    let other = carry_out(&mut host, &wanted(declared().block("red", "h1", "10.51.0.0/28"))).expect("the host answers");
    assert!(other[0].message.contains("10.51.0.0/28 is not a part of it"), "{other:?}");
    // One whose block is gone stays as it is.
    assert_eq!(carry_out(&mut host, &wanted(declared().block("red", "h1", "10.50.0.16/28"))), Ok(vec![]));
    let problems = carry_out(&mut host, &wanted(declared())).expect("the host answers");
    assert_eq!((host.names().len(), problems.len()), (6, 1), "{problems:?}");
}

#[test]
fn what_is_declared_no_more_goes_once_nothing_uses_it() {
    let mut host = Host::new();
    carry_out(&mut host, &wanted(declared().block("red", "h1", "10.50.0.16/28"))).expect("the host answers");
    host.attach("a", "red").expect("attached");
    let nothing = Given::new().host("h1", &record(1));
    let problems = carry_out(&mut host, &wanted(nothing)).expect("the host answers");
    // The network is in use, and it names class and quota.
    let about: Vec<_> = problems.iter().filter_map(|problem| problem.name.as_deref()).collect();
    assert_eq!(about, ["red", "small", "slow"], "{problems:?}");
    assert_eq!(host.names(), ["QosClass slow", "Quota small", "Network default", "Network red"]);
    run(&mut host.0, &delete(ObjectKind::Vnic, "a")).expect("done");
    assert_eq!(carry_out(&mut host, &wanted(Given::new().host("h1", &record(1)))), Ok(vec![]));
    assert_eq!(host.names(), ["Network default"]);
}

/// A range that another network has until it is deleted, in the same round.
#[test]
fn what_one_change_makes_room_for_is_done_with_it() {
    let mut host = Host::new();
    let blocks = |given: Given| given.block("old", "h1", "10.50.0.0/28").block("new", "h1", "10.50.0.16/28");
    let of_tenant = |name: &str| object("Network", name, json!({"tenant": "t", "cidrs": ["10.50.0.0/24"]}));
    let old = blocks(Given::new().host("h1", &record(1)).declared(vec![of_tenant("old")]));
    assert_eq!(carry_out(&mut host, &wanted(old)), Ok(vec![]));
    let new = blocks(Given::new().host("h1", &record(1)).declared(vec![of_tenant("new")]));
    assert_eq!(carry_out(&mut host, &wanted(new)), Ok(vec![]));
    assert_eq!(host.names(), ["Network default", "Network new"]);
}

#[test]
fn one_bad_object_stops_no_other() {
    let mut host = Host::new();
    // Its range is that of the host's own network.
    run(&mut host.0, &crate::given::apply(vec![network("here", "10.60.0.0/24")])).expect("done");
    let given = Given::new().host("h1", &record(1)).declared(vec![
        object("Network", "a", json!({"tenant": "here", "cidrs": ["10.60.0.0/25"]})),
        network("b", "10.61.0.0/24"),
        object("QosClass", "slow", json!({})),
    ]);
    let mut all = wanted(given.block("a", "h1", "10.60.0.0/28").block("b", "h1", "10.61.0.0/28"));
    all.kept.insert((ObjectKind::Network, "here".into()));
    let problems = carry_out(&mut host, &all).expect("the host answers");
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!((problems[0].kind.as_deref(), problems[0].name.as_deref()), (Some("Network"), Some("a")));
    assert_eq!(host.names(), ["QosClass slow", "Network b", "Network default", "Network here"]);
}

#[test]
fn a_host_that_joins_loses_nothing_of_its_own() {
    let mut host = Host::new();
    run(
        &mut host.0,
        &crate::given::apply(vec![network("own", "10.70.0.0/24"), object("QosClass", "slow", json!({"priority": 2}))]),
    )
    .expect("done");
    let all = wanted(declared().block("red", "h1", "10.50.0.16/28"));
    let own = own_objects(&all, &present_of(&mut host).expect("the host answers"));
    let about: Vec<_> = own.iter().filter_map(|problem| problem.name.as_deref()).collect();
    assert_eq!(about, ["slow", "own"], "another class of that name, and a network: {own:?}");
    // Its own network of a name that the cluster has, too, before it has a block of it.
    let mut host = Host::new();
    run(&mut host.0, &crate::given::apply(vec![network("red", "10.50.0.0/24")])).expect("done");
    let own = own_objects(&wanted(declared()), &present_of(&mut host).expect("the host answers"));
    assert_eq!(own.iter().filter_map(|problem| problem.name.as_deref()).collect::<Vec<_>>(), ["red"], "{own:?}");
    let mut empty = Host::new();
    assert_eq!(own_objects(&all, &present_of(&mut empty).expect("the host answers")), []);
}
