//! The description of all this for programs: OpenAPI 3.1, made from the types. `docs/openapi.json`
//! is its copy for reviews.
use super::{BASE, openapi_host};
use freeflow_orchestrator::objects::{
    API_VERSION, AccessRule, Group, Host, Kind, Metadata, Network, QosClass, Quota, Vnic,
};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// Made once.
pub fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(make)
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

pub fn content(schema: &Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

pub fn answer(description: &str, schema: &Value) -> Value {
    json!({"description": description, "content": content(schema)})
}

/// The answers of an operation: the good one, and the refusals.
pub fn answers(good: &[(&str, Value)], refusals: &[&str]) -> Value {
    let words = |code: &str| match code {
        "400" => "BadRequest: not understood",
        "403" => "Forbidden: the caller's role does not allow it",
        "404" => "NotFound: it, or something that has to be there, is not there or not to be seen",
        "409" => "Conflict, AlreadyExists, InUse",
        "410" => "Expired: list again, and watch from there",
        "422" => "Invalid: the causes name the fields",
        "507" => "Exhausted: no address, or no room, is left",
        _ => "Internal: the router, or its disk, failed",
    };
    let mut all: Map<String, Value> = good.iter().map(|(code, value)| ((*code).to_owned(), value.clone())).collect();
    for code in refusals.iter().chain(&["403", "500"]) {
        all.insert((*code).into(), answer(words(code), &reference("Status")));
    }
    all.into()
}

pub fn parameter(name: &str, schema: &Value, description: &str) -> Value {
    json!({"name": name, "in": "query", "required": false, "schema": schema, "description": description})
}

fn dry_run() -> Value {
    parameter("dryRun", &json!({"type": "boolean"}), "Say what it would come to, and change nothing.")
}

fn follow() -> Value {
    parameter(
        "follow",
        &json!({"type": "boolean"}),
        "A cluster's follower changes what is declared for all hosts; nobody else may, where a host follows a cluster.",
    )
}

fn lease() -> Value {
    parameter(
        "lease",
        &json!({"type": "string"}),
        "Of a follower: afterS of the lease that it knows the router to have, or none; refused if it is another one (Conflict).",
    )
}

fn manager() -> Value {
    parameter(
        "manager",
        &json!({"type": "string"}),
        "The manager that asks: it makes objects its own, and changes and deletes those alone. An admin's.",
    )
}

fn take_over() -> Value {
    parameter(
        "takeOver",
        &json!({"type": "boolean"}),
        "Also objects that have a manager; changed ones have none after. An admin's, where the manager is gone.",
    )
}

fn floating() -> Value {
    parameter("floating", &json!({"type": "boolean"}), "Only objects of the cluster's that the host follows.")
}

fn unused() -> Value {
    parameter(
        "unused",
        &json!({"type": "boolean"}),
        "A Vnic: only if no container has it and no process uses it; else it stays (InUse).",
    )
}

fn precondition() -> Value {
    parameter(
        "resourceVersion",
        &json!({"type": "integer", "minimum": 0}),
        "Of the object as it was read: once it has changed since, it stays (Conflict).",
    )
}

fn watching() -> [Value; 2] {
    [
        parameter("watch", &json!({"type": "boolean"}), "Answer with a WatchEvent a line, from now on."),
        parameter(
            "resourceVersion",
            &json!({"type": "integer", "minimum": 0}),
            "Of a watch: send what came after this, the resourceVersion of a list or of a BOOKMARK; else it begins with all that is \
             there, as ADDED. That of an event is that of all objects that were changed together: who goes on from it may miss some.",
        ),
    ]
}

/// An object of a kind, and a list of such.
fn object_schemas<K: Kind>(generator: &mut SchemaGenerator, schemas: &mut Map<String, Value>)
where
    K::Spec: JsonSchema,
    K::Status: JsonSchema,
{
    let (metadata, spec) = (generator.subschema_for::<Metadata>(), generator.subschema_for::<K::Spec>());
    let status = generator.subschema_for::<K::Status>();
    schemas.insert(
        K::KIND.into(),
        json!({
            "type": "object",
            "additionalProperties": false,
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {
                "apiVersion": {"const": API_VERSION},
                "kind": {"const": K::KIND},
                "metadata": metadata,
                "spec": spec,
                "status": status,
            },
        }),
    );
    schemas.insert(format!("{}List", K::KIND), list_schema(&format!("{}List", K::KIND), &reference(K::KIND)));
}

fn list_schema(kind: &str, item: &Value) -> Value {
    json!({
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "items"],
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": kind},
            "metadata": reference("ListMetadata"),
            "items": {"type": "array", "items": item},
        },
    })
}

fn object_paths<K: Kind>(paths: &mut Map<String, Value>) {
    let (object, list) = (reference(K::KIND), reference(&format!("{}List", K::KIND)));
    let [watch, version] = watching();
    let selector = parameter(
        "labelSelector",
        &json!({"type": "string"}),
        "`a=b`, `a==b`, `a!=b`, `a`, `!a`, by commas; all hold.",
    );
    let name = json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string"}});
    let id = |verb: &str| format!("{verb}{}", K::KIND);
    let body = json!({"required": true, "content": content(&object)});
    paths.insert(
        format!("{BASE}/{}", K::PLURAL),
        json!({"get": {
            "operationId": id("list"),
            "parameters": [selector, &watch, &version, &floating()],
            "responses": answers(&[("200", answer("All that the caller may see.", &list))], &["400", "410"]),
        }}),
    );
    paths.insert(
        format!("{BASE}/{}/{{name}}", K::PLURAL),
        json!({
            "parameters": [name],
            "get": {
                "operationId": id("read"),
                "parameters": [watch, version],
                "responses": answers(&[("200", answer("With its status.", &object))], &["400", "404", "410"]),
            },
            "put": {
                "operationId": id("replace"),
                "parameters": [dry_run(), manager(), take_over()],
                "requestBody": body,
                "responses": answers(
                    &[("200", answer("It is as it was sent.", &object)), ("201", answer("It is new.", &object))],
                    &["400", "404", "409", "422", "507"],
                ),
            },
            "delete": {
                "operationId": id("delete"),
                "parameters": [dry_run(), follow(), manager(), precondition(), take_over(), unused()],
                "responses": answers(&[("200", answer("It was.", &reference("Results")))], &["400", "404", "409"]),
            },
        }),
    );
}

/// Of `live`: numbers since the vNIC, or the QP, was made.
fn live_schemas(add: &mut impl FnMut(&str, &[&str], Value)) {
    let (text, number) = (json!({"type": "string"}), json!({"type": "integer", "minimum": 0}));
    let limit = json!({"type": "object", "properties": {
        "bitsPerSecond": {"type": ["integer", "null"]}, "messagesPerSecond": {"type": ["integer", "null"]}}});
    let way = json!({"type": "object", "properties": {"messages": number, "bytes": number}});
    let throttled = json!({"type": "object", "properties": {"waits": number, "nanoseconds": number}});
    let of_qp = json!({
        "qpn": number, "type": text, "state": text, "path": {"enum": ["direct", "routed", "wire"]},
        "peerAddress": {"type": ["string", "null"]}, "peerQpn": {"type": ["integer", "null"]},
        "messagesSent": number, "bytesSent": number, "messagesReceived": number, "bytesReceived": number,
        "slowPath": {"type": "object", "properties": {
            "accesses": number, "bytes": number,
            "reason": {"description": "Of the last one.", "type": ["string", "null"]}}},
        "throttled": throttled,
    });
    add("LiveQp", &["qpn"], of_qp);
    let of_vnic = json!({
        "vnic": text, "title": text, "tenant": text, "network": text, "address": text,
        "messagesSent": number, "bytesSent": number, "bytesReceived": number,
        "paths": {"type": "object", "properties": {"direct": way, "routed": way, "wire": way}},
        "slowPath": {"description": "Of its memory, by reason.", "type": "array", "items": {"type": "object", "properties": {
            "reason": text, "accesses": number, "bytes": number}}},
        "metered": {"type": "boolean"},
        "limits": {"type": "object", "properties": {"qp": limit, "vnic": limit, "tenant": limit}},
        "throttled": throttled, "errors": number, "drops": number, "qpCount": number,
        "qps": {"type": "array", "items": reference("LiveQp")},
    });
    add("LiveVnic", &["vnic"], of_vnic);
    let metadata = json!({"type": "object", "required": ["nanoseconds", "continue"], "properties": {
        "nanoseconds": {"description": "When, by a clock that only counts.", "type": "integer"},
        "continue": {"description": "Ask with this for the next page; empty: that was all. A vNIC with many QPs is on several.",
            "type": "string"}}});
    let items = json!({"type": "array", "items": reference("LiveVnic")});
    let list = json!({"apiVersion": {"const": API_VERSION}, "kind": {"const": "LiveList"}, "metadata": metadata, "items": items});
    add("LiveList", &["apiVersion", "kind", "metadata", "items"], list);
}

/// Schemas of values that are no objects.
fn other_schemas(schemas: &mut Map<String, Value>, kinds: &[&str]) {
    let any = json!({"oneOf": kinds.iter().map(|kind| reference(kind)).collect::<Vec<_>>()});
    let text = json!({"type": "string"});
    let mut add = |name: &str, required: &[&str], properties: Value| {
        schemas.insert(name.into(), json!({"type": "object", "required": required, "properties": properties}));
    };
    let version = json!({"description": "To watch from. Objects of a long list may be newer, as their own says: what a watch sends of them up \
        to that is known.", "type": "integer"});
    add("ListMetadata", &["resourceVersion"], json!({"resourceVersion": version}));
    let result = json!({"enum": ["created", "configured", "unchanged", "deleted"]});
    add(
        "Result",
        &["kind", "name", "result", "object"],
        json!({"kind": text, "name": text, "result": result, "object": any}),
    );
    let results = json!({"type": "array", "items": reference("Result")});
    let metadata = reference("ListMetadata");
    add(
        "Results",
        &["apiVersion", "metadata", "items"],
        json!({"apiVersion": {"const": API_VERSION}, "metadata": metadata, "items": results}),
    );
    let event = json!({
        "type": {"description": "BOOKMARK: all up to its resourceVersion is sent; after what there was at the beginning, after the last \
            event of a resourceVersion, and now and then.", "enum": ["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]},
        "object": {"description": "The object; of a BOOKMARK only apiVersion, kind and metadata.resourceVersion; of an ERROR a Status."},
    });
    add("WatchEvent", &["type", "object"], event);
    let cause = json!({"type": "object", "properties": {"field": text, "message": text}});
    let details = json!({"type": "object", "properties": {"kind": text, "name": text, "index": {"type": "integer"},
        "causes": {"type": "array", "items": cause},
        "users": {"description": "Of a dry run of DELETE that answers InUse: what names it, as \"Vnic a\"; 10,000 at most.",
            "type": "array", "items": text}}});
    let reasons = [
        "BadRequest",
        "Invalid",
        "NotFound",
        "Forbidden",
        "Conflict",
        "AlreadyExists",
        "InUse",
        "Exhausted",
        "Expired",
        "Internal",
    ];
    let status = json!({"apiVersion": {"const": API_VERSION}, "kind": {"const": "Status"}, "status": {"const": "Failure"},
        "reason": {"enum": reasons}, "message": text, "code": {"type": "integer"}, "details": details});
    add("Status", &["kind", "status", "reason", "message", "code"], status);
    live_schemas(&mut add);
    let host = json!({"description": "The name of the Host; for who reads everything.", "type": "string"});
    add("Version", &["version", "apiVersion"], json!({"version": text, "apiVersion": text, "host": host}));
    let (word, map) = (
        json!({"description": "Not looked at.", "type": "string"}),
        json!({"description": "Not looked at.", "type": "object"}),
    );
    let items = json!({"items": {"type": "array", "items": any}, "apiVersion": word, "kind": word, "metadata": map});
    schemas.insert(
        "Items".into(),
        json!({"type": "object", "additionalProperties": false, "required": ["items"], "properties": items}),
    );
}

fn other_paths(paths: &mut Map<String, Value>) {
    let body = json!({"required": true, "content": content(&reference("Items"))});
    paths.insert(
        format!("{BASE}/apply"),
        json!({"post": {
            "operationId": "apply",
            "description": "All of them or none: one transaction.",
            "parameters": [dry_run(), follow(), lease(), manager(), take_over()],
            "requestBody": body,
            "responses": answers(&[("200", answer("Done.", &reference("Results")))], &["400", "404", "409", "422", "507"]),
        }}),
    );
    let version = answers(&[("200", answer("The router's.", &reference("Version")))], &[]);
    paths.insert("/version".into(), json!({"get": {"operationId": "version", "responses": version}}));
    let document = answers(&[("200", answer("This.", &json!({"type": "object"})))], &[]);
    paths.insert("/openapi/v3".into(), json!({"get": {"operationId": "openapi", "responses": document}}));
    paths.insert(
        format!("{BASE}/live"),
        json!({"get": {
            "operationId": "live",
            "description": "What vNICs, and their QPs, have done so far: a page in order of id.",
            "parameters": [
                parameter("qps", &json!({"type": "boolean"}), "With their QPs."),
                parameter("continue", &json!({"type": "string"}), "What the page before says; empty: from the beginning."),
            ],
            "responses": answers(&[("200", answer("A page.", &reference("LiveList")))], &["400"]),
        }}),
    );
    let text =
        json!({"description": "Prometheus' text form.", "content": {"text/plain": {"schema": {"type": "string"}}}});
    let get = json!({"operationId": "metrics", "responses": answers(&[("200", text)], &[])});
    paths.insert("/metrics".into(), json!({"get": get}));
    for (path, description) in
        [("/livez", "The router's threads answer."), ("/readyz", "And its worker turns, and its store can be written.")]
    {
        let good = json!({"description": description, "content": {"text/plain": {"schema": {"const": "ok\n"}}}});
        let get = json!({"operationId": &path[1..], "responses": answers(&[("200", good)], &[])});
        paths.insert(path.into(), json!({"get": get}));
    }
}

/// A field that a writer gives is never null.
fn without_null(value: &mut Value) {
    let is_null = |value: &Value| *value == "null" || value["type"] == "null";
    if let Value::Object(map) = value {
        for key in ["type", "anyOf"] {
            let Some(Value::Array(all)) = map.get_mut(key) else { continue };
            all.retain(|one| !is_null(one));
            if all.len() == 1 {
                let one = all.remove(0);
                map.remove(key);
                match one {
                    Value::Object(fields) => map.extend(fields),
                    word => drop(map.insert(key.into(), word)),
                }
            }
        }
        map.values_mut().for_each(without_null);
    } else if let Value::Array(all) = value {
        all.iter_mut().for_each(without_null);
    }
}

fn make() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    let mut generator = settings.clone().into_generator();
    let (mut schemas, mut paths, mut kinds) = (Map::new(), Map::new(), Vec::new());
    macro_rules! add {
        ($($kind:ident),*) => { $(
            object_schemas::<$kind>(&mut generator, &mut schemas);
            object_paths::<$kind>(&mut paths);
            kinds.push($kind::KIND);
        )* };
    }
    add!(Network, Group, AccessRule, QosClass, Quota, Vnic, Host);
    other_schemas(&mut schemas, &kinds);
    other_paths(&mut paths);
    let mut definitions = generator.take_definitions(true);
    definitions.iter_mut().filter(|(name, _)| !name.ends_with("Status")).for_each(|(_, schema)| without_null(schema));
    schemas.extend(definitions);
    openapi_host::add(settings, &mut schemas, &mut paths);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "FreeFlow",
            "version": API_VERSION.rsplit('/').next(),
            "description": "The control plane of one host, on the Unix socket api.sock of its run directory. \
                Who a caller is, the socket's credentials say.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");

    #[test]
    fn the_copy_is_what_is_served() {
        let text = format!("{:#}\n", document());
        if std::env::var_os("FREEFLOW_UPDATE").is_some() {
            std::fs::write(COPY, &text).unwrap();
        }
        let copy = std::fs::read_to_string(COPY).unwrap_or_default();
        assert!(
            copy == text,
            "docs/openapi.json is not what is served: FREEFLOW_UPDATE=1 writes it again; review the difference"
        );
    }

    /// Every reference leads somewhere.
    fn check(value: &Value, schemas: &Map<String, Value>) {
        match value {
            Value::Object(map) => {
                if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
                    let name = reference.strip_prefix("#/components/schemas/").unwrap_or_else(|| panic!("{reference}"));
                    assert!(schemas.contains_key(name), "{name}");
                }
                map.values().for_each(|value| check(value, schemas));
            }
            Value::Array(all) => all.iter().for_each(|value| check(value, schemas)),
            _ => {}
        }
    }

    #[test]
    fn it_holds_together_and_names_all_kinds() {
        let document = document();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        check(document, schemas);
        for (kind, plural) in freeflow_orchestrator::objects::KINDS {
            assert!(schemas.contains_key(*kind) && schemas.contains_key(&format!("{kind}Spec")), "{kind}");
            assert!(document["paths"][format!("{BASE}/{plural}/{{name}}")]["put"].is_object(), "{plural}");
            assert!(!schemas[&format!("{kind}Spec")].to_string().contains("null"), "{kind}: a null would be refused");
        }
    }
}
