//! The part of the OpenAPI document that describes the subresources of [`super::host`].
use super::BASE;
use super::openapi::{answer, answers, content, parameter};
use freeflow_orchestrator::objects::API_VERSION;
use freeflow_protocol::admin::{
    CmStatus, NetworkStatus, PeersStatus, QpStatus, RouterStatus, VnicStatus, WireFaults, WireStatus,
};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// A read of a part of the host. `kind`: of the answer; `field`: where the status is in it.
struct Part {
    path: &'static str,
    kind: &'static str,
    field: &'static str,
    description: &'static str,
    schema: Value,
    parameters: Vec<Value>,
    is_paged: bool,
}

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().into()
}

fn page() -> Value {
    parameter("continue", &json!({"type": "string"}), "What the page before says; empty: from the beginning.")
}

fn parts(generator: &mut SchemaGenerator) -> Vec<Part> {
    let vnic = parameter("vnic", &json!({"type": "string"}), "Of this vNIC alone.");
    let whole = |path, kind, description, schema| Part {
        path,
        kind,
        field: "status",
        description,
        schema,
        parameters: Vec::new(),
        is_paged: false,
    };
    let paged =
        |part: Part, more: Vec<Value>| Part { parameters: [more, vec![page()]].concat(), is_paged: true, ..part };
    let list = |path, kind, description, item: Value| {
        let items = json!({"type": "array", "items": item});
        Part { field: "items", ..whole(path, kind, description, items) }
    };
    vec![
        whole("router", "RouterStatus", "What the router has and did.", of::<RouterStatus>(generator)),
        paged(
            list("vnics", "HostVnicList", "The vNICs of the host, in order of id.", of::<VnicStatus>(generator)),
            Vec::new(),
        ),
        paged(
            list("networks", "HostNetworkList", "Its networks, in order of name.", of::<NetworkStatus>(generator)),
            Vec::new(),
        ),
        paged(
            list("qps", "QpList", "Queue pairs and their paths, in order of number.", of::<QpStatus>(generator)),
            vec![vnic],
        ),
        paged(
            whole("wire", "WireStatus", "What goes between hosts; queue pairs by pages.", of::<WireStatus>(generator)),
            Vec::new(),
        ),
        paged(
            whole("cm", "CmStatus", "Connection management; identifiers by pages.", of::<CmStatus>(generator)),
            Vec::new(),
        ),
        whole("peers", "PeersStatus", "What this host knows of the others.", of::<PeersStatus>(generator)),
        whole("lease", "LeaseStatus", "Until when it may use the addresses that its cluster gave it.", lease_schema()),
    ]
}

fn lease_schema() -> Value {
    json!({"type": "object", "required": ["afterS", "untilNs", "isOver"], "properties": {
        "afterS": {"description": "The time after which others may have them, seconds; null: it needs no lease.",
            "type": ["integer", "null"]},
        "untilNs": {"description": "Its end, by CLOCK_BOOTTIME, nanoseconds.", "type": "integer"},
        "isOver": {"description": "Its vNICs in the cluster's networks are stopped.", "type": "boolean"}}})
}

fn document_schema(part: &Part) -> Value {
    let mut schema = json!({
        "type": "object",
        "required": ["apiVersion", "kind", part.field],
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": part.kind},
            part.field: part.schema,
        },
    });
    if part.is_paged {
        schema["properties"]["metadata"] = json!({"type": "object", "required": ["continue"], "properties": {
            "continue": {"description": "Ask with this for the next page; empty: that was all.", "type": "string"}}});
    }
    schema
}

/// A change that makes no object.
fn change(id: &str, description: &str, body: Option<&Value>) -> Value {
    let success = json!({"type": "object", "properties": {
        "apiVersion": {"const": API_VERSION}, "kind": {"const": "Status"}, "status": {"const": "Success"}}});
    let mut operation = json!({
        "operationId": id,
        "description": description,
        "responses": answers(&[("200", answer("It is so.", &success))], &["400", "404", "422"]),
    });
    if let Some(body) = body {
        operation["requestBody"] = json!({"required": true, "content": content(body)});
    }
    operation
}

/// A field of a status may be null, unlike one of a spec: these schemas are made by themselves.
pub fn add(settings: SchemaSettings, schemas: &mut Map<String, Value>, paths: &mut Map<String, Value>) {
    let mut generator = settings.into_generator();
    let name = json!([{"name": "name", "in": "path", "required": true, "schema": {"type": "string"}}]);
    for part in parts(&mut generator) {
        let get = json!({
            "operationId": format!("read{}", part.kind),
            "description": part.description,
            "parameters": part.parameters,
            "responses": answers(&[("200", answer("As it is now.", &document_schema(&part)))], &["400", "404"]),
        });
        paths.insert(format!("{BASE}/hosts/{{name}}/{}", part.path), json!({"parameters": name, "get": get}));
    }
    let lease = json!({"type": "object", "additionalProperties": false, "properties": {
        "afterS": {"type": ["integer", "null"]}, "untilNs": {"type": "integer"}, "isFresh": {"type": "boolean"},
        "barred": {"type": "array", "items": {"type": "string"}}}});
    let put = change("changeLease", "Of the follower of the cluster, when etcd has the host's word.", Some(&lease));
    if let Some(path) = paths.get_mut(&format!("{BASE}/hosts/{{name}}/lease")) {
        path["put"] = put;
    }
    let cluster = json!({"type": "object", "additionalProperties": false, "required": ["isAway"],
        "properties": {"isAway": {"type": "boolean"}}});
    let put = change("noteCluster", "Of the follower of the cluster: a line in the audit log.", Some(&cluster));
    paths.insert(format!("{BASE}/hosts/{{name}}/cluster"), json!({"parameters": name, "put": put}));
    let faults = of::<WireFaults>(&mut generator);
    paths.insert(
        format!("{BASE}/hosts/{{name}}/wire/faults"),
        json!({
            "parameters": name,
            "put": change("setWireFaults", "Loses, delays or spoils packets on purpose from now on.", Some(&faults)),
            "delete": change("endWireFaults", "No more faults.", None),
        }),
    );
    let reload = change("reloadPeers", "Reads the peers file again; one that cannot be used changes nothing.", None);
    paths.insert(format!("{BASE}/hosts/{{name}}/peers/reload"), json!({"parameters": name, "post": reload}));
    let body = json!({"type": "object", "additionalProperties": false, "required": ["dataPath"],
        "properties": {"dataPath": {"enum": ["auto", "direct", "routed"]}}});
    let put = change("setDataPath", "The same as spec.dataPath; answers when QPs at work follow it.", Some(&body));
    paths.insert(format!("{BASE}/networks/{{name}}/dataPath"), json!({"parameters": name, "put": put}));
    for (name, schema) in generator.take_definitions(true) {
        let before = schemas.insert(name, schema.clone());
        assert!(before.is_none_or(|before| before == schema), "two schemas of one name");
    }
}
