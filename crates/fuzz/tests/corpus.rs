//! Replays the corpora: what once broke a promise stays mended, and every target still reads what it was given.
use freeflow_fuzz::{TARGETS, target};
use std::fs;
use std::path::PathBuf;

/// Of one file, and of all together.
const FILE_BYTES_MAX: u64 = 20 << 10;
const BYTES_MAX: u64 = 400 << 10;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

#[test]
fn every_target_keeps_its_promises_over_its_corpus() {
    for target in &TARGETS {
        let mut count = 0;
        for entry in fs::read_dir(folder().join(target.name)).expect("each target has a corpus") {
            let path = entry.expect("an entry").path();
            println!("{}", path.display());
            (target.run)(&fs::read(&path).expect("a file"));
            count += 1;
        }
        assert!(count > 0, "{}: the corpus is empty", target.name);
    }
}

#[test]
fn corpora_are_small_and_of_targets() {
    let mut total = 0;
    for entry in fs::read_dir(folder()).expect("the corpora") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        assert!(target(&name).is_some(), "{name}: no target is called so");
        for file in fs::read_dir(&path).expect("a folder") {
            let bytes = file.expect("an entry").metadata().expect("a file").len();
            assert!(bytes <= FILE_BYTES_MAX, "{name}: a file of {bytes} bytes");
            total += bytes;
        }
    }
    assert!(total <= BYTES_MAX, "{total} bytes: minimise with scripts/fuzz TARGET -merge=1");
}
