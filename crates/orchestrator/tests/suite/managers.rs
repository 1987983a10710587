//! Objects that have a manager: who may change them.
use crate::common::{Host, host, named};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Change, Command, JOINED_PAIRS_MAX, KUBERNETES, Reason, State, Store, Writer};
use freeflow_protocol::admin::DataPath;
use serde_json::{Value, json};

const NAME: &str = "k8s.team.red";

fn kubernetes() -> Writer {
    Writer::Manager(KUBERNETES.into())
}

/// A network as Kubernetes declares it.
fn managed(cidr: &str) -> Value {
    let mut value = named("Network", NAME, json!({"tenant": "k8s.team", "cidrs": [cidr]}));
    value["metadata"]["manager"] = json!({"name": "kubernetes", "change": "kubectl edit ffnet red -n team"});
    value
}

fn by_hand(cidr: &str) -> Value {
    named("Network", NAME, json!({"tenant": "k8s.team", "cidrs": [cidr]}))
}

fn delete() -> Command {
    Command::Delete { kind: ObjectKind::Network, name: NAME.into(), version: None }
}

fn object(host: &Host) -> AnyObject {
    host.state.object(ObjectKind::Network, NAME).expect("it is there")
}

fn manager(host: &Host) -> Option<String> {
    object(host).metadata().manager.clone().map(|manager| manager.name)
}

fn with_network() -> Host {
    let mut host = host();
    assert_eq!(host.apply_by(&kubernetes(), &[managed("10.1.0.0/24")]), Ok(vec![Change::Created]));
    host
}

#[test]
fn a_managed_object_is_its_managers_to_change() {
    let mut host = with_network();
    let other = Writer::Manager("nomad".into());
    let set = Command::SetDataPath { network: NAME.into(), path: DataPath::Routed };
    for (writer, command) in [(&Writer::Hand, &set), (&Writer::Hand, &delete()), (&other, &delete())] {
        let refusal = host.state.plan_by(writer, command).expect_err("it is another's");
        assert_eq!(refusal.reason, Reason::Conflict, "{refusal}");
        for words in ["managed by kubernetes", "kubectl edit ffnet red -n team", "--take-over"] {
            assert!(refusal.message.contains(words), "{refusal}");
        }
    }
    for writer in [Writer::Hand, other] {
        let refusal = host.apply_by(&writer, &[by_hand("10.2.0.0/24")]).expect_err("it is another's");
        assert_eq!(refusal.reason, Reason::Conflict, "{refusal}");
    }
    // Also with the manager that it was read with.
    assert_eq!(host.refused(&[managed("10.2.0.0/24")]).reason, Reason::Conflict);
    // One bad object changes nothing else.
    host.refused(&[named("QosClass", "new", json!({})), by_hand("10.2.0.0/24")]);
    // The same again is no change.
    for same in [managed("10.1.0.0/24"), by_hand("10.1.0.0/24")] {
        assert_eq!(host.apply(&[same]), [Change::Unchanged]);
    }
    assert_eq!(manager(&host).as_deref(), Some(KUBERNETES));
    assert_eq!(host.apply_by(&kubernetes(), &[managed("10.2.0.0/24")]), Ok(vec![Change::Configured]));
    // Containers come and go nevertheless.
    assert_eq!(host.attach("a", NAME, None), Ok(Change::Created));
    host.run(&Command::Detach { id: "a".into() }).unwrap();
    // As a store has it.
    assert_eq!(
        State::of(&host.store.list("", None).unwrap()).unwrap().object(ObjectKind::Network, NAME),
        Some(object(&host))
    );
    host.run_by(&kubernetes(), &delete()).unwrap();
    assert!(host.state.network(NAME).is_none());
}

#[test]
fn names_and_objects_of_others_are_not_taken() {
    let mut host = with_network();
    // By hand nobody declares a manager, or what is called as a manager's.
    for (name, manager, field) in [
        ("blue", json!({"name": "kubernetes"}), "metadata.manager"),
        ("k8s.team.blue", Value::Null, "metadata.name"),
        ("k8s.", Value::Null, "metadata.name"),
    ] {
        let mut value = named("Group", name, json!({"tenant": "t", "members": []}));
        if !manager.is_null() {
            value["metadata"]["manager"] = manager;
        }
        assert_eq!(host.refused(&[value]).causes[0].field, field);
    }
    // And Kubernetes nothing that is called otherwise, or in another's name, or with bad words.
    let group = |name: &str| named("Group", name, json!({"tenant": "t", "members": []}));
    host.apply(&[group("mine")]);
    let refusal = host.apply_by(&kubernetes(), &[group("mine")]).expect_err("it is declared by hand");
    assert_eq!(refusal.reason, Reason::Conflict, "{refusal}");
    let delete = Command::Delete { kind: ObjectKind::Group, name: "mine".into(), version: None };
    assert_eq!(host.run_by(&kubernetes(), &delete).expect_err("it is declared by hand").reason, Reason::Conflict);
    let field = |host: &mut Host, value: Value| {
        host.apply_by(&kubernetes(), &[value]).expect_err("it is refused").causes.remove(0).field
    };
    assert_eq!(field(&mut host, group("new")), "metadata.name");
    for (manager, wrong) in [
        (json!({"name": "nomad"}), "metadata.manager.name"),
        (json!({"name": "kubernetes", "change": "a\nb"}), "metadata.manager.change"),
        (json!({"name": "kubernetes", "change": "x".repeat(513)}), "metadata.manager.change"),
    ] {
        let mut value = group("k8s.team.g");
        value["metadata"]["manager"] = manager;
        assert_eq!(field(&mut host, value), wrong);
    }
    assert_eq!(host.apply_by(&kubernetes(), &[group("k8s.team.g")]), Ok(vec![Change::Created]));
}

#[test]
fn an_operator_takes_over() {
    let mut host = with_network();
    assert_eq!(host.apply_by(&Writer::TakeOver, &[managed("10.1.0.0/24")]), Ok(vec![Change::Configured]));
    assert_eq!(manager(&host), None);
    assert_eq!(host.apply(&[by_hand("10.3.0.0/24")]), [Change::Configured]);
    // It is nobody's whose manager comes back.
    let refusal = host.apply_by(&kubernetes(), &[managed("10.1.0.0/24")]).expect_err("it was taken over");
    assert_eq!(refusal.reason, Reason::Conflict, "{refusal}");
    let mut host = with_network();
    host.run_by(&Writer::TakeOver, &delete()).unwrap();
    assert!(host.state.network(NAME).is_none());
}

#[test]
fn a_copy_has_the_managers_of_its_original() {
    let mut host = with_network();
    let original = object(&host);
    let command = |object: AnyObject| Command::Apply { objects: vec![object] };
    let bare = |mut object: AnyObject| {
        object.metadata_mut().resource_version = None;
        object
    };
    let mut copy = crate::common::host();
    copy.run_by(&Writer::Copy, &command(bare(original.clone()))).unwrap();
    assert_eq!(object(&copy).metadata().manager, original.metadata().manager);
    // It was taken over elsewhere.
    host.apply_by(&Writer::TakeOver, &[by_hand("10.1.0.0/24")]).unwrap();
    copy.run_by(&Writer::Copy, &command(bare(object(&host)))).unwrap();
    assert_eq!(manager(&copy), None);
    copy.run_by(&Writer::Copy, &delete()).unwrap();
}

#[test]
fn users_of_a_manager_have_shares_of_networks() {
    let mut host = host();
    let network = |name: String, tenant: &str, number: usize| {
        let cidr = format!("10.{}.{}.0/24", number / 256, number % 256);
        named("Network", &name, json!({"tenant": tenant, "cidrs": [cidr]}))
    };
    // Made by an admin. Of the 96 places that are left the network `default` has one.
    let all: Vec<Value> =
        (0..4000).map(|number| network(format!("n{number}"), &format!("t{}", number / 100), number)).collect();
    all.chunks(250).for_each(|part| drop(host.apply(part)));
    let mut made = |namespace: &str, numbers: std::ops::Range<usize>| {
        let tenant = format!("k8s.{namespace}");
        let of = |number: usize| network(format!("{tenant}.n{number}"), &tenant, number);
        host.apply_by(&kubernetes(), &numbers.map(of).collect::<Vec<_>>()).map(|done| done.len())
    };
    assert_eq!(made("a", 0..47), Ok(47));
    assert_eq!(made("a", 47..48).expect_err("it has half of what is left").reason, Reason::Exhausted);
    assert_eq!(made("b", 0..24), Ok(24));
    assert_eq!(made("b", 24..25).expect_err("it has half of what is left").reason, Reason::Exhausted);
    assert_eq!(host.apply(&[network("last".into(), "t", 4000)]), [Change::Created]);
}

#[test]
fn a_copy_does_not_depend_on_the_order() {
    let group = |tenant: &str, number: usize| {
        named("Group", &format!("{tenant}-{number:04}"), json!({"tenant": tenant, "members": []}))
    };
    let many = |tenant: &'static str, count: usize| (0..count).map(move |number| group(tenant, number));
    let (first, second): (Vec<Value>, Vec<Value>) = (many("zz", 2048).collect(), many("aa", 1024).collect());
    let mut original = host();
    original.apply(&first);
    original.apply(&second);
    // In the order of their names the tenant that came late is the first.
    let all = [second, first].concat();
    assert_eq!(
        host().apply_by(&Writer::Hand, &all).expect_err("shares are of those that are there").reason,
        Reason::Exhausted
    );
    assert_eq!(host().apply_by(&Writer::Copy, &all).map(|done| done.len()), Ok(3072));
}

#[test]
fn a_copy_changes_rules_in_any_order() {
    let pairs: Vec<(usize, usize)> = (0..13).flat_map(|one| (0..one).map(move |other| (one, other))).collect();
    let rule = |name: &str, pair: usize, action: &str| {
        let end = |number: usize| json!({"network": format!("n{number}")});
        let (from, to) = (end(pairs[pair].0), end(pairs[pair].1));
        named("AccessRule", name, json!({"tenant": "red", "from": from, "to": to, "action": action}))
    };
    let network = |number: usize| {
        named("Network", &format!("n{number}"), json!({"tenant": "red", "cidrs": [format!("10.{number}.0.0/16")]}))
    };
    let mut before: Vec<Value> = (0..13).map(network).collect();
    before.extend((1..JOINED_PAIRS_MAX).map(|at| rule(&format!("r{at}"), at, "allow")));
    before.extend([rule("a", JOINED_PAIRS_MAX, "deny"), rule("z", 0, "allow")]);
    let mut copy = host();
    copy.apply_by(&Writer::Copy, &before).unwrap();
    // One joins what the other one has left: in the order of their names there is a pair too many on the way.
    let after = [rule("a", JOINED_PAIRS_MAX, "allow"), rule("z", 0, "deny")];
    assert_eq!(copy.apply_by(&Writer::Hand, &after).expect_err("too many pairs").reason, Reason::Exhausted);
    assert_eq!(copy.apply_by(&Writer::Copy, &after), Ok(vec![Change::Configured; 2]));
}

/// Tenants that make networks choose their names, and could be in the segment of another's.
#[test]
fn no_network_has_the_overlay_of_another_one() {
    let of = |namespace: &str, name: &str, cidr: &str| {
        let tenant = format!("k8s.{namespace}");
        let mut value = named("Network", &format!("{tenant}.{name}"), json!({"tenant": tenant, "cidrs": [cidr]}));
        value["metadata"]["manager"] = json!({"name": "kubernetes", "change": "kubectl edit"});
        value
    };
    let (first, same) = (of("a", "red", "10.1.0.0/24"), of("b", "n43795743", "10.2.0.0/24"));
    let mut host = host();
    // In one request, and in two.
    let both = [first.clone(), same.clone()];
    assert_eq!(host.apply_by(&kubernetes(), &both).expect_err("it is the same").causes[0].field, "metadata.name");
    host.apply_by(&kubernetes(), std::slice::from_ref(&first)).unwrap();
    let refusal = host.apply_by(&kubernetes(), &[same]).expect_err("it is the same");
    assert!(refusal.reason == Reason::Invalid && !refusal.to_string().contains("red"), "{refusal}");
    assert_eq!(host.apply_by(&kubernetes(), &[first]), Ok(vec![Change::Unchanged]));
    assert_eq!(host.apply_by(&Writer::Copy, &both), Ok(vec![Change::Unchanged, Change::Created]));
}
