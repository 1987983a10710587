//! `RUN_DIR/state.json`: what survives a restart of the router. Written beside, synced and renamed, so that there is
//! always one whole version of it.
use freeflow_orchestrator::State;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

pub struct Store {
    directory: PathBuf,
    path: PathBuf,
}

impl Store {
    pub fn new(run_dir: &Path) -> Self {
        Self { directory: run_dir.into(), path: run_dir.join("state.json") }
    }

    /// The stored state, or an empty one if there is none yet. Errors: `InvalidData` if it can't be used; it is left as it
    /// is, since forgetting addresses that containers still use would be worse.
    pub fn load(&self) -> io::Result<State> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(State::new()),
            Err(error) => return Err(error),
        };
        let bad = |why: String| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: {why}; move it away to begin anew", self.path.display()),
            )
        };
        let state: State = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
        if state.is_sound() { Ok(state) } else { Err(bad("of another version, or contradicts itself".into())) }
    }

    pub fn save(&self, state: &State) -> io::Result<()> {
        let beside = self.path.with_extension("json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(&serde_json::to_vec_pretty(state)?)?;
        file.sync_all()?;
        std::fs::rename(&beside, &self.path)?;
        File::open(&self.directory)?.sync_all()
    }
}
