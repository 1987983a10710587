//! The file: conformance, faults, files that can't be used.
use freeflow_orchestrator::conformance::{self, Kind};
use freeflow_orchestrator::store::{Committed, Revision, Store, StoreError, Transaction, Write};
use freeflow_store::{FileStore, Opener, open_state_dir};
use proptest::prelude::*;
use redb::StorageBackend;
use redb::backends::FileBackend;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ff-store-{}-{}", std::process::id(), COUNT.fetch_add(1, SeqCst));
        let path = std::env::temp_dir().join(name);
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("state.redb")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn put(key: &str, value: &str) -> Transaction {
    let write = Write { key: key.into(), value: Some(value.into()), lease: None };
    Transaction { compares: Vec::new(), writes: vec![write] }
}

fn values(store: &FileStore) -> Vec<(String, String)> {
    let entries = store.list("", None).unwrap().entries;
    entries.into_iter().map(|entry| (entry.key, String::from_utf8(entry.value).unwrap())).collect()
}

#[test]
fn managers_are_kept() {
    let directory = Directory::new();
    let file = directory.file();
    conformance::check_managers(FileStore::open(&file).unwrap(), |store| {
        drop(store);
        FileStore::open(&file).unwrap()
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn as_the_model(operations in proptest::collection::vec(any::<u64>(), 0..60)) {
        let directory = Directory::new();
        let file = directory.file();
        conformance::check(FileStore::open(&file).unwrap(), Kind::Embedded, &operations, |store| {
            drop(store);
            FileStore::open(&file).unwrap()
        });
    }
}

#[test]
fn the_file_is_the_owners_alone() {
    let directory = Directory::new();
    let _store = FileStore::open(&directory.file()).unwrap();
    assert_eq!(std::fs::metadata(directory.file()).unwrap().permissions().mode() & 0o777, 0o600);
}

/// A file whose writes fail after so many bytes, as on a full disk, or after so many calls, as when the power goes.
#[derive(Debug)]
struct Faulty {
    file: FileBackend,
    full: Arc<AtomicBool>,
    calls_left: Arc<AtomicU64>,
}

impl Faulty {
    fn spend(&self) -> io::Result<()> {
        if self.full.load(SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let spent = self.calls_left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        spent.map(drop).map_err(|_| io::Error::other("the power is gone"))
    }
}

impl StorageBackend for Faulty {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.spend()?;
        self.file.set_len(len)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.spend()
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.spend()?;
        self.file.write(offset, data)
    }
    fn close(&self) -> io::Result<()> {
        self.file.close()
    }
}

fn faulty(path: &Path, full: &Arc<AtomicBool>, calls_left: &Arc<AtomicU64>) -> Opener {
    let (path, full, calls_left) = (path.to_owned(), full.clone(), calls_left.clone());
    Box::new(move || {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let backend =
            Faulty { file: FileBackend::new(file).unwrap(), full: full.clone(), calls_left: calls_left.clone() };
        redb::Builder::new().create_with_backend(backend).map_err(|error| StoreError::Broken(error.to_string()))
    })
}

#[test]
fn a_full_disk_is_said_and_loses_nothing() {
    let directory = Directory::new();
    let (full, calls_left) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(u64::MAX)));
    let opener = faulty(&directory.file(), &full, &calls_left);
    let mut store = FileStore::with("file".into(), opener, 100).unwrap();
    store.commit(&put("a", "1")).unwrap();
    full.store(true, SeqCst);
    let refused = store.commit(&put("a", "2")).unwrap_err();
    assert_eq!(refused, StoreError::Full);
    assert!(store.commit(&put("b", "2")).is_err());
    assert_eq!((values(&store), store.revision()), (vec![("a".into(), "1".into())], Ok(Revision(1))));
    full.store(false, SeqCst);
    assert_eq!(store.commit(&put("b", "3")), Ok(Committed::Done(Revision(2))));
    drop(store);
    let store = FileStore::open(&directory.file()).unwrap();
    assert_eq!(values(&store), [("a".into(), "1".into()), ("b".into(), "3".into())]);
}

#[test]
fn whatever_write_is_the_last_what_was_answered_is_there() {
    for calls in 0..60 {
        let directory = Directory::new();
        let (full, calls_left) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(u64::MAX)));
        let mut store = FileStore::with("file".into(), faulty(&directory.file(), &full, &calls_left), 3).unwrap();
        calls_left.store(calls, SeqCst);
        let mut answered = 0;
        for round in 1..=8u64 {
            match store.commit(&put("a", &round.to_string())) {
                Ok(_) => answered = round,
                Err(_) => break,
            }
        }
        drop(store);
        let store = FileStore::open(&directory.file()).unwrap();
        let there = values(&store).first().map_or(0, |(_, value)| value.parse::<u64>().unwrap());
        // A change that was not answered may be there, or not: the one after it can't.
        assert!((answered..=answered + 1).contains(&there), "{calls}: {answered} {there}");
        assert_eq!(store.revision(), Ok(Revision(there)));
    }
}

#[test]
fn history_has_an_end() {
    let directory = Directory::new();
    let (full, calls_left) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(u64::MAX)));
    let mut store = FileStore::with("file".into(), faulty(&directory.file(), &full, &calls_left), 5).unwrap();
    for round in 0..20 {
        store.commit(&put("a", &round.to_string())).unwrap();
    }
    assert_eq!(store.events("", Revision(15)).unwrap().len(), 5);
    assert_eq!(store.events("", Revision(14)), Err(StoreError::Expired { compacted: Revision(15) }));
    drop(store);
    let store = FileStore::open(&directory.file()).unwrap();
    assert_eq!(store.events("", Revision(14)), Err(StoreError::Expired { compacted: Revision(15) }));
    assert_eq!(values(&store), [("a".into(), "19".into())]);
}

#[test]
fn files_that_cannot_be_used_stay_as_they_are() {
    let directory = Directory::new();
    let other = b"this is no store, and somebody may want it ".repeat(1000);
    std::fs::write(directory.file(), &other).unwrap();
    assert!(matches!(FileStore::open(&directory.file()), Err(StoreError::Broken(_))));
    assert_eq!(std::fs::read(directory.file()).unwrap(), other);
    std::fs::remove_file(directory.file()).unwrap();
    {
        let database = redb::Database::create(directory.file()).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(redb::TableDefinition::<&str, u64>::new("meta")).unwrap().insert("format", 2).unwrap();
        write.commit().unwrap();
    }
    let error = open_state_dir(&directory.0).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(error.to_string().contains("another version"), "{error}");
    // Every byte spoilt in turn, here and there: an error, or what was stored; never a crash.
    let directory = Directory::new();
    FileStore::open(&directory.file()).unwrap().commit(&put("a", "1")).unwrap();
    let good = std::fs::read(directory.file()).unwrap();
    for at in (0..good.len()).step_by(good.len() / 40 + 1).chain(0..8) {
        let mut bad = good.clone();
        bad[at] ^= 0x55;
        std::fs::write(directory.file(), &bad).unwrap();
        if let Ok(store) = FileStore::open(&directory.file()) {
            assert_eq!(values(&store), [("a".into(), "1".into())], "{at}");
        }
    }
}

#[test]
fn history_has_an_end_in_bytes() {
    let directory = Directory::new();
    let mut store = FileStore::open(&directory.file()).unwrap();
    let value = "x".repeat(60 << 10);
    for _ in 0..300 {
        store.commit(&put("/a", &value)).unwrap();
    }
    let check = |store: &FileStore| {
        assert!(matches!(store.events("", Revision(10)), Err(StoreError::Expired { .. })));
        let bytes: usize = store
            .events("", Revision(100))
            .unwrap()
            .iter()
            .map(|event| event.entry.as_ref().map_or(0, |entry| entry.value.len()))
            .sum();
        assert!(bytes > 10 << 20, "{bytes}");
    };
    check(&store);
    drop(store);
    let mut store = FileStore::open(&directory.file()).unwrap();
    check(&store);
    store.commit(&put("/a", &value)).unwrap();
    check(&store);
}
