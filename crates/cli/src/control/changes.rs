//! `freeflow diff`: what `apply` would change, as a unified diff of YAML.

use freeflow_manifest::to_yaml;
use serde_json::{Value, json};
use similar::TextDiff;

const CONTEXT_LINES: usize = 3;

pub fn list_of(objects: &[Value]) -> Value {
    json!({"apiVersion": "freeflow.io/v1", "kind": "List", "items": objects})
}

/// An object without what nobody declares.
pub fn declared(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(map) = object.as_object_mut() {
        map.remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("resourceVersion");
        metadata.remove("generation");
    }
    object
}

/// Nothing if they declare the same. `None` stands for an object that is not there.
pub fn unified(name: &str, before: Option<&Value>, after: Option<&Value>) -> Option<String> {
    let text = |object: Option<&Value>| object.map(|object| to_yaml(&declared(object))).unwrap_or_default();
    let (old, new) = (text(before), text(after));
    if old == new {
        return None;
    }
    let side = |prefix: &str, object: Option<&Value>| match object {
        Some(_) => format!("{prefix}/{name}"),
        None => "/dev/null".into(),
    };
    let diff = TextDiff::from_lines(&old, &new);
    let text =
        diff.unified_diff().context_radius(CONTEXT_LINES).header(&side("a", before), &side("b", after)).to_string();
    Some(text.trim_end().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(weight: u32, generation: u32) -> Value {
        json!({"apiVersion": "freeflow.io/v1", "kind": "QosClass", "metadata": {"name": "a", "generation": generation,
            "resourceVersion": 7}, "spec": {"weight": weight}, "status": {"vnicCount": generation}})
    }

    #[test]
    fn only_what_is_declared_differs() {
        assert_eq!(unified("x", Some(&class(1, 1)), Some(&class(1, 2))), None);
        let text = unified("qosclass/a", Some(&class(1, 1)), Some(&class(2, 2))).unwrap();
        assert!(text.starts_with("--- a/qosclass/a\n+++ b/qosclass/a\n@@ "), "{text}");
        assert!(text.contains("\n-  weight: 1\n+  weight: 2"), "{text}");
        let new = unified("qosclass/a", None, Some(&class(2, 2))).unwrap();
        assert!(new.starts_with("--- /dev/null\n") && new.lines().skip(3).all(|line| line.starts_with('+')), "{new}");
    }
}
