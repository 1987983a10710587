//! The REST server's requests about declared objects: a few at a time, and changes.
use crate::api::caller::Caller;
use crate::api::failure;
use crate::api::permission::{self, View};
use crate::api::plane::{
    BeginWatch, Beginning, ChangeObjects, Done, GetObject, NotDone, Page, PageObjects, ReplyTo, Serve,
};
use crate::audit::{About, Entry};
use crate::control::admin_audit::about;
use crate::control::store_slot::QueuedCommand;
use crate::control::thread::Control;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Change, Command, Outcome, Reason, Refusal, State, Writer};
use std::collections::BTreeMap;

/// Objects of one answer, and objects looked at for it.
const PAGE_COUNT_MAX: usize = 128;
const LOOK_COUNT_MAX: usize = 1024;
/// Changes that wait for the store, each with its body.
const WAITING_COMMAND_COUNT_MAX: usize = 64;

type Managers = BTreeMap<(ObjectKind, String), String>;

/// For the audit log: the manager that an object has, or had.
fn manager_text(outcome: &Outcome, before: Option<&String>, writer: &Writer) -> String {
    let after = outcome.object.metadata().manager.as_ref().map(|manager| &manager.name);
    let is_gone = outcome.what == Change::Deleted;
    match (before, after) {
        (Some(before), _) if *writer == Writer::TakeOver => format!("taken over from the manager {before}"),
        (Some(before), None) if !is_gone => format!("no more managed by {before}"),
        (_, Some(manager)) => format!("managed by {manager}"),
        _ => String::new(),
    }
}

impl Control {
    /// All that is declared.
    pub(crate) fn declared(&self) -> &State {
        &self.state
    }

    /// Checks, does, and notes in the audit log. The objects of the outcomes have no statuses.
    pub(crate) fn change_objects(&mut self, call: ChangeObjects) -> Result<Done, Refusal> {
        let ChangeObjects { caller, verb, writer, command, dry_run, only_unused } = call;
        let subject = match &command {
            Command::Apply { objects } | Command::ApplyForCluster { objects } => {
                objects.first().map(|object| (object.kind(), object.name().to_owned()))
            }
            Command::Delete { kind, name, .. } => Some((*kind, name.clone())),
            Command::Attach { id, .. } | Command::Detach { id } => Some((ObjectKind::Vnic, id.clone())),
            Command::SetDataPath { network, .. } => Some((ObjectKind::Network, network.clone())),
            Command::Begin { .. } => None,
        };
        let container = self.container_of(&command);
        let managers = self.managers_of(&command);
        let done = permission::check(&caller.role, self.declared(), &command)
            .and_then(|()| permission::check_cluster(self.config.follows_cluster, &self.state, (verb, &command)))
            .and_then(|()| if only_unused { self.check_unused(&command) } else { Ok(()) })
            .and_then(|()| self.command_by(&writer, command, dry_run));
        let mut outcomes = match done {
            Ok(outcomes) => outcomes,
            Err(refusal) => {
                // A caller that only asks for what is in use has tried nothing.
                if !(dry_run && refusal.reason == Reason::InUse) {
                    self.note_refusal(&caller, verb, subject, &refusal);
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
            let detail = manager_text(outcome, managers.get(&(outcome.kind, outcome.name.clone())), &writer);
            let (kind, name) = (outcome.kind.name().to_owned(), outcome.name.clone());
            self.audit.note(Entry::Change {
                who: caller.who.clone(),
                verb,
                kind,
                name,
                outcome: word,
                revision: Some(revision.0),
                about: Box::new(About { detail, ..about(outcome, &container) }),
            });
            if let Some(object) = self.declared().object(outcome.kind, &outcome.name) {
                outcome.object = object;
            }
        }
        Ok(Done { revision, outcomes })
    }

    /// Names of the managers of a command's objects as they are.
    fn managers_of(&self, command: &Command) -> Managers {
        let subjects: Vec<(ObjectKind, &str)> = match command {
            Command::Apply { objects } | Command::ApplyForCluster { objects } => {
                objects.iter().map(|object| (object.kind(), object.name())).collect()
            }
            Command::Delete { kind, name, .. } => vec![(*kind, name.as_str())],
            _ => Vec::new(),
        };
        let manager = |(kind, name): (ObjectKind, &str)| {
            let manager = self.declared().object(kind, name)?.metadata().manager.clone()?;
            Some(((kind, name.to_owned()), manager.name))
        };
        subjects.into_iter().filter_map(manager).collect()
    }

    /// Refuses to delete a vNIC that a container has, or a process uses.
    fn check_unused(&self, command: &Command) -> Result<(), Refusal> {
        let Command::Delete { kind: ObjectKind::Vnic, name, .. } = command else { return Ok(()) };
        let in_use = |who: String| Err(Refusal::new(Reason::InUse, who).about(ObjectKind::Vnic, name));
        if let Some(container) = self.occupied.get(name) {
            return in_use(format!("the container {container} has it"));
        }
        if self.connections.iter().any(|(_, connection)| connection.vnic == *name) {
            return in_use("processes use it".into());
        }
        Ok(())
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

impl Serve<PageObjects> for Control {
    fn serve(&mut self, PageObjects { role, kind, after, selector, floating }: PageObjects, reply: ReplyTo<Page>) {
        let view = View::of(&role, self.declared());
        let (mut objects, mut next) = (Vec::new(), None);
        for (looked, object) in self.declared().objects_after(kind, after.as_deref()).enumerate() {
            if looked == LOOK_COUNT_MAX || objects.len() == PAGE_COUNT_MAX {
                break;
            }
            next = Some(object.name().to_owned());
            if floating && !self.declared().is_clusters(kind, object.name()) {
                continue;
            }
            if selector.fits(&object.metadata().labels) && view.shows_object(self.declared(), &object) {
                objects.push(object);
            }
        }
        let is_all =
            next.as_deref().is_none_or(|last| self.declared().objects_after(kind, Some(last)).next().is_none());
        let (revision, next) = (self.declared().revision(), next.filter(|_| !is_all));
        self.with_status(objects, role.read_tenants(), move |_, objects| reply.give(Page { revision, objects, next }));
    }
}

impl Serve<GetObject> for Control {
    fn serve(&mut self, GetObject { role, kind, name }: GetObject, reply: ReplyTo<Option<AnyObject>>) {
        let view = View::of(&role, self.declared());
        let found = self.declared().object(kind, &name).filter(|object| view.shows_object(self.declared(), object));
        let Some(object) = found else { return reply.give(None) };
        self.with_status(vec![object], role.read_tenants(), move |_, mut objects| reply.give(objects.pop()));
    }
}

impl Serve<BeginWatch> for Control {
    fn serve(&mut self, BeginWatch { role, kind }: BeginWatch, reply: ReplyTo<Beginning>) {
        let names = View::of(&role, self.declared()).names(kind);
        reply.give(Beginning { revision: self.declared().revision(), names });
    }
}

impl Serve<ChangeObjects> for Control {
    fn serve(&mut self, call: ChangeObjects, reply: ReplyTo<Result<Done, NotDone>>) {
        if self.waiting_command_count() >= WAITING_COMMAND_COUNT_MAX {
            return reply.give(Err(NotDone::Busy));
        }
        self.when_stored(QueuedCommand::Change { call: Box::new(call), reply });
    }
}
