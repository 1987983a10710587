//! Many objects at once: etcd takes so many operations in a transaction, so they are declared in parts.
//!
//! First all of it is checked against what is declared, and each part against what the ones before leave: so a mistake
//! in any object changes nothing. After that a part is refused only where others change what is declared at the same
//! time, or etcd fails. Objects come in the order in which they name each other, so what is declared makes sense after
//! each part.
use crate::ClusterError;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{CLUSTER_KINDS, Change, Outcome, Plan, Reason, Refusal, Revision, State};
use std::collections::VecDeque;

/// Objects in a transaction.
const PART_COUNT_MAX: usize = 100;
/// Writes in one, of which some objects take several: etcd takes 128 as it is by default, a few of which are not
/// objects'.
const WRITE_COUNT_MAX: usize = 110;
/// So few objects are one transaction, whatever they are.
const FEW: usize = 32;
/// Their bytes: etcd takes 1.5 MiB.
const PART_BYTES_MAX: usize = 1 << 20;

pub(crate) type Name = (ObjectKind, String);

pub(crate) fn name_of(object: &AnyObject) -> Name {
    (object.kind(), object.name().to_owned())
}

fn length(object: &AnyObject) -> usize {
    serde_json::to_vec(object).map_or(0, |bytes| bytes.len())
}

/// Whether it may have to be done in parts.
pub(crate) fn is_many(objects: &[AnyObject]) -> bool {
    objects.len() > FEW || objects.iter().map(length).sum::<usize>() > PART_BYTES_MAX
}

/// Parts that can be declared one after the other.
fn parts(mut objects: Vec<AnyObject>) -> Vec<Vec<AnyObject>> {
    let rank = |object: &AnyObject| CLUSTER_KINDS.iter().position(|kind| *kind == object.kind());
    objects.sort_by_key(rank);
    let (mut parts, mut bytes) = (vec![Vec::new()], 0);
    for object in objects {
        let last: &mut Vec<AnyObject> = parts.last_mut().expect("there is one");
        bytes += length(&object);
        if last.len() < PART_COUNT_MAX && (bytes <= PART_BYTES_MAX || last.is_empty()) {
            last.push(object);
            continue;
        }
        bytes = length(&object);
        parts.push(vec![object]);
    }
    parts
}

/// The parts in which the objects are declared that are others than there are; checked, as if each were done.
pub(crate) fn checked_parts(
    mut state: State,
    objects: &[AnyObject],
    results: &[Outcome],
    plan: impl Fn(&State, &[AnyObject]) -> Result<Plan, Refusal>,
) -> Result<Vec<Vec<AnyObject>>, ClusterError> {
    let changed = objects.iter().zip(results).filter(|(_, outcome)| outcome.what != Change::Unchanged);
    let mut waiting = VecDeque::from(parts(changed.map(|(object, _)| object.clone()).collect()));
    let mut checked = Vec::new();
    while let Some(mut part) = waiting.pop_front() {
        let planned = plan(&state, &part).map_err(|refusal| {
            let text = format!("{refusal}; so many objects are declared in parts, and these go only together");
            Refusal::new(Reason::Conflict, text)
        })?;
        if planned.writes.len() > WRITE_COUNT_MAX && part.len() > 1 {
            let rest = part.split_off(part.len() / 2);
            waiting.push_front(rest);
            waiting.push_front(part);
            continue;
        }
        let revision = Revision(state.revision().0 + 1);
        state.adopt(&planned, revision);
        checked.push(part);
    }
    Ok(checked)
}

/// Objects of which some were declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partly {
    /// These are declared.
    pub done: Vec<Name>,
    /// Of these it is not known.
    pub doubtful: Vec<Name>,
    /// These are not.
    pub left: Vec<Name>,
    /// Why.
    pub why: String,
}

impl std::fmt::Display for Partly {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = self.done.len() + self.doubtful.len() + self.left.len();
        write!(f, "{} of {all} objects are declared, the others are not: {}", self.done.len(), self.why)?;
        for (what, names) in
            [("declared", &self.done), ("not known whether", &self.doubtful), ("not declared", &self.left)]
        {
            for (kind, name) in names {
                write!(f, "\n{what}: {} {name}", kind.name())?;
            }
        }
        write!(f, "\nonce that is settled, apply all of it again: what is declared already stays as it is")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_orchestrator::objects::parse_object;
    use serde_json::json;

    fn object(kind: &str, name: &str, spec: serde_json::Value) -> AnyObject {
        let value = json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
        parse_object(&value).expect("an object")
    }

    #[test]
    fn parts_are_bounded_and_in_order() {
        let class = |number: usize| object("QosClass", &format!("c{number}"), json!({}));
        let group = |number: usize| object("Group", &format!("g{number}"), json!({"tenant": "t", "members": []}));
        let all: Vec<AnyObject> = (0..150).map(group).chain((0..120).map(class)).collect();
        assert!(is_many(&all) && !is_many(&all[..FEW]));
        let parts = parts(all);
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [100, 100, 70]);
        let kinds: Vec<ObjectKind> = parts.iter().flatten().map(AnyObject::kind).collect();
        assert!(kinds[..120].iter().all(|kind| *kind == ObjectKind::QosClass));
        let label = "x".repeat(60);
        let labels: serde_json::Map<String, serde_json::Value> =
            (0..32).map(|number| (format!("k{number}"), label.clone().into())).collect();
        let fat = |number: usize| {
            let selector = json!({"labels": labels.clone()});
            let spec = json!({"tenant": "t", "members": vec![selector; 16]});
            object("Group", &format!("f{number}"), spec)
        };
        let fat: Vec<AnyObject> = (0..80).map(fat).collect();
        assert!(is_many(&fat));
        let parts = super::parts(fat);
        let bytes = |part: &Vec<AnyObject>| part.iter().map(length).sum::<usize>();
        assert!(parts.len() > 1 && parts.iter().all(|part| bytes(part) <= PART_BYTES_MAX));
        assert_eq!(parts.iter().map(Vec::len).sum::<usize>(), 80);
    }

    #[test]
    fn a_part_that_was_not_done_is_said_by_name() {
        let name = |name: &str| (ObjectKind::Network, name.to_owned());
        let partly =
            Partly { done: vec![name("a")], doubtful: vec![name("b")], left: vec![name("c")], why: "etcd".into() };
        let text = partly.to_string();
        for line in ["1 of 3", "declared: Network a", "not known whether: Network b", "not declared: Network c"] {
            assert!(text.contains(line), "{text}");
        }
    }
}
