//! Writers of declared objects, and the objects that each may change.
//!
//! An object may have a manager, such as Kubernetes, whose own copy is the truth. Everybody else is refused with the
//! manager's name and the way to change the object there. An operator whose manager is gone takes the object over.
use crate::command::{Reason, Refusal};
use crate::name_is_good;
use crate::objects::{Cause, Manager, Metadata, ObjectKind};
use alloc::format;
use alloc::string::String;

/// Longest [`Manager::change`], bytes.
const CHANGE_BYTES_MAX: usize = 512;

/// The manager of objects that Kubernetes declares.
pub const KUBERNETES: &str = "kubernetes";
/// Names that begin so are Kubernetes' alone.
pub const KUBERNETES_PREFIX: &str = "k8s.";

/// The source of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Writer {
    /// Somebody who declares objects by hand.
    #[default]
    Hand,
    /// The manager of that name, for its own objects.
    Manager(String),
    /// An operator in a manager's place: the objects have no manager then.
    TakeOver,
    /// One that carries out decisions made elsewhere: the follower of a cluster, the reader of a backup, the router for
    /// its containers. Managers are as the objects say.
    Copy,
}

fn refuse<T>(kind: ObjectKind, name: &str, reason: Reason, message: String) -> Result<T, Refusal> {
    Err(Refusal::new(reason, message).about(kind, name))
}

fn invalid<T>(kind: ObjectKind, name: &str, field: &str, message: String) -> Result<T, Refusal> {
    let text = format!("{field}: {message}");
    let causes = alloc::vec![Cause::new(field, message)];
    Err(Refusal { causes, ..Refusal::new(Reason::Invalid, text).about(kind, name) })
}

/// An object that another one manages.
fn managed(kind: ObjectKind, name: &str, manager: &Manager) -> Refusal {
    let at = match &manager.change {
        Some(change) => format!(" with {change}"),
        None => String::new(),
    };
    let message = format!(
        "it is managed by {}: change or delete it there{at}. If {} is gone for good, take it over with --take-over",
        manager.name, manager.name
    );
    Refusal::new(Reason::Conflict, message).about(kind, name)
}

fn check_manager(kind: ObjectKind, name: &str, manager: &Manager) -> Result<(), Refusal> {
    if !name_is_good(&manager.name) {
        return invalid(kind, name, "metadata.manager.name", crate::check::BAD_NAME.into());
    }
    let change = manager.change.as_deref().unwrap_or_default();
    if change.len() > CHANGE_BYTES_MAX || change.contains(char::is_control) {
        let message = format!("up to {CHANGE_BYTES_MAX} bytes without control characters");
        return invalid(kind, name, "metadata.manager.change", message);
    }
    Ok(())
}

impl Writer {
    /// The manager that an object has after a change by this writer. `old`: of the object that is there; `changes`:
    /// whether the change comes to something.
    ///
    /// # Errors
    /// `Conflict`: the object is another's. `Invalid`: a manager that the writer can't give.
    pub(crate) fn manager_after(
        &self,
        kind: ObjectKind,
        new: &Metadata,
        old: Option<&Metadata>,
        changes: bool,
    ) -> Result<Option<Manager>, Refusal> {
        let name = new.name.as_str();
        let there = old.and_then(|old| old.manager.as_ref());
        match self {
            Self::Hand => self.manager_by_hand(kind, new, (old, there), changes),
            Self::Manager(own) => {
                let manager = new.manager.clone().unwrap_or_else(|| Manager { name: own.clone(), change: None });
                if manager.name != *own {
                    return invalid(kind, name, "metadata.manager.name", format!("the request is of {own}"));
                }
                check_manager(kind, name, &manager)?;
                self.check_owned(kind, name, old)?;
                if old.is_none() && (own == KUBERNETES) != name.starts_with(KUBERNETES_PREFIX) {
                    let message = format!("names of {KUBERNETES}, and no others, begin with {KUBERNETES_PREFIX}");
                    return invalid(kind, name, "metadata.name", message);
                }
                Ok(Some(manager))
            }
            Self::TakeOver if old.is_none() && name.starts_with(KUBERNETES_PREFIX) => {
                let message = format!("names that begin with {KUBERNETES_PREFIX} are {KUBERNETES}'");
                invalid(kind, name, "metadata.name", message)
            }
            Self::TakeOver => Ok(None),
            Self::Copy => {
                new.manager.as_ref().map_or(Ok(()), |manager| check_manager(kind, name, manager))?;
                Ok(new.manager.clone())
            }
        }
    }

    fn manager_by_hand(
        &self,
        kind: ObjectKind,
        new: &Metadata,
        (old, there): (Option<&Metadata>, Option<&Manager>),
        changes: bool,
    ) -> Result<Option<Manager>, Refusal> {
        let name = new.name.as_str();
        if let Some(manager) =
            there.filter(|manager| changes || new.manager.as_ref().is_some_and(|new| new != *manager))
        {
            return Err(managed(kind, name, manager));
        }
        if there.is_none() && new.manager.is_some() {
            let message = "only a manager's own requests set it: leave it out, or use --take-over";
            return invalid(kind, name, "metadata.manager", message.into());
        }
        if old.is_none() && name.starts_with(KUBERNETES_PREFIX) {
            let message = format!("names that begin with {KUBERNETES_PREFIX} are {KUBERNETES}'");
            return invalid(kind, name, "metadata.name", message);
        }
        Ok(there.cloned())
    }

    /// Checks that the writer may change or delete the object that is there.
    ///
    /// # Errors
    /// `Conflict`: it is another's.
    pub(crate) fn check_owned(&self, kind: ObjectKind, name: &str, old: Option<&Metadata>) -> Result<(), Refusal> {
        let there = old.and_then(|old| old.manager.as_ref());
        match (self, there) {
            (Self::TakeOver | Self::Copy, _) | (Self::Hand, None) => Ok(()),
            (Self::Manager(own), Some(manager)) if manager.name == *own => Ok(()),
            (Self::Manager(own), None) if old.is_some() => {
                let message = format!("it was declared by hand, and not by {own}: delete it, or choose another name");
                refuse(kind, name, Reason::Conflict, message)
            }
            (Self::Manager(_), None) => Ok(()),
            (Self::Hand | Self::Manager(_), Some(manager)) => Err(managed(kind, name, manager)),
        }
    }
}
