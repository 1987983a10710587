//! Objects of a kind, and what is asked about them.
use super::client::{Body, Client};
use super::configuration::invalid;
use super::error::ApiError;
use hyper::Method;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::marker::PhantomData;

/// Objects in a page of a list. Where a page is too long an answer, it is asked for with fewer: tenants make objects,
/// and may make them large.
const PAGE_COUNT: usize = 500;
const FEWER: usize = 8;
/// Objects of a list in all: a broken server could fill our memory otherwise.
const LIST_COUNT_MAX: usize = 1 << 18;

/// A kind by its place in the API: group (empty for the core), version and plural.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    pub group: Cow<'static, str>,
    pub version: Cow<'static, str>,
    pub plural: Cow<'static, str>,
}

/// Text as a part of a path or query (RFC 3986, section 2.1).
pub(super) fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'-' | b'.' | b'_' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => encoded.push(char::from(byte)),
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

impl Kind {
    pub const fn new(group: &'static str, version: &'static str, plural: &'static str) -> Self {
        Self { group: Cow::Borrowed(group), version: Cow::Borrowed(version), plural: Cow::Borrowed(plural) }
    }

    /// The same in another version of its group.
    #[must_use]
    pub fn at_version(&self, version: &str) -> Self {
        Self { version: Cow::Owned(version.into()), ..self.clone() }
    }

    /// `apiVersion` of its objects.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_string() } else { format!("{}/{}", self.group, self.version) }
    }

    /// # Errors
    /// `Invalid`: a name that is a path's part by itself, or none.
    pub fn path(&self, namespace: Option<&str>, name: Option<&str>) -> Result<String, ApiError> {
        let part = |text: &str| match text {
            "" | "." | ".." => Err(invalid(format!("`{text}` is no name of an object"))),
            text => Ok(encoded(text)),
        };
        let mut path = if self.group.is_empty() { "/api".into() } else { format!("/apis/{}", self.group) };
        path.push_str(&format!("/{}", self.version));
        if let Some(namespace) = namespace {
            path.push_str(&format!("/namespaces/{}", part(namespace)?));
        }
        path.push_str(&format!("/{}", self.plural));
        if let Some(name) = name {
            path.push_str(&format!("/{}", part(name)?));
        }
        Ok(path)
    }
}

/// Which objects of a collection; empty: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Such as `app=web`.
    pub labels: String,
    /// Such as `spec.nodeName=node1`; which fields there are depends on the kind.
    pub fields: String,
}

impl Selection {
    pub(super) fn query(&self) -> String {
        [("labelSelector", &self.labels), ("fieldSelector", &self.fields)]
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(key, value)| format!("&{key}={}", encoded(value)))
            .collect()
    }
}

#[derive(Deserialize)]
struct Page {
    metadata: PageMetadata,
    #[serde(default)]
    items: Option<Vec<Value>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    r#continue: Option<String>,
}

/// The object that a deletion means, and no other of its name.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preconditions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<String>,
}

/// Objects of a kind, of a namespace or all. `T` has the fields that the caller uses.
pub struct Collection<T> {
    client: Client,
    kind: Kind,
    namespace: Option<String>,
    objects: PhantomData<fn() -> T>,
}

impl<T> Clone for Collection<T> {
    fn clone(&self) -> Self {
        Self::new(self.client.clone(), self.kind.clone(), self.namespace.clone())
    }
}

impl<T> Collection<T> {
    fn new(client: Client, kind: Kind, namespace: Option<String>) -> Self {
        Self { client, kind, namespace, objects: PhantomData }
    }

    /// All objects of a kind: those of all namespaces, or of a kind without.
    pub fn all(client: &Client, kind: &Kind) -> Self {
        Self::new(client.clone(), kind.clone(), None)
    }

    /// Objects of a namespace.
    pub fn of_namespace(client: &Client, kind: &Kind, namespace: &str) -> Self {
        Self::new(client.clone(), kind.clone(), Some(namespace.into()))
    }

    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    fn path(&self, name: Option<&str>) -> Result<String, ApiError> {
        self.kind.path(self.namespace.as_deref(), name)
    }

    /// Path and query of a list or watch.
    pub(super) fn query(&self, selection: &Selection, more: &str) -> Result<String, ApiError> {
        Ok(format!("{}?{more}{}", self.path(None)?, selection.query()))
    }

    /// All objects, page by page: `take` has one after the other. The resource version at which they were all there.
    ///
    /// # Errors
    /// See [`ApiError`]; `is_gone` where the list took so long that its pages have expired.
    pub async fn list(&self, selection: &Selection, mut take: impl FnMut(Value)) -> Result<String, ApiError> {
        let (mut next, mut limit, mut count) = (String::new(), PAGE_COUNT, 0);
        loop {
            let position = if next.is_empty() { String::new() } else { format!("&continue={}", encoded(&next)) };
            let path = self.query(selection, &format!("limit={limit}{position}"))?;
            let page: Page = match self.client.exchange(Method::GET, &path, Body::None).await {
                Err(ApiError::TooLong(_)) if limit > 1 => {
                    limit = (limit / FEWER).max(1);
                    continue;
                }
                page => page?,
            };
            let items = page.items.unwrap_or_default();
            count += items.len();
            items.into_iter().for_each(&mut take);
            next = page.metadata.r#continue.unwrap_or_default();
            if next.is_empty() {
                return Ok(page.metadata.resource_version);
            }
            if count > LIST_COUNT_MAX {
                return Err(ApiError::Malformed(format!("more than {LIST_COUNT_MAX} {}", self.kind.plural)));
            }
        }
    }

    /// # Errors
    /// See [`ApiError`].
    pub async fn delete(&self, name: &str, preconditions: &Preconditions) -> Result<(), ApiError> {
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
        let path = self.path(Some(name))?;
        self.client.exchange::<Value>(Method::DELETE, &path, Body::Json(&options)).await.map(|_| ())
    }
}

impl<T: DeserializeOwned> Collection<T> {
    /// # Errors
    /// See [`ApiError`].
    pub async fn get(&self, name: &str) -> Result<T, ApiError> {
        self.client.exchange(Method::GET, &self.path(Some(name))?, Body::None).await
    }

    /// `None`: the server says that it has none of that name.
    ///
    /// # Errors
    /// See [`ApiError`]; also where the server does not have the kind.
    pub async fn find(&self, name: &str) -> Result<Option<T>, ApiError> {
        match self.get(name).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object.
    ///
    /// # Errors
    /// See [`ApiError`]; `is_already_there` where there is one of its name.
    pub async fn create(&self, object: &Value) -> Result<T, ApiError> {
        self.client.exchange(Method::POST, &self.path(None)?, Body::Json(object)).await
    }

    /// Replaces an object by this one, with all its fields; with its `resourceVersion` only the one that was read.
    ///
    /// # Errors
    /// See [`ApiError`]; `is_conflict` where it has changed since.
    pub async fn replace(&self, name: &str, object: &Value) -> Result<T, ApiError> {
        self.client.exchange(Method::PUT, &self.path(Some(name))?, Body::Json(object)).await
    }

    /// Changes the fields that the patch has (RFC 7386); with `metadata.resourceVersion` only of the object that was
    /// read.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn merge(&self, name: &str, patch: &Value) -> Result<T, ApiError> {
        self.client.exchange(Method::PATCH, &self.path(Some(name))?, Body::MergePatch(patch)).await
    }

    /// The same in its status.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn merge_status(&self, name: &str, patch: &Value) -> Result<T, ApiError> {
        let path = format!("{}/status", self.path(Some(name))?);
        self.client.exchange(Method::PATCH, &path, Body::MergePatch(patch)).await
    }

    /// Replaces an object's status.
    ///
    /// # Errors
    /// See [`ApiError`]; `is_conflict` where the object has changed since.
    pub async fn replace_status(&self, name: &str, object: &Value) -> Result<T, ApiError> {
        let path = format!("{}/status", self.path(Some(name))?);
        self.client.exchange(Method::PUT, &path, Body::Json(object)).await
    }

    /// Server-side apply: creates or changes the object so that it has these fields, which are `manager`'s then, also
    /// where they were another's.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn apply(&self, name: &str, manager: &str, object: &Value) -> Result<T, ApiError> {
        let path = format!("{}?fieldManager={}&force=true", self.path(Some(name))?, encoded(manager));
        self.client.exchange(Method::PATCH, &path, Body::Apply(object)).await
    }

    /// The same of its status.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn apply_status(&self, name: &str, manager: &str, object: &Value) -> Result<T, ApiError> {
        let path = format!("{}/status?fieldManager={}&force=true", self.path(Some(name))?, encoded(manager));
        self.client.exchange(Method::PATCH, &path, Body::Apply(object)).await
    }
}
