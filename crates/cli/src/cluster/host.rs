//! Files of a host that follows a cluster.
use crate::failure::{Context, Result};
use crate::keys;
use freeflow_cluster::{Peer, Wire};
use freeflow_hostnet::run_dir::{RunDir, Settings, write_atomically};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The part of the cluster that a host remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// The cluster that it follows.
    pub id: Option<String>,
    /// When that was last restored from a backup, and what was followed since: a revision, and that of what is
    /// declared. Earlier ones are those of a backup that nobody has spoken of.
    #[serde(default)]
    pub restored: u64,
    #[serde(default)]
    pub revision: u64,
    #[serde(default)]
    pub declared: u64,
    /// vNICs that were let go, and those that a container has had, each under the revision of its place.
    #[serde(default)]
    pub released: BTreeMap<String, u64>,
    #[serde(default)]
    pub served: BTreeMap<String, u64>,
    /// Such ones were seen. Revisions that grow again make them no better.
    #[serde(default)]
    pub has_gone_back: bool,
    /// The name under which its record was there: if it is not any more, it was removed.
    pub recorded_as: Option<String>,
}

/// The directory of these files: beside the state, which outlives them otherwise.
pub struct Directory(PathBuf);

impl Directory {
    pub fn of(run_dir: &RunDir, settings: &Settings) -> Self {
        Self::at(settings.state.as_deref().unwrap_or(run_dir.path()))
    }

    /// Beside a state.
    pub fn at(state: &Path) -> Self {
        Self(state.join("cluster"))
    }

    pub fn path(&self) -> &PathBuf {
        &self.0
    }

    pub fn peers_file(&self) -> PathBuf {
        self.0.join("peers.json")
    }

    fn memory_file(&self) -> PathBuf {
        self.0.join("followed.json")
    }

    /// A file that makes no sense is none: then the host is as one that has followed nothing yet.
    pub fn memory(&self) -> Memory {
        let text = fs::read(self.memory_file()).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// A host that follows no cluster any more: what it declares then is its own.
    pub fn forget(&self) {
        let _ = fs::remove_file(self.memory_file());
    }

    pub fn remember(&self, memory: &Memory) -> Result<()> {
        let text = serde_json::to_vec(memory).expect("it is encodable");
        let file = self.memory_file();
        write_atomically(&file, &text, 0o600).context(file.display())?;
        // Without it a host that has lost its power would be as one that has followed nothing yet.
        fs::File::open(&file).and_then(|file| file.sync_all()).context(file.display())
    }

    /// The host's public key; it is made if there is none.
    pub fn public_key(&self) -> Result<String> {
        keys::key(&self.0.join("host.key"))
    }

    /// Writes the peers file if it is another one than before; whether it was.
    pub fn write_peers(&self, own: &Own<'_>, all: &[Peer]) -> Result<bool> {
        let Own { host, address, wire } = own;
        let value = json!({"host": host, "address": address, "key_file": "host.key", "wire": wire, "peers": all});
        let text = format!("{value:#}\n");
        if fs::read_to_string(self.peers_file()).is_ok_and(|there| there == text) {
            return Ok(false);
        }
        write_atomically(&self.peers_file(), text.as_bytes(), 0o600).context(self.peers_file().display())?;
        Ok(true)
    }
}

/// A host, as its own peers file has it.
pub struct Own<'a> {
    pub host: &'a str,
    pub address: IpAddr,
    pub wire: Wire,
}

/// Before a router of a host that follows is started: its key, and a peers file, of nobody where there was none.
pub fn prepare(directory: &Directory, own: &Own<'_>) -> Result<()> {
    let (path, address) = (directory.path(), own.address);
    DirBuilder::new().recursive(true).mode(0o700).create(path).context(path.display())?;
    directory.public_key()?;
    let there: serde_json::Value =
        fs::read(directory.peers_file()).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    if there["host"] != own.host || there["address"] != json!(address) || there["wire"] != json!(own.wire) {
        directory.write_peers(own, &[])?;
    }
    Ok(())
}
