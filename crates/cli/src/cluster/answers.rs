//! The requests of `apply`, `get`, `describe`, `diff` and `delete`, answered from etcd: for all hosts of a cluster,
//! with the credential of the caller. The answers are those of a router's API.
use super::views;
use crate::control::api::{Answer, BASE, Cause, Details, Refusal, Trouble, decoded};
use crate::failure::{Failure, Result};
use crate::output;
use freeflow_cluster::{ClusterFile, Follow, News, Operator, Scope, View};
use freeflow_orchestrator::objects::{AnyObject, Invalid, Labels, ObjectKind, parse_object};
use freeflow_orchestrator::{Command, Outcome, Reason, Revision, Selector, State, Writer};
use hyper::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Of an `apply` of a backup: managers are as the objects say. A cluster's alone.
pub const RESTORE: &str = "restore";
/// Longest wait for news; then it is waited on.
const NEWS_TIME: Duration = Duration::from_secs(60);

/// The objects that are declared for all hosts.
pub struct ClusterApi {
    file: ClusterFile,
    operator: Operator,
    /// The list that was answered last, from which a watch goes on.
    listed: Vec<Value>,
}

impl From<freeflow_orchestrator::Refusal> for Refusal {
    fn from(refusal: freeflow_orchestrator::Refusal) -> Self {
        let message = refusal.to_string();
        let (kind, name) = refusal.object.map(|(kind, name)| (kind.name().to_owned(), name)).unzip();
        let causes = refusal.causes.into_iter().map(|cause| Cause { field: cause.field, message: cause.message });
        Self {
            code: refusal.reason.http_status(),
            reason: refusal.reason.word().into(),
            message,
            details: Details { kind, name, index: None, causes: causes.collect(), users: refusal.users },
        }
    }
}

fn refused(refusal: impl Into<Refusal>) -> Trouble {
    Trouble::Refused(Box::new(refusal.into()))
}

fn not_found(kind: ObjectKind, name: &str) -> Trouble {
    refused(freeflow_orchestrator::Refusal::new(Reason::NotFound, "the cluster has none").about(kind, name))
}

fn invalid(invalid: Invalid, index: usize, item: &Value) -> Trouble {
    let causes: Vec<Cause> = invalid
        .causes
        .iter()
        .map(|cause| Cause { field: cause.field.clone(), message: cause.message.clone() })
        .collect();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let details = Details {
        kind: text(&item["kind"]),
        name: text(&item["metadata"]["name"]),
        index: Some(index),
        causes,
        users: Vec::new(),
    };
    let (code, reason) = (Reason::Invalid.http_status(), Reason::Invalid.word().into());
    Trouble::Refused(Box::new(Refusal { code, reason, message: invalid.to_string(), details }))
}

fn kind_of(plural: &str) -> Result<ObjectKind> {
    ObjectKind::of(plural).ok_or_else(|| Failure::new(format!("a cluster knows no {plural}")))
}

fn results(revision: Revision, outcomes: &[Outcome]) -> Value {
    let item = |outcome: &Outcome| json!({"kind": outcome.kind.name(), "name": outcome.name, "result": outcome.what, "object": outcome.object});
    json!({"metadata": {"resourceVersion": revision}, "items": outcomes.iter().map(item).collect::<Vec<_>>()})
}

/// The object, and which hosts have followed it.
fn shown(object: &AnyObject, view: &View) -> Value {
    let mut value = serde_json::to_value(object).unwrap_or_default();
    let at = object.metadata().resource_version.unwrap_or_default();
    let (mut count, mut behind, mut refused_by) = (0, Vec::new(), Vec::new());
    for host in view.hosts().keys() {
        let followed = view.followed().get(host).filter(|followed| followed.revision >= at);
        let problem = followed.and_then(|followed| {
            followed.problems.iter().find(|problem| {
                let is_it = problem.kind.as_deref() == Some(object.kind().name());
                problem.kind.is_none() || is_it && problem.name.as_deref() == Some(object.name())
            })
        });
        match (followed, problem) {
            (None, _) => behind.push(host),
            (Some(_), None) => count += 1,
            (Some(_), Some(problem)) => refused_by.push(json!({"host": host, "message": problem.message})),
        }
    }
    value["status"] = json!({"followedBy": count, "behind": behind, "refusedBy": refused_by});
    value
}

impl ClusterApi {
    pub fn open(path: &Path) -> Result<Self> {
        let file = ClusterFile::read(path)?;
        Ok(Self { operator: Operator::open(&file)?, file, listed: Vec::new() })
    }

    pub fn answer(&mut self, method: &Method, path: &str, body: Option<&Value>) -> Answer<Value> {
        let path = path.strip_prefix(BASE).unwrap_or(path).trim_start_matches('/');
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let parameter = |name: &str| {
            query
                .split('&')
                .find_map(|part| part.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value))
        };
        let dry_run = parameter("dryRun") == Some("true");
        let writer = match parameter(RESTORE) {
            Some(_) => Writer::Copy,
            None if parameter("takeOver") == Some("true") => Writer::TakeOver,
            None => Writer::Hand,
        };
        let selector = selector_in(query)?;
        match (method, path.split_once('/')) {
            (&Method::POST, None) if path == "apply" => self.apply(&writer, body.unwrap_or(&Value::Null), dry_run),
            (&Method::GET, None) => self.list(kind_of(path)?, &selector),
            (&Method::GET, Some((plural, name))) => self.get(kind_of(plural)?, name),
            (&Method::DELETE, Some((plural, name))) => {
                let version = parameter("resourceVersion").map(str::parse).transpose();
                let version = version.map_err(|_| Failure::new("resourceVersion is a number"))?;
                let command = Command::Delete { kind: kind_of(plural)?, name: name.into(), version };
                self.change(&writer, &command, dry_run)
            }
            _ => Err(Failure::new("that can't be asked of a cluster").into()),
        }
    }

    fn change(&mut self, writer: &Writer, command: &Command, dry_run: bool) -> Answer<Value> {
        let (revision, outcomes) = self.operator.change_by(writer, command, dry_run)?;
        Ok(results(revision, &outcomes))
    }

    fn apply(&mut self, writer: &Writer, body: &Value, dry_run: bool) -> Answer<Value> {
        let items = body["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut objects = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            objects.push(parse_object(item).map_err(|error| invalid(error, index, item))?);
        }
        self.change(writer, &Command::Apply { objects }, dry_run)
    }

    fn read(&self, kind: ObjectKind) -> Result<(View, State)> {
        let view = self.operator.view_of(scope_of(kind))?;
        let declared = view.declared()?;
        Ok((view, declared))
    }

    fn list(&mut self, kind: ObjectKind, selector: &Selector) -> Answer<Value> {
        let view = self.operator.view_of(scope_of(kind))?;
        let items = items(kind, &view, selector)?;
        self.listed.clone_from(&items);
        Ok(json!({"apiVersion": "freeflow.io/v1", "kind": format!("{kind}List"),
            "metadata": {"resourceVersion": view.revision()}, "items": items}))
    }

    fn get(&self, kind: ObjectKind, name: &str) -> Answer<Value> {
        let (view, declared) = self.read(kind)?;
        let declared: Vec<AnyObject> = declared.object(kind, name).into_iter().collect();
        let mut found = merged(kind, declared.iter(), &view);
        found.retain(|object| object["metadata"]["name"] == name);
        if found.len() > 1 {
            let hosts: Vec<&str> = found.iter().filter_map(|object| object["status"]["host"].as_str()).collect();
            let text =
                format!("several hosts have a {kind} {name}: {}; see freeflow get {}", hosts.join(", "), kind.plural());
            return Err(Failure::new(text).into());
        }
        found.pop().ok_or_else(|| not_found(kind, name))
    }

    /// Calls `event` for each change since the last list, until it wants no more.
    pub fn watch(&mut self, path: &str, mut event: impl FnMut(Value) -> Answer<bool>) -> Answer<()> {
        let path = path.strip_prefix(BASE).unwrap_or(path).trim_start_matches('/');
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let (kind, selector) = (kind_of(path)?, selector_in(query)?);
        let follow = Follow::start_of(&self.file, scope_of(kind))?;
        let mut view = View::new(&self.file.root, scope_of(kind));
        let mut before = by_name(&std::mem::take(&mut self.listed));
        let mut is_behind = false;
        loop {
            let Some(first) = follow.next(NEWS_TIME) else { continue };
            for news in std::iter::once(first).chain(std::iter::from_fn(|| follow.next(Duration::ZERO))) {
                if let News::Behind(error) = &news
                    && !std::mem::replace(&mut is_behind, true)
                {
                    output::complaint(format!("etcd does not answer, and what changes is shown later: {error}"));
                }
                is_behind &= matches!(news, News::Behind(_));
                view.take(news);
            }
            if is_behind {
                continue;
            }
            let after = by_name(&items(kind, &view, &selector)?);
            for change in changes(&before, &after) {
                if !event(change)? {
                    return Ok(());
                }
            }
            before = after;
        }
    }
}

/// The keys by which objects of a kind are shown.
fn scope_of(kind: ObjectKind) -> Scope {
    match kind {
        ObjectKind::Vnic | ObjectKind::Host => Scope::Vnics,
        _ => Scope::Said,
    }
}

/// The selector in a query.
fn selector_in(query: &str) -> Result<Selector> {
    let text = query.split('&').find_map(|part| part.strip_prefix("labelSelector="));
    let text = text.map_or_else(|| Some(String::new()), decoded);
    let parsed =
        text.ok_or_else(|| "labelSelector: not well-formed".to_owned()).and_then(|text| Selector::parse(&text));
    parsed.map_err(|why| Failure::new(why).with_code(2))
}

/// All that is declared, and that hosts have of themselves, with such labels.
fn items(kind: ObjectKind, view: &View, selector: &Selector) -> Result<Vec<Value>> {
    let declared = view.declared()?;
    let objects: Vec<AnyObject> = declared.objects(kind).collect();
    let mut items = merged(kind, objects.iter(), view);
    let labels =
        |item: &Value| serde_json::from_value::<Labels>(item["metadata"]["labels"].clone()).unwrap_or_default();
    items.retain(|item| selector.fits(&labels(item)));
    Ok(items)
}

/// The same of these; a declared vNIC is shown once, with the words of the host that has it.
fn merged<'a>(kind: ObjectKind, declared: impl Iterator<Item = &'a AnyObject>, view: &View) -> Vec<Value> {
    let mut own = of_hosts(kind, view);
    let with_words = |object: &AnyObject| {
        let mut value = shown(object, view);
        let host = view.places().get(object.name()).map(|(_, place)| place.host.as_str());
        let Some(host) = host.filter(|_| kind == ObjectKind::Vnic) else { return value };
        value["status"]["host"] = json!(host);
        let is_its = |item: &Value| item["metadata"]["name"] == object.name() && item["status"]["host"] == host;
        if let Some(at) = own.iter().position(is_its) {
            let said = own.swap_remove(at);
            for (field, word) in said["status"].as_object().into_iter().flatten() {
                value["status"][field] = word.clone();
            }
            if value["spec"]["addresses"].as_array().is_none_or(Vec::is_empty) {
                value["spec"]["addresses"] = said["spec"]["addresses"].clone();
            }
        }
        value
    };
    let mut items: Vec<Value> = declared.map(with_words).collect();
    own.sort_by_key(|item| (item["status"]["host"].to_string(), item["status"]["title"].to_string()));
    items.extend(own);
    items
}

/// Objects that hosts have of themselves.
fn of_hosts(kind: ObjectKind, view: &View) -> Vec<Value> {
    match kind {
        ObjectKind::Vnic => views::vnics(view),
        ObjectKind::Host => views::hosts(view),
        _ => Vec::new(),
    }
}

type Named = BTreeMap<(String, Option<String>), Value>;

/// By name and host.
fn by_name(items: &[Value]) -> Named {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let key = |item: &Value| (text(&item["metadata"]["name"]).unwrap_or_default(), text(&item["status"]["host"]));
    items.iter().map(|item| (key(item), item.clone())).collect()
}

fn changes(before: &Named, after: &Named) -> Vec<Value> {
    let event = |what: &str, object: &Value| json!({"type": what, "object": object});
    let gone = before.iter().filter(|(key, _)| !after.contains_key(*key)).map(|(_, old)| event("DELETED", old));
    let come = after.iter().filter_map(|(key, new)| match before.get(key) {
        None => Some(event("ADDED", new)),
        Some(old) if views::still(old) != views::still(new) => Some(event("MODIFIED", new)),
        Some(_) => None,
    });
    gone.chain(come).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_told_once_and_by_host() {
        let vnic = |host: &str, phase: &str, age: u64| json!({"metadata": {"name": "v"}, "status": {"host": host, "phase": phase, "ageSeconds": age}});
        let of = |items: &[Value]| by_name(items);
        let told = |before: &[Value], after: &[Value]| -> Vec<String> {
            let all = changes(&of(before), &of(after));
            all.iter().map(|event| format!("{} {}", event["type"], event["object"]["status"]["host"])).collect()
        };
        let one = vnic("h1", "Ready", 1);
        assert_eq!(told(&[], std::slice::from_ref(&one)), [r#""ADDED" "h1""#]);
        assert!(told(std::slice::from_ref(&one), &[vnic("h1", "Ready", 30)]).is_empty());
        let both = [vnic("h1", "Failed", 2), vnic("h2", "Ready", 1)];
        assert_eq!(told(&[one], &both), [r#""MODIFIED" "h1""#, r#""ADDED" "h2""#]);
        assert_eq!(told(&both, &both[..1]), [r#""DELETED" "h2""#]);
    }
}
