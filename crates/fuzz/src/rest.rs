//! Bodies of REST requests, up to what they would store.
use freeflow_orchestrator::objects::{AnyObject, ObjectKind, parse_object};
use freeflow_orchestrator::store::Committed;
use freeflow_orchestrator::{Command, MemoryStore, State, Store};
use serde_json::Value;

pub fn run(bytes: &[u8]) {
    let Ok(body) = serde_json::from_slice::<Value>(bytes) else { return };
    apply(&body);
}

/// The body of `apply`, or one object.
fn apply(body: &Value) {
    let items = body.get("items").and_then(Value::as_array).map_or(std::slice::from_ref(body), Vec::as_slice);
    let objects: Vec<AnyObject> = items.iter().filter_map(|item| parse_object(item).ok()).collect();
    for object in &objects {
        let written = serde_json::to_value(object).expect("an object is JSON");
        assert_eq!(parse_object(&written).as_ref(), Ok(object), "what is read is what is written");
    }
    let (mut state, mut store) = (State::new(), MemoryStore::new());
    let pool = "10.111.0.0/16".parse().expect("a pool");
    let begin = Command::Begin { host: "h1".into(), pool, range: None, bridge: "ff0".into() };
    assert!(run_command(&mut state, &mut store, &begin), "a router begins");
    let names: Vec<(ObjectKind, String)> = objects.iter().map(|it| (it.kind(), it.metadata().name.clone())).collect();
    if !run_command(&mut state, &mut store, &Command::Apply { objects: objects.clone() }) {
        return;
    }
    for (kind, name) in &names {
        assert!(state.object(*kind, name).is_some(), "what was applied is there");
    }
    assert!(run_command(&mut state, &mut store, &Command::Apply { objects }), "a second time nothing is wrong with it");
    for (kind, name) in names {
        run_command(&mut state, &mut store, &Command::Delete { kind, name, version: None });
    }
}

/// False: it was refused, and nothing has changed.
fn run_command(state: &mut State, store: &mut MemoryStore, command: &Command) -> bool {
    let Ok(plan) = state.plan(command) else { return false };
    if !plan.writes.is_empty() {
        let committed = store.commit(&state.transaction(&plan)).expect("a store in memory");
        let Committed::Done(revision) = committed else { panic!("{committed:?}") };
        state.adopt(&plan, revision);
        let stored = State::of(&store.list("", None).expect("a store in memory"));
        assert_eq!(stored.as_ref().ok(), Some(&*state), "the state is what the store says");
    }
    true
}
