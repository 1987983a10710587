//! Rules as written, and the compiled table against the rules read one after the other.
use super::*;
use alloc::format;
use alloc::string::ToString;
use alloc::vec;
use proptest::prelude::*;
use proptest::sample::select;

fn network(tenant: &str, access: Access) -> NetworkSpec {
    NetworkSpec {
        tenant: tenant.into(),
        cidrs: vec!["10.0.0.0/16".into()],
        range: None,
        floating: None,
        data_path: Default::default(),
        access,
        external: Access::Allow,
        qos_class: None,
        quota: None,
    }
}

fn rule(from: EndSelector, to: EndSelector, action: Access, order: i32) -> AccessRuleSpec {
    AccessRuleSpec { tenant: "red".into(), from, to, direction: AccessDirection::FromTo, action, order }
}

fn labelled(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn by_label(value: &str) -> EndSelector {
    EndSelector { labels: labelled(&[("app", value)]), ..Default::default() }
}

#[derive(Debug)]
struct Someone {
    network: &'static str,
    vnic: String,
    address: IpAddr,
    labels: Labels,
    is_known: bool,
}

impl Someone {
    fn new(network: &'static str, last: u8, app: &str) -> Self {
        let address = format!("10.0.0.{last}").parse().unwrap();
        Self { network, vnic: format!("v{last}"), address, labels: labelled(&[("app", app)]), is_known: true }
    }

    fn party(&self) -> Party<'_> {
        let known = self.is_known.then_some(Known { vnic: &self.vnic, labels: &self.labels });
        Party { network: self.network, addresses: core::slice::from_ref(&self.address), known }
    }
}

fn table(access: Access, rules: &[(&str, AccessRuleSpec)], groups: &[(&str, GroupSpec)]) -> AccessTable {
    let networks = [("a", "red"), ("b", "red"), ("c", "blue"), ("d", "red"), ("e", "blue")];
    let networks = networks.map(|(name, tenant)| (name, network(tenant, access)));
    AccessTable::compile(
        networks.iter().map(|(name, spec)| (*name, spec)),
        groups.iter().map(|(name, spec)| (*name, spec)),
        rules.iter().map(|(name, spec)| (*name, spec)),
    )
}

fn profiles(table: &AccessTable, one: &Someone, other: &Someone) -> [Profile; 2] {
    match one.network == other.network {
        true => [one, other].map(|who| table.profile(&who.party())),
        false => [(one, other), (other, one)].map(|(who, other)| table.profile_across(&who.party(), other.network)),
    }
}

fn says(table: &AccessTable, from: &Someone, to: &Someone) -> (bool, Option<String>) {
    let [from, to] = profiles(table, from, to);
    let verdict = table.decide(&from, &to);
    (verdict.allowed, verdict.rule.and_then(|rule| table.rule_name(rule)).map(Into::into))
}

#[test]
fn the_default_is_the_networks_and_nothing_crosses() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("a", 2, "y"));
    assert_eq!(says(&table(Access::Allow, &[], &[]), &x, &y), (true, None));
    assert_eq!(says(&table(Access::Deny, &[], &[]), &x, &y), (false, None));
    let all = rule(EndSelector::default(), EndSelector::default(), Access::Allow, 9);
    let open = table(Access::Allow, &[("all", all)], &[]);
    for (one, other) in [("a", "b"), ("a", "c"), ("nowhere", "nowhere")] {
        assert_eq!(says(&open, &Someone::new(one, 1, "x"), &Someone::new(other, 2, "x")), (false, None));
    }
}

#[test]
fn the_highest_order_decides_and_of_equals_a_denial() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("a", 2, "y"));
    let make = |action, order| rule(by_label("x"), by_label("y"), action, order);
    let rules = [("low", make(Access::Deny, 1)), ("high", make(Access::Allow, 2))];
    assert_eq!(says(&table(Access::Allow, &rules, &[]), &x, &y), (true, Some("high".into())));
    let rules = [("a", make(Access::Allow, 1)), ("z", make(Access::Deny, 1))];
    assert_eq!(says(&table(Access::Allow, &rules, &[]), &x, &y), (false, Some("z".into())));
}

#[test]
fn only_groups_that_rules_name_are_looked_at() {
    let large = || {
        let cidrs = (0..64).map(|last| format!("10.1.0.{last}")).collect();
        GroupSpec { tenant: "red".into(), members: vec![VnicSelector { cidrs, ..Default::default() }; 16] }
    };
    let of_group = |group: &str| EndSelector { group: Some(group.into()), ..Default::default() };
    let rules = [("one", rule(of_group("used"), by_label("y"), Access::Deny, 0))];
    let groups = [("unused", large()), ("used", large())];
    let one = table(Access::Allow, &rules, &groups[1..]);
    let two = table(Access::Allow, &rules, &groups);
    assert!(one.work("a") > 1000);
    assert_eq!((two.work("a"), two.work("c"), two.work("nowhere")), (one.work("a"), 0, 0));
}

#[test]
fn direction_groups_and_strangers() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("a", 2, "y"));
    let member = VnicSelector { vnics: vec!["v2".into()], ..Default::default() };
    let group = GroupSpec { tenant: "red".into(), members: vec![member] };
    let to_group = EndSelector { group: Some("servers".into()), ..Default::default() };
    let one_way = rule(by_label("x"), to_group, Access::Allow, 0);
    let groups = [("servers", group)];
    let closed = table(Access::Deny, &[("in", one_way.clone())], &groups);
    assert_eq!(says(&closed, &x, &y), (true, Some("in".into())));
    assert_eq!(says(&closed, &y, &x), (false, None));
    let (px, py) = (closed.profile(&x.party()), closed.profile(&y.party()));
    assert!(closed.decide_connection(&py, &px).allowed && closed.decide_connection(&px, &py).allowed);
    let both = AccessRuleSpec { direction: AccessDirection::Both, ..one_way };
    assert!(says(&table(Access::Deny, &[("in", both)], &groups), &y, &x).0);
    let stranger = Someone { is_known: false, ..Someone::new("a", 2, "y") };
    assert_eq!(says(&closed, &x, &stranger), (false, None), "its id is not known");
    let blue = GroupSpec { tenant: "blue".into(), members: vec![VnicSelector::default()] };
    let rules = [(
        "in",
        rule(by_label("x"), EndSelector { group: Some("servers".into()), ..Default::default() }, Access::Allow, 0),
    )];
    assert!(!says(&table(Access::Deny, &rules, &[("servers", blue)]), &x, &y).0, "another tenant's group");
}

#[test]
fn addresses_are_matched_by_prefix() {
    for (text, address, holds) in [
        ("10.0.0.0/24", "10.0.0.255", true),
        ("10.0.0.0/24", "10.0.1.0", false),
        ("0.0.0.0/0", "255.255.255.255", true),
        ("10.0.0.7", "10.0.0.7", true),
        ("10.0.0.7/32", "10.0.0.6", false),
        ("fd00::/8", "fdff::1", true),
        ("::/0", "10.0.0.1", false),
        ("fd00::1/128", "fd00::2", false),
    ] {
        assert_eq!(text.parse::<Cidr>().unwrap().contains(address.parse().unwrap()), holds, "{text} {address}");
    }
    for bad in ["", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/-1", "x/8"] {
        assert!(bad.parse::<Cidr>().is_err(), "{bad}");
    }
}

#[test]
fn thousands_of_rules_are_found_in_their_order() {
    let rules: Vec<(String, AccessRuleSpec)> = (0..5000)
        .map(|n| (format!("r{n:05}"), rule(by_label(&format!("x{}", n % 50)), by_label("y"), Access::Deny, n)))
        .collect();
    let net = network("red", Access::Allow);
    let table = AccessTable::compile([("a", &net)], [], rules.iter().map(|(name, spec)| (name.as_str(), spec)));
    let (x, y) = (Someone::new("a", 1, "x7"), Someone::new("a", 2, "y"));
    assert_eq!(says(&table, &x, &y), (false, Some("r04957".into())));
    assert!(!table.is_open("a"));
}

// ---- across two networks

fn of_network(network: &str) -> EndSelector {
    EndSelector { network: Some(network.into()), ..Default::default() }
}

/// Denies everybody, before all others.
fn nobody() -> AccessRuleSpec {
    rule(EndSelector::default(), EndSelector::default(), Access::Deny, 100)
}

#[test]
fn only_rules_that_name_two_networks_join_them() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("b", 2, "y"));
    let everybody = EndSelector::default;
    for (from, to, action) in [
        (everybody(), everybody(), Access::Allow),
        (of_network("a"), everybody(), Access::Allow),
        (everybody(), of_network("b"), Access::Allow),
        (of_network("a"), of_network("a"), Access::Allow),
        (by_label("x"), by_label("y"), Access::Allow),
        (of_network("a"), of_network("d"), Access::Allow),
        (of_network("a"), of_network("nowhere"), Access::Allow),
        (of_network("a"), of_network("b"), Access::Deny),
    ] {
        let text = format!("{from:?} {to:?} {action:?}");
        let table = table(Access::Allow, &[("r", rule(from, to, action, 9))], &[]);
        assert!(!table.joins("a", "b") && !table.is_joined("b"), "{text}");
        assert_eq!((says(&table, &x, &y), table.work_across("a", "b")), ((false, None), 0), "{text}");
    }
    // Each of these beside one that joins them allows no more than it.
    let only_z =
        rule(EndSelector { labels: labelled(&[("app", "z")]), ..of_network("a") }, of_network("b"), Access::Allow, 0);
    let all = rule(everybody(), everybody(), Access::Allow, 9);
    let half = rule(of_network("a"), everybody(), Access::Allow, 9);
    let rules = [("all", all), ("half", half), ("z", only_z)];
    let table = table(Access::Allow, &rules, &[]);
    assert!(table.joins("a", "b") && table.joins("b", "a") && !table.joins("a", "d") && !table.joins("a", "a"));
    assert!(table.is_joined("a") && table.is_joined("b") && !table.is_joined("d") && !table.is_joined("nowhere"));
    assert_eq!(says(&table, &x, &y), (false, None), "the default across is to deny, though the networks' is not");
    assert_eq!(says(&table, &Someone::new("a", 3, "z"), &y), (true, Some("z".into())));
    assert_eq!(says(&table, &y, &Someone::new("a", 3, "z")), (false, None));
    assert!(table.is_open("a") && table.is_open("b"), "nothing changes within either");
    assert!(table.work_across("a", "b") > 0 && table.work_across("b", "a") == table.work_across("a", "b"));
}

#[test]
fn direction_is_of_rules_across_too() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("b", 2, "y"));
    let one_way = rule(of_network("a"), of_network("b"), Access::Allow, 0);
    let both = AccessRuleSpec { direction: AccessDirection::Both, ..one_way.clone() };
    let one = table(Access::Deny, &[("r", one_way)], &[]);
    assert_eq!(says(&one, &x, &y), (true, Some("r".into())));
    assert_eq!(says(&one, &y, &x), (false, None));
    let [of_x, of_y] = profiles(&one, &x, &y);
    assert!(one.decide_connection(&of_x, &of_y).allowed && one.decide_connection(&of_y, &of_x).allowed);
    let table = table(Access::Deny, &[("r", both)], &[]);
    assert!(says(&table, &x, &y).0 && says(&table, &y, &x).0);
}

#[test]
fn denials_hold_across_by_their_order() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("b", 2, "y"));
    let join = || rule(of_network("a"), of_network("b"), Access::Allow, 5);
    let everybody = EndSelector::default;
    for (from, to, order, denies) in [
        (everybody(), everybody(), 6, true),
        (everybody(), everybody(), 5, true),
        (everybody(), everybody(), 4, false),
        (of_network("a"), of_network("b"), 6, true),
        (of_network("a"), of_network("b"), 4, false),
        (of_network("a"), everybody(), 6, true),
        (everybody(), of_network("b"), 6, true),
        (by_label("x"), by_label("y"), 6, true),
        // Those of other ends.
        (of_network("b"), everybody(), 6, false),
        (everybody(), of_network("a"), 6, false),
        (of_network("b"), of_network("a"), 6, false),
        (of_network("a"), of_network("a"), 6, false),
        (of_network("a"), of_network("d"), 6, false),
        (by_label("y"), by_label("x"), 6, false),
    ] {
        let text = format!("{from:?} {to:?} {order}");
        let rules = [("join", join()), ("no", rule(from, to, Access::Deny, order))];
        let name = if denies { "no" } else { "join" };
        assert_eq!(says(&table(Access::Allow, &rules, &[]), &x, &y), (!denies, Some(name.into())), "{text}");
    }
    // Either side may begin.
    let no = rule(of_network("b"), everybody(), Access::Deny, 6);
    let both = AccessRuleSpec { direction: AccessDirection::Both, ..no };
    assert!(!says(&table(Access::Allow, &[("join", join()), ("no", both)], &[]), &x, &y).0);
}

#[test]
fn each_end_is_chosen_as_anywhere() {
    let (x, y) = (Someone::new("a", 1, "x"), Someone::new("b", 2, "y"));
    let vnics = |name: &str| VnicSelector { vnics: vec![name.into()], ..Default::default() };
    let in_network = |network: &str| VnicSelector { networks: vec![network.into()], ..Default::default() };
    let group = |tenant: &str, member| GroupSpec { tenant: tenant.into(), members: vec![member] };
    let groups = [
        ("first", group("red", vnics("v1"))),
        ("second", group("red", vnics("v2"))),
        ("of-a", group("red", in_network("a"))),
        ("of-b", group("red", in_network("b"))),
        ("theirs", group("blue", VnicSelector::default())),
    ];
    let of_group = |name: &str| EndSelector { group: Some(name.into()), ..Default::default() };
    let cidr = |text: &str| EndSelector { cidr: Some(text.into()), ..Default::default() };
    for (from, to, allowed) in [
        (of_group("first"), of_group("second"), true),
        (of_group("of-a"), of_group("of-b"), true),
        (by_label("x"), by_label("y"), true),
        (cidr("10.0.0.1"), cidr("10.0.0.2/31"), true),
        (of_group("second"), EndSelector::default(), false),
        (EndSelector::default(), of_group("of-a"), false),
        (EndSelector::default(), of_group("theirs"), false),
        (EndSelector::default(), of_group("nobody"), false),
        (by_label("y"), EndSelector::default(), false),
        (EndSelector::default(), by_label("x"), false),
        (cidr("10.0.0.2"), EndSelector::default(), false),
        (EndSelector::default(), cidr("10.0.0.1"), false),
    ] {
        let text = format!("{from:?} {to:?}");
        let from = EndSelector { network: Some("a".into()), ..from };
        let to = EndSelector { network: Some("b".into()), ..to };
        let table = table(Access::Allow, &[("r", rule(from, to, Access::Allow, 0))], &groups);
        assert_eq!(says(&table, &x, &y).0, allowed, "{text}");
        assert!(!says(&table, &Someone::new("b", 1, "x"), &Someone::new("a", 2, "y")).0, "{text}: the wrong networks");
    }
}

#[test]
fn nothing_of_another_tenant_is_joined() {
    let (x, z) = (Someone::new("a", 1, "x"), Someone::new("c", 1, "x"));
    let of = |tenant: &str, from, to| AccessRuleSpec {
        tenant: tenant.into(),
        ..rule(of_network(from), of_network(to), Access::Allow, 9)
    };
    let rules = [
        ("1", of("red", "a", "c")),
        ("2", of("blue", "a", "c")),
        ("3", of("red", "c", "a")),
        ("4", of("blue", "a", "b")),
        ("5", of("red", "c", "e")),
        ("6", of("green", "a", "b")),
    ];
    let open = table(Access::Allow, &rules, &[]);
    for (one, other) in [("a", "c"), ("a", "b"), ("c", "e")] {
        assert!(!open.joins(one, other) && !open.joins(other, one), "{one} {other}");
    }
    assert_eq!((says(&open, &x, &z), says(&open, &z, &x)), ((false, None), (false, None)));
    // Another tenant's rules say nothing of who is joined.
    let no = AccessRuleSpec { tenant: "blue".into(), ..nobody() };
    let rules = [("join", of("red", "a", "b")), ("theirs", of("blue", "a", "b")), ("no", no)];
    let joined = table(Access::Allow, &rules, &[]);
    assert_eq!(says(&joined, &x, &Someone::new("b", 2, "y")), (true, Some("join".into())));
    let rules = [("theirs", of("blue", "a", "b")), ("join", of("red", "a", "b")), ("no", nobody())];
    assert_eq!(says(&table(Access::Allow, &rules, &[]), &x, &Someone::new("b", 2, "y")), (false, Some("no".into())));
}

#[test]
fn profiles_are_good_for_the_two_networks_alone() {
    let join = |from: &str, to: &str| AccessRuleSpec {
        direction: AccessDirection::Both,
        ..rule(of_network(from), of_network(to), Access::Allow, 0)
    };
    let table = table(Access::Allow, &[("ab", join("a", "b")), ("bd", join("d", "b"))], &[]);
    let [a, b, d] = ["a", "b", "d"].map(|network| Someone::new(network, 1, "x"));
    assert!(says(&table, &a, &b).0 && says(&table, &b, &a).0 && says(&table, &b, &d).0);
    assert_eq!(says(&table, &a, &d), (false, None), "who is joined with one is not with all that are");
    let refused = |one: &Profile, other: &Profile| {
        [table.decide(one, other), table.decide(other, one), table.decide_connection(one, other)]
            .iter()
            .all(|verdict| *verdict == Verdict { allowed: false, rule: None })
    };
    let of = |who: &Someone, other: &str| table.profile_across(&who.party(), other);
    let second = Someone::new("a", 2, "x");
    assert!(refused(&of(&a, "b"), &of(&second, "b")) && refused(&of(&b, "a"), &of(&b, "a")), "of one network");
    assert!(refused(&of(&a, "b"), &table.profile(&b.party())) && refused(&table.profile(&a.party()), &of(&b, "a")));
    assert!(refused(&of(&a, "b"), &table.profile(&second.party())));
    assert!(refused(&table.profile(&a.party()), &table.profile(&b.party())));
    assert!(refused(&of(&a, "b"), &of(&b, "d")), "of two pairs");
    for nowhere in ["a", "d", "c", "nowhere"] {
        let profile = of(&a, nowhere);
        assert_eq!(table.network_of(&profile), None, "{nowhere}");
        assert!(refused(&profile, &profile) && refused(&profile, &table.profile(&a.party())), "{nowhere}");
    }
    assert_eq!((table.network_of(&of(&a, "b")), table.network_of(&of(&b, "a"))), (Some("a"), Some("b")));
}

#[test]
fn across_networks_denials_alone_are_looked_at_beside_what_joins_them() {
    let mut rules: Vec<(String, AccessRuleSpec)> = (0..200)
        .map(|n| (format!("r{n:03}"), rule(by_label(&format!("x{n}")), by_label("y"), Access::Deny, n)))
        .collect();
    rules.extend((0..200).map(|n| (format!("s{n:03}"), rule(by_label("x"), by_label("y"), Access::Allow, n))));
    rules.push(("join".into(), rule(of_network("a"), of_network("b"), Access::Allow, -1)));
    let rules: Vec<(&str, AccessRuleSpec)> = rules.iter().map(|(name, spec)| (name.as_str(), spec.clone())).collect();
    let table = table(Access::Allow, &rules, &[]);
    assert!(table.work_across("a", "b") < table.work("a") * 2 / 3);
    let y = Someone::new("b", 2, "y");
    assert_eq!(says(&table, &Someone::new("a", 1, "x150"), &y), (false, Some("r150".into())));
    assert_eq!(says(&table, &Someone::new("a", 1, "x"), &y), (true, Some("join".into())));
}

// ---- against the rules as they stand

fn end_fits(end: &EndSelector, who: &Someone, tenant: &str, groups: &[(&str, GroupSpec)]) -> bool {
    let labels = |wanted: &Labels| {
        wanted.is_empty() || who.is_known && wanted.iter().all(|(name, value)| who.labels.get(name) == Some(value))
    };
    let cidr = |text: &String| text.parse::<Cidr>().unwrap().contains(who.address);
    let in_group = |name: &String| {
        groups.iter().filter(|(group, spec)| group == name && spec.tenant == tenant).any(|(_, spec)| {
            spec.members.iter().any(|member| {
                labels(&member.labels)
                    && (member.networks.is_empty() || member.networks.iter().any(|network| network == who.network))
                    && (member.cidrs.is_empty() || member.cidrs.iter().any(cidr))
                    && (member.vnics.is_empty() || who.is_known && member.vnics.contains(&who.vnic))
            })
        })
    };
    end.group.as_ref().is_none_or(in_group)
        && labels(&end.labels)
        && end.network.as_deref().is_none_or(|network| network == who.network)
        && end.cidr.as_ref().is_none_or(cidr)
}

fn naive(
    access: Access,
    rules: &[(&str, AccessRuleSpec)],
    groups: &[(&str, GroupSpec)],
    from: &Someone,
    to: &Someone,
) -> bool {
    let tenant = tenant_of(from.network);
    if tenant != tenant_of(to.network) {
        return false;
    }
    let is_across = from.network != to.network;
    let joins = |rule: &AccessRuleSpec| rule.from.network.is_some() && rule.to.network.is_some();
    let fits = |rule: &AccessRuleSpec| {
        let fit = |one: &Someone, other: &Someone| {
            end_fits(&rule.from, one, tenant, groups) && end_fits(&rule.to, other, tenant, groups)
        };
        rule.tenant == tenant
            && (!is_across || rule.action == Access::Deny || joins(rule))
            && (fit(from, to) || rule.direction == AccessDirection::Both && fit(to, from))
    };
    let fitting: Vec<&AccessRuleSpec> = rules.iter().map(|(_, rule)| rule).filter(|rule| fits(rule)).collect();
    let Some(highest) = fitting.iter().map(|rule| rule.order).max() else {
        return !is_across && access == Access::Allow;
    };
    fitting.iter().filter(|rule| rule.order == highest).all(|rule| rule.action == Access::Allow)
}

fn any_labels() -> impl Strategy<Value = Labels> {
    let pair = (select(vec!["app", "tier"]), select(vec!["x", "y"]));
    prop::collection::vec(pair, 0..3).prop_map(|pairs| labelled(&pairs))
}

fn any_cidr() -> impl Strategy<Value = String> {
    select(vec!["10.0.0.0/30", "10.0.0.4/31", "10.0.0.0/16", "10.0.0.5"]).prop_map(Into::into)
}

fn tenant_of(network: &str) -> &str {
    if matches!(network, "c" | "e") { "blue" } else { "red" }
}

fn any_network() -> impl Strategy<Value = &'static str> {
    select(vec!["a", "b", "a", "b", "c", "d", "e"])
}

fn any_end() -> impl Strategy<Value = EndSelector> {
    let group = prop::option::of(select(vec!["g", "h", "none"]).prop_map(String::from));
    (group, any_labels(), prop::option::of(any_network().prop_map(String::from)), prop::option::of(any_cidr()))
        .prop_map(|(group, labels, network, cidr)| EndSelector { group, labels, network, cidr })
}

fn any_selector() -> impl Strategy<Value = VnicSelector> {
    let networks = prop::collection::vec(any_network().prop_map(String::from), 0..2);
    let vnics = prop::collection::vec(select(vec!["v1", "v2", "v3"]).prop_map(String::from), 0..2);
    (any_labels(), networks, prop::collection::vec(any_cidr(), 0..2), vnics)
        .prop_map(|(labels, networks, cidrs, vnics)| VnicSelector { labels, networks, cidrs, vnics })
}

fn any_rule() -> impl Strategy<Value = AccessRuleSpec> {
    let access = select(vec![Access::Allow, Access::Deny]);
    let direction = select(vec![AccessDirection::Both, AccessDirection::FromTo]);
    (select(vec!["red", "red", "blue"]), any_end(), any_end(), direction, access, -2..3).prop_map(
        |(tenant, from, to, direction, action, order)| AccessRuleSpec {
            tenant: tenant.into(),
            from,
            to,
            direction,
            action,
            order,
        },
    )
}

fn any_one() -> impl Strategy<Value = Someone> {
    (any_network(), 1..7_u8, any_labels(), any::<bool>()).prop_map(|(network, last, labels, is_known)| Someone {
        network,
        vnic: format!("v{last}"),
        address: format!("10.0.0.{last}").parse().unwrap(),
        labels,
        is_known,
    })
}

proptest! {
    #[test]
    fn the_table_says_what_the_rules_say(
        access in select(vec![Access::Allow, Access::Deny]),
        rules in prop::collection::vec(any_rule(), 0..80),
        g in prop::collection::vec(any_selector(), 0..3),
        h in prop::collection::vec(any_selector(), 0..2),
        who in prop::collection::vec(any_one(), 2..6),
    ) {
        const NAMES: [&str; 80] = {
            let mut names = [""; 80];
            let all = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&()*+,-./:;<=>?@";
            let mut at = 0;
            while at < 80 {
                names[at] = all.split_at(at).1.split_at(1).0;
                at += 1;
            }
            names
        };
        let rules: Vec<(&str, AccessRuleSpec)> = NAMES.iter().copied().zip(rules).collect();
        let groups = [
            ("g", GroupSpec { tenant: "red".into(), members: g }),
            ("h", GroupSpec { tenant: "red".into(), members: h }),
        ];
        let table = table(access, &rules, &groups);
        for from in &who {
            for to in &who {
                prop_assert_eq!(says(&table, from, to).0, naive(access, &rules, &groups, from, to));
            }
        }
    }
}
