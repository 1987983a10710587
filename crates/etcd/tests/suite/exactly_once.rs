//! Transactions whose answers are lost: members are killed and stopped under them.
use crate::common::{Cluster, open, put, put_if, until};
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::store::{Committed, Revision, Store, StoreError};
use std::time::{Duration, Instant};

/// The number in a key, and when it was written.
fn number(store: &EtcdStore, key: &str) -> Result<(u64, Option<Revision>), StoreError> {
    Ok(match store.get(key, None)? {
        None => (0, None),
        Some(entry) => {
            let text = String::from_utf8(entry.value).expect("text");
            (text.parse().expect("a number"), Some(entry.modified))
        }
    })
}

/// Counts a key up by compare and set; how often that was answered with done, and how often it can't be known.
fn count_up(store: &mut EtcdStore, until: Instant) -> (u64, u64) {
    let (mut done, mut unknown) = (0, 0);
    while Instant::now() < until {
        let Ok((before, modified)) = number(store, "counter") else { continue };
        match put_if(store, "counter", &(before + 1).to_string(), modified) {
            Ok(Committed::Done(_)) => done += 1,
            Ok(Committed::Conflict(_)) => {}
            Err(StoreError::Broken(_)) => {}
            Err(StoreError::Unknown(_)) => unknown += 1,
            Err(error) => panic!("{error}"),
        }
    }
    (done, unknown)
}

#[test]
fn each_transaction_is_done_once_or_not_at_all() {
    let mut cluster = Cluster::start(3, &[]);
    let endpoints = cluster.endpoints();
    let mut first = open(&endpoints, "/freeflow-test").call_time(Duration::from_millis(300));
    let mut second = open(&endpoints, "/freeflow-test").call_time(Duration::from_millis(300));
    let end = Instant::now() + Duration::from_secs(20);
    let counts = std::thread::scope(|scope| {
        let threads = [scope.spawn(|| count_up(&mut first, end)), scope.spawn(|| count_up(&mut second, end))];
        let mut round = 0;
        while Instant::now() + Duration::from_secs(3) < end {
            std::thread::sleep(Duration::from_millis(1_500));
            let member = round % cluster.count();
            if round % 2 == 0 {
                // Answers are lost, and the transactions may be done much later.
                cluster.stop(member, true);
                std::thread::sleep(Duration::from_millis(1_000));
                cluster.stop(member, false);
            } else {
                cluster.kill(member);
                cluster.start_member(member);
            }
            round += 1;
        }
        threads.map(|thread| thread.join().expect("it counted"))
    });
    let (done, unknown): (Vec<u64>, Vec<u64>) = counts.into_iter().unzip();
    let (done, unknown): (u64, u64) = (done.iter().sum(), unknown.iter().sum());
    let (found, _) = until("etcd answers again", || number(&first, "counter").map_err(|error| error.to_string()));
    println!("{done} done, {unknown} unknown, {found} found");
    assert!(done > 20, "{done}");
    assert!((done..=done + unknown).contains(&found), "{found} are there, {done} were done, {unknown} unknown");
    assert_eq!(unknown, 0, "it is learnt as soon as etcd answers");
}

#[test]
fn nothing_is_done_without_a_majority() {
    let mut cluster = Cluster::start(3, &[]);
    let mut store = open(&cluster.endpoints(), "/freeflow-test").call_time(Duration::from_millis(500));
    put(&mut store, "a", "1").expect("written");
    cluster.kill(1);
    until("two of three are enough", || put(&mut store, "a", "2").map_err(|error| error.to_string()));
    cluster.kill(2);
    let error = store.list("", None).expect_err("no majority");
    assert!(matches!(error, StoreError::Broken(_) | StoreError::Unknown(_)), "{error}");
    assert!(error.to_string().contains("etcd"), "{error}");
    cluster.start_member(1);
    until("two of three again", || put(&mut store, "a", "3").map_err(|error| error.to_string()));
    assert_eq!(store.get("a", None).expect("read").expect("there").value, b"3");
}

#[test]
fn receipts_do_not_pile_up() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), "/freeflow-test");
    for number in 0..50 {
        put(&mut store, "a", &number.to_string()).expect("written");
        put_if(&mut store, "a", "never", None).expect("answered");
    }
    let keys = cluster.etcdctl(None, &["get", "/freeflow-test/", "--prefix", "--keys-only"]);
    let keys: Vec<&str> = keys.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(keys.len(), 2, "the key and the last receipt: {keys:?}");
}
