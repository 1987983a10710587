//! etcd as its clients see it: keys with revisions, transactions one after another, and watchers that are told of those
//! that they follow: hosts of most keys, controllers also of what hosts have followed, and nobody of what vNICs do.
//!
//! It has no machine below it: a transaction, and each event that goes to a watcher, takes a given time, and members
//! send a given number of bytes in a second. So an overload shows as watchers that get further and further behind.
use freeflow_cluster::{DEFAULT_ROOT, News};
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::store::Entry;
use std::collections::BTreeMap;

/// Keys and values, `None`: it is gone.
pub type Writes = Vec<(String, Option<Vec<u8>>)>;

/// Beside keys and values, of each revision of a key in etcd's file, and of each event on its way.
pub const EVENT_BYTES_AROUND: u64 = 64;

/// Times of etcd's, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub members: u64,
    /// From the request of a transaction that waits for no other until its answer: a majority has it on disk.
    pub commit_ns: u64,
    /// For which a transaction keeps all others waiting.
    pub transaction_ns: u64,
    /// Of a member's time, for an event that one watcher is told.
    pub event_ns: u64,
    /// Of one member, to watchers.
    pub bytes_per_s: u64,
}

impl Default for Model {
    /// Three members with disks of servers, on 10 Gb/s.
    fn default() -> Self {
        Self { members: 3, commit_ns: 2_000_000, transaction_ns: 100_000, event_ns: 3_000, bytes_per_s: 1_250_000_000 }
    }
}

/// Parts of a cluster's keys that controllers follow, and that nobody follows; all hosts follow the rest.
const OF_CONTROLLERS: [&str; 3] = ["admission/", "requests/", "said/"];
const OF_NOBODY: [&str; 1] = ["vnics/"];

/// Events, and bytes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Told {
    events: u64,
    bytes: u64,
}

/// One revision, as it goes to watchers.
struct Revised {
    /// When members begin to send it.
    from_ns: u64,
    /// Of each watcher.
    each_ns: u64,
    /// To each of them.
    told: Told,
    changes: Vec<(String, Option<Entry>)>,
}

/// Sums since they were last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub transactions: u64,
    /// Of all keys that were written.
    pub written_bytes: u64,
    /// As each host is told them.
    pub events: u64,
    /// Of them.
    pub bytes: u64,
    /// To all watchers.
    pub sent_events: u64,
    pub sent_bytes: u64,
}

pub struct Etcd {
    pub model: Model,
    entries: BTreeMap<String, Entry>,
    /// The first one has the number 1.
    revisions: Vec<Revised>,
    /// Of the changes before that nothing is kept.
    kept_from: usize,
    writing_until_ns: u64,
    sending_until_ns: u64,
    pub watchers: u64,
    /// Of these, those of controllers.
    pub controllers: u64,
    counts: Counts,
}

/// Whether a key is in one of these parts.
fn is_of(key: &str, parts: &[&str]) -> bool {
    let rest = key.strip_prefix(DEFAULT_ROOT).and_then(|rest| rest.strip_prefix('/'));
    rest.is_some_and(|rest| parts.iter().any(|part| rest.starts_with(part)))
}

/// Whether a controller, or any host, is told of a key.
pub fn is_followed(key: &str, by_controller: bool) -> bool {
    !is_of(key, &OF_NOBODY) && (by_controller || !is_of(key, &OF_CONTROLLERS))
}

impl Told {
    fn of<'a>(changes: impl Iterator<Item = &'a (String, Option<Entry>)>) -> Self {
        let length = |(key, entry): &(String, Option<Entry>)| {
            EVENT_BYTES_AROUND + key.len() as u64 + entry.as_ref().map_or(0, |entry| entry.value.len() as u64)
        };
        let add = |all: Self, change| Self { events: all.events + 1, bytes: all.bytes + length(change) };
        changes.fold(Self::default(), add)
    }

    /// Of a member's time.
    fn takes_ns(self, Model { event_ns, bytes_per_s, .. }: Model) -> u64 {
        self.events * event_ns + self.bytes.saturating_mul(1_000_000_000) / bytes_per_s
    }
}

impl Etcd {
    pub fn new(model: Model) -> Self {
        Self {
            model,
            entries: BTreeMap::new(),
            revisions: Vec::new(),
            kept_from: 0,
            writing_until_ns: 0,
            sending_until_ns: 0,
            watchers: 0,
            controllers: 0,
            counts: Counts::default(),
        }
    }

    /// Does a transaction that is asked for now; when its answer comes, and its revision.
    pub fn commit(&mut self, now_ns: u64, writes: Writes) -> (u64, Revision) {
        let Model { commit_ns, transaction_ns, members, .. } = self.model;
        let revision = Revision(self.revisions.len() as u64 + 1);
        self.writing_until_ns = self.writing_until_ns.max(now_ns) + transaction_ns;
        let done_ns = self.writing_until_ns + commit_ns.saturating_sub(transaction_ns);
        let changes: Vec<_> = writes.into_iter().filter_map(|(key, value)| self.change(revision, key, value)).collect();
        let told = Told::of(changes.iter().filter(|(key, _)| is_followed(key, false)));
        let more = Told::of(changes.iter().filter(|(key, _)| is_followed(key, true) && !is_followed(key, false)));
        let each_ns = told.takes_ns(self.model);
        let from_ns = done_ns.max(self.sending_until_ns);
        let to_controllers = more.takes_ns(self.model) * self.controllers.div_ceil(members);
        self.sending_until_ns = from_ns + each_ns * self.watchers.div_ceil(members) + to_controllers;
        self.counts.transactions += 1;
        self.counts.written_bytes += Told::of(changes.iter()).bytes;
        self.counts.events += told.events;
        self.counts.bytes += told.bytes;
        self.counts.sent_events += told.events * self.watchers + more.events * self.controllers;
        self.counts.sent_bytes += told.bytes * self.watchers + more.bytes * self.controllers;
        self.revisions.push(Revised { from_ns, each_ns, told, changes });
        (done_ns, revision)
    }

    /// Deleting a key that is not there is no event.
    fn change(&mut self, at: Revision, key: String, value: Option<Vec<u8>>) -> Option<(String, Option<Entry>)> {
        let Some(value) = value else { return self.entries.remove(&key).map(|_| (key, None)) };
        let created = self.entries.get(&key).map_or(at, |there| there.created);
        let entry = Entry { key: key.clone(), value, created, modified: at, lease: None };
        self.entries.insert(key.clone(), entry.clone());
        Some((key, Some(entry)))
    }

    /// When the watcher that is told after so many others of its member hears of a revision.
    pub fn heard_ns(&self, revision: u64, others: u64) -> u64 {
        let revised = &self.revisions[revision as usize - 1];
        revised.from_ns + (others + 1) * revised.each_ns
    }

    /// The last revision of which that watcher has heard by now.
    pub fn heard(&self, now_ns: u64, others: u64) -> u64 {
        self.revisions.partition_point(|revised| revised.from_ns + (others + 1) * revised.each_ns <= now_ns) as u64
    }

    /// The last revision.
    pub fn revision(&self) -> u64 {
        self.revisions.len() as u64
    }

    /// All that came after one revision, up to another, as a host is told it, or a controller.
    pub fn news(&self, after: u64, until: u64, is_controller: bool) -> News {
        assert!(after as usize >= self.kept_from, "that is forgotten");
        let changes = self.revisions[after as usize..until as usize].iter().flat_map(|revised| &revised.changes);
        let changes = changes.filter(|(key, _)| is_followed(key, is_controller));
        News::Changed(Revision(until), changes.cloned().collect())
    }

    /// Events and bytes after a revision: what a host that comes back is told.
    pub fn missed(&self, after: u64) -> (u64, u64) {
        let missed = self.revisions[after as usize..].iter().map(|revised| revised.told);
        missed.fold((0, 0), |(events, bytes), told| (events + told.events, bytes + told.bytes))
    }

    /// A watcher that was away is sent so much, at the cost of others.
    pub fn send_missed(&mut self, now_ns: u64, (events, bytes): (u64, u64)) -> u64 {
        let Model { event_ns, bytes_per_s, members, .. } = self.model;
        let each_ns = events * event_ns + bytes.saturating_mul(1_000_000_000) / bytes_per_s;
        self.sending_until_ns = self.sending_until_ns.max(now_ns) + each_ns / members;
        self.counts.sent_events += events;
        self.counts.sent_bytes += bytes;
        self.sending_until_ns
    }

    /// No change up to this revision is asked for any more.
    pub fn forget(&mut self, until: u64) {
        for revised in &mut self.revisions[self.kept_from..until as usize] {
            revised.changes = Vec::new();
        }
        self.kept_from = self.kept_from.max(until as usize);
    }

    /// The keys, as a host that begins to follow gets them, or a controller.
    pub fn listed(&self, is_controller: bool) -> News {
        let entries = self.entries.values().filter(|entry| is_followed(&entry.key, is_controller));
        News::Listed(Revision(self.revision()), entries.cloned().collect())
    }

    /// All keys.
    pub fn all(&self) -> News {
        News::Listed(Revision(self.revision()), self.entries.values().cloned().collect())
    }

    /// Keys there are now, and the bytes of these and their values.
    pub fn size(&self) -> (u64, u64) {
        let length = |entry: &Entry| EVENT_BYTES_AROUND + (entry.key.len() + entry.value.len()) as u64;
        (self.entries.len() as u64, self.entries.values().map(length).sum())
    }

    /// How far members are behind with telling watchers.
    pub fn behind_ns(&self, now_ns: u64) -> u64 {
        self.sending_until_ns.max(self.writing_until_ns).saturating_sub(now_ns)
    }

    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Model =
        Model { members: 2, commit_ns: 1000, transaction_ns: 100, event_ns: 10, bytes_per_s: 1_000_000_000 };

    fn put(key: &str) -> Writes {
        vec![(key.into(), Some(vec![0; 10]))]
    }

    #[test]
    fn watchers_hear_one_after_another_and_an_overload_is_seen() {
        let mut etcd = Etcd::new(MODEL);
        etcd.watchers = 4;
        let (done, first) = etcd.commit(0, put("k"));
        assert_eq!((done, first), (1000, Revision(1)));
        // 10 ns for the event, and as many as it has bytes.
        let each = 10 + 64 + 1 + 10;
        assert_eq!((etcd.heard_ns(1, 0), etcd.heard_ns(1, 1)), (1000 + each, 1000 + 2 * each));
        assert_eq!((etcd.heard(1000 + each, 0), etcd.heard(1000 + each, 1)), (1, 0));
        let (done, _) = etcd.commit(0, put("k"));
        assert_eq!((done, etcd.heard_ns(2, 0)), (1100, 1000 + 3 * each));
        assert_eq!(etcd.behind_ns(1100), 1000 + 4 * each - 1100);
        let counts = etcd.take_counts();
        assert_eq!((counts.transactions, counts.events, counts.sent_events, counts.sent_bytes), (2, 2, 8, 8 * 75));
        assert_eq!(etcd.size(), (1, 75));
    }

    #[test]
    fn keys_go_to_those_who_follow_them() {
        let mut etcd = Etcd::new(MODEL);
        (etcd.watchers, etcd.controllers) = (5, 2);
        for (part, hosts, sent) in [("hosts/h", 1, 5), ("said/h", 0, 2), ("requests/t", 0, 2), ("vnics/h", 0, 0)] {
            let key = format!("{DEFAULT_ROOT}/{part}/data/k");
            let (_, Revision(at)) = etcd.commit(0, put(&key));
            let counts = etcd.take_counts();
            assert_eq!((counts.events, counts.sent_events), (hosts, sent), "{part}");
            assert!(counts.written_bytes > 10 && counts.sent_bytes == counts.written_bytes * sent);
            for (is_controller, is_told) in [(false, hosts == 1), (true, sent > 0)] {
                let News::Changed(_, changes) = etcd.news(at - 1, at, is_controller) else { panic!("other news") };
                assert_eq!(!changes.is_empty(), is_told, "{part}");
            }
        }
    }

    #[test]
    fn a_key_that_is_not_there_is_deleted_without_an_event() {
        let mut etcd = Etcd::new(MODEL);
        etcd.commit(0, put("k"));
        etcd.commit(0, vec![("k".into(), None), ("other".into(), None)]);
        assert_eq!((etcd.take_counts().events, etcd.size()), (2, (0, 0)));
        let News::Changed(Revision(2), changes) = etcd.news(1, 2, false) else { panic!("other news") };
        assert_eq!(changes, [("k".to_owned(), None)]);
    }
}
