//! Manifests that people write: files of YAML documents (or JSON, which is YAML), as objects to be
//! sent, each value with its line.
//!
//! Nothing is checked here but that it is an object with a kind: the router knows what fields there
//! are. What a file may cost is bounded: its size, its nodes, its depth, what aliases may repeat.
//! YAML 1.2: `no` is a word, not false.

use super::api::{Cause, EXIT_REFUSED};
use super::kinds::Kind;
use crate::failure::{Context, Failure, Result, fail};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Of all files of a call together.
const BYTES_MAX: u64 = 8 << 20;
const FILE_COUNT_MAX: usize = 1024;
pub const ITEM_COUNT_MAX: usize = 10_000;
const DEPTH_MAX: usize = 32;
const NODE_COUNT_MAX: usize = 500_000;
/// Documents of one file.
const DOCUMENT_COUNT_MAX: usize = ITEM_COUNT_MAX;
const ANCHOR_COUNT_MAX: usize = 256;
const ALIAS_COUNT_MAX: usize = 1024;
/// Nodes that aliases stand for, in all.
const REPLAYED_COUNT_MAX: usize = 10_000;
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// An object as it was written, and where.
#[derive(Clone, Debug)]
pub struct Item {
    pub value: Value,
    pub kind: Kind,
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
    pub fn explain(&self, cause: &Cause) -> String {
        let field = if cause.field.is_empty() { String::new() } else { format!("{}: ", cause.field) };
        format!("{}: {field}{}", self.place(&cause.field), cause.message)
    }

    fn place(&self, field: &str) -> String {
        let line = self.line_of(field);
        match (self.is_alone, line) {
            (true, 0) => self.file.clone(),
            (true, line) => format!("{} (line {line})", self.file),
            (false, 0) => format!("{} (document {})", self.file, self.document),
            (false, line) => format!("{} (document {}, line {line})", self.file, self.document),
        }
    }

    /// The line of a field, or of what it is missing in; 0 if it isn't known.
    fn line_of(&self, field: &str) -> u64 {
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

/// All objects of `-f`: a file, the YAML and JSON files of a folder in order of name, or `-` for standard input.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    let mut left = BYTES_MAX;
    for path in paths {
        for (name, text) in texts(path, &mut left)? {
            items.extend(parse(&name, &text).map_err(|failure| failure.or_code(EXIT_REFUSED))?);
            if items.len() > ITEM_COUNT_MAX {
                fail!("{name}: these are more than {ITEM_COUNT_MAX} objects; apply them in parts");
            }
        }
    }
    if items.is_empty() {
        return Err(Failure::new("there is no object in what -f names").with_code(EXIT_REFUSED));
    }
    let mut seen = BTreeMap::new();
    for item in &items {
        if let Some(first) = seen.insert((item.kind.plural, item.name.as_str()), item) {
            let text =
                format!("{}: {} {} is in {} already", item.place(""), item.kind.singular(), item.name, first.place(""));
            return Err(Failure::new(text).with_code(EXIT_REFUSED));
        }
    }
    Ok(items)
}

/// Names and contents of the files that a path stands for.
fn texts(path: &Path, left: &mut u64) -> Result<Vec<(String, String)>> {
    if path == Path::new("-") {
        return Ok(vec![("standard input".into(), text_of(std::io::stdin(), "standard input", left)?)]);
    }
    let name = path.display().to_string();
    if !path.is_dir() {
        let file = File::open(path).context(&name)?;
        return Ok(vec![(name.clone(), text_of(file, &name, left)?)]);
    }
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(path).context(&name)? {
        let file = entry.context(&name)?.path();
        let wanted =
            file.extension().and_then(|extension| extension.to_str()).is_some_and(|it| EXTENSIONS.contains(&it));
        if wanted && file.is_file() {
            files.push(file);
        }
        if files.len() > FILE_COUNT_MAX {
            fail!("{name}: more than {FILE_COUNT_MAX} files");
        }
    }
    files.sort();
    let read = |file: PathBuf| {
        let name = file.display().to_string();
        Ok((name.clone(), text_of(File::open(&file).context(&name)?, &name, left)?))
    };
    files.into_iter().map(read).collect()
}

fn text_of(input: impl Read, name: &str, left: &mut u64) -> Result<String> {
    let mut text = String::new();
    input.take(*left + 1).read_to_string(&mut text).context(name)?;
    *left = left
        .checked_sub(text.len() as u64)
        .ok_or_else(|| Failure::new(format!("{name}: these files are longer than {} MiB together", BYTES_MAX >> 20)))?;
    Ok(text)
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

/// The objects of a text.
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
                    _ => return Err(Failure::new(format!("{}: items: it has to be a list", place(line)))),
                }
            }
            value => vec![Spanned { value, ..document }],
        };
        for part in parts {
            let line = part.referenced.line();
            let mut lines = BTreeMap::new();
            let value = part.value.into_value(&mut String::new(), line, &mut lines);
            let (kind, name) = identity(&value).map_err(|why| Failure::new(format!("{}: {why}", place(line))))?;
            let file = file.to_string();
            items.push(Item { value, kind, name, file, document: document_number, is_alone, lines });
        }
    }
    Ok(items)
}

fn unreadable(file: &str, error: &serde_saphyr::Error) -> Failure {
    let text = error.without_snippet().to_string();
    Failure::new(format!("{file}: {}", text.lines().next().unwrap_or("it can't be read"))).with_code(EXIT_REFUSED)
}

fn is_list(entries: &[(String, Spanned<Node>)]) -> bool {
    let kind = entries.iter().find(|(key, _)| key == "kind").map(|(_, kind)| &kind.value);
    let named = matches!(kind, Some(Node::Scalar(Value::String(kind))) if kind.ends_with("List"));
    named && entries.iter().any(|(key, _)| key == "items")
}

/// Kind and name, without which nothing can be asked.
fn identity(value: &Value) -> std::result::Result<(Kind, String), String> {
    if !value.is_object() {
        return Err("an object with apiVersion, kind, metadata and spec is expected".into());
    }
    let word = value["kind"].as_str().ok_or("kind: it is missing")?;
    let kind = Kind::of_object(word).ok_or_else(|| {
        let mut names: Vec<&str> = super::kinds::KINDS.iter().map(|kind| kind.name).collect();
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

/// As YAML, for people and to be applied again.
pub fn to_yaml(value: &Value) -> String {
    serde_saphyr::to_string(value).expect("JSON can be written as YAML")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {name: blue}\nspec:\n  cidrs:\n  - 10.1.0.0/16\n  \
                       - x\n---\n# nothing\n---\nkind: QosClass\nmetadata:\n  name: slow\nspec:\n  vnic: {rate: 1Gbit}\n  \
                       weight: 3\n";

    fn cause(field: &str) -> Cause {
        Cause { field: field.into(), message: "bad".into() }
    }

    #[test]
    fn documents_are_numbered_and_values_have_lines() {
        let items = parse("f.yaml", TWO).unwrap();
        assert_eq!(items.len(), 2);
        assert_eq!((items[0].kind.name, items[0].name.as_str()), ("Network", "blue"));
        assert_eq!(items[0].value["spec"]["cidrs"][1], "x");
        assert_eq!(items[0].explain(&cause("spec.cidrs[1]")), "f.yaml (document 1, line 7): spec.cidrs[1]: bad");
        assert_eq!(items[0].explain(&cause("spec.tenant")), "f.yaml (document 1, line 5): spec.tenant: bad");
        assert_eq!(items[1].value["spec"]["weight"], 3);
        assert!(items[1].explain(&cause("spec.vnic.rate")).starts_with("f.yaml (document 2, line 15)"));
        let alone = &parse("f.yaml", TWO.split("---").next().unwrap()).unwrap()[0];
        assert_eq!(alone.explain(&cause("")), "f.yaml (line 1): bad");
    }

    #[test]
    fn json_and_lists_are_read_as_well() {
        let json = r#"{"kind": "NetworkList", "items": [{"kind": "Network", "metadata": {"name": "a"}},
            {"kind": "Network", "metadata": {"name": "b"}}]}"#;
        let names: Vec<String> = parse("f", json).unwrap().into_iter().map(|item| item.name).collect();
        assert_eq!(names, ["a", "b"]);
        // Printed objects can be read.
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
        let mut left = 3;
        assert!(text_of(&b"abcd"[..], "x", &mut left).is_err());
        assert_eq!(text_of(&b"abc"[..], "x", &mut left).unwrap(), "abc");
    }
}
