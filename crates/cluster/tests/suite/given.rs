//! A beginning for tests: a view of keys that etcd could have, and a host that is a state.
use freeflow_cluster::mirror::Target;
use freeflow_cluster::{Followed, Holdings, HostRecord, Identity, News, Place, Scope, View};
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, parse_object};
use freeflow_orchestrator::store::Entry;
use freeflow_orchestrator::{Command, Revision, State};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

pub const ROOT: &str = "/freeflow";

pub fn object(kind: &str, name: &str, spec: Value) -> AnyObject {
    let value = json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    parse_object(&value).unwrap_or_else(|error| panic!("{error}"))
}

pub fn network(name: &str, cidr: &str) -> AnyObject {
    object("Network", name, json!({"tenant": name, "cidrs": [cidr]}))
}

pub fn apply(objects: Vec<AnyObject>) -> Command {
    Command::ApplyForCluster { objects }
}

pub fn delete(kind: ObjectKind, name: &str) -> Command {
    Command::Delete { kind, name: name.into(), version: None }
}

/// Does a command, as one host's router does.
pub fn run(state: &mut State, command: &Command) -> Result<(), String> {
    let plan = state.plan(command).map_err(|refusal| refusal.to_string())?;
    let revision = Revision(state.revision().0 + 1);
    state.adopt(&plan, revision);
    Ok(())
}

pub fn record(number: u8) -> HostRecord {
    HostRecord {
        address: [192, 0, 2, number].into(),
        control_port: 4790,
        public_key: format!("{number:02x}").repeat(32),
        default_range: format!("10.111.{number}.0/24"),
    }
}

/// Keys of a cluster.
#[derive(Clone, Default)]
pub struct Given(Vec<Entry>);

impl Given {
    pub fn new() -> Self {
        Self::with(Identity { id: "c".into(), version: 1, restored: 0, pool: None, full_mesh: 64 })
    }

    pub fn with(identity: Identity) -> Self {
        Self::default().key("cluster/data/identity", &serde_json::to_vec(&identity).expect("encodable"))
    }

    pub fn key(mut self, key: &str, value: &[u8]) -> Self {
        let revision = Revision(self.0.len() as u64 + 1);
        let key = format!("{ROOT}/{key}");
        self.0.push(Entry { key, value: value.to_vec(), created: revision, modified: revision, lease: None });
        self
    }

    pub fn declared(self, objects: Vec<AnyObject>) -> Self {
        let plan = State::new().plan(&apply(objects)).unwrap_or_else(|refusal| panic!("{refusal}"));
        let put = |given: Self, (key, value): &(String, Option<Vec<u8>>)| {
            given.key(&format!("declared/data/{key}"), value.as_deref().expect("all are new"))
        };
        plan.writes.iter().fold(self, put)
    }

    pub fn host(self, name: &str, record: &HostRecord) -> Self {
        self.key(&format!("hosts/{name}/data/record"), &serde_json::to_vec(record).expect("encodable"))
    }

    /// With the keys of another, written later.
    pub fn and(mut self, later: Self) -> Self {
        for entry in later.0 {
            let revision = Revision(self.0.len() as u64 + 1);
            self.0.push(Entry { created: revision, modified: revision, ..entry });
        }
        self
    }

    pub fn block(self, network: &str, host: &str, cidr: &str) -> Self {
        self.key(&format!("blocks/data/{network}/{host}"), cidr.as_bytes())
    }

    /// Of a vNIC; the revision at which it is written.
    pub fn place(self, vnic: &str, place: &Place) -> (Self, u64) {
        let given = self.key(&format!("places/data/{vnic}"), &serde_json::to_vec(place).expect("encodable"));
        let at = given.0.len() as u64;
        (given, at)
    }

    pub fn followed(self, host: &str, followed: &Followed) -> Self {
        let value = serde_json::to_vec(followed).expect("words are encodable");
        self.key(&format!("said/{host}/data/followed"), &value)
    }

    pub fn holdings(self, host: &str, holdings: &Holdings) -> Self {
        self.key(&format!("hosts/{host}/data/holdings"), &serde_json::to_vec(holdings).expect("encodable"))
    }

    /// An operator has said that all before this came from a backup.
    pub fn restored(mut self) -> Self {
        self.0.retain(|entry| !entry.key.ends_with("/identity"));
        let identity = Identity { id: "c".into(), version: 1, restored: 1000, pool: None, full_mesh: 64 };
        // Entries of a list come in any order, and none has the revision of another.
        let later = Self::default().key("cluster/data/identity", &serde_json::to_vec(&identity).expect("encodable"));
        let revision = Revision(self.0.iter().map(|entry| entry.modified.0).max().unwrap_or_default() + 1);
        self.0.extend(later.0.into_iter().map(|entry| Entry { modified: revision, ..entry }));
        self
    }

    pub fn view(self) -> View {
        self.view_of(Duration::ZERO)
    }

    /// All of it came so long ago.
    pub fn view_of(self, ago: Duration) -> View {
        let mut view = View::new(ROOT, Scope::Said);
        let then = Instant::now().checked_sub(ago).expect("the machine has run for longer");
        assert!(view.take_at(News::Listed(Revision(100), self.0), then));
        view
    }
}

/// A host: the state of its router.
pub struct Host(pub State);

impl Host {
    /// With the network `default`, as a router begins.
    pub fn new() -> Self {
        let mut state = State::new();
        let pool = "10.111.0.0/16".parse().expect("a range");
        run(&mut state, &Command::Begin { host: "h1".into(), pool, range: None, bridge: "ff0".into() }).expect("done");
        Self(state)
    }

    pub fn attach(&mut self, id: &str, network: &str) -> Result<String, String> {
        let (id, network) = (id.to_owned(), network.to_owned());
        let labels = Default::default();
        run(&mut self.0, &Command::Attach { id: id.clone(), title: id.clone(), network, address: None, labels })?;
        Ok(self.0.vnic(&id).expect("it is there").address.to_string())
    }

    pub fn names(&self) -> Vec<String> {
        let is_asked = |object: &AnyObject| {
            object.kind() != ObjectKind::Vnic || self.0.is_clusters(ObjectKind::Vnic, object.name())
        };
        let of = |kind: &ObjectKind| {
            self.0.objects(*kind).filter(is_asked).map(|object| format!("{} {}", object.kind(), object.name()))
        };
        freeflow_orchestrator::CLUSTER_KINDS.iter().flat_map(|kind| of(kind).collect::<Vec<_>>()).collect()
    }
}

impl Target for Host {
    fn present(&mut self, kind: ObjectKind) -> Result<Vec<AnyObject>, String> {
        let is_asked = |object: &AnyObject| kind != ObjectKind::Vnic || self.0.is_clusters(kind, object.name());
        Ok(self.0.objects(kind).filter(is_asked).collect())
    }

    fn apply(&mut self, objects: &[AnyObject]) -> Result<(), String> {
        run(&mut self.0, &apply(objects.to_vec()))
    }

    fn delete(&mut self, kind: ObjectKind, name: &str) -> Result<(), String> {
        run(&mut self.0, &delete(kind, name))
    }
}
