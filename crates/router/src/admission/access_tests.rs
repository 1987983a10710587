//! Verdicts, what is counted and noted of them, and what is kept.
use super::*;
use crate::admission::inter_network::PROFILE_COUNT_MAX;
use freeflow_orchestrator::objects::{AccessRuleSpec, NetworkSpec};

const A: NetworkId = NetworkId(1);
const B: NetworkId = NetworkId(2);

fn gid(text: &str) -> Gid {
    Gid::from_ip(text.parse().unwrap())
}

fn who(vnic: &str, app: &str) -> Arc<VnicIdentity> {
    let labels = [("app".to_owned(), app.to_owned())].into_iter().collect();
    Arc::new(VnicIdentity { vnic: vnic.into(), labels, addresses: Vec::new() })
}

/// Networks `a`, and `b`, which is closed; and that what has one label may not talk to what has the other in `a`.
fn rules(denials: &[(&str, &str, &str)], before: Option<&Rules>) -> Arc<Rules> {
    let network = |access| {
        let text = format!("{{\"cidrs\": [\"10.0.0.0/16\"], \"access\": \"{access}\", \"external\": \"{access}\"}}");
        serde_json::from_str::<NetworkSpec>(&text).unwrap()
    };
    let networks = [("a", network("allow")), ("b", network("deny"))];
    let rule = |(name, from, to): &(&str, &str, &str)| {
        let text = format!(
            "{{\"from\": {{\"labels\": {{\"app\": \"{from}\"}}}}, \"to\": {{\"labels\": {{\"app\": \"{to}\"}}}}, \
             \"direction\": \"fromTo\", \"action\": \"deny\"}}"
        );
        ((*name).to_owned(), serde_json::from_str::<AccessRuleSpec>(&text).unwrap())
    };
    let rules: Vec<(String, AccessRuleSpec)> = denials.iter().map(rule).collect();
    let table = AccessTable::compile(
        networks.iter().map(|(name, spec)| (*name, spec)),
        [],
        rules.iter().map(|(name, spec)| (name.as_str(), spec)),
    );
    Arc::new(Rules::new(table, AddressMap::default(), before))
}

fn access(denials: &[(&str, &str, &str)]) -> AccessPolicy {
    let mut access = AccessPolicy::default();
    access.set_network(A, "a");
    access.set_network(B, "b");
    for network in [A, B] {
        access.set_vnic(network, gid("10.0.0.1"), who("v1", "x"));
        access.set_vnic(network, gid("10.0.0.2"), who("v2", "y"));
    }
    access.set_rules(rules(denials, None));
    access.take_change();
    access
}

fn request(network: NetworkId, from: &str, to: &str, traffic: TrafficKind) -> AuthorizationRequest {
    let subject = Subject::From;
    AuthorizationRequest { network, other: network, from: gid(from), to: gid(to), traffic, is_external: false, subject }
}

/// Refusals and disconnections.
fn counts(access: &AccessPolicy, rule: Option<&str>) -> (u64, u64) {
    let counts = access.rules().unwrap().counts_of(rule).unwrap().get();
    (counts.refusals, counts.disconnections)
}

#[test]
fn without_rules_all_may_talk_and_with_them_unknown_networks_may_not() {
    let mut none = AccessPolicy::default();
    assert!(none.authorize(&request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Connection)));
    let mut some = access(&[]);
    assert!(some.authorize(&request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Connection)));
    assert!(!some.authorize(&request(NetworkId(9), "10.0.0.1", "10.0.0.2", TrafficKind::Connection)));
    assert!(!some.authorize(&request(B, "10.0.0.1", "10.0.0.2", TrafficKind::Connection)));
    assert!(some.authorize(&request(B, "10.0.0.1", "10.0.0.1", TrafficKind::Connection)), "itself");
    assert_eq!(counts(&some, None), (2, 0));
}

#[test]
fn refusals_and_violations_are_counted_by_network() {
    let mut access = access(&[("r", "x", "y"), ("s", "y", "x")]);
    let tally = |access: &AccessPolicy, rule: Option<&str>, network| {
        let index = rule.map(|name| access.rules().unwrap().index_of(name));
        let tally = access.tallies().refused.get(&(index.flatten(), Some(network)))?;
        (index != Some(None)).then_some((tally.refusals, tally.disconnections))
    };
    assert!(!access.authorize(&request(A, "10.0.0.2", "10.0.0.1", TrafficKind::Connection)));
    assert!(!access.authorize(&request(A, "10.0.0.2", "10.0.0.1", TrafficKind::Standing)));
    assert!(!access.authorize(&request(B, "10.0.0.1", "10.0.0.3", TrafficKind::Connection)));
    access.note_aim((B, gid("10.0.0.1")), ViolationClass::Request, gid("10.9.0.1"));
    let kind = freeflow_engine::ViolationKind::Message;
    let (from, to) = (gid("10.0.0.1"), gid("10.9.0.1"));
    access.note_violation(&Violation { kind, network: A, from, to, number: 7, owner: None });
    assert_eq!((tally(&access, Some("s"), A), tally(&access, Some("s"), B)), (Some((1, 1)), None));
    assert_eq!((tally(&access, None, A), tally(&access, None, B)), (None, Some((1, 0))));
    let violations = |access: &AccessPolicy| access.tallies().violations.clone().into_iter().collect::<Vec<_>>();
    assert_eq!(
        violations(&access),
        [
            ((Some(A), ViolationClass::Engine(kind)), 1),
            ((Some(B), ViolationClass::Connection), 1),
            ((Some(B), ViolationClass::Request), 1)
        ]
    );
    // The rule has another place.
    let next = rules(&[("a", "x", "z"), ("s", "y", "x")], access.rules().map(Arc::as_ref));
    access.set_rules(next);
    assert_eq!((tally(&access, Some("a"), A), tally(&access, Some("s"), A)), (None, Some((1, 1))));
    assert_eq!(tally(&access, None, B), Some((1, 0)));
    // The rule goes, and a network that has no vNIC left.
    access.networks.remove(&B);
    let next = rules(&[("t", "y", "x")], access.rules().map(Arc::as_ref));
    access.set_rules(next);
    assert!(access.tallies().refused.is_empty());
    assert_eq!(violations(&access), [((Some(A), ViolationClass::Engine(kind)), 1)]);
}

#[test]
fn each_means_has_its_direction_and_is_counted_by_rule() {
    let mut one_way = access(&[("r", "x", "y")]);
    for (traffic, forth, back) in [
        (TrafficKind::Connection, true, true),
        (TrafficKind::Standing, true, true),
        (TrafficKind::Datagram, false, true),
        (TrafficKind::Multicast, false, true),
        // Not counted.
        (TrafficKind::DirectDatagrams, false, true),
    ] {
        assert_eq!(one_way.authorize(&request(A, "10.0.0.1", "10.0.0.2", traffic)), forth);
        assert_eq!(one_way.authorize(&request(A, "10.0.0.2", "10.0.0.1", traffic)), back);
    }
    assert_eq!(counts(&one_way, Some("r")), (2, 0));
    let mut closed = access(&[("r", "x", "y"), ("s", "y", "x")]);
    assert!(!closed.authorize(&request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Connection)));
    assert!(!closed.authorize(&request(A, "10.0.0.2", "10.0.0.1", TrafficKind::Standing)));
    assert_eq!((counts(&closed, Some("r")), counts(&closed, Some("s"))), ((1, 0), (0, 1)));
    // Rules that stay go on counting, wherever they are in the table now.
    let next = rules(&[("a", "x", "z"), ("s", "y", "x")], closed.rules().map(Arc::as_ref));
    closed.set_rules(next);
    assert_eq!((counts(&closed, Some("a")), counts(&closed, Some("s"))), ((0, 0), (0, 1)));
    assert!(closed.rules().unwrap().counts_of(Some("r")).is_none());
    let incidents = closed.take_incidents(Instant(1 << 40));
    let named: Vec<_> = incidents.iter().map(|one| (one.rule.as_deref(), one.vnic.as_deref(), one.deed)).collect();
    assert_eq!(named, [(Some("r"), Some("v1"), Deed::Connection), (Some("s"), Some("v2"), Deed::Disconnect)]);
}

#[test]
fn what_a_withdrawn_rule_disconnects_is_put_down_to_it() {
    let table = |rules: &[(&str, &str)]| {
        let text = "{\"cidrs\": [\"10.0.0.0/16\"], \"access\": \"deny\"}";
        let network = serde_json::from_str::<NetworkSpec>(text).unwrap();
        let rule = |(name, action): &(&str, &str)| {
            let text = format!("{{\"from\": {{}}, \"to\": {{}}, \"action\": \"{action}\"}}");
            ((*name).to_owned(), serde_json::from_str::<AccessRuleSpec>(&text).unwrap())
        };
        let rules: Vec<(String, AccessRuleSpec)> = rules.iter().map(rule).collect();
        let rules = rules.iter().map(|(name, spec)| (name.as_str(), spec));
        Arc::new(Rules::new(AccessTable::compile([("a", &network)], [], rules), AddressMap::default(), None))
    };
    let mut access = access(&[]);
    let ask = |access: &mut AccessPolicy, now: u64| {
        assert!(!access.authorize(&request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Standing)));
        let incidents = access.take_incidents(Instant(now << 40));
        assert_eq!(incidents.len(), 1);
        incidents[0].rule.clone()
    };
    access.set_rules(table(&[("r", "allow")]));
    assert!(access.authorize(&request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Standing)));
    access.set_rules(table(&[]));
    assert_eq!(ask(&mut access, 1).as_deref(), Some("r (withdrawn)"));
    // It was reported by its name before that was forgotten.
    assert!(!access.authorize(&request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Standing)));
    access.set_rules(table(&[]));
    let incidents = access.take_incidents(Instant(2 << 40));
    assert_eq!(incidents[0].rule.as_deref(), Some("r (withdrawn)"));
    assert_eq!(ask(&mut access, 3), None, "that was two changes ago");
    // One that says another thing now decides itself.
    access.set_rules(table(&[("r", "allow")]));
    access.set_rules(table(&[("r", "deny")]));
    assert_eq!(ask(&mut access, 4).as_deref(), Some("r"));
}

#[test]
fn a_rule_about_one_address_is_about_the_vnic() {
    let (four, six) = ("10.0.0.7", "fd00::7");
    let both = || {
        let addresses = vec![four.parse().unwrap(), six.parse().unwrap()];
        Arc::new(VnicIdentity { addresses, ..VnicIdentity::clone(&who("v7", "z")) })
    };
    for cidr in ["fd00::7/128", "10.0.0.7/32"] {
        let network: NetworkSpec = serde_json::from_str(r#"{"cidrs": ["10.0.0.0/16"]}"#).unwrap();
        let rule = format!(r#"{{"from": {{}}, "to": {{"cidr": "{cidr}"}}, "action": "deny"}}"#);
        let rule: AccessRuleSpec = serde_json::from_str(&rule).unwrap();
        let table = AccessTable::compile([("a", &network)], [], [("r", &rule)]);
        let mut access = access(&[]);
        access.set_rules(Arc::new(Rules::new(table, AddressMap::default(), None)));
        for text in [four, six] {
            access.set_vnic(A, gid(text), both());
            assert!(!access.authorize(&request(A, "10.0.0.1", text, TrafficKind::Connection)), "{cidr} {text}");
            access.remove_vnic(A, gid(text));
            access.set_remote(A, gid(text), Some(both()));
            assert!(
                !access.authorize(&request(A, "10.0.0.1", text, TrafficKind::Datagram)),
                "{cidr} {text}, elsewhere"
            );
        }
    }
}

#[test]
fn labels_of_here_and_elsewhere_change_verdicts() {
    let mut access = access(&[("r", "x", "y")]);
    let ask =
        |access: &mut AccessPolicy, to: &str| access.authorize(&request(A, "10.0.0.1", to, TrafficKind::Datagram));
    assert!(ask(&mut access, "10.0.9.9"), "nobody");
    access.set_vnic(A, gid("10.0.0.2"), who("v2", "z"));
    assert!(access.take_change() && !access.take_change());
    assert!(ask(&mut access, "10.0.0.2"));
    access.set_remote(A, gid("10.0.1.1"), None);
    assert!(access.take_change() && ask(&mut access, "10.0.1.1"), "its labels are not known");
    access.set_remote(A, gid("10.0.1.1"), Some(who("v9", "y")));
    assert!(access.take_change() && !ask(&mut access, "10.0.1.1"));
    access.set_remote(A, gid("10.0.0.2"), Some(who("liar", "y")));
    assert!(!access.take_change() && ask(&mut access, "10.0.0.2"), "it is here");
    access.remove_remote(A, gid("10.0.0.2"));
    assert!(!access.take_change());
    access.remove_vnic(A, gid("10.0.0.2"));
    assert!(access.take_change());
}

#[test]
fn what_quotas_refuse_is_reported_as_sums() {
    use crate::admission::violations::{Resource, Share, ViolationClass};
    let mut access = AccessPolicy::default();
    let (qps, bytes) = ((Share::Vnic, Resource::Qps), (Share::Network, Resource::RegisteredBytes));
    for (share, resource) in [qps, qps, bytes] {
        access.note_shortage((A, gid("10.0.0.1")), share, resource, 3);
    }
    let reported = |access: &mut AccessPolicy, now: u64| -> Vec<_> {
        access
            .take_violations(Instant(now))
            .into_iter()
            .map(|reported| (reported.class, reported.peer, reported.count))
            .collect()
    };
    let line = |(share, resource), count| (ViolationClass::Quota(share, resource), String::new(), count);
    assert_eq!(reported(&mut access, 1 << 40), [line(qps, 6), line(bytes, 3)]);
    // Repeated requests are reported now and then.
    for _ in 0..100_000 {
        access.note_shortage((A, gid("10.0.0.1")), qps.0, qps.1, 1);
    }
    assert_eq!(reported(&mut access, (1 << 40) + 1_000_000_000), []);
    assert_eq!(reported(&mut access, (1 << 40) + 11_000_000_000), [line(qps, 100_000)]);
}

#[test]
fn machines_outside_are_the_networks_to_allow() {
    let mut access = access(&[("r", "x", "y")]);
    for (network, allowed) in [(A, true), (B, false)] {
        let out = AuthorizationRequest {
            is_external: true,
            ..request(network, "10.0.0.1", "192.0.2.9", TrafficKind::Connection)
        };
        assert_eq!(access.authorize(&out), allowed);
    }
    // The second address is no way around the rules.
    let around =
        AuthorizationRequest { is_external: true, ..request(A, "10.0.0.1", "10.0.0.2", TrafficKind::Datagram) };
    assert!(!access.authorize(&around));
}

#[test]
fn violations_are_reported_with_their_owner() {
    let mut access = access(&[]);
    access.set_vnic(B, gid("10.0.0.9"), who("v9", "z"));
    for to in ["10.0.0.2", "10.0.0.9", "10.0.7.7"] {
        assert!(access.authorize(&request(A, "10.0.0.1", to, TrafficKind::Connection)));
        let now = Instant(1 << 40) + access.due_in(Instant(0)).unwrap_or_default();
        let reported = access.take_violations(now);
        assert_eq!(access.due_in(now), None);
        assert!(access.take_violations(now).is_empty());
        let expected = match to {
            "10.0.0.2" => Vec::new(),
            "10.0.0.9" => vec![Some("b")],
            _ => vec![None],
        };
        assert_eq!(reported.iter().map(|one| one.owner.as_deref()).collect::<Vec<_>>(), expected, "{to}");
        for one in reported {
            assert_eq!((one.network.as_str(), one.vnic.as_deref(), one.count), ("a", Some("v1"), 1));
            assert!(one.peer.ends_with(to), "{}", one.peer);
        }
        access.violations = Violations::default();
    }
    let outside =
        AuthorizationRequest { is_external: true, ..request(A, "10.0.0.1", "192.0.2.9", TrafficKind::Connection) };
    access.authorize(&outside);
    assert_eq!(access.due_in(Instant(0)), None, "a machine outside is nobody's address");
}

#[test]
fn unknown_addresses_are_looked_up_once_and_few_are_kept() {
    let mut access = access(&[("r", "x", "y")]);
    let ask =
        |access: &mut AccessPolicy, to: &str| access.authorize(&request(A, "10.0.0.1", to, TrafficKind::Connection));
    ask(&mut access, "10.0.9.9");
    let work = access.work();
    assert!(work > 0);
    for _ in 0..100 {
        assert!(ask(&mut access, "10.0.9.9"));
    }
    assert_eq!(access.work(), work, "nothing was looked at again");
    for number in 0..3000 {
        ask(&mut access, &format!("10.0.{}.{}", 100 + number / 250, number % 250));
    }
    assert_eq!(access.unknown.len(), UNKNOWN_COUNT_MAX);
    access.set_remote(A, gid("10.0.9.9"), Some(who("v9", "y")));
    assert!(!access.authorize(&request(A, "10.0.0.1", "10.0.9.9", TrafficKind::Datagram)), "no stranger any more");
    access.set_rules(rules(&[], None));
    assert!(access.unknown.is_empty());
}

#[test]
fn what_waits_to_be_reported_is_bounded_for_each() {
    let mut access = access(&[("r", "x", "y")]);
    for number in 0..200 {
        access.set_remote(A, gid(&format!("10.0.1.{number}")), Some(who("v", "y")));
        for _ in 0..3 {
            assert!(!access.authorize(&request(A, "10.0.0.1", &format!("10.0.1.{number}"), TrafficKind::Datagram)));
        }
    }
    assert!(!access.authorize(&request(B, "10.0.0.2", "10.0.0.1", TrafficKind::Datagram)));
    assert_eq!(counts(&access, Some("r")), (600, 0));
    let now = Instant(1 << 40);
    let incidents = access.take_incidents(now);
    assert_eq!(incidents.len(), INCIDENT_OF_VNIC_COUNT_MAX + 1, "the other one is not pushed out");
    assert_eq!(incidents[0].count, 3);
    assert!(!access.authorize(&request(B, "10.0.0.2", "10.0.0.1", TrafficKind::Datagram)));
    assert_eq!((access.take_incidents(now).len(), access.due_in(now)), (0, Some(REPORT_INTERVAL)));
    assert_eq!(access.take_incidents(now + REPORT_INTERVAL).len(), 1);
}

const C: NetworkId = NetworkId(3);
/// Of another tenant, with the addresses of `b`.
const Z: NetworkId = NetworkId(4);

/// Open networks `a`, `b` and `c` of one tenant, `z` of another one; and rules by name.
fn across(rules: &[(&str, &str)], before: Option<&Rules>) -> Arc<Rules> {
    let all = [
        (A, "a", "red", "10.0.0.0/16", ("10.0.0.0", "10.0.255.255")),
        (B, "b", "red", "10.1.0.0/16", ("10.1.0.0", "10.1.255.255")),
        (C, "c", "red", "10.2.0.0/16", ("10.2.0.0", "10.2.255.255")),
        (Z, "z", "blue", "10.1.0.0/16", ("10.1.0.0", "10.1.255.255")),
    ];
    let network = |tenant, cidr| {
        let text = format!(r#"{{"tenant": "{tenant}", "cidrs": ["{cidr}"], "access": "allow", "external": "allow"}}"#);
        serde_json::from_str::<NetworkSpec>(&text).unwrap()
    };
    let networks = all.map(|(_, name, tenant, cidr, _)| (name, network(tenant, cidr)));
    let rule = |(name, text): &(&str, &str)| {
        let text = format!(r#"{{"tenant": "red", {text}}}"#);
        ((*name).to_owned(), serde_json::from_str::<AccessRuleSpec>(&text).unwrap())
    };
    let rules: Vec<(String, AccessRuleSpec)> = rules.iter().map(rule).collect();
    let rules = rules.iter().map(|(name, spec)| (name.as_str(), spec));
    let table = AccessTable::compile(networks.iter().map(|(name, spec)| (*name, spec)), [], rules);
    let ranges = |(first, last)| [(gid(first), gid(last))].into_iter();
    let address_map = AddressMap::new(all.into_iter().map(|(id, _, tenant, _, range)| (id, tenant, ranges(range))));
    let address_map = address_map.named(all.into_iter().map(|(id, name, ..)| (id, name)));
    Arc::new(Rules::new(table, address_map, before))
}

/// From `x` of `a` to `y` of `b`.
const X_TO_Y: &str = r#""from": {"network": "a", "labels": {"app": "x"}}, "to": {"network": "b", "labels": {"app": "y"}},
    "direction": "fromTo", "action": "allow""#;
/// From all of `a` to all of `b`.
const ALL: &str = r#""from": {"network": "a"}, "to": {"network": "b"}, "direction": "both", "action": "allow""#;
/// And nobody with `y`.
const NOT_Y: &str = r#""from": {}, "to": {"labels": {"app": "y"}}, "direction": "fromTo", "action": "deny""#;

/// `x` and `y` here in `a`, the others elsewhere.
fn apart(rules: &[(&str, &str)]) -> AccessPolicy {
    let mut access = AccessPolicy::default();
    access.set_network(A, "a");
    for (end, app) in [("0.1", "x"), ("0.2", "y")] {
        access.set_vnic(A, gid(&format!("10.0.{end}")), who(&format!("a{app}"), app));
        access.set_remote(B, gid(&format!("10.1.{end}")), Some(who(&format!("b{app}"), app)));
        access.set_remote(C, gid(&format!("10.2.{end}")), Some(who(&format!("c{app}"), app)));
        access.set_remote(Z, gid(&format!("10.1.{end}")), Some(who(&format!("z{app}"), app)));
    }
    access.set_rules(across(rules, None));
    access.take_change();
    access
}

/// From the network `a`, to where the address is for that.
fn out(access: &AccessPolicy, from: &str, to: &str, traffic: TrafficKind) -> AuthorizationRequest {
    AuthorizationRequest { other: access.network_at(A, gid(to)), ..request(A, from, to, traffic) }
}

/// To the network `a`.
fn came(access: &AccessPolicy, from: &str, to: &str, traffic: TrafficKind) -> AuthorizationRequest {
    AuthorizationRequest {
        other: access.network_at(A, gid(from)),
        subject: Subject::To,
        ..request(A, from, to, traffic)
    }
}

fn ask(access: &mut AccessPolicy, from: &str, to: &str, traffic: TrafficKind) -> bool {
    let request = out(access, from, to, traffic);
    access.authorize(&request)
}

const ALL_TRAFFIC: [TrafficKind; 4] =
    [TrafficKind::Connection, TrafficKind::Standing, TrafficKind::Datagram, TrafficKind::Multicast];

#[test]
fn nothing_goes_across_without_a_rule_of_the_two_networks() {
    let everybody = r#""from": {}, "to": {}, "action": "allow""#;
    let mut access = apart(&[("r", everybody)]);
    let work = access.work();
    // Somebody, and nobody.
    for (to, network) in [("10.1.0.1", B), ("10.1.9.9", B), ("10.2.0.1", C), ("10.2.9.9", C)] {
        assert_eq!(access.network_at(A, gid(to)), network);
        for traffic in ALL_TRAFFIC {
            assert!(!ask(&mut access, "10.0.0.1", to, traffic), "{to} {traffic:?}");
            let back = came(&access, to, "10.0.0.1", traffic);
            assert!(!access.authorize(&back), "from {to} {traffic:?}");
        }
    }
    assert!(ask(&mut access, "10.0.0.1", "10.0.0.2", TrafficKind::Connection), "in one network");
    assert_eq!((counts(&access, None), counts(&access, Some("r"))), ((24, 8), (0, 0)));
    assert_eq!((access.work(), access.across.len()), (work, 0), "nobody was looked at");
    // One address in two networks is two.
    let one = AuthorizationRequest { other: B, ..request(A, "10.0.0.1", "10.0.0.1", TrafficKind::Connection) };
    assert!(!access.authorize(&one));
    // Without rules nobody is asked, and nothing is in another network.
    let mut none = AccessPolicy::default();
    assert_eq!(none.network_at(A, gid("10.1.0.1")), A);
    let pair = Pair { from: (A, gid("10.0.0.1")), to: (B, gid("10.1.0.1")), is_external: false };
    assert!(!none.may_begin(&pair, Deed::Request) && !none.may_be_connected(&pair, Deed::DisconnectRequest));
}

#[test]
fn a_rule_of_two_networks_allows_in_its_direction_what_it_chooses() {
    let mut access = apart(&[("r", X_TO_Y)]);
    for traffic in ALL_TRAFFIC {
        assert!(ask(&mut access, "10.0.0.1", "10.1.0.2", traffic), "x to y, {traffic:?}");
        assert!(!ask(&mut access, "10.0.0.1", "10.1.0.1", traffic), "x to x, {traffic:?}");
        assert!(!ask(&mut access, "10.0.0.2", "10.1.0.2", traffic), "y to y, {traffic:?}");
        assert!(!ask(&mut access, "10.0.0.1", "10.2.0.2", traffic), "to c, {traffic:?}");
        let is_connected = matches!(traffic, TrafficKind::Connection | TrafficKind::Standing);
        let back = came(&access, "10.1.0.2", "10.0.0.1", traffic);
        assert_eq!(access.authorize(&back), is_connected, "back, {traffic:?}");
    }
    // To nobody, as in one network.
    assert!(ask(&mut access, "10.0.0.2", "10.1.9.9", TrafficKind::Datagram));
    assert!(!ask(&mut access, "10.0.0.2", "10.1.9.9", TrafficKind::Connection));
}

#[test]
fn rules_that_deny_hold_across_and_are_named_with_the_network() {
    let mut access = apart(&[("all", ALL), ("not-y", NOT_Y)]);
    assert!(ask(&mut access, "10.0.0.1", "10.1.0.1", TrafficKind::Datagram));
    assert!(!ask(&mut access, "10.0.0.1", "10.1.0.2", TrafficKind::Datagram));
    assert!(!ask(&mut access, "10.0.0.1", "10.2.0.1", TrafficKind::Connection));
    assert_eq!((counts(&access, Some("not-y")), counts(&access, None)), ((1, 0), (1, 0)));
    let reported = access.take_incidents(Instant(1 << 40));
    let reported: Vec<_> =
        reported.iter().map(|one| (one.network.as_str(), one.target.as_deref(), one.rule.as_deref())).collect();
    assert_eq!(reported, [("a", Some("b"), Some("not-y")), ("a", Some("c"), None)]);
    // In one network there is no other.
    assert!(!ask(&mut access, "10.0.0.1", "10.0.0.2", TrafficKind::Datagram));
    assert_eq!(access.take_incidents(Instant(2 << 40))[0].target, None);
}

#[test]
fn connections_across_end_with_the_rule() {
    let mut access = apart(&[("r", X_TO_Y)]);
    let stands = |access: &mut AccessPolicy| ask(access, "10.0.0.1", "10.1.0.2", TrafficKind::Standing);
    assert!(stands(&mut access));
    access.set_rules(across(&[], access.rules().map(Arc::as_ref)));
    assert!(access.take_change() && !stands(&mut access));
    let reported = access.take_incidents(Instant(1 << 40));
    assert_eq!((reported[0].deed, reported[0].rule.as_deref()), (Deed::Disconnect, Some("r (withdrawn)")));
    assert_eq!((reported[0].network.as_str(), reported[0].target.as_deref()), ("a", Some("b")));
    assert_eq!(counts(&access, None), (0, 1));
    // It allowed nothing to those.
    assert!(!ask(&mut access, "10.0.0.1", "10.2.0.2", TrafficKind::Standing));
    assert_eq!(access.take_incidents(Instant(2 << 40))[0].rule, None);
    access.set_rules(across(&[("r", X_TO_Y)], None));
    assert!(stands(&mut access));
}

#[test]
fn who_comes_to_a_joined_network_matters_also_where_all_may_talk() {
    let arrive = |access: &mut AccessPolicy, network, text: &str| {
        access.set_remote(network, gid(text), Some(who("new", "y")));
        access.take_change()
    };
    for (rules, is_joined) in [(&[][..], false), (&[("all", ALL)][..], true)] {
        let mut access = apart(rules);
        access.set_network(B, "b");
        access.set_network(C, "c");
        access.take_change();
        for (network, text) in [(A, "10.0.9.9"), (B, "10.1.9.9")] {
            assert_eq!(arrive(&mut access, network, text), is_joined, "{text} comes");
            access.remove_remote(network, gid(text));
            assert_eq!(access.take_change(), is_joined, "{text} goes");
        }
        assert!(!arrive(&mut access, C, "10.2.9.9"), "c is open, and not joined");
    }
    // A datagram may go to nobody, and so to whoever comes there until something changes.
    let mut access = apart(&[("all", ALL), ("not-y", NOT_Y)]);
    let sends = |access: &mut AccessPolicy| ask(access, "10.0.0.1", "10.1.9.9", TrafficKind::Datagram);
    assert!(sends(&mut access));
    assert!(arrive(&mut access, B, "10.1.9.9") && !sends(&mut access));
}

#[test]
fn what_is_kept_of_those_across_is_bounded_and_dropped_with_who_it_is_of() {
    let mut access = apart(&[("r", X_TO_Y)]);
    let sends = |access: &mut AccessPolicy, to: &str| ask(access, "10.0.0.1", to, TrafficKind::Datagram);
    assert!(sends(&mut access, "10.1.0.2"));
    let work = access.work();
    assert_eq!((access.across.len(), work > 0), (2, true));
    assert!(sends(&mut access, "10.1.0.2"));
    assert_eq!(access.work(), work, "nobody was looked at again");
    // Other labels, here and elsewhere.
    access.set_remote(B, gid("10.1.0.2"), Some(who("by", "x")));
    assert_eq!(access.across.len(), 1);
    assert!(!sends(&mut access, "10.1.0.2"));
    access.set_remote(B, gid("10.1.0.2"), Some(who("by", "y")));
    assert!(sends(&mut access, "10.1.0.2"));
    access.set_vnic(A, gid("10.0.0.1"), who("ax", "y"));
    assert!(!sends(&mut access, "10.1.0.2"));
    access.set_vnic(A, gid("10.0.0.1"), who("ax", "x"));
    assert!(sends(&mut access, "10.1.0.2"));
    access.remove_remote(B, gid("10.1.0.2"));
    assert_eq!(access.across.len(), 1);
    for number in 0..PROFILE_COUNT_MAX + 100 {
        let to = format!("10.1.{}.{}", 1 + number / 250, number % 250);
        assert!(!ask(&mut access, "10.0.0.1", &to, TrafficKind::Connection), "{to}");
    }
    assert_eq!(access.across.len(), PROFILE_COUNT_MAX);
    access.set_rules(across(&[("r", X_TO_Y)], None));
    assert_eq!(access.across.len(), 0);
}

#[test]
fn another_tenants_network_with_the_same_addresses_is_never_reached() {
    let to_z = r#""from": {"network": "a"}, "to": {"network": "z"}, "action": "allow""#;
    let mut access = apart(&[("all", ALL), ("z", to_z)]);
    assert_eq!(access.network_at(A, gid("10.1.0.1")), B);
    assert_eq!(access.network_at(Z, gid("10.0.0.1")), Z);
    for traffic in ALL_TRAFFIC {
        let request = request(A, "10.0.0.1", "10.1.0.1", traffic);
        assert!(!access.authorize(&AuthorizationRequest { other: Z, ..request }), "{traffic:?}");
        assert!(
            !access.authorize(&AuthorizationRequest { network: Z, other: A, subject: Subject::To, ..request }),
            "{traffic:?}"
        );
        assert!(access.authorize(&AuthorizationRequest { other: B, ..request }), "{traffic:?}");
    }
    // An aimed-at address is looked for in the tenant's own network first.
    access.set_network(Z, "z");
    let aimed = Violation {
        kind: freeflow_engine::ViolationKind::Message,
        network: A,
        from: gid("10.0.0.1"),
        to: gid("10.1.0.1"),
        number: 7,
        owner: None,
    };
    access.note_violation(&aimed);
    let reported = access.take_violations(Instant(1 << 40));
    assert_eq!((reported[0].network.as_str(), reported[0].owner.as_deref()), ("a", Some("b")));
}

#[test]
fn machines_outside_are_judged_by_the_own_network_whatever_is_joined() {
    let mut access = apart(&[("all", ALL)]);
    let outside = |to: &str| AuthorizationRequest {
        is_external: true,
        other: B,
        ..request(A, "10.0.0.1", to, TrafficKind::Connection)
    };
    assert!(access.authorize(&outside("192.0.2.9")) && access.authorize(&outside("10.1.0.1")));
    let closed = r#"{"cidrs": ["10.0.0.0/16"], "external": "deny"}"#;
    let network: NetworkSpec = serde_json::from_str(closed).unwrap();
    let table = AccessTable::compile([("a", &network)], [], []);
    access.set_rules(Arc::new(Rules::new(table, AddressMap::default(), None)));
    assert!(!access.authorize(&outside("192.0.2.9")) && !access.authorize(&outside("10.1.0.1")));
    access.set_rules(across(&[("all", ALL)], None));
    let pair = Pair { from: (A, gid("10.0.0.1")), to: (B, gid("10.1.0.1")), is_external: true };
    assert!(!access.may_begin(&pair, Deed::Request), "no machine outside is in another network");
}
