//! etcd as its clients see it: keys with revisions, transactions one after another, and watchers that are told of each.
//!
//! It has no machine below it: a transaction, and each event that goes to a watcher, takes a given time, and members
//! send a given number of bytes in a second. So an overload shows as watchers that get further and further behind.
//! Watchers of a class watch the same keys, so a revision is kept once for all of them.
use freeflow_cluster::News;
use freeflow_orchestrator::Revision;
use freeflow_orchestrator::store::Entry;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// Keys and values, `None`: it is gone.
pub type Writes = Vec<(String, Option<Vec<u8>>)>;

/// Beside keys and values, of each revision of a key in etcd's file, and of each event on its way.
pub const EVENT_BYTES_AROUND: u64 = 64;

/// Watchers of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Watched {
    ByAll,
    ByControllers,
    /// Its value is not kept here, only how long it is.
    ByNobody,
}

/// Times of etcd's, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub members: u64,
    /// From the request of a transaction that waits for no other until its answer: a majority has it on disk.
    pub commit_ns: u64,
    /// For which a transaction keeps all others waiting.
    pub transaction_ns: u64,
    /// The same for what it writes: into the log, and to the other members.
    pub written_bytes_per_s: u64,
    /// Of a member's time, for an event that one watcher is told.
    pub event_ns: u64,
    /// Of one member, to watchers, and in answers.
    pub bytes_per_s: u64,
}

impl Default for Model {
    /// Three members with disks of servers, on 10 Gb/s. An event takes as long as with a real etcd and hundreds of
    /// watches (`fan_out`).
    fn default() -> Self {
        Self {
            members: 3,
            commit_ns: 2_000_000,
            transaction_ns: 100_000,
            written_bytes_per_s: 200_000_000,
            event_ns: 15_000,
            bytes_per_s: 1_250_000_000,
        }
    }
}

fn time_of(bytes: u64, per_s: u64) -> u64 {
    (u128::from(bytes) * 1_000_000_000 / u128::from(per_s.max(1))) as u64
}

impl Model {
    /// A call that waits for no other, and reads so many bytes.
    pub fn read_ns(&self, bytes: u64) -> u64 {
        self.commit_ns / 2 + time_of(bytes, self.bytes_per_s)
    }

    fn told_ns(&self, told: Told) -> u64 {
        told.events * self.event_ns + time_of(told.bytes, self.bytes_per_s)
    }
}

/// Events, and the bytes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Told {
    pub events: u64,
    pub bytes: u64,
}

impl Told {
    fn add(&mut self, other: Self) {
        self.events += other.events;
        self.bytes += other.bytes;
    }
}

/// A revision as it goes to watchers of a class.
struct Sent {
    revision: u64,
    /// When the first one is told, but for the time that this takes.
    from_ns: u64,
    /// Of each watcher.
    each_ns: u64,
    told: Told,
    changes: Vec<(String, Option<Entry>)>,
}

/// Watchers of a class, and all that they are told.
#[derive(Default)]
pub struct Lane {
    pub watchers: u64,
    sent: VecDeque<Sent>,
    /// Of what is not in that any more, the last revision.
    gone: u64,
    /// Of the revisions up to here no change is kept.
    kept_from: u64,
}

impl Lane {
    fn at(&self, revision: u64) -> usize {
        self.sent.partition_point(|sent| sent.revision <= revision)
    }

    /// When the watcher that is told after so many others of its member hears of a revision; `None`: it is not told.
    pub fn heard_ns(&self, revision: u64, others: u64) -> Option<u64> {
        let sent = self.sent.get(self.at(revision).checked_sub(1)?).filter(|sent| sent.revision == revision)?;
        Some(sent.from_ns + (others + 1) * sent.each_ns)
    }

    /// The last revision of which that watcher has heard by now.
    pub fn heard(&self, now_ns: u64, others: u64) -> u64 {
        let count = self.sent.partition_point(|sent| sent.from_ns + (others + 1) * sent.each_ns <= now_ns);
        count.checked_sub(1).map_or(self.gone, |last| self.sent[last].revision)
    }

    /// The last revision of which there was anything to tell.
    pub fn last(&self) -> u64 {
        self.sent.back().map_or(self.gone, |sent| sent.revision)
    }

    /// All that came after one revision, up to another.
    pub fn news(&self, after: u64, until: u64) -> News {
        assert!(after >= self.kept_from, "that is forgotten");
        let all = self.sent.range(self.at(after)..self.at(until));
        News::Changed(Revision(until), all.flat_map(|sent| sent.changes.clone()).collect())
    }

    /// Events and bytes after a revision: what a watcher that comes back is told.
    pub fn missed(&self, after: u64) -> Told {
        assert!(after >= self.gone, "that is gone");
        let mut all = Told::default();
        self.sent.range(self.at(after)..).for_each(|sent| all.add(sent.told));
        all
    }

    /// No change up to this revision is asked for any more. When it was told is kept, but for the last of all.
    pub fn forget(&mut self, until: u64) {
        let (from, to) = (self.at(self.kept_from), self.at(until));
        self.sent.range_mut(from..to).for_each(|sent| sent.changes = Vec::new());
        self.kept_from = self.kept_from.max(until);
    }

    /// Nor when it was told.
    pub fn drop_until(&mut self, until: u64) {
        let count = self.at(until);
        if let Some(last) = self.sent.drain(..count).next_back() {
            self.gone = last.revision;
        }
        self.kept_from = self.kept_from.max(until);
    }
}

/// Sums since they were last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub transactions: u64,
    /// Revisions of keys, which are kept until etcd is compacted.
    pub written: Told,
    /// As each watcher is told them.
    pub to_host: Told,
    pub to_controller: Told,
    /// All of them, times the watchers.
    pub sent: Told,
    /// To who asks for a list.
    pub listed_bytes: u64,
}

/// The length of a key and its value, and that, if somebody watches it.
struct Kept {
    bytes: u64,
    entry: Option<Entry>,
}

/// A change of a key, of this length, for those who watch it.
struct Change {
    told: Told,
    watched: Watched,
    entry: Option<Entry>,
}

pub struct Etcd {
    pub model: Model,
    watched: fn(&str) -> Watched,
    entries: BTreeMap<String, Kept>,
    bytes: u64,
    bytes_by_all: u64,
    /// And not by others.
    bytes_by_controllers: u64,
    revision: u64,
    writing_until_ns: u64,
    sending_until_ns: u64,
    /// Controllers are not among the hosts.
    pub hosts: Lane,
    pub controllers: Lane,
    counts: Counts,
}

impl Etcd {
    pub fn new(model: Model, watched: fn(&str) -> Watched) -> Self {
        Self {
            model,
            watched,
            entries: BTreeMap::new(),
            bytes: 0,
            bytes_by_all: 0,
            bytes_by_controllers: 0,
            revision: 0,
            writing_until_ns: 0,
            sending_until_ns: 0,
            hosts: Lane::default(),
            controllers: Lane::default(),
            counts: Counts::default(),
        }
    }

    /// Does a transaction that is asked for now; when its answer comes, and its revision.
    pub fn commit(&mut self, now_ns: u64, writes: Writes) -> (u64, Revision) {
        let Model { commit_ns, transaction_ns, written_bytes_per_s, .. } = self.model;
        self.revision += 1;
        let (mut written, mut to_host, mut to_controller) = (Told::default(), Told::default(), Told::default());
        let (mut host_changes, mut changes) = (Vec::new(), Vec::new());
        for (key, value) in writes {
            let Some(Change { told, watched, entry }) = self.change(&key, value) else { continue };
            written.add(told);
            if watched <= Watched::ByControllers {
                to_controller.add(told);
                changes.push((key.clone(), entry.clone()));
            }
            if watched == Watched::ByAll {
                to_host.add(told);
                host_changes.push((key, entry));
            }
        }
        let took = transaction_ns + time_of(written.bytes, written_bytes_per_s);
        self.writing_until_ns = self.writing_until_ns.max(now_ns) + took;
        let done_ns = self.writing_until_ns + commit_ns.saturating_sub(transaction_ns);
        self.send(done_ns, (to_host, host_changes), (to_controller, changes));
        self.counts.transactions += 1;
        self.counts.written.add(written);
        self.counts.to_host.add(to_host);
        self.counts.to_controller.add(to_controller);
        (done_ns, Revision(self.revision))
    }

    /// Members tell controllers first, then hosts.
    fn send(
        &mut self,
        done_ns: u64,
        (to_host, host_changes): (Told, Vec<(String, Option<Entry>)>),
        (to_controller, changes): (Told, Vec<(String, Option<Entry>)>),
    ) {
        for (lane, told, changes) in
            [(&mut self.controllers, to_controller, changes), (&mut self.hosts, to_host, host_changes)]
        {
            if told.events == 0 {
                continue;
            }
            let (from_ns, each_ns) = (done_ns.max(self.sending_until_ns), self.model.told_ns(told));
            self.sending_until_ns = from_ns + each_ns * lane.watchers.div_ceil(self.model.members);
            let all = Told { events: told.events * lane.watchers, bytes: told.bytes * lane.watchers };
            self.counts.sent.add(all);
            lane.sent.push_back(Sent { revision: self.revision, from_ns, each_ns, told, changes });
        }
    }

    /// Deleting a key that is not there is no event.
    fn change(&mut self, key: &str, value: Option<Vec<u8>>) -> Option<Change> {
        let watched = (self.watched)(key);
        let before = self.entries.get(key);
        let around = EVENT_BYTES_AROUND + key.len() as u64;
        let Some(value) = value else {
            let before_bytes = before?.bytes;
            self.entries.remove(key);
            self.count(watched, 0, before_bytes);
            return Some(Change { told: Told { events: 1, bytes: around }, watched, entry: None });
        };
        let bytes = around + value.len() as u64;
        let (at, before_bytes) = (Revision(self.revision), before.map_or(0, |before| before.bytes));
        let created = before.and_then(|before| Some(before.entry.as_ref()?.created)).unwrap_or(at);
        let entry = Entry { key: key.to_owned(), value, created, modified: at, lease: None };
        let entry = Some(entry).filter(|_| watched != Watched::ByNobody);
        self.count(watched, bytes, before_bytes);
        self.entries.insert(key.to_owned(), Kept { bytes, entry: entry.clone() });
        Some(Change { told: Told { events: 1, bytes }, watched, entry })
    }

    fn count(&mut self, watched: Watched, bytes: u64, before: u64) {
        let part = match watched {
            Watched::ByAll => Some(&mut self.bytes_by_all),
            Watched::ByControllers => Some(&mut self.bytes_by_controllers),
            Watched::ByNobody => None,
        };
        for sum in part.into_iter().chain([&mut self.bytes]) {
            *sum = *sum + bytes - before;
        }
    }

    /// The last revision.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// A watcher that was away is sent so much, at the cost of others; when it has it.
    pub fn send_missed(&mut self, now_ns: u64, missed: Told) -> u64 {
        let each_ns = self.model.told_ns(missed);
        self.sending_until_ns = self.sending_until_ns.max(now_ns) + each_ns / self.model.members;
        self.counts.sent.add(missed);
        self.sending_until_ns
    }

    /// A client is sent a list of all that it watches, at the cost of others; when it has it.
    pub fn send_list(&mut self, now_ns: u64, is_controller: bool) -> u64 {
        let Model { bytes_per_s, members, .. } = self.model;
        let bytes = self.listed_bytes(is_controller);
        let took = time_of(bytes, bytes_per_s);
        self.sending_until_ns = self.sending_until_ns.max(now_ns) + took / members;
        self.counts.listed_bytes += bytes;
        self.sending_until_ns.max(now_ns + self.model.read_ns(bytes))
    }

    /// Of all keys that such a watcher watches.
    pub fn listed_bytes(&self, is_controller: bool) -> u64 {
        if is_controller { self.bytes_by_all + self.bytes_by_controllers } else { self.bytes_by_all }
    }

    /// Calls that write no key, but are transactions for etcd's members.
    pub fn hold_up(&mut self, now_ns: u64, count: u64) {
        self.writing_until_ns = self.writing_until_ns.max(now_ns) + count * self.model.transaction_ns;
        self.counts.transactions += count;
    }

    /// All keys that such a watcher watches, as a host that begins to follow gets them.
    pub fn listed(&self, is_controller: bool) -> News {
        let most = if is_controller { Watched::ByControllers } else { Watched::ByAll };
        let entry = |(key, kept): (&String, &Kept)| kept.entry.clone().filter(|_| (self.watched)(key) <= most);
        News::Listed(Revision(self.revision), self.entries.iter().filter_map(entry).collect())
    }

    /// Keys there are now, and the bytes of these and their values.
    pub fn size(&self) -> (u64, u64) {
        (self.entries.len() as u64, self.bytes)
    }

    /// The same of those that begin so.
    pub fn size_of(&self, prefix: &str) -> Told {
        let mut all = Told::default();
        let part = self.entries.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
        part.for_each(|(_, kept)| all.add(Told { events: 1, bytes: kept.bytes }));
        all
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

    const MODEL: Model = Model {
        members: 2,
        commit_ns: 1000,
        transaction_ns: 90,
        written_bytes_per_s: 7_500_000_000,
        event_ns: 10,
        bytes_per_s: 1_000_000_000,
    };

    fn watched(key: &str) -> Watched {
        match key.as_bytes()[0] {
            b'a' => Watched::ByAll,
            b'c' => Watched::ByControllers,
            _ => Watched::ByNobody,
        }
    }

    fn put(key: &str) -> Writes {
        vec![(key.into(), Some(vec![0; 10]))]
    }

    #[test]
    fn watchers_hear_one_after_another_and_an_overload_is_seen() {
        let mut etcd = Etcd::new(MODEL, watched);
        (etcd.hosts.watchers, etcd.controllers.watchers) = (4, 1);
        let (done, first) = etcd.commit(0, put("a"));
        // 90 ns, and 10 for the bytes.
        assert_eq!((done, first), (1010, Revision(1)));
        // 10 ns for the event, and as many as it has bytes.
        let each = 10 + 64 + 1 + 10;
        assert_eq!(etcd.controllers.heard_ns(1, 0), Some(1010 + each));
        let from = 1010 + each;
        assert_eq!(etcd.hosts.heard_ns(1, 0), Some(from + each));
        assert_eq!(etcd.hosts.heard_ns(1, 1), Some(from + 2 * each));
        assert_eq!((etcd.hosts.heard(from + each, 0), etcd.hosts.heard(from + each, 1)), (1, 0));
        let (done, _) = etcd.commit(0, put("a"));
        assert_eq!((done, etcd.hosts.heard_ns(2, 0)), (1110, Some(from + 2 * each + each + each)));
        assert_eq!(etcd.behind_ns(1110), from + 5 * each - 1110);
        let counts = etcd.take_counts();
        let two = Told { events: 2, bytes: 150 };
        assert_eq!((counts.transactions, counts.written, counts.to_host, counts.to_controller), (2, two, two, two));
        assert_eq!(counts.sent, Told { events: 10, bytes: 10 * 75 });
        assert_eq!((etcd.size(), etcd.hosts.missed(1)), ((1, 75), Told { events: 1, bytes: 75 }));
    }

    #[test]
    fn each_class_is_told_of_what_it_watches() {
        let mut etcd = Etcd::new(MODEL, watched);
        (etcd.hosts.watchers, etcd.controllers.watchers) = (2, 1);
        for key in ["a", "c", "n"] {
            etcd.commit(0, put(key));
        }
        let now = 1 << 40;
        assert_eq!((etcd.hosts.heard(now, 0), etcd.controllers.heard(now, 0), etcd.revision()), (1, 2, 3));
        assert_eq!((etcd.hosts.heard_ns(2, 0), etcd.controllers.heard_ns(3, 0)), (None, None));
        let keys = |news: News| match news {
            News::Listed(_, entries) => entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>(),
            News::Changed(_, changes) => changes.into_iter().map(|(key, _)| key).collect(),
            _ => panic!("other news"),
        };
        assert_eq!(
            (keys(etcd.listed(false)), keys(etcd.listed(true))),
            (vec!["a".into()], vec!["a".into(), "c".into()])
        );
        assert_eq!(keys(etcd.controllers.news(0, 3)), ["a", "c"]);
        assert_eq!((etcd.size(), etcd.size_of("n")), ((3, 3 * 75), Told { events: 1, bytes: 75 }));
        etcd.controllers.drop_until(2);
        assert_eq!((keys(etcd.controllers.news(2, 3)).len(), etcd.controllers.heard(now, 0)), (0, 2));
    }

    #[test]
    fn a_key_that_is_not_there_is_deleted_without_an_event() {
        let mut etcd = Etcd::new(MODEL, watched);
        etcd.commit(0, put("a"));
        etcd.commit(0, vec![("a".into(), None), ("another".into(), None)]);
        assert_eq!((etcd.take_counts().written.events, etcd.size()), (2, (0, 0)));
        let News::Changed(Revision(2), changes) = etcd.hosts.news(1, 2) else { panic!("other news") };
        assert_eq!(changes, [("a".to_owned(), None)]);
    }
}
