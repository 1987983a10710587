//! Objects as rows of a table. A field that a router does not report is `-`.

use super::kinds::Kind;
use freeflow_cluster::HEARTBEAT;
use serde_json::Value;

/// A column: its heading, whether only `-o wide` has it, and what stands in it.
type Column = (&'static str, bool, fn(&Value) -> String);

/// A host that has said nothing for so long is shown as silent: three heartbeats.
pub const SILENCE_S: u64 = 3 * HEARTBEAT.as_secs();

const ALWAYS: bool = false;
const WIDE: bool = true;

pub fn headings(kind: Kind, wide: bool) -> Vec<String> {
    columns(kind).iter().filter(|column| wide || !column.1).map(|column| column.0.to_string()).collect()
}

pub fn row(kind: Kind, object: &Value, wide: bool) -> Vec<String> {
    columns(kind).iter().filter(|column| wide || !column.1).map(|column| (column.2)(object)).collect()
}

fn columns(kind: Kind) -> &'static [Column] {
    match kind.name {
        "Vnic" if kind.is_clusters => CLUSTER_VNIC,
        "Host" if kind.is_clusters => CLUSTER_HOST,
        "Network" => NETWORK,
        "Group" => GROUP,
        "AccessRule" => ACCESS_RULE,
        "QosClass" => QOS_CLASS,
        "Quota" => QUOTA,
        "Vnic" => VNIC,
        _ => HOST,
    }
}

const NETWORK: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("TENANT", ALWAYS, |it| text(&it["spec"]["tenant"])),
    ("CIDRS", ALWAYS, |it| text(&it["spec"]["cidrs"])),
    ("ACCESS", ALWAYS, |it| text(&it["spec"]["access"])),
    ("DATA PATH", ALWAYS, |it| text(&it["spec"]["dataPath"])),
    ("VNICS", ALWAYS, |it| text(&it["status"]["vnicCount"])),
    ("QOS", ALWAYS, |it| text(&it["spec"]["qosClass"])),
    ("QUOTA", ALWAYS, |it| text(&it["spec"]["quota"])),
    ("RANGE", WIDE, |it| text(&it["spec"]["range"])),
    ("EXTERNAL", WIDE, |it| text(&it["spec"]["external"])),
    ("FREE", WIDE, |it| text(&it["status"]["freeAddressCount"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const GROUP: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("TENANT", ALWAYS, |it| text(&it["spec"]["tenant"])),
    ("MEMBERS", ALWAYS, |it| selectors(&it["spec"]["members"])),
    ("VNICS", ALWAYS, |it| count(&it["status"]["vnics"])),
    ("WHICH", WIDE, |it| text(&it["status"]["vnics"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const ACCESS_RULE: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("TENANT", ALWAYS, |it| text(&it["spec"]["tenant"])),
    ("ACTION", ALWAYS, |it| text(&it["spec"]["action"])),
    ("FROM", ALWAYS, |it| selector(&it["spec"]["from"])),
    ("TO", ALWAYS, |it| selector(&it["spec"]["to"])),
    ("DIRECTION", ALWAYS, |it| text(&it["spec"]["direction"])),
    ("ORDER", ALWAYS, |it| text(&it["spec"]["order"])),
    ("REFUSED", WIDE, |it| text(&it["status"]["refusalCount"])),
    ("DISCONNECTED", WIDE, |it| text(&it["status"]["disconnectionCount"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const QOS_CLASS: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("QP", ALWAYS, |it| limit(&it["spec"]["qp"])),
    ("VNIC", ALWAYS, |it| limit(&it["spec"]["vnic"])),
    ("TENANT", ALWAYS, |it| limit(&it["spec"]["tenant"])),
    ("PRIORITY", ALWAYS, |it| text(&it["spec"]["priority"])),
    ("WEIGHT", ALWAYS, |it| text(&it["spec"]["weight"])),
    ("NETWORKS", WIDE, |it| text(&it["status"]["networks"])),
    ("VNICS", WIDE, |it| text(&it["status"]["vnicCount"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const QUOTA: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("PER VNIC", ALWAYS, |it| pairs(&it["spec"]["perVnic"])),
    ("PER NETWORK", ALWAYS, |it| pairs(&it["spec"]["perNetwork"])),
    ("VNICS", ALWAYS, |it| text(&it["spec"]["vnics"])),
    ("REFUSED", ALWAYS, |it| text(&it["status"]["refusalCount"])),
    ("NETWORKS", WIDE, |it| text(&it["status"]["networks"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const VNIC: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("TITLE", ALWAYS, |it| text(&it["status"]["title"])),
    ("NETWORK", ALWAYS, |it| text(&it["spec"]["network"])),
    ("ADDRESSES", ALWAYS, |it| text(&it["spec"]["addresses"])),
    ("PHASE", ALWAYS, |it| text(&it["status"]["phase"])),
    ("QPS", ALWAYS, |it| text(&it["status"]["qpCount"])),
    ("QOS", WIDE, |it| text(&it["spec"]["qosClass"])),
    ("QUOTA", WIDE, |it| text(&it["spec"]["quota"])),
    ("TENANT", WIDE, |it| text(&it["status"]["tenant"])),
    ("MRS", WIDE, |it| text(&it["status"]["mrCount"])),
    ("REGISTERED", WIDE, |it| bytes(&it["status"]["registeredBytes"])),
    ("SENT", WIDE, |it| bytes(&it["status"]["sentBytes"])),
    ("RECEIVED", WIDE, |it| bytes(&it["status"]["receivedBytes"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const HOST: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("MODE", ALWAYS, |it| text(&it["status"]["mode"])),
    ("LATENCY CLASS", ALWAYS, |it| text(&it["status"]["latencyClass"])),
    ("HEALTH", ALWAYS, |it| text(&it["status"]["health"])),
    ("BACKENDS", ALWAYS, |it| text(&it["status"]["backends"])),
    ("WANTED", WIDE, |it| text(&it["spec"]["mode"])),
    ("ADDRESS", WIDE, |it| text(&it["status"]["address"])),
    ("PEERS", WIDE, |it| text(&it["status"]["peerCount"])),
    ("VERSION", WIDE, |it| text(&it["status"]["version"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const CLUSTER_VNIC: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("TITLE", ALWAYS, |it| text(&it["status"]["title"])),
    ("NETWORK", ALWAYS, |it| text(&it["spec"]["network"])),
    ("ADDRESSES", ALWAYS, |it| text(&it["spec"]["addresses"])),
    ("PHASE", ALWAYS, |it| text(&it["status"]["phase"])),
    ("HOST", ALWAYS, |it| text(&it["status"]["host"])),
    ("AGE", ALWAYS, |it| age(&it["status"]["ageSeconds"])),
    ("TENANT", WIDE, |it| text(&it["status"]["tenant"])),
    ("CONTAINER", WIDE, |it| text(&it["status"]["container"]["name"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

const CLUSTER_HOST: &[Column] = &[
    ("NAME", ALWAYS, |it| text(&it["metadata"]["name"])),
    ("ADDRESS", ALWAYS, |it| text(&it["status"]["address"])),
    ("FOLLOWS", ALWAYS, |it| text(&it["status"]["follows"])),
    ("AGE", ALWAYS, |it| age(&it["status"]["ageSeconds"])),
    ("VNICS", ALWAYS, |it| text(&it["status"]["vnicCount"])),
    ("PROBLEMS", ALWAYS, |it| count(&it["status"]["problems"])),
    ("VERSION", WIDE, |it| text(&it["status"]["version"])),
    ("LABELS", WIDE, |it| pairs(&it["metadata"]["labels"])),
];

/// A value in one cell. What comes from others is made harmless for terminals.
pub fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) if text.is_empty() => "-".into(),
        Value::String(text) => harmless(text),
        Value::Array(items) if items.is_empty() => "-".into(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        Value::Object(_) => pairs(value),
        other => other.to_string(),
    }
}

/// Since a host said it; one that has missed three words is marked.
pub fn age(seconds: &Value) -> String {
    match seconds.as_u64() {
        Some(seconds) if seconds > SILENCE_S => format!("{}: silent", crate::output::duration(seconds)),
        Some(seconds) => crate::output::duration(seconds),
        None => "-".into(),
    }
}

/// Without characters that do something to a terminal.
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn count(value: &Value) -> String {
    value.as_array().map_or("-".into(), |items| items.len().to_string())
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or("-".into(), crate::output::bytes)
}

/// `a=1,b=2`
fn pairs(value: &Value) -> String {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            let one = |(key, value): (&String, &Value)| format!("{}={}", harmless(key), text(value));
            map.iter().map(one).collect::<Vec<_>>().join(",")
        }
        _ => "-".into(),
    }
}

/// `1Gbit+64KiB 200k/s`: rate and burst.
fn limit(value: &Value) -> String {
    let part = |rate: &str, burst: &str, unit: &str| {
        let rate = value[rate].as_str().map(harmless)?;
        let burst = if value[burst].is_null() { String::new() } else { format!("+{}", text(&value[burst])) };
        Some(format!("{rate}{unit}{burst}"))
    };
    let parts: Vec<String> =
        [part("rate", "burst", ""), part("messageRate", "messageBurst", "/s")].into_iter().flatten().collect();
    if parts.is_empty() { "-".into() } else { parts.join(" ") }
}

/// Selector of one end of a rule, or of a group, as text.
fn selector(value: &Value) -> String {
    let mut parts = Vec::new();
    for (key, word) in [
        ("group", "group"),
        ("network", "network"),
        ("networks", "networks"),
        ("cidr", "cidr"),
        ("cidrs", "cidrs"),
        ("vnics", "vnics"),
    ] {
        if !value[key].is_null() {
            parts.push(format!("{word} {}", text(&value[key])));
        }
    }
    if value["labels"].is_object() {
        parts.push(pairs(&value["labels"]));
    }
    if parts.is_empty() { "any".into() } else { parts.join(" & ") }
}

fn selectors(value: &Value) -> String {
    let all: Vec<String> = value.as_array().into_iter().flatten().map(selector).collect();
    if all.is_empty() { "-".into() } else { all.join(" | ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::kinds::KINDS;
    use serde_json::json;

    #[test]
    fn every_kind_has_a_name_first_and_more_when_wide() {
        for kind in KINDS.into_iter().flat_map(|kind| [kind, Kind { is_clusters: true, ..kind }]) {
            let (few, many) = (headings(kind, false), headings(kind, true));
            assert_eq!(few[0], "NAME");
            assert!(many.len() > few.len() && many.last().unwrap() == "LABELS");
            // The narrow ones come first, so that scripts find them at the same places.
            assert_eq!(many[..few.len()], few);
            assert_eq!(row(kind, &json!({}), true).len(), many.len());
            assert!(row(kind, &json!({}), true).iter().all(|cell| cell == "-" || cell == "any"));
        }
    }

    #[test]
    fn cells_say_it_shortly() {
        let class = json!({"metadata": {"name": "slow"}, "spec": {"vnic": {"rate": "1Gbit", "burst": "64KiB"},
            "qp": {"messageRate": "200k"}, "priority": 3, "weight": 10}});
        let kind = Kind::named("qos").unwrap();
        assert_eq!(row(kind, &class, false), ["slow", "200k/s", "1Gbit+64KiB", "-", "3", "10"]);
        let rule = json!({"metadata": {"name": "r"}, "spec": {"tenant": "t", "action": "deny", "direction": "both",
            "from": {"labels": {"tier": "web"}}, "to": {"group": "db", "cidr": "10.0.0.0/8"}, "order": 5}});
        let kind = Kind::named("rule").unwrap();
        assert_eq!(row(kind, &rule, false), ["r", "t", "deny", "tier=web", "group db & cidr 10.0.0.0/8", "both", "5"]);
        assert_eq!(text(&json!("a\u{1b}[2J")), "a\u{fffd}[2J");
        assert_eq!((age(&json!(5)), age(&Value::Null)), ("5 seconds".into(), "-".into()));
        assert_eq!(age(&json!(600)), "10 minutes: silent");
    }
}
