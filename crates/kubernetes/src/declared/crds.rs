//! The definitions of the custom resources (CRDs), generated from the types by which they are read.
//!
//! Kubernetes takes *structural* schemas: no references, one type a value, no `const`. FreeFlow checks the rest, as
//! overlapping addresses, and the condition `Accepted` shows the result.
use super::{
    AccessRuleSpec, ClusterNetworkSpec, DeclaredKind, GROUP, GroupSpec, NetworkSpec, Status, VERSION, VnicSpec,
};
use crate::declared::names::NAME_BYTES_MAX;
use freeflow_orchestrator::objects::{QosClassSpec, QuotaSpec};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

fn schema_of<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.meta_schema = None;
    settings.inline_subschemas = true;
    let mut schema = serde_json::to_value(settings.into_generator().into_root_schema_for::<T>()).expect("a schema");
    structural(&mut schema);
    schema
}

fn spec_schema(kind: DeclaredKind) -> Value {
    match kind {
        DeclaredKind::QosClass => schema_of::<QosClassSpec>(),
        DeclaredKind::Quota => schema_of::<QuotaSpec>(),
        DeclaredKind::ClusterNetwork => schema_of::<ClusterNetworkSpec>(),
        DeclaredKind::Network => schema_of::<NetworkSpec>(),
        DeclaredKind::Group => schema_of::<GroupSpec>(),
        DeclaredKind::Vnic => schema_of::<VnicSpec>(),
        DeclaredKind::AccessRule => schema_of::<AccessRuleSpec>(),
    }
}

/// Makes a schema structural.
fn structural(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            for key in ["title", "$schema", "examples"] {
                // A property may be called so.
                if !fields.get(key).is_some_and(Value::is_object) {
                    fields.remove(key);
                }
            }
            without_null(fields);
            one_enum(fields);
            one_type(fields);
            number_format(fields);
            if fields.get("additionalProperties") == Some(&Value::Bool(false)) {
                fields.remove("additionalProperties");
            }
            fields.values_mut().for_each(structural);
        }
        Value::Array(all) => all.iter_mut().for_each(structural),
        _ => {}
    }
}

/// A field is left out, and never null.
fn without_null(fields: &mut Map<String, Value>) {
    if fields.get("default") == Some(&Value::Null) {
        fields.remove("default");
    }
    let Some(Value::Array(all)) = fields.get_mut("anyOf") else { return };
    all.retain(|one| one["type"] != "null");
    if let [Value::Object(one)] = &mut all[..] {
        let one = std::mem::take(one);
        fields.remove("anyOf");
        for (key, value) in one {
            // The field's own description says more.
            fields.entry(key).or_insert(value);
        }
    }
}

/// Words of which each has a description become one list.
fn one_enum(fields: &mut Map<String, Value>) {
    let Some(Value::Array(all)) = fields.get("oneOf") else { return };
    let mut words = Vec::new();
    for one in all {
        match (&one["const"], &one["enum"]) {
            (Value::String(word), _) => words.push(Value::String(word.clone())),
            (_, Value::Array(several)) => words.extend(several.iter().cloned()),
            _ => return,
        }
    }
    fields.remove("oneOf");
    fields.insert("type".into(), "string".into());
    fields.insert("enum".into(), words.into());
}

fn one_type(fields: &mut Map<String, Value>) {
    let Some(Value::Array(types)) = fields.get_mut("type") else { return };
    types.retain(|one| one != "null");
    if types.len() == 1 {
        let one = types.remove(0);
        fields.insert("type".into(), one);
    } else {
        // A quantity: a text with a unit, or a number.
        fields.remove("type");
        fields.remove("minimum");
        fields.insert("x-kubernetes-int-or-string".into(), true.into());
    }
}

/// Formats that Kubernetes does not know become bounds.
fn number_format(fields: &mut Map<String, Value>) {
    let max = match fields.get("format").and_then(Value::as_str) {
        Some("uint8") => Some(u64::from(u8::MAX)),
        Some("uint16") => Some(u64::from(u16::MAX)),
        Some("uint32") => Some(u64::from(u32::MAX)),
        Some("uint64" | "ip") => None,
        _ => return,
    };
    fields.remove("format");
    if let Some(max) = max {
        fields.entry("maximum").or_insert_with(|| max.into());
    }
}

fn columns(kind: DeclaredKind) -> Value {
    let column = |name: &str, path: &str| json!({"name": name, "type": "string", "jsonPath": path});
    let mut columns = Vec::new();
    match kind {
        DeclaredKind::Network | DeclaredKind::ClusterNetwork => columns.push(column("CIDRs", ".spec.cidrs")),
        DeclaredKind::Vnic => columns.push(column("Network", ".spec.network")),
        DeclaredKind::AccessRule => columns.push(column("Action", ".spec.action")),
        _ => {}
    }
    columns.push(column("Accepted", ".status.conditions[?(@.type=='Accepted')].status"));
    columns.push(column("Enforced", ".status.conditions[?(@.type=='Enforced')].status"));
    columns.push(json!({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}));
    columns.into()
}

fn definition(kind: DeclaredKind) -> Value {
    let mut status = schema_of::<Status>();
    let conditions = &mut status["properties"]["conditions"];
    conditions["x-kubernetes-list-type"] = "map".into();
    conditions["x-kubernetes-list-map-keys"] = json!(["type"]);
    conditions["items"]["required"] = json!(["type", "status"]);
    for field in ["type", "status"] {
        conditions["items"]["properties"][field].as_object_mut().map(|schema| schema.remove("default"));
    }
    let rule = json!({
        "rule": format!("size(self.metadata.name) <= {NAME_BYTES_MAX}"),
        "message": format!("a name has {NAME_BYTES_MAX} letters at most"),
    });
    let schema = json!({
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": spec_schema(kind), "status": status},
        "x-kubernetes-validations": [rule],
    });
    let singular = kind.name().to_ascii_lowercase();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{}.{GROUP}", kind.plural())},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.name(),
                "listKind": format!("{}List", kind.name()),
                "plural": kind.plural(),
                "singular": singular,
                "shortNames": [format!("ff{singular}")],
                "categories": ["freeflow"],
            },
            "scope": if kind.is_namespaced() { "Namespaced" } else { "Cluster" },
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": schema},
                "additionalPrinterColumns": columns(kind),
            }],
        },
    })
}

/// All definitions, as YAML.
pub fn yaml() -> String {
    let mut text = String::from("# Written by `freeflow-kubernetes crds`.\n");
    for kind in DeclaredKind::ALL {
        text.push_str("---\n");
        text.push_str(&freeflow_manifest::to_yaml(&definition(kind)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes/chart/crds/freeflow.yaml");

    #[test]
    fn the_copy_is_what_is_generated() {
        let text = yaml();
        if std::env::var_os("FREEFLOW_UPDATE").is_some() {
            std::fs::write(COPY, &text).unwrap();
        }
        let copy = std::fs::read_to_string(COPY).unwrap_or_default();
        assert!(copy == text, "{COPY} is another: FREEFLOW_UPDATE=1 writes it again; review the difference");
    }

    /// A structural schema, as far as these have to be one.
    fn check(schema: &Value, at: &str) {
        let Some(fields) = schema.as_object() else { panic!("{at}: {schema}") };
        for key in ["$ref", "$defs", "const", "oneOf", "anyOf", "allOf", "examples", "title", "$schema"] {
            assert!(!fields.contains_key(key), "{at}: {key}");
        }
        assert!(!fields.get("default").is_some_and(Value::is_null), "{at}");
        if fields.contains_key("x-kubernetes-int-or-string") {
            assert!(!fields.contains_key("type"), "{at}");
            return;
        }
        let known = ["object", "array", "string", "integer", "boolean"];
        let of_type = fields.get("type").and_then(Value::as_str).unwrap_or_else(|| panic!("{at}: no type"));
        assert!(known.contains(&of_type), "{at}: {of_type}");
        assert!(matches!(fields.get("format").and_then(Value::as_str), None | Some("int32" | "int64")), "{at}: format");
        match of_type {
            "array" => check(&fields["items"], &format!("{at}[]")),
            "object" => {
                assert!(
                    !(fields.contains_key("properties") && fields.contains_key("additionalProperties")),
                    "{at}: both properties and others"
                );
                let properties = fields.get("properties").and_then(Value::as_object);
                for (key, value) in properties.into_iter().flatten() {
                    check(value, &format!("{at}.{key}"));
                }
                if let Some(others) = fields.get("additionalProperties") {
                    check(others, &format!("{at}.*"));
                }
            }
            _ => {}
        }
    }

    #[test]
    fn schemas_are_structural() {
        for kind in DeclaredKind::ALL {
            let definition = definition(kind);
            let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            check(schema, kind.name());
        }
        let network = spec_schema(DeclaredKind::Network);
        assert_eq!(network["required"], json!(["cidrs"]));
        assert_eq!(network["properties"]["access"]["enum"], json!(["allow", "deny"]));
        assert_eq!(network["properties"]["access"]["default"], "allow");
        let class = spec_schema(DeclaredKind::QosClass);
        assert_eq!(class["properties"]["vnic"]["properties"]["rate"]["x-kubernetes-int-or-string"], true);
        assert_eq!(class["properties"]["priority"]["maximum"], 7);
    }
}
