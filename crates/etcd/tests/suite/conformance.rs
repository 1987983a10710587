//! The suite that every store has to pass, and the limits that etcd has besides.
use crate::common::{Cluster, open, put, write};
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::conformance::{self, Kind};
use freeflow_orchestrator::store::{Store, StoreError, Transaction};

/// Numbers that one seed makes.
fn operations(seed: u64, count: usize) -> Vec<u64> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some(state)
    };
    std::iter::from_fn(next).take(count).collect()
}

#[test]
fn etcd_is_a_store() {
    let cluster = Cluster::start(1, &[]);
    let endpoints = cluster.endpoints();
    let rounds = if std::env::var("FREEFLOW_TEST_FULL").is_ok_and(|full| full == "1") { 100 } else { 3 };
    for seed in 0..rounds {
        // Others' keys beside it: with a name that begins with its own, and with one that it begins with.
        let root = format!("/freeflow-test/{seed}");
        for other in [format!("{root}0"), "/freeflow-test".into()] {
            put(&mut open(&endpoints, &other), "a", "another's").expect("written");
        }
        println!("seed {seed}");
        conformance::check(open(&endpoints, &root), Kind::Shared, &operations(seed, 120), |_: EtcdStore| {
            open(&endpoints, &root)
        });
    }
    let root = "/freeflow-test/managers";
    conformance::check_managers(open(&endpoints, root), |_| open(&endpoints, root));
}

#[test]
fn more_than_a_page_is_listed() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), "/freeflow-test");
    let keys: Vec<String> = (0..1_203).map(|number| format!("key/{number:05}")).collect();
    for chunk in keys.chunks(100) {
        let writes = chunk.iter().map(|key| write(key, Some(key))).collect();
        store.commit(&Transaction { compares: Vec::new(), writes }).expect("written");
    }
    let listing = store.list("key/", None).expect("listed");
    let found: Vec<&str> = listing.entries.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(found, keys);
    assert_eq!(listing.revision, store.revision().expect("a revision"));
    assert_eq!(store.events("key/", freeflow_orchestrator::Revision(1)).expect("events").len(), keys.len());
}

#[test]
fn more_than_etcd_takes_at_once_is_refused() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), "/freeflow-test");
    let many = (0..129).map(|number| write(&format!("{number}"), Some(""))).collect();
    let large = "x".repeat(freeflow_orchestrator::store::VALUE_BYTES_MAX);
    let heavy = (0..40).map(|number| write(&format!("{number}"), Some(&large))).collect();
    for writes in [many, heavy] {
        let answer = store.commit(&Transaction { compares: Vec::new(), writes });
        assert!(matches!(answer, Err(StoreError::TooLarge(_))), "{answer:?}");
    }
    assert_eq!(store.list("", None).expect("listed").entries, []);
}
