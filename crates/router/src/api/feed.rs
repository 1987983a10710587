//! What the control thread tells the server of its own accord: what has changed.
use crate::control::thread::Control;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Plan, Revision, State, object_of_key};
use tokio::sync::mpsc::UnboundedSender;

/// An object at one side of a change.
#[derive(Clone, Debug)]
pub struct Side {
    pub object: AnyObject,
    /// Whose it is.
    pub tenant: Option<String>,
}

/// One object's change.
#[derive(Clone, Debug)]
pub struct Change {
    pub revision: Revision,
    pub before: Option<Side>,
    pub after: Option<Side>,
    /// It is declared as before: only its status is another, since that revision.
    pub is_status: bool,
}

/// Where changes go; the default leads nowhere. The queue has no limit of its own: each change was a transaction on the disk, or the end
/// of a vNIC's threads, and the server does little with each.
#[derive(Clone, Default)]
pub struct Feed(Option<UnboundedSender<Vec<Change>>>);

impl Feed {
    pub fn new(sender: UnboundedSender<Vec<Change>>) -> Self {
        Self(Some(sender))
    }

    fn is_on(&self) -> bool {
        self.0.is_some()
    }

    fn put(&self, changes: Vec<Change>) {
        if let Some(sender) = &self.0 {
            // Fails only when the server has ended.
            let _ = sender.send(changes);
        }
    }
}

/// What a plan touches, as it was before it was adopted.
pub struct Touched(Vec<(ObjectKind, String, Option<Side>)>);

fn side(state: &State, kind: ObjectKind, name: &str) -> Option<Side> {
    let object = state.object(kind, name)?;
    let tenant = state.tenant_of(&object);
    Some(Side { object, tenant })
}

impl Control {
    /// To be called before a plan is adopted, and [`Self::tell_changes`] after.
    pub(crate) fn touched(&self, plan: &Plan) -> Touched {
        if !self.feed.is_on() {
            return Touched(Vec::new());
        }
        let objects = plan.writes.iter().filter_map(|(key, _)| object_of_key(key));
        Touched(objects.map(|(kind, name)| (kind, name.to_owned(), side(self.declared(), kind, name))).collect())
    }

    pub(crate) fn tell_changes(&self, touched: Touched) {
        let revision = self.declared().revision();
        let changes = touched.0.into_iter().filter_map(|(kind, name, before)| {
            let after = side(self.declared(), kind, &name);
            (before.is_some() || after.is_some()).then_some(Change { revision, before, after, is_status: false })
        });
        let changes: Vec<Change> = changes.collect();
        if !changes.is_empty() {
            self.feed.put(changes);
        }
    }

    /// A vNIC is in another phase.
    pub(crate) fn tell_phase(&self, id: &str) {
        if !self.feed.is_on() {
            return;
        }
        let Some(side) = side(self.declared(), ObjectKind::Vnic, id) else { return };
        let revision = self.declared().revision();
        self.feed.put(vec![Change { revision, before: Some(side.clone()), after: Some(side), is_status: true }]);
    }
}
