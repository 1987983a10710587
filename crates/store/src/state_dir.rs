//! The store of a host, and the state that it holds.
use crate::FileStore;
use freeflow_orchestrator::State;
use freeflow_orchestrator::store::{Store, StoreError};
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens `STATE_DIR/state.redb` and reads the state from it.
///
/// # Errors
/// `InvalidData` if the file cannot be used: it is left unchanged. `StorageFull` if the disk has no room.
pub fn open_state_dir(state_dir: &Path) -> io::Result<(FileStore, State)> {
    let path = state_dir.join("state.redb");
    let invalid = |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let store = FileStore::open(&path).map_err(|error| match error {
        StoreError::Full => io::Error::new(io::ErrorKind::StorageFull, format!("{}: {error}", path.display())),
        error => invalid(&error),
    })?;
    let listing = store.list("", None).map_err(|error| invalid(&error))?;
    let state = State::of(&listing)
        .map_err(|why| invalid(&format!("{}: {why}; move it away to begin again", path.display())))?;
    // A new file's name must be on the disk as well.
    File::open(state_dir)?.sync_all()?;
    Ok((store, state))
}
