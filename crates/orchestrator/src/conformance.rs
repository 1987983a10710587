//! Requirements for every [`Store`], as a test that runs against any: random operations, each
//! answer compared with that of a model that remembers every revision whole.
use crate::command::{Command, Reason};
use crate::objects::{Manager, Metadata, Object, ObjectKind, Quota, QuotaSpec};
use crate::state::State;
use crate::store::{Committed, Compare, Entry, Event, LeaseId, Revision, Store, StoreError, Transaction, Write};
use crate::writer::{KUBERNETES, KUBERNETES_PREFIX, Writer};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Instant};

type Snapshot = BTreeMap<String, Entry>;

/// Two kinds of stores: by who writes to it, and whose its time is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nobody else writes to it, so that each transaction makes the next revision; leases end by the time that is
    /// passed in.
    Embedded,
    /// Revisions that nobody here has made lie between; leases end by its own clock, by which none ends during a check.
    Shared,
}

/// Every revision that changed something, whole, with its number.
struct Model {
    kind: Kind,
    snapshots: Vec<(u64, Snapshot)>,
    /// The store's revision at least.
    last: u64,
    compacted: u64,
    leases: BTreeMap<LeaseId, (u64, Option<u64>)>,
    now: u64,
}

/// Random numbers that one seed makes.
struct SimRng(u64);

impl SimRng {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    /// Few, so that operations meet; one is another's beginning.
    fn key(&mut self) -> String {
        ["a", "a/1", "a/2", "ab", "b/1", "b/2"][self.roll(6) as usize].into()
    }

    fn prefix(&mut self) -> &'static str {
        ["", "a", "a/", "b/", "c"][self.roll(5) as usize]
    }
}

impl Model {
    fn new(kind: Kind, first: u64) -> Self {
        let snapshots = alloc::vec![(first, Snapshot::new())];
        Self { kind, snapshots, last: first, compacted: first, leases: BTreeMap::new(), now: 1 }
    }

    fn now(&self) -> &Snapshot {
        &self.snapshots.last().expect("the first revision is there").1
    }

    /// As it was at a revision that is there.
    fn at(&self, at: u64) -> &Snapshot {
        let found = self.snapshots.iter().rev().find(|(revision, _)| *revision <= at);
        &found.expect("not before the first").1
    }

    /// Some revision from the first to one that is to come.
    fn roll(&self, rng: &mut SimRng) -> u64 {
        let first = self.snapshots[0].0;
        first + rng.roll(self.last - first + 2)
    }

    fn point(&self, at: u64) -> Result<u64, StoreError> {
        if at > self.last {
            Err(StoreError::Future { revision: Revision(self.last) })
        } else if at < self.compacted {
            Err(StoreError::Expired { compacted: Revision(self.compacted) })
        } else {
            Ok(at)
        }
    }

    /// The store is at this revision, so many after the last; others may have made more.
    fn reach(&mut self, revision: Revision, made: u64) {
        match self.kind {
            Kind::Embedded => assert_eq!(revision.0, self.last + made),
            Kind::Shared => assert!(revision.0 >= self.last + made, "{revision} after {}", self.last),
        }
        self.last = revision.0;
    }

    /// Does the writes in a revision that the store has given them; if they change nothing, it has
    /// said what its revision is.
    fn write(&mut self, writes: &[Write], revision: Revision) {
        let (mut snapshot, mut changed) = (self.now().clone(), false);
        for write in writes {
            let before = snapshot.remove(&write.key);
            changed |= before.is_some() || write.value.is_some();
            if let Some(value) = write.value.clone() {
                let created = before.map_or(revision, |before| before.created);
                let entry = Entry { key: write.key.clone(), value, created, modified: revision, lease: write.lease };
                snapshot.insert(write.key.clone(), entry);
            }
        }
        self.reach(revision, u64::from(changed));
        if changed {
            self.snapshots.push((revision.0, snapshot));
        }
    }

    /// The lease ends in that revision.
    fn end(&mut self, lease: LeaseId, revision: Revision) {
        self.leases.remove(&lease);
        let of = self.now().values().filter(|entry| entry.lease == Some(lease));
        let writes: Vec<Write> = of.map(|entry| Write { key: entry.key.clone(), value: None, lease: None }).collect();
        self.write(&writes, revision);
    }

    /// As the embedded store makes it.
    fn next_revision(&self, lease: LeaseId) -> Revision {
        Revision(self.last + u64::from(self.now().values().any(|entry| entry.lease == Some(lease))))
    }

    fn events(&self, prefix: &str, after: u64) -> Result<Vec<Event>, StoreError> {
        let (mut events, after) = (Vec::new(), self.point(after)?);
        for pair in self.snapshots.windows(2) {
            let ((_, old), (at, new)) = (&pair[0], &pair[1]);
            if *at <= after {
                continue;
            }
            let mut keys: Vec<&String> = old.keys().chain(new.keys()).filter(|key| key.starts_with(prefix)).collect();
            keys.sort();
            keys.dedup();
            for key in keys.into_iter().filter(|key| old.get(*key) != new.get(*key)) {
                let (entry, before) = (new.get(key).cloned(), old.get(key).cloned());
                events.push(Event { revision: Revision(*at), key: key.clone(), entry, before });
            }
        }
        Ok(events)
    }
}

fn transaction(rng: &mut SimRng, model: &Model) -> Transaction {
    let mut transaction = Transaction::default();
    for _ in 0..rng.roll(3) {
        let key = rng.key();
        let modified = match rng.roll(4) {
            0 => None,
            1 => Some(Revision(model.roll(rng))),
            _ => model.now().get(&key).map(|entry| entry.modified),
        };
        transaction.compares.push(Compare { key, modified });
    }
    for _ in 0..rng.roll(4) {
        let value = (rng.roll(3) > 0).then(|| format!("{}", rng.roll(1000)).into_bytes());
        let lease = match rng.roll(4) {
            0 => model.leases.keys().nth(rng.roll(3) as usize).copied(),
            _ => None,
        };
        transaction.writes.push(Write { key: rng.key(), lease: lease.filter(|_| value.is_some()), value });
    }
    transaction
}

/// Whether a transaction has the same effect on both.
fn commit(store: &mut impl Store, model: &mut Model, transaction: &Transaction) {
    let answer = store.commit(transaction);
    if transaction.check().is_err() {
        assert_eq!(answer, Err(StoreError::BadTransaction));
        return;
    }
    let holds = |compare: &Compare| model.now().get(&compare.key).map(|entry| entry.modified) == compare.modified;
    match (transaction.compares.iter().all(holds), answer) {
        (true, Ok(Committed::Done(revision))) => model.write(&transaction.writes, revision),
        (false, Ok(Committed::Conflict(revision))) => model.reach(revision, 0),
        (holds, answer) => panic!("{answer:?}, where comparisons hold: {holds}"),
    }
}

fn look(store: &impl Store, model: &mut Model, rng: &mut SimRng) {
    model.reach(store.revision().expect("a revision"), 0);
    let (prefix, key, at) = (rng.prefix(), rng.key(), model.roll(rng));
    let point = model.point(at);
    let listed = store.list(prefix, Some(Revision(at)));
    match &point {
        Ok(at) => {
            let snapshot = model.at(*at);
            let expected: Vec<Entry> =
                snapshot.values().filter(|entry| entry.key.starts_with(prefix)).cloned().collect();
            assert_eq!(listed.map(|listing| (listing.revision, listing.entries)), Ok((Revision(*at), expected)));
            assert_eq!(store.get(&key, Some(Revision(*at))), Ok(snapshot.get(&key).cloned()));
        }
        Err(error) => {
            assert_eq!(listed.as_ref(), Err(error));
            assert_eq!(store.get(&key, Some(Revision(at))).as_ref(), Err(error));
        }
    }
    let now: Vec<Entry> = model.now().values().cloned().collect();
    assert_eq!(store.list("", None).map(|listing| listing.entries), Ok(now));
    // A shared store takes a tenth of a second for it, and makes a revision to find the present.
    let shown = model.kind == Kind::Embedded || rng.roll(4) == 0;
    if shown {
        assert_eq!(store.events(prefix, Revision(at)), model.events(prefix, at));
    }
    model.reach(store.revision().expect("a revision"), 0);
}

fn leases(store: &mut impl Store, model: &mut Model, rng: &mut SimRng) {
    let some = model.leases.keys().nth(rng.roll(3) as usize).copied();
    match (rng.roll(4), some) {
        (0, _) => {
            let ttl = match model.kind {
                Kind::Embedded => 1 + rng.roll(50),
                Kind::Shared => 3_600_000_000_000,
            };
            let lease = store.grant(Instant(model.now), Duration(ttl)).expect("a lease");
            assert!(model.leases.insert(lease, (ttl, Some(model.now + ttl))).is_none(), "a lease twice");
        }
        (1, Some(lease)) => {
            assert_eq!(store.keep_alive(Instant(model.now), lease), Ok(()));
            model.leases.entry(lease).and_modify(|(ttl, until)| *until = Some(model.now + *ttl));
        }
        (2, Some(lease)) => {
            let revision = store.revoke(lease).expect("a lease");
            model.end(lease, revision);
            assert_eq!(store.revoke(lease), Err(StoreError::NoLease));
            assert_eq!(store.keep_alive(Instant(model.now), lease), Err(StoreError::NoLease));
            let write = Write { key: "a".into(), value: Some(Vec::new()), lease: Some(lease) };
            let transaction = Transaction { compares: Vec::new(), writes: alloc::vec![write] };
            assert_eq!(store.commit(&transaction), Err(StoreError::NoLease));
        }
        _ => {
            model.now += rng.roll(40);
            let ended = expire(model);
            assert_eq!(store.expire(Instant(model.now)), Ok(ended.clone()));
            for lease in ended {
                let revision = model.next_revision(lease);
                model.end(lease, revision);
            }
        }
    }
    let next = model.leases.values().map(|(_, until)| Instant(until.unwrap_or_default())).min();
    assert_eq!(store.next_expiry(), next.filter(|_| model.kind == Kind::Embedded));
}

/// The leases whose time is over.
fn expire(model: &mut Model) -> Vec<LeaseId> {
    if model.kind == Kind::Shared {
        return Vec::new();
    }
    let now = model.now;
    for (ttl, until) in model.leases.values_mut() {
        until.get_or_insert(now + *ttl);
    }
    let over = |(_, until): &(u64, Option<u64>)| until.is_some_and(|until| until <= now);
    model.leases.iter().filter(|(_, lease)| over(lease)).map(|(&id, _)| id).collect()
}

/// Each number is one operation. `reopen` closes a store and opens it again.
pub fn check<S: Store>(mut store: S, kind: Kind, operations: &[u64], mut reopen: impl FnMut(S) -> S) {
    let mut model = Model::new(kind, store.revision().expect("a revision").0);
    for &operation in operations {
        let mut rng = SimRng(operation);
        match rng.roll(16) {
            0..=7 => {
                let transaction = transaction(&mut rng, &model);
                commit(&mut store, &mut model, &transaction);
            }
            8..=10 => leases(&mut store, &mut model, &mut rng),
            11 => {
                let at = model.roll(&mut rng);
                let expected = model.point(at).map(|at| model.compacted = at);
                assert_eq!(store.compact(Revision(at)), expected);
            }
            12 => {
                store = reopen(store);
                model.leases.values_mut().for_each(|(_, until)| *until = None);
            }
            _ => {}
        }
        look(&store, &mut model, &mut rng);
    }
}

/// An object keeps its manager in the store, and is that manager's after the store was opened again. `store` has
/// nothing in it.
pub fn check_managers<S: Store>(mut store: S, mut reopen: impl FnMut(S) -> S) {
    let run = |store: &mut S, writer: &Writer, command: &Command| {
        let mut state = State::of(&store.list("", None).expect("listed")).expect("a state");
        let plan = state.plan_by(writer, command).map_err(|refusal| refusal.reason)?;
        let committed = store.commit(&state.transaction(&plan)).expect("stored");
        let Committed::Done(revision) = committed else { panic!("nobody else writes") };
        state.adopt(&plan, revision);
        let read = State::of(&store.list("", None).expect("listed")).expect("a state");
        assert_eq!(
            read.objects(ObjectKind::Quota).collect::<Vec<_>>(),
            state.objects(ObjectKind::Quota).collect::<Vec<_>>()
        );
        Ok(())
    };
    let name = format!("{KUBERNETES_PREFIX}team.small");
    let manager = Manager { name: KUBERNETES.into(), change: Some("kubectl edit quota small".into()) };
    let quota = |manager: Option<&Manager>, vnics: u32| {
        let metadata = Metadata { name: name.clone(), manager: manager.cloned(), ..Metadata::default() };
        let object = Object::new::<Quota>(metadata, QuotaSpec { vnics: Some(vnics), ..QuotaSpec::default() });
        Command::Apply { objects: alloc::vec![object.into()] }
    };
    let delete = Command::Delete { kind: ObjectKind::Quota, name: name.clone(), version: None };
    let kubernetes = Writer::Manager(KUBERNETES.into());
    assert_eq!(run(&mut store, &kubernetes, &quota(Some(&manager), 8)), Ok(()));
    store = reopen(store);
    let there = State::of(&store.list("", None).expect("listed")).expect("a state");
    let there = there.object(ObjectKind::Quota, &name).expect("it is there");
    assert_eq!(there.metadata().manager.as_ref(), Some(&manager));
    for command in [quota(None, 9), delete.clone()] {
        assert_eq!(run(&mut store, &Writer::Hand, &command), Err(Reason::Conflict));
    }
    assert_eq!(run(&mut store, &kubernetes, &quota(Some(&manager), 9)), Ok(()));
    assert_eq!(run(&mut store, &Writer::TakeOver, &quota(None, 9)), Ok(()));
    store = reopen(store);
    assert_eq!(run(&mut store, &kubernetes, &quota(Some(&manager), 9)), Err(Reason::Conflict));
    assert_eq!(run(&mut store, &Writer::Hand, &delete), Ok(()));
}

/// Whether an operation closes the store and opens it again.
pub fn reopens(operation: u64) -> bool {
    SimRng(operation).roll(16) == 12
}
