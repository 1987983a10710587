//! A store that forgets everything when it is dropped: for tests, and to compare others with.
use crate::store::{
    Committed, Entry, Event, LeaseId, Leases, Listing, Revision, Store, StoreError, Transaction, Write,
};
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use freeflow_verbs::{Duration, Instant};

/// Values of a key, each from a revision on; `None`: absent.
type Versions = BTreeMap<Revision, Option<Entry>>;

/// Changes of a revision.
#[derive(Clone, Debug, Default)]
struct Changed {
    keys: Vec<String>,
    bytes: usize,
}

/// Bytes that a version takes beyond its key and its value, about.
const VERSION_BYTES: usize = 128;

fn bytes_of(key: &str, entry: Option<&Entry>) -> usize {
    VERSION_BYTES + key.len() + entry.map_or(0, |entry| entry.value.len())
}

/// A store that forgets all when it is dropped.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    keys: BTreeMap<String, Versions>,
    changed: BTreeMap<Revision, Changed>,
    /// Of all that changed since the compaction.
    history_bytes: usize,
    revision: Revision,
    compacted: Revision,
    next_lease: u64,
    leases: Leases,
}

/// A change before it is made, so that a store with a disk can write it there first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// The store's, afterwards.
    pub revision: Revision,
    /// Revisions up to this one are compacted away afterwards.
    pub compacted: Revision,
    /// New versions of keys, all of `revision`; `None`: absent from then on.
    pub written: Vec<(String, Option<Entry>)>,
    /// Versions that nobody can see any more.
    pub dropped: Vec<(String, Revision)>,
    /// The lease that ends with it.
    pub ended_lease: Option<LeaseId>,
}

impl Delta {
    /// Bytes that it writes.
    fn bytes(&self) -> usize {
        self.written.iter().map(|(key, entry)| bytes_of(key, entry.as_ref())).sum()
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// One that was stored: versions in any order, and leases whose time begins again.
    pub fn restored(
        (revision, compacted): (Revision, Revision),
        versions: impl Iterator<Item = (String, Revision, Option<Entry>)>,
        leases: impl Iterator<Item = (LeaseId, Duration)>,
    ) -> Self {
        let mut store = Self { revision, compacted, ..Self::default() };
        for (key, at, entry) in versions {
            if at > compacted {
                let changed = store.changed.entry(at).or_default();
                changed.keys.push(key.clone());
                changed.bytes += bytes_of(&key, entry.as_ref());
                store.history_bytes += bytes_of(&key, entry.as_ref());
            }
            store.keys.entry(key).or_default().insert(at, entry);
        }
        store.changed.values_mut().for_each(|changed| changed.keys.sort());
        for (lease, ttl) in leases {
            store.next_lease = store.next_lease.max(lease.0);
            store.leases.restore(lease, ttl);
        }
        store
    }

    fn point(&self, at: Option<Revision>) -> Result<Revision, StoreError> {
        let at = at.unwrap_or(self.revision);
        if at > self.revision {
            return Err(StoreError::Future { revision: self.revision });
        }
        if at < self.compacted {
            return Err(StoreError::Expired { compacted: self.compacted });
        }
        Ok(at)
    }

    fn seen(versions: &Versions, at: Revision) -> Option<&Entry> {
        versions.range(..=at).next_back().and_then(|(_, entry)| entry.as_ref())
    }

    fn now(&self, key: &str) -> Option<&Entry> {
        Self::seen(self.keys.get(key)?, self.revision)
    }

    fn delta_of_writes(&self, writes: &[Write]) -> Delta {
        let next = Revision(self.revision.0 + 1);
        let mut written = Vec::new();
        for write in writes {
            let before = self.now(&write.key);
            let entry = match (&write.value, before) {
                (None, None) => continue,
                (None, Some(_)) => None,
                (Some(value), before) => Some(Entry {
                    key: write.key.clone(),
                    value: value.clone(),
                    created: before.map_or(next, |before| before.created),
                    modified: next,
                    lease: write.lease,
                }),
            };
            written.push((write.key.clone(), entry));
        }
        let revision = if written.is_empty() { self.revision } else { next };
        Delta { revision, compacted: self.compacted, written, dropped: Vec::new(), ended_lease: None }
    }

    /// The change that a transaction would make; `None`: a comparison does not hold.
    ///
    /// # Errors
    /// [`StoreError::BadTransaction`], [`StoreError::NoLease`], or [`StoreError::Full`].
    pub fn delta_of_commit(&self, transaction: &Transaction) -> Result<Option<Delta>, StoreError> {
        transaction.check()?;
        if transaction.writes.iter().any(|write| write.lease.is_some_and(|lease| !self.leases.has(lease))) {
            return Err(StoreError::NoLease);
        }
        let holds = |key: &str, modified| self.now(key).map(|entry| entry.modified) == modified;
        let hold = transaction.compares.iter().all(|compare| holds(&compare.key, compare.modified));
        Ok(hold.then(|| self.delta_of_writes(&transaction.writes)))
    }

    /// Adds to a change that what was before a revision of now is forgotten. Only keys that changed
    /// since the last time have something to forget.
    ///
    /// # Errors
    /// [`StoreError::Future`]: that revision is still to come.
    pub fn and_compact(&self, at: Revision, delta: Delta) -> Result<Delta, StoreError> {
        let at = self.point(Some(at))?;
        let mut dropped = Vec::new();
        let mut keys: Vec<&String> = self.changed.range(..=at).flat_map(|(_, changed)| &changed.keys).collect();
        keys.sort();
        keys.dedup();
        for key in keys {
            let versions = &self.keys[key];
            let Some((&kept, last)) = versions.range(..=at).next_back() else { continue };
            let end = if last.is_none() { Revision(kept.0 + 1) } else { kept };
            dropped.extend(versions.range(..end).map(|(&version, _)| (key.clone(), version)));
        }
        Ok(Delta { compacted: at, dropped, ..delta })
    }

    /// The revision to compact at before a change is made, so that what can be looked back at takes
    /// no more than so many bytes.
    pub fn excess(&self, delta: &Delta, bytes_max: usize) -> Revision {
        let (mut bytes, mut at) = (self.history_bytes + delta.bytes(), self.compacted);
        for (&revision, changed) in &self.changed {
            if bytes <= bytes_max {
                break;
            }
            (bytes, at) = (bytes - changed.bytes, revision);
        }
        at
    }

    /// The change that [`Store::compact`] would make.
    ///
    /// # Errors
    /// [`StoreError::Future`]: that revision is still to come.
    pub fn delta_of_compaction(&self, at: Revision) -> Result<Delta, StoreError> {
        self.and_compact(at, self.delta_of_writes(&[]))
    }

    /// The change that [`Store::revoke`] would make.
    ///
    /// # Errors
    /// [`StoreError::NoLease`].
    pub fn delta_of_revocation(&self, lease: LeaseId) -> Result<Delta, StoreError> {
        if !self.leases.has(lease) {
            return Err(StoreError::NoLease);
        }
        let goes = |(key, versions): (&String, &Versions)| {
            let entry = Self::seen(versions, self.revision)?;
            (entry.lease == Some(lease)).then(|| Write { key: key.clone(), value: None, lease: None })
        };
        let writes: Vec<Write> = self.keys.iter().filter_map(goes).collect();
        Ok(Delta { ended_lease: Some(lease), ..self.delta_of_writes(&writes) })
    }

    /// The lease that [`Store::grant`] makes next.
    pub fn next_lease(&self) -> LeaseId {
        LeaseId(self.next_lease + 1)
    }

    /// Leases whose time is over.
    pub fn over(&mut self, now: Instant) -> Vec<LeaseId> {
        self.leases.over(now)
    }

    /// Makes a change that was computed from this very store.
    pub fn adopt(&mut self, delta: Delta) -> Revision {
        for (key, version) in &delta.dropped {
            if let Some(versions) = self.keys.get_mut(key) {
                versions.remove(version);
                if versions.is_empty() {
                    self.keys.remove(key);
                }
            }
        }
        if delta.compacted > self.compacted {
            let kept = self.changed.split_off(&Revision(delta.compacted.0 + 1));
            let gone = core::mem::replace(&mut self.changed, kept);
            self.history_bytes -= gone.values().map(|changed| changed.bytes).sum::<usize>();
            self.compacted = delta.compacted;
        }
        if !delta.written.is_empty() {
            let mut keys: Vec<String> = delta.written.iter().map(|(key, _)| key.clone()).collect();
            keys.sort();
            let bytes = delta.bytes();
            self.history_bytes += bytes;
            self.changed.insert(delta.revision, Changed { keys, bytes });
        }
        for (key, entry) in delta.written {
            self.keys.entry(key).or_default().insert(delta.revision, entry);
        }
        if let Some(lease) = delta.ended_lease {
            self.leases.remove(lease);
        }
        self.revision = delta.revision;
        self.revision
    }
}

impl Store for MemoryStore {
    fn revision(&self) -> Result<Revision, StoreError> {
        Ok(self.revision)
    }

    fn get(&self, key: &str, at: Option<Revision>) -> Result<Option<Entry>, StoreError> {
        let at = self.point(at)?;
        Ok(self.keys.get(key).and_then(|versions| Self::seen(versions, at)).cloned())
    }

    fn list(&self, prefix: &str, at: Option<Revision>) -> Result<Listing, StoreError> {
        let revision = self.point(at)?;
        let from = self.keys.range(String::from(prefix)..).take_while(|(key, _)| key.starts_with(prefix));
        let entries = from.filter_map(|(_, versions)| Self::seen(versions, revision).cloned()).collect();
        Ok(Listing { revision, entries })
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Committed, StoreError> {
        Ok(match self.delta_of_commit(transaction)? {
            None => Committed::Conflict(self.revision),
            Some(delta) => Committed::Done(self.adopt(delta)),
        })
    }

    fn events(&self, prefix: &str, after: Revision) -> Result<Vec<Event>, StoreError> {
        self.point(Some(after))?;
        let mut events = Vec::new();
        for (&revision, changed) in self.changed.range(Revision(after.0 + 1)..) {
            for key in changed.keys.iter().filter(|key| key.starts_with(prefix)) {
                let versions = &self.keys[key];
                let before = Self::seen(versions, Revision(revision.0 - 1)).cloned();
                events.push(Event { revision, key: key.clone(), entry: versions[&revision].clone(), before });
            }
        }
        Ok(events)
    }

    fn compact(&mut self, at: Revision) -> Result<(), StoreError> {
        let delta = self.delta_of_compaction(at)?;
        self.adopt(delta);
        Ok(())
    }

    fn grant(&mut self, now: Instant, ttl: Duration) -> Result<LeaseId, StoreError> {
        self.next_lease += 1;
        let lease = LeaseId(self.next_lease);
        self.leases.insert(lease, now, ttl);
        Ok(lease)
    }

    fn keep_alive(&mut self, now: Instant, lease: LeaseId) -> Result<(), StoreError> {
        self.leases.keep_alive(lease, now)
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<Revision, StoreError> {
        let delta = self.delta_of_revocation(lease)?;
        Ok(self.adopt(delta))
    }

    fn expire(&mut self, now: Instant) -> Result<Vec<LeaseId>, StoreError> {
        let over = self.over(now);
        for &lease in &over {
            self.revoke(lease)?;
        }
        Ok(over)
    }

    fn next_expiry(&self) -> Option<Instant> {
        self.leases.next()
    }
}
