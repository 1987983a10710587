//! Files that declare objects: YAML documents (or JSON, which is YAML), each value with its line.
//!
//! Checked here: a document is an object with a known kind and a name. The router checks the fields.
//! The cost of a text is bounded: its nodes, its depth, the nodes that aliases repeat.
//! YAML 1.2: `no` is a word, not false.
//!
//! ```
//! let text = "kind: Network\nmetadata:\n  name: red\nspec:\n  cidrs: [10.1.0.0/16]\n";
//! let items = freeflow_manifest::parse("red.yaml", text).unwrap();
//! assert_eq!(items[0].name, "red");
//! // A refusal of the router names the line of the field.
//! assert_eq!(items[0].explain("spec.cidrs[0]", "overlaps"), "red.yaml (line 5): spec.cidrs[0]: overlaps");
//!
//! let refused = freeflow_manifest::parse("red.yaml", "kind: Netwrok").unwrap_err();
//! assert!(refused.to_string().starts_with("red.yaml"));
//! ```
#![forbid(unsafe_code)]

use freeflow_orchestrator::objects::ObjectKind;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;
use std::collections::BTreeMap;
use std::fmt;

/// Objects that one command may send.
pub const ITEM_COUNT_MAX: usize = 10_000;
const DEPTH_MAX: usize = 32;
/// Values of one text, those that aliases repeat included.
pub const NODE_COUNT_MAX: usize = 500_000;
/// Documents of one file.
const DOCUMENT_COUNT_MAX: usize = ITEM_COUNT_MAX;
const ANCHOR_COUNT_MAX: usize = 256;
const ALIAS_COUNT_MAX: usize = 1024;
/// Nodes that aliases stand for, in all.
const REPLAYED_COUNT_MAX: usize = 10_000;

/// Why a text is refused: one line, which begins with the file's name and has the place where it is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(String);

type Result<T> = std::result::Result<T, ParseError>;

/// An object as it was written, and its place.
#[derive(Clone, Debug)]
pub struct Item {
    /// The object as JSON.
    pub value: Value,
    pub kind: ObjectKind,
    /// `metadata.name`; not empty.
    pub name: String,
    file: String,
    /// From 1; documents that are empty don't count.
    document: usize,
    /// The only one of its file.
    is_alone: bool,
    /// Lines of its values, by path: `spec.cidrs[0]`.
    lines: BTreeMap<String, u64>,
}

impl Item {
    /// `FILE (document 2, line 7): spec.cidrs[0]: message`.
    pub fn explain(&self, field: &str, message: &str) -> String {
        let label = if field.is_empty() { String::new() } else { format!("{field}: ") };
        format!("{}: {label}{message}", self.place(field))
    }

    /// `FILE (document 2, line 7)`: the place of a field, or of the object that lacks it.
    pub fn place(&self, field: &str) -> String {
        let line = self.line_of(field);
        match (self.is_alone, line) {
            (true, 0) => self.file.clone(),
            (true, line) => format!("{} (line {line})", self.file),
            (false, 0) => format!("{} (document {})", self.file, self.document),
            (false, line) => format!("{} (document {}, line {line})", self.file, self.document),
        }
    }

    /// The line of a field, from 1, or of the object that lacks it; 0 if it isn't known.
    pub fn line_of(&self, field: &str) -> u64 {
        let mut path = field;
        loop {
            if let Some(line) = self.lines.get(path) {
                return *line;
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => return self.lines.get("").copied().unwrap_or(0),
            }
        }
    }
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: DEPTH_MAX,
            max_nodes: NODE_COUNT_MAX,
            max_documents: DOCUMENT_COUNT_MAX,
            max_anchors: ANCHOR_COUNT_MAX,
            max_aliases: ALIAS_COUNT_MAX,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: REPLAYED_COUNT_MAX,
            max_alias_expansions_per_anchor: ALIAS_COUNT_MAX,
        },
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
    }
}

/// The objects of a text, in order. `file` is the name that errors and places give it.
///
/// Errors: no YAML, too large, or a document that is no object with a known kind and a name.
pub fn parse(file: &str, text: &str) -> Result<Vec<Item>> {
    let documents: Vec<Spanned<Node>> =
        serde_saphyr::from_multiple_with_options(text, options()).map_err(|error| unreadable(file, &error))?;
    let is_alone = documents.len() == 1;
    let mut items = Vec::new();
    for (index, document) in documents.into_iter().enumerate() {
        let (document_number, line) = (index + 1, document.referenced.line());
        let place = |line| {
            if is_alone {
                format!("{file} (line {line})")
            } else {
                format!("{file} (document {document_number}, line {line})")
            }
        };
        let parts = match document.value {
            // A list as `get -o yaml` prints it.
            Node::Map(entries) if is_list(&entries) => {
                let items = entries.into_iter().find(|(key, _)| key == "items").map(|(_, items)| items.value);
                match items {
                    Some(Node::List(items)) => items,
                    _ => return Err(ParseError(format!("{}: items: it has to be a list", place(line)))),
                }
            }
            value => vec![Spanned { value, ..document }],
        };
        for part in parts {
            let line = part.referenced.line();
            let mut lines = BTreeMap::new();
            let value = part.value.into_value(&mut String::new(), line, &mut lines);
            let (kind, name) = identity(&value).map_err(|why| ParseError(format!("{}: {why}", place(line))))?;
            let file = file.to_string();
            items.push(Item { value, kind, name, file, document: document_number, is_alone, lines });
        }
    }
    Ok(items)
}

fn unreadable(file: &str, error: &serde_saphyr::Error) -> ParseError {
    let text = error.without_snippet().to_string();
    ParseError(format!("{file}: {}", text.lines().next().unwrap_or("it can't be read")))
}

fn is_list(entries: &[(String, Spanned<Node>)]) -> bool {
    let kind = entries.iter().find(|(key, _)| key == "kind").map(|(_, kind)| &kind.value);
    let named = matches!(kind, Some(Node::Scalar(Value::String(kind))) if kind.ends_with("List"));
    named && entries.iter().any(|(key, _)| key == "items")
}

/// Kind and name, without which nothing can be asked.
fn identity(value: &Value) -> std::result::Result<(ObjectKind, String), String> {
    if !value.is_object() {
        return Err("an object with apiVersion, kind, metadata and spec is expected".into());
    }
    let word = value["kind"].as_str().ok_or("kind: it is missing")?;
    let kind = ObjectKind::ALL.iter().copied().find(|kind| kind.name() == word).ok_or_else(|| {
        let mut names: Vec<&str> = ObjectKind::ALL.iter().map(|kind| kind.name()).collect();
        names.sort_unstable();
        format!("kind: there is no {word:?}, but {}", names.join(", "))
    })?;
    match value["metadata"]["name"].as_str() {
        Some(name) if !name.is_empty() => Ok((kind, name.to_string())),
        _ => Err("metadata.name: it is missing, or is no text (write numbers in quotes)".into()),
    }
}

/// YAML without its spellings.
#[derive(Debug)]
enum Node {
    Scalar(Value),
    List(Vec<Spanned<Node>>),
    Map(Vec<(String, Spanned<Node>)>),
}

impl Node {
    /// As JSON; the line of each value goes into `lines`.
    fn into_value(self, path: &mut String, line: u64, lines: &mut BTreeMap<String, u64>) -> Value {
        lines.insert(path.clone(), line);
        let length = path.len();
        match self {
            Self::Scalar(value) => value,
            Self::List(list) => {
                let mut values = Vec::new();
                for (index, item) in list.into_iter().enumerate() {
                    path.push_str(&format!("[{index}]"));
                    values.push(item.value.into_value(path, item.referenced.line(), lines));
                    path.truncate(length);
                }
                Value::Array(values)
            }
            Self::Map(entries) => {
                let mut map = Map::new();
                for (key, item) in entries {
                    if length > 0 {
                        path.push('.');
                    }
                    path.push_str(&key);
                    let value = item.value.into_value(path, item.referenced.line(), lines);
                    map.insert(key, value);
                    path.truncate(length);
                }
                Value::Object(map)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> std::result::Result<Node, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("a number that is none"))?;
        Ok(Node::Scalar(Value::Number(number)))
    }

    fn visit_str<E: Error>(self, value: &str) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_unit<E: Error>(self) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_none<E: Error>(self) -> std::result::Result<Node, E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> std::result::Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = access.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Map(entries))
    }
}

/// A value as YAML, for people; [`parse`] reads it back.
pub fn to_yaml(value: &Value) -> String {
    serde_saphyr::to_string(value).expect("JSON can be written as YAML")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {name: blue}\nspec:\n  cidrs:\n  - 10.1.0.0/16\n  \
                       - x\n---\n# nothing\n---\nkind: QosClass\nmetadata:\n  name: slow\nspec:\n  vnic: {rate: 1Gbit}\n  \
                       weight: 3\n";

    #[test]
    fn documents_are_numbered_and_values_have_lines() {
        let items = parse("f.yaml", TWO).unwrap();
        assert_eq!(items.len(), 2);
        assert_eq!((items[0].kind.name(), items[0].name.as_str()), ("Network", "blue"));
        assert_eq!(items[0].value["spec"]["cidrs"][1], "x");
        assert_eq!(items[0].explain("spec.cidrs[1]", "bad"), "f.yaml (document 1, line 7): spec.cidrs[1]: bad");
        assert_eq!(items[0].explain("spec.tenant", "bad"), "f.yaml (document 1, line 5): spec.tenant: bad");
        assert_eq!(items[1].value["spec"]["weight"], 3);
        assert!(items[1].explain("spec.vnic.rate", "bad").starts_with("f.yaml (document 2, line 15)"));
        let alone = &parse("f.yaml", TWO.split("---").next().unwrap()).unwrap()[0];
        assert_eq!(alone.explain("", "bad"), "f.yaml (line 1): bad");
    }

    #[test]
    fn json_and_lists_are_read_as_well() {
        let json = r#"{"kind": "NetworkList", "items": [{"kind": "Network", "metadata": {"name": "a"}},
            {"kind": "Network", "metadata": {"name": "b"}}]}"#;
        let names: Vec<String> = parse("f", json).unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(names, ["a", "b"]);
        // The printed text can be read.
        let value = &parse("f", TWO).unwrap()[0].value;
        assert_eq!(parse("f", &to_yaml(value)).unwrap()[0].value, *value);
    }

    #[test]
    fn words_stay_words() {
        let text = "kind: Vnic\nmetadata: {name: v, labels: {a: no, b: \"1\", c: on, d: ~}}";
        let labels = &parse("f", text).unwrap()[0].value["metadata"]["labels"];
        assert_eq!((&labels["a"], &labels["b"], &labels["c"]), (&"no".into(), &"1".into(), &"on".into()));
        for text in ["no", "1", "on", "~", "null", "true", "1e3", "0x1f", " x", "a: b", "", "2026-01-01", "line\nline"]
        {
            let value = serde_json::json!({"kind": "Vnic", "metadata": {"name": "v", "labels": {"a": text}}});
            assert_eq!(parse("f", &to_yaml(&value)).unwrap()[0].value, value, "{text:?}");
        }
    }

    #[test]
    fn what_can_not_be_meant_is_refused_with_its_place() {
        for (text, part) in [
            ("- a\n- b\n", "an object with apiVersion"),
            ("kind: Pod\nmetadata: {name: x}\n", "there is no \"Pod\""),
            ("kind: Network\nmetadata: {name: 1}\n", "metadata.name"),
            ("kind: Network\nkind: Group\nmetadata: {name: x}\n", "line 2"),
            ("kind: [\n", "line"),
            ("kind: Network\n  bad: indent\n", "line 2"),
            ("kind: !!python/object x\n", "line 1"),
        ] {
            let failure = parse("f.yaml", text).unwrap_err().to_string();
            assert!(failure.starts_with("f.yaml") && failure.contains(part), "{text:?}: {failure}");
        }
    }

    #[test]
    fn files_that_grow_when_read_are_refused() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..10 {
            let before = format!("*a{}", level - 1);
            bomb.push_str(&format!("a{level}: &a{level} [{}]\n", vec![before; 10].join(", ")));
        }
        let begin = std::time::Instant::now();
        assert!(parse("bomb", &bomb).is_err());
        assert!(parse("deep", &"[".repeat(100_000)).is_err());
        assert!(parse("deep", &"{a: ".repeat(1000)).is_err());
        assert!(parse("many", &"---\nkind: Network\n".repeat(DOCUMENT_COUNT_MAX + 1)).is_err());
        assert!(begin.elapsed().as_secs() < 60);
    }
}
