//! News of changes, whatever happens on the way: none is missed, none told twice.
use crate::common::{Cluster, SOON, open, put, until, write};
use freeflow_etcd::{Client, EtcdStore, Follower, News, Part};
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::store::{Store, Transaction};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

/// The keys as news alone tell them, and which news came.
struct Known {
    runtime: Runtime,
    follower: Receiver<News>,
    prefix: String,
    keys: BTreeMap<String, Vec<u8>>,
    revision: Revision,
    lists: usize,
    behind: usize,
}

impl Known {
    fn new(cluster: &Cluster, root: &str) -> Self {
        let prefix = format!("{root}/data/");
        Self::of(cluster, &prefix, vec![Part::whole(&prefix)])
    }

    /// The same by these parts, in which keys that begin so are.
    fn of(cluster: &Cluster, prefix: &str, parts: Vec<Part>) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let client = runtime.block_on(async { Client::new(&cluster.endpoints()) }).expect("a client");
        let client = client.call_time(Duration::from_secs(1));
        let follower = runtime.block_on(async { Follower::spawn_of(client, parts) });
        Self {
            runtime,
            follower,
            prefix: prefix.into(),
            keys: BTreeMap::new(),
            revision: Revision(0),
            lists: 0,
            behind: 0,
        }
    }

    fn next(&mut self) -> Option<News> {
        let follower = &mut self.follower;
        let news = self.runtime.block_on(async { timeout(Duration::from_millis(500), follower.recv()).await });
        let news = news.ok()?.expect("it follows");
        match &news {
            News::Listed(revision, entries) => {
                self.lists += 1;
                assert!(*revision >= self.revision);
                self.revision = *revision;
                self.keys = entries.iter().map(|entry| (entry.key.clone(), entry.value.clone())).collect();
            }
            News::Changed(revision, changes) => {
                assert!(*revision > self.revision, "{revision} after {}", self.revision);
                for (key, entry) in changes {
                    assert!(key.starts_with(&self.prefix), "{key}");
                    assert!(entry.as_ref().is_none_or(|entry| entry.modified > self.revision), "told twice: {entry:?}");
                    match entry {
                        Some(entry) => self.keys.insert(key.clone(), entry.value.clone()),
                        None => Some(self.keys.remove(key).expect("what is not there does not go")),
                    };
                }
                self.revision = *revision;
            }
            News::Unchanged(revision) => {
                assert!(*revision >= self.revision, "{revision} after {}", self.revision);
                self.revision = *revision;
            }
            News::Behind(_) => self.behind += 1,
        }
        Some(news)
    }

    /// Follows until it knows what the store has.
    fn catch_up(&mut self, store: &EtcdStore) {
        let listing = until("etcd answers", || store.list("", None).map_err(|error| error.to_string()));
        let wanted: BTreeMap<String, Vec<u8>> =
            listing.entries.into_iter().map(|entry| (format!("{}{}", self.prefix, entry.key), entry.value)).collect();
        let begin = std::time::Instant::now();
        while self.keys != wanted {
            assert!(begin.elapsed() < SOON, "{:?} is not {wanted:?}", self.keys);
            self.next();
        }
    }
}

const ROOT: &str = "/freeflow-test";

#[test]
fn changes_come_in_order_and_whole() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    put(&mut store, "a", "1").expect("written");
    let mut known = Known::new(&cluster, ROOT);
    known.catch_up(&store);
    assert_eq!((known.lists, known.keys.len()), (1, 1));
    let writes = vec![write("a", None), write("b", Some("2")), write("c", Some("3"))];
    store.commit(&Transaction { compares: Vec::new(), writes }).expect("written");
    let changes = loop {
        match known.next() {
            Some(News::Changed(_, changes)) => break changes,
            Some(News::Listed(..) | News::Behind(_)) => panic!("nothing is wrong"),
            Some(News::Unchanged(_)) | None => {}
        }
    };
    assert_eq!(changes.len(), 3, "one transaction comes at once: {changes:?}");
    // Many, in revisions that do not fit one message of etcd's together.
    let large = "x".repeat(60_000);
    for round in 0..6 {
        let writes =
            (0..20).map(|number| write(&format!("large/{number}"), Some(&format!("{round}{large}")))).collect();
        store.commit(&Transaction { compares: Vec::new(), writes }).expect("written");
    }
    known.catch_up(&store);
    assert_eq!((known.lists, known.behind), (1, 0));
}

#[test]
fn a_watch_goes_on_at_another_member() {
    let mut cluster = Cluster::start(3, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    let mut known = Known::new(&cluster, ROOT);
    known.catch_up(&store);
    for round in 0..6 {
        let member = round % 3;
        cluster.kill(member);
        for number in 0..10 {
            let value = format!("{round}.{number}");
            until("a majority writes", || {
                put(&mut store, &format!("key/{number}"), &value).map_err(|error| error.to_string())
            });
        }
        known.catch_up(&store);
        cluster.start_member(member);
    }
    assert_eq!(known.lists, 1, "it went on from where it was");
    assert!(known.behind > 0);
}

#[test]
fn what_was_compacted_away_is_listed_again() {
    let mut cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    for key in ["stays", "goes", "changes"] {
        put(&mut store, key, "1").expect("written");
    }
    let mut known = Known::new(&cluster, ROOT);
    known.catch_up(&store);
    // The watch ends, and what comes then is compacted before it is begun again.
    cluster.kill(0);
    while !matches!(known.next(), Some(News::Behind(_))) {}
    cluster.start_member(0);
    until("etcd answers", || put(&mut store, "changes", "2").map_err(|error| error.to_string()));
    store.commit(&Transaction { compares: Vec::new(), writes: vec![write("goes", None)] }).expect("written");
    let revision = put(&mut store, "new", "1").expect("written");
    store.compact(revision).expect("compacted");
    known.catch_up(&store);
    assert_eq!(known.lists, 2);
    put(&mut store, "new", "2").expect("written");
    known.catch_up(&store);
    assert_eq!(known.lists, 2, "and it is followed again");
}

/// One that fills its part hides nobody else's keys, however many it writes.
#[test]
fn a_writer_that_writes_too_much_is_cut_alone() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    let large = "x".repeat(1000);
    // More than a page of each, and of the second one more than it may have.
    for (writer, count) in [("h1", 60), ("h2", 300), ("h3", 60)] {
        for first in (0..count).step_by(60) {
            let number = first..first + 60;
            let writes = number.map(|number| write(&format!("{writer}/{number:03}"), Some(&large))).collect();
            store.commit(&Transaction { compares: Vec::new(), writes }).expect("written");
        }
    }
    put(&mut store, "h4", "alone").expect("written");
    let prefix = format!("{ROOT}/data/");
    let mut known = Known::of(&cluster, &prefix, vec![Part::of_writers(&prefix, 100_000)]);
    let begin = std::time::Instant::now();
    while known.lists == 0 {
        assert!(begin.elapsed() < SOON);
        known.next();
    }
    let count = |writer: &str| known.keys.keys().filter(|key| key.starts_with(&format!("{prefix}{writer}"))).count();
    assert_eq!([count("h1"), count("h3"), count("h4")], [60, 60, 1]);
    assert!((90..100).contains(&count("h2")), "{}", count("h2"));
    assert_eq!(known.behind, 0);
}

/// Others' keys are in the same revisions, before ours and after them, and fill responses of their own.
#[test]
fn parts_that_are_not_followed_hide_nothing() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    // The watch has others' keys, since these parts are around them.
    let parts = ["0/", "m/", "zz/"].map(|part| Part::whole(format!("{ROOT}/data/{part}")));
    let mut known = Known::of(&cluster, &format!("{ROOT}/data/m/"), parts.into());
    // More than etcd sends in one piece.
    let large = "x".repeat(60_000);
    for round in 0..6 {
        let others = |side: &str| -> Vec<_> {
            (0..12).map(|number| write(&format!("{side}/{round}.{number}"), Some(&large))).collect()
        };
        let own = write(&format!("m/{round}"), Some(&round.to_string()));
        let writes = if round % 3 == 0 {
            others("a")
        } else {
            others("a").into_iter().chain([own]).chain(others("z")).collect()
        };
        store.commit(&Transaction { compares: Vec::new(), writes }).expect("written");
        put(&mut store, "m/last", &round.to_string()).expect("written");
    }
    let begin = std::time::Instant::now();
    while known.keys.get(&format!("{ROOT}/data/m/last")).map(Vec::as_slice) != Some(b"5") {
        assert!(begin.elapsed() < SOON, "{:?}", known.keys.keys());
        known.next();
    }
    let own: Vec<&str> = known.keys.keys().map(|key| key.rsplit('/').next().expect("a name")).collect();
    assert_eq!(own, ["1", "2", "4", "5", "last"]);
    assert_eq!((known.lists, known.behind), (1, 0));
}

/// Keys beside the range of a watch come to nobody, and what comes after them is not held up.
#[test]
fn keys_beside_all_parts_are_not_sent() {
    let cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    let parts = ["b/", "m/"].map(|part| Part::whole(format!("{ROOT}/data/{part}")));
    let mut known = Known::of(&cluster, &format!("{ROOT}/data/"), parts.into());
    put(&mut store, "b/1", "1").expect("written");
    let begin = std::time::Instant::now();
    let has = |known: &Known, key: &str| known.keys.contains_key(&format!("{ROOT}/data/{key}"));
    while !has(&known, "b/1") {
        assert!(begin.elapsed() < SOON);
        known.next();
    }
    let before = known.revision;
    for number in 0..10 {
        put(&mut store, &format!("a/{number}"), "x").expect("written");
        put(&mut store, &format!("z/{number}"), "x").expect("written");
    }
    let last = put(&mut store, "m/1", "1").expect("written");
    while !has(&known, "m/1") {
        assert!(begin.elapsed() < SOON);
        let news = known.next();
        assert!(!matches!(news, Some(News::Unchanged(at)) if at > before && at < last), "{news:?} of others' keys");
    }
    assert_eq!((known.keys.len(), known.revision), (2, last));
}

#[test]
fn that_it_follows_again_is_told_though_nothing_has_changed() {
    let mut cluster = Cluster::start(1, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    put(&mut store, "key", "1").expect("written");
    let mut known = Known::new(&cluster, ROOT);
    known.catch_up(&store);
    cluster.kill(0);
    while !matches!(known.next(), Some(News::Behind(_))) {}
    cluster.start_member(0);
    let begin = std::time::Instant::now();
    while !matches!(known.next(), Some(News::Unchanged(revision)) if revision == known.revision) {
        assert!(begin.elapsed() < SOON, "nothing was told");
    }
    assert_eq!(known.lists, 1);
}

#[test]
fn a_member_that_hangs_is_left() {
    let cluster = Cluster::start(3, &[]);
    let mut store = open(&cluster.endpoints(), ROOT);
    let mut known = Known::new(&cluster, ROOT);
    known.catch_up(&store);
    for member in 0..3 {
        cluster.stop(member, true);
        until("a majority writes", || put(&mut store, "key", &member.to_string()).map_err(|error| error.to_string()));
        known.catch_up(&store);
        cluster.stop(member, false);
    }
    assert_eq!(known.lists, 1);
}
