//! Requirements for every [`Store`], as a test that runs against any: random operations, each
//! answer compared with that of a model that remembers every revision whole.
use crate::store::{Committed, Compare, Entry, Event, LeaseId, Revision, Store, StoreError, Transaction, Write};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Instant};

type Snapshot = BTreeMap<String, Entry>;

/// Every revision, whole.
struct Model {
    snapshots: Vec<Snapshot>,
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
    fn last(&self) -> u64 {
        self.snapshots.len() as u64 - 1
    }

    fn now(&self) -> &Snapshot {
        self.snapshots.last().expect("revision 0 is there")
    }

    fn point(&self, at: u64) -> Result<u64, StoreError> {
        if at > self.last() {
            Err(StoreError::Future { revision: Revision(self.last()) })
        } else if at < self.compacted {
            Err(StoreError::Expired { compacted: Revision(self.compacted) })
        } else {
            Ok(at)
        }
    }

    fn write(&mut self, writes: &[Write]) {
        let next = Revision(self.last() + 1);
        let (mut snapshot, mut changed) = (self.now().clone(), false);
        for write in writes {
            let before = snapshot.remove(&write.key);
            changed |= before.is_some() || write.value.is_some();
            if let Some(value) = write.value.clone() {
                let created = before.map_or(next, |before| before.created);
                let entry = Entry { key: write.key.clone(), value, created, modified: next, lease: write.lease };
                snapshot.insert(write.key.clone(), entry);
            }
        }
        if changed {
            self.snapshots.push(snapshot);
        }
    }

    fn end(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
        let of = self.now().values().filter(|entry| entry.lease == Some(lease));
        let writes: Vec<Write> = of.map(|entry| Write { key: entry.key.clone(), value: None, lease: None }).collect();
        self.write(&writes);
    }

    fn events(&self, prefix: &str, after: u64) -> Result<Vec<Event>, StoreError> {
        let mut events = Vec::new();
        for at in self.point(after)? + 1..=self.last() {
            let (old, new) = (&self.snapshots[at as usize - 1], &self.snapshots[at as usize]);
            let mut keys: Vec<&String> = old.keys().chain(new.keys()).filter(|key| key.starts_with(prefix)).collect();
            keys.sort();
            keys.dedup();
            for key in keys.into_iter().filter(|key| old.get(*key) != new.get(*key)) {
                let (entry, before) = (new.get(key).cloned(), old.get(key).cloned());
                events.push(Event { revision: Revision(at), key: key.clone(), entry, before });
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
            1 => Some(Revision(rng.roll(model.last() + 2))),
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
    if transaction.compares.iter().all(holds) {
        model.write(&transaction.writes);
        assert_eq!(answer, Ok(Committed::Done(Revision(model.last()))));
    } else {
        assert_eq!(answer, Ok(Committed::Conflict(Revision(model.last()))));
    }
}

fn look(store: &impl Store, model: &Model, rng: &mut SimRng) {
    let (prefix, key, at) = (rng.prefix(), rng.key(), rng.roll(model.last() + 2));
    let point = model.point(at);
    let listed = store.list(prefix, Some(Revision(at)));
    match &point {
        Ok(at) => {
            let snapshot = &model.snapshots[*at as usize];
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
    assert_eq!(store.events(prefix, Revision(at)), model.events(prefix, at));
    let now: Vec<Entry> = model.now().values().cloned().collect();
    assert_eq!(store.list("", None).map(|listing| listing.entries), Ok(now));
    assert_eq!(store.revision(), Ok(Revision(model.last())));
}

fn leases(store: &mut impl Store, model: &mut Model, rng: &mut SimRng) {
    let some = model.leases.keys().nth(rng.roll(3) as usize).copied();
    match (rng.roll(4), some) {
        (0, _) => {
            let ttl = 1 + rng.roll(50);
            let lease = store.grant(Instant(model.now), Duration(ttl)).expect("a lease");
            assert!(model.leases.insert(lease, (ttl, Some(model.now + ttl))).is_none(), "a lease twice");
        }
        (1, Some(lease)) => {
            assert_eq!(store.keep_alive(Instant(model.now), lease), Ok(()));
            model.leases.entry(lease).and_modify(|(ttl, until)| *until = Some(model.now + *ttl));
        }
        (2, Some(lease)) => {
            let revision = store.revoke(lease);
            model.end(lease);
            assert_eq!(revision, Ok(Revision(model.last())));
            assert_eq!(store.revoke(lease), Err(StoreError::NoLease));
            assert_eq!(store.keep_alive(Instant(model.now), lease), Err(StoreError::NoLease));
        }
        _ => {
            model.now += rng.roll(40);
            let now = model.now;
            for (ttl, until) in model.leases.values_mut() {
                until.get_or_insert(now + *ttl);
            }
            let over = |(_, until): &(u64, Option<u64>)| until.is_some_and(|until| until <= now);
            let ended: Vec<LeaseId> = model.leases.iter().filter(|(_, lease)| over(lease)).map(|(&id, _)| id).collect();
            assert_eq!(store.expire(Instant(now)), Ok(ended.clone()));
            ended.into_iter().for_each(|lease| model.end(lease));
        }
    }
    let next = model.leases.values().map(|(_, until)| Instant(until.unwrap_or_default())).min();
    assert_eq!(store.next_expiry(), next);
}

/// Each number is one operation. `reopen` closes a store and opens it again.
pub fn check<S: Store>(mut store: S, operations: &[u64], mut reopen: impl FnMut(S) -> S) {
    let mut model = Model { snapshots: alloc::vec![Snapshot::new()], compacted: 0, leases: BTreeMap::new(), now: 1 };
    for &operation in operations {
        let mut rng = SimRng(operation);
        match rng.roll(16) {
            0..=7 => {
                let transaction = transaction(&mut rng, &model);
                commit(&mut store, &mut model, &transaction);
            }
            8..=10 => leases(&mut store, &mut model, &mut rng),
            11 => {
                let at = rng.roll(model.last() + 2);
                let expected = model.point(at).map(|at| model.compacted = at);
                assert_eq!(store.compact(Revision(at)), expected);
            }
            12 => {
                store = reopen(store);
                model.leases.values_mut().for_each(|(_, until)| *until = None);
            }
            _ => {}
        }
        look(&store, &model, &mut rng);
    }
}

/// Whether an operation closes the store and opens it again.
pub fn reopens(operation: u64) -> bool {
    SimRng(operation).roll(16) == 12
}
