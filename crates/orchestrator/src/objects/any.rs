//! An object of whatever kind, as it comes from a writer and goes to a reader.
use super::{API_VERSION, AccessRule, Group, Host, Kind, Metadata, Network, Object, QosClass, Quota, Vnic};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;

/// An object of one of the kinds as its own type.
pub type Typed<K> = Object<<K as Kind>::Spec, <K as Kind>::Status>;

/// Error of one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// `spec.cidrs[0]`; empty if it is the object as a whole.
    pub field: String,
    /// A sentence for people.
    pub message: String,
}

impl Cause {
    /// An error of that field.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.field, self.message) }
    }
}

/// Why something is no object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// Errors, field by field; at least one.
    pub causes: Vec<Cause>,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, cause) in self.causes.iter().enumerate() {
            write!(f, "{}{cause}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl core::error::Error for Invalid {}

macro_rules! any {
    ($($kind:ident),*) => {
        /// A kind, as a value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs, reason = "the kinds, by their names")]
        pub enum ObjectKind { $($kind),* }

        impl ObjectKind {
            /// All kinds, in the order of the list.
            pub const ALL: &'static [Self] = &[$(Self::$kind),*];

            /// `QosClass`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => <$kind as Kind>::KIND),* }
            }

            /// `qosclasses`.
            pub const fn plural(self) -> &'static str {
                match self { $(Self::$kind => <$kind as Kind>::PLURAL),* }
            }
        }

        /// An object of any kind.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "the kinds, by their names")]
        pub enum AnyObject { $($kind(Typed<$kind>)),* }

        impl AnyObject {
            /// Its kind.
            pub fn kind(&self) -> ObjectKind {
                match self { $(Self::$kind(_) => ObjectKind::$kind),* }
            }

            /// Its name, labels and version.
            pub fn metadata(&self) -> &Metadata {
                match self { $(Self::$kind(object) => &object.metadata),* }
            }

            /// Its name, labels and version, to be changed.
            pub fn metadata_mut(&mut self) -> &mut Metadata {
                match self { $(Self::$kind(object) => &mut object.metadata),* }
            }

            /// Removes the status, which only the router gives.
            pub fn clear_status(&mut self) {
                match self { $(Self::$kind(object) => object.status = None),* }
            }

            fn parse(kind: ObjectKind, value: Value) -> Result<Self, Invalid> {
                match kind { $(ObjectKind::$kind => typed::<$kind>(value).map(Self::$kind)),* }
            }
        }

        impl Serialize for AnyObject {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self { $(Self::$kind(object) => object.serialize(serializer)),* }
            }
        }

        $(impl From<Typed<$kind>> for AnyObject {
            fn from(object: Typed<$kind>) -> Self {
                Self::$kind(object)
            }
        })*
    };
}

any!(Network, Group, AccessRule, QosClass, Quota, Vnic, Host);

impl ObjectKind {
    /// By name or plural, in whatever case.
    pub fn of(text: &str) -> Option<Self> {
        let is = |kind: &&Self| kind.name().eq_ignore_ascii_case(text) || kind.plural().eq_ignore_ascii_case(text);
        Self::ALL.iter().find(is).copied()
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl AnyObject {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.metadata().name
    }
}

impl<'de> Deserialize<'de> for AnyObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_object(&Value::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl<S, T> Object<S, T> {
    /// Without a status.
    pub fn new<K: Kind<Spec = S, Status = T>>(metadata: Metadata, spec: S) -> Self {
        Self { api_version: API_VERSION.into(), kind: K::KIND.into(), metadata, spec, status: None }
    }
}

fn typed<K: Kind>(value: Value) -> Result<Typed<K>, Invalid>
where
    Typed<K>: DeserializeOwned,
{
    serde_path_to_error::deserialize(value).map_err(|error| {
        let (path, inner) = (error.path().to_string(), error.into_inner().to_string());
        let at = if path == "." { String::new() } else { path };
        Invalid { causes: vec![named(at, inner)] }
    })
}

/// A field that is missing or unknown is named itself, and not what it would be in.
fn named(at: String, message: String) -> Cause {
    let field = ["missing field `", "unknown field `"].iter().find_map(|what| {
        let (field, _) = message.strip_prefix(what)?.split_once('`')?;
        (!at.ends_with(&format!(".{field}")) && at != field).then(|| String::from(field))
    });
    match field {
        Some(field) if at.is_empty() => Cause::new(field, message),
        Some(field) => Cause::new(format!("{at}.{field}"), message),
        None => Cause::new(at, message),
    }
}

/// The first field without a value. In YAML that is easily written (`rate:`), and must not take away what was there.
fn null_in(value: &Value, at: &str) -> Option<String> {
    match value {
        Value::Null => Some(at.into()),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(number, item)| null_in(item, &format!("{at}[{number}]")))
        }
        Value::Object(fields) => fields.iter().find_map(|(key, field)| null_in(field, &format!("{at}.{key}"))),
        _ => None,
    }
}

/// An object from JSON. What it says of its status is ignored. Whether its values make sense,
/// [`crate::State::plan`] says.
///
/// # Errors
/// [`Invalid`]: not an object of a known kind, or one with unknown, missing or bad fields.
pub fn parse_object(value: &Value) -> Result<AnyObject, Invalid> {
    let invalid = |field: &str, message: String| Err(Invalid { causes: vec![Cause::new(field, message)] });
    let Some(fields) = value.as_object() else {
        return invalid("", "an object is wanted, with apiVersion, kind, metadata and spec".into());
    };
    match fields.get("apiVersion").and_then(Value::as_str) {
        Some(API_VERSION) => {}
        Some(other) => return invalid("apiVersion", format!("{other} is not known, {API_VERSION} is")),
        None => return invalid("apiVersion", format!("missing; it is {API_VERSION}")),
    }
    let Some(kind) = fields.get("kind").and_then(Value::as_str) else {
        return invalid("kind", "missing".into());
    };
    let Some(kind) = ObjectKind::ALL.iter().find(|known| known.name() == kind).copied() else {
        let known: Vec<&str> = ObjectKind::ALL.iter().map(|kind| kind.name()).collect();
        return invalid("kind", format!("{kind} is not known; there are {}", known.join(", ")));
    };
    let written = ["metadata", "spec"].into_iter().filter_map(|part| Some((part, fields.get(part)?)));
    if let Some(field) = written.into_iter().find_map(|(part, value)| null_in(value, part)) {
        return invalid(&field, "has no value (null): give it one, or leave it out".into());
    }
    let mut fields = fields.clone();
    fields.remove("status");
    AnyObject::parse(kind, Value::Object(fields))
}
