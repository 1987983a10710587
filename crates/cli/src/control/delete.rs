//! `freeflow delete`: one object after the other, whoever names another before it. Several are all
//! looked at before the first goes.

use super::api::encoded;
use super::api::{Answer, Api, Refusal, Trouble};
use super::kinds::Kind;
use super::{list_of, manifest, path_of, print_value};
use crate::arguments_control::Delete;
use crate::failure::{Failure, Result};
use crate::{networks, output};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_manifest::Item;
use serde_json::Value;
use std::collections::BTreeSet;

/// Users of an object that are named.
const USERS_NAMED_MAX: usize = 5;

/// An object that is to go.
struct Wanted {
    kind: Kind,
    name: String,
    /// Only if it is at this.
    version: Option<String>,
    /// Also if it has a manager.
    take_over: bool,
}

impl Wanted {
    fn label(&self) -> String {
        format!("{}/{}", self.kind.singular(), self.name)
    }

    fn path(&self, dry_run: bool) -> String {
        let dry_run = dry_run.then(|| "dryRun=true".to_owned());
        let take_over = self.take_over.then(|| "takeOver=true".to_owned());
        let version = self.version.as_ref().map(|version| format!("resourceVersion={}", encoded(version)));
        let query = [dry_run, version, take_over].into_iter().flatten().collect::<Vec<_>>().join("&");
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{}{mark}{query}", path_of(self.kind, &self.name))
    }
}

/// The resourceVersion that a file has for an object, as it is written: the router says whether it is one.
fn version_in(object: &Value) -> Option<String> {
    match &object["metadata"]["resourceVersion"] {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// In the order in which they go: whoever names another comes before it.
fn wanted(arguments: &Delete) -> Result<Vec<Wanted>> {
    let take_over = arguments.take_over;
    let mut wanted: Vec<Wanted> = match &arguments.kind {
        Some(kind) => {
            let kind = Kind::named(kind)?;
            arguments.names.iter().map(|name| Wanted { kind, name: name.clone(), version: None, take_over }).collect()
        }
        None => {
            let items = manifest::read(&arguments.files)?.into_iter();
            let of = |item: Item| {
                let version = version_in(&item.value);
                Wanted { kind: Kind::of(item.kind), version, name: item.name, take_over }
            };
            items.map(of).collect()
        }
    };
    wanted.sort_by_key(|one| one.kind.rank());
    Ok(wanted)
}

/// A refusal without the users that go before; nothing if those were all.
fn left_in_use(mut refusal: Box<Refusal>, gone: &BTreeSet<String>) -> Option<Box<Refusal>> {
    refusal.details.users.retain(|user| !gone.contains(user));
    let users = &refusal.details.users;
    let named = &users[..users.len().min(USERS_NAMED_MAX)];
    let more =
        if users.len() > named.len() { format!(" and {} more", users.len() - named.len()) } else { String::new() };
    refusal.message = format!("it is used by {}{more}", named.join(", "));
    (!refusal.details.users.is_empty()).then_some(refusal)
}

/// Why each can't be deleted, as long as it can't. What goes before it does not use it then.
fn look(api: &Api, wanted: &[Wanted]) -> Result<Vec<Option<Box<Refusal>>>> {
    let mut gone = BTreeSet::new();
    let mut found = Vec::new();
    for one in wanted {
        let refusal = match api.delete(&one.path(true)) {
            Ok(_) => None,
            Err(Trouble::Refused(refusal)) if refusal.details.users.is_empty() => Some(refusal),
            Err(Trouble::Refused(refusal)) => left_in_use(refusal, &gone),
            Err(Trouble::Failed(failure)) => return Err(failure),
        };
        if refusal.is_none() {
            gone.insert(format!("{} {}", one.kind.name, one.name));
        }
        found.push(refusal);
    }
    Ok(found)
}

/// All that stands in the way, if something other than absence does.
fn check(wanted: &[Wanted], found: Vec<Option<Box<Refusal>>>) -> Result<()> {
    let refused: Vec<_> = wanted.iter().zip(found).filter_map(|(one, refusal)| Some((one, refusal?))).collect();
    let mut refused: Vec<_> = refused.into_iter().filter(|(_, refusal)| refusal.code != 404).collect();
    let Some((last, refusal)) = refused.pop() else { return Ok(()) };
    let mut lines: Vec<String> =
        refused.iter().map(|(one, refusal)| format!("{}: {}", one.label(), refusal.message)).collect();
    let failure = Failure::from(Trouble::Refused(refusal));
    lines.push(format!("{}: {failure}", last.label()));
    let first = refused.into_iter().next().map(|(_, refusal)| Failure::from(Trouble::Refused(refusal)).code());
    let text = format!("refused, and nothing was deleted:\n{}", lines.join("\n"));
    Err(Failure::new(text).with_code(first.unwrap_or(failure.code())).in_lines())
}

/// Prints the result for one object, real or of a dry run; the last word is the first failure's.
fn report(one: &Wanted, done: Answer<()>, arguments: &Delete, first_failure: &mut Option<Failure>) {
    let trouble = match done {
        Ok(()) if !arguments.output.format.is_text() => return,
        Ok(()) => {
            let note = if arguments.dry_run { " (dry run)" } else { "" };
            return output::line(format!("{} deleted{note}", one.label()));
        }
        Err(Trouble::Refused(refusal)) if refusal.code == 404 && arguments.ignore_not_found => return,
        Err(trouble) => trouble,
    };
    let failure = Failure::from(trouble);
    let code = failure.code();
    let failure = Failure::new(format!("{}: {failure}", one.label())).with_code(code);
    match first_failure {
        None => *first_failure = Some(failure),
        Some(_) => output::complaint(failure),
    }
}

pub fn delete(run_dir: &RunDir, api: &Api, arguments: &Delete) -> Result<i32> {
    let wanted = wanted(arguments)?;
    let (mut first_failure, mut objects) = (None, Vec::new());
    let print = |objects: Vec<Value>| print_value(arguments.output.format, || list_of(&objects));
    if arguments.dry_run {
        for (one, refusal) in wanted.iter().zip(look(api, &wanted)?) {
            let found = match refusal {
                Some(refusal) => Err(Trouble::Refused(refusal)),
                None if arguments.output.format.is_text() => Ok(Value::Null),
                None => api.get(&path_of(one.kind, &one.name)),
            };
            report(one, found.map(|object| objects.push(object)), arguments, &mut first_failure);
        }
        print(objects);
        return first_failure.map_or(Ok(0), Err);
    }
    if wanted.len() > 1 {
        check(&wanted, look(api, &wanted)?)?;
    }
    for one in &wanted {
        // The others are tried nevertheless.
        let done = api.delete(&one.path(false));
        let done = done.map(|answer| objects.push(answer["items"][0]["object"].clone()));
        report(one, done, arguments, &mut first_failure);
    }
    print(objects);
    if !api.is_clusters() && wanted.iter().any(|one| ["Network", "Vnic"].contains(&one.kind.name)) {
        networks::reconcile_host(run_dir);
    }
    first_failure.map_or(Ok(0), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_deletes_what_it_has_read() {
        let text = "kind: Network\nmetadata: {name: a, resourceVersion: 7}\n---\nkind: Group\nmetadata: {name: b}\n";
        let items = freeflow_manifest::parse("f", text).unwrap();
        let versions: Vec<_> = items.iter().map(|item| version_in(&item.value)).collect();
        assert_eq!(versions, [Some("7".to_string()), None]);
    }
}
