//! Files of YAML documents that `freeflow apply` reads, up to the objects that it sends.
use freeflow_manifest::{ITEM_COUNT_MAX, Item, NODE_COUNT_MAX, parse, to_yaml};
use freeflow_orchestrator::objects::parse_object;
use serde_json::Value;

const FILE: &str = "f.yaml";

pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match parse(FILE, text) {
        Ok(items) => {
            assert!(items.len() <= ITEM_COUNT_MAX);
            assert!(items.iter().map(|item| node_count(&item.value)).sum::<usize>() <= NODE_COUNT_MAX);
            let line_count = text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count() as u64;
            items.iter().for_each(|item| look_at(item, line_count));
        }
        Err(error) => {
            let error = error.to_string();
            assert!(error.starts_with(FILE) && error.lines().count() == 1, "{error}");
        }
    }
}

fn look_at(item: &Item, line_count: u64) {
    let value = &item.value;
    assert_eq!(value["kind"], item.kind.name());
    assert_eq!(value["metadata"]["name"], item.name.as_str());
    for field in ["", "metadata", "metadata.name", "spec", "spec.cidrs[0]", "no[3].such.field"] {
        assert!(item.line_of(field) <= line_count, "{field} is on a line of the text");
    }
    let printed = to_yaml(value);
    let again = parse(FILE, &printed).unwrap_or_else(|error| panic!("{error}: {printed}"));
    assert_eq!(again.iter().map(|item| &item.value).collect::<Vec<_>>(), [value], "what is printed can be read");
    if let Ok(object) = parse_object(value) {
        assert_eq!((object.kind(), object.name()), (item.kind, item.name.as_str()));
    }
}

fn node_count(value: &Value) -> usize {
    let below = match value {
        Value::Array(items) => items.iter().map(node_count).sum(),
        Value::Object(fields) => fields.values().map(node_count).sum(),
        _ => 0,
    };
    below + 1
}
