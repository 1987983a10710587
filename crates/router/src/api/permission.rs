//! Permissions of each role to read and change, from the state alone.
//!
//! | | read | change |
//! |---|---|---|
//! | admin | all | all |
//! | tenant-admin | the tenant's Networks, Groups, AccessRules and Vnics; QosClasses and Quotas that its Networks name | the tenant's Groups, AccessRules and Vnics, but not what a Vnic is held to |
//! | viewer | all | nothing |
//!
//! An object that may not be read looks as if it were not there.
use super::caller::Role;
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::{Command, Reason, Refusal, State};
use std::collections::BTreeSet;

/// The part of a state that a role reads, as it is now.
pub struct View<'a> {
    role: &'a Role,
    /// QosClasses that the tenants' networks name.
    classes: BTreeSet<&'a str>,
    quotas: BTreeSet<&'a str>,
}

impl<'a> View<'a> {
    pub fn of(role: &'a Role, state: &'a State) -> Self {
        let mut view = Self { role, classes: BTreeSet::new(), quotas: BTreeSet::new() };
        if role.reads_all() || role.tenants.is_empty() {
            return view;
        }
        for network in state.networks().map(|entry| &entry.object.spec) {
            if role.tenants.contains(&network.tenant) {
                view.classes.extend(network.qos_class.as_deref());
                view.quotas.extend(network.quota.as_deref());
            }
        }
        view
    }

    /// `tenant`: whose the object is.
    pub fn shows(&self, kind: ObjectKind, name: &str, tenant: Option<&str>) -> bool {
        self.role.reads_all()
            || match kind {
                ObjectKind::Network | ObjectKind::Group | ObjectKind::AccessRule | ObjectKind::Vnic => {
                    tenant.is_some_and(|tenant| self.role.tenants.contains(tenant))
                }
                ObjectKind::QosClass => self.classes.contains(name),
                ObjectKind::Quota => self.quotas.contains(name),
                ObjectKind::Host => false,
            }
    }

    pub fn shows_object(&self, state: &State, object: &AnyObject) -> bool {
        self.shows(object.kind(), object.name(), state.tenant_of(object).as_deref())
    }

    /// The names of a kind by which it depends on the tenants' networks: a watch that began with
    /// others has missed something.
    pub fn names(&self, kind: ObjectKind) -> BTreeSet<String> {
        let names = match kind {
            ObjectKind::QosClass => &self.classes,
            ObjectKind::Quota => &self.quotas,
            _ => return BTreeSet::new(),
        };
        names.iter().map(|&name| name.to_owned()).collect()
    }
}

fn forbidden(kind: ObjectKind, name: &str, message: impl Into<String>) -> Refusal {
    Refusal::new(Reason::Forbidden, message).about(kind, name)
}

/// Whether a role may do that. Errors: `Forbidden`, or `NotFound` for what it doesn't see.
pub fn check(role: &Role, state: &State, command: &Command) -> Result<(), Refusal> {
    if role.is_admin {
        return Ok(());
    }
    match command {
        Command::Apply { objects } => objects.iter().try_for_each(|object| check_apply(role, state, object)),
        Command::Delete { kind, name, .. } => check_delete(role, state, *kind, name),
        _ => Err(Refusal::new(Reason::Forbidden, "only an admin may do that")),
    }
}

/// Of changes that a cluster's follower makes.
pub const FOLLOW: &str = "follow";

/// Whether the host itself may change that: where it follows a cluster, the cluster's objects are changed for all
/// hosts together. By the verb of the change. Without a cluster nobody copies anything: managers would not count.
pub fn check_cluster(follows_cluster: bool, state: &State, (verb, command): (&str, &Command)) -> Result<(), Refusal> {
    if verb == FOLLOW && !follows_cluster {
        return Err(Refusal::new(Reason::Forbidden, "this host follows no cluster"));
    }
    if let Command::Delete { kind: ObjectKind::Vnic, name, .. } = command
        && verb == FOLLOW
        && state.vnic(name).is_some()
        && !state.is_clusters(ObjectKind::Vnic, name)
    {
        return Err(forbidden(ObjectKind::Vnic, name, "this vNIC is the host's own, and not the cluster's"));
    }
    match state.clusters_object(command) {
        Some((kind, name)) if follows_cluster && verb != FOLLOW => Err(forbidden(
            kind,
            name,
            "this host follows a cluster: it is declared for all hosts, by an operator with freeflow --cluster FILE",
        )),
        _ => Ok(()),
    }
}

/// Refuses a change of a kind that the role may not change at all.
fn check_kind(role: &Role, kind: ObjectKind, name: &str) -> Result<(), Refusal> {
    if role.tenants.is_empty() {
        return Err(forbidden(kind, name, "a viewer changes nothing"));
    }
    match kind {
        ObjectKind::Group | ObjectKind::AccessRule | ObjectKind::Vnic => Ok(()),
        _ => Err(forbidden(kind, name, "only an admin may change this kind")),
    }
}

fn is_own(role: &Role, state: &State, object: &AnyObject) -> bool {
    state.tenant_of(object).is_some_and(|tenant| role.tenants.contains(&tenant))
}

/// The Vnic's own class and quota, if it does not have its network's.
fn own_terms(object: &AnyObject) -> (Option<&str>, Option<&str>) {
    match object {
        AnyObject::Vnic(vnic) => (vnic.spec.qos_class.as_deref(), vnic.spec.quota.as_deref()),
        _ => (None, None),
    }
}

fn check_apply(role: &Role, state: &State, object: &AnyObject) -> Result<(), Refusal> {
    let (kind, name) = (object.kind(), object.name());
    check_kind(role, kind, name)?;
    if !is_own(role, state, object) {
        return Err(forbidden(kind, name, "it would not be your tenant's"));
    }
    let before = state.object(kind, name);
    if before.as_ref().is_some_and(|before| !is_own(role, state, before)) {
        return Err(forbidden(kind, name, "there is one of this name, and it is not your tenant's"));
    }
    if own_terms(object) != before.as_ref().map_or((None, None), own_terms) {
        return Err(forbidden(kind, name, "only an admin may change a Vnic's own qosClass or quota"));
    }
    Ok(())
}

fn check_delete(role: &Role, state: &State, kind: ObjectKind, name: &str) -> Result<(), Refusal> {
    check_kind(role, kind, name)?;
    let Some(object) = state.object(kind, name).filter(|object| is_own(role, state, object)) else {
        return Err(Refusal::new(Reason::NotFound, "there is none").about(kind, name));
    };
    // It could be made again without them.
    if own_terms(&object) != (None, None) {
        return Err(forbidden(
            kind,
            name,
            "an admin has given this Vnic a qosClass or quota of its own; only an admin may delete it",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_orchestrator::Revision;
    use freeflow_orchestrator::objects::parse_object;
    use serde_json::{Value, json};

    fn object(kind: &str, name: &str, spec: Value) -> AnyObject {
        let value = json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
        parse_object(&value).unwrap_or_else(|error| panic!("{error}"))
    }

    fn apply(objects: Vec<AnyObject>) -> Command {
        Command::Apply { objects }
    }

    fn delete(kind: ObjectKind, name: &str) -> Command {
        Command::Delete { kind, name: name.into(), version: None }
    }

    fn rule(name: &str, tenant: &str) -> AnyObject {
        object("AccessRule", name, json!({"tenant": tenant, "from": {}, "to": {}, "action": "deny"}))
    }

    fn vnic(name: &str, network: &str, class: Option<&str>) -> AnyObject {
        let mut spec = json!({"network": network});
        if let Some(class) = class {
            spec["qosClass"] = class.into();
        }
        object("Vnic", name, spec)
    }

    /// Two tenants, with a network, a rule and a vNIC each, and classes.
    fn state() -> State {
        let mut state = State::new();
        let network = |name: &str, tenant: &str, class: &str| {
            object("Network", name, json!({"tenant": tenant, "cidrs": ["10.1.0.0/24"], "qosClass": class}))
        };
        let class = |name: &str| object("QosClass", name, json!({}));
        let objects = vec![
            class("slow"),
            class("fast"),
            network("blue-net", "blue", "slow"),
            network("red-net", "red", "fast"),
            rule("blue-rule", "blue"),
            rule("red-rule", "red"),
            vnic("blue-vnic", "blue-net", None),
            vnic("blue-special", "blue-net", Some("fast")),
        ];
        let plan = state.plan(&apply(objects)).unwrap_or_else(|refusal| panic!("{refusal} {:?}", refusal.causes));
        state.adopt(&plan, Revision(1));
        state
    }

    fn roles() -> [Role; 3] {
        let tenants = BTreeSet::from(["blue".to_owned()]);
        [
            Role { is_admin: true, ..Role::default() },
            Role { tenants, ..Role::default() },
            Role { is_viewer: true, ..Role::default() },
        ]
    }

    #[test]
    fn each_role_changes_what_it_may() {
        let state = state();
        let group = object("Group", "g", json!({"tenant": "blue", "members": []}));
        // Of admin, tenant-admin of blue, viewer.
        let (fine, no, hidden) = (None, Some(Reason::Forbidden), Some(Reason::NotFound));
        for (command, expected) in [
            (apply(vec![group.clone()]), [fine, fine, no]),
            (apply(vec![group, rule("x", "red")]), [fine, no, no]),
            (apply(vec![rule("blue-rule", "blue")]), [fine, fine, no]),
            // Another's by its name, or to be taken over.
            (apply(vec![rule("red-rule", "blue")]), [fine, no, no]),
            (apply(vec![rule("blue-rule", "red")]), [fine, no, no]),
            (apply(vec![object("QosClass", "new", json!({}))]), [fine, no, no]),
            (apply(vec![object("Quota", "new", json!({}))]), [fine, no, no]),
            (apply(vec![object("Host", "h", json!({}))]), [fine, no, no]),
            (apply(vec![object("Network", "n", json!({"tenant": "blue", "cidrs": ["10.9.0.0/24"]}))]), [fine, no, no]),
            (apply(vec![vnic("new", "blue-net", None)]), [fine, fine, no]),
            (apply(vec![vnic("new", "red-net", None)]), [fine, no, no]),
            (apply(vec![vnic("new", "no-net", None)]), [fine, no, no]),
            (apply(vec![vnic("new", "blue-net", Some("slow"))]), [fine, no, no]),
            (apply(vec![vnic("blue-vnic", "blue-net", Some("fast"))]), [fine, no, no]),
            (apply(vec![vnic("blue-special", "blue-net", Some("fast"))]), [fine, fine, no]),
            (apply(vec![vnic("blue-special", "blue-net", None)]), [fine, no, no]),
            (delete(ObjectKind::Vnic, "blue-vnic"), [fine, fine, no]),
            (delete(ObjectKind::Vnic, "blue-special"), [fine, no, no]),
            (delete(ObjectKind::AccessRule, "red-rule"), [fine, hidden, no]),
            (delete(ObjectKind::AccessRule, "none"), [fine, hidden, no]),
            (delete(ObjectKind::Network, "blue-net"), [fine, no, no]),
            (Command::Detach { id: "blue-vnic".into() }, [fine, no, no]),
        ] {
            for (role, expected) in roles().iter().zip(expected) {
                let reason = check(role, &state, &command).err().map(|refusal| refusal.reason);
                assert_eq!(reason, expected, "{role}: {command:?}");
            }
            assert!(check(&Role::default(), &state, &command).is_err());
        }
    }

    #[test]
    fn what_is_a_clusters_is_its_followers_to_change() {
        let mut state = state();
        // A vNIC with an address that goes from host to host.
        let network = json!({"tenant": "blue", "cidrs": ["10.2.0.0/24"], "floating": "10.2.0.224/27"});
        let of_cluster = vec![object("Network", "wide", network), vnic("database", "wide", None)];
        let plan = state.plan(&Command::ApplyForCluster { objects: of_cluster }).unwrap();
        state.adopt(&plan, Revision(9));
        let set = |network: &str| Command::SetDataPath { network: network.into(), path: Default::default() };
        let own = [
            apply(vec![object("Network", "default", json!({"cidrs": ["10.1.0.0/24"]}))]),
            apply(vec![vnic("v", "blue-net", None), object("Host", "h", json!({}))]),
            delete(ObjectKind::Vnic, "blue-vnic"),
            set("default"),
            Command::Detach { id: "blue-vnic".into() },
        ];
        let clusters = [
            apply(vec![vnic("v", "blue-net", None), rule("r", "blue")]),
            apply(vec![object("QosClass", "slow", json!({}))]),
            apply(vec![object("Quota", "q", json!({}))]),
            delete(ObjectKind::Network, "blue-net"),
            delete(ObjectKind::Group, "g"),
            set("blue-net"),
            apply(vec![vnic("database", "wide", None)]),
            delete(ObjectKind::Vnic, "database"),
            Command::Detach { id: "database".into() },
        ];
        for command in own.iter().chain(&clusters) {
            assert_eq!(check_cluster(false, &state, ("apply", command)), Ok(()), "{command:?}");
            let is_own_vnic = *command == delete(ObjectKind::Vnic, "blue-vnic");
            assert_eq!(check_cluster(true, &state, (FOLLOW, command)).is_err(), is_own_vnic, "{command:?}");
            let without = check_cluster(false, &state, (FOLLOW, command)).map_err(|refusal| refusal.reason);
            assert_eq!(without, Err(Reason::Forbidden), "{command:?}");
        }
        assert!(own.iter().all(|command| check_cluster(true, &state, ("apply", command)).is_ok()));
        assert!(clusters.iter().all(|command| check_cluster(true, &state, ("put", command)).is_err()));
    }

    #[test]
    fn each_role_reads_what_it_may() {
        let state = state();
        let all: Vec<AnyObject> = ObjectKind::ALL.iter().flat_map(|kind| state.objects(*kind)).collect();
        let seen = |role: &Role| -> Vec<String> {
            let view = View::of(role, &state);
            let of_view = all.iter().filter(|object| view.shows_object(&state, object));
            of_view.map(|object| object.name().to_owned()).collect()
        };
        let [admin, tenant, viewer] = roles();
        assert_eq!(seen(&admin).len(), all.len());
        assert_eq!(seen(&viewer).len(), all.len());
        assert_eq!(seen(&tenant), ["blue-net", "blue-rule", "slow", "blue-special", "blue-vnic"]);
        let view = View::of(&tenant, &state);
        assert_eq!(view.names(ObjectKind::QosClass), BTreeSet::from(["slow".to_owned()]));
        assert!(view.names(ObjectKind::Quota).is_empty(), "a class of that name is no quota");
        assert!(seen(&Role::default()).is_empty());
    }
}
