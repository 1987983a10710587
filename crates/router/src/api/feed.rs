//! Changes that the control thread reports to the server of its own accord.
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Revision, State};
use tokio::sync::mpsc::UnboundedSender;

/// An object at one side of a change.
#[derive(Clone, Debug)]
pub struct Side {
    pub object: AnyObject,
    /// The object's owner.
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

/// Where changes go; the default leads nowhere. The queue has no limit of its own: each change was
/// a transaction on the disk, or the end of a vNIC's threads, and the server does little with each.
#[derive(Clone, Default)]
pub struct Feed(Option<UnboundedSender<Vec<Change>>>);

impl Feed {
    pub fn new(sender: UnboundedSender<Vec<Change>>) -> Self {
        Self(Some(sender))
    }

    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    pub fn put(&self, changes: Vec<Change>) {
        if let Some(sender) = &self.0 {
            // Fails only when the server has ended.
            let _ = sender.send(changes);
        }
    }
}

/// Objects that a plan touches, as they were before it was adopted.
pub struct Touched(pub Vec<(ObjectKind, String, Option<Side>)>);

pub fn side(state: &State, kind: ObjectKind, name: &str) -> Option<Side> {
    let object = state.object(kind, name)?;
    let tenant = state.tenant_of(&object);
    Some(Side { object, tenant })
}
