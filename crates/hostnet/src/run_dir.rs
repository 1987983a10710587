//! Where a host keeps its state, and the settings it was brought up with.
//!
//! `RUN_DIR/`: `admin.sock`, `router.pid`, `router.log`, `state.redb`, `vnics/ID/router.sock` (the
//! router's); `up.json`, `up.lock`, `bridges.lock`, `containers/NAME.json`, `holders/VNIC.json`,
//! `logs/NAME.log`, `names/NETWORK` (this command's); `netns` where the host has a network namespace of its own (a
//! lab's); `labs/NAME/`, see `lab`.

use crate::error::{Context, Error, Result, fail};
use rustix::fs::{FlockOperation, flock};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub const DEFAULT: &str = "/run/freeflow";
/// Names of every run directory of the machine: a container of one host must not see the sockets of another.
const REGISTRY: &str = "/run/freeflow-hosts";
/// Where the routers of the machine publish their numbers of spinning threads.
const MACHINE_DIR: &str = "/run/freeflow-machine";

/// The run directory of one host.
#[derive(Clone, Debug)]
pub struct RunDir {
    path: PathBuf,
}

/// Settings given to `freeflow up`; the next `up` starts from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub mode: String,
    pub pool: String,
    pub host: String,
    pub cdi_file: Option<PathBuf>,
    /// The part of the pool that this host gives out.
    #[serde(default)]
    pub range: Option<String>,
    /// This host's address among its peers.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// The peers file.
    #[serde(default)]
    pub peers: Option<PathBuf>,
    /// The directory of what is declared, if not this one.
    #[serde(default)]
    pub state: Option<PathBuf>,
    /// Threads that copy; what suits the machine, if none.
    #[serde(default)]
    pub workers: Option<u32>,
    /// Engines that work side by side; what suits the machine, if none.
    #[serde(default)]
    pub shards: Option<u32>,
    /// Which vNICs share one: `tenant` or `vnic`.
    #[serde(default)]
    pub shard_by: Option<String>,
    /// The cluster file.
    #[serde(default)]
    pub cluster: Option<PathBuf>,
    /// Where the router serves metrics by TCP.
    #[serde(default)]
    pub metrics_listen: Option<SocketAddr>,
    /// From which size on they do; only tests ask for it.
    #[serde(default)]
    pub move_bytes_min: Option<u32>,
    /// The command's own file, by which an installation knows its hosts.
    #[serde(default)]
    pub program: Option<PathBuf>,
    /// How processes are reached, `local` or `remote`; only tests ask for it.
    #[serde(default)]
    pub attachment: Option<String>,
}

impl RunDir {
    /// The directory need not exist; symbolic links in what exists of it are followed.
    pub fn new(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).context(format!("bad run directory {}", path.display()))?;
        let path = fs::canonicalize(&path).unwrap_or(path);
        // A socket's path must fit into 108 bytes: RUN_DIR/vnics/ID/router.sock, with an id of 64.
        const PATH_BYTES_MAX: usize = 80;
        if path.as_os_str().len() > PATH_BYTES_MAX {
            fail!("the run directory's path is longer than {PATH_BYTES_MAX} bytes; choose a shorter --run-dir");
        }
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_default(&self) -> bool {
        self.path == Path::new(DEFAULT)
    }

    /// `" --run-dir DIR"` for a command to copy, or nothing where it is the default.
    pub fn option(&self) -> String {
        if self.is_default() { String::new() } else { format!(" --run-dir {}", self.path.display()) }
    }

    pub fn admin_socket(&self) -> PathBuf {
        self.path.join("admin.sock")
    }

    pub fn router_log(&self) -> PathBuf {
        self.path.join("router.log")
    }

    pub fn router_pid(&self) -> PathBuf {
        self.path.join("router.pid")
    }

    pub fn containers(&self) -> PathBuf {
        self.path.join("containers")
    }

    /// Containers of engines with declared vNICs, see `holders`.
    pub fn holders(&self) -> PathBuf {
        self.path.join("holders")
    }

    /// Attachments of the CNI plugin.
    pub fn cni(&self) -> PathBuf {
        self.path.join("cni")
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.path.join("logs").join(format!("{name}.log"))
    }

    /// The network namespace that this host lives in, where it is not the caller's own.
    pub fn network_namespace(&self) -> PathBuf {
        self.path.join("netns")
    }

    /// Puts this process into the host's network namespace, if it has one of its own.
    pub fn enter_network(&self) -> Result<()> {
        let path = self.network_namespace();
        let namespace = match File::open(&path) {
            Ok(namespace) => namespace,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error).context(path.display()),
        };
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).map_err(|_| {
            Error::new(format!("{} is no network namespace any more; end the lab: freeflow lab down", path.display()))
        })
    }

    /// The bridge of the network `default`: one a run directory.
    pub fn bridge(&self) -> String {
        format!("ff-{}", self.short_hash())
    }

    /// Eight hex digits that stand for this run directory in interface names.
    pub fn short_hash(&self) -> String {
        format!("{:08x}", fnv1a(self.path.as_os_str().as_encoded_bytes()) as u32)
    }

    /// Makes the directories, for root only; but the way to `api.sock`, which looks at who comes, is open to all.
    pub fn create(&self) -> Result<()> {
        let directories = [
            (self.path.clone(), 0o711),
            (self.containers(), 0o700),
            (self.holders(), 0o700),
            (self.path.join("logs"), 0o700),
            (self.vnics(), 0o700),
        ];
        for (directory, mode) in directories {
            let what = || format!("can't make {}", directory.display());
            DirBuilder::new().recursive(true).mode(mode).create(&directory).context(what())?;
        }
        // To reach a vNIC's socket is the permission to use it. An earlier version left this open.
        let closed = fs::Permissions::from_mode(0o700);
        fs::set_permissions(self.vnics(), closed).context(self.vnics().display())
    }

    pub fn vnics(&self) -> PathBuf {
        self.path.join("vnics")
    }

    /// Holds the lock that one `up` or `down` at a time may have.
    pub fn lock(&self) -> Result<File> {
        lock_file(&self.path.join("up.lock"))
    }

    pub fn settings(&self) -> Option<Settings> {
        serde_json::from_slice(&fs::read(self.path.join("up.json")).ok()?).ok()
    }

    pub fn store_settings(&self, settings: &Settings) -> Result<()> {
        let text = serde_json::to_vec_pretty(settings).expect("settings are encodable");
        write_atomically(&self.path.join("up.json"), &text, 0o600).context("can't store the settings")
    }

    /// Enters the directory into the machine's list.
    pub fn register(&self) -> Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(REGISTRY).context(format!("can't make {REGISTRY}"))?;
        let entry = Path::new(REGISTRY).join(self.short_hash());
        write_atomically(&entry, self.path.as_os_str().as_encoded_bytes(), 0o600)
            .context(format!("can't write {}", entry.display()))
    }

    pub fn unregister(&self) {
        // Nothing depends on its absence.
        let _ = fs::remove_file(Path::new(REGISTRY).join(self.short_hash()));
    }

    /// Paths that no container may see: every run directory of this machine, and the directories
    /// that its routers share.
    pub fn hidden(&self) -> Vec<PathBuf> {
        let mut all = vec![self.path.clone()];
        all.extend(registered());
        all.extend([DEFAULT, REGISTRY, MACHINE_DIR].map(PathBuf::from));
        all.retain(|path| path.is_absolute() && path.is_dir());
        all.sort();
        all.dedup();
        all
    }
}

/// Every run directory in the machine's list; some may be gone.
pub fn registered() -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let entries = fs::read_dir(REGISTRY).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| fs::read(entry.path()).ok());
    texts.map(|bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes))).collect()
}

/// Opens (and makes) a file and waits for its exclusive lock, which lasts as long as the value.
pub fn lock_file(path: &Path) -> Result<File> {
    let what = || format!("can't lock {}", path.display());
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| Error::new(format!("{}: {error}", what())))?;
    flock(&file, FlockOperation::LockExclusive).context(what())?;
    Ok(file)
}

/// Puts a file in place whole: a reader sees the old or the new one.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    let result = (|| {
        let mut file = File::options().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
        file.write_all(bytes)?;
        fs::rename(&temporary, path)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

pub use freeflow_protocol::fnv1a;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_name_fits_an_interface_and_differs_by_run_directory() {
        let one = RunDir::new(Path::new("/run/freeflow")).unwrap();
        let other = RunDir::new(Path::new("/tmp/elsewhere/b")).unwrap();
        assert!(one.bridge().len() <= 15);
        assert_ne!(one.bridge(), other.bridge());
        assert!(one.is_default() && !other.is_default());
        assert_eq!(other.option(), " --run-dir /tmp/elsewhere/b");
    }

    #[test]
    fn too_long_a_path_is_refused() {
        assert!(RunDir::new(Path::new(&format!("/{}", "x".repeat(100)))).is_err());
    }
}
