//! Configuration with which a router is started.
use crate::attachment::near_halves::NearHalves;
pub use crate::base::mode::Mode;
pub use crate::control::placement::ShardBy;
use crate::dataplane::wire_options::WireOptions;
use crate::memory::copy_threads::CopyThreadOptions;
use crate::network_reconciler::ReconcilerProcess;
use freeflow_orchestrator::{Pool, name_is_good};
use freeflow_verbs::{Duration, VnicLimits};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The directory of the file by which the routers of one machine know each other's pollers.
pub const MACHINE_DIR: &str = "/run/freeflow-machine";

#[derive(Clone, Debug)]
pub struct Config {
    /// Holds everything of this router: sockets, state, vNIC directories. One router each.
    pub run_dir: PathBuf,
    /// Holds `state.redb`, what is declared; the run directory, if none.
    pub state_dir: Option<PathBuf>,
    /// The process that changes the host's network when networks have come or gone.
    pub network_reconciler: Option<ReconcilerProcess>,
    /// For tests: where vNICs have their near halves; the router reaches their processes itself, if nowhere.
    pub near_halves: Option<NearHalves>,
    pub mode: Mode,
    /// The copy threads.
    pub copy_threads: CopyThreadOptions,
    /// Engines that work side by side, each with vNICs of its own: 1, 2, 4 or 8.
    pub shard_count: u8,
    /// How vNICs are spread over them.
    pub shard_by: ShardBy,
    /// The processor that the first worker is bound to.
    pub cpu: Option<usize>,
    /// Name of the host in `status`.
    pub host: String,
    /// Name of the bridge that gives the default network its IP path; only reported.
    pub bridge: String,
    /// Addresses of the default network.
    pub pool: Pool,
    /// Those of them that this host gives out; all, if none.
    pub range: Option<Pool>,
    /// How the sockets to them are opened.
    pub wire: WireOptions,
    /// Limits of vNICs attached from now on.
    pub limits: VnicLimits,
    /// The file that names the other hosts, see [`crate::peering::PeersFile`].
    pub peers: Option<PathBuf>,
    /// Objects of a cluster's kinds are changed by its follower alone.
    pub follows_cluster: bool,
    /// How long a process may take for the commands of [`freeflow_protocol::library::Request::OpenCommands`].
    pub revocation_time: Duration,
    /// Where metrics are served by TCP too, to whoever asks.
    pub metrics_listen: Option<SocketAddr>,
    /// See [`MACHINE_DIR`].
    pub machine_dir: PathBuf,
}

impl Config {
    /// The name of the object that is this host: its own, where that can be one.
    pub fn host_name(&self) -> String {
        if name_is_good(&self.host) { self.host.clone() } else { "host".into() }
    }

    /// Where the store is.
    pub fn state_dir(&self) -> &Path {
        self.state_dir.as_deref().unwrap_or(&self.run_dir)
    }
}
