//! Rounds between an API server of the test's own and a FreeFlow that is a state with its store.
use super::fenced::Fenced;
use super::leader::{Candidate, Term};
use super::sync::{FINALIZER, Sync};
use super::target::{Following, Target, TargetError};
use crate::api::News;
use crate::api::test_server::{Seen, TestServer};
use crate::declared::{DeclaredKind, Resource};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind};
use freeflow_orchestrator::store::Committed;
use freeflow_orchestrator::{Command, KUBERNETES, MemoryStore, State, Store, Writer};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A host's objects.
struct Host {
    state: State,
    store: MemoryStore,
    /// Objects of each request.
    asked: Vec<usize>,
    is_away: bool,
    /// How far its hosts are.
    following: Following,
    /// A command of another one, which comes before the next deletion.
    before_delete: Option<Command>,
}

/// Shared with the test.
#[derive(Clone)]
struct Fake(Rc<RefCell<Host>>);

impl Fake {
    fn new() -> Self {
        let following = Following { count: 1, of: 1, ..Following::default() };
        let (state, store) = (State::new(), MemoryStore::new());
        let host = Host { state, store, asked: Vec::new(), is_away: false, following, before_delete: None };
        let fake = Self(Rc::new(RefCell::new(host)));
        let pool = "10.111.0.0/16".parse().unwrap();
        let begin = Command::Begin { host: "h1".into(), pool, range: None, bridge: "ff0".into() };
        fake.run(&Writer::Hand, &begin).unwrap();
        fake
    }

    fn run(&self, writer: &Writer, command: &Command) -> Result<Vec<AnyObject>, TargetError> {
        let host = &mut *self.0.borrow_mut();
        if host.is_away {
            return Err(TargetError::Away("a test".into()));
        }
        let plan = host
            .state
            .plan_by(writer, command)
            .map_err(|refusal| TargetError::Refused(refusal.reason.word().into(), refusal.to_string()))?;
        if !plan.writes.is_empty() {
            let committed = host.store.commit(&host.state.transaction(&plan)).unwrap();
            let Committed::Done(revision) = committed else { panic!("{committed:?}") };
            host.state.adopt(&plan, revision);
        }
        let now = |kind, name: &str| host.state.object(kind, name);
        Ok(plan.results.into_iter().map(|one| now(one.kind, &one.name).unwrap_or(one.object)).collect())
    }

    fn names(&self, kind: ObjectKind) -> Vec<String> {
        self.0.borrow().state.objects(kind).map(|object| object.name().to_owned()).collect()
    }

    fn spec(&self, kind: ObjectKind, name: &str) -> Value {
        serde_json::to_value(self.0.borrow().state.object(kind, name).expect("it is there")).unwrap()["spec"].clone()
    }

    fn asked(&self) -> Vec<usize> {
        std::mem::take(&mut self.0.borrow_mut().asked)
    }
}

fn kubernetes() -> Writer {
    Writer::Manager(KUBERNETES.into())
}

impl Target for Fake {
    async fn present(&mut self) -> Result<Vec<AnyObject>, TargetError> {
        let host = self.0.borrow();
        if host.is_away {
            return Err(TargetError::Away("a test".into()));
        }
        let all = ObjectKind::ALL.iter().flat_map(|kind| host.state.objects(*kind));
        Ok(all.filter(|object| object.metadata().manager.is_some()).collect())
    }

    async fn apply(&mut self, objects: &[AnyObject]) -> Result<Vec<AnyObject>, TargetError> {
        self.0.borrow_mut().asked.push(objects.len());
        self.run(&kubernetes(), &Command::Apply { objects: objects.to_vec() })
    }

    async fn delete(&mut self, object: &AnyObject) -> Result<(), TargetError> {
        let before = self.0.borrow_mut().before_delete.take();
        if let Some(command) = before {
            self.run(&kubernetes(), &command)?;
        }
        let (kind, name) = (object.kind(), object.name().to_owned());
        let version = object.metadata().resource_version;
        assert!(version.is_some());
        self.run(&kubernetes(), &Command::Delete { kind, name, version }).map(drop)
    }

    async fn following(&mut self, objects: &[AnyObject]) -> Result<Vec<Following>, TargetError> {
        Ok(vec![self.0.borrow().following.clone(); objects.len()])
    }
}

/// Objects of an API server by their paths.
#[derive(Clone, Default)]
struct Objects(Arc<Mutex<BTreeMap<String, Value>>>, Arc<AtomicBool>);

fn merge(into: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else { return *into = patch.clone() };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        match value {
            Value::Null => drop(into.as_object_mut().unwrap().remove(key)),
            value => merge(&mut into[key], value),
        }
    }
}

fn status(code: u16, reason: &str) -> (u16, String) {
    (code, json!({"kind": "Status", "code": code, "reason": reason, "message": reason}).to_string())
}

impl Objects {
    fn answer(&self, seen: &Seen) -> (u16, String) {
        let mut all = self.0.lock().unwrap();
        let path = seen.path.split('?').next().unwrap_or_default();
        if path.ends_with("/status") && self.1.load(Ordering::Relaxed) {
            return status(500, "InternalError");
        }
        let path = path.strip_suffix("/status").unwrap_or(path).to_owned();
        let version = all.len() + seen.body.len();
        match seen.method.as_str() {
            "POST" => {
                let mut object = seen.json();
                let name = object["metadata"]["name"].as_str().map_or_else(|| format!("e{version}"), str::to_owned);
                object["metadata"]["resourceVersion"] = "1".into();
                let at = format!("{path}/{name}");
                if all.contains_key(&at) {
                    return status(409, "AlreadyExists");
                }
                all.insert(at, object.clone());
                (201, object.to_string())
            }
            "PATCH" => {
                let Some(object) = all.get_mut(&path) else { return status(404, "NotFound") };
                let mut patch = seen.json();
                let asked = patch["metadata"]["resourceVersion"].take();
                let there = object["metadata"]["resourceVersion"].clone();
                if !asked.is_null() && asked != there {
                    return status(409, "Conflict");
                }
                if let Some(metadata) = patch["metadata"].as_object_mut() {
                    metadata.remove("resourceVersion");
                }
                merge(object, &patch);
                let number: u64 = there.as_str().and_then(|text| text.parse().ok()).unwrap_or(0);
                object["metadata"]["resourceVersion"] = (number + 1).to_string().into();
                let is_gone = !object["metadata"]["deletionTimestamp"].is_null()
                    && object["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty);
                let answer = object.to_string();
                if is_gone {
                    all.remove(&path);
                }
                (200, answer)
            }
            "GET" => all.get(&path).map_or_else(|| status(404, "NotFound"), |object| (200, object.to_string())),
            _ => status(405, "MethodNotAllowed"),
        }
    }

    fn path(kind: DeclaredKind, namespace: &str, name: &str) -> String {
        let of = Some(namespace).filter(|namespace| !namespace.is_empty());
        kind.api().path(of, Some(name)).unwrap()
    }

    /// A new resource, or a new spec of one.
    fn put(&self, kind: DeclaredKind, (namespace, name): (&str, &str), spec: Value) -> Resource {
        let mut all = self.0.lock().unwrap();
        let object = all.entry(Self::path(kind, namespace, name)).or_insert_with(
            || json!({"metadata": {"name": name, "namespace": namespace, "uid": "u", "resourceVersion": "1"}}),
        );
        if object["spec"] != spec {
            let number = |value: &Value| value.as_str().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
            let metadata = &mut object["metadata"];
            metadata["resourceVersion"] = (number(&metadata["resourceVersion"]) + 1).to_string().into();
            metadata["generation"] = (metadata["generation"].as_u64().unwrap_or(0) + 1).into();
        }
        object["spec"] = spec;
        serde_json::from_value(object.clone()).unwrap()
    }

    fn get(&self, kind: DeclaredKind, namespace: &str, name: &str) -> Option<Resource> {
        let all = self.0.lock().unwrap();
        Some(serde_json::from_value(all.get(&Self::path(kind, namespace, name))?.clone()).unwrap())
    }

    /// As `kubectl delete` does it; the resource with its time.
    fn delete(&self, kind: DeclaredKind, namespace: &str, name: &str) -> Resource {
        let mut all = self.0.lock().unwrap();
        let object = all.get_mut(&Self::path(kind, namespace, name)).expect("it is there");
        object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        serde_json::from_value(object.clone()).unwrap()
    }

    fn events(&self) -> Vec<(String, String)> {
        let all = self.0.lock().unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let events = all.iter().filter(|(path, _)| path.contains("/events/"));
        events.map(|(_, event)| (text(&event["type"]), text(&event["reason"]))).collect()
    }
}

/// `Accepted=True/Declared`, of all conditions.
fn conditions(resource: &Resource) -> Vec<String> {
    let conditions = resource.status.iter().flat_map(|status| &status.conditions);
    conditions.map(|one| format!("{}={}/{}", one.r#type, one.status, one.reason)).collect()
}

const FINE: [&str; 2] = ["Accepted=True/Declared", "Enforced=True/Everywhere"];

struct World {
    objects: Objects,
    server: TestServer,
    fake: Fake,
    sync: Sync<Fake>,
}

impl World {
    async fn new() -> Self {
        let objects = Objects::default();
        let of_server = objects.clone();
        let server = TestServer::start(move |seen| of_server.answer(seen)).await;
        let fake = Fake::new();
        let sync = Sync::new(server.client(), fake.clone());
        Self { objects, server, fake, sync }
    }

    fn put(&mut self, kind: DeclaredKind, (namespace, name): (&str, &str), spec: Value) {
        let resource = self.objects.put(kind, (namespace, name), spec);
        self.sync.take(kind, News::Changed(resource));
    }

    fn delete(&mut self, kind: DeclaredKind, namespace: &str, name: &str) {
        let resource = self.objects.delete(kind, namespace, name);
        assert!(self.sync.take(kind, News::Changed(resource)));
    }

    async fn round(&mut self) -> Duration {
        self.sync.round().await.unwrap_or_else(|error| panic!("{error}"))
    }

    fn conditions(&self, kind: DeclaredKind, namespace: &str, name: &str) -> Vec<String> {
        conditions(&self.objects.get(kind, namespace, name).expect("it is there"))
    }
}

fn network(cidr: &str) -> Value {
    json!({"cidrs": [cidr]})
}

#[tokio::test]
async fn resources_become_objects_and_have_conditions() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Network, ("team", "red"), network("10.1.0.0/24"));
    world.put(DeclaredKind::Vnic, ("team", "db"), json!({"network": "red", "addresses": ["10.1.0.9"]}));
    world.put(DeclaredKind::QosClass, ("", "slow"), json!({"priority": 1}));
    world.put(DeclaredKind::Network, ("other", "red"), network("10.1.0.0/24"));
    assert!(world.round().await > Duration::from_secs(60));
    assert_eq!(world.fake.asked(), [4]);
    assert_eq!(world.fake.names(ObjectKind::Network), ["default", "k8s.other.red", "k8s.team.red"]);
    assert_eq!(world.fake.spec(ObjectKind::Vnic, "k8s.team.db")["addresses"], json!(["10.1.0.9"]));
    for (kind, namespace, name) in [
        (DeclaredKind::Network, "team", "red"),
        (DeclaredKind::Vnic, "team", "db"),
        (DeclaredKind::QosClass, "", "slow"),
    ] {
        let resource = world.objects.get(kind, namespace, name).unwrap();
        assert_eq!(conditions(&resource), FINE);
        assert_eq!(resource.metadata.finalizers, [FINALIZER]);
        assert_eq!(resource.status.unwrap().freeflow_name, kind.freeflow_name(&resource.metadata).unwrap());
    }
    // A round without news asks FreeFlow for nothing, and writes nothing.
    let seen = world.server.seen().len();
    world.round().await;
    assert_eq!((world.fake.asked(), world.server.seen().len()), (vec![], seen));
    // A change by the manager is one of the object.
    world.put(DeclaredKind::QosClass, ("", "slow"), json!({"priority": 2}));
    world.round().await;
    assert_eq!(world.fake.spec(ObjectKind::QosClass, "k8s._.slow")["priority"], 2);
    assert_eq!(world.fake.asked(), [1]);
    // One that another hand deleted is there again.
    let delete = Command::Delete { kind: ObjectKind::QosClass, name: "k8s._.slow".into(), version: None };
    world.fake.run(&Writer::TakeOver, &delete).unwrap();
    world.round().await;
    assert_eq!(world.fake.names(ObjectKind::QosClass), ["k8s._.slow"]);
    // A controller that begins later has nothing to do.
    let mut later = Sync::new(world.server.client(), world.fake.clone());
    for (kind, namespace, name) in [
        (DeclaredKind::Network, "team", "red"),
        (DeclaredKind::Network, "other", "red"),
        (DeclaredKind::Vnic, "team", "db"),
        (DeclaredKind::QosClass, "", "slow"),
    ] {
        later.take(kind, News::Changed(world.objects.get(kind, namespace, name).unwrap()));
    }
    let (revision, seen) = (world.fake.0.borrow().state.revision(), world.server.seen().len());
    later.round().await.unwrap();
    assert_eq!((world.fake.0.borrow().state.revision(), world.server.seen().len()), (revision, seen));
}

#[tokio::test]
async fn a_broken_resource_stops_nobody() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Network, ("team", "bad"), json!({"cidrs": ["10.1.0.0/24"], "nonsense": 1}));
    world.put(DeclaredKind::Network, ("team", "worse"), network("127.0.0.0/8"));
    world.put(DeclaredKind::Network, ("team", "twice"), network("10.9.0.0/25"));
    world.put(DeclaredKind::Network, ("team", "good"), network("10.9.0.0/24"));
    world.put(DeclaredKind::Vnic, ("team", "early"), json!({"network": "late"}));
    let next = world.round().await;
    assert!(next <= Duration::from_secs(2), "{next:?}");
    assert_eq!(world.fake.names(ObjectKind::Network), ["default", "k8s.team.good"]);
    assert_eq!(world.conditions(DeclaredKind::Network, "team", "good"), FINE);
    for name in ["bad", "worse", "twice"] {
        let conditions = world.conditions(DeclaredKind::Network, "team", name);
        assert_eq!(conditions, ["Accepted=False/Invalid", "Enforced=False/NotAccepted"], "{name}");
    }
    let said = world.objects.get(DeclaredKind::Network, "team", "bad").unwrap().status.unwrap();
    assert!(said.conditions[0].message.contains("nonsense"), "{said:?}");
    let warning = |reason: &str| ("Warning".to_owned(), reason.to_owned());
    assert!(world.objects.events().contains(&warning("Invalid")), "{:?}", world.objects.events());
    // Once a network is there, a vNIC of it is, too.
    world.put(DeclaredKind::Network, ("team", "late"), network("10.8.0.0/24"));
    world.round().await;
    assert_eq!(world.conditions(DeclaredKind::Vnic, "team", "early"), FINE);
    // The pauses between attempts grow.
    let mut last = Duration::ZERO;
    for _ in 0..8 {
        let next = world.round().await;
        assert!(next >= last, "{next:?} after {last:?}");
        last = next;
    }
    assert_eq!(last, Duration::from_secs(60));
}

#[tokio::test]
async fn a_deletion_waits_for_users() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Network, ("team", "red"), network("10.1.0.0/24"));
    world.put(DeclaredKind::Group, ("team", "g"), json!({"members": [{"networks": ["red"]}]}));
    world.round().await;
    let attach = Command::Attach {
        id: "pod".into(),
        title: "pod".into(),
        network: "k8s.team.red".into(),
        address: None,
        labels: BTreeMap::new(),
    };
    world.fake.run(&Writer::Hand, &attach).unwrap();
    world.delete(DeclaredKind::Network, "team", "red");
    world.delete(DeclaredKind::Group, "team", "g");
    let next = world.round().await;
    assert!(next <= Duration::from_secs(5), "{next:?}");
    // The group is gone first; a pod uses the network.
    assert!(world.objects.get(DeclaredKind::Group, "team", "g").is_none());
    let conditions = world.conditions(DeclaredKind::Network, "team", "red");
    assert!(conditions.contains(&"Deleted=False/InUse".to_owned()), "{conditions:?}");
    let said = world.objects.get(DeclaredKind::Network, "team", "red").unwrap().status.unwrap();
    assert!(said.conditions.last().unwrap().message.contains("Vnic pod"), "{said:?}");
    world.fake.run(&Writer::Hand, &Command::Detach { id: "pod".into() }).unwrap();
    world.round().await;
    assert_eq!(world.fake.names(ObjectKind::Network), ["default"]);
    assert!(world.objects.get(DeclaredKind::Network, "team", "red").is_none());
    // One that was never declared goes at once.
    world.put(DeclaredKind::Network, ("team", "x"), network("127.0.0.0/8"));
    world.round().await;
    world.delete(DeclaredKind::Network, "team", "x");
    world.round().await;
    assert!(world.objects.get(DeclaredKind::Network, "team", "x").is_none());
}

#[tokio::test]
async fn what_is_anothers_stays() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Quota, ("", "small"), json!({"vnics": 8}));
    world.round().await;
    // Taken over by an operator: it is no more the controller's to change or delete.
    let spec = json!({"vnics": 9});
    let value =
        json!({"apiVersion": "freeflow.io/v1", "kind": "Quota", "metadata": {"name": "k8s._.small"}, "spec": spec});
    let taken = freeflow_orchestrator::objects::parse_object(&value).unwrap();
    world.fake.run(&Writer::TakeOver, &Command::Apply { objects: vec![taken] }).unwrap();
    world.round().await;
    assert_eq!(world.fake.spec(ObjectKind::Quota, "k8s._.small")["vnics"], 9);
    let conditions = world.conditions(DeclaredKind::Quota, "", "small");
    assert_eq!(conditions, ["Accepted=False/Conflict", "Enforced=False/NotAccepted"]);
    world.delete(DeclaredKind::Quota, "", "small");
    world.round().await;
    assert!(world.objects.get(DeclaredKind::Quota, "", "small").is_none());
    assert_eq!(world.fake.names(ObjectKind::Quota), ["k8s._.small"]);
    // An API server without resources, as after a loss of its data, takes nothing away.
    world.put(DeclaredKind::Network, ("team", "red"), network("10.1.0.0/24"));
    world.round().await;
    for kind in DeclaredKind::ALL {
        world.sync.take(kind, News::All(Vec::new()));
    }
    for _ in 0..3 {
        world.round().await;
    }
    assert_eq!(world.fake.names(ObjectKind::Network), ["default", "k8s.team.red"]);
}

#[tokio::test]
async fn without_freeflow_nothing_is_said() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Quota, ("", "small"), json!({"vnics": 8}));
    world.fake.0.borrow_mut().is_away = true;
    assert!(matches!(world.sync.round().await, Err(TargetError::Away(_))));
    assert!(world.conditions(DeclaredKind::Quota, "", "small").is_empty());
    world.fake.0.borrow_mut().is_away = false;
    world.round().await;
    assert_eq!(world.conditions(DeclaredKind::Quota, "", "small"), FINE);
}

#[tokio::test]
async fn many_are_declared_in_batches() {
    let mut world = World::new().await;
    for number in 0..150 {
        world.put(DeclaredKind::Quota, ("", &format!("q{number}")), json!({"vnics": 8}));
    }
    // So many get their finalizers in a round.
    assert!(world.round().await <= Duration::from_secs(2));
    world.round().await;
    assert_eq!(world.fake.names(ObjectKind::Quota).len(), 150);
    assert_eq!(world.fake.asked(), [100, 50]);
}

fn vnic(network: &str) -> Value {
    json!({"network": network})
}

#[tokio::test]
async fn a_namespace_with_many_broken_ones_delays_no_other_one() {
    let mut world = World::new().await;
    let broken = |number: usize| format!("v{number:03}");
    for number in 0..150 {
        world.put(DeclaredKind::Vnic, ("aaa", &broken(number)), vnic("none"));
    }
    for _ in 0..4 {
        world.round().await;
    }
    // A new one of another namespace comes at the same time as more of them.
    for number in 150..210 {
        world.put(DeclaredKind::Vnic, ("aaa", &broken(number)), vnic("none"));
    }
    world.put(DeclaredKind::Network, ("zed", "red"), network("10.1.0.0/24"));
    world.put(DeclaredKind::Vnic, ("zed", "good"), vnic("red"));
    world.fake.asked();
    world.round().await;
    assert_eq!(world.conditions(DeclaredKind::Vnic, "zed", "good"), FINE);
    // One request for all that was new, and then so many for single ones.
    assert_eq!(world.fake.asked(), [vec![62], vec![1; 64]].concat());
    world.delete(DeclaredKind::Vnic, "zed", "good");
    world.round().await;
    assert!(world.objects.get(DeclaredKind::Vnic, "zed", "good").is_none());
}

#[tokio::test]
async fn a_spec_that_was_not_tried_yet_is_not_accepted() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Network, ("aaa", "red"), network("10.1.0.0/24"));
    world.put(DeclaredKind::Vnic, ("aaa", "v100x"), vnic("red"));
    world.round().await;
    assert_eq!(world.conditions(DeclaredKind::Vnic, "aaa", "v100x"), FINE);
    for number in 0..150 {
        world.put(DeclaredKind::Vnic, ("aaa", &format!("v{number:03}")), vnic("none"));
    }
    world.round().await;
    world.round().await;
    world.put(DeclaredKind::Vnic, ("aaa", "v100x"), vnic("none"));
    let mut skipped = 0;
    loop {
        world.round().await;
        let resource = world.objects.get(DeclaredKind::Vnic, "aaa", "v100x").unwrap();
        let accepted = resource.status.as_ref().unwrap().conditions[0].clone();
        if accepted.observed_generation == resource.metadata.generation {
            assert_eq!(accepted.status, "False", "{accepted:?}");
            break;
        }
        assert_eq!((accepted.status.as_str(), accepted.observed_generation), ("True", 1));
        skipped += 1;
    }
    assert!(skipped > 0, "it was tried at once");
}

#[tokio::test]
async fn a_change_during_a_round_is_heard_of() {
    let mut world = World::new().await;
    let put = (DeclaredKind::Network, ("team", "red"));
    world.put(put.0, put.1, network("10.1.0.0/24"));
    world.round().await;
    world.put(put.0, put.1, network("10.2.0.0/24"));
    // The watch has not brought this one when the status is written.
    let later = world.objects.put(put.0, put.1, network("10.3.0.0/24"));
    assert!(world.round().await <= Duration::from_secs(2));
    assert!(world.sync.take(put.0, News::Changed(later)), "the change was lost");
    world.round().await;
    assert_eq!(world.fake.spec(ObjectKind::Network, "k8s.team.red")["cidrs"], json!(["10.3.0.0/24"]));
    let said = world.objects.get(put.0, "team", "red").unwrap().status.unwrap();
    assert_eq!(said.conditions[0].observed_generation, 3);
}

#[tokio::test]
async fn a_status_that_was_not_written_is_written_soon() {
    let mut world = World::new().await;
    world.objects.1.store(true, Ordering::Relaxed);
    world.put(DeclaredKind::Quota, ("", "small"), json!({"vnics": 8}));
    assert!(world.round().await <= Duration::from_secs(2));
    assert!(world.conditions(DeclaredKind::Quota, "", "small").is_empty());
    world.objects.1.store(false, Ordering::Relaxed);
    assert!(world.round().await > Duration::from_secs(60));
    assert_eq!(world.conditions(DeclaredKind::Quota, "", "small"), FINE);
}

#[tokio::test]
async fn pauses_grow_while_hosts_are_behind() {
    let mut world = World::new().await;
    world.fake.0.borrow_mut().following =
        Following { of: 2, behind: vec!["h2".into()], count: 1, ..Following::default() };
    world.put(DeclaredKind::Quota, ("", "small"), json!({"vnics": 8}));
    let mut pauses = Vec::new();
    for _ in 0..5 {
        pauses.push(world.round().await.as_secs());
    }
    assert_eq!(pauses, [3, 6, 12, 15, 15]);
    assert_eq!(world.conditions(DeclaredKind::Quota, "", "small"), ["Accepted=True/Declared", "Enforced=False/Behind"]);
    world.put(DeclaredKind::Quota, ("", "small"), json!({"vnics": 9}));
    assert_eq!(world.round().await.as_secs(), 3);
}

#[tokio::test]
async fn a_later_object_of_the_name_is_not_deleted() {
    let mut world = World::new().await;
    world.put(DeclaredKind::Quota, ("", "small"), json!({"vnics": 8}));
    world.round().await;
    let value = json!({"apiVersion": "freeflow.io/v1", "kind": "Quota", "metadata": {"name": "k8s._.small"}, "spec": {"vnics": 9}});
    let other = freeflow_orchestrator::objects::parse_object(&value).unwrap();
    world.fake.0.borrow_mut().before_delete = Some(Command::Apply { objects: vec![other] });
    world.delete(DeclaredKind::Quota, "", "small");
    assert!(world.round().await <= Duration::from_secs(2));
    assert_eq!(world.fake.spec(ObjectKind::Quota, "k8s._.small")["vnics"], 9);
    let resource = world.objects.get(DeclaredKind::Quota, "", "small").expect("it waits");
    assert_eq!(resource.metadata.finalizers, [FINALIZER]);
    assert_eq!(conditions(&resource), FINE, "nothing has refused it");
    // It was seen now.
    world.round().await;
    assert!(world.objects.get(DeclaredKind::Quota, "", "small").is_none());
}

#[tokio::test]
async fn nothing_is_changed_after_the_term() {
    let (mut fenced, fake) = {
        let fake = Fake::new();
        (Fenced { target: fake.clone(), term: Term::default() }, fake)
    };
    let quota = |vnics: u32| {
        let value = json!({"apiVersion": "freeflow.io/v1", "kind": "Quota", "metadata": {"name": "k8s._.q"}, "spec": {"vnics": vnics}});
        [freeflow_orchestrator::objects::parse_object(&value).unwrap()]
    };
    let is_over = |answer: Result<(), TargetError>| matches!(answer, Err(TargetError::Away(why)) if why.contains("leads no more"));
    assert!(is_over(fenced.apply(&quota(1)).await.map(drop)), "it leads not yet");
    let term = fenced.term.clone();
    term.renew(freeflow_shm::boottime_ns());
    let there = fenced.apply(&quota(1)).await.unwrap();
    // By a clock that has gone on meanwhile.
    term.renew(freeflow_shm::boottime_ns().saturating_sub(11_000_000_000));
    assert!(is_over(fenced.apply(&quota(2)).await.map(drop)) && is_over(fenced.delete(&there[0]).await));
    term.renew(freeflow_shm::boottime_ns());
    let change = term.change().await.expect("it leads");
    let ended = tokio::time::timeout(Duration::from_millis(10), term.end()).await;
    assert!(ended.is_err(), "a change is under way");
    drop(change);
    term.end().await;
    term.renew(freeflow_shm::boottime_ns());
    assert!(is_over(fenced.delete(&there[0]).await), "it was ended for good");
    assert_eq!(fake.spec(ObjectKind::Quota, "k8s._.q")["vnics"], 1);
    assert_eq!(fenced.present().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_lease_that_is_given_back_is_the_next_ones_at_once() {
    let world = World::new().await;
    let client = world.server.client();
    let (mut one, mut two) = (Candidate::new(&client, "ns", "one"), Candidate::new(&client, "ns", "two"));
    one.release().await.unwrap();
    let now = Instant::now();
    assert_eq!(one.try_once(now).await, Ok(true));
    // It is not another's to give back.
    two.release().await.unwrap();
    assert_eq!(two.try_once(now).await, Ok(false));
    one.release().await.unwrap();
    assert_eq!(two.try_once(now).await, Ok(true));
    assert_eq!(one.try_once(now).await, Ok(false));
}

#[tokio::test]
async fn one_of_two_leads() {
    let world = World::new().await;
    let client = world.server.client();
    let (mut one, mut two) = (Candidate::new(&client, "ns", "one"), Candidate::new(&client, "ns", "two"));
    let begin = Instant::now();
    let at = |seconds| begin + Duration::from_secs(seconds);
    assert_eq!(one.try_once(at(0)).await, Ok(true));
    assert_eq!(two.try_once(at(0)).await, Ok(false));
    assert_eq!(two.try_once(at(14)).await, Ok(false));
    // A renewal is another word.
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(one.try_once(at(14)).await, Ok(true));
    assert_eq!(two.try_once(at(16)).await, Ok(false));
    assert_eq!(two.try_once(at(30)).await, Ok(false));
    assert_eq!(two.try_once(at(31)).await, Ok(true));
    assert_eq!(one.try_once(at(31)).await, Ok(false));
    let lease =
        world.objects.0.lock().unwrap()["/apis/coordination.k8s.io/v1/namespaces/ns/leases/freeflow-controller"]
            .clone();
    assert_eq!((&lease["spec"]["holderIdentity"], &lease["spec"]["leaseTransitions"]), (&json!("two"), &json!(1)));
}

#[tokio::test]
async fn a_lease_needs_a_namespace() {
    let world = World::new().await;
    let declares = super::Declares::Host("/nonexistent".into());
    let settings = super::Settings { declares, namespace: String::new(), identity: "one".into() };
    let why = super::run(&world.server.client(), &settings).await.unwrap_err();
    assert!(why.contains("--namespace") && world.server.seen().is_empty(), "{why}");
}
