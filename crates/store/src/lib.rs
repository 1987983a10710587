//! The embedded store: one file, written with fsync before anything is answered, which a `kill -9`
//! at any instant leaves whole.
//!
//! The content of the file is in memory too ([`MemoryStore`], which also computes each change):
//! readers never touch the disk, and a change is made in memory after it is on the disk.
//!
//! Invariant: a file that can't be used is left as it is; nobody's addresses are forgotten by beginning again.
//!
//! ```
//! use freeflow_orchestrator::store::{Store, Transaction, Write};
//! use freeflow_store::FileStore;
//!
//! let path = std::env::temp_dir().join(format!("freeflow-store-example.{}", std::process::id()));
//! let write = Write { key: "/a".into(), value: Some(b"1".to_vec()), lease: None };
//! FileStore::open(&path)?.commit(&Transaction { compares: Vec::new(), writes: vec![write] })?;
//!
//! // Whoever opens it next, after a crash too, finds what was answered.
//! let entry = FileStore::open(&path)?.get("/a", None)?.expect("it is there");
//! assert_eq!(entry.value, b"1");
//! std::fs::remove_file(&path).expect("removed");
//! # Ok::<(), freeflow_orchestrator::store::StoreError>(())
//! ```
#![forbid(unsafe_code)]

mod state_dir;

pub use state_dir::open_state_dir;

use freeflow_orchestrator::store::{
    Committed, Entry, Event, LeaseId, Listing, Revision, Store, StoreError, Transaction,
};
use freeflow_orchestrator::{Delta, MemoryStore};
use freeflow_verbs::{Duration, Instant};
use redb::backends::FileBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Changes with every incompatible change of what is in the file.
const FORMAT: u64 = 1;
/// Revisions that a watch may go back.
pub const HISTORY_COUNT: u64 = 10_000;
/// And what they may take, bytes: in memory, and in the file about as much.
pub const HISTORY_BYTES: usize = 16 << 20;
const CACHE_BYTES: usize = 4 << 20;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
/// By key and revision, what the key is from then on.
const VERSIONS: TableDefinition<'_, (&str, u64), &[u8]> = TableDefinition::new("versions");
/// Time to live, nanoseconds.
const LEASES: TableDefinition<'_, u64, u64> = TableDefinition::new("leases");

/// Opens the file, the first time and again after it could not be written.
pub type Opener = Box<dyn FnMut() -> Result<Database, StoreError> + Send>;

pub struct FileStore {
    name: String,
    opener: Opener,
    /// None: it could not be written, nor opened again since.
    database: Option<Database>,
    memory: MemoryStore,
    history_count: u64,
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}

/// Nothing of a version is what makes it a deletion.
fn bytes_of(entry: Option<&Entry>) -> Vec<u8> {
    let Some(entry) = entry else { return Vec::new() };
    let mut bytes = entry.created.0.to_le_bytes().to_vec();
    bytes.extend(entry.lease.map_or(0, |lease| lease.0).to_le_bytes());
    bytes.extend(&entry.value);
    bytes
}

fn entry_of(key: &str, modified: u64, bytes: &[u8]) -> Option<Option<Entry>> {
    if bytes.is_empty() {
        return Some(None);
    }
    let (created, rest) = bytes.split_first_chunk()?;
    let (lease, value) = rest.split_first_chunk()?;
    let lease = u64::from_le_bytes(*lease);
    Some(Some(Entry {
        key: key.into(),
        value: value.into(),
        created: Revision(u64::from_le_bytes(*created)),
        modified: Revision(modified),
        lease: (lease != 0).then_some(LeaseId(lease)),
    }))
}

impl FileStore {
    /// Errors: `Broken` if it is no store, one of another version, or damaged.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let name = path.display().to_string();
        let path = path.to_owned();
        let opener = move || {
            let broken = |error: &dyn std::fmt::Display| StoreError::Broken(format!("{}: {error}", path.display()));
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
            let backend = FileBackend::new(file.map_err(|error| broken(&error))?).map_err(|error| broken(&error))?;
            redb::Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(backend).map_err(|error| match error {
                DatabaseError::Storage(StorageError::Io(error)) if is_full(&error) => StoreError::Full,
                error => broken(&error),
            })
        };
        Self::with(name, Box::new(opener), HISTORY_COUNT)
    }

    /// `name`: of the file, for messages.
    pub fn with(name: String, mut opener: Opener, history_count: u64) -> Result<Self, StoreError> {
        // Damage that redb itself does not see must not take the program with it.
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let database = opener()?;
            let memory = load(&name, &database)?;
            Ok((database, memory))
        }));
        let damaged = || Err(StoreError::Broken(format!("{name}: damaged; move it away to begin again")));
        let (database, memory) = opened.unwrap_or_else(|_| damaged())?;
        Ok(Self { name, opener, database: Some(database), memory, history_count })
    }

    /// On the disk first, then in memory.
    fn change(&mut self, delta: Delta, lease: Option<(LeaseId, Duration)>) -> Result<(), StoreError> {
        let unchanged = delta.written.is_empty() && delta.dropped.is_empty() && delta.ended_lease.is_none();
        if unchanged && lease.is_none() && Ok(delta.compacted) == self.compacted() {
            return Ok(());
        }
        if self.database.is_none() && self.reopen()? != self.memory.revision()? {
            self.database = None;
            let text = format!("{}: is not what was last written to it; start the router again", self.name);
            return Err(StoreError::Broken(text));
        }
        let database = self.database.as_ref().expect("it is open");
        if let Err(error) = write(database, &delta, lease) {
            // It may have reached the disk all the same. redb takes nothing more until the file is opened again.
            let error = self.error(error);
            self.database = None;
            let Ok(there) = self.reopen() else { return Err(error) };
            if there != delta.revision || delta.written.is_empty() {
                return Err(error);
            }
        }
        self.memory.adopt(delta);
        Ok(())
    }

    /// The revision that the file is at.
    fn reopen(&mut self) -> Result<Revision, StoreError> {
        let database = (self.opener)()?;
        let there = load(&self.name, &database)?.revision()?;
        self.database = Some(database);
        Ok(there)
    }

    fn compacted(&self) -> Result<Revision, StoreError> {
        // The oldest that can be looked at.
        match self.memory.list("", Some(Revision(0))) {
            Err(StoreError::Expired { compacted }) => Ok(compacted),
            other => other.map(|_| Revision(0)),
        }
    }

    fn error(&self, error: redb::Error) -> StoreError {
        match error {
            redb::Error::Io(error) if is_full(&error) => StoreError::Full,
            error => StoreError::Broken(format!("{}: {error}", self.name)),
        }
    }

    /// With what is to be forgotten by now.
    fn trimmed(&self, delta: Delta) -> Result<Delta, StoreError> {
        let by_count = Revision(delta.revision.0.saturating_sub(self.history_count));
        let at = by_count.max(self.memory.excess(&delta, HISTORY_BYTES));
        if at > delta.compacted { self.memory.and_compact(at, delta) } else { Ok(delta) }
    }
}

fn load(name: &str, database: &Database) -> Result<MemoryStore, StoreError> {
    let broken = |error: &dyn std::fmt::Display| StoreError::Broken(format!("{name}: {error}"));
    let failed = |error: redb::Error| broken(&error);
    let read = || -> Result<Option<MemoryStore>, redb::Error> {
        let transaction = database.begin_read()?;
        let meta = match transaction.open_table(META) {
            Ok(meta) => meta,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Some(MemoryStore::new())),
            Err(error) => return Err(error.into()),
        };
        let number = |name: &str| Ok::<_, redb::Error>(meta.get(name)?.map(|value| value.value()));
        if number("format")? != Some(FORMAT) {
            return Ok(None);
        }
        let (revision, compacted) = (number("revision")?.unwrap_or(0), number("compacted")?.unwrap_or(0));
        let mut versions = Vec::new();
        for row in transaction.open_table(VERSIONS)?.iter()? {
            let (key, bytes) = row?;
            let (key, at) = key.value();
            let Some(entry) = entry_of(key, at, bytes.value()) else { return Ok(None) };
            versions.push((key.to_owned(), Revision(at), entry));
        }
        let mut leases = Vec::new();
        for row in transaction.open_table(LEASES)?.iter()? {
            let (lease, ttl) = row?;
            leases.push((LeaseId(lease.value()), Duration(ttl.value())));
        }
        let point = (Revision(revision), Revision(compacted));
        Ok(Some(MemoryStore::restored(point, versions.into_iter(), leases.into_iter())))
    };
    let unusable = || broken(&"of another version, or contradicts itself; move it away to begin again");
    read().map_err(failed)?.ok_or_else(unusable)
}

fn write(database: &Database, delta: &Delta, lease: Option<(LeaseId, Duration)>) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut meta = transaction.open_table(META)?;
        meta.insert("format", FORMAT)?;
        meta.insert("revision", delta.revision.0)?;
        meta.insert("compacted", delta.compacted.0)?;
        let mut versions = transaction.open_table(VERSIONS)?;
        for (key, version) in &delta.dropped {
            versions.remove((key.as_str(), version.0))?;
        }
        for (key, entry) in &delta.written {
            versions.insert((key.as_str(), delta.revision.0), bytes_of(entry.as_ref()).as_slice())?;
        }
        let mut leases = transaction.open_table(LEASES)?;
        if let Some(ended) = delta.ended_lease {
            leases.remove(ended.0)?;
        }
        if let Some((lease, ttl)) = lease {
            leases.insert(lease.0, ttl.0)?;
        }
    }
    Ok(transaction.commit()?)
}

impl Store for FileStore {
    fn revision(&self) -> Result<Revision, StoreError> {
        self.memory.revision()
    }

    fn get(&self, key: &str, at: Option<Revision>) -> Result<Option<Entry>, StoreError> {
        self.memory.get(key, at)
    }

    fn list(&self, prefix: &str, at: Option<Revision>) -> Result<Listing, StoreError> {
        self.memory.list(prefix, at)
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Committed, StoreError> {
        let Some(delta) = self.memory.delta_of_commit(transaction)? else {
            return Ok(Committed::Conflict(self.memory.revision()?));
        };
        let delta = self.trimmed(delta)?;
        self.change(delta, None)?;
        Ok(Committed::Done(self.memory.revision()?))
    }

    fn events(&self, prefix: &str, after: Revision) -> Result<Vec<Event>, StoreError> {
        self.memory.events(prefix, after)
    }

    fn compact(&mut self, at: Revision) -> Result<(), StoreError> {
        let delta = self.memory.delta_of_compaction(at)?;
        self.change(delta, None)
    }

    fn grant(&mut self, now: Instant, ttl: Duration) -> Result<LeaseId, StoreError> {
        let delta = self.memory.delta_of_commit(&Transaction::default())?.expect("nothing is compared");
        self.change(delta, Some((self.memory.next_lease(), ttl)))?;
        self.memory.grant(now, ttl)
    }

    fn keep_alive(&mut self, now: Instant, lease: LeaseId) -> Result<(), StoreError> {
        self.memory.keep_alive(now, lease)
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<Revision, StoreError> {
        let delta = self.memory.delta_of_revocation(lease)?;
        self.change(delta, None)?;
        self.memory.revision()
    }

    fn expire(&mut self, now: Instant) -> Result<Vec<LeaseId>, StoreError> {
        let over = self.memory.over(now);
        for &lease in &over {
            self.revoke(lease)?;
        }
        Ok(over)
    }

    fn next_expiry(&self) -> Option<Instant> {
        self.memory.next_expiry()
    }
}
