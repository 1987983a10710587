//! A state with its store, as a router has them.
use freeflow_orchestrator::objects::{AnyObject, parse_object};
use freeflow_orchestrator::store::Committed;
use freeflow_orchestrator::{Change, Command, MemoryStore, Outcome, Plan, Reason, Refusal, State, Store, Writer};
use serde_json::{Value, json};

pub struct Host {
    pub state: State,
    pub store: MemoryStore,
}

/// One that has just begun.
pub fn host() -> Host {
    host_with("10.111.0.0/16")
}

pub fn host_with(pool: &str) -> Host {
    let mut host = Host { state: State::new(), store: MemoryStore::new() };
    let pool = pool.parse().unwrap();
    host.run(&Command::Begin { host: "h1".into(), pool, range: None, bridge: "ff0".into() }).unwrap();
    host
}

pub fn named(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "freeflow.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
}

pub fn class(name: &str, spec: Value) -> Value {
    named("QosClass", name, spec)
}

fn parsed(values: &[Value]) -> Vec<AnyObject> {
    values.iter().map(|value| parse_object(value).unwrap_or_else(|error| panic!("{value}: {error}"))).collect()
}

impl Host {
    pub fn plan(&self, command: &Command) -> Result<Plan, Refusal> {
        self.state.plan(command)
    }

    pub fn run(&mut self, command: &Command) -> Result<Vec<Outcome>, Refusal> {
        self.run_by(&Writer::Hand, command)
    }

    pub fn run_by(&mut self, writer: &Writer, command: &Command) -> Result<Vec<Outcome>, Refusal> {
        let plan = self.state.plan_by(writer, command)?;
        if !plan.writes.is_empty() {
            let committed = self.store.commit(&self.state.transaction(&plan)).unwrap();
            let Committed::Done(revision) = committed else { panic!("{committed:?}") };
            self.state.adopt(&plan, revision);
        }
        Ok(plan.results)
    }

    /// In the order of the objects.
    pub fn apply(&mut self, values: &[Value]) -> Vec<Change> {
        let results = self.run(&Command::Apply { objects: parsed(values) });
        results.unwrap_or_else(|refusal| panic!("{refusal}")).into_iter().map(|outcome| outcome.what).collect()
    }

    /// In the order of the objects, by this writer.
    pub fn apply_by(&mut self, writer: &Writer, values: &[Value]) -> Result<Vec<Change>, Refusal> {
        let results = self.run_by(writer, &Command::Apply { objects: parsed(values) })?;
        Ok(results.into_iter().map(|outcome| outcome.what).collect())
    }

    /// As a cluster's objects.
    pub fn apply_for_cluster(&mut self, values: &[Value]) -> Result<Vec<Outcome>, Reason> {
        self.run(&Command::ApplyForCluster { objects: parsed(values) }).map_err(|refusal| refusal.reason)
    }

    pub fn refused(&self, values: &[Value]) -> Refusal {
        self.state.plan(&Command::Apply { objects: parsed(values) }).expect_err("it is refused")
    }

    pub fn attach(&mut self, id: &str, network: &str, address: Option<&str>) -> Result<Change, Reason> {
        self.attach_labelled(id, network, address, &[])
    }

    pub fn attach_labelled(
        &mut self,
        id: &str,
        network: &str,
        address: Option<&str>,
        labels: &[(&str, &str)],
    ) -> Result<Change, Reason> {
        let command = Command::Attach {
            id: id.into(),
            title: id.into(),
            network: network.into(),
            address: address.map(|text| text.parse().unwrap()),
            labels: labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        };
        self.run(&command).map(|outcomes| outcomes[0].what).map_err(|refusal| refusal.reason)
    }

    pub fn detach(&mut self, id: &str) {
        self.run(&Command::Detach { id: id.into() }).unwrap();
    }

    /// `KEY=VALUE KEY=VALUE`
    pub fn labels(&self, id: &str) -> String {
        let labels = &self.state.vnic(id).unwrap().object.metadata.labels;
        labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
    }

    pub fn address(&self, id: &str) -> String {
        self.state.vnic(id).unwrap().address.to_string()
    }

    /// The state as it is built from the store alone.
    pub fn rebuilt(&self) -> State {
        State::of(&self.store.list("", None).unwrap()).unwrap()
    }
}
