//! Files of a host that follows a cluster.
use crate::failure::{Context, Result, fail};
use crate::keys;
use crate::record::now_s;
use freeflow_cluster::{Peer, Welcome, Wire};
use freeflow_hostnet::run_dir::{RunDir, Settings, write_atomically};
use freeflow_orchestrator::DEFAULT_NETWORK;
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
    /// When this host's own last word was written, as a controller has it. Nobody else writes it, so an earlier one is
    /// of a backup, however far etcd has come since that was restored.
    #[serde(default)]
    pub word: u64,
    /// vNICs that were let go, and those that a container has had, each under the revision of its place.
    #[serde(default)]
    pub released: BTreeMap<String, u64>,
    #[serde(default)]
    pub served: BTreeMap<String, u64>,
    /// vNICs of the cluster's that are here, under the latest place that was seen.
    #[serde(default)]
    pub had: BTreeMap<String, u64>,
    /// Such ones were seen. Revisions that grow again make them no better.
    #[serde(default)]
    pub has_gone_back: bool,
    /// The name under which its record was there: if it is not any more, it was removed.
    pub recorded_as: Option<String>,
}

/// How a host that has joined is brought up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    pub host: String,
    pub address: IpAddr,
    pub pool: String,
    pub range: String,
    /// Its certificate's end, if it has one, and when it asks for another: seconds of Unix time.
    pub expires_s: u64,
    pub renew_s: u64,
}

impl Joined {
    /// With the certificate of this welcome, which is renewed when half of its time is over.
    pub fn of(host: String, address: IpAddr, welcome: &Welcome) -> Self {
        let (pool, range, expires_s) = (welcome.pool.clone(), welcome.range.clone(), welcome.expires_s);
        Self { host, address, pool, range, expires_s, renew_s: now_s().midpoint(expires_s) }
    }
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
        let _ = fs::remove_file(self.joined_file());
        let _ = fs::remove_file(self.drained_file());
        // The router's, beside its store: a lease of this cluster is none of the next one.
        let _ = fs::remove_file(self.0.with_file_name("cluster.lease"));
    }

    fn drained_file(&self) -> PathBuf {
        self.0.join("drained")
    }

    /// Why no container with the cluster's vNICs starts here, if none does.
    pub fn drained(&self) -> Option<String> {
        fs::read_to_string(self.drained_file()).ok()
    }

    /// Notes that; `None`: they start.
    pub fn note_drained(&self, why: Option<&str>) -> Result<()> {
        let file = self.drained_file();
        match why {
            _ if self.drained().as_deref() == why => Ok(()),
            Some(why) => write_atomically(&file, why.as_bytes(), 0o600).context(file.display()),
            None => fs::remove_file(&file).context(file.display()),
        }
    }

    fn joined_file(&self) -> PathBuf {
        self.0.join(JOINED)
    }

    /// The cluster file of a host that has joined.
    pub fn cluster_file(&self) -> PathBuf {
        self.0.join("cluster.json")
    }

    /// Of a host that has joined, with all its files.
    pub fn joined(&self) -> Option<Joined> {
        let joined = serde_json::from_slice(&fs::read(self.joined_file()).ok()?).ok()?;
        self.cluster_file().exists().then_some(joined)
    }

    /// Its key for etcd.
    pub fn etcd_key(&self) -> PathBuf {
        self.0.join(ETCD_KEY)
    }

    /// Made if need be.
    pub fn make(&self) -> Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0).context(self.0.display())
    }

    /// So that it is there after a loss of power.
    fn put(&self, name: &str, text: &str) -> Result<()> {
        let path = self.0.join(name);
        write_atomically(&path, text.as_bytes(), 0o600).context(path.display())?;
        fs::File::open(&path).and_then(|file| file.sync_all()).context(path.display())
    }

    /// Another certificate of a host that has joined.
    pub fn keep_renewed(&self, joined: &Joined, certificate: &str) -> Result<()> {
        self.put(CERTIFICATE, certificate)?;
        self.put(JOINED, &serde_json::to_string(joined).expect("it is encodable"))
    }

    /// Keeps all that a host got when it joined; last, that it has all of it.
    pub fn keep_joined(&self, joined: &Joined, mut file: serde_json::Value, pems: Pems<'_>) -> Result<()> {
        let put = |name: &str, text: &str| self.put(name, text);
        if let (Some(authority), Some(certificate)) = (pems.authority, pems.certificate) {
            put("ca.pem", authority)?;
            put(CERTIFICATE, certificate)?;
            (file["cacert"], file["cert"], file["key"]) = ("ca.pem".into(), CERTIFICATE.into(), ETCD_KEY.into());
        }
        put("cluster.json", &format!("{file:#}\n"))?;
        put(JOINED, &serde_json::to_string(joined).expect("it is encodable"))
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

const ETCD_KEY: &str = "etcd.key";
const CERTIFICATE: &str = "etcd.pem";
const JOINED: &str = "joined.json";

/// Certificates of a host that joins, where etcd has TLS.
#[derive(Clone, Copy)]
pub struct Pems<'a> {
    pub authority: Option<&'a str>,
    pub certificate: Option<&'a str>,
}

/// A host, as its own peers file has it.
pub struct Own<'a> {
    pub host: &'a str,
    pub address: IpAddr,
    pub wire: Wire,
}

/// Refuses a container with a vNIC of this network, where the host is drained.
pub fn check_drained(run_dir: &RunDir, network: &str) -> Result<()> {
    let settings = run_dir.settings().filter(|settings| settings.cluster.is_some() && network != DEFAULT_NETWORK);
    match settings.and_then(|settings| Directory::of(run_dir, &settings).drained()) {
        Some(why) => fail!("{why}"),
        None => Ok(()),
    }
}

/// Before a router of a host that follows is started: its key, and a peers file, of nobody where there was none.
pub fn prepare(directory: &Directory, own: &Own<'_>) -> Result<()> {
    let address = own.address;
    directory.make()?;
    directory.public_key()?;
    let there: serde_json::Value =
        fs::read(directory.peers_file()).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    if there["host"] != own.host || there["address"] != json!(address) || there["wire"] != json!(own.wire) {
        directory.write_peers(own, &[])?;
    }
    Ok(())
}
