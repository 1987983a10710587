//! Parts with several writers: they take turns, by a serial number that each transaction writes on condition that it is
//! as it was read. So each has seen all that came before.
use crate::ClusterError;
use crate::file::ClusterFile;
use crate::keys::SERIAL;
use freeflow_etcd::EtcdStore;
use freeflow_orchestrator::store::{Committed, Compare, Entry, Transaction, Write};
use freeflow_orchestrator::{Reason, Refusal, Revision, Store};

/// etcd takes 128 operations at once, of which some are the store's.
pub const WRITE_COUNT_MAX: usize = 100;
/// Transactions that others have forestalled, or that a guard forbids for good.
const CONFLICT_COUNT_MAX: usize = 8;

pub(crate) fn busy() -> ClusterError {
    Refusal::new(Reason::Conflict, "others change the same keys of the cluster all the time; try again").into()
}

pub(crate) fn serial_in(entries: &[Entry]) -> Option<Revision> {
    entries.iter().find(|entry| entry.key == SERIAL).map(|entry| entry.modified)
}

/// A key outside a part, whole, and when it was written: what is done in the part is done only as long as it is so.
pub(crate) type Guard<'a> = (&'a str, Revision);

/// A part of the cluster, to be changed under a guard if there is one.
pub(crate) fn part(file: &ClusterFile, root: &str, guard: Option<Guard<'_>>) -> Result<EtcdStore, ClusterError> {
    let store = file.store(root)?;
    Ok(match guard {
        Some((key, modified)) => store.guarded(key, modified),
        None => store,
    })
}

/// Its revision is what counts.
pub(crate) fn serial_write() -> Write {
    Write { key: SERIAL.into(), value: Some(Vec::new()), lease: None }
}

/// Keys and their new values; `None`: no longer. False: somebody else was faster, and what he did comes as news.
pub(crate) fn commit(
    store: &mut EtcdStore,
    writes: impl IntoIterator<Item = (String, Option<Vec<u8>>)>,
    serial: Option<Revision>,
) -> Result<bool, ClusterError> {
    let mut writes = writes.into_iter().peekable();
    if writes.peek().is_none() { Ok(true) } else { commit_in_turn(store, writes, serial) }
}

/// The same; the serial number is written also where nothing else is.
fn commit_in_turn(
    store: &mut EtcdStore,
    writes: impl IntoIterator<Item = (String, Option<Vec<u8>>)>,
    serial: Option<Revision>,
) -> Result<bool, ClusterError> {
    let write = |(key, value)| Write { key, value, lease: None };
    let mut writes: Vec<Write> = writes.into_iter().map(write).collect();
    writes.push(serial_write());
    let transaction = Transaction { compares: vec![Compare { key: SERIAL.into(), modified: serial }], writes };
    Ok(matches!(store.commit(&transaction)?, Committed::Done(_)))
}

/// Deletes all keys that are due, as many as there are; how many those were. The serial number is written also where
/// there are none: controllers that have not heard of it have to hear first.
pub(crate) fn delete_in_turns(
    store: &mut EtcdStore,
    due: impl Fn(&[Entry]) -> Vec<String>,
) -> Result<usize, ClusterError> {
    change_in_turns(store, |entries| due(entries).into_iter().map(|key| (key, None)).collect())
}

/// The same of changes, none of which is due any more once it was done.
pub(crate) fn change_in_turns(
    store: &mut EtcdStore,
    due: impl Fn(&[Entry]) -> Vec<(String, Option<Vec<u8>>)>,
) -> Result<usize, ClusterError> {
    let (mut count, mut conflict_count) = (0, 0);
    loop {
        let listing = store.list("", None)?;
        let mut changes = due(&listing.entries);
        changes.truncate(WRITE_COUNT_MAX);
        let changed = changes.len();
        if commit_in_turn(store, changes, serial_in(&listing.entries))? {
            count += changed;
            if changed < WRITE_COUNT_MAX {
                return Ok(count);
            }
        } else {
            conflict_count += 1;
            if conflict_count == CONFLICT_COUNT_MAX {
                return Err(busy());
            }
        }
    }
}
