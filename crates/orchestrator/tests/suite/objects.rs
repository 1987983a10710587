//! Objects as they come: what is refused, by which field, and what is written back.
use crate::common::*;
use freeflow_orchestrator::access::AccessTable;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, parse_object};
use freeflow_orchestrator::{Change, Command, JOINED_PAIRS_MAX, Reason, State, Store};
use serde_json::{Value, json};

fn fields(value: Value) -> Vec<String> {
    let refusal = match parse_object(&value) {
        Err(invalid) => return invalid.causes.into_iter().map(|cause| cause.field).collect(),
        Ok(object) => host().plan(&Command::Apply { objects: vec![object] }).expect_err("it is bad"),
    };
    assert_eq!(refusal.reason, Reason::Invalid, "{refusal}");
    refusal.causes.into_iter().map(|cause| cause.field).collect()
}

fn spec(kind: &str, spec: Value) -> Value {
    json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec})
}

#[test]
fn what_is_wrong_is_named() {
    let network = |more: Value| {
        let mut of = json!({"cidrs": ["10.1.0.0/16"]});
        of.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec("Network", of)
    };
    for (value, field) in [
        (json!([]), ""),
        (json!({"kind": "Network"}), "apiVersion"),
        (json!({"apiVersion": "v2", "kind": "Network"}), "apiVersion"),
        (json!({"apiVersion": "freeflow.io/v1"}), "kind"),
        (json!({"apiVersion": "freeflow.io/v1", "kind": "Pod"}), "kind"),
        (json!({"apiVersion": "freeflow.io/v1", "kind": "Network", "spec": {}}), "metadata"),
        (json!({"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {}, "spec": {}}), "metadata.name"),
        (json!({"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": "x"}}), "spec"),
        (spec("Network", json!({})), "spec.cidrs"),
        (spec("Network", json!({"cidrs": ["10.1.0.0"]})), "spec.cidrs[0]"),
        (spec("Network", json!({"cidrs": ["10.1.0.0/30"]})), "spec.cidrs[0]"),
        (spec("Network", json!({"cidrs": ["127.0.0.0/8"]})), "spec.cidrs[0]"),
        (spec("Network", json!({"cidrs": ["10.1.0.0/16", "10.2.0.0/16"]})), "spec.cidrs[1]"),
        (spec("Network", json!({"cidrs": [7]})), "spec.cidrs[0]"),
        (network(json!({"range": "10.2.0.0/24"})), "spec.range"),
        (network(json!({"nonsense": 1})), "spec.nonsense"),
        (network(json!({"dataPath": "fast"})), "spec.dataPath"),
        (network(json!({"external": "perhaps"})), "spec.external"),
        (network(json!({"qosClass": "none"})), "spec.qosClass"),
        (network(json!({"quota": "none"})), "spec.quota"),
        (network(json!({"tenant": "../x"})), "spec.tenant"),
        (spec("QosClass", json!({"vnic": {"rate": "fast"}})), "spec.vnic.rate"),
        (spec("QosClass", json!({"vnic": {"rate": "1bit"}})), "spec.vnic.rate"),
        (spec("QosClass", json!({"vnic": {"burst": "64KiB"}})), "spec.vnic.burst"),
        (spec("QosClass", json!({"qp": {"rate": "1Gbit", "burst": "1B"}})), "spec.qp.burst"),
        (spec("QosClass", json!({"tenant": {"messageRate": "1k", "messageBurst": 0}})), "spec.tenant.messageBurst"),
        (spec("QosClass", json!({"priority": 8})), "spec.priority"),
        (spec("QosClass", json!({"vnic": {"burst": null, "rate": "1Gbit"}})), "spec.vnic.burst"),
        (spec("QosClass", json!({"vnic": {"rate": null}})), "spec.vnic.rate"),
        (spec("QosClass", json!({"vnic": null})), "spec.vnic"),
        (spec("QosClass", Value::Null), "spec"),
        (network(json!({"qosClass": null})), "spec.qosClass"),
        (spec("Group", json!({"members": [{"networks": ["default", null]}]})), "spec.members[0].networks[1]"),
        (spec("QosClass", json!({"priority": 256})), "spec.priority"),
        (spec("QosClass", json!({"weight": 0})), "spec.weight"),
        (spec("QosClass", json!({"weight": 1001})), "spec.weight"),
        (spec("Quota", json!({"perVnic": {"qps": -1}})), "spec.perVnic.qps"),
        (spec("Quota", json!({"vnics": 65_537})), "spec.vnics"),
        (spec("Vnic", json!({})), "spec.network"),
        (spec("Vnic", json!({"network": "none"})), "spec.network"),
        (spec("Vnic", json!({"network": "default", "addresses": ["10.112.0.2"]})), "spec.addresses[0]"),
        (spec("Vnic", json!({"network": "default", "addresses": ["10.111.0.1"]})), "spec.addresses[0]"),
        (spec("Vnic", json!({"network": "default", "addresses": ["10.111.0.2", "10.111.0.3"]})), "spec.addresses[1]"),
        (spec("Vnic", json!({"network": "default", "addresses": ["x"]})), "spec.addresses[0]"),
        (spec("Group", json!({"members": [{"networks": ["none"]}]})), "spec.members[0].networks[0]"),
        (spec("Group", json!({"members": [{"cidrs": ["10.0.0.1/8"]}]})), "spec.members[0].cidrs[0]"),
        (spec("Group", json!({"members": [{"label": {}}]})), "spec.members[0].label"),
        (spec("AccessRule", json!({"from": {"group": "none"}, "to": {}, "action": "deny"})), "spec.from.group"),
        (spec("AccessRule", json!({"from": {}, "to": {}})), "spec.action"),
        (spec("AccessRule", json!({"from": {}, "to": {"cidr": "x"}, "action": "deny"})), "spec.to.cidr"),
        (spec("AccessRule", json!({"from": {}, "to": {}, "action": "deny", "direction": "up"})), "spec.direction"),
    ] {
        assert_eq!(fields(value.clone()), [field], "{value}");
    }
    let name = |name: &str| json!({"apiVersion": "freeflow.io/v1", "kind": "QosClass", "metadata": {"name": name}, "spec": {}});
    for bad in ["", ".", "a/b", "-x", "ä", "a b"] {
        assert_eq!(fields(name(bad)), ["metadata.name"], "{bad}");
    }
    let all = fields(spec("QosClass", json!({"priority": 9, "weight": 0, "qp": {"burst": 1}})));
    assert_eq!(all, ["spec.qp.burst", "spec.qp.burst", "spec.priority", "spec.weight"]);
}

#[test]
fn ipv6_ranges_are_checked() {
    let network = |cidrs: Value| fields(spec("Network", json!({"cidrs": cidrs})));
    for bad in ["fd00:1::/16", "fd00:1::/113", "fd00:1::1/64", "ff05::/64", "fe80::/64", "::ffff:10.0.0.0/112", "::/64"]
    {
        assert_eq!(network(json!(["10.1.0.0/16", bad])), ["spec.cidrs[1]"], "{bad}");
    }
    assert_eq!(network(json!(["fd00:1::/64"])), ["spec.cidrs"], "without IPv4");
    assert_eq!(network(json!(["fd00:1::/64", "10.1.0.0/16", "fd00:2::/64"])), ["spec.cidrs[2]"]);
    assert_eq!(network(json!(["10.0.0.0/12", "fd00:1::/112"])), ["spec.cidrs[1]"], "fewer than of IPv4");
    let vnic = spec("Vnic", json!({"network": "default", "addresses": ["fd00::5"]}));
    assert_eq!(fields(vnic), ["spec.addresses[0]"], "a network without IPv6");
    let mut host = host();
    host.apply(&[named("Network", "a", json!({"tenant": "t", "cidrs": ["10.1.0.0/16", "fd00:1::/64"]}))]);
    let of = |tenant: &str| named("Network", "b", json!({"tenant": tenant, "cidrs": ["10.2.0.0/16", "fd00:1::/80"]}));
    assert_eq!(host.refused(&[of("t")]).causes[0].field, "spec.cidrs[1]", "overlaps one of the same tenant");
    assert_eq!(host.apply(&[of("u")]), [Change::Created], "another tenant's");
}

#[test]
fn defaults_are_written_back_and_statuses_ignored() {
    let mut host = host();
    let mut given = spec("Network", json!({"cidrs": ["10.1.0.0/16"]}));
    given["status"] = json!({"whatever": 1});
    host.apply(&[given]);
    let back = serde_json::to_value(host.state.object(ObjectKind::Network, "x").unwrap()).unwrap();
    let revision = host.state.revision().0;
    let expected = json!({
        "apiVersion": "freeflow.io/v1", "kind": "Network",
        "metadata": {"name": "x", "resourceVersion": revision, "generation": 1},
        "spec": {"tenant": "default", "cidrs": ["10.1.0.0/16"], "dataPath": "auto", "access": "allow", "external": "allow"},
    });
    assert_eq!(back, expected);
    // An object that was read can be written, and is unchanged.
    assert_eq!(host.apply(std::slice::from_ref(&back)), [Change::Unchanged]);
    assert_eq!(parse_object(&back).map(|object| object.kind()), Ok(ObjectKind::Network));
    assert!(serde_json::from_value::<AnyObject>(back).is_ok());
}

#[test]
fn the_network_default_can_be_changed_but_not_its_addresses() {
    let mut host = host();
    host.apply(&[class("slow", json!({"vnic": {"rate": "1Gbit"}}))]);
    let default = |spec: Value| named("Network", "default", spec);
    assert_eq!(host.apply(&[default(json!({"qosClass": "slow"}))]), [Change::Configured]);
    assert_eq!(host.state.network("default").unwrap().object.spec.cidrs, ["10.111.0.0/16"]);
    assert_eq!(host.refused(&[default(json!({"cidrs": ["10.112.0.0/16"]}))]).causes[0].field, "spec.cidrs");
    assert_eq!(host.refused(&[default(json!({"range": "10.111.2.0/24"}))]).causes[0].field, "spec.range");
    let delete = Command::Delete { kind: ObjectKind::Network, name: "default".into(), version: None };
    assert_eq!(host.state.plan(&delete).unwrap_err().reason, Reason::Conflict);
    let delete = Command::Delete { kind: ObjectKind::Host, name: "h1".into(), version: None };
    assert_eq!(host.state.plan(&delete).unwrap_err().reason, Reason::Conflict);
}

#[test]
fn what_is_used_stays_and_users_are_named() {
    let mut host = host();
    host.apply(&[
        named("AccessRule", "r", json!({"from": {"group": "g"}, "to": {}, "action": "deny"})),
        named("Vnic", "v", json!({"network": "n", "qosClass": "c"})),
        named("Group", "g", json!({"members": [{"networks": ["n"]}]})),
        named("Network", "n", json!({"cidrs": ["10.1.0.0/16"], "quota": "q"})),
        named("Quota", "q", json!({"vnics": 1})),
        class("c", json!({"weight": 7})),
    ]);
    for (kind, name, users) in [
        (ObjectKind::Group, "g", "AccessRule r"),
        (ObjectKind::Network, "n", "Vnic v, Group g"),
        (ObjectKind::Quota, "q", "Network n"),
        (ObjectKind::QosClass, "c", "Vnic v"),
    ] {
        let refusal = host.state.plan(&Command::Delete { kind, name: name.into(), version: None }).unwrap_err();
        assert_eq!(refusal.reason, Reason::InUse);
        assert!(refusal.message.contains(users), "{refusal}");
    }
    let second = host.refused(&[named("Vnic", "w", json!({"network": "n"}))]);
    assert_eq!(second.reason, Reason::Exhausted);
    for (kind, name) in [
        (ObjectKind::AccessRule, "r"),
        (ObjectKind::Group, "g"),
        (ObjectKind::Vnic, "v"),
        (ObjectKind::Network, "n"),
        (ObjectKind::Quota, "q"),
        (ObjectKind::QosClass, "c"),
    ] {
        host.run(&Command::Delete { kind, name: name.into(), version: None }).unwrap();
    }
    let gone = Command::Delete { kind: ObjectKind::Quota, name: "q".into(), version: None };
    assert_eq!(host.state.plan(&gone).unwrap_err().reason, Reason::NotFound);
}

#[test]
fn what_others_have_changed_is_not_deleted() {
    let mut host = host();
    host.apply(&[class("c", json!({"weight": 7}))]);
    let read = host.state.revision().0;
    host.apply(&[class("c", json!({"weight": 8}))]);
    let delete = |version| Command::Delete { kind: ObjectKind::QosClass, name: "c".into(), version };
    for other in [read, 0, u64::MAX] {
        let refusal = host.state.plan(&delete(Some(other))).unwrap_err();
        assert_eq!(refusal.reason, Reason::Conflict, "{refusal}");
    }
    host.run(&delete(Some(host.state.revision().0))).unwrap();
    assert_eq!(host.state.plan(&delete(Some(read))).unwrap_err().reason, Reason::NotFound);
}

#[test]
fn tenants_share_addresses_with_each_other_only() {
    let mut host = host();
    let network =
        |name: &str, tenant: &str, cidr: &str| named("Network", name, json!({"tenant": tenant, "cidrs": [cidr]}));
    host.apply(&[network("a", "red", "10.1.0.0/16"), network("b", "blue", "10.1.0.0/16")]);
    let ids: Vec<_> = ["a", "b"].map(|name| host.state.network(name).unwrap().id).into();
    assert_ne!(ids[0], ids[1]);
    let refusal = host.refused(&[network("c", "red", "10.1.7.0/24")]);
    assert_eq!(refusal.causes[0].field, "spec.cidrs[0]");
    assert_eq!(host.refused(&[network("d", "default", "10.0.0.0/8")]).causes[0].field, "spec.cidrs[0]");
    // Two in one request, and two that change places.
    host.refused(&[network("e", "green", "10.1.0.0/16"), network("f", "green", "10.1.0.0/17")]);
    host.apply(&[network("e", "green", "10.1.0.0/16"), network("f", "green", "10.2.0.0/16")]);
    host.apply(&[network("f", "green", "10.1.0.0/16"), network("e", "green", "10.2.0.0/16")]);
    assert_eq!(host.refused(&[network("e", "red", "10.2.0.0/16")]).causes[0].field, "spec.tenant");
    // The other tenant's network can't be named.
    let group = named("Group", "g", json!({"tenant": "red", "members": [{"networks": ["b"]}]}));
    assert_eq!(host.refused(&[group]).causes[0].field, "spec.members[0].networks[0]");
    let rule = json!({"tenant": "red", "from": {"network": "a"}, "to": {"network": "b"}, "action": "allow"});
    let fields: Vec<String> =
        host.refused(&[named("AccessRule", "r", rule)]).causes.into_iter().map(|cause| cause.field).collect();
    assert_eq!(fields, ["spec.to.network"]);
}

fn rule(name: &str, from: &str, to: &str, action: &str) -> serde_json::Value {
    let (from, to) = (json!({"network": from}), json!({"network": to}));
    named("AccessRule", name, json!({"tenant": "red", "from": from, "to": to, "action": action}))
}

#[test]
fn rules_join_networks_of_their_tenant() {
    let mut host = host();
    let network =
        |name: &str, tenant: &str, cidr: &str| named("Network", name, json!({"tenant": tenant, "cidrs": [cidr]}));
    host.apply(&[
        network("a", "red", "10.1.0.0/16"),
        network("b", "red", "10.2.0.0/16"),
        network("c", "blue", "10.2.0.0/16"),
    ]);
    assert_eq!(host.apply(&[rule("no", "b", "a", "deny"), rule("r", "a", "b", "allow")]), [Change::Created; 2]);
    let table = AccessTable::of(host.state.access());
    assert!(table.joins("a", "b") && table.is_joined("b") && !table.joins("a", "c"));
    for action in ["allow", "deny"] {
        assert_eq!(host.refused(&[rule("s", "c", "a", action)]).causes[0].field, "spec.from.network");
    }
    let delete = |kind, name: &str| Command::Delete { kind, name: name.into(), version: None };
    let refusal = host.state.plan(&delete(ObjectKind::Network, "b")).unwrap_err();
    assert_eq!(refusal.reason, Reason::InUse, "{refusal}");
    host.run(&delete(ObjectKind::AccessRule, "r")).unwrap();
    assert!(!AccessTable::of(host.state.access()).joins("a", "b"), "what denies joins nothing");
}

#[test]
fn a_tenant_joins_so_many_pairs_of_networks() {
    let mut host = host();
    let networks: Vec<_> = (0..13)
        .map(|n| named("Network", &format!("n{n}"), json!({"tenant": "red", "cidrs": [format!("10.{n}.0.0/16")]})))
        .collect();
    host.apply(&networks);
    let pairs: Vec<(String, String)> =
        (0..13).flat_map(|one| (0..one).map(move |other| (format!("n{one}"), format!("n{other}")))).collect();
    let (first, more) = pairs.split_at(JOINED_PAIRS_MAX);
    let joining = |name: usize, (one, other): &(String, String)| rule(&format!("r{name}"), one, other, "allow");
    let rules: Vec<_> = first.iter().enumerate().map(|(at, pair)| joining(at, pair)).collect();
    // In one request, and in many.
    let mut too_many = rules.clone();
    too_many.push(joining(64, &more[0]));
    assert_eq!(host.refused(&too_many).reason, Reason::Exhausted);
    host.apply(&rules);
    let refusal = host.refused(&[joining(64, &more[0])]);
    assert_eq!((refusal.reason, refusal.causes[0].field.as_str()), (Reason::Exhausted, "spec.to.network"));
    assert!(refusal.to_string().contains("64 pairs"), "{refusal}");
    // The same pair again, either way round; one that denies; one in another's place; after one is gone.
    let (one, other) = &first[0];
    host.apply(&[rule("again", other, one, "allow"), rule("no", &more[0].0, &more[0].1, "deny")]);
    host.apply(&[joining(1, &more[0])]);
    assert_eq!(host.refused(&[joining(64, &more[1])]).reason, Reason::Exhausted);
    host.run(&Command::Delete { kind: ObjectKind::AccessRule, name: "r0".into(), version: None }).unwrap();
    assert_eq!(host.refused(&[joining(64, &more[1])]).reason, Reason::Exhausted, "another rule joins them still");
    host.apply(&[rule("again", other, one, "deny")]);
    host.apply(&[joining(64, &more[1])]);
}

#[test]
fn what_others_have_is_not_disclosed() {
    let mut host = host();
    host.apply(&[
        named("Network", "theirs", json!({"tenant": "blue", "cidrs": ["10.1.0.0/16"]})),
        named("Group", "theirs", json!({"tenant": "blue", "members": []})),
    ]);
    for (kind, spec) in [
        ("Group", json!({"tenant": "red", "members": [{"networks": ["theirs"]}]})),
        ("AccessRule", json!({"tenant": "red", "from": {"network": "theirs"}, "to": {}, "action": "deny"})),
        ("AccessRule", json!({"tenant": "red", "from": {}, "to": {"group": "theirs"}, "action": "deny"})),
    ] {
        let text = spec.to_string();
        let nobodys = serde_json::from_str(&text.replace("theirs", "nobodys")).unwrap();
        let [refused, as_if] = [spec, nobodys].map(|spec| host.refused(&[named(kind, "x", spec)]).to_string());
        assert_eq!(refused.replace("theirs", "nobodys"), as_if);
    }
}

#[test]
fn writers_that_have_not_seen_the_last_change_are_refused() {
    let mut host = host();
    host.apply(&[class("c", json!({"weight": 1}))]);
    let read = serde_json::to_value(host.state.object(ObjectKind::QosClass, "c").unwrap()).unwrap();
    host.apply(&[class("c", json!({"weight": 2}))]);
    assert_eq!(host.refused(std::slice::from_ref(&read)).reason, Reason::Conflict);
    let mut fresh = serde_json::to_value(host.state.object(ObjectKind::QosClass, "c").unwrap()).unwrap();
    fresh["spec"]["weight"] = json!(3);
    assert_eq!(host.apply(&[fresh.clone()]), [Change::Configured]);
    assert_eq!(host.state.object(ObjectKind::QosClass, "c").unwrap().metadata().generation, Some(3));
    fresh["metadata"]["name"] = json!("d");
    assert_eq!(host.refused(&[fresh]).reason, Reason::Conflict);
    assert_eq!(host.refused(&[class("e", json!({})), class("e", json!({}))]).reason, Reason::Invalid);
}

#[test]
fn a_vnic_keeps_its_network_and_address() {
    let mut host = host();
    host.apply(&[named("Network", "n", json!({"cidrs": ["10.1.0.0/16"]}))]);
    host.apply(&[named("Vnic", "v", json!({"network": "n"}))]);
    let address = host.state.vnic("v").unwrap().address.to_string();
    assert_eq!(address, "10.1.0.2");
    assert_eq!(host.apply(&[named("Vnic", "v", json!({"network": "n"}))]), [Change::Unchanged]);
    assert_eq!(host.apply(&[named("Vnic", "v", json!({"network": "n", "addresses": [address]}))]), [Change::Unchanged]);
    assert_eq!(host.refused(&[named("Vnic", "v", json!({"network": "default"}))]).causes[0].field, "spec.network");
    let other = named("Vnic", "v", json!({"network": "n", "addresses": ["10.1.0.9"]}));
    assert_eq!(host.refused(&[other]).causes[0].field, "spec.addresses[0]");
    let moved = named("Network", "n", json!({"cidrs": ["10.2.0.0/16"]}));
    assert_eq!(host.refused(std::slice::from_ref(&moved)).causes[0].field, "spec.cidrs");
    host.run(&Command::Detach { id: "v".into() }).unwrap();
    host.apply(&[moved]);
    // A container that comes with the name of a vNIC that was declared gets that.
    host.apply(&[named("Vnic", "v", json!({"network": "n"}))]);
    assert_eq!(host.attach("v", "n", None), Ok(Change::Unchanged));
    assert_eq!(host.attach("v", "default", None), Err(Reason::AlreadyExists));
}

fn labelled(id: &str, labels: Value) -> Value {
    let mut object = named("Vnic", id, json!({"network": "default"}));
    object["metadata"]["labels"] = labels;
    object
}

#[test]
fn labels_that_say_whose_container_it_is_come_with_the_container_alone() {
    let mut host = host();
    for key in ["engine", "supervisor", "pid", "start_ticks"] {
        let refusal = host.refused(&[labelled("v", json!({ key: "freeflow" }))]);
        assert_eq!(refusal.causes[0].field, format!("metadata.labels.{key}"));
    }
    host.attach_labelled("c", "default", None, &[("engine", "oci"), ("pid", "7"), ("tier", "web")]).unwrap();
    for bad in [json!({"engine": "freeflow"}), json!({"engine": "oci", "pid": "8"}), json!({"supervisor": "1"})] {
        assert_eq!(host.refused(&[labelled("c", bad)]).reason, Reason::Invalid);
    }
    // Objects that are read can be written back, and fields that they do not name stay.
    let same = labelled("c", json!({"engine": "oci", "pid": "7", "tier": "web"}));
    assert_eq!(host.apply(&[same]), [Change::Unchanged]);
    assert_eq!(host.apply(&[labelled("c", json!({"tier": "db"}))]), [Change::Configured]);
    assert_eq!(host.labels("c"), "engine=oci pid=7 tier=db");
    assert_eq!(host.apply(&[named("Vnic", "c", json!({"network": "default"}))]), [Change::Configured]);
    assert_eq!(host.labels("c"), "engine=oci pid=7");
}

#[test]
fn a_container_has_the_labels_that_it_asks_for() {
    let mut host = host();
    host.apply(&[class("c", json!({})), named("Vnic", "v", json!({"network": "default", "qosClass": "c"}))]);
    host.apply(&[labelled("w", json!({"tier": "db", "zone": "a"}))]);
    let asked = [("engine", "oci"), ("pid", "7"), ("tier", "web")];
    assert_eq!(host.attach_labelled("v", "default", None, &asked), Ok(Change::Configured));
    assert_eq!(host.labels("v"), "engine=oci pid=7 tier=web");
    assert_eq!(host.attach_labelled("v", "default", None, &asked), Ok(Change::Unchanged));
    // Declared ones stay, but for those that are given.
    assert_eq!(host.attach_labelled("w", "default", None, &asked), Ok(Change::Configured));
    assert_eq!(host.labels("w"), "engine=oci pid=7 tier=web zone=a");
    // An earlier container's do not.
    let address = host.address("v");
    let next = [("engine", "oci"), ("pid", "8")];
    assert_eq!(host.attach_labelled("v", "default", None, &next), Ok(Change::Configured));
    assert_eq!((host.labels("v").as_str(), host.address("v")), ("engine=oci pid=8", address));
    assert_eq!(host.rebuilt().vnic("v").unwrap().object.metadata.labels.len(), 2);
}

#[test]
fn a_latency_class_is_one_that_there_is() {
    let mut host = host();
    let field = "metadata.labels.freeflow.io/latency-class";
    for bad in ["Low", "", "fast"] {
        let refusal = host.refused(&[labelled("v", json!({"freeflow.io/latency-class": bad}))]);
        assert_eq!((refusal.reason, refusal.causes[0].field.as_str()), (Reason::Invalid, field), "{bad:?}");
        assert!(refusal.message.contains("low, normal, background"), "{refusal}");
        let attached = host.attach_labelled("c", "default", None, &[("freeflow.io/latency-class", bad)]);
        assert_eq!(attached, Err(Reason::Invalid), "{bad:?}");
    }
    for good in ["low", "normal", "background"] {
        host.apply(&[labelled("v", json!({"freeflow.io/latency-class": good}))]);
        host.attach_labelled(good, "default", None, &[("freeflow.io/latency-class", good)]).unwrap();
    }
    assert_eq!(
        host.attach_labelled("v", "default", None, &[("freeflow.io/latency-class", "no")]),
        Err(Reason::Invalid)
    );
    assert_eq!(host.labels("v"), "freeflow.io/latency-class=background");
    // Other kinds have no latency class, and selectors choose what there may be.
    host.apply(&[json!({"apiVersion": "freeflow.io/v1", "kind": "Network",
        "metadata": {"name": "n", "labels": {"freeflow.io/latency-class": "x"}}, "spec": {"cidrs": ["10.1.0.0/24"]}})]);
}

#[test]
fn classes_and_quotas_come_from_the_vnic_or_its_network() {
    let mut host = host();
    host.apply(&[
        class("slow", json!({"vnic": {"rate": "1Gbit"}, "tenant": {"rate": "2Gbit"}, "priority": 1})),
        class("fast", json!({"qp": {"messageRate": "1k"}, "weight": 5})),
        named("Quota", "few", json!({"perVnic": {"qps": 3, "registeredBytes": "1MiB"}, "perNetwork": {"qps": 4}})),
        named("Network", "default", json!({"qosClass": "slow", "quota": "few"})),
        named("Network", "second", json!({"cidrs": ["10.1.0.0/16"], "qosClass": "slow"})),
        named("Vnic", "a", json!({"network": "default"})),
        named("Vnic", "b", json!({"network": "default", "qosClass": "fast"})),
        named("Vnic", "c", json!({"network": "second"})),
    ]);
    let shaping = |id: &str| host.state.shaping_of(host.state.vnic(id).unwrap());
    assert_eq!((shaping("a").vnic.bits_per_s, shaping("a").priority), (Some(1_000_000_000), 1));
    assert_eq!((shaping("b").qp.messages_per_s, shaping("b").weight, shaping("b").tenant), (Some(1000), 5, None));
    // One tenant, one class: one limit.
    assert_eq!(shaping("a").tenant, shaping("c").tenant);
    let limits = host.state.tenant_limits();
    assert_eq!(limits.len(), 1);
    assert_eq!((Some(limits[0].0), limits[0].1.bits_per_s), (shaping("a").tenant, Some(2_000_000_000)));
    let limits = host.state.limits_of(host.state.vnic("a").unwrap(), freeflow_verbs::VnicLimits::default());
    assert_eq!((limits.qp_count_max, limits.registered_bytes_max), (3, 1 << 20));
    let lines = host.state.conditions_of(host.state.vnic("a").unwrap());
    assert!(lines.iter().any(|line| line.contains("1Gbit/s: QosClass slow of network default")), "{lines:?}");
    // A field of a quota that has no effect where it is named is reported.
    host.apply(&[
        named("Quota", "each", json!({"perVnic": {"qps": 3}})),
        named("Vnic", "d", json!({"network": "second", "quota": "few"})),
        named("Vnic", "e", json!({"network": "default", "quota": "few"})),
        named("Vnic", "f", json!({"network": "second", "quota": "each"})),
    ]);
    let reported =
        |id: &str| host.state.conditions_of(host.state.vnic(id).unwrap()).join("; ").contains("only perVnic holds");
    assert_eq!(["a", "d", "e", "f"].map(reported), [false, true, false, false]);
}

#[test]
fn one_tenant_leaves_room_for_the_next() {
    let mut host = host();
    let group =
        |tenant: &str, at: usize| named("Group", &format!("{tenant}-{at}"), json!({"tenant": tenant, "members": []}));
    let groups =
        |tenant: &str, range: core::ops::Range<usize>| -> Vec<Value> { range.map(|at| group(tenant, at)).collect() };
    host.apply(&groups("red", 0..1000));
    host.apply(&groups("red", 1000..2048));
    let refusal = host.refused(&groups("red", 2048..2049));
    assert_eq!(refusal.reason, Reason::Exhausted, "{refusal}");
    // Existing objects may change still.
    host.apply(&groups("red", 0..1));
    host.apply(&groups("blue", 0..1024));
    assert_eq!(host.refused(&groups("blue", 1024..1025)).reason, Reason::Exhausted);
    host.apply(&groups("green", 0..512));
    // In one request, too.
    assert_eq!(host.refused(&groups("white", 0..257)).reason, Reason::Exhausted);
}

#[test]
fn what_selectors_list_is_bounded_for_each_tenant() {
    let mut host = host();
    let group = |tenant: &str, at: usize, count: usize| {
        let cidrs: Vec<String> = (0..count).map(|last| format!("10.0.{at}.{last}/32")).collect();
        let members = vec![json!({"cidrs": cidrs}); 16];
        named("Group", &format!("{tenant}-{at}"), json!({"tenant": tenant, "members": members}))
    };
    assert_eq!(host.refused(&[group("red", 0, 65)]).reason, Reason::Invalid);
    let seven: Vec<Value> = (0..7).map(|at| group("red", at, 64)).collect();
    host.apply(&seven);
    let refusal = host.refused(&[group("red", 7, 64)]);
    assert_eq!(refusal.reason, Reason::Exhausted, "{refusal}");
    host.apply(&[group("blue", 7, 64), group("red", 0, 1)]);
    host.apply(&[group("red", 7, 64)]);
}

#[test]
fn objects_are_bounded_in_bytes() {
    let host = host();
    let ids: Vec<String> = (0..64).map(|at| format!("{at:0>128}")).collect();
    let members = vec![json!({"vnics": ids}); 8];
    let refusal = host.refused(&[named("Group", "g", json!({"tenant": "red", "members": members}))]);
    assert_eq!(refusal.reason, Reason::Invalid, "{refusal}");
    let mut host = host;
    host.apply(&[named("Group", "g", json!({"tenant": "red", "members": members[..1]}))]);
    host.run(&Command::Delete { kind: ObjectKind::Group, name: "g".into(), version: None }).unwrap();
    // Sizes are a part of what is compared.
    assert_eq!(State::of(&host.store.list("", None).unwrap()).unwrap(), host.state);
}

#[test]
fn one_tenant_leaves_bytes_for_the_next() {
    let mut host = host();
    let label = "x".repeat(1000);
    let labels: serde_json::Map<String, Value> = (0..8).map(|at| (at.to_string(), label.clone().into())).collect();
    let member = |at: usize| {
        let mut object = named("Group", &format!("g{at}"), json!({"tenant": "red", "members": []}));
        let members = vec![json!({"labels": labels}); 7];
        object["spec"]["members"] = members.into();
        object
    };
    // Selectors alone would allow 8192 / (7 * 9) = 130 of them, of 56 KiB.
    let objects: Vec<Value> = (0..130).map(member).collect();
    host.apply(&objects);
    let network = named("Network", "n", json!({"tenant": "red", "cidrs": ["10.9.0.0/16"]}));
    host.apply(&[network]);
    let vnic = |at: usize| {
        let mut object = named("Vnic", &format!("v{at}"), json!({"network": "n"}));
        object["metadata"]["labels"] = labels.clone().into();
        object
    };
    let (mut count, mut refusal) = (0, None);
    while refusal.is_none() && count < 10_000 {
        let some: Vec<AnyObject> = (count..count + 500).map(|at| parse_object(&vnic(at)).unwrap()).collect();
        refusal = host.run(&Command::Apply { objects: some }).err();
        count += 500;
    }
    assert_eq!(refusal.expect("there is an end").reason, Reason::Exhausted);
    assert!((2000..4000).contains(&count), "{count}");
    let other = named("Group", "other", json!({"tenant": "blue", "members": [{"labels": labels}]}));
    host.apply(&[other, class("gold", json!({}))]);
}
