//! The server's questions, on the control thread: a few objects at a time, and changes.
use super::caller::{Caller, Role};
use super::failure;
use super::link::Reply;
use super::permission::{self, View};
use super::query::Selector;
use crate::audit::Entry;
use crate::control::admin_audit::about;
use crate::control::thread::Control;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Change, Command, Outcome, Reason, Refusal, Revision, State};
use std::collections::BTreeSet;

/// Objects of one answer, and objects looked at for it.
const PAGE_COUNT_MAX: usize = 128;
const LOOK_COUNT_MAX: usize = 1024;

/// Some objects of a kind, in order of name, as somebody may see them.
pub struct Page {
    pub revision: Revision,
    pub objects: Vec<AnyObject>,
    /// Go on after this name; `None`: that was all.
    pub next: Option<String>,
}

/// Parameters for beginning a watch.
pub struct Beginning {
    pub revision: Revision,
    pub names: BTreeSet<String>,
}

/// Result of a command.
pub struct Done {
    pub revision: Revision,
    pub outcomes: Vec<Outcome>,
}

/// Whose networks and vNICs a role may be told of.
fn told(role: &Role) -> Option<BTreeSet<String>> {
    (!role.reads_all()).then(|| role.tenants.clone())
}

impl Control {
    /// All that is declared.
    pub(crate) fn declared(&self) -> &State {
        &self.state
    }

    pub(crate) fn api_page(
        &mut self,
        role: &Role,
        kind: ObjectKind,
        (after, selector): (Option<String>, &Selector),
        reply: Reply<Page>,
    ) {
        let view = View::of(role, self.declared());
        let (mut objects, mut next) = (Vec::new(), None);
        for (looked, object) in self.declared().objects_after(kind, after.as_deref()).enumerate() {
            if looked == LOOK_COUNT_MAX || objects.len() == PAGE_COUNT_MAX {
                break;
            }
            next = Some(object.name().to_owned());
            if selector.fits(&object.metadata().labels) && view.shows_object(self.declared(), &object) {
                objects.push(object);
            }
        }
        let is_all =
            next.as_deref().is_none_or(|last| self.declared().objects_after(kind, Some(last)).next().is_none());
        let (revision, next) = (self.declared().revision(), next.filter(|_| !is_all));
        self.with_status(objects, told(role), move |_, objects| {
            // Whoever asked may be gone.
            let _ = reply.send(Page { revision, objects, next });
        });
    }

    pub(crate) fn api_get(&mut self, role: &Role, kind: ObjectKind, name: &str, reply: Reply<Option<AnyObject>>) {
        let view = View::of(role, self.declared());
        let found = self.declared().object(kind, name).filter(|object| view.shows_object(self.declared(), object));
        let Some(object) = found else {
            let _ = reply.send(None);
            return;
        };
        self.with_status(vec![object], told(role), move |_, mut objects| {
            let _ = reply.send(objects.pop());
        });
    }

    pub(crate) fn api_beginning(&self, role: &Role, kind: ObjectKind) -> Beginning {
        Beginning { revision: self.declared().revision(), names: View::of(role, self.declared()).names(kind) }
    }

    /// Checks, does, and notes in the audit log. The objects of the outcomes have no statuses.
    pub(crate) fn api_change(
        &mut self,
        caller: &Caller,
        verb: &'static str,
        command: Command,
        dry_run: bool,
    ) -> Result<Done, Refusal> {
        let subject = match &command {
            Command::Apply { objects } => objects.first().map(|object| (object.kind(), object.name().to_owned())),
            Command::Delete { kind, name, .. } => Some((*kind, name.clone())),
            Command::Attach { id, .. } | Command::Detach { id } => Some((ObjectKind::Vnic, id.clone())),
            Command::SetDataPath { network, .. } => Some((ObjectKind::Network, network.clone())),
            Command::Begin { .. } => None,
        };
        let container = self.container_of(&command);
        let done =
            permission::check(&caller.role, self.declared(), &command).and_then(|()| self.command(command, dry_run));
        let mut outcomes = match done {
            Ok(outcomes) => outcomes,
            Err(refusal) => {
                // A caller that only asks for what is in use has tried nothing.
                if !(dry_run && refusal.reason == Reason::InUse) {
                    self.note_refusal(caller, verb, subject, &refusal);
                }
                return Err(refusal);
            }
        };
        let revision = self.declared().revision();
        for outcome in &mut outcomes {
            if dry_run {
                continue;
            }
            let word = match outcome.what {
                Change::Created => "created",
                Change::Configured => "configured",
                Change::Deleted => "deleted",
                Change::Unchanged => continue,
            };
            let (kind, name) = (outcome.kind.name().to_owned(), outcome.name.clone());
            self.audit.note(Entry::Change {
                who: caller.who.clone(),
                verb,
                kind,
                name,
                outcome: word,
                revision: Some(revision.0),
                about: Box::new(about(outcome, &container)),
            });
            if let Some(object) = self.declared().object(outcome.kind, &outcome.name) {
                outcome.object = object;
            }
        }
        Ok(Done { revision, outcomes })
    }

    fn note_refusal(
        &self,
        caller: &Caller,
        verb: &'static str,
        about: Option<(ObjectKind, String)>,
        refusal: &Refusal,
    ) {
        let about = refusal.object.clone().or(about);
        self.audit.note_some(caller.who.originator(), |left_out| {
            let (kind, name) = about.as_ref().map_or(("", ""), |(kind, name)| (kind.name(), name.as_str()));
            let why = (failure::word(refusal.reason), refusal.message.as_str());
            Entry::refused(caller.who.clone(), verb, (kind, name), why, left_out)
        });
    }
}
