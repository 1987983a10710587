//! The store: keys and values in which everything is a revision, as etcd has made it familiar.
//!
//! There is one number, the revision, for the whole store. Each transaction that writes makes the next one, and all its
//! writes bear it. A reader may look at any revision that is not compacted away, and be notified of all changes
//! since. Where others have keys in the same store (etcd), their writes count, too.
//!
//! Time is an argument: leases end when whoever runs the store says what time it is.
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A point in the store's history; 0 is before everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A lease: keys that name it go when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value, bytes that mean nothing to the store.
    pub value: Vec<u8>,
    /// When the key was made, after it was last absent.
    pub created: Revision,
    /// When the value was last written.
    pub modified: Revision,
    /// Goes with it.
    pub lease: Option<LeaseId>,
}

/// The keys of a prefix at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The revision that the list shows.
    pub revision: Revision,
    /// In order of key.
    pub entries: Vec<Entry>,
}

/// One key's change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The revision that made it.
    pub revision: Revision,
    /// The key.
    pub key: String,
    /// `None`: it is gone.
    pub entry: Option<Entry>,
    /// The entry before the change.
    pub before: Option<Entry>,
}

/// A key was last written at this revision; `None`: it is absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compare {
    /// The key.
    pub key: String,
    /// Revision of its last write.
    pub modified: Option<Revision>,
}

/// One write of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The key.
    pub key: String,
    /// `None`: away with it.
    pub value: Option<Vec<u8>>,
    /// The lease that the key goes with.
    pub lease: Option<LeaseId>,
}

/// If all comparisons hold, all is written, else nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// Conditions on keys as they are.
    pub compares: Vec<Compare>,
    /// No key twice.
    pub writes: Vec<Write>,
}

/// Result of [`Store::commit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// The revision of the writes; if they changed nothing (no writes; absent keys deleted), the store's now.
    Done(Revision),
    /// A comparison did not hold.
    Conflict(Revision),
}

/// Why the store did not do it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// The revision is compacted away; later ones than this are there.
    #[error("revisions up to {compacted} are compacted away")]
    Expired {
        /// The last of them.
        compacted: Revision,
    },
    /// The revision is still to come.
    #[error("the store is at revision {revision} only")]
    Future {
        /// The store's revision now.
        revision: Revision,
    },
    /// A key twice in one transaction, or one that is empty or too long, or too large a value.
    #[error("a transaction with a key twice, or a bad key, or too large a value")]
    BadTransaction,
    /// The lease has ended, or never was.
    #[error("no such lease")]
    NoLease,
    /// No room is left. Nothing was written.
    #[error("no space is left")]
    Full,
    /// More than the store takes in one transaction. Nothing was written.
    #[error("{0}")]
    TooLarge(String),
    /// Can't be read or written; the text says what and where. Nothing of a transaction that failed so was written, nor
    /// will be.
    #[error("{0}")]
    Broken(String),
    /// No answer came: it may have been written, or be written yet.
    #[error("{0}")]
    Unknown(String),
}

/// Longest key and value, bytes.
pub const KEY_BYTES_MAX: usize = 1024;
/// Longest value, bytes.
pub const VALUE_BYTES_MAX: usize = crate::OBJECT_BYTES_MAX;

/// A store of revisions. Time is an argument.
pub trait Store {
    /// The present revision.
    ///
    /// # Errors
    /// [`StoreError::Broken`].
    fn revision(&self) -> Result<Revision, StoreError>;

    /// As it was at a revision; none given: as it is.
    ///
    /// # Errors
    /// `Expired` or `Future`: no such revision is there. `Broken`.
    fn get(&self, key: &str, at: Option<Revision>) -> Result<Option<Entry>, StoreError>;

    /// All keys that begin so.
    ///
    /// # Errors
    /// `Expired` or `Future`: no such revision is there. `Broken`.
    fn list(&self, prefix: &str, at: Option<Revision>) -> Result<Listing, StoreError>;

    /// Durable when it returns.
    ///
    /// # Errors
    /// `BadTransaction`, `NoLease`, `Full`, `TooLarge`, `Broken`: nothing was written. `Unknown`.
    fn commit(&mut self, transaction: &Transaction) -> Result<Committed, StoreError>;

    /// Changes after that revision for a watch: all those of keys that begin so, in order of
    /// revision, and of key within one.
    ///
    /// # Errors
    /// `Expired` if some of them are compacted away. `Broken`.
    fn events(&self, prefix: &str, after: Revision) -> Result<Vec<Event>, StoreError>;

    /// Forgets what was before that revision, which itself remains to be seen.
    ///
    /// # Errors
    /// `Future`: that revision is still to come. `Broken`.
    fn compact(&mut self, at: Revision) -> Result<(), StoreError>;

    /// A lease that ends when it was not kept alive for so long. After a restart of the store all
    /// leases have their whole time again.
    ///
    /// # Errors
    /// `Broken`.
    fn grant(&mut self, now: Instant, ttl: Duration) -> Result<LeaseId, StoreError>;

    /// The lease ends its time to live after `now`, not before.
    ///
    /// # Errors
    /// `NoLease`, `Broken`.
    fn keep_alive(&mut self, now: Instant, lease: LeaseId) -> Result<(), StoreError>;

    /// Ends a lease: all keys that go with it are deleted, in one transaction.
    ///
    /// # Errors
    /// `NoLease`, `Broken`.
    fn revoke(&mut self, lease: LeaseId) -> Result<Revision, StoreError>;

    /// Revokes all leases whose time is over; which those were. In a store with a clock of its own they end by
    /// themselves, and this answers none.
    ///
    /// # Errors
    /// `Broken`.
    fn expire(&mut self, now: Instant) -> Result<Vec<LeaseId>, StoreError>;

    /// When [`Self::expire`] has something to do next.
    fn next_expiry(&self) -> Option<Instant>;
}

impl Transaction {
    /// Whether it could be done at all.
    ///
    /// # Errors
    /// `BadTransaction`.
    pub fn check(&self) -> Result<(), StoreError> {
        let mut keys: Vec<&str> = self.writes.iter().map(|write| write.key.as_str()).collect();
        keys.sort_unstable();
        let twice = keys.windows(2).any(|pair| pair[0] == pair[1]);
        let bad_key = |key: &str| key.is_empty() || key.len() > KEY_BYTES_MAX;
        let large = |write: &Write| write.value.as_ref().is_some_and(|value| value.len() > VALUE_BYTES_MAX);
        let bad = twice
            || self.writes.iter().any(|write| bad_key(&write.key) || large(write))
            || self.compares.iter().any(|compare| bad_key(&compare.key));
        if bad { Err(StoreError::BadTransaction) } else { Ok(()) }
    }
}

/// When leases end: the part that is the same in every store that keeps its own.
#[derive(Clone, Debug, Default)]
pub struct Leases(BTreeMap<LeaseId, (Duration, Option<Instant>)>);

impl Leases {
    /// Enters a lease that lives for `ttl` from `now`.
    pub fn insert(&mut self, lease: LeaseId, now: Instant, ttl: Duration) {
        self.0.insert(lease, (ttl, Some(now + ttl)));
    }

    /// One that was there before a restart: its time begins when the time is first known.
    pub fn restore(&mut self, lease: LeaseId, ttl: Duration) {
        self.0.insert(lease, (ttl, None));
    }

    /// Whether the lease is there.
    pub fn has(&self, lease: LeaseId) -> bool {
        self.0.contains_key(&lease)
    }

    /// Forgets a lease.
    pub fn remove(&mut self, lease: LeaseId) {
        self.0.remove(&lease);
    }

    /// The lease ends its time to live after `now`.
    ///
    /// # Errors
    /// `NoLease`.
    pub fn keep_alive(&mut self, lease: LeaseId, now: Instant) -> Result<(), StoreError> {
        let (ttl, until) = self.0.get_mut(&lease).ok_or(StoreError::NoLease)?;
        *until = Some(now + *ttl);
        Ok(())
    }

    /// Those whose time is over, in order.
    pub fn over(&mut self, now: Instant) -> Vec<LeaseId> {
        let mut over = Vec::new();
        for (&lease, (ttl, until)) in &mut self.0 {
            if *until.get_or_insert(now + *ttl) <= now {
                over.push(lease);
            }
        }
        over
    }

    /// At once, where there is one whose time has not begun.
    pub fn next(&self) -> Option<Instant> {
        self.0.values().map(|(_, until)| until.unwrap_or_default()).min()
    }
}
