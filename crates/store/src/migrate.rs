//! A run directory's store, and what was there before it: `state.json`.
use crate::FileStore;
use freeflow_orchestrator::store::{Store, StoreError};
use freeflow_orchestrator::{Plan, State, before};
use std::fs::File;
use std::io;
use std::path::Path;

/// The store in `RUN_DIR/state.redb` and the state in it. What an older version left in `state.json` is taken over, once: the file is
/// then called `state.json.migrated`.
///
/// Errors: `InvalidData` if one of the files can't be used, and then it is left as it is.
pub fn open_run_dir(run_dir: &Path, state_dir: &Path) -> io::Result<(FileStore, State)> {
    let path = state_dir.join("state.redb");
    let invalid = |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let old_path = run_dir.join("state.json");
    // Read first, so that a file that can't be used leaves nothing behind beside it.
    let old = read_old(&old_path)?;
    let mut store = FileStore::open(&path).map_err(|error| match error {
        StoreError::Full => io::Error::new(io::ErrorKind::StorageFull, format!("{}: {error}", path.display())),
        error => invalid(&error),
    })?;
    let listing = store.list("", None).map_err(|error| invalid(&error))?;
    let mut state = State::of(&listing)
        .map_err(|why| invalid(&format!("{}: {why}; move it away to begin anew", path.display())))?;
    if let Some(old) = old {
        if listing.revision.0 == 0 {
            take_over(&mut store, &mut state, &old)
                .map_err(|why| invalid(&format!("{}: {why}", old_path.display())))?;
        }
        std::fs::rename(&old_path, old_path.with_extension("json.migrated"))?;
    }
    // The new file's name is on the disk, too.
    File::open(state_dir)?.sync_all()?;
    Ok((store, state))
}

fn read_old(path: &Path) -> io::Result<Option<before::State>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let bad = |why: String| {
        let text = format!("{}: {why}; move it away to begin anew", path.display());
        io::Error::new(io::ErrorKind::InvalidData, text)
    };
    let state: before::State = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    if state.is_sound() { Ok(Some(state)) } else { Err(bad("of another version, or contradicts itself".into())) }
}

/// In one transaction: all or nothing.
fn take_over(store: &mut FileStore, state: &mut State, old: &before::State) -> Result<(), String> {
    let plan = Plan { writes: old.entries(), results: Vec::new() };
    let committed = store.commit(&state.transaction(&plan)).map_err(|error| error.to_string())?;
    let listing = store.list("", None).map_err(|error| error.to_string())?;
    debug_assert!(matches!(committed, freeflow_orchestrator::store::Committed::Done(_)));
    *state = State::of(&listing)?;
    Ok(())
}
