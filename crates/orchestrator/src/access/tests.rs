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
    let networks = [("a", network("red", access)), ("b", network("red", access)), ("c", network("blue", access))];
    AccessTable::compile(
        networks.iter().map(|(name, spec)| (*name, spec)),
        groups.iter().map(|(name, spec)| (*name, spec)),
        rules.iter().map(|(name, spec)| (*name, spec)),
    )
}

fn says(table: &AccessTable, from: &Someone, to: &Someone) -> (bool, Option<String>) {
    let verdict = table.decide(&table.profile(&from.party()), &table.profile(&to.party()));
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

// ---- against the rules as they stand

fn end_fits(end: &EndSelector, who: &Someone, groups: &[(&str, GroupSpec)]) -> bool {
    let labels = |wanted: &Labels| {
        wanted.is_empty() || who.is_known && wanted.iter().all(|(name, value)| who.labels.get(name) == Some(value))
    };
    let cidr = |text: &String| text.parse::<Cidr>().unwrap().contains(who.address);
    let in_group = |name: &String| {
        groups.iter().filter(|(group, spec)| group == name && spec.tenant == "red").any(|(_, spec)| {
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
    if from.network != to.network {
        return false;
    }
    let fits = |rule: &AccessRuleSpec| {
        let forth = end_fits(&rule.from, from, groups) && end_fits(&rule.to, to, groups);
        let back = end_fits(&rule.from, to, groups) && end_fits(&rule.to, from, groups);
        rule.tenant == "red" && (forth || rule.direction == AccessDirection::Both && back)
    };
    let fitting: Vec<&AccessRuleSpec> = rules.iter().map(|(_, rule)| rule).filter(|rule| fits(rule)).collect();
    let Some(highest) = fitting.iter().map(|rule| rule.order).max() else { return access == Access::Allow };
    fitting.iter().filter(|rule| rule.order == highest).all(|rule| rule.action == Access::Allow)
}

fn any_labels() -> impl Strategy<Value = Labels> {
    let pair = (select(vec!["app", "tier"]), select(vec!["x", "y"]));
    prop::collection::vec(pair, 0..3).prop_map(|pairs| labelled(&pairs))
}

fn any_cidr() -> impl Strategy<Value = String> {
    select(vec!["10.0.0.0/30", "10.0.0.4/31", "10.0.0.0/16", "10.0.0.5"]).prop_map(Into::into)
}

fn any_network() -> impl Strategy<Value = &'static str> {
    select(vec!["a", "b"])
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
                let says = table.decide(&table.profile(&from.party()), &table.profile(&to.party())).allowed;
                prop_assert_eq!(says, naive(access, &rules, &groups, from, to));
            }
        }
    }
}
