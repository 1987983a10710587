//! Declared control: what an operator wants is written in files and sent to the router, which
//! checks, stores and enforces it.
//!
//! No privilege is needed here: the router looks at who is at the other end of its socket.
mod all_hosts;
pub mod api;
pub mod changes;
pub mod columns;
mod delete;
mod describe;
pub mod kinds;
mod manifest;
mod top;
mod watch;

use crate::arguments::Command;
use crate::arguments_control::{Apply, Cluster, Describe, Diff, Format, Get, ObjectOutput, OfCluster};
use crate::failure::{Failure, Result, fail};
use crate::{cluster, networks, output};
pub use all_hosts::containers;
pub use top::Sampler;

use api::{Answer, Api, BASE, Refusal, Trouble, encoded};
use changes::list_of;
use freeflow_cluster::Operator;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_manifest::{Item, to_yaml};
use freeflow_orchestrator::CLUSTER_KINDS;
use kinds::Kind;
use serde_json::{Value, json};
use std::path::Path;

/// Failures of `diff`, where 1 says that something differs.
const EXIT_DIFF_FAILED: u8 = 2;

/// Runs the command if it is one of these.
pub fn dispatch(run_dir: &RunDir, command: &Command) -> Option<Result<i32>> {
    let api = |of: &OfCluster| Api::choose(run_dir, of.cluster.as_deref());
    Some(match command {
        Command::Apply(arguments) => api(&arguments.of).and_then(|api| apply(run_dir, &api, arguments)),
        Command::Get(arguments) => api(&arguments.of).and_then(|api| get(&api, arguments)),
        Command::Describe(arguments) => api(&arguments.of).and_then(|api| describe(&api, arguments)),
        Command::Delete(arguments) => api(&arguments.of).and_then(|api| delete::delete(run_dir, &api, arguments)),
        Command::Diff(arguments) => {
            let differ = api(&arguments.of).and_then(|api| diff(&api, arguments)).map(i32::from);
            differ.map_err(|failure| {
                let code = failure.code().max(EXIT_DIFF_FAILED);
                failure.with_code(code)
            })
        }
        Command::Cluster(Cluster::Import { file, force, of }) => import(run_dir, file, *force, of),
        Command::Top(arguments) if arguments.hosts.all_hosts => all_hosts::top(run_dir, arguments),
        Command::Top(arguments) => Api::of(run_dir).and_then(|api| top::top(&api, arguments)),
        _ => return None,
    })
}

fn path_of(kind: Kind, name: &str) -> String {
    format!("{BASE}/{}/{}", kind.plural, encoded(name))
}

/// Parameters of a request.
#[derive(Clone, Copy, Default)]
struct Sending {
    dry_run: bool,
    /// Also objects that have a manager.
    take_over: bool,
    /// Objects of a backup, with their managers.
    restore: bool,
}

/// Sends the objects of files, or asks what they would change.
fn send(api: &Api, items: &[Item], sending: Sending) -> Result<Vec<Value>> {
    let body = json!({"items": items.iter().map(|item| &item.value).collect::<Vec<_>>()});
    let parameters =
        [("dryRun", sending.dry_run), ("takeOver", sending.take_over), (cluster::RESTORE, sending.restore)];
    let path = format!("{BASE}/apply{}", query_of(parameters.into_iter().filter(|(_, is_set)| *is_set)));
    let results = match api.post(&path, &body) {
        Ok(answer) => items_of(&answer)?,
        Err(Trouble::Refused(refusal)) => return Err(explained(refusal, items)),
        Err(trouble) => return Err(trouble.into()),
    };
    if results.len() != items.len() {
        fail!("the router's answer lists {} objects; {} were sent", results.len(), items.len());
    }
    Ok(results)
}

/// Parameters that are set.
fn query_of<'a>(parameters: impl Iterator<Item = (&'a str, bool)>) -> String {
    let set: Vec<String> = parameters.map(|(name, _)| format!("{name}=true")).collect();
    if set.is_empty() { String::new() } else { format!("?{}", set.join("&")) }
}

/// A refusal that is reported with the places in the files.
fn explained(refusal: Box<Refusal>, items: &[Item]) -> Failure {
    let Some(item) = item_of(&refusal.details, items) else { return Trouble::Refused(refusal).into() };
    let mut causes = refusal.details.causes.clone();
    if causes.is_empty() {
        causes.push(api::Cause { field: String::new(), message: refusal.message.clone() });
    }
    let lines: Vec<String> = causes.iter().map(|cause| item.explain(&cause.field, &cause.message)).collect();
    let code = Failure::from(Trouble::Refused(refusal)).code();
    Failure::new(format!("refused, and nothing was changed:\n{}", lines.join("\n"))).with_code(code).in_lines()
}

/// The object that a refusal is about.
fn item_of<'a>(details: &api::Details, items: &'a [Item]) -> Option<&'a Item> {
    let is_named = |item: &&Item| {
        details.kind.as_deref() == Some(item.kind.name()) && details.name.as_deref() == Some(item.name.as_str())
    };
    let numbered = details.index.and_then(|index| items.get(index));
    numbered.or_else(|| items.iter().find(is_named)).or(match items {
        [item] if !details.causes.is_empty() => Some(item),
        _ => None,
    })
}

fn apply(run_dir: &RunDir, api: &Api, arguments: &Apply) -> Result<i32> {
    let sending = Sending { dry_run: arguments.dry_run, take_over: arguments.take_over, ..Sending::default() };
    apply_as(run_dir, api, arguments, sending)
}

fn apply_as(run_dir: &RunDir, api: &Api, arguments: &Apply, sending: Sending) -> Result<i32> {
    let items = manifest::read(&arguments.files)?;
    let results = send(api, &items, sending)?;
    let objects: Vec<Value> = results.iter().map(|result| result["object"].clone()).collect();
    if !print_value(arguments.output.format, || list_of(&objects)) {
        let note = if arguments.dry_run { " (dry run)" } else { "" };
        for result in &results {
            let kind = columns::text(&result["kind"]).to_ascii_lowercase();
            let (name, what) = (columns::text(&result["name"]), columns::text(&result["result"]));
            output::line(format!("{kind}/{name} {what}{note}"));
        }
    }
    let is_device = |result: &Value| result["kind"] == "Network" || result["kind"] == "Vnic";
    let made = |result: &Value| is_device(result) && result["result"] == "created";
    if !arguments.dry_run && !api.is_clusters() && results.iter().any(made) {
        networks::reconcile_host(run_dir);
    }
    Ok(0)
}

/// A backup of all that a cluster declares is declared again.
fn import(run_dir: &RunDir, file: &Path, force: bool, of: &OfCluster) -> Result<i32> {
    let path = cluster::path_of(run_dir, of.cluster.clone())?;
    let state = Operator::open(&cluster::read(&path)?.as_own())?.state()?;
    let there: Vec<String> = CLUSTER_KINDS
        .into_iter()
        .flat_map(|kind| state.objects(kind))
        .map(|object| format!("{}/{}", object.kind().name().to_ascii_lowercase(), object.name()))
        .collect();
    if let (Some(first), false) = (there.first(), force) {
        return Err(Failure::new(format!(
            "the cluster declares {} objects already, such as {first}: nothing was changed. With --force objects of the file \
             are changed, and others stay",
            there.len()
        ))
        .with_code(api::EXIT_REFUSED));
    }
    let output = ObjectOutput { format: Format::Table };
    let of = OfCluster { cluster: Some(path.clone()) };
    let arguments = Apply { files: vec![file.into()], dry_run: false, take_over: false, of, output };
    let sending = Sending { restore: true, ..Sending::default() };
    apply_as(run_dir, &Api::choose(run_dir, Some(&path))?, &arguments, sending)
}

/// As JSON or YAML; false: it is to be printed for people.
fn print_value(format: Format, value: impl FnOnce() -> Value) -> bool {
    match format {
        Format::Json => output::json(&value()),
        Format::Yaml => output::line(to_yaml(&value()).trim_end()),
        Format::Table | Format::Wide => {}
    }
    !format.is_text()
}

/// The list of a kind, or of those with some labels.
fn list(api: &Api, kind: Kind, labels: Option<&str>) -> Answer<Value> {
    let query = labels.map(|labels| format!("?labelSelector={}", encoded(labels))).unwrap_or_default();
    api.get(&format!("{BASE}/{}{query}", kind.plural))
}

/// The list in an answer, whatever that is.
fn items_of(answer: &Value) -> Result<Vec<Value>> {
    answer["items"].as_array().cloned().ok_or_else(|| Failure::new("the router's answer has no list of objects"))
}

/// A vNIC may be called by its container, too, where none has that name itself.
fn object(api: &Api, kind: Kind, name: &str) -> Answer<Value> {
    let refusal = match api.get(&path_of(kind, name)) {
        Err(Trouble::Refused(refusal)) if refusal.code == 404 && kind.name == "Vnic" => refusal,
        answer => return answer,
    };
    let mut found = items_of(&list(api, kind, None)?)?;
    found.retain(|vnic| vnic["status"]["title"] == name);
    if found.len() > 1 {
        let names: Vec<String> = found.iter().map(|vnic| columns::text(&vnic["metadata"]["name"])).collect();
        return Err(Failure::new(format!("several vNICs are of {name:?}; name one: {}", names.join(", "))).into());
    }
    found.pop().ok_or(Trouble::Refused(refusal))
}

/// The router's answer, and the objects in it.
fn read(api: &Api, kind: Kind, name: Option<&str>, labels: Option<&str>) -> Answer<(Value, Vec<Value>)> {
    if let Some(name) = name {
        let object = object(api, kind, name)?;
        return Ok((object.clone(), vec![object]));
    }
    let list = list(api, kind, labels)?;
    let objects = items_of(&list)?;
    Ok((list, objects))
}

fn get(api: &Api, arguments: &Get) -> Result<i32> {
    let kind = Kind { is_clusters: api.is_clusters(), ..Kind::named(&arguments.kind)? };
    if arguments.watch {
        watch::watch(api, kind, arguments)?;
        return Ok(0);
    }
    if arguments.name.is_some() && arguments.labels.is_some() {
        return Err(Failure::new("a NAME and -l don't go together").with_code(2));
    }
    let (whole, objects) = read(api, kind, arguments.name.as_deref(), arguments.labels.as_deref())?;
    let format = arguments.output.format;
    if !print_value(format, || whole) {
        let wide = format == Format::Wide;
        let mut rows = vec![columns::headings(kind, wide)];
        rows.extend(objects.iter().map(|object| columns::row(kind, object, wide)));
        output::table(&rows);
    }
    Ok(0)
}

fn describe(api: &Api, arguments: &Describe) -> Result<i32> {
    let kind = Kind::named(&arguments.kind)?;
    let (whole, objects) = read(api, kind, arguments.name.as_deref(), None)?;
    if print_value(arguments.output.format, || whole) {
        return Ok(0);
    }
    for (index, object) in objects.iter().enumerate() {
        if index > 0 {
            output::line("");
        }
        for line in describe::lines(object) {
            output::line(line.trim_end());
        }
    }
    Ok(0)
}

/// Whether something would change.
fn diff(api: &Api, arguments: &Diff) -> Result<bool> {
    let items = manifest::read(&arguments.files)?;
    let results = send(api, &items, Sending { dry_run: true, ..Sending::default() })?;
    let is_text = arguments.output.format.is_text();
    let mut different = Vec::new();
    for (item, result) in items.iter().zip(&results) {
        let kind = Kind::of(item.kind);
        let before = match api.get(&path_of(kind, &item.name)) {
            Ok(object) => Some(object),
            Err(Trouble::Refused(refusal)) if refusal.code == 404 => None,
            Err(trouble) => return Err(trouble.into()),
        };
        let name = format!("{}/{}", kind.singular(), item.name);
        if let Some(text) = changes::unified(&name, before.as_ref(), Some(&result["object"])) {
            if is_text {
                output::line(text);
            }
            let before = before.as_ref().map(changes::declared);
            let after = changes::declared(&result["object"]);
            different.push(json!({"kind": kind.name, "name": item.name, "before": before, "after": after}));
        }
    }
    print_value(arguments.output.format, || list_of(&different));
    Ok(!different.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_find_their_objects() {
        let text = "kind: Network\nmetadata: {name: a}\n---\nkind: Group\nmetadata: {name: b}\n";
        let items = freeflow_manifest::parse("f", text).unwrap();
        let name =
            |details: &api::Details, count: usize| item_of(details, &items[..count]).map(|item| item.name.clone());
        let mut details = api::Details { index: Some(1), ..api::Details::default() };
        assert_eq!(name(&details, 2).as_deref(), Some("b"));
        details.index = Some(7);
        assert_eq!(name(&details, 2), None);
        (details.kind, details.name) = (Some("Network".into()), Some("a".into()));
        assert_eq!(name(&details, 2).as_deref(), Some("a"));
        details = api::Details { causes: vec![api::Cause::default()], ..api::Details::default() };
        assert_eq!((name(&details, 2), name(&details, 1).as_deref()), (None, Some("a")));
    }
}
