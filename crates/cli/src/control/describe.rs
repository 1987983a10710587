//! One object for people to read: all that is declared and all that is so, a line each.

use super::columns::{harmless, text};
use crate::output;
use serde_json::Value;

const INDENT: &str = "  ";
const LABEL_WIDTH: usize = 24;

/// Lines of an object.
pub fn lines(object: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    let metadata = &object["metadata"];
    entry(&mut lines, 0, "Name", &metadata["name"]);
    entry(&mut lines, 0, "Kind", &object["kind"]);
    entry(&mut lines, 0, "Labels", &metadata["labels"]);
    entry(&mut lines, 0, "Resource version", &metadata["resourceVersion"]);
    entry(&mut lines, 0, "Generation", &metadata["generation"]);
    if metadata["manager"].is_object() {
        entry(&mut lines, 0, "Manager", &metadata["manager"]);
    }
    for (part, title) in [("spec", "Spec"), ("status", "Status")] {
        if object[part].as_object().is_some_and(|map| !map.is_empty()) {
            entry(&mut lines, 0, title, &object[part]);
        }
    }
    lines
}

fn entry(lines: &mut Vec<String>, depth: usize, title: &str, value: &Value) {
    let begin = format!("{}{title}:", INDENT.repeat(depth));
    match value {
        Value::Object(map) if !map.is_empty() => {
            lines.push(begin);
            for (key, value) in map {
                // A label's name stays as it is.
                let title = if title == "Labels" { harmless(key) } else { words(key) };
                quantity(lines, depth + 1, &title, key, value);
            }
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || is_sentence(item)) => {
            lines.push(begin);
            for item in items {
                match item {
                    Value::Object(map) => {
                        for (index, (key, value)) in map.iter().enumerate() {
                            let mark = if index == 0 { "- " } else { "  " };
                            let title = format!("{mark}{}", words(key));
                            entry(lines, depth + 1, &title, value);
                        }
                        if map.is_empty() {
                            lines.push(format!("{}- any", INDENT.repeat(depth + 1)));
                        }
                    }
                    other => lines.push(format!("{}- {}", INDENT.repeat(depth + 1), text(other))),
                }
            }
        }
        value => lines.push(format!("{begin:<LABEL_WIDTH$} {}", text(value))),
    }
}

/// Numbers that have a unit are said with it.
fn quantity(lines: &mut Vec<String>, depth: usize, title: &str, key: &str, value: &Value) {
    let said = match value.as_u64() {
        Some(count) if key.ends_with("Bytes") => Some(output::bytes(count)),
        Some(seconds) if key.ends_with("S") && key.len() > 1 => Some(output::duration(seconds)),
        _ => None,
    };
    match said {
        Some(said) => {
            let title = title.trim_end_matches(" s").to_string();
            entry(lines, depth, &title, &Value::String(said));
        }
        None => entry(lines, depth, title, value),
    }
}

fn is_sentence(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.contains(' '))
}

/// `qosClass` → `Qos class`.
fn words(key: &str) -> String {
    let mut text = String::new();
    for (index, c) in harmless(key).chars().enumerate() {
        if index == 0 {
            text.extend(c.to_uppercase());
        } else if c.is_ascii_uppercase() {
            text.push(' ');
            text.push(c.to_ascii_lowercase());
        } else {
            text.push(c);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_object_is_described_whole() {
        let vnic = json!({"kind": "Vnic", "metadata": {"name": "db", "labels": {"tier": "web"}, "generation": 2},
            "spec": {"network": "blue", "addresses": ["10.1.0.5"]},
            "status": {"registeredBytes": 65536, "uptimeS": 7200, "conditions": ["held to 1 Gbit/s by slow"],
                       "members": [{"group": "g", "cidr": "10.0.0.0/8"}], "reason": null}});
        let text = lines(&vnic).join("\n");
        for part in [
            "Name:                    db",
            "Kind:                    Vnic",
            "Labels:\n  tier:",
            "Spec:\n  Addresses:",
            "10.1.0.5",
            "  Registered bytes:      65.5 kB",
            "  Uptime:                2 hours",
            "  Conditions:\n    - held to 1 Gbit/s by slow",
            "    - Cidr:",
            "      Group:",
            "  Reason:                -",
        ] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
    }
}
